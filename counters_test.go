package ratelimit

import (
	"errors"
	"net/http"
	"testing"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestCounted guards what a decision is counted as: one that leaves a bucket at
// least 80 % full is near its limit, however small the bucket is, and units are
// those that were charged.
func TestCounted(t *testing.T) {
	admitted := func(size, remaining int64) limiter.Decision {
		return limiter.Decision{Size: size, Remaining: remaining, By: limiter.DecidedByRedis}
	}
	full := limiter.Decision{Denied: true, Size: 10, By: limiter.DecidedByCache}
	tests := []struct {
		name            string
		decision        limiter.Decision
		denied, charged bool
		want            counted
		units           uint64
	}{
		{"79 % full", admitted(100, 21), false, true, countedAdmitted, 7},
		{"80 % full", admitted(100, 20), false, true, countedNear, 7},
		{"full", admitted(100, 0), false, true, countedNear, 7},
		{"one of one", admitted(1, 0), false, true, countedNear, 7},
		{"three of four", admitted(4, 1), false, true, countedAdmitted, 7},
		{"four of five", admitted(5, 1), false, true, countedNear, 7},
		{"three of five", admitted(5, 2), false, true, countedAdmitted, 7},
		{"largest", admitted(limiter.MaxUnits, limiter.MaxUnits/5+1), false, true, countedAdmitted, 7},
		{"denied", full, true, false, countedDenied, 0},
		{"denied by another limit", admitted(100, 0), true, false, countedSpared, 0},
		{"denied by another limit, but charged", admitted(100, 0), true, true, countedSpared, 7},
	}
	for _, tc := range tests {
		var c counters
		c.count(3, &tc.decision, tc.denied, tc.charged, 7)
		var want limitTotals
		want.decisions[tc.want][tc.decision.By] = 1
		want.units = tc.units
		if got := c.totals(); got != want {
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
	var c counters
	before := checkedTotal(checkedEarlyData)
	redistest.Together(t, callers, func(i int) {
		d := limiter.Decision{Size: 10, Remaining: 9}
		for range each {
			c.count(uint32(i), &d, false, true, 2)
			countRefused(uint32(i), errEarlyData)
		}
	})
	totals := c.totals()
	if n := totals.of(countedAdmitted); n != callers*each || totals.units != 2*n {
		t.Errorf("got %d admitted and %d units, want %d and %d", n, totals.units, callers*each, 2*callers*each)
	}
	if n := checkedTotal(checkedEarlyData) - before; n != callers*each {
		t.Errorf("got %d refusals of early data, want %d", n, callers*each)
	}
}

// TestRefusedAreCounted guards which errors count as early data.
func TestRefusedAreCounted(t *testing.T) {
	for err, want := range map[error]checked{
		errEarlyData: checkedEarlyData,
		refusal{http.StatusBadRequest, errors.New("x")}: checkedRefused,
		errors.New("of a matcher"):                      checkedRefused,
	} {
		before := checkedTotal(want)
		countRefused(0, err)
		if checkedTotal(want) != before+1 {
			t.Errorf("%v is not counted as %d", err, want)
		}
	}
}

// TestStripesAreApart guards that no two stripes have a cache line in common: cores
// that count in different stripes would slow each other.
func TestStripesAreApart(t *testing.T) {
	const line = 64
	var s [2]stripe
	if gap := uintptr(unsafe.Pointer(&s[1].decisions)) - uintptr(unsafe.Pointer(&s[0].units)) - unsafe.Sizeof(s[0].units); gap < line {
		t.Errorf("%d bytes are between the counters of two stripes", gap)
	}
}

// BenchmarkCount counts on one limit from all cores: each in the stripe of its
// evaluation, and all in the same one.
func BenchmarkCount(b *testing.B) {
	d := limiter.Decision{Size: 10, Remaining: 9}
	for _, one := range []bool{false, true} {
		name := "stripes"
		if one {
			name = "one"
		}
		b.Run(name, func(b *testing.B) {
			var c counters
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					e := evaluations.Get().(*evaluation)
					on := e.stripe
					if one {
						on = 0
					}
					c.count(on, &d, false, true, 1)
					countChecked(on, checkedAdmitted)
					evaluations.Put(e)
				}
			})
		})
	}
}

// BenchmarkObserve observes how long a request waited for Redis.
func BenchmarkObserve(b *testing.B) {
	decisions := []limiter.Decision{{By: limiter.DecidedByRedis}}
	b.RunParallel(func(pb *testing.PB) {
		for n := 0; pb.Next(); n++ {
			observeRedisWait(350_000+(17_011*time.Duration(n))%200_000, decisions)
		}
	})
}
