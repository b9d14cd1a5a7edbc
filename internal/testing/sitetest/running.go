package sitetest

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// http returns the HTTP app of the config that runs.
func (s *Site) http() *caddyhttp.App {
	s.t.Helper()
	app, err := s.Context().AppIfConfigured("http")
	if err != nil {
		s.t.Fatal(err)
	}
	return app.(*caddyhttp.App)
}

// Handlers returns the handlers of this module in the config that runs.
func (s *Site) Handlers() []rule.Module {
	s.t.Helper()
	order, _ := routes.Arounds[rule.Module](s.http())
	return order
}

// Server returns the HTTP server of the site.
func (s *Site) Server() *caddyhttp.Server {
	s.t.Helper()
	return s.http().Servers["srv0"]
}

// BucketAt returns the bucket of a path in the config that runs.
func (s *Site) BucketAt(path string) *rule.Bucket {
	s.t.Helper()
	for _, h := range s.Handlers() {
		for b := range rule.Buckets(h.Compiled().Limits) {
			if b.Path == path {
				return b.Bucket
			}
		}
	}
	s.t.Fatalf("the running config has no limit %s", path)
	return nil
}

// Received returns r with what the context of a request that came over a connection has.
func Received(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{}))
}

// Request is a request as handlers get it.
type Request struct {
	*http.Request
	Replacer *caddy.Replacer
}

// NewRequest returns a request whose client has the address 192.0.2.1.
func NewRequest() *Request {
	r := httptest.NewRequest("GET", "/", nil)
	repl := caddy.NewReplacer()
	return &Request{caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server)), repl}
}

// SetClient gives the request a client's address.
func (r *Request) SetClient(address string) {
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
}

// Queries returns what a store is asked when the request has to pass l.
func (r *Request) Queries(l *rule.Limit) (buckets []limiter.Bucket, err error) {
	q, err := rule.Evaluate(r.Request, []*rule.Limit{l}, time.Time{})
	defer q.Release()
	for _, e := range q.Entries() {
		buckets = append(buckets, e.Query)
	}
	return buckets, err
}

// NewContext returns the context of a config without apps, until the test ends.
func NewContext(t testing.TB) caddy.Context {
	t.Helper()
	parent, err := caddy.ProvisionContext(new(caddy.Config))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(parent)
	t.Cleanup(cancel)
	return ctx
}
