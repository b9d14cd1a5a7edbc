package ratelimit

import (
	"cmp"
	"encoding/json"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// shown returns the numbers of b as its config has them.
func (b *bucket) shown() adminapi.Numbers {
	n := b.shownWith(jsonValue(&b.rate, func(d time.Duration) any { return adminapi.Seconds(d) }), jsonValue(&b.drip, asIs))
	if b.period != nil {
		n.Window = nil // its length varies
	}
	switch {
	case b.off:
		n.Size = int64(0)
	case !b.sizeIsDynamic():
		n.Size, _, _ = b.effectiveSize(nil) // validated before
	case b.factor.IsDynamic() || b.factor.Constant != 1e6:
		n.Size = b.size.String() + " / " + b.factor.String()
	default:
		n.Size = b.size.String()
	}
	return n
}

// shownFor returns the numbers of b for one request.
func (b *bucket) shownFor(l *limiter.Limit) adminapi.Numbers {
	n := b.shownWith(adminapi.Seconds(l.DripInterval), l.DripSize)
	n.Size = l.Size
	return n
}

// shownWith returns the numbers of b but for its size, given the interval and the
// size of its drips.
func (b *bucket) shownWith(interval, drip any) adminapi.Numbers {
	n := adminapi.Numbers{Algorithm: string(b.limit.algorithm)}
	n.Policies = b.shownPolicies()
	switch b.limit.algorithm {
	case leakyBucket, tokenBucket:
		n.DripRate, n.DripSize = interval, drip
	case fixedWindow:
		n.Window = interval
		if b.period != nil {
			n.Period = b.period.String()
		} else {
			n.WindowStart = cmp.Or(b.limit.WindowStart, windowStartClock)
		}
	case concurrency: // has only a size
	case slidingWindow, slidingLog:
		n.Window = interval
	case warmUp:
		n.Rate = option.Rate{Units: b.drip.Constant, Each: b.rate.Constant}.String()
		n.WarmUp, n.ColdFactor = adminapi.Seconds(b.warmUp), json.Number(b.cold.String())
	}
	return n
}

// shownPolicies returns the policies of b. The bucket of a min_interval has few of those of
// its limit.
func (b *bucket) shownPolicies() adminapi.Policies {
	l := b.limit
	p := adminapi.Policies{CountDenied: l.CountDenied, DryRun: l.dryRun, Status: l.statusCode, Consistency: b.shownConsistency()}
	if b.path != l.path {
		return p
	}
	p.Count, p.ActualCost = l.Count, l.ActualCost
	if p.Soft, p.MaxDelay = l.soft, adminapi.Seconds(l.maxDelay); l.maxDelay > 0 {
		p.MaxWaiting = l.maxWaiting
	}
	for _, d := range l.banDurations {
		p.Ban = append(p.Ban, adminapi.Seconds(d))
	}
	p.BanAfter = l.banAfter()
	p.Borrow, p.Pool = l.Borrow, l.Pool
	return p
}

// shownCost returns the cost of requests, before their responses are known.
func (b *bucket) shownCost() any {
	if b.costIsBody {
		return bodyCost
	}
	return jsonValue(&b.cost, asIs)
}

// jsonValue returns what to show of a value: its template if it depends on the
// request, and otherwise what show returns of it.
func jsonValue[T any](v *option.Value[T], show func(T) any) any {
	if v.IsDynamic() {
		return v.Template
	}
	return show(v.Constant)
}

// asIs returns a number to show.
func asIs(n int64) any { return n }
