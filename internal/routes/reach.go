package routes

import (
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/fileserver"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Obstacle is why no request gets to a handler, or none that its matchers match.
type Obstacle struct {
	Kind ObstacleKind
	By   string // the directive that it is
	Path string // of the matcher; empty for Answered
	To   string // the path that requests have instead, if it is known
}

// ObstacleKind is the kind of an obstacle.
type ObstacleKind uint8

// The kinds of obstacles.
const (
	Answered     ObstacleKind = iota // By has answered all requests
	AnsweredPath                     // By has answered those with the path
	OtherBlock                       // another handle block takes those with the path
	Stripped                         // the path has a prefix that was removed
	Rewritten                        // the path is another one since By
	unmatched                        // requests with the path took another route
)

// obstacle returns what no request has passed on the way to a handler, if anything.
func (p *path) obstacle() *Obstacle {
	if p.ended != "" {
		return &Obstacle{Kind: Answered, By: p.ended}
	}
	return p.blocked
}

// Obstacle returns what keeps all requests from the handler, or nil if nothing does that is
// known.
func (a *Around) Obstacle() *Obstacle {
	return a.first(func(w way) *Obstacle { return w.obstacle })
}

// ObstacleTo returns why no request that reaches the handler matches matchers, or nil if some
// may.
func (a *Around) ObstacleTo(sets caddyhttp.MatcherSets) *Obstacle {
	return a.first(func(w way) *Obstacle { return w.paths.obstacle(sets) })
}

// first returns the first obstacle, if there is one on each way.
func (a *Around) first(on func(way) *Obstacle) (first *Obstacle) {
	for _, w := range slices.Backward(a.ways) {
		if first = on(w); first == nil {
			return nil
		}
	}
	return first
}

// Matchers returns the matchers of the routes that the handler is in.
func (a *Around) Matchers() (all []caddyhttp.MatcherSets) {
	for _, w := range a.ways {
		all = append(all, w.matchers)
	}
	return all
}

// answers returns the directive of a handler that answers each request, or "".
func answers(h caddyhttp.MiddlewareHandler) string {
	switch h := h.(type) {
	case *caddyhttp.StaticResponse:
		switch code := string(h.StatusCode); {
		case h.Abort:
			return "abort"
		case h.Headers.Get("Location") != "":
			return "redir"
		case code == "" || len(code) == 3 && code[0] != '1':
			return "respond"
		}
		return "" // early hints, or what depends on the request
	case *caddyhttp.StaticError:
		return "error"
	case *fileserver.FileServer:
		if !h.PassThru {
			return "file_server"
		}
	case *reverseproxy.Handler:
		if len(h.HandleResponse) == 0 {
			return "reverse_proxy"
		}
	}
	if m, ok := h.(caddy.Module); ok && m.CaddyModule().ID == "http.handlers.metrics" {
		return "metrics"
	}
	return ""
}

// group is a group of routes, of which a request takes the first that matches, or a single
// route.
type group struct {
	to      path // to the routes that are left
	last    int  // the index of the last one
	several bool // whether there were any before
	goOn    bool // whether requests go on behind those
}

// at returns the path to the route with an index, of which p is the one to the list's.
func (g *group) at(i int, p path) path {
	to := g.to
	if to.ended = p.ended; g.last != i-1 {
		to.paths = paths{} // routes of no group in between may have changed them
	}
	g.last = i
	return to
}

// leave returns the path behind a route, given those to its list's, to it and behind what is
// in it.
func (g *group) leave(rt *caddyhttp.Route, p, to, behind path) path {
	answered := behind.ended != "" && to.ended == ""
	all := len(rt.MatcherSets) == 0
	taken, _ := onlyPaths(rt.MatcherSets)
	others := p.paths // of requests that do not match
	switch {
	case answered && all && !g.goOn:
		p.ended = behind.ended
	case answered && !g.goOn:
		p.paths = others.without(taken, Obstacle{Kind: AnsweredPath, By: behind.ended})
	case answered:
	case all && !g.several:
		p.paths = behind.paths
	default:
		p.paths = both(others.without(taken, Obstacle{Kind: unmatched}), behind.paths)
		if fallback := fallbackFor(rt); fallback != "" {
			p.paths.fallback = fallback
		}
	}
	g.several, g.goOn = true, g.goOn || !answered
	g.to.paths = to.paths.without(taken, Obstacle{Kind: OtherBlock})
	return p
}
