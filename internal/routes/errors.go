package routes

import (
	"net/http"
	"net/url"
	"slices"
	"sync"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// destination is where the errors that a handler returns go to, a set of:
type destination uint8

const (
	toNone     destination = 1 << iota // from error routes of the server, which responds with the status of the first error
	toServer                           // to the error routes of the server that match the request
	toSubroute                         // to the error routes of a subroute
)

// destinations are where the errors go of requests that reach a handler normally
// and of those that reach it in error routes; 0 if none do.
type destinations struct{ normal, inErrorRoute destination }

// union returns the destinations of a handler that requests reach in both ways.
func (o destinations) union(other destinations) destinations {
	return destinations{o.normal | other.normal, o.inErrorRoute | other.inErrorRoute}
}

// ErrorRoutes finds out which error routes may handle the errors that one handler
// returns. It is safe for concurrent use.
type ErrorRoutes struct {
	servers sync.Map // *caddyhttp.Server to *errorRoutes
}

// MaySee reports whether error routes might handle an error with the given status that
// h, always the same, returns for r.
func (e *ErrorRoutes) MaySee(h caddyhttp.MiddlewareHandler, r *http.Request, status int) bool {
	srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		return true
	}
	found, ok := e.servers.Load(srv)
	if !ok {
		found, _ = e.servers.LoadOrStore(srv, findErrorRoutes(srv, h))
	}
	return found.(*errorRoutes).maySee(r, status)
}

// errorRoutes are the error routes of a server that may handle the errors of one
// handler.
type errorRoutes struct {
	// Several, as named routes may be invoked from several places. None if the
	// handler was not found: handlers of other plugins may contain routes.
	destinations

	hasSubroutes bool         // whether any subroute has error routes
	filters      []errorRoute // one for each error route of the server
}

// errorRoute is what is known of one beforehand.
type errorRoute struct {
	requests requestFilter
	statuses *statuses
}

// findErrorRoutes returns the error routes of srv that may handle the errors of h.
func findErrorRoutes(srv *caddyhttp.Server, h caddyhttp.MiddlewareHandler) *errorRoutes {
	s := errorRoutesSearch{server: srv, handler: h, invoked: map[invocation]destinations{}}
	s.routes(srv.Routes, destinations{normal: toServer})
	if srv.Errors != nil {
		s.routes(srv.Errors.Routes, destinations{inErrorRoute: toNone})
		for i := range srv.Errors.Routes {
			route := &srv.Errors.Routes[i]
			s.found.filters = append(s.found.filters, errorRoute{newRequestFilter(route.MatcherSets), newStatuses(route)})
		}
	}
	return &s.found
}

// errorRoutesSearch looks for a handler in the routes of a server and tracks where
// errors go. That does not only depend on the routes that contain a handler: a
// subroute also invokes the handlers after it, and handles their errors.
type errorRoutesSearch struct {
	server  *caddyhttp.Server
	handler caddyhttp.MiddlewareHandler
	found   errorRoutes
	invoked map[invocation]destinations // after named routes that were searched
}

// invocation is a named route and the destinations of its errors.
type invocation struct {
	name string
	destinations
}

// routes searches routes whose errors go to dest, and returns the destinations of
// the errors of handlers after them.
func (s *errorRoutesSearch) routes(list caddyhttp.RouteList, dest destinations) destinations {
	for i := range list {
		after := dest
		for _, handler := range list[i].Handlers {
			after = s.handle(handler, after)
		}
		if !list[i].Terminal {
			dest = dest.union(after) // as it may not match
		}
	}
	return dest
}

// handle searches a handler like routes does routes.
func (s *errorRoutesSearch) handle(h caddyhttp.MiddlewareHandler, dest destinations) destinations {
	if h == s.handler {
		s.found.destinations = s.found.union(dest)
	}
	nested := In(h, s.server.NamedRoutes)
	inner := dest // of the routes within it
	if slices.ContainsFunc(nested, func(n Nested) bool { return n.Kind == OnError }) {
		s.found.hasSubroutes = true
		inner = destinations{}
		if dest.normal != 0 {
			inner.normal = toSubroute
		}
		if dest.inErrorRoute != 0 {
			inner.inErrorRoute = toSubroute
		}
	}
	after := dest
	for _, n := range nested {
		switch n.Kind {
		case Within:
			after = s.routes(n.Routes, inner)
		case OnError:
			after = after.union(s.routes(n.Routes, destinations{inErrorRoute: dest.normal | dest.inErrorRoute}))
		case Named:
			at := invocation{n.Name, dest}
			if _, known := s.invoked[at]; !known {
				s.invoked[at] = dest // in case it invokes itself
				s.invoked[at] = s.routes(n.Routes, dest)
			}
			after = after.union(s.invoked[at])
		case OnResponse:
			after = after.union(s.routes(n.Routes, dest))
		}
	}
	return after
}

// maySee reports whether error routes may handle an error with the given status
// that is returned for r. If that is unknown, it is true only if returning the
// error is harmless: in error routes of the server, Caddy would respond with the
// status of the first error, and it would log an unhandled error of status 500 or
// above for each request, with the request's header fields.
func (e *errorRoutes) maySee(r *http.Request, status int) bool {
	found := e.destinations != destinations{}
	if found && !e.hasSubroutes && len(e.filters) == 0 {
		return false
	}
	dest := e.normal
	if r.Context().Value(caddyhttp.ErrorCtxKey) != nil {
		if dest = e.inErrorRoute; dest == 0 {
			return false
		}
	}
	switch {
	case dest&toNone != 0:
		return false
	case dest == toSubroute || e.matchFilters(r, status):
		return true
	case dest == toServer:
		return false
	}
	return status < http.StatusInternalServerError
}

// matchFilters reports whether the server has error routes for the site of r that may handle
// the status.
func (e *errorRoutes) matchFilters(r *http.Request, status int) bool {
	for i := range e.filters {
		if f := &e.filters[i]; f.statuses.has(status) && f.requests.match(r) {
			return true
		}
	}
	return false
}

// requestFilter is the part of a route's matchers that does not depend on the
// error: the hosts and paths that separate the sites of a Caddyfile. It is empty
// if all requests may match.
type requestFilter []filterSet

// filterSet is a set of matchers that must all match.
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

// match reports whether r may match the route.
func (f requestFilter) match(r *http.Request) bool {
	for i := range f {
		if matchAll(f[i].host, r) && (f[i].path == nil || matchAll(f[i].path, asReceived(r))) {
			return true
		}
	}
	return len(f) == 0
}

// matchAll reports whether all matchers match r. A matcher that fails counts as
// a match.
func matchAll(matchers []caddyhttp.RequestMatcherWithError, r *http.Request) bool {
	for _, m := range matchers {
		if matches, err := m.MatchWithError(r); err == nil && !matches {
			return false
		}
	}
	return true
}

// asReceived returns r with the URL that the client sent, as Caddy restores it for
// error routes.
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
