package advice

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// flooded advises on a bucket for all that is charged for requests which a narrower limit denies:
// one client that sends many of them denies everybody.
func (c *collector) flooded(h *rule.Handler) {
	if h.Accounting == rule.Atomic {
		return
	}
	buckets := conditioned(h.Limits)
	var all []conditionedBucket // before the limit that is looked at, or all of them if each is charged
	for _, b := range buckets {
		if b.forAll() && charges(b.LocatedBucket) {
			all = append(all, b)
		}
		if h.Accounting == rule.InOrder {
			c.floodedBy(b, all, h.Accounting)
		}
	}
	if h.Accounting == rule.Each {
		for _, b := range buckets {
			c.floodedBy(b, all, h.Accounting)
		}
	}
}

// floodedBy advises on buckets for all that are charged for what b denies.
func (c *collector) floodedBy(b conditionedBucket, all []conditionedBucket, accounting rule.Accounting) {
	if b.forAll() || !charges(b.LocatedBucket) {
		return
	}
	how := "With accounting " + string(accounting)
	if accounting == rule.InOrder {
		how = "As zones count in order"
	}
	for _, a := range all {
		if (a.meets(b) || b.meets(a)) && tighter(b.Bucket, a.Bucket) {
			c.limit(a.Path, advise(Floodable,
				how+", it is also charged for requests that limit "+b.Path+
					" denies: a single client that sends many of them uses up the bucket for all.",
				"Use accounting atomic: then a denied request is charged to no limit."))
		}
	}
}

// charges reports whether b denies requests, and charges them as soon as it admits them.
func charges(b rule.LocatedBucket) bool {
	l := b.Limit
	return b.Constant != nil && !b.Off && !l.DryRun && l.Load == nil && !l.Pool && l.Lender == nil && len(l.Borrowers) == 0 && !l.Settlement.Holds()
}

// conditionedBucket is a bucket, the matchers of its limit and of those around it, and the
// placeholders of its key.
type conditionedBucket struct {
	rule.LocatedBucket
	conditions, key []string
}

// conditioned returns the buckets of limits.
func conditioned(limits []*rule.Limit) (all []conditionedBucket) {
	for b := range rule.Buckets(limits) {
		of := conditionedBucket{LocatedBucket: b, key: b.Limit.Key.Names()}
		for _, l := range append(slices.Clip(b.Around), b.Limit) {
			if len(l.Match) > 0 {
				text, _ := json.Marshal(l.Match)
				of.conditions = append(of.conditions, string(text))
			}
		}
		all = append(all, of)
	}
	return all
}

// forAll reports whether all requests share one bucket of a.
func (a *conditionedBucket) forAll() bool { return len(a.key) == 0 }

// meets reports whether all requests that meet b meet a too, both of one handler.
func (a *conditionedBucket) meets(b conditionedBucket) bool {
	return !slices.ContainsFunc(a.conditions, func(condition string) bool { return !slices.Contains(b.conditions, condition) })
}

// sharesKey reports whether requests that share a bucket of b share one of a.
func (a *conditionedBucket) sharesKey(b conditionedBucket) bool {
	captured := func(name string) bool { return strings.HasPrefix(name, placeholder.OfCapture) } // which may differ by then
	return a.Limit.Key.Prefixes == b.Limit.Key.Prefixes &&
		!slices.ContainsFunc(a.key, func(name string) bool { return captured(name) || !slices.Contains(b.key, name) })
}

// unused advises on limits of a handler that never deny anything, since another one does first.
func (c *collector) unused(h *rule.Handler) {
	all := conditioned(h.Limits)
	for i, b := range all {
		if !mayBeUnused(b.LocatedBucket, h.Accounting) {
			continue
		}
		for j, a := range all {
			if i == j || a.Limit == b.Limit || !charges(a.LocatedBucket) || a.Limit.MaxDelay > 0 || a.Consistency != (limiter.Consistency{}) ||
				!a.meets(b) || !a.sharesKey(b) || a.Constant.Cost < b.Constant.Cost || !tighter(a.Bucket, b.Bucket) || j > i && tighter(b.Bucket, a.Bucket) {
				continue
			}
			c.limit(b.Path, advise(NeverDenies,
				"It denies no client that limit "+a.Path+" does not deny: that one is tighter, for the same key and at least the same requests.",
				"Remove it, or give limit "+a.Path+" a matcher for the requests that it should limit."))
			break
		}
	}
}

// mayBeUnused reports whether b has no effect if it never denies a request on its own.
func mayBeUnused(b rule.LocatedBucket, accounting rule.Accounting) bool {
	l := b.Limit
	return b.Constant != nil && !b.Off && !l.DryRun && l.Load == nil && !l.Pool && l.Lender == nil && len(l.Borrowers) == 0 &&
		!l.Settlement.InProgress && l.Settlement.ActualCost == "" && !l.CountDenied && (l.Bans == nil || accounting == rule.Atomic)
}

// tighter reports whether what a admits at most in any time always fits into b.
func tighter(a, b *rule.Bucket) bool {
	return a.Constant != nil && b.Constant != nil && fits(bucket.Limit(a.Constant.Limit), a.Limit.Soft, bucket.Limit(b.Constant.Limit))
}

// fits reports whether what a limit admits at most in any time, with that many units above its
// size, never fills another.
func fits(a bucket.Limit, soft int64, b bucket.Limit) bool {
	a, b = a.Complete(), b.Complete()
	a.Size += soft
	// The units that a admits at most in a time that is shorter than t. As floats, these do not
	// overflow.
	var atMost func(t time.Duration) float64
	intervals := func(t time.Duration) float64 { return float64((t - 1) / a.DripInterval) }
	size := float64(a.Size)
	// A drip soon after the first of some units makes room for all but one of its own.
	early := min(a.DripSize, a.Size) - 1
	switch a.Algorithm {
	case bucket.Leaky:
		atMost = func(t time.Duration) float64 { return size + float64(early) + float64(a.DripSize)*intervals(t) }
	case bucket.Log:
		atMost = func(t time.Duration) float64 { return size * (intervals(t) + 1) }
	case bucket.Fixed, bucket.Sliding: // of a sliding window, no part that begins by the clock admits more
		atMost = func(t time.Duration) float64 {
			if a.Algorithm == bucket.Fixed && b.Algorithm == bucket.Fixed && a.Aligned && b.Aligned && a.Phase == 0 && b.Phase == 0 && t%a.DripInterval == 0 {
				return size * float64(t/a.DripInterval)
			}
			return size * (intervals(t) + 2)
		}
	case bucket.WarmUp, bucket.Bans:
		return false
	}
	switch b.Algorithm {
	case bucket.Fixed, bucket.Log:
		return atMost(b.DripInterval) <= float64(b.Size)
	case bucket.Sliding:
		return atMost(2*b.DripInterval) <= float64(b.Size)
	case bucket.Leaky:
		// What it holds is largest right after a burst, if it drips no less than is admitted.
		if a.Algorithm == bucket.Leaky {
			return a.Size <= b.Size && a.DripInterval >= b.DripInterval && a.DripSize == 1 ||
				a.Size+early+b.DripSize <= b.Size && perHour(a) <= perHour(b)
		}
		return atMost(1) <= float64(b.Size) && size <= float64(b.DripSize)*float64(a.DripInterval/b.DripInterval)
	case bucket.WarmUp, bucket.Bans:
	}
	return false
}

// perHour returns how many units drip in an hour.
func perHour(l bucket.Limit) float64 {
	return float64(l.DripSize) * float64(time.Hour) / float64(l.DripInterval)
}

// zones advises on zones that admit nothing, and on zones of one name whose options differ.
func (c *collector) zones() {
	first := make(map[string]rule.LocatedBucket) // by path
	c.each(func(h *rule.Handler, _ *routes.Around) {
		for b := range rule.Buckets(h.Limits) {
			if b.Limit.Zone == nil {
				continue
			}
			if b.Limit.Zone.Events == 0 {
				c.limit(b.Path, Advice{Kind: ZoneClosed, Problem: "It admits no request, since its max_events is 0.", Remedy: "Set max_events to the number of requests to admit."})
			}
			earlier, found := first[b.Path]
			if !found {
				first[b.Path] = b
				continue
			}
			if option := zonesDiffer(earlier, b); option != "" {
				c.limit(b.Path, advise(ZonesDiffer,
					"Zones of this name have different "+option+", and count together only if their keys and windows are equal.",
					"Give all of them the same options, or each its own name."))
			}
		}
	})
}

// zonesDiffer returns what differs in two zones, or "".
func zonesDiffer(a, b rule.LocatedBucket) string {
	switch ka, kb := a.Limit.Key, b.Limit.Key; {
	case ka.String() != kb.String():
		return "keys"
	case ka.Prefixes != kb.Prefixes:
		return "prefixes"
	case a.Limit.Zone.Events != b.Limit.Zone.Events:
		return "events"
	case a.Limit.Zone.Window != b.Limit.Zone.Window || a.Limit.Algorithm != b.Limit.Algorithm:
		return "windows"
	}
	return ""
}
