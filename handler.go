package ratelimit

import (
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// ServeHTTP admits the request to the next handler or denies it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
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
	return err
}

// undecidedError is why a store has not decided.
type undecidedError struct{ error }

// decide charges the request to the limits that apply to it and sets the header
// fields. It returns the request's record, or nil if no limit applies. An error
// is a denial, a refusal, an undecidedError, or one to be returned as it is.
func (h *Handler) decide(w http.ResponseWriter, r *http.Request) (*record, error) {
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

	var err error
	c.decisions, err = h.store.Take(r.Context(), limiter.Request{
		Buckets:    c.buckets,
		Accounting: h.accounting,
		NoFallback: h.onError != onErrorFallback,
	}, c.decisions)
	if err != nil {
		return nil, undecidedError{err}
	}
	rec := recordOf(c)
	if decider, wait := rec.add(c, h.families, w.Header()); decider.decision.Denied {
		return nil, denial{decider, wait}
	}
	return rec, nil
}

// undecided does what on_error says with a request on which there is no
// decision. Nothing above DEBUG tells of a single one: that Redis is lost is
// reported once, see report.
func (h *Handler) undecided(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, err error) error {
	switch {
	case !errors.Is(err, limiter.ErrUnavailable): // not the store's fault
		h.logger.Error("no decision on a request, answering 500", zap.Error(err))
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
	if h.seenByErrorRoutes(r) {
		if status != http.StatusTooManyRequests && status != http.StatusTooEarly {
			err = errNoDecision
		}
		return caddyhttp.HandlerError{StatusCode: status, Err: err}
	}
	if c := h.logger.Check(zap.DebugLevel, "request refused"); c != nil {
		c.Write(zap.Int("status", status), zap.Error(err))
	}
	w.WriteHeader(status)
	return nil
}

// seenByErrorRoutes reports whether error routes might see an error that h
// returns for r. It is decided once for each server.
func (h *Handler) seenByErrorRoutes(r *http.Request) bool {
	srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		return true
	}
	if seen, ok := h.errorRoutes.Load(srv); ok {
		return seen.(bool)
	}
	// If h does not turn up, something else than a subroute holds it, such as a
	// named route, which may be invoked wherever errors are seen.
	inner, found := h.search(srv.Routes)
	seen := inner || !found
	if srv.Errors != nil && len(srv.Errors.Routes) > 0 {
		// The server's error routes see all errors but their own.
		inner, found = h.search(srv.Errors.Routes)
		seen = inner || !found
	}
	h.errorRoutes.Store(srv, seen)
	return seen
}

// search reports whether any subroute in routes has error routes, and whether
// h is in one of them.
func (h *Handler) search(routes caddyhttp.RouteList) (errorRoutes, found bool) {
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch handler := handler.(type) {
			case *Handler:
				found = found || handler == h
			case *caddyhttp.Subroute:
				e, f := h.search(handler.Routes)
				errorRoutes, found = errorRoutes || e || handler.Errors != nil, found || f
			}
		}
	}
	return errorRoutes, found
}
