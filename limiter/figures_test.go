package limiter

import (
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// step is a request in a published example.
type step struct {
	at        time.Duration // since the first request
	cost      int64
	denied    bool
	remaining int64
	wait      time.Duration // RetryAfter if it is denied, otherwise Clear; 0 if it is unknown
}

// checkSteps makes the requests of an example, of a limit that begins at the given
// time on the store's clock, in both stores.
func checkSteps(t *testing.T, l Limit, begin time.Time, steps []step) {
	t.Helper()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	// The server's keys expire by its own clock: the example begins as long after
	// the virtual clock's start as it takes for it to be the same moment of a window.
	start := v.start - v.start%l.of().Rate() + begin.UnixMicro()%l.of().Rate() + l.of().Rate()
	var now time.Duration
	memory := NewMemoryWithClock(func() time.Duration { return time.Duration(start)*time.Microsecond + now })
	for i, s := range steps {
		now = s.at
		v.at(t, start+now.Microseconds())
		for name, store := range map[string]Store{"memory": memory, "redis": v} {
			d := decide(t, store, AccountingAtomic, Bucket{Name: "figures", Key: "k", Limit: l, Cost: s.cost})[0]
			got := step{s.at, s.cost, d.Denied, d.Remaining, d.Clear}
			if d.Denied {
				got.wait = d.RetryAfter
			}
			if s.wait == 0 {
				got.wait = 0
			}
			if got != s {
				t.Errorf("%s, step %d:\n got %+v\nwant %+v", name, i+1, got, s)
			}
		}
	}
}

// TestTokenBucketFigures guards that a leaky bucket decides as a token bucket does,
// with the tables that token buckets are tested with: those of x/time/rate
// (TestLimiterBurst1 and TestLimiterBurst3) and of throttled and redis-cell, whose
// times are those here.
func TestTokenBucketFigures(t *testing.T) {
	const tenth = 100 * time.Millisecond
	tests := map[string]struct {
		limit Limit
		steps []step
	}{
		"x/time/rate, burst 1": {
			Limit{Size: 1, DripInterval: tenth, DripSize: 1}, []step{
				{cost: 1}, {cost: 1, denied: true}, {cost: 1, denied: true},
				{at: tenth, cost: 1}, {at: tenth, cost: 1, denied: true}, {at: tenth, cost: 1, denied: true},
				{at: 2 * tenth, cost: 2, denied: true, remaining: 1}, {at: 2 * tenth, cost: 1}, {at: 2 * tenth, cost: 1, denied: true},
			},
		},
		"x/time/rate, burst 3": {
			Limit{Size: 3, DripInterval: tenth, DripSize: 1}, []step{
				{cost: 2, remaining: 1}, {cost: 2, denied: true, remaining: 1}, {cost: 1}, {cost: 1, denied: true},
				{at: tenth, cost: 4, denied: true, remaining: 1}, {at: 2 * tenth, cost: 1, remaining: 1},
				{at: 3 * tenth, cost: 1, remaining: 1}, {at: 4 * tenth, cost: 1, remaining: 1}, {at: 4 * tenth, cost: 1},
				{at: 4 * tenth, cost: 1, denied: true}, {at: 4 * tenth, cost: 1, denied: true}, {at: 9 * tenth, cost: 3},
			},
		},
		"throttled, redis-cell": {
			Limit{Size: 5, DripInterval: time.Second, DripSize: 1}, []step{
				{cost: 6, denied: true, remaining: 5},
				{cost: 1, remaining: 4, wait: time.Second}, {cost: 1, remaining: 3, wait: 2 * time.Second},
				{cost: 1, remaining: 2, wait: 3 * time.Second}, {cost: 1, remaining: 1, wait: 4 * time.Second},
				{cost: 1, wait: 5 * time.Second}, {cost: 1, denied: true, wait: time.Second},
				{at: 3 * time.Second, cost: 1, remaining: 2, wait: 3 * time.Second},
				{at: 31 * tenth, cost: 1, remaining: 1, wait: 39 * tenth},
				{at: 4 * time.Second, cost: 1, remaining: 1, wait: 4 * time.Second},
				{at: 8 * time.Second, cost: 1, remaining: 4, wait: time.Second},
				{at: 95 * tenth, cost: 1, remaining: 4, wait: time.Second},
				{at: 95 * tenth, cost: 2, remaining: 2, wait: 3 * time.Second},
				{at: 95 * tenth, cost: 5, denied: true, remaining: 2, wait: 3 * time.Second},
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) { checkSteps(t, tc.limit, time.Unix(0, 0), tc.steps) })
	}
}

// TestFixedWindowFigures guards fixed windows with published figures: those of
// envoyproxy/ratelimit, whose hour at 1,000,000 s since 1970 is that at 997,200 s;
// and of a window that begins with its first request, at 00:00:45, in the
// documentation of alisaifee/limits.
func TestFixedWindowFigures(t *testing.T) {
	tests := map[string]struct {
		limit Limit
		begin time.Time
		steps []step
	}{
		"envoyproxy/ratelimit": {
			ClockWindow(2, time.Hour, time.Unix(0, 0)), time.Unix(1_000_000, 0), []step{
				{cost: 1, remaining: 1, wait: 800 * time.Second}, {cost: 1, wait: 800 * time.Second},
				{cost: 1, denied: true, wait: 800 * time.Second},
				{at: 800*time.Second - time.Microsecond, cost: 1, denied: true, wait: time.Microsecond},
				{at: 800 * time.Second, cost: 1, remaining: 1, wait: time.Hour},
			},
		},
		"alisaifee/limits": {
			FixedWindow(2, time.Minute), time.Unix(45, 0), []step{
				{cost: 2, wait: time.Minute}, {at: 59 * time.Second, cost: 1, denied: true, wait: time.Second},
				{at: time.Minute, cost: 1, remaining: 1, wait: time.Minute},
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) { checkSteps(t, tc.limit, tc.begin, tc.steps) })
	}
}
