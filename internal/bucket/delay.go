package bucket

import (
	"math"
	"math/bits"
	"time"
)

// Requests may wait for room instead of being denied. To a store their bucket is then
// larger by what passes within the longest delay, and it charges them when they come. So
// no store has a queue, and how long a request waits follows from the level that it left.

// delaying is what an algorithm has whose buckets can be larger in that way. All times
// are in µs.
type delaying interface {
	// delayed returns what Limit.Delayed does.
	delayed(l *Limit, d, cost int64) int64

	// waits reports whether it shows in l that requests may wait.
	waits(l *Limit) bool

	// delay returns what Limit.Delay does, of an admitted request that left level s.
	delay(l *Limit, s Level, cost, delayed, now int64) int64
}

// Delayed returns how many units have to be added to the Size of l so that requests of the
// given cost are admitted if they have to wait for at most d, or for longer by less than 1 part in
// 10,000, as the drips of a rate may. It is rounded down: to whole
// drips or, with [WarmingUp], to the time of whole units. It is 0 if such requests can't
// wait: d is shorter than that, or l is neither a leaky bucket nor warms up, or they cost
// too much for the latter, or more than Size − DripSize + 1 units in a leaky bucket, as then
// more than Size might pass at a moment. A request to a store with such a Size has to wait as
// long as [Limit.Delay] says.
func (l Limit) Delayed(d time.Duration, cost int64) int64 {
	l = l.Complete()
	if a, ok := l.by().(delaying); ok {
		return a.delayed(&l, d.Microseconds(), max(cost, 1))
	}
	return 0
}

// Delay returns how long a request of some cost has to wait that was admitted, and left level s,
// in µs, if l has room for that many delayed units, see [Limit.Delayed].
func (l *Limit) Delay(s Level, cost, delayed, now int64) int64 {
	if a, ok := l.by().(delaying); ok {
		return a.delay(l, s, cost, delayed, now)
	}
	return 0
}

// Waits reports whether it shows in l that requests may wait.
func (l *Limit) Waits() bool {
	a, ok := l.by().(delaying)
	return ok && a.waits(l)
}

// mulDiv returns a·b/c rounded down, or the largest number if that is larger. None is
// negative, and c is not 0.
func mulDiv(a, b, c int64) int64 {
	over, product := bits.Mul64(uint64(a), uint64(b)) // not negative
	if over >= uint64(c) {                            // nor this
		return math.MaxInt64
	}
	quotient, _ := bits.Div64(over, product, uint64(c)) // nor this
	return int64(min(quotient, math.MaxInt64))          // within range
}
