package ratelimit

import (
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// leastLeasable is how many requests a bucket of which a server leases anything admits at
// least at once: it leases a quarter of the room, for two requests at least.
const leastLeasable = 8

// wantConsistency describes valid consistencies.
const wantConsistency = "exact, or lease or eventual with a duration from 1ms to 1m, such as lease 100ms"

// parseConsistency parses the consistency option.
func parseConsistency(text string) (c limiter.Consistency, want string) {
	words := strings.Fields(text)
	if len(words) == 1 && words[0] == "exact" {
		return c, ""
	}
	if len(words) != 2 {
		return c, wantConsistency
	}
	d, err := caddy.ParseDuration(words[1])
	if err != nil || d < limiter.MinConsistency || d > limiter.MaxConsistency || d%time.Microsecond != 0 {
		return c, wantConsistency
	}
	switch words[0] {
	case "lease":
		return limiter.Lease(d), ""
	case "eventual":
		return limiter.Eventual(d), ""
	}
	return c, wantConsistency
}

// setConsistency sets who decides on the buckets of l. Unless it says so itself, that is as
// in the limit that contains it or else as by default, and exact if it can't be so.
func (l *Limit) setConsistency(parent *Limit, byDefault limiter.Consistency) (err error) {
	if l.consistency = byDefault; parent != nil {
		l.consistency = parent.consistency
	}
	if l.Consistency != "" {
		if l.consistency, err = option.Parse(l.resolve, "consistency", l.Consistency, parseConsistency); err != nil {
			return err
		}
	}
	if l.consistency == (limiter.Consistency{}) {
		return nil
	}
	reason := l.exactReason()
	for _, b := range l.buckets {
		if reason == "" {
			reason = b.exactReason(l.consistency)
		}
		if reason == "" {
			b.consistency = l.consistency
		}
	}
	if reason == "" {
		return nil
	}
	for _, b := range l.buckets {
		b.consistency = limiter.Consistency{}
	}
	if l.Consistency != "" {
		return option.Bad("consistency", l.Consistency, "exact, "+reason)
	}
	return nil
}

// shownConsistency returns who decides on b, or "" if it is exact.
func (b *bucket) shownConsistency() string {
	if b.consistency == (limiter.Consistency{}) {
		return ""
	}
	return b.consistency.String()
}

// exactReason returns why Redis has to decide each request on l, or "".
func (l *Limit) exactReason() string {
	switch {
	case l.Concurrency != "":
		return "as requests in progress are counted by all instances together"
	case l.Count != nil:
		return "as with count requests hold units until their responses"
	case l.ActualCost != "":
		return "as with actual_cost requests hold units until their responses"
	case l.bans != nil:
		return "as a ban holds for all instances at once"
	case l.Borrow != "" || l.Pool:
		return "as a pool has one level for all that borrow from it"
	case l.CountDenied:
		return "as with count_denied each denial is counted"
	case l.maxDelay > 0:
		return "as with max_delay requests of all instances wait in one order"
	}
	return ""
}

// exactReason returns why b has to be exact, although its limit may be c, or "".
func (b *bucket) exactReason(c limiter.Consistency) string {
	if c.Validate(limiter.Limit{Algorithm: b.counts}) != nil {
		return "as algorithm " + string(b.limit.algorithm) + " depends on each request"
	}
	if b.off || b.sizeIsDynamic() {
		return ""
	}
	size, _, _ := b.effectiveSize(nil) // validated before
	if c.IsEventual() && b.counts.DripSize() == 0 && !b.drip.IsDynamic() && b.drip.Constant > size {
		return "or a drip_size of at most the size: what exceeds the limit drips as fast"
	}
	if c.IsLease() && (size < leastLeasable || !b.cost.IsDynamic() && size/leastLeasable < b.cost.Constant) {
		return "or a size of at least 8 times the cost in each of its buckets: of less nothing is leased"
	}
	return ""
}
