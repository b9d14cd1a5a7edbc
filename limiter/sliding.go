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
// Its state is stored as that of any other bucket. The clear time is the end of the
// window after the one that was last charged: then neither of the two counts any
// longer. The slack is not what its name says, but the units of the window that was
// last charged, plus those of the one before, shifted. So nothing has to be written
// when a window ends.

const (
	// MaxSlidingUnits is the largest Size of a [Sliding] Limit: 2^24 − 1.
	MaxSlidingUnits = 1<<countBits - 1

	// countBits is the number of bits in which the units of one window are
	// stored.
	countBits = 24

	// slidingDrip is the DripSize of all [Sliding] Limits: the slack of a
	// bucket is always less.
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

func (windows) doubles(l *Limit) (rate, drip, phase float64) { return leaky{}.doubles(l) }

func (windows) slackEnd(l *Limit) int64 { return l.DripSize }

// counts returns the units in the two windows that s counts.
func (s state) counts() (before, last int64) {
	return s.slack >> countBits, s.slack & MaxSlidingUnits
}

// counted returns the level that clears at the given time and counts the given
// units.
func counted(clear, before, last int64) state {
	return state{clear, min(before, MaxSlidingUnits)<<countBits | min(last, MaxSlidingUnits)}
}

// slid returns the level that counts the same units as s, given that the window at
// now is the last one: s is returned unless that is a later one than s counts. The
// clear time of s must be after now.
func (l *Limit) slid(s state, now int64) state {
	if s.clear-now > l.rate() {
		return s
	}
	_, last := s.counts()
	return counted(s.clear+l.rate(), last, 0)
}

func (a sliding) fits(l *Limit, s state, now, cost, beside int64) bool {
	return cost <= l.Size-beside && a.wait(l, s, now, cost+beside) == 0
}

func (a sliding) wait(l *Limit, s state, now, cost int64) int64 {
	if s.clear <= now || a.units(l, s, now)+cost <= l.Size {
		return 0
	}
	s = l.slid(s, now)
	before, last := s.counts()
	ends := s.clear - l.rate()
	if last+cost > l.Size { // wait for the next window, in which last counts ever less
		before, last, ends = last, 0, s.clear
	}
	// There is room once before·left < (room + 1)·rate, for what is then left of
	// the window. Until then, room is less than before.
	room := l.Size - last - cost
	over, most := bits.Mul64(uint64(room+1), uint64(l.rate())) //nolint:gosec // neither is negative
	most, borrow := bits.Sub64(most, 1, 0)
	left, _ := bits.Div64(over-borrow, most, uint64(before)) //nolint:gosec // less than 2^50
	return max(ends-int64(left)-now, 0)                      //nolint:gosec // fits
}

func (a sliding) remaining(l *Limit, s state, now int64) int64 {
	return max(l.Size-a.units(l, s, now), 0)
}

// units returns the estimate at now.
func (sliding) units(l *Limit, s state, now int64) int64 {
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

func (windows) started(l *Limit, s state, now, unix int64) state {
	if s.clear > now {
		return l.slid(s, now)
	}
	return state{clear: now - l.sinceDrip(unix) + 2*l.rate()}
}

func (windows) add(_ *Limit, s state, cost int64) state {
	before, last := s.counts()
	return counted(s.clear, before, last+min(cost, MaxSlidingUnits))
}

func (a sliding) atLeast(l *Limit, s state, units, size, unix int64) state {
	if room := size - a.units(l, s, 0); room > 0 {
		return a.add(l, a.started(l, s, 0, unix), min(units, room))
	}
	return s
}

// count counts the units in the present window, as far as it can count.
func (a windows) count(l *Limit, s state, now, unix, cost, _ int64) state {
	return a.add(l, a.started(l, s, now, unix), cost)
}

// higher: the windows may end later than they should, because reports are late. Of each
// window the larger count counts, so units that are in both levels count once. If one
// of them is of a later window, those of the other have ended: what it would hold until
// they end by its own reckoning is not added to the later ones.
func (windows) higher(l *Limit, a, b state, _ time.Duration, _ bool) state {
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

func (windows) arriving(_ *Limit, s state, _ int64) (arrived state, drained bool) { return s, false }

func (windows) ending(_ *Limit, s state, _, _ int64) state { return s }

func (a sliding) tell(l *Limit, s state, now, _ int64) (remaining, counts, one int64) {
	return a.remaining(l, s, now), s.slack, 0
}

func (a sliding) again(l *Limit, clear, _, counts, _, cost int64) int64 {
	return a.wait(l, state{clear, counts}, 0, cost)
}
