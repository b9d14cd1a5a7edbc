package bucket

import (
	"math"
	"testing"
	"time"
)

// TestLevelAtNow guards how a stored level is read: one that has drained, or lies
// beyond the horizon, is an empty bucket. Any other stays as it is, even if it
// holds more than the size in a request.
func TestLevelAtNow(t *testing.T) {
	const now = 1_790_000_000_000_000
	tests := []struct {
		name         string
		stored, want Level
	}{
		{"absent", Level{}, Level{now, 0}},
		{"drained", Level{now, 1}, Level{now, 0}},
		{"drained long ago", Level{1, 1}, Level{now, 0}},
		{"not drained", Level{now + 1, 1}, Level{now + 1, 1}},
		{"an hour", Level{now + 3600e6, 2}, Level{now + 3600e6, 2}},
		{"at the horizon", Level{now + 1<<50, 1}, Level{now + 1<<50, 1}},
		{"beyond the horizon", Level{now + 1<<50 + 1, 1}, Level{now, 0}},
		{"end of time", Level{math.MaxInt64, 1}, Level{now, 0}},
	}
	for _, tc := range tests {
		if got := tc.stored.At(now); got != tc.want {
			t.Errorf("%s: got now%+d µs, rest %d, want now%+d µs, rest %d",
				tc.name, got.Clear-now, got.Rest, tc.want.Clear-now, tc.want.Rest)
		}
	}
}

// checkValidate checks the error of a limit's numbers, which is empty if they are valid.
func checkValidate(t testing.TB, l Limit, want string) {
	t.Helper()
	got := ""
	if err := l.Validate(); err != nil {
		got = err.Error()
	}
	if got != want {
		t.Errorf("%+v: got %q, want %q", l, got, want)
	}
}

// TestLimitValidate guards the error texts for numbers out of range, and the edges
// of the ranges.
func TestLimitValidate(t *testing.T) {
	const us = time.Microsecond
	tests := []struct {
		name  string
		limit Limit
		want  string // the error, empty if none
	}{
		{"zero", Limit{}, "the zero Limit is not valid: use PerSecond, FixedWindow or another function that makes one"},
		{"negative size", Limit{Size: -1, DripInterval: us, DripSize: 1}, "size -1: must be from 1 to 562949953421312"},
		{"size too large", Limit{Size: 1<<49 + 1, DripInterval: us, DripSize: 1},
			"size 562949953421313: must be from 1 to 562949953421312"},
		{"negative drip size", Limit{Size: 1, DripInterval: us, DripSize: -1}, "drip size -1: must be from 1 to 562949953421312"},
		{"drip size too large", Limit{Size: 1, DripInterval: us, DripSize: 1<<49 + 1},
			"drip size 562949953421313: must be from 1 to 562949953421312"},
		{"no drip rate", Limit{Size: 1, DripInterval: 0, DripSize: 1},
			"drip rate 0s: must be a whole number of microseconds, at least 1µs"},
		{"negative drip rate", Limit{Size: 1, DripInterval: -us, DripSize: 1},
			"drip rate -1µs: must be a whole number of microseconds, at least 1µs"},
		{"drip rate too short", Limit{Size: 1, DripInterval: 999, DripSize: 1},
			"drip rate 999ns: must be a whole number of microseconds, at least 1µs"},
		{"drip rate not whole", Limit{Size: 1, DripInterval: 1500, DripSize: 1},
			"drip rate 1.5µs: must be a whole number of microseconds, at least 1µs"},
		{"largest size drains too slowly", Limit{Size: 1 << 49, DripInterval: 2 * us, DripSize: 1},
			"size 562949953421312, drip rate 2µs, drip size 1: a full bucket and one drip more must drain within 35 years"},
		{"drains in 2^64 µs, which is 0 in 64 bits", Limit{Size: 1<<11 - 1, DripInterval: 1 << 53 * us, DripSize: 1},
			"size 2047, drip rate 2501999h47m34.740992s, drip size 1: a full bucket and one drip more must drain within 35 years"},
		{"one microsecond too long", Limit{Size: 4, DripInterval: (1<<50 + 1) / 5 * us, DripSize: 1},
			"size 4, drip rate 62549h59m41.368525s, drip size 1: a full bucket and one drip more must drain within 35 years"},
		{"rate just too long for one unit", Limit{Size: 1, DripInterval: 1<<49*us + us, DripSize: 1},
			"size 1, drip rate 156374h59m13.421313s, drip size 1: a full bucket and one drip more must drain within 35 years"},
		{"rate just too long for three drips", Limit{Size: 7, DripInterval: 1<<48*us + us, DripSize: 3},
			"size 7, drip rate 78187h29m36.710657s, drip size 3: a full bucket and one drip more must drain within 35 years"},

		{"least", Limit{Size: 1, DripInterval: us, DripSize: 1}, ""},
		{"no drip size, which means 1", Limit{Size: 1, DripInterval: us, DripSize: 0}, ""},
		{"largest size, smallest drip", Limit{Size: 1 << 49, DripInterval: us, DripSize: 1}, ""},
		{"largest size and drip", Limit{Size: 1 << 49, DripInterval: 1 << 49 * us, DripSize: 1 << 49}, ""},
		{"largest drip", Limit{Size: 1, DripInterval: us, DripSize: 1 << 49}, ""},
		{"longest rate for one unit", Limit{Size: 1, DripInterval: 1 << 49 * us, DripSize: 1}, ""},
		{"longest rate for three drips", Limit{Size: 7, DripInterval: 1 << 48 * us, DripSize: 3}, ""},
		{"usual", Limit{Size: 100, DripInterval: time.Second, DripSize: 10}, ""},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			checkValidate(t, tc.limit, tc.want)
		})
	}
}

// TestCheckedLimits guards that a limit is checked when it is compiled, and not again for
// each request.
func TestCheckedLimits(t *testing.T) {
	l := Limit{Size: 0, DripInterval: time.Second, DripSize: 1}
	if err := l.Check(); err == nil {
		t.Error("a size of 0 is valid")
	}
	if l = l.Checked(); l.Check() != nil {
		t.Errorf("a limit that was checked is checked again: %v", l.Check())
	}
}

// TestCeilDiv guards the rounding that everything else uses, at the edges of its
// arguments.
func TestCeilDiv(t *testing.T) {
	tests := []struct{ a, b, want int64 }{
		{0, 1, 0}, {1, 1, 1}, {5, 1, 5},
		{0, 5, 0}, {1, 5, 1}, {4, 5, 1}, {5, 5, 1}, {6, 5, 2}, {10, 5, 2}, {11, 5, 3},
		{-1, 5, 0}, {-4, 5, 0},
		{MaxUnits, MaxUnits, 1}, {MaxUnits, 1, MaxUnits}, {1, MaxUnits, 1}, {1 - MaxUnits, MaxUnits, 0},
		{Horizon, Horizon, 1}, {Horizon, Horizon - 1, 2},
	}
	for _, tc := range tests {
		if got := CeilDiv(tc.a, tc.b); got != tc.want {
			t.Errorf("ceilDiv(%d, %d) = %d, want %d", tc.a, tc.b, got, tc.want)
		}
	}
}

// TestDrainAndDripTime guards two durations that the documentation and policies
// use: an incomplete last drip takes as long as any.
func TestDrainAndDripTime(t *testing.T) {
	tests := []struct {
		limit Limit
		units int64
		drain time.Duration
		drip  time.Duration
	}{
		{Limit{Size: 10, DripInterval: time.Second, DripSize: 1}, 10, 10 * time.Second, 10 * time.Second},
		{Limit{Size: 10, DripInterval: time.Second, DripSize: 1}, 0, 10 * time.Second, 0},
		{Limit{Size: 10, DripInterval: time.Second, DripSize: 3}, 1, 4 * time.Second, time.Second},
		{Limit{Size: 10, DripInterval: time.Second, DripSize: 3}, 3, 4 * time.Second, time.Second},
		{Limit{Size: 10, DripInterval: time.Second, DripSize: 3}, 4, 4 * time.Second, 2 * time.Second},
		{Limit{Size: 9, DripInterval: 1500 * time.Millisecond, DripSize: 3}, 9, 4500 * time.Millisecond, 4500 * time.Millisecond},
		{Limit{Size: 10, DripInterval: time.Second, DripSize: 100}, 10, time.Second, time.Second},
		{Limit{Size: 1 << 49, DripInterval: time.Microsecond, DripSize: 1}, 1 << 49, 1 << 49 * time.Microsecond, 1 << 49 * time.Microsecond},
	}
	for _, tc := range tests {
		if got := tc.limit.DrainTime(); got != tc.drain {
			t.Errorf("%+v: DrainTime() = %v, want %v", tc.limit, got, tc.drain)
		}
		if got := tc.limit.DripTime(tc.units); got != tc.drip {
			t.Errorf("%+v: DripTime(%d) = %v, want %v", tc.limit, tc.units, got, tc.drip)
		}
	}
}
