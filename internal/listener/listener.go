// Package listener limits connections before TLS: it has the module `rate_limit` of `listener_wrappers`.
package listener

import (
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/directive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
)

func init() {
	// Caddy's website reads modules from such lines, in all packages that the root imports.
	caddy.RegisterModule(new(Wrapper))
}

// App is the app of this module. It is a type of the root package, which can't be imported from here.
type App interface {
	caddy.App

	// Join has the app know of a listener that is provisioned with ctx, and returns what it uses of the app.
	Join(l *rule.Listener, ctx caddy.Context) Shared

	// Ready is called before the first connection is decided on: Caddy may start its servers before the app.
	Ready()
}

// Shared is what listeners use of their app.
type Shared struct {
	Limits *compile.Shared
	Stores *state.Stores
	Logger *zap.Logger // which does not block
}

// Wrapper refuses TCP connections before TLS, in this Caddy alone, also with Redis: those of addresses that have
// too many open, or open them too fast, and of those that are banned. In `listener_wrappers` it comes before
// `tls`, and after `proxy_protocol` if there is that. A connection that is refused is reset.
//
// It does not see HTTP/3, which has no such connections: `protocols h1 h2` turns that off. A connection counts until
// it is closed, once, however many requests or HTTP/2 streams it has. Buckets survive reloads, and are shared by all
// servers where a limit has the same name.
type Wrapper struct {
	config.Listener

	app    App
	limits rule.Listener
}

// CaddyModule returns the Caddy module information.
func (*Wrapper) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "caddy.listeners.rate_limit",
		New: func() caddy.Module { return new(Wrapper) },
	}
}

// UnmarshalCaddyfile parses rate_limit in listener_wrappers, see directive.ParseListener.
func (w *Wrapper) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	of, err := directive.ParseListener(d)
	if err == nil {
		w.Listener = *of
	}
	return err
}

// UnmarshalJSON accepts known fields only, as Caddy does, and says which field is meant by an unknown one.
func (w *Wrapper) UnmarshalJSON(b []byte) error { return directive.UnmarshalListener(b, &w.Listener) }

// Provision sets up the limits. It returns an error if an option is invalid, or if TLS would come first.
func (w *Wrapper) Provision(ctx caddy.Context) error {
	loaded, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	app, ok := loaded.(App)
	if !ok {
		return errors.New("the app rate_limit is of another module")
	}
	w.app, w.limits.Banned, w.limits.IgnoredAdvice = app, w.Banned, w.IgnoreAdvice
	server, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if server != nil {
		w.limits.Server, w.limits.Wrappers = server.Name(), wrappersOf(server)
	}
	shared := app.Join(&w.limits, ctx)
	if server != nil && len(server.TLSConnPolicies) > 0 && !slices.Contains(w.limits.Wrappers[w.limits.Index:], "tls") {
		return errors.New("listener_wrappers: rate_limit has to come before TLS; write tls in a line of its own after it")
	}
	c, err := compile.NewListener(&w.Listener, option.OnLoad)
	if err != nil {
		return err
	}
	c.Logger, c.Location = shared.Logger, func(string) string { return " in listener_wrappers of server " + w.limits.Server }
	if len(w.Limits) > 0 || len(w.Banned) == 0 {
		if w.limits.Limits, err = c.Load(ctx, shared.Limits); err != nil {
			return err
		}
	}
	w.limits.Accounting, w.limits.OnError, w.limits.Logger = c.Settings.Accounting, rule.OnErrorFallback, shared.Logger
	w.limits.Store, w.limits.Memory, w.limits.Process = shared.Stores.Memory, shared.Stores.Memory, shared.Stores.Process.Process
	return nil
}

// wrappersOf returns the names of all listener wrappers of a server, which is being provisioned.
func wrappersOf(server *caddyhttp.Server) (names []string) {
	for _, raw := range server.ListenerWrappersRaw {
		var module struct {
			Wrapper string `json:"wrapper"`
		}
		_ = json.Unmarshal(raw, &module) // Caddy returns an error
		names = append(names, module.Wrapper)
	}
	return names
}

// WrapListener implements caddy.ListenerWrapper.
func (w *Wrapper) WrapListener(l net.Listener) net.Listener { return &limited{l, w} }

// limited is a listener whose connections are limited.
type limited struct {
	net.Listener
	wrapper *Wrapper
}

// Accept returns the next connection that is not refused. It does not wait for an address that is not known yet, as
// with the PROXY protocol: what opens such a connection is decided when it is first used.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if !knowsAddress(c) {
			return newLate(c, l.wrapper), nil
		}
		if units, admitted := l.wrapper.admit(c); admitted {
			return holding(c, units), nil
		}
		refuse(c)
	}
}

// admit decides on a connection, and returns what it holds until it is closed.
func (w *Wrapper) admit(c net.Conn) (units rule.Units, admitted bool) {
	w.app.Ready()
	address := addressOf(c)
	units, by := w.limits.Connect(address)
	if by == "" {
		return units, true
	}
	if c := w.limits.Logger.Check(zap.DebugLevel, "connection refused"); c != nil {
		c.Write(zap.String("limit", by), zap.String("remote_ip", address))
	}
	return units, false
}

// addressOf returns the address of the client of a connection: "" if it has none, as on a unix socket.
func addressOf(c net.Conn) string {
	var at netip.AddrPort
	switch remote := c.RemoteAddr().(type) {
	case *net.TCPAddr:
		at = remote.AddrPort()
	case nil:
	default:
		at, _ = netip.ParseAddrPort(remote.String())
	}
	if !at.IsValid() {
		return ""
	}
	return at.Addr().Unmap().WithZone("").String()
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Wrapper)(nil)
	_ caddy.ListenerWrapper = (*Wrapper)(nil)
	_ caddyfile.Unmarshaler = (*Wrapper)(nil)
)
