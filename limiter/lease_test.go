package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// fleet is several nodes that share a server, on one virtual clock.
type fleet struct {
	*clockedRedis
	nodes []*Redis
	clock atomic.Int64 // of the nodes, in µs, which read it in the background too
}

// at sets the clock.
func (f *fleet) at(t rapid.TB, now int64) {
	t.Helper()
	f.clock.Store(now - f.start)
	f.clockedRedis.at(t, now)
}

// advance moves the clock forward.
func (f *fleet) advance(t rapid.TB, d time.Duration) {
	t.Helper()
	f.at(t, f.now+d.Microseconds())
}

// newFleet returns a fleet of n nodes, each with a fallback.
func newFleet(t testing.TB, server *redistest.Server, n int) *fleet {
	t.Helper()
	f := &fleet{clockedRedis: newClockedRedis(t, server, "rl:")}
	for range n {
		r := newRedis(RedisOptions{Addresses: []string{server.Socket}, KeyPrefix: "rl:", Timeout: 10 * time.Second}, newScript(f.source))
		t.Cleanup(func() { _ = r.Close() })
		r.clock = func() time.Duration { return time.Duration(f.clock.Load()) * time.Microsecond }
		r.fallback = newFallback(NewMemoryWithClock(r.clock), time.Second, r.location)
		r.fallback.removals.send = r.remove
		r.ledger.running = true
		r.reports.running = true // sent by hand
		f.nodes = append(f.nodes, r)
	}
	return f
}

// settle waits until a node has the answers to all its calls.
func (f *fleet) settle(t rapid.TB, node int) {
	t.Helper()
	if _, err := f.nodes[node].Peek(context.Background(), Bucket{Name: "other", Key: "k", Limit: PerSecond(1), Cost: 1}); err != nil {
		t.Fatal(err)
	}
}

// take decides one request on b at a node.
func (f *fleet) take(t rapid.TB, node int, buckets ...Bucket) []Decision {
	t.Helper()
	d, err := f.nodes[node].Take(context.Background(), Request{Buckets: buckets}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// checkLeaseBound fails if more than a limit allows in a time and slack more was admitted in
// any time. times are those of admissions of one unit each, in order.
func checkLeaseBound(t rapid.TB, l Limit, slack time.Duration, times []int64) {
	t.Helper()
	rate, drip := l.of().Rate(), min(l.DripSize, l.Size)
	for i := range times {
		for j := i; j < len(times); j++ {
			length := times[j] - times[i] + slack.Microseconds()
			most := max(l.Size+drip*(length/rate), l.Size-1+drip*bucket.CeilDiv(length, rate))
			if n := int64(j - i + 1); n > most {
				t.Fatalf("%+v: %d admitted in %d µs, want at most %d", l, n, times[j]-times[i], most)
			}
		}
	}
}

// TestLeasesKeepBound guards that with leases all nodes together admit in any time no more
// than the limit allows in that time and the time of a lease, whatever the load, with
// answers that come late or never and nodes that crash; and no more than the limit in any
// window of those that have windows.
func TestLeasesKeepBound(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	f := newFleet(t, server, 3)
	byLease, reserved, trace := 0, 0, 0
	checkTraces(t, few(10), func(t *rapid.T) {
		trace++
		within := rapid.SampledFrom([]time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second}).Draw(t, "within")
		limit := Limit{
			Size:         rapid.SampledFrom([]int64{1, 8, 40, 200}).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{500 * time.Microsecond, 3 * time.Millisecond, 50 * time.Millisecond}).Draw(t, "interval"),
			DripSize:     rapid.SampledFrom([]int64{1, 1, 1, 3}).Draw(t, "drip size"),
		}
		if rapid.IntRange(0, 3).Draw(t, "window") == 0 {
			limit = FixedWindow(limit.Size, 100*limit.DripInterval)
		}
		b := Bucket{Name: "b", Key: fmt.Sprint(trace), Limit: limit, Cost: 1, Consistency: Lease(within)}
		gap := rapid.SampledFrom([]int64{50, 400, 2000}).Draw(t, "gap")
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		steady, node := random.IntN(2) == 0, 0
		var times, windows []int64
		for range rapid.IntRange(50, 400).Draw(t, "requests") {
			wait := random.Int64N(2 * gap)
			if random.IntN(20) == 0 { // a pause, and the load goes to another node
				wait, node = random.Int64N(2*within.Microseconds()), random.IntN(len(f.nodes))
			}
			f.advance(t, time.Duration(wait)*time.Microsecond)
			if steady {
				node = random.IntN(len(f.nodes))
			}
			d := f.take(t, node, b)[0]
			if !d.Denied {
				times = append(times, f.now)
				if d.By == DecidedByLease {
					byLease++
				} else if limit.Algorithm == bucket.Fixed {
					windows = append(windows, f.now+d.Clear.Microseconds())
				}
			} else if f.nodes[node].leases.left(&b) > 0 {
				reserved++
			}
			if random.IntN(3) > 0 { // otherwise the answer to a renewal comes later
				f.settle(t, node)
			}
			if random.IntN(50) == 0 { // the node crashes
				f.nodes[node].leases.forget(&b)
			}
		}
		if limit.Algorithm != bucket.Fixed {
			checkLeaseBound(t, limit, within, times)
			return
		}
		for _, end := range slices.Compact(windows) {
			from, _ := slices.BinarySearch(times, end-limit.of().Rate())
			to, _ := slices.BinarySearch(times, end)
			if n := int64(to - from); n > limit.Size {
				t.Fatalf("%+v: %d admitted in a window", limit, n)
			}
		}
	})
	if byLease < 1000 || reserved < 100 {
		t.Errorf("%d by lease, %d with units leased ahead of room: the test covers too little", byLease, reserved)
	}
}

// TestLeasesKeepShorterTime guards that units which were leased for a long time keep the bound
// of the leases that a new configuration wants, with a shorter time, or a longer one, and that
// of each of them while one request has the old configuration and the next the new one.
func TestLeasesKeepShorterTime(t *testing.T) {
	t.Parallel()
	f := newFleet(t, redistest.Start(t), 2)
	byOld, trace := 0, 0
	checkTraces(t, few(3), func(t *rapid.T) {
		trace++
		draw := func(label string) time.Duration {
			return rapid.SampledFrom([]time.Duration{time.Millisecond, 20 * time.Millisecond, time.Second, time.Minute}).Draw(t, label)
		}
		old, within, both := draw("old"), draw("new"), rapid.Bool().Draw(t, "both at once")
		b := Bucket{Name: "shorter", Key: fmt.Sprint(trace), Limit: Limit{
			Size:         rapid.SampledFrom([]int64{8, 40, 400}).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{500 * time.Microsecond, 10 * time.Millisecond}).Draw(t, "interval"),
			DripSize:     1,
		}, Cost: 1}
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		var times []int64
		requests := rapid.IntRange(20, 300).Draw(t, "requests")
		for i := range 2 * requests {
			fresh := i >= requests
			b.Consistency = Lease(old)
			if fresh && (!both || random.IntN(2) == 0) {
				b.Consistency = Lease(within)
			}
			switch random.IntN(40) {
			case 0:
				f.advance(t, time.Duration(b.Limit.Size)*b.Limit.DripInterval) // the bucket drains
			case 1, 2, 3, 4:
				f.advance(t, time.Duration(random.Int64N(2*b.Limit.of().Rate()))*time.Microsecond)
			}
			node := 0
			if fresh {
				node = random.IntN(len(f.nodes))
			}
			if d := f.take(t, node, b)[0]; !d.Denied && fresh {
				times = append(times, f.now)
				if d.By == DecidedByLease {
					byOld++
				}
			}
			f.settle(t, node)
		}
		if both {
			within = max(within, old)
		}
		checkLeaseBound(t, b.Limit, within, times)
	})
	if byOld < 500 {
		t.Errorf("%d by lease after a reload: the test covers too little", byOld)
	}
}

// TestLeasesEnd guards until when leased units are used: to the microsecond for the time of
// the lease after they were charged, or until their window ends; and units for which there
// was no room when they were charged from when there was, one after the other.
func TestLeasesEnd(t *testing.T) {
	const within = 100 * time.Millisecond
	for _, tc := range []struct {
		name   string
		limit  Limit
		lasts  time.Duration // from the renewal on
		leased int64         // a quarter of the room, or as many as were wanted
	}{
		{"leaky bucket", Limit{Size: 400, DripInterval: 10 * time.Second, DripSize: 1}, within, 20},
		{"sliding window", SlidingWindow(400, time.Minute), within, 20},
		{"window", FixedWindow(400, time.Minute), within, 20},
		{"window that ends", FixedWindow(400, 50*time.Millisecond), 50 * time.Millisecond, 20},
		{"little room", Limit{Size: 60, DripInterval: 10 * time.Second, DripSize: 1}, within, 10},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFleet(t, redistest.Start(t), 1)
			r, b := f.nodes[0], Bucket{Name: "b", Key: "k", Limit: tc.limit, Cost: 1, Consistency: Lease(within)}
			for _, cost := range []int64{19, 1} { // the second request shows a demand of 20
				b.Cost = cost
				f.take(t, 0, b)
			}
			f.settle(t, 0)
			b.Cost = 1
			if got := r.leases.left(&b); got != tc.leased {
				t.Fatalf("%d leased, want %d", got, tc.leased)
			}
			f.advance(t, tc.lasts-time.Microsecond)
			if d := f.take(t, 0, b)[0]; d.By != DecidedByLease || r.leases.left(&b) != tc.leased-1 {
				t.Errorf("decided by %v, %d left, want a leased unit", d.By, r.leases.left(&b))
			}
			f.advance(t, time.Microsecond)
			if left := r.leases.left(&b); left != 0 {
				t.Errorf("%d left at the end", left)
			}
			if d := f.take(t, 0, b)[0]; d.By == DecidedByLease {
				t.Errorf("decided by %v after the end", d.By)
			}
		})
	}
}

// TestLeasesLeaveRoomForCosts guards that requests which cost more than one unit are admitted
// as without leases, if they come one by one: no lease takes the room that they need, or is
// too small for them; and that those which come often are decided by leases.
func TestLeasesLeaveRoomForCosts(t *testing.T) {
	f := newFleet(t, redistest.Start(t), 1)
	for _, tc := range []struct{ size, cost, leased int64 }{ // leased is how many may be at once
		{8, 8, 0}, {8, 4, 0}, {100, 50, 0}, {100, 13, 0}, {100, 100, 0}, {100, 5, 25}, {1_000_000, 50, 1000}, {100, 1 << 60, 0},
	} {
		t.Run(fmt.Sprintf("%d of %d", tc.cost, tc.size), func(t *testing.T) {
			b := Bucket{Name: "b", Limit: Limit{Size: tc.size, DripInterval: time.Second, DripSize: 1}, Cost: tc.cost}
			for _, gap := range []time.Duration{time.Second, time.Millisecond} {
				exact, leased := b, b
				leased.Consistency = Lease(100 * time.Millisecond)
				exact.Key = fmt.Sprint(tc.size, tc.cost, gap)
				leased.Key = exact.Key + "leased"
				byLease := 0
				for range 10 {
					want, got := f.take(t, 0, exact)[0], f.take(t, 0, leased)[0]
					f.settle(t, 0)
					if got.By == DecidedByLease {
						byLease++
					} else if got.Denied != want.Denied && tc.leased == 0 {
						t.Errorf("every %v: denied %t, want %t", gap, got.Denied, want.Denied)
					}
					if left := f.nodes[0].leases.left(&leased); left > tc.leased {
						t.Errorf("every %v: %d leased", gap, left)
					}
					f.advance(t, max(gap, want.RetryAfter))
				}
				if want := tc.leased > 0 && gap == time.Millisecond; byLease > 0 != want {
					t.Errorf("every %v: %d by lease", gap, byLease)
				}
			}
		})
	}
}

// TestLeasesOfOtherBuckets guards that a bucket is charged for what it admits, with little that
// is leased and not used: not for requests that another bucket denies, nor if a server decides
// on them anyway, as other buckets of theirs are requested rarely.
func TestLeasesOfOtherBuckets(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	f := newFleet(t, redistest.Start(t), 1)
	lease := Lease(100 * time.Millisecond)
	all := Bucket{Name: "all", Limit: Limit{Size: 100_000, DripInterval: time.Hour, DripSize: 1}, Cost: 1, Consistency: lease}
	for name, tc := range map[string]struct {
		limit Limit
		keys  int // of the other bucket
	}{
		"full":       {Limit{Size: 8, DripInterval: time.Second, DripSize: 1}, 1},
		"full often": {Limit{Size: 100, DripInterval: 10 * time.Millisecond, DripSize: 1}, 1},
		"rare":       {Limit{Size: 100, DripInterval: 10 * time.Millisecond, DripSize: 1}, 1000},
	} {
		for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
			t.Run(fmt.Sprint(name, " ", accounting), func(t *testing.T) {
				all.Key = fmt.Sprint(name, accounting)
				other := Bucket{Name: "other", Limit: tc.limit, Cost: 1, Consistency: lease}
				want := int64(0)
				for i := range 4000 {
					f.advance(t, time.Millisecond)
					other.Key = fmt.Sprint(name, accounting, i%tc.keys)
					d, err := f.nodes[0].Take(t.Context(), Request{Buckets: []Bucket{other, all}, Accounting: accounting}, nil)
					if err != nil {
						t.Fatal(err)
					}
					if !d[0].Denied || accounting == AccountingEach {
						want++
					}
					f.settle(t, 0)
				}
				got, err := f.nodes[0].Peek(t.Context(), all)
				if err != nil {
					t.Fatal(err)
				}
				if got.Units < want || got.Units > want+want/10+50 {
					t.Errorf("charged %d for %d", got.Units, want)
				}
			})
		}
	}
}

// TestLeaseSlotsAreGivenUp guards that a bucket gets the place of one that gets no requests
// any more, although its lease is for longer: here, of the same bucket with another size.
func TestLeaseSlotsAreGivenUp(t *testing.T) {
	f := newFleet(t, redistest.Start(t), 1)
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 1000, DripInterval: time.Second, DripSize: 1}, Cost: 1, Consistency: Lease(10 * time.Millisecond)}
	f.advance(t, time.Minute)
	flood := func() (d Decision) {
		for range 10 {
			d = f.take(t, 0, b)[0]
			f.settle(t, 0)
			f.advance(t, time.Millisecond)
		}
		return d
	}
	if d := flood(); d.By != DecidedByLease {
		t.Errorf("decided by %v", d.By)
	}
	b.Limit.Size, b.Consistency = 2000, Lease(time.Second)
	if d := flood(); d.By != DecidedByRedis {
		t.Errorf("decided by %v, although another size may still be in use", d.By)
	}
	f.advance(t, 2*time.Second)
	if d := flood(); d.By != DecidedByLease {
		t.Errorf("decided by %v, although the other size is not in use", d.By)
	}
}

// TestLeasesAheadOfRoom guards that a full bucket under a flood is leased drip by drip: a
// node admits one request with each drip, as without leases, and has the server decide
// several of them at once.
func TestLeasesAheadOfRoom(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	f := newFleet(t, redistest.Start(t), 1)
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 10, DripInterval: time.Millisecond, DripSize: 1}, Cost: 1}
	flood := func(b Bucket) (admitted, asked int) {
		for range 2000 { // two seconds
			f.advance(t, 999*time.Microsecond/10)
			for range 3 {
				d := f.take(t, 0, b)[0]
				if d.By == DecidedByRedis {
					asked++
				}
				if !d.Denied {
					admitted++
				}
				f.settle(t, 0)
			}
		}
		return admitted, asked
	}
	exact, asked := flood(b)
	b.Key, b.Consistency = "l", Lease(100*time.Millisecond)
	renewals := f.nodes[0].leases.calls.Load()
	leased, askedLeased := flood(b)
	renewals = f.nodes[0].leases.calls.Load() - renewals
	t.Logf("exact: %d admitted, %d asked; leased: %d admitted, %d asked, %d renewals", exact, asked, leased, askedLeased, renewals)
	if leased > exact || leased < exact*9/10 {
		t.Errorf("%d admitted with leases, %d without", leased, exact)
	}
	if n := askedLeased + int(renewals); n > asked/2 {
		t.Errorf("%d calls with leases, %d without", n, asked)
	}
}

// TestLeasesOfSeveralBuckets guards requests on a full bucket and on another one, with units
// of both leased: those that are denied until a leased unit may be used are charged nowhere,
// and if the full bucket is a dry run all are admitted.
func TestLeasesOfSeveralBuckets(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	for _, dryRun := range []bool{false, true} {
		t.Run(fmt.Sprint("dry run ", dryRun), func(t *testing.T) {
			f := newFleet(t, redistest.Start(t), 1)
			lease := Lease(100 * time.Millisecond)
			buckets := []Bucket{
				{Name: "full", Key: "k", Limit: Limit{Size: 10, DripInterval: time.Millisecond, DripSize: 1}, Cost: 1, Consistency: lease, DryRun: dryRun},
				{Name: "other", Key: "k", Limit: Limit{Size: 1_000_000, DripInterval: time.Minute, DripSize: 1}, Cost: 1, Consistency: lease},
			}
			const requests = 6000
			admitted, byLease, denied := int64(0), int64(0), 0
			for range requests {
				f.advance(t, 33*time.Microsecond)
				d := f.take(t, 0, buckets...)
				switch {
				case !Denied(d):
					if admitted++; d[0].By == DecidedByLease {
						byLease++
					}
				case d[0].By == DecidedByLease:
					denied++
				}
				f.settle(t, 0)
			}
			want := int64(10 + requests*33/1000)
			if dryRun {
				want = requests
			}
			if admitted > want || admitted < want*9/10 || byLease < want/4 || !dryRun && denied == 0 {
				t.Errorf("%d of %d admitted, %d of them by lease, and %d denied by it", admitted, want, byLease, denied)
			}
			level, err := f.nodes[0].Peek(t.Context(), buckets[1])
			if err != nil {
				t.Fatal(err)
			}
			usage := f.nodes[0].Leases()[1]
			if charged := admitted - byLease + usage.Granted; level.Units != charged || usage.Used != byLease {
				t.Errorf("the other bucket has %d units, want %d, of which %d were leased and %d used, want %d", level.Units, charged, usage.Granted, usage.Used, byLease)
			}
		})
	}
}

// TestLeasesInCluster guards leases, and reports, of requests whose limits have different keys,
// in slots of different servers of a cluster, on several nodes at once: no limit admits more
// than its bound in any time, and nodes do decide.
func TestLeasesInCluster(t *testing.T) {
	t.Parallel()
	const lasts, within = 800 * time.Millisecond, 100 * time.Millisecond
	cluster := redistest.StartCluster(t, 3)
	for name, c := range map[string]Consistency{"lease": Lease(within), "eventual": Eventual(within)} {
		for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
			t.Run(fmt.Sprint(name, " ", accounting), func(t *testing.T) {
				var stores []*Redis
				for range 3 {
					stores = append(stores, newTestCluster(t, cluster, func(opt *RedisOptions) {
						opt.Fallback, opt.Timeout = NewMemory(), 10*time.Second
					}))
				}
				var buckets []Bucket
				for i, server := range cluster.Nodes {
					b := Bucket{Name: fmt.Sprint("b", i), Limit: Limit{Size: 200, DripInterval: time.Duration(i+1) * 2 * time.Millisecond, DripSize: 1}, Cost: 1, Consistency: c}
					buckets = append(buckets, onNode(t, stores[0], cluster, server, b))
				}
				type admission struct{ sent, got time.Time }
				var mu sync.Mutex
				admitted, here, all := make([][]admission, len(buckets)), 0, 0
				start := time.Now()
				redistest.Together(t, 12, func(g int) {
					r := stores[g%len(stores)]
					for time.Since(start) < lasts {
						sent := time.Now()
						d, err := r.Take(context.Background(), Request{Buckets: buckets, Accounting: accounting}, nil)
						got := time.Now()
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						all++
						if d[0].By == DecidedByLease || d[0].By == DecidedByEventual {
							here++
						}
						for i := range d {
							if !d[i].Denied && (accounting == AccountingEach || !Denied(d)) {
								admitted[i] = append(admitted[i], admission{sent, got})
							}
						}
						mu.Unlock()
						time.Sleep(time.Millisecond)
					}
				})
				t.Logf("%d of %d requests decided here; %d, %d, %d admitted", here, all, len(admitted[0]), len(admitted[1]), len(admitted[2]))
				if here < 50 || c.IsEventual() && here < all {
					t.Errorf("%d of %d requests decided here", here, all)
				}
				for i, times := range admitted {
					l, extra := buckets[i].Limit, int64(0)
					if c.IsEventual() { // two nodes more
						extra = 2 * (l.Size + bucket.CeilDiv((2*within).Microseconds(), l.of().Rate()))
					}
					slices.SortFunc(times, func(a, b admission) int { return a.sent.Compare(b.sent) })
					for from := 0; from < len(times); from += 7 {
						last := times[from].got
						for to := from; to < len(times); to++ {
							if times[to].got.After(last) {
								last = times[to].got
							}
							length := last.Sub(times[from].sent) + c.lease()
							if n, most := int64(to-from+1), l.Size+bucket.CeilDiv(length.Microseconds(), l.of().Rate())+extra; n > most {
								t.Fatalf("bucket %d admitted %d in %v, want at most %d", i, n, length, most)
							}
						}
					}
				}
			})
		}
	}
}
