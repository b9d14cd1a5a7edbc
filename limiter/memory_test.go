package limiter

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// frozen is a stopped clock.
func frozen() time.Duration { return time.Hour }

// decide sends a request to store, which must decide it. The Decisions say nothing
// of By, which is TestDeciders's.
func decide(t rapid.TB, store Store, accounting Accounting, buckets ...Bucket) []Decision {
	t.Helper()
	got, err := store.Take(context.Background(), Request{Buckets: buckets, Accounting: accounting}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(buckets) {
		t.Fatalf("%d decisions on %d buckets", len(got), len(buckets))
	}
	for i := range got {
		got[i].By = 0
	}
	return got
}

// unitsIn returns the number of units in b, by sending a request that can never be
// admitted.
func unitsIn(t rapid.TB, store Store, b Bucket) int64 {
	t.Helper()
	b.Cost = b.Limit.Size + 1
	return b.Limit.Size - decide(t, store, AccountingEach, b)[0].Remaining
}

// plain is a store made of limit.go and a map: the reference for the others. It
// also handles a clock that was set back as Redis does, see written.
type plain map[Bucket]written

// identity returns b with only the fields that identify it.
func identity(b Bucket) Bucket {
	b.Cost, b.Limit.Size, b.Limit.CountDenied = 0, 0, false
	return b
}

// take decides req at the time now, in µs.
func (p plain) take(req Request, now int64) []Decision {
	admitted := true
	states, fits := make([]bucket.Level, len(req.Buckets)), make([]bool, len(req.Buckets))
	for i, b := range req.Buckets {
		var back bool
		if states[i], back = p[identity(b)].at(now); back {
			p[identity(b)] = b.Limit.written(states[i], now)
		}
		fits[i] = b.Cost == 0 || b.Cost <= b.Limit.Size && b.Limit.of().Wait(states[i], b.Cost, now) == 0
		admitted = admitted && fits[i]
	}
	decisions := make([]Decision, len(req.Buckets))
	for i, b := range req.Buckets {
		if b.Cost == 0 { // nothing is charged, and no denial counts
		} else if fits[i] && (admitted || req.Accounting == AccountingEach) {
			states[i] = b.Limit.of().Add(states[i], b.Cost, bucket.Moment{Now: now, Unix: now})
			p[identity(b)] = b.Limit.written(states[i], now)
		} else if before := states[i]; b.Limit.CountDenied {
			if fits[i] {
				states[i] = b.Limit.of().Add(states[i], b.Cost, bucket.Moment{Now: now, Unix: now})
			} else {
				states[i] = b.Limit.of().Count(states[i], 0, b.Cost, bucket.Moment{Now: now, Unix: now})
			}
			if fits[i] || states[i] != before {
				p[identity(b)] = b.Limit.written(states[i], now)
			}
		}
		decisions[i] = b.Limit.decision(states[i], now, b.need(), !fits[i])
	}
	return decisions
}

// TestMemoryExactConcurrently floods a few buckets from many goroutines while the
// clock is stopped: each admits exactly its size.
func TestMemoryExactConcurrently(t *testing.T) {
	const goroutines, requests = 32, 2000
	m := NewMemoryWithClock(frozen)
	sizes := []int64{1, 7, 1000, 9999}
	admitted := make([]atomic.Int64, len(sizes))
	redistest.Together(t, goroutines, func(g int) {
		for i := range requests {
			k := (g + i) % len(sizes)
			got, err := m.Take(t.Context(), Request{Buckets: []Bucket{{
				Name:  "flood",
				Key:   fmt.Sprint(k),
				Limit: Limit{Size: sizes[k], DripInterval: time.Minute, DripSize: 1},
				Cost:  1,
			}}}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if !got[0].Denied {
				admitted[k].Add(1)
			}
		}
	})
	for k, size := range sizes {
		if got := admitted[k].Load(); got != size {
			t.Errorf("bucket of size %d: admitted %d", size, got)
		}
	}
	if got := m.Len(); got != len(sizes) {
		t.Errorf("Len() = %d, want %d", got, len(sizes))
	}
}

// TestMemorySeveralBucketsConcurrently sends requests with overlapping random sets
// of buckets, in random order, from many goroutines: there is no deadlock, and
// each bucket ends up with exactly the total cost of the requests that charged it.
func TestMemorySeveralBucketsConcurrently(t *testing.T) {
	for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
		t.Run(accounting.String(), func(t *testing.T) {
			const goroutines, requests = 16, 3000
			m := NewMemoryWithClock(frozen)
			buckets := make([]Bucket, 24)
			for k := range buckets {
				buckets[k] = Bucket{
					Name:  fmt.Sprint("b", k%3),
					Key:   fmt.Sprint(k),
					Limit: Limit{Size: int64(100 + 500*k), DripInterval: time.Second, DripSize: int64(1 + k%4)}, Cost: 1,
				}
			}
			charged := make([]atomic.Int64, len(buckets))
			redistest.Together(t, goroutines, func(g int) {
				random := rand.New(rand.NewPCG(1, uint64(g)))
				var dst []Decision
				for range requests {
					var req Request
					req.Accounting = accounting
					set := random.Perm(len(buckets))[:1+random.IntN(12)]
					for _, k := range set {
						b := buckets[k]
						b.Cost = 1 + random.Int64N(5)
						req.Buckets = append(req.Buckets, b)
					}
					var err error
					if dst, err = m.Take(t.Context(), req, dst[:0]); err != nil {
						t.Error(err)
						return
					}
					denied := Denied(dst)
					for i, k := range set {
						if accounting == AccountingEach && !dst[i].Denied || !denied {
							charged[k].Add(req.Buckets[i].Cost)
						}
					}
				}
			})
			full := 0
			for k, b := range buckets {
				got, want := unitsIn(t, m, b), charged[k].Load()
				if got != want || got > b.Limit.Size {
					t.Errorf("bucket of size %d holds %d, its requests add up to %d", b.Limit.Size, got, want)
				}
				if want == b.Limit.Size {
					full++
				}
			}
			if full == 0 {
				t.Error("no bucket was ever full: the test proves nothing")
			}
		})
	}
}

// TestMemoryBucketsInOneTable guards requests whose buckets share a table, and so
// a lock.
func TestMemoryBucketsInOneTable(t *testing.T) {
	m := NewMemoryWithClock(frozen)
	limit := Limit{Size: 2, DripInterval: time.Second, DripSize: 1}
	redistest.Together(t, 1, func(int) {
		buckets := inTables(m, 5, 1, Bucket{Name: "b", Limit: limit, Cost: 1})
		for i, denied := range []bool{false, false, true} {
			for j, d := range decide(t, m, AccountingAtomic, buckets...) {
				if d.Denied != denied {
					t.Errorf("request %d, bucket %d: denied %t, want %t", i, j, d.Denied, denied)
				}
			}
		}
	})
}

// inTables returns n buckets like b with keys that put them into the first few
// tables of m.
func inTables(m *Memory, n int, few uint64, b Bucket) []Bucket {
	var buckets []Bucket
	for i := 0; len(buckets) < n; i++ {
		b.Key = fmt.Sprint(i)
		if m.location(&b).hash%tables < few {
			buckets = append(buckets, b)
		}
	}
	return buckets
}

// TestMemoryDoesNotAllocate guards that decisions on existing buckets do not
// allocate, whether these are clean, dirty, or shared for lack of room.
func TestMemoryDoesNotAllocate(t *testing.T) {
	racetest.SingleGoroutine(t) // a sync.Pool forgets some of what it has under the race detector
	whose := map[string]func(m *Memory, req Request){
		"own":   func(*Memory, Request) {},
		"dirty": func(m *Memory, req Request) { takeInstead(m, req) },
		"shared": func(m *Memory, req Request) {
			for i := range req.Buckets {
				req.Buckets[i].MaxKeys, req.Buckets[i].ShareKey = 1, fmt.Sprint("network ", i)
			}
			first := req.Buckets[0]
			first.Key = "first"
			decide(t, m, AccountingAtomic, first)
		},
	}
	for name, prepare := range whose {
		for _, size := range []int64{1, 1e9} {
			for _, n := range []int{1, 4} {
				t.Run(fmt.Sprintf("%s,size=%d,buckets=%d", name, size, n), func(t *testing.T) {
					m := NewMemoryWithClock(frozen)
					req := Request{}
					for i := range n {
						req.Buckets = append(req.Buckets, Bucket{
							Name:  "b",
							Key:   fmt.Sprint(i),
							Limit: Limit{Size: size, DripInterval: time.Millisecond, DripSize: 1},
							Cost:  1,
						})
					}
					prepare(m, req)
					decide(t, m, AccountingAtomic, req.Buckets...)
					ctx, dst := t.Context(), make([]Decision, 0, n)
					allocs := testing.AllocsPerRun(1000, func() { dst, _ = m.Take(ctx, req, dst[:0]) })
					if allocs != 0 {
						t.Errorf("%v allocations in a decision", allocs)
					}
					if got, want := Denied(dst), size == 1; got != want {
						t.Errorf("denied %t, want %t", got, want)
					}
					if own := ownBuckets(m, req.Buckets); (own == 0) != (name == "shared") {
						t.Errorf("%d keys have a bucket", own)
					}
					if dirty := dirtyLevels(m, req.Buckets) != nil; dirty != (name == "dirty") {
						t.Errorf("dirty %t", dirty)
					}
				})
			}
		}
	}
}

// heapInUse returns the bytes of the heap that are in use. It waits until garbage of
// earlier tests is gone, some of which goroutines that are about to end still hold.
func heapInUse(t *testing.T) int64 {
	t.Helper()
	const noise, enough = 64 << 10, 5
	var last int64
	for tries, same := 0, 0; tries < 100 && same < enough; tries++ {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		now := int64(stats.HeapAlloc)
		if same++; now < last-noise || now > last+noise {
			same = 0
		}
		last = now
		time.Sleep(10 * time.Millisecond)
	}
	return last
}

// TestMemoryRemovesDrainedBuckets guards the store's memory use: after many keys
// were used once, a few requests with other keys are enough to remove their
// drained buckets and free the memory. Buckets that still hold something stay.
func TestMemoryRemovesDrainedBuckets(t *testing.T) {
	const keys, stay, others = 200_000, 100, 8
	var now time.Duration
	m := NewMemoryWithClock(func() time.Duration { return now })
	req := Request{Buckets: make([]Bucket, 1)}
	var dst []Decision
	take := func(key int, rate time.Duration) Decision {
		req.Buckets[0] = Bucket{
			Name:  "b",
			Key:   fmt.Sprint(key),
			Limit: Limit{Size: 1, DripInterval: rate, DripSize: 1},
			Cost:  1,
		}
		var err error
		if dst, err = m.Take(t.Context(), req, dst[:0]); err != nil {
			t.Fatal(err)
		}
		return dst[0]
	}

	empty := heapInUse(t)
	for key := range keys {
		take(key, time.Minute)
	}
	for key := range stay {
		take(key, 24*time.Hour)
	}
	if got := m.Len(); got != keys+stay {
		t.Fatalf("Len() = %d after %d keys", got, keys+stay)
	}
	full := heapInUse(t)

	now += time.Minute
	for i := range 1100 {
		now += 10 * time.Millisecond
		take(keys+i%others, time.Microsecond)
	}
	if got := m.Len(); got < stay || got > stay+others {
		t.Errorf("Len() = %d eleven seconds after %d of %d buckets drained", got, keys, keys+stay)
	}
	// What earlier tests left may still go meanwhile, so what is freed is what counts.
	if after := heapInUse(t); full-after < keys*24 || after-empty > (full-after)/10 {
		t.Errorf("heap: %d B before, %d B with the keys, %d B after they drained", empty, full, after)
	}
	for key := range stay {
		if d := take(key, 24*time.Hour); !d.Denied || d.RetryAfter != 24*time.Hour-now {
			t.Fatalf("full bucket %d: %+v", key, d)
		}
	}
}

// TestMemoryAgainstMap compares the store with a plain map under random requests
// with many keys that share a few tables, while the clock moves: no live bucket is
// lost or changed as tables grow, are swept and rebuilt.
func TestMemoryAgainstMap(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	const keys, crowded, steps = 2000, 4, 60_000
	var now time.Duration
	m, p := NewMemoryWithClock(func() time.Duration { return now }), plain{}
	random := rand.New(rand.NewPCG(2, 3))
	buckets := inTables(m, keys, crowded, Bucket{
		Name:  "b",
		Limit: Limit{Size: 9, DripInterval: 700 * time.Millisecond, DripSize: 2}, Cost: 1,
	})

	check := func() (live int) {
		t.Helper()
		for b, want := range p {
			if want.Clear <= now.Microseconds() {
				continue
			}
			live++
			p := m.location(&b)
			if got, _ := p.table.get(p.hash); got != want.Level {
				t.Fatalf("bucket of %s holds %+v, want %+v", b.Key, got, want)
			}
		}
		slots := usedSlots(t, m)
		if got := m.Len(); got != slots || got < live {
			t.Fatalf("Len() = %d with %d slots used by %d live buckets", got, slots, live)
		}
		return live
	}
	used := func() (n int) {
		for _, t := range tablesOf(m) {
			n += t.used
		}
		return n
	}

	most, least, shrunk := 0, keys, false
	for step := range steps {
		// Sometimes only a few keys are busy, so that the others drain.
		busy, gap := keys, 3*time.Millisecond
		if step/10_000%2 == 1 {
			busy, gap = 20, 15*time.Millisecond
		}
		now += time.Duration(random.Int64N(int64(gap)))
		req := Request{Accounting: Accounting(random.IntN(2))}
		first := random.IntN(busy)
		for i := range 1 + random.IntN(3) {
			b := buckets[(first+i*i)%busy]
			b.Cost = 1 + random.Int64N(10)
			req.Buckets = append(req.Buckets, b)
		}
		before := used()
		got, want := decide(t, m, req.Accounting, req.Buckets...), p.take(req, now.Microseconds())
		if !slices.Equal(got, want) {
			t.Fatalf("step %d: decided %+v, want %+v", step, got, want)
		}
		shrunk = shrunk || used() < before
		if step%500 == 0 {
			live := check()
			most, least = max(most, live), min(least, live)
		}
	}
	check()
	if most < keys/2 || least > keys/10 || !shrunk {
		t.Errorf("%d to %d buckets alive, shrunk %t: the test covers too little", least, most, shrunk)
	}
}

// TestMemoryOneBucketMatchesSeveral compares the two ways to decide a request on
// one bucket, the one for requests with a single bucket and the one for several,
// on two otherwise equal stores: both decide and store the same, for any numbers,
// dirty buckets included.
func TestMemoryOneBucketMatchesSeveral(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	const keys, steps = 300, 200_000
	now := time.Hour
	clock := func() time.Duration { return now }
	one, several := NewMemoryWithClock(clock), NewMemoryWithClock(clock)
	several.seed, several.key = one.seed, one.key
	limits := []Limit{
		{Size: 1, DripInterval: time.Second, DripSize: 1},
		{Size: 9, DripInterval: 700 * time.Millisecond, DripSize: 1},
		{Size: 9, DripInterval: 700 * time.Millisecond, DripSize: 2},
		{Size: 10, DripInterval: 2 * time.Second, DripSize: 3},
		{Size: 5, DripInterval: time.Second, DripSize: 100},
		{Size: 1 << 40, DripInterval: time.Microsecond, DripSize: 1 << 20},
	}
	random := rand.New(rand.NewPCG(6, 7))
	seen := struct{ admitted, denied, never, slack, dirty, fresh int }{}
	for step := range steps {
		b := Bucket{Name: "b", Limit: limits[random.IntN(len(limits))], Cost: 1}
		// Some keys are busy, others come and go.
		few := 10
		if step/5000%4 == 3 {
			few = keys
		}
		b.Key = fmt.Sprint(random.IntN(few))
		size := b.Limit.Size
		b.Cost = []int64{1, 1, 1, size/3 + 1, size, size + 1}[random.IntN(6)]
		if random.IntN(4) == 0 {
			b.Limit.Size = 1 + random.Int64N(size)
		}
		switch random.IntN(200) {
		case 0:
			now += time.Duration(random.Int64N(int64(time.Minute)))
		default:
			now += time.Duration(random.Int64N(int64(10 * time.Millisecond)))
		}
		now = now.Truncate(time.Microsecond)

		req := Request{Buckets: []Bucket{b}, Accounting: Accounting(random.IntN(2))}
		if random.IntN(50) == 0 {
			takeInstead(one, req)
			takeInstead(several, req)
			continue
		}
		if dirtyLevels(one, req.Buckets) != nil {
			seen.dirty++
		}
		before := one.Len()
		got, outcomes := decide(t, one, req.Accounting, b), several.take(new(scratch), req, nil, nil)
		if want := req.decisions(outcomes, nil); !slices.Equal(got, want) {
			t.Fatalf("step %d, %+v: decided %+v, want %+v", step, b, got, want)
		}
		if got, want := one.location(&b).table, several.location(&b).table; got.used != want.used || !slices.Equal(got.slots, want.slots) {
			t.Fatalf("step %d, %+v: holds\n%+v, want\n%+v", step, b, got.slots, want.slots)
		}
		if got, want := dirtyLevels(one, req.Buckets), dirtyLevels(several, req.Buckets); !slices.Equal(got, want) {
			t.Fatalf("step %d, %+v: dirty %+v, want %+v", step, b, got, want)
		}
		switch d := got[0]; {
		case d.Never:
			seen.never++
		case d.Denied:
			seen.denied++
		default:
			seen.admitted++
			if outcomes[0].Rest > 0 {
				seen.slack++
			}
			if one.Len() > before {
				seen.fresh++
			}
		}
	}
	if got, want := usedSlots(t, one), usedSlots(t, several); got != want {
		t.Errorf("%d buckets, want %d", got, want)
	}
	t.Logf("%+v", seen)
	if min(seen.admitted, seen.denied, seen.never, seen.slack, seen.dirty, seen.fresh) < 500 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestTableFindsItsBuckets guards the table's edges: buckets that belong in the
// last slot continue at the first one, and a table always keeps a free slot,
// without which a search would not end. A growing table is rarely rebuilt.
func TestTableFindsItsBuckets(t *testing.T) {
	hashes := map[string]func(i int) uint64{
		"last slot":  func(i int) uint64 { return math.MaxUint64 - uint64(i) },
		"first slot": func(i int) uint64 { return uint64(i) },
		"spread":     func(i int) uint64 { return uint64(i) * 0x9e3779b97f4a7c15 },
	}
	for name, hash := range hashes {
		t.Run(name, func(t *testing.T) {
			const n = 300
			var account table
			wrapped, rebuilt, slots := false, 0, 0
			for i := range n {
				if got, _ := account.get(hash(i)); got != (bucket.Level{}) {
					t.Fatalf("absent bucket %d: %+v", i, got)
				}
				account.put(hash(i), bucket.Level{Clear: int64(1000 + i), Rest: int64(i)}, dirtiness(i%3), 1)
				if account.used != i+1 || account.used >= len(account.slots) {
					t.Fatalf("%d slots, %d used by %d buckets", len(account.slots), account.used, i+1)
				}
				for j := range i + 1 {
					got, dirty := account.get(hash(j))
					if want := (bucket.Level{Clear: int64(1000 + j), Rest: int64(j)}); got != want || dirty != dirtiness(j%3) {
						t.Fatalf("bucket %d of %d: %+v, dirty %d, want %+v", j, i+1, got, dirty, want)
					}
				}
				wrapped = wrapped || name == "last slot" && account.slots[0].Clear != 0
				if len(account.slots) != slots {
					rebuilt, slots = rebuilt+1, len(account.slots)
				}
			}
			if rebuilt > 30 {
				t.Errorf("rebuilt %d times for %d buckets", rebuilt, n)
			}
			if name == "last slot" && !wrapped {
				t.Error("no bucket lies before its place: the test proves nothing")
			}

			// A stored bucket is replaced in place.
			account.put(hash(7), bucket.Level{Clear: 5000}, clean, 1)
			if got, _ := account.get(hash(7)); got.Clear != 5000 || account.used != n {
				t.Errorf("replaced bucket: %+v, %d of %d slots used", got, account.used, n)
			}

			// Half of them drain, and are removed when the table is rebuilt.
			now := int64(1000 + n/2)
			live := account.live(now)
			if want := n/2 - 1 + 1; live != want { // the later half, and the replaced one
				t.Errorf("%d live buckets, want %d", live, want)
			}
			account.rebuild(live, now)
			if account.used != live {
				t.Errorf("%d slots used by %d live buckets", account.used, live)
			}
			for i := range n {
				got, _ := account.get(hash(i))
				if alive := i == 7 || 1000+i > int(now); alive == (got == bucket.Level{}) {
					t.Errorf("bucket %d, live %t: %+v", i, alive, got)
				}
			}

			account.rebuild(account.live(5000), 5000)
			if got, _ := account.get(hash(7)); account.used != 0 || account.slots != nil || got != (bucket.Level{}) {
				t.Errorf("drained table keeps %d buckets in %d slots", account.used, len(account.slots))
			}
		})
	}
}

// TestTableDropsDrainedInsteadOfGrowing guards that a table stays small if each
// key is used only briefly.
func TestTableDropsDrainedInsteadOfGrowing(t *testing.T) {
	var account table
	for i := range int64(10_000) {
		account.put(uint64(i)*0x9e3779b97f4a7c15, bucket.Level{Clear: i + 3}, clean, i)
	}
	if len(account.slots) > 16 {
		t.Errorf("%d slots for three live buckets at a time", len(account.slots))
	}
}

// TestMemoryIdentity guards which fields identify a bucket in Memory.
func TestMemoryIdentity(t *testing.T) {
	testIdentity(t, func(testing.TB) Store { return NewMemoryWithClock(frozen) })
}

// testIdentity checks that name, key, drip rate and drip size identify a bucket,
// and nothing else.
func testIdentity(t *testing.T, newStore func(testing.TB) Store) {
	limit := Limit{Size: 5, DripInterval: time.Hour, DripSize: 2}
	fixed := Bucket{Name: "a", Key: "k", Limit: limit, Cost: 3}
	tests := []struct {
		name   string
		first  Bucket
		change func(b *Bucket)
		same   bool
	}{
		{"nothing", fixed, func(*Bucket) {}, true},
		{"cost", fixed, func(b *Bucket) { b.Cost = 4 }, true},
		{"name", fixed, func(b *Bucket) { b.Name = "b" }, false},
		{"key", fixed, func(b *Bucket) { b.Key = "l" }, false},
		{"no key", fixed, func(b *Bucket) { b.Key = "" }, false},
		{"name and key swapped", fixed, func(b *Bucket) { b.Name, b.Key = b.Key, b.Name }, false},
		{"name longer, key shorter", fixed, func(b *Bucket) { b.Name, b.Key = "ak", "" }, false},
		{"larger size", fixed, func(b *Bucket) { b.Limit.Size = 6 }, true},
		{"smaller size", fixed, func(b *Bucket) { b.Limit.Size = 3 }, true},
		{"drip rate", fixed, func(b *Bucket) { b.Limit.DripInterval += time.Microsecond }, false},
		{"drip size", fixed, func(b *Bucket) { b.Limit.DripSize = 3 }, false},
		{"both sizes swapped", fixed, func(b *Bucket) { b.Limit.Size, b.Limit.DripSize = 2, 5 }, false},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			store, second := newStore(t), tc.first
			tc.change(&second)
			if d := decide(t, store, AccountingAtomic, tc.first)[0]; d.Denied || d.Remaining != 2 {
				t.Fatalf("first bucket: %+v", d)
			}
			want := int64(0)
			if tc.same {
				want = 3
			}
			if got := unitsIn(t, store, second); got != want {
				t.Errorf("second bucket holds %d, want %d", got, want)
			}
		})
	}
}

// TestMemoryRejectsMalformedRequests guards the requests that Memory does not
// decide.
func TestMemoryRejectsMalformedRequests(t *testing.T) {
	m := NewMemoryWithClock(frozen)
	testMalformed(t, m)
	if n := m.Len(); n != 0 {
		t.Errorf("refused requests left %d buckets", n)
	}
}

// testMalformed checks that a request with numbers out of range, or with one
// bucket twice, returns an error that names the bucket and the problem, and
// charges nothing.
func testMalformed(t *testing.T, store Store) {
	const hour = time.Hour
	tests := []struct {
		name  string
		limit Limit
		cost  int64
		want  string
	}{
		{"no size", Limit{Size: 0, DripInterval: hour, DripSize: 1}, 1, "size 0:"},
		{"negative size", Limit{Size: -5, DripInterval: hour, DripSize: 1}, 1, "size -5:"},
		{"least size", Limit{Size: math.MinInt64, DripInterval: hour, DripSize: 1}, 1, "size -9223372036854775808:"},
		{"size too large", Limit{Size: MaxUnits + 1, DripInterval: time.Microsecond, DripSize: 1}, 1, "size 562949953421313:"},
		{"largest size", Limit{Size: math.MaxInt64, DripInterval: time.Microsecond, DripSize: 1}, 1, "size 9223372036854775807:"},
		{"negative drip size", Limit{Size: 1, DripInterval: hour, DripSize: -1}, 1, "drip size -1:"},
		{"least drip size", Limit{Size: 1, DripInterval: hour, DripSize: math.MinInt64}, 1, "drip size -9223372036854775808:"},
		{"drip size too large", Limit{Size: 1, DripInterval: hour, DripSize: MaxUnits + 1}, 1, "drip size 562949953421313:"},
		{"no drip rate", Limit{Size: 1, DripInterval: 0, DripSize: 1}, 1, "drip rate 0s:"},
		{"negative drip rate", Limit{Size: 1, DripInterval: -hour, DripSize: 1}, 1, "drip rate -1h0m0s:"},
		{"drip rate too short", Limit{Size: 1, DripInterval: time.Nanosecond, DripSize: 1}, 1, "drip rate 1ns:"},
		{"fraction of a microsecond", Limit{Size: 1, DripInterval: 1500 * time.Nanosecond, DripSize: 1}, 1, "drip rate 1.5µs:"},
		{"too long to drain", Limit{Size: MaxUnits, DripInterval: 2 * time.Microsecond, DripSize: 1}, 1, "drip rate 2µs, drip size 1:"},
		{"product beyond 64 bits", Limit{Size: MaxUnits, DripInterval: math.MaxInt64 / 1000 * 1000, DripSize: 1}, 1, "within 35 years"},
		{"negative cost", Limit{Size: 1, DripInterval: hour, DripSize: 1}, -1, "cost -1:"},
		{"least cost", Limit{Size: 1, DripInterval: hour, DripSize: 1}, math.MinInt64, "cost -9223372036854775808:"},
	}
	good := Bucket{Name: "good", Key: "malformed", Limit: Limit{Size: 3, DripInterval: hour, DripSize: 1}, Cost: 1}
	refused := func(t *testing.T, want string, buckets ...Bucket) {
		t.Helper()
		for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
			dst := []Decision{{Size: 1234}}
			dst, err := store.Take(context.Background(), Request{Buckets: buckets, Accounting: accounting}, dst)
			text := fmt.Sprint(err)
			if err == nil || !strings.Contains(text, `bucket "login": `) || !strings.Contains(text, want) {
				t.Errorf("error %v, want one that names the bucket and says %q", err, want)
			}
			if len(dst) != 1 || dst[0].Size != 1234 {
				t.Errorf("decisions %+v of a refused request", dst)
			}
		}
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			bad := Bucket{Name: "login", Key: "malformed", Limit: tc.limit, Cost: tc.cost}
			refused(t, tc.want, bad)
			refused(t, tc.want, good, bad)
		})
	}

	t.Run("twice", func(t *testing.T) {
		login, other := good, good
		login.Name, other.Key = "login", "someone else"
		refused(t, "twice", login, login)
		refused(t, "twice", login, good, other, login)
		// Even if the numbers differ, so that they would be two buckets.
		again := login
		again.Limit.Size++
		again.Cost++
		refused(t, "twice", login, again)
	})
}

// TestMemoryEmptyRequest guards that a request without buckets decides nothing and
// is not an error.
func TestMemoryEmptyRequest(t *testing.T) {
	if got := decide(t, NewMemory(), AccountingAtomic); len(got) != 0 {
		t.Errorf("decided %+v", got)
	}
}

// TestMemorySystemClock guards the default clock: it starts near 0 and moves
// forward.
func TestMemorySystemClock(t *testing.T) {
	m := NewMemory()
	b := Bucket{Name: "b", Limit: Limit{Size: 1, DripInterval: 5 * time.Millisecond, DripSize: 1}, Cost: 1}
	deadline := time.Now().Add(10 * time.Second)
	for n := 0; n < 3; {
		if d := decide(t, m, AccountingAtomic, b)[0]; !d.Denied {
			n++
		} else if d.RetryAfter <= 0 || d.RetryAfter > 5*time.Millisecond {
			t.Fatalf("denied: %+v", d)
		} else if time.Now().After(deadline) {
			t.Fatal("the bucket does not drip")
		}
	}
}

// tablesOf returns all tables of m.
func tablesOf(m *Memory) (all []*table) {
	for _, p := range m.directory.Load().all {
		for i := range p.tables {
			all = append(all, &p.tables[i])
		}
	}
	return all
}

// usedSlots counts the buckets in m's tables one by one. It checks that the count
// is what m says, and that each bucket can be found.
func usedSlots(t testing.TB, m *Memory) int {
	t.Helper()
	used := 0
	for i, account := range tablesOf(m) {
		before := used
		for j, s := range account.slots {
			if s.Clear != 0 {
				used++
				if account.find(s.hash) != j {
					t.Fatalf("table %d of %d slots: the bucket in slot %d is not found", i, len(account.slots), j)
				}
			}
		}
		if n := used - before; n != account.used || n > 0 && n == len(account.slots) {
			t.Fatalf("table %d of %d slots: %d used, %d counted", i, len(account.slots), n, account.used)
		}
	}
	if got := m.Len(); got != used {
		t.Errorf("Len() = %d, %d slots are used", got, used)
	}
	held := 0
	for _, l := range m.Usage() {
		held += l.Buckets
	}
	if got := int(m.held.Load()); got != held {
		t.Errorf("%d buckets in all, %d of all limits", got, held)
	}
	return used
}

// ownBuckets counts how many of the buckets have an unshared bucket in m.
func ownBuckets(m *Memory, buckets []Bucket) int {
	own := 0
	for i := range buckets {
		p := m.location(&buckets[i])
		if p.table.has(p.hash) {
			own++
		}
	}
	return own
}

// keyed returns n buckets like b with different keys.
func keyed(n int, b Bucket) []Bucket {
	buckets := make([]Bucket, n)
	for i := range buckets {
		buckets[i] = b
		buckets[i].Key = fmt.Sprint("key ", i)
	}
	return buckets
}

// TestMemoryBytesPerBucket guards the maximum memory per bucket, and that it does
// not depend on the number of buckets or the order in which they come.
func TestMemoryBytesPerBucket(t *testing.T) {
	racetest.SingleGoroutine(t)
	for _, keys := range []int{30_000, 100_000, 300_000, 1_000_000} {
		m := NewMemoryWithClock(frozen)
		b := Bucket{Name: "b", Limit: Limit{Size: 9, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: keys}
		for i := range keys {
			b.Key = strconv.Itoa(i)
			decide(t, m, AccountingAtomic, b)
		}
		bytes := 0
		for _, t := range tablesOf(m) {
			bytes += cap(t.slots) * int(unsafe.Sizeof(slot{}))
		}
		if perKey := float64(bytes) / float64(keys); perKey < 24 || perKey > 36.5 {
			t.Errorf("%d buckets take %.1f bytes each", keys, perKey)
		}
		if total := bytes + int(unsafe.Sizeof(*m)+unsafe.Sizeof(partition{})); keys == 1_000_000 && total > 50_000_000 {
			t.Errorf("a million buckets take %d bytes", total)
		}
	}
}

// TestSweepWithoutRequests guards that drained buckets are removed within ten seconds,
// and their memory is freed, although no request comes; and that those which hold
// something stay.
func TestSweepWithoutRequests(t *testing.T) {
	const keys, stay = 100_000, 100
	var now time.Duration
	m := NewMemoryWithClock(func() time.Duration { return now })
	empty := heapInUse(t)
	fill := func(name string, keys int, rate time.Duration) {
		for key := range keys {
			decide(t, m, AccountingAtomic, Bucket{
				Name: name, Key: fmt.Sprint(key), Limit: Limit{Size: 1, DripInterval: rate, DripSize: 1}, Cost: 1,
			})
		}
	}
	fill("drains", keys, time.Minute)
	fill("stays", stay, 24*time.Hour)
	full := heapInUse(t)
	m.Sweep()
	if got := m.Len(); got != keys+stay {
		t.Fatalf("Len() = %d after %d keys", got, keys+stay)
	}
	now += time.Minute
	for range 11 {
		now += time.Second
		m.Sweep()
	}
	if got := m.Len(); got != stay {
		t.Errorf("Len() = %d eleven seconds after %d of %d buckets drained", got, keys, keys+stay)
	}
	// What earlier tests left may still go meanwhile, so what is freed is what counts.
	if after := heapInUse(t); full-after < keys*24 || after-empty > (full-after)/10 {
		t.Errorf("heap: %d B before, %d B with the keys, %d B after they drained", empty, full, after)
	}
	runtime.KeepAlive(m)
}
