package limiter

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// inProgress is a request that holds units of one bucket.
type inProgress struct {
	held *Held
	cost int64
}

// begin decides a request that holds b's cost.
func begin(t rapid.TB, store Store, b Bucket) (Decision, inProgress) {
	t.Helper()
	b.Hold = true
	held := new(Held)
	decisions, err := store.Take(context.Background(), Request{Buckets: []Bucket{b}, Held: held}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return decisions[0], inProgress{held, b.Cost}
}

// beginThere begins a request of b that r's server decides, which may take until r is connected.
func beginThere(t testing.TB, r *Redis, b Bucket) (h inProgress) {
	t.Helper()
	redistest.WaitFor(t, 10*time.Second, func() error {
		var d Decision
		if d, h = begin(t, r, b); d.By != DecidedByRedis {
			h.held.Settle(0, 0)
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	return h
}

// awaitDown takes b until r considers its server down.
func awaitDown(t testing.TB, r *Redis, b Bucket) {
	t.Helper()
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, h := begin(t, r, b)
		h.held.Settle(0, 0)
		if r.Stats()[0].State != ServerDown {
			return errors.New("not down")
		}
		return nil
	})
}

// heldNow returns how many units of b are held.
func heldNow(t rapid.TB, store Store, b Bucket) int64 {
	t.Helper()
	return levelNow(t, store, b).Held
}

// TestHold guards requests whose cost is known at their end, against a plain model: they
// are admitted if they fit next to what was charged and what others hold, and are charged
// at their end, by what they cost then, or empty the bucket. Those that hold nothing are admitted
// while there is room for any, and charged anyway. Both stores decide alike, and renewals keep what
// is held however long requests take.
func TestHold(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	trace, seen := 0, map[string]int{}
	checkTraces(t, 5, func(t *rapid.T) {
		trace++
		size := rapid.SampledFrom([]int64{1, 2, 5, 20, 100_000}).Draw(t, "size")
		interval := rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second, 7 * time.Second, time.Hour}).Draw(t, "interval")
		limit := Limit{Size: size, DripInterval: interval, DripSize: rapid.SampledFrom([]int64{1, 1, 3}).Draw(t, "drip size")}
		switch rapid.IntRange(0, 4).Draw(t, "algorithm") {
		case 1:
			limit = FixedWindow(size, interval)
		case 2:
			limit = SlidingWindow(size, interval)
		case 3:
			limit = Concurrency(size)
		case 4:
			limit = SlidingLog(min(size, bucket.MaxLogUnits), interval)
			size = limit.Size
		}
		modelled := limit.Algorithm != bucket.Log // of which the stores only have to decide alike
		b := Bucket{Name: "b", Key: fmt.Sprint(trace), Limit: limit, Cost: 1}
		costs := rapid.SampledFrom([][]int64{{1, 2, 3}, {0}, {0, 1, 2}}).Draw(t, "costs")
		stores := []Store{v, m}
		var running [][2]inProgress
		s, busy := bucket.Level{}, int64(0)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.advance(t, time.Duration(rapid.SampledFrom([]int64{0, 0, 1, 900, 1000, 1_000_000, 4_000_000}).Draw(t, "gap"))*time.Microsecond)
			v.ledger.tick()
			heldNow(t, v, b) // on the same connection, so that the server has renewed what was due
			s = s.At(v.now)
			if i := rapid.IntRange(-2, len(running)-1).Draw(t, "which"); i >= 0 {
				h := running[i]
				running = append(running[:i], running[i+1:]...)
				cost := h[0].cost
				charge := rapid.SampledFrom([]int64{0, cost, cost, cost + 1, cost + 2, 10 * size}).Draw(t, "charge")
				clears := rapid.IntRange(0, 4).Draw(t, "clears: 0") == 0
				for i := range stores {
					if clears {
						if err := h[i].held.Clear(context.Background(), 0); err != nil {
							t.Fatal(err)
						}
						charge, s = 0, bucket.Level{Clear: v.now}
						seen["cleared"]++
					}
					h[i].held.Settle(0, charge)
					h[i].held.Settle(0, charge) // which does nothing
				}
				heldNow(t, v, b)
				busy -= cost
				if limit.of().CountsHeld() {
					charge = 0
				}
				if charge > 0 {
					charge = min(charge, max(cost, 2*size-limit.of().Units(s, v.now)))
					s = limit.of().Add(s, charge, bucket.Moment{Now: v.now, Unix: v.now})
				}
				seen[map[bool]string{true: "let go", false: "charged"}[charge == 0]]++
				if cost == 0 && charge > 0 {
					seen["charged, and nothing was held"]++
				}
				continue
			}
			b.Cost = min(rapid.SampledFrom(costs).Draw(t, "cost"), size)
			need := max(b.Cost, 1)
			fits := limit.of().Room(s, busy, v.now) >= need
			var now [2]inProgress
			for i, store := range stores {
				var d Decision
				d, now[i] = begin(t, store, b)
				if !modelled && i == 0 {
					fits = !d.Denied
				}
				if d.Denied == fits {
					t.Fatalf("%T: %+v with %d held of %+v: %+v, want denied %t", store, limit, busy, s, d, !fits)
				}
				room := limit.of().Room(s, 0, v.now) - busy
				if fits {
					room -= b.Cost
				}
				// A server does not tell of what others hold if this one holds nothing.
				if room = max(room, 0); (b.Cost > 0 || busy == 0) && limit.Algorithm == bucket.Leaky && limit.DripSize == 1 && d.Remaining != room {
					t.Fatalf("%T: %+v with %d held of %+v and %d asked: %d remaining, want %d: %+v", store, limit, busy, s, b.Cost, d.Remaining, room, d)
				}
				if blocked := modelled && !fits && limit.of().Room(s, 0, v.now) >= need; blocked && d.RetryAfter != time.Second {
					t.Fatalf("%T: retry after %v, although nobody knows when units are let go", store, d.RetryAfter)
				}
			}
			if !fits {
				seen["denied"]++
				continue
			}
			busy += b.Cost
			running = append(running, now)
		}
		for _, store := range stores {
			if n := heldNow(t, store, b); n != busy {
				t.Fatalf("%T: %d are held, want %d", store, n, busy)
			}
		}
		for _, h := range running {
			h[0].held.Settle(0, 0)
			h[1].held.Settle(0, 0)
		}
	})
	for _, what := range []string{"denied", "charged", "let go", "cleared", "charged, and nothing was held"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
	if len(m.holding.units) > 0 {
		t.Errorf("%d buckets are held in memory, although nothing is", len(m.holding.units))
	}
}

// TestHoldIsNeverExceeded guards that no more units are held at one time than a limit of
// concurrency has, by requests of random length on several nodes, and that nothing stays
// held when all have ended.
func TestHoldIsNeverExceeded(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for _, nodes := range []int{0, 1, 3} { // 0: in the process
		const size, goroutines, requests = 5, 24, 200
		var stores []Store
		for range nodes {
			r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 10 * time.Second, Fallback: NewMemory()}, takeScript)
			t.Cleanup(func() { _ = r.Close() })
			stores = append(stores, r)
		}
		if nodes == 0 {
			stores = []Store{NewMemory()}
		}
		b := Bucket{Name: fmt.Sprint("running", nodes), Key: "k", Limit: Concurrency(size), Cost: 1}
		var running, most, admitted atomic.Int64
		redistest.Together(t, goroutines, func(g int) {
			random := rand.New(rand.NewPCG(7, uint64(g)))
			for range requests {
				d, h := begin(t, stores[g%len(stores)], b)
				if d.Denied {
					if d.RetryAfter != time.Second || d.Never {
						t.Errorf("%+v", d)
					}
					continue
				}
				n := running.Add(1)
				for last := most.Load(); n > last && !most.CompareAndSwap(last, n); last = most.Load() {
				}
				admitted.Add(1)
				time.Sleep(time.Duration(random.IntN(300)) * time.Microsecond)
				running.Add(-1)
				h.held.Settle(0, 0)
			}
		})
		if n := most.Load(); n > size || n < 2 || admitted.Load() < 100 {
			t.Errorf("%d nodes: %d ran at one time, want at most %d; %d of all", nodes, n, size, admitted.Load())
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			if n := heldNow(t, stores[0], b); n > 0 {
				return fmt.Errorf("%d nodes: %d units stay held", nodes, n)
			}
			return nil
		})
	}
}

// TestHeldUnitsOfCrashedNode guards until when what a node held counts that crashed: to
// the microsecond, for 15 s from when the server last heard of it, which renews what it holds
// every 5 s, and so for 10 to 15 s from the crash. Another's requests that go on keep theirs.
func TestHeldUnitsOfCrashedNode(t *testing.T) {
	server := redistest.Start(t)
	v, dies := newClockedRedis(t, server, "rl:"), newClockedRedis(t, server, "rl:")
	v.start = dies.start
	dies.clock = v.clock
	b := Bucket{Name: "running", Key: "k", Limit: Concurrency(3), Cost: 1}
	const instant = time.Microsecond
	for _, tc := range []struct {
		name    string
		renewed time.Duration // after it was held, if it was
		crash   time.Duration // after it was held
		free    time.Duration // after the crash
	}{
		{"crashed at once", 0, 0, lapse},
		{"crashed just before it would renew", 0, renewEvery - instant, lapse - renewEvery + instant},
		{"renewed", renewEvery, renewEvery, lapse},
		{"renewed, crashed just before it would again", renewEvery, 2*renewEvery - instant, lapse - renewEvery + instant},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v.flush(t)
			dies.ledger.all, dies.ledger.process = nil, dies.ledger.process+1
			began := v.now
			begin(t, dies, b)
			_, lives := begin(t, v, b)
			for at := renewEvery / 2; at <= tc.crash; at += renewEvery / 2 {
				v.at(t, began+at.Microseconds())
				v.ledger.tick()
				dies.ledger.tick()
				heldNow(t, v, b) // it has been answered
				heldNow(t, dies, b)
			}
			v.at(t, began+tc.crash.Microseconds())
			count := func(at int64, want int64) {
				t.Helper()
				for v.now < at {
					v.at(t, min(v.now+1_000_000, at))
					v.ledger.tick()
					heldNow(t, v, b)
				}
				if n := heldNow(t, v, b); n != want {
					t.Errorf("%v after the crash %d are held, want %d", time.Duration(v.now-began)*time.Microsecond-tc.crash, n, want)
				}
			}
			free := began + (tc.crash + tc.free).Microseconds()
			count(free-1, 2)
			count(free, 1)
			count(free+3*lapse.Microseconds(), 1)
			lives.held.Settle(0, 0)
			redistest.WaitFor(t, 5*time.Second, func() error {
				if n := heldNow(t, v, b); n > 0 {
					return fmt.Errorf("%d are held after all have ended", n)
				}
				return nil
			})
			if tc.free <= lapse-renewEvery || tc.free > lapse {
				t.Error("not as it is promised")
			}
		})
	}
}

// TestHoldAfterOutage guards that a server which is back, and has lost its data, has no room
// for requests that it or this process had admitted, before their units are renewed there.
func TestHoldAfterOutage(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]Limit{
		"in progress": Concurrency(3), "counted": {Size: 3, DripInterval: time.Hour, DripSize: 1}, "log": SlidingLog(3, time.Hour),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
			t.Cleanup(func() { _ = r.Close() })
			r.ledger.running = true // nothing is renewed
			b := Bucket{Name: "running", Key: "k", Limit: limit, Cost: 1}
			until := func(by Decider) (all []inProgress) {
				t.Helper()
				redistest.WaitFor(t, 10*time.Second, func() error {
					d, h := begin(t, r, b)
					if !d.Denied {
						all = append(all, h)
					}
					if d.By != by {
						return fmt.Errorf("%+v", d)
					}
					return nil
				})
				return all
			}
			for before := range 4 {
				running := until(DecidedByRedis)
				for len(running) < before {
					// What has ended is known a round trip after the server is back.
					redistest.WaitFor(t, time.Second, func() error {
						d, h := begin(t, r, b)
						if d.Denied {
							return fmt.Errorf("%+v", d)
						}
						running = append(running, h)
						return nil
					})
				}
				for _, h := range running[before:] {
					h.held.Settle(0, 0)
				}
				running = running[:before]
				server.Kill()
				running = append(running, until(DecidedByFallback)...)
				for range 3 {
					if d, h := begin(t, r, b); !d.Denied {
						running = append(running, h)
					}
				}
				admitted := len(running)
				server.Restart(t)
				if more := until(DecidedByRedis); admitted != 3 || len(more) > 0 {
					t.Errorf("%d were admitted before and in the outage, of which %d before, and %d after it; want 3 and none", admitted, before, len(more))
				}
				for _, h := range running {
					h.held.Settle(0, 0)
				}
			}
		})
	}
}

// TestHoldThroughStores guards that requests which are in progress while one store replaces
// another keep their room there, also when they have been renewed, and give it back.
func TestHoldThroughStores(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for name, limit := range map[string]Limit{
		"in progress": Concurrency(10), "counted": {Size: 10, DripInterval: time.Hour, DripSize: 1}, "log": SlidingLog(10, time.Hour),
	} {
		t.Run(name, func(t *testing.T) {
			m := NewMemory()
			redis := func(prefix string) *Redis {
				r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 10 * time.Second, Fallback: m, KeyPrefix: name + prefix}, takeScript)
				t.Cleanup(func() { _ = r.Close() })
				return r
			}
			a, b := redis("a:"), redis("b:")
			bucket := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
			call := func(i int, store Store, admitted bool) inProgress {
				t.Helper()
				d, h := begin(t, store, bucket)
				if d.Denied == admitted {
					t.Fatalf("step %d, %T: %+v, want admitted %t", i, store, d, admitted)
				}
				return h
			}
			stores := []Store{m, a, b, m, b}
			var running []inProgress
			for i, store := range stores {
				for range 2 {
					running = append(running, call(i, store, true))
				}
				for _, r := range []*Redis{a, b} {
					r.ledger.lock()
					for _, t := range r.ledger.all {
						t.doubt = true
					}
					r.ledger.unlock()
					r.ledger.tick()
					heldNow(t, r, bucket)
				}
			}
			for i, store := range stores {
				call(i, store, false)
			}
			for _, h := range running[1:] {
				h.held.Settle(0, 0)
			}
			for i, store := range stores {
				var more []inProgress
				for range 9 {
					more = append(more, call(i, store, true))
				}
				call(i, store, false)
				for _, h := range more {
					h.held.Settle(0, 0)
				}
			}
		})
	}
}

// TestMovedRequestsAreChargedOnce guards the charges of requests that began with another store
// than the one that goes on with their buckets: its servers learn of them once, whichever
// server answers first, and whether or not the bucket is queried meanwhile.
func TestMovedRequestsAreChargedOnce(t *testing.T) {
	t.Parallel()
	const late, requests = 50 * time.Millisecond, 3
	for _, closed := range []bool{false, true} {
		for _, from := range []string{"memory", "the faster server", "the slower server"} {
			for _, asks := range []bool{false, true} {
				t.Run(fmt.Sprintf("from %s, closed %t, asked %t", from, closed, asks), func(t *testing.T) {
					t.Parallel()
					m, server := NewMemory(), redistest.Start(t)
					redis := func(prefix string) (*Redis, *redistest.Proxy) {
						p := redistest.StartProxy(t, server.Addr)
						r := newRedis(RedisOptions{Addresses: []string{p.Addr}, Timeout: 10 * time.Second, Fallback: m, KeyPrefix: prefix}, takeScript)
						t.Cleanup(func() { _ = r.Close() })
						return r, p
					}
					a, slowA := redis("a:")
					to, slowTo := redis("b:")
					store := Store(a)
					if from == "memory" {
						store = m
					}
					b := hourly(9)
					var running []inProgress
					for range requests {
						_, h := begin(t, store, b)
						running = append(running, h)
					}
					levelNow(t, to, b)
					if from != "memory" && closed {
						_ = a.Close()
					}
					if from == "the slower server" {
						slowA.Delay(late)
					} else {
						slowTo.Delay(late)
					}
					want := int64(requests)
					for _, h := range running {
						h.held.Settle(0, 1)
						if asks {
							d, h := begin(t, to, b)
							if h.held.Settle(0, 1); d.Denied {
								t.Errorf("denied beside %d units: %+v", want, d)
							}
							want++
						}
					}
					redistest.WaitFor(t, 10*time.Second, func() error {
						_, h := begin(t, to, b) // reports what is known here
						h.held.Settle(0, 0)
						if l, err := to.Peek(t.Context(), b); err != nil || l.Units < want || l.Held > 0 {
							return fmt.Errorf("%+v, %w, want %d units", l, err, want)
						}
						return nil
					})
					time.Sleep(2*late + 2*resendEvery)
					b.Cost = 2
					begin(t, to, b) // reports what it knows
					if l, err := to.Peek(t.Context(), b); err != nil || l.Units != want {
						t.Errorf("%+v, %v, want %d units", l, err, want)
					}
				})
			}
		}
	}
}

// TestHoldThroughOutage guards that a node whose server is gone goes on with what its own
// requests hold, and reports to the server when it is back, whether or not that has lost its
// data.
func TestHoldThroughOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
	t.Cleanup(func() { _ = r.Close() })
	r.Connect(t.Context())
	b := Bucket{Name: "running", Key: "k", Limit: Concurrency(3), Cost: 1}
	var running []inProgress
	more := func(by Decider, admitted int) {
		t.Helper()
		for i := range 3 {
			d, h := begin(t, r, b)
			if d.Denied != (i >= admitted) || d.By != by {
				t.Fatalf("request %d of which %d are to be admitted by %v: %+v", i, admitted, by, d)
			}
			if !d.Denied {
				running = append(running, h)
			}
		}
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		if d, h := begin(t, r, b); !d.Denied && d.By == DecidedByRedis {
			running = append(running, h)
			return nil
		} else {
			h.held.Settle(0, 0)
			return fmt.Errorf("%+v", d)
		}
	})
	more(DecidedByRedis, 2)
	server.Kill()
	more(DecidedByFallback, 0)
	running[0].held.Settle(0, 0) // which the server does not hear of
	more(DecidedByFallback, 1)
	server.Restart(t)
	redistest.WaitFor(t, 10*time.Second, func() error {
		if l, err := r.Peek(t.Context(), b); err != nil || l.Held != 3 {
			return fmt.Errorf("%+v, %w", l, err)
		}
		return nil
	})
	for _, h := range running {
		h.held.Settle(0, 0)
	}
	redistest.WaitFor(t, 10*time.Second, func() error {
		if l, err := r.Peek(t.Context(), b); err != nil || l.Held != 0 {
			return fmt.Errorf("after the end: %+v, %w", l, err)
		}
		return nil
	})
}

// TestSettleWhileDown guards requests that end once their server is down: what they are
// charged drips from then on, and is not charged twice when the server is back.
func TestSettleWhileDown(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
	t.Cleanup(func() { _ = r.Close() })
	r.Connect(t.Context())
	fast := Bucket{Name: "fast", Key: "k", Limit: Limit{Size: 3, DripInterval: 100 * time.Millisecond, DripSize: 1}, Cost: 1}
	slow := hourly(3)
	slow.Key = "k"
	var running []inProgress
	for _, b := range []Bucket{fast, slow} {
		running = append(running, beginThere(t, r, b))
		for range 2 {
			_, h := begin(t, r, b)
			running = append(running, h)
		}
	}
	server.Kill()
	awaitDown(t, r, numbered(1))
	for _, h := range running {
		h.held.Settle(0, 1)
	}
	began := time.Now()
	redistest.WaitFor(t, 5*time.Second, func() error {
		d, h := begin(t, r, fast)
		h.held.Settle(0, 0)
		if d.Denied {
			return fmt.Errorf("%v after its requests have ended: %+v", time.Since(began), d)
		}
		return nil
	})
	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if d, _ := begin(t, r, slow); !d.Denied || d.By != DecidedByRedis {
			return fmt.Errorf("%+v", d)
		}
		if l, err := r.Peek(t.Context(), slow); err != nil || l.Held != 0 || l.Units != 3 {
			return fmt.Errorf("%+v, %w", l, err)
		}
		return nil
	})
}

// TestHoldWhileConnectionsBreak guards that connections which break again and again, before
// and after the server has run what it was sent, let no more requests of one process pass
// than the limit has room for, and that each is charged once.
func TestHoldWhileConnectionsBreak(t *testing.T) {
	t.Parallel()
	const size, keys, goroutines = 37, 12, 5
	proxy := redistest.StartProxy(t, redistest.Start(t).Addr)
	r := newRedis(RedisOptions{Addresses: []string{proxy.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
	t.Cleanup(func() { _ = r.Close() })
	var admitted [keys]atomic.Int64
	var over atomic.Bool
	redistest.Together(t, 1+keys*goroutines, func(g int) {
		random := rand.New(rand.NewPCG(3, uint64(g)))
		if g == 0 {
			for range 25 {
				proxy.CutReplies("evalsha")
				time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond)
				proxy.Pass()
				time.Sleep(time.Duration(random.IntN(120)) * time.Millisecond)
			}
			over.Store(true)
			return
		}
		b := hourly(size)
		b.Key = fmt.Sprint(g % keys)
		for !over.Load() {
			d, h := begin(t, r, b)
			if !d.Denied {
				admitted[g%keys].Add(1)
				time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond)
			}
			h.held.Settle(0, 1)
			time.Sleep(5 * time.Millisecond)
		}
	})
	for i := range admitted {
		b := hourly(size)
		b.Key = fmt.Sprint(i)
		redistest.WaitFor(t, 5*time.Second, func() error {
			if l, err := r.Peek(t.Context(), b); err != nil || l.Held != 0 || l.Units != admitted[i].Load() || l.Units > size {
				return fmt.Errorf("%d were admitted of %d: %+v, %w", admitted[i].Load(), size, l, err)
			}
			return nil
		})
	}
}

// TestHoldUntilClosed guards a process that ends while requests hold units: others need not
// wait until these would lapse.
func TestHoldUntilClosed(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	ends := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	stays := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	running := Bucket{Name: "running", Key: "k", Limit: Concurrency(2), Cost: 1}
	counted := hourly(2)
	var left []*Held
	for _, b := range []Bucket{running, counted} {
		if d, _ := begin(t, stays, b); d.Denied {
			t.Fatalf("%+v", d)
		}
		d, h := begin(t, ends, b)
		if d.Denied {
			t.Fatalf("%+v", d)
		}
		left = append(left, h.held)
	}
	_ = ends.Close()
	for _, h := range left { // they may end a moment later
		h.Settle(0, 0)
	}
	if l := peek(t, stays, running); l.Held != 1 || l.Units != 0 {
		t.Errorf("in progress: %+v, want the one of the other process", l)
	}
	if l := peek(t, stays, counted); l.Held != 1 || l.Units != 1 {
		t.Errorf("that would count or not: %+v, want it charged, as after a crash", l)
	}
}

// TestOutageLeavesNoReservations guards the memory of a process that goes through many keys while
// its server is down: what has ended, which no server has heard of, is kept by nothing but
// its Memory.
func TestOutageLeavesNoReservations(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
	t.Cleanup(func() { _ = r.Close() })
	r.Connect(t.Context())
	running := Bucket{Name: "running", Key: "k", Limit: Concurrency(2), Cost: 1}
	beginThere(t, r, running).held.Settle(0, 0)
	server.Kill()
	awaitDown(t, r, running)
	const keys = 500
	var slow []inProgress
	for n := range keys {
		for _, b := range []Bucket{running, hourly(3)} {
			b.Key = fmt.Sprint(n)
			d, h := begin(t, r, b)
			if d.Denied || d.By != DecidedByFallback {
				t.Fatalf("%+v", d)
			}
			if slow = append(slow, h); n%2 == 0 {
				h.held.Settle(0, 1)
			}
		}
	}
	time.Sleep(3 * resendEvery) // the others are to be renewed now
	for _, h := range slow {
		h.held.Settle(0, 1)
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		r.ledger.lock()
		defer r.ledger.unlock()
		if n := len(r.ledger.all); n > 2 {
			return fmt.Errorf("%d ledger are left", n)
		}
		return nil
	})
	for n := range keys {
		b := hourly(3)
		b.Key = fmt.Sprint(n)
		if l, _ := peekHere(t, r, b); l.Held != 0 || l.Units != 1 {
			t.Fatalf("key %d: %+v, want 1 charged", n, l)
		}
	}
	server.Restart(t)
	b := hourly(3)
	b.Key = "7"
	beginThere(t, r, b).held.Settle(0, 0)
	if l := peek(t, r, b); l.Units != 1 {
		t.Errorf("after the outage: %+v, want 1 charged", l)
	}
}

// TestCloseLeavesNothingInFlight guards a Memory that goes on after a store was closed whose
// server had not answered what was settled: that is charged, and is in flight no longer.
func TestCloseLeavesNothingInFlight(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	memory := NewMemory()
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: memory}, takeScript)
	b := hourly(3)
	var all []inProgress
	all = append(all, beginThere(t, r, b))
	_, h := begin(t, r, b)
	all = append(all, h)
	server.Pause(t)
	all[0].held.Settle(0, 1)
	_ = r.Close()
	all[1].held.Settle(0, 1)
	server.Resume(t)
	inFlight := func() (units int64, buckets int) {
		r.fallback.mu.Lock()
		defer r.fallback.mu.Unlock()
		return r.fallback.units(memory.hash(&b), b.Limit.Size), len(r.fallback.flights.of)
	}
	if units, _ := inFlight(); units > 0 {
		t.Errorf("%d units are in flight", units)
	}
	redistest.WaitFor(t, 10*time.Second, func() error { // calls end when their connection has
		if _, buckets := inFlight(); buckets > 0 {
			return fmt.Errorf("%d buckets have something in flight", buckets)
		}
		return nil
	})
	if l, err := memory.Peek(context.Background(), b); err != nil || l.Units != 2 {
		t.Errorf("%+v, want 2 charged", l)
	}
}

// TestHoldOverSlots guards requests that hold the units of one bucket until their end and
// charge others in other slots of a cluster: together, or none if any denies.
func TestHoldOverSlots(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	limit := Limit{Size: 4, DripInterval: time.Hour, DripSize: 1}
	for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
		name := accounting.String()
		running := Bucket{Name: "running" + name, Key: "a", Limit: Concurrency(2), Cost: 1, Hold: true}
		same := Bucket{Name: "same" + name, Key: "a", Limit: limit, Cost: 1}
		other := Bucket{Name: "other" + name, Key: "b", Limit: limit, Cost: 1}
		all := []Bucket{same, running, other}
		charged := func(b Bucket, want int64) {
			t.Helper()
			redistest.WaitFor(t, 5*time.Second, func() error {
				if l := peek(t, r, b); l.Units != want || l.Held != 0 && b.Name != running.Name {
					return fmt.Errorf("%v: %s holds %+v, want %d", accounting, b.Name, l, want)
				}
				return nil
			})
		}
		var held []*Held
		for i := range 3 {
			h := new(Held)
			d := mustTake(t, r, Request{Buckets: all, Held: h, Accounting: accounting})
			if d[1].Denied != (i == 2) || d[0].Denied || d[2].Denied {
				t.Fatalf("%v: request %d: %+v", accounting, i, d)
			}
			held = append(held, h)
		}
		want := int64(2)
		if accounting == AccountingEach {
			want = 3
		}
		charged(same, want)
		charged(other, want)
		if l := peek(t, r, running); l.Held != 2 {
			t.Errorf("%v: %+v", accounting, l)
		}
		for _, h := range held {
			h.Settle(1, 0)
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			if l := peek(t, r, running); l.Held != 0 {
				return fmt.Errorf("%v: %+v", accounting, l)
			}
			return nil
		})
		// Now another denies.
		other.Cost = 3
		h := new(Held)
		if d := mustTake(t, r, Request{Buckets: []Bucket{same, running, other}, Held: h, Accounting: accounting}); !d[2].Denied || d[1].Denied {
			t.Fatalf("%v: %+v", accounting, d)
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			if l := peek(t, r, running); l.Held != 0 {
				return fmt.Errorf("%v: a denied request holds %+v", accounting, l)
			}
			return nil
		})
		h.Settle(1, 0)
	}
}

// TestHoldDeniedElsewhere guards what is reported and counted of a bucket with room whose request
// another bucket denies: the same in both stores, also where that is in another slot.
func TestHoldDeniedElsewhere(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	hourly := Limit{Size: 9, DripInterval: time.Hour, DripSize: 1}
	counting, log := hourly, SlidingLog(9, time.Hour)
	counting.CountDenied = true
	for name, limit := range map[string]Limit{"in progress": Concurrency(9), "held": hourly, "counting": counting, "log": log} {
		m := NewMemory()
		first := Bucket{Name: "first " + name, Key: "a", Limit: Limit{Size: 2, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
		held := Bucket{Name: "held " + name, Key: "b", Limit: limit, Cost: 1, Hold: true}
		for i := range 5 {
			var got [2][]Decision
			for j, store := range []Store{m, r} {
				d, err := store.Take(t.Context(), Request{Buckets: []Bucket{first, held}, Held: new(Held)}, nil)
				if err != nil || d[0].Denied != (i >= 2) || d[1].Denied {
					t.Fatalf("%s: request %d, %T: %+v, %v", name, i, store, d, err)
				}
				got[j] = d
			}
			if here, there := got[0][1].Remaining, got[1][1].Remaining; here != there {
				t.Errorf("%s: request %d: %d remain in the process, %d in the cluster", name, i, here, there)
			}
		}
	}
}

// TestLogDeniedElsewhere guards that a log which a request would have filled is not remembered
// as full once a bucket in another slot has denied that request.
func TestLogDeniedElsewhere(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	full := Bucket{Name: "full", Key: "a", Limit: Limit{Size: 1, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	mustTake(t, r, Request{Buckets: []Bucket{full}})
	for _, hold := range []bool{false, true} {
		for size := range int64(3) {
			log := Bucket{Name: fmt.Sprint("log", hold, size), Key: "b", Limit: SlidingLog(size+1, time.Hour), Cost: 1}
			for range size {
				mustTake(t, r, Request{Buckets: []Bucket{log}})
			}
			log.Hold = hold
			if d := mustTake(t, r, Request{Buckets: []Bucket{log, full}, Held: new(Held)}); d[0].Denied || d[0].Remaining != 1 || !d[1].Denied {
				t.Fatalf("%s: %+v", log.Name, d)
			}
			redistest.WaitFor(t, 5*time.Second, func() error {
				if l := peek(t, r, log); l.Held != 0 {
					return fmt.Errorf("%+v", l)
				}
				return nil
			})
			d := mustTake(t, r, Request{Buckets: []Bucket{log}, Held: new(Held)})
			if l := peek(t, r, log); d[0].Denied || d[0].Remaining != 0 || l.Remaining != 0 {
				t.Errorf("%s: then %+v, and it has %+v", log.Name, d[0], l)
			}
		}
	}
}

// TestHoldInLog guards that what is held of a log counts in the time until it has room.
func TestHoldInLog(t *testing.T) {
	m := NewMemory()
	b := Bucket{Name: "log", Key: "k", Limit: SlidingLog(3, time.Hour), Cost: 1}
	if _, err := m.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err != nil {
		t.Fatal(err)
	}
	var d Decision
	for range 2 {
		d, _ = begin(t, m, b)
	}
	l, err := m.Peek(context.Background(), b)
	if wait := b.RoomIn(&d); err != nil || wait < 59*time.Minute || l.RetryAfter < 59*time.Minute || l.Remaining != 0 {
		t.Errorf("a full log has room in %v, says the request, and %+v, %v", wait, l, err)
	}
}

// TestLateAnswerOfSomeHeldUnits guards requests of which one bucket is held and another is
// charged at once, whose answer comes too late: what was held is released, and nothing else.
func TestLateAnswerOfSomeHeldUnits(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
	t.Cleanup(func() { _ = r.Close() })
	held := Bucket{Name: "inflight", Key: "k", Limit: Concurrency(3), Cost: 1, Hold: true}
	plain := Bucket{Name: "plain", Key: "k", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	req := Request{Buckets: []Bucket{held, plain}, Held: new(Held)}
	take := func(want Decider) error {
		req.Held = new(Held)
		d, err := r.Take(t.Context(), req, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Held.Settle(0, 0)
		if d[0].By != want {
			return fmt.Errorf("%+v, want %v", d[0], want)
		}
		return nil
	}
	redistest.WaitFor(t, 5*time.Second, func() error { return take(DecidedByRedis) })
	server.Pause(t)
	if err := take(DecidedByFallback); err != nil {
		t.Fatal(err)
	}
	server.Resume(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if l, err := r.Peek(t.Context(), held); err != nil || l.Held != 0 {
			return fmt.Errorf("%+v, %w", l, err)
		}
		return take(DecidedByRedis)
	})
}

// TestRemainingWithHeld guards what remains, says a denial that is only due to units which
// others hold, or which this process has in flight: the room in addition to those, for all algorithms.
func TestRemainingWithHeld(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for name, limit := range map[string]Limit{
		"leaky": {Size: 10, DripInterval: time.Hour, DripSize: 1}, "window": FixedWindow(10, time.Hour), "sliding": SlidingWindow(10, time.Hour),
		"log": SlidingLog(10, time.Hour), "concurrency": Concurrency(10), "warm-up": warmingUp(10, time.Hour, 4*time.Hour, 3),
	} {
		for kind, store := range map[string]Store{
			"memory":    NewMemory(),
			"redis":     newTestRedis(t, server, func(opt *RedisOptions) { opt.KeyPrefix = "a:" }),
			"restarted": newTestRedis(t, server, func(opt *RedisOptions) { opt.KeyPrefix, opt.Fallback = "b:", NewMemory() }),
			"fallback":  NewMemory(), // which decides locally
		} {
			b := Bucket{Name: name, Key: "k", Limit: limit, Cost: 8}
			if kind == "fallback" {
				gone := newRedis(RedisOptions{Addresses: []string{"127.0.0.1:1"}, Timeout: 50 * time.Millisecond, Fallback: store.(*Memory)}, takeScript)
				t.Cleanup(func() { _ = gone.Close() })
				store = gone
			}
			d, h := begin(t, store, b)
			if d.Denied {
				t.Fatalf("%s, %s: %+v", name, kind, d)
			}
			if r, ok := store.(*Redis); ok && kind == "restarted" { // as if the server had restarted empty
				r.ledger.running = true
				redistest.Done(t, server.Client().Del(t.Context(), r.keys.of(&b)))
				r.fallback.restarted(h.held.reservations[0].query.server)
			}
			b.Cost = 5
			d, _ = begin(t, store, b)
			if most := int64(2); !d.Denied || d.Remaining > most || d.Remaining < most && limit.Algorithm != bucket.WarmUp || d.RetryAfter != time.Second {
				t.Errorf("%s, %s: %+v beside 8 of 10 that are held, want 2 remaining", name, kind, d)
			}
			h.held.Settle(0, 0)
		}
	}
}

// TestHoldNeedsHeld guards that nothing is held that can't be settled.
func TestHoldNeedsHeld(t *testing.T) {
	b := Bucket{Name: "b", Key: "k", Limit: Concurrency(1), Cost: 1, Hold: true}
	if _, err := NewMemory().Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err == nil {
		t.Error("no error")
	}
}

// TestDryRun guards that dry runs change no decision: of two equal traces of requests,
// one with a dry run besides, all else is decided alike in both stores, with buckets of all
// kinds: such as hold units, ban, and borrow. And that a plain dry run decides as if it
// alone were enforced next to the others.
func TestDryRun(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	trace, seen := 0, map[string]int{}
	checkTraces(t, 6, func(t *rapid.T) {
		trace++
		stores := []Store{v, NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })}
		// group draws a limit with what belongs to it.
		group := func(name string, dryRun bool) []Bucket {
			b := Bucket{Name: name, Key: fmt.Sprint(trace), Cost: 1, DryRun: dryRun}
			b.Limit = Limit{Size: rapid.Int64Range(1, 6).Draw(t, name), DripInterval: time.Second, DripSize: 1}
			kind := rapid.SampledFrom([]string{"plain", "plain", "holds", "concurrency", "bans", "holds and bans", "borrows"}).Draw(t, "kind of "+name)
			seen[fmt.Sprint(kind, ", dry run ", dryRun)]++
			b.Hold = strings.Contains(kind, "holds")
			switch kind {
			case "plain":
				b.Limit.CountDenied = rapid.IntRange(0, 3).Draw(t, name+" counts denied requests: 0") == 0
			case "concurrency":
				b.Limit, b.Hold = Concurrency(b.Limit.Size), true
			case "bans", "holds and bans":
				ban := b
				ban.Name, ban.Limit, ban.Hold, ban.Watches = name+"/ban", BanAfter(rapid.Int64Range(1, 2).Draw(t, "ban after"), 3*time.Second), false, 1
				return []Bucket{b, ban}
			case "borrows":
				pool := b
				pool.Name, pool.Key, pool.Pool, pool.Hold = name+"/pool", b.Key+"all", true, rapid.Bool().Draw(t, "the pool holds")
				b.Borrows = true
				return []Bucket{b, pool}
			}
			return []Bucket{b}
		}
		accounting := Accounting(rapid.IntRange(0, 1).Draw(t, "accounting"))
		remembers := rapid.Bool().Draw(t, "remembers denials") // of which fewer numbers are known
		groups := [][]Bucket{group("one", false), group("two", false)}
		dry := group("dry", true)
		enforced := slices.Concat(groups...)
		dryAt := []int{0, len(groups[0]), len(enforced)}[rapid.IntRange(0, 2).Draw(t, "place of the dry run")]
		take := func(store Store, key string, buckets []Bucket, costs map[string]int64) ([]Decision, *Held) {
			t.Helper()
			req := Request{Buckets: slices.Clone(buckets), Accounting: accounting, Held: new(Held)}
			for i := range req.Buckets {
				req.Buckets[i].Key += key
				req.Buckets[i].Cost = costs[req.Buckets[i].Name]
			}
			d, err := store.Take(context.Background(), req, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !remembers {
				v.denyCache = newDenyCache(64)
			}
			for i := range d {
				if d[i].By = 0; remembers {
					d[i] = Decision{Denied: d[i].Denied, DryRun: d[i].DryRun, Borrowed: d[i].Borrowed, Began: d[i].Began, Pool: d[i].Pool}
				}
			}
			return d, req.Held
		}
		type inProgress struct{ without, with [2]*Held }
		var running []inProgress
		s := bucket.Level{} // of a plain dry run
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.advance(t, time.Duration(rapid.Int64Range(0, 1_500_000).Draw(t, "gap"))*time.Microsecond)
			v.ledger.tick()
			if len(running) > 0 && rapid.IntRange(0, 2).Draw(t, "end: 0") == 0 {
				at := rapid.IntRange(0, len(running)-1).Draw(t, "which")
				h, charge := running[at], rapid.Int64Range(0, 3).Draw(t, "charge")
				running = slices.Delete(running, at, at+1)
				for n := range stores {
					for i := range enforced {
						h.without[n].Settle(i, charge)
					}
					for i := range len(enforced) + len(dry) {
						h.with[n].Settle(i, charge)
					}
				}
			}
			levelNow(t, v, enforced[0]) // on the same connection, so that all of that is done
			costs := map[string]int64{}
			for _, b := range slices.Concat(enforced, dry) {
				costs[b.Name] = 1
				if b.Watches == 0 {
					costs[b.Name] = rapid.Int64Range(1, 2).Draw(t, "cost of "+b.Name)
				}
			}
			var now inProgress
			for n, store := range stores {
				var want, got []Decision
				want, now.without[n] = take(store, "without", enforced, costs)
				got, now.with[n] = take(store, "with", slices.Insert(slices.Clone(enforced), dryAt, dry...), costs)
				dryGot := slices.Clone(got[dryAt : dryAt+len(dry)])
				denied := Denied(want)
				rest := slices.Delete(slices.Clone(got), dryAt, dryAt+len(dry))
				same := slices.Equal(rest, want) || denied && remembers // then it may not be known which others would deny
				if !same || Denied(got) != denied {
					t.Fatalf("%T, %+v beside %+v:\n got %+v\nwant %+v as without the dry run", store, dry, enforced, rest, want)
				}
				for _, d := range dryGot {
					if !d.DryRun {
						t.Fatalf("%T: %+v is no dry run", store, d)
					}
				}
				if n == 0 {
					seen[fmt.Sprint("denied: ", denied)]++
					seen[fmt.Sprint("would deny: ", Denied(dryGot) || dryGot[0].Denied)]++
				}
				l := dry[0].Limit
				if len(dry) > 1 || dry[0].Hold {
					continue
				}
				after := s.At(v.now)
				would := l.of().Room(after, 0, v.now) < costs["dry"]
				switch at := (bucket.Moment{Now: v.now, Unix: v.now}); {
				case !would && (!denied || accounting == AccountingEach || l.CountDenied):
					after = l.of().Add(after, costs["dry"], at)
				case would && l.CountDenied:
					after = l.of().Count(after, 0, costs["dry"], at)
				}
				if dryGot[0].Denied != would {
					t.Fatalf("%T: the dry run of %+v decides %+v, want denied %t", store, l, dryGot[0], would)
				}
				if n == len(stores)-1 {
					s = after
				}
			}
			running = append(running, now)
		}
		for _, h := range running {
			for n := range stores {
				for i := range len(enforced) + len(dry) {
					h.without[n].Settle(i, 0)
					h.with[n].Settle(i, 0)
				}
			}
		}
	})
	for _, kind := range []string{"plain", "holds", "concurrency", "bans", "holds and bans", "borrows"} {
		for _, dryRun := range []bool{false, true} {
			if what := fmt.Sprint(kind, ", dry run ", dryRun); seen[what] < 30 {
				t.Errorf("%s: %d traces: the test covers too little", what, seen[what])
			}
		}
	}
	for _, what := range []string{"denied: true", "denied: false", "would deny: true", "would deny: false"} {
		if seen[what] < 100 {
			t.Errorf("%s: %d: the test covers too little", what, seen[what])
		}
	}
}

// TestHoldCountsEachUnitOnce guards requests of a node that reports to its server what it knows,
// since that may have lost it: what it holds, and what it has requested just now, takes room
// once, whether or not the server still has it.
func TestHoldCountsEachUnitOnce(t *testing.T) {
	t.Parallel()
	const size, first = 100, 60
	for name, losesData := range map[string]bool{"the script is lost": false, "all is lost": true} {
		for _, limit := range []Limit{Concurrency(size), {Size: size, DripInterval: time.Hour, DripSize: 1}, SlidingLog(size, time.Hour), FixedWindow(size, time.Hour)} {
			t.Run(name+", "+limit.Algorithm.String(), func(t *testing.T) {
				t.Parallel()
				server := redistest.Start(t)
				proxy := redistest.StartProxy(t, server.Addr)
				proxy.Delay(20 * time.Millisecond) // so that requests are in flight together
				r := newRedis(RedisOptions{Addresses: []string{proxy.Addr}, Timeout: 10 * time.Second, Fallback: NewMemory()}, takeScript)
				t.Cleanup(func() { _ = r.Close() })
				b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
				combine := func(n int) (admitted int64) {
					var count atomic.Int64
					redistest.Together(t, n, func(int) {
						if d, _ := begin(t, r, b); !d.Denied {
							count.Add(1)
						}
					})
					return count.Load()
				}
				if n := combine(first); n != first {
					t.Fatalf("%d of %d were admitted at first", n, first)
				}
				if losesData {
					redistest.Done(t, server.Client().FlushAll(t.Context()))
				}
				redistest.Done(t, server.Client().ScriptFlush(t.Context()))
				if n := combine(1); n != 1 { // by which the loss is found
					t.Error("one that fits was denied")
				}
				r.ledger.lock()
				for _, account := range r.ledger.all {
					account.lose()
				}
				r.ledger.unlock()
				if n := combine(size); n != size-first-1 {
					t.Errorf("%d were admitted beside %d, want %d", n, first+1, size-first-1)
				}
			})
		}
	}
}

// TestHeldUnitsKeepTheirLimit guards that units that are held count as long as they are, although nothing else of their
// limit is left and tables are swept; that Usage tells how many there are; and that they concern no other limit.
func TestHeldUnitsKeepTheirLimit(t *testing.T) {
	t.Parallel()
	var now time.Duration
	m := NewMemoryWithClock(func() time.Duration { return now })
	open := Bucket{Name: "open", Key: "a", Limit: Concurrency(2), Cost: 1, Hold: true}
	other := Bucket{Name: "other", Key: "a", Limit: PerSecond(1), Cost: 1}
	held := func() int64 {
		for _, u := range m.Usage() {
			if u.Name == "open" {
				return u.Held
			}
		}
		return 0
	}
	var holding []*Held
	for i, denied := range []bool{false, false, true} {
		now += time.Hour
		for range 3 * sweepSteps {
			now += sweepEvery * time.Microsecond
			m.Sweep()
		}
		h := new(Held)
		got, err := m.Take(t.Context(), Request{Buckets: []Bucket{open}, Held: h}, nil)
		if err != nil || got[0].Denied != denied {
			t.Fatalf("%d: got %+v, %v", i, got, err)
		}
		holding = append(holding, h)
		if got, err := m.Take(t.Context(), Request{Buckets: []Bucket{other}}, nil); err != nil || got[0].Denied {
			t.Errorf("%d: another limit: got %+v, %v", i, got, err)
		}
	}
	if n := held(); n != 2 {
		t.Errorf("%d are held", n)
	}
	for _, h := range holding {
		h.Settle(0, 0)
	}
	if n := held(); n != 0 || len(m.holding.units) > 0 {
		t.Errorf("%d are held, although nothing is", n)
	}
}

// BenchmarkTakeBesideHeld measures decisions on a limit with a rate while units of another limit are held, as of
// connections, or none are.
func BenchmarkTakeBesideHeld(b *testing.B) {
	for _, connections := range []int{0, 1000} {
		b.Run(strconv.Itoa(connections), func(b *testing.B) {
			m := NewMemory()
			for i := range connections {
				open := Bucket{Name: "open", Key: strconv.Itoa(i), Limit: Concurrency(2), Cost: 1, Hold: true}
				if _, err := m.Take(b.Context(), Request{Buckets: []Bucket{open}, Held: new(Held)}, nil); err != nil {
					b.Fatal(err)
				}
			}
			limit := Bucket{Name: "rate", Key: "203.0.113.7", Limit: PerSecond(1_000_000), Cost: 1}
			req, decisions := Request{Buckets: []Bucket{limit}}, make([]Decision, 0, 1)
			for b.Loop() {
				if _, err := m.Take(b.Context(), req, decisions); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
