package compile

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// setPool checks that there is a pool next to d to borrow from, or if it is one, that there is
// a limit that borrows from it.
func (d *LimitBuilder) setPool() error {
	d.rule.Borrow, d.rule.OwnCost = d.Borrow, d.Cost != "" || d.Concurrency != ""
	if d.Pool {
		if d.Borrow == "" && !slices.ContainsFunc(d.siblings, func(other *config.Limit) bool { return lendsTo(d.Limit, other) }) {
			return option.Needs("pool", "", "a limit in the same block that borrows from it")
		}
		return nil
	}
	if d.Borrow == "" {
		return nil
	}
	i := slices.IndexFunc(d.siblings, func(other *config.Limit) bool { return other != nil && other.Name == d.Borrow })
	switch {
	case i < 0:
		return option.Bad("borrow", d.Borrow, "the name of a limit in the same block that has pool")
	case d.siblings[i] == d.Limit:
		return option.Bad("borrow", d.Borrow, "another limit in the same block, with pool")
	case !d.siblings[i].Pool:
		return option.Needs("borrow", d.Borrow, "pool in that limit")
	case d.siblings[i].DryRun != d.DryRun && (d.parent == nil || !d.parent.rule.DryRun):
		return option.Needs("borrow", d.Borrow, "dry_run in both limits, or in neither")
	}
	return nil
}

// lendsTo reports whether another limit borrows from l.
func lendsTo(l, other *config.Limit) bool {
	return other != nil && other != l && l.Name != "" && other.Borrow == l.Name
}

// linkPools links the pools among limits with those that borrow from them, given what the
// limits are compiled to.
func linkPools(limits []*config.Limit, compiled []*rule.Limit) {
	for i, pool := range limits {
		for j, other := range limits {
			if pool.Pool && lendsTo(pool, other) {
				compiled[j].Lender = compiled[i]
				compiled[i].Borrowers = append(compiled[i].Borrowers, compiled[j])
			}
		}
	}
}
