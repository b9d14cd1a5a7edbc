package sitetest

import (
	"context"
	"os/exec"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// execHandler does what the plugin caddy-events-exec does.
type execHandler struct{ Command []string }

func init() { caddy.RegisterModule(new(execHandler)) }

// CaddyModule returns the Caddy module information.
func (*execHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.exec", New: func() caddy.Module { return new(execHandler) }}
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (h *execHandler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	h.Command = d.RemainingArgs()
	return nil
}

// Handle implements caddyevents.Handler.
func (h *execHandler) Handle(ctx context.Context, _ caddy.Event) error {
	args := slices.Clone(h.Command[1:])
	for i, arg := range args {
		args[i] = ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer).ReplaceAll(arg, "")
	}
	return exec.CommandContext(ctx, h.Command[0], args...).Run() //nolint:gosec // it is the recipe's
}
