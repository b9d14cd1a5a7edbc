package limiter

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// In a cluster, the buckets of a request may be in several slots, and no call can
// have keys in two slots. Then the request is decided in parts: one for each key,
// or one for each bucket while a slot is being moved. To charge all buckets or
// none, each part first holds its units, see held.lua. Once all parts have been
// answered, the held units are settled.
//
// The second step is asynchronous: it is sent with the next batch. If it never
// arrives, the server charges the held units later.
//
// A pool is a part of its own. It is asked once the others have been answered, and only
// if something is to be borrowed: requests that have room elsewhere take nothing from it,
// not even for a moment, and its server is spared them.

// heldFor is the time for which a server holds units at least, see held.lua.
const heldFor = 10 * time.Second

// verdict is the outcome of a request whose units are held.
type verdict uint8

const (
	verdictNone     verdict = iota // nothing was decided: the units are let go
	verdictDenied                  // likewise, but they are charged where denied requests count
	verdictAdmitted                // they are charged
)

// settleEvery is the time between two attempts to settle held units.
const settleEvery = 250 * time.Millisecond

// part is a subset of a request's buckets that is decided in one call.
type part struct {
	Request
	indexes []int // the indexes of its buckets in the whole request
	pool    bool  // whether it is a pool, and nothing else
	unused  bool  // whether nothing is borrowed from that

	// The result. The query is kept as long as its units are held.
	query    *query
	server   *redisscript.Server
	outcomes []outcome
	err      error
}

// severalKeys reports whether the buckets belong to more than one key.
func (req Request) severalKeys() bool {
	for i := range req.Buckets {
		if !req.Buckets[i].sameKey(&req.Buckets[0]) {
			return true
		}
	}
	return false
}

// fewBuckets is the largest number of buckets whose keys are compared pairwise. With
// more of them a map is faster.
const fewBuckets = 16

// byKey splits the request into one part for each key.
func (req Request) byKey() []*part {
	if len(req.Buckets) > fewBuckets {
		return req.manyByKey()
	}
	var parts []*part
next:
	for i, b := range req.Buckets {
		for _, p := range parts {
			if !b.Pool && !p.pool && p.Buckets[0].sameKey(&b) {
				p.add(b, i)
				continue next
			}
		}
		parts = append(parts, req.part(b, i))
	}
	return parts
}

// manyByKey is byKey for many buckets.
func (req Request) manyByKey() []*part {
	parts := make([]*part, 0, len(req.Buckets))
	type key struct {
		text   string
		shared bool
	}
	of := make(map[key]*part)
	for i, b := range req.Buckets {
		k := key{b.Key, b.shared}
		p := of[k]
		if p != nil && !b.Pool {
			p.add(b, i)
			continue
		}
		p = req.part(b, i)
		if !b.Pool {
			of[k] = p
		}
		parts = append(parts, p)
	}
	return parts
}

// byBucket splits the request into one part for each bucket. indexes are those of
// its buckets in the whole request.
func (req Request) byBucket(indexes []int) []*part {
	parts := make([]*part, len(req.Buckets))
	for i, b := range req.Buckets {
		parts[i] = req.part(b, indexes[i])
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

// decideSplit decides the parts of req in parallel. Parts that no server decides
// are then decided here, in one step. If charging is atomic, they are charged only
// if no server has denied.
func (r *Redis) decideSplit(end redisscript.Deadline, req Request, parts []*part) ([]outcome, error) {
	pools := slices.DeleteFunc(slices.Clone(parts), func(p *part) bool { return !p.pool })
	parts = slices.DeleteFunc(parts, func(p *part) bool { return p.pool })
	parts = r.holdParts(end, parts)
	outcomes := make([]outcome, len(req.Buckets))
	failed, err := together(parts, outcomes)
	decidesHere := r.fallback != nil && !req.NoFallback
	if len(pools) > 0 && (err == nil || decidesHere) {
		pools = r.holdParts(end, req.poolsNeeded(pools, failed, outcomes))
		poolsFailed, poolsErr := together(pools, outcomes)
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
	at := moment{unix: time.Now().UnixMicro()}
	for _, p := range parts {
		if p.err != nil {
			continue
		}
		held := !p.denied()
		for _, i := range p.indexes { // the levels after settling
			b, o := &req.Buckets[i], &outcomes[i]
			p.unused = o.unused
			if (denied || o.unused) && held && !o.denied && (b.Hold || p.query != nil) && !b.Limit.CountDenied {
				o.held -= b.Cost
				if o.entries != nil { // there was room beside what others hold
					o.entries.again, o.entries.one = 0, 0
				}
			}
			if b.Hold || b.Watches > 0 || p.query == nil {
				continue
			}
			o.ahead = b.Limit.atLeast(o.after(at.now), o.held, at).ahead(at.now)
			if o.entries != nil {
				*o.entries = o.entries.plus(o.held, &b.Limit)
			}
		}
	}
	r.settle(parts, as)
	return outcomes, nil
}

// together puts the outcomes of parts in their places in that of the whole request. It
// returns the parts that no server has decided, and the error of one.
func together(parts []*part, outcomes []outcome) (failed []*part, err error) {
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
func (r *Redis) holdParts(end redisscript.Deadline, parts []*part) []*part {
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() { r.askPart(end, p) })
	}
	wg.Wait()
	all := make([]*part, 0, len(parts))
	for _, p := range parts {
		if len(p.Buckets) > 1 && redisscript.MovingSlot(p.err) {
			r.fallback.drop(p.query)
			all = append(all, r.holdParts(end, p.byBucket(p.indexes))...)
			continue
		}
		all = append(all, p)
	}
	return all
}

// askPart sends one part.
func (r *Redis) askPart(end redisscript.Deadline, p *part) {
	p.query = r.query(p.Request, byte(p.Accounting))
	if p.Accounting == AccountingAtomic {
		p.query.holdAll()
	}
	p.server, p.outcomes, p.err = r.ask(end, p.query, nil)
	if p.err != nil {
		return
	}
	held := p.Accounting == AccountingAtomic && !p.denied() && p.query.holdsAny(p.outcomes)
	r.answered(p.query, p.outcomes, held)
	if held {
		r.fallback.keepBuckets(p.query, (*asked).heldOnly)
	} else {
		p.query.release()
		p.query = nil
	}
}

// decideHere decides the parts that no server has decided. outcomes has those of the
// others, and gets theirs.
func (r *Redis) decideHere(req Request, failed []*part, outcomes []outcome) {
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

// settle settles all units that are held for the parts.
func (r *Redis) settle(parts []*part, as verdict) {
	for _, p := range parts {
		if p.err != nil || p.query == nil {
			continue
		}
		as := as
		if p.unused {
			as = verdictNone
		}
		r.fallback.settle(p.query, as)
		r.settleOn(p.server, p.query)
	}
}

// releaseLate releases units that a server has held for a call that was given up:
// its request was decided here.
func (r *Redis) releaseLate(srv *redisscript.Server, c *redisscript.Call) {
	q := c.Owner.(*query)
	if !q.admitted() {
		return
	}
	outcomes, _, err := q.outcomes(nil)
	if err != nil {
		return
	}
	q.received(outcomes)
	r.fallback.keepBuckets(q, func(p *asked) bool { return p.taken })
	if len(q.buckets) == 0 {
		return
	}
	r.fallback.settle(q, verdictNone)
	r.settleOn(srv, q)
}

// settleOn sends q, which settles units that are held, to the server that holds them or,
// if srv is nil, the one that has their keys.
func (r *Redis) settleOn(srv *redisscript.Server, q *query) {
	until := r.clock() + heldFor
	q.Done = func(err error) { r.afterSettling(q, until, err) }
	if srv != nil {
		srv.Submit(&q.Call)
		return
	}
	end := redisscript.Deadline{At: time.Now().Add(r.timeout)}
	if err := r.client.Submit(end, &q.Call); err != nil { // so it was not sent
		r.settleAgain(q, until, err)
	}
}

// afterSettling handles the result of settling. As long as the units are held and
// it is certain that the server did nothing, it tries again, in the background.
func (r *Redis) afterSettling(q *query, until time.Duration, err error) {
	switch {
	case err == nil:
		r.settled(q)
	case !redisscript.NotRun(err):
		r.leaveToServer(q)
	default:
		r.settleAgain(q, until, err)
	}
}

// settleAgain settles units in the background, after an error that says that the server has
// not. If it is down, what it was to charge is charged here: while it is awaited, nothing of
// that would drip. The server is told of it with the next request for the bucket, so q then
// only lets the units go.
func (r *Redis) settleAgain(q *query, until time.Duration, err error) {
	if r.fallback != nil && !redisscript.Elsewhere(err) {
		r.fallback.charge(q)
		for i := range q.buckets {
			q.buckets[i].held.charge = 0
		}
	}
	go r.settleLater(q, until)
}

// settleLater tries to settle units until they are no longer held.
func (r *Redis) settleLater(q *query, until time.Duration) {
	q.Done = nil
	for {
		time.Sleep(settleEvery)
		if r.closed.Load() || r.clock() >= until {
			r.leaveToServer(q)
			return
		}
		end := redisscript.Deadline{At: time.Now().Add(r.timeout)}
		_, err := r.client.DoAlone(end, &q.Call)
		if err == nil {
			r.settled(q)
			return
		}
		if !redisscript.NotRun(err) {
			r.leaveToServer(q)
			return
		}
	}
}

// settled records the reply to a query that settles units. If they were only let go, the
// fallback has dropped it.
func (r *Redis) settled(q *query) {
	outcomes, _, err := q.outcomes(nil)
	if err != nil {
		r.leaveToServer(q)
		return
	}
	r.fallback.answered(q, outcomes, false)
}

// leaveToServer records that it is unknown whether units are settled. The server
// charges them in the end.
func (r *Redis) leaveToServer(q *query) { r.fallback.charge(q) }
