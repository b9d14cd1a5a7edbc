package limiter

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// In a cluster, the buckets of a request may be in several slots, and no call can
// have keys in two slots. Then the request is decided in parts: one for each key,
// or one for each bucket while a slot is being moved. To charge all buckets or
// none, each part first holds its units, see held.lua. Once all parts have been
// answered, the held units are settled.
//
// The second step is asynchronous: it is sent with the next batch, see ledger.go.
//
// A pool is a part of its own. It is queried once the others have been answered, and only
// if something is to be borrowed: requests that have room elsewhere take nothing from it,
// not even for a moment, and its server is spared them.

// verdict is the outcome of a request whose units are held.
type verdict uint8

const (
	verdictNone     verdict = iota // nothing was decided: the units are released
	verdictDenied                  // the same, but they are charged where denied requests count
	verdictAdmitted                // they are charged
)

// part is a subset of a request's buckets that is decided in one call.
type part struct {
	Request
	indexes []int // the indexes of its buckets in the whole request
	pool    bool  // whether it is a pool, and nothing else
	unused  bool  // whether nothing is borrowed from that

	// The result. The query is nil once it is answered.
	query    *query
	outcomes []outcome
	err      error
}

// byKey splits the request into one part for each key.
func (req Request) byKey() []*part {
	type key struct {
		text   string
		shared bool
	}
	parts, of := make([]*part, 0, len(req.Buckets)), make(map[key]*part)
	for i, b := range req.Buckets {
		k := key{b.Key, b.shared}
		switch p := of[k]; {
		case b.Pool:
			parts = append(parts, req.part(b, i))
		case p != nil:
			p.add(b, i)
		default:
			of[k] = req.part(b, i)
			parts = append(parts, of[k])
		}
	}
	return parts
}

// byBucket splits the request into one part for each bucket.
func (req Request) byBucket() []*part {
	parts := make([]*part, len(req.Buckets))
	for i, b := range req.Buckets {
		parts[i] = req.part(b, i)
	}
	return parts
}

// part returns a part of the request with one bucket. A pool is held if it has room,
// until it is known whether it is charged.
func (req Request) part(b Bucket, index int) *part {
	p := &part{Request: req, pool: b.Pool}
	p.Buckets = nil
	if p.pool {
		b.Pool, b.Borrows = false, true // there is no other bucket that it depends on
		p.Accounting = AccountingAtomic
	}
	p.add(b, index)
	return p
}

// add adds a bucket to the part.
func (p *part) add(b Bucket, index int) {
	p.Buckets = append(p.Buckets, b)
	p.indexes = append(p.indexes, index)
}

// denied reports whether any of the part's buckets denied.
func (p *part) denied() bool { return p.Request.denied(p.outcomes) }

// reserveParts returns req with what is needed to hold the units of all buckets that may only be
// charged together with the units of other parts.
func (r *servers) reserveParts(req Request) Request {
	req.Buckets = slices.Clone(req.Buckets)
	held := new(Held)
	if req.Held != nil {
		held.reservations = slices.Clone(req.Held.reservations)
	}
	req.Held = held
	for i := range req.Buckets {
		if b := &req.Buckets[i]; b.reservedAs == 0 && b.Cost > 0 && b.Watches == 0 && (b.Pool || req.Accounting == AccountingAtomic) {
			r.reserveBucket(req, i)
		}
	}
	return req
}

// decideSplit decides the parts of req in parallel. Parts that no server decides
// are then decided here, in one step. If charging is atomic, they are charged only
// if no server has denied.
func (r *servers) decideSplit(end redisscript.Deadline, req Request, split func(Request) []*part) ([]outcome, error) {
	req = r.reserveParts(req)
	parts := split(req)
	pools := slices.DeleteFunc(slices.Clone(parts), func(p *part) bool { return !p.pool })
	parts = slices.DeleteFunc(parts, func(p *part) bool { return p.pool })
	parts = r.holdParts(end, parts)
	outcomes := make([]outcome, len(req.Buckets))
	failed, err := combine(parts, outcomes)
	decidesHere := r.fallback != nil && !req.NoFallback
	if len(pools) > 0 && (err == nil || decidesHere) {
		pools = r.holdParts(end, req.poolsNeeded(pools, failed, outcomes))
		poolsFailed, poolsErr := combine(pools, outcomes)
		parts, failed, err = append(parts, pools...), append(failed, poolsFailed...), cmp.Or(err, poolsErr)
	}
	if err != nil && !decidesHere {
		r.settle(parts, verdictNone)
		for _, p := range failed {
			r.fallback.drop(p.query)
		}
		return nil, err
	}
	if err != nil {
		r.decideHere(req, failed, outcomes)
	}
	req.markUnused(outcomes)
	as := verdictAdmitted
	denied := req.denied(outcomes)
	if denied {
		as = verdictDenied
	}
	at := bucket.Moment{Unix: time.Now().UnixMicro()}
	for _, p := range parts {
		if p.err != nil {
			continue
		}
		held := !p.denied()
		for _, i := range p.indexes { // the levels after settling
			b, o := &req.Buckets[i], &outcomes[i]
			p.unused = o.unused
			if (denied || o.unused) && held && !o.denied && req.newReservation(b) != nil && !b.Limit.CountDenied {
				o.held -= b.Cost
				if o.entries != nil { // there was room in addition to what others hold
					o.entries.Again, o.entries.One = 0, 0
				}
			}
			if b.Hold || req.newReservation(b) == nil || !held {
				continue
			}
			o.Ahead = b.Limit.of().AtLeast(o.After(at.Now), o.held, at).Ahead(at.Now)
			if o.entries != nil {
				*o.entries = o.entries.Plus(o.held, b.Limit.of())
			}
		}
	}
	r.settle(parts, as)
	return outcomes, nil
}

// combine puts the outcomes of parts in their places in the outcome of the whole request. It
// returns the parts that no server has decided, and the error of one.
func combine(parts []*part, outcomes []outcome) (failed []*part, err error) {
	for _, p := range parts {
		if p.err != nil {
			failed, err = append(failed, p), p.err
			continue
		}
		for j, o := range p.outcomes {
			outcomes[p.indexes[j]] = o
		}
	}
	return failed, err
}

// holdParts sends all parts of req and returns them with their results. It returns
// more parts if a slot is being moved.
func (r *servers) holdParts(end redisscript.Deadline, parts []*part) []*part {
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() { r.callPart(end, p) })
	}
	wg.Wait()
	all := make([]*part, 0, len(parts))
	for _, p := range parts {
		if len(p.Buckets) > 1 && redisscript.MovingSlot(p.err) {
			r.fallback.drop(p.query)
			each := p.byBucket()
			for i, index := range p.indexes {
				each[i].indexes[0] = index
			}
			all = append(all, r.holdParts(end, each)...)
			continue
		}
		all = append(all, p)
	}
	return all
}

// callPart sends one part.
func (r *servers) callPart(end redisscript.Deadline, p *part) {
	p.query = r.query(p.Request, byte(p.Accounting))
	_, p.outcomes, p.err = r.call(end, p.query, nil)
	if p.err == nil {
		p.query.release()
		p.query = nil
	}
}

// decideHere decides the parts that no server has decided. outcomes has the outcomes of the
// others, and gets theirs.
func (r *servers) decideHere(req Request, failed []*part, outcomes []outcome) {
	here := req
	here.Buckets = nil
	var indexes []int
	instead := make([]*query, 0, len(failed))
	for _, p := range failed {
		indexes = append(indexes, p.indexes...)
		instead = append(instead, p.query)
	}
	slices.Sort(indexes)
	for _, i := range indexes {
		here.Buckets = append(here.Buckets, req.Buckets[i])
	}
	req.lendHere(here.Buckets, indexes, outcomes)
	for i, o := range r.fallback.decide(here, nil, req.denied(outcomes), instead...) {
		outcomes[indexes[i]] = o
	}
}

// settle settles the units that are held until the parts are decided.
func (r *servers) settle(parts []*part, as verdict) {
	for _, p := range parts {
		for i := range p.Buckets {
			b := &p.Buckets[i]
			k := p.newReservation(b)
			if k == nil || b.Hold || p.err != nil {
				continue
			}
			charge := int64(0)
			if !p.unused && (as == verdictAdmitted || as == verdictDenied && b.Limit.CountDenied) {
				charge = b.Cost
			}
			k.settle(charge)
		}
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
