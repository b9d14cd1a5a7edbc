package replay

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const ms = time.Millisecond

// TestPeaks guards that the highest level of a key's bucket, if it could hold
// anything, says by which size the key would be denied, whatever the algorithm: it is
// denied at least once by a limit of a smaller size, and never by one of that size.
func TestPeaks(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	interval := func() time.Duration { return time.Duration(1+random.IntN(2000)) * ms }
	for name, numbers := range map[string]func() limiter.Limit{
		"leaky bucket":   func() limiter.Limit { return limiter.Limit{DripInterval: interval(), DripSize: 1 + random.Int64N(5)} },
		"window":         func() limiter.Limit { return limiter.FixedWindow(1, 10*interval()) },
		"clock window":   func() limiter.Limit { return limiter.ClockWindow(1, 10*interval(), time.Unix(0, 0)) },
		"sliding window": func() limiter.Limit { return limiter.SlidingWindow(1, 10*interval()) },
	} {
		t.Run(name, func(t *testing.T) {
			for range 300 {
				b := limiter.Bucket{Name: "x", Limit: numbers(), Cost: 1}
				times, costs := make([]time.Duration, 60), make([]int64, 60)
				now := time.Hour
				clock := func() time.Duration { return now }
				roomy, peak := newRoomyStore(clock, 10), int64(0)
				for i := range times {
					now += time.Duration(random.IntN(1000)) * ms
					times[i], costs[i] = now, 1+random.Int64N(4)
					b.Cost = costs[i]
					levels, err := roomy.fill([]limiter.Bucket{b})
					if err != nil {
						t.Fatal(err)
					}
					peak = max(peak, levels[0].units)
				}
				denies := func(size int64) bool {
					m := limiter.NewMemoryWithClock(clock)
					b.Limit.Size = size
					for i := range times {
						now, b.Cost = times[i], costs[i]
						d, err := m.Take(t.Context(), limiter.Request{Buckets: []limiter.Bucket{b}}, nil)
						if err != nil {
							t.Fatal(err)
						}
						if d[0].Denied {
							return true
						}
					}
					return false
				}
				if denies(peak) || peak > 1 && !denies(peak-1) {
					t.Fatalf("%+v: peak %d: denies %v, one less %v", b.Limit, peak, denies(peak), denies(peak-1))
				}
			}
		})
	}
}

// TestPeaksWithoutEnd guards that a key which no valid size would serve is reported
// from others.
func TestPeaksWithoutEnd(t *testing.T) {
	for name, of := range map[string]struct {
		limit limiter.Limit
		cost  int64
	}{
		"leaky bucket":   {limiter.Limit{DripInterval: 24 * time.Hour}, 10_000},
		"window":         {limiter.FixedWindow(1, time.Second), limiter.MaxUnits},
		"sliding window": {limiter.SlidingWindow(1, time.Second), bucket.MaxSlidingUnits},
	} {
		roomy := newRoomyStore(func() time.Duration { return time.Hour }, 10)
		for i, fits := range []bool{true, false} {
			levels, err := roomy.fill([]limiter.Bucket{{Name: "x", Limit: of.limit, Cost: of.cost}})
			if err != nil || (levels[0].units == of.cost) != fits || (levels[0].units == report.NoSize) == fits {
				t.Errorf("%s, request %d: %v, %v", name, i, levels, err)
			}
		}
	}
}

// TestRounding guards how peaks are rounded.
func TestRounding(t *testing.T) {
	for units, want := range map[int64]int64{1: 1, 63: 63, 64: 64, 65: 66, 1001: 1008, math.MaxInt64: math.MaxInt64} {
		if got := roundUp(units); got != want {
			t.Errorf("%d is rounded to %d, want %d", units, got, want)
		}
	}
	if got := roundedPeak(99, 99); got != 99 {
		t.Errorf("a peak of the size is rounded to %d", got)
	}
}

// TestTimeline guards that requests stay in the slot of their time while
// slots widen, over years.
func TestTimeline(t *testing.T) {
	var line timeline
	start := time.Date(2023, 11, 14, 22, 13, 20, 0, time.UTC)
	var times []time.Time
	for at, step := start, time.Second; at.Before(start.AddDate(20, 0, 0)); at, step = at.Add(step), step+step/2 {
		times = append(times, at)
		line.count(at.UnixNano(), false, true)
		width, slots := line.report()
		if len(slots) > maxSlots {
			t.Fatalf("%d slots", len(slots))
		}
		for _, past := range times {
			want := int64(0)
			i := slices.IndexFunc(slots, func(s report.Slot) bool { return !past.Before(s.Start) && past.Before(s.Start.Add(width)) })
			for _, other := range times {
				if !other.Before(slots[i].Start) && other.Before(slots[i].Start.Add(width)) {
					want++
				}
			}
			if slots[i].Admitted != want {
				t.Fatalf("the slot of %v has %d requests, want %d", past, slots[i].Admitted, want)
			}
		}
	}
}

// TestMemory guards that what a replay holds is bounded, however many keys
// and paths clients choose, and that what was removed still counts.
func TestMemory(t *testing.T) {
	p := &replay{store: limiter.NewMemory()}
	p.roomy = newRoomyStore(func() time.Duration { return p.now }, maxReplayedKeys)
	l := newReplayedLimit(limitOfSize(2), Options{Location: time.UTC, ShowKeys: true})
	l.keys.most = maxReplayedKeys
	b := limiter.Bucket{Name: l.bucket, Limit: limiter.Limit{Size: 2, DripInterval: time.Second}, Cost: 1}
	const requests = 1_300_000
	long := strings.Repeat("x", 10_000)
	for i := range requests {
		b.Key = fmt.Sprint(i)
		path := "/" + b.Key
		if i%1000 == 0 {
			path, b.Key = "/popular"+long, long
		}
		p.now = time.Hour + time.Duration(i)*time.Microsecond
		levels, err := p.roomy.fill([]limiter.Bucket{b})
		if err != nil {
			t.Fatal(err)
		}
		l.keys.add(&b, p.now, levels[0], i%1000 == 0)
		l.count(int64(i), path, i%1000 == 0, i%1000 != 0)
	}
	runtime.GC()
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	if mem.HeapAlloc > 400<<20 {
		t.Errorf("the heap has %d MB", mem.HeapAlloc>>20)
	}
	r := l.report()
	var inPeaks, inPaths int64
	for _, peak := range r.Peaks {
		inPeaks += peak.Keys
	}
	for _, path := range r.ByPath {
		inPaths += path.Requests
	}
	if r.Keys < requests*999/1000 || r.Keys > requests || inPeaks != r.Keys || inPaths != requests {
		t.Errorf("%d keys, %d peaks, %d requests by path", r.Keys, inPeaks, inPaths)
	}
	if r.Top[0].Denied == 0 || r.ByPath[0].Path != ("/popular" + long)[:maxText] || len(r.Top) != shownKeys || len(r.ByPath) != shownPaths+1 {
		t.Errorf("got %d top keys, the first is %.20s with %d denied, and %d paths", len(r.Top), r.Top[0].Text, r.Top[0].Denied, len(r.ByPath))
	}
	if len(p.unusual(l)) != 1 {
		t.Errorf("got %q", p.unusual(l))
	}
}

// TestFactor guards which size leaves so many units when a factor divides it, and that
// none does that is too large for a limit.
func TestFactor(t *testing.T) {
	for _, tc := range []struct {
		factor      factor
		units, want int64
	}{{1e6, math.MaxInt64, math.MaxInt64}, {1e6, limiter.MaxUnits, limiter.MaxUnits}, {2e6, limiter.MaxUnits, math.MaxInt64}, {math.MaxUint64, 1 << 40, math.MaxInt64}, {1, limiter.MaxUnits, limiter.MaxUnits/1_000_000 + 1}} {
		if got := tc.factor.sizeFor(tc.units); got != tc.want {
			t.Errorf("factor %v, %d units: got %d, want %d", tc.factor, tc.units, got, tc.want)
		}
	}
}

// limitOfSize returns a limit of a size that drips each second.
func limitOfSize(size int64) *offline.Limit {
	return &offline.Limit{LocatedBucket: rule.LocatedBucket{Bucket: &rule.Bucket{
		Limit: &rule.Limit{Path: "a", Key: new(key.Key), Algorithm: rule.LeakyBucket}, Path: "a", Name: "a",
		Size:   value.Value[int64]{Constant: size},
		Rate:   value.Value[time.Duration]{Constant: time.Second},
		Drip:   value.Value[int64]{Constant: 1},
		Cost:   value.Value[int64]{Constant: 1},
		Factor: value.Value[option.Factor]{Constant: 1e6},
	}}}
}
