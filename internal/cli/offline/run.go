package offline

import (
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Request is a request as a server received it. Its URL has a path and a query only, its body is not
// nil, and handlers may change it.
type Request struct {
	*http.Request
	UserID string // {http.auth.user.id}

	// Who sent it, and whether through a proxy; empty if the config is to decide by the address
	// that the request came from.
	ClientIP string
	Proxied  bool
}

// Visit is called for each handler of limits that a request reaches, with the request as it is then.
// It returns whether the request is passed on.
type Visit func(h *Handler, r *http.Request) bool

// Run is a request on its way through the routes of a server. It is the response writer that
// handlers see, too; they do not write to it.
type Run struct {
	visit  Visit
	repl   *caddy.Replacer
	header http.Header
}

// Serve takes a request through the server's routes. The error is a matcher's.
func (s *Server) Serve(req Request, visit Visit) (*Run, error) {
	run := &Run{visit: visit, repl: caddy.NewReplacer(), header: make(http.Header)}
	r := caddyhttp.PrepareRequest(req.WithContext(s.context), run.repl, run, s.server)
	if req.ClientIP != "" {
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, req.ClientIP)
		caddyhttp.SetVar(r.Context(), caddyhttp.TrustedProxyVarKey, req.Proxied)
	}
	if req.UserID != "" {
		run.repl.Set("http.auth.user.id", req.UserID)
	}
	return run, s.server.Routes.Compile(end).ServeHTTP(run, r)
}

// end is what comes behind all routes.
var end = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

// SetResponse has the placeholders of the request show the header of its response, as after
// reverse_proxy.
func (run *Run) SetResponse(header http.Header) {
	run.header = header
	for name, values := range header {
		run.repl.Set("http.reverse_proxy.header."+name, strings.Join(values, ","))
	}
}

// Header implements http.ResponseWriter.
func (run *Run) Header() http.Header { return run.header }

// Write implements http.ResponseWriter.
func (*Run) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements http.ResponseWriter.
func (*Run) WriteHeader(int) {}

// Handler is a handler of limits, in the place of the one that decides by them.
type Handler struct {
	*rule.Handler
	Buckets []*Limit // in the order in which requests meet them
	Around  *routes.Around
}

// Compiled implements rule.Module.
func (h *Handler) Compiled() *rule.Handler { return h.Handler }

// ServeHTTP has the limits visited.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	run, ok := w.(*Run)
	if !ok {
		return errors.New("a handler replaced the response writer") // those that do are cut away
	}
	if !run.visit(h, r) {
		return nil
	}
	return next.ServeHTTP(w, r)
}

// replaceHandlers puts Handlers in the place of those that decide.
func (d *Config) replaceHandlers() error {
	order, around := routes.Arounds[rule.Module](d.HTTP)
	for _, module := range order {
		h := &Handler{Handler: module.Compiled(), Around: around[module]}
		for b := range rule.Buckets(h.Limits) {
			h.Buckets = append(h.Buckets, &Limit{b})
		}
		s := d.server(h.Around.Server())
		s.Handlers = append(s.Handlers, h)
		within := h.Around.Routes()
		for _, named := range s.server.NamedRoutes { // of which the others are copies
			within = append(within, named)
		}
		for _, rt := range within {
			for i := range rt.Handlers {
				if rt.Handlers[i] == caddyhttp.MiddlewareHandler(module) {
					rt.Handlers[i] = h
				}
			}
			if err := rt.ProvisionHandlers(d.ctx, nil); err != nil { // Caddy has compiled them
				return err
			}
		}
	}
	return nil
}

// server returns a server of the config by its name.
func (d *Config) server(name string) *Server {
	return d.Servers[slices.IndexFunc(d.Servers, func(s *Server) bool { return s.Name == name })]
}
