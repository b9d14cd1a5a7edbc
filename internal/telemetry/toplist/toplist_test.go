package toplist

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// clock is moved by the test alone.
type clock struct{ now time.Duration }

func (c *clock) read() time.Duration { return c.now }

// TestBounds guards the bounds that the package states, against exact counts of
// traffic of several shapes, over one generation and over two: no count is too low,
// none is too high by more than its error, no error exceeds total/n, and every key
// that came more often than that is listed. The numbers next to the sorted ones are
// never too high.
func TestBounds(t *testing.T) {
	shapes := map[string]func(*rand.Rand) int{
		"few keys":      func(r *rand.Rand) int { return r.IntN(5) },
		"uniform":       func(r *rand.Rand) int { return r.IntN(5000) },
		"skewed":        zipf(1.2),
		"very skewed":   zipf(2.5),
		"half a flood":  func(r *rand.Rand) int { return r.IntN(2) * r.Int() },
		"a flood alone": func(r *rand.Rand) int { return r.Int() },
	}
	for name, next := range shapes {
		for _, n := range []int{1, 2, 10, 100, 1000} {
			for _, rotates := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/%t", name, n, rotates), func(t *testing.T) {
					r := rand.New(rand.NewPCG(1, uint64(n)))
					c := new(clock)
					l := New(n, c.read)
					requests, denied := map[string]uint64{}, map[string]uint64{}
					const total = 20_000
					for i := range total {
						if rotates && i == total/3 {
							c.now += Window
						}
						k := next(r)
						text, deny := fmt.Sprint(k), k%7 == 0 || r.IntN(10) == 0
						requests[text]++
						if deny {
							denied[text]++
						}
						l.Record(text, false, deny)
					}
					checkBounds(t, l, ByRequests, n, requests, denied)
					checkBounds(t, l, ByDenied, n, denied, requests)
				})
			}
		}
	}
}

// zipf returns a generator of keys whose frequencies follow Zipf's law.
func zipf(s float64) func(*rand.Rand) int {
	return func(r *rand.Rand) int { return int(rand.NewZipf(r, s, 1, 100_000).Uint64()) }
}

// checkBounds checks a list against exact counts of what it is sorted by, and of
// the other.
func checkBounds(t *testing.T, l *List, by By, n int, exact, others map[string]uint64) {
	t.Helper()
	var total uint64
	for _, count := range exact {
		total += count
	}
	top := l.Top(by, 1<<30)
	of := func(e Entry) (count, other uint64) {
		if by == ByDenied {
			return e.Denied, e.Requests
		}
		return e.Requests, e.Denied
	}
	if by == ByRequests && top.Requests != total || by == ByDenied && top.Denied != total {
		t.Errorf("total %d, counted %d and %d", total, top.Requests, top.Denied)
	}
	listed := make(map[string]bool)
	last := ^uint64(0)
	for _, e := range top.Entries {
		count, other := of(e)
		if count < exact[e.Text] || count-e.Error > exact[e.Text] {
			t.Errorf("key %s: %d with error %d, exactly %d", e.Text, count, e.Error, exact[e.Text])
		}
		if e.Error > total/uint64(n) {
			t.Errorf("key %s: error %d, of %d with %d counters", e.Text, e.Error, total, n)
		}
		if other > others[e.Text] {
			t.Errorf("key %s: the other number is %d, exactly %d", e.Text, other, others[e.Text])
		}
		if count > last {
			t.Errorf("key %s: %d after %d", e.Text, count, last)
		}
		if listed[e.Text] {
			t.Errorf("key %s is listed twice", e.Text)
		}
		last, listed[e.Text] = count, true
	}
	for text, count := range exact {
		if count > total/uint64(n) && !listed[text] {
			t.Errorf("key %s came %d times of %d and is not listed with %d counters", text, count, total, n)
		}
	}
	if len(top.Entries) > 2*n {
		t.Errorf("%d counters list %d keys", n, len(top.Entries))
	}
}

// TestFewKeysAreExact guards that counts are exact as long as every key has a
// counter.
func TestFewKeysAreExact(t *testing.T) {
	l := New(3, new(clock).read)
	for range 5 {
		l.Record("a", false, false)
	}
	for i := range 3 {
		l.Record("b", false, i > 0)
	}
	l.Record("a", true, true)
	want := []Entry{
		{Key: Key{Text: "a"}, Requests: 5},
		{Key: Key{Text: "b"}, Requests: 3, Denied: 2},
		{Key: Key{Text: "a", Address: true}, Requests: 1, Denied: 1},
	}
	if got := l.Top(ByRequests, 10).Entries; !slices.Equal(got, want) {
		t.Errorf("by requests got %+v\nwant %+v", got, want)
	}
	if got := l.Top(ByDenied, 10).Entries; !slices.Equal(got, []Entry{want[1], want[2]}) {
		t.Errorf("by denials got %+v", got)
	}
	if got := l.Top(ByRequests, 1).Entries; !slices.Equal(got, want[:1]) {
		t.Errorf("of one got %+v", got)
	}
}

// TestWindow guards that counts last one to two minutes, also if nothing comes for
// long.
func TestWindow(t *testing.T) {
	c := new(clock)
	l := New(10, c.read)
	l.Record("a", false, false)
	for _, step := range []struct {
		advance time.Duration
		record  bool
		want    uint64
		window  time.Duration
	}{
		{59 * time.Second, true, 2, 59 * time.Second},
		{time.Second, false, 2, time.Minute},
		{59 * time.Second, true, 3, 119 * time.Second},
		{time.Second, false, 1, time.Minute},
		{time.Minute, false, 0, 0},
		{0, true, 1, 0},
		{10 * time.Minute, false, 0, 0},
		{90 * time.Second, true, 1, 30 * time.Second},
	} {
		c.now += step.advance
		if step.record {
			l.Record("a", false, false)
		}
		if top := l.Top(ByRequests, 10); top.Requests != step.want || top.Window != step.window {
			t.Errorf("at %v: %d requests in %v, want %d in %v", c.now, top.Requests, top.Window, step.want, step.window)
		}
	}
}

// TestLongKeys guards that little is kept of a long key, and that those with the
// same beginning are distinguished.
func TestLongKeys(t *testing.T) {
	l := New(10, new(clock).read)
	long := strings.Repeat("x", 8000)
	for range 3 {
		l.Record(long+"a", false, false)
	}
	l.Record(long+"b", false, false)
	l.Record(long[:maxText], false, false)
	entries := l.Top(ByRequests, 10).Entries
	if len(entries) != 3 || entries[0].Requests != 3 {
		t.Fatalf("three keys are listed as %+v", entries)
	}
	for _, e := range entries {
		if whole := e.Text == long[:maxText]; e.Cut == whole || len(e.Text) > maxText+20 {
			t.Errorf("key of %d bytes, cut %t: %s", len(e.Text), e.Cut, e.Text)
		}
	}
}

// TestHeap guards the order of the counters, on which the bounds depend, after each
// step of a random history.
func TestHeap(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	s := summary{index: make(map[Key]int)}
	for range 20_000 {
		s.add(Key{Text: fmt.Sprint(r.IntN(60))}, 40)
		for i := 1; i < len(s.counters); i++ {
			if s.counters[(i-1)/2].count > s.counters[i].count {
				t.Fatalf("counter %d is less than its parent", i)
			}
		}
		for k, i := range s.index {
			if s.counters[i].key != k {
				t.Fatalf("key %s is not where the index says", k.Text)
			}
		}
		if len(s.index) != len(s.counters) {
			t.Fatalf("%d keys with %d counters", len(s.index), len(s.counters))
		}
	}
}

// TestConcurrentUse guards that nothing is lost or torn when many count and look.
func TestConcurrentUse(t *testing.T) {
	l := New(8, nil)
	var wg sync.WaitGroup
	const each, workers = 2000, 8
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				l.Record(fmt.Sprint((i*w)%13), false, i%2 == 0)
				if i%100 == 0 {
					l.Top(ByDenied, 3)
				}
			}
		})
	}
	wg.Wait()
	if top := l.Top(ByRequests, 3); top.Requests != each*workers || top.Denied != each*workers/2 {
		t.Errorf("counted %d and %d of %d", top.Requests, top.Denied, each*workers)
	}
}

// TestRecordAllocates guards that a key that has a counter costs no memory.
func TestRecordAllocates(t *testing.T) {
	l := New(10, nil)
	if n := testing.AllocsPerRun(1000, func() { l.Record("203.0.113.7", false, true) }); n > 0 {
		t.Errorf("a known key takes %v allocations", n)
	}
}

func BenchmarkRecord(b *testing.B) {
	for _, bm := range []struct {
		name    string
		n, keys int
	}{{"known", 100, 50}, {"flood-100", 100, 1 << 20}, {"flood-10000", 10_000, 1 << 20}} {
		b.Run(bm.name, func(b *testing.B) {
			texts := make([]string, bm.keys)
			for i := range texts {
				texts[i] = fmt.Sprint("203.0.113.", i)
			}
			l := New(bm.n, nil)
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for i := rand.Int(); pb.Next(); i++ {
					l.Record(texts[uint(i)%uint(len(texts))], false, false)
				}
			})
		})
	}
}
