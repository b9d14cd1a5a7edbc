package limiter

import (
	"fmt"
	"time"
)

// MaxUnits is the largest Size and DripSize of a Limit: 2^49.
const MaxUnits = 1 << 49

// horizon is the furthest, in µs, that a bucket's clear time may lie in the
// future: about 35 years. It keeps every sum below 2^53, where the doubles of
// Redis's Lua are still exact.
const horizon = 1 << 50

// Limit describes a bucket: it holds at most Size units, and every DripInterval it
// loses DripSize of them. [PerSecond], [PerMinute], [Every] and [NewLimit] make a
// Limit from a rate, [Window] and [ClockWindow] one that counts in fixed windows,
// [SlidingWindow] one whose windows slide, [SlidingLog] one that is exact in every
// window, [WarmingUp] one whose rate grows. The zero Limit is not valid: Size and
// DripInterval have no default.
type Limit struct {
	// The most units that the bucket holds, from 1 to MaxUnits.
	Size int64

	// The time between two drips: a whole number of microseconds, at least 1 µs.
	DripInterval time.Duration

	// The units that leave with each drip, from 1 to MaxUnits; 0 means 1.
	DripSize int64

	// Whether the drips are aligned to the clock: they then happen at Phase after
	// the Unix epoch and every DripInterval before and after that. Otherwise they
	// happen every DripInterval after the request that found the bucket empty.
	Aligned bool

	// How units are counted. The above describes a leaky bucket; for the others see
	// the functions that make such a Limit.
	Algorithm Algorithm

	// Whether requests that are denied count too, in the bucket that denies them and
	// in others of the request that have this. Then whoever keeps asking stays
	// locked out, and a RetryAfter only holds for those who do not ask before. A
	// leaky bucket that denies a request is filled to its Size, and drips anew from
	// then on. A fixed window is full until it ends, a sliding window counts the
	// units, and one that warms up has no room for the time of a unit at its full
	// rate. A bucket that had room, although the request was denied by another, is
	// charged. No such request is denied without asking the server.
	CountDenied bool

	// How much longer the first waits of a bucket are that warms up, in thousandths;
	// 0 for other algorithms.
	ColdFactor uint32

	// The time from the Unix epoch to an aligned drip: a whole number of
	// microseconds, from 0 to less than DripInterval. It must be 0 if drips are
	// not aligned. If a bucket warms up, how long that takes.
	Phase time.Duration
}

// Validate returns an error that names the first number of l that is out of range,
// or nil. A full bucket and one more drip must drain within 2^50 µs, which is
// about 35 years.
func (l Limit) Validate() error {
	l = l.complete()
	return l.validate()
}

// validate is Validate for a Limit that is complete. It runs for each bucket of each
// request, so it does not copy the Limit.
func (l *Limit) validate() error {
	switch {
	case l.Size < 1 || l.Size > MaxUnits:
		return fmt.Errorf("size %d: must be from 1 to %d", l.Size, int64(MaxUnits))
	case l.DripSize < 1 || l.DripSize > MaxUnits:
		return fmt.Errorf("drip size %d: must be from 1 to %d", l.DripSize, int64(MaxUnits))
	case l.DripInterval < time.Microsecond || l.DripInterval%time.Microsecond != 0:
		return fmt.Errorf("drip rate %v: must be a whole number of microseconds, at least 1µs", l.DripInterval)
	case int(l.Algorithm) >= len(algorithms):
		return fmt.Errorf("algorithm %d: unknown", l.Algorithm)
	}
	return l.by().validate(l)
}

// LargestSize returns the largest Size with which l is valid, or 0 if none is.
func (l Limit) LargestSize() (size int64) {
	for more := int64(MaxUnits); more > 0; more /= 2 {
		if l.Size = size + more; l.Validate() == nil {
			size = l.Size
		}
	}
	return size
}

// CountingDenied returns l, but requests that are denied count too, in the bucket that
// denies them and in others of the request that have such a Limit. Then whoever keeps asking
// stays locked out, and a RetryAfter only holds for those who do not ask before. A bucket
// that denies a request is filled, and drips anew from then on; a fixed window is full until
// it ends, a sliding one counts the units, and one that warms up has no room for the time of
// a unit at its full rate. A bucket that had room, although the request was denied by
// another, is charged. No such request is denied without asking the server.
func (l Limit) CountingDenied() Limit {
	l.CountDenied = true
	return l
}

// validatePhase is validate for the Phase of limits that drip by the clock, and have no
// ColdFactor.
func (l *Limit) validatePhase() error {
	switch {
	case l.ColdFactor != 0:
		return fmt.Errorf("cold factor %v: must be 0 unless the bucket warms up", l.coldFactor())
	case !l.Aligned && l.Phase != 0:
		return fmt.Errorf("phase %v: must be 0 if drips are not aligned", l.Phase)
	case l.Phase < 0 || l.Phase >= l.DripInterval || l.Phase%time.Microsecond != 0:
		return fmt.Errorf("phase %v: must be a whole number of microseconds, from 0 to less than the drip rate, %v", l.Phase, l.DripInterval)
	}
	return nil
}

// complete returns l with its default values filled in.
func (l Limit) complete() Limit {
	if l.DripSize == 0 {
		l.DripSize = 1
	}
	return l
}

// rate returns the time between two drips, in µs.
func (l *Limit) rate() int64 { return int64(l.DripInterval / time.Microsecond) }

// DrainTime returns how long a full bucket takes to run empty; for one that warms
// up, the longest time until it is cold again.
func (l Limit) DrainTime() time.Duration {
	l = l.complete()
	return l.by().drainTime(&l)
}

// DripTime returns how long a bucket that has just dripped takes to lose the given
// number of units, at most Size; for one that warms up, at its full rate.
func (l Limit) DripTime(units int64) time.Duration {
	l = l.complete()
	return l.by().dripTime(&l, units)
}

// SpendTime returns over what time to spend the units that d left, so as to keep to l: until
// they have dripped out again or, in windows, until the present one ends. If none are left,
// it is the time until one is. d was made for a limit like l but for its size, and admitted
// the request.
func (l *Limit) SpendTime(d *Decision) time.Duration {
	if l.DripSize == 0 {
		complete := l.complete()
		l = &complete
	}
	switch {
	case d.Remaining == 0:
		told := *l
		told.Size = d.Size
		return d.waitIn(&told, 1)
	case d.Clear == 0 || l.Algorithm.DripSize() == 0:
		return l.by().dripTime(l, d.Remaining)
	}
	// Where the units of a window count in later ones too, that is so much longer.
	if later := l.by().drainTime(l) - l.DripInterval; d.Clear > later {
		return d.Clear - later
	}
	return d.Clear
}

// level is what a bucket holds: the time at which nothing is left of it, in µs on the
// store's clock, and a number that only its algorithm understands. So nothing has to be
// written as time passes. A bucket that is not stored is empty, and so is one whose time
// has passed.
type level struct{ clear, rest int64 }

// at returns the level at now. A bucket whose time lies beyond the horizon is empty. The
// level may exceed the Size of one limit if another limit with the same drips has filled
// the bucket further.
func (s level) at(now int64) level {
	if left := s.clear - now; left <= 0 || left > horizon {
		return level{clear: now}
	}
	return s
}

// below reports whether leaky bucket s holds less than t.
func (s level) below(t level) bool {
	return s.clear < t.clear || s.clear == t.clear && s.rest > t.rest
}

// ahead returns the level as seen from now.
func (s level) ahead(now int64) ahead { return ahead{s.clear - now, s.rest} }

// ahead is a level as seen from some moment: its time is the time from then. Clocks of
// different stores have nothing in common, so this is what they tell each other.
type ahead struct{ clear, rest int64 }

// after returns the level on the clock that shows now at that moment.
func (a ahead) after(now int64) level { return level{now + a.clear, a.rest} }

// moment is a time on the store's clock, and what that shows since the Unix epoch, in
// µs, which only limits need that are Aligned.
type moment struct{ now, unix int64 }

// ceilDiv returns a/b rounded up, for b > 0 and a > −b.
func ceilDiv(a, b int64) int64 { return floorDiv(a+b-1, b) }

// floorDiv returns a/b rounded down, for b > 0 and a ≥ 0. Usually b is a drip size
// of 1, and the division would be the most expensive step of all.
func floorDiv(a, b int64) int64 {
	if b == 1 {
		return a
	}
	return a / b
}
