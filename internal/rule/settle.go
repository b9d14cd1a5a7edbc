package rule

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"golang.org/x/net/http/httpguts"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// What a request is charged may be known only when its response is: whether it counts,
// or how much it cost. And it may be charged nothing, if only requests in progress count.
// Until then it holds its cost, beside which others have to fit, so that no more than the
// limit allows pass at once, however many come in parallel. Or it holds nothing, see HoldOff:
// then a store is asked with a cost of 0.

// What a request may cost in the end, besides placeholders and what its response's body says.
const (
	ActualBytes    = "bytes"    // the length of the response's body
	ActualDuration = "duration" // how long it took, in milliseconds
)

// statusClientLeft is the status of requests whose clients left before there was a
// response. It is that of Caddy's reverse_proxy, which also writes it for a request that a
// connection was to carry whose last request was canceled: then its client is still there.
const statusClientLeft = 499

// Settlement is how requests are charged that hold units of a limit until their outcome is
// known.
type Settlement struct {
	InProgress bool              // not at all, as only requests in progress count
	Count      *option.Responses // the responses that count; nil if all do
	ActualCost string            // as it is configured; empty for the cost
	Usage      *usage.Cost       // the actual cost if the response's body says it, or nil
	HoldOff    bool              // whether nothing is held meanwhile, so that a request is admitted if there is room for any
}

// Holds reports whether requests hold units, or nothing in place of them, and are settled.
func (s *Settlement) Holds() bool { return s.InProgress || s.Count != nil || s.ActualCost != "" }

// ReadsHeader reports whether it takes header fields of the response.
func (s *Settlement) ReadsHeader() bool {
	return s.Count != nil && len(s.Count.Headers) > 0 || strings.Contains(s.ActualCost, "{")
}

// matches reports whether a response counts by its status and its fields.
func (s *Settlement) matches(status int, header http.Header) bool {
	return s.Count.Match(status, key.TrimFields(header, s.Count.Headers))
}

// awaitsTrailer reports whether a response with that status and header may have a trailer by
// which it counts. One of gRPC need not announce it.
func (s *Settlement) awaitsTrailer(status int, header http.Header) bool {
	if len(s.Count.Headers) == 0 || !s.Count.MatchStatus(status) {
		return false
	}
	if strings.HasPrefix(strings.ToLower(header.Get("Content-Type")), "application/grpc") {
		return true
	}
	for name := range s.Count.Headers {
		if httpguts.HeaderValuesContainsToken(header["Trailer"], name) {
			return true
		}
	}
	return false
}

// lacksTrailer reports whether the header of a response, with all trailers that there are,
// lacks any of the fields by which it may count.
func (s *Settlement) lacksTrailer(header http.Header) bool {
	return len(key.TrimFields(header, s.Count.Headers)) < len(s.Count.Headers)
}

// Holding is what one request holds of a bucket, until that is settled.
type Holding struct {
	held   *limiter.Held
	index  int      // of the bucket in the request to the store
	queue  queueKey // of those that wait for its place, if any may
	client string   // by fair_by, if any may wait
	bucket *Bucket
	cost   int64
	counts bool // whether the header of its response has decided that it counts

	// since is since when it has a slot that instances share and requests wait for; otherwise 0.
	since time.Time

	outcome *outcome.Outcome // to be told what is charged; nil until it is told of the decision
	entry   int              // there; before that in the Request

	place *place // at a limit that follows the load, instead of units; nil if there is none, or no more
}

// Settle settles it, by what the request is charged.
func (h *Holding) Settle(charge int64) {
	if h.held == nil {
		return
	}
	h.held.Settle(h.index, charge)
	h.held = nil
	if h.outcome != nil {
		h.outcome.Charge(h.entry, charge)
	}
	if h.bucket.Limit.waitsForSlot() {
		h.bucket.Limit.Waiting.took(h.queue, h.client, -h.cost)
		h.bucket.Limit.Waiting.freed(h.queue, h.cost, h.used())
	}
	if charge > 0 {
		h.bucket.Policy.Counters.CountUnits(charge)
	}
}

// used returns for how long it has a slot that instances share.
func (h *Holding) used() time.Duration {
	if h.since.IsZero() {
		return 0
	}
	return time.Since(h.since)
}

// byHeader returns what the request is charged, if the status and the header of its
// response decide that.
func (h *Holding) byHeader(status int, header http.Header) (charge int64, decided bool) {
	switch s := &h.bucket.Limit.Settlement; {
	case s.Count == nil:
		return 0, false
	case s.matches(status, header):
		h.counts = true
		return h.cost, s.ActualCost == ""
	default:
		return 0, !s.awaitsTrailer(status, header)
	}
}

// responseState is what is known of a response.
type responseState uint8

const (
	pending  responseState = iota // it has not begun
	unpassed                      // there is none: the request was not passed on
	unknown                       // the request was passed on, and what came of it is unknown
	upgraded                      // a handler has taken the connection before there was a status
	broken                        // it has begun, but broke off
	complete                      // it has ended, as far as anybody can tell
)

// response is a response as far as it decides what its request is charged.
type response struct {
	state   responseState
	status  int         // if it has begun
	header  http.Header // with the trailers that there are
	bytes   int64       // of its body, or sent over its connection
	took    time.Duration
	body    *usage.Body // nil if it is not read
	request int64       // the length of the request's body, as far as it is known
	left    bool        // whether its client has left
}

// atEnd returns what a request is charged by its response if the header did not decide that. If
// it is not known, that is the estimated cost, and why says what there was in place of it. In
// short:
//
//	           cost   bytes       placeholder  body                     duration
//	unpassed   0 if only some responses count, else the cost
//	unknown    cost   as count    as count     cost or estimate         time
//	upgraded   cost   bytes       as count     as count                 time
//	broken     cost   bytes       number       the most of all          time
//	complete   cost   bytes       number       number, 0 or estimate    time
//
// A response that does not count is charged nothing, and one that breaks off before the trailer
// by which it may count is unknown.
func (h *Holding) atEnd(r *http.Request, res *response) (charge int64, why string, known bool) {
	s, state := &h.bucket.Limit.Settlement, res.state
	if s.Count != nil && !h.counts {
		switch {
		case state == upgraded, state == broken && s.lacksTrailer(res.header):
			state = unknown
		case state > upgraded && !s.matches(res.status, res.header):
			return 0, "", true
		}
	}
	switch {
	case s.InProgress:
		return 0, "", true // in progress no more
	case state == unpassed:
		return h.unpassed(), "", true
	case s.ActualCost == ActualDuration:
		return min((res.took + time.Millisecond - 1).Milliseconds(), limiter.MaxUnits), "", true
	case s.ActualCost == ActualBytes && state != unknown:
		return min(h.bytesOf(r, res), limiter.MaxUnits), "", true
	case s.Usage != nil && state != unknown:
		charge, why, known = h.usageIn(r, res)
		return min(charge, limiter.MaxUnits), why, known
	case s.Usage != nil && res.left: // or who hangs up at once would send any prompt for the cost
		return max(h.cost, usage.Estimate(res.request)), "", true
	case state < broken, s.ActualCost == "":
		return h.cost, "", true // or who hangs up in time would guess for nothing
	}
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	text := textproto.TrimString(repl.ReplaceAll(s.ActualCost, ""))
	n, err := strconv.ParseInt(text, 10, 64) // of a number that is too large, the largest
	if err != nil && !errors.Is(err, strconv.ErrRange) || n < 0 {
		return h.cost, text, false
	}
	return min(n, limiter.MaxUnits), "", true
}

// bytesOf returns the length of a response's body, and of the request's if that is the
// estimated cost.
func (h *Holding) bytesOf(r *http.Request, res *response) int64 {
	n := res.bytes
	if r.Method == http.MethodHead {
		n = 0 // what handlers write of a body is not sent
	}
	if h.bucket.CostIsBody {
		n += max(r.ContentLength, 0)
	}
	return n
}

// usageIn returns what a response's body says that its request has cost, or what is charged in
// place of it, and then why, unless that is no fault of the response.
func (h *Holding) usageIn(r *http.Request, res *response) (charge int64, why string, known bool) {
	switch {
	case r.Method == http.MethodHead, r.Method == http.MethodOptions, res.status == http.StatusNoContent, res.status/100 == 3:
		return 0, "", true
	case res.body == nil:
		return h.cost, usage.RemedyUpgrade, false
	}
	n, found := h.bucket.Limit.Settlement.Usage.In(res.body)
	switch {
	case !found && res.status >= 400:
		return 0, "", true
	case found && res.body.Whole() && (res.state == complete || res.sentWhole()):
		return n, "", true
	}
	charge = max(h.cost, n, res.body.Estimate(res.request)) // or leaving out the number would buy streams of any length
	return charge, res.body.Remedy(), found || res.state == broken
}

// sentWhole reports whether the body has the length that the header says. A client that closes its
// connection then has not left early.
func (res *response) sentWhole() bool {
	return res.header.Get("Content-Length") == strconv.FormatInt(res.bytes, 10)
}

// unpassed returns what the request is charged if it is not passed on: there is no response
// that could count.
func (h *Holding) unpassed() int64 {
	if s := &h.bucket.Limit.Settlement; s.ActualCost != "" && s.Count == nil {
		return h.cost
	}
	return 0
}

// Response is the response to a request, as far as a log tells it.
type Response struct {
	Status  int              // 0 if there is none
	Unknown bool             // there is none since the client has left: the next handlers had the request
	Header  http.Header      // which placeholders show as well
	Bytes   int64            // of its body; -1 if unknown
	Took    time.Duration    // -1 if unknown
	Units   map[string]int64 // what limits charged, by their paths; nil if unknown
}

// Held is what a request holds of one bucket, or would hold if it had not been denied.
type Held struct {
	Holding
	request *http.Request
}

// Held returns what the request holds of the i-th entry, after Decide, or nil if it is charged
// at once.
func (q *Request) Held(i int) *Held {
	e := &q.entries[i]
	if !e.Query.Hold {
		return nil
	}
	h := &Held{Holding{bucket: e.Bucket, cost: e.Estimate}, q.http}
	for _, own := range q.holdings {
		if own.bucket == h.bucket {
			h.Holding = own
		}
	}
	return h
}

// Charge returns what the request is charged by its response, and whether the log tells: if
// not, the estimated cost is charged.
func (h *Held) Charge(r *Response) (charge int64, known bool) {
	s, res := &h.bucket.Limit.Settlement, response{state: complete, status: r.Status, header: r.Header, bytes: r.Bytes, took: r.Took, request: h.request.ContentLength}
	switch {
	case r.Unknown:
		res.state = unknown
	case r.Status == 0:
		res.state = unpassed
	default:
		if charge, decided := h.byHeader(r.Status, r.Header); decided || s.Count != nil && !h.counts { // logs have trailers among the fields
			return charge, true
		}
	}
	if res.state != unpassed {
		units, logged := r.Units[h.bucket.Path]
		switch {
		case s.Usage != nil && logged:
			return units, true
		case s.Usage != nil && r.Status >= 400 && !r.Unknown:
			return 0, true
		case s.ActualCost == ActualDuration && r.Took < 0, s.ActualCost == ActualBytes && r.Bytes < 0 && !r.Unknown:
			return h.cost, false
		}
	}
	charge, _, known = h.atEnd(h.request, &res)
	return charge, known
}

// hold notes what the buckets that were asked hold, if they have admitted the request.
func (q *Request) hold(held *limiter.Held) {
	for j, of := range q.about {
		if q.asked[j].Watches == 0 && q.entries[of.from].Denies() {
			return
		}
	}
	for j, of := range q.about {
		if d := &q.answers[j]; q.asked[j].Hold && !d.Denied && d.Borrowed == d.Pool {
			e := &q.entries[of.from]
			h := Holding{held: held, index: j, queue: e.queue(0), bucket: e.Bucket, cost: e.Estimate, entry: of.from}
			if e.Limit.waitsForSlot() {
				h.client = q.fairBy(e.Limit)
				e.Limit.Waiting.took(h.queue, h.client, h.cost)
				if d.By == limiter.DecidedByRedis {
					h.since = time.Now()
				}
			}
			q.holdings = append(q.holdings, h)
		}
	}
}

// settleUnpassed settles what a request holds that is not passed on: a limit that was asked
// later has denied it, or its client has left while it waited.
func (q *Request) settleUnpassed() {
	for i := range q.holdings {
		h, charge := &q.holdings[i], q.holdings[i].unpassed()
		if h.held != nil && h.outcome == nil {
			q.entries[h.entry].Charged = charge
		}
		h.Settle(charge)
	}
	q.holdings = nil
}

// settler is the writer of a response by which units are settled that its request holds.
type settler struct {
	caddyhttp.ResponseWriterWrapper
	request  *http.Request
	holdings []Holding
	early    bool // whether the client had left before the request was passed on, and no handler had it since
	state    responseState
	status   int          // once it has begun
	body     *usage.Body  // nil unless a limit reads it
	counted  *countedBody // the request's body if its length is wanted and not known; otherwise nil
	bytes    atomic.Int64 // of the body, or sent over its connection
}

// countedBody is the body of a request that does not tell its length.
type countedBody struct {
	io.ReadCloser
	read atomic.Int64 // bytes
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read.Add(int64(n))
	return n, err
}

// countBody has the body of the request counted if what a request costs may be estimated by its
// length and it does not tell that: clients choose whether it does.
func (s *settler) countBody() {
	r := s.request
	if r.ContentLength < 0 && slices.ContainsFunc(s.holdings, func(h Holding) bool { return h.bucket.Limit.Settlement.Usage != nil }) {
		s.counted = &countedBody{ReadCloser: r.Body}
		r.Body = s.counted
	}
}

// requestLength returns the length of the request's body, as far as it is known.
func (s *settler) requestLength() int64 {
	if s.counted != nil {
		return s.counted.read.Load()
	}
	return s.request.ContentLength
}

// left reports whether the client seems to have left.
func (s *settler) left() bool { return s.request.Context().Err() != nil }

// begin settles what the status and the header of the response decide, once. A handler's
// failure after the client has left is no response, nor is the status that says so, nor an
// error route's text where it is unknown what the response would have been; their bodies begin
// none either.
func (s *settler) begin(status int) {
	if s.state != pending {
		return
	}
	s.leavePlaces(status)
	switch {
	case s.early && (status == statusClientLeft || s.unanswered(s.routedError())):
		s.state = unpassed
	case status == statusClientLeft, status > statusClientLeft && s.left(), s.unanswered(s.routedError()):
		s.state = unknown
	default:
		s.state, s.status = complete, status
		s.beginBody()
	}
}

// beginBody settles what the header of the response decides, and has the body read if a limit
// wants that.
func (s *settler) beginBody() {
	for i := range s.holdings {
		h := &s.holdings[i]
		if charge, decided := h.byHeader(s.status, s.Header()); decided {
			h.Settle(charge)
		}
		if cost := h.bucket.Limit.Settlement.Usage; cost != nil && h.held != nil && s.body == nil && !s.upgrades(s.status) {
			s.body = cost.Plan().NewBody(s.Header())
		}
	}
}

// upgrades reports whether the connection, or the stream of it, carries another protocol than HTTP
// after a response with that status.
func (s *settler) upgrades(status int) bool {
	return status == http.StatusSwitchingProtocols || s.request.Method == http.MethodConnect
}

// unanswered reports whether err says that the request was passed on to a server whose
// answer is not known. Clients can cause such errors, by a body that breaks off, when they
// know from the silence that they guessed wrong.
func (s *settler) unanswered(err error) bool {
	if err == nil {
		return false
	}
	if errors.Is(err, context.Canceled) {
		return true
	}
	switch statusOf(err) {
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		var unreachable reverseproxy.DialError
		return !errors.As(err, &unreachable) || s.retried()
	case http.StatusRequestEntityTooLarge:
		return s.request.ContentLength < 0 // otherwise it was rejected before it was passed on
	case statusClientLeft:
		return true
	}
	return false
}

// retried reports whether a proxy has tried the request more than once. Its error is about
// the last try, and does not tell whether an upstream had the request before.
func (s *settler) retried() bool {
	value, _ := s.request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Get("http.reverse_proxy.retries")
	retries, _ := value.(int)
	return retries > 0
}

// routedError returns the error that error routes within the next handlers have got, or nil.
func (s *settler) routedError() error {
	ctx := s.request.Context()
	if ctx.Value(caddyhttp.ErrorCtxKey) != nil {
		return nil // the request is in error routes itself
	}
	value, _ := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Get("http.error")
	err, _ := value.(error)
	return err
}

// statusOf returns the status of the response to a request that handlers failed with err.
func statusOf(err error) int {
	var failed caddyhttp.HandlerError
	switch {
	case err == nil:
		return http.StatusOK
	case errors.As(err, &failed) && failed.StatusCode != 0:
		return failed.StatusCode
	}
	return http.StatusInternalServerError
}

// end settles the rest when the handlers have returned err, or panicked. A request that
// was passed on and whose response is not known counts. If its client had left before that,
// a proxy does not send it, and says so by status 499 or nothing, and without an error.
func (s *settler) end(err error, panicked bool) {
	s.leaveAll(err == nil && !panicked && !s.left())
	failed := panicked || err != nil
	switch {
	case s.state == complete && (failed || s.left()):
		s.state = broken
	case s.state == unpassed && failed:
		s.state = unknown
	case s.state != pending:
	case panicked, s.unanswered(err):
		s.state = unknown
	case err != nil || !s.left():
		s.begin(statusOf(err))
	case s.early:
		s.state = unpassed
	default:
		s.state = unknown
	}
	if s.body != nil {
		s.body.End()
	}
	res := response{
		state: s.state, status: s.status, header: s.Header(), bytes: s.bytes.Load(), took: took(s.request), body: s.body, request: s.requestLength(),
		left: s.left(),
	}
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.held == nil {
			continue // its header has decided
		}
		charge, why, known := h.atEnd(s.request, &res)
		if !known {
			s := &h.bucket.Limit.Settlement
			h.bucket.Limit.Reporter.NoCost(s.ActualCost, s.Usage != nil, why, charge)
		}
		h.Settle(charge)
	}
}

// took returns the time since Caddy has received a request.
func took(r *http.Request) time.Duration {
	if received, ok := caddyhttp.GetVar(r.Context(), "start_time").(time.Time); ok {
		return time.Since(received)
	}
	return 0
}

// WriteHeader implements http.ResponseWriter. Informational responses are not final.
func (s *settler) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		s.begin(status)
	}
	s.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter. Over HTTP/2 a write that fails counts as a whole,
// since n says nothing then: a client that resets the stream after all but the last byte would
// get the rest of them for nothing.
func (s *settler) Write(b []byte) (int, error) {
	s.begin(http.StatusOK)
	n, err := s.ResponseWriter.Write(b)
	if s.body != nil {
		s.body.Write(b) // also what does not reach the client: it was made for it
	}
	sent := n
	if err != nil && s.request.ProtoMajor == 2 && !errors.Is(err, http.ErrBodyNotAllowed) {
		sent = len(b)
	}
	s.bytes.Add(int64(sent))
	return n, err
}

// ReadFrom implements io.ReaderFrom, which lets files be sent without copying, but not over HTTP/2.
func (s *settler) ReadFrom(r io.Reader) (int64, error) {
	s.begin(http.StatusOK)
	if s.request.ProtoMajor == 2 || s.body != nil {
		return io.Copy(struct{ io.Writer }{s}, r)
	}
	n, err := s.ResponseWriterWrapper.ReadFrom(r)
	s.bytes.Add(n)
	return n, err
}

// FlushError implements flushing for http.ResponseController.
func (s *settler) FlushError() error {
	s.begin(http.StatusOK)
	return http.NewResponseController(s.ResponseWriter).Flush()
}

// settling passes a request on that holds units, and settles them whatever comes of it.
func settling(w http.ResponseWriter, r *http.Request, holdings []Holding, o *outcome.Outcome, next caddyhttp.Handler) (err error) {
	s := &settler{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, request: r, holdings: holdings}
	s.early = s.left()
	s.countBody()
	panicked := true
	defer func() { s.end(err, panicked) }()
	err = o.Serve(s, r, next)
	panicked = false
	return err
}

// Interface guards
var (
	_ http.ResponseWriter = (*settler)(nil)
	_ http.Pusher         = (*settler)(nil)
	_ io.ReaderFrom       = (*settler)(nil)
)
