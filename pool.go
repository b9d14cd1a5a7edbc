package ratelimit

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
)

// What a limit has no room for it may borrow from another one, which is a pool. A store
// decides both in one step, so a pool stands behind those that borrow from it. Of a
// request that borrows nothing it is not seen, nor charged.

// setPool sets which of its siblings l borrows from, or which of them borrow from l.
func (l *Limit) setPool(parent *Limit, prep *preparation) error {
	siblings := prep.limits
	if parent != nil {
		siblings = parent.Limits
	}
	dry := func(other *Limit) bool { return other.DryRun || parent != nil && parent.dryRun }
	switch {
	case l.Borrow == "" && !l.Pool:
		return nil
	case l.Pool:
		return l.setBorrowers(siblings)
	case len(l.buckets) == 0:
		return option.Bad("borrow", l.Borrow, "a size with it")
	case prep.accounting == accountingInOrder:
		return option.Bad("borrow", l.Borrow, "accounting atomic or each, as limits that are asked in order do not know what those behind them have")
	case l.CountDenied:
		return option.Bad("borrow", l.Borrow, "no count_denied with it, as only the pool knows what is denied")
	case l.bans != nil:
		return option.Bad("borrow", l.Borrow, "no ban with it, as only the pool knows what is denied; ban at another limit")
	case l.maxDelay > 0:
		return option.Bad("borrow", l.Borrow, "no max_delay with it: a request either waits or borrows")
	}
	i := slices.IndexFunc(siblings, func(other *Limit) bool { return other != nil && other.Name == l.Borrow })
	switch {
	case i < 0:
		return option.Bad("borrow", l.Borrow, "the name of a limit in the same block that has pool")
	case siblings[i] == l:
		return option.Bad("borrow", l.Borrow, "another limit in the same block, with pool")
	case !siblings[i].Pool:
		return option.Bad("borrow", l.Borrow, "pool in that limit")
	case dry(siblings[i]) != l.dryRun:
		return option.Bad("borrow", l.Borrow, "dry_run in both limits, or in neither")
	}
	l.lender = siblings[i]
	return nil
}

// setBorrowers sets which of its siblings borrow from l, a pool.
func (l *Limit) setBorrowers(siblings []*Limit) error {
	want := ""
	switch {
	case len(l.buckets) == 0:
		want = "a size with it"
	case l.Borrow != "":
		want = "no borrow with it: what is to spare stands in one pool"
	case len(l.Limits) > 0:
		want = "no limits within it, put them beside it"
	case l.CountDenied:
		want = "no count_denied with it, which counts only what is borrowed"
	case l.bans != nil:
		want = "no ban with it, which denies nothing by itself"
	case l.soft > 0:
		want = "no soft with it, but a larger size"
	case l.maxDelay > 0:
		want = "no max_delay with it: what it has no room for is denied"
	case l.MinInterval != "":
		want = "no min_interval with it"
	}
	if want != "" {
		return option.Bad("pool", "true", want)
	}
	for _, other := range siblings {
		if other != nil && other != l && l.Name != "" && other.Borrow == l.Name {
			l.borrowers = append(l.borrowers, other)
		}
	}
	if len(l.borrowers) == 0 {
		return option.Bad("pool", "true", "a limit in the same block with borrow and its name")
	}
	return nil
}

// addPoolTo adds to e the buckets of the limits that borrow from l and that the request has
// to pass, then that of l, and then those of limits within the former.
func (l *Limit) addPoolTo(e *evaluation) error {
	var few [4]*Limit
	met, from := few[:0], len(e.buckets)
	for _, borrower := range l.borrowers {
		matches, err := borrower.addOwnTo(e)
		if err != nil {
			return err
		}
		if matches {
			met = append(met, borrower)
		}
	}
	if at := len(e.buckets); at > from {
		if _, err := l.addOwnTo(e); err != nil {
			return err
		}
		e.pools = e.pools || len(e.buckets) > at
		for i := at; i < len(e.buckets) && l.Cost == "" && l.Concurrency == ""; i++ {
			for j := from; j < at; j++ {
				if e.of[j].isMain() {
					e.buckets[i].Cost = max(e.buckets[i].Cost, e.buckets[j].Cost)
				}
			}
		}
	}
	for _, borrower := range met {
		if err := e.add(borrower.Limits); err != nil {
			return err
		}
	}
	return nil
}

// isMain reports whether b is its limit's own bucket, and not that of a min_interval.
func (b *bucket) isMain() bool { return b.path == b.limit.path }

// linkPools tells a store which of e's buckets borrow from which. It removes pools from
// which none does.
func (e *evaluation) linkPools() {
	if !e.pools {
		return
	}
	for i := len(e.of) - 1; i >= 0; i-- {
		pool := e.of[i].limit
		for j := i - 1; j >= 0 && pool.Pool; j-- {
			if e.of[j].limit.lender == pool && e.of[j].isMain() {
				e.buckets[j].Borrows, e.buckets[i].Pool = true, true
			}
		}
		if pool.Pool && !e.buckets[i].Pool {
			e.remove(i)
		}
	}
}

// foldPools removes the pools from e of which nothing was borrowed, and what linkPools has
// told.
func (e *evaluation) foldPools() {
	if !e.pools {
		return
	}
	for i := len(e.of) - 1; i >= 0; i-- {
		e.buckets[i].Borrows, e.buckets[i].Pool = false, false
		if len(e.decisions) > 0 && e.decisions[i].Pool && !e.decisions[i].Borrowed {
			e.remove(i)
		}
	}
}

// remove removes the i-th bucket from e, and what was decided on it.
func (e *evaluation) remove(i int) {
	e.buckets, e.of = slices.Delete(e.buckets, i, i+1), slices.Delete(e.of, i, i+1)
	if len(e.decisions) > i {
		e.decisions = slices.Delete(e.decisions, i, i+1)
	}
}
