package ratelimit

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// bucket is one bucket of a limit, made ready.
type bucket struct {
	limit        *Limit
	path         string
	policy       *policy
	name         string // what it is called in the store
	fallbackName string // the same where the client's address stands in for the key

	// The option that tells how long the bucket takes to drain, if it is not
	// drip_rate.
	written setting

	size, drip, cost value[int64]
	rate             value[time.Duration]
	factor           value[factor]

	// What all requests have in common, where nothing depends on the request.
	constant *limiter.Bucket
	off      bool
}

// policy is what answers tell of a bucket besides its numbers.
type policy struct {
	path  string
	units bool // whether requests may cost other than one unit
}

// sizeVaries reports whether the size in force depends on the request.
func (b *bucket) sizeVaries() bool { return b.size.varies() || b.factor.varies() }

// check makes what is constant ready, and returns an error if it can't be
// right for any request.
func (b *bucket) check() error {
	if b.off = !b.factor.varies() && b.factor.constant == 0; b.off {
		return nil
	}
	// What depends on the request is taken to be what drains soonest.
	numbers := limiter.Limit{Size: 1, DripInterval: time.Microsecond, DripSize: limiter.MaxUnits}
	if !b.sizeVaries() {
		var err error
		if numbers.Size, _, err = b.sizeInForce(nil); err != nil {
			return err
		}
		if !b.cost.varies() && b.cost.constant > numbers.Size {
			return badOption("cost", b.cost.String(), fmt.Sprintf("at most the size, %d", numbers.Size))
		}
	}
	if !b.rate.varies() {
		numbers.DripInterval = b.rate.constant
	}
	if !b.drip.varies() {
		numbers.DripSize = b.drip.constant
	}
	if err := numbers.Validate(); err != nil {
		if b.written.option != "" {
			return badOption(b.written.option, b.written.text,
				"less: a full bucket and one drip more must drain within 35 years")
		}
		return err
	}
	if !b.sizeVaries() && !b.rate.varies() && !b.drip.varies() && !b.cost.varies() {
		b.constant = &limiter.Bucket{Limit: numbers, Cost: b.cost.constant}
	}
	return nil
}

// sizeInForce returns the size divided by the factor, or that the bucket is
// off.
func (b *bucket) sizeInForce(repl *caddy.Replacer) (size int64, off bool, err error) {
	divisor, err := b.factor.at(repl)
	if err != nil || divisor == 0 {
		return 0, err == nil, err
	}
	if size, err = b.size.at(repl); err != nil {
		return 0, false, err
	}
	if size = divisor.divide(size); size > limiter.MaxUnits {
		return 0, false, badOption("factor", divisor.String(),
			fmt.Sprintf("one that leaves a size of at most %d", int64(limiter.MaxUnits)))
	}
	return size, false, nil
}

// shownNumbers returns the bucket's numbers in force or, for those that depend on
// the request, what they are made of.
func (b *bucket) shownNumbers() string {
	size, rate, drip := b.size.String()+" / "+b.factor.String(), b.rate.String(), b.drip.String()
	if !b.sizeVaries() {
		inForce, _, _ := b.sizeInForce(nil) // as has been checked
		size = strconv.FormatInt(inForce, 10)
	}
	if !b.rate.varies() {
		rate = b.rate.constant.String()
	}
	if !b.drip.varies() {
		drip = strconv.FormatInt(b.drip.constant, 10)
	}
	return size + " " + rate + " " + drip
}

// numbers returns the bucket's numbers for one request, or that it is off.
func (b *bucket) numbers(repl *caddy.Replacer) (numbers limiter.Limit, off bool, err error) {
	if numbers.Size, off, err = b.sizeInForce(repl); err != nil || off {
		return numbers, off, err
	}
	if numbers.DripInterval, err = b.rate.at(repl); err != nil {
		return numbers, false, err
	}
	if numbers.DripSize, err = b.drip.at(repl); err != nil {
		return numbers, false, err
	}
	return numbers, false, numbers.Validate()
}

// apply adds the bucket to c, unless it is off.
func (b *bucket) apply(c *check) error {
	if b.off {
		return nil
	}
	var add limiter.Bucket
	if b.constant != nil {
		add = *b.constant
	} else {
		var off bool
		var err error
		if add.Limit, off, err = b.numbers(c.replacer); err != nil || off {
			return c.badValue(b, http.StatusInternalServerError, err)
		}
		if add.Cost, err = b.cost.at(c.replacer); err != nil {
			return c.badValue(b, http.StatusBadRequest, err)
		}
	}
	text, own, err := c.keyOf(b)
	if err != nil {
		return err
	}
	add.Name, add.Key = b.name, text
	if !own {
		add.Name = b.fallbackName
		b.limit.reportNoKey(text)
	}
	if add.MaxKeys = b.limit.maxKeys; b.limit.share {
		add.ShareKey = c.clientNetwork()
	}
	c.buckets = append(c.buckets, add)
	c.policies = append(c.policies, b.policy)
	return nil
}
