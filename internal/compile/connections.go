package compile

import (
	"encoding/json"
	"errors"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// A limit of connections is compiled like one of requests. It decides before there is a request, so it has no
// options that are about requests or responses, and in this process, whatever the store is.

// inListener is what options of requests conflict with there.
const inListener = "listener_wrappers"

// UseBanned describes the words of banned.
const UseBanned = "the names of limits of requests that have ban, such as banned login"

// ConnectionOptions are the options of limits of connections in a Caddyfile.
var ConnectionOptions = slices.DeleteFunc(slices.Clone(config.LimitOptions), func(name string) bool {
	return slices.ContainsFunc(conflicts, func(c conflict) bool { return c.Option == name && c.With == inListener })
})

// NewListener returns the compiler of limits of connections.
func NewListener(of *config.Listener, resolve option.Resolver) (*Compiler, error) {
	for _, l := range of.Limits {
		if l != nil && l.Name == "" && !l.IsGroup() {
			l.Name = config.ConnectionsName
		}
	}
	c, err := New(&config.Block{Limits: of.Limits, Accounting: of.Accounting, IgnoreAdvice: of.IgnoreAdvice}, resolve)
	c.connections = true
	return c, err
}

// checkConnections returns an error if a limit of connections needs to know of requests.
func (l *LimitBuilder) checkConnections() error {
	if !l.connections {
		return nil
	}
	for _, c := range conflicts {
		if o := l.Setting(c.Option); o != nil && c.With == inListener {
			return option.Clash(o.Option, o.Text, inListener, c.Instead)
		}
	}
	if l.Concurrency == config.ConcurrencyAuto {
		return option.Clash("concurrency", config.ConcurrencyAuto, inListener, "use a number: how long connections last says nothing of the load")
	}
	for _, name := range l.rule.Key.Names() {
		if name != placeholder.ClientIP {
			return option.Bad("key", l.rule.Key.Source, "{client_ip}, here the address of the connection, or a word for one bucket for all")
		}
	}
	if !areOfAddresses(l.MatcherSetsRaw) {
		return option.Errorf("match", "only the address is known before TLS; use remote_ip or not remote_ip, with addresses")
	}
	return nil
}

// checkNumbers returns an error if the numbers of a limit of connections depend on requests.
func (l *LimitBuilder) checkNumbers() error {
	if !l.connections {
		return nil
	}
	depends := func(dynamic bool, name, text string) bool {
		return dynamic && l.knows(option.Setting{Option: name, Text: text})
	}
	for _, b := range l.rule.Buckets {
		if depends(b.Size.IsDynamic(), "size", b.Size.String()) || depends(b.Factor.IsDynamic(), "factor", b.Factor.String()) ||
			depends(b.Rate.IsDynamic(), "drip_rate", b.Rate.String()) || depends(b.Drip.IsDynamic(), "drip_size", b.Drip.String()) {
			return errors.New("its numbers have placeholders that have no value before there is a request; use numbers, or {env.*}")
		}
	}
	return nil
}

// areOfAddresses reports whether matchers are only about the addresses of connections.
func areOfAddresses(sets caddyhttp.RawMatcherSets) bool {
	return !slices.ContainsFunc(sets, func(set caddy.ModuleMap) bool {
		for name, raw := range set {
			var inner caddyhttp.RawMatcherSets
			switch {
			case name == "remote_ip", name == "client_ip":
			case name == "not" && json.Unmarshal(raw, &inner) == nil && areOfAddresses(inner):
			default:
				return true
			}
		}
		return false
	})
}
