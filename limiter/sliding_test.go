package limiter

import (
	"fmt"
	"math/big"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// slider is a sliding window as its description says: it keeps every admission,
// counts those of the present window and of the one before, and takes the share of
// the latter with numbers of any length.
type slider struct {
	phase    int64
	admitted []charge
}

// index returns the number of the window at the time now, in µs.
func (s *slider) index(l Limit, now int64) int64 {
	n := (now - s.phase) / l.of().Rate()
	if s.phase+n*l.of().Rate() > now {
		n--
	}
	return n
}

// units returns the estimate at now.
func (s *slider) units(l Limit, now int64) int64 {
	window, before, last := s.index(l, now), int64(0), int64(0)
	for _, a := range s.admitted {
		switch s.index(l, a.at) {
		case window - 1:
			before += a.units
		case window:
			last += a.units
		}
	}
	left := s.phase + (window+1)*l.of().Rate() - now
	return floorOf(times(big.NewInt(before), big.NewInt(left)), big.NewInt(l.of().Rate())).Int64() + last
}

// take decides a request at the time now, in µs.
func (s *slider) take(l Limit, now, cost int64) Decision {
	units := s.units(l, now)
	d := Decision{Size: l.Size, Denied: cost > l.Size-units, Never: cost > l.Size}
	if !d.Denied {
		s.admitted = append(s.admitted, charge{at: now, units: cost})
		units += cost
	}
	d.Remaining = max(l.Size-units, 0)
	if n := len(s.admitted); n > 0 {
		ends := s.phase + (s.index(l, s.admitted[n-1].at)+2)*l.of().Rate()
		d.Clear = time.Duration(max(ends-now, 0)) * time.Microsecond
	}
	if d.Denied && !d.Never {
		// The estimate never grows on its own, so the first moment with room can be
		// found by halving.
		denied, admitted := now, now+2*l.of().Rate()
		for admitted-denied > 1 {
			if at := denied + (admitted-denied)/2; cost > l.Size-s.units(l, at) {
				denied = at
			} else {
				admitted = at
			}
		}
		d.RetryAfter = time.Duration(admitted-now) * time.Microsecond
	}
	for len(s.admitted) > 0 && s.index(l, s.admitted[0].at) < s.index(l, now)-1 {
		s.admitted = s.admitted[1:]
	}
	return d
}

// drawSliding draws a sliding window of any magnitude.
func drawSliding(t *rapid.T) Limit {
	l := SlidingWindow(
		rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, bucket.MaxSlidingUnits), rapid.Just[int64](bucket.MaxSlidingUnits)).Draw(t, "size"),
		rapid.SampledFrom([]time.Duration{
			time.Microsecond, 7 * time.Microsecond, 999_983 * time.Microsecond, time.Second, time.Minute, time.Hour,
			23 * time.Hour, 31 * 24 * time.Hour, 366 * 24 * time.Hour, bucket.Horizon / 3 * time.Microsecond,
		}).Draw(t, "window"))
	if rapid.Bool().Draw(t, "with a phase") {
		l.Phase = time.Duration(rapid.Int64Range(0, l.of().Rate()-1).Draw(t, "phase")) * time.Microsecond
	}
	return l
}

// drawSlidingCost draws a cost.
func drawSlidingCost(t *rapid.T, l Limit, last Decision) int64 {
	return max(rapid.SampledFrom([]int64{
		1, 1, 1, 2, l.Size/3 + 1, l.Size/2 + 1, l.Size, l.Size + 1, last.Remaining, last.Remaining + 1,
	}).Draw(t, "cost"), 1)
}

// plainDecision returns d without what no description knows.
func plainDecision(d Decision) Decision {
	d.By, d.exact, d.rest, d.one = DecidedByMemory, false, 0, 0
	return d
}

// TestSlidingWindowFollowsDescription guards sliding windows: every number in
// every decision is what adding up the admissions gives.
func TestSlidingWindowFollowsDescription(t *testing.T) {
	t.Parallel()
	seen := struct{ admitted, denied, borrowed int }{}
	checkTraces(t, 100, func(t *rapid.T) {
		l := drawSliding(t)
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		s := newSubject(1_790_000_000_123_456)
		m, last := &slider{phase: l.Phase.Microseconds()}, Decision{}
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			s.now += drawWindowGap(t, l, last)
			cost := drawSlidingCost(t, l, last)
			want := m.take(l, s.now, cost)
			got := s.take(t, l, cost)
			if last = plainDecision(got); last != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", l, i, cost, s.now, last, want)
			}
			wait := Decision{}
			if b := (Bucket{Limit: l, Cost: cost}); cost <= l.Size {
				ahead := slider{m.phase, slices.Clone(m.admitted)}
				if wait = ahead.take(l, s.now, cost); b.RoomIn(&got) != wait.RetryAfter {
					t.Fatalf("%+v, request %d, cost %d, at %d µs: would wait %v, want %v", l, i, cost, s.now, b.RoomIn(&got), wait.RetryAfter)
				}
			}
			switch {
			case !last.Denied:
				seen.admitted++
			case last.RetryAfter > l.DripInterval:
				seen.borrowed++
			default:
				seen.denied++
			}
		}
	})
	if min(seen.admitted, seen.denied, seen.borrowed) < 5000 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestRedisSlidingWindows guards the same in Redis, on the server's clock.
func TestRedisSlidingWindows(t *testing.T) {
	t.Parallel()
	seen := struct{ admitted, denied, octal int }{}
	checkRedisTraces(t, 10, func(t *rapid.T) described {
		l := drawSliding(t)
		m := &slider{phase: l.Phase.Microseconds()}
		return described{
			limit: l,
			gap:   func(last Decision) int64 { return drawWindowGap(t, l, last) },
			cost:  func(last Decision) int64 { return drawSlidingCost(t, l, last) },
			take: func(now, cost int64) Decision {
				d := m.take(l, now, cost)
				switch {
				case d.Denied:
					seen.denied++
				case l.Size > 1<<20 && l.of().Rate() > 1<<33:
					seen.octal++
				default:
					seen.admitted++
				}
				return d
			},
		}
	})
	if min(seen.admitted, seen.denied, seen.octal) < 500 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestRedisSlidingWindowProducts guards that Redis takes shares of long windows to the
// unit, where the product of units and time has too many digits for a double: it is 1
// less than a multiple of the window.
func TestRedisSlidingWindowProducts(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for _, before := range []int64{331, 439, 503, 677, 941} { // primes
		l := SlidingWindow(before, 366*24*time.Hour)
		rate := big.NewInt(l.of().Rate())
		left := new(big.Int).ModInverse(big.NewInt(before), rate)
		left.Sub(rate, left)
		if product := times(left, big.NewInt(before)); product.BitLen() != 54 {
			t.Fatalf("%d · %d has %d bits", before, left, product.BitLen())
		}
		b := Bucket{Name: "s", Key: fmt.Sprint(before), Limit: l, Cost: before}
		m := new(slider)
		begin := v.start - v.start%l.of().Rate() + l.of().Rate()
		for _, at := range []int64{begin, begin + 2*l.of().Rate() - left.Int64()} {
			v.at(t, at)
			want := m.take(l, at, b.Cost)
			if got := plainDecision(decide(t, v, AccountingAtomic, b)[0]); got != want {
				t.Errorf("%d units before, %d µs left:\n got %+v\nwant %+v", before, left, got, want)
			}
			b.Cost = before - floorOf(times(left, big.NewInt(before)), rate).Int64() // all that has room then
		}
	}
}

// TestSlidingWindowPublishedFigures guards two published examples. Seed 004: of 7 a
// minute, with 5 in the last minute and 3 in this one, 30 % in, 6.5 are counted, and
// one more passes. Cloudflare: of 50 a minute, with 42 and 18, 15 s in, 49.5.
func TestSlidingWindowPublishedFigures(t *testing.T) {
	minute := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC).UnixMicro()
	for _, tc := range []struct {
		size, before, last int64
		in                 time.Duration
		passes             int64
	}{
		{7, 5, 3, 18 * time.Second, 1},
		{50, 42, 18, 15 * time.Second, 1},
	} {
		l := SlidingWindow(tc.size, time.Minute)
		s := newSubject(minute)
		for range tc.before {
			s.take(t, l, 1)
		}
		s.now = minute + time.Minute.Microseconds() + tc.in.Microseconds()
		for range tc.last {
			if s.take(t, l, 1).Denied {
				t.Fatalf("%+v: denied too early", tc)
			}
		}
		if n := s.flood(t, l); n != tc.passes {
			t.Errorf("%+v: %d more admitted", tc, n)
		}
	}
}

// TestSlidingWindowDoublesAtMost guards what is said of sliding windows: after as
// many units as fit at the end of a window, half of them pass until the middle of
// the next, and twice as many within the time of a window, but no more.
func TestSlidingWindowDoublesAtMost(t *testing.T) {
	minute := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	l := SlidingWindow(10, time.Minute)
	s := newSubject(minute.Add(-time.Microsecond).UnixMicro())
	if n := s.flood(t, l); n != 10 {
		t.Errorf("%d admitted at the end of the first window, want 10", n)
	}
	s.now = minute.UnixMicro()
	if d := s.take(t, l, 1); d.RetryAfter != time.Microsecond {
		t.Errorf("in the second window: %+v, want a denial for as long as ten tenths count", d)
	}
	total := int64(10)
	for s.now < minute.Add(30*time.Second).UnixMicro() {
		s.now += 1000
		total += s.flood(t, l)
	}
	if total != 15 {
		t.Errorf("%d admitted until the middle, want 15", total)
	}
	for s.now < minute.Add(time.Minute-time.Microsecond).UnixMicro() {
		s.now += 1000
		total += s.flood(t, l)
	}
	if total != 20 {
		t.Errorf("%d admitted within one window, want 20", total)
	}
}

// TestSlidingWindowClockSetBack guards that a server's clock that is set back
// neither empties a sliding window nor keeps it full for longer than it was when it
// was written.
func TestSlidingWindowClockSetBack(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	l := SlidingWindow(10, time.Minute)
	for _, back := range []time.Duration{
		time.Microsecond, time.Second, 59 * time.Second, time.Minute, 61 * time.Second, 2 * time.Minute, time.Hour, 365 * 24 * time.Hour,
	} {
		v.flush(t)
		start := v.start - v.start%l.of().Rate() + 10*365*24*3600e6
		start -= start % l.of().Rate()
		b := Bucket{Name: "s", Key: "k", Limit: l, Cost: 10}
		v.at(t, start+30_000_000)
		if decide(t, v, AccountingAtomic, b)[0].Denied {
			t.Fatal("the first request was denied")
		}
		v.at(t, v.now-back.Microseconds())
		b.Cost = 1
		set := v.now
		d := decide(t, v, AccountingAtomic, b)[0]
		if !d.Denied || d.Remaining != 0 {
			t.Errorf("back by %v: %+v, want a denial", back, d)
		}
		if d.Clear != 90*time.Second || d.RetryAfter > 36*time.Second {
			t.Errorf("back by %v: clears in %v, retry after %v", back, d.Clear, d.RetryAfter)
		}
		v.at(t, set+d.RetryAfter.Microseconds()-1)
		if d := decide(t, v, AccountingAtomic, b)[0]; !d.Denied {
			t.Errorf("back by %v: admitted too early", back)
		}
		v.at(t, set+d.RetryAfter.Microseconds())
		if d := decide(t, v, AccountingAtomic, b)[0]; d.Denied {
			t.Errorf("back by %v: denied at the reported time", back)
		}
	}
}

// TestRedisJoinsSlidingWindows guards that the server joins a reported level
// with its own as this process does, in the windows of the clock: late as the level
// is, it counts in those for which it was reported, and none of them ends later for it.
func TestRedisJoinsSlidingWindows(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen := map[string]int{}
	checkTraces(t, 20, func(t *rapid.T) {
		l := SlidingWindow(30, rapid.SampledFrom([]time.Duration{7 * time.Microsecond, 8 * time.Microsecond, time.Second, time.Minute}).Draw(t, "window"))
		now := v.start - v.start%l.of().Rate() + rapid.Int64Range(0, l.of().Rate()-1).Draw(t, "now")
		v.at(t, now)
		ends := now - now%l.of().Rate() + l.of().Rate() - now // of the present window
		draw := func(label string) bucket.Level {
			return bucket.Counted(ends+rapid.Int64Range(0, 1).Draw(t, label+" windows")*l.of().Rate(),
				rapid.Int64Range(0, 20).Draw(t, label+" before"), rapid.Int64Range(1, 20).Draw(t, label+" last"))
		}
		stored, reported := draw("stored"), draw("reported")
		b := Bucket{Name: "s", Key: "k", Limit: l, Cost: 31} // never admitted, so nothing is charged
		server := stored
		server.Clear += v.now
		redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), l.written(server, v.now).value(), 0))
		want := l.of().Join(stored, reported, 0, false)
		late := reported
		late.Clear += rapid.Int64Range(0, (l.of().Rate()-1)/2).Draw(t, "late")
		dirty := rapid.SampledFrom([]dirtiness{unsure, own}).Draw(t, "dirty")
		outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{bucket.Ahead(late), 0, dirty}})
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case reported.Clear > stored.Clear:
			seen["a later window"]++
		case reported.Clear < stored.Clear:
			seen["an earlier window"]++
		case late != reported:
			seen["late"]++
		}
		if outcomes[0].After(0) != want {
			t.Fatalf("%+v, reported %+v, %v: %+v, want %+v", stored, late, dirty, outcomes[0].Ahead, want)
		}
		if now, _ := parseWritten(v.stored(t, []Bucket{b})[0]); now.Clear-v.now != want.Clear || now.Rest != want.Rest {
			t.Fatalf("stored %+v, want %+v", now, want)
		}
	})
	for _, what := range []string{"a later window", "an earlier window", "late"} {
		if seen[what] < 50 {
			t.Errorf("the test covers too little: %v", seen)
		}
	}
}

// TestSlidingWindowHoldsUnits guards units that are held for a request which has
// buckets in other slots: they take room; they count once they are committed, or as
// of the time until which they were held; and not once they are released.
func TestSlidingWindowHoldsUnits(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "s", Key: "k", Limit: SlidingWindow(10, time.Minute), Cost: 4}
	req := Request{Buckets: []Bucket{b}}
	call := func(q *query) outcome {
		t.Helper()
		return v.evaluate(t, req, q)
	}
	peek := func(what string, units, held, remaining int64) {
		t.Helper()
		if l, err := v.Peek(t.Context(), b); err != nil || l.Units != units || l.Held != held || l.Remaining != remaining {
			t.Errorf("%s: %+v, error %v, want %d units, %d held, %d remaining", what, l, err, units, held, remaining)
		}
	}
	begin := v.start - v.start%60e6 + 3600e6
	for _, end := range []string{"committed", "released", "left"} {
		v.flush(t)
		v.at(t, begin+55e6)
		decide(t, v, AccountingAtomic, b)
		q := asProcess(v.query(toHold(req), 0))
		o := call(q)
		if o.denied || o.held != 4 || o.receipt != v.now {
			t.Errorf("held: %+v", o)
		}
		peek("held", 4, 4, 2)
		again := call(asProcess(v.query(toHold(req), 0)))
		if !again.denied || !again.blocked {
			t.Errorf("a request that has no room beside held units: %+v", again)
		}
		v.at(t, begin+60e6)
		peek("in the next window", 4, 4, 2)
		switch end {
		case "committed":
			settleAs(q, verdictAdmitted, []outcome{o})
			call(q)
			peek(end, 8, 0, 2)
			v.at(t, begin+90e6)
			peek("half a window later", 6, 0, 4)
		case "released":
			settleAs(q, verdictNone, []outcome{o})
			call(q)
			peek(end, 4, 0, 6)
		case "left":
			v.at(t, begin+70e6-1)
			peek("still held", 3, 4, 3)
			v.at(t, begin+90e6)
			peek(end, 6, 0, 4)
			settleAs(q, verdictAdmitted, []outcome{o})
			if o := call(q); o.Rest&bucket.MaxSlidingUnits != 4 {
				t.Errorf("settled too late: %+v", o)
			}
			v.at(t, begin+150e6)
			peek("a window later", 2, 0, 8)
		}
	}
}

// TestSlidingWindowReported guards what is reported to a server of a sliding window: all that
// it counts, even if it may not for long.
func TestSlidingWindowReported(t *testing.T) {
	now := 1000 * time.Hour
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, time.Minute, "")
	b := Bucket{Name: "s", Key: "k", Limit: SlidingWindow(9, time.Hour), Cost: 3}
	f.decide(Request{Buckets: []Bucket{b}}, nil, false)
	now += 2*time.Hour - time.Second // 3 units at the beginning of a window, and one second left of the next
	f = &fallback{traffic: new(traffic), memory: m, timeout: time.Minute}
	got := localLevelsFor(f, queryOf(f, Request{Buckets: []Bucket{b}}))
	want := bucket.Ahead{Clear: 1e6, Rest: 3}
	if len(got) != 1 || got[0].Ahead != want || got[0].dirty != own {
		t.Errorf("reported %+v, want %+v", got, want)
	}
}
