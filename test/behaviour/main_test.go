// Package behaviour has the tests of what the module does in a Caddy, by subject: the files of one
// begin with its name.
package behaviour

import (
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func TestMain(m *testing.M) { sitetest.Main(m) }

const (
	ms = time.Millisecond
	µs = time.Microsecond
)

// provisionApp returns an app of a process that is ready to start, until the test ends.
func provisionApp(t *testing.T, p *state.Process, config string) *ratelimit.App {
	t.Helper()
	app := new(ratelimit.App)
	if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
		t.Fatal(err)
	}
	if err := provision(t, p, app); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cleanUp(t, app) })
	return app
}

// provision provisions an app in a process.
func provision(t *testing.T, p *state.Process, app *ratelimit.App) error {
	t.Helper()
	ctx := sitetest.NewContext(t)
	return sitetest.In(p, func() error { return app.Provision(ctx) })
}

// storeOf returns the store that decides.
func storeOf(app telemetry.App) limiter.Store {
	if c := app.Compiled(); c.Redis != nil {
		return c.Redis
	}
	return app.Compiled().Memory
}

// cleanUp does what Caddy does with an app whose configuration ends.
func cleanUp(t *testing.T, app *ratelimit.App) {
	t.Helper()
	if err := app.Cleanup(); err != nil {
		t.Error(err)
	}
}
