package rule

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// What a request is charged may be known only when its response is: whether it counts,
// or how much it cost. And it may be charged nothing, if only requests in progress count.
// Until then it holds its cost, beside which others have to fit, so that no more than the
// limit allows pass at once, however many come in parallel.

// ActualBytes is the actual cost that is the length of the response's body.
const ActualBytes = "bytes"

// StatusClientLeft is the status of requests whose clients left before there was a
// response. It is that of Caddy's reverse_proxy.
const StatusClientLeft = 499

// Settlement is how requests are charged that hold units of a limit until their outcome is
// known.
type Settlement struct {
	InProgress bool                       // not at all, as only requests in progress count
	Count      *caddyhttp.ResponseMatcher // the responses that count; nil if all do
	ActualCost string                     // a placeholder, or ActualBytes; empty for the cost
}

// Holds reports whether requests hold units at all.
func (s *Settlement) Holds() bool { return s.InProgress || s.Count != nil || s.ActualCost != "" }

// ReadsHeader reports whether it takes header fields of the response.
func (s *Settlement) ReadsHeader() bool {
	return s.Count != nil && len(s.Count.Headers) > 0 || strings.Contains(s.ActualCost, "{")
}

// Holding is what one request holds of a bucket.
type Holding struct {
	held   *limiter.Held
	index  int // of the bucket in the request to the store
	bucket *Bucket
	cost   int64
}

// Settle settles it, by what the request is charged.
func (h *Holding) Settle(charge int64) {
	if h.held == nil {
		return
	}
	h.held.Settle(h.index, charge)
	h.held = nil
	if charge > 0 {
		h.bucket.Policy.Counters.CountUnits(charge)
	}
}

// byHeader returns what the request is charged, if the status and the header of its
// response decide that.
func (h *Holding) byHeader(status int, header http.Header) (charge int64, decided bool) {
	switch s := &h.bucket.Limit.Settlement; {
	case s.Count == nil:
		return 0, false
	case !s.Count.Match(status, header):
		return 0, true
	default:
		return h.cost, s.ActualCost == ""
	}
}

// byEnd returns what the request is charged at its end, if its header did not decide that.
// status is 0 if there was no response, and bytes the length of its body. If ok is false,
// its actual cost is no number but got, and its estimated cost is charged.
func (h *Holding) byEnd(r *http.Request, status int, bytes int64) (charge int64, got string, ok bool) {
	switch s := &h.bucket.Limit.Settlement; {
	case s.ActualCost == "", status == 0 && s.Count != nil:
		return 0, "", true // in progress no more, or without a response that could count
	case status == 0:
		return h.cost, "", true
	case s.ActualCost == ActualBytes && r.Method == http.MethodHead:
		return 0, "", true // what handlers write of a body is not sent
	case s.ActualCost == ActualBytes:
		return bytes, "", true
	default:
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		text := repl.ReplaceAll(s.ActualCost, "")
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return h.cost, text, false
		}
		return n, "", true
	}
}

// Response is the response to a request, as far as it decides what that is charged.
type Response struct {
	Status int         // 0 if there is none
	Header http.Header // which placeholders show as well
	Bytes  int64       // of its body; -1 if unknown
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
	if !e.Ask.Hold {
		return nil
	}
	h := &Held{Holding{bucket: e.Bucket, cost: e.Ask.Cost}, q.http}
	for _, own := range q.holdings {
		if own.bucket == h.bucket {
			h.Holding = own
		}
	}
	return h
}

// Charge returns what the request is charged by its response, and whether the response
// tells: if not, the estimated cost is charged.
func (h *Held) Charge(r *Response) (charge int64, known bool) {
	if r.Status != 0 {
		if charge, decided := h.byHeader(r.Status, r.Header); decided {
			return charge, true
		}
		if h.bucket.Limit.Settlement.ActualCost == ActualBytes && r.Bytes < 0 {
			return h.cost, false
		}
	}
	charge, _, known = h.byEnd(h.request, r.Status, r.Bytes)
	return charge, known
}

// hold notes what the buckets that were asked hold, if they have admitted the request.
func (q *Request) hold(held *limiter.Held) {
	for j := range q.of {
		if q.asked[j].Watches == 0 && q.entries[q.of[j]].Denies() {
			return
		}
	}
	for j, i := range q.of {
		if d := &q.answers[j]; q.asked[j].Hold && !d.Denied && d.Borrowed == d.Pool {
			q.holdings = append(q.holdings, Holding{held, j, q.entries[i].Bucket, q.asked[j].Cost})
		}
	}
}

// settleDenied settles what the request holds although it is denied, by a limit that
// was asked later: there is no response that could count.
func (q *Request) settleDenied() {
	for i := range q.holdings {
		h := &q.holdings[i]
		if h.bucket.Limit.Settlement.ActualCost != "" {
			h.Settle(h.cost)
		}
		h.Settle(0)
	}
	q.holdings = nil
}

// settler is the writer of a response by which units are settled that its request holds.
type settler struct {
	caddyhttp.ResponseWriterWrapper
	request  *http.Request
	holdings []Holding
	status   int   // of the response; 0 as long as there is none
	bytes    int64 // of its body
}

// left reports whether the client seems to have left.
func (s *settler) left() bool { return s.request.Context().Err() != nil }

// begin settles what the status and the header of the response decide. That there is none,
// as the client has left, is no response.
func (s *settler) begin(status int) {
	if s.status != 0 || status == StatusClientLeft && s.left() {
		return
	}
	s.status = status
	for i := range s.holdings {
		h := &s.holdings[i]
		if charge, decided := h.byHeader(status, s.Header()); decided {
			h.Settle(charge)
		}
	}
}

// end settles the rest when the handlers have returned err, or panicked.
func (s *settler) end(err error, panicked bool) {
	switch {
	case s.status != 0 || panicked:
	case err != nil:
		status := http.StatusInternalServerError
		var failed caddyhttp.HandlerError
		if errors.As(err, &failed) && failed.StatusCode != 0 {
			status = failed.StatusCode
		}
		// A client that has closed only its side of the connection gets the response all
		// the same, and could try passwords without being counted.
		if !s.left() || !errors.Is(err, context.Canceled) {
			s.begin(status)
		}
	case s.left(): // and nobody knows what it would have got
	default:
		s.begin(http.StatusOK)
	}
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.held == nil {
			continue // its header has decided
		}
		charge, got, ok := h.byEnd(s.request, s.status, s.bytes)
		if !ok {
			h.bucket.Limit.Reporter.badCost(h.bucket, got, h.cost)
		}
		h.Settle(charge)
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

// Settling passes a request on that holds units, and settles them whatever comes of it.
func Settling(w http.ResponseWriter, r *http.Request, holdings []Holding, serve func(http.ResponseWriter) error) (err error) {
	s := &settler{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, request: r, holdings: holdings}
	panicked := true
	defer func() { s.end(err, panicked) }()
	err = serve(s)
	panicked = false
	return err
}

// Interface guards
var (
	_ http.ResponseWriter = (*settler)(nil)
	_ http.Pusher         = (*settler)(nil)
	_ io.ReaderFrom       = (*settler)(nil)
)
