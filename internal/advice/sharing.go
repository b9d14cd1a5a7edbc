package advice

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Limits may share buckets, or be charged twice, though that is hardly meant. Limits that users
// gave one name share their buckets on purpose.
const (
	unnamed       = "Several limits without a name, or within one, have equal keys and numbers, so they share their buckets: requests to one site or path use up the limit of another."
	unnamedRemedy = "Unless that is meant, give each a name."
	twice         = "Some requests pass it twice, in blocks that share its buckets, so each of them is charged twice."
	twiceRemedy   = "Remove one, or give them different names."
)

// sharing advises on limits that share buckets, in the order of the config.
func (c *collector) sharing(order []rule.Module, around map[rule.Module]*routes.Around) {
	earlier := make(map[string][]shared) // by the name of the bucket in stores
	for _, m := range order {
		for b := range rule.Buckets(m.Compiled().Limits) {
			if b.Off || b.Limit.Pool { // a pool is charged for those that borrow alone
				continue
			}
			if b.Unnamed() && len(earlier[b.Name]) > 0 {
				c.limit(b.Path, Advice{Kind: Unnamed, Problem: unnamed, Remedy: unnamedRemedy})
			}
			earlier[b.Name] = append(earlier[b.Name], shared{b, m})
		}
	}
	for _, m := range order {
		for b := range rule.Buckets(m.Compiled().Limits) {
			for _, first := range earlier[b.Name] {
				if !b.Unnamed() && around[m].After(around[first.module]) && first.alwaysMet() && first.costs(b) {
					c.limit(b.Path, Advice{Kind: ChargedTwice, Problem: twice, Remedy: twiceRemedy})
				}
			}
		}
	}
}

// shared is a bucket of a handler.
type shared struct {
	rule.LocatedBucket
	module rule.Module
}

// alwaysMet reports whether all requests that reach the handler meet the limit.
func (p shared) alwaysMet() bool {
	for _, l := range append(slices.Clip(p.Around), p.Limit) {
		if len(l.Matchers) > 0 {
			return false
		}
	}
	return true
}

// costs reports whether p charges a request as b does. Blocks of one name that charge
// differently may well both be meant, as for a path that costs more.
func (p shared) costs(b rule.LocatedBucket) bool {
	return p.Cost.String() == b.Cost.String() && p.CostIsBody == b.CostIsBody
}
