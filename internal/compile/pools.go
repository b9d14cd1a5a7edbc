package compile

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// setPool checks that there is a pool next to l to borrow from, or if it is one, that there is
// a limit that borrows from it.
func (l *LimitBuilder) setPool() error {
	l.rule.Borrow, l.rule.OwnCost = l.Borrow, l.Cost != "" || l.Concurrency != ""
	if l.Pool {
		if l.Borrow == "" && !slices.ContainsFunc(l.siblings, func(other *config.Limit) bool { return lendsTo(l.Limit, other) }) {
			return option.Needs("pool", "", "a limit in the same block that borrows from it")
		}
		return nil
	}
	if l.Borrow == "" {
		return nil
	}
	i := slices.IndexFunc(l.siblings, func(other *config.Limit) bool { return other != nil && other.Name == l.Borrow })
	switch {
	case i < 0:
		return option.Bad("borrow", l.Borrow, "the name of a limit in the same block that has pool")
	case l.siblings[i] == l.Limit:
		return option.Bad("borrow", l.Borrow, "another limit in the same block, with pool")
	case !l.siblings[i].Pool:
		return option.Needs("borrow", l.Borrow, "pool in that limit")
	case l.siblings[i].DryRun != l.DryRun && (l.parent == nil || !l.parent.rule.DryRun):
		return option.Needs("borrow", l.Borrow, "dry_run in both limits, or in neither")
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
