package rule

import (
	"encoding/json"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Shown returns the numbers of b as its config has them.
func (b *Bucket) Shown() adminjson.Numbers {
	n := b.shownWith(jsonValue(&b.Rate, func(d time.Duration) any { return adminjson.Seconds(d) }), jsonValue(&b.Drip, asIs))
	if b.Period != nil {
		n.Window = nil // its length varies
	}
	switch {
	case b.Off:
		n.Size = int64(0)
	case !b.SizeIsDynamic():
		n.Size, _, _ = b.EffectiveSize(nil) // validated before
	case b.Factor.IsDynamic() || b.Factor.Constant != 1e6:
		n.Size = b.Size.String() + " / " + b.Factor.String()
	default:
		n.Size = b.Size.String()
	}
	return n
}

// ShownFor returns the numbers of b for one request.
func (b *Bucket) ShownFor(l *limiter.Limit) adminjson.Numbers {
	n := b.shownWith(adminjson.Seconds(l.DripInterval), l.DripSize)
	n.Size = l.Size
	return n
}

// shownWith returns the numbers of b except for its size, given the interval and the
// size of its drips.
func (b *Bucket) shownWith(interval, drip any) adminjson.Numbers {
	n := adminjson.Numbers{Algorithm: string(b.Limit.Algorithm)}
	n.Policies = b.ShownPolicies()
	switch b.Limit.Algorithm {
	case LeakyBucket, TokenBucket:
		n.DripRate, n.DripSize = interval, drip
	case FixedWindow:
		n.Window = interval
		if b.Period != nil {
			n.Period = b.Period.String()
		} else {
			n.WindowStart = b.windowStart()
		}
	case Concurrency: // has only a size
	case SlidingWindow, SlidingLog:
		n.Window = interval
	case WarmUp:
		n.Rate = option.Rate{Units: b.Drip.Constant, Each: b.Rate.Constant}.String()
		n.WarmUp, n.ColdFactor = adminjson.Seconds(b.WarmUp), json.Number(b.Cold.String())
	}
	return n
}

// ShownPolicies returns the policies of b. The bucket of a min_interval has few of the policies
// of its limit.
func (b *Bucket) ShownPolicies() adminjson.Policies {
	p := b.Limit.Policies
	if !b.IsMain() {
		p = adminjson.Policies{CountDenied: p.CountDenied, DryRun: p.DryRun, Status: p.Status}
	}
	if b.Consistency != (limiter.Consistency{}) {
		p.Consistency = b.Consistency.String()
	}
	return p
}

// windowStart returns when fixed windows begin, as the option is written.
func (b *Bucket) windowStart() string {
	if b.Aligned {
		return "clock"
	}
	return "first"
}

// ShownCost returns the cost of requests, before their responses are known.
func (b *Bucket) ShownCost() any {
	if b.CostIsBody {
		return "body"
	}
	return jsonValue(&b.Cost, asIs)
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

// Reported returns what metrics show of b, given the maximum number of buckets of all limits.
func (b *Bucket) Reported(maxKeys int) telemetry.Limit {
	n := b.Shown()
	l := telemetry.Limit{
		Name: b.Name, MaxKeys: b.Limit.MaxKeysOf(maxKeys), Counters: b.Policy.Counters, Algorithm: n.Algorithm,
		Size: reportedNumber(n.Size), DripRate: reportedNumber(n.DripRate), DripSize: reportedNumber(n.DripSize),
		Window: reportedNumber(n.Window), Policies: b.counted(),
	}
	if b.Limit.Load != nil {
		l.Load = b.Limit.Load.Controllers
	}
	if b.Limit.Waiting != nil && b.IsMain() {
		l.Waiting = b.Limit.Waiting.State
	}
	switch {
	case n.Period != "":
		l.Window = n.Period
	case n.Rate != "":
		l.DripRate, l.DripSize = adminjson.Interval(adminjson.Seconds(b.Rate.Constant)), adminjson.Number(b.Drip.Constant)
	}
	return l
}

// counted returns the options of b of which more is counted.
func (b *Bucket) counted() (p telemetry.Policies) {
	for name, has := range map[telemetry.Policies]bool{
		telemetry.DryRun: b.Limit.DryRun, telemetry.Soft: b.Limit.Soft > 0, telemetry.Delays: b.Limit.MaxDelay > 0,
		telemetry.Bans: b.Limit.Bans != nil, telemetry.Borrows: b.Limit.Lender != nil,
		telemetry.Leases: b.Consistency.IsLease(), telemetry.Eventual: b.Consistency.IsEventual(),
		telemetry.Load: b.Limit.Load != nil,
	} {
		if has {
			p |= name
		}
	}
	return p
}

// reportedNumber returns a number of a limit as text.
func reportedNumber(value any) string {
	switch value.(type) {
	case nil:
		return ""
	case string:
		return telemetry.DynamicNumber
	}
	return adminjson.Interval(value)
}
