package bench

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
)

// BenchmarkHandler serves requests through the handler, with buckets in this
// process. The baseline, x-pass, invokes the next handler alone; both create
// Caddy's part of the request anew each time. allocs-more/op is the number of
// allocations that the handler adds. A denial is written by the handler or, in a
// server with error routes, returned as an error; those routes are not run.
func BenchmarkHandler(b *testing.B) {
	for _, c := range []struct{ name, config string }{
		{"allowed", `{"limits":[{"size":1000000000,"drip_rate":"1ms"}]}`},
		{"ratelimit", `{"headers":["ratelimit-11"],"limits":[{"size":1000000000,"drip_rate":"1ms"}]}`},
		{"denied", `{"limits":[{"size":1,"drip_rate":"24h"}]}`},
		{errorRoutes, `{"limits":[{"size":1,"drip_rate":"24h"}]}`},
		{"header", `{"limits":[{"key":"{http.request.header.X-Key}","size":1000000000,"drip_rate":"1ms"}]}`},
		{"three", `{"limits":[{"name":"a","size":1000000000,"drip_rate":"1ms","limits":[` +
			`{"name":"b","size":1000000000,"drip_rate":"1ms"},{"name":"c","key":"all","size":1000000000,"drip_rate":"1ms"}]}]}`},
	} {
		b.Run(c.name, func(b *testing.B) {
			ctx, err := caddy.ProvisionContext(&caddy.Config{AppsRaw: caddy.ModuleMap{"rate_limit": json.RawMessage(`{}`)}})
			if err != nil {
				b.Fatal(err)
			}
			h := new(ratelimit.Handler)
			if err := json.Unmarshal([]byte(c.config), h); err != nil {
				b.Fatal(err)
			}
			if err := h.Provision(ctx); err != nil {
				b.Fatal(err)
			}
			pass := func(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
				return next.ServeHTTP(w, r)
			}
			server := &caddyhttp.Server{Routes: caddyhttp.RouteList{{Handlers: []caddyhttp.MiddlewareHandler{h}}}}
			if c.name == errorRoutes {
				server.Errors = &caddyhttp.HTTPErrorConfig{Routes: make(caddyhttp.RouteList, 1)}
			}
			with, without := serve(server, h.ServeHTTP)(), serve(server, pass)()
			more := testing.AllocsPerRun(1000, func() { with(0) }) - testing.AllocsPerRun(1000, func() { without(0) })
			comparison{
				task:      serve(server, h.ServeHTTP),
				baselines: []baseline{{"pass", serve(server, pass)}},
				callers:   1,
			}.run(b)
			b.ReportMetric(more, "allocs-more/op")
		})
	}
}

// errorRoutes is the benchmark of a server that has error routes.
const errorRoutes = "denied-error"

// serve returns a task that serves a request of the server.
func serve(server *caddyhttp.Server, handle func(http.ResponseWriter, *http.Request, caddyhttp.Handler) error) task {
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		return nil
	})
	// A request without a connection would not be limited.
	ctx := context.WithValue(context.Background(), http.LocalAddrContextKey, new(net.TCPAddr))
	return func() func(int) {
		w := nowhere{header: make(http.Header)}
		request := httptest.NewRequest(http.MethodGet, "/", nil)
		request.Header.Set("X-Key", "alice")
		return func(int) {
			clear(w.header)
			repl := caddy.NewReplacer()
			_ = handle(w, caddyhttp.PrepareRequest(request.WithContext(ctx), repl, w, server), next)
		}
	}
}

// nowhere is a response writer that discards everything.
type nowhere struct{ header http.Header }

func (w nowhere) Header() http.Header       { return w.header }
func (nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (nowhere) WriteHeader(int)             {}
