package bucket

import (
	"fmt"
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// TestOfRate guards the drips of a rate: n/d reduced to whole microseconds,
// unless that is uneven or more than the bucket holds.
func TestOfRate(t *testing.T) {
	const (
		µs  = time.Microsecond
		ms  = time.Millisecond
		day = 24 * time.Hour
	)
	tests := []struct {
		n    int64
		d    time.Duration
		size int64
		drip int64 // wanted
		rate time.Duration
	}{
		{1, time.Second, 1, 1, time.Second},
		{5, time.Second, 5, 1, 200 * ms},
		{60, time.Minute, 60, 1, time.Second},
		{3, day, 3, 1, 8 * time.Hour},
		{1000, day, 50, 1, 86_400 * ms},
		{60, time.Second, 60, 3, 50 * ms},
		{60, time.Second, 3, 3, 50 * ms},
		{60, time.Second, 2, 1, 16_667 * µs}, // 3 would not fit
		{60, time.Second, 1, 1, 16_667 * µs},
		{30, time.Second, 30, 3, 100 * ms},
		{15, time.Second, 15, 1, 66_667 * µs}, // not 3 every 200 ms
		{7, time.Second, 7, 1, 142_858 * µs},  // not 7 every second
		{7, time.Minute, 100, 1, 8_571_429 * µs},
		{999, time.Second, 999, 10, 10_011 * µs},
		{1000, time.Second, 1, 1, ms},
		{999_983, time.Second, 999_983, 8547, 8548 * µs},
		{1_000_000, time.Second, 1, 1, µs},
		{3_000_000, time.Second, 3, 3, µs},
		{MaxUnits, µs, MaxUnits, MaxUnits, µs},
		{MaxUnits, MaxUnits * µs, 1, 1, µs},
		{1, MaxUnits * µs, 1, 1, MaxUnits * µs},
	}
	for _, tc := range tests {
		t.Run(fmt.Sprintf("%d each %v, size %d", tc.n, tc.d, tc.size), func(t *testing.T) {
			got, err := OfRate(tc.n, tc.d, tc.size)
			if want := (Limit{Size: tc.size, DripInterval: tc.rate, DripSize: tc.drip}); err != nil || got != want {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
		})
	}
}

// TestOfRateErrors guards that a rate which cannot be kept is an error that says
// what is out of range.
func TestOfRateErrors(t *testing.T) {
	const drain = ": a full bucket and one drip more must drain within 35 years"
	tests := []struct {
		n    int64
		d    time.Duration
		size int64
		want string
	}{
		{0, time.Second, 1, "rate of 0 units: must be from 1 to 562949953421312"},
		{-1, time.Second, 1, "rate of -1 units: must be from 1 to 562949953421312"},
		{MaxUnits + 1, time.Second, 1, "rate of 562949953421313 units: must be from 1 to 562949953421312"},
		{1, 0, 1, "rate of 1/0s: must be for a whole number of microseconds, at least 1µs"},
		{1, -time.Second, 1, "rate of 1/-1s: must be for a whole number of microseconds, at least 1µs"},
		{1, 1500, 1, "rate of 1/1.5µs: must be for a whole number of microseconds, at least 1µs"},
		{
			1, math.MaxInt64 / 1000 * time.Microsecond, 1,
			"rate of 1/2562047h47m16.854775s: must be for at most 35 years",
		},
		{1, time.Second, 0, "size 0: must be from 1 to 562949953421312"},
		{1, time.Second, MaxUnits + 1, "size 562949953421313: must be from 1 to 562949953421312"},
		{999, time.Second, -1, "size -1: must be from 1 to 562949953421312"},
		{1, time.Second, MaxUnits, "size 562949953421312, drip rate 1s, drip size 1" + drain},
		{
			999, time.Second, 9, "size 9: must be at least 10 for a rate of 999/1s; " +
				"the nearest rates for it are 9/9.01ms and 9/9.009ms",
		},
		{
			3_000_000, time.Second, 2, "size 2: must be at least 3 for a rate of 3000000/1s; " +
				"the nearest rates for it are 2/1µs",
		},
	}
	for _, tc := range tests {
		t.Run(tc.want, func(t *testing.T) {
			l, err := OfRate(tc.n, tc.d, tc.size)
			if err == nil || err.Error() != tc.want || l != (Limit{}) {
				t.Errorf("got %+v, %v", l, err)
			}
		})
	}
}

// TestOfRateKeepsRate guards the promise for every rate and size: never above
// the rate, below it by less than 1 part in 10,000, even, and no drip larger than
// the bucket. The size is rejected only if no drip can keep the rate, and the
// suggested rates are accepted.
func TestOfRateKeepsRate(t *testing.T) {
	anyOf := func(most int64) *rapid.Generator[int64] {
		return rapid.OneOf(rapid.Int64Range(1, 100), rapid.Int64Range(1, 2_000_000), rapid.Int64Range(1, most),
			rapid.Map(rapid.IntRange(0, 49), func(bit int) int64 { return min(1<<bit, most) }))
	}
	testseed.Check(t, 1, func(t *rapid.T) {
		n := anyOf(MaxUnits).Draw(t, "n")
		d := rapid.OneOf(anyOf(Horizon), rapid.SampledFrom([]int64{1e3, 1e6, 60e6, 3600e6, 86400e6})).Draw(t, "d")
		size := rapid.OneOf(anyOf(MaxUnits), rapid.Just(n)).Draw(t, "size")
		l, err := OfRate(n, time.Duration(d)*time.Microsecond, size)
		if err != nil {
			// None of the drips that fit may keep the rate: with s units a drip,
			// the best interval is ⌈s·d/n⌉, of at most some 10,000 µs.
			for s := int64(1); s <= min(size, 20_000); s++ {
				p := new(big.Int).Mul(big.NewInt(s), big.NewInt(d))
				p.Add(p, big.NewInt(n-1)).Div(p, big.NewInt(n))
				best := Limit{Size: size, DripInterval: time.Duration(p.Int64()) * time.Microsecond, DripSize: s}
				if best.Validate() == nil && short(n, d, best) {
					t.Fatalf("%d each %d µs, size %d: %v, but %+v keeps the rate", n, d, size, err, best)
				}
			}
			return
		}
		switch {
		case l.Size != size || l.Validate() != nil:
			t.Fatalf("%+v: %v, want size %d", l, l.Validate(), size)
		case l.DripSize > size:
			t.Fatalf("%+v: a drip is more than the bucket holds", l)
		case l.DripSize > 1 && l.DripInterval > evenly:
			t.Fatalf("%+v is not even", l)
		case !short(n, d, l):
			t.Fatalf("%+v does not keep %d each %d µs", l, n, d)
		}
	})
}

// TestWithBurst guards that a burst changes nothing but itself if there is room for what drips
// at once, and otherwise makes the rate lower, never higher; and that no burst makes a Limit
// valid that is not.
func TestWithBurst(t *testing.T) {
	const µs = time.Microsecond
	counting := Per(60, time.Second)
	counting.CountDenied = true
	for _, tc := range []struct {
		name  string
		l     Limit
		burst int64
		want  Limit // the zero Limit if it is not valid
	}{
		{"larger", Per(1000, 24*time.Hour), 5000, Limit{Size: 5000, DripInterval: 86_400 * time.Millisecond, DripSize: 1}},
		{"smaller", Per(1000, 24*time.Hour), 50, Limit{Size: 50, DripInterval: 86_400 * time.Millisecond, DripSize: 1}},
		{"of an interval", Every(2 * time.Second), 16, Limit{Size: 16, DripInterval: 2 * time.Second, DripSize: 1}},
		{"of a drip", Per(60, time.Second), 3, Limit{Size: 3, DripInterval: 50_000 * µs, DripSize: 3}},
		{"less than a drip", Per(60, time.Second), 2, Limit{Size: 2, DripInterval: 16_667 * µs, DripSize: 1}},
		{"less than a drip, counting", counting, 2, Limit{Size: 2, DripInterval: 16_667 * µs, DripSize: 1, CountDenied: true}},
		{"less than the least drip", Per(999, time.Second), 9, Limit{Size: 9, DripInterval: 5_006 * µs, DripSize: 5}},
		{"much less than the least drip", Per(999, time.Second), 4, Limit{Size: 4, DripInterval: 4_005 * µs, DripSize: 4}},
		{"less than a microsecond's", Per(3_000_000, time.Second), 2, Limit{Size: 2, DripInterval: µs, DripSize: 2}},
		{"one of very many", Per(MaxUnits, time.Second), 1, Limit{Size: 1, DripInterval: µs, DripSize: 1}},
		{"none", Per(60, time.Second), 0, Limit{}},
		{"too large", Per(60, time.Second), MaxUnits + 1, Limit{}},
		{"drains too slowly", Every(time.Hour), 1 << 20, Limit{}},
		{"of no rate", Per(0, time.Second), 5, Limit{}},
		{"of a negative rate", Per(-3, time.Second), 5, Limit{}},
		{"of too high a rate", Per(MaxUnits+1, time.Second), 5, Limit{}},
		{"of no time", Per(5, 0), 2, Limit{}},
		{"of a fraction of a microsecond", Per(5, 1500), 2, Limit{}},
		{"of too long a time", Per(5, 36*365*24*time.Hour), 2, Limit{}},
		{"of a window", FixedWindow(5, time.Second), 2, Limit{}},
		{"of a sliding window", SlidingWindow(5, time.Second), 2, Limit{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := tc.l.WithBurst(tc.burst)
			if tc.want == (Limit{}) {
				if err := got.Validate(); err == nil {
					t.Errorf("%+v is valid", got)
				}
				return
			}
			if err := got.Validate(); err != nil || got != tc.want {
				t.Errorf("got %+v, %v, want %+v", got, err, tc.want)
			}
		})
	}
	testseed.Check(t, 1, func(t *rapid.T) {
		n := rapid.OneOf(rapid.Int64Range(1, 2_000_000), rapid.Int64Range(1, MaxUnits)).Draw(t, "n")
		d := time.Duration(rapid.OneOf(rapid.Int64Range(1, 10_000), rapid.Int64Range(1, 86_400e6)).Draw(t, "d")) * µs
		burst := rapid.OneOf(rapid.Int64Range(1, 100), rapid.Int64Range(1, 2_000_000)).Draw(t, "burst")
		l := Per(n, d)
		got := l.WithBurst(burst)
		if l.Validate() != nil || got.Validate() != nil {
			return
		}
		if got.Size != burst || got.DripSize > burst {
			t.Fatalf("%+v.WithBurst(%d) = %+v", l, burst, got)
		}
		asked, rate := big.NewRat(n, d.Microseconds()), big.NewRat(l.DripSize, l.DripInterval.Microseconds())
		if drips := big.NewRat(got.DripSize, got.DripInterval.Microseconds()); drips.Cmp(asked) > 0 {
			t.Fatalf("%+v.WithBurst(%d) = %+v: more than %d every %v", l, burst, got, n, d)
		}
		if got.DripSize == l.DripSize && got.DripInterval == l.DripInterval || short(l.DripSize, l.DripInterval.Microseconds(), got) {
			return
		}
		if µs := got.DripInterval.Microseconds(); got.DripSize != burst || µs > 1 && big.NewRat(burst, µs-1).Cmp(rate) <= 0 {
			t.Fatalf("%+v.WithBurst(%d) = %+v: less than it could be", l, burst, got)
		}
	})
}

// short reports whether l drips at most n units every d µs, and less by less than
// 1 part in 10,000.
func short(n, d int64, l Limit) bool {
	rate := big.NewRat(n, d)
	drips := big.NewRat(l.DripSize, l.DripInterval.Microseconds())
	least := new(big.Rat).Mul(rate, big.NewRat(9_999, 10_000))
	return drips.Cmp(rate) <= 0 && drips.Cmp(least) > 0
}

// TestOfRateExtremes guards that the search for a drip ends without overflow for
// the largest numbers.
func TestOfRateExtremes(t *testing.T) {
	for _, n := range []int64{1, 2, 3, 1<<25 - 1, 1<<49 - 1, MaxUnits} {
		for _, d := range []int64{1, 2, 3, 9_999, 10_001, 1<<25 + 1, 1<<49 - 1, 1<<49 + 1, Horizon - 1, Horizon} {
			l := Limit{Size: n, DripInterval: time.Duration(d) * time.Microsecond, DripSize: n}.finest()
			if l.DripSize < 1 || l.DripSize > n || !short(n, d, l) {
				t.Errorf("%d each %d µs: %+v", n, d, l)
			}
		}
	}
}

// TestRateConstructors guards Per and Every for numbers that make
// sense and numbers that do not: nothing panics, and a Limit that is not valid
// admits nothing.
func TestRateConstructors(t *testing.T) {
	for _, tc := range []struct {
		name  string
		got   Limit
		want  Limit
		valid bool
	}{
		{"1 a second", Per(1, time.Second), Limit{Size: 1, DripInterval: time.Second, DripSize: 1}, true},
		{"10 a second", Per(10, time.Second), Limit{Size: 10, DripInterval: 100 * time.Millisecond, DripSize: 1}, true},
		{"60 a second", Per(60, time.Second), Limit{Size: 60, DripInterval: 50 * time.Millisecond, DripSize: 3}, true},
		{"MaxUnits a second", Per(MaxUnits, time.Second), Limit{Size: MaxUnits, DripInterval: 15_625 * time.Microsecond, DripSize: MaxUnits / 64}, true},
		{"0 a second", Per(0, time.Second), Limit{Size: 0, DripInterval: time.Second, DripSize: -1}, false},
		{"-1 a second", Per(-1, time.Second), Limit{Size: -1, DripInterval: time.Second, DripSize: -1}, false},
		{"MaxUnits+1 a second", Per(MaxUnits+1, time.Second), Limit{Size: MaxUnits + 1, DripInterval: time.Second, DripSize: MaxUnits + 1}, false},
		{"30 a minute", Per(30, time.Minute), Limit{Size: 30, DripInterval: 2 * time.Second, DripSize: 1}, true},
		{"0 a minute", Per(0, time.Minute), Limit{Size: 0, DripInterval: time.Minute, DripSize: -1}, false},
		{"Every(1s)", Every(time.Second), Limit{Size: 1, DripInterval: time.Second, DripSize: 1}, true},
		{"Every(1ns)", Every(1), Limit{Size: 1, DripInterval: time.Microsecond, DripSize: 1}, true},
		{"Every(1001ns)", Every(1001), Limit{Size: 1, DripInterval: 2 * time.Microsecond, DripSize: 1}, true},
		{"Every(0)", Every(0), Limit{Size: 1, DripInterval: 0, DripSize: 1}, false},
		{"Every(-1s)", Every(-time.Second), Limit{Size: 1, DripInterval: -time.Second, DripSize: 1}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.got != tc.want {
				t.Errorf("got %+v, want %+v", tc.got, tc.want)
			}
			if err := tc.got.Validate(); (err == nil) != tc.valid {
				t.Errorf("%+v: %v", tc.got, err)
			}
		})
	}
	if l := Every(math.MaxInt64); l.Validate() == nil {
		t.Errorf("Every(MaxInt64) is %+v", l)
	}
}

// TestPerIsValid guards that only the number of units can be wrong with a rate of a second or
// a minute, which returns no error.
func TestPerIsValid(t *testing.T) {
	testseed.Check(t, 1, func(t *rapid.T) {
		n := rapid.OneOf(rapid.Int64Range(1, 3_000_000), rapid.Int64Range(1, MaxUnits)).Draw(t, "n")
		for _, l := range []Limit{Per(n, time.Second), Per(n, time.Minute)} {
			if err := l.Validate(); err != nil || l.Size != n {
				t.Fatalf("%d: %+v: %v", n, l, err)
			}
		}
	})
}

// TestDelayedAtARate guards that as many requests may wait as the rate says that is written, although
// its drips take longer by a part of a microsecond.
func TestDelayedAtARate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		n    int64
		each time.Duration
		wait time.Duration
		want int64
	}{
		{3, time.Second, 332 * time.Millisecond, 0},
		{3, time.Second, 333333 * time.Microsecond, 1},
		{3, time.Second, 666 * time.Millisecond, 1},
		{3, time.Second, 667 * time.Millisecond, 2},
		{3, time.Second, time.Second, 3},
		{7, time.Second, time.Second, 7},
		{7, time.Second, time.Minute, 420},
		{10, time.Second, 999 * time.Millisecond, 9},
		{1, time.Second, 9999 * time.Millisecond, 9},
	} {
		l, err := OfRate(tc.n, tc.each, 10)
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Delayed(tc.wait, 1); got != tc.want {
			t.Errorf("%d/%v: %d may wait for %v, want %d", tc.n, tc.each, got, tc.wait, tc.want)
		}
	}
}
