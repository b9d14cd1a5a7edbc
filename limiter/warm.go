package limiter

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

// WarmingUp returns a Limit that admits n units every d, evenly and without bursts,
// and slower after it was idle: a cold bucket waits coldFactor times as long after
// the first unit, and in the time of warmUp at most reaches the full rate, if there
// are always requests. A bucket that has been idle for the time of warmUp is cold
// again, and one that was idle for less is so in part.
//
// A request is admitted once the wait after the last one is over, whatever its own
// cost, and makes the next one wait for as long as all its units take. It may cost at
// most n, unless Size is changed. With warm units that is d/n for each, and so at
// most 1 + T·n/d requests of one unit are admitted in a time T. Each wait is rounded
// up to whole microseconds, and the idle time that makes up for a unit is rounded down
// to whole microseconds, at least one. So no wait is too short, unless d/n is below
// 1.5 µs; after idle time one may be a little longer than exact.
//
// With a Size above n, requests are admitted earlier, so as to wait: up to the time of
// Size − n units at the full rate before the wait is over. [Limit.Delayed] returns such a
// Size. It returns none for a cost of half as many units as fit into warmUp at the full
// rate, or more, as the level that such a request leaves may not tell for how long it has
// to wait. A bucket with such a Size can't have Hold.
//
// n is from 1 to the number of microseconds in d; d and warmUp are whole numbers of
// microseconds; coldFactor, rounded to thousandths, is from 1 to [MaxColdFactor]. All of
// d and twice warmUp are at most 35 years. Otherwise the Limit is not valid, and
// every request returns an error.
func WarmingUp(n int64, d, warmUp time.Duration, coldFactor float64) Limit {
	l := Limit{Size: n, DripInterval: d, DripSize: n, Aligned: true, Algorithm: WarmUp, Phase: warmUp}
	if factor := math.Round(coldFactor * thousandths); factor >= 1 && factor <= MaxColdFactor*thousandths {
		l.ColdFactor = uint32(factor)
	}
	return l
}

// warm counts units in a bucket that warms up.
type warm struct{}

func (warm) validate(l *Limit) error {
	switch {
	case !l.Aligned:
		return fmt.Errorf("%v: must be made by WarmingUp", l.Algorithm)
	case l.DripSize > l.rate():
		return fmt.Errorf("rate of %d/%v: must be at most one unit for each microsecond", l.DripSize, l.DripInterval)
	case l.Phase < time.Microsecond || l.Phase%time.Microsecond != 0:
		return fmt.Errorf("warm-up of %v: must be a whole number of microseconds, at least 1µs", l.Phase)
	case l.ColdFactor < thousandths || l.ColdFactor > MaxColdFactor*thousandths:
		return fmt.Errorf("cold factor %v: must be from 1 to %d", l.coldFactor(), MaxColdFactor)
	}
	// A request of Size units that finds it cold waits no longer than all stored
	// permits take in excess, which is the warm-up, and Size units at the full rate; and
	// those that may wait, for more units than that.
	if mulDiv(l.Size+max(l.Size-l.DripSize, 0), l.rate(), l.DripSize) > max(horizon-2*l.warmUp()-2, 0) {
		return fmt.Errorf("size %d, rate of %d/%v, warm-up of %v: the time for size and twice the warm-up must be at most 35 years",
			l.Size, l.DripSize, l.DripInterval, l.Phase)
	}
	return nil
}

func (a warm) drainTime(l *Limit) time.Duration {
	return time.Duration(a.reach(l)+a.add(l, level{}, l.Size, moment{}).free())*time.Microsecond + l.Phase
}

func (warm) dripTime(l *Limit, units int64) time.Duration {
	part := math.Ceil(float64(units%l.DripSize) * l.interval())
	return time.Duration(units/l.DripSize)*l.DripInterval + time.Duration(part)*time.Microsecond
}

// doubles: the size is negative if the request may wait, and then for how long.
func (a warm) doubles(l *Limit, cost int64) (size, rate, drip, phase float64) {
	size = float64(l.Size)
	if a.waits(l) && cost <= l.Size {
		size = -float64(a.reach(l))
	}
	return size, l.interval(), float64(l.warmUp() + 1), l.coldFactor()
}

func (warm) restEnd(l *Limit) int64 { return l.warmUp() + 1 }

// warmUp returns the idle time after which a bucket is cold, in µs.
func (l *Limit) warmUp() int64 { return l.Phase.Microseconds() }

// coldFactor returns l's cold factor.
func (l *Limit) coldFactor() float64 { return float64(l.ColdFactor) / thousandths }

// interval returns the time for each unit at the full rate, in µs.
func (l *Limit) interval() float64 { return float64(l.rate()) / float64(l.DripSize) }

// free returns the next free moment of a bucket at level s.
func (s level) free() int64 { return s.clear - s.rest }

// waits: room for more than the rate's units is for requests that wait.
func (warm) waits(l *Limit) bool { return l.Size > l.DripSize }

// reach returns for how long requests may wait.
func (a warm) reach(l *Limit) int64 {
	if !a.waits(l) {
		return 0
	}
	return int64(float64(l.Size-l.DripSize) * l.interval())
}

// room: there is room for a request, whatever it costs, or there is none. Other units
// make it wait.
func (a warm) room(l *Limit, s level, n, now int64) int64 {
	if n > 0 {
		if !a.waits(l) {
			return 0
		}
		s = a.add(l, s, n, moment{now: now})
	}
	if a.wait(l, s, 1, now) > 0 {
		return 0
	}
	return l.Size
}

// remaining is for one request, whatever it costs, and for as many that wait after it as
// may do so at the full rate.
func (a warm) remaining(l *Limit, s level, now int64) int64 {
	if a.wait(l, s, 1, now) > 0 {
		return 0
	}
	if !a.waits(l) {
		return 1
	}
	waiting := math.Ceil(float64(max(s.free()-now, 0)) / l.interval())
	return 1 + max(l.Size-l.DripSize-int64(waiting), 0)
}

func (a warm) wait(l *Limit, s level, _, now int64) int64 { return max(s.free()-a.reach(l)-now, 0) }

// units: one, until the next free moment.
func (warm) units(_ *Limit, s level, now int64) int64 {
	if s.clear > now && s.free() > now {
		return 1
	}
	return 0
}

// started returns a level that is free at now, if s was so before.
func (warm) started(s level, now int64) level {
	switch {
	case s.clear <= now:
		return level{clear: now}
	case s.free() < now: // it was idle since
		s.rest = s.clear - now
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
	interval, warmUp := l.interval(), float64(l.warmUp())

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

// take returns how long so many units take from a store that is full after the given idle
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

func (a warm) add(l *Limit, s level, n int64, at moment) level {
	s = a.started(s, at.now)
	p, units := l.permits(), float64(n)
	rest := min(float64(s.rest)+float64(units*p.each), p.full)
	return level{s.free() + p.take(s.rest, units) + int64(rest), int64(rest)}
}

// count takes no permits.
func (a warm) count(l *Limit, s level, _, cost int64, at moment) level {
	s = a.started(s, at.now)
	latest := at.now
	if cost <= l.Size {
		latest += a.reach(l)
	}
	free := max(s.free(), latest+int64(math.Ceil(l.interval())))
	return level{free + s.rest, s.rest}
}

// atLeast: more than size units from cold means that some of them are in s already. So
// they do not count as taken permits, because then the next ones would be too cheap.
func (a warm) atLeast(l *Limit, s level, n, size int64, at moment) level {
	s = a.started(s, at.now)
	sum := a.add(l, s, n, at)
	if latest := max(a.add(l, level{clear: at.now}, size, at).free()+a.reach(l), s.free()); sum.free() > latest {
		return level{latest + s.rest, s.rest}
	}
	return sum
}

// join returns a level at which requests are admitted no earlier than at a or b, and
// which is cold no earlier: who knows of more units knows of a later time. That the
// store of permits may then be as low as the lower of the two admits nothing too early,
// because the level in which it is so low comes with the waits for all the permits that
// were taken from it.
func (warm) join(_ *Limit, a, b level, _ time.Duration, _ bool) level {
	clear := max(a.clear, b.clear)
	return level{clear, clear - max(a.free(), b.free())}
}

func (warm) arriving(_ *Limit, s ahead, _ int64) (arrived ahead, drained bool) { return s, false }

func (warm) ending(_ *Limit, s level, _, _ int64) level { return s }

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
	return min(mulDiv(d, l.DripSize, l.rate()), MaxUnits)
}

// delay: until the moment that was free before the request.
func (warm) delay(l *Limit, s level, cost, _, now int64) int64 {
	p, units := l.permits(), float64(cost)
	free, found := s.free(), s.rest
	if float64(s.rest) < p.full {
		found = max(s.rest-int64(float64(units*p.each)), 0)
	}
	return max(free-p.take(found, units)-now, 0)
}
