package behaviour

import (
	"bufio"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/http2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestVirtualRequests guards that the requests which Caddy makes itself, for a
// template that includes other pages, are charged to no one, and that clients
// can't pass theirs off as such.
func TestVirtualRequests(t *testing.T) {
	t.Parallel()
	dir := sitetest.TempDir(t)
	page := []byte(`{{httpInclude "/part"}} and {{httpInclude "/part"}}`)
	filetest.Write(t, filepath.Join(dir, "page.html"), page)
	s := sitetest.Start(t, `
		rate_limit {
			size 1
			drip_rate 1h
		}
		root `+dir+`
		templates
		respond /part "part"
		file_server
	`)
	const (
		admitted = "200 limit=1 remaining=0 clear=3600.000"
		denied   = "429 limit=1 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600"
	)
	for _, client := range []string{"127.0.0.2", "127.0.0.3"} {
		s.From(client)
		s.Run(
			sitetest.Step{Path: "/page.html", Want: admitted, Text: "part and part"},
			sitetest.Step{Path: "/page.html", Want: denied},
			sitetest.Step{Path: "/part", Header: []string{"Caddy-Templates-Include: 1"}, Want: denied},
		)
	}
	// The address that virtual requests come from has its bucket for itself.
	s.From("127.0.0.1")
	s.Run(
		sitetest.Step{Path: "/part", Header: []string{"Caddy-Templates-Include: 1"}, Want: admitted, Text: "part"},
		sitetest.Step{Path: "/part", Header: []string{"Caddy-Templates-Include: 1"}, Want: denied},
	)
	if lines := s.Log("error", ""); len(lines) > 0 {
		t.Errorf("got %v, want no error in the log", lines)
	}
}

// TestProtocols guards that what comes over a connection is limited, whatever
// version of HTTP it speaks, with TLS or without, and that denied uploads are
// answered before their bodies have come.
func TestProtocols(t *testing.T) {
	addr := redistest.FreeAddr(t)
	// A certificate of Caddy's own would be one more thing that starts: Caddy obtains
	// it while its apps are starting, and reads one of them (a race in Caddy v2.11.9).
	authority := redistest.NewAuthority(t)
	cert, key := authority.Issue(t, "localhost")
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2 h2c h3\n}\nauto_https disable_redirects",
		Site:   "rate_limit {\nkey {http.request.proto}\nsize 1\n}\nrespond admitted",
		Sites: "https://" + addr + " {\ntls " + cert + " " + key + `
			rate_limit {
				key {http.request.proto}-tls
				size 1
			}
			respond admitted
		}`,
	})
	trusting := &tls.Config{RootCAs: authority.Pool()}
	only := func(set func(*http.Protocols)) *http.Transport {
		transport := &http.Transport{TLSClientConfig: trusting.Clone(), Protocols: new(http.Protocols)}
		set(transport.Protocols)
		return transport
	}
	h3 := &http3.Transport{TLSClientConfig: trusting.Clone()}
	t.Cleanup(func() { h3.Close() })
	for _, tc := range []struct {
		name, url, proto string
		transport        http.RoundTripper
	}{
		{"HTTP/1.1", s.URL("/"), "HTTP/1.1", only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP/1.1 with TLS", "https://" + addr, "HTTP/1.1", only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP/2", s.URL("/"), "HTTP/2.0", only(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })},
		{"HTTP/2 with TLS", "https://" + addr, "HTTP/2.0", only(func(p *http.Protocols) { p.SetHTTP2(true) })},
		{"HTTP/3", "https://" + addr, "HTTP/3.0", h3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.transport == h3 {
				sitetest.OverHTTP3(t)
			}
			client := &http.Client{Transport: tc.transport, Timeout: sitetest.Patience}
			defer client.CloseIdleConnections()
			for i, want := range []string{
				"200 limit=1 remaining=0 clear=1.000",
				"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1",
			} {
				res, err := client.Get(tc.url)
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				if got := (sitetest.Answer{Response: res}).String(); got != want || res.Proto != tc.proto {
					t.Errorf("request %d: got %s over %s, want %s over %s", i+1, got, res.Proto, want, tc.proto)
				}
			}
			body, in := io.Pipe() // which stalls
			defer in.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // Caddy would wait a minute for it
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, "POST", tc.url, body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Expect", "100-continue")
			res, err := client.Do(req)
			if err != nil {
				t.Fatalf("an upload got no answer: %v", err)
			}
			res.Body.Close()
			if res.StatusCode != http.StatusTooManyRequests || res.Proto != tc.proto {
				t.Errorf("an upload got %d over %s, want 429 over %s", res.StatusCode, res.Proto, tc.proto)
			}
		})
	}
}

// newWebSocket starts a server that takes over connections and sends back what
// comes over them, and returns its host:port.
func newWebSocket(t testing.TB) string {
	return sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) { upgrade(t, w, r) })
}

// upgrade answers a request that wants its connection upgraded, and sends back what comes over
// it.
func upgrade(t testing.TB, w http.ResponseWriter, r *http.Request) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+
		r.Header.Get("Upgrade")+"\r\nX-RateLimit-Limit: 5000\r\n\r\n")
	io.Copy(conn, rw)
}

// connect opens a WebSocket by CONNECT in a stream of HTTP/2, until the test ends, and
// returns what to write to and the response.
func connect(t *testing.T, addr string) (io.WriteCloser, *http.Response) {
	t.Helper()
	//nolint:staticcheck // http.Transport sends no such CONNECT
	client := &http2.Transport{AllowHTTP: true,
		DialTLSContext: func(ctx context.Context, network, addr string, _ *tls.Config) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, addr)
		}}
	t.Cleanup(client.CloseIdleConnections) //nolint:staticcheck // see above
	ctx, cancel := context.WithTimeout(t.Context(), sitetest.Patience)
	t.Cleanup(cancel)
	body, in := io.Pipe()
	t.Cleanup(func() { in.Close() })
	req, err := http.NewRequestWithContext(ctx, http.MethodConnect, "http://"+addr+"/chat", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header[":protocol"] = []string{"websocket"}
	res, err := client.RoundTrip(req) //nolint:staticcheck // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return in, res
}

// TestWebSocketOverHTTP2 guards that a WebSocket that is opened by CONNECT in a
// stream of HTTP/2 is charged once and gets the fields, works, and is denied like any
// other request.
func TestWebSocketOverHTTP2(t *testing.T) {
	upstream := newWebSocket(t)
	t.Setenv("GODEBUG", "http2xconnect=1") // without it Go's server takes no such CONNECT
	addr := sitetest.StartProcess(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site:   "rate_limit {\nsize 2\ndrip_rate 1h\n}\nreverse_proxy " + upstream,
	})
	open := func(want string) (io.Writer, *bufio.Reader) {
		t.Helper()
		in, res := connect(t, addr)
		a := sitetest.Answer{Response: res}
		if !strings.HasPrefix(a.String(), want+" clear=") || res.ProtoMajor != 2 {
			t.Errorf("got %s over %s, want %s", a, res.Proto, want)
		}
		return in, bufio.NewReader(res.Body)
	}
	for _, want := range []string{"200 limit=2 remaining=1", "200 limit=2 remaining=0"} {
		in, out := open(want)
		for _, text := range []string{"one\n", "two\n"} {
			io.WriteString(in, text)
			if echo, err := out.ReadString('\n'); echo != text || err != nil {
				t.Fatalf("%q came back as %q, %v", text, echo, err)
			}
		}
	}
	open("429 limit=2 remaining=0")
}

// TestBytesOfWebSockets guards that what is sent over a websocket counts as the response
// that it is, over HTTP/1 and 2 alike, and that either side can end what it sends.
func TestBytesOfWebSockets(t *testing.T) {
	upstream := newWebSocket(t)
	t.Setenv("GODEBUG", "http2xconnect=1") // without it Go's server takes no such CONNECT
	addr := sitetest.StartProcess(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site: "rate_limit {\nkey all\nsize 1000000\ndrip_rate 5m\nactual_cost bytes\n}\n" +
			"respond /left 204\nreverse_proxy " + upstream,
	})
	const length = 300_000
	sent := strings.Repeat("x", length)
	used := func() int64 {
		_, header := sitetest.Ask(t.Context(), "http://"+addr+"/left")
		return 999_999 - fieldstest.Number(header.Get("X-RateLimit-Remaining")) // 1 is held
	}
	conn := sitetest.Dial(t, addr)
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", addr)
	r := bufio.NewReader(conn)
	if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("got %v, %v", res, err)
	}
	go func() {
		io.WriteString(conn, sent)
		conn.(*net.TCPConn).CloseWrite()
	}()
	if echo, err := io.Copy(io.Discard, r); echo != length || err != nil {
		t.Fatalf("%d bytes came back, %v", echo, err)
	}
	conn.Close()
	sitetest.Eventually(t, "bytes over HTTP/1 count", func() bool { return used() == length })

	in, res := connect(t, addr)
	go io.WriteString(in, sent)
	if _, err := io.ReadFull(res.Body, make([]byte, length)); err != nil {
		t.Fatal(err)
	}
	in.Close()
	res.Body.Close()
	sitetest.Eventually(t, "bytes over HTTP/2 count", func() bool { return used() == 2*length })
}

// TestForwardAuth guards that a limit in front of forward_auth keeps what it
// denies from the authentication server, that one behind it can go by what that
// server says, and that denials behind it are shaped by error routes.
func TestForwardAuth(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	auth := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Header().Set("X-RateLimit-Limit", "5000")
		user := r.Header.Get("X-Token")
		if user == "" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.Header().Set("Remote-User", user)
	})
	for name, tc := range map[string]struct{ errors, body string }{
		"without error routes": {},
		"with error routes": {
			errors: "handle_errors 429 {\nrespond {err.message}\n}",
			body:   "rate limit user exceeded: retry after 3600 s",
		},
	} {
		t.Run(name, func(t *testing.T) {
			asked.Store(0)
			s := sitetest.Start(t, `
				rate_limit address {
					size 6
					drip_rate 1h
				}
				forward_auth `+auth+` {
					uri /auth
					copy_headers Remote-User
				}
				route {
					rate_limit user {
						key {header.Remote-User}
						size 1
						drip_rate 1h
					}
					respond "{header.Remote-User}"
				}
				`+tc.errors)
			s.Run(
				sitetest.Step{Want: "401 limit=6 remaining=5 clear=3600.000"},
				sitetest.Step{Header: []string{"X-Token: alice"}, Want: "200 limit=1 remaining=0 clear=7200.000", Text: "alice"},
				sitetest.Step{Header: []string{"X-Token: alice"}, Text: tc.body,
					Want: "429 limit=1 remaining=0 clear=10800.000 reset=3600.000 retry-after=3600"},
				sitetest.Step{Header: []string{"X-Token: bob", "Remote-User: eve"}, Want: "200 limit=1 remaining=0 clear=14400.000", Text: "bob"},
				sitetest.Step{Header: []string{"Remote-User: eve"}, Want: "401 limit=6 remaining=1 clear=18000.000"},
				sitetest.Step{Want: "401 limit=6 remaining=0 clear=21600.000"},
				sitetest.Step{Want: "429 limit=6 remaining=0 clear=21600.000 reset=3600.000 retry-after=3600"},
			)
			if n := asked.Load(); n != 6 {
				t.Errorf("the authentication server was asked %d times, want 6", n)
			}
		})
	}
}

// TestTracing guards that limits work within tracing, whose spans can tell what
// they decided.
func TestTracing(t *testing.T) {
	spans := sitetest.CollectSpans(t)
	s := sitetest.Start(t, `
		tracing {
			span site
			span_attributes {
				exceeded "<{http.rate_limit.exceeded.name}>"
			}
		}
		rate_limit tight {
			size 1
		}
		respond "admitted {http.vars.trace_id}"
		handle_errors {
			respond "{err.message} {http.vars.trace_id}"
		}
	`)
	s.Run(sitetest.Step{Want: "200 limit=1 remaining=0 clear=1.000"})
	denied := s.Get("/")
	if got, want := denied.String(), "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if text, id, _ := strings.Cut(denied.Text, " s "); text != "rate limit tight exceeded: retry after 1" || len(id) != 32 {
		t.Errorf("got body %q", denied.Text)
	}
	for got := ""; !strings.Contains(got, "<>") || !strings.Contains(got, "<tight>"); {
		select {
		case span := <-spans:
			got += span
		case <-time.After(sitetest.Patience):
			t.Fatalf("no spans tell of one request admitted and one denied: %q", got)
		}
	}
}

// TestPreflights guards that the OPTIONS requests by which browsers ask whether
// they may send another count like any request, and do not where a matcher says
// so; the answer to one carries our fields.
func TestPreflights(t *testing.T) {
	preflight := []string{"Origin: https://app.test", "Access-Control-Request-Method: POST"}
	const site = `
		rate_limit %s {
			size 1
			drip_rate 1h
		}
		header Access-Control-Allow-Origin *
		header Access-Control-Expose-Headers "Retry-After, X-RateLimit-Remaining"
		@preflight method OPTIONS
		respond @preflight 204
		respond "admitted"
	`
	const (
		denied = "429 limit=1 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600"
		full   = "limit=1 remaining=0 clear=3600.000"
	)
	t.Run("counted", func(t *testing.T) {
		s := sitetest.Start(t, strings.Replace(site, "%s", "", 1))
		s.Run(
			sitetest.Step{Method: "OPTIONS", Header: preflight, Want: "204 " + full},
			sitetest.Step{Method: "OPTIONS", Header: preflight, Want: denied},
			sitetest.Step{Method: "POST", Want: denied},
		)
		// Scripts may read why.
		if got := s.Get("/").Header.Get("Access-Control-Expose-Headers"); got != "Retry-After, X-RateLimit-Remaining" {
			t.Errorf("a denial exposes %q", got)
		}
	})
	t.Run("not counted", func(t *testing.T) {
		s := sitetest.Start(t, "@counted not method OPTIONS\n"+strings.Replace(site, "%s", "@counted", 1))
		s.Run(
			sitetest.Step{Method: "OPTIONS", Header: preflight, Want: "204"},
			sitetest.Step{Method: "OPTIONS", Header: preflight, Want: "204"},
			sitetest.Step{Method: "POST", Want: "200 " + full},
			sitetest.Step{Method: "POST", Want: denied},
			sitetest.Step{Method: "OPTIONS", Header: preflight, Want: "204"},
		)
	})
}

// TestHTTP2 guards that requests are limited and get the fields on HTTP/2 too.
func TestHTTP2(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site:   "rate_limit {\nsize 1\n}\nrespond admitted",
	})
	s.UseHTTP2()
	s.Run(
		sitetest.Step{Want: "200 limit=1 remaining=0 clear=1.000", Text: "admitted"},
		sitetest.Step{Want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
	)
	if a := s.Get("/"); a.ProtoMajor != 2 {
		t.Errorf("this was %s", a.Proto)
	}
}

// TestUpgrade guards that connections can be handed over, as to WebSocket, and
// that the 101 has the fields, those of the upstream dropped.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	upstream := newWebSocket(t)
	s := sitetest.Start(t, "rate_limit {\nsize 2\n}\nrespond /plain admitted\nreverse_proxy "+upstream)
	conn := sitetest.Dial(t, s.Addr)
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", s.Addr)
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	a := sitetest.Answer{Response: res}
	if got, want := a.String(), "101 limit=2 remaining=1 clear=1.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, text := range []string{"one\n", "two\n"} {
		io.WriteString(conn, text)
		if echo, err := r.ReadString('\n'); echo != text || err != nil {
			t.Fatalf("%q came back as %q, %v", text, echo, err)
		}
	}
	// An upgraded connection has been charged once, and a full bucket takes no more.
	s.Run(
		sitetest.Step{Path: "/plain", Want: "200 limit=2 remaining=0 clear=2.000", Text: "admitted"},
		sitetest.Step{Header: []string{"Connection: Upgrade", "Upgrade: echo"},
			Want: "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"},
	)
}

// TestServerSentEvents guards that events of an upstream come through at once:
// the second is only sent when the first has arrived.
func TestServerSentEvents(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, contentType, proxy string }{
		{"by content type", "text/event-stream", "reverse_proxy %s"},
		{"by flush_interval", "text/plain", "reverse_proxy %s {\nflush_interval -1\n}"},
		{"every millisecond", "text/plain", "reverse_proxy %s {\nflush_interval 1ms\n}"},
		{"through encode", "text/event-stream", "encode gzip\nreverse_proxy %s"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			arrived := make(chan struct{})
			upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", tc.contentType)
				w.Header().Set("X-RateLimit-Limit", "5000")
				for i := range 3 {
					fmt.Fprintf(w, "data: %d\n\n", i)
					w.(http.Flusher).Flush()
					select {
					case <-arrived:
					case <-r.Context().Done():
						return
					}
				}
			})
			s := sitetest.Start(t, "rate_limit {\nsize 9\n}\n"+fmt.Sprintf(tc.proxy, upstream))
			res, err := s.Client.Get(s.URL("/"))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if got, want := fieldstest.In(res.Header), "limit=9 remaining=8 clear=1.000"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			body := bufio.NewReader(res.Body)
			for i := range 3 {
				event, err := body.ReadString('\n')
				if want := fmt.Sprintf("data: %d\n", i); event != want || err != nil {
					t.Fatalf("got event %q, %v, want %q", event, err, want)
				}
				body.ReadString('\n')
				arrived <- struct{}{}
			}
			if rest, err := io.ReadAll(body); len(rest) > 0 || err != nil {
				t.Errorf("after the events: %q, %v", rest, err)
			}
		})
	}
}

// TestFiles guards that files come through whole, in part, not at all where
// the client has them, and that each such answer has the fields.
func TestFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	content := make([]byte, 3<<20)
	random := rand.NewChaCha8([32]byte{})
	random.Read(content)
	filetest.Write(t, filepath.Join(dir, "file"), content)
	s := sitetest.Start(t, `
		root `+dir+`
		rate_limit {
			size 9
			drip_rate 1h
		}
		file_server
	`)
	a := s.Get("/file")
	if got, want := a.String(), "200 limit=9 remaining=8 clear=3600.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if a.Text != string(content) {
		t.Errorf("the file of %d bytes came through as %d others", len(content), len(a.Text))
	}
	etag := a.Header.Get("Etag")
	s.Run(
		sitetest.Step{Path: "/file", Header: []string{"Range: bytes=1000-1003"},
			Want: "206 limit=9 remaining=7 clear=7200.000", Text: string(content[1000:1004])},
		sitetest.Step{Path: "/file", Header: []string{"If-None-Match: " + etag},
			Want: "304 limit=9 remaining=6 clear=10800.000"},
		sitetest.Step{Path: "/none", Want: "404 limit=9 remaining=5 clear=14400.000"},
		sitetest.Step{Path: "/file", Method: "HEAD", Want: "200 limit=9 remaining=4 clear=18000.000"},
	)
	if length := s.Send("HEAD", "/file").ContentLength; length != int64(len(content)) {
		t.Errorf("HEAD tells of %d bytes, want %d", length, len(content))
	}
}

// TestEncode guards that responses are still compressed, whether encode stands
// before or behind.
func TestEncode(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("text ", 1000)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("X-RateLimit-Limit", "5000")
		io.WriteString(w, text)
	})
	const limit = "rate_limit {\nsize 2\n}\n"
	for name, order := range map[string]string{
		"before": "encode gzip\n" + limit,
		"behind": limit + "encode gzip\n",
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.Start(t, "route {\n"+order+"reverse_proxy "+upstream+"\n}")
			a := s.Get("/", "Accept-Encoding: gzip")
			if got, want := a.String(), "200 limit=2 remaining=1 clear=1.000"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if got := a.Header.Get("Content-Encoding"); got != "gzip" {
				t.Fatalf("Content-Encoding is %q", got)
			}
			zipped, err := gzip.NewReader(strings.NewReader(a.Text))
			if err != nil {
				t.Fatal(err)
			}
			if plain, err := io.ReadAll(zipped); string(plain) != text || err != nil {
				t.Errorf("%d bytes came through as %d others, %v", len(text), len(plain), err)
			}
			// The denial has no body to compress.
			s.Get("/")
			a = s.Get("/", "Accept-Encoding: gzip")
			if got, want := a.String(), "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if a.Text != sitetest.PlainDenial || a.Header.Get("Content-Encoding") != "" {
				t.Errorf("a denial has body %q of encoding %q", a.Text, a.Header.Get("Content-Encoding"))
			}
		})
	}
}

// TestEarlyHints guards that informational responses pass, and that the final
// one behind them still has clean fields.
func TestEarlyHints(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		io.WriteString(w, "upstream")
	})
	s := sitetest.Start(t, "rate_limit {\nsize 2\n}\nreverse_proxy "+upstream)
	hints, final := s.GetWithHints("/")
	const ours = "limit=2 remaining=1 clear=1.000"
	if want := []string{"103 </style.css>; rel=preload " + ours}; !slices.Equal(hints, want) {
		t.Errorf("got hints %q, want %q", hints, want)
	}
	if got, want := final.String(), "200 "+ours; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestTrailers guards that trailer fields pass, announced or not.
func TestTrailers(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Announced")
		io.WriteString(w, "upstream")
		w.Header().Set("X-Announced", "yes")
		w.Header().Set(http.TrailerPrefix+"X-Sudden", "yes")
	})
	s := sitetest.Start(t, "rate_limit {\nsize 2\n}\nreverse_proxy "+upstream)
	a := s.Get("/")
	if got, want := a.String(), "200 limit=2 remaining=1 clear=1.000"; got != want || a.Text != "upstream" {
		t.Errorf("got %s %q, want %s", got, a.Text, want)
	}
	for _, name := range []string{"X-Announced", "X-Sudden"} {
		if a.Trailer.Get(name) != "yes" {
			t.Errorf("trailer %s is lost: %v", name, a.Trailer)
		}
	}
}
