package limiter

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// flooded is a Memory on a clock that the test sets. Requests request single
// units.
type flooded struct {
	t   testing.TB
	m   *Memory
	now time.Duration
}

func newFlooded(t testing.TB) *flooded {
	f := &flooded{t: t, now: time.Hour}
	f.m = NewMemoryWithClock(func() time.Duration { return f.now })
	return f
}

// call reports whether b's next unit is admitted for the key.
func (f *flooded) call(b Bucket, key string) bool {
	b.Key = key
	return !decide(f.t, f.m, AccountingAtomic, b)[0].Denied
}

// usage returns the usage of a limit.
func (f *flooded) usage(name string) LimitUsage {
	for _, l := range f.m.Usage() {
		if l.Name == name {
			return l
		}
	}
	return LimitUsage{}
}

// TestFloodServesNewcomers floods a limit with far more keys than it holds, each
// with one or several requests. It guards what eviction is for: newcomers and
// returning clients are served as if there were no flood, a client that stays at
// its limit gets nothing extra, and full buckets of inactive clients stay while
// the flood's buckets are emptier.
func TestFloodServesNewcomers(t *testing.T) {
	racetest.SingleGoroutine(t)
	const most, size, flood, drips = 2000, 10, 5000, 60
	for _, per := range []int{1, 2, 5, 10} {
		t.Run(fmt.Sprintf("per=%d", per), func(t *testing.T) {
			t.Parallel()
			f := newFlooded(t)
			f.now = 0
			b := Bucket{Name: "b", Limit: Limit{Size: size, DripInterval: time.Second, DripSize: 1}, Cost: 1, MaxKeys: most}
			active, quiet := make([]int, 20), make([]int, 20)
			fill := func(name string, of []int) {
				for i := range of {
					for range size {
						f.call(b, fmt.Sprint(name, i))
					}
				}
			}
			fill("active", active)
			fill("quiet", quiet)
			newcomers, denied := 0, 0
			returning, deniedAgain := 0, 0
			for n := range flood * drips {
				f.now = time.Duration(n) * time.Second / flood
				f.call(b, fmt.Sprint("flood", n/per))
				if n%(flood/4) == 0 {
					for i := range active {
						if f.call(b, fmt.Sprint("active", i)) {
							active[i]++
						}
					}
					newcomers++
					if !f.call(b, fmt.Sprint("new", newcomers)) {
						denied++
					}
				}
				if n%flood == 0 {
					returning++
					if !f.call(b, fmt.Sprint("returning", n/flood%15)) {
						deniedAgain++
					}
				}
				if n == 5*flood {
					for i := range quiet {
						for range size + 2 {
							if f.call(b, fmt.Sprint("quiet", i)) {
								quiet[i]++
							}
						}
					}
				}
				if n%(10*flood) == 0 && f.usage("b").Buckets > most {
					t.Fatalf("%d buckets, want at most %d", f.usage("b").Buckets, most)
				}
			}
			if denied > 0 || deniedAgain > 0 {
				t.Errorf("denied %d of %d newcomers, %d of %d who come back", denied, newcomers, deniedAgain, returning)
			}
			over, lost := 0, 0
			for i := range active {
				over = max(over, active[i]-drips)
			}
			for i := range quiet {
				if quiet[i] > 5 {
					lost++
				}
			}
			if over > 0 {
				t.Errorf("a client at its limit got %d more", over)
			}
			if per < size && lost > 0 {
				t.Errorf("%d of %d quiet full buckets were forgotten", lost, len(quiet))
			}
			u := f.usage("b")
			t.Logf("quiet full buckets forgotten: %d of %d; %+v", lost, len(quiet), u)
			if u.Forgotten < flood {
				t.Errorf("only %d buckets were forgotten: the test proves nothing", u.Forgotten)
			}
			usedSlots(t, f.m)
		})
	}
}

// TestFloodOfOneLimit guards that a flood on a slow limit affects no other limit:
// other buckets stay, and newcomers there find room, even if the process is full.
func TestFloodOfOneLimit(t *testing.T) {
	racetest.SingleGoroutine(t)
	const most, kept = 10_000, 1000
	f := newFlooded(t)
	f.m.SetMaxKeys(most)
	slow := Bucket{Name: "slow", Limit: Limit{Size: 3, DripInterval: 8 * time.Hour, DripSize: 1}, Cost: 1, MaxKeys: most}
	other := Bucket{Name: "other", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	for i := range kept {
		b := other
		b.Key, b.Cost = fmt.Sprint(i), 1+int64(i%10)
		decide(t, f.m, AccountingAtomic, b)
	}
	for i := range 5 * most {
		f.now += 100 * time.Microsecond
		if !f.call(slow, fmt.Sprint("flood", i)) {
			t.Fatalf("the flood's key %d was denied", i)
		}
	}
	for i := range kept {
		b := other
		b.Key = fmt.Sprint(i)
		if got, want := unitsIn(t, f.m, b), 1+int64(i%10); got != want {
			t.Fatalf("bucket %d of another limit holds %d, want %d", i, got, want)
		}
	}
	other.Cost = 1
	for i := range kept {
		if !f.call(other, fmt.Sprint("new", i)) || !f.call(slow, fmt.Sprint("new", i)) {
			t.Fatalf("newcomer %d was denied", i)
		}
	}
	if u := f.usage("other"); u.Buckets != 2*kept || u.Forgotten != 0 || u.MaxKeys != most/2 {
		t.Errorf("other limit: %+v", u)
	}
	if u := f.usage("slow"); u.Buckets != most-2*kept || u.Forgotten != 5*most+kept-uint64(u.Buckets) || u.MaxKeys != most {
		t.Errorf("flooded limit: %+v", u)
	}
	usedSlots(t, f.m)
}

// TestFloodDisplacesFullBucket guards what it costs a flood to evict a full
// bucket: its keys have to fill about as many buckets as the limit holds.
func TestFloodDisplacesFullBucket(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	const most, size = 5000, 10
	for n := range 9 {
		fill, drip := []int{size / 2, size - 1, size}[n%3], []int64{1, 4, size}[n/3]
		f := newFlooded(t)
		b := Bucket{Name: "b", Limit: Limit{Size: size, DripInterval: time.Hour, DripSize: drip}, Cost: 1, MaxKeys: most}
		for range size {
			f.call(b, "full")
		}
		asked := 0
		for n := range 5 * most {
			for range fill {
				f.call(b, fmt.Sprint(n))
				asked++
			}
			b.Key = "full"
			if ownBuckets(f.m, []Bucket{b}) == 0 {
				break
			}
		}
		b.Key = "full"
		gone := ownBuckets(f.m, []Bucket{b}) == 0
		t.Logf("drip size %d, filled to %d of %d: %d admitted requests, forgotten %t", drip, fill, size, asked, gone)
		if fill < size && gone {
			t.Errorf("forgotten by buckets that hold %d of %d, after %d requests", fill, size, asked)
		}
		if fill == size && gone && asked < most*size*9/10 {
			t.Errorf("forgotten after %d requests, want about %d", asked, most*size)
		}
	}
}

// TestSmallMaxKeys guards limits that hold very few buckets: the latest ones stay,
// the maximum holds, and nothing that is in the tables is lost.
func TestSmallMaxKeys(t *testing.T) {
	for _, most := range []int{1, 2, 3, 15, 16, 17, 100} {
		f := newFlooded(t)
		b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: most}
		for i := range 20 * most {
			if !f.call(b, fmt.Sprint(i)) {
				t.Fatalf("max keys %d: newcomer %d was denied", most, i)
			}
			if n := f.m.Len(); n > most || n < min(i+1, most) {
				t.Fatalf("max keys %d: %d buckets after %d keys", most, n, i+1)
			}
			if b.Key = fmt.Sprint(i); unitsIn(t, f.m, b) != 1 {
				t.Fatalf("max keys %d: the newest bucket was forgotten", most)
			}
		}
		usedSlots(t, f.m)
	}
	m := NewMemoryWithClock(frozen)
	m.SetMaxKeys(1)
	for i := range 10 {
		decide(t, m, AccountingAtomic, Bucket{Name: fmt.Sprint(i), Limit: Limit{Size: 1, DripInterval: time.Hour, DripSize: 1}, Cost: 1})
		if m.Len() != 1 {
			t.Fatalf("%d buckets, want at most 1", m.Len())
		}
	}
}

// TestLoweredMaxKeys guards that surplus buckets are evicted as requests come in
// after a maximum was lowered, a few at a time and the emptiest first.
func TestLoweredMaxKeys(t *testing.T) {
	const before, after = 4000, 1000
	f := newFlooded(t)
	b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: before}
	for i := range before {
		b.Key, b.Cost = fmt.Sprint(i), 1+int64(i%4)*3
		decide(t, f.m, AccountingAtomic, b)
	}
	b.Cost, b.MaxKeys = 1, after
	f.call(b, "new")
	if n := f.m.Len(); n < before-2*forgetAtOnce || n > before {
		t.Errorf("%d buckets after one request, were %d", n, before)
	}
	for i := range before - after {
		f.now += time.Millisecond
		f.call(b, fmt.Sprint("new", i))
	}
	if n := f.m.Len(); n != after {
		t.Errorf("%d buckets, want %d", n, after)
	}
	full := 0
	for i := 3; i < before; i += 4 {
		if b.Key = fmt.Sprint(i); unitsIn(t, f.m, b) == 10 {
			full++
		}
	}
	if full < after/2 { // if evicted at random it would be a quarter
		t.Errorf("%d of the %d fullest buckets were kept", full, before/4)
	}
	usedSlots(t, f.m)
}

// TestTableAgainstMap compares a table with a map under random insertions, changes
// and removals, with hashes that cluster in a few places and at the table's end.
func TestTableAgainstMap(t *testing.T) {
	racetest.SingleGoroutine(t)
	for seed := range uint64(8) {
		random := rand.New(rand.NewPCG(seed, 1))
		var account table
		model := map[uint64]bucket.Level{}
		names := map[uint64]string{}
		hash := func() uint64 {
			h := uint64(random.IntN(64))
			switch random.IntN(3) {
			case 0:
				return h
			case 1:
				return ^h
			}
			return h << 58
		}
		for step := range int64(20_000) {
			h := hash()
			switch _, ok := model[h]; {
			case random.IntN(2) == 0:
				s := bucket.Level{Clear: 10 + step, Rest: random.Int64N(9)}
				more, entered := account.put(h, s, clean, 1)
				if entered == ok || (more == 1) != entered {
					t.Fatalf("step %d: %d more, entered %t, was there %t", step, more, entered, ok)
				}
				model[h] = s
				if seed%2 == 0 {
					b := Bucket{Key: fmt.Sprint(h)}
					*account.digest(h) = digestOf(keys{}.of(&b))
					names[h] = b.Key
				}
			case ok:
				digest := account.remove(account.find(h))
				if b := (Bucket{Key: names[h]}); seed%2 == 0 && digest != digestOf(keys{}.of(&b)) {
					t.Fatalf("step %d: the removed bucket has another's digest", step)
				}
				delete(model, h)
			}
			if account.used != len(model) {
				t.Fatalf("step %d: %d used, want %d", step, account.used, len(model))
			}
			if step%5 > 0 {
				continue
			}
			for h, want := range model {
				if got, _ := account.get(h); got != want {
					t.Fatalf("step %d: bucket %x holds %+v, want %+v", step, h, got, want)
				}
			}
			var best slot
			if seen := account.emptiest(0, 1000, h, new(emptiness), &best); len(account.slots) > 0 {
				least, others := bucket.Level{}, 0
				for other, s := range model {
					if other == h {
						continue
					}
					if others++; least.Clear == 0 || s.Clear < least.Clear {
						least = s
					}
				}
				if seen != others || best.Clear != least.Clear {
					t.Fatalf("step %d: emptiest of %d drains at %d, want %d, %d", step, seen, best.Clear, others, least.Clear)
				}
			}
		}
	}
}

// TestFloodConcurrently guards that the maximum holds, give or take one bucket for
// each request in progress, while many goroutines use new keys of several limits,
// one of which goes away; and that clients whose buckets stay lose nothing. Two
// requests that find the limit one over its maximum may both evict a bucket, or
// both choose the same one.
func TestFloodConcurrently(t *testing.T) {
	const goroutines, requests, most = 8, 4000, 500
	f := newFlooded(t)
	redistest.Together(t, goroutines, func(g int) {
		random := rand.New(rand.NewPCG(5, uint64(g)))
		for i := range requests {
			limit := Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}
			req := Request{Buckets: []Bucket{
				{Name: fmt.Sprint(random.IntN(3)), Key: fmt.Sprint(g, i), Limit: limit, Cost: 1, MaxKeys: most},
				{Name: "kept", Key: fmt.Sprint(g, i), Limit: limit, Cost: 1, MaxKeys: most, ShareKey: fmt.Sprint(i % 10)},
				{Name: fmt.Sprint("rare", i/1000), Key: "k", Limit: limit, Cost: 1},
			}, Accounting: AccountingEach}
			random.Shuffle(3, func(i, j int) { req.Buckets[i], req.Buckets[j] = req.Buckets[j], req.Buckets[i] })
			if _, err := f.m.Take(t.Context(), req, nil); err != nil {
				t.Error(err)
				return
			}
			if i%100 == 0 {
				f.m.sweepTables(f.now.Microseconds(), 1)
				for _, u := range f.m.Usage() {
					if u.Buckets > most+goroutines {
						t.Errorf("%+v", u)
					}
				}
			}
		}
	})
	for i := range 3 {
		if u := f.usage(fmt.Sprint(i)); u.Buckets < most-goroutines || u.Buckets > most+goroutines {
			t.Errorf("%+v", u)
		}
	}
	if u := f.usage("kept"); u.Buckets < most || u.Buckets > most+goroutines || u.Forgotten > 0 || u.Shared == 0 {
		t.Errorf("%+v", u)
	}
	usedSlots(t, f.m)
}

// TestEmptyPartitionsAreDropped guards that the tables of a limit are freed when
// all of its buckets have drained, while its counters stay; and that limits beyond
// the maximum share tables without mixing their buckets.
func TestEmptyPartitionsAreDropped(t *testing.T) {
	f := newFlooded(t)
	b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Second, DripSize: 1}, Cost: 1, MaxKeys: 10}
	for i := range 20 {
		f.call(b, fmt.Sprint(i))
	}
	old := f.m.location(&b).partition
	steady := Bucket{Name: "steady", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	for range 4000 {
		f.now += 20 * time.Millisecond
		f.call(steady, "k")
	}
	if n := len(f.m.directory.Load().all); n != 1 {
		t.Errorf("%d limits have tables, want 1", n)
	}
	if u := f.usage("b"); u != (LimitUsage{Name: "b", MaxKeys: 10, Forgotten: 10}) {
		t.Errorf("%+v", u)
	}
	// A request that found the old tables before they were dropped.
	late := b
	late.Key = "late"
	_, hash := f.m.locate(&late)
	p := location{hash: hash, partition: old, table: &old.tables[hash%tables]}
	f.m.lock(&p)
	p.table.mu.Unlock()
	if p.partition == old || p.partition != f.m.location(&late).partition {
		t.Error("the old tables are used again")
	}

	shapes := maxShapes + 100
	for i := range shapes {
		b.Limit.DripInterval = time.Hour + time.Duration(i)*time.Millisecond
		b.MaxKeys = 10_000
		for range 1 + i%10 {
			f.call(b, "k")
		}
	}
	for i := range shapes {
		b.Limit.DripInterval = time.Hour + time.Duration(i)*time.Millisecond
		b.Key = "k"
		if got, want := unitsIn(t, f.m, b), int64(1+i%10); got != want {
			t.Fatalf("bucket of limit %d holds %d, want %d", i, got, want)
		}
	}
	if n := len(f.m.directory.Load().all); n > 2+maxShapes+1 {
		t.Errorf("%d limits have tables", n)
	}
	usedSlots(t, f.m)
}

// TestPartitionDroppedConcurrently guards that a bucket which is added while its
// limit's tables are being dropped is not lost with them.
func TestPartitionDroppedConcurrently(t *testing.T) {
	var now, stop atomic.Int64
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(now.Load()) })
	var wg sync.WaitGroup
	wg.Go(func() {
		for stop.Load() == 0 {
			m.sweepTables(now.Load()/1000, 1)
		}
	})
	b := Bucket{Name: "b", Limit: Limit{Size: 1, DripInterval: time.Second, DripSize: 1}, Cost: 1}
	random := rand.New(rand.NewPCG(3, 4))
	dropped, last := 0, m.location(&b).partition
	for i, end := 0, time.Now().Add(time.Second); time.Now().Before(end); i++ {
		b.Key = fmt.Sprint(i)
		if i%2 == 0 {
			decide(t, m, AccountingAtomic, b)
		} else {
			other := b
			other.Key += "x"
			decide(t, m, AccountingAtomic, b, other)
		}
		if _, known := m.stored(&b); !known {
			t.Fatalf("bucket %d was lost", i)
		}
		now.Add(int64(2 * time.Second))
		for range random.IntN(2000) {
			if p := m.directory.Load(); len(p.all) == 0 || p.all[0] != last {
				break
			}
		}
		if p := m.location(&b).partition; p != last {
			dropped, last = dropped+1, p
		}
	}
	stop.Store(1)
	wg.Wait()
	t.Logf("dropped %d times", dropped)
	if dropped == 0 {
		t.Error("never dropped: the test proves nothing")
	}
	usedSlots(t, m)
}
