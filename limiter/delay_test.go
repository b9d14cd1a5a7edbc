package limiter

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestDelayKeepsBound guards what requests that may wait pass: in any time, and at any
// moment, no more than the limit admits in it without those that wait, in the order in which
// they came, and none waits longer than it may; whatever the sizes of the bucket and of its
// drips, with costs that differ from request to request and may exceed the size, and with
// requests among them that may not wait. A request that can't wait is decided as if none did.
func TestDelayKeepsBound(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	waited, never, full := 0, 0, 0
	checkTraces(t, few(6), func(t *rapid.T) {
		v.flush(t)
		stores := []Store{v, NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })}
		l := Limit{
			Size:         rapid.OneOf(rapid.Int64Range(1, 12), rapid.Just[int64](1_000_000)).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second}).Draw(t, "interval"),
		}
		l.DripSize = rapid.SampledFrom([]int64{1, 1, 2, 3, l.Size/2 + 1, l.Size, 50}).Draw(t, "drip size")
		if rapid.Bool().Draw(t, "aligned") {
			l.Aligned, l.Phase = true, time.Duration(rapid.Int64Range(0, l.of().Rate()-1).Draw(t, "phase"))*time.Microsecond
		}
		longest := time.Duration(rapid.SampledFrom([]int64{l.of().Rate() / 2, l.of().Rate(), 3*l.of().Rate() + 1, 8 * l.of().Rate()}).Draw(t, "longest")) * time.Microsecond
		steady := rapid.SampledFrom([]int64{0, 1, l.Size/4 + 1, l.Size}).Draw(t, "cost of all, or 0")
		type pass struct{ at, units int64 }
		var passes []pass
		for range rapid.IntRange(2, 60).Draw(t, "requests") {
			v.advance(t, time.Duration(rapid.SampledFrom([]int64{0, 0, 0, 1, l.of().Rate() / 3, l.of().Rate(), 3*l.of().Rate() + 1}).Draw(t, "gap"))*time.Microsecond)
			b := Bucket{Name: "b", Key: "k", Limit: l, Cost: steady}
			if steady == 0 {
				b.Cost = rapid.SampledFrom([]int64{1, 1, 2, l.Size/3 + 1, l.Size, l.Size + 1, 3*l.Size + 1, MaxUnits}).Draw(t, "cost")
			}
			delayed := int64(0)
			if rapid.IntRange(0, 4).Draw(t, "may not wait: 0") > 0 {
				delayed = l.of().Delayed(longest, b.Cost)
			}
			b.Limit.Size += delayed
			decisions := make([]Decision, len(stores))
			for i, store := range stores {
				decisions[i] = decide(t, store, AccountingAtomic, b)[0]
			}
			d := decisions[0]
			if plainDecision(decisions[1]) != plainDecision(d) {
				t.Fatalf("Memory decided %+v, Redis %+v", decisions[1], d)
			}
			wait := b.Delay(&d, delayed)
			switch {
			case d.Denied && b.Cost > l.Size:
				never++
			case d.Denied:
				full++
			case wait > longest:
				t.Fatalf("%+v: waits %v, which is longer than %v", l, wait, longest)
			case b.Cost > l.Size:
				t.Fatalf("%+v: a request of %d passes", l, b.Cost)
			default:
				if wait > 0 {
					waited++
				}
				passes = append(passes, pass{v.now + wait.Microseconds(), b.Cost})
			}
		}
		if !slices.IsSortedFunc(passes, func(a, b pass) int { return cmp.Compare(a.at, b.at) }) {
			t.Fatalf("%+v: not in order: %v", l, passes)
		}
		drip := min(l.DripSize, l.Size)
		for i := range passes {
			units := int64(0)
			for _, p := range passes[i:] {
				units += p.units
				length := p.at - passes[i].at
				// A bucket that was empty drips from then on; one that was not has a unit at least.
				most := max(l.Size+drip*(length/l.of().Rate()), l.Size-1+drip*bucket.CeilDiv(length, l.of().Rate()))
				if l.Aligned {
					most = l.Size + drip*bucket.CeilDiv(length, l.of().Rate())
				}
				if units > most {
					t.Fatalf("%+v: %d units pass in %d µs, want at most %d: %v", l, units, length, most, passes)
				}
			}
		}
	})
	t.Logf("%d waited, %d were denied, and %d because of their cost", waited, full, never)
	if min(waited, full, never) < 35*few(6) {
		t.Errorf("%d waited, %d were denied, and %d because of their cost: the test covers too little", waited, full, never)
	}
}
