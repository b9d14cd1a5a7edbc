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

// Sites returns the positions of the handlers of type H of an HTTP app, or none if app is nil. Those
// in routes of other plugins' handlers are not found.
func Sites[H interface {
	caddyhttp.MiddlewareHandler
	comparable
}](app *caddyhttp.App) map[H]Site {
	found := make(map[H]Site)
	if app == nil {
		return found
	}
	add := func(list caddyhttp.RouteList, at Site) {
		addSites(list, at, func(h caddyhttp.MiddlewareHandler, at Site) {
			if own, ok := h.(H); ok {
				found[own] = at
			}
		})
	}
	for name, srv := range app.Servers {
		at := Site{Server: name}
		add(srv.Routes, at)
		if srv.Errors != nil {
			add(srv.Errors.Routes, at)
		}
		for _, route := range srv.NamedRoutes {
			add(caddyhttp.RouteList{*route}, at)
		}
	}
	return found
}

// addSites calls add for all handlers in routes.
func addSites(list caddyhttp.RouteList, at Site, add func(caddyhttp.MiddlewareHandler, Site)) {
	for i := range list {
		in := at
		if hosts := hostsOf(list[i].MatcherSets); hosts != nil {
			in.Hosts = hosts
		}
		if sets := rawMatchers(list[i].MatcherSets); sets != nil {
			in.Matches = append(slices.Clip(in.Matches), sets)
		}
		for _, h := range list[i].Handlers {
			add(h, in)
			for _, nested := range In(h, nil) { // named ones are added by themselves
				addSites(nested.Routes, in, add)
			}
		}
	}
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

// hostsOf returns the hosts that matchers match, or nil if they match all.
func hostsOf(sets caddyhttp.MatcherSets) (hosts []string) {
	for _, set := range sets {
		i := slices.IndexFunc(set, func(m any) bool { _, ok := m.(*caddyhttp.MatchHost); return ok })
		if i < 0 {
			return nil
		}
		hosts = append(hosts, *set[i].(*caddyhttp.MatchHost)...)
	}
	return hosts
}
