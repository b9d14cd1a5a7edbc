package limiter

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

	// delay returns what Bucket.Delay does, of an admitted request that left level s.
	delay(l *Limit, s level, cost, delayed, now int64) int64
}

// Delayed returns how many units have to be added to the Size of l so that requests of the
// given cost are admitted if they have to wait for at most d. It is rounded down: to whole
// drips or, with [WarmingUp], to the time of whole units. It is 0 if such requests can't
// wait: d is shorter than that, or l is neither a leaky bucket nor warms up, or they cost
// too much for the latter, or more than Size − DripSize + 1 units in a leaky bucket, as then
// more than Size might pass at a moment. Whoever asks a store with such a Size has to wait as long as
// [Bucket.Delay] says.
func (l Limit) Delayed(d time.Duration, cost int64) int64 {
	l = l.complete()
	if a, ok := l.by().(delaying); ok {
		return a.delayed(&l, d.Microseconds(), max(cost, 1))
	}
	return 0
}

// WithDelay returns l, with room for so many units more that requests of the given cost are
// admitted if they have to wait for at most d, and how many these are: none if such requests
// can't wait, see the next paragraph. Whoever asks a store with this Limit has to wait for as
// long as [Bucket.Delay] says.
//
// Requests can wait if l is made by [Per], [PerSecond], [PerMinute], [Every] or [WarmingUp],
// and d is long enough for a drip, or the time of a unit. Their cost may be so high that they
// can't: above the burst with rates whose drips are single units.
func (l Limit) WithDelay(d time.Duration, cost int64) (delaying Limit, delayed int64) {
	delayed = l.Delayed(d, cost)
	l.Size += delayed
	return l, delayed
}

// Delay returns how long the request has to wait that d admitted, from then on, if b's Limit
// has room for so many delayed units, see [Limit.WithDelay]. If all of them wait, no more pass
// in any time than the limit without these units admits: first come, first served. It is 0 if
// d denied.
func (b *Bucket) Delay(d *Decision, delayed int64) time.Duration {
	if d.Denied || delayed == 0 {
		return 0
	}
	l := b.Limit.complete()
	a, ok := l.by().(delaying)
	if !ok {
		return 0
	}
	s := level{d.Clear.Microseconds(), d.rest}
	return time.Duration(a.delay(&l, s, b.need(), delayed, 0)) * time.Microsecond
}

// waits reports whether it shows in l that requests may wait.
func (l *Limit) waits() bool {
	a, ok := l.by().(delaying)
	return ok && a.waits(l)
}

// mulDiv returns a·b/c rounded down, or the largest number if that is larger. None is
// negative, and c is not 0.
func mulDiv(a, b, c int64) int64 {
	over, product := bits.Mul64(uint64(a), uint64(b)) //nolint:gosec // not negative
	if over >= uint64(c) {                            //nolint:gosec // nor this
		return math.MaxInt64
	}
	quotient, _ := bits.Div64(over, product, uint64(c)) //nolint:gosec // nor this
	return int64(min(quotient, math.MaxInt64))          //nolint:gosec // within range
}
