package ratelimit

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// What a request is charged may be known only when its response is: whether it counts,
// or how much it cost. And it may be charged nothing, if only requests in progress count.
// Until then it holds its cost, beside which others have to fit, so that no more than the
// limit allows pass at once, however many come in parallel.

// actualBytes is the actual_cost that is the length of the response's body.
const actualBytes = "bytes"

// setSettlement checks the options that say what requests are charged in the end.
func (l *Limit) setSettlement() error {
	switch {
	case l.Concurrency != "" && l.Count != nil:
		return badOption("count", l.countText(), "no concurrency with it, which counts requests in progress whatever comes of them")
	case l.Concurrency != "" && l.ActualCost != "":
		return badOption("actual_cost", l.ActualCost, "no concurrency with it, which counts requests in progress whatever they cost")
	case l.holds() && l.maxDelay > 0:
		return badOption("max_delay", string(l.MaxDelay), "none with count, actual_cost or concurrency")
	case l.ActualCost != "" && l.ActualCost != actualBytes && !isTemplate(l.ActualCost):
		return badOption("actual_cost", l.ActualCost, "bytes, or a placeholder such as {http.response.header.X-Cost}")
	}
	if l.Count != nil {
		for _, code := range l.Count.StatusCode {
			if code < 1 || code > 5 && code < 100 || code > 599 {
				return badOption("count", strconv.Itoa(code), "status codes from 100 to 599, or classes such as 4xx (in JSON 4)")
			}
		}
		if len(l.Count.StatusCode) == 0 && len(l.Count.Headers) == 0 {
			return badOption("count", "", "status codes or header fields of the responses that count")
		}
	}
	return nil
}

// holds reports whether requests hold units of l's main bucket until their outcome is
// known.
func (l *Limit) holds() bool { return l.Concurrency != "" || l.Count != nil || l.ActualCost != "" }

// countText returns the count option as text.
func (l *Limit) countText() string {
	if l.Count == nil {
		return ""
	}
	text, _ := json.Marshal(l.Count) // which has only strings and numbers
	return string(text)
}

// holding is what one request holds of a bucket.
type holding struct {
	held   *limiter.Held
	index  int // of the bucket in the request to the store
	bucket *bucket
	cost   int64
}

// settle settles it, by what the request is charged.
func (h *holding) settle(charge int64) {
	if h.held == nil {
		return
	}
	h.held.Settle(h.index, charge)
	h.held = nil
	if charge > 0 {
		h.bucket.policy.counters.CountUnits(charge)
	}
}

// byHeader returns what the request is charged, if the status and the header of its
// response decide that.
func (h *holding) byHeader(status int, header http.Header) (charge int64, decided bool) {
	switch l := h.bucket.limit; {
	case l.Count == nil:
		return 0, false
	case !l.Count.Match(status, header):
		return 0, true
	default:
		return h.cost, l.ActualCost == ""
	}
}

// byEnd returns what the request is charged at its end, if its header did not decide that.
// status is 0 if the response is not known, and bytes the length of its body. If ok is
// false, its actual cost is no number but got, and its estimated cost is charged.
func (h *holding) byEnd(r *http.Request, status int, bytes int64) (charge int64, got string, ok bool) {
	switch l := h.bucket.limit; {
	case l.Concurrency != "":
		return 0, "", true // in progress no more
	case status == 0:
		return h.cost, "", true // or who hangs up in time would guess for nothing
	case l.ActualCost == actualBytes && r.Method == http.MethodHead:
		return 0, "", true // what handlers write of a body is not sent
	case l.ActualCost == actualBytes:
		return bytes, "", true
	default:
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		text := repl.ReplaceAll(l.ActualCost, "")
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return h.cost, text, false
		}
		return n, "", true
	}
}

// unpassed returns what the request is charged if it is not passed on: there is no response
// that could count.
func (h *holding) unpassed() int64 {
	if l := h.bucket.limit; l.ActualCost != "" && l.Count == nil {
		return h.cost
	}
	return 0
}

// holds reports whether any bucket of e holds units.
func (e *evaluation) holds() bool {
	for i := range e.buckets {
		if e.buckets[i].Hold {
			return true
		}
	}
	return false
}

// hold notes what the buckets of e hold, after a store has admitted them.
func (e *evaluation) hold(held *limiter.Held) {
	if e.firstDenied() >= 0 {
		return
	}
	for i := range e.buckets {
		if b, d := &e.buckets[i], &e.decisions[i]; b.Hold && !d.Denied && d.Borrowed == d.Pool {
			e.holdings = append(e.holdings, holding{held, i, e.of[i].bucket, b.Cost})
		}
	}
}

// settleUnpassed settles what a request holds that is not passed on: a limit that was asked
// later has denied it, or its client has left while it waited.
func (e *evaluation) settleUnpassed() {
	for i := range e.holdings {
		h := &e.holdings[i]
		h.settle(h.unpassed())
	}
	e.holdings = e.holdings[:0]
}

// settler is the writer of a response by which units are settled that its request holds.
type settler struct {
	caddyhttp.ResponseWriterWrapper
	request  *http.Request
	holdings []holding
	early    bool  // whether the client had left before the request was passed on
	hijacked bool  // whether a handler has taken the connection
	status   int   // of the response; 0 as long as it is not known
	bytes    int64 // of its body
}

// left reports whether the client seems to have left.
func (s *settler) left() bool { return s.request.Context().Err() != nil }

// begin settles what the status and the header of the response decide. A handler's failure
// after the client has left is no response, and neither is an error route's text where
// nobody knows what the response would have been.
func (s *settler) begin(status int) {
	if s.status != 0 || status >= statusClientLeft && s.left() || s.unanswered(s.routedError()) {
		return
	}
	s.status = status
	for i := range s.holdings {
		h := &s.holdings[i]
		if charge, decided := h.byHeader(status, s.Header()); decided {
			h.settle(charge)
		}
	}
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
		return !errors.As(err, &unreachable)
	case http.StatusRequestEntityTooLarge:
		return s.request.ContentLength < 0 // otherwise it was rejected before it was passed on
	case statusClientLeft:
		return true
	}
	return false
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
// a proxy does not send it, and says so without an error.
func (s *settler) end(err error, panicked bool) {
	if !panicked && !s.hijacked && !s.unanswered(err) && (err != nil || !s.left()) {
		s.begin(statusOf(err))
	}
	for i := range s.holdings {
		h := &s.holdings[i]
		switch {
		case h.held == nil: // its header has decided
		case s.status == 0 && s.early && err == nil && !panicked && !s.hijacked:
			h.settle(h.unpassed())
		default:
			charge, got, ok := h.byEnd(s.request, s.status, s.bytes)
			if !ok {
				h.bucket.limit.reportBadCost(got, h)
			}
			h.settle(charge)
		}
	}
}

// reportBadCost logs that the actual cost of a request is no number, at most once a
// minute for a limit.
func (l *Limit) reportBadCost(text string, h *holding) {
	if l.valueErrorThrottle.Allow() {
		l.logger.Warn("the actual cost of a request is no whole number, so its estimated cost is charged",
			zap.String("limit", h.bucket.path), zap.String("actual_cost", l.ActualCost), zap.String("got", redacted(text)), zap.Int64("charged", h.cost))
	}
}

// WriteHeader implements http.ResponseWriter. Informational responses are not final.
func (s *settler) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		s.begin(status)
	}
	s.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (s *settler) Write(b []byte) (int, error) {
	s.begin(http.StatusOK)
	n, err := s.ResponseWriter.Write(b)
	s.bytes += int64(n)
	return n, err
}

// ReadFrom implements io.ReaderFrom, which lets files be sent without copying.
func (s *settler) ReadFrom(r io.Reader) (int64, error) {
	s.begin(http.StatusOK)
	n, err := s.ResponseWriterWrapper.ReadFrom(r)
	s.bytes += n
	return n, err
}

// FlushError implements flushing for http.ResponseController.
func (s *settler) FlushError() error {
	s.begin(http.StatusOK)
	return http.NewResponseController(s.ResponseWriter).Flush()
}

// Hijack implements http.Hijacker. What goes over the connection then is not known.
func (s *settler) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(s.ResponseWriter).Hijack()
	s.hijacked = s.hijacked || err == nil
	return conn, buffered, err
}

// serveHolding passes a request on that holds units, and settles them whatever comes of
// it.
func serveHolding(s *settler, serve func(http.ResponseWriter) error) (err error) {
	panicked := true
	defer func() { s.end(err, panicked) }()
	err = serve(s)
	panicked = false
	return err
}

// bodyCost is the cost of a request that is the length of its body.
const bodyCost = "body"

// costOf returns what the request costs, as far as that is known before its response.
func (b *bucket) costOf(e *evaluation) (int64, error) {
	if b.costIsBody {
		return min(max(e.request.ContentLength, 1), limiter.MaxUnits), nil
	}
	return b.cost.at(e.replacer)
}

// Interface guards
var (
	_ http.ResponseWriter = (*settler)(nil)
	_ http.Hijacker       = (*settler)(nil)
	_ http.Pusher         = (*settler)(nil)
	_ io.ReaderFrom       = (*settler)(nil)
)
