package compile

import (
	"cmp"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// minLeasable is how many requests a bucket of which a server leases anything admits at
// least at once: it leases a quarter of the room, for two requests at least.
const minLeasable = 8

// UseConsistency describes valid consistencies.
const UseConsistency = "exact, or lease or eventual with a duration from 1ms to 1m, such as lease 100ms"

// parseConsistency parses the consistency option.
func parseConsistency(text string) (c limiter.Consistency, use string) {
	words := strings.Fields(text)
	if len(words) == 1 && words[0] == "exact" {
		return c, ""
	}
	if len(words) != 2 {
		return c, UseConsistency
	}
	d, err := caddy.ParseDuration(words[1])
	if err != nil || d < limiter.MinConsistency || d > limiter.MaxConsistency || d%time.Microsecond != 0 {
		return c, UseConsistency
	}
	switch words[0] {
	case "lease":
		return limiter.Lease(d), ""
	case "eventual":
		return limiter.Eventual(d), ""
	}
	return c, UseConsistency
}

// setConsistency sets who decides on the buckets of l. Unless it says so itself, that is as
// in the limit that contains it or else as by default, and exact if it can't be so.
func (l *LimitBuilder) setConsistency() error {
	if l.consistency = l.Compiler.consistency; l.parent != nil {
		l.consistency = l.parent.consistency
	}
	if l.Consistency != "" {
		l.consistency = read(&l.reader, "consistency", l.Consistency, parseConsistency)
	}
	reason := l.mustBeExact()
	for _, b := range l.rule.Buckets {
		b.Leasable = reason == nil && mustBeExact(b, limiter.Lease(time.Second)) == nil
	}
	if l.consistency == (limiter.Consistency{}) {
		return nil
	}
	for _, b := range l.rule.Buckets {
		reason = cmp.Or(reason, mustBeExact(b, l.consistency))
	}
	if reason != nil {
		if l.Consistency != "" {
			return option.Clash("consistency", l.Consistency, reason.With, reason.Instead)
		}
		return nil
	}
	for _, b := range l.rule.Buckets {
		b.Consistency = l.consistency
	}
	return nil
}

// mustBeExact returns why b has to be exact, although its limit may be c, or nil.
func mustBeExact(b *rule.Bucket, c limiter.Consistency) *conflict {
	if c.Validate(limiter.Limit{Algorithm: b.Counts}) != nil {
		return &conflict{With: "algorithm " + string(b.Limit.Algorithm), Instead: "use exact: it depends on each request"}
	}
	if b.Off || b.SizeIsDynamic() {
		return nil
	}
	size, _, _ := b.EffectiveSize(nil) // it is complete
	if c.IsEventual() && b.Counts.DripSize() == 0 && !b.Drip.IsDynamic() && b.Drip.Constant > size {
		return &conflict{With: "a drip_size above the size", Instead: "use exact or a smaller drip_size: what exceeds the limit drips as fast"}
	}
	if c.IsLease() && (size < minLeasable || !b.Cost.IsDynamic() && size/minLeasable < b.Cost.Constant) {
		return &conflict{With: "a size below 8 times the cost", Instead: "use exact, or a larger size in each of its buckets: nothing would be leased"}
	}
	return nil
}
