package redisscript

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
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
// server that hangs, or is slow in any way, none waits longer than its timeout. Other
// load on this machine can delay calls: goroutines that only sleep measure by how much.
func TestBoundedWait(t *testing.T) {
	const timeout, margin, callers = 50 * time.Millisecond, 20 * time.Millisecond, 50
	for _, tc := range []struct {
		name  string
		fault func(*testing.T, *redistest.Server, *redistest.Proxy) (end func())
		event string
	}{
		{"stopped", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) func() {
			server.Pause(t)
			return func() { server.Resume(t) }
		}, "down timeout"},
		{"answers late", func(_ *testing.T, _ *redistest.Server, p *redistest.Proxy) func() {
			p.Delay(4*timeout, timeout)
			return p.Pass
		}, "down timeout"},
		{"a byte at a time", func(_ *testing.T, _ *redistest.Server, p *redistest.Proxy) func() {
			p.Slice(1, timeout/5)
			return p.Pass
		}, ""},
		{"stalls again and again", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) func() {
			stop := make(chan struct{})
			var stalling sync.WaitGroup
			stalling.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(timeout / 10):
						server.Pause(t)
						time.Sleep(timeout * 8 / 10)
						server.Resume(t)
					}
				}
			})
			return func() { close(stop); stalling.Wait() }
		}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := redistest.Start(t)
			p := redistest.StartProxy(t, server.Addr)
			for range 3 {
				var seen events
				r := newTestClient(t, server, func(opt *Options) {
					opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
				})
				redistest.WaitFor(t, 5*time.Second, func() error {
					_, err := r.count(t.Context(), upTo(100_000))
					return err
				})
				worst, idle := waits(t, r, callers, timeout, func() {
					time.Sleep(timeout)
					end := tc.fault(t, server, p)
					time.Sleep(12 * timeout)
					end()
				})
				r.Close()
				if got := seen.take(); tc.event != "" && !slices.Contains(got, tc.event) {
					t.Errorf("reported %q", got)
				}
				if worst <= timeout+margin+idle {
					return
				}
				t.Logf("waited %v, may wait %v; those who slept were %v late", worst, timeout, idle)
			}
			t.Error("waited too long three times")
		})
	}
}

// waits returns the longest wait of some callers who call while something happens, and
// by how much those who only slept meanwhile were late.
func waits(t *testing.T, r *testClient, callers int, sleep time.Duration, while func()) (worst, late time.Duration) {
	var mu sync.Mutex
	stop := make(chan struct{})
	var busy sync.WaitGroup
	do := func(what func()) {
		busy.Go(func() {
			for {
				what()
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Millisecond):
				}
			}
		})
	}
	for range callers {
		do(func() {
			began := time.Now()
			_, _ = r.count(context.Background(), upTo(100_000))
			mu.Lock()
			worst = max(worst, time.Since(began))
			mu.Unlock()
		})
		do(func() {
			began := time.Now()
			time.Sleep(sleep)
			mu.Lock()
			late = max(late, time.Since(began)-sleep)
			mu.Unlock()
		})
	}
	while()
	close(stop)
	busy.Wait()
	return worst, late
}

// TestSlowHandshake guards a server so far away that no call could wait for a
// connection: the connection is made in the background, and then used. Until then nothing is reported.
func TestSlowHandshake(t *testing.T) {
	t.Parallel()
	const timeout = 250 * time.Millisecond
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	p.Delay(300 * time.Millisecond)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
	})
	b := upTo(100)
	s := r.server()
	if d, err := r.count(t.Context(), b); err == nil {
		t.Fatalf("counted %+v without a connection", d)
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		if !s.pipeline.healthy() {
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
	if n := p.Connections(); n != 1 {
		t.Errorf("%d connections", n)
	}
	if f := s.stats().Failures; len(f) > 0 {
		t.Errorf("failures %v", f)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestOneConnection guards that a client has one connection to a server, however many
// callers there are, and none once it is closed.
func TestOneConnection(t *testing.T) {
	server := redistest.Start(t)
	before := server.InfoNumber(t, "stats", "total_connections_received")
	clients(t, server) // which makes one of the test
	own := server.InfoNumber(t, "stats", "total_connections_received") - before
	r := newTestClient(t, server, nil)
	var most atomic.Int64
	redistest.Together(t, 64, func(g int) {
		for n := range 100 {
			if _, err := r.count(t.Context(), upTo(100_000)); err != nil {
				t.Error(err)
			}
			if g == 0 && n%10 == 0 {
				most.Store(max(most.Load(), int64(clients(t, server))))
			}
		}
	})
	made := server.InfoNumber(t, "stats", "total_connections_received") - before - own
	if most.Load() != 1 || made != 1 {
		t.Errorf("%d connections at a time, %d made, want 1", most.Load(), made)
	}
	r.Close()
	redistest.WaitFor(t, 5*time.Second, func() error {
		if n := clients(t, server); n > 0 {
			return fmt.Errorf("%d connections of a closed client", n)
		}
		return nil
	})
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
	redistest.Done(t, server.Client().ScriptLoad(t.Context(), counting))
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

// ownCounts is one caller's keys, and what he knows of their count.
type ownCounts struct {
	on      []counter
	counted int64 // calls that were answered
	unknown int64 // calls that may have been run
	longest time.Duration
}

// take makes a call on all keys. It returns an error if the answer cannot be right.
func (o *ownCounts) take(r *testClient) error {
	began := time.Now()
	all, err := r.count(context.Background(), o.on...)
	o.longest = max(o.longest, time.Since(began))
	var f *ServerError
	switch {
	case errors.As(err, &f):
		if !NotRun(err) {
			o.unknown++
		}
		return nil
	case err != nil:
		return err
	}
	o.counted++
	return o.check(all)
}

// check checks the counts of all keys.
func (o *ownCounts) check(all []counted) error {
	for i, c := range all {
		add := o.on[i].add
		if n := c.n / add; c.denied || c.n%add != 0 || n < o.counted || n > o.counted+o.unknown || c.n != all[0].n/o.on[0].add*add {
			return fmt.Errorf("key %d: counted %+v, by %d each; %d calls were answered, %d are unknown", i, all, add, o.counted, o.unknown)
		}
	}
	return nil
}

// TestTimedDyingConnections guards many callers, each with keys of his own, whose
// connections die again and again, in all ways: each counts exactly, except for the calls
// whose outcome he does not know. None waits for much longer than the timeout, and
// nothing is left.
func TestTimedDyingConnections(t *testing.T) {
	const timeout, margin, callers, rounds = time.Second, 500 * time.Millisecond, 512, 4
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	clients(t, server)
	before := runtime.NumGoroutine()
	r := newTestClient(t, server, func(opt *Options) { opt.Addresses, opt.Timeout = []string{p.Addr}, timeout })
	all := make([]ownCounts, callers)
	stop := make(chan struct{})
	var busy sync.WaitGroup
	var answered atomic.Int64
	for i := range all {
		o := &all[i]
		for n := range 1 + i%3 {
			o.on = append(o.on, counter{key: fmt.Sprintf("rl:{own%d}:%d", i, n), add: int64(1000*(n+1) + i), limit: 1 << 31})
		}
		busy.Go(func() {
			for {
				was := o.counted
				if err := o.take(r); err != nil {
					t.Errorf("caller %d: %v", i, err)
					return
				}
				answered.Add(o.counted - was)
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(i%7) * time.Millisecond):
				}
			}
		})
	}
	for round := range rounds {
		for _, kill := range []func(){
			func() {
				if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err(); err != nil {
					t.Error(err)
				}
			},
			p.CloseAll,
			func() { p.HalfReply(1+round*7, "evalsha") },
			func() { p.CutReplies("evalsha", "eval") },
			func() { p.Slice(5, time.Microsecond); p.CloseAll() },
			p.Refuse,
		} {
			kill()
			time.Sleep(20 * time.Millisecond)
			p.Pass()
			want := answered.Load() + callers/2
			redistest.WaitFor(t, 10*time.Second, func() error {
				if n := answered.Load(); n < want {
					return fmt.Errorf("%d calls were answered, want %d", n, want)
				}
				return nil
			})
		}
	}
	close(stop)
	busy.Wait()
	unknown := int64(0)
	for i := range all {
		o := &all[i]
		var got []counted
		for _, c := range o.on {
			got = append(got, counted{n: stored(t, server, c.key)})
		}
		if err := o.check(got); err != nil {
			t.Errorf("caller %d: %v", i, err)
		}
		if o.longest > timeout+margin {
			t.Errorf("caller %d waited %v", i, o.longest)
		}
		unknown += o.unknown
	}
	if unknown == 0 {
		t.Error("the outcome of every call was known: the test proves nothing")
	}
	r.Close()
	p.Refuse()
	redistest.WaitFor(t, 10*time.Second, func() error {
		if n := clients(t, server); n > 0 {
			return fmt.Errorf("%d connections are left", n)
		}
		if n := runtime.NumGoroutine(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
	t.Logf("%d calls answered, %d unknown", answered.Load(), unknown)
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
		r := newTestClient(t, server, func(opt *Options) { opt.Timeout = time.Second })
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
			opt.Addresses, opt.Timeout = []string{silent.Addr}, time.Millisecond
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
	redistest.Done(t, server.Client().ScriptLoad(t.Context(), counting))
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

// TestBlackHole guards an outage in which everything sent is lost: it is reported
// once, and connections that were started during it and fail long after do not
// count as another.
func TestBlackHole(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout = []string{p.Addr}, 200*time.Millisecond
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

// TestMaxClients guards a server that accepts no more clients: the connection stays
// and serves all calls, and no other is tried.
func TestMaxClients(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
	mustCount(t, r, upTo(100_000))
	have := server.InfoNumber(t, "clients", "connected_clients")
	redistest.Done(t, server.Client().Do(t.Context(), "CONFIG", "SET", "maxclients", have))
	redistest.Together(t, 40, func(int) {
		for range 50 {
			mustCount(t, r, upTo(100_000))
		}
	})
	if n := server.InfoNumber(t, "stats", "rejected_connections"); n > 0 {
		t.Errorf("%d connections were rejected", n)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestIdleConnectionClosed guards a connection that is closed while it is idle, as
// servers and load balancers do: another one is made at once, the next call is
// answered on it, and nothing is reported.
func TestIdleConnectionClosed(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"CLIENT KILL", "what is between"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			p := redistest.StartProxy(t, server.Addr)
			var seen events
			var restarts atomic.Int64
			r := newHookedClient(t, server, newCounting(counting), Hooks{Restarted: func(*Server) { restarts.Add(1) }}, func(opt *Options) {
				opt.Addresses, opt.Report = []string{p.Addr}, seen.report
			})
			mustCount(t, r, upTo(100))
			for range 3 {
				time.Sleep(probeEvery) // a connection that lives for shorter is not replaced at once
				made, known := p.Connections(), restarts.Load()
				if by == "CLIENT KILL" {
					redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal"))
				} else {
					p.CloseAll()
				}
				redistest.WaitFor(t, 5*time.Second, func() error {
					if n := p.Connections(); n == made || !r.server().pipeline.healthy() {
						return errors.New("no other connection")
					}
					return nil
				})
				if restarts.Load() == known {
					t.Error("a new connection, and the server does not count as restarted")
				}
				mustCount(t, r, upTo(100))
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
		if r.server().pipeline.healthy() || !r.server().breaker.isOpen() {
			return errors.New("the server is not down")
		}
		return nil
	})
	r.server().breaker.mu.Lock()
	r.server().breaker.probeAt = time.Now().Add(time.Hour) // no probe becomes due
	r.server().breaker.mu.Unlock()
	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if clients(t, server) == 0 || !r.server().pipeline.healthy() {
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
				r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
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
// replica, is enough to close the connection to it.
func TestAddressMovesToAnotherServer(t *testing.T) {
	const calls = 40
	before, after := redistest.Start(t), redistest.Start(t)
	p := redistest.StartProxy(t, before.Addr)
	var seen events
	r := newTestClient(t, before, func(opt *Options) {
		opt.Addresses, opt.Report = []string{p.Addr}, seen.report
	})
	connected(t, r.server())
	p.Retarget(after.Addr)
	redistest.Done(t, before.Client().Do(t.Context(), "REPLICAOF", "127.0.0.1", "1"))
	b := upTo(100)
	_, err := r.count(t.Context(), b)
	checkError(t, err, p.Addr)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if !r.server().pipeline.healthy() {
			return errors.New("not connected")
		}
		return nil
	})
	for range calls {
		mustCount(t, r, b)
	}
	if got := stored(t, after, b.key); got != calls {
		t.Errorf("%d units, want %d", got, calls)
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

// recording is a script that counts and also records the number of keys it is run
// with.
var recording = newCounting("redis.call('RPUSH', 'carried', #KEYS)\n" + counting)

// carried returns the number of keys in each invocation, in order.
func carried(t testing.TB, server *redistest.Server) []int {
	t.Helper()
	var buckets []int
	if err := server.Client().LRange(t.Context(), "carried", 0, -1).ScanSlice(&buckets); err != nil {
		t.Fatal(err)
	}
	return buckets
}

// TestBatchesAreExact guards that batched calls run one after the other: many in
// one batch count exactly up to the limit, and a call on several keys counts on
// all or none.
func TestBatchesAreExact(t *testing.T) {
	const calls, limit = 100, 30
	server := redistest.Start(t)
	for _, tc := range []struct {
		name  string
		add   int64
		keys  int   // whose calls are batched
		other int64 // the limit of another key in every call, if there is one
	}{
		{name: "one key", add: 1, keys: 1},
		{name: "more than one at a time", add: 3, keys: 1},
		{name: "several keys", add: 1, keys: 3},
		{name: "two keys in a call", add: 1, keys: 1, other: 1000},
		{name: "the other reaches its limit first", add: 1, keys: 1, other: 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			r := newTestClient(t, server, nil)
			s := r.server()
			s.script = recording
			on := func(i int) []counter {
				all := []counter{{key: fmt.Sprintf("rl:{%d}", i%tc.keys), add: tc.add, limit: limit}}
				if tc.other > 0 {
					all = append(all, counter{key: "rl:{0}:other", add: 1, limit: tc.other})
				}
				return all
			}
			admitted := make([]atomic.Int64, tc.keys)
			gather(t, s, calls, func(i int) {
				d, err := r.count(t.Context(), on(i)...)
				if err != nil {
					t.Error(err)
				} else if !d[0].denied {
					admitted[i%tc.keys].Add(1)
				}
			})
			want := limit / tc.add
			if tc.other > 0 {
				want = min(want, tc.other)
			}
			for key := range tc.keys {
				if got := admitted[key].Load(); got != want {
					t.Errorf("key %d: %d calls counted, want %d", key, got, want)
				}
				for _, c := range on(key) {
					if got := stored(t, server, c.key); got != want*c.add {
						t.Errorf("%s holds %d, want %d", c.key, got, want*c.add)
					}
				}
			}
			if got := carried(t, server); len(got) > 1+calls*2/maxBatchKeys {
				t.Errorf("batches of %d keys", got)
			}
		})
	}
}

// takeOwn makes a call by caller i and checks that its keys have counted at least
// least and at most most. What an answer adds shows whose it is.
func takeOwn(t testing.TB, r *testClient, i int, least, most int64) {
	var own []counter
	for n := range 1 + i%3 {
		own = append(own, counter{key: fmt.Sprintf("rl:{own%d}:%d", i, n), add: int64(1000*(n+1) + i), limit: 1 << 30})
	}
	all, err := r.count(context.Background(), own...)
	if err != nil || len(all) != len(own) {
		t.Errorf("caller %d: counted %+v, error %v", i, all, err)
		return
	}
	for n, c := range all {
		if add := own[n].add; c.denied || c.n%add != 0 || c.n < least*add || c.n > most*add {
			t.Errorf("caller %d, key %d: counted %+v, want %d to %d times %d", i, n, c, least, most, add)
		}
	}
}

// checkCharged checks that calls on the counters numbered from 1 on have counted
// once each, and those that failed at most once. It returns how many have not.
func checkCharged(t testing.TB, server *redistest.Server, calls, failed int64) (missing int64) {
	t.Helper()
	for n := range calls {
		switch got := stored(t, server, numbered(n+1).key); got {
		case 1:
		case 0:
			missing++
		default:
			t.Fatalf("call %d counted %d times", n, got)
		}
	}
	if missing > failed {
		t.Errorf("%d calls were not counted, %d failed", missing, failed)
	}
	return missing
}

// TestBatchedCallsGetTheirOwnAnswers guards that each call in a batch gets its own
// answer.
func TestBatchedCallsGetTheirOwnAnswers(t *testing.T) {
	const callers, rounds = 60, 5
	r := newTestClient(t, redistest.Start(t), nil)
	s := r.server()
	for n := range int64(rounds) {
		gather(t, s, callers, func(i int) { takeOwn(t, r, i, n+1, n+1) })
	}
}

// TestManyCallsTakeFewInvocations guards the purpose of batching: the server runs
// the script far less often than it is called.
func TestManyCallsTakeFewInvocations(t *testing.T) {
	t.Parallel()
	const callers, rounds, size = 64, 8, 200
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r := newTestClient(t, server, func(opt *Options) { opt.Addresses = []string{p.Addr} })
	mustCount(t, r, numbered(1))
	p.Delay(20 * time.Millisecond)
	var admitted atomic.Int64
	c := redistest.CommandCounter{Server: server}
	c.Since(t, "evalsha")
	redistest.Together(t, callers, func(int) {
		for range rounds {
			d, err := r.count(context.Background(), upTo(size))
			if err != nil {
				t.Error(err)
			} else if !d[0].denied {
				admitted.Add(1)
			}
		}
	})
	if got := c.Since(t, "evalsha"); got > callers*rounds/4 {
		t.Errorf("%d invocations for %d calls", got, callers*rounds)
	}
	if got := admitted.Load(); got != size {
		t.Errorf("admitted %d, want %d", got, size)
	}
}

// TestBatchSize guards the size of a batch: the earliest calls, up to a number of
// keys. A call with more keys than that is sent alone, in its turn.
func TestBatchSize(t *testing.T) {
	server := redistest.Start(t)
	for _, tc := range []struct {
		name  string
		calls []int // the number of keys of each call, in order of arrival
		want  []int // the number of keys in each batch
	}{
		{"all", slices.Repeat([]int{1}, maxBatchKeys), []int{maxBatchKeys}},
		{"one too many", slices.Repeat([]int{1}, maxBatchKeys+1), []int{maxBatchKeys, 1}},
		{"never a part", slices.Repeat([]int{maxBatchKeys/2 - 1}, 5), []int{maxBatchKeys - 2, maxBatchKeys - 2, maxBatchKeys/2 - 1}},
		{"exactly", []int{maxBatchKeys - 2, 2, maxBatchKeys, 1}, []int{maxBatchKeys, maxBatchKeys, 1}},
		{"more", []int{1, 2, maxBatchKeys + 44, 3, 4}, []int{3, maxBatchKeys + 44, 7}},
		{"more at first", []int{maxBatchKeys + 44, maxBatchKeys + 1, 1}, []int{maxBatchKeys + 44, maxBatchKeys + 1, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			r := newTestClient(t, server, nil)
			s := r.server()
			s.script = recording
			release := hold(t, s)
			var all sync.WaitGroup
			defer all.Wait()
			for i, n := range tc.calls {
				var own []counter
				for j := range n {
					own = append(own, counter{key: fmt.Sprintf("rl:{%d}:%d", i, j), add: int64(1 + i), limit: 1 << 30})
				}
				all.Go(func() {
					d, err := r.count(t.Context(), own...)
					if err != nil {
						t.Error(err)
						return
					}
					for _, d := range d {
						if d.denied || d.n != int64(1+i) {
							t.Errorf("call %d: counted %+v", i, d)
						}
					}
				})
				for deadline := time.Now().Add(4 * time.Second); waitingAt(s) <= i; runtime.Gosched() {
					if time.Now().After(deadline) {
						t.Fatalf("call %d does not wait", i)
					}
				}
			}
			release()
			all.Wait()
			if got := carried(t, server); !slices.Equal(got, tc.want) {
				t.Errorf("batches of %d keys, want %d", got, tc.want)
			}
		})
	}
}

// TestBatchFails guards batches that fail: each of their calls fails, once and for
// the same reason, and none is sent again. The batch counts as one failure, and
// only several in a row count as an outage.
func TestBatchFails(t *testing.T) {
	t.Parallel()
	const calls = 30
	reply := func(reply string) func(*testing.T, *Server, *redistest.Server, *redistest.Proxy) {
		return func(_ *testing.T, s *Server, _ *redistest.Server, _ *redistest.Proxy) {
			s.script = newCounting("return redis.error_reply('" + reply + "')")
		}
	}
	for _, tc := range []struct {
		name, reason string
		begin        func(*testing.T, *Server, *redistest.Server, *redistest.Proxy)
		ran          int64 // units that each batch charges
	}{
		{"reply lost", "closed", func(_ *testing.T, _ *Server, _ *redistest.Server, p *redistest.Proxy) {
			p.CutReplies("evalsha")
		}, 1},
		{"reply cut", "closed", func(_ *testing.T, _ *Server, _ *redistest.Server, p *redistest.Proxy) {
			p.HalfReply(20, "evalsha")
		}, 1},
		{"out of memory", "oom", func(t *testing.T, _ *Server, s *redistest.Server, _ *redistest.Proxy) {
			redistest.Done(t, s.Client().ConfigSet(t.Context(), "maxmemory", "1"))
		}, 0},
		{"loading", "loading", reply("LOADING Redis is loading the dataset in memory"), 0},
		{"busy", "busy", reply("BUSY Redis is busy running a script"), 0},
		{"unknown", "error", reply("ERR something else"), 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			redistest.Done(t, server.Client().ScriptLoad(t.Context(), counting))
			p := redistest.StartProxy(t, server.Addr)
			var seen events
			r := newTestClient(t, server, func(opt *Options) {
				opt.Addresses, opt.Report = []string{p.Addr}, seen.report
			})
			s := r.server()
			mustCount(t, r, upTo(100))
			tc.begin(t, s, server, p)
			for n := range openAfter {
				if got, want := int(s.breaker.failures.Load()), n; got != want {
					t.Errorf("%d failures by %d batches", got, want)
				}
				if got := seen.take(); len(got) > 0 {
					t.Errorf("reported %q after %d batches", got, n)
				}
				gather(t, s, calls, func(i int) {
					d, err := r.count(context.Background(), numbered(int64(n*calls+i+1)))
					if len(d) > 0 {
						t.Errorf("counted %+v", d)
					}
					checkError(t, err, p.Addr)
					if f := failureOf(t, err); f.reason != tc.reason {
						t.Errorf("reason %q, want %q: %v", f.reason, tc.reason, err)
					}
				})
			}
			if got, want := seen.take(), []string{"down " + tc.reason}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			for n := range int64(openAfter * calls) {
				if got := stored(t, server, numbered(n+1).key); got != tc.ran {
					t.Fatalf("call %d counted %d, want %d", n, got, tc.ran)
				}
			}
		})
	}
}

// TestRepliesOfWrongLength guards that when a server answers a batch with too many
// or too few numbers, no call gets any of them, because it is unknown which number
// belongs to which call.
func TestRepliesOfWrongLength(t *testing.T) {
	const calls = 30
	server := redistest.Start(t)
	for _, script := range []string{
		"return {}",
		"return {1}",
		"local r = {} for i = 1, #KEYS - 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, #KEYS + 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, 2 * #KEYS do r[i] = 0 end return r",
	} {
		t.Run(script, func(t *testing.T) {
			r := newTestClient(t, server, nil)
			s := r.server()
			s.script = newCounting(script)
			gather(t, s, calls, func(i int) {
				if d, err := r.count(context.Background(), numbered(int64(i))); err == nil || !strings.HasPrefix(err.Error(), "reply []") {
					t.Errorf("counted %+v, error %v, want no reply", d, err)
				}
			})
			s.script = newCounting(counting)
			gather(t, s, calls, func(i int) { takeOwn(t, r, i, 1, 1<<20) })
		})
	}
}

// TestScriptFlushedWithPendingCalls guards that flushing the server's scripts
// while calls are pending fails none of them, and that none counts twice.
func TestScriptFlushedWithPendingCalls(t *testing.T) {
	server := redistest.Start(t)
	r := newTestClient(t, server, nil)
	s := r.server()
	c := redistest.CommandCounter{Server: server}
	for n := range int64(3) {
		gather(t, s, 50, func(i int) { takeOwn(t, r, i, n+1, n+1) }, func() {
			if err := server.Client().ScriptFlush(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		})
		c.Check(t, "evalsha", 1)
		// New connections load the script on the server too.
		if got, most := c.Since(t, "eval"), 1+c.Since(t, "evalsha_ro"); got < 1 || got > most {
			t.Errorf("%d calls of eval, want 1 to %d", got, most)
		}
	}
}

// TestStallsHardlyCountAsSlowBatches guards the estimate of how long a batch
// takes: it follows a server that is slow for long, and hardly one that stalls, however
// many batches wait for it and however often. Otherwise a server nearby would count as
// far away after each stall, and get many small batches.
func TestStallsHardlyCountAsSlowBatches(t *testing.T) {
	t.Parallel()
	type batch struct{ began, ended int } // in ms
	for _, tc := range []struct {
		name        string
		times       int
		batches     []batch // of each time
		every       int     // ms until they come again
		least, most time.Duration
	}{
		{"quick ones", 100, []batch{{0, 1}}, 2, 900 * time.Microsecond, time.Millisecond},
		{"slow ones", 100, []batch{{0, 60}}, 60, 59 * time.Millisecond, 60 * time.Millisecond},
		{"slow ones, two in flight", 100, []batch{{0, 60}, {30, 90}}, 60, 59 * time.Millisecond, 60 * time.Millisecond},
		{"first stall", 1, slices.Repeat([]batch{{0, 60}}, 16), 0, 7 * time.Millisecond, 8 * time.Millisecond},
		{"stalls", 100, append([]batch{{0, 1}}, slices.Repeat([]batch{{2, 62}}, 16)...), 100, 7 * time.Millisecond, 9 * time.Millisecond},
		{"stalls are over", 100, append(slices.Repeat([]batch{{2, 62}}, 16), batch{62, 63}), 100, 900 * time.Microsecond, time.Millisecond},
	} {
		var b pipeline
		start := time.Now()
		for i := range tc.times {
			for _, sent := range tc.batches {
				at := func(ms int) time.Time { return start.Add(time.Duration(i*tc.every+ms) * time.Millisecond) }
				b.tookFor(at(sent.began), at(sent.ended))
			}
		}
		if b.took < tc.least || b.took > tc.most {
			t.Errorf("%s: estimated as %v, want %v to %v", tc.name, b.took, tc.least, tc.most)
		}
	}
}

// TestLateAnswers guards calls that time out in flight: they return in time, as one
// failure. When their answers arrive at last, the connection stays, and no later call
// takes them for its own.
func TestLateAnswers(t *testing.T) {
	t.Parallel()
	const requests, timeout = 40, time.Second
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Timeout, opt.Report = timeout, seen.report
	})
	mustCount(t, r, upTo(100))
	received := server.InfoNumber(t, "stats", "total_connections_received")
	server.Pause(t)
	var all sync.WaitGroup
	for i := range requests {
		all.Go(func() {
			began := time.Now()
			_, err := r.count(context.Background(), numbered(int64(i+1)))
			if took := time.Since(began); err == nil || took < timeout-time.Millisecond {
				t.Errorf("returned after %v, error %v", took, err)
			}
		})
	}
	all.Wait()
	server.Resume(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if !r.server().pipeline.healthy() {
			return errors.New("the connection is still suspected")
		}
		return nil
	})
	redistest.Together(t, requests, func(i int) { takeOwn(t, r, i, 1, 1) })
	if late := requests - checkCharged(t, server, requests, requests); late == 0 {
		t.Error("no answer was late: the test proves nothing")
	}
	if made := server.InfoNumber(t, "stats", "total_connections_received") - received; made > 1 {
		t.Errorf("%d connections made", made) // one in case the server had stayed silent
	}
	if got := seen.take(); slices.Contains(got, "down timeout") {
		t.Errorf("reported %q", got)
	}
}

// TestPendingCallsFailWhenServerGoesDown guards calls that wait to be sent when the
// breaker opens: they fail at once and with its reason, because waiting is useless.
func TestPendingCallsFailWhenServerGoesDown(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestClient(t, server, func(opt *Options) { opt.Timeout = time.Minute })
	s := r.server()
	mustCount(t, r, upTo(100))
	hold(t, s)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			_, err := r.count(context.Background(), upTo(100))
			if f := failureOf(t, err); f.reason != "oom" || !NotRun(err) {
				t.Errorf("reason %q, want why the server is down: %v", f.reason, f)
			}
		})
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		if n := waitingAt(s); n < 20 {
			return fmt.Errorf("%d calls wait", n)
		}
		return nil
	})
	for range openAfter {
		s.fail(s.failure(replyError("OOM command not allowed")))
	}
	all.Wait()
}

// TestCloseEndsPendingCalls guards that closing a client ends pending calls,
// without reporting an event.
func TestCloseEndsPendingCalls(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
	s := r.server()
	var closed time.Time
	gather(t, s, 30, func(int) {
		_, err := r.count(context.Background(), upTo(100))
		checkError(t, err, server.Addr)
		if f := failureOf(t, err); f.reason != "unused" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	}, func() {
		closed = time.Now()
		r.Close()
		redistest.WaitFor(t, 4*time.Second, func() error {
			if n := waitingAt(s); n > 0 {
				return fmt.Errorf("%d calls wait", n)
			}
			return nil
		})
	})
	if took := time.Since(closed); took > r.timeout/4 {
		t.Errorf("waited %v for what can't be", took)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestCloseEndsForgottenCalls guards that calls end which a closed client was about to send
// again, because the server did not know the script.
func TestCloseEndsForgottenCalls(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	forgotten, closed := make(chan struct{}), make(chan struct{})
	var flushed atomic.Bool
	r := newHookedClient(t, server, newCounting(counting), Hooks{Restarted: func(*Server) {
		if flushed.Load() { // while the reader says so, the client is closed
			close(forgotten)
			<-closed
		}
	}}, nil)
	mustCount(t, r, upTo(1000))
	redistest.Done(t, server.Client().ScriptFlush(t.Context()))
	flushed.Store(true)
	server.Pause(t) // so that both are answered together
	outcomes := make(chan error, nearBatches)
	for n := 1; n <= nearBatches; n++ {
		c := callOf(upTo(1000))
		c.Done = func(err error) { outcomes <- err }
		if err := r.server().offer(c, false, false); err != nil {
			t.Fatal(err)
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			p := r.server().pipeline
			p.mu.Lock()
			defer p.mu.Unlock()
			if all := p.conn.flight.invocations; len(all) < n || all[n-1].sent.IsZero() {
				return fmt.Errorf("%d of %d are in flight", len(all), n)
			}
			return nil
		})
	}
	server.Resume(t)
	<-forgotten
	_ = r.Close()
	close(closed)
	for range nearBatches {
		select {
		case err := <-outcomes:
			checkError(t, err, server.Addr)
		case <-time.After(5 * time.Second):
			t.Fatal("a call does not end")
		}
	}
}

// TestCallsEndBeforeNextConnection guards that no call is sent on a connection before all
// calls of the last one have ended: callers may take the answers in this order.
func TestCallsEndBeforeNextConnection(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestClient(t, server, nil)
	s := r.server()
	connected(t, s)
	server.Pause(t)
	ended, release := make(chan error), make(chan struct{})
	c := callOf(upTo(1000))
	c.Done = func(err error) { ended <- err; <-release }
	if err := s.offer(c, false, false); err != nil {
		t.Fatal(err)
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		s.pipeline.mu.Lock()
		defer s.pipeline.mu.Unlock()
		if s.pipeline.conn.batches == 0 {
			return errors.New("not in flight")
		}
		return nil
	})
	s.pipeline.stop(errDropped)
	server.Resume(t)
	checkError(t, <-ended, server.Addr)
	answered := make(chan error, 1)
	go func() {
		_, err := r.count(context.Background(), upTo(1000))
		answered <- err
	}()
	select {
	case err := <-answered:
		t.Errorf("answered while a call of the connection before ends: %v", err)
		answered <- err
	case <-time.After(100 * time.Millisecond):
	}
	close(release)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// TestDistantServer guards a server so far away that the round trip takes more than
// half of the timeout, in bursts and under constant load: no call waits for an earlier
// one's answer. All times are five times those of the default timeout and a server
// 40 ms away.
func TestDistantServer(t *testing.T) {
	const times = 5
	const delay, timeout = times * 40 * time.Millisecond, times * 50 * time.Millisecond
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	p.Delay(delay)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
	})
	r.Connect()
	connected(t, r.server())

	const burst, steady = 100, 1000
	var decided atomic.Int64
	take := func() {
		if _, err := r.count(context.Background(), upTo(100_000)); err == nil {
			decided.Add(1)
		}
	}
	for range 3 {
		decided.Store(0)
		redistest.Together(t, burst, func(int) { take() })
		if got := decided.Load(); got < burst {
			t.Errorf("%d of %d requests at once decided", got, burst)
		}
	}
	decided.Store(0)
	var all sync.WaitGroup
	for began, n := time.Now(), 0; n < steady; n++ {
		time.Sleep(time.Until(began.Add(time.Duration(n) * time.Millisecond)))
		all.Go(take)
	}
	all.Wait()
	if got := decided.Load(); got < steady*99/100 {
		t.Errorf("%d of %d requests decided that came one each millisecond", got, steady)
	}
	if got := p.Connections(); got != 1 {
		t.Errorf("%d connections", got)
	}
}

// TestTimedBusyProcess guards that a process which is late to send calls and to read
// replies does not take that for the server's silence: calls wait for longer than the
// timeout and are answered. When the server then is silent, they give up.
func TestTimedBusyProcess(t *testing.T) {
	const timeout, callers = 50 * time.Millisecond, 20
	server := redistest.Start(t)
	var seen events
	r := newTestClient(t, server, func(opt *Options) { opt.Timeout, opt.Report = timeout, seen.report })
	s := r.server()
	mustCount(t, r, upTo(100_000))
	for round := range 5 {
		// The writer is late.
		release := hold(t, s)
		var all sync.WaitGroup
		for range callers {
			all.Go(func() { mustCount(t, r, upTo(100_000)) })
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			if n := waitingAt(s); n > 0 && round%2 == 0 {
				return fmt.Errorf("%d calls wait, although their callers may send them", n)
			}
			return nil
		})
		release()
		all.Wait()

		// The reader is late: it is kept in a hook, while others give up waiting.
		keep := make(chan struct{})
		c := callOf(upTo(100_000))
		c.Done = func(error) { <-keep }
		s.Submit(c)
		for range callers {
			all.Go(func() { mustCount(t, r, upTo(100_000)) })
		}
		time.Sleep(3 * timeout)
		close(keep)
		all.Wait()
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}

	server.Pause(t)
	defer server.Resume(t)
	began := time.Now()
	redistest.Together(t, callers, func(int) {
		if _, err := r.count(context.Background(), upTo(100_000)); err == nil {
			t.Error("a server that is stopped has answered")
		}
	})
	if took := time.Since(began); took > 10*timeout {
		t.Errorf("waited %v for a server that is silent", took)
	}
}

// lateConn is a connection of a process that is late: before each write, and before it
// reads what has come.
type lateConn struct {
	net.Conn
	write, read atomic.Int64 // by how much, as a time.Duration
}

func (c *lateConn) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(c.write.Load()))
	return c.Conn.Write(b)
}

func (c *lateConn) Read(b []byte) (int, error) {
	time.Sleep(time.Duration(c.read.Load()))
	return c.Conn.Read(b)
}

// TestTimedLateProcessIsNotSlowServer guards a process that takes longer than the timeout
// to write what it is about to send, or to read what has come: all calls are answered,
// also those that gather meanwhile, and nothing is taken for the server's silence. It
// runs alone, since a server that gets no processor is silent.
func TestTimedLateProcessIsNotSlowServer(t *testing.T) {
	const timeout, callers, each = 50 * time.Millisecond, 600, 3 // more than fit into two batches
	for name, late := range map[string]func(*lateConn){
		"to write": func(c *lateConn) { c.write.Store(int64(3 * timeout)) },
		"to read":  func(c *lateConn) { c.read.Store(int64(3 * timeout)) },
		"to do both": func(c *lateConn) {
			c.write.Store(int64(timeout))
			c.read.Store(int64(timeout * 3 / 2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			var seen events
			r := newTestClient(t, server, func(opt *Options) { opt.Timeout, opt.Report = timeout, seen.report })
			s := r.server()
			conn, err := s.greeter.greet(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			c := &lateConn{Conn: conn.Conn}
			late(c)
			conn.Conn = c
			s.pipeline.use(conn)
			redistest.Together(t, callers, func(i int) {
				for n := range int64(each) {
					takeOwn(t, r, i, n+1, each)
				}
			})
			if got := seen.take(); len(got) > 0 {
				t.Errorf("reported %q", got)
			}
			if f := s.stats().Failures; len(f) > 0 {
				t.Errorf("failures %v", f)
			}
		})
	}
}

// stoppedEnv is the environment variable that has the address of the server for
// callUntilTold.
const stoppedEnv = "REDISSCRIPT_STOPPED"

// callUntilTold is the process that TestTimedStoppedProcess stops: it makes calls until its
// input ends, and writes what went wrong.
func callUntilTold(t *testing.T, addr string) {
	var seen events
	r := newTestClient(t, nil, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.Report = []string{addr}, 200*time.Millisecond, seen.report
	})
	r.Connect()
	fmt.Println("connecting")
	redistest.WaitFor(t, 10*time.Second, func() error {
		if !r.server().pipeline.healthy() {
			return errors.New("not connected")
		}
		return nil
	})
	var over atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		over.Store(true)
	}()
	redistest.Together(t, 50, func(int) {
		for !over.Load() {
			if _, err := r.count(context.Background(), upTo(1<<30)); err != nil {
				fmt.Println(err)
			}
		}
	})
	if got := seen.take(); len(got) > 0 {
		fmt.Printf("reported %q\n", got)
	}
	if f := r.server().stats().Failures; len(f) > 0 {
		fmt.Printf("failures %v\n", f)
	}
}

// TestTimedStoppedProcess guards a process that is stopped for a while, as by SIGSTOP or by
// a machine that is moved, while it connects and while calls are in flight: when it goes
// on they find their answers, and nothing is taken for the server's silence.
func TestTimedStoppedProcess(t *testing.T) {
	if addr := os.Getenv(stoppedEnv); addr != "" {
		callUntilTold(t, addr)
		return
	}
	t.Parallel()
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	p.Delay(300 * time.Millisecond)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestTimedStoppedProcess$")
	cmd.Env = append(os.Environ(), stoppedEnv+"="+p.Addr)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := func(d time.Duration) {
		for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
			if err := cmd.Process.Signal(s); err != nil {
				t.Error(err)
			}
			time.Sleep(d)
			d = 0
		}
	}
	lines := bufio.NewScanner(out)
	if lines.Scan(); lines.Text() != "connecting" {
		t.Errorf("the process says %q", lines.Text())
	}
	stop(2 * time.Second)
	p.Delay(20 * time.Millisecond) // so that some are always in flight
	for _, d := range []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, 2 * time.Second} {
		ran := server.CommandStat(t, "evalsha")
		redistest.WaitFor(t, 10*time.Second, func() error {
			if n := server.CommandStat(t, "evalsha"); n < ran+5 {
				return fmt.Errorf("%d calls ran", n-ran)
			}
			return nil
		})
		stop(d)
	}
	in.Close()
	for lines.Scan() {
		if line := lines.Text(); line != "PASS" {
			t.Error(line)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestSlowTLSRecord guards a server, or what is between, that sends a part of a TLS
// record and then falls silent: its calls do not wait for the rest of it.
func TestSlowTLSRecord(t *testing.T) {
	t.Parallel()
	const timeout, margin = 100 * time.Millisecond, 400 * time.Millisecond
	a := redistest.NewAuthority(t)
	server := redistest.StartTLS(t, a, false)
	p := redistest.StartProxy(t, server.Addr)
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.TLS = []string{p.Addr}, timeout, a.ClientConfig(t)
	})
	connected(t, r.server())
	p.Slice(7, time.Minute)
	began := time.Now()
	_, err := r.count(t.Context(), upTo(100))
	if f := failureOf(t, err); f.reason != "timeout" {
		t.Errorf("reason %q: %v", f.reason, err)
	}
	if took := time.Since(began); took > timeout+margin {
		t.Errorf("waited %v", took)
	}
}

// TestShortestTimeout guards the connection to a server that has just spoken: a call
// that gives up does not take it for silent, however short the timeout is.
func TestShortestTimeout(t *testing.T) {
	for _, timeout := range []time.Duration{time.Millisecond, 2 * time.Millisecond, time.Second} {
		r := newTestClient(t, redistest.Start(t), func(opt *Options) { opt.Timeout = timeout })
		pipeline := r.server().pipeline
		connected(t, r.server())
		pipeline.mu.Lock()
		conn := pipeline.conn
		pipeline.mu.Unlock()
		_ = pipeline.giveUp(conn, conn.heard(), conn.heard().Add(timeout/4), false, false)
		if !pipeline.healthy() {
			t.Errorf("timeout %v: a server that spoke %v ago is taken for silent", timeout, timeout/4)
		}
	}
}

// TestShortenedCallBlamesNoServer guards calls that have less time than the timeout: they
// give up when that is over, which is no failure of the server, also in a process that
// has just been late.
func TestShortenedCallBlamesNoServer(t *testing.T) {
	t.Parallel()
	const timeout, short = 500 * time.Millisecond, 20 * time.Millisecond
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
	})
	s := r.server()
	connected(t, s)
	p.Delay(timeout / 2)
	for range 2 * openAfter {
		release := hold(t, s) // for most of its time
		time.AfterFunc(short*3/4, release)
		ctx, cancel := context.WithTimeout(t.Context(), short)
		began := time.Now()
		_, err := r.count(ctx, upTo(100))
		cancel()
		if f := failureOf(t, err); f.reason != "backlog" || f.counts {
			t.Errorf("reason %q, counts %t: %v", f.reason, f.counts, err)
		}
		if took := time.Since(began); took > timeout/3 {
			t.Errorf("waited %v of %v", took, short)
		}
	}
	if got := seen.take(); !slices.Equal(got, []string{"error backlog"}) {
		t.Errorf("reported %q", got)
	}
}

// TestSubmittedCallReportsNotRun guards a submitted call for which there is no
// connection: its Done learns that the script was not run, so that the call can be
// retried.
func TestSubmittedCallReportsNotRun(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		fault func(*redistest.Proxy)
	}{
		{"the next takes long", (*redistest.Proxy).BlackHole},
		{"the next is refused", (*redistest.Proxy).Refuse},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			p := redistest.StartProxy(t, server.Addr)
			r := newTestClient(t, server, func(opt *Options) {
				opt.Addresses, opt.Timeout = []string{p.Addr}, 200*time.Millisecond
			})
			s := r.server()
			connected(t, s)
			tc.fault(p)
			redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal"))
			p.CloseAll()
			redistest.WaitFor(t, 5*time.Second, func() error {
				if s.pipeline.healthy() {
					return errors.New("the connection is still there")
				}
				return nil
			})
			c, done := callOf(upTo(10)), make(chan error, 1)
			c.Done = func(err error) { done <- err }
			s.Submit(c)
			select {
			case err := <-done:
				if !NotRun(err) {
					t.Errorf("error %v, want one that says that nothing was run", err)
				}
			case <-time.After(5 * time.Second):
				t.Error("Done was not called")
			}
		})
	}
}
