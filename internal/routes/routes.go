// Package routes knows which of Caddy's handlers contain routes: the position of a handler, what is
// around it and keeps requests from it, and which error routes may handle its errors.
//
// Two walkers go through the routes of a loaded config by In. They are two because they differ in when they run and in what
// leads from one route to the next: errorRoutesSearch runs when a server's first denial is served, and carries where errors
// go, which ends at the routes that handle them; walker runs when a config is loaded or checked, and carries what requests
// have passed. The commands that load nothing cut JSON by a third one, in package offline: no module exists there yet.
package routes

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/intercept"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Kind says when a handler passes requests to routes that it contains.
type Kind uint8

// The kinds of routes.
const (
	Within     Kind = iota // before the handler that follows it
	Named                  // as above, and other routes may share them
	OnError                // if the routes within it, or what follows them, return an error
	OnResponse             // if what follows it, or an upstream, has responded
)

// Nested are routes that a handler contains.
type Nested struct {
	Kind   Kind
	Name   string // of a Named route
	Routes caddyhttp.RouteList
}

// In returns the routes that h contains, given the named routes of its server. There are
// none in handlers of other plugins, as far as is known.
func In(h caddyhttp.MiddlewareHandler, named map[string]*caddyhttp.Route) (nested []Nested) {
	responses := func(handlers []caddyhttp.ResponseHandler) {
		for i := range handlers {
			nested = append(nested, Nested{Kind: OnResponse, Routes: handlers[i].Routes})
		}
	}
	switch h := h.(type) {
	case *caddyhttp.Subroute:
		nested = append(nested, Nested{Kind: Within, Routes: h.Routes})
		if h.Errors != nil && len(h.Errors.Routes) > 0 {
			nested = append(nested, Nested{Kind: OnError, Routes: h.Errors.Routes})
		}
	case *caddyhttp.Invoke:
		if route := named[h.Name]; route != nil {
			nested = append(nested, Nested{Kind: Named, Name: h.Name, Routes: caddyhttp.RouteList{*route}})
		}
	case *reverseproxy.Handler:
		responses(h.HandleResponse)
	case *intercept.Intercept:
		responses(h.HandleResponse)
	}
	return nested
}
