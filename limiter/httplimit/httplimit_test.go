package httplimit

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// hours is longer than any test: nothing leaves a bucket meanwhile.
const hours = 100 * time.Hour

// mustNew returns a middleware.
func mustNew(t *testing.T, opt Options) func(http.Handler) http.Handler {
	t.Helper()
	limit, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	return limit
}

// start serves h by HTTP/1.1 or HTTP/2.
func start(t *testing.T, proto string, h http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.EnableHTTP2 = proto == "HTTP/2.0"
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// protocols are those that servers are tested with.
var protocols = []string{"HTTP/1.1", "HTTP/2.0"}

// response is what a client sees of a response.
type response struct {
	status       int
	body         string
	policy       string
	limit        string
	retry, cache string
}

// get makes a request of a client with the given key.
func get(t *testing.T, server *httptest.Server, key string) response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Key", key)
	res, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	fields := func(name string) string { return strings.Join(res.Header.Values(name), " | ") }
	return response{res.StatusCode, string(body), fields("RateLimit-Policy"), fields("RateLimit"), fields("Retry-After"), fields("Cache-Control")}
}

// byKey is the key of get.
func byKey(r *http.Request) string { return r.Header.Get("X-Key") }

// hello is a handler that is limited.
var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })

// TestResponses guards what clients see of requests that are admitted and denied, by both
// protocols, with one limit, with several, and with a middleware within another.
func TestResponses(t *testing.T) {
	hourly := Limit{Name: "hourly", Limit: limiter.FixedWindow(2, time.Hour), Key: byKey}
	at := []Limit{{Limit: limiter.Concurrency(9)}, hourly}
	const denial = "Too many requests. Retry after 3600 s.\n"
	for _, proto := range protocols {
		t.Run(proto, func(t *testing.T) {
			for _, tc := range []struct {
				name  string
				setUp func(store limiter.Store) http.Handler
				want  []response
			}{
				{"one", func(store limiter.Store) http.Handler {
					return mustNew(t, Options{Store: store, Limits: []Limit{hourly}})(hello)
				}, []response{
					{200, "hello", `"hourly";q=2;w=3600`, `"hourly";r=1;t=3600`, "", ""},
					{200, "hello", `"hourly";q=2;w=3600`, `"hourly";r=0;t=3600`, "", ""},
					{429, denial, `"hourly";q=2;w=3600`, `"hourly";r=0;t=3600`, "3600", "no-store"},
				}},
				{"several", func(store limiter.Store) http.Handler {
					return mustNew(t, Options{Store: store, Limits: at})(hello)
				}, []response{
					{200, "hello", `"default";q=9;qu="concurrent-requests", "hourly";q=2;w=3600`, `"default";r=8, "hourly";r=1;t=3600`, "", ""},
					{200, "hello", `"default";q=9;qu="concurrent-requests", "hourly";q=2;w=3600`, `"default";r=8, "hourly";r=0;t=3600`, "", ""},
					{429, denial, `"default";q=9;qu="concurrent-requests", "hourly";q=2;w=3600`, `"default";r=9, "hourly";r=0;t=3600`, "3600", "no-store"},
				}},
				{"nested", func(store limiter.Store) http.Handler {
					outer := mustNew(t, Options{Store: store, Limits: []Limit{{Name: "site", Limit: limiter.FixedWindow(100, time.Hour)}}})
					return outer(mustNew(t, Options{Store: store, Limits: []Limit{hourly}})(hello))
				}, []response{
					{200, "hello", `"site";q=100;w=3600 | "hourly";q=2;w=3600`, `"site";r=99;t=3600 | "hourly";r=1;t=3600`, "", ""},
					{200, "hello", `"site";q=100;w=3600 | "hourly";q=2;w=3600`, `"site";r=98;t=3600 | "hourly";r=0;t=3600`, "", ""},
					{429, denial, `"site";q=100;w=3600 | "hourly";q=2;w=3600`, `"site";r=97;t=3600 | "hourly";r=0;t=3600`, "3600", "no-store"},
				}},
				{"another response", func(store limiter.Store) http.Handler {
					return mustNew(t, Options{Store: store, Limits: []Limit{hourly}, Denied: http.HandlerFunc(
						func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "busy", http.StatusServiceUnavailable) })})(hello)
				}, []response{
					{200, "hello", `"hourly";q=2;w=3600`, `"hourly";r=1;t=3600`, "", ""},
					{200, "hello", `"hourly";q=2;w=3600`, `"hourly";r=0;t=3600`, "", ""},
					{503, "busy\n", `"hourly";q=2;w=3600`, `"hourly";r=0;t=3600`, "3600", "no-store"},
				}},
			} {
				t.Run(tc.name, func(t *testing.T) {
					server := start(t, proto, tc.setUp(limiter.NewMemoryWithClock(func() time.Duration { return 0 })))
					for i, want := range tc.want {
						if got := get(t, server, "a"); got != want {
							t.Errorf("request %d: got  %+v\nwant %+v", i, got, want)
						}
					}
					if got := get(t, server, "b"); got.status != http.StatusOK {
						t.Errorf("another key: %+v", got)
					}
				})
			}
		})
	}
}

// TestWriterIsPassedOn guards that the handler gets the server's writer, and so all that it
// can do: send what there is, copy files without a buffer, take over the connection.
func TestWriterIsPassedOn(t *testing.T) {
	limit := mustNew(t, Options{Store: limiter.NewMemory(), Limits: []Limit{{Limit: limiter.PerSecond(1000)}, {Name: "at-once", Limit: limiter.Concurrency(1)}}})
	for _, proto := range protocols {
		t.Run(proto, func(t *testing.T) {
			more := make(chan struct{})
			plain, limited, ended := make(chan string, 1), make(chan string, 1), make(chan struct{}, 1)
			types := func(to chan string, w http.ResponseWriter) {
				_, flushes := w.(http.Flusher)
				_, copies := w.(io.ReaderFrom)
				_, hijacks := w.(http.Hijacker)
				to <- fmt.Sprintf("%T, flushes %t, copies %t, hijacks %t", w, flushes, copies, hijacks)
			}
			within := limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				types(limited, w)
				_, _ = io.WriteString(w, "first\n")
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Error(err)
				}
				<-more
				if r.ProtoMajor > 1 {
					_, _ = io.WriteString(w, "second\n")
					return
				}
				conn, rw, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = rw.WriteString("7\r\nsecond\n\r\n0\r\n\r\n")
				_ = rw.Flush()
				_ = conn.Close()
			}))
			server := start(t, proto, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				types(plain, w)
				within.ServeHTTP(w, r)
				ended <- struct{}{} // after the client has seen the end of a connection that was taken over
			}))
			t.Cleanup(func() { close(more) })
			for range 2 { // the first has ended
				res, err := server.Client().Get(server.URL)
				if err != nil {
					t.Fatal(err)
				}
				lines := bufio.NewReader(res.Body)
				if line, err := lines.ReadString('\n'); line != "first\n" || res.Proto != proto {
					t.Fatalf("%s %s: read %q, error %v", res.Proto, res.Status, line, err)
				}
				more <- struct{}{}
				if line, err := lines.ReadString('\n'); line != "second\n" {
					t.Errorf("read %q, error %v", line, err)
				}
				_ = res.Body.Close()
				if a, b := <-plain, <-limited; a != b {
					t.Errorf("the handler gets %s, want %s", b, a)
				}
				<-ended
			}
		})
	}
}

// TestExactInParallel guards that servers with one Redis together admit exactly the limit, and
// at any time no more than may be in progress, however many requests come at once.
func TestExactInParallel(t *testing.T) {
	const total, atOnce = 120, 7
	redis := redistest.Start(t)
	var running, most atomic.Int64
	within := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := running.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		_, _ = io.WriteString(w, "hello")
		running.Add(-1)
	})
	var servers []*httptest.Server
	for i := range 4 {
		store, err := limiter.NewRedis(limiter.RedisOptions{Addresses: []string{redis.Addr}, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Close() })
		servers = append(servers, start(t, protocols[i%2], mustNew(t, Options{Store: store, Limits: []Limit{
			{Name: "total", Limit: limiter.FixedWindow(total, hours)},
			{Name: "at-once", Limit: limiter.Concurrency(atOnce), Key: func(*http.Request) string { return "all" }},
		}})(within)))
	}
	var admitted, unavailable atomic.Int64
	var clients sync.WaitGroup
	for i := range 32 {
		server := servers[i%len(servers)]
		server.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = 32
		clients.Go(func() {
			for limit := ""; !strings.Contains(limit, `"total";r=0`); {
				res, err := server.Client().Get(server.URL)
				if err != nil {
					t.Error(err)
					return
				}
				_ = res.Body.Close()
				limit = res.Header.Get("RateLimit")
				switch res.StatusCode {
				case http.StatusOK:
					admitted.Add(1)
				case http.StatusServiceUnavailable: // and may have been charged
					unavailable.Add(1)
				}
			}
		})
	}
	clients.Wait()
	if n := admitted.Load(); n > total || n < total-unavailable.Load() {
		t.Errorf("%d requests of %d admitted, Redis was unavailable to %d", n, total, unavailable.Load())
	}
	if n := most.Load(); n > atOnce || n < 1 {
		t.Errorf("%d requests at once, of %d", n, atOnce)
	}
}

// TestInProgressUntilTheHandlerReturns guards when a request no longer counts: when its
// handler has returned, however it does, and not when its client is gone.
func TestInProgressUntilTheHandlerReturns(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan func())
	for _, proto := range protocols {
		t.Run(proto, func(t *testing.T) {
			server := start(t, proto, mustNew(t, Options{Store: limiter.NewMemory(), Limits: []Limit{
				{Name: "at-once", Limit: limiter.Concurrency(1)},
			}})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if byKey(r) == "quick" {
					return
				}
				entered <- struct{}{}
				(<-leave)()
			})))
			for name, how := range map[string]func(){
				"returns": func() {}, "panics": func() { panic(http.ErrAbortHandler) },
			} {
				ctx, cancel := context.WithCancel(t.Context())
				gone := make(chan struct{})
				go func() {
					defer close(gone)
					req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, http.NoBody)
					if err != nil {
						t.Error(err)
						return
					}
					if res, err := server.Client().Do(req); err == nil {
						_ = res.Body.Close()
					}
				}()
				<-entered
				if got := get(t, server, "quick"); got.status != http.StatusTooManyRequests {
					t.Errorf("%s: beside it %+v", name, got)
				}
				cancel()
				<-gone
				if got := get(t, server, "quick"); got.status != http.StatusTooManyRequests {
					t.Errorf("%s: after its client is gone %+v", name, got)
				}
				leave <- how
				redistest.WaitFor(t, 10*time.Second, func() error {
					if got := get(t, server, "quick"); got.status != http.StatusOK {
						return fmt.Errorf("%s: after its handler %+v", name, got)
					}
					return nil
				})
			}
		})
	}
}

// TestStalledRedis guards what clients see while Redis does not answer: with a Fallback the
// same limit, which goes on afterwards, and without one 503 until it is back. Nobody waits for
// much longer than the timeout.
func TestStalledRedis(t *testing.T) {
	logging.Disable()
	for _, tc := range []struct {
		name     string
		fallback *limiter.Memory
		stalled  int
	}{
		{"with a Fallback", limiter.NewMemory(), http.StatusOK},
		{"without", nil, http.StatusServiceUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const total = 6
			redis := redistest.Start(t)
			store, err := limiter.NewRedis(limiter.RedisOptions{Addresses: []string{redis.Addr}, Timeout: 200 * time.Millisecond, Fallback: tc.fallback})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = store.Close() })
			store.Connect(t.Context())
			var served atomic.Int64
			server := start(t, "HTTP/1.1", mustNew(t, Options{Store: store, Limits: []Limit{{Limit: limiter.FixedWindow(total, hours)}}})(
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) })))
			redistest.WaitFor(t, 10*time.Second, func() error {
				if got := get(t, server, ""); got.status != http.StatusOK {
					return fmt.Errorf("%+v", got)
				}
				return nil
			})
			redis.Pause(t)
			for range 2 {
				began := time.Now()
				got := get(t, server, "")
				if took := time.Since(began); got.status != tc.stalled || took > 5*time.Second {
					t.Errorf("stalled: %+v after %v", got, took)
				}
				if got.status == http.StatusServiceUnavailable && (got.body != "The rate limiter is unavailable.\n" || got.limit+got.retry != "") {
					t.Errorf("stalled: %+v", got)
				}
			}
			redis.Resume(t)
			redistest.WaitFor(t, 20*time.Second, func() error {
				if got := get(t, server, ""); got.status != http.StatusTooManyRequests {
					return fmt.Errorf("%+v", got)
				}
				return nil
			})
			if n := served.Load(); n > total || n < total-2 && tc.fallback == nil || n != total && tc.fallback != nil {
				t.Errorf("served %d of %d", n, total)
			}
		})
	}
}

// TestAddress guards whose request is whose: no client can choose its key, and clients behind
// proxies do not share one.
func TestAddress(t *testing.T) {
	proxies := []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("2001:db8:f::/48"),
	}
	for _, tc := range []struct {
		name      string
		proxies   []netip.Prefix
		peer      string
		forwarded []string
		want      string
	}{
		{"IPv4", nil, "203.0.113.7:1234", nil, "203.0.113.7"},
		{"IPv6", nil, "[2001:db8:1:2:3:4:5:6]:1234", nil, "2001:db8:1:2::/64"},
		{"IPv6 with a zone", nil, "[fe80::1%eth0]:1234", nil, "fe80::/64"},
		{"IPv4 in IPv6", nil, "[::ffff:203.0.113.7]:1234", nil, "203.0.113.7"},
		{"no port", nil, "203.0.113.7", nil, "203.0.113.7"},
		{"a unix socket", nil, "@", []string{"203.0.113.7"}, "@"},
		{"nothing is trusted", nil, "203.0.113.7:1234", []string{"198.51.100.1"}, "203.0.113.7"},
		{"the peer is not trusted", proxies, "203.0.113.7:1234", []string{"198.51.100.1, 10.0.0.1"}, "203.0.113.7"},
		{"a proxy", proxies, "10.0.0.1:1234", []string{"203.0.113.7"}, "203.0.113.7"},
		{"a proxy by IPv4 in IPv6", proxies, "[::ffff:10.0.0.1]:1234", []string{"203.0.113.7"}, "203.0.113.7"},
		{"a prefix by IPv4 in IPv6", []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}, "10.0.0.1:1234", []string{"203.0.113.7"}, "203.0.113.7"},
		{"a proxy by IPv6", proxies, "[2001:db8:f::1]:1234", []string{"2001:db8:1:2:3:4:5:6"}, "2001:db8:1:2::/64"},
		{"two proxies", proxies, "10.0.0.1:1234", []string{"203.0.113.7, 10.0.0.2"}, "203.0.113.7"},
		{"two fields", proxies, "10.0.0.1:1234", []string{"203.0.113.7", "192.0.2.1,10.0.0.2"}, "203.0.113.7"},
		{"made up before", proxies, "10.0.0.1:1234", []string{"198.51.100.1, 10.0.0.9, 203.0.113.7"}, "203.0.113.7"},
		{"made up in another field", proxies, "10.0.0.1:1234", []string{"198.51.100.1", "203.0.113.7"}, "203.0.113.7"},
		{"nonsense before", proxies, "10.0.0.1:1234", []string{"x,,203.0.113.7"}, "203.0.113.7"},
		{"nonsense of a proxy", proxies, "10.0.0.1:1234", []string{"198.51.100.1, unknown"}, "10.0.0.1"},
		{"nonsense of an outer proxy", proxies, "10.0.0.1:1234", []string{"198.51.100.1, unknown, 10.0.0.2"}, "10.0.0.2"},
		{"nothing after a comma", proxies, "10.0.0.1:1234", []string{"198.51.100.1,"}, "10.0.0.1"},
		{"an empty field", proxies, "10.0.0.1:1234", []string{""}, "10.0.0.1"},
		{"no field", proxies, "10.0.0.1:1234", nil, "10.0.0.1"},
		{"from a proxy itself", proxies, "10.0.0.1:1234", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		{"with a port", proxies, "10.0.0.1:1234", []string{"203.0.113.7:4711"}, "203.0.113.7"},
		{"IPv6 with a port", proxies, "10.0.0.1:1234", []string{"[2001:db8:1:2::6]:4711"}, "2001:db8:1:2::/64"},
		{"IPv6 in brackets", proxies, "10.0.0.1:1234", []string{"[2001:db8:1:2::6]"}, "2001:db8:1:2::/64"},
		{"trusted with a port", proxies, "10.0.0.1:1234", []string{"203.0.113.7, 10.0.0.2:80"}, "203.0.113.7"},
		{"a proxy by a unix socket", proxies, "@", []string{"198.51.100.1, 203.0.113.7"}, "203.0.113.7"},
		{"a unix socket without a field", proxies, "@", nil, "@"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
			r.RemoteAddr = tc.peer
			r.Header["X-Forwarded-For"] = tc.forwarded
			r.Header.Set("X-Real-Ip", "198.51.100.99")
			r.Header.Set("Forwarded", "for=198.51.100.99")
			if got := Address(tc.proxies...)(r); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestNewRefuses guards that what could not limit is an error of New, in one line that says
// what to write, and not one of each request.
func TestNewRefuses(t *testing.T) {
	store, rate := limiter.NewMemory(), limiter.PerSecond(1)
	for want, opt := range map[string]Options{
		"httplimit: Store is nil: use limiter.NewMemory or limiter.NewRedis": {Limits: []Limit{{Limit: rate}}},
		"httplimit: Limits is empty: give at least one":                      {Store: store},
		`httplimit: bucket "default": the zero Limit is not valid: use PerSecond, FixedWindow or another function that makes one`: {
			Store: store, Limits: []Limit{{}}},
		`httplimit: bucket "a": size 0: must be from 1 to 562949953421312`: {Store: store, Limits: []Limit{{Name: "a", Limit: limiter.PerSecond(0)}}},
		`httplimit: bucket "default": named twice with one key in one request`: {
			Store: store, Limits: []Limit{{Limit: rate}, {Limit: rate, Key: byKey}}},
		`httplimit: bucket "ban": a BanAfter limit counts denials by other buckets of the request: set Bucket.Watches`: {
			Store: store, Limits: []Limit{{Limit: rate}, {Name: "ban", Limit: limiter.BanAfter(1, time.Hour)}}},
		`httplimit: limit "a\"b": use a name in printable ASCII, without quotes and backslashes`: {Store: store, Limits: []Limit{{Name: `a"b`, Limit: rate}}},
		`httplimit: limit "ä": use a name in printable ASCII, without quotes and backslashes`:    {Store: store, Limits: []Limit{{Name: "ä", Limit: rate}}},
		`httplimit: limit "a\n": use a name in printable ASCII, without quotes and backslashes`:  {Store: store, Limits: []Limit{{Name: "a\n", Limit: rate}}},
	} {
		if limit, err := New(opt); limit != nil || err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	if store.Len() != 0 {
		t.Error("New has charged the store")
	}
}
