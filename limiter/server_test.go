package limiter

import (
	"context"
	"crypto/tls"
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

// guardOf returns the guard of a store's one server.
func guardOf(r *Redis) *guard { return &r.servers.(*single).server.guard }

// clients returns how many connections the server has, those of the test left
// out.
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

// connectAll makes so many connections to a server, and waits for them.
func connectAll(t testing.TB, s *server, n int) {
	t.Helper()
	for range n {
		s.connect(false)
	}
	waitFor(t, 5*time.Second, func() error {
		if ready := len(s.ready); ready < n {
			return fmt.Errorf("%d connections", ready)
		}
		return nil
	})
}

// mustTake takes one request that must be decided.
func mustTake(t testing.TB, r *Redis, req Request) []Decision {
	t.Helper()
	d, err := r.Take(t.Context(), req, nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestBoundedWait tests the promise that all else rests on: of many requests at
// once to a server that has stopped, none waits longer than it may. What else
// runs on this machine can make them late: by how much is told by others that
// only sleep.
func TestBoundedWait(t *testing.T) {
	const timeout, margin, callers = 50 * time.Millisecond, 20 * time.Millisecond, 50
	server := redistest.Start(t)
	b := hourly(100_000)
	for range 3 {
		var seen events
		r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Timeout, opt.Report = timeout, seen.report })
		waitFor(t, 5*time.Second, func() error {
			_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
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
					_, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
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
			t.Fatalf("%d requests failed: the test shows nothing", failed.Load())
		}
		if got := seen.take(); !slices.Contains(got, "lost timeout") {
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

// TestSlowGreeting tests a server so far away that no request could wait for a
// connection to be made: it is made all the same, and then serves.
func TestSlowGreeting(t *testing.T) {
	t.Parallel()
	const timeout = 250 * time.Millisecond
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	p.Delay(300 * time.Millisecond)
	var seen events
	memory := NewMemory(nil)
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
		opt.Fallback, opt.PoolSize = memory, 2
	})
	b := hourly(100)
	s := r.servers.(*single).server
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	waitFor(t, 5*time.Second, func() error {
		if s.made.Load() == 0 {
			return errors.New("not connected")
		}
		return nil
	})
	p.Delay(50 * time.Millisecond)
	for n := range int64(20) {
		d := mustTake(t, r, Request{Buckets: []Bucket{b}})
		if d[0].Denied {
			t.Fatalf("decided %+v", d)
		}
		direct := newTestRedis(t, server, nil)
		if got := level(t, direct, b); got < n+1 {
			t.Fatalf("%d units in Redis after %d requests that it should decide", got, n+1)
		}
		direct.Close()
	}
	if n := p.Connections(); n > 2 {
		t.Errorf("%d connections", n)
	}
	if got := seen.take(); len(got) > 1 || len(got) == 1 && got[0] != "lapse timeout" {
		t.Errorf("reported %q", got)
	}
}

// TestConnections tests that there are no more connections than are told, and
// that they are kept: for thousands of requests they are made once.
func TestConnections(t *testing.T) {
	server := redistest.Start(t)
	for _, size := range []int{1, 3} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			before := infoNumber(t, server, "stats", "total_connections_received")
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize = size })
			b := hourly(100_000)
			var most atomic.Int64
			together(t, 20, func(g int) {
				for n := range 100 {
					if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err != nil {
						t.Error(err)
					}
					if g == 0 && n%10 == 0 {
						most.Store(max(most.Load(), int64(clients(t, server))))
					}
				}
			})
			if got := most.Load(); got > int64(size) || got == 0 {
				t.Errorf("%d connections, may be %d", got, size)
			}
			made := infoNumber(t, server, "stats", "total_connections_received") - before
			if made > int64(size)+10 { // the test has some too
				t.Errorf("%d connections made, may be %d at a time", made, size)
			}
			r.Close()
			waitFor(t, 5*time.Second, func() error {
				if n := clients(t, server); n > 0 {
					return fmt.Errorf("%d connections of a closed store", n)
				}
				return nil
			})
		})
	}
}

// TestConnectionsAsNeeded tests that requests which come one after the other are
// content with a connection, and one more for the next.
func TestConnectionsAsNeeded(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	clients(t, server)
	before := infoNumber(t, server, "stats", "total_connections_received")
	for range 2000 {
		mustTake(t, r, Request{Buckets: []Bucket{hourly(100_000)}})
	}
	if made := infoNumber(t, server, "stats", "total_connections_received") - before; made > 3 {
		t.Errorf("%d connections made", made)
	}
}

// TestConnectAhead tests that a store which was told to connect does, before
// there is any request.
func TestConnectAhead(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	r.Connect()
	waitFor(t, 5*time.Second, func() error {
		if n := clients(t, server); n != 1 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
}

// TestConnectionsKilled tests that a server which closes all connections fails
// each caller once, or twice if another connection was just being handed on;
// that this is no outage; and that what fails is not sent again.
func TestConnectionsKilled(t *testing.T) {
	const callers, kills = 8, 10
	server := redistest.Start(t)
	if err := server.Client().ScriptLoad(t.Context(), takeSource).Err(); err != nil {
		t.Fatal(err)
	}
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
	var requests, failed atomic.Int64
	for range kills {
		stop := make(chan struct{})
		var busy sync.WaitGroup
		for range callers {
			busy.Go(func() {
				failures := 0
				for {
					b := numbered(requests.Add(1))
					if _, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err != nil {
						failures++
						failed.Add(1)
						if f := new(failure); errors.As(err, &f) && f.reason != "closed" {
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
		t.Error("no request failed: the test shows nothing")
	}
	if got, want := seen.take(), []string{"lapse closed"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
	checkCharged(t, newTestRedis(t, server, nil), requests.Load(), failed.Load())
}

// numbered returns the bucket that only the n-th request has.
func numbered(n int64) Bucket {
	b := hourly(100)
	b.Key = fmt.Sprint(n)
	return b
}

// checkCharged checks that of so many requests, each with a bucket of its own,
// those were charged once that did not fail, and of the others none more.
func checkCharged(t testing.TB, r *Redis, requests, failed int64) {
	t.Helper()
	charged := int64(0)
	for n := range requests {
		units := level(t, r, numbered(n+1))
		if charged += units; units > 1 {
			t.Fatalf("%d units by one request", units)
		}
	}
	if charged < requests-failed {
		t.Errorf("%d of %d requests charged, of which %d failed", charged, requests, failed)
	}
}

// TestRestart tests that a server which was gone decides again soon after it is
// there, and that nobody waits in between.
func TestRestart(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	server := redistest.Start(t)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Timeout, opt.Report = timeout, seen.report })
	b := hourly(100_000)
	for range 2 {
		waitFor(t, 5*time.Second, func() error {
			_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			return err
		})
		seen.take()
		server.Kill()
		dead := time.Now()
		for time.Since(dead) < 700*time.Millisecond {
			began := time.Now()
			if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err == nil {
				t.Fatal("decided by nobody")
			}
			if took := time.Since(began); took > timeout*2 {
				t.Errorf("waited %v", took)
			}
			time.Sleep(time.Millisecond)
		}
		server.Restart(t)
		waitFor(t, 2*time.Second, func() error {
			_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			return err
		})
		got := seen.take()
		if len(got) != 2 || !strings.HasPrefix(got[0], "lost ") || got[1] != "back" {
			t.Errorf("reported %q", got)
		}
	}
}

// TestCancelledRequests tests that clients which leave cost no connection.
func TestCancelledRequests(t *testing.T) {
	server := redistest.Start(t)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize, opt.Report = 1, seen.report })
	b := hourly(100_000)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	before := infoNumber(t, server, "stats", "total_connections_received")
	const requests = 500
	for n := range requests {
		ctx, cancel := context.WithCancel(t.Context())
		if n%2 == 0 {
			cancel()
		} else {
			time.AfterFunc(20*time.Microsecond, cancel)
		}
		if d, err := r.Take(ctx, Request{Buckets: []Bucket{b}}, nil); err != nil || d[0].Denied {
			t.Fatalf("decided %+v, error %v", d, err)
		}
		cancel()
	}
	if made := infoNumber(t, server, "stats", "total_connections_received") - before; made > 0 {
		t.Errorf("%d connections made", made)
	}
	if got := level(t, r, b); got != requests+1 {
		t.Errorf("%d units after %d requests", got, requests+1)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestCloseLeavesNothing tests that of a closed store neither connections nor
// goroutines remain, whatever it was doing.
func TestCloseLeavesNothing(t *testing.T) {
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
		r := mustNewRedis(t, RedisOptions{Addresses: []string{server.Addr}, Timeout: time.Second, PoolSize: 4})
		together(t, 8, func(int) {
			for range 5 {
				if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100_000)}}, nil); err != nil {
					t.Error(err)
				}
			}
		})
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100_000)}}, nil); err == nil {
			t.Error("decided by a closed store")
		}

		lost := mustNewRedis(t, RedisOptions{Addresses: []string{silent.Addr}, Timeout: time.Millisecond, PoolSize: 4})
		for range 6 {
			lost.Take(t.Context(), Request{Buckets: []Bucket{hourly(100_000)}}, nil)
		}
		lost.Connect()
		if err := lost.Close(); err != nil {
			t.Error(err)
		}
	}
	silent.Refuse()
	waitFor(t, 10*time.Second, func() error {
		if n := clients(t, server); n > 0 {
			return fmt.Errorf("%d connections of closed stores", n)
		}
		if n := settled(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
}

// TestWarmFallback tests that an outage begins where the server stopped: what it
// had admitted before it was killed is not admitted once more, and all that was
// left is.
func TestWarmFallback(t *testing.T) {
	t.Parallel()
	for _, accounting := range []Accounting{Atomic, Each} {
		for _, drip := range []int64{1, 3} {
			for _, several := range []bool{false, true} {
				name := fmt.Sprintf("%v,drip=%d,several=%t", accounting, drip, several)
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					server := redistest.Start(t)
					var all []*Redis
					for before := range int64(7) {
						r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory(nil) })
						all = append(all, r)
						for range before {
							mustTake(t, r, warmRequest(before, accounting, drip, several))
						}
					}
					server.Kill()
					for before, r := range all {
						req := warmRequest(int64(before), accounting, drip, several)
						admitted := int64(0)
						for n := range int64(20) {
							d := mustTake(t, r, req)
							if d[0].Denied != (int64(before)+n >= 10) {
								t.Fatalf("%d before and %d after: decided %+v", before, n, d)
							}
							if !Summarize(d).Denied {
								admitted++
							}
						}
						if want := int64(10 - before); admitted != want {
							t.Errorf("admitted %d after %d, want %d", admitted, before, want)
						}
						if !several {
							continue
						}
						// The other bucket was charged for what was admitted, or, if each is
						// charged for itself, for all.
						want := int64(10)
						if accounting == Each {
							want = int64(before) + 20
						}
						if got := level(t, r, req.Buckets[1]); got != want {
							t.Errorf("the other bucket holds %d, want %d", got, want)
						}
					}
				})
			}
		}
	}
}

// warmRequest returns a request of its own to a bucket of 10 and, if there are
// several, to one of 1000.
func warmRequest(key int64, accounting Accounting, drip int64, several bool) Request {
	b := Bucket{Name: "b", Key: fmt.Sprint(key), Limit: Limit{10, time.Hour, drip}, Cost: 1}
	req := Request{Buckets: []Bucket{b}, Accounting: accounting}
	if several {
		b.Name, b.Limit.Size = "other", 1000
		req.Buckets = append(req.Buckets, b)
	}
	return req
}

// TestOutageIsPaid tests the other end of an outage: what was admitted here
// meanwhile counts in the server when it is back, and is not admitted again.
func TestOutageIsPaid(t *testing.T) {
	t.Parallel()
	for _, drip := range []int64{1, 3} {
		t.Run(fmt.Sprint(drip), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory(nil) })
			b := Bucket{Name: "b", Key: fmt.Sprint(drip), Limit: Limit{100, time.Hour, drip}, Cost: 1}
			req := Request{Buckets: []Bucket{b}}
			for range 5 {
				mustTake(t, r, req)
			}
			server.Kill()
			for range 20 {
				mustTake(t, r, req)
			}
			server.Restart(t)
			direct := newTestRedis(t, server, nil)
			n := int64(25)
			waitFor(t, 5*time.Second, func() error {
				mustTake(t, r, req)
				n++
				if got := level(t, direct, b); got != n {
					return fmt.Errorf("%d units in Redis, %d requests admitted", got, n)
				}
				return nil
			})
			// It is paid once.
			for range 10 {
				mustTake(t, r, req)
				n++
			}
			if got := level(t, direct, b); got != n {
				t.Errorf("%d units in Redis, %d requests admitted", got, n)
			}
		})
	}
}

// TestNoFallback tests requests that ask not to be decided here: they get an
// error, and change nothing here; but what a server has decided on them counts
// for those that are.
func TestNoFallback(t *testing.T) {
	server := redistest.Start(t)
	memory := NewMemory(nil)
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = memory })
	req := Request{Buckets: []Bucket{hourly(5)}, NoFallback: true}
	mustTake(t, r, req)
	server.Kill()
	for range 2 * lostAfter {
		d, err := r.Take(t.Context(), req, []Decision{{Size: 1234}})
		checkError(t, err, server.Addr)
		if len(d) != 1 || d[0].Size != 1234 {
			t.Errorf("decided %+v", d)
		}
	}
	req.NoFallback = false
	for n := range 5 {
		if d := mustTake(t, r, req); d[0].Denied != (n == 4) {
			t.Errorf("request %d: decided %+v", n, d)
		}
	}
}

// TestCorruptIsReported tests that keys which something else has written to are
// reported, once, and disturb nobody.
func TestCorruptIsReported(t *testing.T) {
	server := redistest.Start(t)
	var seen events
	memory := NewMemory(nil)
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Report, opt.Fallback = seen.report, memory })
	b := hourly(5)
	key := r.keys.of(&b)
	admin := server.Client()
	for n, fill := range []func() error{
		func() error { return admin.Set(t.Context(), key, "garbage", 0).Err() },
		func() error { return admin.RPush(t.Context(), key, 1, 2).Err() },
		func() error { return admin.Set(t.Context(), key, serverTime(t, server)+2*horizon, 0).Err() },
		func() error { return admin.Set(t.Context(), key, "", 0).Err() },
	} {
		if err := admin.Del(t.Context(), key).Err(); err != nil {
			t.Fatal(err)
		}
		if err := fill(); err != nil {
			t.Fatal(err)
		}
		r.denials = newDenials(denialSlots)
		for m := range 6 {
			if d := mustTake(t, r, Request{Buckets: []Bucket{b}}); d[0].Denied != (m == 5) {
				t.Errorf("request %d: decided %+v", m, d)
			}
		}
		if s, _ := storedState(t, server, key); s.slack != 0 {
			t.Errorf("stored %+v", s)
		}
		want := []string(nil)
		if n == 0 {
			want = []string{"lapse corrupt"}
		}
		if got := seen.take(); !slices.Equal(got, want) {
			t.Errorf("reported %q, want %q", got, want)
		}
	}
	if n := guardOf(r).failures.Load(); n != 0 {
		t.Errorf("%d failures", n)
	}
}

// TestRepliesCutConcurrently tests that of many requests whose answers get lost
// none runs twice.
func TestRepliesCutConcurrently(t *testing.T) {
	server := redistest.Start(t)
	if err := server.Client().ScriptLoad(t.Context(), takeSource).Err(); err != nil {
		t.Fatal(err)
	}
	p := redistest.StartProxy(t, server.Addr)
	var sent, cut atomic.Int64
	for n := range 6 {
		r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Addresses = []string{p.Addr} })
		if n%2 == 0 {
			p.CutReplies("evalsha")
		} else {
			p.HalfReply(3, "evalsha")
		}
		together(t, 4, func(int) {
			for range 20 {
				cut.Add(1)
				_, err := r.Take(t.Context(), Request{Buckets: []Bucket{numbered(sent.Add(1))}}, nil)
				checkError(t, err, p.Addr)
			}
		})
		p.Pass()
		waitFor(t, 5*time.Second, func() error {
			_, err := r.Take(t.Context(), Request{Buckets: []Bucket{numbered(sent.Add(1))}}, nil)
			if err != nil {
				cut.Add(1)
			}
			return err
		})
	}
	if ran := server.CommandStat(t, "evalsha"); ran < 6*lostAfter {
		t.Errorf("%d calls ran: the test shows nothing", ran)
	}
	checkCharged(t, newTestRedis(t, server, nil), sent.Load(), cut.Load())
}

// TestPoolExhausted tests that a server which answers, but not all who ask at
// once, is not taken for lost.
func TestPoolExhausted(t *testing.T) {
	const timeout = 50 * time.Millisecond
	server := redistest.Start(t)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize, opt.Report = 1, seen.report })
	b := hourly(100)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	r.timeout = timeout
	s := r.servers.(*single).server
	conn := <-s.ready // as a request that takes long does
	together(t, 20, func(int) {
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
		checkError(t, err, server.Addr)
		if f := failureOf(t, err); f.reason != "pool" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	})
	s.ready <- conn
	r.timeout = 10 * time.Second
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	if got, want := seen.take(), []string{"lapse pool"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// TestRedisDecidesNothing guards the request without buckets: there is nothing
// to ask a server.
func TestRedisDecidesNothing(t *testing.T) {
	server := redistest.Start(t)
	checkDecidesNothing(t, newTestRedis(t, server, nil))
	server.Kill()
	checkDecidesNothing(t, newTestRedis(t, server, nil))
}

// checkDecidesNothing checks that a request without buckets is admitted.
func checkDecidesNothing(t testing.TB, r *Redis) {
	t.Helper()
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("panic: %v", r)
		}
	}()
	kept := Decision{Size: 1234}
	d, err := r.Take(t.Context(), Request{}, []Decision{kept})
	if err != nil || len(d) != 1 || d[0] != kept {
		t.Errorf("decided %+v, error %v", d, err)
	}
}

// clientTLS returns how to speak TLS with a server of the given authority that
// wants a certificate.
func clientTLS(t testing.TB, a *redistest.Authority) *tls.Config {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(a.Issue(t, "client"))
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{RootCAs: a.Pool(), Certificates: []tls.Certificate{cert}}
}

// TestTLS tests a server that speaks TLS only: with the right authority, and
// with the certificate that it wants, it decides; else requests are decided
// here.
func TestTLS(t *testing.T) {
	t.Parallel()
	good, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	tests := []struct {
		name        string
		clientCerts bool
		config      *tls.Config
		works       bool
	}{
		{"authority", false, &tls.Config{RootCAs: good.Pool()}, true},
		{"name", false, &tls.Config{RootCAs: good.Pool(), ServerName: "localhost"}, true},
		{"certificate", true, clientTLS(t, good), true},
		{"not verified", false, &tls.Config{InsecureSkipVerify: true}, true},
		{"other authority", false, &tls.Config{RootCAs: other.Pool()}, false},
		{"other name", false, &tls.Config{RootCAs: good.Pool(), ServerName: "redis.test"}, false},
		{"no certificate", true, &tls.Config{RootCAs: good.Pool()}, false},
		{"no TLS", false, nil, false},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.StartTLS(t, good, tc.clientCerts)
			var seen events
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.TLS, opt.Fallback, opt.Report = tc.config, NewMemory(nil), seen.report
			})
			b := hourly(100)
			for range 2 * lostAfter {
				mustTake(t, r, Request{Buckets: []Bucket{b}})
			}
			n, err := server.Client().Exists(t.Context(), r.keys.of(&b)).Result()
			if err != nil || (n == 1) != tc.works {
				t.Errorf("%d buckets in Redis, error %v; works %t", n, err, tc.works)
			}
			if got := seen.take(); tc.works && len(got) > 0 || !tc.works && len(got) != 1 {
				t.Errorf("reported %q", got)
			}
			if got := level(t, r, b); got != 2*lostAfter {
				t.Errorf("%d units", got)
			}
		})
	}
}

// TestBlackHole tests an outage in which all that is sent gets lost: there is
// one, and connections that were begun meanwhile and fail long after are no
// other.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.Timeout, opt.PoolSize = []string{p.Addr}, 50*time.Millisecond, 10
		opt.Report = seen.report
	})
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for range 20 {
		busy.Go(func() {
			for {
				_, _ = r.Take(context.Background(), Request{Buckets: []Bucket{hourly(100_000)}}, nil)
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
	waitFor(t, 5*time.Second, func() error {
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100_000)}}, nil)
		return err
	})
	time.Sleep(connectWithin)
	close(stop)
	busy.Wait()
	got := seen.take()
	got = slices.DeleteFunc(got, func(event string) bool { return strings.HasPrefix(event, "lapse") })
	if want := []string{"lost timeout", "back"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// busy lets callers take requests one after the other, with a little time
// between, for a second. It returns how many requests were made, and how many
// of them were decided.
func busy(t testing.TB, r *Redis, callers int, b Bucket) (made, decided int64) {
	t.Helper()
	var sent, good atomic.Int64
	end := time.Now().Add(time.Second)
	together(t, callers, func(int) {
		for time.Now().Before(end) {
			sent.Add(1)
			if _, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err == nil {
				good.Add(1)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	return sent.Load(), good.Load()
}

// failToConnect lets a server find that no more connections can be made than it
// has.
func failToConnect(t testing.TB, s *server) {
	t.Helper()
	s.connect(false)
	waitFor(t, 5*time.Second, func() error {
		if s.dials.Load() == 0 {
			return errors.New("no attempt to connect has failed")
		}
		return nil
	})
}

// checkFewDials checks that requests of about a second, which wanted more
// connections than could be made, did not try that more often than a lost server
// is asked.
func checkFewDials(t testing.TB, dials int64) {
	t.Helper()
	if most := int64(1500 * time.Millisecond / (probeEvery * 4 / 5)); dials == 0 || dials > most {
		t.Errorf("%d attempts to connect, may be 1 to %d", dials, most)
	}
}

// TestNoMoreClients tests a server that takes no more clients than it has: the
// connections there are stay and serve all, and next to no others are tried.
func TestNoMoreClients(t *testing.T) {
	t.Parallel()
	const size, callers = 20, 40
	server := redistest.Start(t)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize, opt.Report = size, seen.report })
	b := hourly(100_000)
	for range 5 {
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	s := r.servers.(*single).server
	waitFor(t, 5*time.Second, func() error {
		if held, made := s.held.Load(), s.made.Load(); held != made {
			return fmt.Errorf("%d connections made of %d", made, held)
		}
		return nil
	})
	have := infoNumber(t, server, "clients", "connected_clients")
	if err := server.Client().Do(t.Context(), "CONFIG", "SET", "maxclients", have).Err(); err != nil {
		t.Fatal(err)
	}
	failToConnect(t, s)
	rejected := infoNumber(t, server, "stats", "rejected_connections")

	made, decided := busy(t, r, callers, b)
	if decided != made {
		t.Errorf("%d of %d requests decided", decided, made)
	}
	if got := level(t, r, b); got != made+5 {
		t.Errorf("%d units by %d requests", got, made+5)
	}
	checkFewDials(t, infoNumber(t, server, "stats", "rejected_connections")-rejected)
	for _, event := range seen.take() {
		// The server closes behind its reply, which may get lost by that.
		if event != "lapse maxclients" && event != "lapse closed" {
			t.Errorf("reported %q", event)
		}
	}
}

// TestOverload tests a server that is asked for more than twice of what it could
// answer in calls of one request each: those who wait travel together, and next
// to all are decided.
func TestOverload(t *testing.T) {
	t.Parallel()
	const size, delay, timeout, requests = 4, 20 * time.Millisecond, 100 * time.Millisecond, 500
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.Timeout, opt.PoolSize, opt.Report = []string{p.Addr}, timeout, size, seen.report
	})
	b := hourly(100_000)
	s := r.servers.(*single).server
	waitFor(t, 5*time.Second, func() error {
		if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err != nil {
			return err
		}
		s.connect(false)
		if n := s.made.Load(); n < size {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	p.Delay(delay)
	c := calls{server: server}
	c.since(t, "evalsha")
	seen.take()

	var decided atomic.Int64
	var all sync.WaitGroup
	began := time.Now()
	for n := range requests {
		time.Sleep(time.Until(began.Add(time.Duration(n) * time.Second / requests)))
		all.Go(func() {
			if _, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err == nil {
				decided.Add(1)
			}
		})
	}
	took := time.Since(began)
	all.Wait()
	ran, can := c.since(t, "evalsha"), size*int64(took/delay)
	if n := decided.Load(); n < requests*9/10 || ran > can || 2*can > requests {
		t.Errorf("%d of %d requests decided; %d calls ran, %d could", n, requests, ran, can)
	}
	for _, event := range seen.take() {
		if !strings.HasPrefix(event, "lapse ") {
			t.Errorf("reported %q", event)
		}
	}
}

// idle lets all connections of a server have lain idle for some time, and
// returns how many there are.
func idle(t testing.TB, s *server, d time.Duration) int {
	t.Helper()
	if held, ready := int(s.held.Load()), len(s.ready); held != ready {
		t.Fatalf("%d of %d connections lie idle", ready, held)
	}
	for range len(s.ready) {
		conn := <-s.ready
		conn.used = conn.used.Add(-d)
		s.ready <- conn
	}
	return len(s.ready)
}

// TestIdleConnections tests what is done for connections that nobody has used
// for long: those that the server has closed are replaced before a request
// meets one, and the others stay.
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
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize, opt.Report = 4, seen.report })
			defer r.Close()
			s := r.servers.(*single).server
			settled := func(least int32) {
				t.Helper()
				waitFor(t, 5*time.Second, func() error {
					if n := s.made.Load(); n < least || n != s.held.Load() || int(n) != len(s.ready) {
						return fmt.Errorf("%d connections, %d lie idle, want %d", n, len(s.ready), least)
					}
					return nil
				})
			}
			for range 3 {
				s.connect(false)
			}
			settled(3)
			n := idle(t, s, tc.idle)
			if tc.closed {
				if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err(); err != nil {
					t.Fatal(err)
				}
			}
			c := calls{server: server}
			c.since(t, "hello")
			received := infoNumber(t, server, "stats", "total_connections_received")

			s.check()
			settled(1)
			if got := c.since(t, "hello"); (got > 0) != tc.tried {
				t.Errorf("%d tries of %d connections, want %t", got, n, tc.tried)
			}
			if !tc.closed {
				settled(int32(n))
				if more := infoNumber(t, server, "stats", "total_connections_received") - received; more > 0 {
					t.Errorf("%d connections made", more)
				}
			}
			for range 2 * n {
				mustTake(t, r, Request{Buckets: []Bucket{hourly(100_000)}})
			}
			if got := seen.take(); len(got) > 0 {
				t.Errorf("reported %q", got)
			}
		})
	}
}

// TestBackUnasked tests an outage that ends while nobody asks: there is a
// connection to the server again before the first request, which it decides.
func TestBackUnasked(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
	req := Request{Buckets: []Bucket{hourly(100)}}
	mustTake(t, r, req)
	server.Kill()
	for range lostAfter {
		_, err := r.Take(t.Context(), req, nil)
		checkError(t, err, server.Addr)
	}
	waitFor(t, 5*time.Second, func() error { // what was still under way
		if n := r.servers.(*single).server.held.Load(); n > 0 || !guardOf(r).isLost() {
			return fmt.Errorf("%d connections, lost %t", n, guardOf(r).isLost())
		}
		return nil
	})
	guardOf(r).mu.Lock()
	guardOf(r).probeAt = time.Now().Add(time.Hour) // none of its own accord
	guardOf(r).mu.Unlock()
	server.Restart(t)
	waitFor(t, 5*time.Second, func() error {
		if clients(t, server) == 0 || len(r.servers.(*single).server.ready) == 0 {
			return errors.New("not connected")
		}
		return nil
	})
	mustTake(t, r, req)
	got := seen.take()
	if len(got) != 2 || !strings.HasPrefix(got[0], "lost ") || got[1] != "back" {
		t.Errorf("reported %q", got)
	}
}

// TestClosedReportsNothing tests that nothing is reported of a store that was
// closed, whatever it was doing and is asked afterwards.
func TestClosedReportsNothing(t *testing.T) {
	server := redistest.Start(t)
	for _, callers := range []int{0, 1, 20} {
		t.Run(fmt.Sprint(callers), func(t *testing.T) {
			for range 10 {
				var seen events
				r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize, opt.Report = 8, seen.report })
				mustTake(t, r, Request{Buckets: []Bucket{hourly(100_000)}})
				before := infoNumber(t, server, "stats", "total_commands_processed")
				var asks sync.WaitGroup
				for range callers {
					asks.Go(func() {
						for {
							_, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(100_000)}}, nil)
							if err != nil {
								return
							}
						}
					})
				}
				waitFor(t, 5*time.Second, func() error {
					ran := infoNumber(t, server, "stats", "total_commands_processed") - before
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
				for range 2 * lostAfter {
					_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100_000)}}, nil)
					checkError(t, err, server.Addr)
				}
				if got := seen.take(); len(got) > 0 {
					t.Fatalf("reported %q", got)
				}
			}
		})
	}
}

// TestNameOfAnotherServer tests a name, or an address that is passed on, which by
// a failover comes to stand for another server: one reply of the old server, now
// a replica, is enough for all connections to it to be given up.
func TestNameOfAnotherServer(t *testing.T) {
	const size = 20
	before, after := redistest.Start(t), redistest.Start(t)
	p := redistest.StartProxy(t, before.Addr)
	var seen events
	r := newTestRedis(t, before, func(opt *RedisOptions) {
		opt.Addresses, opt.PoolSize, opt.Report = []string{p.Addr}, size, seen.report
	})
	s := r.servers.(*single).server
	connectAll(t, s, size)
	p.Retarget(after.Addr)
	if err := before.Client().Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err(); err != nil {
		t.Fatal(err)
	}
	b := hourly(100)
	_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
	checkError(t, err, p.Addr)
	for range 2 * size {
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	if got := storedUnits(t, r, after, b); got != 2*size {
		t.Errorf("%d units, want %d", got, 2*size)
	}
	waitFor(t, 5*time.Second, func() error {
		if n := clients(t, before); n > 0 {
			return fmt.Errorf("%d connections to the replica", n)
		}
		return nil
	})
	if got, want := seen.take(), []string{"lapse readonly"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}
