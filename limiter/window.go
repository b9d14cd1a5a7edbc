package limiter

import (
	"fmt"
	"time"
)

// FixedWindow returns a Limit that counts in fixed windows: it admits n units in each,
// and so up to 2·n in a time of d that lies in two windows. A window begins with
// the first request after the one before has ended. n is from 1 to [MaxUnits]; d
// is a whole number of microseconds. Otherwise the Limit is not valid, and every
// request returns an error.
//
// Several Sizes may share a window.
func FixedWindow(n int64, d time.Duration) Limit {
	return Limit{Size: n, DripInterval: d, DripSize: MaxUnits, Algorithm: Fixed}
}

// Concurrency returns a Limit of n units that are held at one time, for a Bucket with
// Hold. What is charged when they are settled leaves at once, so that only held units
// take room.
func Concurrency(n int64) Limit { return FixedWindow(n, time.Microsecond) }

// ClockWindow is like [FixedWindow], but the windows begin at start and every d before
// and after it, by the store's clock: the server's in a [Redis].
func ClockWindow(n int64, d time.Duration, start time.Time) Limit {
	l := FixedWindow(n, d)
	l.Aligned = true
	if d > 0 {
		if l.Phase = time.Duration(start.UnixMicro()%max(d.Microseconds(), 1)) * time.Microsecond; l.Phase < 0 {
			l.Phase += d
		}
	}
	return l
}

// A fixed window loses all that it holds when it ends. The time of its level is that
// end, and the rest is the units that it holds.

// window counts units in a fixed window.
type window struct{}

func (window) validate(l *Limit) error {
	if l.DripSize != MaxUnits {
		return fmt.Errorf("%v: must be made by FixedWindow or ClockWindow", l.Algorithm)
	}
	return leaky{}.validate(l)
}

func (window) drainTime(l *Limit) time.Duration { return l.DripInterval }

func (window) dripTime(l *Limit, _ int64) time.Duration { return l.DripInterval }

// doubles: a window may hold MaxUnits, and the script takes a rest that is less than
// drip.
func (window) doubles(l *Limit, cost int64) (size, rate, drip, phase float64) {
	size, rate, _, phase = leaky{}.doubles(l, cost)
	return size, rate, MaxUnits + 1, phase
}

func (window) restEnd(*Limit) int64 { return MaxUnits + 1 }

func (a window) room(l *Limit, s level, n, now int64) int64 { return l.Size - n - a.units(l, s, now) }

func (a window) remaining(l *Limit, s level, now int64) int64 { return max(a.room(l, s, 0, now), 0) }

func (a window) wait(l *Limit, s level, n, now int64) int64 {
	if a.room(l, s, n, now) >= 0 {
		return 0
	}
	return s.clear - now
}

func (window) units(_ *Limit, s level, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	return s.rest
}

// begun returns the level of a window that has begun.
func (window) begun(l *Limit, s level, at moment) level {
	if s.clear > at.now {
		return s
	}
	return level{clear: l.start(at) + l.rate()}
}

func (a window) add(l *Limit, s level, n int64, at moment) level {
	s = a.begun(l, s, at)
	s.rest = min(s.rest+min(n, MaxUnits), MaxUnits)
	return s
}

func (a window) atLeast(l *Limit, s level, n, size int64, at moment) level {
	if room := size - a.units(l, s, at.now); room > 0 {
		return a.add(l, s, min(n, room), at)
	}
	return s
}

// count fills the window until it ends.
func (a window) count(l *Limit, s level, n, _ int64, at moment) level {
	if n >= l.Size {
		return s
	}
	s = a.begun(l, s, at)
	s.rest = max(s.rest, l.Size-n)
	return s
}

// join returns the later window, or of one that both know the larger count: a window
// that has ended adds nothing to the next.
func (window) join(l *Limit, a, b level, late time.Duration, own bool) level {
	a, b, same := l.ordered(a, b, late, own)
	if same {
		a.rest = max(a.rest, b.rest)
	}
	return a
}

// arriving: a window may have ended by then, unless that is by the clock.
func (window) arriving(l *Limit, s ahead, late int64) (arrived ahead, drained bool) {
	return s, !l.Aligned && s.clear <= late
}

// ending: windows of the clock end.
func (window) ending(l *Limit, s level, now, late int64) level {
	if l.Aligned && s.clear > now && s.clear-now <= late {
		s.rest = max(s.rest, l.Size)
	}
	return s
}
