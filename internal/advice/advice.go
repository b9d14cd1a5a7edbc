// Package advice finds what is legal in a configuration and probably a mistake, and says what to
// write instead. What is logged when a config is loaded and what the command check prints come
// from one list.
package advice

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Advice is something in a config that should be changed.
type Advice struct {
	Kind    Kind
	Of      string // what it is about, such as "limit"
	Name    string // of that, if it has one
	Problem string
	Remedy  string

	Placeholder string // by its full name; empty if it is about something else
	Inherited   bool   // whether the limit around it has it too

	// Whether a client gets other buckets with each request or connection, so that the limit
	// limits nothing.
	unshared bool
}

// advise returns advice.
func advise(kind Kind, problem, remedy string) Advice {
	return Advice{Kind: kind, Problem: problem, Remedy: remedy}
}

// About returns what the advice is about, such as "limit api".
func (a Advice) About() string { return strings.TrimSpace(a.Of + " " + a.Name) }

// MarshalJSON returns what check prints.
func (a Advice) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{
		"kind": a.Kind.String(), "certain": a.Kind.IsCertain(), "about": a.About(), "problem": a.Problem, "remedy": a.Remedy,
	})
}

// Config is what advice is given on.
type Config struct {
	HTTP      *caddyhttp.App        // provisioned; nil if there is none
	Listeners []*rule.Listener      // of its servers
	Redis     bool                  // whether buckets are kept in Redis
	Servers   *limiter.RedisOptions // of that; nil if they are not known
	Ignored   []string              // the kinds that are not reported
}

// collector collects advice.
type collector struct {
	Config
	order  []rule.Module // in the order of the config
	around map[rule.Module]*routes.Around

	module   rule.Module        // that is looked at
	listener *rule.Listener     // the same; one of both, or none
	flawed   map[[2]string]bool // by limit and placeholder, what has advice
	found    []Advice
}

// each looks at all modules.
func (c *collector) each(look func(h *rule.Handler, around *routes.Around)) {
	for _, c.module = range c.order {
		look(c.module.Compiled(), c.around[c.module])
	}
}

// add adds advice, unless the same was given of another placeholder, or it is ignored.
func (c *collector) add(a Advice) {
	c.flawed[[2]string{a.Name, a.Placeholder}] = true
	ignored := c.Ignored
	if c.module != nil {
		ignored = slices.Concat(c.module.Compiled().IgnoredAdvice, ignored)
	}
	if c.listener != nil {
		ignored = slices.Concat(c.listener.IgnoredAdvice, ignored)
	}
	given := slices.ContainsFunc(c.found, func(b Advice) bool { return a.About() == b.About() && a.Problem == b.Problem && a.Remedy == b.Remedy })
	if !given && !slices.Contains(ignored, a.Kind.String()) {
		c.found = append(c.found, a)
	}
}

// limit adds advice on a limit, by its path.
func (c *collector) limit(path string, a Advice) {
	a.Of, a.Name = "limit", cmp.Or(path, "default")
	c.add(a)
}

// server adds advice on a server.
func (c *collector) server(name string, a Advice) {
	a.Of, a.Name = "server", name
	c.add(a)
}

// On returns advice on a config: what is reported when it is loaded, and then what only check
// says.
func On(config Config) []Advice {
	c := &collector{Config: config, flawed: make(map[[2]string]bool)}
	c.order, c.around = routes.Arounds[rule.Module](config.HTTP)
	c.each(func(h *rule.Handler, around *routes.Around) {
		for b := range rule.Buckets(h.Limits) {
			around.NoteMatchers(b.Limit.Matchers)
		}
	})
	c.each(func(h *rule.Handler, around *routes.Around) {
		c.handler(h.Limits, around)
		c.flooded(h)
		c.unprotected(h.Limits)
		c.unused(h)
	})
	c.hosts()
	c.each(c.names)
	c.sharing()
	c.sites()
	c.zones()
	c.each(c.addresses)
	c.each(c.keys)
	c.each(c.numbers)
	c.each(c.submitted)
	c.each(c.cleared)
	c.each(c.cut)
	c.each(c.encoded)
	c.each(c.unavailable)
	c.module = nil
	for _, c.listener = range c.Listeners {
		c.connections(c.listener)
	}
	c.listener = nil
	c.open()
	return c.found
}
