package limiter

import (
	"context"
	"flag"
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// model is a bucket as its description says, event by event: it holds units, and
// while it holds any it drips. It knows nothing of clear times and slack.
type model struct {
	level int64 // the units in the bucket
	next  int64 // when it drips next, in µs; an empty bucket does not drip
}

// drip performs one drip.
func (m *model) drip(l Limit) {
	m.level = max(m.level-l.DripSize, 0)
	m.next += l.DripInterval.Microseconds()
}

// take decides a request at the time now, in µs.
func (m *model) take(l Limit, now, cost int64) Decision {
	for m.level > 0 && m.next <= now {
		m.drip(l)
	}
	admitted := m.level+cost <= l.Size || cost == 0
	if admitted {
		if m.level == 0 {
			m.next = firstDrip(l, now)
		}
		m.level += cost
	}
	d := Decision{
		Denied:    !admitted,
		Never:     cost > l.Size,
		Size:      l.Size,
		Remaining: max(l.Size-m.level, 0),
		Clear:     m.until(l, now, 0),
	}
	if d.Denied && !d.Never {
		d.RetryAfter = m.until(l, now, l.Size-cost)
	}
	return d
}

// firstDrip returns when a bucket drips that is filled at now, in µs.
func firstDrip(l Limit, now int64) int64 {
	if !l.Aligned {
		return now + l.DripInterval.Microseconds()
	}
	drip := l.Phase.Microseconds()
	drip += (now - drip) / l.DripInterval.Microseconds() * l.DripInterval.Microseconds()
	for drip <= now {
		drip += l.DripInterval.Microseconds()
	}
	return drip
}

// until returns how long until at most level units are left.
func (m *model) until(l Limit, now, level int64) time.Duration {
	at, ahead := now, *m
	for ahead.level > level {
		at = ahead.next
		ahead.drip(l)
	}
	return time.Duration(at-now) * time.Microsecond
}

// subject is one bucket under test, kept twice: as a level that is passed through
// the functions of limit.go, and in a Memory.
type subject struct {
	now   int64 // µs
	level bucket.Level
	store *Memory
}

func newSubject(now int64) *subject {
	s := &subject{now: now}
	s.store = NewMemoryWithClock(func() time.Duration { return time.Duration(s.now) * time.Microsecond })
	return s
}

// take decides a request both ways, with the same result.
func (s *subject) take(t rapid.TB, l Limit, cost int64) Decision {
	t.Helper()
	b := Bucket{Name: "test", Key: "key", Limit: l, Cost: cost}
	s.level = s.level.At(s.now)
	fits := cost == 0 || cost <= b.Limit.Size && b.Limit.of().Wait(s.level, cost, s.now) == 0
	if fits {
		s.level = b.Limit.of().Add(s.level, b.Cost, bucket.Moment{Now: s.now, Unix: s.now})
	} else if l.CountDenied && cost > 0 {
		s.level = b.Limit.of().Count(s.level, 0, b.Cost, bucket.Moment{Now: s.now, Unix: s.now})
	}
	want := b.Limit.decision(s.level, s.now, b.need(), !fits)

	got, err := s.store.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
	if err != nil {
		t.Fatalf("%+v, cost %d: %v", b.Limit, b.Cost, err)
	}
	if len(got) != 1 || got[0] != want {
		t.Fatalf("%+v, cost %d, at %d µs:\n   Memory decided %+v\nthe functions %+v",
			b.Limit, b.Cost, s.now, got, want)
	}
	return want
}

// flood takes one unit at a time until a request is denied, and returns the number
// admitted.
func (s *subject) flood(t rapid.TB, l Limit) int64 {
	t.Helper()
	n := int64(0)
	for !s.take(t, l, 1).Denied {
		if n++; n > l.Size {
			t.Fatalf("%+v, at %d µs: %d units admitted at once", l, s.now, n)
		}
	}
	return n
}

// minTraces can raise the number of random traces of each property, which is what a test
// run can afford where they are sent to Redis.
var minTraces = flag.Int("traces", 0, "check each property on at least so `many` traces")

// few returns n, or a third of it for a short test.
func few(n int) int {
	if testing.Short() {
		return (n + 2) / 3
	}
	return n
}

// checkTraces checks a property on n hundred traces, which is n times rapid's default
// number, or on as many as the flag says. A trace is one goroutine's, with a clock that it
// moves by hand.
func checkTraces(t *testing.T, n int, property func(*rapid.T)) {
	t.Helper()
	racetest.SingleGoroutine(t)
	testseed.Check(t, max(n, (*minTraces+99)/100), property)
}

// drawSubject draws an empty bucket: at time 0, or today.
func drawSubject(t *rapid.T) *subject {
	return newSubject(rapid.SampledFrom([]int64{0, 1, 1_790_000_000_123_456}).Draw(t, "now"))
}

// drawLimit draws a small limit: with drips of one unit, of less than a full
// bucket, of exactly one, and of more.
func drawLimit(t *rapid.T) Limit {
	size := rapid.Int64Range(1, 30).Draw(t, "size")
	drip := int64(1)
	switch rapid.IntRange(0, 4).Draw(t, "drip size: one, part, all, more, a window's") {
	case 1:
		drip = rapid.Int64Range(1, size).Draw(t, "drip size")
	case 2:
		drip = size
	case 3:
		drip = rapid.Int64Range(size+1, 2*size+1).Draw(t, "drip size")
	case 4:
		drip = MaxUnits
	}
	rate := rapid.SampledFrom([]int64{1, 2, 7, 1000, 999_983, 1_000_000, 60_000_000}).Draw(t, "drip rate")
	if drip == MaxUnits { // 1 µs is for held units
		rate = max(rate, 2)
	}
	l := Limit{Size: size, DripInterval: time.Duration(rate) * time.Microsecond, DripSize: drip}
	if drip == MaxUnits {
		l.Algorithm = bucket.Fixed
	}
	if rapid.Bool().Draw(t, "aligned") {
		l.Aligned = true
		l.Phase = time.Duration(rapid.Int64Range(0, rate-1).Draw(t, "phase")) * time.Microsecond
	}
	return l
}

// drawCost draws a cost that may well exceed the room, or 0.
func drawCost(t *rapid.T, l Limit) int64 {
	if rapid.Bool().Draw(t, "cost of one") {
		return 1
	}
	return rapid.Int64Range(0, l.Size+2).Draw(t, "cost")
}

// drawGap draws the time to the next request, in µs: none, hardly any, about one
// drip or several, about the last RetryAfter, or very long.
func drawGap(t *rapid.T, l Limit, last Decision) int64 {
	rate := l.DripInterval.Microseconds()
	off := rapid.Int64Range(-1, 1)
	gap := int64(0)
	switch rapid.IntRange(0, 7).Draw(t, "gap") {
	case 1:
		gap = 1
	case 2:
		gap = rate + off.Draw(t, "off by")
	case 3:
		gap = rapid.Int64Range(2, l.Size+2).Draw(t, "drips")*rate + off.Draw(t, "off by")
	case 4:
		gap = last.RetryAfter.Microseconds() + off.Draw(t, "off by")
	case 5:
		gap = last.Clear.Microseconds() + off.Draw(t, "off by")
	case 6:
		gap = rapid.Int64Range(0, 2*rate).Draw(t, "µs")
	case 7:
		gap = rapid.Int64Range(1000, 1_000_000).Draw(t, "drips")*rate + off.Draw(t, "off by")
	}
	return max(gap, 0)
}

// drawTrace sends some requests to s, so that its level can be anything.
func drawTrace(t *rapid.T, l Limit, s *subject) Decision {
	var last Decision
	for range rapid.IntRange(1, 12).Draw(t, "requests") {
		s.now += drawGap(t, l, last)
		last = s.take(t, l, drawCost(t, l))
	}
	return last
}

// TestBucketFollowsDescription guards the whole arithmetic: every number in every
// decision is what the described bucket would give, drip by drip.
func TestBucketFollowsDescription(t *testing.T) {
	t.Parallel()
	checkTraces(t, 100, func(t *rapid.T) {
		l, s := drawLimit(t), drawSubject(t)
		var m model
		var last Decision
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			s.now += drawGap(t, l, last)
			cost := drawCost(t, l)
			want := m.take(l, s.now, cost)
			if last = plainDecision(s.take(t, l, cost)); last != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v",
					l, i, cost, s.now, last, want)
			}
		}
	})
}

// TestRetryIsExact guards RetryAfter: one microsecond earlier is too early, and at
// that time there is no need to wait longer.
func TestRetryIsExact(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l, s := drawLimit(t), drawSubject(t)
		drawTrace(t, l, s)
		last := s.take(t, l, 1) // so that it is not empty
		cost := rapid.Int64Range(last.Remaining+1, l.Size).Draw(t, "cost that has no room")
		d := s.take(t, l, cost)
		if !d.Denied || d.Never || d.RetryAfter < time.Microsecond {
			t.Fatalf("%+v, cost %d with room for %d: %+v", l, cost, last.Remaining, d)
		}
		retry := d.RetryAfter.Microseconds()
		s.now += retry - 1
		if d := s.take(t, l, cost); !d.Denied || d.RetryAfter != time.Microsecond {
			t.Fatalf("%+v, cost %d, 1 µs before the retry time of %d µs: %+v", l, cost, retry, d)
		}
		s.now++
		if d := s.take(t, l, cost); d.Denied {
			t.Fatalf("%+v, cost %d, at the retry time of %d µs: %+v", l, cost, retry, d)
		}
	})
}

// TestDenialLeavesNoTrace guards that a client which keeps trying is neither
// punished nor rewarded: of two buckets one also gets requests that it denies, and
// they never differ.
func TestDenialLeavesNoTrace(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l, calm := drawLimit(t), drawSubject(t)
		hammered := newSubject(calm.now)
		var last Decision
		for i := range rapid.IntRange(1, 20).Draw(t, "requests") {
			gap := drawGap(t, l, last)
			for _, part := range []int64{gap / 2, gap - gap/2} {
				calm.now += part
				hammered.now += part
				never := hammered.take(t, l, l.Size+1)
				if d := hammered.take(t, l, never.Remaining+1); !never.Denied || !d.Denied {
					t.Fatalf("%+v, before request %d: admitted, by %+v or %+v", l, i, never, d)
				}
			}
			cost := drawCost(t, l)
			last = calm.take(t, l, cost)
			if got := hammered.take(t, l, cost); got != last {
				t.Fatalf("%+v, request %d, cost %d: hammered %+v, calm %+v", l, i, cost, got, last)
			}
		}
	})
}

// TestRemainingIsExact guards the number by which clients plan: exactly that many
// requests of cost 1 are admitted at once, or one request of exactly that cost.
func TestRemainingIsExact(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l, s := drawLimit(t), drawSubject(t)
		last := drawTrace(t, l, s)
		s.now += drawGap(t, l, last)
		remaining := s.take(t, l, l.Size+1).Remaining // denied, so it only reads
		if d := s.take(t, l, remaining+1); !d.Denied {
			t.Fatalf("%+v: %d remaining, but one more admitted: %+v", l, remaining, d)
		}
		if rapid.Bool().Draw(t, "one by one") {
			if got := s.flood(t, l); got != remaining {
				t.Fatalf("%+v: %d remaining, but %d admitted", l, remaining, got)
			}
		} else if remaining > 0 {
			if d := s.take(t, l, remaining); d.Denied || d.Remaining != 0 {
				t.Fatalf("%+v: %d remaining, but after as many at once: %+v", l, remaining, d)
			}
		}
	})
}

// TestFullerBucketAdmitsNoMore guards that a client never gains by having used
// more: of two buckets that drip at the same moments, the fuller one never does
// better.
func TestFullerBucketAdmitsNoMore(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l, s := drawLimit(t), drawSubject(t)
		last := drawTrace(t, l, s)
		less := s.level
		more := l.of().Add(less, rapid.Int64Range(0, last.Remaining).Draw(t, "more units"), bucket.Moment{Now: s.now, Unix: s.now})
		if l.DripSize == 1 {
			// Then the moments do not matter either.
			more.Clear += rapid.Int64Range(0, 3*l.DripInterval.Microseconds()).Draw(t, "µs later")
		}
		now := s.now + drawGap(t, l, last)
		cost := rapid.Int64Range(1, l.Size).Draw(t, "cost")
		less, more = less.At(now), more.At(now)
		if l.of().Wait(more, cost, now) < l.of().Wait(less, cost, now) {
			t.Errorf("%+v, cost %d, at %d µs: waits longer at %+v than at %+v", l, cost, now, less, more)
		}
		if l.of().Remaining(more, now) > l.of().Remaining(less, now) {
			t.Errorf("%+v, at %d µs: less remaining at %+v than at %+v", l, now, less, more)
		}
	})
}

// fromEmpty returns the most units that a bucket may admit in a window, in µs,
// that begins when it is empty.
func fromEmpty(l Limit, window int64) int64 {
	if l.Aligned { // it may drip at once
		return l.Size + min(l.DripSize, l.Size)*bucket.CeilDiv(window, l.of().Rate())
	}
	return l.Size + min(l.DripSize, l.Size)*(window/l.DripInterval.Microseconds())
}

// inAnyWindow returns the most units that a bucket may admit in any window of that
// length.
func inAnyWindow(l Limit, window int64) int64 {
	rate := l.DripInterval.Microseconds()
	return max(fromEmpty(l, window), l.Size-1+min(l.DripSize, l.Size)*((window+rate-1)/rate))
}

// admission is an admission at one moment.
type admission struct {
	at    int64 // µs
	units int64
	empty bool // the bucket was empty before
}

// checkWindows checks every window from one admission to another against the
// bounds.
func checkWindows(t rapid.TB, l Limit, log []admission) {
	t.Helper()
	for i, first := range log {
		units := int64(0)
		for _, last := range log[i:] {
			units += last.units
			window := last.at - first.at
			if bound := inAnyWindow(l, window); units > bound {
				t.Fatalf("%+v: %d units in %d µs, the bound is %d: %+v", l, units, window, bound, log)
			}
			if bound := fromEmpty(l, window); first.empty && units > bound {
				t.Fatalf("%+v: %d units in %d µs from empty, the bound is %d: %+v",
					l, units, window, bound, log)
			}
		}
	}
}

// TestNoWindowExceedsBounds guards the promise of a limiter: whatever requests
// come, no time window admits more units than the bounds say.
func TestNoWindowExceedsBounds(t *testing.T) {
	checkTraces(t, 30, func(t *rapid.T) {
		l, s := drawLimit(t), drawSubject(t)
		var last Decision
		var log []admission
		for range rapid.IntRange(1, 40).Draw(t, "moments") {
			s.now += drawGap(t, l, last)
			a := admission{at: s.now, empty: s.level.Clear <= s.now}
			if rapid.Bool().Draw(t, "flood") {
				a.units = s.flood(t, l)
				last = s.take(t, l, 1)
			} else {
				cost := drawCost(t, l)
				if last = s.take(t, l, cost); !last.Denied {
					a.units = cost
				}
			}
			if a.units > 0 {
				log = append(log, a)
			}
		}
		checkWindows(t, l, log)
	})
}

// TestBoundsAreReached guards that the bounds are tight: some traffic reaches each
// of them, so nothing lower can be promised.
func TestBoundsAreReached(t *testing.T) {
	tests := []struct {
		size, drip int64
		drips      int64 // the length of the window in drip intervals
		fromEmpty  int64
		anyWindow  int64 // 1 µs longer, from just before a drip to just after one
	}{
		{size: 1, drip: 1, drips: 0, fromEmpty: 1, anyWindow: 1},
		{size: 1, drip: 1, drips: 60, fromEmpty: 61, anyWindow: 61},
		{size: 10, drip: 1, drips: 0, fromEmpty: 10, anyWindow: 10},
		{size: 10, drip: 1, drips: 60, fromEmpty: 70, anyWindow: 70},
		{size: 10, drip: 2, drips: 60, fromEmpty: 130, anyWindow: 131},
		{size: 10, drip: 3, drips: 0, fromEmpty: 10, anyWindow: 12},
		{size: 10, drip: 3, drips: 7, fromEmpty: 31, anyWindow: 33},
		{size: 10, drip: 9, drips: 1, fromEmpty: 19, anyWindow: 27},
		{size: 10, drip: 10, drips: 2, fromEmpty: 30, anyWindow: 39},
		{size: 10, drip: 1000, drips: 2, fromEmpty: 30, anyWindow: 39},
	}
	for _, tc := range tests {
		l := Limit{Size: tc.size, DripInterval: time.Second, DripSize: tc.drip}
		const second = 1_000_000 // µs
		window := tc.drips * second

		if got := fromEmpty(l, window); got != tc.fromEmpty {
			t.Errorf("%+v: the bound on %d µs from empty is %d, want %d", l, window, got, tc.fromEmpty)
		}
		s, units := newSubject(0), int64(0)
		for ; s.now <= window; s.now += second {
			units += s.flood(t, l)
		}
		if units != tc.fromEmpty {
			t.Errorf("%+v: %d units in %d µs from empty, want %d", l, units, window, tc.fromEmpty)
		}

		// One unit starts the drips; the rest of the bucket is filled just before
		// the first of them.
		window++
		if got := inAnyWindow(l, window); got != tc.anyWindow {
			t.Errorf("%+v: the bound on any %d µs is %d, want %d", l, window, got, tc.anyWindow)
		}
		s = newSubject(0)
		s.take(t, l, 1)
		s.now = second - 1
		begin := s.now
		units = s.flood(t, l)
		for s.now = second; s.now <= begin+window; s.now += second {
			units += s.flood(t, l)
		}
		if units != tc.anyWindow {
			t.Errorf("%+v: %d units in %d µs from before a drip, want %d", l, units, window, tc.anyWindow)
		}
	}
}

// TestSaturatedBucketWastesNothing guards that a limit never gives less than its
// numbers say: a client that asks at every drip gets every drip in full.
func TestSaturatedBucketWastesNothing(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l, s := drawLimit(t), drawSubject(t)
		begin, rate, units := s.now, l.DripInterval.Microseconds(), int64(0)
		for drip := range rapid.Int64Range(1, 20).Draw(t, "drips") {
			s.now = begin + drip*rate
			units += s.flood(t, l)
			if want := fromEmpty(l, drip*rate); units != want {
				t.Fatalf("%+v: %d units after %d drips, want %d", l, units, drip, want)
			}
			// Requests between the drips find no room and change nothing.
			for range rapid.IntRange(0, 2).Draw(t, "requests between") {
				s.now += rapid.Int64Range(0, begin+(drip+1)*rate-1-s.now).Draw(t, "µs")
				units += s.flood(t, l)
			}
		}
	})
}

// TestDrainedBucketIsAbsentBucket guards the removal of drained buckets, in memory
// and by expiry in Redis: a bucket that has run empty may be removed at any time
// without changing any decision.
func TestDrainedBucketIsAbsentBucket(t *testing.T) {
	checkTraces(t, 20, func(t *rapid.T) {
		l, kept := drawLimit(t), drawSubject(t)
		dropped := newSubject(kept.now)
		var last Decision
		for i := range rapid.IntRange(1, 20).Draw(t, "requests") {
			gap := drawGap(t, l, last)
			kept.now += gap
			if gap >= last.Clear.Microseconds() {
				dropped = newSubject(kept.now)
			}
			dropped.now = kept.now
			cost := drawCost(t, l)
			last = kept.take(t, l, cost)
			if got := dropped.take(t, l, cost); got != last {
				t.Fatalf("%+v, request %d, cost %d: dropped %+v, kept %+v", l, i, cost, got, last)
			}
		}
	})
}

// exact evaluates the formulas of the design literally, in numbers that cannot
// overflow.
type exact struct{ clear, slack *big.Int }

func (e *exact) take(l Limit, at, price int64) (admitted bool, retry, remaining, clear *big.Int) {
	B, S, R := big.NewInt(l.Size), big.NewInt(l.DripSize), big.NewInt(l.DripInterval.Microseconds())
	now, c, zero := big.NewInt(at), big.NewInt(price), new(big.Int)

	// clear <= now, or no key: clear = now, slack = 0
	if e.clear == nil || e.clear.Cmp(now) <= 0 {
		e.clear, e.slack = now, zero
	}
	// fits = floor((B - c + slack) / S) * R
	fits := times(floorOf(plus(minus(B, c), e.slack), S), R)
	// admit iff c <= B and clear - now <= fits
	if c.Cmp(B) <= 0 && minus(e.clear, now).Cmp(fits) <= 0 {
		admitted = true
		// d = ceil((c - slack) / S); clear += d*R; slack += d*S - c
		d := ceilOf(minus(c, e.slack), S)
		e.clear = plus(e.clear, times(d, R))
		e.slack = minus(plus(e.slack, times(d, S)), c)
	} else {
		// retry = clear - now - fits
		retry = minus(minus(e.clear, now), fits)
	}
	// remaining = max(B - (ceil((clear - now) / R)*S - slack), 0)
	remaining = minus(B, minus(times(ceilOf(minus(e.clear, now), R), S), e.slack))
	if remaining.Cmp(zero) < 0 {
		remaining = zero
	}
	return admitted, retry, remaining, minus(e.clear, now)
}

func plus(a, b *big.Int) *big.Int    { return new(big.Int).Add(a, b) }
func minus(a, b *big.Int) *big.Int   { return new(big.Int).Sub(a, b) }
func times(a, b *big.Int) *big.Int   { return new(big.Int).Mul(a, b) }
func floorOf(a, b *big.Int) *big.Int { return new(big.Int).Div(a, b) } // b > 0
func ceilOf(a, b *big.Int) *big.Int {
	return new(big.Int).Neg(floorOf(new(big.Int).Neg(a), b))
}

// drawUnits draws from 1 to most, of any magnitude, with a preference for powers
// of two and their neighbours.
func drawUnits(t *rapid.T, label string, most int64) int64 {
	power := int64(1) << rapid.IntRange(0, 49).Draw(t, label+": power")
	switch rapid.IntRange(0, 3).Draw(t, label+": at power, off it, any, most") {
	case 0:
		return min(power, most)
	case 1:
		return min(max(power+rapid.Int64Range(-1, 1).Draw(t, label+": off by"), 1), most)
	case 2:
		return rapid.Int64Range(1, min(power, most)).Draw(t, label)
	}
	return most
}

// TestExtremesDoNotOverflow guards against overflow: with any numbers that
// Validate accepts, even the largest, decisions are what exact arithmetic gives,
// and no clear time lies beyond the horizon.
func TestExtremesDoNotOverflow(t *testing.T) {
	const latest = 1<<53 - bucket.Horizon // the last moment at which doubles are exact up to the horizon
	checkTraces(t, 30, func(t *rapid.T) {
		l := Limit{Size: drawUnits(t, "size", MaxUnits), DripSize: drawUnits(t, "drip size", MaxUnits)}
		drips := (l.Size-1)/l.DripSize + 1
		rate := drawUnits(t, "drip rate", bucket.Horizon/(drips+1))
		l.DripInterval = time.Duration(rate) * time.Microsecond
		if err := l.Validate(); err != nil {
			t.Fatalf("%d drips at most: %v", drips+1, err)
		}

		s := newSubject(rapid.SampledFrom([]int64{0, 1_790_000_000_123_456, latest}).Draw(t, "now"))
		var e exact
		var last Decision
		for i := range rapid.IntRange(1, 8).Draw(t, "requests") {
			off := rapid.Int64Range(-1, 1).Draw(t, "off by")
			gap := rapid.SampledFrom([]int64{
				0, 1, rate + off, last.RetryAfter.Microseconds() + off, last.Clear.Microseconds() + off, bucket.Horizon,
			}).Draw(t, "gap")
			s.now = min(s.now+max(gap, 0), latest)
			cost := rapid.SampledFrom([]int64{
				1, l.DripSize, l.Size, l.Size + 1, l.Size/2 + 1, last.Remaining + off, math.MaxInt64,
			}).Draw(t, "cost")
			cost = max(cost, 1)

			got := plainDecision(s.take(t, l, cost))
			admitted, retry, remaining, ahead := e.take(l, s.now, cost)
			want := Decision{
				Denied:    !admitted,
				Never:     cost > l.Size,
				Size:      l.Size,
				Remaining: remaining.Int64(),
				Clear:     time.Duration(ahead.Int64()) * time.Microsecond,
			}
			if want.Denied && !want.Never {
				want.RetryAfter = time.Duration(retry.Int64()) * time.Microsecond
			}
			if got != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v",
					l, i, cost, s.now, got, want)
			}
			if !ahead.IsInt64() || ahead.Int64() > bucket.Horizon || got.Clear > l.of().DrainTime() {
				t.Fatalf("%+v, cost %d: clears in %v, a full bucket in %v", l, cost, got.Clear, l.of().DrainTime())
			}
			last = got
		}
	})
}

// TestValidateAcceptsExactlyWhatIsAllowed guards the check that everything above
// relies on: Validate accepts exactly the numbers that the design allows.
func TestValidateAcceptsExactlyWhatIsAllowed(t *testing.T) {
	units := []int64{math.MinInt64, -1, 0, 1, 2, 3, 1<<11 - 1, 1<<49 - 1, 1 << 49, 1<<49 + 1, math.MaxInt64}
	checkTraces(t, 20, func(t *rapid.T) {
		number := rapid.OneOf(
			rapid.SampledFrom(units), rapid.Int64Range(1, MaxUnits), rapid.Int64Range(1, 100))
		l := Limit{Size: number.Draw(t, "size"), DripSize: number.Draw(t, "drip size")}

		one, most := big.NewInt(1), big.NewInt(1<<49)
		B, S := big.NewInt(l.Size), big.NewInt(l.DripSize)
		if l.DripSize == 0 { // which means 1
			S = one
		}
		allowed := B.Cmp(one) >= 0 && B.Cmp(most) <= 0 && S.Cmp(one) >= 0 && S.Cmp(most) <= 0

		rates := []int64{
			math.MinInt64, -1000, 0, 1, 999, 1000, 1001, 1500, 1e9, 1 << 53 * 1000, math.MaxInt64,
		}
		if allowed {
			// The longest drip interval that is allowed, and those next to it.
			longest := floorOf(big.NewInt(1<<50), plus(ceilOf(B, S), one)).Int64() * 1000
			rates = append(rates, longest-1000, longest-1, longest, longest+1, longest+1000)
		}
		l.DripInterval = time.Duration(rapid.SampledFrom(rates).Draw(t, "drip rate"))
		if allowed {
			R := big.NewInt(int64(l.DripInterval) / 1000)
			drain := times(plus(ceilOf(B, S), one), R)
			allowed = l.DripInterval%1000 == 0 && R.Cmp(one) >= 0 && drain.Cmp(big.NewInt(1<<50)) <= 0
		}
		if err := l.Validate(); err == nil != allowed {
			t.Fatalf("size %d, drip size %d, drip rate %d ns: got error %v, allowed: %t",
				l.Size, l.DripSize, int64(l.DripInterval), err, allowed)
		}
	})
}

// TestVaryingSizesShareOneBucket guards sizes that differ, because of
// placeholders, between nodes or over a reload: even if the size changes from
// request to request, there is one bucket, which follows its description and
// admits no more than if every request had the largest size.
func TestVaryingSizesShareOneBucket(t *testing.T) {
	checkTraces(t, 30, func(t *rapid.T) {
		largest, s := drawLimit(t), drawSubject(t)
		sizes := rapid.SliceOfN(rapid.Int64Range(1, largest.Size), 1, 3).Draw(t, "other sizes")
		sizes = append(sizes, largest.Size)
		var m model
		var last Decision
		var log []admission
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			l := largest
			l.Size = rapid.SampledFrom(sizes).Draw(t, "size")
			s.now += drawGap(t, l, last)
			a := admission{at: s.now, empty: s.level.Clear <= s.now}
			cost := drawCost(t, l)
			want := m.take(l, s.now, cost)
			if last = plainDecision(s.take(t, l, cost)); last != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v",
					l, i, cost, s.now, last, want)
			}
			if a.units = cost; !last.Denied {
				log = append(log, a)
			}
		}
		checkWindows(t, largest, log)
	})
}
