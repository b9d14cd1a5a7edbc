// Package ratelimit is a Caddy module that limits how often clients may send
// requests. It uses leaky buckets, kept either in this process or in Redis, where
// all Caddy instances share them. Other algorithms can be chosen for each limit.
//
// With this Caddyfile each client address has a burst of ten requests to the API and ten
// more a second, and of five log-ins and five more a minute, on all Caddys together:
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
// name, which configures where the buckets are kept. If another plugin has that name,
// they are called `redis_rate_limit`. The buckets themselves are implemented by
// package limiter, which needs no Caddy.
package ratelimit

import (
	"reflect"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/convert"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/replay"
)

// ownName is the name of the handler, the directive, the global option, the app and
// the admin API, and with a hyphen that of the command. It is another one if another
// plugin has taken any of these.
//
// Go initialises packages in the order of their import paths, as far as their
// dependencies allow. A plugin that comes after this one panics if it wants the same
// name.
var ownName = "rate_limit"

func init() {
	if isTaken(ownName) || !registerDirective(ownName) {
		taken := ownName
		ownName = "redis_rate_limit"
		caddy.Log().Warn("another plugin already has the name of this one, which uses a longer one; "+
			"use that for the directive and the global option, or in JSON for the handler and the app",
			zap.String("plugin", reflect.TypeFor[Handler]().PkgPath()), zap.String("taken", taken), zap.String("name", ownName))
		httpcaddyfile.RegisterHandlerDirective(ownName, parseHandler)
	}
	// Limits see rewritten requests, and come before expensive handlers, such as those
	// that hash passwords: basicauth, as the old name has it, and basic_auth.
	httpcaddyfile.RegisterDirectiveOrder(ownName, httpcaddyfile.After, "try_files")
	httpcaddyfile.RegisterGlobalOption(ownName, parseApp)
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(adminAPI))
	caddycmd.RegisterCommand(command.New(commandName(ownName), commands()))
}

// isTaken reports whether a module or command of another plugin has a name of ours.
func isTaken(name string) bool {
	for _, id := range []string{name, "http.handlers." + name, "admin.api." + name} {
		if _, err := caddy.GetModule(id); err == nil {
			return true
		}
	}
	_, taken := caddycmd.Commands()[commandName(name)]
	return taken
}

// commands returns the subcommands of caddy rate-limit.
func commands() []*cobra.Command {
	return append(command.Asking(adminPrefix()), offline.ExplainCommand(offlineModule{}), offline.CheckCommand(offlineModule{}),
		replay.Command(offlineModule{}), convert.Command())
}

// commandName returns the name of the command of a module.
func commandName(module string) string { return strings.ReplaceAll(module, "_", "-") }

// registerDirective registers the directive, and reports whether its name was free:
// if not, Caddy panics, and tells in no other way.
func registerDirective(name string) (free bool) {
	defer func() { free = recover() == nil }()
	httpcaddyfile.RegisterHandlerDirective(name, parseHandler)
	return true
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
