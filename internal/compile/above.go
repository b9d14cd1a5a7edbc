package compile

import (
	"cmp"
	"math"
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// defaultMaxWaiting is how many requests may wait for one limit unless max_waiting says
// otherwise.
const defaultMaxWaiting = 1000

// setExtra sets what may be above the size of the limit.
func (d *LimitBuilder) setExtra() (err error) {
	if d.Soft != "" {
		if d.rule.Soft, err = option.Parse(d.resolve, "soft", string(d.Soft), d.units()); err != nil {
			return err
		}
	}
	most := defaultMaxWaiting
	if d.MaxWaiting != "" {
		if most, err = option.Parse(d.resolve, "max_waiting", string(d.MaxWaiting), option.Integer(1, math.MaxInt32)); err != nil {
			return err
		}
		if d.MaxDelay == "" {
			return option.Needs("max_waiting", string(d.MaxWaiting), "max_delay")
		}
	}
	if d.MaxDelay != "" {
		d.rule.MaxWaiting, d.rule.Waiting = int64(most), &rule.Waiters{Option: string(d.MaxDelay)}
		d.rule.MaxDelay, err = option.Parse(d.resolve, "max_delay", string(d.MaxDelay), option.Interval)
	}
	return err
}

// setFairBy sets which clients of the limit wait in turn.
func (d *LimitBuilder) setFairBy() (err error) {
	queues := d.MaxDelay != "" && d.Concurrency != ""
	switch {
	case d.FairBy != "" && !queues:
		return option.Needs("fair_by", d.FairBy, "concurrency and max_delay")
	case !queues, d.FairBy == "off":
	default:
		d.rule.FairBy, err = key.Parse("fair_by", cmp.Or(d.FairBy, defaultKey), d.rule.Key.Prefixes)
	}
	return err
}

// checkQueue returns an error if requests that wait for a place of d would be charged by other
// limits each time that they ask for it.
func (d *LimitBuilder) checkQueue() error {
	switch {
	case d.MaxDelay == "" || !d.rule.Settlement.InProgress:
		return nil
	case d.Settings.Accounting != rule.Atomic:
		return option.Needs("max_delay", string(d.MaxDelay), "accounting atomic with concurrency: others would charge a request each time that it asks for a place")
	case d.countsDenied:
		return option.Clash("max_delay", string(d.MaxDelay), "count_denied in one block", "remove count_denied: it would count a request each time that it asks for a place")
	}
	return nil
}

// countDenied reports whether any of limits, or of those within them, counts denied requests.
func countDenied(limits []*config.Limit) bool {
	return slices.ContainsFunc(limits, func(l *config.Limit) bool { return l != nil && (l.CountDenied || countDenied(l.Limits.List)) })
}
