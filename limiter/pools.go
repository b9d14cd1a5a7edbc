package limiter

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// What a bucket with Borrows has no room for, the next Pool of the request may have. So
// whether a pool is charged depends on buckets before it, and whether these deny depends
// on it. The outcome of each is whether it has room, and lending says what follows.

// lending follows the buckets of a request in their order. Its zero value is ready for
// the first one.
type lending struct {
	short bool // whether one that borrows had no room, since the last pool
}

// next notes whether the next bucket fits. It reports whether that denies the request,
// unless it is a dry run, and whether it is a pool of which nothing is borrowed.
func (l *lending) next(borrows, pool, fits bool) (denies, unused bool) {
	switch {
	case borrows:
		l.short = l.short || !fits
		return false, false
	case pool:
		short := l.short
		l.short = false
		return short && !fits, !short
	}
	return !fits, false
}

// elastic reports whether b denies nothing on its own.
func (b *Bucket) elastic() bool { return b.Borrows || b.Pool }

// errPools rejects a request in which it is not certain who lends, or that no store can
// decide in one step.
var errPools = errors.New("a bucket that Borrows needs a Pool behind it, and a Pool one before it that Borrows, with the same DryRun; none of them may have CountDenied, and none may be both")

// validatePools returns an error if it is not clear which pool a bucket borrows from.
func (req *Request) validatePools() error {
	borrower := -1 // the first since the last pool
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if !b.elastic() {
			continue
		}
		if b.Limit.CountDenied || b.Borrows && b.Pool || b.Pool && borrower < 0 ||
			borrower >= 0 && b.DryRun != req.Buckets[borrower].DryRun {
			return fmt.Errorf("bucket %q: %w", b.Name, errPools)
		}
		if borrower < 0 {
			borrower = i
		}
		if b.Pool {
			borrower = -1
		}
	}
	if borrower >= 0 {
		return fmt.Errorf("bucket %q: %w", req.Buckets[borrower].Name, errPools)
	}
	return nil
}

// markUnused marks the outcomes of pools of which nothing is borrowed.
func (req *Request) markUnused(outcomes []outcome) {
	var pools lending
	for i := range outcomes {
		b, o := &req.Buckets[i], &outcomes[i]
		_, o.unused = pools.next(b.Borrows, b.Pool, !o.denied)
	}
}

// poolsNeeded returns the parts with pools that have to be queried: a bucket that
// borrows had no room, or no server has decided on it, and nothing else denies the
// request. outcomes has the outcomes of all other parts, and gets the ones of pools that are not
// queried.
func (req *Request) poolsNeeded(pools, failed []*part, outcomes []outcome) (needed []*part) {
	denied := req.denied(outcomes) // as if all pools had room
	borrows := func(pool int) bool {
		for i := pool - 1; i >= 0 && !req.Buckets[i].Pool; i-- {
			if req.Buckets[i].Borrows && (outcomes[i].denied || slices.ContainsFunc(failed, func(p *part) bool { return slices.Contains(p.indexes, i) })) {
				return true
			}
		}
		return false
	}
	for _, p := range pools {
		if i := p.indexes[0]; !denied && borrows(i) {
			needed = append(needed, p)
		} else {
			outcomes[i] = outcome{denied: true, unasked: true, by: DecidedByRedis}
		}
	}
	return needed
}

// lendHere prepares buckets, which this process decides, for what others have decided on
// those that they borrow from or lend to. They have the given indexes in req, of which
// outcomes has what is known.
func (req *Request) lendHere(buckets []Bucket, indexes []int, outcomes []outcome) {
	here := make([]*Bucket, len(req.Buckets))
	for i := range buckets {
		here[indexes[i]] = &buckets[i]
	}
	from := 0
	for i := range req.Buckets {
		if !req.Buckets[i].Pool {
			continue
		}
		for j := from; j < i; j++ {
			switch b := here[j]; {
			case !req.Buckets[j].Borrows:
			case b == nil && here[i] != nil:
				here[i].lent = here[i].lent || outcomes[j].denied
			case b != nil && here[i] == nil: // its pool has room or not
				b.Borrows = false
				b.DryRun = b.DryRun || !outcomes[i].denied
			}
		}
		from = i + 1
	}
}

// never is a wait that does not end.
const never time.Duration = math.MaxInt64 / 1000 * 1000

// lend makes the Decisions on the pool with the given index, and on those that borrow from
// it, what follows from them for the request. So far each says whether there is room.
func (req *Request) lend(pool int, outcomes []outcome, decisions []Decision) {
	d := &decisions[pool]
	wait := req.Buckets[pool].RoomIn(d) // until it has as much room
	if d.Never || outcomes[pool].unasked {
		wait = never
	}
	full := d.Denied
	lent := !full && !outcomes[pool].unused && !req.denied(outcomes)
	for i := pool - 1; i >= 0 && !req.Buckets[i].Pool; i-- {
		own := &decisions[i]
		if !req.Buckets[i].Borrows {
			continue
		}
		switch micros := wait.Microseconds(); {
		case !own.exact:
			own.one = micros + 1
		case req.Buckets[i].need() > own.Size:
			own.rest, own.one = micros, min(own.one, micros)
		default:
			own.rest, own.one = min(own.rest, micros), min(own.one, micros)
		}
		switch {
		case !own.Denied:
			continue
		case own.Never:
			own.RetryAfter = never
		}
		own.RetryAfter = min(own.RetryAfter, wait)
		own.Denied, own.Borrowed = full, lent
		if own.Never = own.RetryAfter == never; own.Never || !full {
			own.RetryAfter = 0
		}
	}
	d.Pool, d.Borrowed = true, lent
	d.Denied, d.Never, d.RetryAfter = false, false, 0
}
