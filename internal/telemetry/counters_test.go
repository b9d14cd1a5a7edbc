package telemetry

import (
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestCounted guards what a decision is counted as: one that leaves a bucket at
// least 80 % full is near its limit, however small the bucket is, unless any request
// does so to an empty one; and units are those that were charged.
func TestCounted(t *testing.T) {
	admitted := func(size, remaining int64) limiter.Decision {
		return limiter.Decision{Size: size, Remaining: remaining, By: limiter.DecidedByRedis}
	}
	full := limiter.Decision{Denied: true, Size: 10, By: limiter.DecidedByCache}
	tests := []struct {
		name            string
		decision        limiter.Decision
		denied, charged bool
		want            Result
		cost            int64 // 1 if it is 0
		warmUp          bool
	}{
		{"79 % full", admitted(100, 21), false, true, Admitted, 7, false},
		{"80 % full", admitted(100, 20), false, true, Near, 7, false},
		{"full", admitted(100, 0), false, true, Near, 7, false},
		{"one of one", admitted(1, 0), false, true, Admitted, 0, false},
		{"two of two", admitted(2, 0), false, true, Near, 0, false},
		{"three of four", admitted(4, 1), false, true, Admitted, 0, false},
		{"four of five", admitted(5, 1), false, true, Near, 0, false},
		{"three of five", admitted(5, 2), false, true, Admitted, 0, false},
		{"four of five at once", admitted(5, 1), false, true, Admitted, 4, false},
		{"five of five, three at once", admitted(5, 0), false, true, Near, 3, false},
		{"all that a warm-up admits", admitted(10, 0), false, true, Admitted, 0, true},
		{"largest", admitted(limiter.MaxUnits, limiter.MaxUnits/5+1), false, true, Admitted, 7, false},
		{"denied", full, true, false, Denied, 7, false},
		{"denied by a ban", full, true, false, Banned, 7, false},
		{"denied by another limit", admitted(100, 0), true, false, Spared, 7, false},
		{"denied by another limit, but charged", admitted(100, 0), true, true, Spared, 7, false},
	}
	for _, tc := range tests {
		var c Counters
		b := limiter.Bucket{Limit: limiter.Limit{Size: tc.decision.Size}, Cost: max(tc.cost, 1)}
		if tc.warmUp {
			b.Limit.Algorithm = bucket.WarmUp
		}
		c.Count(3, &b, &tc.decision, tc.want == Banned, tc.denied, tc.charged)
		var want Totals
		want.decisions[tc.want][tc.decision.By] = 1
		if tc.charged {
			want.Tallies[Units] = uint64(b.Cost)
		}
		if got := c.Totals(); got != want {
			t.Errorf("%s: got %v, want %v", tc.name, got, want)
		}
	}
}

// TestDecidersAreCounted guards that there is a counter for everything that may
// decide: counting another would panic on a request.
func TestDecidersAreCounted(t *testing.T) {
	names := make(map[string]bool)
	for by := range limiter.Decider(deciders) {
		names[by.String()] = true
	}
	if len(names) != deciders {
		t.Errorf("%d deciders are called %v", deciders, names)
	}
	if name := limiter.Decider(deciders).String(); !names[name] {
		t.Errorf("decider %q has no counter", name)
	}
}

// TestEveryStripeIsCounted guards that nothing is lost when many requests are
// counted at once, whatever stripes they count in.
func TestEveryStripeIsCounted(t *testing.T) {
	const callers, each = 16, 1000
	var c Counters
	p := New(Options{})
	redistest.Together(t, callers, func(i int) {
		b, d := limiter.Bucket{Cost: 2}, limiter.Decision{Size: 10, Remaining: 9}
		for range each {
			c.Count(uint32(i), &b, &d, false, false, true)
			p.CountRequest(uint32(i), CheckedEarlyData)
		}
	})
	totals := c.Totals()
	if n := totals.Of(Admitted); n != callers*each || totals.Tallies[Units] != 2*n {
		t.Errorf("got %d admitted and %d units, want %d and %d", n, totals.Tallies[Units], callers*each, 2*callers*each)
	}
	if n := p.Requests()[CheckedEarlyData]; n != callers*each {
		t.Errorf("got %d refusals of early data, want %d", n, callers*each)
	}
}

// TestStripesAreApart guards that no two stripes have a cache line in common: cores
// that count in different stripes would slow each other.
func TestStripesAreApart(t *testing.T) {
	const line = 64
	var s [2]stripe
	if gap := uintptr(unsafe.Pointer(&s[1].decisions)) - uintptr(unsafe.Pointer(&s[0].tallies)) - unsafe.Sizeof(s[0].tallies); gap < line {
		t.Errorf("%d bytes are between the counters of two stripes", gap)
	}
}

// BenchmarkCount counts on one limit from all cores: each in a stripe of its
// own, and all in the same one.
func BenchmarkCount(b *testing.B) {
	p := New(Options{})
	limited, d := limiter.Bucket{Cost: 1}, limiter.Decision{Size: 10, Remaining: 9}
	for _, one := range []bool{false, true} {
		name := "stripes"
		if one {
			name = "one"
		}
		b.Run(name, func(b *testing.B) {
			var c Counters
			var callers atomic.Uint32
			b.RunParallel(func(pb *testing.PB) {
				on := callers.Add(1)
				if one {
					on = 0
				}
				for pb.Next() {
					c.Count(on, &limited, &d, false, false, true)
					p.CountRequest(on, CheckedAdmitted)
				}
			})
		})
	}
}

// BenchmarkObserve observes how long a request waited for Redis.
func BenchmarkObserve(b *testing.B) {
	p := New(Options{})
	decisions := []limiter.Decision{{By: limiter.DecidedByRedis}}
	b.RunParallel(func(pb *testing.PB) {
		for n := 0; pb.Next(); n++ {
			p.ObserveRedisWait(350_000+(17_011*time.Duration(n))%200_000, decisions)
		}
	})
}
