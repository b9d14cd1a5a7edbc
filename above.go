package ratelimit

import (
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// defaultMaxWaiting is how many requests may wait for one limit unless max_waiting says
// otherwise.
const defaultMaxWaiting = 1000

// setAbove sets what may be above the size of the limit: see above.
func (l *Limit) setAbove() (err error) {
	if l.Soft != "" {
		if l.soft, err = newNumberBy(l.resolve, "soft", string(l.Soft), parseUnits); err != nil {
			return err
		}
	}
	if l.MaxDelay != "" {
		if l.maxDelay, err = newNumberBy(l.resolve, "max_delay", string(l.MaxDelay), parseInterval); err != nil {
			return err
		}
	}
	if l.maxWaiting = defaultMaxWaiting; l.MaxWaiting != "" {
		most, err := newNumberBy(l.resolve, "max_waiting", string(l.MaxWaiting), parseInteger(1, math.MaxInt32))
		if err != nil {
			return err
		}
		if l.maxWaiting = int64(most); l.maxDelay == 0 {
			return badOption("max_waiting", string(l.MaxWaiting), "max_delay with it")
		}
	}
	return nil
}

// checkAbove returns an error if b's algorithm has nothing above its size.
func (b *bucket) checkAbove(numbers limiter.Limit) error {
	l := b.limit
	least := numbers // with which requests may wait
	if b.drip.isDynamic() {
		least.DripSize = 1
	}
	if b.sizeIsDynamic() {
		least.Size = leastDelaying(&least, b.usualCost())
	}
	switch {
	case l.soft > 0 && !l.algorithm.hasSize():
		return badOption("soft", string(l.Soft), "another algorithm than warm_up, which has no size")
	case l.maxDelay > 0:
		if err := b.checkDelay(&least); err != nil {
			return err
		}
	}
	most := b.above(&least, b.usualCost())
	if numbers.Size += most.units(); numbers.Validate() != nil {
		if l.soft == 0 {
			return newOptionError("max_delay", "together with size the bucket is too large, want less")
		}
		return newOptionError("soft", "together with size and max_delay the bucket is too large, want less")
	}
	return nil
}

// checkDelay returns an error if no request to b may wait for the limit's max_delay.
func (b *bucket) checkDelay(numbers *limiter.Limit) error {
	l, cost := b.limit, b.usualCost()
	var want string
	switch unit := numbers.DripTime(1); {
	case !b.counts.MayWait():
		want = "algorithm leaky_bucket, token_bucket or warm_up with it"
	case l.maxDelay < unit:
		want = fmt.Sprintf("at least %v, in which a unit leaves", unit)
	case l.delayed(*numbers, cost) > 0:
		return nil
	case l.algorithm.hasSize():
		size := leastDelaying(numbers, cost) - l.soft
		want = fmt.Sprintf("size %d or more with it, as drip_size is %d and cost %d: otherwise more than the size could pass at once", size, numbers.DripSize, cost)
	default:
		want = fmt.Sprintf("a warm_up of more than %v with it: twice the time of a request at the full rate", 2*numbers.DripTime(cost))
	}
	return badOption("max_delay", string(l.MaxDelay), want)
}

// leastDelaying returns the least size of a bucket at which requests of some cost may wait,
// see limiter.Limit.Delayed.
func leastDelaying(numbers *limiter.Limit, cost int64) int64 { return numbers.DripSize + cost - 1 }

// usualCost returns what a request costs, or 1 if that depends on it.
func (b *bucket) usualCost() int64 {
	if b.cost.isDynamic() || b.costIsBody {
		return 1
	}
	return b.cost.constant
}

// above is what a bucket may hold above its size: units of requests that pass although
// they exceed it, and above those units of requests that wait until they have dripped
// out. To a store the size is larger by both, and what that means is read from the level
// after the request. So both are exact for all instances, without a queue anywhere.
type above struct {
	soft, delayed int64
}

// above returns what b may hold above its size, given its numbers for a request of some
// cost.
func (b *bucket) above(numbers *limiter.Limit, cost int64) (a above) {
	l := b.limit
	if l.soft == 0 && l.maxDelay == 0 || b.path != l.path { // a min_interval has none
		return a
	}
	a.soft = l.soft
	if l.maxDelay > 0 {
		a.delayed = l.delayed(*numbers, cost)
	}
	return a
}

// delayed returns how much larger a bucket is for requests of some cost that wait. To them
// what l admits above its size is room like the rest.
func (l *Limit) delayed(numbers limiter.Limit, cost int64) int64 {
	numbers.Size += l.soft
	return numbers.Delayed(l.maxDelay, cost)
}

// units returns by how much the bucket is larger than the limit.
func (a above) units() int64 { return a.soft + a.delayed }

// waiters counts the requests that wait for room, or may have to, at the limits whose
// buckets have one name. It is kept across reloads, as long as any config in use has such
// a limit.
type waiters struct {
	atomic.Int64
	name string
}

// waitersOf returns the count of a name. The caller must release it.
func waitersOf(name string) *waiters {
	w, _, _ := process.waiting.LoadOrNew(name, func() (caddy.Destructor, error) {
		return &waiters{name: name}, nil
	})
	return w.(*waiters)
}

// release releases the count, which ends with the last config that uses it.
func (w *waiters) release() { _, _ = process.waiting.Delete(w.name) }

// Destruct implements caddy.Destructor.
func (*waiters) Destruct() error { return nil }

// mayWait reports whether one more request of l may wait, and counts it if so.
func (l *Limit) mayWait() bool {
	if l.waiting.Add(1) <= l.maxWaiting {
		return true
	}
	l.waiting.Add(-1)
	return false
}

// lower makes the decisions on a request ones about the sizes of the limits. If the
// request is admitted, it returns how long it has to wait. What need not wait does not
// count as waiting from then on. A dry run only counts what would have waited.
func (e *evaluation) lower() (wait time.Duration) {
	all := e.firstDenied() < 0
	for i := range e.decisions {
		a := &e.of[i].above
		if *a == (above{}) {
			continue
		}
		d, b := &e.decisions[i], &e.buckets[i]
		admitted := all && !d.Denied
		var own time.Duration
		if admitted {
			own = b.Delay(d, a.delayed)
		}
		if own > 0 {
			e.of[i].delay = own
			e.of[i].policy.counters.CountDelayed(e.stripe)
		}
		if d.DryRun {
			own = 0
		}
		if wait = max(wait, own); own == 0 {
			e.of[i].endWait()
		}
		if admitted && !d.Borrowed && a.soft > 0 && d.Remaining < a.units() {
			e.of[i].over = true
			e.of[i].policy.counters.CountOver(e.stripe)
		}
		d.Size -= a.units()
		d.Remaining = max(d.Remaining-a.units(), 0)
	}
	return wait
}

// endWait notes that the request does not wait, or not any more, for the limit.
func (c *configured) endWait() {
	if c.waits {
		c.limit.waiting.Add(-1)
		c.waits = false
	}
}

// raise adds to the size of numbers what may be above it for one more request of some
// cost.
func (b *bucket) raise(numbers *limiter.Limit, cost int64) (a above, waits bool) {
	if a = b.above(numbers, cost); a == (above{}) {
		return a, false
	}
	if a.delayed > 0 {
		if waits = b.limit.mayWait(); !waits {
			a.delayed = 0
		}
	}
	numbers.Size += a.units()
	return a, waits
}
