package bucket

import (
	"testing"
	"time"
)

// TestPhaseValidate guards that the moments of aligned drips are not ambiguous.
func TestPhaseValidate(t *testing.T) {
	for _, tc := range []struct {
		aligned bool
		phase   time.Duration
		want    string
	}{
		{false, 0, ""},
		{true, 0, ""},
		{true, time.Second - time.Microsecond, ""},
		{false, 1, "phase 1ns: must be 0 if drips are not aligned"},
		{true, -time.Microsecond, "phase -1µs: must be a whole number of microseconds, from 0 to less than the drip rate, 1s"},
		{true, time.Second, "phase 1s: must be a whole number of microseconds, from 0 to less than the drip rate, 1s"},
		{true, time.Nanosecond, "phase 1ns: must be a whole number of microseconds, from 0 to less than the drip rate, 1s"},
	} {
		l := Limit{Size: 1, DripInterval: time.Second, Aligned: tc.aligned, Phase: tc.phase}
		checkValidate(t, l, tc.want)
	}
}
