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
const defaultMaxWaiting = "1000"

// setExtra sets what may be above the size of the limit.
func (l *LimitBuilder) setExtra() error {
	l.rule.Soft = read(&l.reader, "soft", l.Soft, l.units())
	most := read(&l.reader, "max_waiting", cmp.Or(l.MaxWaiting, defaultMaxWaiting), option.Integer(1, math.MaxInt32))
	switch {
	case l.MaxDelay != "":
		l.rule.MaxWaiting, l.rule.Waiting = int64(most), &rule.Waiters{Option: string(l.MaxDelay)}
		l.rule.MaxDelay = option.Seconds(read(&l.reader, "max_delay", l.MaxDelay, option.Interval))
	case l.MaxWaiting != "":
		return option.Needs("max_waiting", string(l.MaxWaiting), "max_delay")
	}
	return nil
}

// setFairBy sets which clients of the limit wait in turn.
func (l *LimitBuilder) setFairBy() (err error) {
	switch {
	case l.FairBy != "" && l.MaxDelay == "" && l.Speed == "":
		return option.Needs("fair_by", l.FairBy, "max_delay or speed")
	case l.MaxDelay == "" && l.Speed == "":
	case l.FairBy == "off":
		l.rule.FairBy = "off"
	default:
		l.rule.FairBy = cmp.Or(l.FairBy, defaultKey)
		l.rule.Turns, err = key.Parse("fair_by", l.rule.FairBy, l.rule.Key.Prefixes)
	}
	return err
}

// checkQueue returns an error if requests that wait for a place of l would be charged by other
// limits each time that they ask for it.
func (l *LimitBuilder) checkQueue() error {
	switch {
	case l.MaxDelay == "" || !l.rule.Settlement.InProgress:
		return nil
	case l.Settings.Accounting != rule.Atomic:
		return option.Needs("max_delay", string(l.MaxDelay), "accounting atomic with concurrency: others would charge a request each time that it asks for a place")
	case l.countsDenied:
		return option.Clash("max_delay", string(l.MaxDelay), "count_denied in one block", "remove count_denied: it would count a request each time that it asks for a place")
	}
	return nil
}

// countDenied reports whether any of limits, or of those within them, counts denied requests.
func countDenied(limits []*config.Limit) bool {
	return slices.ContainsFunc(limits, func(l *config.Limit) bool { return l != nil && (l.CountDenied || countDenied(l.Limits.List)) })
}
