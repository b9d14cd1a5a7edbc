package routes

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/fileserver"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// answer is a handler that may answer requests behind another.
type answer struct {
	handler caddyhttp.MiddlewareHandler
	steps   []step // the routes that it is in
	paths   paths  // of the requests that reach it
	changed bool   // whether a handler between the two changes the path
	before  int    // how many have changed it before

	removed []string // the response fields that the directive header removes between the two
}

// pass notes for the handlers that were passed that requests pass h, which may answer them.
func (p *path) pass(h caddyhttp.MiddlewareHandler) {
	if own, ok := h.(*headers.Handler); ok && own.Response != nil && own.Response.Require == nil && own.Response.HeaderOps != nil {
		p.removed = append(slices.Clip(p.removed), own.Response.Delete...)
	}
	if p.obstacle() != nil || answers(h) == "" && !isProxy(h) && !ofPlugin(h) {
		return
	}
	for _, first := range p.passed {
		first.answers = append(first.answers, answer{
			handler: h, steps: p.steps, paths: p.paths, changed: p.changes != first.changes, before: first.changes, removed: p.removed[first.removed:],
		})
	}
}

// isProxy reports whether a handler has an upstream answer requests, other than one that it asks
// whether to pass them on, as forward_auth does.
func isProxy(h caddyhttp.MiddlewareHandler) bool {
	proxy, ok := h.(*reverseproxy.Handler)
	return ok && (len(proxy.HandleResponse) == 0 || proxy.Rewrite == nil || proxy.Rewrite.Method == "")
}

// refuses reports whether a handler answers each request with an error, or a redirection to
// another path.
func refuses(h caddyhttp.MiddlewareHandler) bool {
	switch h := h.(type) {
	case *caddyhttp.StaticError:
		return true
	case *caddyhttp.StaticResponse:
		return h.Abort || len(h.StatusCode) == 3 && h.StatusCode[0] >= '3'
	}
	return false
}

// Serves reports whether a request with a path that passes the handler may get an answer other
// than an error: files have no other paths than their own.
func (a *Around) Serves(path string) bool {
	if len(a.answers) == 0 {
		return true
	}
	return slices.ContainsFunc(a.answers, func(by answer) bool {
		_, files := by.handler.(*fileserver.FileServer)
		return !files && !refuses(by.handler) && by.mayGet(path)
	})
}

// mayGet reports whether requests with a path may get there.
func (by answer) mayGet(path string) bool {
	for _, s := range by.steps {
		if s.changes == by.before && !mayMatch(s.route.MatcherSets, path) {
			return false
		}
	}
	return by.changed || by.paths.never(strings.ToLower(path)) == nil
}

// mayMatch reports whether a request with a path may match.
func mayMatch(sets caddyhttp.MatcherSets, path string) bool {
	return len(sets) == 0 || slices.ContainsFunc(sets, func(set caddyhttp.MatcherSet) bool {
		return !slices.ContainsFunc(set, func(m any) bool {
			switch m := m.(type) {
			case caddyhttp.MatchPath:
				return !matchesPath(m, path)
			case *caddyhttp.MatchPath:
				return !matchesPath(*m, path)
			case *caddyhttp.MatchNot:
				return slices.ContainsFunc(m.MatcherSets, func(set caddyhttp.MatcherSet) bool { return alwaysMatches(set, path) })
			}
			return false
		})
	})
}

// alwaysMatches reports whether all requests with a path match.
func alwaysMatches(set caddyhttp.MatcherSet, path string) bool {
	return !slices.ContainsFunc(set, func(m any) bool {
		patterns, ok := m.(*caddyhttp.MatchPath)
		return !ok || !matchesPath(*patterns, path)
	})
}

// matchesPath reports whether any of the patterns matches a path.
func matchesPath(patterns caddyhttp.MatchPath, path string) bool {
	r := &http.Request{URL: &url.URL{Path: path}}
	matches, err := patterns.MatchWithError(r.WithContext(context.WithValue(context.Background(), caddy.ReplacerCtxKey, caddy.NewReplacer())))
	return matches && err == nil
}

// Removes returns the directive that removes a field from all responses behind the handler before
// they get there, or "".
func (a *Around) Removes(field string) (directive string) {
	for _, by := range a.answers {
		switch {
		case ofPlugin(by.handler):
			return "" // which may set it
		case slices.ContainsFunc(by.removed, func(pattern string) bool { return removesField(pattern, field) }):
			directive = "header"
		case !isProxy(by.handler): // which sends no such field
		case removesFrom(by.handler, field):
			directive = "reverse_proxy"
		default:
			return ""
		}
	}
	return directive
}

// removesFrom reports whether reverse_proxy removes a field from all responses.
func removesFrom(h caddyhttp.MiddlewareHandler, field string) bool {
	proxy, ok := h.(*reverseproxy.Handler)
	if !ok || proxy.Headers == nil || proxy.Headers.Response == nil || proxy.Headers.Response.HeaderOps == nil || proxy.Headers.Response.Require != nil {
		return false
	}
	return slices.ContainsFunc(proxy.Headers.Response.Delete, func(pattern string) bool { return removesField(pattern, field) })
}

// removesField reports whether a field is one of those that a pattern of what to delete stands for.
func removesField(pattern, field string) bool {
	pattern, field = strings.ToLower(pattern), strings.ToLower(field)
	begin, isBegin := strings.CutSuffix(pattern, "*")
	end, isEnd := strings.CutPrefix(pattern, "*")
	switch {
	case isBegin && isEnd:
		return strings.Contains(field, strings.Trim(pattern, "*"))
	case isBegin:
		return strings.HasPrefix(field, begin)
	case isEnd:
		return strings.HasSuffix(field, end)
	}
	return pattern == field
}

// HasHost reports whether requests for a host, which may have wildcards, get to the handler.
func (a *Around) HasHost(host string) bool {
	if len(a.ways) == 0 {
		return true
	}
	return slices.ContainsFunc(a.ways, func(w way) bool {
		return !slices.ContainsFunc(w.steps, func(s step) bool {
			hosts := hostsIn(s.route.MatcherSets)
			return len(hosts) > 0 && !slices.ContainsFunc(hosts, func(own string) bool { return mayBeOneHost(own, host) })
		})
	})
}

// mayBeOneHost reports whether two patterns may match one host.
func mayBeOneHost(a, b string) bool {
	if strings.Contains(a+b, "{") || a == "*" || b == "*" {
		return true
	}
	as, bs := strings.Split(strings.ToLower(a), "."), strings.Split(strings.ToLower(b), ".")
	return slices.EqualFunc(as, bs, func(a, b string) bool { return a == b || a == "*" || b == "*" })
}

// Hosts returns the hosts of the site that the handler is in, or nil if it serves all, or is in a
// named route that several invoke.
func (a *Around) Hosts() []string { return a.Site().Hosts }

// Routes returns the routes that requests have taken to the handler, on all ways.
func (a *Around) Routes() (all []*caddyhttp.Route) {
	for _, w := range a.ways {
		for _, s := range w.steps {
			all = append(all, s.route)
		}
	}
	return all
}

// Selects reports whether routes select requests for the handler by more than the host.
func (a *Around) Selects() bool {
	return slices.ContainsFunc(a.Routes(), func(rt *caddyhttp.Route) bool {
		return rt.Group != "" || slices.ContainsFunc(slices.Concat(rt.MatcherSets...), func(m any) bool {
			_, isHost := m.(*caddyhttp.MatchHost)
			return !isHost
		})
	})
}

// Shares reports whether the requests that reach the handler are among those that reach another
// one, unless something answers them between the two.
func (a *Around) Shares(other *Around) bool {
	return a.server == other.server && !slices.ContainsFunc(a.ways, func(w way) bool {
		return !slices.ContainsFunc(other.ways, func(o way) bool {
			return !slices.ContainsFunc(o.steps, func(s step) bool {
				return (len(s.route.MatcherSets) > 0 || s.route.Group != "") &&
					!slices.ContainsFunc(w.steps, func(own step) bool { return own.route == s.route })
			})
		})
	})
}
