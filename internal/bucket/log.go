package bucket

import (
	"fmt"
	"time"
)

// A sliding log keeps the time and the units of each admission for the time of one
// window, so it is exact in every window. A server keeps such a log (see log.lua of package
// limiter), and so does a Memory that is a Store of its own (see entries.go).
//
// A Memory that replaces a server has only a summary of the server's entries: the
// level of a sliding window (see sliding.go), which counts the same units in
// windows that begin at multiples of their length. It decides by it carefully: all
// units of a window count until the next one ends, for longer than they would in
// the log. So it never admits more than Size in any window, and at worst half of
// what the log would.
//
// Everything else about the summary is as for sliding windows: what is reported,
// followed, reported and joined. A server that hears of more units in one of two
// windows than it has adds them to its log as late as they can have been: now, or
// when that window ended for the node that reports.

// MaxLogUnits is the largest Size of a [SlidingLog].
const MaxLogUnits = 10_000

// SlidingLog returns a Limit that counts in a window which slides, exactly.
func SlidingLog(n int64, d time.Duration) Limit {
	return Limit{Size: n, DripInterval: d, DripSize: SlidingDrip, Aligned: true, Algorithm: Log}
}

// logSummary counts units by the summary of a log.
type logSummary struct{ windows }

func (logSummary) Validate(l *Limit) error {
	if err := validateWindow(l, "SlidingLog", "log", MaxLogUnits); err != nil {
		return err
	}
	if l.Phase != 0 {
		return fmt.Errorf("%v: must be made by SlidingLog", l.Algorithm)
	}
	return nil
}

func (a logSummary) Room(l *Limit, s Level, n, now int64) int64 {
	return l.Size - n - a.Units(l, s, now)
}

func (a logSummary) Remaining(l *Limit, s Level, now int64) int64 {
	return max(a.Room(l, s, 0, now), 0)
}

// Wait: the units of a window leave when the next one ends.
func (logSummary) Wait(l *Limit, s Level, n, now int64) int64 {
	if s.Clear <= now {
		return 0
	}
	s = l.slid(s, now)
	switch before, last := s.Counts(); {
	case before+last <= l.Size-n:
		return 0
	case last <= l.Size-n:
		return max(s.Clear-l.Rate()-now, 0)
	}
	return s.Clear - now
}

func (logSummary) Units(l *Limit, s Level, now int64) int64 {
	if s.Clear <= now {
		return 0
	}
	before, last := l.slid(s, now).Counts()
	return before + last
}

// AtLeast: no window has more than size units; how many of the one before still count
// in the log is unknown.
func (a logSummary) AtLeast(l *Limit, s Level, n, size int64, at Moment) Level {
	s = a.started(l, s, at)
	before, last := s.Counts()
	if last >= size {
		return s
	}
	return Counted(s.Clear, before, min(last+n, size))
}

// EntriesLevel is what a log holds, in numbers that its summary lacks. Times
// are in µs from now.
type EntriesLevel struct {
	Units int64 // the units in the window that ends now
	Clear int64 // until there are none
	Again int64 // until there is room for the same cost; 0 if there is, or never will be
	One   int64 // until there is room for one unit
}

// Later returns the level as far as it is known some time later, in µs: it is not
// known which units have left, unless all have.
func (v EntriesLevel) Later(by int64) EntriesLevel {
	if by >= v.Clear {
		return EntriesLevel{}
	}
	return EntriesLevel{v.Units, max(v.Clear-by, 0), max(v.Again-by, 0), max(v.One-by, 0)}
}

// Plus returns the level with units more that are charged now. The times until there
// is room include them already.
func (v EntriesLevel) Plus(units int64, l *Limit) EntriesLevel {
	if v.Units += units; units > 0 {
		v.Clear = l.Rate()
	}
	return v
}
