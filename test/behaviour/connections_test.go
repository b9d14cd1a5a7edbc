package behaviour

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// wrapped returns the global option for listener wrappers, one a line.
func wrapped(wrappers string) string {
	return "servers {\nprotocols h1 h2 h2c\nlistener_wrappers {\n" + wrappers + "\n}\n}"
}

// dialer is a client that opens connections from an address.
type dialer struct {
	t    testing.TB
	from string
}

// client is a client with one connection.
type client struct {
	conn net.Conn // nil if it was refused at once
	r    *bufio.Reader
	host string // that it asks for
}

// dial opens a connection to an address, or the path of a socket.
func (d dialer) dial(to string) *client {
	d.t.Helper()
	dialer, network := net.Dialer{Timeout: sitetest.Patience}, "unix"
	if !strings.HasPrefix(to, "/") {
		network, dialer.LocalAddr = "tcp", &net.TCPAddr{IP: net.ParseIP(d.from)}
	}
	conn, err := dialer.DialContext(d.t.Context(), network, to)
	if errors.Is(err, syscall.ECONNRESET) {
		return new(client)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(sitetest.Patience))
	host := to
	if network == "unix" {
		host = "x"
	}
	return &client{conn, bufio.NewReader(conn), host}
}

// get dials and sends a request, see client.get.
func (d dialer) get(to string) string {
	d.t.Helper()
	return d.dial(to).get()
}

// got returns what a number of new connections got, which stay open.
func (d dialer) got(n int, to string) string {
	d.t.Helper()
	all := make([]string, n)
	for i := range all {
		all[i] = d.get(to)
	}
	return strings.Join(all, " ")
}

// get sends a request and returns the body of the response, "reset" if the connection is, or the error.
func (c *client) get() string {
	if c.conn == nil {
		return "reset"
	}
	_, err := io.WriteString(c.conn, "GET / HTTP/1.1\r\nHost: "+c.host+"\r\n\r\n")
	if err == nil {
		var res *http.Response
		if res, err = http.ReadResponse(c.r, nil); err == nil {
			body, _ := io.ReadAll(res.Body)
			return string(body)
		}
	}
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return "reset"
	}
	return err.Error()
}

// listenersOf returns what limits the connections of the config that runs.
func listenersOf(t testing.TB, s *sitetest.Site) []*rule.Listener {
	t.Helper()
	app, err := s.Context().AppIfConfigured("rate_limit")
	if err != nil {
		t.Fatal(err)
	}
	return app.(interface{ Listeners() []*rule.Listener }).Listeners()
}

// connectionsOf returns what a limit of connections counts of a key.
func connectionsOf(t testing.TB, s *sitetest.Site, path, key string) limiter.Level {
	t.Helper()
	for _, l := range listenersOf(t, s) {
		for b := range rule.Buckets(l.Limits) {
			if b.Path == path {
				level, err := l.Store.(*limiter.Memory).Peek(t.Context(), limiter.Bucket{Name: b.Name, Key: key, Limit: b.Stored(time.Now()), Cost: 1})
				if err != nil {
					t.Fatal(err)
				}
				return level
			}
		}
	}
	t.Fatalf("no limit %s", path)
	return limiter.Level{}
}

// openOf returns how many connections of a key a limit counts as open.
func openOf(t testing.TB, s *sitetest.Site, path, key string) int64 {
	t.Helper()
	return connectionsOf(t, s, path, key).Held
}

// wantOpen waits until a limit counts that many connections of a key as open.
func wantOpen(t testing.TB, s *sitetest.Site, path, key string, want int64) {
	t.Helper()
	sitetest.Eventually(t, fmt.Sprintf("%s has %d connections of %s", path, want, key), func() bool { return openOf(t, s, path, key) == want })
}

// TestOpenConnections guards that a client has no more connections open than it may, that one counts until it is
// closed, with one request or several, that the next ones are reset, and that others are not concerned.
func TestOpenConnections(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{Global: wrapped("rate_limit {\nconcurrency 2\n}"), Site: "respond ok"})
	two := dialer{t, "127.0.0.2"}
	first := two.dial(s.Addr)
	if got := first.get() + " " + two.got(3, s.Addr); got != "ok ok reset reset" {
		t.Error(got)
	}
	if got := (dialer{t, "127.0.0.3"}).got(3, s.Addr); got != "ok ok reset" {
		t.Errorf("another client: %s", got)
	}
	if got := first.get(); got != "ok" {
		t.Errorf("another request over the first connection: %s", got)
	}
	_ = first.conn.Close()
	wantOpen(t, s, "connections", "127.0.0.2", 1)
	if got := two.got(2, s.Addr); got != "ok reset" {
		t.Errorf("after one was closed: %s", got)
	}
}

// TestConnectionsAreExact guards that 20 clients of an address that dial in parallel, while the config is loaded
// three times, never have more connections open than they may, and open exactly as many as its bucket and its clock
// admit; and that nothing is left when all are closed.
func TestConnectionsAreExact(t *testing.T) {
	t.Parallel()
	const atOnce, size = 5, 150
	c := sitetest.Config{
		Global: wrapped(fmt.Sprintf("rate_limit {\nlimit open {\nconcurrency %d\n}\nlimit new {\nrate 10/s\nsize %d\n}\n}", atOnce, size)), Site: "respond ok",
	}
	s := sitetest.StartConfig(t, c)
	var addr atomic.Value
	addr.Store(s.Addr)
	var open, opened atomic.Int64
	var dialers sync.WaitGroup
	dialing, end := t.Context(), make(chan struct{})
	for range 20 {
		dialers.Go(func() {
			for dialing.Err() == nil {
				select {
				case <-end:
					return
				default:
				}
				d := net.Dialer{Timeout: sitetest.Patience, LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
				to := addr.Load().(string)
				conn, err := d.DialContext(dialing, "tcp", to)
				if err != nil {
					continue // refused, or of the config before
				}
				one := &client{conn, bufio.NewReader(conn), to}
				if one.get() == "ok" {
					opened.Add(1)
					if now := open.Add(1); now > atOnce {
						t.Errorf("%d connections are open", now)
					}
					runtime.Gosched()
					open.Add(-1)
				}
				_ = conn.Close()
			}
		})
	}
	most := int64(size)
	for i := range 4 {
		sitetest.Eventually(t, "all are opened that may be", func() bool { return connectionsOf(t, s, "new", "127.0.0.2").Remaining == 0 })
		if i < 3 {
			s.Reload(c)
			addr.Store(s.Addr)
			s.Clock.Advance(10 * time.Second)
			most += 100
		}
	}
	close(end)
	dialers.Wait()
	if got := opened.Load(); got > most || got < most-100 { // a config that ends answers not all that it has accepted
		t.Errorf("%d connections were opened, want %d", got, most)
	}
	wantOpen(t, s, "open", "127.0.0.2", 0)
}

// TestConnectionsOfTheConfigBefore guards that a connection of the config before counts while a request over it is
// in progress, at a limit with another number too, and ends with it.
func TestConnectionsOfTheConfigBefore(t *testing.T) {
	t.Parallel()
	begun, release := make(chan struct{}), make(chan struct{})
	upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { close(begun); <-release })
	limit := func(n int) string {
		return fmt.Sprintf("%s\ngrace_period 1m", wrapped(fmt.Sprintf("rate_limit {\nconcurrency %d\n}", n)))
	}
	s := sitetest.StartConfig(t, sitetest.Config{Global: limit(3), Site: "reverse_proxy " + upstream})
	two := dialer{t, "127.0.0.2"}
	first := two.dial(s.Addr)
	ended := make(chan string)
	go func() { ended <- first.get() }()
	<-begun
	for range 3 {
		s.Reload(sitetest.Config{Global: limit(1), Site: "respond again"})
		if got := two.get(s.Addr); got != "reset" {
			t.Errorf("beside the connection of the config before: %s", got)
		}
	}
	close(release)
	<-ended
	_ = first.conn.Close()
	wantOpen(t, s, "connections", "127.0.0.2", 0)
	if got := two.get(s.Addr); got != "again" {
		t.Errorf("afterwards: %s", got)
	}
}

// TestNewConnections guards how many connections a client may open in a time, and that bans begin and end. With
// accounting each, attempts that the limit of open ones refuses count for the ban too.
func TestNewConnections(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{Global: wrapped("rate_limit new 1/s {\nsize 2\nban 10s\nban_after 2\n}"), Site: "respond ok"})
	two := dialer{t, "127.0.0.2"}
	for _, step := range []struct {
		after time.Duration
		want  string
	}{{0, "ok ok reset"}, {time.Second, "ok reset"}, {9 * time.Second, "reset"}, {time.Second, "ok ok reset"}} {
		s.Clock.Advance(step.after)
		if got := two.got(strings.Count(step.want, " ")+1, s.Addr); got != step.want {
			t.Errorf("%v later: %s, want %s", step.after, got, step.want)
		}
	}
	s.Reload(sitetest.Config{
		Global: wrapped("rate_limit {\nlimit open {\nconcurrency 1\n}\nlimit tries {\nrate 1/s\nsize 4\nban 10s\n}\naccounting each\n}"), Site: "respond ok",
	})
	three := dialer{t, "127.0.0.3"}
	first := three.dial(s.Addr)
	if got := first.get() + " " + three.got(4, s.Addr); got != "ok reset reset reset reset" {
		t.Error(got)
	}
	_ = first.conn.Close()
	wantOpen(t, s, "open", "127.0.0.3", 0)
	s.Clock.Advance(9 * time.Second)
	if got := three.get(s.Addr); got != "reset" {
		t.Errorf("while it is banned: %s", got)
	}
}

// TestConnectionsWithOtherOptions guards one bucket for all, a matcher that leaves out an address, a dry run, denied
// connections that count, and keys beyond the most that there may be, which share buckets.
func TestConnectionsWithOtherOptions(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		block string
		from  []string // who dials
		want  string
	}{
		"all":          {"key all\nconcurrency 2", []string{"2", "2", "3"}, "ok ok reset"},
		"not matched":  {"concurrency 1\nmatch not remote_ip 127.0.0.3 127.0.0.4/31", []string{"2", "2", "3", "3", "5", "5"}, "ok reset ok ok ok ok"},
		"matched":      {"concurrency 1\nmatch client_ip 127.0.0.3", []string{"2", "2", "3", "3"}, "ok ok ok reset"},
		"dry run":      {"rate 1/h\ndry_run", []string{"2", "2"}, "ok ok"},
		"nested":       {"concurrency 2\nlimit inner {\nrate 1/h\n}", []string{"2", "2"}, "ok reset"},
		"prefix":       {"concurrency 1\nipv4_prefix 24", []string{"2", "3"}, "ok reset"},
		"share":        {"rate 1/h\nmax_keys 1\nwhen_full share", []string{"2", "3", "4", "5"}, "ok ok reset reset"},
		"share open":   {"concurrency 1\nmax_keys 1\nwhen_full share", []string{"2", "3"}, "ok ok"},
		"count denied": {"rate 1/s\nsize 1\ncount_denied", []string{"2", "+600ms", "2", "+600ms", "2", "+1s", "2"}, "ok reset reset ok"},
		"window":       {"algorithm sliding_log\nsize 2\nwindow 1m", []string{"2", "2", "2", "+1m", "2"}, "ok ok reset ok"},
		"off":          {"concurrency 1\nfactor 0", []string{"2", "2"}, "ok ok"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sitetest.StartConfig(t, sitetest.Config{Global: wrapped("rate_limit {\n" + tc.block + "\n}"), Site: "respond ok"})
			var got []string
			for _, from := range tc.from {
				if after, err := time.ParseDuration(from); err == nil && from[0] == '+' {
					s.Clock.Advance(after)
					continue
				}
				got = append(got, dialer{t, "127.0.0." + from}.get(s.Addr))
			}
			if strings.Join(got, " ") != tc.want {
				t.Errorf("got %v, want %s", got, tc.want)
			}
		})
	}
}

// TestConnectionsOverIPv6 guards that a client over IPv6 has one bucket for its network, and that one over IPv4 has the
// same bucket at a socket for both.
func TestConnectionsOverIPv6(t *testing.T) {
	t.Parallel()
	probe, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("needs IPv6")
	}
	_ = probe.Close()
	s := sitetest.StartConfig(t, sitetest.Config{Global: wrapped("rate_limit {\nconcurrency 1\n}"), Site: "bind ::\nrespond ok"})
	_, port, _ := strings.Cut(s.Addr, ":")
	for i, want := range []string{"ok", "reset"} {
		c := dialer{t, "::1"}.dial("[::1]:" + port)
		c.host = s.Addr
		if got := c.get(); got != want {
			t.Errorf("%d, over IPv6: %s, want %s", i, got, want)
		}
	}
	if open := openOf(t, s, "connections", "::/64"); open != 1 {
		t.Errorf("%d connections of the network", open)
	}
	if got := (dialer{t, "127.0.0.2"}).got(2, s.Addr); got != "ok reset" {
		t.Errorf("over IPv4 at that socket: %s", got)
	}
	if open := openOf(t, s, "connections", "127.0.0.2"); open != 1 {
		t.Errorf("%d connections over IPv4", open)
	}
}

// TestConnectionsOfSockets guards that clients of a unix socket, which have no address, are not limited by it, but by
// one bucket for all.
func TestConnectionsOfSockets(t *testing.T) {
	t.Parallel()
	for limit, want := range map[string]string{"concurrency 1": "ok ok ok", "concurrency 2\nkey all": "ok ok reset"} {
		socket := filepath.Join(sitetest.TempDir(t), "s")
		s := sitetest.StartConfig(t, sitetest.Config{
			Global: wrapped("rate_limit {\n" + limit + "\n}"), Site: "respond other", Sites: "http://x {\nbind unix/" + socket + "\nrespond ok\n}",
		})
		if got := strings.ReplaceAll((dialer{t: t}).got(3, socket), "EOF", "reset"); got != want {
			t.Errorf("%s: %s, want %s", limit, got, want)
		}
		_ = s
	}
}

// TestConnectionsOverHTTP2 guards that a connection counts once, however many requests it has.
func TestConnectionsOverHTTP2(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{Global: wrapped("rate_limit {\nconcurrency 1\n}"), Site: "respond ok"})
	s.From("127.0.0.2")
	s.UseHTTP2()
	if got := s.Statuses(100, "GET", "/"); got != "map[200:100]" {
		t.Error(got)
	}
	if got := (dialer{t, "127.0.0.2"}).get(s.Addr); got != "reset" {
		t.Errorf("beside it: %s", got)
	}
}

// TestUpgradedConnections guards that a connection that a handler has taken over counts until it is closed, and that
// it is copied as without a limit.
func TestUpgradedConnections(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, _ = io.Copy(conn, conn)
		_ = conn.Close()
	})
	s := sitetest.StartConfig(t, sitetest.Config{Global: wrapped("rate_limit {\nconcurrency 1\n}"), Site: "reverse_proxy " + upstream})
	c := dialer{t, "127.0.0.2"}.dial(s.Addr)
	fmt.Fprintf(c.conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", s.Addr)
	if res, err := http.ReadResponse(c.r, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("got %v, %v", res, err)
	}
	big := strings.Repeat("x", 1<<20)
	go func() { _, _ = io.WriteString(c.conn, big) }()
	back := make([]byte, len(big))
	if _, err := io.ReadFull(c.r, back); err != nil || string(back) != big {
		t.Errorf("echo: %v", err)
	}
	if got := (dialer{t, "127.0.0.2"}).get(s.Addr); got != "reset" {
		t.Errorf("beside it: %s", got)
	}
	_ = c.conn.Close()
	wantOpen(t, s, "connections", "127.0.0.2", 0)
}

// TestConnectionsBeforeTLS guards that a client is refused before the handshake, that one whose handshake has not
// ended counts, and that requests have TLS.
func TestConnectionsBeforeTLS(t *testing.T) {
	t.Parallel()
	_, port, _ := strings.Cut(redistest.FreeAddr(t), ":")
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: wrapped("rate_limit {\nconcurrency 2\n}\ntls") + "\nskip_install_trust\nauto_https disable_redirects\nhttps_port " + port, Site: "respond ok",
		Sites: "https://localhost:" + port + " {\ntls internal\nrespond {tls_version}:{http.request.proto}\n}",
	})
	handshake := func(from string) (*tls.Conn, error) {
		c := dialer{t, from}.dial("127.0.0.1:" + port)
		if c.conn == nil {
			return nil, syscall.ECONNRESET
		}
		conn := tls.Client(c.conn, &tls.Config{ServerName: "localhost", InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
		return conn, conn.HandshakeContext(t.Context())
	}
	sitetest.Eventually(t, "there is a certificate", func() bool {
		c, err := handshake("127.0.0.9")
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	half := dialer{t, "127.0.0.2"}.dial("127.0.0.1:" + port)
	c, err := handshake("127.0.0.2")
	if err != nil {
		t.Fatal(err)
	}
	if got := (&client{c, bufio.NewReader(c), "localhost:" + port}).get(); got != "tls1.3:HTTP/1.1" {
		t.Error(got)
	}
	if _, err := handshake("127.0.0.2"); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("the third connection: %v", err)
	}
	_, _ = half.conn.Close(), c.Close()
	wantOpen(t, s, "connections", "127.0.0.2", 0)
}

// TestConnectionsOfProxies guards that the client counts that the PROXY protocol names, that a connection without a
// header keeps nobody waiting, and that a second limit before it counts the connections of others than the proxies.
func TestConnectionsOfProxies(t *testing.T) {
	t.Parallel()
	const proxy = "proxy_protocol {\nallow 127.0.0.9/32\n}\n"
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: wrapped("rate_limit direct {\nconcurrency 2\nmatch not remote_ip 127.0.0.9\n}\n" + proxy + "rate_limit {\nconcurrency 1\n}"),
		Site:   "respond {client_ip}",
	})
	nine, two := dialer{t, "127.0.0.9"}, dialer{t, "127.0.0.2"}
	for range 3 {
		nine.dial(s.Addr) // says nothing
	}
	via := func(address string) string {
		c := nine.dial(s.Addr)
		_, _ = fmt.Fprintf(c.conn, "PROXY TCP4 %s 127.0.0.1 1234 80\r\n", address)
		return c.get()
	}
	for i, step := range []struct{ client, want string }{
		{"203.0.113.1", "203.0.113.1"}, {"203.0.113.1", "reset"}, {"203.0.113.2", "203.0.113.2"},
	} {
		if got := via(step.client); got != step.want {
			t.Errorf("%d, %s: %s, want %s", i, step.client, got, step.want)
		}
	}
	if got := two.got(2, s.Addr); got != "127.0.0.2 reset" {
		t.Errorf("without a proxy: %s", got)
	}
	wantOpen(t, s, "direct", "127.0.0.2", 1)
	two.dial(s.Addr) // says nothing
	wantOpen(t, s, "direct", "127.0.0.2", 2)
	if got := two.get(s.Addr); got != "reset" {
		t.Errorf("beside one that says nothing: %s", got)
	}
	if open := openOf(t, s, "connections", "127.0.0.2"); open != 1 {
		t.Errorf("%d connections count behind the PROXY protocol", open)
	}
}

// TestConnectionsBeforeTheProxyProtocol guards that in the other order the connections of the proxy count.
func TestConnectionsBeforeTheProxyProtocol(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: wrapped("rate_limit {\nconcurrency 1\n}\nproxy_protocol {\nallow 127.0.0.9/32\n}"), Site: "respond {client_ip}",
	})
	for i, want := range []string{"203.0.113.0", "reset"} {
		c := dialer{t, "127.0.0.9"}.dial(s.Addr)
		if c.conn != nil {
			_, _ = fmt.Fprintf(c.conn, "PROXY TCP4 203.0.113.%d 127.0.0.1 1234 80\r\n", i)
		}
		if got := c.get(); got != want {
			t.Errorf("%d: %s, want %s", i, got, want)
		}
	}
}

// TestBannedConnections guards that connections of a client are refused that a limit of requests has banned, from the
// ban on, after a reload, until it is lifted or ends; and that this is counted there.
func TestBannedConnections(t *testing.T) {
	c := sitetest.Config{Global: wrapped("rate_limit {\nbanned login\n}"), Site: "rate_limit /login login 1/h {\nban 1m\n}\nrespond ok"}
	s, a := sitetest.StartWithAdmin(t, c)
	c.Admin = a.Addr
	s.From("127.0.0.2")
	check := func(when, want string) {
		t.Helper()
		if got := (dialer{t, "127.0.0.2"}).get(s.Addr); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
		if got := (dialer{t, "127.0.0.3"}).get(s.Addr); got != "ok" {
			t.Errorf("%s: another client: %s", when, got)
		}
	}
	const ask = `{"limit":"login","key":"127.0.0.2"}`
	if got := s.Statuses(2, "GET", "/login"); got != "map[200:1 429:1]" {
		t.Fatal(got)
	}
	check("banned", "reset")
	s.Reload(c)
	check("after a reload", "reset")
	a.Ask("POST", "unban", ask)
	check("lifted", "ok")
	a.Ask("POST", "ban", strings.Replace(ask, "}", `,"duration":"1m"}`, 1))
	check("banned by hand", "reset")
	a.Ask("POST", "reset", ask)
	check("reset", "ok")
	a.Ask("POST", "ban", strings.Replace(ask, "}", `,"duration":"1m"}`, 1))
	s.Clock.Advance(time.Minute + time.Second)
	check("over", "ok")
	sitetest.WantJSON(t, a.Ask("GET", "limits", "")["limits"], `[{"path":"login","denied":4}]`)
}

// TestConnectionsBannedInRedis guards that a ban in Redis holds for connections as this Caddy knows of it: when a request
// has met it, and until it is lifted here.
func TestConnectionsBannedInRedis(t *testing.T) {
	server := redistest.Start(t)
	c := sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout) + "\n" + wrapped("rate_limit {\nbanned login\nconcurrency 3\n}"),
		Site:   "rate_limit /login login 1/h {\nban 1m\n}\nrespond ok",
	}
	s, a := sitetest.StartWithAdmin(t, c)
	c.Admin = a.Addr
	s.From("127.0.0.2")
	if got := s.Statuses(2, "GET", "/login"); got != "map[200:1 429:1]" {
		t.Fatal(got)
	}
	two := dialer{t, "127.0.0.2"}
	if got := two.get(s.Addr); got != "reset" {
		t.Errorf("banned: %s", got)
	}
	s.Reload(c)
	if got := two.get(s.Addr); got != "reset" {
		t.Errorf("after a reload: %s", got)
	}
	a.Ask("POST", "unban", `{"limit":"login","key":"127.0.0.2"}`)
	if got := two.get(s.Addr); got != "ok" {
		t.Errorf("lifted: %s", got)
	}
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit":"connections","key":"127.0.0.2"}`), `{"from":"memory","held":1}`)
}

// TestConnectionsBesideRedis guards that this process counts connections, whatever becomes of a Redis that has the limits
// of requests: it asks none, and forgets nothing when that one has lost all, or is gone.
func TestConnectionsBesideRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout) + "\n" + wrapped("rate_limit {\nlimit open {\nconcurrency 3\n}\nlimit new {\nrate 2/h\n}\n}"),
		Site:   "rate_limit /x 1000/s\nrespond ok",
	})
	s.From("127.0.0.3")
	two := dialer{t, "127.0.0.2"}
	if got := two.got(3, s.Addr); got != "ok ok reset" {
		t.Errorf("at first: %s", got)
	}
	if keys := server.Client().Keys(t.Context(), "*").Val(); len(keys) > 0 {
		t.Errorf("Redis has %q", keys)
	}
	for _, step := range []struct {
		what string
		harm func()
	}{
		{"emptied", func() { server.Client().FlushAll(t.Context()) }}, {"restarted", func() { server.Restart(t) }}, {"gone", server.Kill},
	} {
		step.harm()
		_ = s.Get("/x")
		if got, open := two.get(s.Addr), openOf(t, s, "open", "127.0.0.2"); got != "reset" || open != 2 {
			t.Errorf("when Redis is %s: %s, and %d are open", step.what, got, open)
		}
	}
}

// TestConnectionsAreShown guards that what shows limits of requests shows those of connections.
func TestConnectionsAreShown(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{
		Global: wrapped("rate_limit {\nlimit open {\nconcurrency 2\n}\nlimit new {\nrate 3/h\nban 1h\nban_after 2\ntrack_top 10\n}\n}"), Site: "respond ok",
	})
	two := dialer{t, "127.0.0.2"}
	if got := two.got(3, s.Addr); got != "ok ok reset" {
		t.Fatal(got)
	}
	sitetest.WantJSON(t, a.Ask("GET", "status", "")["limits"], `[{"path":"open","admitted":2,"denied":1},{"path":"new","admitted":2,"denied":0}]`)
	sitetest.WantJSON(t, a.Ask("GET", "limits", "")["limits"],
		`[{"path":"open","connections":true,"handler":-1,"server":"srv0","size":2},{"path":"new","connections":true,"server":"srv0","size":3}]`)
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit":"open","key":"127.0.0.2"}`), `{"level":0,"held":2,"remaining":0,"from":"memory"}`)
	sitetest.WantJSON(t, a.Ask("GET", "top?limit=new", ""), `{"limit":"new"}`)
	metrics := scrape(t, a.Addr)
	for _, name := range []string{`open_connections{limit="open"}`, `decisions_total{by="memory",limit="new",result="admitted"}`} {
		if got := metrics[name]; got != "2" {
			t.Errorf("%s is %q, want 2", name, got)
		}
	}
	a.Ask("POST", "ban", `{"limit":"new","key":"127.0.0.3","duration":"1h"}`)
	if got := (dialer{t, "127.0.0.3"}).get(s.Addr); got != "reset" {
		t.Errorf("banned by hand: %s", got)
	}
	a.Ask("POST", "unban", `{"limit":"new","key":"127.0.0.3"}`)
	if got := (dialer{t, "127.0.0.3"}).get(s.Addr); got != "ok" {
		t.Errorf("lifted: %s", got)
	}
	refused := 0
	for _, e := range s.Entries() {
		if e.Text() != "" && strings.Contains(fmt.Sprint(e), "connection refused") {
			refused++
		}
	}
	if refused != 2 {
		t.Errorf("%d refusals in the log", refused)
	}
}

// TestConnectionErrors guards what is an error when a config is loaded, in one line that says what to do.
func TestConnectionErrors(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{Site: "respond ok"})
	_, port, _ := strings.Cut(redistest.FreeAddr(t), ":")
	for _, tc := range []struct {
		want string
		c    sitetest.Config
	}{
		{
			`banned: "login" is not valid; use the name of a limit of requests in this config that has ban`,
			sitetest.Config{Global: wrapped("rate_limit {\nbanned login\n}")},
		},
		{
			`banned: "login" is not valid; use the name of a limit with ban, with the key {client_ip}`,
			sitetest.Config{Global: wrapped("rate_limit {\nbanned login\n}"), Site: "rate_limit login {header.X} 1/s {\nban 1m\n}\nrespond ok"},
		},
		{
			`"one" is the name of a limit of requests and of one of connections; use another for one of them`,
			sitetest.Config{Global: wrapped("rate_limit one 1/s"), Site: "rate_limit one 1/s\nrespond ok"},
		},
		{
			"rate_limit has to come before TLS; write tls in a line of its own after it",
			sitetest.Config{
				Global: wrapped("rate_limit 1/s") + "\nskip_install_trust\nauto_https disable_redirects", Sites: "https://localhost:" + port + " {\ntls internal\n}",
			},
		},
	} {
		if tc.c.Site == "" {
			tc.c.Site = "respond ok"
		}
		if err := s.Load(tc.c); err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("got  %v\nwant %s", err, tc.want)
		}
	}
}
