package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
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
	// The limits that requests must pass. Required, unless there are `rate_limits`.
	Limits []*Limit `json:"limits,omitempty"`

	// Which buckets to charge if some have room for the request and others do
	// not. With `atomic`, none: a denied request uses up no limit. With
	// `each`, every bucket that has room. With `in_order`, the limits are asked one
	// after the other as they stand in the block, and those before the first that
	// denies are charged; those behind it are not asked. With these two, requests that
	// are denied use up other limits: nine denied trades take nine units from the bucket
	// of all actions of that user, which are then denied too. Default: `atomic`, for
	// `rate_limits` `in_order`.
	Accounting string `json:"accounting,omitempty"`

	// The header fields to set on responses, one or more of:
	//
	// - `x-ratelimit` (default): `X-RateLimit-Limit`, `-Remaining`, `-Clear`,
	//   and on denial `-Reset`
	// - `github`, in place of `x-ratelimit`: `X-RateLimit-Limit`, `-Remaining`, `-Used`, and
	//   `-Reset` as a time in seconds since 1970. If a request passes several handlers, the
	//   first that shows `X-RateLimit-*` decides how.
	// - `ratelimit-11`: `RateLimit-Policy` and `RateLimit` of
	//   draft-ietf-httpapi-ratelimit-headers-11, with an item for each limit
	// - `fill`: where an upstream sends any field of a family, leave that family to it,
	//   unless the request was denied; otherwise all fields of the upstream's that are of the same family are removed.
	//   The families are `X-RateLimit-*`, and `RateLimit` with `RateLimit-*`.
	// - `off`, alone: none
	//
	// The response to a denied request always has `Retry-After`.
	Headers List `json:"headers,omitempty"`

	// How to handle a request if Redis is unavailable or does not reply in time:
	// `fallback`, `allow` or `deny`, see the app's option of the same name.
	// Default: the app's.
	OnError string `json:"on_error,omitempty"`

	// Whether to add the object `rate_limit` to the request's line in the access
	// log. It never contains the key. Default: false. Its fields:
	//
	// - `result`: `admitted` or `denied`; `undecided` if Redis was unavailable, so
	//   that `on_error` applied; `refused` if a number or a matcher could not be
	//   evaluated; `early_data` if the client's address was not verified yet
	// - `limit`, `by`, `remaining`: as the placeholders
	// - `retry_after`: the wait that the client was told, not rounded, if the request was
	//   denied and a wait helps
	// - `over`, `banned`, `borrowed`, `dry_run`: as the placeholders, if they are not empty
	// - `units`: what the request was charged, by the paths of the limits, without those that
	//   charged nothing; with `count` and `actual_cost`, what its response came to
	// - `waited`: for how long the request waited for Redis, if there is one
	// - `delayed`: for how long it waited by `max_delay`, if it did
	Log bool `json:"log,omitempty"`

	// Whether the response to a denied request that no error route handles has a body,
	// `on` (default) or `off`: one line of text with the seconds until there is room.
	Body string `json:"body,omitempty"`

	// The largest share by which the wait is longer that denied clients are told, such
	// as 0.2 for up to a fifth, at most 1, with `rate_limits` also more. How much is random, so
	// that clients that were denied together do not return together. All header fields,
	// placeholders, messages and log fields tell the same wait. Default: 0.
	Jitter Number `json:"jitter,omitempty"`

	Zones

	store      limiter.Store
	redis      *sharedRedis  // the same store; nil without Redis
	timeout    time.Duration // of Redis; 0 without
	onError    rule.OnError
	accounting rule.Accounting
	limits     []*rule.Limit
	zones      map[*Limit]*zone.Zone // that limits were
	families   outcome.Families
	jitter     float64
	bare       bool // whether denials have no body
	logger     *zap.Logger

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

// Provision sets up the limits. It returns an error if an option is invalid.
func (h *Handler) Provision(ctx caddy.Context) error {
	loaded, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	app := loaded.(*App)
	h.logger = app.lines.Logger(ctx.Logger())
	if err := h.setZones(); err != nil {
		return err
	}
	if err := h.setOptions(option.OnLoad); err != nil {
		return err
	}
	h.store, h.redis, h.timeout = app.store, app.redis, app.timeout
	if h.onError == "" {
		h.onError = app.onError
	}
	if len(h.Limits) == 0 {
		return errors.New("limits: none given; use at least one")
	}
	c := h.compiler(option.OnLoad, app.maxKeys)
	c.consistency = app.consistency
	c.place = func(string) string { return h.siteOf(ctx) }
	if h.limits, err = c.load(ctx, h.Limits, nil, app.agreement); err != nil {
		return err
	}
	rule.KeepConnections(ctx, h.limits)
	h.warnZones(app)
	app.handlers = append(app.handlers, h)
	return nil
}

// siteOf returns where h stands, for errors of handlers that are provisioned after it: routes
// have their handlers once all of them are.
func (h *Handler) siteOf(ctx caddy.Context) string {
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

// setOptions sets the options that are not those of limits. on_error is left empty if
// it is the app's.
func (h *Handler) setOptions(resolve option.Resolver) (err error) {
	charged, fields := rule.Atomic, List{}
	if len(h.RateLimits) > 0 {
		charged, fields = rule.InOrder, List{"off"}
	}
	if len(h.Headers) > 0 {
		fields = h.Headers
	}
	if h.accounting, err = option.ParseConstant("accounting", cmp.Or(h.Accounting, string(charged)), rule.ParseAccounting); err != nil {
		return err
	}
	if h.families, err = newFamilies(fields); err != nil {
		return err
	}
	if h.OnError != "" {
		if h.onError, err = option.ParseConstant("on_error", h.OnError, rule.ParseOnError); err != nil {
			return err
		}
	}
	if h.bare, err = option.ParseConstant("body", cmp.Or(h.Body, "on"), parseBody); err != nil {
		return err
	}
	if h.Jitter != "" {
		parse := parseJitter
		if len(h.RateLimits) > 0 {
			parse = zone.ParseJitter
		}
		h.jitter, err = option.Parse(resolve, "jitter", string(h.Jitter), parse)
	}
	return err
}

// newFamilies parses the headers option.
func newFamilies(words []string) (outcome.Families, error) {
	if len(words) == 0 {
		return outcome.XRateLimit, nil
	}
	const use = "x-ratelimit, github, ratelimit-11, fill, or off alone"
	var set outcome.Families
	for i, word := range words {
		var family outcome.Families
		switch word {
		case "x-ratelimit":
			family = outcome.XRateLimit
		case "github":
			family = outcome.XRateLimit | outcome.GitHub
		case "ratelimit-11":
			family = outcome.IETF
		case "fill":
			family = outcome.Fill
		case "off":
			if len(words) > 1 {
				return 0, option.Bad("headers", strings.Join(words, " "), use)
			}
		default:
			return 0, option.Bad("headers", word, use)
		}
		switch {
		case slices.Contains(words[:i], word):
			return 0, option.Errorf("headers", "duplicate %q", word)
		case set&family != 0:
			return 0, option.Errorf("headers", "x-ratelimit can't be combined with github; use one of them: both set X-RateLimit-Reset")
		}
		set |= family
	}
	if set == outcome.Fill {
		set |= outcome.XRateLimit
	}
	return set, nil
}

// parseJitter parses the jitter option. Beside limits, more than 1 is a percentage by mistake.
func parseJitter(text string) (share float64, use string) {
	if share, use = zone.ParseJitter(text); use != "" || share > 1 {
		return 0, "a share of the wait from 0 to 1, such as 0.1 for 10 %"
	}
	return share, ""
}

// parseBody parses the body option.
func parseBody(text string) (bare bool, use string) {
	switch text {
	case "on", "off":
		return text == "off", ""
	}
	return false, "on or off"
}

// Compiled implements rule.Module.
func (h *Handler) Compiled() rule.Handler {
	return rule.Handler{Limits: h.limits, Accounting: h.accounting, OnError: h.onError}
}

// ServeHTTP passes the request to the next handler or denies it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if h.redis != nil {
		// The store must stay open: another handler may use it for this request.
		h.redis.requests.Add(1)
		defer h.redis.requests.Add(-1)
		h.redis.connect()
	}
	res, holdings, err := h.decide(w, r)
	if res.Open() {
		defer res.Count(process.Process)
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
		decider, wait, err := q.Enter(res, outcome.How{Jitter: h.jitter, At: time.Now()}, w.Header())
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
		Accounting: h.accounting, NoFallback: h.onError != rule.OnErrorFallback, Timeout: h.timeout, Outcome: res, Waits: process.Process,
	})
	if err != nil {
		h.noteUndecided(res, r, telemetry.CheckedUndecided)
		return storeError{err}
	}
	q.Count(h.accounting)
	decider, wait := q.Tell(res, outcome.How{Families: h.families, Jitter: h.jitter, At: began}, w.Header())
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
	res.Become(why)
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
