package advice

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// capturePrefix is how the placeholders of what regular expressions have captured begin.
const capturePrefix = "http.regexp."

// captures advises on keys with what a regular expression has captured, if none has its name. A matcher
// that is not Caddy's, or is an expression, may have any.
func (c *collector) captures() {
	if c.HTTP == nil {
		return
	}
	var names []string
	unknown := false
	note := func(sets caddyhttp.MatcherSets) {
		found, more := regexpsIn(sets)
		names, unknown = append(names, found...), unknown || more
	}
	for _, server := range c.HTTP.Servers {
		eachRoute(server.Routes, server.NamedRoutes, func(r *caddyhttp.Route) { note(r.MatcherSets) })
		for _, r := range server.NamedRoutes {
			eachRoute(caddyhttp.RouteList{*r}, server.NamedRoutes, func(r *caddyhttp.Route) { note(r.MatcherSets) })
		}
	}
	c.each(func(h *rule.Handler, around *routes.Around) {
		unknown = unknown || around.Plugins()
		for b := range rule.Buckets(h.Limits) {
			note(b.Limit.Matchers)
		}
	})
	if unknown {
		return
	}
	c.each(func(h *rule.Handler, _ *routes.Around) {
		for b := range rule.Buckets(h.Limits) {
			for _, name := range b.Limit.Key.Template().Placeholders() {
				of, group, named := strings.Cut(strings.TrimPrefix(name, capturePrefix), ".")
				if strings.HasPrefix(name, capturePrefix) && named && group != "" && !slices.Contains(names, of) {
					c.limit(b.Path, Advice{
						Kind: KeyUnset, Problem: "no regular expression of that name sets, so it is empty",
						Remedy: "Give the matcher that name, as in path_regexp " + of + " <expression>, or use the name that it has.",
					}.of("key", name))
				}
			}
		}
	})
}

// eachRoute calls visit for routes and for those within their handlers.
func eachRoute(list caddyhttp.RouteList, named map[string]*caddyhttp.Route, visit func(*caddyhttp.Route)) {
	for i := range list {
		visit(&list[i])
		for _, h := range list[i].Handlers {
			for _, nested := range routes.In(h, named) {
				if nested.Kind != routes.Named { // they are visited once, or may contain themselves
					eachRoute(nested.Routes, named, visit)
				}
			}
		}
	}
}

// regexpsIn returns the names of the regular expressions of matchers, and whether there may be more.
func regexpsIn(sets caddyhttp.MatcherSets) (names []string, unknown bool) {
	for _, set := range sets {
		for _, m := range set {
			switch m := m.(type) {
			case *caddyhttp.MatchPathRE:
				names = append(names, m.Name)
			case *caddyhttp.MatchHeaderRE:
				for _, re := range *m {
					names = append(names, re.Name)
				}
			case *caddyhttp.MatchVarsRE:
				for _, re := range *m {
					names = append(names, re.Name)
				}
			case *caddyhttp.MatchNot:
				found, more := regexpsIn(m.MatcherSets)
				names, unknown = append(names, found...), unknown || more
			case *caddyhttp.MatchPath, *caddyhttp.MatchHost, *caddyhttp.MatchMethod, *caddyhttp.MatchQuery, *caddyhttp.MatchHeader,
				*caddyhttp.MatchProtocol, *caddyhttp.MatchRemoteIP, *caddyhttp.MatchClientIP, *caddyhttp.VarsMatcher:
			default:
				unknown = true
			}
		}
	}
	return names, unknown
}
