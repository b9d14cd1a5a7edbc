// Package ratelimit is a Caddy module that limits how often clients may send
// requests. It uses leaky buckets, kept either in this process or in Redis, where
// all Caddy instances share them. Other algorithms can be chosen for each limit.
//
// With this Caddyfile each client address gets a burst of ten requests to the API and ten
// more a second, and a burst of five logins and five more a minute, on all instances together:
//
//	{
//		rate_limit {
//			redis localhost
//		}
//	}
//
//	example.com {
//		rate_limit /api/* 10/s
//		rate_limit /login 5/m
//		reverse_proxy localhost:9000
//	}
//
// Without the first block, each Caddy limits separately.
//
// The package provides the HTTP handler `rate_limit` and the app of the same
// name, which configures where the buckets are kept. The buckets themselves are
// implemented by package limiter, which needs no Caddy.
package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/check"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/convert"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/explain"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/replay"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/directive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/listener"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state/persist"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/logqueue"
)

func init() {
	// Caddy's website reads the modules from these lines and from literal IDs.
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(adminAPI))
	caddycmd.RegisterCommand(command.New(commands()))
}

// commands returns the subcommands of caddy rate-limit.
func commands() []*cobra.Command {
	return append(command.AdminCommands(), explain.Command(), check.Command(), replay.Command(), convert.Command())
}

// What configs consist of.
type (
	Block        = config.Block
	Limit        = config.Limit
	NestedLimits = config.NestedLimits
	Auto         = config.Auto
	Zones        = config.Zones
	Zone         = config.Zone
	Distributed  = config.Distributed
	Redis        = config.Redis
	Memory       = config.Memory
	Number       = config.Number
	Duration     = config.Duration
	Rate         = config.Rate
	List         = config.List
)

// App configures where the buckets of all `rate_limit` handlers are kept. Without
// it they are kept in this process: each Caddy instance then limits separately.
// They survive config reloads and, in a file, restarts.
type App struct {
	config.App

	shared    *compile.Shared // what its handlers have in common
	stores    state.Stores
	applied   sync.Once
	timeout   time.Duration    // of Redis; 0 without
	linked    error            // why listeners can't know of bans
	handlers  []*Handler       // of the config, in the order in which they were provisioned
	listeners []*rule.Listener // the same
	lines     logqueue.Queue   // of the app, its handlers and listeners
	logger    *zap.Logger      // of lines

	ctx     caddy.Context
	events  *caddyevents.App
	running *telemetry.Config // nil until it has started
}

// UnmarshalJSON accepts known fields only, as Caddy does, and says which field is meant by an unknown
// one.
func (a *App) UnmarshalJSON(b []byte) error { return directive.UnmarshalApp(b, &a.App) }

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision opens the stores, or takes over those of the previous config.
func (a *App) Provision(ctx caddy.Context) (err error) {
	a.logger, a.ctx = a.lines.Logger(ctx.Logger()), ctx
	a.stores.Process = state.Default
	if a.shared, err = compile.NewShared(&a.App, a.stores.Process); err != nil {
		return err
	}
	if a.shared.Metrics {
		if err := a.stores.Process.Register(ctx.GetMetricsRegistry()); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	if err := a.openEvents(ctx); err != nil {
		return err
	}
	if err := a.stores.OpenMemory(); err != nil {
		return err
	}
	if a.Redis == nil {
		return nil
	}
	opt, tls, err := a.Redis.Options(ctx)
	if err == nil {
		login := a.Redis.Rotates(&opt)
		err = a.stores.OpenRedis(opt, tls, login)
	}
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	a.timeout = opt.Timeout
	if opt.TLS != nil && opt.TLS.InsecureSkipVerify {
		a.logger.Warn("tls_insecure_skip_verify: certificates of redis are not verified, " +
			"anyone on the network path can read and change what is sent")
	}
	return nil
}

// flushLines is how long a config that ends waits for its log.
const flushLines = 500 * time.Millisecond

// Cleanup undoes Start and releases the stores. Caddy also calls it if Provision
// or Start failed, or was never called.
func (a *App) Cleanup() error {
	a.deactivate()
	defer a.lines.Flush(flushLines)
	if a.shared != nil {
		a.shared.Release()
	}
	return a.stores.Release()
}

// Start applies the app's settings and connects to Redis.
func (a *App) Start() error {
	if a.ready(); a.linked != nil {
		return a.linked
	}
	a.activate()
	a.warnUnintended()
	if a.stores.Redis != nil {
		a.stores.Redis.ConnectOnce()
	}
	return nil
}

// Stop has limits that are decided here reported at once: the app that takes over may keep
// them in another way. Requests may still be in flight, so Cleanup flushes the log again.
func (a *App) Stop() error {
	if a.stores.Redis != nil {
		a.stores.Redis.Flush()
	}
	a.lines.Flush(flushLines)
	return nil
}

// ready applies the settings of the buckets in this process, and loads them, and the speeds in force, before
// the first request: Caddy may start its servers before the app. It is not done in Provision: validate
// neither reads nor locks the file.
func (a *App) ready() {
	a.applied.Do(func() {
		a.apply()
		a.linked = a.Link()
	})
}

func (a *App) apply() {
	a.stores.Memory.SetMaxKeys(a.shared.MaxKeys)
	a.stores.File.Use(persist.Options{Path: a.shared.Persist, Redis: a.Redis != nil, Logger: a.logger})
	for _, h := range a.handlers {
		for b := range rule.Buckets(h.rules.Limits) {
			if b.Limit.Pace != nil {
				b.Limit.Pace.Use()
			}
		}
	}
}

// Join implements listener.App.
func (a *App) Join(l *rule.Listener, ctx caddy.Context) listener.Shared {
	for _, other := range a.listeners {
		if other.Server == l.Server {
			l.Index = other.Index + 1
		}
	}
	for l.Index < len(l.Wrappers) && l.Wrappers[l.Index] != "rate_limit" {
		l.Index++
	}
	a.listeners = append(a.listeners, l)
	return listener.Shared{Limits: a.shared, Stores: &a.stores, Logger: a.lines.Logger(ctx.Logger())}
}

// Ready implements listener.App.
func (a *App) Ready() { a.ready() }

// Listeners returns what limits connections, in the order in which it was provisioned.
func (a *App) Listeners() []*rule.Listener { return a.listeners }

// Link has listeners know of bans, once all handlers are provisioned.
func (a *App) Link() error {
	var limits []*rule.Limit
	for _, h := range a.handlers {
		limits = append(limits, h.rules.Limits...)
	}
	memory := a.stores.Memory
	if a.stores.Redis != nil {
		memory = nil
	}
	for _, l := range a.listeners {
		if err := l.Link(limits, memory); err != nil {
			return fmt.Errorf("rate_limit in listener_wrappers of server %s: %w", l.Server, err)
		}
	}
	return nil
}

// activate makes the app the newest one that runs.
func (a *App) activate() {
	if before := newestApp(a.stores.Process); before != nil {
		a.logStoreChange(before)
	}
	a.running = a.Compiled()
	a.stores.Process.Add(a.running)
}

// warnUnintended logs what of the config is probably not as it was intended, once all handlers
// around its limits are known: one line for each limit. The command check says the same, and more.
func (a *App) warnUnintended() {
	reported := make(map[string]bool)
	for _, found := range advice.On(advice.Config{HTTP: a.http(), Listeners: a.listeners, Redis: a.stores.Redis != nil, Ignored: a.IgnoreAdvice}) {
		if about := found.About(); found.Kind.OnLoad() && !found.Inherited && !reported[about] {
			reported[about] = true
			a.logger.Warn("this "+found.Of+" probably does not do what was intended", zap.String(found.Of, found.Name),
				zap.String("problem", found.Problem), zap.String("remedy", found.Remedy), zap.Stringer("kind", found.Kind))
		}
	}
}

// logStoreChange logs what happens to the limits if the app keeps its buckets
// elsewhere than the one before it.
func (a *App) logStoreChange(before *App) {
	switch {
	case a.stores.Redis == nil && before.stores.Redis == nil:
	case a.stores.Redis == nil:
		a.logger.Info("limits are now kept in this process, starting from the levels that redis last reported; " +
			"each Caddy instance limits on its own")
	case before.stores.Redis == nil:
		a.logger.Info("limits are now kept in redis, starting from the levels in this process; " +
			"what several Caddy instances admitted on their own is not added up")
	case !a.stores.Redis.SharesBuckets(before.stores.Redis.Redis):
		a.logger.Info("limits are now kept in another redis or under other keys, starting from the levels that this process knows; " +
			"levels known only to other Caddy instances are carried over when those are reloaded")
	}
}

// deactivate applies the settings of the newest other app, if there is one.
func (a *App) deactivate() {
	if a.stores.Process == nil {
		return
	}
	a.stores.Process.Remove(a.running)
	if newest := newestApp(a.stores.Process); newest != nil {
		newest.apply()
	}
}

// newestApp returns the newest app that runs in a process, or nil if there is none.
func newestApp(p *state.Process) *App {
	newest := p.Newest()
	if newest == nil {
		return nil
	}
	return newest.App.(*App)
}

// openEvents makes the app emit events once its config has started. It must not do
// so earlier: until then the events app may still be adding handlers.
func (a *App) openEvents(ctx caddy.Context) error {
	loaded, err := ctx.App("events")
	if err != nil {
		return err
	}
	app, ok := loaded.(*caddyevents.App)
	if !ok {
		return errors.New("the events app is not Caddy's")
	}
	a.ctx, a.events = ctx, app
	return app.On("started", startedHandler{a})
}

// startedHandler handles the event that the config of an app has started. Caddy
// logs handlers with their exported fields, of which this has none: those of the
// app include passwords.
type startedHandler struct{ app *App }

// Handle implements caddyevents.Handler.
func (h startedHandler) Handle(context.Context, caddy.Event) error {
	h.app.stores.Process.Started(h.app.running)
	return nil
}

// Compiled implements telemetry.App.
func (a *App) Compiled() *telemetry.Config {
	c := &telemetry.Config{
		App: a, Memory: a.stores.Memory, MaxKeys: a.shared.MaxKeys, Saved: a.stores.File.Saved, Metrics: a.shared.Metrics, Logger: a.logger, Events: a.events, Context: a.ctx,
	}
	if a.stores.Redis != nil {
		c.Redis = a.stores.Redis.Redis
	}
	report := func(limits []*rule.Limit) {
		for b := range rule.Buckets(limits) {
			c.Limits = append(c.Limits, adminapi.Reported(b.Bucket, a.shared.MaxKeys))
		}
	}
	for _, h := range a.handlers {
		report(h.rules.Limits)
	}
	for _, l := range a.listeners {
		report(l.Limits)
	}
	return c
}

// adminAPI adds endpoints to Caddy's admin API that show what rate limits do, and
// empty buckets:
//
// Endpoint | Description
// ---------|------------
// `GET /rate_limit/status` | The store, the state of each Redis server, and the counts and rates of each limit
// `GET /rate_limit/limits` | Every limit of the running config, with its numbers, key and matchers
// `POST /rate_limit/peek` | What is in the bucket of `{"limit": "api", "key": "203.0.113.7"}`; charges nothing
// `POST /rate_limit/reset` | Empties that bucket, on all Caddy instances, and says what was in it; while Redis does not answer, in this process alone
// `POST /rate_limit/ban` | Bans the key of `{"limit": "login", "key": "203.0.113.7", "duration": "1h"}`, on all Caddy instances, at a limit with `ban`
// `POST /rate_limit/unban` | Ends the ban of `{"limit": "login", "key": "203.0.113.7"}`, on all Caddy instances
// `GET /rate_limit/bans` | The bans that this Caddy has begun or met, of all limits or of that of `?limit=login`
// `GET /rate_limit/top` | The keys that ask most, or are denied most, at a limit with `track_top`
//
// Without a limit, peek and reset are about all limits whose keys can be made from what
// is given: `{"address": "203.0.113.7"}`, `{"key": "acme"}`, or both.
//
// Caddy logs the URLs of admin requests, so keys are only sent in bodies.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (*adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.rate_limit",
		New: func() caddy.Module { return new(adminAPI) },
	}
}

// Provision registers the metrics, so that the admin endpoint keeps them if the
// config is rejected. It sets up nothing else: Caddy makes several instances of the
// API, also for such configs.
func (*adminAPI) Provision(ctx caddy.Context) error {
	return state.Default.Register(ctx.GetMetricsRegistry())
}

// Routes implements caddy.AdminRouter.
func (*adminAPI) Routes() []caddy.AdminRoute {
	process := state.Default
	return adminapi.Routes(process.Process, func() *adminapi.Config {
		if app := newestApp(process); app != nil {
			return app.adminConfig()
		}
		return nil
	})
}

// adminConfig returns the config of a running app for the admin API.
func (a *App) adminConfig() *adminapi.Config {
	c := &adminapi.Config{OnError: a.shared.OnError, HTTP: a.http(), Memory: a.stores.Memory, MaxKeys: a.shared.MaxKeys, Saved: a.stores.File.Saved()}
	for _, h := range a.handlers {
		c.Handlers = append(c.Handlers, h)
	}
	c.Listeners = a.listeners
	if a.stores.Redis != nil {
		c.Redis, c.InUse = a.stores.Redis.Redis, &a.stores.Redis.Requests
	}
	return c
}

// http returns the HTTP app of the config of a running app, or nil if it has none.
func (a *App) http() *caddyhttp.App {
	app, _ := a.ctx.AppIfConfigured("http")
	http, _ := app.(*caddyhttp.App)
	return http
}

// Interface guards
var (
	_ telemetry.App               = (*App)(nil)
	_ listener.App                = (*App)(nil)
	_ caddy.Provisioner           = (*App)(nil)
	_ caddy.CleanerUpper          = (*App)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ caddy.AdminRouter           = (*adminAPI)(nil)
	_ caddy.Provisioner           = (*adminAPI)(nil)
)
