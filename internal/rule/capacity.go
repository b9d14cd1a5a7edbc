package rule

import (
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// extraCapacity is what a bucket may hold above its size: units of requests that pass although
// they exceed it, and above those units of requests that wait until they have dripped
// out. To a store the size is larger by both, and what that means is read from the level
// after the request. So both are exact for all instances, without a queue anywhere.
//
// A limit of a plan without a quota has a size of 0, which no bucket has in a store: that is larger
// by a unit then, which no request fits into.
type extraCapacity struct {
	soft, delayed, unusable int64
}

// units returns by how much the bucket is larger than the limit.
func (c extraCapacity) units() int64 { return c.soft + c.delayed + c.unusable }

// ExtraCapacity returns by how many units b may exceed its size, given its numbers for a request
// of some cost.
func (b *Bucket) ExtraCapacity(numbers *limiter.Limit, cost int64) int64 {
	return b.extraCapacity((*bucket.Limit)(numbers), cost).units()
}

// extraCapacity returns what b may hold above its size, given the same.
func (b *Bucket) extraCapacity(numbers *bucket.Limit, cost int64) (c extraCapacity) {
	l := b.Limit
	if l.Soft == 0 && l.MaxDelay == 0 || !b.IsMain() {
		return c
	}
	c.soft = l.Soft
	if l.waitsForRoom() {
		c.delayed = l.delayed(*numbers, cost)
	}
	return c
}

// checkExtraCapacity returns an error if b's algorithm has nothing above its size.
func (b *Bucket) checkExtraCapacity(numbers bucket.Limit) error {
	l := b.Limit
	minimum := numbers // with which requests may wait
	if b.Drip.IsDynamic() {
		minimum.DripSize = 1
	}
	if b.SizeIsDynamic() {
		minimum.Size = minDelaying(&minimum, b.UsualCost())
	}
	switch {
	case l.Soft > 0 && !l.Algorithm.HasSize():
		return option.Clash("soft", fmt.Sprint(l.Soft), "algorithm warm_up", "use another algorithm: warm_up has no size")
	case l.waitsForRoom():
		if err := b.checkDelay(&minimum); err != nil {
			return err
		}
	}
	if numbers.Size += b.extraCapacity(&minimum, b.UsualCost()).units(); numbers.Validate() != nil {
		if l.Soft == 0 {
			return option.Bad("max_delay", l.Waiting.Option, "less: together with size the bucket is too large")
		}
		return option.Bad("soft", fmt.Sprint(l.Soft), "less: together with size and max_delay the bucket is too large")
	}
	return nil
}

// checkDelay returns an error if no request to b may wait for the limit's max_delay.
func (b *Bucket) checkDelay(numbers *bucket.Limit) error {
	l, cost := b.Limit, b.UsualCost()
	var needed string
	switch unit := numbers.DripTime(1); {
	case !b.Counts.MayWait():
		needed = "algorithm leaky_bucket, token_bucket or warm_up"
	case l.delayed(*numbers, cost) > 0:
		return nil
	case time.Duration(l.MaxDelay) < unit:
		return option.Bad("max_delay", l.Waiting.Option, fmt.Sprintf("at least %v, the time in which one unit drips", unit))
	case l.Algorithm.HasSize():
		size := minDelaying(numbers, cost) - l.Soft
		needed = fmt.Sprintf("size %d or more, as drip_size is %d and cost %d: otherwise more than the size could pass at once", size, numbers.DripSize, cost)
	default:
		needed = fmt.Sprintf("a warm_up of more than %v: twice the time of a request at the full rate", 2*numbers.DripTime(cost))
	}
	return option.Needs("max_delay", l.Waiting.Option, needed)
}

// minDelaying returns the smallest size of a bucket at which requests of some cost may wait,
// see bucket.Limit.Delayed.
func minDelaying(numbers *bucket.Limit, cost int64) int64 { return numbers.DripSize + cost - 1 }

// delayed returns how much larger a bucket is for requests of some cost that wait. For them
// what l admits above its size is room like the rest.
func (l *Limit) delayed(numbers bucket.Limit, cost int64) int64 {
	numbers.Size += l.Soft
	return numbers.Delayed(time.Duration(l.MaxDelay), cost)
}
