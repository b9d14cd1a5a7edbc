package ratelimit

import (
	"cmp"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
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

// setConsistency sets who decides on the buckets of d. Unless it says so itself, that is as
// in the limit that contains it or else as by default, and exact if it can't be so.
func (d *draft) setConsistency() (err error) {
	if d.consistency = d.compiler.consistency; d.parent != nil {
		d.consistency = d.parent.consistency
	}
	if d.Consistency != "" {
		if d.consistency, err = option.Parse(d.resolve, "consistency", d.Consistency, parseConsistency); err != nil {
			return err
		}
	}
	reason := d.exactReason()
	for _, b := range d.rule.Buckets {
		b.Leasable = reason == "" && exactReason(b, limiter.Lease(time.Second)) == ""
	}
	if d.consistency == (limiter.Consistency{}) {
		return nil
	}
	for _, b := range d.rule.Buckets {
		reason = cmp.Or(reason, exactReason(b, d.consistency))
	}
	if reason != "" {
		if d.Consistency != "" {
			return option.Bad("consistency", d.Consistency, reason)
		}
		return nil
	}
	for _, b := range d.rule.Buckets {
		b.Consistency = d.consistency
	}
	return nil
}

// exactReason returns why b has to be exact, although its limit may be c, or "".
func exactReason(b *rule.Bucket, c limiter.Consistency) string {
	if c.Validate(limiter.Limit{Algorithm: b.Counts}) != nil {
		return "exact, as algorithm " + string(b.Limit.Algorithm) + " depends on each request"
	}
	if b.Off || b.SizeIsDynamic() {
		return ""
	}
	size, _, _ := b.EffectiveSize(nil) // it is complete
	if c.IsEventual() && b.Counts.DripSize() == 0 && !b.Drip.IsDynamic() && b.Drip.Constant > size {
		return "exact, or a drip_size of at most the size: what exceeds the limit drips as fast"
	}
	if c.IsLease() && (size < leastLeasable || !b.Cost.IsDynamic() && size/leastLeasable < b.Cost.Constant) {
		return "exact, or a size of at least 8 times the cost in each of its buckets: of less nothing is leased"
	}
	return ""
}
