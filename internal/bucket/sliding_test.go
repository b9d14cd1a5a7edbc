package bucket

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// TestSlidingHigher guards that the level that joins two reports is at least as
// high as both at any time, that no report adds more to it than it counts, however
// late, and that two reports of the same units count once.
func TestSlidingHigher(t *testing.T) {
	testseed.Check(t, 20, func(t *rapid.T) {
		l := SlidingWindow(20, rapid.SampledFrom([]time.Duration{time.Microsecond, 10 * time.Microsecond, time.Second}).Draw(t, "window"))
		ends := rapid.Int64Range(1, l.Rate()).Draw(t, "end of the window")
		late := rapid.Int64Range(0, (l.Rate()-1)/2)
		// As the server knows it, and as it is reported.
		draw := func(label string) (known, reported Level) {
			known = Counted(ends+rapid.Int64Range(0, 1).Draw(t, label+" windows")*l.Rate(),
				rapid.Int64Range(0, 20).Draw(t, label+" before"), rapid.Int64Range(0, 20).Draw(t, label+" last"))
			return known, Level{known.Clear + late.Draw(t, label+" late"), known.Rest}
		}
		a, lateA := draw("a")
		b, lateB := draw("b")
		sum := l.Join(lateA, lateB, 0, false)
		if other := l.Join(lateB, lateA, 0, false); lateA.Clear != lateB.Clear && other != sum {
			t.Fatalf("%+v and %+v: %+v, or %+v the other way", lateA, lateB, sum, other)
		}
		for at := int64(0); at <= 4*l.Rate(); at += max(l.Rate()/64, 1) {
			if got, least := l.Units(sum, at), max(l.Units(a, at), l.Units(b, at)); got < least {
				t.Fatalf("%+v and %+v: %+v holds %d at %d, want at least %d", lateA, lateB, sum, got, at, least)
			}
		}
		beforeA, lastA := a.Counts()
		beforeB, lastB := b.Counts()
		switch {
		case a.Clear < b.Clear:
			beforeA, lastA = lastA, 0
		case b.Clear < a.Clear:
			beforeB, lastB = lastB, 0
		}
		if before, last := sum.Counts(); before > max(beforeA, beforeB) || last > max(lastA, lastB) {
			t.Fatalf("%+v and %+v: %+v counts more", lateA, lateB, sum)
		}
	})
}

// TestSlidingValidate guards the numbers of sliding windows.
func TestSlidingValidate(t *testing.T) {
	other := SlidingWindow(1, time.Second)
	other.DripSize = 1
	free := SlidingWindow(1, time.Second)
	free.Aligned = false
	for _, tc := range []struct {
		l    Limit
		want string
	}{
		{SlidingWindow(1, time.Microsecond), ""},
		{SlidingWindow(MaxSlidingUnits, Horizon/3*time.Microsecond), ""},
		{SlidingWindow(0, time.Second), "size 0: must be from 1 to 562949953421312"},
		{SlidingWindow(MaxSlidingUnits+1, time.Second), "size 16777216: must be at most 16777215 in a sliding window"},
		{SlidingWindow(1, 0), "drip rate 0s: must be a whole number of microseconds, at least 1µs"},
		{
			SlidingWindow(1, (Horizon/3+1)*time.Microsecond),
			"drip rate 104249h59m28.947542s: must be at most 104249h59m28.947541s in a sliding window",
		},
		{other, "sliding: must be made by SlidingWindow"},
		{free, "sliding: must be made by SlidingWindow"},
	} {
		checkValidate(t, tc.l, tc.want)
	}
}
