package settle

import (
	"context"
	"errors"
	"net/http"
	"net/textproto"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Holding is what one request holds of a bucket, until that is settled: units, or a place.
type Holding struct {
	Terms *Terms
	Held  *limiter.Held
	Index int // of the bucket in the request to the store
	Cost  int64
	Slots wait.Slots // which others may wait for
	Place *Place     // at a limit that follows the load; nil if there is none, or no more

	Outcome *outcome.Outcome // which shows what is charged; nil until it has the decision
	Entry   int              // there; before that in the request

	Own    bool // whether its key is the request's own: all that it names has a value, which is clear
	counts bool // whether the header of its response has decided that it counts
}

// Settle settles it, by what the request is charged.
func (h *Holding) Settle(charge int64) {
	if h.Held == nil {
		return
	}
	h.Held.Settle(h.Index, charge)
	h.settled(charge)
}

// settled notes that it is settled, by that charge.
func (h *Holding) settled(charge int64) {
	h.Held = nil
	if h.Outcome != nil {
		h.Outcome.Charge(h.Entry, charge)
	}
	h.Slots.Free()
}

// clears empties the bucket if a response with that status and header says so, and reports whether it
// does. It waits for that, so that the client's next request finds the bucket empty wherever it gets.
// Without a key of its own the request does not say whose bucket it is.
func (h *Holding) clears(ctx context.Context, status int, header http.Header) bool {
	if h.Held == nil || !h.Own || !matches(h.Terms.Clear, status, header) {
		return false
	}
	h.Clear(ctx)
	return true
}

// Clear settles it by no charge, and empties the bucket.
func (h *Holding) Clear(ctx context.Context) {
	if h.Held != nil {
		_ = h.Held.Clear(ctx, h.Index) // a store that does not answer is logged
		h.settled(0)
	}
}

// byHeader returns what the request is charged, if the status and the header of its
// response decide that.
func (h *Holding) byHeader(status int, header http.Header) (charge int64, decided bool) {
	s := h.Terms
	decided = !awaitsTrailer(s.Clear, status, header)
	switch {
	case s.Count == nil:
		return 0, false
	case matches(s.Count, status, header):
		h.counts = true
		return h.Cost, decided && s.ActualCost == ""
	default:
		return 0, decided && !awaitsTrailer(s.Count, status, header)
	}
}

// responseState is what is known of a response.
type responseState uint8

const (
	pending  responseState = iota // it has not begun
	unpassed                      // there is none: the request was not passed on
	unknown                       // the request was passed on, and its outcome is unknown
	upgraded                      // a handler has taken the connection before there was a status
	broken                        // it has begun, but broke off
	complete                      // it has ended, as far as anybody can tell
)

// response is a response as far as it decides what its request is charged.
type response struct {
	state  responseState
	status int         // if it has begun
	header http.Header // with the trailers that there are
	bytes  int64       // of its body, or sent over its connection
	took   time.Duration
	body   *usage.Body // nil if it is not read
	length int64       // of the request's body, as far as it is known
	left   bool        // whether its client has left
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
	s, state := h.Terms, res.state
	if s.Count != nil && !h.counts {
		switch {
		case state == upgraded, state == broken && s.lacksTrailer(res.header):
			state = unknown
		case state > upgraded && !matches(s.Count, res.status, res.header):
			return 0, "", true
		}
	}
	switch {
	case s.InProgress:
		return 0, "", true // in progress no more
	case state == unpassed:
		return h.Unpassed(), "", true
	case s.ActualCost == ActualDuration:
		return min((res.took + time.Millisecond - 1).Milliseconds(), limiter.MaxUnits), "", true
	case s.ActualCost == ActualBytes && state != unknown:
		return min(h.bytesOf(r, res), limiter.MaxUnits), "", true
	case s.Usage != nil && state != unknown:
		charge, why, known = h.usageIn(r, res)
		return min(charge, limiter.MaxUnits), why, known
	case s.Usage != nil && res.left: // or who hangs up at once would send any prompt for the cost
		return max(h.Cost, usage.Estimate(res.length)), "", true
	case state < broken, s.ActualCost == "":
		return h.Cost, "", true // or who hangs up in time would guess for nothing
	}
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	text := textproto.TrimString(repl.ReplaceAll(s.ActualCost, ""))
	n, err := strconv.ParseInt(text, 10, 64) // of a number that is too large, the largest
	if err != nil && !errors.Is(err, strconv.ErrRange) || n < 0 {
		return h.Cost, text, false
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
	if h.Terms.CostIsBody {
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
		return h.Cost, usage.RemedyUpgrade, false
	}
	n, found := h.Terms.Usage.In(res.body)
	switch {
	case !found && res.status >= 400:
		return 0, "", true
	case found && (res.body.SaysEnd() || res.body.Whole() && (res.state == complete || res.sentWhole())):
		return n, "", true
	}
	charge = max(h.Cost, n, res.body.Estimate(res.length)) // or leaving out the number would buy streams of any length
	return charge, res.body.Remedy(), found || res.state == broken
}

// sentWhole reports whether the body has the length that the header says. A client that closes its
// connection then has not left early.
func (res *response) sentWhole() bool {
	return res.header.Get("Content-Length") == strconv.FormatInt(res.bytes, 10)
}

// Unpassed returns what the request is charged if it is not passed on: there is no response
// that could count.
func (h *Holding) Unpassed() int64 {
	if s := h.Terms; s.InProgress || s.Count != nil {
		return 0
	}
	return h.Cost
}
