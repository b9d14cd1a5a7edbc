package ratelimit

import (
	"context"
	"errors"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// newestApp returns the newest app that runs, or nil if there is none.
func newestApp() *App {
	newest, _ := process.Newest().(runningApp)
	return newest.app
}

// parseMetrics parses the metrics option.
func parseMetrics(text string) (on bool, want string) {
	switch text {
	case "on", "off":
		return text == "on", ""
	}
	return false, "on or off"
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
	process.Started(runningApp(h))
	return nil
}

// runningApp is a running app as telemetry.Config.
type runningApp struct{ app *App }

// Logger implements telemetry.Config.
func (r runningApp) Logger() *zap.Logger { return r.app.logger }

// Metrics implements telemetry.Config.
func (r runningApp) Metrics() bool { return r.app.reportMetrics }

// MaxKeys implements telemetry.Config.
func (r runningApp) MaxKeys() int { return r.app.maxKeys }

// Redis implements telemetry.Config.
func (r runningApp) Redis() telemetry.Redis {
	if r.app.redis == nil {
		return nil
	}
	return r.app.redis
}

// Listens implements telemetry.Config.
func (r runningApp) Listens(event string) bool {
	return r.app.ctx.Err() == nil && r.app.events.ShouldEmit(event)
}

// Emit implements telemetry.Config.
func (r runningApp) Emit(event string, data map[string]any) {
	r.app.events.Emit(r.app.ctx, event, data)
}

// Usage implements telemetry.Config. It has the limits too that have not had any bucket
// yet.
func (r runningApp) Usage() (usages []telemetry.Usage) {
	used := make(map[string]bool)
	add := func(u limiter.LimitUsage) {
		used[u.Name] = true
		usages = append(usages, telemetry.Usage{Path: rule.PathOf(u.Name), LimitUsage: u})
	}
	for _, u := range r.app.memory.Limits() {
		add(u)
	}
	for b := range r.app.limits() {
		if !used[b.Name] {
			add(limiter.LimitUsage{Name: b.Name, MaxKeys: b.Limit.MaxKeysOf(r.app.maxKeys)})
		}
	}
	return usages
}

// Leases implements telemetry.Config.
func (r runningApp) Leases() (leases []telemetry.Lease) {
	if r.app.redis == nil {
		return nil
	}
	for _, u := range r.app.redis.Leases() {
		leases = append(leases, telemetry.Lease{Path: rule.PathOf(u.Name), LeaseUsage: u})
	}
	return leases
}

// Limits implements telemetry.Config.
func (r runningApp) Limits() (limits []telemetry.Limit) {
	for b := range r.app.limits() {
		n := b.Shown()
		l := telemetry.Limit{
			Counters: b.Policy.Counters, Algorithm: n.Algorithm, Size: reportedNumber(n.Size),
			DripRate: reportedNumber(n.DripRate), DripSize: reportedNumber(n.DripSize), Window: reportedNumber(n.Window),
			Policies: countedPolicies(b.Bucket),
		}
		switch {
		case n.Period != "":
			l.Window = n.Period
		case n.Rate != "":
			l.DripRate, l.DripSize = adminapi.Interval(adminapi.Seconds(b.Rate.Constant)), adminapi.Number(b.Drip.Constant)
		}
		limits = append(limits, l)
	}
	return limits
}

// countedPolicies returns the options of b of which more is counted.
func countedPolicies(b *rule.Bucket) (p telemetry.Policies) {
	for name, has := range map[telemetry.Policies]bool{
		telemetry.DryRun: b.Limit.DryRun, telemetry.Soft: b.Limit.Soft > 0, telemetry.Delays: b.Limit.MaxDelay > 0,
		telemetry.Bans: b.Limit.Bans != nil, telemetry.Borrows: b.Limit.Lender != nil,
		telemetry.Leases: b.Consistency.IsLease(), telemetry.Eventual: b.Consistency.IsEventual(),
	} {
		if has {
			p |= name
		}
	}
	return p
}

// reportedNumber returns a number of a limit as text.
func reportedNumber(value any) string {
	switch value.(type) {
	case nil:
		return ""
	case string:
		return telemetry.DynamicNumber
	}
	return adminapi.Interval(value)
}
