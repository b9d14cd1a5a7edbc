package limiter

import (
	"fmt"
	"math/bits"
	"time"
)

// MaxUnits is the most units that a bucket can hold, and the most that can
// leave it with one drip: 2^49.
const MaxUnits = 1 << 49

// horizon is the furthest, in µs, that a bucket's clear time may lie ahead:
// about 35 years. It keeps every sum below 2^53, where the doubles of Redis's
// Lua are still exact.
const horizon = 1 << 50

// Limit is the shape of a bucket: it holds at most Size units, and every
// DripInterval it loses DripSize of them. [PerSecond], [PerMinute], [Every] and
// [NewLimit] make one of a rate. The zero Limit is not valid: neither a size nor a
// time can be guessed.
type Limit struct {
	// The most units the bucket holds, 1 to MaxUnits.
	Size int64

	// The time from one drip to the next: whole microseconds, at least one.
	DripInterval time.Duration

	// The units that leave with each drip, 1 to MaxUnits; 0 means 1.
	DripSize int64
}

// Validate returns an error that says which number of l is out of range, if
// one is. A full bucket and one drip more must drain within 2^50 µs, which is
// about 35 years.
func (l Limit) Validate() error {
	l = l.complete()
	switch {
	case l.Size < 1 || l.Size > MaxUnits:
		return fmt.Errorf("size %d: must be from 1 to %d", l.Size, int64(MaxUnits))
	case l.DripSize < 1 || l.DripSize > MaxUnits:
		return fmt.Errorf("drip size %d: must be from 1 to %d", l.DripSize, int64(MaxUnits))
	case l.DripInterval < time.Microsecond || l.DripInterval%time.Microsecond != 0:
		return fmt.Errorf("drip rate %v: must be a whole number of microseconds, at least 1µs", l.DripInterval)
	}
	if over, drain := bits.Mul64(uint64(l.drips()+1), uint64(l.rate())); over != 0 || drain > horizon {
		return fmt.Errorf("size %d, drip rate %v, drip size %d: a full bucket and one drip more must drain within 35 years",
			l.Size, l.DripInterval, l.DripSize)
	}
	return nil
}

// complete returns l with what it leaves out.
func (l Limit) complete() Limit {
	if l.DripSize == 0 {
		l.DripSize = 1
	}
	return l
}

// rate returns the time between two drips in µs.
func (l Limit) rate() int64 { return int64(l.DripInterval / time.Microsecond) }

// drips returns how many drips empty a full bucket.
func (l Limit) drips() int64 { return ceilDiv(l.Size, l.DripSize) }

// DrainTime returns how long a full bucket takes to run empty.
func (l Limit) DrainTime() time.Duration { return time.Duration(l.complete().drips()) * l.DripInterval }

// DripTime returns how long l takes to drip the given number of units, at
// most Size, out of a bucket that has just dripped.
func (l Limit) DripTime(units int64) time.Duration {
	return time.Duration(ceilDiv(units, l.complete().DripSize)) * l.DripInterval
}

// state is what a bucket holds, told by when it will have run empty: clear is
// that moment, in µs on the store's clock, and slack the units by which the
// last drip before it will fall short of a full drip, 0 ≤ slack < DripSize.
// Nothing has to be written as the bucket drips. An absent bucket is an empty
// one.
type state struct {
	clear int64
	slack int64
}

// at returns the bucket as it stands at now. One that has drained, or lies
// beyond the horizon, is empty. It may hold more than the size of a limit that
// another limit of the same drips has filled it by.
func (s state) at(now int64) state {
	if ahead := s.clear - now; ahead <= 0 || ahead > horizon {
		return state{clear: now}
	}
	return s
}

// wait returns how long, in µs, until a bucket that stands at s has room for
// cost; none if it has room now. The cost must not exceed the size.
func (l Limit) wait(s state, now, cost int64) int64 {
	fits := floorDiv(l.Size-cost+s.slack, l.DripSize) * l.rate()
	return max(s.clear-now-fits, 0)
}

// add returns the bucket with cost units more in it.
func (l Limit) add(s state, cost int64) state {
	drips := ceilDiv(cost-s.slack, l.DripSize)
	return state{
		clear: s.clear + drips*l.rate(),
		slack: s.slack + drips*l.DripSize - cost,
	}
}

// remaining returns how many units a bucket that stands at s has room for.
func (l Limit) remaining(s state, now int64) int64 {
	// drips·DripSize − slack units are in it. The product is only taken where
	// it is known to be small: a bucket may hold far more than this size, if
	// requests of another have filled it.
	drips, room := ceilDiv(s.clear-now, l.rate()), l.Size+s.slack
	if drips > floorDiv(room, l.DripSize) {
		return 0
	}
	return room - drips*l.DripSize
}

// ceilDiv returns a/b rounded up, for b > 0 and a > −b.
func ceilDiv(a, b int64) int64 { return floorDiv(a+b-1, b) }

// floorDiv returns a/b rounded down, for b > 0 and a ≥ 0. Mostly b is a drip
// size of 1, and a division the dearest thing that there is to do.
func floorDiv(a, b int64) int64 {
	if b == 1 {
		return a
	}
	return a / b
}
