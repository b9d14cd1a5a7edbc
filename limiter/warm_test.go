package limiter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// warmingUp returns a Limit that warms up with some cold factor.
func warmingUp(n int64, d, warmUp time.Duration, factor float64) Limit {
	return Limit(bucket.WarmingUp(n, d, warmUp, factor))
}

// warmer is a limit that warms up as Guava describes it: it stores permits, which
// grow with idle time, and waits for the area under the line of their prices. It
// knows nothing of clear times and slack, but that idle times are whole microseconds.
type warmer struct {
	interval, most, threshold, slope float64
	each                             float64 // the idle time for a permit, in whole µs, at least one
	full                             float64 // the idle time for all permits, in whole µs, at least one

	waiting int64 // how many units at the full rate requests may wait for
	reach   int64 // how long that is, in µs

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
	w.each = max(math.Floor(warmUp/w.most), 1)
	w.full = min(max(math.Floor(w.most*w.each), 1), warmUp)
	w.stored, w.free = w.most, math.MinInt64
	w.waiting = max(l.Size-l.DripSize, 0)
	w.reach = int64(float64(w.waiting) * w.interval)
	return w
}

// price returns what the permit at the given place in the store takes, in µs.
func (w *warmer) price(location float64) float64 {
	return w.interval + max(location-w.threshold, 0)*w.slope
}

// take decides a request at the time now, in µs.
func (w *warmer) take(l Limit, now, cost int64) Decision {
	d := Decision{Size: l.Size, Never: cost > l.Size}
	if w.free < now && w.stored < w.most {
		w.stored = min(w.most, w.stored+float64(now-w.free)/w.each)
	}
	if w.free = max(w.free, now); w.free > now+w.reach || d.Never {
		d.Denied, d.Clear, d.Remaining = true, w.clear(now), w.remaining(now)
		if w.free == now && w.stored == w.most {
			d.Clear = 0
		}
		if !d.Never {
			d.RetryAfter = time.Duration(w.free-w.reach-now) * time.Microsecond
		}
		return d
	}
	taken := min(float64(cost), w.stored)
	steep := min(taken, max(w.stored-w.threshold, 0))
	wait := steep * (w.price(w.stored) + w.price(w.stored-steep)) / 2
	wait += (float64(cost) - steep) * w.interval
	w.stored = max(w.stored-taken, w.most-w.full/w.each)
	w.free += int64(math.Ceil(wait))
	d.Clear, d.Remaining = w.clear(now), w.remaining(now)
	return d
}

// remaining returns how many requests there is room for at the full rate.
func (w *warmer) remaining(now int64) int64 {
	if w.free > now+w.reach {
		return 0
	}
	return 1 + max(w.waiting-int64(math.Ceil(float64(max(w.free-now, 0))/w.interval)), 0)
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

// exact returns how exact the description's waits are: to the microsecond and, if
// hardly any of the stored permits take very long, to as many digits as are left of
// the place of a permit.
func (w *warmer) exact() time.Duration {
	return time.Duration(1+w.most*w.price(w.most)*0x1p-50) * time.Microsecond
}

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
	return warmingUp(min(n, d.Microseconds()), d, warmUp, factor)
}

// drawWaiting draws how much larger l is for requests that wait.
func drawWaiting(t *rapid.T, l Limit) Limit {
	without := l
	l.Size += rapid.SampledFrom([]int64{0, 0, 0, 1, 2, 5, 5, 100, l.Size}).Draw(t, "waiting")
	if l.Validate() != nil {
		return without
	}
	return l
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
		gap = wait.Microseconds() + rapid.Int64Range(0, l.of().WarmUp()).Draw(t, "idle")
	case 7:
		gap = rapid.Int64Range(0, 2*l.of().Rate()).Draw(t, "µs")
	}
	return max(gap, 0) % (5 * 365 * 24 * 3600 * 1e6)
}

// TestWarmUpFollowsDescription guards limits that warm up: every number in every
// decision is what storing permits gives, except for the microsecond to which they are
// rounded. From there on the description continues with the stored permits as they
// were rounded. Requests that wait do so until the moment that was free before them, to the
// microsecond; or longer, if that can't be known and they should not.
func TestWarmUpFollowsDescription(t *testing.T) {
	t.Parallel()
	seen := struct{ admitted, denied, cold, warm, waited, unknown int }{}
	checkTraces(t, 110, func(t *rapid.T) {
		l := drawWarm(t)
		if l.Validate() != nil {
			t.Skip()
		}
		l = drawWaiting(t, l)
		s, m := newSubject(1_790_000_000_123_456), newWarmer(l)
		last, wait := Decision{}, time.Duration(0)
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			s.now += drawWarmGap(t, l, last, wait)
			cost := drawWarmCost(t, l)
			slot := time.Duration(max(m.free, s.now)-s.now) * time.Microsecond
			want := m.take(l, s.now, cost)
			got := s.take(t, l, cost)
			b := Bucket{Limit: l, Cost: cost}
			wait = b.RoomIn(&got)
			if got.Never {
				wait = time.Duration(max(s.level.Free()-m.reach-s.now, 0)) * time.Microsecond
			}
			if free := time.Duration(max(m.free-m.reach-s.now, 0)) * time.Microsecond; (wait - free).Abs() > m.exact() {
				t.Fatalf("%+v, request %d, cost %d, at %d µs: would be denied for %v, want %v", l, i, cost, s.now, wait, free)
			}
			known := l.of().Delayed(365*24*time.Hour, cost) > 0
			switch delay := b.Delay(&got, m.waiting); {
			case got.Denied || m.waiting == 0:
				if delay != 0 {
					t.Fatalf("%+v, request %d, cost %d, at %d µs: %+v, and waits %v", l, i, cost, s.now, got, delay)
				}
			case delay < slot, known && delay > slot:
				t.Fatalf("%+v, request %d, cost %d, at %d µs: waits %v, want %v", l, i, cost, s.now, delay, slot)
			case known && slot > 0:
				seen.waited++
			case !known:
				seen.unknown++
			}
			if m.free = s.level.Free(); s.level.Clear <= s.now {
				m.free = s.now
			}
			want.Remaining = m.remaining(s.now)
			if last = plainDecision(got); !near(last, want, 2*m.exact()) {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", l, i, cost, s.now, last, want)
			}
			switch {
			case last.Denied:
				seen.denied++
			case last.Clear.Microseconds() > l.of().WarmUp():
				seen.warm++
			case last.Clear.Microseconds() < 2*l.of().Rate():
				seen.cold++
			default:
				seen.admitted++
			}
			m.stored = m.most - float64(max(s.level.Rest, 0))/m.each
			if s.level.Clear <= s.now {
				m.stored = m.most
			}
		}
	})
	if min(seen.admitted, seen.denied, seen.cold, seen.warm, seen.waited, seen.unknown) < 3000 {
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
		{"one by one", warmingUp(2, time.Second, 4*time.Second, 3), []int64{1, 1, 1, 1, 1, 1}, []int64{1375, 1125, 875, 625, 500, 500}},
		{"idle", warmingUp(2, time.Second, 4*time.Second, 3),
			[]int64{1, 1, 1, 1, 1, -500, 1, 1, -4000, 1, 1, 1}, []int64{1375, 1125, 875, 625, 500, 500, 500, 1375, 1125, 875}},
		{"half cold", warmingUp(2, time.Second, 4*time.Second, 3),
			[]int64{1, 1, 1, 1, 1, 1, 1, 1, -3000, 1, 1, 1}, []int64{1375, 1125, 875, 625, 500, 500, 500, 500, 875, 625, 500}},
		{"several units", warmingUp(10, 5*time.Second, 4*time.Second, 3), []int64{4, 4, 5}, []int64{4000, 2000, 2500}},
		{"all at once", warmingUp(10, 5*time.Second, 4*time.Second, 3), []int64{10, 1}, []int64{7000, 500}},
		// Intervals of 0.2 s, cold ones of 2 s: half of 5 s of them is 12.5 permits, and 2·5 s/2.2 s
		// are above. A permit of those lowers the price by 0.396 s.
		{"cold factor 10", warmingUp(5, time.Second, 5*time.Second, 10), []int64{1, 1, 1, 1, 1, 1}, []int64{1802, 1406, 1010, 614, 258, 200}},
		{"no warm-up", warmingUp(5, time.Second, 5*time.Second, 1), []int64{1, 2, 1}, []int64{200, 400, 200}},
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
				wait := b.RoomIn(&d)
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

// TestWarmUpWaitsAreNotTooShort guards the waits against the description in exact
// fractions, which knows nothing of how the store is rounded: none is shorter, and
// from cold on, while there are always requests, all are exact except for the microsecond
// to which they are rounded up. Below 1.5 µs a unit, idle time may count for more.
func TestWarmUpWaitsAreNotTooShort(t *testing.T) {
	t.Parallel()
	seen := struct{ exact, idle, partly int }{}
	check := func(t rapid.TB, l Limit, costs, idles []int64) (waits []int64) {
		t.Helper()
		m, s := newExactWarmer(l), newSubject(1_790_000_000_123_456)
		wasIdle := l.of().WarmUp() < 6 // a microsecond is much of its store
		for i, cost := range costs {
			if s.now > 1_790_000_000_123_456+bucket.Horizon {
				break // no clock goes that far
			}
			s.take(t, l, cost)
			want, got := m.take(cost), s.level.Free()-s.now
			waits = append(waits, got)
			least, most := m.rounded(want)
			switch {
			case got < least || !wasIdle && got > most:
				t.Fatalf("%+v, request %d of costs %v with idle times %v: wait of %d µs, want %s", l, i, costs, idles, got, want.FloatString(6))
			case !wasIdle:
				seen.exact++
			default:
				seen.idle++
			}
			s.now += got + idles[i]
			m.idle(idles[i]) // it begins when the wait is over that responses have
			wasIdle = wasIdle || idles[i] > 0
			if used, _ := m.used.Float64(); wasIdle && used > 0 {
				seen.partly++
			}
		}
		return waits
	}
	for _, tc := range []struct {
		l    Limit
		want []int64
	}{
		{warmingUp(10, time.Second, 4*time.Second, 10), []int64{938_125, 814_375, 690_625, 566_875, 443_125, 319_375, 195_625, 104_603, 100_000}},
		{warmingUp(2, time.Second, 4*time.Second, 3), []int64{1_375_000, 1_125_000, 875_000, 625_000, 500_000}},
	} {
		n := len(tc.want)
		if got := check(t, tc.l, slices.Repeat([]int64{1}, n), make([]int64, n)); !slices.Equal(got, tc.want) {
			t.Errorf("%+v: waits of %v µs, want %v", tc.l, got, tc.want)
		}
	}
	checkTraces(t, 60, func(t *rapid.T) {
		l := drawWarm(t)
		if l.Validate() != nil || l.of().Interval() < 1.5 {
			t.Skip()
		}
		n := rapid.IntRange(1, 30).Draw(t, "requests")
		costs, idles := make([]int64, n), make([]int64, n)
		for i := range n {
			costs[i] = min(drawWarmCost(t, l), l.Size)
			if rapid.IntRange(0, 5).Draw(t, "idle") == 0 {
				idles[i] = rapid.Int64Range(0, l.of().WarmUp()).Draw(t, "µs")
			}
		}
		check(t, l, costs, idles)
	})
	if min(seen.exact, seen.idle, seen.partly) < 3000 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// exactWarmer is a warmer in fractions.
type exactWarmer struct {
	interval, above, slope, most, each big.Rat
	used                               big.Rat // permits that were taken and not stored again
}

// newExactWarmer returns the cold description of l.
func newExactWarmer(l Limit) *exactWarmer {
	m, warmUp := new(exactWarmer), big.NewRat(l.of().WarmUp(), 1)
	m.interval.SetFrac64(l.of().Rate(), l.DripSize)
	var cold, threshold big.Rat
	cold.Mul(&m.interval, big.NewRat(int64(l.ColdFactor), 1000))
	threshold.Quo(warmUp, &m.interval).Mul(&threshold, big.NewRat(1, 2))
	m.above.Add(&m.interval, &cold).Inv(&m.above).Mul(&m.above, warmUp).Mul(&m.above, big.NewRat(2, 1))
	m.slope.Sub(&cold, &m.interval).Quo(&m.slope, &m.above)
	m.most.Add(&threshold, &m.above)
	m.each.Quo(warmUp, &m.most)
	return m
}

// take takes permits and returns how many µs that takes.
func (m *exactWarmer) take(cost int64) *big.Rat {
	var wait, high, steep, price big.Rat
	units := big.NewRat(cost, 1)
	wait.Mul(units, &m.interval)
	if high.Sub(&m.above, &m.used); high.Sign() > 0 {
		if steep.Set(units); steep.Cmp(&high) > 0 {
			steep.Set(&high)
		}
		price.Mul(&steep, big.NewRat(-1, 2)).Add(&price, &high).Mul(&price, &m.slope).Mul(&price, &steep)
		wait.Add(&wait, &price)
	}
	if m.used.Add(&m.used, units); m.used.Cmp(&m.most) > 0 {
		m.used.Set(&m.most)
	}
	return &wait
}

// idle stores the permits of an idle time.
func (m *exactWarmer) idle(µs int64) {
	stored := new(big.Rat).Quo(big.NewRat(µs, 1), &m.each)
	if m.used.Sub(&m.used, stored); m.used.Sign() < 0 {
		m.used.SetInt64(0)
	}
}

// rounded returns a wait rounded up to µs, the least and the most that it may be as
// floating-point numbers of that size, and of that of the store, are not exact.
func (m *exactWarmer) rounded(wait *big.Rat) (least, most int64) {
	noise := new(big.Rat).Mul(&m.slope, &m.most)
	noise.Mul(noise, &m.most).Add(noise, wait).Mul(noise, big.NewRat(1, 1<<48))
	up := func(r *big.Rat) int64 {
		n := new(big.Int).Add(r.Num(), r.Denom())
		return n.Sub(n, big.NewInt(1)).Div(n, r.Denom()).Int64()
	}
	return up(new(big.Rat).Sub(wait, noise)), up(new(big.Rat).Add(wait, noise))
}

// TestRedisWarmUp guards that Redis decides as the same arithmetic in Go does, to the
// microsecond, with numbers of any magnitude.
func TestRedisWarmUp(t *testing.T) {
	t.Parallel()
	seen := struct{ admitted, denied, long int }{}
	checkRedisTraces(t, 10, func(t *rapid.T) described {
		l := drawWarm(t)
		if l.Validate() != nil {
			t.Skip()
		}
		l = drawWaiting(t, l)
		p, b := plain{}, Bucket{Name: "b", Limit: l, Cost: 1}
		return described{
			limit: l,
			gap:   func(last Decision) int64 { return drawWarmGap(t, l, last, b.RoomIn(&last)) },
			cost:  func(Decision) int64 { return drawWarmCost(t, l) },
			take: func(now, cost int64) Decision {
				b.Cost = cost
				d := p.take(Request{Buckets: []Bucket{b}}, now)[0]
				switch {
				case d.Denied:
					seen.denied++
				case d.Clear > 24*time.Hour:
					seen.long++
				default:
					seen.admitted++
				}
				return d
			},
			value: func() string { return p[identity(b)].value() },
		}
	})
	if min(seen.admitted, seen.denied, seen.long) < 500 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// checkWarmUp checks that no more units are admitted than a limit that warms up
// allows: in any time at most its full rate, after one request, and since it was cold
// no more than the area under the line of prices, which those pass fastest that
// never let it idle. If a key was lost, it was not cold then, as the server was sent
// the level that it had.
func checkWarmUp(t rapid.TB, l Limit, admitted []charge, lost bool) {
	t.Helper()
	admitted = slices.Clone(admitted)
	slices.SortStableFunc(admitted, func(a, b charge) int { return cmp.Compare(a.at, b.at) })
	w, free, earliest := newWarmer(l), int64(math.MinInt64), 0.0
	for i, a := range admitted {
		if a.at < free {
			t.Errorf("%+v: admitted at %d, %d µs too early at the full rate", l, a.at, free-a.at)
			return
		}
		if early := earliest - float64(a.at-admitted[0].at); !lost && early > 0.001 {
			t.Errorf("%+v: request %d admitted %f µs too early after it was cold", l, i, early)
			return
		}
		free = a.at + int64(math.Ceil(float64(a.units)*w.interval))
		steep := min(float64(a.units), max(w.stored-w.threshold, 0))
		earliest += steep*(w.price(w.stored)+w.price(w.stored-steep))/2 + (float64(a.units)-steep)*w.interval
		w.stored = max(w.stored-float64(a.units), 0)
	}
}

// TestWarmUpWaits guards requests that wait, in both stores: they are admitted up to the
// longest delay before the next free moment and wait until then, one after the other, as
// slowly as if they had come then. What is denied learns when it may be admitted to wait.
func TestWarmUpWaits(t *testing.T) {
	l := warmingUp(2, time.Second, 4*time.Second, 3)
	more := l.of().Delayed(4*time.Second, 1)
	l.Size += more
	now := time.Duration(1e15)
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for _, tc := range []struct {
		name    string
		store   Store
		advance func(time.Duration)
	}{
		{"Memory", NewMemoryWithClock(func() time.Duration { return now }), func(d time.Duration) { now += d }},
		{"Redis", v, func(d time.Duration) { v.advance(t, d) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := Bucket{Name: "w", Key: "k", Limit: l, Cost: 1}
			check := func(remaining int64, wait time.Duration) {
				t.Helper()
				d := decide(t, tc.store, AccountingAtomic, b)[0]
				if got := b.Delay(&d, more); d.Denied || got != wait || d.Remaining != remaining {
					t.Errorf("waits %v, want %v, %d remain, want %d: %+v", got, wait, d.Remaining, remaining, d)
				}
			}
			const ms = time.Millisecond
			check(6, 0)
			check(4, 1375*ms)
			check(2, 2500*ms)
			check(1, 3375*ms)
			check(0, 4000*ms)
			if d := decide(t, tc.store, AccountingAtomic, b)[0]; !d.Denied || d.RetryAfter != 500*ms || d.Remaining != 0 {
				t.Errorf("beyond the longest delay: %+v", d)
			}
			tc.advance(500*ms - time.Microsecond)
			if d := decide(t, tc.store, AccountingAtomic, b)[0]; !d.Denied || d.RetryAfter != time.Microsecond {
				t.Errorf("1 µs too early: %+v", d)
			}
			tc.advance(time.Microsecond)
			check(0, 4000*ms)
			tc.advance(4500*ms + 4*time.Second)
			check(6, 0)
			check(4, 1375*ms)
		})
	}
}

// TestWarmUpWaitersRunEvenly guards, against what a limit that warms up allows, when
// requests run that wait for it: first come, first served, and none later than the longest
// delay.
func TestWarmUpWaitersRunEvenly(t *testing.T) {
	waited, denied := 0, 0
	checkTraces(t, 20, func(t *rapid.T) {
		d := rapid.SampledFrom([]time.Duration{7 * time.Millisecond, time.Second, 999_983 * time.Microsecond, time.Hour}).Draw(t, "duration")
		n := rapid.Int64Range(1, 30).Draw(t, "units")
		cost := rapid.Int64Range(1, min(n, 5)).Draw(t, "cost")
		warmUp := time.Duration(rapid.Int64Range(2*cost+1, 50).Draw(t, "warm-up")) * d.Truncate(time.Duration(n)*time.Microsecond) / time.Duration(n)
		l := warmingUp(n, d, warmUp, rapid.SampledFrom([]float64{1, 1.5, 3, 3, 10, 1000}).Draw(t, "cold factor"))
		longest := time.Duration(rapid.Int64Range(l.of().DripTime(1).Microseconds(), 20*l.of().Rate()).Draw(t, "longest delay")) * time.Microsecond
		more := l.of().Delayed(longest, cost)
		if more == 0 {
			t.Fatalf("%+v, cost %d: none may wait", l, cost)
		}
		l.Size += more
		s, runs := newSubject(1_790_000_000_123_456), []charge(nil)
		for range rapid.IntRange(1, 40).Draw(t, "requests") {
			s.now += rapid.Int64Range(0, 2*l.of().Rate()/l.DripSize).Draw(t, "gap")
			b := Bucket{Limit: l, Cost: cost}
			d := s.take(t, l, cost)
			if d.Denied {
				denied++
				continue
			}
			wait := b.Delay(&d, more)
			if wait > longest {
				t.Fatalf("%+v: waits %v, want at most %v", l, wait, longest)
			}
			if wait > 0 {
				waited++
			}
			run := charge{at: s.now + wait.Microseconds(), units: cost}
			if n := len(runs); n > 0 && run.at < runs[n-1].at {
				t.Fatalf("%+v: overtakes", l)
			}
			runs = append(runs, run)
		}
		checkWarmUp(t, l, runs, false)
	})
	if min(waited, denied) < 3000 {
		t.Errorf("only %d requests waited, and %d were denied", waited, denied)
	}
}

// TestDelayed guards which requests may wait: those of leaky buckets and of limits that
// warm up, for whole units, unless what they wait for would be unknown, or more than the size
// might pass at once.
func TestDelayed(t *testing.T) {
	for _, tc := range []struct {
		l    Limit
		d    time.Duration
		cost int64
		want int64
	}{
		{Limit{Size: 5, DripInterval: time.Second}, 2500 * time.Millisecond, 1, 2},
		{Limit{Size: 5, DripInterval: time.Second, DripSize: 3}, 2500 * time.Millisecond, 3, 6},
		{Limit{Size: 5, DripInterval: time.Second, DripSize: 3}, 2500 * time.Millisecond, 4, 0}, // six might pass at once
		{Limit{Size: 5, DripInterval: time.Second, DripSize: 6}, 2500 * time.Millisecond, 1, 0},
		{Limit{Size: 5, DripInterval: time.Second}, 2500 * time.Millisecond, 5, 2},
		{Limit{Size: 5, DripInterval: time.Second}, 2500 * time.Millisecond, 6, 0},
		{Limit{Size: 5, DripInterval: time.Second}, 999 * time.Millisecond, 1, 0},
		{Limit{Size: MaxUnits, DripInterval: time.Microsecond, DripSize: MaxUnits}, time.Hour, 1, MaxUnits},
		{FixedWindow(5, time.Second), time.Hour, 1, 0},
		{SlidingLog(5, time.Second), time.Hour, 1, 0},
		{warmingUp(2, time.Second, 4*time.Second, 3), 1600 * time.Millisecond, 0, 3},
		{warmingUp(2, time.Second, 4*time.Second, 3), 499 * time.Millisecond, 1, 0},
		{warmingUp(2, time.Second, 4*time.Second, 3), time.Second, 3, 0},       // more than the size
		{warmingUp(10, 5*time.Second, 4*time.Second, 3), time.Second, 4, 2},    // just warm in the end
		{warmingUp(10, 5*time.Second, 4*time.Second, 3), time.Second, 5, 0},    // not
		{warmingUp(10, 5*time.Second, time.Microsecond, 1), time.Second, 9, 2}, // always warm
		{warmingUp(1_000_000, time.Second, time.Hour, 3), 1<<50 - 1, 1, (1<<50 - 1) / 1000},
	} {
		if got := tc.l.of().Delayed(tc.d, tc.cost); got != tc.want {
			t.Errorf("%+v, %v, cost %d: %d, want %d", tc.l, tc.d, tc.cost, got, tc.want)
		}
	}
	windowed := Bucket{Limit: FixedWindow(5, time.Second), Cost: 1}
	if d := windowed.Delay(&Decision{Clear: time.Second}, 1); d != 0 {
		t.Errorf("a window's request waits %v", d)
	}
}

// TestHeldUnitsDoNotWait guards that a bucket whose requests hold units and may wait is
// refused, since they would run in an unknown order.
func TestHeldUnitsDoNotWait(t *testing.T) {
	b := Bucket{Name: "w", Key: "k", Limit: waiting(warmingUp(2, time.Second, 4*time.Second, 3), 1), Cost: 1, Hold: true}
	if _, err := NewMemory().Take(t.Context(), Request{Buckets: []Bucket{b}, Held: new(Held)}, nil); !errors.Is(err, errHeldWaits) {
		t.Errorf("error %v, want %v", err, errHeldWaits)
	}
}

// TestWarmUpBound guards the bounds of limits that warm up under real concurrency:
// many goroutines ask as fast as they can, in both stores, while the clock runs.
func TestWarmUpBound(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l := warmingUp(100, time.Second, time.Second, 3)
	for _, tc := range []struct {
		name  string
		store Store
		now   func() int64
	}{
		{"Memory", NewMemory(), func() int64 { return time.Now().UnixMicro() }},
		{"Redis", newTestRedis(t, server, nil), func() int64 { return time.Now().UnixMicro() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := Bucket{Name: "w", Key: "k", Limit: l, Cost: 1}
			var admitted, denied atomic.Int64
			begin := tc.now()
			redistest.Together(t, 16, func(int) {
				for tc.now()-begin < 1_500_000 {
					if decide(t, tc.store, AccountingAtomic, b)[0].Denied {
						denied.Add(1)
						time.Sleep(100 * time.Microsecond)
					} else {
						admitted.Add(1)
					}
				}
			})
			took := float64(tc.now() - begin)
			// Half a second's units take a second at first.
			most := int64(2 + (took-1e6)/1e4 + 50)
			if n := admitted.Load(); n > most || n < 10 || denied.Load() == 0 {
				t.Errorf("%d admitted, %d denied within %.0f µs, want at most %d, and many", n, denied.Load(), took, most)
			}
		})
	}
}

// TestWarmUpClockSetBack guards that a server's clock that is set back neither
// frees a limit that warms up nor makes it wait longer than it had to, nor makes it
// cold or warm.
func TestWarmUpClockSetBack(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	l := warmingUp(4, time.Minute, 10*time.Minute, 3)
	for _, back := range []time.Duration{
		time.Microsecond, time.Second, 16 * time.Second, time.Minute, 5 * time.Minute, time.Hour, 365 * 24 * time.Hour,
	} {
		for _, cost := range []int64{1, 4} {
			v.flush(t)
			v.at(t, v.start+10*365*24*3600e6)
			b := Bucket{Name: "w", Key: "k", Limit: l, Cost: cost}
			first := decide(t, v, AccountingAtomic, b)[0]
			wait := b.RoomIn(&first)
			if first.Denied || wait < 42*time.Second {
				t.Fatalf("the first request: %+v, waits %v", first, wait)
			}
			v.at(t, v.now-back.Microseconds())
			set := v.now
			d := decide(t, v, AccountingAtomic, b)[0]
			if !d.Denied || d.RetryAfter != wait || d.Clear != first.Clear {
				t.Errorf("back by %v: %+v, want a wait of %v, and clear in %v", back, d, wait, first.Clear)
			}
			v.at(t, set+d.RetryAfter.Microseconds()-1)
			if d := decide(t, v, AccountingAtomic, b)[0]; !d.Denied || d.RetryAfter != time.Microsecond {
				t.Errorf("back by %v: 1 µs too early: %+v", back, d)
			}
			v.at(t, set+d.RetryAfter.Microseconds())
			if d := decide(t, v, AccountingAtomic, b)[0]; d.Denied {
				t.Errorf("back by %v: denied at the time local: %+v", back, d)
			}
		}
	}
	// A store that was set back after it was free is as warm as it was.
	v.flush(t)
	b := Bucket{Name: "w", Key: "k", Limit: l, Cost: 1}
	for range 3 {
		d := decide(t, v, AccountingAtomic, b)[0]
		v.advance(t, b.RoomIn(&d))
	}
	v.advance(t, -time.Hour)
	if level, err := v.Peek(t.Context(), b); err != nil || level.Units != 1 || level.Clear < 45*time.Second {
		t.Errorf("%+v, error %v, want a level as it was written", level, err)
	}
}

// TestWarmHigher guards the level that joins two reports: it is free no earlier than
// either and cold no earlier, whichever comes first, and a level joined with itself or
// with an earlier level of the same bucket stays as it is.
func TestWarmHigher(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l := drawWarm(t)
		if l.Validate() != nil {
			t.Skip()
		}
		draw := func(label string) bucket.Level {
			slack := rapid.Int64Range(0, int64(newWarmer(l).full)).Draw(t, label+" slack")
			return bucket.Level{Clear: slack + rapid.Int64Range(-slack, 2*l.of().Rate()).Draw(t, label+" free"), Rest: slack}
		}
		a, b := draw("a"), draw("b")
		sum := l.of().Join(a, b, 0, false)
		if other := l.of().Join(b, a, 0, false); other != sum || l.of().Join(sum, a, 0, false) != sum || l.of().Join(a, a, 0, false) != a {
			t.Fatalf("%+v and %+v: %+v, or %+v the other way", a, b, sum, other)
		}
		if sum.Free() != max(a.Free(), b.Free()) || sum.Clear != max(a.Clear, b.Clear) || sum.Rest < 0 || sum.Rest > l.of().WarmUp() {
			t.Fatalf("%+v and %+v: %+v", a, b, sum)
		}
		now := max(a.Free(), 0)
		if a = a.At(now); a.Clear == now {
			return
		}
		later := l.of().Add(a, rapid.Int64Range(1, l.Size).Draw(t, "cost"), bucket.Moment{Now: now})
		if got := l.of().Join(a, later, 0, false); got != later {
			t.Fatalf("%+v, and %+v after one more request: %+v", a, later, got)
		}
	})
}

// waiting returns l with room for that many units of requests that wait.
func waiting(l Limit, units int64) Limit {
	l.Size += units
	return l
}

// TestRedisJoinsWarmUps guards that the server joins a level that is reported to it with its
// own as this process does, except if both know the same requests: then it keeps its
// own, as the other is only late.
func TestRedisJoinsWarmUps(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen := map[string]int{}
	checkTraces(t, 20, func(t *rapid.T) {
		l := warmingUp(2, time.Second, rapid.SampledFrom([]time.Duration{7 * time.Microsecond, 4 * time.Second, time.Minute}).Draw(t, "warm-up"), 3)
		draw := func(label string) bucket.Level {
			slack := rapid.Int64Range(0, l.of().WarmUp()).Draw(t, label+" slack")
			return bucket.Level{Clear: slack + rapid.Int64Range(min(1-slack, 0), 3e6).Draw(t, label+" free"), Rest: slack}
		}
		stored, reported := draw("stored"), draw("reported")
		if rapid.Bool().Draw(t, "late") {
			reported = bucket.Level{Clear: stored.Clear + rapid.Int64Range(0, 300_000).Draw(t, "by"), Rest: stored.Rest}
		}
		if stored.Clear <= 0 || reported.Clear <= 0 {
			t.Skip()
		}
		b := Bucket{Name: "s", Key: "k", Limit: l, Cost: 3} // never admitted, so nothing is charged
		server := stored
		server.Clear += v.now
		redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), l.written(server, v.now).value(), 0))
		dirty := rapid.SampledFrom([]dirtiness{unsure, own}).Draw(t, "dirty")
		outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{bucket.Ahead(reported), 0, dirty}})
		if err != nil {
			t.Fatal(err)
		}
		want := l.of().Join(stored, reported, 0, false)
		if dirty == unsure && stored.Rest == reported.Rest && (reported.Clear-stored.Clear)*2 < 500_000 && (stored.Clear-reported.Clear)*2 < 500_000 {
			want = stored
			seen["late"]++
		} else {
			seen["joined"]++
		}
		if outcomes[0].After(0) != want {
			t.Fatalf("%+v, reported %+v, %v: %+v, want %+v", stored, reported, dirty, outcomes[0].Ahead, want)
		}
		if now, _ := parseWritten(v.stored(t, []Bucket{b})[0]); now.Clear-v.now != want.Clear || now.Rest != want.Rest {
			t.Fatalf("stored %+v, want %+v", now, want)
		}
	})
	if min(seen["late"], seen["joined"]) < 200 {
		t.Errorf("the test covers too little: %v", seen)
	}
}

// TestWarmUpWaitsWithUnits guards requests that wait next to units which are held for
// others, or in flight while the server has lost them: there is room if those leave some,
// as this process decides alike, and if they are held too each waits for those before it.
func TestWarmUpWaitsWithUnits(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "w", Key: "k", Limit: warmingUp(2, time.Second, 4*time.Second, 3), Cost: 1}
	more := b.Limit.of().Delayed(4*time.Second, 1)
	b.Limit.Size += more
	req := Request{Buckets: []Bucket{b}}
	const ms = time.Millisecond
	for i, want := range []time.Duration{0, 1375 * ms, 2500 * ms, 3375 * ms, 4000 * ms} {
		o := v.evaluate(t, req, asProcess(v.query(toHold(req), 0)))
		if o.denied || o.held != int64(i+1) {
			t.Errorf("request %d: %+v", i, o)
		}
		o.Ahead = b.Limit.of().AtLeast(o.After(0), o.held, bucket.Moment{}).Ahead(0) // as decideSplit does
		d := b.decision(o.Ahead, false, o.by, nil)[0]
		if got := b.Delay(&d, more); got != want {
			t.Errorf("request %d waits %v, want %v", i, got, want)
		}
	}
	if o := v.evaluate(t, req, asProcess(v.query(toHold(req), 0))); !o.denied || !o.blocked {
		t.Errorf("beyond the longest delay: %+v", o)
	}

	seen := map[string]int{}
	checkTraces(t, 10, func(t *rapid.T) {
		redistest.Done(t, v.admin.FlushDB(context.Background()))
		v.at(t, v.now)
		l := waiting(warmingUp(2, time.Second, rapid.SampledFrom([]time.Duration{7 * time.Microsecond, 4 * time.Second, time.Minute}).Draw(t, "warm-up"), 3),
			rapid.Int64Range(0, 20).Draw(t, "waiting"))
		b := Bucket{Name: "w", Key: "k", Limit: l, Cost: rapid.Int64Range(1, 3).Draw(t, "cost")}
		rest := rapid.Int64Range(0, l.of().WarmUp()).Draw(t, "rest")
		s := bucket.Level{Clear: rest + rapid.Int64Range(1, 5_000_000).Draw(t, "free"), Rest: rest}
		inFlight := int64(0)
		if rapid.Bool().Draw(t, "beside others") {
			inFlight = rapid.Int64Range(1, 10).Draw(t, "in flight")
		}
		outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{bucket.Ahead(s), inFlight, own}})
		if err != nil {
			t.Fatal(err)
		}
		if fits := l.of().Room(s, inFlight, 0) >= b.Cost; fits == outcomes[0].denied {
			t.Fatalf("%+v, cost %d, beside %d at %+v: %+v, want room %t", l, b.Cost, inFlight, s, outcomes[0], fits)
		}
		seen[fmt.Sprint(outcomes[0].denied, inFlight > 0)]++
	})
	if len(seen) != 4 || min(seen["true true"], seen["true false"], seen["false true"], seen["false false"]) < 20 {
		t.Errorf("the test covers too little: %v", seen)
	}
}

// TestWarmUpHoldsUnits guards units that are held for a request which has buckets in
// other slots: while they are held no other request is admitted; they make the next
// wait once they are committed, or as of the time until which they were held; and
// not once they are released.
func TestWarmUpHoldsUnits(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "w", Key: "k", Limit: warmingUp(2, time.Second, 4*time.Second, 3), Cost: 1}
	req := Request{Buckets: []Bucket{b}}
	call := func(q *query) outcome {
		t.Helper()
		return v.evaluate(t, req, q)
	}
	peek := func(what string, units, held int64, clear, retry time.Duration) {
		t.Helper()
		want := Level{Units: units, Held: held, Remaining: max(1-units-held, 0), Clear: clear, RetryAfter: retry}
		if l, err := v.Peek(t.Context(), b); err != nil || l != want {
			t.Errorf("%s: %+v, error %v, want %+v", what, l, err, want)
		}
	}
	const ms = time.Millisecond
	for _, end := range []string{"committed", "released", "left"} {
		v.flush(t)
		v.advance(t, time.Hour)
		decide(t, v, AccountingAtomic, b)
		peek("charged", 1, 0, 1875*ms, 1375*ms)
		v.advance(t, 1375*ms)
		peek("free", 0, 0, 500*ms, 0)
		q := asProcess(v.query(toHold(req), 0))
		o := call(q)
		if o.denied || o.held != 1 || o.receipt != v.now {
			t.Errorf("held: %+v", o)
		}
		peek("held", 0, 1, 500*ms, 1125*ms)
		again := call(asProcess(v.query(toHold(req), 0)))
		if !again.denied || !again.blocked || again.After(0).Free() != 1_125_000 {
			t.Errorf("a request beside held units: %+v", again)
		}
		switch end {
		case "committed":
			settleAs(q, verdictAdmitted, []outcome{o})
			call(q)
			peek(end, 1, 0, 2125*ms, 1125*ms)
		case "released":
			settleAs(q, verdictNone, []outcome{o})
			call(q)
			peek(end, 0, 0, 500*ms, 0)
		case "left": // it is cold when they are charged
			v.at(t, o.receipt+lapse.Microseconds()-1)
			peek("still held", 0, 1, 0, 1375*ms)
			v.advance(t, 1000*ms+time.Microsecond)
			peek(end, 1, 0, 875*ms, 375*ms)
			settleAs(q, verdictAdmitted, []outcome{o})
			if o := call(q); o.Clear != 875_000 || o.Rest != 500_000 {
				t.Errorf("settled too late: %+v", o)
			}
		}
	}
}

// TestWarmUpHoldsUnitsWithinHorizon guards that a bucket with the longest waits fails
// no request, and does not become an empty one, when denied requests count next to
// units that are held, and those are charged after that.
func TestWarmUpHoldsUnitsWithinHorizon(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "w", Key: "k", Limit: warmingUp(1, 30*365*24*time.Hour, time.Second, 3), Cost: 1}
	b.Limit.CountDenied = true
	req := Request{Buckets: []Bucket{b}}
	q := asProcess(v.query(toHold(req), 0))
	held := v.evaluate(t, req, q)
	if o := v.evaluate(t, req, v.query(req, 0)); !o.denied || !o.blocked {
		t.Errorf("beside held units: %+v", o)
	}
	settleAs(q, verdictAdmitted, []outcome{held})
	v.evaluate(t, req, q)
	if o := v.evaluate(t, req, v.query(req, 0)); !o.denied || o.foreign {
		t.Errorf("after they are charged: %+v", o)
	}
}

// TestWarmUpFallback guards a limit that warms up while its server is unavailable:
// nothing is admitted next to a request in flight, whose wait is unknown; a server is
// reported the next free moment as it is, even if the bucket will soon be cold; and what
// is in flight counts for it.
func TestWarmUpFallback(t *testing.T) {
	now := 1000 * time.Hour
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, time.Minute, "")
	b := Bucket{Name: "w", Key: "k", Limit: warmingUp(2, time.Second, 4*time.Second, 3), Cost: 1}
	req := Request{Buckets: []Bucket{b}}
	q := queryOf(f, req)
	f.send(nil, callsOf(q))
	if o := f.decide(req, nil, false)[0]; !o.denied || o.After(0).Free() != 1_375_000 {
		t.Errorf("beside a request in flight: %+v", o)
	}
	f.drop(q)
	if o := f.decide(req, nil, false)[0]; o.denied || o.After(0).Free() != 1_375_000 || o.Rest != 500_000 {
		t.Errorf("after it was given up: %+v", o)
	}
	now += 1500 * time.Millisecond
	q = queryOf(f, req)
	if got, want := localLevelsFor(f, q), (localLevel{bucket.Ahead{Clear: 375_000, Rest: 500_000}, 0, own}); len(got) != 1 || got[0] != want {
		t.Errorf("reported %+v, want %+v", got, want)
	}
	f.send(nil, callsOf(q))
	if got := localLevelsFor(f, queryOf(f, req))[0].inFlight; got != 1 {
		t.Errorf("%d units in flight reported, want 1", got)
	}
}

// TestWarmUpIdentity guards that limits whose numbers differ do not share a bucket,
// except in what a request may cost.
func TestWarmUpIdentity(t *testing.T) {
	l := warmingUp(2, time.Second, 4*time.Second, 3)
	larger := l
	larger.Size = 4
	m, k := NewMemory(), keys{prefix: "rl:"}
	of := func(l Limit) *Bucket { return &Bucket{Name: "n", Key: "k", Limit: l, Cost: 1} }
	if name := k.of(of(l)); !strings.HasSuffix(name, "}:n:lfls.2.2dqf4.2bc.w") {
		t.Errorf("key %q", name)
	}
	if k.of(of(l)) != k.of(of(larger)) || m.hash(of(l)) != m.hash(of(larger)) || of(l).limitID() != of(larger).limitID() {
		t.Error("the size is part of the identity")
	}
	for _, other := range []Limit{
		warmingUp(3, time.Second, 4*time.Second, 3), warmingUp(4, 2*time.Second, 4*time.Second, 3),
		warmingUp(2, time.Second, 5*time.Second, 3), warmingUp(2, time.Second, 4*time.Second, 4),
	} {
		if k.of(of(l)) == k.of(of(other)) || m.hash(of(l)) == m.hash(of(other)) || of(l).limitID() == of(other).limitID() {
			t.Errorf("%+v shares a bucket with %+v", other, l)
		}
		id := of(other).limitID()
		got := id.bucket().Limit
		if got.Size = other.Size; got != other {
			t.Errorf("%+v has the identity of %+v", other, got)
		}
	}
}

// TestRedisForeignWarmUps guards that values which cannot be a bucket that warms up
// count as a cold one.
func TestRedisForeignWarmUps(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "w", Key: "k", Limit: warmingUp(2, time.Second, 4*time.Second, 3), Cost: 1}
	of := func(kind byte, clear, rest float64) string {
		return string(appendDoubles([]byte{kind}, float64(v.now)+clear, rest, float64(v.now)))
	}
	for _, value := range []string{
		"text", "12:1", of(11, 1e6, 4000001), of(11, 1e6, -1), of(11, 1e6, 1.5), of(11, 1e6, bucket.Horizon), of(11, 3*bucket.Horizon, 1), of(8, 1e6, 1), of(9, 1e6, 1),
	} {
		redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), value, 0))
		if got, want := peek(t, v.Redis, b), (Level{Remaining: 1}); got != want {
			t.Errorf("%q: peek says %+v, want %+v", value, got, want)
		}
		outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, nil)
		if err != nil || outcomes[0].denied || outcomes[0].Clear != 1_875_000 || outcomes[0].Rest != 500_000 {
			t.Errorf("%q: %+v, error %v", value, outcomes, err)
		}
	}
	// One that is a bucket of those numbers is taken for one.
	value := of(11, 4_200_000, 4_000_000)
	redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), value, 0))
	if d := decide(t, v, AccountingAtomic, b)[0]; !d.Denied || d.RetryAfter != 200*time.Millisecond {
		t.Errorf("%q: %+v", value, d)
	}
}
