package bucket

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

func (leaky) Validate(l *Limit) error {
	if err := l.validatePhase(); err != nil {
		return err
	}
	if over, drain := bits.Mul64(uint64(leaky{}.drips(l)+1), uint64(l.Rate())); over != 0 || drain > Horizon { // neither is negative
		return fmt.Errorf("size %d, drip rate %v, drip size %d: a full bucket and one drip more must drain within 35 years",
			l.Size, l.DripInterval, l.DripSize)
	}
	return nil
}

// drips returns the number of drips that empty a full bucket.
func (leaky) drips(l *Limit) int64 { return CeilDiv(l.Size, l.DripSize) }

func (a leaky) DrainTime(l *Limit) time.Duration {
	return time.Duration(a.drips(l)) * l.DripInterval
}

func (leaky) DripTime(l *Limit, units int64) time.Duration {
	return time.Duration(CeilDiv(units, l.DripSize)) * l.DripInterval
}

func (leaky) Doubles(l *Limit, _ int64) (size, rate, drip, phase float64) {
	phase = -1
	if l.Aligned {
		phase = float64(l.Phase.Microseconds())
	}
	return float64(l.Size), float64(l.Rate()), float64(l.DripSize), phase
}

func (leaky) RestEnd(l *Limit) int64 { return l.DripSize }

func (a leaky) Room(l *Limit, s Level, n, now int64) int64 { return a.roomIn(l, s, l.Size-n, now) }

func (a leaky) Remaining(l *Limit, s Level, now int64) int64 { return a.roomIn(l, s, l.Size, now) }

// roomIn is room in a bucket of the given size.
func (leaky) roomIn(l *Limit, s Level, size, now int64) int64 {
	// The bucket holds drips·DripSize − rest units. The product is computed only
	// where it is known to be small: the level may far exceed this size if
	// requests with a larger one have filled the bucket.
	drips, room := CeilDiv(s.Clear-now, l.Rate()), size+s.Rest
	if room < 0 || drips > floorDiv(room, l.DripSize) {
		return 0
	}
	return room - drips*l.DripSize
}

func (leaky) Wait(l *Limit, s Level, n, now int64) int64 {
	fits := floorDiv(l.Size-n+s.Rest, l.DripSize) * l.Rate()
	return max(s.Clear-now-fits, 0)
}

func (leaky) Units(l *Limit, s Level, now int64) int64 {
	if s.Clear <= now {
		return 0
	}
	over, units := bits.Mul64(uint64(CeilDiv(s.Clear-now, l.Rate())), uint64(l.DripSize))
	if over != 0 || units > math.MaxInt64 {
		return math.MaxInt64 // something else has written to the bucket
	}
	return int64(units) - s.Rest
}

func (leaky) Add(l *Limit, s Level, n int64, at Moment) Level {
	if s.Clear <= at.Now {
		s = Level{Clear: l.start(at)}
	}
	drips := CeilDiv(n-s.Rest, l.DripSize)
	return Level{
		Clear: s.Clear + drips*l.Rate(),
		Rest:  s.Rest + drips*l.DripSize - n,
	}
}

// full returns the level of a bucket to which that many units were added at once.
func (a leaky) full(l *Limit, units int64, at Moment) Level {
	return a.Add(l, Level{Clear: at.Now}, units, at)
}

func (a leaky) AtLeast(l *Limit, s Level, n, size int64, at Moment) Level {
	room := a.roomIn(l, s.At(at.Now), size, at.Now)
	if room > 0 {
		s = a.Add(l, s, min(n, room), at)
	}
	if n > room {
		if full := a.full(l, size, at); s.below(full) {
			return full
		}
	}
	return s
}

// Count fills the bucket, as of now.
func (a leaky) Count(l *Limit, s Level, n, _ int64, at Moment) Level {
	units := l.Size - n
	if units < 1 {
		return s
	}
	full := a.full(l, units, at)
	if s.Clear <= at.Now {
		return full
	}
	return a.Join(l, s, full, 0, false) // a request with a larger size may have filled it further
}

// Join returns the later level, unless both lie within one drip. Then it may hold less
// than the other, and the smaller rest counts.
func (leaky) Join(l *Limit, a, b Level, late time.Duration, own bool) Level {
	a, b, same := l.ordered(a, b, late, own)
	if same {
		a.Rest = min(a.Rest, b.Rest)
	}
	return a
}

// Arriving: a bucket may have drained by then, and its rest no longer counts. Aligned
// drips cannot be delayed.
func (leaky) Arriving(l *Limit, s Ahead, late int64) (arrived Ahead, drained bool) {
	if l.Aligned || s.Clear > late {
		return s, false
	}
	return Ahead{Clear: s.Clear}, s.Clear <= l.Rate()
}

func (leaky) Ending(_ *Limit, s Level, _, _ int64) Level { return s }

// delayed: what drips within d. A drip lets pass those requests whose last unit has room
// then: as many units as drip, and the others of the first of them, which have waited in vain
// until then. If these are more than the size, more would pass at once than without a delay.
// A drip of a rate may come late, by up to 1 µs, and counts as if it did not: the third of 3/s is
// within 1s.
func (leaky) delayed(l *Limit, d, cost int64) int64 {
	if cost > l.Size-l.DripSize+1 {
		return 0
	}
	late := min(d/(tolerance-1), d/l.Rate()+1)
	return min(mulDiv((d+late)/l.Rate(), l.DripSize, 1), MaxUnits)
}

// waits: the larger size is all that there is to it.
func (leaky) waits(*Limit) bool { return false }

// delay: until there is room again for all that may wait.
func (a leaky) delay(l *Limit, s Level, _, delayed, now int64) int64 {
	return a.Wait(l, s, delayed, now)
}
