package bucket

import (
	"fmt"
	"math"
	"time"
)

// A limit that warms up admits requests at growing rates after it was idle. It is
// the SmoothWarmingUp of Guava, which stores permits while it is idle, up to a
// maximum: then it is cold. Taking a stored permit makes the next request wait
// longer the more of them are stored, at least as long as at the full rate.
//
// The time of its level is the moment at which the bucket is cold again, if it stays
// idle until then. The rest is how many of the microseconds before that time it has to
// be idle to be cold. What is left of that time is the next free moment: requests are
// denied until then, and admitted from then on. So nothing has to be written as the
// stored permits grow, and a bucket that is not stored is cold.
//
// Requests that may wait are admitted before the next free moment, and run then.

const (
	// MaxColdFactor is the largest cold factor of a [WarmUp] Limit.
	MaxColdFactor = 1_000_000

	// DefaultColdFactor is the usual cold factor of a [WarmUp] Limit.
	DefaultColdFactor = 3

	thousandths = 1000 // in which cold factors are kept
)

// WarmingUp returns a Limit of n units every d, whose cold buckets wait coldFactor times as long
// and reach the full rate in the time of warmUp. With a Size above n, requests are admitted
// earlier, so as to wait: up to the time of Size − n units at the full rate before the wait is
// over. [Limit.Delayed] returns such a Size. It returns none for a cost of half as many units as
// fit into warmUp at the full rate, or more, as the level that such a request leaves may not show
// for how long it has to wait. A bucket with such a Size can't hold units.
func WarmingUp(n int64, d, warmUp time.Duration, coldFactor float64) Limit {
	l := Limit{Size: n, DripInterval: d, DripSize: n, Aligned: true, Algorithm: WarmUp, Phase: warmUp}
	return l.WithColdFactor(coldFactor)
}

// WithColdFactor returns l with another factor. It is not valid if that is out of range, or l
// does not warm up.
func (l Limit) WithColdFactor(factor float64) Limit {
	if l.ColdFactor = 0; l.Algorithm != WarmUp {
		l.ColdFactor = thousandths
	} else if f := math.Round(factor * thousandths); f >= 1 && f <= MaxColdFactor*thousandths {
		l.ColdFactor = uint32(f)
	}
	return l
}

// warm counts units in a bucket that warms up.
type warm struct{}

func (warm) Validate(l *Limit) error {
	switch {
	case !l.Aligned:
		return fmt.Errorf("%v: must be made by WarmingUp", l.Algorithm)
	case l.DripSize > l.Rate():
		return fmt.Errorf("rate of %d/%v: must be at most one unit for each microsecond", l.DripSize, l.DripInterval)
	case l.Phase < time.Microsecond || l.Phase%time.Microsecond != 0:
		return fmt.Errorf("warm-up of %v: must be a whole number of microseconds, at least 1µs", l.Phase)
	case l.ColdFactor < thousandths || l.ColdFactor > MaxColdFactor*thousandths:
		return fmt.Errorf("cold factor %v: must be from 1 to %d", l.coldFactor(), MaxColdFactor)
	}
	// A request of Size units that finds it cold waits no longer than all stored
	// permits take in excess, which is the warm-up, and Size units at the full rate; and
	// those that may wait, for more units than that.
	if mulDiv(l.Size+max(l.Size-l.DripSize, 0), l.Rate(), l.DripSize) > max(Horizon-2*l.WarmUp()-2, 0) {
		return fmt.Errorf("size %d, rate of %d/%v, warm-up of %v: the time for size and twice the warm-up must be at most 35 years",
			l.Size, l.DripSize, l.DripInterval, l.Phase)
	}
	return nil
}

func (a warm) DrainTime(l *Limit) time.Duration {
	return time.Duration(a.reach(l)+a.Add(l, Level{}, l.Size, Moment{}).Free())*time.Microsecond + l.Phase
}

func (warm) DripTime(l *Limit, units int64) time.Duration {
	part := math.Ceil(float64(units%l.DripSize) * l.Interval())
	return time.Duration(units/l.DripSize)*l.DripInterval + time.Duration(part)*time.Microsecond
}

// Doubles: the size is negative if the request may wait, and then for how long.
func (a warm) Doubles(l *Limit, cost int64) (size, rate, drip, phase float64) {
	size = float64(l.Size)
	if a.waits(l) && cost <= l.Size {
		size = -float64(a.reach(l))
	}
	return size, l.Interval(), float64(l.WarmUp() + 1), l.coldFactor()
}

func (warm) RestEnd(l *Limit) int64 { return l.WarmUp() + 1 }

// WarmUp returns the idle time after which a bucket is cold, in µs.
func (l *Limit) WarmUp() int64 { return l.Phase.Microseconds() }

// coldFactor returns l's cold factor.
func (l *Limit) coldFactor() float64 { return float64(l.ColdFactor) / thousandths }

// Interval returns the time for each unit at the full rate, in µs.
func (l *Limit) Interval() float64 { return float64(l.Rate()) / float64(l.DripSize) }

// Free returns the next free moment of a bucket at level s.
func (s Level) Free() int64 { return s.Clear - s.Rest }

// waits: room for more than the rate's units is for requests that wait.
func (warm) waits(l *Limit) bool { return l.Size > l.DripSize }

// reach returns for how long requests may wait.
func (a warm) reach(l *Limit) int64 {
	if !a.waits(l) {
		return 0
	}
	return int64(float64(l.Size-l.DripSize) * l.Interval())
}

// Room: there is room for a request, whatever it costs, or for no request. Other units
// make it wait.
func (a warm) Room(l *Limit, s Level, n, now int64) int64 {
	if n > 0 {
		if !a.waits(l) {
			return 0
		}
		s = a.Add(l, s, n, Moment{Now: now})
	}
	if a.Wait(l, s, 1, now) > 0 {
		return 0
	}
	return l.Size
}

// Remaining is for one request, whatever it costs, and for as many that wait after it as
// may do so at the full rate.
func (a warm) Remaining(l *Limit, s Level, now int64) int64 {
	if a.Wait(l, s, 1, now) > 0 {
		return 0
	}
	if !a.waits(l) {
		return 1
	}
	waiting := math.Ceil(float64(max(s.Free()-now, 0)) / l.Interval())
	return 1 + max(l.Size-l.DripSize-int64(waiting), 0)
}

func (a warm) Wait(l *Limit, s Level, _, now int64) int64 { return max(s.Free()-a.reach(l)-now, 0) }

// Units: one, until the next free moment.
func (warm) Units(_ *Limit, s Level, now int64) int64 {
	if s.Clear > now && s.Free() > now {
		return 1
	}
	return 0
}

// started returns a level that is free at now, if s was so before.
func (warm) started(s Level, now int64) Level {
	switch {
	case s.Clear <= now:
		return Level{Clear: now}
	case s.Free() < now: // it was idle since
		s.Rest = s.Clear - now
	}
	return s
}

// permits is what a limit that warms up stores. Products are converted so that they are
// rounded before they are added, as in Lua, on all machines.
type permits struct {
	interval float64 // the time for one at the full rate
	above    float64 // how many of them take longer
	slope    float64 // and how much longer each of those than the one below it
	each     float64 // the idle time in which one is stored
	full     float64 // the idle time in which all are
}

// permits returns what l stores.
func (l *Limit) permits() permits {
	interval, warmUp := l.Interval(), float64(l.WarmUp())

	// Half as many permits as fit into the warm-up at the full rate are taken at
	// that rate. Those above take longer, the more the higher they lie.
	threshold := float64(0.5*warmUp) / interval
	above := float64(2*warmUp) / (interval + float64(interval*l.coldFactor()))
	slope := (float64(interval*l.coldFactor()) - interval) / above

	// The idle time in which a permit is stored is whole microseconds, so the rest is
	// exact: nothing adds up over many requests. Rounded down, and with it the whole
	// store, permits are not stored too slowly, and so no wait is too short.
	each := max(math.Floor(warmUp/(threshold+above)), 1)
	full := max(math.Floor((threshold+above)*each), 1)
	return permits{interval, above, slope, each, min(full, warmUp)}
}

// take returns how long that many units take from a store that is full after the given idle
// time.
func (p *permits) take(rest int64, units float64) int64 {
	used := float64(rest) / p.each
	wait := float64(units * p.interval)
	if high := p.above - used; high > 0 {
		steep := min(high, units)
		wait += float64(float64(steep*p.slope) * (high - float64(steep/2)))
	}
	return int64(math.Ceil(wait))
}

func (a warm) Add(l *Limit, s Level, n int64, at Moment) Level {
	s = a.started(s, at.Now)
	p, units := l.permits(), float64(n)
	rest := min(float64(s.Rest)+float64(units*p.each), p.full)
	return Level{s.Free() + p.take(s.Rest, units) + int64(rest), int64(rest)}
}

// Count takes no permits.
func (a warm) Count(l *Limit, s Level, _, cost int64, at Moment) Level {
	s = a.started(s, at.Now)
	latest := at.Now
	if cost <= l.Size {
		latest += a.reach(l)
	}
	free := max(s.Free(), latest+int64(math.Ceil(l.Interval())))
	return Level{free + s.Rest, s.Rest}
}

// AtLeast: more than size units from cold means that some of them are in s already. So
// they do not count as taken permits, because then the next ones would be too cheap.
func (a warm) AtLeast(l *Limit, s Level, n, size int64, at Moment) Level {
	s = a.started(s, at.Now)
	sum := a.Add(l, s, n, at)
	if latest := max(a.Add(l, Level{Clear: at.Now}, size, at).Free()+a.reach(l), s.Free()); sum.Free() > latest {
		return Level{latest + s.Rest, s.Rest}
	}
	return sum
}

// Join returns a level at which requests are admitted no earlier than at a or b, and
// which is cold no earlier: who knows of more units knows of a later time. That the
// store of permits may then be as low as the lower of the two admits nothing too early,
// because the level in which it is so low comes with the waits for all the permits that
// were taken from it.
func (warm) Join(_ *Limit, a, b Level, _ time.Duration, _ bool) Level {
	clear := max(a.Clear, b.Clear)
	return Level{clear, clear - max(a.Free(), b.Free())}
}

func (warm) Arriving(_ *Limit, s Ahead, _ int64) (arrived Ahead, drained bool) { return s, false }

func (warm) Ending(_ *Limit, s Level, _, _ int64) Level { return s }

// delayed: what passes within d at the full rate. What a request waits for is known from
// the level that it left if all that empty the store take the same time, whatever they
// find in it.
func (warm) delayed(l *Limit, d, cost int64) int64 {
	if cost > l.Size {
		return 0
	}
	p, units := l.permits(), float64(cost)
	if p.take(int64(max(p.full-float64(units*p.each), 0)), units) != p.take(int64(p.full), units) {
		return 0
	}
	return min(mulDiv(d, l.DripSize, l.Rate()), MaxUnits)
}

// delay: until the moment that was free before the request.
func (warm) delay(l *Limit, s Level, cost, _, now int64) int64 {
	p, units := l.permits(), float64(cost)
	free, found := s.Free(), s.Rest
	if float64(s.Rest) < p.full {
		found = max(s.Rest-int64(float64(units*p.each)), 0)
	}
	return max(free-p.take(found, units)-now, 0)
}
