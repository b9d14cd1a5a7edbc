package limiter

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// TestSlidingWindowBounds guards the bounds of sliding windows: in the time of a
// window that ends e into one, no more units are admitted than the size and the
// share e of it, rounded up; and in no time more than the windows hold in which it
// lies.
func TestSlidingWindowBounds(t *testing.T) {
	reached := 0
	checkTraces(t, 30, func(t *rapid.T) {
		l := SlidingWindow(rapid.Int64Range(1, 30).Draw(t, "size"),
			rapid.SampledFrom([]time.Duration{time.Microsecond, 7 * time.Microsecond, time.Second, time.Minute}).Draw(t, "window"))
		if rapid.Bool().Draw(t, "with a phase") {
			l.Phase = time.Duration(rapid.Int64Range(0, l.of().Rate()-1).Draw(t, "phase")) * time.Microsecond
		}
		s, last := newSubject(1_790_000_000_123_456), Decision{}
		var log []charge
		for range rapid.IntRange(1, 40).Draw(t, "moments") {
			s.now += drawWindowGap(t, l, last)
			if rapid.Bool().Draw(t, "flood") {
				log = append(log, charge{at: s.now, units: s.flood(t, l)})
				last = s.take(t, l, 1)
			} else {
				cost := drawSlidingCost(t, l, last)
				if last = s.take(t, l, cost); !last.Denied {
					log = append(log, charge{at: s.now, units: cost})
				}
			}

			e, units := l.of().SinceDrip(s.now), int64(0)
			for i := len(log) - 1; i >= 0; i-- {
				units += log[i].units
				apart := s.now - log[i].at
				if bound := l.Size + bucket.CeilDiv(l.Size*e, l.of().Rate()); apart < l.of().Rate() {
					if units > bound {
						t.Fatalf("%+v: %d units in the %d µs that end %d µs into a window, the bound is %d", l, units, apart, e, bound)
					} else if units == bound && e > 0 {
						reached++
					}
				}
				if bound := l.Size * (1 + bucket.CeilDiv(apart, l.of().Rate())); units > bound {
					t.Fatalf("%+v: %d units in %d µs, the bound is %d", l, units, apart, bound)
				}
			}
		}
	})
	if reached < 100 {
		t.Errorf("the bound was reached %d times: the test covers too little", reached)
	}
}

// TestLeakyBucketInsteadOfWindow guards the advice to those who want no more than n
// units in any time of a window: a leaky bucket of half the size, which drains in that
// time.
func TestLeakyBucketInsteadOfWindow(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		half := rapid.Int64Range(1, 30).Draw(t, "half the size")
		l := Limit{Size: half, DripInterval: time.Duration(rapid.Int64Range(1, 60e6).Draw(t, "µs")) * time.Microsecond, DripSize: 1}
		window := half * l.of().Rate()
		s, last := newSubject(1_790_000_000_123_456), Decision{}
		var log []charge
		for range rapid.IntRange(1, 40).Draw(t, "moments") {
			s.now += drawGap(t, l, last)
			log = append(log, charge{at: s.now, units: s.flood(t, l)})
			last = s.take(t, l, 1)
			units := int64(0)
			for _, c := range log {
				if c.at >= s.now-window {
					units += c.units
				}
			}
			if units > 2*half {
				t.Fatalf("%+v: %d units in %d µs", l, units, window)
			}
		}
	})
}
