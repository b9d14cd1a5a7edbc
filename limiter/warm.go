package limiter

import (
	"fmt"
	"math"
	"math/bits"
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
	// permits take in excess, which is the warm-up, and Size units at the full rate.
	over, units := bits.Mul64(uint64(l.Size), uint64(l.rate())) //nolint:gosec // neither is negative
	if over >= uint64(l.DripSize) {                             //nolint:gosec // nor this
		units = math.MaxInt64
	} else {
		units, _ = bits.Div64(over, units, uint64(l.DripSize)) //nolint:gosec // nor this
	}
	if units > uint64(max(horizon-2*l.warmUp()-2, 0)) { //nolint:gosec // not negative
		return fmt.Errorf("size %d, rate of %d/%v, warm-up of %v: the time for size and twice the warm-up must be at most 35 years",
			l.Size, l.DripSize, l.DripInterval, l.Phase)
	}
	return nil
}

func (a warm) drainTime(l *Limit) time.Duration {
	return time.Duration(a.add(l, level{}, l.Size, moment{}).free())*time.Microsecond + l.Phase
}

func (warm) dripTime(l *Limit, units int64) time.Duration {
	return time.Duration(math.Ceil(float64(units)*l.interval())) * time.Microsecond
}

func (warm) doubles(l *Limit) (rate, drip, phase float64) {
	return l.interval(), float64(l.warmUp() + 1), l.coldFactor()
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

// room: other units would make this request wait, whatever their number.
func (a warm) room(l *Limit, s level, n, now int64) int64 {
	if n > 0 || a.wait(l, s, 1, now) > 0 {
		return 0
	}
	return l.Size
}

// remaining is for one request, whatever it costs.
func (a warm) remaining(l *Limit, s level, now int64) int64 { return 1 - a.units(l, s, now) }

func (warm) wait(_ *Limit, s level, _, now int64) int64 { return max(s.free()-now, 0) }

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

// add: products are converted so that they are rounded before they are added, as in
// Lua, on all machines.
func (a warm) add(l *Limit, s level, n int64, at moment) level {
	s = a.started(s, at.now)
	interval, warmUp, units := l.interval(), float64(l.warmUp()), float64(n)

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

	used := float64(s.rest) / each
	wait := float64(units * interval)
	if high := above - used; high > 0 {
		steep := min(high, units)
		wait += float64(float64(steep*slope) * (high - float64(steep/2)))
	}
	rest := min(float64(s.rest)+float64(units*each), full, warmUp)
	return level{s.free() + int64(math.Ceil(wait)) + int64(rest), int64(rest)}
}

// count takes no permits.
func (a warm) count(l *Limit, s level, _, _ int64, at moment) level {
	s = a.started(s, at.now)
	free := max(s.free(), at.now+int64(math.Ceil(l.interval())))
	return level{free + s.rest, s.rest}
}

// atLeast: more than size units from cold means that some of them are in s already. So
// they do not count as taken permits, because then the next ones would be too cheap.
func (a warm) atLeast(l *Limit, s level, n, size int64, at moment) level {
	s = a.started(s, at.now)
	sum := a.add(l, s, n, at)
	if latest := max(a.add(l, level{clear: at.now}, size, at).free(), s.free()); sum.free() > latest {
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
