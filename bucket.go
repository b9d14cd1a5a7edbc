package ratelimit

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/calendar"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// bucket is a provisioned bucket of a limit.
type bucket struct {
	limit       *Limit
	path        string
	policy      *policy
	name        string // in the store
	addressName string // in the store if the client's address replaces the key

	// The option that determines how long the bucket takes to drain, if it is
	// not drip_rate.
	source setting

	size, drip, cost value[int64]
	rate             value[time.Duration]
	factor           value[factor]
	aligned          bool // whether it drips at moments of the clock
	counts           limiter.Algorithm
	warmUp           time.Duration    // if it warms up
	cold             factor           // if it warms up
	period           *calendar.Period // that takes the place of the rate; nil if there is none

	// The bucket of all requests but for its key, or nil if its numbers depend
	// on the request.
	constant *limiter.Bucket
	off      bool

	consistency limiter.Consistency

	holds      bool // whether requests hold units until their outcome is known
	costIsBody bool // whether the cost is the length of the request's body

	offline *offline.Limit // what commands see of it that read config files; nil elsewhere
}

// policy is what responses show of a bucket besides its numbers.
type policy struct {
	path        string
	status      int        // of denials
	concurrency bool       // whether it counts requests in progress
	zone        *zone.Zone // that the limit was; nil if it was none

	counters *telemetry.Counters // of all limits of the path
	top      *topList            // nil if the limit does not track the keys that ask most
}

// title returns the name of the zone, or the path.
func (p *policy) title() string {
	if p.zone != nil {
		return p.zone.Name
	}
	return p.path
}

// sizeIsDynamic reports whether the effective size depends on the request.
func (b *bucket) sizeIsDynamic() bool { return b.size.isDynamic() || b.factor.isDynamic() }

// validate returns an error if the bucket can't be valid for any request. It sets
// off and constant.
func (b *bucket) validate() error {
	if b.off = !b.factor.isDynamic() && b.factor.constant == 0; b.off {
		return nil
	}
	// For numbers that depend on the request, assume the ones that drain fastest.
	numbers := limiter.Limit{Size: 1, DripInterval: time.Microsecond, DripSize: limiter.MaxUnits}
	if !b.sizeIsDynamic() {
		var err error
		if numbers.Size, _, err = b.effectiveSize(nil); err != nil {
			return err
		}
		if !b.cost.isDynamic() && b.cost.constant > numbers.Size {
			most := "size"
			if !b.limit.algorithm.hasSize() {
				most = "units of the rate"
			}
			return badOption("cost", b.cost.String(), fmt.Sprintf("at most the %s, %d", most, numbers.Size))
		}
	}
	if !b.rate.isDynamic() {
		numbers.DripInterval = b.rate.constant
	}
	if !b.drip.isDynamic() {
		numbers.DripSize = b.drip.constant
	}
	b.setAlgorithm(&numbers)
	if err := b.check(numbers); err != nil {
		return err
	}
	if err := b.checkAbove(numbers); err != nil {
		return err
	}
	if b.period == nil && !b.sizeIsDynamic() && !b.rate.isDynamic() && !b.drip.isDynamic() && !b.cost.isDynamic() && !b.costIsBody {
		b.constant = &limiter.Bucket{Limit: numbers, Cost: b.cost.constant}
	}
	return nil
}

// check returns an error if b can't have these numbers.
func (b *bucket) check(numbers limiter.Limit) error {
	err := numbers.Validate()
	switch {
	case err == nil:
		return nil
	case b.limit.algorithm.hasWindow():
		return b.windowError(numbers)
	case b.source.option != "":
		return badOption(b.source.option, b.source.text,
			"less: a full bucket and one drip more must drain within 35 years")
	}
	return err
}

// setAlgorithm sets in numbers how b counts.
func (b *bucket) setAlgorithm(numbers *limiter.Limit) {
	numbers.Aligned, numbers.Algorithm = b.aligned, b.counts
	numbers.Phase, numbers.ColdFactor = b.warmUp, b.cold.thousandths()
	numbers.CountDenied = b.limit.CountDenied
}

// effectiveSize returns the size divided by the factor. The bucket is off if the
// factor is 0.
func (b *bucket) effectiveSize(repl *caddy.Replacer) (size int64, off bool, err error) {
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

// describe returns the bucket's effective numbers or, for those that depend on
// the request, the templates they are made from.
func (b *bucket) describe() string {
	size, rate, drip := b.size.String()+" / "+b.factor.String(), b.rate.String(), b.drip.String()
	if !b.sizeIsDynamic() {
		inForce, _, _ := b.effectiveSize(nil) // validated before
		size = strconv.FormatInt(inForce, 10)
	}
	if !b.rate.isDynamic() {
		rate = b.rate.constant.String()
	}
	if !b.drip.isDynamic() {
		drip = strconv.FormatInt(b.drip.constant, 10)
	}
	if b.period != nil {
		rate = b.period.String()
	}
	return fmt.Sprint(size, " ", rate, " ", drip, " ", b.counts, b.aligned, b.warmUp, b.cold)
}

// numbers returns the bucket's numbers for one request at now, or whether it is
// off.
func (b *bucket) numbers(repl *caddy.Replacer, now time.Time) (numbers limiter.Limit, off bool, err error) {
	if numbers.Size, off, err = b.effectiveSize(repl); err != nil || off {
		return numbers, off, err
	}
	if b.period != nil {
		size := numbers.Size
		numbers = b.period.Limit(size, now)
		numbers.CountDenied = b.limit.CountDenied
		return numbers, false, nil
	}
	b.setAlgorithm(&numbers)
	if numbers.DripInterval, err = b.rate.at(repl); err != nil {
		return numbers, false, err
	}
	if numbers.DripSize, err = b.drip.at(repl); err != nil {
		return numbers, false, err
	}
	return numbers, false, b.check(numbers)
}

// addTo adds the bucket to e, unless it is off.
func (b *bucket) addTo(e *evaluation) error {
	if b.off {
		return nil
	}
	var add limiter.Bucket
	if b.constant != nil {
		add = *b.constant
	} else {
		var off bool
		var err error
		if add.Limit, off, err = b.numbers(e.replacer, e.time()); err != nil || off {
			return e.valueError(b, http.StatusInternalServerError, err)
		}
		if add.Cost, err = b.costOf(e); err != nil {
			return err
		}
	}
	text, own, err := e.keyFor(b)
	if err != nil {
		return err
	}
	of := configured{bucket: b}
	of.above, of.waits = b.raise(&add.Limit, add.Cost)
	add.Name, add.Key = b.name, text
	add.DryRun, add.Hold, add.Consistency = b.limit.dryRun, b.holds, b.consistency
	if !own {
		add.Name = b.addressName
		b.limit.reportNoKey(text)
	}
	if add.MaxKeys = b.limit.maxKeys; b.limit.shareWhenFull {
		add.ShareKey = e.clientNetwork()
	}
	e.buckets = append(e.buckets, add)
	e.of = append(e.of, of)
	return nil
}
