package limiter

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// windowed is a limit that counts in fixed windows, as its description says: it
// knows the units admitted in each window, and nothing of buckets.
type windowed struct {
	begin func(now int64) int64 // when the window at now begins, in µs
	ends  int64                 // when the window of the last admission ends, in µs
	used  int64                 // the units admitted in it
}

// newWindowed returns the description of l.
func newWindowed(l Limit) *windowed {
	w := new(windowed)
	width, phase := l.DripInterval.Microseconds(), l.Phase.Microseconds()
	w.begin = func(now int64) int64 {
		if !l.Aligned {
			return now
		}
		n := (now - phase) / width
		if phase+n*width > now {
			n--
		}
		return phase + n*width
	}
	return w
}

// take decides a request at the time now, in µs.
func (w *windowed) take(l Limit, now, cost int64) Decision {
	if now >= w.ends {
		w.ends, w.used = w.begin(now)+l.DripInterval.Microseconds(), 0
	}
	d := Decision{Size: l.Size, Denied: w.used+cost > l.Size, Never: cost > l.Size}
	if !d.Denied {
		w.used += cost
	}
	left := time.Duration(w.ends-now) * time.Microsecond
	if w.used > 0 {
		d.Clear = left
	} else {
		w.ends = 0 // a window that counts nothing has not begun
	}
	if d.Denied && !d.Never {
		d.RetryAfter = left
	}
	d.Remaining = l.Size - w.used
	return d
}

// drawWindow draws a limit that counts in fixed windows.
func drawWindow(t *rapid.T) Limit {
	size := rapid.SampledFrom([]int64{1, 2, 5, 7, 1000, 1_000_000, MaxUnits}).Draw(t, "size")
	width := rapid.SampledFrom([]time.Duration{
		2 * time.Microsecond, 7 * time.Microsecond, 999_983 * time.Microsecond, time.Second, time.Minute,
		23 * time.Hour, 25 * time.Hour, 31 * 24 * time.Hour, 366 * 24 * time.Hour, 17 * 365 * 24 * time.Hour,
	}).Draw(t, "window")
	if rapid.Bool().Draw(t, "first") {
		return FixedWindow(size, width)
	}
	start := rapid.Int64Range(-1<<51, 1<<51).Draw(t, "start")
	return ClockWindow(size, width, time.UnixMicro(start))
}

// drawWindowGap draws the time to the next request, in µs.
func drawWindowGap(t *rapid.T, l Limit, last Decision) int64 {
	off := rapid.Int64Range(-1, 1)
	gap := int64(0)
	switch rapid.IntRange(0, 5).Draw(t, "gap") {
	case 1:
		gap = 1
	case 2:
		gap = l.of().Rate() + off.Draw(t, "off by")
	case 3:
		gap = max(last.RetryAfter, last.Clear).Microseconds() + off.Draw(t, "off by")
	case 4:
		gap = rapid.Int64Range(0, l.of().Rate()/2).Draw(t, "µs")
	case 5:
		gap = rapid.Int64Range(0, 5).Draw(t, "windows") * l.of().Rate()
	}
	return max(gap, 0) % (5 * 365 * 24 * 3600 * 1e6) // within the years that a Duration can tell
}

// TestWindowsFollowDescription guards fixed windows: every number in every
// decision is what counting the units of each window gives.
func TestWindowsFollowDescription(t *testing.T) {
	t.Parallel()
	checkTraces(t, 100, func(t *rapid.T) {
		l := drawWindow(t)
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		s := newSubject(1_790_000_000_123_456)
		w, last := newWindowed(l), Decision{}
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			s.now += drawWindowGap(t, l, last)
			cost := rapid.SampledFrom([]int64{1, 1, 1, 2, l.Size/2 + 1, l.Size, l.Size + 1}).Draw(t, "cost")
			want := w.take(l, s.now, cost)
			if last = plainDecision(s.take(t, l, cost)); last != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", l, i, cost, s.now, last, want)
			}
		}
	})
}

// TestRedisWindows guards the same in Redis, on the server's clock.
func TestRedisWindows(t *testing.T) {
	t.Parallel()
	seen := struct{ admitted, denied, windows int }{}
	checkRedisTraces(t, 5, func(t *rapid.T) described {
		l := drawWindow(t)
		w := newWindowed(l)
		return described{
			limit: l,
			gap:   func(last Decision) int64 { return drawWindowGap(t, l, last) },
			cost: func(Decision) int64 {
				return rapid.SampledFrom([]int64{1, 1, 1, 2, l.Size/2 + 1, l.Size, l.Size + 1}).Draw(t, "cost")
			},
			take: func(now, cost int64) Decision {
				ended := w.ends
				d := w.take(l, now, cost)
				switch {
				case d.Denied:
					seen.denied++
				case w.ends != ended:
					seen.windows++
				default:
					seen.admitted++
				}
				return d
			},
		}
	})
	if min(seen.admitted, seen.denied, seen.windows) < 200 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestWindowsDoubleAtTheirEdge guards what is said of fixed windows, with the
// figures of seed 004: of two windows of a minute with five requests each, ten
// requests fall into the minute from one middle to the other.
func TestWindowsDoubleAtTheirEdge(t *testing.T) {
	minute := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	s := newSubject(minute.Add(30 * time.Second).UnixMicro())
	l := ClockWindow(5, time.Minute, time.Unix(0, 0))
	if n := s.flood(t, l); n != 5 {
		t.Errorf("%d admitted in the first window, want 5", n)
	}
	s.now = minute.Add(59*time.Second + 999_999*time.Microsecond).UnixMicro()
	if d := s.take(t, l, 1); d.RetryAfter != time.Microsecond {
		t.Errorf("at its end: %+v, want a denial for one microsecond", d)
	}
	s.now = minute.Add(90*time.Second - time.Microsecond).UnixMicro()
	if n := s.flood(t, l); n != 5 {
		t.Errorf("%d admitted in the second window, want 5", n)
	}
	s.now = minute.Add(2 * time.Minute).UnixMicro()
	if n := s.flood(t, l); n != 5 {
		t.Errorf("%d admitted in the third window, want 5", n)
	}
}

// TestWindowsAreLimitsOfTheirOwn guards that windows with other lengths or
// beginnings never share a bucket, in either store.
func TestWindowsAreLimitsOfTheirOwn(t *testing.T) {
	limits := []Limit{
		FixedWindow(1, time.Minute), FixedWindow(1, time.Hour),
		ClockWindow(1, time.Minute, time.Unix(0, 0)), ClockWindow(1, time.Minute, time.Unix(1, 0)),
		{Size: 1, DripInterval: time.Minute, DripSize: 1},
		{Size: 1, DripInterval: time.Minute, DripSize: 1, Aligned: true},
	}
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for _, store := range []Store{NewMemory(), v} {
		for i, l := range limits {
			if d := decide(t, store, AccountingAtomic, Bucket{Name: "w", Key: "k", Limit: l, Cost: 1}); d[0].Denied {
				t.Errorf("%T: limit %d was charged for another", store, i)
			}
		}
	}
	for _, key := range v.admin.Keys(t.Context(), "rl:*").Val() {
		if strings.Contains(key, " ") {
			t.Errorf("key %q", key)
		}
	}
	if n := len(v.admin.Keys(t.Context(), "rl:*").Val()); n != len(limits) {
		t.Errorf("%d keys, want %d", n, len(limits))
	}
}
