// Package ratelimit is a Caddy module that limits how often clients may send
// requests. It uses leaky buckets, kept either in this process or in Redis, where
// all Caddy instances share them.
//
// The package provides the HTTP handler `rate_limit` and the app of the same
// name, which configures where the buckets are kept. The buckets themselves are
// implemented by package limiter.
package ratelimit

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(adminAPI))
}

// Interface guards
var (
	_ caddy.App                   = (*App)(nil)
	_ caddy.Provisioner           = (*App)(nil)
	_ caddy.CleanerUpper          = (*App)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ caddy.AdminRouter           = (*adminAPI)(nil)
	_ caddy.Provisioner           = (*adminAPI)(nil)
)
