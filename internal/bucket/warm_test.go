package bucket

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// TestWarmUpValidate guards the numbers of limits that warm up.
func TestWarmUpValidate(t *testing.T) {
	other := WarmingUp(1, time.Second, time.Second, 3)
	other.Aligned = false
	leaky := Per(1, time.Second)
	leaky.ColdFactor = 3000
	large := WarmingUp(1, time.Hour, time.Second, 3)
	large.Size = MaxUnits
	const years = Horizon * time.Microsecond
	for _, tc := range []struct {
		l    Limit
		want string
	}{
		{WarmingUp(1, time.Microsecond, time.Microsecond, 1), ""},
		{WarmingUp(1_000_000, time.Second, time.Microsecond, MaxColdFactor), ""},
		{WarmingUp(1, years-4*time.Microsecond, time.Microsecond, MaxColdFactor), ""},
		{WarmingUp(1, time.Second, years/2-500_001*time.Microsecond, 3), ""},
		{waiting(WarmingUp(1, time.Second, time.Second, 3), Horizon/2_000_000-2), ""},
		{
			waiting(WarmingUp(1, time.Second, time.Second, 3), Horizon/2_000_000),
			"size 562949954, rate of 1/1s, warm-up of 1s: the time for size and twice the warm-up must be at most 35 years",
		},
		{WarmingUp(0, time.Second, time.Second, 3), "size 0: must be from 1 to 562949953421312"},
		{WarmingUp(1, 0, time.Second, 3), "drip rate 0s: must be a whole number of microseconds, at least 1µs"},
		{WarmingUp(2, time.Microsecond, time.Second, 3), "rate of 2/1µs: must be at most one unit for each microsecond"},
		{WarmingUp(1, time.Second, 0, 3), "warm-up of 0s: must be a whole number of microseconds, at least 1µs"},
		{WarmingUp(1, time.Second, 1500, 3), "warm-up of 1.5µs: must be a whole number of microseconds, at least 1µs"},
		{WarmingUp(1, time.Second, time.Second, 0.9994), "cold factor 0.999: must be from 1 to 1000000"},
		{WarmingUp(1, time.Second, time.Second, 0), "cold factor 0: must be from 1 to 1000000"},
		{WarmingUp(1, time.Second, time.Second, MaxColdFactor+1), "cold factor 0: must be from 1 to 1000000"},
		{WarmingUp(1, time.Second, time.Second, math.NaN()), "cold factor 0: must be from 1 to 1000000"},
		{WarmingUp(1, time.Second, time.Second, math.Inf(1)), "cold factor 0: must be from 1 to 1000000"},
		{
			WarmingUp(1, years, time.Microsecond, 3),
			"size 1, rate of 1/312749h58m26.842624s, warm-up of 1µs: the time for size and twice the warm-up must be at most 35 years",
		},
		{
			WarmingUp(1, time.Second, years/2, 3),
			"size 1, rate of 1/1s, warm-up of 156374h59m13.421312s: the time for size and twice the warm-up must be at most 35 years",
		},
		{large, "size 562949953421312, rate of 1/1h0m0s, warm-up of 1s: the time for size and twice the warm-up must be at most 35 years"},
		{other, "warm-up: must be made by WarmingUp"},
		{leaky, "leaky limits have no cold factor: leave out WithColdFactor"},
	} {
		checkValidate(t, tc.l, tc.want)
	}
}

// TestWarmUpStaysWithinHorizon guards that no level of a valid limit is too far ahead
// for the numbers of Redis, nor further than its DrainTime says.
func TestWarmUpStaysWithinHorizon(t *testing.T) {
	testseed.Check(t, 20, func(t *rapid.T) {
		d := rapid.SampledFrom([]time.Duration{
			time.Microsecond, 999_983 * time.Microsecond, time.Second, time.Hour, 366 * 24 * time.Hour, 35 * 365 * 24 * time.Hour,
		}).Draw(t, "duration")
		n := rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, 1_000_000), rapid.Just(d.Microseconds())).Draw(t, "units")
		warmUp := time.Duration(rapid.OneOf(
			rapid.Int64Range(1, 1_000_000_000), rapid.SampledFrom([]int64{1, 3, 86_400e6, 30 * 86_400e6}),
		).Draw(t, "warm-up")) * time.Microsecond
		factor := rapid.OneOf(rapid.SampledFrom([]float64{1, 1.001, 3, 10, 1e6}), rapid.Float64Range(1, 100)).Draw(t, "cold factor")
		l := WarmingUp(min(n, d.Microseconds()), d, warmUp, factor)
		if l.Validate() != nil {
			t.Skip()
		}
		if more := waiting(l, rapid.SampledFrom([]int64{0, 1, 5, 100, l.Size}).Draw(t, "waiting")); more.Validate() == nil {
			l = more
		}
		s := Level{Rest: rapid.Int64Range(0, l.WarmUp()).Draw(t, "slack")}
		s.Clear = s.Rest + warm{}.reach(&l)
		s = l.Add(s, rapid.Int64Range(1, l.Size).Draw(t, "cost"), Moment{})
		if s.Rest < 0 || s.Rest > l.WarmUp() || s.Free() < 1 || s.Clear > l.DrainTime().Microseconds() || s.Clear > Horizon {
			t.Fatalf("%+v: %+v, drains in %v", l, s, l.DrainTime())
		}
	})
}

// waiting returns l with so many units more for requests that wait.
func waiting(l Limit, units int64) Limit {
	l.Size += units
	return l
}
