package ratelimit

import (
	"context"
	"errors"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// newestApp returns the newest app that runs, or nil if there is none.
func newestApp() *App {
	newest := process.Newest()
	if newest == nil {
		return nil
	}
	return newest.App.(*App)
}

// parseMetrics parses the metrics option.
func parseMetrics(text string) (on bool, use string) {
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
	process.Started(h.app.running)
	return nil
}

// telemetryConfig returns the config of an app for telemetry.
func (a *App) telemetryConfig() *telemetry.Config {
	c := &telemetry.Config{
		App: a, Memory: a.memory, MaxKeys: a.maxKeys, Metrics: a.reportMetrics, Logger: a.logger, Events: a.events, Context: a.ctx,
	}
	if a.redis != nil {
		c.Redis = a.redis.Redis
	}
	for _, h := range a.handlers {
		for b := range rule.Buckets(h.limits) {
			c.Limits = append(c.Limits, b.Reported(a.maxKeys))
		}
	}
	return c
}
