package ratelimit

import (
	"net/http"
	"net/url"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/intercept"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// outlet is where the errors go that a handler returns, a set of:
type outlet uint8

const (
	toNobody   outlet = 1 << iota // from error routes of the server: it answers with the first error's status
	toServer                      // to the error routes of the server that match the request
	toSubroute                    // to the error routes of a subroute
)

// outlets are where the errors go of requests that come to a handler as usual,
// and of those that come to it in error routes; nothing if none does.
type outlets struct{ usual, inError outlet }

// or returns the outlets of a handler that requests come to in either way.
func (o outlets) or(other outlets) outlets {
	return outlets{o.usual | other.usual, o.inError | other.inError}
}

// errorRoutes tells which error routes of a server see what one handler returns.
type errorRoutes struct {
	// Named routes may be invoked from several places. Nothing if the handler was
	// not found: handlers of other plugins may hold routes.
	outlets

	subroutes bool            // whether any subroute has error routes
	sites     []requestFilter // of the server's error routes
}

// errorRoutesOf returns the error routes of srv that see what h returns.
func errorRoutesOf(srv *caddyhttp.Server, h *Handler) *errorRoutes {
	s := errorRoutesSearch{server: srv, handler: h, invoked: map[invocation]outlets{}}
	s.routes(srv.Routes, outlets{usual: toServer})
	if srv.Errors != nil {
		s.routes(srv.Errors.Routes, outlets{inError: toNobody})
		for i := range srv.Errors.Routes {
			s.found.sites = append(s.found.sites, newRequestFilter(srv.Errors.Routes[i].MatcherSets))
		}
	}
	return &s.found
}

// errorRoutesSearch looks for a handler in the routes of a server, and follows
// where errors go on the way. That is not told by what a handler stands in alone:
// a subroute invokes what comes behind it too, and sees the errors of that.
type errorRoutesSearch struct {
	server  *caddyhttp.Server
	handler *Handler
	found   errorRoutes
	invoked map[invocation]outlets // behind named routes that were searched
}

// invocation is a named route and where its errors go.
type invocation struct {
	name string
	outlets
}

// routes searches routes whose errors go to out, and returns where those of
// what comes behind them go.
func (s *errorRoutesSearch) routes(routes caddyhttp.RouteList, out outlets) outlets {
	for i := range routes {
		behind := out
		for _, handler := range routes[i].Handlers {
			behind = s.in(handler, behind)
		}
		if !routes[i].Terminal {
			out = out.or(behind) // for it may not match
		}
	}
	return out
}

// in searches a handler as routes does routes. It knows the handlers of Caddy's
// that have routes in them.
func (s *errorRoutesSearch) in(handler caddyhttp.MiddlewareHandler, out outlets) outlets {
	switch handler := handler.(type) {
	case *Handler:
		if handler == s.handler {
			s.found.outlets = s.found.or(out)
		}
	case *caddyhttp.Subroute:
		return s.subroute(handler, out)
	case *caddyhttp.Invoke:
		at := invocation{handler.Name, out}
		route := s.server.NamedRoutes[handler.Name]
		if _, known := s.invoked[at]; !known && route != nil {
			s.invoked[at] = out // should it invoke itself
			s.invoked[at] = s.routes(caddyhttp.RouteList{*route}, out)
		}
		return out.or(s.invoked[at])
	case *reverseproxy.Handler:
		return s.responses(handler.HandleResponse, out)
	case *intercept.Intercept:
		return s.responses(handler.HandleResponse, out)
	}
	return out
}

// subroute searches a subroute as in does any handler.
func (s *errorRoutesSearch) subroute(sr *caddyhttp.Subroute, out outlets) outlets {
	if sr.Errors == nil || len(sr.Errors.Routes) == 0 {
		return s.routes(sr.Routes, out)
	}
	s.found.subroutes = true
	var inner outlets
	if out.usual != 0 {
		inner.usual = toSubroute
	}
	if out.inError != 0 {
		inner.inError = toSubroute
	}
	behind := s.routes(sr.Routes, inner)
	return behind.or(s.routes(sr.Errors.Routes, outlets{inError: out.usual | out.inError}))
}

// responses searches the routes that handle responses as in does any handler.
func (s *errorRoutesSearch) responses(handlers []caddyhttp.ResponseHandler, out outlets) outlets {
	behind := out
	for i := range handlers {
		behind = behind.or(s.routes(handlers[i].Routes, out))
	}
	return behind
}

// see reports whether an error with the given status that is returned for r may
// be seen by error routes. Where that can't be told it is returned only if no harm
// comes of it: in error routes of the server Caddy would answer with the status of
// the first error, and one from 500 on that nobody sees it would log for each
// request, with the fields of its header.
func (e *errorRoutes) see(r *http.Request, status int) bool {
	found := e.outlets != outlets{}
	if found && !e.subroutes && len(e.sites) == 0 {
		return false
	}
	out := e.usual
	if r.Context().Value(caddyhttp.ErrorCtxKey) != nil {
		if out = e.inError; out == 0 {
			return false
		}
	}
	switch {
	case out&toNobody != 0:
		return false
	case out == toSubroute || e.matchSite(r):
		return true
	case out == toServer:
		return false
	}
	return status < http.StatusInternalServerError
}

// matchSite reports whether the server has error routes for the site of r.
func (e *errorRoutes) matchSite(r *http.Request) bool {
	for i := range e.sites {
		if e.sites[i].match(r) {
			return true
		}
	}
	return false
}

// requestFilter is what matchers of a route say that does not depend on the
// error: the hosts and paths by which Caddyfiles tell sites apart. There is none
// if all requests may match.
type requestFilter []filterSet

// filterSet is matchers of which all have to match.
type filterSet struct {
	host, path []caddyhttp.RequestMatcherWithError
}

// newRequestFilter returns the filter of a route's matchers.
func newRequestFilter(sets caddyhttp.MatcherSets) requestFilter {
	filter := make(requestFilter, 0, len(sets))
	for _, set := range sets {
		var fs filterSet
		for _, matcher := range set {
			switch m := matcher.(type) {
			case *caddyhttp.MatchHost:
				fs.host = append(fs.host, m)
			case *caddyhttp.MatchPath:
				fs.path = append(fs.path, m)
			}
		}
		if fs.host == nil && fs.path == nil {
			return nil
		}
		filter = append(filter, fs)
	}
	return filter
}

// match reports whether the filter lets r through.
func (f requestFilter) match(r *http.Request) bool {
	for i := range f {
		if matchAll(f[i].host, r) && (f[i].path == nil || matchAll(f[i].path, asReceived(r))) {
			return true
		}
	}
	return len(f) == 0
}

// matchAll reports whether all matchers match r. One that can't tell might.
func matchAll(matchers []caddyhttp.RequestMatcherWithError, r *http.Request) bool {
	for _, m := range matchers {
		if matches, err := m.MatchWithError(r); err == nil && !matches {
			return false
		}
	}
	return true
}

// asReceived returns r with the URL that the client sent, which Caddy restores
// before it goes to error routes.
func asReceived(r *http.Request) *http.Request {
	original, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request)
	if !ok {
		return r
	}
	received := *r
	received.URL = new(url.URL)
	*received.URL = *original.URL
	return &received
}
