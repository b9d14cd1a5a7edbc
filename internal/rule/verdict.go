package rule

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/pace"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Verdict is what a handler has decided on a request.
type Verdict struct {
	Outcome *outcome.Outcome // nil if no limit applies

	Status int   // of the response that rejects the request; 0 passes it on
	Err    error // why it is rejected, unless a limit denied it

	Denial *outcome.Entry // of the limit that denied it, or nil
	Key    string         // of that limit
	Wait   time.Duration  // after which to try again, 0 if that does not help

	holdings []settle.Holding // what the request holds until its outcome is known
	paced    *pace.Response   // nil if nothing paces its response
}

// errMatcher replaces the error of a matcher, in the log too: it may have text of the
// request, in places that only the matcher knows.
var errMatcher = errors.New("an error that is not shown, as it may quote the request")

// Decide charges a request to the limits that apply to it, which may have it wait, counts what
// was decided, and sets the rate-limit fields in the header of its response. Limits that follow the
// load come last.
func (h *Handler) Decide(r *http.Request, header http.Header) (v Verdict) {
	q, err := Evaluate(r, h.Limits, time.Time{})
	defer q.Release()
	if err == nil && q.IsEmpty() {
		return v
	}
	v.Outcome = outcome.Of(r, q.replacer, q.stripe)
	if err != nil {
		h.refuse(&v, err)
	} else {
		h.charge(&v, q, header)
	}
	v.Outcome.Observe(r.Context(), h.Log)
	if v.Status == 0 {
		v.holdings, v.paced = q.holdings, q.pace(h.Memory)
	}
	return v
}

// charge charges the request to the limits that a store keeps, and then asks those that follow the
// load: their matchers may read what the others decided.
func (h *Handler) charge(v *Verdict, q *Request, header http.Header) {
	err := q.Decide(h.Store, How{
		Accounting: h.Accounting, NoFallback: h.OnError != OnErrorFallback, Timeout: h.Timeout, Outcome: v.Outcome, Waits: h.Process,
	})
	if err != nil {
		q.undecide(0, len(q.entries))
		if h.undecided(v, err); v.Status != 0 {
			return
		}
	}
	q.count()
	first, n := q.report(0, h.Families), len(q.entries)
	err = nil // admitted all the same
	if len(q.loads) > 0 && q.firstDenied() < 0 {
		err = q.acquire()
		q.report(n, 0) // without header fields: these are no quotas of clients
	}
	var longer func(*outcome.Entry, time.Duration) time.Duration
	if h.Jitter != nil {
		longer = func(e *outcome.Entry, wait time.Duration) time.Duration { return h.Jitter.longer(q, e, wait) }
	}
	decider, wait := v.Outcome.Show(first, longer, header)
	switch {
	case err != nil:
		h.refuse(v, err)
	case decider != nil && decider.Decision.Denied && !decider.Decision.DryRun:
		v.deny(q, decider, wait)
	}
}

// deny rejects the request, which decider denied, or whose client has left while it waited: then
// no one reads the response.
func (v *Verdict) deny(q *Request, decider *outcome.Entry, wait time.Duration) {
	if q.clientLeft {
		v.Status, v.Err = settle.StatusClientLeft, context.Canceled
		return
	}
	v.Status, v.Denial, v.Wait, v.Key = decider.Status, decider, wait, q.keyNamed(decider.Name)
}

// keyNamed returns the key of the bucket of a name.
func (q *Request) keyNamed(name string) string {
	for i := range q.entries {
		if e := &q.entries[i]; e.Query.Name == name {
			return e.Query.Key
		}
	}
	return ""
}

// refuse rejects a request for which it is unknown which limits apply, or how: a value in it or a
// matcher failed.
func (h *Handler) refuse(v *Verdict, err error) {
	why := telemetry.CheckedRefused
	var refusal RefusalError
	if errors.As(err, &refusal) {
		v.Status, v.Err = refusal.Status, refusal.Err
		if v.Status == http.StatusTooEarly {
			why = telemetry.CheckedEarlyData
		}
	} else { // of a matcher
		v.Status, v.Err = http.StatusInternalServerError, errMatcher
		var failed caddyhttp.HandlerError
		if errors.As(err, &failed) {
			v.Status = failed.StatusCode
		}
		if v.Status >= http.StatusInternalServerError {
			h.logError("a matcher failed; requests are rejected", errMatcher)
		}
	}
	v.Outcome.SetResult(why)
}

// undecided admits or rejects a request on which the store did not decide, as on_error says.
// Single requests are only logged at DEBUG: an outage of Redis is logged once, see telemetry.
func (h *Handler) undecided(v *Verdict, err error) {
	v.Outcome.SetResult(telemetry.CheckedUndecided)
	switch {
	case !errors.Is(err, limiter.ErrUnavailable): // a malformed request, not an outage
		h.logError("the store could not process a request, responding with 500", err)
		v.Status, v.Err = http.StatusInternalServerError, err
	case h.OnError == OnErrorAllow:
		if c := h.Logger.Check(zap.DebugLevel, "no decision on a request, admitting it"); c != nil {
			c.Write(zap.Error(err))
		}
	default:
		v.Status, v.Err, v.Wait = http.StatusServiceUnavailable, err, time.Second
	}
}

// logError logs an error that clients can provoke, at most once a minute.
func (h *Handler) logError(message string, err error) {
	if h.reported.Allow() {
		h.Logger.Error(message, zap.Error(err))
	}
}

// Pass passes the request on, keeps the values of others out of the header fields of its outcome,
// paces its response, and settles what it holds, whatever becomes of it.
func (v *Verdict) Pass(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if v.paced == nil {
		return v.settle(w, r, next)
	}
	defer func() { v.Outcome.LogPaced(r, v.paced.Waited()) }()
	pause := settle.Pauses(v.holdings)
	return v.paced.Serve(w, r, socket.Of(r), pause, func(w http.ResponseWriter) error { return v.settle(w, r, next) })
}

// settle is Pass of a response that is not paced, or that w paces.
func (v *Verdict) settle(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if v.holdings == nil {
		return v.Outcome.Serve(w, r, next)
	}
	return settle.Pass(w, r, v.holdings, v.Outcome, next)
}
