package ratelimit

import (
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
// `{http.rate_limit.basic_user}` | The name in a Basic credential, which nobody has verified, if the key of a limit has it
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

// site returns where h stands, for errors of handlers that are provisioned after it: routes
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
	res, holdings, err := h.decide(w, r)
	if res.Open() {
		defer res.Count(state.Process.Process)
	}
	if holdings != nil {
		return rule.Settling(w, r, holdings, func(w http.ResponseWriter) error { return h.serve(w, r, next, res, err) })
	}
	return h.serve(w, r, next, res, err)
}

// serve passes the request on, as its result and an error of decide say, or rejects it.
func (h *Handler) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, res *outcome.Outcome, err error) error {
	switch err := err.(type) { //nolint:errorlint // decide does not wrap them
	case nil:
		if res != nil {
			w = res.Wrap(w)
			if rw, ok := w.(*outcome.Writer); ok {
				err := next.ServeHTTP(w, r)
				rw.CleanTrailers()
				return err
			}
		}
		return next.ServeHTTP(w, r)
	case denial:
		return h.refuse(w, r, err.Status, err)
	case rule.RefusalError:
		return h.refuse(w, r, err.Status, err.Err)
	case storeError:
		return h.handleStoreError(w, r, err.error)
	}
	return h.handleMatcherError(w, r, err)
}

// refusedAs returns what becomes of a request on whose limits a matcher or a value
// failed.
func refusedAs(err error) telemetry.Checked {
	if ref, ok := err.(rule.RefusalError); ok && ref.Status == http.StatusTooEarly { //nolint:errorlint // as Evaluate returns it
		return telemetry.CheckedEarlyData
	}
	return telemetry.CheckedRefused
}

// storeError is the error of a store that did not decide.
type storeError struct{ error }

// decide charges the request to the limits that apply to it, and sets the header fields; last
// of all it asks those that follow the load. It returns the request's outcome, also with an
// error, or nil if no limit applies, and what the request holds until its outcome is known. Its
// error is a denial, a rule.RefusalError, a storeError, or the error of a matcher.
func (h *Handler) decide(w http.ResponseWriter, r *http.Request) (*outcome.Outcome, []rule.Holding, error) {
	if virtual(r) {
		return nil, nil, nil
	}
	q, err := rule.Evaluate(r, h.limits, time.Time{})
	defer q.Release()
	if err != nil {
		res := q.Outcome()
		h.noteUndecided(res, r, refusedAs(err))
		return res, nil, err
	}
	if len(q.Entries()) == 0 && len(q.Loads()) == 0 {
		return nil, nil, nil
	}
	res := q.Outcome()
	if len(q.Entries()) > 0 {
		if err := h.charge(w, r, q, res); err != nil && !h.admitsUndecided(err) {
			return res, nil, err
		}
	}
	if len(q.Loads()) > 0 {
		decider, wait, err := q.Acquire(res, outcome.How{Jitter: h.settings.Jitter, At: time.Now()}, w.Header())
		if err != nil {
			h.noteUndecided(res, r, refusedAs(err))
			return res, nil, err
		}
		res.Observe(r.Context(), h.Log)
		if decider != nil {
			return res, nil, denialOf(q, decider, wait)
		}
	}
	return res, q.Holdings(), nil
}

// charge charges the request to the limits that a store keeps, and sets the header fields. Its
// error is one of those of decide.
func (h *Handler) charge(w http.ResponseWriter, r *http.Request, q *rule.Request, res *outcome.Outcome) error {
	began := time.Now()
	delay, err := q.Decide(h.store, rule.How{
		Accounting: h.settings.Accounting, NoFallback: h.settings.OnError != rule.OnErrorFallback, Timeout: h.timeout, Outcome: res, Waits: state.Process.Process,
	})
	if err != nil {
		h.noteUndecided(res, r, telemetry.CheckedUndecided)
		return storeError{err}
	}
	q.Count(h.settings.Accounting)
	decider, wait := q.SetHeaders(res, outcome.How{Families: h.settings.Families, Jitter: h.settings.Jitter, At: began}, w.Header())
	res.Observe(r.Context(), h.Log)
	if decider.Decision.Denied && !decider.Decision.DryRun {
		if len(h.RateLimits) > 0 {
			h.logExceeded(r, q, decider, wait)
		}
		return denialOf(q, decider, wait)
	}
	return q.WaitOut(delay, res)
}

// denialOf returns the error of a request that decider denied. Nobody reads the response if the
// client has left meanwhile.
func denialOf(q *rule.Request, decider *outcome.Entry, wait time.Duration) error {
	if q.Left() {
		return rule.ErrLeft
	}
	return denial{decider, wait}
}

// noteUndecided notes why the handler did not decide on the request.
func (h *Handler) noteUndecided(res *outcome.Outcome, r *http.Request, why telemetry.Checked) {
	res.SetResult(why)
	res.Observe(r.Context(), h.Log)
}

// virtual reports whether r is a request that Caddy made itself, as templates do
// to include another page. It did not come over a connection, so its context lacks
// the values that the HTTP/1, 2 and 3 servers set; clients can't influence these.
// Both are checked, since the local address may be missing if a plugin made the
// connection.
func virtual(r *http.Request) bool {
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
