package limiter

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
// was last charged, plus those of the one before, shifted. So nothing has to be written
// when a window ends.

const (
	// MaxSlidingUnits is the largest Size of a [Sliding] Limit: 2^24 − 1.
	MaxSlidingUnits = 1<<countBits - 1

	// countBits is the number of bits in which the units of one window are
	// stored.
	countBits = 24

	// slidingDrip is the DripSize of all [Sliding] Limits: the rest of a level is
	// always less.
	slidingDrip = 1 << (2 * countBits)
)

// SlidingWindow returns a Limit that admits n units in a time of d, as far as two
// counters can tell: it estimates that the units of the last window, which began at
// a multiple of d since the Unix epoch by the store's clock, were spread evenly.
// In a time of d it admits up to 2·n, like [ClockWindow], but only if they come
// in two bursts far enough apart. n is from 1 to [MaxSlidingUnits]; d is a whole
// number of microseconds, at most 11 years. Otherwise the Limit is not valid, and
// every request returns an error.
func SlidingWindow(n int64, d time.Duration) Limit {
	return Limit{Size: n, DripInterval: d, DripSize: slidingDrip, Aligned: true, Algorithm: Sliding}
}

// windows is what a sliding window and the summary of a log have in common: they count
// units in windows that follow each other.
type windows struct{}

// sliding counts units in a sliding window.
type sliding struct{ windows }

func (sliding) validate(l *Limit) error {
	return validateWindow(l, "SlidingWindow", "window", MaxSlidingUnits)
}

// validateWindow is validate for limits that count in windows of some kind, which the
// given function makes.
func validateWindow(l *Limit, maker, kind string, most int64) error {
	if err := l.validatePhase(); err != nil {
		return err
	}
	switch {
	case !l.Aligned || l.DripSize != slidingDrip:
		return fmt.Errorf("%v: must be made by %s", l.Algorithm, maker)
	case l.Size > most:
		return fmt.Errorf("size %d: must be at most %d in a sliding %s", l.Size, most, kind)
	case l.rate() > horizon/3:
		return fmt.Errorf("drip rate %v: must be at most %v in a sliding %s", l.DripInterval, horizon/3*time.Microsecond, kind)
	}
	return nil
}

// drainTime: units count in the window after their own too.
func (windows) drainTime(l *Limit) time.Duration { return 2 * l.DripInterval }

func (windows) dripTime(l *Limit, units int64) time.Duration { return leaky{}.dripTime(l, units) }

func (windows) doubles(l *Limit, cost int64) (size, rate, drip, phase float64) {
	return leaky{}.doubles(l, cost)
}

func (windows) restEnd(l *Limit) int64 { return l.DripSize }

// counts returns the units in the two windows that s counts.
func (s level) counts() (before, last int64) {
	return s.rest >> countBits, s.rest & MaxSlidingUnits
}

// counted returns the level that clears at the given time and counts the given
// units.
func counted(clear, before, last int64) level {
	return level{clear, min(before, MaxSlidingUnits)<<countBits | min(last, MaxSlidingUnits)}
}

// slid returns the level that counts the same units as s, given that the window at
// now is the last one: s is returned unless that is a later one than s counts. The
// clear time of s must be after now.
func (l *Limit) slid(s level, now int64) level {
	if s.clear-now > l.rate() {
		return s
	}
	_, last := s.counts()
	return counted(s.clear+l.rate(), last, 0)
}

func (a sliding) room(l *Limit, s level, n, now int64) int64 {
	return l.Size - n - a.units(l, s, now)
}

func (a sliding) remaining(l *Limit, s level, now int64) int64 { return max(a.room(l, s, 0, now), 0) }

func (a sliding) wait(l *Limit, s level, n, now int64) int64 {
	if s.clear <= now || a.room(l, s, n, now) >= 0 {
		return 0
	}
	s = l.slid(s, now)
	before, last := s.counts()
	ends := s.clear - l.rate()
	if last+n > l.Size { // wait for the next window, in which last counts ever less
		before, last, ends = last, 0, s.clear
	}
	// There is room once before·left < (room + 1)·rate, for what is then left of
	// the window. Until then, room is less than before.
	room := l.Size - last - n
	over, most := bits.Mul64(uint64(room+1), uint64(l.rate())) //nolint:gosec // neither is negative
	most, borrow := bits.Sub64(most, 1, 0)
	left, _ := bits.Div64(over-borrow, most, uint64(before)) //nolint:gosec // less than 2^50
	return max(ends-int64(left)-now, 0)                      //nolint:gosec // fits
}

// units returns the estimate at now.
func (sliding) units(l *Limit, s level, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	s = l.slid(s, now)
	before, last := s.counts()
	// The window may seem not to have begun, because the clock was set back.
	left := min(s.clear-l.rate()-now, l.rate())
	over, units := bits.Mul64(uint64(before), uint64(left)) //nolint:gosec // neither is negative
	units, _ = bits.Div64(over, units, uint64(l.rate()))    //nolint:gosec // at most before
	return int64(units) + last                              //nolint:gosec // fits
}

// started returns the level to which a charge can be added.
func (windows) started(l *Limit, s level, at moment) level {
	if s.clear > at.now {
		return l.slid(s, at.now)
	}
	return level{clear: l.start(at) + 2*l.rate()}
}

func (a windows) add(l *Limit, s level, n int64, at moment) level {
	s = a.started(l, s, at)
	before, last := s.counts()
	return counted(s.clear, before, last+min(n, MaxSlidingUnits))
}

func (a sliding) atLeast(l *Limit, s level, n, size int64, at moment) level {
	if room := size - a.units(l, s, at.now); room > 0 {
		return a.add(l, s, min(n, room), at)
	}
	return s
}

// count counts the units in the present window, as far as it can count.
func (a windows) count(l *Limit, s level, _, cost int64, at moment) level {
	return a.add(l, s, cost, at)
}

// join: the windows may end later than they should, because reports are late. Of each
// window the larger count counts, so units that are in both levels count once. If one
// of them is of a later window, those of the other have ended: what it would hold until
// they end by its own reckoning is not added to the later ones.
func (windows) join(l *Limit, a, b level, _ time.Duration, _ bool) level {
	if a.clear < b.clear {
		a, b = b, a
	}
	before, last := a.counts()
	before2, last2 := b.counts()
	switch later := 2 * (a.clear - b.clear); {
	case later >= 3*l.rate():
		return a
	case later >= l.rate():
		b.clear, before2, last2 = b.clear+l.rate(), last2, 0
	}
	if before2+last2 == 0 {
		return a
	}
	return counted(max(a.clear, b.clear), max(before, before2), max(last, last2))
}

func (windows) arriving(_ *Limit, s ahead, _ int64) (arrived ahead, drained bool) { return s, false }

func (windows) ending(_ *Limit, s level, _, _ int64) level { return s }
