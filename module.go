// Package ratelimit is a Caddy module that limits how often clients may send
// requests. It puts leaky buckets in front of any site: in this process, or in
// a Redis server, where all Caddy instances share them.
//
// The package is the HTTP handler `rate_limit` and the app of the same name,
// which says where the buckets are kept. What a bucket is and how it decides is
// in package limiter.
package ratelimit

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
}

// Interface guards
var (
	_ caddy.App                   = (*App)(nil)
	_ caddy.Provisioner           = (*App)(nil)
	_ caddy.CleanerUpper          = (*App)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
