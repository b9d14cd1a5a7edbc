package limiter

import "slices"

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
