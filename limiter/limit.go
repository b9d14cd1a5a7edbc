package limiter

import (
	"fmt"
	"math"
	"math/bits"
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
	// units, and one that warms up is not free within the time of a unit at its full
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
	case l.Algorithm > WarmUp:
		return fmt.Errorf("algorithm %d: unknown", l.Algorithm)
	case l.Algorithm == WarmUp:
		return l.validateWarmUp()
	case l.ColdFactor != 0:
		return fmt.Errorf("cold factor %v: must be 0 unless the bucket warms up", l.coldFactor())
	case !l.Aligned && l.Phase != 0:
		return fmt.Errorf("phase %v: must be 0 if drips are not aligned", l.Phase)
	case l.Phase < 0 || l.Phase >= l.DripInterval || l.Phase%time.Microsecond != 0:
		return fmt.Errorf("phase %v: must be a whole number of microseconds, from 0 to less than the drip rate, %v", l.Phase, l.DripInterval)
	case l.Algorithm.counts():
		return l.validateWindow()
	}
	if over, drain := bits.Mul64(uint64(l.drips()+1), uint64(l.rate())); over != 0 || drain > horizon {
		return fmt.Errorf("size %d, drip rate %v, drip size %d: a full bucket and one drip more must drain within 35 years",
			l.Size, l.DripInterval, l.DripSize)
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

// drips returns the number of drips that empty a full bucket.
func (l *Limit) drips() int64 {
	if l.Algorithm.counts() {
		return 2 // units count in the window after their own too
	}
	return ceilDiv(l.Size, l.DripSize)
}

// DrainTime returns how long a full bucket takes to run empty; for one that warms
// up, the longest time until it is cold again.
func (l Limit) DrainTime() time.Duration {
	if l.Algorithm == WarmUp {
		return time.Duration(l.warmAdd(state{}, l.Size).free())*time.Microsecond + l.Phase
	}
	l = l.complete()
	return time.Duration(l.drips()) * l.DripInterval
}

// DripTime returns how long a bucket that has just dripped takes to lose the given
// number of units, at most Size; for one that warms up, at its full rate.
func (l Limit) DripTime(units int64) time.Duration {
	if l.Algorithm == WarmUp {
		return time.Duration(math.Ceil(float64(units)*l.interval())) * time.Microsecond
	}
	return time.Duration(ceilDiv(units, l.complete().DripSize)) * l.DripInterval
}

// state is the level of a bucket. It is stored as the time at which the bucket
// runs empty, clear, in µs on the store's clock, and slack, the number of units by
// which the last drip before that falls short of a full drip, 0 ≤ slack <
// DripSize. So nothing has to be written as the bucket drips. A bucket that is not
// stored is empty. For the other algorithms see sliding.go, log.go and warm.go.
type state struct {
	clear int64
	slack int64
}

// at returns the level at now. A bucket that has drained, or whose clear time lies
// beyond the horizon, is empty. The level may exceed the Size of one limit if
// another limit with the same drips has filled the bucket further.
func (s state) at(now int64) state {
	if ahead := s.clear - now; ahead <= 0 || ahead > horizon {
		return state{clear: now}
	}
	return s
}

// wait returns how long, in µs, until a bucket at level s has room for cost, or 0
// if it has room now. The cost must not exceed the size.
func (l *Limit) wait(s state, now, cost int64) int64 {
	switch l.Algorithm {
	case Sliding:
		return l.slidingWait(s, now, cost)
	case Log:
		return l.logWait(s, now, cost)
	case WarmUp:
		return warmWait(s, now)
	case Leaky:
	}
	return l.leakyWait(s, now, cost)
}

// leakyWait is wait for Leaky limits. It and those like it are small enough to be
// inlined where that counts.
func (l *Limit) leakyWait(s state, now, cost int64) int64 {
	fits := floorDiv(l.Size-cost+s.slack, l.DripSize) * l.rate()
	return max(s.clear-now-fits, 0)
}

// started returns s or, if that is empty at now, the level from which a charge at
// now counts: the time of the last aligned drip. unix is what the clock shows at
// now, in µs since the Unix epoch.
func (l *Limit) started(s state, now, unix int64) state {
	switch {
	case l.Algorithm.counts():
		return l.slidingStarted(s, now, unix)
	case l.Algorithm == WarmUp:
		return warmStarted(s, now)
	case l.Aligned && s.clear <= now:
		return state{clear: now - l.sinceDrip(unix)}
	}
	return s
}

// sinceDrip returns the time since the last aligned drip, in µs.
func (l *Limit) sinceDrip(unix int64) int64 {
	since := (unix - l.Phase.Microseconds()) % l.rate()
	if since < 0 {
		since += l.rate()
	}
	return since
}

// add returns the level s, which is started, with cost more units.
func (l *Limit) add(s state, cost int64) state {
	switch l.Algorithm {
	case Sliding, Log:
		return slidingAdd(s, cost)
	case WarmUp:
		return l.warmAdd(s, cost)
	case Leaky:
	}
	return l.leakyAdd(s, cost)
}

// leakyAdd is add for Leaky limits.
func (l *Limit) leakyAdd(s state, cost int64) state {
	drips := ceilDiv(cost-s.slack, l.DripSize)
	return state{
		clear: s.clear + drips*l.rate(),
		slack: s.slack + drips*l.DripSize - cost,
	}
}

// remaining returns the number of units that a bucket at level s has room for.
func (l *Limit) remaining(s state, now int64) int64 {
	switch l.Algorithm {
	case Sliding, Log:
		return max(l.Size-l.windowUnits(s, now), 0)
	case WarmUp: // one request, whatever it costs
		return 1 - warmUnits(s, now)
	case Leaky:
	}
	return l.leakyRemaining(s, now)
}

// leakyRemaining is remaining for Leaky limits.
func (l *Limit) leakyRemaining(s state, now int64) int64 {
	// The bucket holds drips·DripSize − slack units. The product is computed only
	// where it is known to be small: the level may far exceed this size if
	// requests with a larger one have filled the bucket.
	drips, room := ceilDiv(s.clear-now, l.rate()), l.Size+s.slack
	if drips > floorDiv(room, l.DripSize) {
		return 0
	}
	return room - drips*l.DripSize
}

// units returns the number of units in a bucket at level s.
func (l *Limit) units(s state, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	switch l.Algorithm {
	case Sliding, Log:
		return l.windowUnits(s, now)
	case WarmUp:
		return warmUnits(s, now)
	case Leaky:
	}
	over, units := bits.Mul64(uint64(ceilDiv(s.clear-now, l.rate())), uint64(l.DripSize))
	if over != 0 || units > math.MaxInt64 {
		return math.MaxInt64 // something else has written to the bucket
	}
	return int64(units) - s.slack
}

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
