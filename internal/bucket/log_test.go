package bucket

import (
	"testing"
	"time"
)

// TestLogValidate guards the numbers of logs.
func TestLogValidate(t *testing.T) {
	other := SlidingLog(1, time.Second)
	other.DripSize = 1
	shifted := SlidingLog(1, time.Second)
	shifted.Phase = time.Millisecond
	for _, tc := range []struct {
		l    Limit
		want string
	}{
		{SlidingLog(1, time.Microsecond), ""},
		{SlidingLog(MaxLogUnits, Horizon/3*time.Microsecond), ""},
		{SlidingLog(0, time.Second), "size 0: must be from 1 to 562949953421312"},
		{SlidingLog(MaxLogUnits+1, time.Second), "size 10001: must be at most 10000 in a sliding log"},
		{SlidingLog(1, 0), "drip rate 0s: must be a whole number of microseconds, at least 1µs"},
		{
			SlidingLog(1, (Horizon/3+1)*time.Microsecond),
			"drip rate 104249h59m28.947542s: must be at most 104249h59m28.947541s in a sliding log",
		},
		{other, "log: must be made by SlidingLog"},
		{shifted, "log: must be made by SlidingLog"},
		{Limit{Size: 1, DripInterval: time.Second, Algorithm: 77}, "algorithm 77: unknown"},
	} {
		checkValidate(t, tc.l, tc.want)
	}
}
