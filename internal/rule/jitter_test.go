package rule

import (
	"slices"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestSlots guards that clients which a bucket denies are told times one after the other, in whole
// drips, by each algorithm; that a time is told once, also when some have passed meanwhile; and that
// none is told a time more than a minute after there is room.
func TestSlots(t *testing.T) {
	t.Parallel()
	const s = time.Second
	start := time.Now()
	for _, tc := range []struct {
		name  string
		limit bucket.Limit
		held  bool // whether requests in progress count
		cost  int64
		want  []time.Duration // the waits of denials at once, where there is room in a second
	}{
		{"drips", bucket.Per(1, 2*s).WithBurst(5), false, 1, []time.Duration{s, 3 * s, 5 * s}},
		{"a cost of several", bucket.Per(1, 2*s).WithBurst(5), false, 3, []time.Duration{s, 7 * s, 13 * s}},
		{"large drips", bucket.Limit{Size: 9, DripInterval: 2 * s, DripSize: 5}, false, 1, []time.Duration{s, 3 * s}},
		{"a fixed window", bucket.FixedWindow(5, 10*s), false, 1, []time.Duration{s, 3 * s, 5 * s, 7 * s}},
		{"a sliding window", bucket.SlidingWindow(5, 10*s), false, 1, []time.Duration{s, 3 * s, 5 * s}},
		{"a log", bucket.SlidingLog(5, 10*s), false, 1, []time.Duration{s, 3 * s, 5 * s}},
		{"a warm-up", bucket.WarmingUp(1, 2*s, time.Minute, 3), false, 1, []time.Duration{s, 3 * s, 5 * s}},
		{"requests in progress", bucket.Concurrency(4), true, 1, []time.Duration{s, 1250 * time.Millisecond, 1500 * time.Millisecond}},
		{"slots half a minute apart", bucket.Per(1, 30*s), false, 1, []time.Duration{s, 31 * s, 61 * s, s, 31 * s}},
		{"slots an hour apart", bucket.Per(1, time.Hour), false, 1, []time.Duration{s, 2 * s, 3 * s}},
		{"a window of a month", bucket.FixedWindow(10, 30*24*time.Hour), false, 1, []time.Duration{s, 2 * s, 3 * s}},
	} {
		j := NewJitter(0)
		e := &outcome.Entry{Policy: &outcome.Policy{Concurrency: tc.held}, Limit: limiter.Limit(tc.limit), Cost: tc.cost, Decision: limiter.Decision{Denied: true, Size: tc.limit.Size}}
		var got []time.Duration
		for range tc.want {
			got = append(got, j.next(7, s, slotTime(e), start))
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: waits of %v, want %v", tc.name, got, tc.want)
		}
	}

	j, step := NewJitter(0), 2*s
	for _, ask := range []struct{ after, wait, want time.Duration }{
		{0, s, s}, {0, s, 3 * s}, // told for 1 and 3 s
		{2 * s, s, 3 * s},  // for 5 s, as 3 s is told
		{20 * s, s, s},     // later than all
		{20 * s, 0, 3 * s}, // there was room meanwhile
		{80 * s, 90 * s, 90 * s},
	} {
		if got := j.next(7, ask.wait, step, start.Add(ask.after)); got != ask.want {
			t.Errorf("after %v: a wait of %v, want %v", ask.after, got, ask.want)
		}
	}
	if got := j.next(7+uint64(len(j.told)), s, step, start); got != s {
		t.Errorf("another bucket: a wait of %v, want %v", got, s)
	}
}
