package limiter

import (
	"fmt"
	"math"
	"math/bits"
	"time"
)

// leaky counts units in a leaky bucket, see Limit. The time of its level is when the
// bucket runs empty, and the rest is by how many units the last drip before that falls
// short of a full one. Its methods are small enough to be inlined where that counts.
type leaky struct{}

func (leaky) validate(l *Limit) error {
	if err := l.validatePhase(); err != nil {
		return err
	}
	if over, drain := bits.Mul64(uint64(leaky{}.drips(l)+1), uint64(l.rate())); over != 0 || drain > horizon { //nolint:gosec // neither is negative
		return fmt.Errorf("size %d, drip rate %v, drip size %d: a full bucket and one drip more must drain within 35 years",
			l.Size, l.DripInterval, l.DripSize)
	}
	return nil
}

// drips returns the number of drips that empty a full bucket.
func (leaky) drips(l *Limit) int64 { return ceilDiv(l.Size, l.DripSize) }

func (a leaky) drainTime(l *Limit) time.Duration {
	return time.Duration(a.drips(l)) * l.DripInterval
}

func (leaky) dripTime(l *Limit, units int64) time.Duration {
	return time.Duration(ceilDiv(units, l.DripSize)) * l.DripInterval
}

func (leaky) doubles(l *Limit, _ int64) (size, rate, drip, phase float64) {
	phase = -1
	if l.Aligned {
		phase = float64(l.Phase.Microseconds())
	}
	return float64(l.Size), float64(l.rate()), float64(l.DripSize), phase
}

func (leaky) restEnd(l *Limit) int64 { return l.DripSize }

func (a leaky) room(l *Limit, s level, n, now int64) int64 { return a.roomIn(l, s, l.Size-n, now) }

func (a leaky) remaining(l *Limit, s level, now int64) int64 { return a.roomIn(l, s, l.Size, now) }

// roomIn is room in a bucket of the given size.
func (leaky) roomIn(l *Limit, s level, size, now int64) int64 {
	// The bucket holds drips·DripSize − rest units. The product is computed only
	// where it is known to be small: the level may far exceed this size if
	// requests with a larger one have filled the bucket.
	drips, room := ceilDiv(s.clear-now, l.rate()), size+s.rest
	if room < 0 || drips > floorDiv(room, l.DripSize) {
		return 0
	}
	return room - drips*l.DripSize
}

func (leaky) wait(l *Limit, s level, n, now int64) int64 {
	fits := floorDiv(l.Size-n+s.rest, l.DripSize) * l.rate()
	return max(s.clear-now-fits, 0)
}

func (leaky) units(l *Limit, s level, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	over, units := bits.Mul64(uint64(ceilDiv(s.clear-now, l.rate())), uint64(l.DripSize))
	if over != 0 || units > math.MaxInt64 {
		return math.MaxInt64 // something else has written to the bucket
	}
	return int64(units) - s.rest
}

func (leaky) add(l *Limit, s level, n int64, at moment) level {
	if s.clear <= at.now {
		s = level{clear: l.start(at)}
	}
	drips := ceilDiv(n-s.rest, l.DripSize)
	return level{
		clear: s.clear + drips*l.rate(),
		rest:  s.rest + drips*l.DripSize - n,
	}
}

// full returns the level of a bucket to which so many units were added at once.
func (a leaky) full(l *Limit, units int64, at moment) level {
	return a.add(l, level{clear: at.now}, units, at)
}

func (a leaky) atLeast(l *Limit, s level, n, size int64, at moment) level {
	room := a.roomIn(l, s.at(at.now), size, at.now)
	if room > 0 {
		s = a.add(l, s, min(n, room), at)
	}
	if n > room {
		if full := a.full(l, size, at); s.below(full) {
			return full
		}
	}
	return s
}

// count fills the bucket, as of now.
func (a leaky) count(l *Limit, s level, n, _ int64, at moment) level {
	units := l.Size - n
	if units < 1 {
		return s
	}
	full := a.full(l, units, at)
	if s.clear <= at.now {
		return full
	}
	return a.join(l, s, full, 0, false) // a request with a larger size may have filled it further
}

// join returns the later level, unless both lie within one drip. Then it may hold less
// than the other, and the smaller rest counts.
func (leaky) join(l *Limit, a, b level, late time.Duration, own bool) level {
	a, b, same := l.ordered(a, b, late, own)
	if same {
		a.rest = min(a.rest, b.rest)
	}
	return a
}

// arriving: a bucket may have drained by then, and its rest no longer counts. Aligned
// drips cannot be delayed.
func (leaky) arriving(l *Limit, s ahead, late int64) (arrived ahead, drained bool) {
	if l.Aligned || s.clear > late {
		return s, false
	}
	return ahead{clear: s.clear}, s.clear <= l.rate()
}

func (leaky) ending(_ *Limit, s level, _, _ int64) level { return s }

// delayed: what drips within d. A drip lets pass those requests whose last unit has room
// then: as many units as drip, and the others of the first of them, which have waited in vain
// until then. If these are more than the size, more would pass at once than without a delay.
func (leaky) delayed(l *Limit, d, cost int64) int64 {
	if cost > l.Size-l.DripSize+1 {
		return 0
	}
	return min(mulDiv(d/l.rate(), l.DripSize, 1), MaxUnits)
}

// waits: the larger size is all that there is to it.
func (leaky) waits(*Limit) bool { return false }

// delay: until there is room again for all that may wait.
func (a leaky) delay(l *Limit, s level, _, delayed, now int64) int64 {
	return a.wait(l, s, delayed, now)
}
