package rule

import (
	"fmt"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// QuotaUnit returns the unit of b's size that is registered for RateLimit-Policy, or "" for
// requests and for other costs.
func (b *Bucket) QuotaUnit() string {
	switch s := &b.Limit.Settlement; {
	case !b.IsMain():
		return ""
	case s.InProgress:
		return fieldtext.ConcurrentRequests
	case s.ActualCost == settle.ActualBytes, s.ActualCost == "" && b.CostIsBody:
		return "content-bytes"
	}
	return ""
}

// SizeIsDynamic reports whether the effective size depends on the request.
func (b *Bucket) SizeIsDynamic() bool { return b.Size.IsDynamic() || b.Factor.IsDynamic() }

// Free reports whether all requests cost nothing, so that it charges none, whatever else its
// limit says about that.
func (b *Bucket) Free() bool { return !b.Cost.IsDynamic() && !b.CostIsBody && b.Cost.Constant == 0 }

// UsualCost returns for how many units there has to be room, or 1 if that depends on the
// request, or there need be none.
func (b *Bucket) UsualCost() int64 {
	if b.Cost.IsDynamic() || b.CostIsBody {
		return 1
	}
	return max(b.Cost.Constant, 1)
}

// Complete sets Off and Constant. It returns an error if the bucket can't be valid for any
// request.
func (b *Bucket) Complete() error {
	if b.Off = !b.Factor.IsDynamic() && b.Factor.Constant == 0; b.Off {
		return nil
	}
	// For numbers that depend on the request, assume the ones that drain fastest.
	numbers := bucket.Limit{Size: 1, DripInterval: time.Microsecond, DripSize: bucket.MaxUnits}
	if !b.SizeIsDynamic() {
		var err error
		if numbers.Size, _, err = b.EffectiveSize(nil); err != nil {
			return err
		}
		if !b.Cost.IsDynamic() && b.Cost.Constant > numbers.Size {
			most := "size"
			if !b.Limit.Algorithm.HasSize() {
				most = "units of the rate"
			}
			return option.Bad("cost", b.Cost.String(), fmt.Sprintf("at most %d, the %s", numbers.Size, most))
		}
	}
	if !b.Rate.IsDynamic() {
		numbers.DripInterval = b.Rate.Constant
	}
	if !b.Drip.IsDynamic() {
		numbers.DripSize = b.Drip.Constant
	}
	b.setAlgorithm(&numbers)
	checked, err := b.checked(numbers)
	if err != nil {
		return err
	}
	if err := b.checkExtraCapacity(numbers); err != nil { // which are to be checked anew
		return err
	}
	if b.Period == nil && !b.SizeIsDynamic() && !b.Rate.IsDynamic() && !b.Drip.IsDynamic() && !b.Cost.IsDynamic() && !b.CostIsBody {
		b.Constant = &limiter.Bucket{Limit: limiter.Limit(checked), Cost: b.Cost.Constant}
	}
	return nil
}

// checked returns the numbers such that stores need not check them again, or an error if b can't
// have them. Their size may be 0: see Entry.addExtra.
func (b *Bucket) checked(numbers bucket.Limit) (bucket.Limit, error) {
	size := numbers.Size
	numbers.Size = max(size, 1)
	err := numbers.Validate()
	switch {
	case err == nil:
		numbers.Size = size
		return numbers.Checked(), nil
	case b.Limit.Algorithm.HasWindow():
		return numbers, b.windowError(numbers)
	case b.Source.Option != "":
		return numbers, option.Bad(b.Source.Option, b.Source.Text,
			"less: a full bucket and one drip more must drain within 35 years")
	}
	return numbers, err
}

// windowError returns the error for invalid numbers of a bucket that counts in windows.
func (b *Bucket) windowError(numbers bucket.Limit) error {
	if size := numbers.LargestSize(); size > 0 {
		got := b.Size.String()
		if b.SizeIsDynamic() {
			got = strconv.FormatInt(numbers.Size, 10)
		}
		return option.BadNumber("size", b.Size.String(), got, fmt.Sprintf("at most %d with algorithm %s", size, b.Limit.Algorithm))
	}
	years := 17
	if b.Limit.Algorithm.Slides() {
		years = 11 // units count in the next window too
	}
	got := b.Source.Text
	if b.Rate.IsDynamic() {
		got = option.DurationText(numbers.DripInterval)
	}
	return option.BadNumber("window", b.Source.Text, got, fmt.Sprintf("at most %d years with algorithm %s", years, b.Limit.Algorithm))
}

// setAlgorithm sets in numbers how b counts.
func (b *Bucket) setAlgorithm(numbers *bucket.Limit) {
	numbers.Aligned, numbers.Algorithm = b.Aligned, b.Counts
	numbers.Phase, numbers.ColdFactor = b.WarmUp, b.Cold.Thousandths()
	numbers.CountDenied = b.Limit.CountDenied
}

// EffectiveSize returns the size divided by the factor. The bucket is off if the
// factor is 0.
func (b *Bucket) EffectiveSize(repl *caddy.Replacer) (size int64, off bool, err error) {
	divisor, err := b.Factor.At(repl)
	if err != nil || divisor == 0 {
		return 0, err == nil, err
	}
	if size, err = b.Size.At(repl); err != nil {
		return 0, false, err
	}
	if size = divisor.Divide(size); size > bucket.MaxUnits {
		return 0, false, option.Bad("factor", divisor.String(),
			fmt.Sprintf("a factor that leaves a size of at most %d", int64(bucket.MaxUnits)))
	}
	return size, false, nil
}

// Describe returns the bucket's effective numbers or, for those that depend on
// the request, the templates they are made from.
func (b *Bucket) Describe() string {
	size, rate, drip := b.Size.String()+" / "+b.Factor.String(), b.Rate.String(), b.Drip.String()
	if !b.SizeIsDynamic() {
		inForce, _, _ := b.EffectiveSize(nil) // it is complete
		size = strconv.FormatInt(inForce, 10)
	}
	if !b.Rate.IsDynamic() {
		rate = b.Rate.Constant.String()
	}
	if !b.Drip.IsDynamic() {
		drip = strconv.FormatInt(b.Drip.Constant, 10)
	}
	if b.Period != nil {
		rate = b.Period.String()
	}
	return fmt.Sprint(size, " ", rate, " ", drip, " ", b.Counts, b.Aligned, b.WarmUp, b.Cold)
}

// Stored returns the numbers with which b is found in stores at now, if they do
// not depend on the request. The size is no part of them, and is 1 if it does.
func (b *Bucket) Stored(now time.Time) limiter.Limit {
	size := int64(1)
	if !b.SizeIsDynamic() {
		size, _, _ = b.EffectiveSize(nil) // it is complete
	}
	if b.Period != nil {
		return b.Period.Limit(size, now)
	}
	l := bucket.Limit{Size: size, DripInterval: b.Rate.Constant, DripSize: b.Drip.Constant}
	b.setAlgorithm(&l)
	return limiter.Limit(l)
}

// numbers returns the bucket's numbers for one request at now, or whether it is
// off.
func (b *Bucket) numbers(repl *caddy.Replacer, now time.Time) (numbers bucket.Limit, off bool, err error) {
	if numbers.Size, off, err = b.EffectiveSize(repl); err != nil || off {
		return numbers, off, err
	}
	if b.Period != nil {
		size := numbers.Size
		numbers = bucket.Limit(b.Period.Limit(size, now))
		numbers.CountDenied = b.Limit.CountDenied
		numbers, err = b.checked(numbers)
		return numbers, false, err
	}
	b.setAlgorithm(&numbers)
	if numbers.DripInterval, err = b.Rate.At(repl); err != nil {
		return numbers, false, err
	}
	if numbers.DripSize, err = b.Drip.At(repl); err != nil {
		return numbers, false, err
	}
	if numbers.DripSize == 0 { // a rate of none is no quota either
		numbers.Size, numbers.DripSize = 0, 1
	}
	numbers, err = b.checked(numbers)
	return numbers, false, err
}
