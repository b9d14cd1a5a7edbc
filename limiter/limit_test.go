package limiter

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// decision returns the Decision on a bucket of limit l.
func (l Limit) decision(s bucket.Level, now, cost int64, denied bool) (d Decision) {
	d.report(l.of(), s.Ahead(now), cost, denied)
	return d
}

// TestAdmitted guards the numbers that the documentation works out, and the four
// ways in which the pseudocode of SkRateLimiterService, on which this limiter is
// based, admits more or fewer requests than it says. The number that it admits of
// the last burst is noted at each case.
func TestAdmitted(t *testing.T) {
	// burst is a series of requests of cost 1 at a fixed interval from one time to
	// another, both included.
	type burst struct {
		from, until, every time.Duration
		requests           int
	}
	at := func(at time.Duration, requests int) burst {
		return burst{from: at, until: at, every: 1, requests: requests}
	}
	tests := []struct {
		name  string
		limit Limit
		load  []burst
		want  []int64 // how many of each burst are admitted
	}{
		{
			name:  "idle time after one request is not banked", // seed: 18
			limit: Limit{Size: 10, DripInterval: time.Second, DripSize: 1},
			load:  []burst{at(0, 1), at(9*time.Second, 40)},
			want:  []int64{1, 10},
		},
		{
			name:  "idle time between five slow requests is not banked", // seed: 45
			limit: Limit{Size: 10, DripInterval: time.Second, DripSize: 1},
			load:  []burst{{0, 32 * time.Second, 8 * time.Second, 1}, at(40*time.Second, 4000)},
			want:  []int64{5, 10},
		},
		{
			name:  "idle time between fifty slow requests is not banked", // seed: 360
			limit: Limit{Size: 10, DripInterval: time.Second, DripSize: 1},
			load:  []burst{{0, 392 * time.Second, 8 * time.Second, 1}, at(400*time.Second, 4000)},
			want:  []int64{50, 10},
		},
		{
			name:  "idle time in an hour of slow requests is not banked", // seed: 3160
			limit: Limit{Size: 10, DripInterval: time.Second, DripSize: 1},
			load:  []burst{{0, 3592 * time.Second, 8 * time.Second, 1}, at(time.Hour, 4000)},
			want:  []int64{450, 10},
		},
		{
			name:  "sustained rate is drip size per drip", // seed: 70
			limit: Limit{Size: 10, DripInterval: time.Second, DripSize: 2},
			load:  []burst{{0, 60 * time.Second, 100 * time.Millisecond, 20}},
			want:  []int64{10 + 2*60},
		},
		{
			// At 301 s the timestamp of the pseudocode has expired, but the
			// counter has not.
			name:  "state that expires does not open the bucket", // seed: all 1000
			limit: Limit{Size: 5, DripInterval: time.Minute, DripSize: 1},
			load: []burst{
				at(0, 1), at(59*time.Second, 1),
				{301 * time.Second, 311*time.Second - 1, 10 * time.Millisecond, 1},
			},
			want: []int64{1, 1, 5},
		},
		{
			name:  "one drip comes one drip rate after the first request",
			limit: Limit{Size: 2, DripInterval: time.Second, DripSize: 1},
			load: []burst{
				at(500*time.Millisecond, 1), at(1499*time.Millisecond, 1),
				at(1500*time.Millisecond-time.Microsecond, 1), at(1500*time.Millisecond, 2),
			},
			want: []int64{1, 1, 0, 1},
		},
		{
			name:  "largest drip never fills the bucket beyond its size",
			limit: Limit{Size: 3, DripInterval: time.Second, DripSize: 100},
			load:  []burst{at(0, 10), at(999*time.Millisecond, 10), at(time.Second, 10), at(time.Hour, 10)},
			want:  []int64{3, 0, 3, 3},
		},
		{
			name:  "bucket of one unit keeps requests a drip rate apart",
			limit: Limit{Size: 1, DripInterval: time.Second, DripSize: 1},
			load:  []burst{{0, 10 * time.Second, time.Millisecond, 1}},
			want:  []int64{11},
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			s := newSubject(0)
			var got []int64
			for _, b := range tc.load {
				n := int64(0)
				for now := b.from; now <= b.until; now += b.every {
					s.now = now.Microseconds()
					for range b.requests {
						if !s.take(t, tc.limit, 1).Denied {
							n++
						}
					}
				}
				got = append(got, n)
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("admitted %d, want %d", got, tc.want)
			}
		})
	}
}

// TestConcurrentRequestsShareOneBucket guards against requests that slip in
// between another one's check and its charge, as when the two are separate steps:
// of many concurrent requests, exactly as many are admitted as there is room for.
func TestConcurrentRequestsShareOneBucket(t *testing.T) {
	for _, size := range []int64{1, 10} {
		t.Run(fmt.Sprintf("size=%d", size), func(t *testing.T) {
			store := NewMemoryWithClock(func() time.Duration { return time.Hour })
			req := Request{Buckets: []Bucket{{Name: "test", Limit: Limit{Size: size, DripInterval: time.Second, DripSize: 1}, Cost: 1}}}
			var admitted atomic.Int64
			var ready, done sync.WaitGroup
			ready.Add(1)
			for range 100 {
				done.Go(func() {
					ready.Wait()
					d, err := store.Take(context.Background(), req, nil)
					if err != nil {
						t.Error(err)
					} else if !d[0].Denied {
						admitted.Add(1)
					}
				})
			}
			ready.Done()
			done.Wait()
			if got := admitted.Load(); got != size {
				t.Errorf("admitted %d of 100, want %d", got, size)
			}
		})
	}
}

// TestDecisions guards every formula with numbers worked out by hand, especially
// where the last drip falls short.
func TestDecisions(t *testing.T) {
	const (
		us = time.Microsecond
		s  = time.Second
	)
	type step struct {
		at   time.Duration
		cost int64
		want Decision // without its size
	}
	tests := []struct {
		name  string
		limit Limit
		steps []step
	}{
		{
			name:  "drip size 1",
			limit: Limit{Size: 2, DripInterval: s, DripSize: 1},
			steps: []step{
				{0, 1, Decision{Remaining: 1, Clear: s}},
				{0, 1, Decision{Remaining: 0, Clear: 2 * s}},
				{0, 1, Decision{Denied: true, Clear: 2 * s, RetryAfter: s}},
				{0, 2, Decision{Denied: true, Clear: 2 * s, RetryAfter: 2 * s}},
				{s - us, 1, Decision{Denied: true, Clear: s + us, RetryAfter: us}},
				{s, 2, Decision{Denied: true, Remaining: 1, Clear: s, RetryAfter: s}},
				{s, 1, Decision{Remaining: 0, Clear: 2 * s}},
				{3*s - us, 2, Decision{Denied: true, Remaining: 1, Clear: us, RetryAfter: us}},
				{3 * s, 2, Decision{Remaining: 0, Clear: 2 * s}},
			},
		},
		{
			name:  "cost above the size",
			limit: Limit{Size: 2, DripInterval: s, DripSize: 1},
			steps: []step{
				{0, 3, Decision{Denied: true, Never: true, Remaining: 2}},
				{0, 1, Decision{Remaining: 1, Clear: s}},
				{0, 3, Decision{Denied: true, Never: true, Remaining: 1, Clear: s}},
				{0, math.MaxInt64, Decision{Denied: true, Never: true, Remaining: 1, Clear: s}},
				{s, 2, Decision{Remaining: 0, Clear: 2 * s}},
			},
		},
		{
			name:  "size is no multiple of drip size", // levels 10, 7, 4, 1, 0
			limit: Limit{Size: 10, DripInterval: s, DripSize: 3},
			steps: []step{
				{0, 1, Decision{Remaining: 9, Clear: s}},
				{0, 2, Decision{Remaining: 7, Clear: s}}, // fills up the drip
				{0, 1, Decision{Remaining: 6, Clear: 2 * s}},
				{0, 6, Decision{Remaining: 0, Clear: 4 * s}},
				{0, 1, Decision{Denied: true, Clear: 4 * s, RetryAfter: s}},
				{0, 3, Decision{Denied: true, Clear: 4 * s, RetryAfter: s}},
				{0, 4, Decision{Denied: true, Clear: 4 * s, RetryAfter: 2 * s}},
				{0, 6, Decision{Denied: true, Clear: 4 * s, RetryAfter: 2 * s}},
				{0, 9, Decision{Denied: true, Clear: 4 * s, RetryAfter: 3 * s}},
				{0, 10, Decision{Denied: true, Clear: 4 * s, RetryAfter: 4 * s}},
				{s - us, 1, Decision{Denied: true, Clear: 3*s + us, RetryAfter: us}},
				{s, 4, Decision{Denied: true, Remaining: 3, Clear: 3 * s, RetryAfter: s}},
				{s, 1, Decision{Remaining: 2, Clear: 3 * s}},
				{2*s + s/2, 6, Decision{Denied: true, Remaining: 5, Clear: s + s/2, RetryAfter: s / 2}},
				{2*s + s/2, 5, Decision{Remaining: 0, Clear: 3*s + s/2}},
			},
		},
		{
			name:  "size is a multiple of drip size", // levels 10, 8, 6, 4, 2, 0
			limit: Limit{Size: 10, DripInterval: s, DripSize: 2},
			steps: []step{
				{0, 10, Decision{Remaining: 0, Clear: 5 * s}},
				{s, 3, Decision{Denied: true, Remaining: 2, Clear: 4 * s, RetryAfter: s}},
				{s, 1, Decision{Remaining: 1, Clear: 5 * s}},
				{2 * s, 1, Decision{Remaining: 2, Clear: 4 * s}},
			},
		},
		{
			name:  "drip size above the size",
			limit: Limit{Size: 3, DripInterval: s, DripSize: 5},
			steps: []step{
				{0, 1, Decision{Remaining: 2, Clear: s}},
				{s / 2, 2, Decision{Remaining: 0, Clear: s / 2}},
				{s / 2, 1, Decision{Denied: true, Clear: s / 2, RetryAfter: s / 2}},
				{s / 2, 3, Decision{Denied: true, Clear: s / 2, RetryAfter: s / 2}},
				{s, 3, Decision{Remaining: 0, Clear: s}},
			},
		},
		{
			name:  "drips keep their beat while the bucket is not empty",
			limit: Limit{Size: 5, DripInterval: s, DripSize: 1},
			steps: []step{
				{0, 2, Decision{Remaining: 3, Clear: 2 * s}},
				{s + s/2, 1, Decision{Remaining: 3, Clear: s + s/2}}, // 1 + 1 units, drips at 2 s and 3 s
				{2 * s, 1, Decision{Remaining: 3, Clear: 2 * s}},
				{4 * s, 1, Decision{Remaining: 4, Clear: s}},
			},
		},
		{
			name:  "an empty bucket finds a new beat",
			limit: Limit{Size: 5, DripInterval: s, DripSize: 2},
			steps: []step{
				{0, 1, Decision{Remaining: 4, Clear: s}},
				{s + 1*us, 1, Decision{Remaining: 4, Clear: s}},
				{2 * s, 1, Decision{Remaining: 3, Clear: us}}, // the same drip takes both
				{time.Hour, 5, Decision{Remaining: 0, Clear: 3 * s}},
			},
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			sub := newSubject(0)
			for i, step := range tc.steps {
				sub.now = step.at.Microseconds()
				want := step.want
				want.Size = tc.limit.Size
				if got := plainDecision(sub.take(t, tc.limit, step.cost)); got != want {
					t.Fatalf("step %d, at %v, cost %d:\n got %+v\nwant %+v", i, step.at, step.cost, got, want)
				}
			}
		})
	}
}

// TestOverfullBucket guards against overflow and negative numbers when a bucket
// holds more than its size, after requests with a larger size: there is no room,
// and the wait includes the surplus.
func TestOverfullBucket(t *testing.T) {
	const us, s = time.Microsecond, time.Second
	tests := []struct {
		name  string
		limit Limit
		level bucket.Level // filled by a larger size
		want  Decision
	}{
		{"filled to size 5, finds size 2", Limit{Size: 2, DripInterval: s, DripSize: 1}, bucket.Level{Clear: 5e6},
			Decision{Denied: true, Size: 2, Clear: 5 * s, RetryAfter: 4 * s}},
		{"filled to size 9 with rest 3, finds size 2", Limit{Size: 2, DripInterval: s, DripSize: 4}, bucket.Level{Clear: 3e6, Rest: 3},
			Decision{Denied: true, Size: 2, Clear: 3 * s, RetryAfter: 2 * s}},
		{"all that fits in Redis: 2^99 units", Limit{Size: 10, DripInterval: us, DripSize: 1 << 49}, bucket.Level{Clear: 1 << 50},
			Decision{Denied: true, Size: 10, Clear: 1 << 50 * us, RetryAfter: 1 << 50 * us}},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			if got := plainDecision(tc.limit.decision(tc.level.At(0), 0, 1, true)); got != tc.want {
				t.Errorf("\n got %+v\nwant %+v", got, tc.want)
			}
		})
	}
}

// TestSpendTime guards over what time clients are to spend what is left, for each
// kind of limit. What is reported may be of a smaller size than the store's: see Delayed.
func TestSpendTime(t *testing.T) {
	leaky, window, slides, log := PerSecond(10), FixedWindow(10, time.Minute), SlidingWindow(10, time.Minute), SlidingLog(10, time.Minute)
	at := time.Date(2026, 11, 27, 17, 15, 55, 250e6, time.UTC) // when all is decided
	clock := func(d time.Duration, start time.Time) Limit { return ClockWindow(10, d, start) }
	november := clock(30*24*time.Hour, time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC))
	warm := warmingUp(10, time.Second, time.Minute, 3)
	leaky.DripInterval, leaky.DripSize = time.Second, 0
	for _, tc := range []struct {
		name  string
		limit Limit
		more  int64 // by how much the store's size is larger
		d     Decision
		want  time.Duration
	}{
		{"drips out", leaky, 0, Decision{Remaining: 3, Clear: 7 * time.Second}, 3 * time.Second},
		{"a drip", leaky, 0, Decision{Clear: 9500 * time.Millisecond}, 500 * time.Millisecond},
		{"drips until below the size", leaky, 2, Decision{Clear: 11500 * time.Millisecond}, 2500 * time.Millisecond},
		{"the window ends", window, 0, Decision{Remaining: 3, Clear: 20 * time.Second, rest: 7}, 20 * time.Second},
		{"no window", window, 0, Decision{Remaining: 10}, time.Minute},
		{"an empty minute", clock(time.Minute, time.Time{}), 0, Decision{Remaining: 10}, 4750 * time.Millisecond},
		{"an empty hour", clock(time.Hour, time.Time{}), 0, Decision{Remaining: 10}, 44*time.Minute + 4750*time.Millisecond},
		{"an empty day", clock(24*time.Hour, time.Time{}), 0, Decision{Remaining: 10}, 24244750 * time.Millisecond},
		{"an empty day, less than the store's size", clock(24*time.Hour, time.Time{}), 5, Decision{Remaining: 10}, 24244750 * time.Millisecond},
		{"an empty month", november, 0, Decision{Remaining: 10}, 3*24*time.Hour + 24244750*time.Millisecond},
		{"a window that begins now", clock(time.Hour, at), 0, Decision{Remaining: 10}, time.Hour},
		{"a window that ends in 1 µs", clock(time.Hour, at.Add(time.Microsecond)), 0, Decision{Remaining: 10}, time.Microsecond},
		{"an empty window that slides", slides, 0, Decision{Remaining: 10}, 4750 * time.Millisecond},
		{"an empty log", log, 0, Decision{Remaining: 10, exact: true}, time.Minute},
		{"full until the window ends", window, 0, Decision{Clear: 20 * time.Second, rest: 10}, 20 * time.Second},
		{"above the size until the window ends", window, 2, Decision{Clear: 20 * time.Second, rest: 11}, 20 * time.Second},
		{"this window, which the next one counts", slides, 0, Decision{Remaining: 3, Clear: 80 * time.Second, rest: 7}, 20 * time.Second},
		{"what the window before counts", slides, 0, Decision{Remaining: 3, Clear: 50 * time.Second, rest: 7}, 50 * time.Second},
		{"all entries leave", log, 0, Decision{Remaining: 3, Clear: 50 * time.Second, exact: true}, 50 * time.Second},
		{"one entry leaves", log, 0, Decision{Clear: 50 * time.Second, exact: true, one: 5_000_000}, 5 * time.Second},
		{"the full rate", warm, 0, Decision{Remaining: 1, Clear: time.Minute, rest: 60_000_000}, 100 * time.Millisecond},
		{"the next free moment", warm, 5, Decision{Clear: 61 * time.Second, rest: 60_000_000}, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.d.Size = tc.limit.Size
			tc.limit.Size += tc.more
			if got := tc.limit.SpendTime(&tc.d, at); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
	for n := range int64(1000) {
		l := warmingUp(n+1, time.Second, time.Minute, 3)
		if got := l.of().DripTime(n + 1); got != time.Second {
			t.Errorf("a rate of %d/1s takes %v for as many units", n+1, got)
		}
	}
}

// TestSummarize guards the one answer that a client gets when several buckets decide: all
// its numbers are those of the bucket that decides, also where units differ.
func TestSummarize(t *testing.T) {
	const s = time.Second
	type found struct {
		cost int64
		Decision
	}
	admits := func(cost, size, remaining int64, clear time.Duration) found {
		return found{cost, Decision{Size: size, Remaining: remaining, Clear: clear}}
	}
	denies := func(cost, size, remaining int64, clear, retry time.Duration) found {
		return found{cost, Decision{Denied: true, Size: size, Remaining: remaining, Clear: clear, RetryAfter: retry}}
	}
	never := func(cost, size, remaining int64, clear time.Duration) found {
		return found{cost, Decision{Denied: true, Never: true, Size: size, Remaining: remaining, Clear: clear}}
	}
	pool, dryRun := denies(1, 1, 0, s, s), denies(1, 1, 0, s, s)
	pool.Pool, dryRun.DryRun = true, true
	tests := []struct {
		name  string
		found []found
		want  Summary
	}{
		{
			"one that admits",
			[]found{admits(1, 10, 9, s)},
			Summary{Size: 10, Remaining: 9, Clear: s},
		},
		{
			"one that denies",
			[]found{denies(1, 10, 3, 9*s, 2*s)},
			Summary{Denied: true, Size: 10, Remaining: 3, Clear: 9 * s, RetryAfter: 2 * s},
		},
		{
			"one that never admits",
			[]found{never(11, 10, 3, 9*s)},
			Summary{Denied: true, Never: true, Size: 10, Remaining: 3, Clear: 9 * s},
		},
		{
			"fewest remaining, not least size",
			[]found{admits(1, 5, 4, s), admits(1, 10, 3, s), admits(1, 8, 4, s)},
			Summary{Size: 10, Remaining: 3, Clear: s, Deciding: 1},
		},
		{
			"fewest requests, not fewest units",
			[]found{admits(1, 3, 2, 0), admits(300_000, 1_000_000, 400_000, s)},
			Summary{Size: 1_000_000, Remaining: 400_000, Clear: s, Deciding: 1},
		},
		{
			"parts of a request count",
			[]found{admits(10, 100, 29, s), admits(100, 900, 210, s)},
			Summary{Size: 900, Remaining: 210, Clear: s, Deciding: 1},
		},
		{
			"products of more than 64 bits",
			[]found{admits(1<<60, 1<<62, 1<<61, s), admits(1<<59, 1<<62, 1<<60-1, s)},
			Summary{Size: 1 << 62, Remaining: 1<<60 - 1, Clear: s, Deciding: 1},
		},
		{
			"one that the request costs nothing has room for any number",
			[]found{admits(0, 5, 0, 9*s), admits(1, 100, 80, s)},
			Summary{Size: 100, Remaining: 80, Clear: 9 * s, Deciding: 1},
		},
		{
			"fewest units if the request costs nothing anywhere",
			[]found{admits(0, 5, 4, s), admits(0, 100, 3, s)},
			Summary{Size: 100, Remaining: 3, Clear: s, Deciding: 1},
		},
		{
			"on a tie, the one whose size is of fewer requests",
			[]found{admits(1, 8, 3, s), admits(2, 10, 6, s), admits(1, 9, 3, s)},
			Summary{Size: 10, Remaining: 6, Clear: s, Deciding: 1},
		},
		{
			"on a tie of both, the one that takes longer to run empty",
			[]found{admits(1, 5, 3, 0), admits(2, 10, 6, 3*s), admits(1, 5, 3, 2*s)},
			Summary{Size: 10, Remaining: 6, Clear: 3 * s, Deciding: 1},
		},
		{
			"order on a tie of all",
			[]found{admits(1, 9, 5, s), admits(1, 5, 3, s), admits(1, 5, 3, s)},
			Summary{Size: 5, Remaining: 3, Clear: s, Deciding: 1},
		},
		{
			"one that denies, not one with less room",
			[]found{admits(1, 10, 0, s), admits(1, 10, 1, s), denies(5, 10, 4, 5*s, s)},
			Summary{Denied: true, Size: 10, Remaining: 4, Clear: 5 * s, RetryAfter: s, Deciding: 2},
		},
		{
			"longest clear, of one that does not deny",
			[]found{denies(1, 5, 0, 5*s, s), admits(1, 10, 2, 30*s)},
			Summary{Denied: true, Size: 5, Remaining: 0, Clear: 30 * s, RetryAfter: s},
		},
		{
			"longest retry decides",
			[]found{denies(1, 5, 0, 5*s, s), denies(2, 10, 1, 20*s, 3*s), denies(1, 7, 0, 9*s, 2*s)},
			Summary{Denied: true, Size: 10, Remaining: 1, Clear: 20 * s, RetryAfter: 3 * s, Deciding: 1},
		},
		{
			"order on equal retries",
			[]found{admits(1, 9, 0, s), denies(3, 5, 2, s, s), denies(2, 4, 1, s, s)},
			Summary{Denied: true, Size: 5, Remaining: 2, Clear: s, RetryAfter: s, Deciding: 1},
		},
		{
			"never outranks a retry before it",
			[]found{denies(1, 5, 0, 5*s, 4*s), never(4, 3, 2, s)},
			Summary{Denied: true, Never: true, Size: 3, Remaining: 2, Clear: 5 * s, Deciding: 1},
		},
		{
			"never outranks a retry after it",
			[]found{never(4, 3, 2, s), denies(1, 5, 0, 5*s, 4*s)},
			Summary{Denied: true, Never: true, Size: 3, Remaining: 2, Clear: 5 * s, Deciding: 0},
		},
		{
			"order on two that never admit",
			[]found{admits(1, 9, 9, 0), never(4, 3, 2, s), never(4, 2, 1, s)},
			Summary{Denied: true, Never: true, Size: 3, Remaining: 2, Clear: s, Deciding: 1},
		},
		{
			"neither a pool nor a dry run",
			[]found{pool, dryRun, admits(1, 10, 9, 2*s)},
			Summary{Size: 10, Remaining: 9, Clear: 2 * s, Deciding: 2},
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			var buckets []Bucket
			var decisions []Decision
			for _, f := range tc.found {
				buckets, decisions = append(buckets, Bucket{Cost: f.cost}), append(decisions, f.Decision)
			}
			before := slices.Clone(decisions)
			if got := Summarize(buckets, decisions); got != tc.want {
				t.Errorf("\n got %+v\nwant %+v", got, tc.want)
			}
			if got := Denied(decisions); got != tc.want.Denied {
				t.Errorf("Denied() = %t", got)
			}
			if !slices.Equal(decisions, before) {
				t.Errorf("decisions changed to %+v", decisions)
			}
		})
	}
}

// TestAccountingString guards the words used in configurations, and that atomic is
// the default.
func TestAccountingString(t *testing.T) {
	var unset Accounting
	for a, want := range map[Accounting]string{unset: "atomic", AccountingAtomic: "atomic", AccountingEach: "each"} {
		if got := a.String(); got != want {
			t.Errorf("Accounting(%d).String() = %q, want %q", a, got, want)
		}
	}
}

// seed001Row has the columns of seed 001: limited, size, remaining, seconds to
// wait or -1 if not limited, seconds until empty; seconds are rounded down.
type seed001Row [5]int64

func seed001RowOf(denied bool, size, remaining int64, retry, clear time.Duration) seed001Row {
	if !denied {
		return seed001Row{0, size, remaining, -1, int64(clear / time.Second)}
	}
	return seed001Row{1, size, remaining, int64(retry / time.Second), int64(clear / time.Second)}
}

// seed001Buckets returns the buckets of seed 001's example.
func seed001Buckets() []Bucket {
	return []Bucket{
		{Name: "user", Key: "alex", Limit: Limit{Size: 16, DripInterval: 2 * time.Second, DripSize: 1}, Cost: 1},
		{Name: "user/trade", Key: "alex", Limit: Limit{Size: 6, DripInterval: 1500 * time.Millisecond, DripSize: 1}, Cost: 1},
	}
}

// takeSeed001 makes the request of seed 001's example, and returns the rows for
// "user", for "user/trade" and for their summary.
func takeSeed001(t *testing.T, store Store, accounting Accounting) [3]seed001Row {
	t.Helper()
	d, err := store.Take(context.Background(), Request{Buckets: seed001Buckets(), Accounting: accounting}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := Summarize(seed001Buckets(), d)
	return [3]seed001Row{
		seed001RowOf(d[0].Denied, d[0].Size, d[0].Remaining, d[0].RetryAfter, d[0].Clear),
		seed001RowOf(d[1].Denied, d[1].Size, d[1].Remaining, d[1].RetryAfter, d[1].Clear),
		seed001RowOf(s.Denied, s.Size, s.Remaining, s.RetryAfter, s.Clear),
	}
}

// testSeed001 makes requests about a millisecond apart to an empty store and
// compares the results with the table that seed 001 prints from its second request
// on. advance lets that time pass; it may do nothing if time passes on its own. The
// table's last row is printed 85 times in seed 001, whose summary then has the smaller size;
// ours has the size of the bucket with the longer wait.
func testSeed001(t *testing.T, store Store, advance func(time.Duration)) {
	t.Helper()
	table := [][3]seed001Row{
		{{0, 16, 14, -1, 3}, {0, 6, 4, -1, 2}, {0, 6, 4, -1, 3}},
		{{0, 16, 13, -1, 5}, {0, 6, 3, -1, 4}, {0, 6, 3, -1, 5}},
		{{0, 16, 12, -1, 7}, {0, 6, 2, -1, 5}, {0, 6, 2, -1, 7}},
		{{0, 16, 11, -1, 9}, {0, 6, 1, -1, 7}, {0, 6, 1, -1, 9}},
		{{0, 16, 10, -1, 11}, {0, 6, 0, -1, 8}, {0, 6, 0, -1, 11}},
		{{0, 16, 9, -1, 13}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 13}},
		{{0, 16, 8, -1, 15}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 15}},
		{{0, 16, 7, -1, 17}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 17}},
		{{0, 16, 6, -1, 19}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 19}},
		{{0, 16, 5, -1, 21}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 21}},
		{{0, 16, 4, -1, 23}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 23}},
		{{0, 16, 3, -1, 25}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 25}},
		{{0, 16, 2, -1, 27}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 27}},
		{{0, 16, 1, -1, 29}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 29}},
		{{0, 16, 0, -1, 31}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 31}},
	}
	for range 85 {
		table = append(table, [3]seed001Row{{1, 16, 0, 1, 31}, {1, 6, 0, 1, 8}, {1, 16, 0, 1, 31}})
	}

	takeSeed001(t, store, AccountingEach)
	for i, want := range table {
		advance(time.Millisecond)
		if got := takeSeed001(t, store, AccountingEach); got != want {
			t.Fatalf("row %d: got %v, want %v", i, got, want)
		}
	}
}

// TestSeed001Memory guards the example of the seed that nested limits come from:
// if each bucket is charged on its own, its table is reproduced exactly.
func TestSeed001Memory(t *testing.T) {
	var now time.Duration
	testSeed001(t, NewMemoryWithClock(func() time.Duration { return now }), func(d time.Duration) { now += d })
}

// TestAtomicDenialChargesNothing guards the default Accounting with the requests
// of seed 001's example: a request that one bucket denies charges none, so the
// user's other requests have the room they should.
func TestAtomicDenialChargesNothing(t *testing.T) {
	var now time.Duration
	store := NewMemoryWithClock(func() time.Duration { return now })
	for i := int64(1); i <= 6; i++ {
		want := [3]seed001Row{
			{0, 16, 16 - i, -1, 2 * i}, {0, 6, 6 - i, -1, 3 * i / 2}, {0, 6, 6 - i, -1, 2 * i},
		}
		if got := takeSeed001(t, store, AccountingAtomic); got != want {
			t.Fatalf("request %d: got %v, want %v", i, got, want)
		}
	}
	for i := range 72 {
		now += time.Millisecond
		want := [3]seed001Row{{0, 16, 10, -1, 11}, {1, 6, 0, 1, 8}, {1, 6, 0, 1, 11}}
		if got := takeSeed001(t, store, AccountingAtomic); got != want {
			t.Fatalf("denied request %d: got %v, want %v", i, got, want)
		}
	}

	// The position of the denying bucket in the request does not matter.
	buckets := seed001Buckets()
	slices.Reverse(buckets)
	for range 2 {
		d, err := store.Take(context.Background(), Request{Buckets: buckets}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !d[0].Denied || d[1].Denied || d[1].Remaining != 10 {
			t.Fatalf("in reverse order: got %+v, want the first denied, 10 remaining of the second", d)
		}
	}
}
