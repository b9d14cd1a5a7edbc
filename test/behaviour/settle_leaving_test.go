package behaviour

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/quic-go/quic-go/http3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// leavingSite is a site over HTTP/1.1, 2 and 3, with TLS and without.
type leavingSite struct {
	*sitetest.Site
	tlsAddr string
	trusted *tls.Config
	h3      *http3.Transport
}

func startLeavingSite(t *testing.T, site string) *leavingSite {
	t.Helper()
	authority := redistest.NewAuthority(t)
	cert, key := authority.Issue(t, "localhost")
	s := &leavingSite{tlsAddr: redistest.FreeAddr(t), trusted: &tls.Config{RootCAs: authority.Pool(), ServerName: "localhost"}}
	s.h3 = &http3.Transport{TLSClientConfig: s.trusted.Clone()}
	t.Cleanup(func() { s.h3.Close() })
	s.Site = sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2 h2c h3\n}\nauto_https disable_redirects",
		Site:   site, Sites: "https://" + s.tlsAddr + " {\ntls " + cert + " " + key + "\n" + site + "\n}",
	})
	return s
}

// leaver sends a request to a path of a site, and hangs up when leave is closed. It returns
// the status of the response, or 0 if there is none.
type leaver func(s *leavingSite, path string, leave <-chan struct{}) int

// overHTTP1 returns a leaver that writes a request literally, in which %s is the path.
func overHTTP1(secure bool, request string, hangUp func(net.Conn)) leaver {
	return func(s *leavingSite, path string, leave <-chan struct{}) int {
		addr := s.Addr
		if secure {
			addr = s.tlsAddr
		}
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return 0
		}
		defer conn.Close()
		if secure {
			conn = tls.Client(conn, s.trusted)
		}
		_, _ = fmt.Fprintf(conn, strings.ReplaceAll(request, "HOST", addr), path)
		done := make(chan struct{})
		defer close(done)
		go func() {
			select {
			case <-leave:
				hangUp(conn)
			case <-done:
			}
		}()
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return 0
		}
		res.Body.Close()
		return res.StatusCode
	}
}

// streams returns the URL of the site over HTTP/2 or 3, and a transport for it.
func (s *leavingSite) streams(version int) (target string, transport interface {
	http.RoundTripper
	CloseIdleConnections()
}) {
	if version == 3 {
		return "https://" + s.tlsAddr, s.h3
	}
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	return "http://" + s.Addr, h2
}

// overStreams returns a leaver that resets its stream of HTTP/2 or 3, in the middle of a
// body if it has one.
func overStreams(version int, body string) leaver {
	return func(s *leavingSite, path string, leave <-chan struct{}) int {
		target, transport := s.streams(version)
		target += path
		defer transport.CloseIdleConnections()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() {
			select {
			case <-leave:
				cancel()
			case <-ctx.Done():
			}
		}()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
		if body != "" {
			unfinished, w := io.Pipe()
			defer w.Close()
			go func() { _, _ = io.WriteString(w, body) }()
			req, err = http.NewRequestWithContext(ctx, http.MethodPost, target, unfinished)
		}
		if err != nil {
			return 0
		}
		res, err := transport.RoundTrip(req)
		if err != nil {
			return 0
		}
		res.Body.Close()
		return res.StatusCode
	}
}

func hangUp(c net.Conn) { c.Close() }

func askAndHangUp(c net.Conn) {
	_, _ = io.WriteString(c, "GET /next HTTP/1.1\r\n")
	c.Close()
}

func closeWrite(c net.Conn) { _ = c.(interface{ CloseWrite() error }).CloseWrite() }

func resetConn(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); c.Close() }

func breakChunk(c net.Conn) { _, _ = io.WriteString(c, "no chunk\r\n") }

func anotherChunk(c net.Conn) { _, _ = io.WriteString(c, "2000\r\n"+guess+"\r\n0\r\n\r\n") }

func stay(net.Conn) {}

// guess is the beginning of a body, so large that a proxy passes it on before the rest comes.
var guess = strings.Repeat("x", 0x2000)

var (
	bare    = "GET %s HTTP/1.1\r\nHost: HOST\r\n\r\n"
	old     = "GET %s HTTP/1.0\r\nHost: HOST\r\n\r\n"
	partial = "POST %s HTTP/1.1\r\nHost: HOST\r\nContent-Length: 200000\r\n\r\n" + strings.Repeat(guess, 8)
	whole   = "POST %s HTTP/1.1\r\nHost: HOST\r\nContent-Length: 8192\r\n\r\n" + guess
	chunked = "POST %s HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n2000\r\n" + guess + "\r\n"
	expects = "POST %s HTTP/1.1\r\nHost: HOST\r\nContent-Length: 8192\r\nExpect: 100-continue\r\n\r\n"
)

// silent is a handler that has a request and gives no response, in a way of its own. One
// that passes it on does so when the client has left.
type silent struct{ How string }

func (silent) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_silent", New: func() caddy.Module { return new(silent) }}
}

var arrived atomic.Int64

func (h silent) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	arrived.Add(1)
	switch h.How {
	case "panic":
		panic("a test")
	case "hijack":
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			conn.Close()
		}
		return err
	}
	<-r.Context().Done()
	switch h.How {
	case "pass":
		return next.ServeHTTP(w, r)
	case "write":
		w.WriteHeader(http.StatusServiceUnavailable)
		return nil
	case "text":
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return nil
	case "fail":
		return errors.New("a query failed")
	case "refuse":
		return caddyhttp.Error(http.StatusBadRequest, fmt.Errorf("a query: %w", r.Context().Err()))
	}
	return nil
}

func init() {
	caddy.RegisterModule(silent{})
	httpcaddyfile.RegisterHandlerDirective("test_silent", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		return silent{h.RemainingArgs()[0]}, nil
	})
}

// TestCountUnknownResponses guards that no more guesses reach a login than its limit allows
// if clients do without the response, however they get rid of it: those who guess right would
// get it at once. It counts for all forms of count, costs what was estimated, fills dry runs,
// and bans.
func TestCountUnknownResponses(t *testing.T) {
	const size, guesses = 3, 8
	over := make(chan struct{})
	defer close(over)
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			_, _ = r.Body.Read(make([]byte, 1))
		}
		arrived.Add(1)
		select {
		case <-r.Context().Done():
		case <-over:
		}
	})
	const counting = "rate_limit {\nlimit login {\nkey {path}\nsize 3\ndrip_rate 1h\ncount status 401\nban 1h\n}\n" +
		"limit field {\nkey {path}\nsize 100\ndrip_rate 1h\ncount header X-Failed *\n}\n" +
		"limit both {\nkey {path}\nsize 100\ndrip_rate 1h\ncost 7\nactual_cost bytes\ncount {\nstatus 2xx\nheader X-Failed *\n}\n}\n" +
		"limit dry {\nkey {path}\nsize 2\ndrip_rate 1h\ncount status 2xx\ndry_run\n}\n}\n"
	site := "route {\n" + counting + "rate_limit inner {\nkey {path}\nsize 100\ndrip_rate 1h\n}\n" +
		"test_silent /panic panic\ntest_silent /hijack hijack\ntest_silent /write write\ntest_silent /text text\ntest_silent /fail fail\n" +
		"test_silent /refuse refuse\ntest_silent /nothing nothing\n" +
		"request_body /large {\nmax_size 10000\n}\nreverse_proxy /timeout " + upstream + " {\ntransport http {\nresponse_header_timeout 20ms\n}\n}\n" +
		"reverse_proxy " + upstream + "\n}\nhandle_errors {\nrespond sorry 200\n}\n"
	s := startLeavingSite(t, site)
	for path, send := range map[string]leaver{
		"/close":       overHTTP1(false, bare, hangUp),
		"/old":         overHTTP1(false, old, hangUp),
		"/half":        overHTTP1(false, bare, closeWrite),
		"/reset":       overHTTP1(false, bare, resetConn),
		"/partial":     overHTTP1(false, partial, hangUp),
		"/partialhalf": overHTTP1(false, partial, closeWrite),
		"/whole":       overHTTP1(false, whole, hangUp),
		"/chunked":     overHTTP1(false, chunked, hangUp),
		"/broken":      overHTTP1(false, chunked, breakChunk),
		"/large":       overHTTP1(false, chunked, anotherChunk),
		"/timeout":     overHTTP1(false, bare, stay),
		"/tls":         overHTTP1(true, bare, hangUp),
		"/tlspartial":  overHTTP1(true, partial, hangUp),
		"/h2":          overStreams(2, ""),
		"/h2body":      overStreams(2, guess),
		"/h3":          overStreams(3, ""),
		"/h3body":      overStreams(3, guess),
		"/panic":       overHTTP1(false, bare, stay),
		"/hijack":      overHTTP1(false, bare, stay),
		"/write":       overHTTP1(false, bare, hangUp),
		"/text":        overHTTP1(false, bare, hangUp),
		"/fail":        overHTTP1(false, bare, hangUp),
		"/refuse":      overHTTP1(false, bare, hangUp),
		"/nothing":     overHTTP1(false, bare, hangUp),
	} {
		t.Run(path[1:], func(t *testing.T) {
			if strings.HasPrefix(path, "/h3") {
				sitetest.OverHTTP3(t)
			}
			arrived.Store(0)
			status := 0
			for range guesses {
				before, leave, left := arrived.Load(), make(chan struct{}), make(chan int)
				go func() { left <- send(s, path, leave) }()
				done := false
				sitetest.Eventually(t, "a guess arrives or is denied", func() bool {
					select {
					case status = <-left:
						done = true
					default:
					}
					return done || arrived.Load() > before
				})
				close(leave)
				if !done {
					status = <-left
				}
				sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s.Site, "login", path).Held == 0 })
			}
			if n := arrived.Load(); n != size || status != http.StatusTooManyRequests && status != http.StatusOK {
				t.Errorf("%d guesses of %d arrived, want %d; the last one got %d", n, guesses, size, status)
			}
			for name, want := range map[string]int64{"login": size, "field": size, "both": 7 * size, "dry": 2} {
				if l := levelOf(t, s.Site, name, path); l.Units != want || l.Held != 0 {
					t.Errorf("%s has %+v, want %d units", name, l, want)
				}
			}
		})
	}
}

// TestCountUnknownWithErrorRoutes guards that error routes between the limit and the proxy
// don't make a known response of a failure that is none, and that what they have to say of
// other errors is one.
func TestCountUnknownWithErrorRoutes(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	const limits = `[{"name": "login", "key": "{http.request.uri.path}", "size": "9", "drip_rate": "1h", "count": {"status_code": [401]}}]`
	s := sitetest.StartConfig(t, sitetest.Config{Site: "rate_limit {\nsize 1\n}", Routes: `[{"handle": [{"handler": "rate_limit", "limits": ` + limits + `},
		{"handler": "subroute", "routes": [
			{"match": [{"path": ["/missing"]}], "handle": [{"handler": "error", "status_code": 404}]},
			{"handle": [{"handler": "reverse_proxy", "upstreams": [{"dial": "` + upstream + `"}]}]}],
		"errors": {"routes": [{"handle": [{"handler": "static_response", "status_code": 200, "body": "sorry"}]}]}}]}]`})
	for path, want := range map[string]int64{"/missing": 0, "/": 1} {
		if a := s.Get(path); a.StatusCode != 200 || a.Text != "sorry" {
			t.Errorf("%s: got %s %q", path, a, a.Text)
		}
		sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "login", path).Held == 0 })
		if l := levelOf(t, s, "login", path); l.Units != want {
			t.Errorf("%s: charged %d, want %d", path, l.Units, want)
		}
	}
}

// TestCountRetriedRequests guards that a request counts which a proxy sent to an upstream
// and then tried to send to another, which is down: that the first one was silent may be
// an answer. What was sent to none, as the only one is down, no upstream had.
func TestCountRetriedRequests(t *testing.T) {
	t.Parallel()
	var arrived atomic.Int64
	upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { arrived.Add(1); panic(http.ErrAbortHandler) })
	down := redistest.FreeAddr(t)
	const login = "rate_limit login {\nkey {path}\nsize 5\ndrip_rate 1h\ncount status 401\n}\n"
	// Round robin begins with the second upstream.
	s := sitetest.Start(t, login+"reverse_proxy /down "+down+"\n"+
		"reverse_proxy "+down+" "+upstream+" {\nlb_policy round_robin\nlb_retries 1\ntransport http {\nkeepalive off\n}\n}")
	for path, want := range map[string]int64{"/down": 0, "/": 5} {
		for range 9 {
			s.Get(path)
		}
		sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "login", path).Held == 0 })
		if l := levelOf(t, s, "login", path); l.Units != want {
			t.Errorf("%s: charged %d, want %d", path, l.Units, want)
		}
	}
	if n := arrived.Load(); n != 5 {
		t.Errorf("%d guesses arrived, want 5", n)
	}
}

// TestUncountedIfNotPassedOn guards that requests don't count that are not passed on: their
// client left before that, or while they waited for another limit, or one that was asked
// later denied them.
func TestUncountedIfNotPassedOn(t *testing.T) {
	var passed atomic.Int64
	upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { passed.Add(1) })
	s := startLeavingSite(t, "route {\ntest_silent /early pass\nrate_limit {\nlimit login {\nkey all\nsize 9\ndrip_rate 1h\ncount status 401\n}\n"+
		"limit tokens {\nkey all\nsize 90\ndrip_rate 1h\ncost 7\ncount status 401\nactual_cost bytes\n}\n"+
		"limit slow {\nmatch not path /early\nkey all\nsize 1\ndrip_rate 1h\nmax_delay 1h\n}\n}\nreverse_proxy "+upstream+"\n}")
	s.Get("/")
	leave, left := make(chan struct{}), make(chan int)
	go func() { left <- overHTTP1(false, whole, hangUp)(s, "/", leave) }()
	sitetest.Eventually(t, "a request waits", func() bool { return waitingAt(s.Site, "slow") == 1 })
	if a := s.Get("/"); a.StatusCode != 429 {
		t.Errorf("got %s, want a denial", a)
	}
	if l := level(t, s.Site, "login"); l.Held != 1 {
		t.Errorf("login has %+v, want what waits to be held", l)
	}
	close(leave)
	<-left
	leave = make(chan struct{})
	before := arrived.Load()
	go func() { left <- overHTTP1(false, bare, hangUp)(s, "/early", leave) }()
	sitetest.Eventually(t, "a request arrives", func() bool { return arrived.Load() > before })
	close(leave)
	<-left
	sitetest.Eventually(t, "it has ended", func() bool { return strings.Contains(fmt.Sprint(s.LastAccess()), "/early") })
	for _, name := range []string{"login", "tokens"} {
		sitetest.Eventually(t, "nothing is held", func() bool { return level(t, s.Site, name).Held == 0 })
		if l := level(t, s.Site, name); l.Units != 0 {
			t.Errorf("%s has %+v, want nothing", name, l)
		}
	}
	if n := passed.Load(); n != 1 {
		t.Errorf("%d requests passed, want 1", n)
	}
}

// waitingAt returns how many requests wait for the limit of a name.
func waitingAt(s *sitetest.Site, name string) int64 {
	return s.BucketAt(name).Limit.Waiting.Len()
}

// TestWaitingClientsLeave guards that a client which leaves while its request waits frees
// its place and is not passed on, whatever it has sent: a body, in part or whole, or its
// next request. It stays charged.
func TestWaitingClientsLeave(t *testing.T) {
	var passed atomic.Int64
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/first" {
			passed.Add(1)
		}
	})
	// With a wait of an hour, a look at the connection ends it, and with a short one the last.
	s := startLeavingSite(t, "rate_limit /long* {\nlimit long {\nkey {path}\nsize 3\ndrip_rate 1h\nmax_delay 10h\nmax_waiting 5\n}\n}\n"+
		"rate_limit /short* {\nlimit short {\nkey {path}\nsize 3\ndrip_rate 200ms\nmax_delay 2s\n}\n}\nreverse_proxy "+upstream)
	for name, send := range map[string]leaver{
		"bare":     overHTTP1(false, bare, hangUp),
		"old":      overHTTP1(false, old, hangUp),
		"half":     overHTTP1(false, whole, closeWrite),
		"reset":    overHTTP1(false, whole, resetConn),
		"partial":  overHTTP1(false, partial, hangUp),
		"whole":    overHTTP1(false, whole, hangUp),
		"chunked":  overHTTP1(false, chunked, hangUp),
		"expects":  overHTTP1(false, expects, hangUp),
		"ahead":    overHTTP1(false, bare, askAndHangUp),
		"tls":      overHTTP1(true, bare, hangUp),
		"tlswhole": overHTTP1(true, whole, hangUp),
		"h2":       overStreams(2, ""),
		"h2body":   overStreams(2, guess),
		"h3":       overStreams(3, ""),
		"h3body":   overStreams(3, guess),
	} {
		for _, wait := range []string{"long", "short"} {
			t.Run(name+", "+wait, func(t *testing.T) {
				if strings.HasPrefix(name, "h3") {
					sitetest.OverHTTP3(t)
				}
				path, waiting := "/"+wait+name, map[string]int{"long": 5, "short": 1}[wait]
				for range 3 {
					s.Get(path)
				}
				passed.Store(0)
				leave := make(chan struct{})
				var leaving sync.WaitGroup
				for n := range waiting {
					leaving.Go(func() { send(s, path, leave) })
					sitetest.Eventually(t, "a request waits", func() bool { return waitingAt(s.Site, wait) == int64(n+1) })
				}
				close(leave)
				leaving.Wait()
				sitetest.Eventually(t, "none waits", func() bool { return waitingAt(s.Site, wait) == 0 })
				if n := passed.Load(); n > 0 {
					t.Errorf("%d requests passed whose clients had left", n)
				}
				if l := levelOf(t, s.Site, wait, path); l.Units != int64(3+waiting) {
					t.Errorf("the limit has %d units, want all %d to stay charged", l.Units, 3+waiting)
				}
			})
		}
	}
}
