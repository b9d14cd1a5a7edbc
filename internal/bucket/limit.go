// Package bucket is the arithmetic of rate limits: what a limit is, what a bucket holds, and how
// each algorithm counts. It is pure: it knows of numbers and times that it is given, and of no
// lock, clock, store or server. Package limiter has the stores, and shows limits to its users
// without these numbers.
package bucket

import (
	"errors"
	"fmt"
	"time"
)

// MaxUnits is the largest Size and DripSize of a Limit: 2^49.
const MaxUnits = 1 << 49

// Horizon is the furthest, in µs, that a bucket's clear time may lie in the
// future: about 35 years. It keeps every sum below 2^53, where the doubles of
// Redis's Lua are still exact.
const Horizon = 1 << 50

// Limit describes a bucket: it holds at most Size units, and every DripInterval it loses
// DripSize of them. That is a leaky bucket; what the numbers are to other algorithms, the
// functions say that make their limits. The zero Limit is not valid: Size and DripInterval have
// no default.
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

	// Whether requests that are denied count too, in the bucket that denies them and in others
	// of the request that have this: how, says CountingDenied of package limiter to users, and
	// Counting.Count here.
	CountDenied bool

	checked bool // see Checked

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
	l = l.Complete()
	return l.check()
}

// Checked marks l, which is complete and valid, so that Check does not check it again; Validate
// does. Code that changes its numbers must keep them valid.
func (l Limit) Checked() Limit {
	l.checked = true
	return l
}

// Check is Validate for a Limit that is complete. It runs for each bucket of each
// request, so it does not copy the Limit.
func (l *Limit) Check() error {
	if l.checked {
		return nil
	}
	return l.check()
}

// check is Check of a Limit that nothing has checked.
func (l *Limit) check() error {
	switch {
	case l.Size < 1 || l.Size > MaxUnits:
		return l.badSize()
	case l.DripSize < 1 || l.DripSize > MaxUnits:
		return fmt.Errorf("drip size %d: must be from 1 to %d", l.DripSize, int64(MaxUnits))
	case l.DripInterval < time.Microsecond || l.DripInterval%time.Microsecond != 0:
		return fmt.Errorf("drip rate %v: must be a whole number of microseconds, at least 1µs", l.DripInterval)
	case int(l.Algorithm) >= len(Algorithms):
		return fmt.Errorf("algorithm %d: unknown", l.Algorithm)
	}
	return l.by().Validate(l)
}

// badSize returns the error for a Size that is out of range.
func (l *Limit) badSize() error {
	switch {
	case *l == (Limit{DripSize: 1}):
		return errors.New("the zero Limit is not valid: use PerSecond, FixedWindow or another function that makes one")
	case l.Size == 0 && l.DripInterval == 0: // see WithBurst
		return fmt.Errorf("%v limits have no burst: leave out WithBurst", l.Algorithm)
	}
	return fmt.Errorf("size %d: must be from 1 to %d", l.Size, int64(MaxUnits))
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

// validatePhase is validate for the Phase of limits that drip by the clock, and have no
// ColdFactor.
func (l *Limit) validatePhase() error {
	switch {
	case l.ColdFactor != 0:
		return fmt.Errorf("%v limits have no cold factor: leave out WithColdFactor", l.Algorithm)
	case !l.Aligned && l.Phase != 0:
		return fmt.Errorf("phase %v: must be 0 if drips are not aligned", l.Phase)
	case l.Phase < 0 || l.Phase >= l.DripInterval || l.Phase%time.Microsecond != 0:
		return fmt.Errorf("phase %v: must be a whole number of microseconds, from 0 to less than the drip rate, %v", l.Phase, l.DripInterval)
	}
	return nil
}

// Complete returns l with its default values filled in.
func (l Limit) Complete() Limit {
	if l.DripSize == 0 {
		l.DripSize = 1
	}
	return l
}

// Rate returns the time between two drips, in µs.
func (l *Limit) Rate() int64 { return int64(l.DripInterval / time.Microsecond) }

// DrainTime returns how long a full bucket takes to run empty; for one that warms
// up, the longest time until it is cold again.
func (l Limit) DrainTime() time.Duration {
	l = l.Complete()
	return l.by().DrainTime(&l)
}

// DripTime returns how long a bucket that has just dripped takes to lose the given
// number of units, at most Size; for one that warms up, at its full rate.
func (l *Limit) DripTime(units int64) time.Duration {
	if l.DripSize == 0 {
		complete := l.Complete()
		l = &complete
	}
	return l.by().DripTime(l, units)
}

// SpendTime returns over what time to spend the units that remain, of a bucket that runs empty
// in the time of clear, so as to keep to l: until they have dripped out again or, in windows,
// until the present one ends. Of an empty bucket, unix says which window that is, if they go
// by the clock; others begin with the next request.
func (l *Limit) SpendTime(remaining int64, clear time.Duration, unix int64) time.Duration {
	switch {
	case l.Algorithm.DripSize() == 0:
		return l.by().DripTime(l, remaining)
	case clear > 0:
		// Where the units of a window count in later ones too, it is that much longer.
		if later := l.by().DrainTime(l) - l.DripInterval; clear > later {
			return clear - later
		}
		return clear
	case l.Aligned && !l.KeepsEntries():
		return l.DripInterval - time.Duration(l.SinceDrip(unix))*time.Microsecond
	}
	return l.DripInterval
}

// Level is what a bucket holds: the time at which nothing is left of it, in µs on the
// store's clock, and a number that only its algorithm understands. So nothing has to be
// written as time passes. A bucket that is not stored is empty, and so is one whose time
// has passed.
type Level struct{ Clear, Rest int64 }

// At returns the level at now. A bucket whose time lies beyond the horizon is empty. The
// level may exceed the Size of one limit if another limit with the same drips has filled
// the bucket further.
func (s Level) At(now int64) Level {
	if left := s.Clear - now; left <= 0 || left > Horizon {
		return Level{Clear: now}
	}
	return s
}

// below reports whether leaky bucket s holds less than t.
func (s Level) below(t Level) bool {
	return s.Clear < t.Clear || s.Clear == t.Clear && s.Rest > t.Rest
}

// Ahead returns the level as seen from now.
func (s Level) Ahead(now int64) Ahead { return Ahead{s.Clear - now, s.Rest} }

// Ahead is a level as seen from some moment: its time is the time from then. Clocks of
// different stores have nothing in common, so this is what they report to each other.
type Ahead struct{ Clear, Rest int64 }

// After returns the level on the clock that shows now at that moment.
func (a Ahead) After(now int64) Level { return Level{now + a.Clear, a.Rest} }

// Moment is a time on the store's clock, and what that shows since the Unix epoch, in
// µs, which only limits need that are Aligned.
type Moment struct{ Now, Unix int64 }

// CeilDiv returns a/b rounded up, for b > 0 and a > −b.
func CeilDiv(a, b int64) int64 { return floorDiv(a+b-1, b) }

// floorDiv returns a/b rounded down, for b > 0 and a ≥ 0. Usually b is a drip size
// of 1, and the division would be the most expensive step of all.
func floorDiv(a, b int64) int64 {
	if b == 1 {
		return a
	}
	return a / b
}
