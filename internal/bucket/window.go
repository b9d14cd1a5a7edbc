package bucket

import (
	"fmt"
	"time"
)

// FixedWindow returns a Limit that counts in fixed windows, which begin with a request.
func FixedWindow(n int64, d time.Duration) Limit {
	return Limit{Size: n, DripInterval: d, DripSize: MaxUnits, Algorithm: Fixed}
}

// Concurrency returns a Limit of n units that are held at one time.
func Concurrency(n int64) Limit { return FixedWindow(n, time.Microsecond) }

// CountsHeld reports whether l is made by [Concurrency]: what is charged leaves at once, so
// that only held units take room.
func (l *Limit) CountsHeld() bool {
	return l.Algorithm == Fixed && !l.Aligned && l.DripInterval == time.Microsecond
}

// ClockWindow is like [FixedWindow], but the windows begin at start and every d before and
// after it.
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

func (window) Validate(l *Limit) error {
	if l.DripSize != MaxUnits {
		return fmt.Errorf("%v: must be made by FixedWindow or ClockWindow", l.Algorithm)
	}
	return leaky{}.Validate(l)
}

func (window) DrainTime(l *Limit) time.Duration { return l.DripInterval }

func (window) DripTime(l *Limit, _ int64) time.Duration { return l.DripInterval }

// Doubles: a window may hold MaxUnits, and the script takes a rest that is less than
// drip.
func (window) Doubles(l *Limit, cost int64) (size, rate, drip, phase float64) {
	size, rate, _, phase = leaky{}.Doubles(l, cost)
	return size, rate, MaxUnits + 1, phase
}

func (window) RestEnd(*Limit) int64 { return MaxUnits + 1 }

func (a window) Room(l *Limit, s Level, n, now int64) int64 { return l.Size - n - a.Units(l, s, now) }

func (a window) Remaining(l *Limit, s Level, now int64) int64 { return max(a.Room(l, s, 0, now), 0) }

func (a window) Wait(l *Limit, s Level, n, now int64) int64 {
	if a.Room(l, s, n, now) >= 0 {
		return 0
	}
	return s.Clear - now
}

func (window) Units(_ *Limit, s Level, now int64) int64 {
	if s.Clear <= now {
		return 0
	}
	return s.Rest
}

// begun returns the level of a window that has begun.
func (window) begun(l *Limit, s Level, at Moment) Level {
	if s.Clear > at.Now {
		return s
	}
	return Level{Clear: l.start(at) + l.Rate()}
}

func (a window) Add(l *Limit, s Level, n int64, at Moment) Level {
	s = a.begun(l, s, at)
	s.Rest = min(s.Rest+min(n, MaxUnits), MaxUnits)
	return s
}

func (a window) AtLeast(l *Limit, s Level, n, size int64, at Moment) Level {
	if room := size - a.Units(l, s, at.Now); room > 0 {
		return a.Add(l, s, min(n, room), at)
	}
	return s
}

// Count fills the window until it ends.
func (a window) Count(l *Limit, s Level, n, _ int64, at Moment) Level {
	if n >= l.Size {
		return s
	}
	s = a.begun(l, s, at)
	s.Rest = max(s.Rest, l.Size-n)
	return s
}

// Join returns the later window, or of one that both know the larger count: a window
// that has ended adds nothing to the next.
func (window) Join(l *Limit, a, b Level, late time.Duration, own bool) Level {
	a, b, same := l.ordered(a, b, late, own)
	if same {
		a.Rest = max(a.Rest, b.Rest)
	}
	return a
}

// Arriving: a window may have ended by then, unless that is by the clock.
func (window) Arriving(l *Limit, s Ahead, late int64) (arrived Ahead, drained bool) {
	return s, !l.Aligned && s.Clear <= late
}

// Ending: windows of the clock end.
func (window) Ending(l *Limit, s Level, now, late int64) Level {
	if l.Aligned && s.Clear > now && s.Clear-now <= late {
		s.Rest = max(s.Rest, l.Size)
	}
	return s
}
