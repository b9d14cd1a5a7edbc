package offline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Server is an HTTP server of a Config.
type Server struct {
	Name   string
	server *caddyhttp.Server

	raw    map[string]json.RawMessage // its config as written
	routes []rawRoute
	named  map[string]rawRoute

	Hosts  []string // of its sites; none if it serves any host
	TLS    bool     // whether it serves HTTPS
	listen []caddy.NetworkAddress

	// Its routes, compiled: the first of a chain that a request passes through.
	first    caddyhttp.Handler
	groups   map[string]int                           // of routes, by name
	handlers []*handler                               // all that have limits, in the order of the config
	own      map[caddyhttp.MiddlewareHandler]*Handler // the same; nil for others

	local net.Addr
}

// newServer reads a server's config.
func newServer(name string, raw map[string]json.RawMessage, httpPort, httpsPort int) (*Server, error) {
	s := &Server{Name: name, raw: raw, groups: make(map[string]int), local: new(net.TCPAddr)}
	var listen []string
	for option, into := range map[string]any{"listen": &listen, "routes": &s.routes, "named_routes": &s.named} {
		if raw[option] == nil {
			continue
		}
		if err := json.Unmarshal(raw[option], into); err != nil {
			return nil, fmt.Errorf("%s: %w", option, err)
		}
	}
	for _, address := range listen {
		a, err := caddy.ParseNetworkAddress(caddy.NewReplacer().ReplaceAll(address, ""))
		if err != nil {
			return nil, fmt.Errorf("listen: %w", err)
		}
		s.listen = append(s.listen, a)
		if !a.IsUnixNetwork() && !a.IsFdNetwork() {
			s.local = &net.TCPAddr{IP: net.ParseIP(a.Host), Port: int(a.StartPort)} // a port
		}
	}
	s.findHosts()
	s.TLS = s.servesTLS(httpPort, httpsPort)
	return s, nil
}

// findHosts finds the hosts of the server's sites.
func (s *Server) findHosts() {
	for _, route := range s.routes {
		var sets []struct {
			Host []string `json:"host"`
		}
		_ = json.Unmarshal(route["match"], &sets)
		all := len(sets) == 0
		for _, set := range sets {
			s.Hosts = append(s.Hosts, set.Host...)
			all = all || len(set.Host) == 0
		}
		if all {
			s.Hosts = nil
			return
		}
	}
}

// servesTLS reports whether Caddy would serve HTTPS, by its rules for automatic
// HTTPS.
func (s *Server) servesTLS(httpPort, httpsPort int) bool {
	var auto struct {
		Disabled bool     `json:"disable"`
		Skip     []string `json:"skip"`
	}
	_ = json.Unmarshal(s.raw["automatic_https"], &auto)
	var policies []json.RawMessage
	_ = json.Unmarshal(s.raw["tls_connection_policies"], &policies)
	switch {
	case len(policies) > 0:
		return true
	case auto.Disabled || !slices.ContainsFunc(s.listen, func(a caddy.NetworkAddress) bool { return !listensOn(a, httpPort) }):
		return false
	}
	return slices.ContainsFunc(s.Hosts, func(host string) bool { return !slices.Contains(auto.Skip, host) }) ||
		!slices.ContainsFunc(s.listen, func(a caddy.NetworkAddress) bool { return !listensOn(a, httpsPort) })
}

// listensOn reports whether an address includes a port.
func listensOn(a caddy.NetworkAddress, port int) bool {
	return !a.IsUnixNetwork() && !a.IsFdNetwork() && int(a.StartPort) <= port && port <= int(a.EndPort) // ports
}

// servesHost reports whether the server has a site for a host. It is false for a
// server without hosts, which serves any.
func (s *Server) servesHost(host string) bool {
	_, domain, _ := strings.Cut(host, ".")
	return slices.ContainsFunc(s.Hosts, func(site string) bool {
		return strings.EqualFold(site, host) || strings.EqualFold(site, "*."+domain)
	})
}

// splitHost returns the host and port that requests for a host go to.
func splitHost(hostport string, tls bool) (host string, port int) {
	host, text, err := net.SplitHostPort(hostport)
	if err != nil {
		host, text = strings.Trim(hostport, "[]"), "80"
		if tls {
			text = "443"
		}
	}
	port, _ = strconv.Atoi(text)
	return host, port
}

// accepts reports whether the server listens on the port of requests for a host.
func (s *Server) accepts(hostport string, tls bool) bool {
	_, port := splitHost(hostport, tls)
	return slices.ContainsFunc(s.listen, func(a caddy.NetworkAddress) bool { return listensOn(a, port) })
}

// ServerOf returns the server that handles requests for a host, which may have a
// port. Several may, behind addresses that are not known here: the one that has a
// site for the host is preferred, then the one that listens on the port, then the
// one that serves TLS or not, as the request has it. exact is false if it differs
// from the request in any of them.
func (d *Config) ServerOf(hostport string, tls bool) (found *Server, exact bool) {
	host, _ := splitHost(hostport, tls)
	most := -1
	for _, s := range d.Servers {
		const forTLS, forPort, forAnyHost, forHost = 1, 2, 4, 8
		points := 0
		switch {
		case s.servesHost(host):
			points = forHost
		case len(s.Hosts) == 0:
			points = forAnyHost
		}
		exactHost := points > 0
		onPort := s.accepts(hostport, tls)
		if onPort {
			points += forPort
		}
		if s.TLS == tls {
			points += forTLS
		}
		if points > most {
			most, found, exact = points, s, exactHost && onPort && s.TLS == tls
		}
	}
	return found, exact
}

// handler is one that has limits, or changes requests, in a chain.
type handler struct {
	module caddyhttp.MiddlewareHandler
	limits *Handler // the same; nil if it is another
	next   caddyhttp.Handler
	routes []*route // that contain it, the outermost first
}

// route is a route in a chain.
type route struct {
	*caddyhttp.Route
	index   int // among its siblings
	group   int // -1 without
	handler caddyhttp.Handler
	next    caddyhttp.Handler
}

// compiler compiles the routes of a server into chains. Unlike Caddy's, these are
// complete before the first request, since all handlers are known.
type compiler struct {
	*Server
	within  []*route
	invoked []string // named routes that are being compiled
}

// end is the end of a chain.
var end = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

// compile compiles the server's routes.
func (s *Server) compile() (err error) {
	s.own = make(map[caddyhttp.MiddlewareHandler]*Handler)
	c := &compiler{Server: s}
	s.first, err = c.routes(s.server.Routes, end)
	if err != nil {
		return err
	}
	slices.Reverse(s.handlers)
	return nil
}

// routes compiles routes. The last is followed by next.
func (c *compiler) routes(list caddyhttp.RouteList, next caddyhttp.Handler) (caddyhttp.Handler, error) {
	for i := range slices.Backward(list) {
		rt := &route{Route: &list[i], index: i, group: -1, next: next}
		if rt.Group != "" {
			if _, known := c.groups[rt.Group]; !known {
				c.groups[rt.Group] = len(c.groups)
			}
			rt.group = c.groups[rt.Group]
		}
		after := next
		if rt.Terminal {
			after = end
		}
		c.within = append(c.within, rt)
		for _, h := range slices.Backward(rt.Handlers) {
			var err error
			if after, err = c.handler(h, after); err != nil {
				return nil, err
			}
		}
		c.within = c.within[:len(c.within)-1]
		rt.handler = after
		next = rt
	}
	return next, nil
}

// handler compiles a handler that is followed by next.
func (c *compiler) handler(h caddyhttp.MiddlewareHandler, next caddyhttp.Handler) (caddyhttp.Handler, error) {
	own, known := c.own[h]
	if !known {
		if own = newHandler(h); own != nil {
			c.own[h] = own
		}
	}
	if own != nil {
		found := &handler{module: h, limits: own, next: next, routes: slices.Clone(c.within)}
		c.handlers = append(c.handlers, found)
		return found, nil
	}
	if invoke, ok := h.(*caddyhttp.Invoke); ok && c.server.NamedRoutes[invoke.Name] == nil {
		return nil, fmt.Errorf("invoke: %q is not valid; use the name of a named route", invoke.Name)
	}
	within := routes.In(h, c.server.NamedRoutes)
	if len(within) == 0 {
		return &handler{module: h, next: next}, nil
	}
	nested := within[0] // others were cut away
	if nested.Kind != routes.Named {
		return c.routes(nested.Routes, next)
	}
	if slices.Contains(c.invoked, nested.Name) {
		return nil, fmt.Errorf("invoke: named route %q invokes itself", nested.Name)
	}
	c.invoked = append(c.invoked, nested.Name)
	compiled, err := c.routes(nested.Routes, next)
	c.invoked = c.invoked[:len(c.invoked)-1]
	return compiled, err
}

// run takes requests through the routes of a server, one at a time. It is the
// response writer that handlers see, too; they do not write to it.
type run struct {
	server *Server
	visit  Visit

	// Called for each route that a request passes by, unless it is nil: it does
	// not match, or another route of its group did.
	passedBy func(rt *route, r *http.Request, other bool)

	// Called for each handler of limits instead of visit, unless it is nil.
	inspect func(h *Handler, r *http.Request) (pass bool)

	now    time.Time // when the request arrived, if that is not now
	groups []bool    // that a route was chosen of
	header http.Header
}

// Visit is called for each handler of limits that a request reaches, with the buckets
// that the request has to pass, limits that follow the load too: at least one.
// It must not keep q. If they could not be determined, err says why, and the request
// ends. It returns whether the request is passed on.
type Visit func(h *Handler, q *rule.Request, err error) bool

// newRun returns a run that calls visit.
func (s *Server) newRun(visit Visit) *run {
	return &run{server: s, visit: visit, groups: make([]bool, len(s.groups)), header: make(http.Header)}
}

// request is a request as a server receives it, with what the server would
// have found out about it.
type request struct {
	*http.Request

	clientIP string // empty if it is to be found out by the config
	userID   string // {http.auth.user.id}
}

// localContext is a context with the address that a request was received on.
type localContext struct {
	context.Context
	local net.Addr
}

// Value implements context.Context.
func (c localContext) Value(key any) any {
	if key == http.LocalAddrContextKey {
		return c.local
	}
	return c.Context.Value(key)
}

// serve takes a request through the server's routes. Its URL has a path and a
// query only, as in servers, and its body is not nil. It may be changed. The error
// is a route matcher's.
func (run *run) serve(req request) error {
	clear(run.groups)
	repl := caddy.NewReplacer()
	r := req.Request.WithContext(localContext{req.Context(), run.server.local})
	r = caddyhttp.PrepareRequest(r, repl, run, run.server.server)
	if req.clientIP != "" {
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, req.clientIP)
	}
	if req.userID != "" {
		repl.Set("http.auth.user.id", req.userID)
	}
	return run.server.first.ServeHTTP(run, r)
}

// ServeHTTP runs the handlers of the route if r matches it.
func (rt *route) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	run, ok := w.(*run)
	if !ok {
		return errWrapped
	}
	other := rt.group >= 0 && run.groups[rt.group]
	matches := !other
	if matches && len(rt.MatcherSets) > 0 {
		var err error
		if matches, err = rt.MatcherSets.AnyMatchWithError(r); err != nil {
			return err
		}
	}
	if !matches {
		if run.passedBy != nil {
			run.passedBy(rt, r, other)
		}
		return rt.next.ServeHTTP(w, r)
	}
	if rt.group >= 0 {
		run.groups[rt.group] = true
	}
	return rt.handler.ServeHTTP(w, r)
}

// errWrapped is the error for a handler that replaced the response writer: those
// that do are not part of a Config.
var errWrapped = errors.New("a handler replaced the response writer")

// ServeHTTP runs the handler.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	if h.limits == nil {
		return h.module.ServeHTTP(w, r, h.next)
	}
	run, ok := w.(*run)
	if !ok {
		return errWrapped
	}
	if !run.meet(h.limits, r) {
		return nil
	}
	return h.next.ServeHTTP(w, r)
}

// meet visits the limits of h that apply to r. It returns whether r is passed on.
func (run *run) meet(h *Handler, r *http.Request) bool {
	if run.inspect != nil {
		return run.inspect(h, r)
	}
	q, err := rule.Evaluate(r, h.Limits, run.now)
	defer q.Release()
	if err != nil {
		run.visit(h, q, err)
		return false
	}
	return len(q.Entries())+len(q.Loads()) == 0 || run.visit(h, q, nil)
}

// Header implements http.ResponseWriter.
func (run *run) Header() http.Header { return run.header }

// Write implements http.ResponseWriter.
func (*run) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements http.ResponseWriter.
func (*run) WriteHeader(int) {}

// OnlyHost returns the host of a config that has a single one, or "".
func (d *Config) OnlyHost() string {
	var hosts []string
	for _, s := range d.Servers {
		hosts = append(hosts, s.Hosts...)
	}
	slices.Sort(hosts)
	if hosts = slices.Compact(hosts); len(hosts) != 1 || strings.Contains(hosts[0], "*") {
		return ""
	}
	return hosts[0]
}

// HasSite reports whether a site of s has the host, as its matchers decide.
func (s *Server) HasSite(host string) bool {
	r := &http.Request{Host: host}
	r = r.WithContext(context.WithValue(context.Background(), caddy.ReplacerCtxKey, caddy.NewReplacer()))
	return len(s.Hosts) == 0 || slices.ContainsFunc(s.Hosts, func(site string) bool {
		m := caddyhttp.MatchHost{site}
		if err := m.Provision(caddy.Context{}); err != nil {
			return false // Caddy would not have loaded it
		}
		matches, _ := m.MatchWithError(r) // there are no errors
		return matches
	})
}

// headersRead matches what reads header fields in routes in JSON: the matchers, their
// functions in expressions, and placeholders. keysOfLimits matches the keys of limits.
var (
	headersRead  = regexp.MustCompile(`"header(_regexp)?":|\bheader(_regexp)?\(|\{(http\.request\.)?(header|cookie)\.`)
	keysOfLimits = regexp.MustCompile(`"key":"[^"]*"`)
)

// ReadsHeaders reports whether anything on the way to the limits of s reads header
// fields, besides their keys.
func (s *Server) ReadsHeaders() bool {
	return headersRead.Match(keysOfLimits.ReplaceAll(marshal([]any{s.routes, s.named}), nil))
}

// Limits returns the limits of all handlers of the server, in the order of the config.
func (s *Server) Limits() (limits []*Limit) {
	for _, h := range s.handlers {
		limits = append(limits, h.limits.buckets...)
	}
	return limits
}
