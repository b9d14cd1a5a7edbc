package ratelimit

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminapi"
)

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
	return process.Register(ctx.GetMetricsRegistry())
}

// Routes implements caddy.AdminRouter.
func (*adminAPI) Routes() []caddy.AdminRoute {
	return adminapi.Routes(process.Process, func() *adminapi.Config {
		if app := newestApp(); app != nil {
			return app.adminConfig()
		}
		return nil
	})
}

// adminConfig returns the config of a running app for the admin API.
func (a *App) adminConfig() *adminapi.Config {
	c := &adminapi.Config{OnError: a.onError, HTTP: a.http(), Memory: a.memory, MaxKeys: a.maxKeys}
	for _, h := range a.handlers {
		c.Handlers = append(c.Handlers, h)
	}
	if a.redis != nil {
		c.Redis, c.InUse = a.redis.Redis, &a.redis.requests
	}
	return c
}

// http returns the HTTP app of the config of a running app, or nil if it has none.
func (a *App) http() *caddyhttp.App {
	app, _ := a.ctx.AppIfConfigured("http")
	http, _ := app.(*caddyhttp.App)
	return http
}
