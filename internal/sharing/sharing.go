// Package sharing finds limits that share buckets, or are charged twice, though that is hardly
// meant. Limits that users gave one name share their buckets on purpose.
package sharing

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Flaw is why the buckets of a limit are probably not shared as was intended, and what to do.
type Flaw struct {
	Limit           string // its path
	Problem, Remedy string
}

// The texts of flaws.
const (
	unnamed       = "Several limits without a name, or within one, have equal keys and numbers, so they share their buckets: requests to one site or path use up the limit of another."
	unnamedRemedy = "Unless that is meant, give each a name."
	twice         = "Some requests pass it twice, in blocks that share its buckets, so each of them is charged twice."
	twiceRemedy   = "Remove one, or give them different names."
)

// Flaws returns those of the limits of handlers, in the order of the config.
func Flaws(order []rule.Module, around map[rule.Module]*routes.Around) (found []Flaw) {
	seen := make(map[Flaw]bool)
	add := func(f Flaw) {
		if !seen[f] {
			seen[f] = true
			found = append(found, f)
		}
	}
	earlier := make(map[string][]placed) // by the name of the bucket in stores
	for _, m := range order {
		for b := range rule.Buckets(m.Compiled().Limits) {
			if b.Off || b.Limit.Pool { // a pool is charged for those that borrow alone
				continue
			}
			if b.Unnamed() && len(earlier[b.Name]) > 0 {
				add(Flaw{b.Path, unnamed, unnamedRemedy})
			}
			earlier[b.Name] = append(earlier[b.Name], placed{b, m})
		}
	}
	for _, m := range order {
		for b := range rule.Buckets(m.Compiled().Limits) {
			for _, first := range earlier[b.Name] {
				if !b.Unnamed() && around[m].After(around[first.module]) && first.alwaysMet() && first.costs(b) {
					add(Flaw{b.Path, twice, twiceRemedy})
				}
			}
		}
	}
	return found
}

// placed is a bucket of a handler.
type placed struct {
	rule.Placed
	module rule.Module
}

// alwaysMet reports whether all requests that come to the handler meet the limit.
func (p placed) alwaysMet() bool {
	for _, l := range append(slices.Clip(p.Around), p.Limit) {
		if len(l.Matchers) > 0 {
			return false
		}
	}
	return true
}

// costs reports whether p charges a request as b does. Blocks of one name that charge
// differently may well both be meant, as for a path that costs more.
func (p placed) costs(b rule.Placed) bool {
	return p.Cost.String() == b.Cost.String() && p.CostIsBody == b.CostIsBody
}
