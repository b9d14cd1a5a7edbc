package listener

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// readyApp is an app that has started.
type readyApp struct{ App }

func (readyApp) Ready() {}

// newWrapper returns a wrapper with limits.
func newWrapper(t testing.TB, limits ...*config.Limit) *Wrapper {
	t.Helper()
	process := state.New(telemetry.Options{})
	shared, err := compile.NewShared(new(config.App), process)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shared.Release)
	w := &Wrapper{Listener: config.Listener{Limits: limits}, app: readyApp{}}
	c, err := compile.NewListener(&w.Listener, option.OnLoad)
	if err != nil {
		t.Fatal(err)
	}
	c.Logger, c.Location = zap.NewNop(), func(string) string { return "" }
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	if w.limits.Limits, err = c.Load(ctx, shared); err != nil {
		t.Fatal(err)
	}
	w.limits.Accounting, w.limits.Store, w.limits.Process, w.limits.Logger = c.Settings.Accounting, limiter.NewMemory(), process.Process, zap.NewNop()
	return w
}

// open returns how many connections count as open.
func (w *Wrapper) open() (n int64) {
	for _, u := range w.limits.Store.(*limiter.Memory).Usage() {
		n += u.Held
	}
	return n
}

// accepted returns a connection that w has accepted from a client, which is closed when the test ends.
func accepted(t testing.TB, w *Wrapper, network string) (server, client net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = t.TempDir() + "/s"
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial(network, l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	if server, err = w.WrapListener(l).Accept(); err != nil {
		t.Fatal(err)
	}
	return server, client
}

// TestForgottenConnections guards that a connection which a handler has taken over and never closes counts until the
// runtime closes its descriptor, and no longer, also if the handler has the connection within.
func TestForgottenConnections(t *testing.T) {
	t.Parallel()
	w := newWrapper(t, &config.Limit{Concurrency: "10"})
	takeOver := func() (within *net.TCPConn, client net.Conn) {
		server, client := accepted(t, w, "tcp")
		return server.(*tcpConn).TCPConn, client
	}
	use := func() (client net.Conn) {
		within, client := takeOver()
		for range 3 {
			runtime.GC()
		}
		if n := w.open(); n != 1 {
			t.Errorf("%d connections count while the connection within is in use", n)
		}
		if _, err := within.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		return client
	}
	client := use()
	for end := time.Now().Add(10 * time.Second); w.open() > 0 && time.Now().Before(end); {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	if n := w.open(); n != 0 {
		t.Errorf("%d connections count that are forgotten", n)
	}
	_ = client.SetReadDeadline(time.Now().Add(10 * time.Second))
	if got, err := io.ReadAll(client); err != nil || string(got) != "x" {
		t.Errorf("the client got %q, %v", got, err)
	}
}

// TestClosedOnce guards that a connection is released once, however often it is closed, and whoever closes it while a
// limit decides.
func TestClosedOnce(t *testing.T) {
	t.Parallel()
	w := newWrapper(t, &config.Limit{Concurrency: "10"})
	one, _ := accepted(t, w, "tcp")
	two, _ := accepted(t, w, "tcp")
	for range 3 {
		_ = one.Close()
	}
	if n := w.open(); n != 1 {
		t.Errorf("%d connections count, want the other", n)
	}
	_ = two.Close()
	late := newLate(wrappedConn{two}, w).(*lateConn)
	_ = late.Close()
	_, _ = late.Read(make([]byte, 1))
	if n := w.open(); n != 0 {
		t.Errorf("%d connections count that were closed before they were decided", n)
	}
}

// wrappedConn is a connection whose address may not be known.
type wrappedConn struct{ net.Conn }

// TestConnectionsKeepTheirMethods guards that a TCP connection sends files as it does without limits, that one wrapper
// adds to what another holds, and that the system's connection can be found within any.
func TestConnectionsKeepTheirMethods(t *testing.T) {
	t.Parallel()
	w := newWrapper(t, &config.Limit{Concurrency: "10", Key: "all"})
	server, _ := accepted(t, w, "tcp")
	for what, ok := range map[string]bool{
		"ReadFrom": is[io.ReaderFrom](server), "WriteTo": is[io.WriterTo](server), "SyscallConn": is[syscall.Conn](server),
		"CloseWrite": is[interface{ CloseWrite() error }](server),
	} {
		if !ok {
			t.Errorf("a TCP connection has no %s", what)
		}
	}
	if same := holding(server, rule.Units{}); same != server {
		t.Errorf("a connection that holds nothing more is a %T", same)
	}
	units, _ := w.admit(server)
	if same := holding(server, units); same != server || w.open() != 2 {
		t.Errorf("a connection with two wrappers is a %T, and holds %d", same, w.open())
	}
	_ = server.Close()
	if n := w.open(); n != 0 {
		t.Errorf("%d are held after it was closed", n)
	}
	socket, _ := accepted(t, w, "unix")
	if !is[*net.UnixConn](innermost(socket)) || !knowsAddress(socket) {
		t.Errorf("a socket's connection is a %T", innermost(socket))
	}
	if err := newLate(server, w).(*lateConn).CloseWrite(); errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
}

// is reports whether a connection is of a type.
func is[T any](c net.Conn) bool { _, ok := c.(T); return ok }

// BenchmarkConnect measures what deciding on a connection and releasing it costs, and allocates.
func BenchmarkConnect(b *testing.B) {
	for name, limits := range map[string][]*config.Limit{
		"rate":    {{Rate: "1000000/s"}},
		"open":    {{Concurrency: "1000000"}},
		"both":    {{Name: "new", Rate: "1000000/s"}, {Name: "open", Concurrency: "1000000"}},
		"refused": {{Rate: "1/h"}},
	} {
		b.Run(name, func(b *testing.B) {
			w := newWrapper(b, limits...)
			b.ReportAllocs()
			for b.Loop() {
				units, _ := w.limits.Connect("203.0.113.7")
				units.Release()
			}
		})
	}
}

// BenchmarkOpenConnection measures the memory of a connection that counts as open, without what it takes unlimited.
func BenchmarkOpenConnection(b *testing.B) {
	const n = 100_000
	w := newWrapper(b, &config.Limit{Name: "new", Rate: "1000000/s"}, &config.Limit{Name: "open", Concurrency: "1000000"})
	tcp := make([]*net.TCPConn, n)
	for i := range tcp {
		tcp[i] = new(net.TCPConn)
	}
	conns := make([]net.Conn, 0, n)
	before := heap()
	for _, c := range tcp {
		units, _ := w.limits.Connect("203.0.113.7")
		conns = append(conns, holding(c, units))
	}
	taken := heap() - before
	for b.Loop() { //nolint:revive // what is measured does not depend on time
	}
	b.ReportMetric(float64(taken)/n, "B/conn")
	runtime.KeepAlive(conns)
	runtime.KeepAlive(tcp)
}

// heap returns how much memory is in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// BenchmarkHandshake measures TLS handshakes over a listener with limits that refuse nothing, in turns with one without:
// vs-none is how many times as fast they are.
func BenchmarkHandshake(b *testing.B) {
	certFile, keyFile := redistest.NewAuthority(b).Issue(b, "localhost")
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		b.Fatal(err)
	}
	w := newWrapper(b, &config.Limit{Name: "new", Rate: "1000000/s"}, &config.Limit{Name: "open", Concurrency: "1000000"})
	serve := func(wrap func(net.Listener) net.Listener) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = l.Close() })
		t := tls.NewListener(wrap(l), &tls.Config{Certificates: []tls.Certificate{cert}})
		go func() {
			for c, err := t.Accept(); err == nil; c, err = t.Accept() {
				go func() {
					_, _ = io.Copy(io.Discard, c)
					_ = c.Close()
				}()
			}
		}()
		return l.Addr().String()
	}
	addrs := [2]string{serve(func(l net.Listener) net.Listener { return l }), serve(w.WrapListener)}
	var took [2]time.Duration
	for b.Loop() {
		for i, addr := range addrs {
			began := time.Now()
			c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
			if err != nil {
				b.Fatal(err)
			}
			_ = c.Close()
			took[i] += time.Since(began)
		}
	}
	b.ReportMetric(float64(took[0])/float64(took[1]), "vs-none")
}
