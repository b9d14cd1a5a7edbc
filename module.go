// Package ratelimit is a Caddy module that limits how often clients may send
// requests. It uses leaky buckets, kept either in this process or in Redis, where
// all Caddy instances share them. Other algorithms can be chosen for each limit.
//
// With this Caddyfile each client address has a burst of ten requests to the API and ten
// more a second, and of five log-ins and five more a minute, on all instances together:
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
// Without the block in front, each Caddy limits on its own.
//
// The package provides the HTTP handler `rate_limit` and the app of the same
// name, which configures where the buckets are kept. The buckets themselves are
// implemented by package limiter, which needs no Caddy.
package ratelimit

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/convert"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/replay"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseHandler)
	// Limits see rewritten requests, and come before expensive handlers, such as those
	// that hash passwords: basicauth, as the old name has it, and basic_auth.
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.After, "try_files")
	httpcaddyfile.RegisterGlobalOption("rate_limit", parseApp)
	// Caddy's website reads the modules from these lines and from literal IDs.
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(adminAPI))
	caddycmd.RegisterCommand(command.New(commands()))
}

// commands returns the subcommands of caddy rate-limit.
func commands() []*cobra.Command {
	return append(command.AdminCommands(), offline.ExplainCommand(offlineModule{}), offline.CheckCommand(offlineModule{}),
		replay.Command(offlineModule{}), convert.Command())
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
