package ratelimit

import (
	"slices"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/intercept"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// site is where a handler stands.
type site struct {
	server string   // the name of the HTTP server
	hosts  []string // that its routes match, none if they match all
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
func (s sites) addRoutes(routes caddyhttp.RouteList, at site) {
	for i := range routes {
		in := at
		if hosts := hostsOf(routes[i].MatcherSets); hosts != nil {
			in.hosts = hosts
		}
		for _, handler := range routes[i].Handlers {
			s.add(handler, in)
		}
	}
}

// add adds a handler and those in its routes.
func (s sites) add(handler caddyhttp.MiddlewareHandler, at site) {
	switch handler := handler.(type) {
	case *Handler:
		s[handler] = at
	case *caddyhttp.Subroute:
		s.addRoutes(handler.Routes, at)
		if handler.Errors != nil {
			s.addRoutes(handler.Errors.Routes, at)
		}
	case *reverseproxy.Handler:
		s.addResponses(handler.HandleResponse, at)
	case *intercept.Intercept:
		s.addResponses(handler.HandleResponse, at)
	}
}

// addResponses adds the handlers in routes that handle responses.
func (s sites) addResponses(handlers []caddyhttp.ResponseHandler, at site) {
	for i := range handlers {
		s.addRoutes(handlers[i].Routes, at)
	}
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
