package ratelimit

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// site is where a handler stands.
type site struct {
	server string   // the name of the HTTP server
	hosts  []string // that its routes match, none if they match all

	// What else the routes match that it is in, the outermost first.
	matches []caddyhttp.RawMatcherSets
}

// String returns the server and the hosts.
func (s site) String() string {
	if len(s.hosts) == 0 {
		return s.server
	}
	return s.server + " " + strings.Join(firstOf(s.hosts), ", ")
}

// maxListed is how many elements of a list a log line has.
const maxListed = 10

// firstOf returns a list for a log line: a config may have thousands of sites, and a site
// of hosts.
func firstOf(all []string) []string {
	if n := len(all) - maxListed; n > 0 {
		return append(slices.Clone(all[:maxListed]), fmt.Sprintf("%d more", n))
	}
	return all
}

// sitesOf returns where the handlers of an HTTP app stand. Those in routes of other
// plugins' handlers are not found.
func sitesOf(app *caddyhttp.App) map[*Handler]site {
	found := make(sites)
	for name, srv := range app.Servers {
		at := site{server: name}
		found.addRoutes(srv.Routes, at)
		if srv.Errors != nil {
			found.addRoutes(srv.Errors.Routes, at)
		}
		for _, route := range srv.NamedRoutes {
			found.addRoutes(caddyhttp.RouteList{*route}, at)
		}
	}
	return found
}

// sites says where handlers stand.
type sites map[*Handler]site

// addRoutes adds the handlers in routes.
func (s sites) addRoutes(list caddyhttp.RouteList, at site) {
	for i := range list {
		in := at
		if hosts := hostsOf(list[i].MatcherSets); hosts != nil {
			in.hosts = hosts
		}
		if sets := rawMatchers(list[i].MatcherSets); sets != nil {
			in.matches = append(slices.Clip(in.matches), sets)
		}
		for _, h := range list[i].Handlers {
			if own, ok := h.(*Handler); ok {
				s[own] = in
			}
			for _, nested := range routes.In(h, nil) { // named ones are added by themselves
				s.addRoutes(nested.Routes, in)
			}
		}
	}
}

// rawMatchers returns matchers as a config has them, without those of hosts, or nil if
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

// logSharedBuckets logs which limits without a name, or within one, stand on several
// sites and share their buckets there, as their keys and numbers are equal.
func (a *App) logSharedBuckets() {
	stand := a.sites()
	shared := make(map[string]map[string]bool) // the sites, by the name of the buckets
	for b := range a.limits() {
		at, known := stand[b.handler]
		if !known || !b.unnamed() || b.off || b.bucket != b.limit.buckets[0] {
			continue
		}
		if shared[b.name] == nil {
			shared[b.name] = make(map[string]bool)
		}
		shared[b.name][at.String()] = true
	}
	for _, name := range slices.Sorted(maps.Keys(shared)) {
		if sites := slices.Sorted(maps.Keys(shared[name])); len(sites) > 1 {
			a.logger.Info("limits without a name, or within one, on several sites have equal keys and numbers, so they share their buckets; "+
				"unless that is meant, give each a name", zap.String("limit", pathOfBuckets(name)), zap.Strings("sites", firstOf(sites)))
		}
	}
}
