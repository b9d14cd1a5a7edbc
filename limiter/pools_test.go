package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// lender is a plain model of one bucket next to others: what was charged, and what is held.
type lender struct {
	Bucket
	bucket.Level
	held int64
	free bool // whether requests hold nothing of it
}

func (l *lender) fits(now int64) bool {
	return l.Bucket.free() || l.Limit.of().Room(l.Level.At(now), l.held, now) >= l.need()
}

// wait returns how long until l has room, or never.
func (l *lender) wait(now int64) time.Duration {
	s := l.Level.At(now)
	switch alone := l.Limit.of().Room(s, 0, now) >= l.need(); {
	case l.Bucket.free():
		return 0
	case l.need() > l.Limit.Size:
		return never
	case l.fits(now):
		return 0
	case l.Hold && alone: // it is unknown when units are released
		return retryBlocked
	}
	s = l.Limit.of().AtLeast(s, l.held, bucket.Moment{Now: now, Unix: now}) // as if it were charged now
	return time.Duration(l.Limit.of().Wait(s, l.need(), now)) * time.Microsecond
}

func (l *lender) charge(n, now int64) {
	l.Level = l.Limit.of().Add(l.Level.At(now), n, bucket.Moment{Now: now, Unix: now})
}

// TestPools guards what is borrowed, against a plain model, in both stores: a bucket that
// has no room takes from the pool behind it, which is charged for nothing else, and nothing
// is charged for a request that anything denies. That holds for costs, also of 0, for held units in
// either, for several that borrow from one pool, for several pools, and for dry runs.
func TestPools(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	trace, seen := 0, map[string]int{}
	checkTraces(t, 6, func(t *rapid.T) {
		trace++
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		stores := []Store{v, m}
		accounting := Accounting(rapid.IntRange(0, 1).Draw(t, "accounting"))
		dry := rapid.IntRange(0, 4).Draw(t, "dry run: 0") == 0
		var all []*lender
		add := func(b Bucket) {
			b.Key = fmt.Sprint(trace, rapid.SampledFrom([]string{"x", "x", "y", "z"}).Draw(t, "key"))
			b.Name, b.Cost = fmt.Sprint("b", len(all)), 1
			size := rapid.SampledFrom([]int64{1, 1, 2, 3, 5}).Draw(t, "size")
			b.Limit = Limit{Size: size, DripInterval: rapid.SampledFrom([]time.Duration{time.Second, 3 * time.Second, time.Hour}).Draw(t, "interval"), DripSize: 1}
			switch rapid.IntRange(0, 4).Draw(t, "kind") {
			case 0:
				b.Limit, b.Hold = Concurrency(size), true
			case 1:
				b.Hold = true
			case 2:
				b.Limit = FixedWindow(size, b.Limit.DripInterval)
			}
			all = append(all, &lender{Bucket: b, free: b.Hold && rapid.Bool().Draw(t, "holds nothing")})
		}
		for range rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(t, "pools") {
			if rapid.Bool().Draw(t, "plain") {
				add(Bucket{DryRun: rapid.Bool().Draw(t, "plain dry run")})
			}
			for range rapid.SampledFrom([]int{1, 1, 2}).Draw(t, "borrowers") {
				add(Bucket{Borrows: true, DryRun: dry})
			}
			add(Bucket{Pool: true, DryRun: dry})
		}
		add(Bucket{})
		type running struct {
			held  [2]*Held
			costs map[int]int64
		}
		var inProgress []running
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.advance(t, time.Duration(rapid.SampledFrom([]int64{0, 0, 0, 1, 300_000, 1_000_000, 3_000_000}).Draw(t, "gap"))*time.Microsecond)
			v.ledger.tick()
			levelNow(t, v, all[0].Bucket)
			if len(inProgress) > 0 && rapid.IntRange(0, 2).Draw(t, "end: 0") == 0 {
				at := rapid.IntRange(0, len(inProgress)-1).Draw(t, "which")
				r := inProgress[at]
				inProgress = append(inProgress[:at], inProgress[at+1:]...)
				charged := rapid.Bool().Draw(t, "charged")
				for i := range all {
					cost, holds := r.costs[i]
					switch {
					case !charged:
						cost = 0
					case cost == 0: // nothing was held, and it is charged anyway
						cost = 1
					}
					for s := range stores {
						r.held[s].Settle(i, cost) // of those that hold nothing it does nothing
					}
					if holds {
						all[i].held -= r.costs[i]
						if most := 2*all[i].Limit.Size - all[i].Limit.of().Units(all[i].Level.At(v.now), v.now); r.costs[i] == 0 {
							cost = min(cost, max(most, 0))
						}
						if cost > 0 && !all[i].Limit.of().CountsHeld() {
							all[i].charge(cost, v.now)
						}
					}
				}
				levelNow(t, v, all[0].Bucket)
				continue
			}
			req := Request{Accounting: accounting}
			for _, l := range all {
				l.Cost = rapid.SampledFrom([]int64{0, 1, 1, 1, 2, 4}).Draw(t, "cost")
				if l.Hold { // if it is 0, a server does not tell what others hold
					l.Cost = max(l.Cost, 1)
				}
				if l.free {
					l.Cost = 0
				}
				req.Buckets = append(req.Buckets, l.Bucket)
			}

			// What the model says.
			want := make([]Decision, len(all))
			admitted, short := true, false
			fits := make([]bool, len(all))
			for i, l := range all {
				fits[i] = l.fits(v.now)
				switch {
				case l.Borrows:
					short = short || !fits[i]
				case l.Pool:
					if short && !fits[i] && !l.DryRun {
						admitted = false
					}
					want[i].Borrowed, short = short, false
				default:
					admitted = admitted && (fits[i] || l.DryRun)
					want[i].Denied = !fits[i]
				}
			}
			pool := -1
			for i := len(all) - 1; i >= 0; i-- {
				l := all[i]
				if l.Pool {
					pool = i
					want[i].Borrowed = want[i].Borrowed && fits[i] && admitted
				}
				if l.Borrows && !fits[i] {
					want[i].Borrowed, want[i].Denied = fits[pool] && admitted, !fits[pool]
				}
				wait := l.wait(v.now)
				if l.Borrows {
					wait = min(wait, all[pool].wait(v.now))
				}
				if want[i].Denied {
					if want[i].RetryAfter = wait; wait == never {
						want[i].Never, want[i].RetryAfter = true, 0
					}
				}
			}
			r := running{costs: map[int]int64{}}
			for s, store := range stores {
				held := new(Held)
				req.Held, r.held[s] = held, held
				got, err := store.Take(context.Background(), req, nil)
				if err != nil {
					t.Fatal(err)
				}
				if Denied(got) == admitted {
					t.Fatalf("%T: admitted %t, want %t: %+v", store, !admitted, admitted, got)
				}
				for i, d := range got {
					if d.By == DecidedByCache {
						continue
					}
					w := want[i]
					if d.Denied != w.Denied || d.Borrowed != w.Borrowed || d.Never != w.Never || d.RetryAfter != w.RetryAfter || d.Pool != all[i].Pool {
						t.Fatalf("%T: bucket %d of %+v:\n got %+v\nwant %+v", store, i, req.Buckets, d, w)
					}
				}
			}
			for i, l := range all {
				switch {
				case !fits[i] || l.Pool && !want[i].Borrowed:
				case l.Hold && admitted:
					l.held += l.Cost
					r.costs[i] = l.Cost
				case admitted && !l.Hold || accounting == AccountingEach && !l.Hold && !l.Pool:
					l.charge(l.Cost, v.now)
				}
				for what, is := range map[string]bool{
					"borrowed": l.Borrows && want[i].Borrowed, "denied": l.Borrows && want[i].Denied, "never": l.Borrows && want[i].Never,
					"not lent": l.Pool && !want[i].Borrowed && fits[i], "lent and held": l.Pool && want[i].Borrowed && l.Hold,
					"borrowed in a dry run": l.DryRun && want[i].Borrowed, "denied elsewhere": l.Borrows && !fits[i] && !admitted && !want[i].Denied,
				} {
					if is {
						seen[what]++
					}
				}
			}
			if admitted {
				inProgress = append(inProgress, r)
			}
		}
		for i, l := range all {
			for _, store := range stores {
				if got := levelNow(t, store, l.Bucket); got.Held != l.held || got.Units != l.Limit.of().Units(l.Level.At(v.now), v.now) {
					t.Fatalf("%T: bucket %d holds %+v, want %d and %d held", store, i, got, l.Limit.of().Units(l.Level.At(v.now), v.now), l.held)
				}
			}
		}
		for _, r := range inProgress {
			for i := range all {
				r.held[0].Settle(i, 0)
				r.held[1].Settle(i, 0)
			}
		}
	})
	t.Log(seen)
	for _, what := range []string{"borrowed", "denied", "never", "not lent", "lent and held", "borrowed in a dry run", "denied elsewhere"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// borrowing returns a bucket of n units an hour that borrows from a pool of m.
func borrowing(name string, n, m int64) (own, pool Bucket) {
	own, pool = hourly(n), hourly(m)
	own.Name, own.Key, own.Borrows = "own", name, true
	pool.Name, pool.Key, pool.Pool = "pool", "all", true
	return own, pool
}

// TestPoolsOverSlots guards pools in other slots of a cluster than what borrows from them:
// they are called only when something is to be borrowed, and charged only if nothing denies.
func TestPoolsOverSlots(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
		own, pool := borrowing("", 2, 3)
		own.Name += accounting.String()
		pool.Name += accounting.String()
		own = onNode(t, r, nodes, nodes.Nodes[0], own)
		pool = onNode(t, r, nodes, nodes.Nodes[1], pool)
		others := hourly(20) // of the same key as the pool
		others.Name, others.Key = "beside"+accounting.String(), pool.Key
		other := hourly(20)
		other.Name += "other" + accounting.String()
		other = onNode(t, r, nodes, nodes.Nodes[2], other)
		take := func(cost int64) []Decision {
			t.Helper()
			other.Cost = cost
			return mustTake(t, r, Request{Buckets: []Bucket{own, others, pool, other}, Accounting: accounting})
		}
		charged := func(of, from int64) {
			t.Helper()
			redistest.WaitFor(t, 5*time.Second, func() error {
				a, b := levelNow(t, r, own), levelNow(t, r, pool)
				if a.Units != of || b.Units != from || a.Held+b.Held > 0 {
					return fmt.Errorf("%v: charged %+v and %+v, want %d and %d", accounting, a, b, of, from)
				}
				return nil
			})
		}
		for n := range int64(7) {
			d := take(1)
			if borrowed, denied := n >= 2 && n < 5, n >= 5; d[0].Borrowed != borrowed || d[2].Borrowed != borrowed || d[0].Denied != denied || Denied(d) != denied {
				t.Fatalf("%v: request %d: %+v", accounting, n, d)
			}
			if n == 3 { // another denies
				if d := take(100); !d[3].Denied || d[0].Borrowed || d[2].Borrowed {
					t.Fatalf("%v: %+v", accounting, d)
				}
			}
			charged(min(n+1, 2), min(max(n-1, 0), 3))
		}
		want := int64(5)
		if accounting == AccountingEach {
			want = 8
		}
		if l := levelNow(t, r, others); l.Units != want || l.Held > 0 {
			t.Errorf("%v: beside the pool %+v are charged, want %d", accounting, l, want)
		}
	}

	// As long as there is room, the server of the pool is not called.
	own, pool := borrowing("", 100, 3)
	own, pool = onNode(t, r, nodes, nodes.Nodes[0], own), onNode(t, r, nodes, nodes.Nodes[1], pool)
	before := nodes.Nodes[1].CommandStat(t, "evalsha")
	for range 50 {
		mustTake(t, r, Request{Buckets: []Bucket{own, pool}})
	}
	if n := nodes.Nodes[1].CommandStat(t, "evalsha") - before; n > 0 {
		t.Errorf("a pool was asked %d times, although nothing was borrowed", n)
	}
}

// TestPoolsOverSlotsInOutage guards pools of a cluster that loses a node: this process
// decides what was there, together with what others decide.
func TestPoolsOverSlotsInOutage(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3, "--cluster-require-full-coverage", "no")
	r := newTestCluster(t, nodes, func(opt *RedisOptions) {
		opt.Fallback, opt.Timeout = NewMemory(), 500*time.Millisecond
	})
	dead := nodes.Nodes[2]
	dead.Kill()
	for name, on := range map[string][3]int{ // the nodes of two that borrow and of the pool
		"pool": {0, 1, 2}, "borrower": {2, 0, 1}, "other borrower": {0, 2, 1}, "both borrowers": {2, 2, 0}, "all": {2, 2, 2}, "borrower and pool": {2, 0, 2},
	} {
		for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
			t.Run(name+" "+accounting.String(), func(t *testing.T) {
				one, pool := borrowing("", 2, 3)
				two := one
				one.Name, two.Name, pool.Name = t.Name()+"one", t.Name()+"two", t.Name()+"pool"
				two.Limit.Size = 4
				one = onNode(t, r, nodes, nodes.Nodes[on[0]], one)
				two = onNode(t, r, nodes, nodes.Nodes[on[1]], two)
				pool = onNode(t, r, nodes, nodes.Nodes[on[2]], pool)
				for n := range 7 { // two fit into all, two into one of two and the pool, one only into the pool
					d := mustTake(t, r, Request{Buckets: []Bucket{one, two, pool}, Accounting: accounting})
					lacking, denied := n >= 2, n >= 5
					if d[0].Borrowed != (lacking && !denied) || d[1].Borrowed != (n == 4) || d[2].Borrowed != (lacking && !denied) || Denied(d) != denied {
						t.Fatalf("request %d: %+v", n, d)
					}
				}
			})
		}
	}
}

// nodesOf returns the stores of three nodes that share "server" or "cluster", or the only
// one in "memory".
func nodesOf(t *testing.T, name string, server *redistest.Server, cluster *redistest.Cluster) (stores []Store) {
	t.Helper()
	if name == "memory" {
		return []Store{NewMemory()}
	}
	for range 3 {
		opt := func(opt *RedisOptions) { opt.Fallback, opt.Timeout = NewMemory(), 10*time.Second }
		if name == "cluster" {
			stores = append(stores, newTestCluster(t, cluster, opt))
		} else {
			stores = append(stores, newTestRedis(t, server, opt))
		}
	}
	return stores
}

// TestPoolsAreNeverExceeded guards that many parallel requests of several nodes get all of
// what each tenant has of its own and the pool has in addition, and nothing more.
func TestPoolsAreNeverExceeded(t *testing.T) {
	t.Parallel()
	server, cluster := redistest.Start(t), redistest.StartCluster(t, 3)
	for _, name := range []string{"memory", "server", "cluster"} {
		stores := nodesOf(t, name, server, cluster)
		const own, shared, tenants = 20, 50, 3
		var admitted, borrowed [tenants]atomic.Int64
		redistest.Together(t, 24, func(g int) {
			a, b := borrowing(fmt.Sprint("tenant", g%tenants), own, shared)
			for range 100 {
				d, err := stores[g%len(stores)].Take(context.Background(), Request{Buckets: []Bucket{a, b}}, nil)
				switch {
				case err != nil:
					t.Error(err)
				case d[0].Denied:
				case d[0].Borrowed:
					borrowed[g%tenants].Add(1)
				default:
					admitted[g%tenants].Add(1)
				}
			}
		})
		all := int64(0)
		for i := range tenants {
			if n := admitted[i].Load(); n != own {
				t.Errorf("%s: tenant %d got %d of its own, want %d", name, i, n, own)
			}
			all += borrowed[i].Load()
		}
		if all != shared {
			t.Errorf("%s: %d were borrowed, want %d", name, all, shared)
		}
	}
}

// TestPoolOfConcurrency guards a pool that lends only while there are few requests in
// progress: never more than it has of those that borrow, on several nodes, and nothing
// stays held.
func TestPoolOfConcurrency(t *testing.T) {
	t.Parallel()
	server, cluster := redistest.Start(t), redistest.StartCluster(t, 3)
	for _, name := range []string{"memory", "server", "cluster"} {
		stores := nodesOf(t, name, server, cluster)
		const size = 5
		_, pool := borrowing("", 1, 1)
		pool.Limit, pool.Hold = Concurrency(size), true
		var running, most, lent atomic.Int64
		redistest.Together(t, 18, func(g int) {
			own, _ := borrowing(fmt.Sprint("tenant", g%2), 10, 1)
			random := rand.New(rand.NewPCG(7, uint64(g)))
			for range 150 {
				held := new(Held)
				d, err := stores[g%len(stores)].Take(context.Background(), Request{Buckets: []Bucket{own, pool}, Held: held}, nil)
				if err != nil {
					t.Error(err)
				} else if d[0].Denied && d[0].RetryAfter != time.Second {
					t.Errorf("%s: retry after %v, although nobody knows when a request ends", name, d[0].RetryAfter)
				} else if d[0].Borrowed {
					lent.Add(1)
					n := running.Add(1)
					for last := most.Load(); n > last && !most.CompareAndSwap(last, n); last = most.Load() {
					}
					time.Sleep(time.Duration(random.IntN(300)) * time.Microsecond)
					running.Add(-1)
				}
				held.Settle(1, 0)
			}
		})
		if n := most.Load(); n > size || n < 2 || lent.Load() < 100 {
			t.Errorf("%s: %d were lent at one time, want at most %d; %d in all", name, n, size, lent.Load())
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			if n := heldNow(t, stores[0], pool); n > 0 {
				return fmt.Errorf("%s: %d units stay held", name, n)
			}
			return nil
		})
	}
}

// TestPoolsThroughOutage guards that a process gets no more from its own limit and a pool
// than they have while its server dies, is away, and comes back empty.
func TestPoolsThroughOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback, opt.Timeout = NewMemory(), 50*time.Millisecond })
	own, pool := borrowing("k", 4, 6)
	admitted, borrowed := 0, 0
	more := func(n int, by Decider) {
		t.Helper()
		redistest.WaitFor(t, 10*time.Second, func() error {
			for range n {
				d := call(t, r, own, pool)
				if !d[0].Denied {
					admitted, n = admitted+1, n-1
				}
				if d[0].Borrowed {
					borrowed++
				}
				if d[0].By != by {
					return fmt.Errorf("%+v, want %v", d, by)
				}
			}
			return nil
		})
	}
	more(3, DecidedByRedis)
	server.Kill()
	more(3, DecidedByFallback)
	server.Restart(t)
	more(1, DecidedByRedis)
	for admitted < 10 {
		if d := call(t, r, own, pool); d[0].Denied {
			t.Fatalf("%d admitted, %d borrowed: %+v", admitted, borrowed, d)
		} else if admitted++; d[0].Borrowed {
			borrowed++
		}
	}
	if d := call(t, r, own, pool); !d[0].Denied || borrowed != 6 {
		t.Errorf("%d borrowed: %+v", borrowed, d)
	}
	if l := levelNow(t, r, pool); l.Units != 6 {
		t.Errorf("the server has heard of %+v", l)
	}
}

// TestFullPoolsAreRemembered guards which denials are decided without a server: those of a
// limit that is full, as its pool is; and those of another limit, whatever the pool has.
// A full limit may still have room in its pool.
func TestFullPoolsAreRemembered(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	one, two := newTestRedis(t, server, nil), newTestRedis(t, server, nil)
	own, pool := borrowing("k", 1, 2)
	for n, want := range []string{"redis redis", "redis redis", "redis redis", "remembered remembered"} {
		d := call(t, one, own, pool)
		if got := strings.Join(deciders(d), " "); got != want || d[0].Denied != (n >= 3) {
			t.Errorf("request %d: by %s, want %s: %+v", n, got, want, d)
		}
	}
	if d := call(t, one, own, pool); d[0].RetryAfter < 59*time.Minute || d[0].Never || d[1].Denied {
		t.Errorf("%+v", d)
	}
	reset(t, two, pool, 2)
	time.Sleep(1100 * time.Millisecond) // after which other processes notice
	if d := call(t, one, own, pool); !d[0].Borrowed {
		t.Errorf("%+v from a pool that has room again", d)
	}

	// A pool whose units are held is not remembered, and need not be.
	other := hourly(1)
	other.Name, other.Key = "other", "k"
	pool.Limit, pool.Hold, pool.Name = Concurrency(5), true, "running"
	take := func() []Decision {
		return mustTake(t, one, Request{Buckets: []Bucket{own, pool, other}, Held: new(Held)})
	}
	for n, want := range []string{"redis redis redis", "remembered remembered remembered"} {
		if got := strings.Join(deciders(take()), " "); got != want {
			t.Errorf("request %d: by %s, want %s", n, got, want)
		}
	}
}

// TestRetryFromPool guards the time after which a request should come back: when its
// own limit or the pool has room, whichever is sooner, to the microsecond.
func TestRetryFromPool(t *testing.T) {
	now := int64(1)
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(now) * time.Microsecond })
	own, pool := borrowing("k", 2, 3)
	own.Limit.DripInterval, pool.Limit.DripInterval = 10*time.Second, 7*time.Second
	own.Cost, pool.Cost = 2, 3
	for range 2 {
		call(t, m, own, pool)
	}
	for n, want := range []time.Duration{20 * time.Second, time.Second, 19 * time.Second} { // its own drips, then the pool, then its own
		d := call(t, m, own, pool)
		if !d[0].Denied || d[0].RetryAfter != want {
			t.Errorf("%+v, want to retry after %v", d[0], want)
		}
		now += want.Microseconds() - 1
		if d := call(t, m, own, pool); !d[0].Denied {
			t.Errorf("admitted too early: %+v", d)
		}
		now++
		if d := call(t, m, own, pool); d[0].Denied || d[0].Borrowed != (n == 1) {
			t.Errorf("after %v %+v", want, d)
		}
	}
	own.Cost = 5 // more than it ever has room for, so only the pool may
	now += 3_600_000_000
	call(t, m, own, pool)
	d := call(t, m, own, pool)
	if d[0].Never || d[0].RetryAfter != 21*time.Second {
		t.Errorf("%+v", d[0])
	}
	pool.Cost = 4
	if d := call(t, m, own, pool); !d[0].Never || d[0].RetryAfter != 0 || !Summarize([]Bucket{own, pool}, d).Never {
		t.Errorf("%+v", d[0])
	}
	// One that was admitted learns when the next would be.
	own.Cost, pool.Cost = 1, 3
	now += 3_600_000_000
	call(t, m, own, pool)
	d = call(t, m, own, pool)
	if wait := own.RoomIn(&d[0]); wait != 0 {
		t.Errorf("%v to wait, although the pool has room", wait)
	}
	d = call(t, m, own, pool)
	if wait := own.RoomIn(&d[0]); wait != 10*time.Second || !d[0].Borrowed {
		t.Errorf("%v to wait, want 10s: %+v", wait, d)
	}
}

// TestPoolsAreValid guards that requests are refused in which it is not clear who lends.
func TestPoolsAreValid(t *testing.T) {
	own, pool := borrowing("k", 1, 1)
	plain := Bucket{Name: "plain", Key: "k", Limit: PerSecond(1), Cost: 1}
	counts, dry, both, ban := own, pool, own, Bucket{Name: "ban", Key: "k", Limit: BanAfter(1, time.Minute), Cost: 1, Watches: 1}
	counts.Limit.CountDenied = true
	dry.DryRun = true
	both.Pool = true
	leased := own
	leased.Consistency = Lease(time.Second)
	for _, tc := range []struct {
		buckets []Bucket
		want    string
	}{
		{[]Bucket{own, pool}, ""},
		{[]Bucket{own, plain, pool}, ""},
		{[]Bucket{own}, `bucket "own": a bucket that Borrows`},
		{[]Bucket{pool}, `bucket "pool": a bucket that Borrows`},
		{[]Bucket{pool, own}, `bucket "pool": a bucket that Borrows`},
		{[]Bucket{plain, pool}, `bucket "pool": a bucket that Borrows`},
		{[]Bucket{counts, pool}, `bucket "own": a bucket that Borrows`},
		{[]Bucket{leased, pool}, `bucket "own": a bucket with Hold, Watches, Borrows or Pool has to be exact`},
		{[]Bucket{own, dry}, `bucket "pool": a bucket that Borrows`},
		{[]Bucket{both, pool}, `bucket "own": a bucket that Borrows`},
		{[]Bucket{own, ban, pool}, `bucket "own", watched by "ban"`},
		{[]Bucket{plain, ban, own, pool}, ""},
	} {
		_, err := NewMemory().Take(t.Context(), Request{Buckets: tc.buckets}, nil)
		if got := fmt.Sprint(err); tc.want == "" && err != nil || !strings.Contains(got, tc.want) && tc.want != "" {
			t.Errorf("%+v: got %v, want %q", tc.buckets, err, tc.want)
		}
	}
}

// TestPoolsOfAllAlgorithms guards that both stores decide alike on what is borrowed, by
// buckets and from pools of each algorithm.
func TestPoolsOfAllAlgorithms(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	trace, borrowed := 0, map[bucket.Algorithm]int{}
	checkTraces(t, 3, func(t *rapid.T) {
		trace++
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		limit := func(of string) Limit {
			n := rapid.Int64Range(1, 4).Draw(t, "size of "+of)
			d := rapid.SampledFrom([]time.Duration{time.Second, 4 * time.Second}).Draw(t, "time of "+of)
			return rapid.SampledFrom([]Limit{
				Every(d), FixedWindow(n, d), SlidingWindow(n, d), SlidingLog(n, d), warmingUp(n, d, 4*d, 3),
			}).Draw(t, "limit of "+of)
		}
		key := fmt.Sprint(trace)
		own := Bucket{Name: "own", Key: key, Limit: limit("own"), Cost: 1, Borrows: true}
		pool := Bucket{Name: "pool", Key: key + "all", Limit: limit("the pool"), Cost: 1, Pool: true, Hold: rapid.Bool().Draw(t, "hold")}
		others := Bucket{Name: "beside", Key: key, Limit: Limit{Size: 3, DripInterval: 500 * time.Millisecond, DripSize: 1}, Cost: 1}
		accounting := Accounting(rapid.IntRange(0, 1).Draw(t, "accounting"))
		var running [][2]*Held
		for range rapid.IntRange(1, 30).Draw(t, "requests") {
			v.advance(t, time.Duration(rapid.SampledFrom([]int64{0, 1, 250_000, 1_000_000, 4_000_000}).Draw(t, "gap"))*time.Microsecond)
			v.ledger.tick()
			levelNow(t, v, own)
			if len(running) > 0 && rapid.Bool().Draw(t, "end") {
				charge := rapid.Int64Range(0, 1).Draw(t, "charge")
				running[0][0].Settle(1, charge)
				running[0][1].Settle(1, charge)
				running = running[1:]
				levelNow(t, v, own) // by then the server has settled it
			}
			held := [2]*Held{new(Held), new(Held)}
			var got [2][]Decision
			for i, store := range []Store{v, m} {
				var err error
				req := Request{Buckets: []Bucket{own, pool, others}, Accounting: accounting, Held: held[i]}
				if got[i], err = store.Take(context.Background(), req, nil); err != nil {
					t.Fatal(err)
				}
			}
			remembered := got[0][0].By == DecidedByCache
			if remembered && Denied(got[0]) && Denied(got[1]) {
				continue
			}
			alike := func(a, b Decision) bool {
				return a.Denied == b.Denied && a.Never == b.Never && a.Borrowed == b.Borrowed
			}
			if !slices.EqualFunc(got[0], got[1], alike) {
				t.Fatalf("%+v:\nRedis  %+v\nMemory %+v", []Bucket{own, pool, others}, got[0], got[1])
			}
			if got[0][0].Borrowed {
				borrowed[own.Limit.Algorithm]++
				borrowed[pool.Limit.Algorithm]++
				running = append(running, held)
			}
		}
		for _, h := range running {
			h[0].Settle(1, 0)
			h[1].Settle(1, 0)
		}
		for _, b := range []Bucket{own, pool, others} {
			if a, b := levelNow(t, v, b), levelNow(t, m, b); a.Units != b.Units || a.Held != b.Held {
				t.Fatalf("Redis %+v, Memory %+v", a, b)
			}
		}
	})
	for _, a := range []bucket.Algorithm{bucket.Leaky, bucket.Fixed, bucket.Sliding, bucket.Log, bucket.WarmUp} {
		if borrowed[a] < 50 {
			t.Errorf("%v: the test covers too little", borrowed)
		}
	}
}
