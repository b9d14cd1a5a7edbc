package routes

import (
	"encoding/json"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Site is the position of a handler.
type Site struct {
	Server string   // the name of the HTTP server
	Hosts  []string // that its routes match, none if they match all

	// What else the routes match that it is in, the outermost first.
	Matches []caddyhttp.RawMatcherSets
}

// Site returns the position of the handler: of a named route, what all that invoke it have in common.
func (a *Around) Site() (site Site) {
	if a == nil {
		return site
	}
	site.Server = a.server
	for _, s := range a.ways[0].steps {
		common := !slices.ContainsFunc(a.ways, func(w way) bool {
			return !slices.ContainsFunc(w.steps, func(other step) bool { return other.route == s.route })
		})
		if !common {
			continue
		}
		if hosts := hostsIn(s.route.MatcherSets); hosts != nil {
			site.Hosts = hosts
		}
		if sets := rawMatchers(s.route.MatcherSets); sets != nil {
			site.Matches = append(site.Matches, sets)
		}
	}
	return site
}

// rawMatchers returns matchers as a config has them, without host matchers, or nil if
// a set matches all requests then: Caddy does not keep the config of routes.
func rawMatchers(sets caddyhttp.MatcherSets) (raw caddyhttp.RawMatcherSets) {
	for _, set := range sets {
		modules := rawSet(set)
		delete(modules, "host")
		if len(modules) == 0 {
			return nil
		}
		raw = append(raw, modules)
	}
	return raw
}

// rawSet returns a set of matchers as a config has it.
func rawSet(set caddyhttp.MatcherSet) caddy.ModuleMap {
	modules := make(caddy.ModuleMap)
	for _, m := range set {
		module, ok := m.(caddy.Module)
		if !ok {
			continue
		}
		config := m
		if not, ok := m.(*caddyhttp.MatchNot); ok { // which only marshals what Caddy has dropped
			var inner caddyhttp.RawMatcherSets
			for _, set := range not.MatcherSets {
				inner = append(inner, rawSet(set))
			}
			config = inner
		}
		text, err := json.Marshal(config)
		if err != nil {
			text = nil // what it matches is not known
		}
		modules[module.CaddyModule().ID.Name()] = text
	}
	return modules
}

// hostsIn returns the hosts that matchers match, or nil if they match all.
func hostsIn(sets caddyhttp.MatcherSets) (hosts []string) {
	for _, set := range sets {
		i := slices.IndexFunc(set, func(m any) bool { _, ok := m.(*caddyhttp.MatchHost); return ok })
		if i < 0 {
			return nil
		}
		hosts = append(hosts, *set[i].(*caddyhttp.MatchHost)...)
	}
	return hosts
}
