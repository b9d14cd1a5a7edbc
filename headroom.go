package ratelimit

import (
	"math"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// defaultMaxWaiting is how many requests may wait for one limit unless max_waiting says
// otherwise.
const defaultMaxWaiting = 1000

// setHeadroom sets what may be above the size of the limit.
func (d *draft) setHeadroom() (err error) {
	if d.Soft != "" {
		if d.rule.Soft, err = option.Parse(d.resolve, "soft", string(d.Soft), option.Units); err != nil {
			return err
		}
	}
	most := defaultMaxWaiting
	if d.MaxWaiting != "" {
		if most, err = option.Parse(d.resolve, "max_waiting", string(d.MaxWaiting), option.Integer(1, math.MaxInt32)); err != nil {
			return err
		}
		if d.MaxDelay == "" {
			return option.Bad("max_waiting", string(d.MaxWaiting), "max_delay with it")
		}
	}
	if d.MaxDelay != "" {
		var delay time.Duration
		delay, err = option.Parse(d.resolve, "max_delay", string(d.MaxDelay), option.Interval)
		d.rule.MaxDelay, d.rule.MaxWaiting = adminjson.Seconds(delay), int64(most)
		d.rule.Waiting = &rule.Waiters{Option: string(d.MaxDelay)}
	}
	return err
}
