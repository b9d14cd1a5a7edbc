package ratelimit

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Rate is `<n>/<duration>`: n units each duration, evenly, such as `60/1s`,
// `1000/1h` or `5/1d`.
type Rate string

// UnmarshalJSON reads what stands in the place of a rate as it is written. What
// it may be is for the option to say.
func (r *Rate) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	*r = Rate(text)
	return err
}

// rate is a number of units each duration.
type rate struct {
	units int64
	each  time.Duration
}

// parseRate reads a rate.
func parseRate(text string) (rate, string) {
	n, each, _ := strings.Cut(text, "/")
	units, wrongUnits := parseUnits(n)
	interval, wrongInterval := parseInterval(each)
	if wrongUnits != "" || wrongInterval != "" {
		return rate{}, fmt.Sprintf("<n>/<duration>, such as 60/1s, 1000/1h or 5/1d: a whole number from 1 to %d "+
			"and whole microseconds", int64(limiter.MaxUnits))
	}
	return rate{units, interval}, ""
}

// setRateBucket makes the bucket of a limit that is told by its rate. Its size
// is the rate's number of units unless it is set.
func (l *Limit) setRateBucket() error {
	if o := firstSet([]setting{
		{"drip_rate", string(l.DripRate)}, {"drip_size", string(l.DripSize)}, {"max", string(l.Max)},
		{"duration", string(l.Duration)}, {"min_interval", string(l.MinInterval)},
	}); o != nil {
		return fmt.Errorf("%s: got %q beside rate, want either rate and size, or size, drip_rate and drip_size, "+
			"or max, duration and min_interval", o.option, o.text)
	}
	r, err := newNumber("rate", string(l.Rate), parseRate)
	if err != nil {
		return err
	}
	b := &bucket{path: l.path}
	if b.size, err = newValue("size", or(string(l.Size), strconv.FormatInt(r.units, 10)), parseUnits); err != nil {
		return err
	}
	if b.factor, err = newValue("factor", or(string(l.Factor), "1"), parseFactor); err != nil {
		return err
	}
	var size int64
	if !b.sizeVaries() {
		if size, _, err = b.sizeInForce(nil); err != nil {
			return err
		}
	}
	numbers, err := r.limit(size)
	if err != nil {
		return fmt.Errorf("rate: got %q, want another rate or size: %w", string(l.Rate), err)
	}
	b.rate = value[time.Duration]{option: "drip_rate", constant: numbers.DripInterval}
	b.drip = value[int64]{option: "drip_size", constant: numbers.DripSize}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}

// limit returns the limit of the given size, or of one that is not known: what
// drips must not depend on the request, and is then one unit, which any size
// holds, wherever that keeps the rate.
func (r rate) limit(size int64) (limiter.Limit, error) {
	if size > 0 {
		return limiter.NewLimit(r.units, r.each, size)
	}
	if l, err := limiter.NewLimit(r.units, r.each, 1); err == nil {
		return l, nil
	}
	return limiter.NewLimit(r.units, r.each, r.units)
}
