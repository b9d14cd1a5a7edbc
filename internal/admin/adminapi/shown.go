package adminapi

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Numbers returns the numbers of a bucket as its config has them.
func Numbers(b *rule.Bucket) adminjson.Numbers {
	n := numbersWith(b, jsonValue(&b.Rate, func(d time.Duration) any { return option.Seconds(d) }), jsonValue(&b.Drip, asIs))
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

// NumbersFor returns the numbers of a bucket for one request.
func NumbersFor(b *rule.Bucket, l *limiter.Limit) adminjson.Numbers {
	n := numbersWith(b, option.Seconds(l.DripInterval), l.DripSize)
	n.Size = l.Size
	return n
}

// numbersWith returns the numbers of b except for its size, given the interval and the
// size of its drips.
func numbersWith(b *rule.Bucket, interval, drip any) adminjson.Numbers {
	n := adminjson.Numbers{Algorithm: string(b.Limit.Algorithm), Options: b.Options()}
	switch b.Limit.Algorithm {
	case rule.LeakyBucket, rule.TokenBucket:
		n.DripRate, n.DripSize = interval, drip
	case rule.FixedWindow:
		n.Window = interval
		if b.Period != nil {
			n.Period = b.Period.String()
		} else {
			n.WindowStart = windowStart(b)
		}
	case rule.Concurrency: // has only a size
	case rule.SlidingWindow, rule.SlidingLog:
		n.Window = interval
	case rule.WarmUp:
		n.Rate = option.Rate{Units: b.Drip.Constant, Each: b.Rate.Constant}.String()
		n.WarmUp, n.ColdFactor = option.Seconds(b.WarmUp), json.Number(b.Cold.String())
	}
	return n
}

// windowStart returns when fixed windows begin, as the option is written.
func windowStart(b *rule.Bucket) string {
	if b.Aligned {
		return "clock"
	}
	return "first"
}

// shownCost returns the cost of requests, before their responses are known.
func shownCost(b *rule.Bucket) any {
	if b.CostIsBody {
		return "body"
	}
	return jsonValue(&b.Cost, asIs)
}

// jsonValue returns what to show of a value: its template if it depends on the
// request, and otherwise what show returns of it.
func jsonValue[T any](v *value.Value[T], show func(T) any) any {
	if v.IsDynamic() {
		return v.Template
	}
	return show(v.Constant)
}

// asIs returns a number to show.
func asIs(n int64) any { return n }

// Reported returns what metrics show of a bucket, given the maximum number of buckets of all limits.
func Reported(b *rule.Bucket, maxKeys int) telemetry.Limit {
	n := Numbers(b)
	l := telemetry.Limit{
		Name: b.Name, MaxKeys: b.Limit.MaxKeysOf(maxKeys), Counters: b.Policy.Counters, Algorithm: n.Algorithm,
		Size: reportedNumber(n.Size), DripRate: reportedNumber(n.DripRate), DripSize: reportedNumber(n.DripSize),
		Window: reportedNumber(n.Window), Policies: counted(b),
	}
	if b.Limit.Load != nil {
		l.Load = b.Limit.Load.Controllers
	}
	l.Waiting = b.WaitingState()
	switch {
	case n.Period != "":
		l.Window = n.Period
	case n.Rate != "":
		l.DripRate, l.DripSize = option.DurationText(b.Rate.Constant), strconv.FormatInt(b.Drip.Constant, 10)
	}
	return l
}

// counted returns the options of b of which more is counted.
func counted(b *rule.Bucket) (p telemetry.Policies) {
	for name, has := range map[telemetry.Policies]bool{
		telemetry.DryRun: b.Limit.DryRun, telemetry.Soft: b.Limit.Soft > 0, telemetry.Delays: b.WaitingState() != nil,
		telemetry.Bans: b.Limit.Bans != nil, telemetry.Borrows: b.Limit.Lender != nil,
		telemetry.Leases: b.Consistency.IsLease(), telemetry.Eventual: b.Consistency.IsEventual(),
		telemetry.Load: b.Limit.Load != nil, telemetry.Fields: b.Limit.Key.Submitted,
		telemetry.Connections: b.Limit.Connections, telemetry.Open: b.Limit.Connections && b.Limit.Settlement.InProgress,
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
