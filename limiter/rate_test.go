package limiter

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
)

// TestRateHoldsOverLongTimes guards what a client gets over a long time, drip by
// drip in a store: size at once, and then n every d.
func TestRateHoldsOverLongTimes(t *testing.T) {
	racetest.SingleGoroutine(t)
	for _, tc := range []struct {
		n    int64
		d    time.Duration
		size int64
	}{
		{60, time.Second, 60}, {60, time.Second, 1}, {60, time.Second, 4}, {7, time.Second, 7}, {7, time.Second, 1},
		{999, time.Second, 10}, {1, time.Second, 5}, {3, 24 * time.Hour, 3}, {350, time.Second, 100},
		{999_983, time.Second, 20_000}, {100, time.Minute, 1},
	} {
		t.Run(fmt.Sprintf("%d each %v, size %d", tc.n, tc.d, tc.size), func(t *testing.T) {
			limit, err := bucket.OfRate(tc.n, tc.d, tc.size)
			if err != nil {
				t.Fatal(err)
			}
			now := time.Hour
			start := now
			l := Limiter{Store: NewMemoryWithClock(func() time.Duration { return now }), Limit: Limit(limit)}
			admitted := int64(0)
			for range 50_000 {
				d, err := l.Allow(t.Context(), "k")
				if err != nil {
					t.Fatal(err)
				}
				if !d.Denied {
					admitted++
					continue
				}
				// All that the time so far allows, and not a unit more.
				due := float64(tc.size) + float64(tc.n)*float64(now-start)/float64(tc.d)
				least := float64(tc.size) + (due-float64(tc.size))*0.9999 - float64(limit.DripSize)
				if got := float64(admitted); got > due || got < least {
					t.Fatalf("%d admitted within %v, want %f to %f", admitted, now-start, least, due)
				}
				now += d.RetryAfter
			}
			if now == start {
				t.Error("nothing was denied")
			}
		})
	}
}
