package redisscript

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// clients returns the number of connections to the server, without those of the
// test.
func clients(t testing.TB, server *redistest.Server) int {
	t.Helper()
	list, err := server.Client().ClientList(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(list) {
		if !strings.Contains(line, " addr="+server.Socket) && !strings.Contains(line, server.Socket+":") {
			n++
		}
	}
	return n
}

// TestBoundedWait guards the most important promise: of many concurrent calls to a
// server that hangs, none waits longer than its timeout. Other load on this
// machine can delay them: goroutines that only sleep measure by how much.
func TestBoundedWait(t *testing.T) {
	const timeout, margin, callers = 50 * time.Millisecond, 20 * time.Millisecond, 50
	server := redistest.Start(t)
	b := upTo(100_000)
	for range 3 {
		var seen events
		r := newTestClient(t, server, func(opt *Options) { opt.Timeout, opt.Report = timeout, seen.report })
		redistest.WaitFor(t, 5*time.Second, func() error {
			_, err := r.count(t.Context(), b)
			return err
		})
		var failed, most, late atomic.Int64
		atLeast := func(most *atomic.Int64, n int64) {
			for last := most.Load(); n > last && !most.CompareAndSwap(last, n); last = most.Load() {
			}
		}
		stop := make(chan struct{})
		var busy sync.WaitGroup
		for range callers {
			busy.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						began := time.Now()
						time.Sleep(timeout)
						atLeast(&late, int64(time.Since(began)-timeout))
					}
				}
			})
		}
		for range callers {
			busy.Go(func() {
				for {
					began := time.Now()
					_, err := r.count(context.Background(), b)
					atLeast(&most, int64(time.Since(began)))
					if err != nil {
						failed.Add(1)
					}
					select {
					case <-stop:
						return
					case <-time.After(2 * time.Millisecond):
					}
				}
			})
		}
		time.Sleep(50 * time.Millisecond)
		server.Pause(t)
		time.Sleep(600 * time.Millisecond)
		close(stop)
		busy.Wait()
		server.Resume(t)
		r.Close()
		if failed.Load() < callers {
			t.Fatalf("%d requests failed: the test proves nothing", failed.Load())
		}
		if got := seen.take(); !slices.Contains(got, "down timeout") {
			t.Errorf("reported %q", got)
		}
		worst, idle := time.Duration(most.Load()), time.Duration(late.Load())
		if worst <= timeout+margin+idle {
			return
		}
		t.Logf("waited %v, may wait %v; those who slept were %v late", worst, timeout, idle)
	}
	t.Error("waited too long three times")
}

// TestSlowHandshake guards a server so far away that no call could wait for a
// connection: the connection is made in the background, and then used.
func TestSlowHandshake(t *testing.T) {
	t.Parallel()
	const timeout = 250 * time.Millisecond
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	p.Delay(300 * time.Millisecond)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
		opt.PoolSize = 2
	})
	b := upTo(100)
	s := r.server()
	if d, err := r.count(t.Context(), b); err == nil {
		t.Fatalf("counted %+v without a connection", d)
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		if s.pool.made.Load() == 0 {
			return errors.New("not connected")
		}
		return nil
	})
	p.Delay(50 * time.Millisecond)
	for n := range int64(20) {
		d := mustCount(t, r, b)
		if d[0].denied {
			t.Fatalf("decided %+v", d)
		}
		if got := stored(t, server, b.key); got < n+1 {
			t.Fatalf("Redis has counted %d after %d calls that it should answer", got, n+1)
		}
	}
	if n := p.Connections(); n > 2 {
		t.Errorf("%d connections", n)
	}
	if got := seen.take(); len(got) > 1 || len(got) == 1 && got[0] != "error timeout" {
		t.Errorf("reported %q", got)
	}
}

// TestConnections guards that there are no more connections than configured, and
// that they are kept: thousands of calls use the same ones.
func TestConnections(t *testing.T) {
	server := redistest.Start(t)
	for _, size := range []int{1, 3} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			before := server.InfoNumber(t, "stats", "total_connections_received")
			r := newTestClient(t, server, func(opt *Options) { opt.PoolSize = size })
			b := upTo(100_000)
			var most atomic.Int64
			redistest.Together(t, 20, func(g int) {
				for n := range 100 {
					if _, err := r.count(t.Context(), b); err != nil {
						t.Error(err)
					}
					if g == 0 && n%10 == 0 {
						most.Store(max(most.Load(), int64(clients(t, server))))
					}
				}
			})
			if got := most.Load(); got > int64(size) || got == 0 {
				t.Errorf("%d connections, want at most %d", got, size)
			}
			made := server.InfoNumber(t, "stats", "total_connections_received") - before
			if made > int64(size)+10 { // the test has some too
				t.Errorf("%d connections made, want at most %d at a time", made, size)
			}
			r.Close()
			redistest.WaitFor(t, 5*time.Second, func() error {
				if n := clients(t, server); n > 0 {
					return fmt.Errorf("%d connections of a closed store", n)
				}
				return nil
			})
		})
	}
}

// TestConnectionsAsNeeded guards that sequential calls make one connection, and
// one more for the next call.
func TestConnectionsAsNeeded(t *testing.T) {
	server := redistest.Start(t)
	r := newTestClient(t, server, nil)
	clients(t, server)
	before := server.InfoNumber(t, "stats", "total_connections_received")
	for range 2000 {
		mustCount(t, r, upTo(100_000))
	}
	if made := server.InfoNumber(t, "stats", "total_connections_received") - before; made > 3 {
		t.Errorf("%d connections made", made)
	}
}

// TestConnect guards that Connect connects before there is any call.
func TestConnect(t *testing.T) {
	server := redistest.Start(t)
	r := newTestClient(t, server, nil)
	r.Connect()
	redistest.WaitFor(t, 5*time.Second, func() error {
		if n := clients(t, server); n != 1 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
}

// TestConnectionsKilled guards a server that closes all connections: each caller
// fails once, or twice if another connection was just being handed over; that is
// not an outage; and failed calls are not sent again.
func TestConnectionsKilled(t *testing.T) {
	const callers, kills = 8, 10
	server := redistest.Start(t)
	if err := server.Client().ScriptLoad(t.Context(), counting).Err(); err != nil {
		t.Fatal(err)
	}
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
	var requests, failed atomic.Int64
	for range kills {
		stop := make(chan struct{})
		var busy sync.WaitGroup
		for range callers {
			busy.Go(func() {
				failures := 0
				for {
					b := numbered(requests.Add(1))
					if _, err := r.count(context.Background(), b); err != nil {
						failures++
						failed.Add(1)
						if f := new(ServerError); errors.As(err, &f) && f.reason != "closed" {
							t.Error(err)
						}
					}
					select {
					case <-stop:
						if failures > 2 {
							t.Errorf("%d failures of one caller by one kill", failures)
						}
						return
					default:
					}
				}
			})
		}
		time.Sleep(20 * time.Millisecond)
		if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err(); err != nil {
			t.Error(err)
		}
		time.Sleep(20 * time.Millisecond)
		close(stop)
		busy.Wait()
	}
	if failed.Load() == 0 {
		t.Error("no request failed: the test proves nothing")
	}
	if got, want := seen.take(), []string{"error closed"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
	checkCharged(t, server, requests.Load(), failed.Load())
}

// TestRestart guards that a server which was down is used again soon after it is
// back, and that no call waits too long in between.
func TestRestart(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.Timeout, opt.Report = timeout, seen.report })
	b := upTo(100_000)
	for range 2 {
		redistest.WaitFor(t, 5*time.Second, func() error {
			_, err := r.count(t.Context(), b)
			return err
		})
		seen.take()
		server.Kill()
		dead := time.Now()
		for time.Since(dead) < 700*time.Millisecond {
			began := time.Now()
			if _, err := r.count(t.Context(), b); err == nil {
				t.Fatal("answered while the server is down")
			}
			if took := time.Since(began); took > timeout*2 {
				t.Errorf("waited %v", took)
			}
			time.Sleep(time.Millisecond)
		}
		server.Restart(t)
		redistest.WaitFor(t, 2*time.Second, func() error {
			_, err := r.count(t.Context(), b)
			return err
		})
		got := seen.take()
		if len(got) != 2 || !strings.HasPrefix(got[0], "down ") || got[1] != "recovered" {
			t.Errorf("reported %q", got)
		}
	}
}

// TestCloseLeaksNothing guards that a closed client leaves no connections or
// goroutines behind, whatever it was doing.
func TestCloseLeaksNothing(t *testing.T) {
	server := redistest.Start(t)
	silent := redistest.StartProxy(t, server.Addr)
	silent.BlackHole()
	clients(t, server)
	settled := func() int {
		runtime.GC()
		return runtime.NumGoroutine()
	}
	before := settled()
	for range 20 {
		r := newTestClient(t, server, func(opt *Options) { opt.Timeout, opt.PoolSize = time.Second, 4 })
		redistest.Together(t, 8, func(int) {
			for range 5 {
				if _, err := r.count(t.Context(), upTo(100_000)); err != nil {
					t.Error(err)
				}
			}
		})
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := r.count(t.Context(), upTo(100_000)); err == nil {
			t.Error("decided by a closed store")
		}

		lost := newTestClient(t, server, func(opt *Options) {
			opt.Addresses, opt.Timeout, opt.PoolSize = []string{silent.Addr}, time.Millisecond, 4
		})
		for range 6 {
			lost.count(t.Context(), upTo(100_000))
		}
		lost.Connect()
		if err := lost.Close(); err != nil {
			t.Error(err)
		}
	}
	silent.Refuse()
	redistest.WaitFor(t, 10*time.Second, func() error {
		if n := clients(t, server); n > 0 {
			return fmt.Errorf("%d connections of closed stores", n)
		}
		if n := settled(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
}

// TestLostRepliesConcurrently guards that of many concurrent calls whose replies
// are lost none runs twice.
func TestLostRepliesConcurrently(t *testing.T) {
	server := redistest.Start(t)
	if err := server.Client().ScriptLoad(t.Context(), counting).Err(); err != nil {
		t.Fatal(err)
	}
	p := redistest.StartProxy(t, server.Addr)
	var sent, cut atomic.Int64
	for n := range 6 {
		r := newTestClient(t, server, func(opt *Options) { opt.Addresses = []string{p.Addr} })
		if n%2 == 0 {
			p.CutReplies("evalsha")
		} else {
			p.HalfReply(3, "evalsha")
		}
		redistest.Together(t, 4, func(int) {
			for range 20 {
				cut.Add(1)
				_, err := r.count(t.Context(), numbered(sent.Add(1)))
				checkError(t, err, p.Addr)
			}
		})
		p.Pass()
		redistest.WaitFor(t, 5*time.Second, func() error {
			_, err := r.count(t.Context(), numbered(sent.Add(1)))
			if err != nil {
				cut.Add(1)
			}
			return err
		})
	}
	if ran := server.CommandStat(t, "evalsha"); ran < 6*openAfter {
		t.Errorf("%d calls ran: the test proves nothing", ran)
	}
	checkCharged(t, server, sent.Load(), cut.Load())
}

// TestPoolExhausted guards that a server which answers, but not all concurrent
// callers, does not count as down.
func TestPoolExhausted(t *testing.T) {
	const timeout = 50 * time.Millisecond
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.PoolSize, opt.Report = 1, seen.report })
	b := upTo(100)
	mustCount(t, r, b)
	r.setTimeout(t, timeout)
	s := r.server()
	conn := <-s.pool.idle // like a call that takes long
	redistest.Together(t, 20, func(int) {
		_, err := r.count(t.Context(), b)
		checkError(t, err, server.Addr)
		if f := failureOf(t, err); f.reason != "pool" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	})
	s.pool.idle <- conn
	r.setTimeout(t, 10*time.Second)
	mustCount(t, r, b)
	if got, want := seen.take(), []string{"error pool"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// TestBlackHole guards an outage in which everything sent is lost: it is reported
// once, and connections that were started during it and fail long after do not
// count as another.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.PoolSize = []string{p.Addr}, 50*time.Millisecond, 10
		opt.Report = seen.report
	})
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for range 20 {
		busy.Go(func() {
			for {
				_, _ = r.count(context.Background(), upTo(100_000))
				select {
				case <-stop:
					return
				case <-time.After(3 * time.Millisecond):
				}
			}
		})
	}
	time.Sleep(100 * time.Millisecond)
	seen.take()
	p.BlackHole()
	time.Sleep(3 * time.Second)
	p.Pass()
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, err := r.count(t.Context(), upTo(100_000))
		return err
	})
	time.Sleep(connectWithin)
	close(stop)
	busy.Wait()
	got := seen.take()
	got = slices.DeleteFunc(got, func(event string) bool { return strings.HasPrefix(event, "error") })
	if want := []string{"down timeout", "recovered"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// busy makes callers send calls one after the other, with short pauses, for a
// second. It returns the number of calls, and how many of them were answered.
func busy(t testing.TB, r *testClient, callers int, b counter) (made, decided int64) {
	t.Helper()
	var sent, good atomic.Int64
	end := time.Now().Add(time.Second)
	redistest.Together(t, callers, func(int) {
		for time.Now().Before(end) {
			sent.Add(1)
			if _, err := r.count(context.Background(), b); err == nil {
				good.Add(1)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	return sent.Load(), good.Load()
}

// failToConnect makes further connections to a server fail.
func failToConnect(t testing.TB, s *Server) {
	t.Helper()
	s.pool.connect(false)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if s.pool.dials.Load() == 0 {
			return errors.New("no attempt to connect has failed")
		}
		return nil
	})
}

// checkFewDials checks that about a second of calls, which wanted more connections
// than could be made, did not dial more often than a server that is down is
// probed.
func checkFewDials(t testing.TB, dials int64) {
	t.Helper()
	if most := int64(1500 * time.Millisecond / (probeEvery * 4 / 5)); dials == 0 || dials > most {
		t.Errorf("%d attempts to connect, want 1 to %d", dials, most)
	}
}

// TestMaxClients guards a server that accepts no more clients: the existing
// connections stay and serve all calls, and hardly any others are tried.
func TestMaxClients(t *testing.T) {
	t.Parallel()
	const size, callers = 20, 40
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.PoolSize, opt.Report = size, seen.report })
	b := upTo(100_000)
	for range 5 {
		mustCount(t, r, b)
	}
	s := r.server()
	redistest.WaitFor(t, 5*time.Second, func() error {
		if held, made := s.pool.held.Load(), s.pool.made.Load(); held != made {
			return fmt.Errorf("%d connections made of %d", made, held)
		}
		return nil
	})
	have := server.InfoNumber(t, "clients", "connected_clients")
	if err := server.Client().Do(t.Context(), "CONFIG", "SET", "maxclients", have).Err(); err != nil {
		t.Fatal(err)
	}
	failToConnect(t, s)
	rejected := server.InfoNumber(t, "stats", "rejected_connections")

	made, decided := busy(t, r, callers, b)
	if decided != made {
		t.Errorf("%d of %d requests decided", decided, made)
	}
	if got := stored(t, server, b.key); got != made+5 {
		t.Errorf("%d units by %d requests", got, made+5)
	}
	checkFewDials(t, server.InfoNumber(t, "stats", "rejected_connections")-rejected)
	for _, event := range seen.take() {
		// The server closes behind its reply, which may get lost by that.
		if event != "error maxclients" && event != "error closed" {
			t.Errorf("reported %q", event)
		}
	}
}

// TestOverload guards a server that gets more than twice the calls that it could
// answer one at a time: pending calls are batched, and nearly all are answered.
func TestOverload(t *testing.T) {
	t.Parallel()
	const size, delay, timeout, requests = 4, 20 * time.Millisecond, 100 * time.Millisecond, 500
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.PoolSize, opt.Report = []string{p.Addr}, timeout, size, seen.report
	})
	b := upTo(100_000)
	s := r.server()
	redistest.WaitFor(t, 5*time.Second, func() error {
		if _, err := r.count(t.Context(), b); err != nil {
			return err
		}
		s.pool.connect(false)
		if n := s.pool.made.Load(); n < size {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	p.Delay(delay)
	c := redistest.CommandCounter{Server: server}
	c.Since(t, "evalsha")
	seen.take()

	var decided atomic.Int64
	var all sync.WaitGroup
	began := time.Now()
	for n := range requests {
		time.Sleep(time.Until(began.Add(time.Duration(n) * time.Second / requests)))
		all.Go(func() {
			if _, err := r.count(context.Background(), b); err == nil {
				decided.Add(1)
			}
		})
	}
	took := time.Since(began)
	all.Wait()
	ran, can := c.Since(t, "evalsha"), size*int64(took/delay)
	if n := decided.Load(); n < requests*9/10 || ran > can || 2*can > requests {
		t.Errorf("%d of %d requests decided; %d calls ran, %d could", n, requests, ran, can)
	}
	for _, event := range seen.take() {
		if !strings.HasPrefix(event, "error ") {
			t.Errorf("reported %q", event)
		}
	}
}

// idle leaves all connections of a server idle for some time, and returns how many
// there are.
func idle(t testing.TB, s *Server, d time.Duration) int {
	t.Helper()
	if held, ready := int(s.pool.held.Load()), len(s.pool.idle); held != ready {
		t.Fatalf("%d of %d connections lie idle", ready, held)
	}
	for range len(s.pool.idle) {
		conn := <-s.pool.idle
		conn.used = conn.used.Add(-d)
		s.pool.idle <- conn
	}
	return len(s.pool.idle)
}

// TestIdleConnections guards connections that have long been idle: those that the
// server has closed are replaced before a call uses them, and the others stay.
func TestIdleConnections(t *testing.T) {
	server := redistest.Start(t)
	for _, tc := range []struct {
		name   string
		closed bool
		idle   time.Duration
		tried  bool
	}{
		{"closed", true, checkEvery, true},
		{"well", false, checkEvery, true},
		{"well and used", false, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var seen events
			r := newTestClient(t, server, func(opt *Options) { opt.PoolSize, opt.Report = 4, seen.report })
			defer r.Close()
			s := r.server()
			settled := func(least int32) {
				t.Helper()
				redistest.WaitFor(t, 5*time.Second, func() error {
					if n := s.pool.made.Load(); n < least || n != s.pool.held.Load() || int(n) != len(s.pool.idle) {
						return fmt.Errorf("%d connections, %d lie idle, want %d", n, len(s.pool.idle), least)
					}
					return nil
				})
			}
			for range 3 {
				s.pool.connect(false)
			}
			settled(3)
			n := idle(t, s, tc.idle)
			if tc.closed {
				if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err(); err != nil {
					t.Fatal(err)
				}
			}
			c := redistest.CommandCounter{Server: server}
			c.Since(t, "hello")
			received := server.InfoNumber(t, "stats", "total_connections_received")

			s.pool.check()
			settled(1)
			if got := c.Since(t, "hello"); (got > 0) != tc.tried {
				t.Errorf("%d tries of %d connections, want %t", got, n, tc.tried)
			}
			if !tc.closed {
				settled(int32(n))
				if more := server.InfoNumber(t, "stats", "total_connections_received") - received; more > 0 {
					t.Errorf("%d connections made", more)
				}
			}
			for range 2 * n {
				mustCount(t, r, upTo(100_000))
			}
			if got := seen.take(); len(got) > 0 {
				t.Errorf("reported %q", got)
			}
		})
	}
}

// TestReconnectsWhileIdle guards an outage that ends while there are no calls:
// there is a connection to the server again before the first call, which it
// answers.
func TestReconnectsWhileIdle(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
	req := upTo(100)
	mustCount(t, r, req)
	server.Kill()
	for range openAfter {
		_, err := r.count(t.Context(), req)
		checkError(t, err, server.Addr)
	}
	redistest.WaitFor(t, 5*time.Second, func() error { // what was still in flight
		if n := r.server().pool.held.Load(); n > 0 || !r.server().breaker.isOpen() {
			return fmt.Errorf("%d connections, lost %t", n, r.server().breaker.isOpen())
		}
		return nil
	})
	r.server().breaker.mu.Lock()
	r.server().breaker.probeAt = time.Now().Add(time.Hour) // no probe becomes due
	r.server().breaker.mu.Unlock()
	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if clients(t, server) == 0 || len(r.server().pool.idle) == 0 {
			return errors.New("not connected")
		}
		return nil
	})
	mustCount(t, r, req)
	got := seen.take()
	if len(got) != 2 || !strings.HasPrefix(got[0], "down ") || got[1] != "recovered" {
		t.Errorf("reported %q", got)
	}
}

// TestClosedReportsNothing guards that a closed client reports no events, whatever
// it was doing and whatever calls follow.
func TestClosedReportsNothing(t *testing.T) {
	server := redistest.Start(t)
	for _, callers := range []int{0, 1, 20} {
		t.Run(fmt.Sprint(callers), func(t *testing.T) {
			for range 10 {
				var seen events
				r := newTestClient(t, server, func(opt *Options) { opt.PoolSize, opt.Report = 8, seen.report })
				mustCount(t, r, upTo(100_000))
				before := server.InfoNumber(t, "stats", "total_commands_processed")
				var asks sync.WaitGroup
				for range callers {
					asks.Go(func() {
						for {
							_, err := r.count(context.Background(), upTo(100_000))
							if err != nil {
								return
							}
						}
					})
				}
				redistest.WaitFor(t, 5*time.Second, func() error {
					ran := server.InfoNumber(t, "stats", "total_commands_processed") - before
					if ran < int64(20*callers) {
						return fmt.Errorf("%d commands", ran)
					}
					return nil
				})
				closed := time.Now()
				if err := r.Close(); err != nil {
					t.Error(err)
				}
				asks.Wait()
				if took := time.Since(closed); took > r.timeout/4 {
					t.Errorf("waited %v for what can't be", took)
				}
				for range 2 * openAfter {
					_, err := r.count(t.Context(), upTo(100_000))
					checkError(t, err, server.Addr)
				}
				if got := seen.take(); len(got) > 0 {
					t.Fatalf("reported %q", got)
				}
			}
		})
	}
}

// TestAddressMovesToAnotherServer guards a name, or a forwarded address, that
// moves to another server by a failover: one reply of the old server, now a
// replica, is enough to close all connections to it.
func TestAddressMovesToAnotherServer(t *testing.T) {
	const size = 20
	before, after := redistest.Start(t), redistest.Start(t)
	p := redistest.StartProxy(t, before.Addr)
	var seen events
	r := newTestClient(t, before, func(opt *Options) {
		opt.Addresses, opt.PoolSize, opt.Report = []string{p.Addr}, size, seen.report
	})
	s := r.server()
	connectAll(t, s, size)
	p.Retarget(after.Addr)
	if err := before.Client().Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err(); err != nil {
		t.Fatal(err)
	}
	b := upTo(100)
	_, err := r.count(t.Context(), b)
	checkError(t, err, p.Addr)
	for range 2 * size {
		mustCount(t, r, b)
	}
	if got := stored(t, after, b.key); got != 2*size {
		t.Errorf("%d units, want %d", got, 2*size)
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		if n := clients(t, before); n > 0 {
			return fmt.Errorf("%d connections to the replica", n)
		}
		return nil
	})
	if got, want := seen.take(), []string{"error readonly"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}
