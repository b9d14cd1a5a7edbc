package limiter

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// warmer is a limit that warms up as Guava describes it: it stores permits, which
// grow with idle time, and waits for the area under the line of their prices. It
// knows nothing of clear times and slack.
type warmer struct {
	interval, most, threshold, slope float64
	each                             float64 // the idle time for a permit, in µs

	stored float64
	free   int64 // the next free moment, in µs
}

// newWarmer returns the cold description of l.
func newWarmer(l Limit) *warmer {
	factor := float64(l.ColdFactor) / 1000
	w := &warmer{interval: float64(l.DripInterval.Microseconds()) / float64(l.DripSize)}
	warmUp, cold := float64(l.Phase.Microseconds()), factor*w.interval
	w.threshold = 0.5 * warmUp / w.interval
	w.most = w.threshold + 2*warmUp/(w.interval+cold)
	w.slope = (cold - w.interval) / (w.most - w.threshold)
	w.each = warmUp / w.most
	w.stored, w.free = w.most, math.MinInt64
	return w
}

// price returns what the permit at the given place in the store takes, in µs.
func (w *warmer) price(place float64) float64 {
	return w.interval + max(place-w.threshold, 0)*w.slope
}

// take decides a request at the time now, in µs.
func (w *warmer) take(l Limit, now, cost int64) Decision {
	d := Decision{Size: l.Size, Never: cost > l.Size}
	if w.free < now && w.stored < w.most {
		w.stored = min(w.most, w.stored+float64(now-w.free)/w.each)
	}
	if w.free = max(w.free, now); w.free > now || d.Never {
		d.Denied, d.Clear = true, w.clear(now)
		if w.free == now && w.stored < w.most {
			d.Remaining = 1
		} else if w.free == now {
			d.Remaining, d.Clear = 1, 0
		}
		if !d.Never {
			d.RetryAfter = time.Duration(w.free-now) * time.Microsecond
		}
		return d
	}
	taken := min(float64(cost), w.stored)
	steep := min(taken, max(w.stored-w.threshold, 0))
	wait := steep * (w.price(w.stored) + w.price(w.stored-steep)) / 2
	wait += (float64(cost) - steep) * w.interval
	w.stored -= taken
	w.free += int64(math.Ceil(wait))
	d.Clear = w.clear(now)
	return d
}

// clear returns the time until all permits are stored.
func (w *warmer) clear(now int64) time.Duration {
	return time.Duration(w.free-now+int64(math.Round((w.most-w.stored)*w.each))) * time.Microsecond
}

// near reports whether two decisions differ by no more than rounding makes them: the
// store is kept in whole microseconds.
func near(a, b Decision, within time.Duration) bool {
	apart := max((a.Clear - b.Clear).Abs(), (a.RetryAfter - b.RetryAfter).Abs())
	a.Clear, a.RetryAfter = b.Clear, b.RetryAfter
	return a == b && apart <= within
}

// within returns how exact the description's waits are: to the microsecond and, if
// hardly any of the stored permits take long, only to so many digits.
func within(wait time.Duration) time.Duration { return max(time.Microsecond, wait>>32) }

// drawWarm draws a limit that warms up, of any magnitude.
func drawWarm(t *rapid.T) Limit {
	d := rapid.SampledFrom([]time.Duration{
		time.Microsecond, 7 * time.Microsecond, 999_983 * time.Microsecond, time.Second, time.Minute, time.Hour,
		366 * 24 * time.Hour, 35 * 365 * 24 * time.Hour,
	}).Draw(t, "duration")
	n := rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, 1_000_000), rapid.Just(d.Microseconds())).Draw(t, "units")
	warmUp := rapid.OneOf(
		rapid.SampledFrom([]time.Duration{
			time.Microsecond, 3 * time.Microsecond, time.Millisecond, time.Second, 10 * time.Minute, 24 * time.Hour, 30 * 24 * time.Hour,
		}),
		rapid.Custom(func(t *rapid.T) time.Duration {
			return time.Duration(rapid.Int64Range(1, 1_000_000_000).Draw(t, "µs")) * time.Microsecond
		})).Draw(t, "warm-up")
	factor := rapid.OneOf(
		rapid.SampledFrom([]float64{1, 1.001, 2, 3, 3, 3, 10, 1e6}), rapid.Float64Range(1, 100)).Draw(t, "cold factor")
	return WarmingUp(min(n, d.Microseconds()), d, warmUp, factor)
}

// drawWarmCost draws a cost.
func drawWarmCost(t *rapid.T, l Limit) int64 {
	return max(rapid.SampledFrom([]int64{1, 1, 1, 1, 2, 3, l.Size/3 + 1, l.Size, l.Size + 1}).Draw(t, "cost"), 1)
}

// drawWarmGap draws the time to the next request, in µs.
func drawWarmGap(t *rapid.T, l Limit, last Decision, wait time.Duration) int64 {
	off := rapid.Int64Range(-1, 1)
	gap := int64(0)
	switch rapid.IntRange(0, 7).Draw(t, "gap") {
	case 1, 2, 3:
		gap = wait.Microseconds()
	case 4:
		gap = wait.Microseconds() + off.Draw(t, "off by")
	case 5:
		gap = last.Clear.Microseconds() + off.Draw(t, "off by")
	case 6:
		gap = wait.Microseconds() + rapid.Int64Range(0, l.warmUp()).Draw(t, "idle")
	case 7:
		gap = rapid.Int64Range(0, 2*l.rate()).Draw(t, "µs")
	}
	return max(gap, 0) % (5 * 365 * 24 * 3600 * 1e6)
}

// TestWarmUpFollowsDescription guards limits that warm up: every number in every
// decision is what storing permits gives, but for the microsecond to which they are
// rounded. From there on the description continues with the stored permits as they
// were rounded.
func TestWarmUpFollowsDescription(t *testing.T) {
	seen := struct{ admitted, denied, cold, warm int }{}
	checkTraces(t, 110, func(t *rapid.T) {
		l := drawWarm(t)
		if l.Validate() != nil {
			t.Skip()
		}
		s, m := newSubject(1_790_000_000_123_456), newWarmer(l)
		last, wait := Decision{}, time.Duration(0)
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			s.now += drawWarmGap(t, l, last, wait)
			cost := drawWarmCost(t, l)
			want := m.take(l, s.now, cost)
			got := s.take(t, l, cost)
			wait = (&Bucket{Limit: l, Cost: cost}).Wait(&got)
			if got.Never {
				wait = time.Duration(max(s.state.free()-s.now, 0)) * time.Microsecond
			}
			if free := time.Duration(m.free-s.now) * time.Microsecond; (wait - free).Abs() > within(free) {
				t.Fatalf("%+v, request %d, cost %d, at %d µs: would wait %v, want %v", l, i, cost, s.now, wait, free)
			}
			if last = plainDecision(got); !near(last, want, 2*within(wait)) {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", l, i, cost, s.now, last, want)
			}
			switch {
			case last.Denied:
				seen.denied++
			case last.Clear.Microseconds() > l.warmUp():
				seen.warm++
			case last.Clear.Microseconds() < 2*l.rate():
				seen.cold++
			default:
				seen.admitted++
			}
			if m.free = s.state.free(); s.state.clear <= s.now {
				m.free = s.now
			}
			m.stored = float64(l.warmUp()-max(s.state.slack, 0)) / m.each
			if s.state.clear <= s.now {
				m.stored = m.most
			}
		}
	})
	if min(seen.admitted, seen.denied, seen.cold, seen.warm) < 3000 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestWarmUpPublishedFigures guards the sequence of Guava's documentation and tests:
// at 2 a second with a warm-up of 4 s, a cold limit makes requests wait 1.375 s,
// 1.125 s, 0.875 s and 0.625 s, and then 0.5 s. It warms up in 4 s, as fast for
// requests of several units, and cools down in 4 s, in part if it is idle for less.
func TestWarmUpPublishedFigures(t *testing.T) {
	const ms = 1000
	for _, tc := range []struct {
		name  string
		l     Limit
		steps []int64 // the cost, or idle milliseconds beyond the wait if negative
		waits []int64 // after each cost, in ms
	}{
		{"one by one", WarmingUp(2, time.Second, 4*time.Second, 3), []int64{1, 1, 1, 1, 1, 1}, []int64{1375, 1125, 875, 625, 500, 500}},
		{"idle", WarmingUp(2, time.Second, 4*time.Second, 3),
			[]int64{1, 1, 1, 1, 1, -500, 1, 1, -4000, 1, 1, 1}, []int64{1375, 1125, 875, 625, 500, 500, 500, 1375, 1125, 875}},
		{"half cold", WarmingUp(2, time.Second, 4*time.Second, 3),
			[]int64{1, 1, 1, 1, 1, 1, 1, 1, -3000, 1, 1, 1}, []int64{1375, 1125, 875, 625, 500, 500, 500, 500, 875, 625, 500}},
		{"several units", WarmingUp(10, 5*time.Second, 4*time.Second, 3), []int64{4, 4, 5}, []int64{4000, 2000, 2500}},
		{"all at once", WarmingUp(10, 5*time.Second, 4*time.Second, 3), []int64{10, 1}, []int64{7000, 500}},
		// Intervals of 0.2 s, cold ones of 2 s: half of 5 s of them is 12.5 permits, and 2·5 s/2.2 s
		// are above. A permit of those lowers the price by 0.396 s.
		{"cold factor 10", WarmingUp(5, time.Second, 5*time.Second, 10), []int64{1, 1, 1, 1, 1, 1}, []int64{1802, 1406, 1010, 614, 258, 200}},
		{"no warm-up", WarmingUp(5, time.Second, 5*time.Second, 1), []int64{1, 2, 1}, []int64{200, 400, 200}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, waits := newSubject(1e15), []int64(nil)
			for _, cost := range tc.steps {
				if cost < 0 {
					s.now -= cost * ms
					continue
				}
				d := s.take(t, tc.l, cost)
				b := Bucket{Limit: tc.l, Cost: 1}
				wait := b.Wait(&d)
				s.now += wait.Microseconds() - 1
				if d := s.take(t, tc.l, 1); !d.Denied || d.RetryAfter != time.Microsecond {
					t.Errorf("1 µs too early: %+v", d)
				}
				s.now++
				waits = append(waits, wait.Milliseconds())
			}
			if !slices.Equal(waits, tc.waits) {
				t.Errorf("waits of %v ms, want %v", waits, tc.waits)
			}
		})
	}
}

// TestRedisWarmUp guards that Redis decides as the same arithmetic in Go does, to the
// microsecond, with numbers of any magnitude.
func TestRedisWarmUp(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	seen := struct{ admitted, denied, long int }{}
	trace := 0
	checkTraces(t, 10, func(t *rapid.T) {
		l, last, wait := drawWarm(t), Decision{}, time.Duration(0)
		if l.Validate() != nil {
			t.Skip()
		}
		trace++
		v.at(t, v.start)
		p := plain{}
		b := Bucket{Name: "w", Key: fmt.Sprint(trace), Limit: l}
		for i := range rapid.IntRange(1, 30).Draw(t, "requests") {
			v.at(t, v.now+drawWarmGap(t, l, last, wait))
			b.Cost = drawWarmCost(t, l)
			want := p.take(Request{Buckets: []Bucket{b}}, v.now)[0]
			if last = decide(t, v, AccountingAtomic, b)[0]; last != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", l, i, b.Cost, v.now, last, want)
			}
			if got, want := v.stored(t, []Bucket{b})[0], p[identity(b)].value(); got != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs: stored %q, want %q", l, i, b.Cost, v.now, got, want)
			}
			wait = b.Wait(&last)
			switch {
			case last.Denied:
				seen.denied++
			case last.Clear > 24*time.Hour:
				seen.long++
			default:
				seen.admitted++
			}
		}
	})
	if min(seen.admitted, seen.denied, seen.long) < 500 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}
