package routes

import (
	"maps"
	"net/textproto"
	"reflect"
	"regexp/syntax"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/caddyauth"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/encode"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	caddymap "github.com/caddyserver/caddy/v2/modules/caddyhttp/map"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// Around knows which placeholders are set before a handler, and which behind it, by those
// that requests may pass on their way, and what keeps them from the handler.
type Around struct {
	server         string
	before, behind []setter
	mapped         map[string]bool // by map, anywhere in the config
	captures       *captures       // by matchers, anywhere in the config; nil if they are not known
	certain        []*Around       // of handlers of its type that requests have passed on some way to it
	ways           []way           // on which requests reach it, several to a named route
	answers        []answer        // what may answer them behind it
}

// way is one on which requests reach a handler.
type way struct {
	obstacle *Obstacle             // which none of them passes; nil if some do
	matchers caddyhttp.MatcherSets // of the route that the handler is in
	steps    []step
	paths    paths
}

// step is a route that requests take on their way.
type step struct {
	route   *caddyhttp.Route
	changes int // how many handlers have changed the path before
}

// setter is a handler that sets placeholders.
type setter struct {
	directive string
	sets      func(name string) bool // nil for a plugin's handler, which may set any

	// The placeholders that a value which it sets is made from; nil without any.
	sources func(name string) []string

	// Whether it takes the place of what it sets, rather than of what an upstream is to see.
	replaces bool

	// What clients can't choose behind it, and whether only some requests pass it.
	owns        func(name string) bool
	conditional bool

	authenticates bool
}

// Server returns the name of the server that has the handler.
func (a *Around) Server() string { return a.server }

// Sets reports whether a handler of Caddy sets the placeholder before, or map does anywhere.
func (a *Around) Sets(name string) bool {
	return a.mapped[name] && a.SetLater(name) == "" || setBy(a.before, name)
}

// setBy reports whether one of the setters is known to set a placeholder.
func setBy(all []setter, name string) bool {
	return slices.ContainsFunc(all, func(s setter) bool { return s.sets != nil && s.sets(name) })
}

// Plugins reports whether handlers of plugins are passed before, which may set anything.
func (a *Around) Plugins() bool {
	return slices.ContainsFunc(a.before, func(s setter) bool { return s.sets == nil })
}

// SetLater returns the directive that sets a placeholder behind the handler, or "" if none does
// or one before may.
func (a *Around) SetLater(name string) string {
	return a.setBehind(name, func(s setter) bool { return s.replaces })
}

// MarkedLater is SetLater for a placeholder that a matcher reads: it may also be a constant,
// which marks some of the requests.
func (a *Around) MarkedLater(name string) string {
	return a.setBehind(name, func(s setter) bool { return s.replaces || s.conditional })
}

// setBehind returns the first directive behind the handler that sets a placeholder and meets a
// condition, or "" if none does or one before may set it.
func (a *Around) setBehind(name string, meets func(setter) bool) string {
	if a.Plugins() || setBy(a.before, name) {
		return ""
	}
	for _, s := range a.behind {
		if s.sets != nil && s.sets(name) && meets(s) {
			return s.directive
		}
	}
	return ""
}

// After reports whether there is a way to the handler on which all requests have passed the handler of
// other, which may be the same.
func (a *Around) After(other *Around) bool { return slices.Contains(a.certain, other) }

// Owns reports whether clients can't choose the value of a placeholder, as a handler before
// removes or replaces what they send.
func (a *Around) Owns(name string) (owned bool) {
	for _, s := range a.before {
		switch {
		case s.owns != nil && s.owns(name):
			owned = owned || !s.conditional
		case s.sets != nil && s.sets(name):
			owned = false
		}
	}
	return owned
}

// Sources returns the placeholders that handlers before make the value of a placeholder from.
func (a *Around) Sources(name string) (names []string) {
	for _, s := range a.before {
		if s.sets == nil || !s.sets(name) {
			continue
		}
		if !s.conditional {
			names = nil // it takes the place of others
		}
		if s.sources != nil {
			names = append(names, s.sources(name)...)
		}
	}
	return names
}

// Authentication returns the directive that authenticates clients before the handler, or "".
func (a *Around) Authentication() string {
	i := slices.IndexFunc(a.before, func(s setter) bool { return s.authenticates })
	if i < 0 {
		return ""
	}
	return a.before[i].directive
}

// Encoded reports whether encode compresses what is written to the handler's responses.
func (a *Around) Encoded() bool {
	return slices.ContainsFunc(a.before, func(s setter) bool { return s.directive == "encode" })
}

// Arounds returns the handlers of type H of an HTTP app in the order of the config, and what is
// around each. Those in routes of other plugins' handlers are not found.
func Arounds[H interface {
	caddyhttp.MiddlewareHandler
	comparable
}](app *caddyhttp.App) (order []H, around map[H]*Around) {
	around = make(map[H]*Around)
	if app == nil {
		return nil, around
	}
	w := walker{mapped: make(map[string]bool), captures: &captures{names: make(map[string]bool)}}
	w.own = func(h caddyhttp.MiddlewareHandler) *Around {
		own, ok := h.(H)
		if !ok {
			return nil
		}
		if around[own] == nil {
			order, around[own] = append(order, own), &Around{server: w.server, mapped: w.mapped, captures: w.captures}
		}
		return around[own]
	}
	for _, name := range slices.Sorted(maps.Keys(app.Servers)) {
		srv := app.Servers[name]
		w.server, w.named = name, srv.NamedRoutes
		w.list(srv.Routes, path{})
		if srv.Errors != nil {
			w.list(srv.Errors.Routes, path{before: []setter{{}}}) // any may have been passed
		}
	}
	return order, around
}

// path is what requests have passed: setters, and the handlers that are looked for; and what
// is known of those that have come so far.
type path struct {
	before  []setter
	passed  []passed
	certain []*Around // of these, those that all requests have passed
	steps   []step    // the routes that they are in
	changes int       // how many handlers have changed the path
	removed []string  // response fields that the directive header removes

	ended   string    // the directive that has answered all of them; "" if some go on
	blocked *Obstacle // that none passes to routes within; nil if some do
	paths   paths
}

// passed is a handler that requests have passed.
type passed struct {
	*Around
	changes, removed int // how many there were before
}

// walker walks over routes.
type walker struct {
	server   string
	named    map[string]*caddyhttp.Route
	own      func(caddyhttp.MiddlewareHandler) *Around // nil for others
	mapped   map[string]bool
	captures *captures
	proxies  int      // within whose routes it is
	invoked  []string // named routes that it is in

	matchers caddyhttp.MatcherSets // of the route that it is in
}

// list walks over routes, and returns the path behind them.
func (w *walker) list(list caddyhttp.RouteList, p path) path {
	groups := make(map[string]*group)
	for i := range list {
		rt := &list[i]
		w.captures.note(rt.MatcherSets)
		g := groups[rt.Group]
		if rt.Group == "" || g == nil {
			g = &group{to: p, last: i - 1}
			groups[rt.Group] = g
		}
		to := g.at(i, p)
		inside := to
		if o := to.paths.obstacle(rt.MatcherSets); o != nil && to.blocked == nil {
			inside.blocked = o
		}
		inside.steps = append(slices.Clip(to.steps), step{rt, to.changes})
		within := w.matchers
		behind := inside
		for _, h := range rt.Handlers {
			w.matchers = rt.MatcherSets
			behind = w.handler(h, behind)
		}
		w.matchers = within
		if rt.Terminal && behind.ended == "" {
			behind.ended = "a terminal route"
		}
		if !rt.Terminal {
			passed := slices.Clone(behind.before[len(to.before):])
			for j := range passed {
				passed[j].conditional = passed[j].conditional || len(rt.MatcherSets) > 0
			}
			p.before = append(slices.Clip(p.before), passed...)
			p.passed = append(slices.Clip(p.passed), behind.passed[len(to.passed):]...)
			p.changes = max(p.changes, behind.changes)
			if rt.Group == "" && len(rt.MatcherSets) == 0 {
				p.certain, p.removed = behind.certain, behind.removed
			}
		}
		p = g.leave(rt, p, to, behind)
	}
	return p
}

// handler walks over a handler, and returns the path behind it.
func (w *walker) handler(h caddyhttp.MiddlewareHandler, p path) path {
	if own := w.own(h); own != nil {
		own.before = append(own.before, p.before...)
		own.certain = append(own.certain, p.certain...)
		own.ways = append(own.ways, way{p.obstacle(), w.matchers, p.steps, p.paths})
		p.passed = append(slices.Clip(p.passed), passed{own, p.changes, len(p.removed)})
		p.certain = append(slices.Clip(p.certain), own)
		return p
	}
	for _, s := range w.settersIn(h) {
		s.conditional = s.conditional || len(w.matchers) > 0
		for _, a := range p.passed {
			a.behind = append(a.behind, s)
		}
		s.conditional = false // for what is in the same route
		p.before = append(slices.Clip(p.before), s)
	}
	p.pass(h)
	if by := answers(h); by != "" && p.ended == "" {
		p.ended = by
	}
	if _, changes := h.(*rewrite.Rewrite); changes {
		p.changes++
	}
	p.paths = p.paths.behind(h)
	return w.nested(h, p)
}

// nested walks over the routes of a handler, and returns the path behind it.
func (w *walker) nested(h caddyhttp.MiddlewareHandler, p path) path {
	nested := In(h, w.named)
	goesOn := slices.ContainsFunc(nested, func(n Nested) bool { return n.Kind == OnError || n.Kind == OnResponse })
	before := p
	for _, n := range nested {
		_, isProxy := h.(*reverseproxy.Handler)
		switch {
		case n.Kind == Named && slices.Contains(w.invoked, n.Name):
		case n.Kind == Named:
			w.invoked = append(w.invoked, n.Name)
			p = w.list(n.Routes, p)
			w.invoked = w.invoked[:len(w.invoked)-1]
		case n.Kind == Within:
			p = w.list(n.Routes, p)
		case isProxy: // which passes the request on behind them, as forward_auth does
			w.proxies++
			behind := w.list(n.Routes, p)
			behind.certain = p.certain // the response decides whether they are passed
			p = behind
			w.proxies--
		default: // when any may have been passed
			w.list(n.Routes, path{before: []setter{{}}})
		}
	}
	if goesOn { // where error routes or those for responses do not answer
		if p.ended = before.ended; len(nested) > 1 {
			p.paths = paths{}
		}
	}
	return p
}

// settersIn returns what h alone sets.
func (w *walker) settersIn(h caddyhttp.MiddlewareHandler) (found []setter) {
	switch h := h.(type) {
	case *caddyauth.Authentication:
		const prefix = "http.auth.user."
		s := setter{directive: "basic_auth", replaces: true, authenticates: true, sets: func(name string) bool { return strings.HasPrefix(name, prefix) }}
		if _, basic := h.Providers["http_basic"]; !basic || len(h.Providers) > 1 {
			s.directive = "the authentication"
			found = append(found, setter{}) // providers of plugins may set other things too
		}
		return append(found, s)
	case *caddyhttp.VarsMiddleware:
		for name := range *h {
			if strings.Contains(name, "{") { // which it is depends on the request
				return []setter{{}}
			}
		}
		return []setter{{directive: "vars", replaces: true, sets: func(name string) bool {
			_, set := (*h)[strings.TrimPrefix(name, "http.vars.")]
			return set && (strings.HasPrefix(name, "http.vars.") || name == "http.auth.user.id")
		}, sources: func(name string) []string {
			return placeholder.In(caddy.ToString((*h)[strings.TrimPrefix(name, "http.vars.")]))
		}}}
	case *encode.Encode:
		return []setter{{directive: "encode", sets: func(string) bool { return false }}}
	case *caddymap.Handler:
		for _, name := range h.Destinations {
			w.mapped[name] = true
		}
		return []setter{{directive: "map", replaces: true, sets: func(name string) bool { return slices.Contains(h.Destinations, name) },
			sources: func(name string) []string { return mappedFrom(h, slices.Index(h.Destinations, name)) }}}
	case *headers.Handler:
		if h.Request == nil {
			return nil
		}
		return w.fieldsSet(h.Request)
	}
	if ofPlugin(h) {
		return []setter{{}}
	}
	return nil
}

// ofPlugin reports whether a handler is not Caddy's.
func ofPlugin(h caddyhttp.MiddlewareHandler) bool {
	of := reflect.Indirect(reflect.ValueOf(h))
	return of.IsValid() && !strings.HasPrefix(of.Type().PkgPath(), "github.com/caddyserver/caddy/v2/")
}

// mappedFrom returns the placeholders that a map makes the value of a destination from. One that
// only selects a constant is not one of them.
func mappedFrom(h *caddymap.Handler, destination int) (names []string) {
	for _, m := range h.Mappings {
		if destination >= len(m.Outputs) || m.Outputs[destination] == nil {
			continue
		}
		switch output := caddy.ToString(m.Outputs[destination]); {
		case m.InputRegexp == "":
			names = append(names, placeholder.In(output)...)
		case strings.Contains(output, "$") && capturesAnything(m.InputRegexp):
			names = append(names, placeholder.In(h.Source)...)
		}
	}
	if destination < len(h.Defaults) {
		names = append(names, placeholder.In(h.Defaults[destination])...)
	}
	return names
}

// capturesAnything reports whether a regular expression may capture arbitrarily many texts,
// rather than one of a few words.
func capturesAnything(expression string) bool {
	parsed, err := syntax.Parse(expression, syntax.Perl)
	return err == nil && hasRepetition(parsed)
}

// hasRepetition reports whether any part of a regular expression repeats.
func hasRepetition(re *syntax.Regexp) bool {
	return re.Op == syntax.OpStar || re.Op == syntax.OpPlus || re.Op == syntax.OpRepeat || slices.ContainsFunc(re.Sub, hasRepetition)
}

// fieldsSet returns the header fields that are set, of which each is a setter: one that is set
// to a constant, as is done for an upstream, says nothing of the client.
func (w *walker) fieldsSet(ops *headers.HeaderOps) (found []setter) {
	directive := "request_header"
	if w.proxies > 0 {
		directive = "forward_auth"
	}
	for _, field := range ops.Delete {
		is := named(field)
		found = append(found, setter{directive: directive, sets: func(string) bool { return false }, owns: is})
	}
	for i, fields := range []map[string][]string{ops.Set, ops.Add} {
		for field, values := range fields {
			is := named(field)
			s := setter{directive: directive, sets: is, sources: func(string) (names []string) {
				for _, v := range values {
					names = append(names, placeholder.In(v)...)
				}
				return names
			}}
			dynamic := slices.ContainsFunc(values, func(v string) bool {
				return strings.Contains(v, "{http.") && !strings.Contains(v, "{http.request.header."+textproto.CanonicalMIMEHeaderKey(field)+"}")
			})
			// These are the client's own where Caddy exchanges them for others.
			s.replaces = dynamic && !is("http.request.header.Authorization") && !is("http.request.header.Cookie")
			if adds := i == 1; !adds && !slices.ContainsFunc(values, placeholder.AnyChosen) {
				s.owns = is
			}
			found = append(found, s)
		}
	}
	return found
}

// named returns whether a placeholder is a header field.
func named(field string) func(name string) bool {
	own := "http.request.header." + textproto.CanonicalMIMEHeaderKey(field)
	return func(name string) bool { return name == own }
}
