package ratelimit

import (
	"fmt"
	"net/http"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/directive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
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
// are; see `rate_limits`.
//
// The handler sets these placeholders. If several limits apply, they show the one that
// denied the request (the one with the longest wait, if several did) or, if it was admitted,
// the one that would admit the fewest more requests of the same cost:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.limit}` | The path of that limit
// `{http.rate_limit.size}` | The size of that limit's bucket
// `{http.rate_limit.remaining}` | The units for which that bucket still has room
// `{http.rate_limit.clear}` | The seconds until all buckets are empty
// `{http.rate_limit.retry_after}` | The whole seconds until all limits would admit the same request; `0` if it was admitted, empty if they never will
// `{http.rate_limit.reset}` | The whole seconds over which to spend the remaining units, or until there is room if none remain; if the request was denied, the wait
// `{http.rate_limit.reset_at}` | The same as a time, in seconds since 1970
// `{http.rate_limit.denied}` | Whether the request was denied, `true` or `false`
// `{http.rate_limit.exceeded.name}` | The path of the limit that denied the request, or the name of the zone; empty if none did
// `{http.rate_limit.violated_policies}` | The names of all limits that denied the request, as in `RateLimit-Policy`, as a JSON array
// `{http.rate_limit.over}` | The path of a limit with `soft` whose bucket the request filled above its size; empty if it did not
// `{http.rate_limit.banned}` | The path of a limit with `ban` that has banned the key of the request; empty if none has
// `{http.rate_limit.borrowed}` | The path of a limit with `borrow` that had no room for the request although its pool did; empty if none borrowed
// `{http.rate_limit.dry_run}` | The path of a limit with `dry_run` that would have denied the request; empty if none would
// `{http.rate_limit.delayed}` | How many seconds `max_delay` made the request wait
// `{http.rate_limit.basic_user}` | The unverified name in a Basic credential, if the key of a limit has it
// `{http.rate_limit.field.<name>}` | A field that the client submits, in a form, JSON or the query, if a limit names any; empty if the request does not have it, or if upstreams may read it differently
// `{http.rate_limit.by}` | What decided on that limit: `redis`; `memory`, this process without Redis; `remembered`, this process because Redis had reported that the bucket is full; `lease`, this process from units that it has leased; `eventual`, this process, which reports to Redis; `load`, the upstream's speed (`concurrency auto`); `fallback`, this process instead of Redis
type Handler struct {
	config.Block

	app    *App
	redis  *state.Redis // the store; nil without Redis
	rules  rule.Handler
	noBody bool // whether denials have none
	logger *zap.Logger

	errorRoutes routes.ErrorRoutes

	origin atomic.Pointer[string] // trace of the handler's errors, from the first one
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
	h.redis = app.stores.Redis
	c, err := compile.New(&h.Block, option.OnLoad)
	if err != nil {
		return err
	}
	c.Logger, c.Location = h.logger, func(string) string { return h.site(ctx) }
	limits, err := c.Load(ctx, app.shared)
	if err != nil {
		return err
	}
	h.noBody = c.Settings.NoBody
	h.rules = rule.Handler{
		Limits: limits, Accounting: c.Settings.Accounting, OnError: c.Settings.OnError, Families: c.Settings.Families, Jitter: c.Settings.Jitter, Log: h.Log,
		IgnoredAdvice: h.IgnoreAdvice, Store: app.stores.Store(), Memory: app.stores.Memory, Timeout: app.timeout, Process: app.stores.Process.Process, Logger: h.logger,
	}
	for b := range rule.Buckets(limits) {
		if b.Limit.Waiting != nil || b.Limit.Pace != nil {
			socket.KeepConnections(ctx)
			break
		}
	}
	app.handlers = append(app.handlers, h)
	return nil
}

// site returns where h is, for errors of handlers that are provisioned after it: routes
// have their handlers once all of them are.
func (h *Handler) site(ctx caddy.Context) string {
	var around *routes.Around
	for _, m := range ctx.Modules() {
		if app, ok := m.(*caddyhttp.App); ok {
			_, all := routes.Arounds[*Handler](app)
			around = all[h]
		}
	}
	site := around.Site()
	switch hosts := site.Hosts; {
	case around == nil:
		return " in the same route"
	case len(hosts) > 1:
		return fmt.Sprintf(" on %s and %d more hosts", hosts[0], len(hosts)-1)
	case len(hosts) > 0:
		return " on " + hosts[0]
	}
	return " in server " + site.Server
}

// Compiled implements rule.Module.
func (h *Handler) Compiled() *rule.Handler { return &h.rules }

// ServeHTTP passes the request to the next handler or denies it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	h.app.ready()
	if h.redis != nil {
		// The store must stay open: another handler may use it for this request.
		h.redis.Requests.Add(1)
		defer h.redis.Requests.Add(-1)
		h.redis.ConnectOnce()
	}
	if madeByCaddy(r) {
		return next.ServeHTTP(w, r)
	}
	v := h.rules.Decide(r, w.Header())
	if v.Outcome.Enter() {
		defer v.Outcome.Count(h.rules.Process)
	}
	if v.Status != 0 {
		return h.reject(w, r, &v)
	}
	return v.Pass(w, r, next)
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
