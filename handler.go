package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Handler limits how often clients may send requests, by leaky buckets.
//
// A request has to pass all limits that apply to it. If it does, response
// header fields tell the client how much room is left, and the next handler is
// invoked. If it does not, it is denied with status 429 and `Retry-After`, and
// error routes shape the response. Only where no error route could see the
// error is the bare response written directly. Requests that Caddy makes itself,
// as for `httpInclude` in templates, are not limited.
//
// The handler sets these placeholders. Where several `rate_limit` handlers
// see a request, they show the tightest of their limits:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.limit}` | The path of the limit that decided: of a denied request the one that denies it, the longest if several do, else the one with the least room
// `{http.rate_limit.size}` | The size of that limit's bucket
// `{http.rate_limit.remaining}` | The units that the fullest bucket still has room for
// `{http.rate_limit.clear}` | The seconds until all buckets have run empty
// `{http.rate_limit.retry_after}` | The whole seconds to wait before all limits admit the same request; `0` if it was admitted, empty if it never will be
// `{http.rate_limit.denied}` | Whether the request was denied, `true` or `false`
// `{http.rate_limit.exceeded.name}` | The path of the limit that denied the request; empty if none did
type Handler struct {
	// The limits that requests have to pass.
	Limits []*Limit `json:"limits,omitempty"`

	// What a request is charged if some of its buckets have room and others do
	// not. With `atomic`, the default, nothing anywhere: a denied request uses
	// up no limit. With `each`, every bucket that has room is charged.
	Accounting string `json:"accounting,omitempty"`

	// The header fields to set on responses, one or several of:
	//
	// - `x-ratelimit` (default): `X-RateLimit-Limit`, `-Remaining`, `-Clear`,
	//   and on denial `-Reset`
	// - `ratelimit`: `RateLimit-Policy` and `RateLimit` of
	//   draft-ietf-httpapi-ratelimit-headers-11, with an item for each limit
	// - `off`: neither
	//
	// A denied request gets `Retry-After` in any case.
	Headers List `json:"headers,omitempty"`

	// What becomes of a request if Redis can't be asked, or does not answer in
	// time: `fallback`, `allow` or `deny`, see the app's option of the same name.
	// Default: what the app says.
	OnError string `json:"on_error,omitempty"`

	store      limiter.Store
	redis      *sharedRedis  // the same; nil without Redis
	timeout    time.Duration // of Redis; 0 without
	onError    onError
	accounting limiter.Accounting
	families   families
	logger     *zap.Logger

	// Which error routes of a server see the handler's errors, *errorRoutes by
	// *caddyhttp.Server.
	errorRoutes sync.Map

	origin   atomic.Pointer[string] // of the handler's errors, once there was one
	reported minutely
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.rate_limit",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision makes the limits ready, and returns an error if an option of one
// can't be right.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	var err error
	if h.accounting, err = newConstant("accounting", or(h.Accounting, "atomic"), parseAccounting); err != nil {
		return err
	}
	if h.families, err = newFamilies(h.Headers); err != nil {
		return err
	}

	loaded, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	app := loaded.(*App)
	h.store, h.redis, h.timeout = app.store, app.redis, app.timeout
	if h.onError, err = newConstant("on_error", or(h.OnError, string(app.onError)), parseOnError); err != nil {
		return err
	}
	defs := app.definitions.inHandler()
	if len(h.Limits) == 0 {
		return errors.New("limits: got none, want at least one")
	}
	for i, l := range h.Limits {
		if l == nil {
			return fmt.Errorf("limits: limit %d is null", i)
		}
		if err := l.provision(ctx, nil, defs); err != nil {
			return err
		}
	}
	return nil
}

// parseAccounting reads a kind of accounting.
func parseAccounting(text string) (limiter.Accounting, string) {
	switch text {
	case limiter.AccountingAtomic.String():
		return limiter.AccountingAtomic, ""
	case limiter.AccountingEach.String():
		return limiter.AccountingEach, ""
	}
	return 0, "atomic or each"
}

// onError is what becomes of a request on which Redis does not decide.
type onError string

const (
	onErrorFallback onError = "fallback" // this process decides
	onErrorAllow    onError = "allow"    // it passes
	onErrorDeny     onError = "deny"     // it is refused
)

// parseOnError reads what becomes of such a request.
func parseOnError(text string) (onError, string) {
	switch o := onError(text); o {
	case onErrorFallback, onErrorAllow, onErrorDeny:
		return o, ""
	}
	return "", "fallback, allow or deny"
}

// ServeHTTP admits the request to the next handler or denies it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if h.redis != nil {
		// It may come to another handler with the same store.
		h.redis.requests.Add(1)
		defer h.redis.requests.Add(-1)
	}
	rec, err := h.decide(w, r)
	switch err := err.(type) { //nolint:errorlint // decide's own
	case nil:
		if rec != nil {
			w = rec.wrap(w)
			if rw, ok := w.(*responseWriter); ok {
				err := next.ServeHTTP(w, r)
				rw.end()
				return err
			}
		}
		return next.ServeHTTP(w, r)
	case denial:
		return h.refuse(w, r, http.StatusTooManyRequests, err)
	case refusal:
		return h.refuse(w, r, err.status, err.err)
	case undecidedError:
		return h.undecided(w, r, next, err.error)
	}
	return h.unmatched(w, r, err)
}

// undecidedError is why a store has not decided.
type undecidedError struct{ error }

// decide charges the request to the limits that apply to it and sets the header
// fields. It returns the request's record, or nil if no limit applies. An error
// is a denial, a refusal, an undecidedError, or that of a matcher.
func (h *Handler) decide(w http.ResponseWriter, r *http.Request) (*record, error) {
	if virtual(r) {
		return nil, nil
	}
	c := checkOf(r)
	defer c.release()
	for _, l := range h.Limits {
		if err := l.apply(c); err != nil {
			return nil, err
		}
	}
	if len(c.buckets) == 0 {
		return nil, nil
	}

	rec := recordOf(c)
	if err := h.take(c, rec); err != nil {
		return nil, undecidedError{err}
	}
	if decider, wait := rec.add(c, h.families, w.Header()); decider.decision.Denied {
		return nil, denial{decider, wait}
	}
	return rec, nil
}

// take has the store decide on the buckets of c. All blocks that a request passes
// wait for Redis no longer than its timeout together; the time that it spends
// elsewhere between them does not count. Nor does its own context: a client that
// goes away, or is in a hurry, is charged like others.
func (h *Handler) take(c *check, rec *record) error {
	ctx, start := context.Background(), time.Time{}
	if h.timeout > 0 {
		start = time.Now()
		if rec.waited > 0 {
			ctx = deadline{ctx, start.Add(h.timeout - rec.waited)}
		}
	}
	var err error
	c.decisions, err = h.store.Take(ctx, limiter.Request{
		Buckets:    c.buckets,
		Accounting: h.accounting,
		NoFallback: h.onError != onErrorFallback,
	}, c.decisions)
	if h.timeout > 0 {
		rec.waited += time.Since(start)
	}
	return err
}

// deadline is a context with a deadline that is only told, so that it needs no
// timer: the store keeps it.
type deadline struct {
	context.Context
	at time.Time
}

// Deadline returns the time by which all must be done.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// virtual reports whether r is a request that Caddy made itself, as templates do
// to include another page. It came over no connection, so that it lacks what the
// servers of HTTP/1, 2 and 3 put into the context of one that did; whatever a
// client sends changes nothing about that. The address may be missing for a
// connection that a plugin made, which is why it alone does not tell.
func virtual(r *http.Request) bool {
	ctx := r.Context()
	return ctx.Value(http.LocalAddrContextKey) == nil && ctx.Value(http.ServerContextKey) == nil
}

// undecided does what on_error says with a request on which there is no
// decision. Nothing above DEBUG tells of a single one: that Redis is lost is
// reported once, see report.
func (h *Handler) undecided(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, err error) error {
	switch {
	case !errors.Is(err, limiter.ErrUnavailable): // not the store's fault
		h.reportError("no decision on a request, answering 500", err)
		return h.refuse(w, r, http.StatusInternalServerError, err)
	case h.onError == onErrorAllow:
		if c := h.logger.Check(zap.DebugLevel, "no decision on a request, letting it pass"); c != nil {
			c.Write(zap.Error(err))
		}
		return next.ServeHTTP(w, r)
	}
	w.Header().Set("Retry-After", "1")
	return h.refuse(w, r, http.StatusServiceUnavailable, err)
}

// unmatched answers a request for which a matcher of a limit failed: it is not
// known whether the limit applies.
func (h *Handler) unmatched(w http.ResponseWriter, r *http.Request, err error) error {
	refused, ok := err.(caddyhttp.HandlerError) //nolint:errorlint // as Caddy does
	if !ok {
		refused = caddyhttp.HandlerError{StatusCode: http.StatusInternalServerError, Err: err}
	}
	if refused.StatusCode >= http.StatusInternalServerError {
		h.reportError("a matcher failed, requests are refused", err)
	}
	return h.refuse(w, r, refused.StatusCode, refused.Err)
}

// reportError logs an error that clients can bring about, at most once a minute.
func (h *Handler) reportError(msg string, err error) {
	if h.reported.due() {
		h.logger.Error(msg, zap.Error(err))
	}
}

// denial is the error of a request that a limit denies: what that decided, and
// how long to wait for all limits.
type denial struct {
	*item
	wait time.Duration
}

// Error names the limit and the wait.
func (d denial) Error() string {
	if d.decision.Never {
		return "rate limit " + d.path + " exceeded: the request costs more than the limit holds"
	}
	return "rate limit " + d.path + " exceeded: retry after " + wholeSeconds(d.wait) + " s"
}

// refusal is the error of a request that is kept from the next handler for
// another reason.
type refusal struct {
	status int
	err    error
}

// Error returns why the request is refused.
func (ref refusal) Error() string { return ref.err.Error() }

// errNoDecision is what error routes may show to clients where the reason is
// none of their business: the store's address, say. That is in the log.
var errNoDecision = errors.New("rate limits can't be checked for this request")

// refuse answers a request that does not get to the next handler, by an error
// for error routes to shape. Where none can see it the bare status is written,
// as the server would: a returned error costs it more than twice as much.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, status int, err error) error {
	if h.seenByErrorRoutes(r, status) {
		if status != http.StatusTooManyRequests && status != http.StatusTooEarly {
			err = errNoDecision
		}
		return h.handlerError(status, err)
	}
	if c := h.logger.Check(zap.DebugLevel, "request refused"); c != nil {
		c.Write(zap.Int("status", status), zap.Error(err))
	}
	w.WriteHeader(status)
	return nil
}

// handlerError returns err as Caddy's handlers do, with an id and where it comes
// from. To look that up takes longer than all the rest, and it is always here.
func (h *Handler) handlerError(status int, err error) error {
	origin := h.origin.Load()
	if origin == nil {
		e := caddyhttp.Error(status, err)
		h.origin.Store(&e.Trace)
		return e
	}
	return caddyhttp.HandlerError{Err: err, StatusCode: status, ID: newErrorID(), Trace: *origin}
}

// newErrorID returns an id as Caddy's errors have them.
func newErrorID() string {
	const chars = "abcdefghijkmnpqrstuvwxyz23456789" // 32 that are not mistaken for others
	var id [9]byte
	bits := rand.Uint64() //nolint:gosec // it is no secret
	for i := range id {
		id[i] = chars[bits%32]
		bits /= 32
	}
	return string(id[:])
}

// seenByErrorRoutes reports whether error routes might see an error with the
// given status that h returns for r.
func (h *Handler) seenByErrorRoutes(r *http.Request, status int) bool {
	srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		return true
	}
	found, ok := h.errorRoutes.Load(srv)
	if !ok {
		found, _ = h.errorRoutes.LoadOrStore(srv, errorRoutesOf(srv, h))
	}
	return found.(*errorRoutes).see(r, status)
}
