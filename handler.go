package ratelimit

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/directive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Handler limits how often clients may send requests, by leaky buckets unless a limit
// names another algorithm.
//
// A request must pass all limits that apply to it. If it does, response header
// fields tell the client how much it has left, and the next handler is invoked.
// If it does not, it is denied with status 429 and `Retry-After`, as an error that
// error routes can handle. If no error route would handle it, a response with a line
// of text is written directly. Requests that Caddy makes itself, such as for `httpInclude`
// in templates, are not limited. Configs of mholt/caddy-ratelimit can be loaded as they
// are, see `rate_limits`.
//
// The handler sets these placeholders. If a request passes several `rate_limit`
// handlers, they show the tightest of all limits:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.limit}` | The path of the limit that decided: if the request was denied, the limit that denied it (of several, the one with the longest wait), otherwise the one with the least room
// `{http.rate_limit.size}` | The size of that limit's bucket
// `{http.rate_limit.remaining}` | The units for which the fullest bucket still has room
// `{http.rate_limit.clear}` | The seconds until all buckets are empty
// `{http.rate_limit.retry_after}` | The whole seconds until all limits would admit the same request; `0` if it was admitted, empty if they never will
// `{http.rate_limit.reset}` | The whole seconds over which to spend what remains, or until there is room if nothing does; if the request was denied, the wait
// `{http.rate_limit.reset_at}` | The same as a time, in seconds since 1970
// `{http.rate_limit.denied}` | Whether the request was denied, `true` or `false`
// `{http.rate_limit.exceeded.name}` | The path of the limit that denied the request, or the name of the zone; empty if none did
// `{http.rate_limit.violated_policies}` | The names of all limits that denied the request, as in `RateLimit-Policy`, as a JSON array
// `{http.rate_limit.over}` | The path of a limit with `soft` whose bucket the request filled above its size; empty if it did not
// `{http.rate_limit.banned}` | The path of a limit with `ban` that has banned the key of the request; empty if none has
// `{http.rate_limit.borrowed}` | The path of a limit with `borrow` that had no room for the request, which its pool had; empty if none borrowed
// `{http.rate_limit.dry_run}` | The path of a limit with `dry_run` that would have denied the request; empty if none would
// `{http.rate_limit.delayed}` | The seconds for which the request waited by `max_delay`
// `{http.rate_limit.basic_user}` | The unverified name in a Basic credential, if the key of a limit has it
// `{http.rate_limit.by}` | What decided on that limit: `redis`; `memory`, this process without Redis; `remembered`, this process because Redis had reported that the bucket is full; `lease`, this process from units that it has leased; `eventual`, this process, which reports to Redis; `load`, how fast the upstream answers; `fallback`, this process instead of Redis
type Handler struct {
	config.Block

	app      *App
	store    limiter.Store
	redis    *state.Redis  // the same store; nil without Redis
	timeout  time.Duration // of Redis; 0 without
	settings compile.Settings
	limits   []*rule.Limit
	logger   *zap.Logger

	errorRoutes routes.ErrorRoutes

	origin        atomic.Pointer[string] // trace of the handler's errors, from the first one
	errorThrottle telemetry.Throttle
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.rate_limit",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON accepts known fields only, as Caddy does, and says which field is meant by an unknown
// one.
func (h *Handler) UnmarshalJSON(b []byte) error { return directive.UnmarshalBlock(b, &h.Block) }

// Provision sets up the limits. It returns an error if an option is invalid.
func (h *Handler) Provision(ctx caddy.Context) error {
	loaded, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	app := loaded.(*App)
	h.app = app
	h.logger = app.lines.Logger(ctx.Logger())
	h.store, h.redis, h.timeout = app.stores.Store(), app.stores.Redis, app.timeout
	c, err := compile.New(&h.Block, option.OnLoad)
	if err != nil {
		return err
	}
	c.Logger, c.Location = h.logger, func(string) string { return h.site(ctx) }
	if h.limits, err = c.Load(ctx, app.shared); err != nil {
		return err
	}
	h.settings = c.Settings
	rule.KeepConnections(ctx, h.limits)
	app.handlers = append(app.handlers, h)
	return nil
}

// site returns where h is, for errors of handlers that are provisioned after it: routes
// have their handlers once all of them are.
func (h *Handler) site(ctx caddy.Context) string {
	var site routes.Site
	found := false
	for _, m := range ctx.Modules() {
		if app, ok := m.(*caddyhttp.App); ok {
			site, found = routes.Sites[*Handler](app)[h]
		}
	}
	switch hosts := site.Hosts; {
	case !found:
		return " in the same route"
	case len(hosts) > 1:
		return fmt.Sprintf(" on %s and %d more hosts", hosts[0], len(hosts)-1)
	case len(hosts) > 0:
		return " on " + hosts[0]
	}
	return " in server " + site.Server
}

// Compiled implements rule.Module.
func (h *Handler) Compiled() rule.Handler {
	return rule.Handler{Limits: h.limits, Accounting: h.settings.Accounting, OnError: h.settings.OnError}
}

// ServeHTTP passes the request to the next handler or denies it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	h.app.ready()
	if h.redis != nil {
		// The store must stay open: another handler may use it for this request.
		h.redis.Requests.Add(1)
		defer h.redis.Requests.Add(-1)
		h.redis.ConnectOnce()
	}
	v := h.decide(w, r)
	if v.outcome.Open() {
		defer v.outcome.Count(state.Process.Process)
	}
	if v.status != 0 {
		return h.reject(w, r, v)
	}
	if v.holdings != nil {
		res := v.outcome
		return rule.Settling(w, r, v.holdings, func(w http.ResponseWriter) error { return pass(w, r, next, res) })
	}
	return pass(w, r, next, v.outcome)
}

// pass passes a request on, and sets the header fields of its outcome when the response begins.
func pass(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, res *outcome.Outcome) error {
	if res == nil {
		return next.ServeHTTP(w, r)
	}
	w = res.Wrap(w)
	err := next.ServeHTTP(w, r)
	if rw, ok := w.(*outcome.Writer); ok {
		rw.CleanTrailers()
	}
	return err
}

// verdict is what the handler has decided on a request.
type verdict struct {
	outcome  *outcome.Outcome // nil if no limit applies
	holdings []rule.Holding   // what the request holds until its outcome is known

	status int    // of the response that rejects the request; 0 passes it on
	err    error  // why it is rejected
	denial denial // the same, if a limit denied it
}

// decide charges the request to the limits that apply to it, and sets the header fields. Limits
// that follow the load come last.
func (h *Handler) decide(w http.ResponseWriter, r *http.Request) (v verdict) {
	if madeByCaddy(r) {
		return v
	}
	q, err := rule.Evaluate(r, h.limits, time.Time{})
	defer q.Release()
	if err == nil && len(q.Entries()) == 0 && len(q.Loads()) == 0 {
		return v
	}
	v.outcome = q.Outcome()
	if err != nil {
		h.refuse(&v, r, err)
		return v
	}
	if len(q.Entries()) > 0 {
		h.charge(w, r, q, &v)
	}
	if len(q.Loads()) > 0 && v.status == 0 {
		h.acquire(w, r, q, &v)
	}
	if v.status == 0 {
		v.holdings = q.Holdings()
	}
	return v
}

// charge charges the request to the limits that a store keeps, which may have it wait, counts what
// was decided, and sets the header fields.
func (h *Handler) charge(w http.ResponseWriter, r *http.Request, q *rule.Request, v *verdict) {
	err := q.Decide(h.store, rule.How{
		Accounting: h.settings.Accounting, NoFallback: h.settings.OnError != rule.OnErrorFallback, Timeout: h.timeout, Outcome: v.outcome, Waits: state.Process.Process,
	})
	if err != nil {
		h.undecided(w, r, v, err)
		return
	}
	q.Count(h.settings.Accounting)
	decider, wait := q.SetHeaders(v.outcome, outcome.How{Families: h.settings.Families, Jitter: h.settings.Jitter, At: q.DecidedAt()}, w.Header())
	v.outcome.Observe(r.Context(), h.Log)
	if decider.Decision.Denied && !decider.Decision.DryRun {
		if len(h.RateLimits) > 0 {
			h.logExceeded(r, q, decider, wait)
		}
		v.deny(q, decider, wait)
	}
}

// acquire asks for room in the limits that follow the load.
func (h *Handler) acquire(w http.ResponseWriter, r *http.Request, q *rule.Request, v *verdict) {
	decider, wait, err := q.Acquire(v.outcome, outcome.How{Jitter: h.settings.Jitter, At: time.Now()}, w.Header())
	if err != nil {
		h.refuse(v, r, err)
		return
	}
	v.outcome.Observe(r.Context(), h.Log)
	if decider != nil {
		v.deny(q, decider, wait)
	}
}

// deny rejects the request, which decider denied.
func (v *verdict) deny(q *rule.Request, decider *outcome.Entry, wait time.Duration) {
	if q.Left() {
		v.leave()
		return
	}
	v.denial = denial{decider, wait}
	v.status, v.err = decider.Status, v.denial
}

// leave rejects the request of a client that has left while it waited: no one reads the response.
func (v *verdict) leave() { v.status, v.err = rule.ErrLeft.Status, rule.ErrLeft.Err }

// refuse rejects a request for which it is unknown which limits apply, or how: a value in it or a
// matcher failed.
func (h *Handler) refuse(v *verdict, r *http.Request, err error) {
	why := telemetry.CheckedRefused
	var refusal rule.RefusalError
	if errors.As(err, &refusal) {
		v.status, v.err = refusal.Status, refusal.Err
		if v.status == http.StatusTooEarly {
			why = telemetry.CheckedEarlyData
		}
	} else { // of a matcher
		v.status, v.err = http.StatusInternalServerError, errMatcher
		var failed caddyhttp.HandlerError
		if errors.As(err, &failed) {
			v.status = failed.StatusCode
		}
		if v.status >= http.StatusInternalServerError {
			h.reportError("a matcher failed; requests are rejected", errMatcher)
		}
	}
	v.outcome.SetResult(why)
	v.outcome.Observe(r.Context(), h.Log)
}

// undecided admits or rejects a request on which the store did not decide, as on_error says.
// Single requests are only logged at DEBUG: an outage of Redis is logged once, see telemetry.
func (h *Handler) undecided(w http.ResponseWriter, r *http.Request, v *verdict, err error) {
	v.outcome.SetResult(telemetry.CheckedUndecided)
	v.outcome.Observe(r.Context(), h.Log)
	switch {
	case !errors.Is(err, limiter.ErrUnavailable): // a malformed request, not an outage
		h.reportError("the store could not process a request, responding with 500", err)
		v.status, v.err = http.StatusInternalServerError, err
	case h.settings.OnError == rule.OnErrorAllow:
		if c := h.logger.Check(zap.DebugLevel, "no decision on a request, admitting it"); c != nil {
			c.Write(zap.Error(err))
		}
	default:
		w.Header().Set("Retry-After", "1")
		v.status, v.err = http.StatusServiceUnavailable, err
	}
}

// madeByCaddy reports whether r is a request that Caddy made itself, as templates do
// to include another page. It did not come over a connection, so its context lacks
// the values that the HTTP/1, 2 and 3 servers set; clients can't influence these.
// Both are checked, since the local address may be missing if a plugin made the
// connection.
func madeByCaddy(r *http.Request) bool {
	ctx := r.Context()
	return ctx.Value(http.LocalAddrContextKey) == nil && ctx.Value(http.ServerContextKey) == nil
}

// logExceeded logs that a zone has denied a request, and the wait that its client is
// told.
func (h *Handler) logExceeded(r *http.Request, q *rule.Request, decider *outcome.Entry, wait time.Duration) {
	c := h.logger.Check(zap.InfoLevel, "rate limit exceeded")
	if c == nil {
		return
	}
	address, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		address = r.RemoteAddr
	}
	fields := []zap.Field{zap.String("zone", decider.Title), zap.Duration("wait", wait), zap.String("remote_ip", address)}
	if h.LogKey {
		entries := q.Entries()
		i := slices.IndexFunc(entries, func(e rule.Entry) bool { return e.Query.Name == decider.Name })
		key, template := entries[i].Query.Key, h.RateLimits[decider.Title].Key
		if template == "" || strings.Count(template, "{") > 1 { // the text between several placeholders counts too
			key = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).ReplaceAll(template, "")
		}
		fields = append(fields, zap.String("key", keytext.Of(key)))
	}
	c.Write(fields...)
}
