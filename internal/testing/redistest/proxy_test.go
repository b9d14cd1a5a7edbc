package redistest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"runtime"
	"syscall"
	"testing"
	"time"
)

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

// send sends a command of one line.
func send(t *testing.T, conn net.Conn, command string) {
	t.Helper()
	if _, err := conn.Write([]byte(command + "\r\n")); err != nil {
		t.Fatal(err)
	}
}

// expect reads the reply.
func expect(t *testing.T, conn net.Conn, want string) {
	t.Helper()
	reply := make([]byte, len(want))
	n, err := io.ReadFull(conn, reply)
	if err != nil || string(reply[:n]) != want {
		t.Fatalf("got %q, %v, want %q", reply[:n], err, want)
	}
}

// expectSilence reads nothing for a while.
func expectSilence(t *testing.T, conn net.Conn) {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	reply := make([]byte, 64)
	if n, err := conn.Read(reply); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %q, %v, want nothing", reply[:n], err)
	}
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
}

// expectClosed reads until the connection is closed.
func expectClosed(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection is open")
	}
}

func expectRefused(t *testing.T, addr string) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		conn.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v, want a refusal", err)
	}
}

// startProxied runs a server, a proxy and a working connection through it.
func startProxied(t *testing.T) (*Server, *Proxy, net.Conn) {
	t.Helper()
	s := Start(t)
	p := StartProxy(t, s.Socket)
	conn := dial(t, p.Addr)
	send(t, conn, "PING")
	expect(t, conn, "+PONG\r\n")
	return s, p, conn
}

// TestProxyPasses guards that a proxy without a fault is transparent, whatever its
// target, and that it counts connections.
func TestProxyPasses(t *testing.T) {
	t.Parallel()
	s := Start(t)
	for name, target := range map[string]string{"tcp": s.Addr, "unix": s.Socket} {
		p := StartProxy(t, target)
		for n := range 3 {
			conn := dial(t, p.Addr)
			send(t, conn, "PING")
			expect(t, conn, "+PONG\r\n")
			if p.Connections() != n+1 || p.Open() != 1 {
				t.Errorf("%s: %d taken, %d open, want %d, 1", name, p.Connections(), p.Open(), n+1)
			}
			conn.Close()
			WaitFor(t, 5*time.Second, func() error {
				if open := p.Open(); open != 0 {
					return fmt.Errorf("%s: %d open", name, open)
				}
				return nil
			})
		}
	}
}

// TestProxyTargetDown guards that the connections of clients are closed when the
// server is down, or goes down.
func TestProxyTargetDown(t *testing.T) {
	t.Parallel()
	s, p, conn := startProxied(t)
	s.Kill()
	expectClosed(t, conn)
	expectClosed(t, dial(t, p.Addr))
}

// TestProxyDelay guards that replies are delayed by the given time, and that
// ending the fault also ends a delay in progress.
func TestProxyDelay(t *testing.T) {
	t.Parallel()
	_, p, conn := startProxied(t)
	p.Delay(50*time.Millisecond, 10*time.Millisecond)
	begin := time.Now()
	send(t, conn, "PING")
	expect(t, conn, "+PONG\r\n")
	if took := time.Since(begin); took < 50*time.Millisecond {
		t.Errorf("took %v", took)
	}

	p.Delay(time.Hour)
	send(t, conn, "PING")
	expectSilence(t, conn)
	p.Pass()
	expect(t, conn, "+PONG\r\n")
}

// TestProxyBlackHole guards that nothing gets through a black hole, neither on
// existing connections nor on new ones, nor the close of the server, and that
// everything works as before afterwards.
func TestProxyBlackHole(t *testing.T) {
	t.Parallel()
	s, p, old := startProxied(t)
	p.BlackHole()
	for _, conn := range []net.Conn{old, dial(t, p.Addr)} {
		send(t, conn, "INCR n")
		expectSilence(t, conn)
	}
	s.Kill()
	last := dial(t, p.Addr)
	send(t, last, "INCR n")
	expectSilence(t, last)
	expectSilence(t, old)

	p.Pass()
	expectClosed(t, old)
	expectClosed(t, last)
	s.Restart(t)
	conn := dial(t, p.Addr)
	send(t, conn, "INCR n")
	expect(t, conn, ":1\r\n")
}

// TestProxyBlackHoleLoses guards that data lost in a black hole does not arrive
// later, on a connection that outlives it.
func TestProxyBlackHoleLoses(t *testing.T) {
	t.Parallel()
	s, p, conn := startProxied(t)
	p.BlackHole()
	send(t, conn, "INCR n")
	expectSilence(t, conn)
	if calls := s.CommandStat(t, "incr"); calls != 0 {
		t.Errorf("INCR ran %d times", calls)
	}
	p.Pass()
	send(t, conn, "INCR n")
	expect(t, conn, ":1\r\n")
}

// TestProxyCutReplies guards that a command whose reply is cut has run, that its
// connection is reset, and that only the intended replies are cut.
func TestProxyCutReplies(t *testing.T) {
	t.Parallel()
	for name, requests := range map[string][]string{"all": nil, "some": {"evalsha", "incr"}} {
		t.Run(name, func(t *testing.T) {
			s, p, conn := startProxied(t)
			p.CutReplies(requests...)
			if requests != nil {
				send(t, conn, "PING")
				expect(t, conn, "+PONG\r\n")
			}
			send(t, conn, "InCr n")
			if _, err := io.ReadAll(conn); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want a reset", err)
			}
			if n, err := s.Client().Get(context.Background(), "n").Int(); n != 1 {
				t.Errorf("INCR ran %d times, %v", n, err)
			}
		})
	}
}

// TestProxyHalfReply guards that the beginning of a reply arrives and no more.
func TestProxyHalfReply(t *testing.T) {
	t.Parallel()
	_, p, conn := startProxied(t)
	p.HalfReply(2, "ping")
	send(t, conn, "PING")
	if got, err := io.ReadAll(conn); string(got) != "+P" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestProxySlice guards that a reply arrives whole, and in pieces.
func TestProxySlice(t *testing.T) {
	t.Parallel()
	_, p, conn := startProxied(t)
	p.Slice(3, 10*time.Millisecond)
	begin := time.Now()
	send(t, conn, "PING")
	first := make([]byte, 64)
	if n, err := conn.Read(first); string(first[:n]) != "+PO" || err != nil {
		t.Errorf("got %q, %v", first[:n], err)
	}
	expect(t, conn, "NG\r\n")
	if took := time.Since(begin); took < 20*time.Millisecond {
		t.Errorf("took %v", took)
	}
}

// TestProxyThrottle guards that data takes as long as the bandwidth requires, in
// both directions and for all connections together.
func TestProxyThrottle(t *testing.T) {
	t.Parallel()
	_, p, one := startProxied(t)
	other := dial(t, p.Addr)
	send(t, other, "PING")
	expect(t, other, "+PONG\r\n")
	p.Throttle(200)
	begin := time.Now()
	send(t, one, "PING")
	send(t, other, "PING")
	expect(t, one, "+PONG\r\n")
	expect(t, other, "+PONG\r\n")
	// 6 bytes there and 7 back, twice: the two directions overlap for one of them.
	if took := time.Since(begin); took < 90*time.Millisecond {
		t.Errorf("took %v", took)
	}
}

// TestProxyRefuse guards that no client gets or stays connected while the proxy
// refuses, and that it is back at the same address afterwards.
func TestProxyRefuse(t *testing.T) {
	t.Parallel()
	_, p, conn := startProxied(t)
	p.Refuse()
	expectClosed(t, conn)
	expectRefused(t, p.Addr)
	p.Refuse()

	p.Pass()
	conn = dial(t, p.Addr)
	send(t, conn, "PING")
	expect(t, conn, "+PONG\r\n")
}

// TestProxyCloseAll guards that open connections end and new ones work.
func TestProxyCloseAll(t *testing.T) {
	t.Parallel()
	p := StartProxy(t, Start(t).Addr)
	conn := dial(t, p.Addr)
	send(t, conn, "PING")
	expect(t, conn, "+PONG\r\n")
	p.CloseAll()
	expectClosed(t, conn)
	conn = dial(t, p.Addr)
	send(t, conn, "PING")
	expect(t, conn, "+PONG\r\n")
}

// TestProxyRetarget guards that another target applies to new connections only.
func TestProxyRetarget(t *testing.T) {
	t.Parallel()
	_, p, old := startProxied(t)
	p.Retarget(Start(t).Addr)
	send(t, old, "INCR n")
	expect(t, old, ":1\r\n")
	conn := dial(t, p.Addr)
	for _, c := range []struct {
		net.Conn
		want string
	}{{old, ":2\r\n"}, {conn, ":1\r\n"}} {
		send(t, c, "INCR n")
		expect(t, c, c.want)
	}
}

// TestProxyEnds guards that no goroutine of a proxy outlives its test, whatever
// the fault is, with open connections and requests in progress. It is not
// parallel, because the proxies of other tests would be taken for its own.
func TestProxyEnds(t *testing.T) {
	s := Start(t)
	for name, fault := range map[string]func(*Proxy){
		"pass":       (*Proxy).Pass,
		"delay":      func(p *Proxy) { p.Delay(time.Hour) },
		"slice":      func(p *Proxy) { p.Slice(1, time.Hour) },
		"black hole": (*Proxy).BlackHole,
		"throttle":   func(p *Proxy) { p.Throttle(1) },
		"refuse":     (*Proxy).Refuse,
		"target down": func(p *Proxy) {
			p.Retarget("127.0.0.1:1")
			p.BlackHole()
		},
	} {
		t.Run(name, func(inner *testing.T) {
			p := StartProxy(inner, s.Socket)
			open := dial(t, p.Addr)
			send(t, open, "PING")
			expect(t, open, "+PONG\r\n")
			fault(p)
			open.Write([]byte("PING\r\n"))
			if conn, err := net.Dial("tcp", p.Addr); err == nil {
				t.Cleanup(func() { conn.Close() })
				send(t, conn, "PING")
			}
		})
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		if regexp.MustCompile(`redistest\.\(\*(Proxy|link)\)`).Match(stacks) {
			t.Errorf("%s: %s", name, stacks)
		}
	}
}
