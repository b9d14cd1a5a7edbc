package bucket

import (
	"fmt"
	"math/bits"
	"time"
)

// A sliding window counts units in windows that follow each other, and estimates
// from the last two how many lie in the time of one window that ends now: all of
// the present window, and of the one before the share that its part of that time
// has. In between, it takes the units of a window to be spread evenly.
//
// The time of its level is the end of the window after the one that was last charged:
// then neither of the two counts any longer. The rest is the units of the window that
// was last charged, plus the units of the one before, shifted. So nothing has to be written
// when a window ends.

const (
	// MaxSlidingUnits is the largest Size of a [Sliding] Limit: 2^24 − 1.
	MaxSlidingUnits = 1<<CountBits - 1

	// CountBits is the number of bits in which the units of one window are
	// stored.
	CountBits = 24

	// SlidingDrip is the DripSize of all [Sliding] Limits: the rest of a level is
	// always less.
	SlidingDrip = 1 << (2 * CountBits)
)

// SlidingWindow returns a Limit that counts in windows which slide, by two counters.
func SlidingWindow(n int64, d time.Duration) Limit {
	return Limit{Size: n, DripInterval: d, DripSize: SlidingDrip, Aligned: true, Algorithm: Sliding}
}

// windows is what a sliding window and the summary of a log have in common: they count
// units in windows that follow each other.
type windows struct{}

// sliding counts units in a sliding window.
type sliding struct{ windows }

func (sliding) Validate(l *Limit) error {
	return validateWindow(l, "SlidingWindow", "window", MaxSlidingUnits)
}

// validateWindow is validate for limits that count in windows of some kind, which the
// given function makes.
func validateWindow(l *Limit, maker, kind string, most int64) error {
	if err := l.validatePhase(); err != nil {
		return err
	}
	switch {
	case !l.Aligned || l.DripSize != SlidingDrip:
		return fmt.Errorf("%v: must be made by %s", l.Algorithm, maker)
	case l.Size > most:
		return fmt.Errorf("size %d: must be at most %d in a sliding %s", l.Size, most, kind)
	case l.Rate() > Horizon/3:
		return fmt.Errorf("drip rate %v: must be at most %v in a sliding %s", l.DripInterval, Horizon/3*time.Microsecond, kind)
	}
	return nil
}

// DrainTime: units count in the window after their own too.
func (windows) DrainTime(l *Limit) time.Duration { return 2 * l.DripInterval }

func (windows) DripTime(l *Limit, units int64) time.Duration { return leaky{}.DripTime(l, units) }

func (windows) Doubles(l *Limit, cost int64) (size, rate, drip, phase float64) {
	return leaky{}.Doubles(l, cost)
}

func (windows) RestEnd(l *Limit) int64 { return l.DripSize }

// Counts returns the units in the two windows that s counts.
func (s Level) Counts() (before, last int64) {
	return s.Rest >> CountBits, s.Rest & MaxSlidingUnits
}

// Counted returns the level that clears at the given time and counts the given
// units.
func Counted(clear, before, last int64) Level {
	return Level{clear, min(before, MaxSlidingUnits)<<CountBits | min(last, MaxSlidingUnits)}
}

// slid returns the level that counts the same units as s, given that the window at
// now is the last one: s is returned unless that is a later one than s counts. The
// clear time of s must be after now.
func (l *Limit) slid(s Level, now int64) Level {
	if s.Clear-now > l.Rate() {
		return s
	}
	_, last := s.Counts()
	return Counted(s.Clear+l.Rate(), last, 0)
}

func (a sliding) Room(l *Limit, s Level, n, now int64) int64 {
	return l.Size - n - a.Units(l, s, now)
}

func (a sliding) Remaining(l *Limit, s Level, now int64) int64 { return max(a.Room(l, s, 0, now), 0) }

func (a sliding) Wait(l *Limit, s Level, n, now int64) int64 {
	if s.Clear <= now || a.Room(l, s, n, now) >= 0 {
		return 0
	}
	s = l.slid(s, now)
	before, last := s.Counts()
	ends := s.Clear - l.Rate()
	if last+n > l.Size { // wait for the next window, in which last counts ever less
		before, last, ends = last, 0, s.Clear
	}
	// There is room once before·left < (room + 1)·rate, for what is then left of
	// the window. Until then, room is less than before.
	room := l.Size - last - n
	over, most := bits.Mul64(uint64(room+1), uint64(l.Rate())) // neither is negative
	most, borrow := bits.Sub64(most, 1, 0)
	left, _ := bits.Div64(over-borrow, most, uint64(before)) // less than 2^50
	return max(ends-int64(left)-now, 0)                      // fits
}

// Units returns the estimate at now.
func (sliding) Units(l *Limit, s Level, now int64) int64 {
	if s.Clear <= now {
		return 0
	}
	s = l.slid(s, now)
	before, last := s.Counts()
	// The window may seem not to have begun, because the clock was set back.
	left := min(s.Clear-l.Rate()-now, l.Rate())
	over, units := bits.Mul64(uint64(before), uint64(left)) // neither is negative
	units, _ = bits.Div64(over, units, uint64(l.Rate()))    // at most before
	return int64(units) + last                              // fits
}

// started returns the level to which a charge can be added.
func (windows) started(l *Limit, s Level, at Moment) Level {
	if s.Clear > at.Now {
		return l.slid(s, at.Now)
	}
	return Level{Clear: l.start(at) + 2*l.Rate()}
}

func (a windows) Add(l *Limit, s Level, n int64, at Moment) Level {
	s = a.started(l, s, at)
	before, last := s.Counts()
	return Counted(s.Clear, before, last+min(n, MaxSlidingUnits))
}

func (a sliding) AtLeast(l *Limit, s Level, n, size int64, at Moment) Level {
	if room := size - a.Units(l, s, at.Now); room > 0 {
		return a.Add(l, s, min(n, room), at)
	}
	return s
}

// Count counts the units in the present window, as far as it can count.
func (a windows) Count(l *Limit, s Level, _, cost int64, at Moment) Level {
	return a.Add(l, s, cost, at)
}

// Join: the windows may end later than they should, because reports are late. Of each
// window the larger count counts, so units that are in both levels count once. If one
// of them is of a later window, the units of the other have ended: what it would hold until
// they end by its own reckoning is not added to the later ones.
func (windows) Join(l *Limit, a, b Level, _ time.Duration, _ bool) Level {
	if a.Clear < b.Clear {
		a, b = b, a
	}
	before, last := a.Counts()
	before2, last2 := b.Counts()
	switch later := 2 * (a.Clear - b.Clear); {
	case later >= 3*l.Rate():
		return a
	case later >= l.Rate():
		b.Clear, before2, last2 = b.Clear+l.Rate(), last2, 0
	}
	if before2+last2 == 0 {
		return a
	}
	return Counted(max(a.Clear, b.Clear), max(before, before2), max(last, last2))
}

func (windows) Arriving(_ *Limit, s Ahead, _ int64) (arrived Ahead, drained bool) { return s, false }

func (windows) Ending(_ *Limit, s Level, _, _ int64) Level { return s }
