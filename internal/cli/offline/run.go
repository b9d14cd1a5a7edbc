package offline

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Run takes many requests through the routes of a server, one at a time, in less than
// half the time of run.serve: what Caddy makes for each request is made once. It
// is the context of the requests, too.
type Run struct {
	context.Context
	run *run

	// The request to serve next. All but its context may be set.
	Request *http.Request

	fields   *caddy.Replacer // the placeholders of the request itself
	repl     *caddy.Replacer // all of them, with those that handlers set
	vars     map[string]any
	original http.Request
	url      url.URL // of the original request
	log      caddyhttp.ExtraLogFields
}

// NewRun returns a run that calls visit.
func (s *Server) NewRun(visit Visit) *Run {
	r := &Run{
		Context: context.Background(),
		run:     s.newRun(visit),
		fields:  caddy.NewEmptyReplacer(),
		vars:    make(map[string]any),
	}
	blank := &http.Request{Header: make(http.Header), URL: new(url.URL), Body: http.NoBody}
	r.Request = caddyhttp.PrepareRequest(blank, r.fields, r.run, s.server)
	*r.Request = *r.Request.WithContext(r) // r.fields know it by its address
	return r
}

// Value implements context.Context.
func (r *Run) Value(key any) any {
	if key == http.LocalAddrContextKey {
		return r.run.server.local
	}
	name, _ := key.(caddy.CtxKey)
	switch name {
	case caddy.ReplacerCtxKey:
		return r.repl
	case caddyhttp.VarsCtxKey:
		return r.vars
	case caddyhttp.ServerCtxKey:
		return r.run.server.server
	case caddyhttp.OriginalRequestCtxKey:
		return r.original
	case caddyhttp.ExtraLogFieldsCtxKey:
		return &r.log
	}
	return nil
}

// Serve takes r.Request, which arrived at the given time, and which a proxy may have
// sent for a client, through the server's routes. The error is a matcher's.
func (r *Run) Serve(at time.Time, clientIP, userID string, proxied bool) error {
	r.run.now = at
	clear(r.run.groups)
	clear(r.vars)
	clear(r.run.header)
	r.vars[caddyhttp.TrustedProxyVarKey] = proxied
	r.vars[caddyhttp.ClientIPVarKey] = clientIP
	r.Request.Body, r.Request.Form, r.Request.PostForm, r.Request.MultipartForm = http.NoBody, nil, nil, nil
	r.url = *r.Request.URL
	r.original = http.Request{Method: r.Request.Method, RemoteAddr: r.Request.RemoteAddr, RequestURI: r.Request.RequestURI, URL: &r.url}
	r.repl = caddy.NewReplacer()
	r.repl.Map(r.fields.Get)
	if userID != "" {
		r.repl.Set("http.auth.user.id", userID)
	}
	return r.run.server.first.ServeHTTP(r.run, r.Request)
}

// SetResponse has the placeholders of the request that was served last show the header of
// its response, as after reverse_proxy.
func (r *Run) SetResponse(header http.Header) {
	r.run.header = header
	for name, values := range header {
		r.repl.Set("http.reverse_proxy.header."+name, strings.Join(values, ","))
	}
}
