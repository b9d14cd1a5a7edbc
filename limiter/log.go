package limiter

import (
	"fmt"
	"time"
)

// A sliding log keeps the time and the units of each admission for the time of one
// window, so it is exact in every window. A server keeps such a log (see log.lua),
// and so does a Memory that is a Store of its own (see entries.go).
//
// A Memory that stands in for a server has only a summary of the server's entries: the
// level of a sliding window (see sliding.go), which counts the same units in
// windows that begin at multiples of their length. It decides by it carefully: all
// units of a window count until the next one ends, for longer than they would in
// the log. So it never admits more than Size in any window, and at worst half of
// what the log would.
//
// Everything else about the summary is as for sliding windows: what is reported,
// followed, told and joined. A server that is told of more units in one of two
// windows than it has adds them to its log as late as they can have been: now, or
// when that window ended for the node that tells.

// MaxLogUnits is the largest Size of a [Log] Limit.
const MaxLogUnits = 10_000

// SlidingLog returns a Limit that admits n units in any time of d, exactly: a unit
// has room if fewer than n were admitted in the time of d that ends with it. It
// keeps the time of each admission, at about 10 bytes, which is why n is at most
// [MaxLogUnits]. d is a whole number of microseconds, at most 11 years. Otherwise
// the Limit is not valid, and every request returns an error.
func SlidingLog(n int64, d time.Duration) Limit {
	return Limit{Size: n, DripInterval: d, DripSize: slidingDrip, Aligned: true, Algorithm: Log}
}

// logSummary counts units by the summary of a log.
type logSummary struct{ windows }

func (logSummary) validate(l *Limit) error {
	if err := validateWindow(l, "SlidingLog", "log", MaxLogUnits); err != nil {
		return err
	}
	if l.Phase != 0 {
		return fmt.Errorf("%v: must be made by SlidingLog", l.Algorithm)
	}
	return nil
}

func (a logSummary) room(l *Limit, s level, n, now int64) int64 {
	return l.Size - n - a.units(l, s, now)
}

func (a logSummary) remaining(l *Limit, s level, now int64) int64 {
	return max(a.room(l, s, 0, now), 0)
}

// wait: the units of a window leave when the next one ends.
func (logSummary) wait(l *Limit, s level, n, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	s = l.slid(s, now)
	switch before, last := s.counts(); {
	case before+last <= l.Size-n:
		return 0
	case last <= l.Size-n:
		return max(s.clear-l.rate()-now, 0)
	}
	return s.clear - now
}

func (logSummary) units(l *Limit, s level, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	before, last := l.slid(s, now).counts()
	return before + last
}

// atLeast: no window has more than size units; how many of the one before still count
// in the log is unknown.
func (a logSummary) atLeast(l *Limit, s level, n, size int64, at moment) level {
	s = a.started(l, s, at)
	before, last := s.counts()
	if last >= size {
		return s
	}
	return counted(s.clear, before, min(last+n, size))
}

// entriesLevel is what a log holds, in numbers that its summary does not tell. Times
// are in µs from now.
type entriesLevel struct {
	units int64 // the units in the window that ends now
	clear int64 // until there are none
	again int64 // until there is room for the same cost; 0 if there is, or never will be
	one   int64 // until there is room for one unit
}

// later returns the level as far as it is known some time later, in µs: it is not
// known which units have left, unless all have.
func (v entriesLevel) later(by int64) entriesLevel {
	if by >= v.clear {
		return entriesLevel{}
	}
	return entriesLevel{v.units, max(v.clear-by, 0), max(v.again-by, 0), max(v.one-by, 0)}
}

// plus returns the level with units more that are charged now. The times until there
// is room include them already.
func (v entriesLevel) plus(units int64, l *Limit) entriesLevel {
	if v.units += units; units > 0 {
		v.clear = l.rate()
	}
	return v
}

// reportEntries fills in d for a log at level v, as report does for other buckets.
func (d *Decision) reportEntries(l *Limit, v *entriesLevel, cost int64, denied bool) {
	d.Size = l.Size
	d.Remaining = max(l.Size-v.units, 0)
	d.Clear = time.Duration(v.clear) * time.Microsecond
	d.exact, d.rest, d.one = true, v.again, v.one
	if denied {
		d.Denied = true
		if d.Never = cost > l.Size; !d.Never {
			d.RetryAfter = time.Duration(v.again) * time.Microsecond
		}
	}
}
