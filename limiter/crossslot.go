package limiter

import (
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// In a cluster, the buckets of a request may be in several slots, and no call can
// have keys in two slots. Then the request is decided in parts: one for each key,
// or one for each bucket while a slot is being moved. To charge all buckets or
// none, each part first holds its units: held units take room beside what the
// bucket holds, but do not drip. Once all parts have been answered, the held units
// are committed or released, or committed all the same where denied requests count.
// Nothing is ever taken out of a bucket again, because nobody could tell how much of
// it has dripped meanwhile.
//
// The second step is asynchronous: it is sent with the next batch. If it never
// arrives, the server charges the held units after heldFor.

// heldFor is the time for which a server holds units, see core.lua.
const heldFor = 10 * time.Second

// settleEvery is the time between two attempts to settle held units.
const settleEvery = 250 * time.Millisecond

// part is a subset of a request's buckets that is decided in one call.
type part struct {
	Request
	indexes []int // the indexes of its buckets in the whole request

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
			if p.Buckets[0].sameKey(&b) {
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
		if p != nil {
			p.add(b, i)
			continue
		}
		p = req.part(b, i)
		of[k] = p
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

// part returns a part of the request with one bucket.
func (req Request) part(b Bucket, index int) *part {
	p := &part{Request: req}
	p.Buckets = nil
	p.add(b, index)
	return p
}

// add adds a bucket to the part.
func (p *part) add(b Bucket, index int) {
	p.Buckets = append(p.Buckets, b)
	p.indexes = append(p.indexes, index)
}

// denied reports whether any of the part's buckets denied.
func (p *part) denied() bool {
	for i := range p.outcomes {
		if p.outcomes[i].denied {
			return true
		}
	}
	return false
}

// decideSplit decides the parts of req in parallel. Parts that no server decides
// are then decided here, in one step. If charging is atomic, they are charged only
// if no server has denied.
func (r *Redis) decideSplit(end redisscript.Deadline, req Request, parts []*part) ([]outcome, error) {
	parts = r.holdParts(end, req, parts)
	outcomes := make([]outcome, len(req.Buckets))
	var failed []*part
	var err error
	denied := false
	for _, p := range parts {
		if p.err != nil {
			failed, err = append(failed, p), p.err
			continue
		}
		denied = denied || p.denied()
		for j, o := range p.outcomes {
			outcomes[p.indexes[j]] = o
		}
	}
	if err != nil && (r.fallback == nil || req.NoFallback) {
		r.settle(parts, whatRelease)
		for _, p := range failed {
			r.fallback.drop(p.query)
		}
		return nil, err
	}
	if err != nil {
		denied = r.decideHere(req, failed, denied, outcomes)
	}
	what := byte(whatCommit)
	if denied {
		what = whatRelease
	}
	at := moment{unix: time.Now().UnixMicro()}
	for _, p := range parts {
		if p.query == nil || p.err != nil {
			continue
		}
		p.query.countsRelease = true
		for _, i := range p.indexes { // the levels after settling
			b, o := &req.Buckets[i], &outcomes[i]
			if denied && !b.Limit.CountDenied {
				o.held -= b.Cost
			}
			o.ahead = b.Limit.atLeast(o.after(at.now), o.held, at).ahead(at.now)
			if o.log != nil {
				*o.log = o.log.plus(o.held, &b.Limit)
			}
		}
	}
	r.settle(parts, what)
	return outcomes, nil
}

// holdParts sends all parts of req and returns them with their results. It returns
// more parts if a slot is being moved.
func (r *Redis) holdParts(end redisscript.Deadline, req Request, parts []*part) []*part {
	what := byte(whatHold)
	if req.Accounting == AccountingEach {
		what = byte(AccountingEach)
	}
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() { r.askPart(end, p, what) })
	}
	wg.Wait()
	all := make([]*part, 0, len(parts))
	for _, p := range parts {
		if len(p.Buckets) > 1 && redisscript.MovingSlot(p.err) {
			r.fallback.drop(p.query)
			all = append(all, r.holdParts(end, req, p.byBucket(p.indexes))...)
			continue
		}
		all = append(all, p)
	}
	return all
}

// askPart sends one part.
func (r *Redis) askPart(end redisscript.Deadline, p *part, what byte) {
	p.query = r.query(p.Request, what)
	p.server, p.outcomes, p.err = r.ask(end, p.Request, p.query, nil)
	if p.err != nil {
		return
	}
	if what == whatHold && !p.denied() {
		r.fallback.answered(p.query, p.outcomes, true)
		return
	}
	r.fallback.answered(p.query, p.outcomes, false)
	p.query.release()
	p.query = nil
}

// decideHere decides the parts that no server has decided, and reports whether the
// request is denied.
func (r *Redis) decideHere(req Request, failed []*part, denied bool, outcomes []outcome) bool {
	here := req
	here.Buckets = nil
	var indexes []int
	instead := make([]*query, 0, len(failed))
	for _, p := range failed {
		here.Buckets = append(here.Buckets, p.Buckets...)
		indexes = append(indexes, p.indexes...)
		instead = append(instead, p.query)
	}
	peek := denied && req.Accounting == AccountingAtomic
	for i, o := range r.fallback.decide(here, nil, peek, instead...) {
		outcomes[indexes[i]] = o
		denied = denied || o.denied
	}
	return denied
}

// settle commits or releases all units that are held for the parts.
func (r *Redis) settle(parts []*part, what byte) {
	for _, p := range parts {
		if p.err != nil || p.query == nil {
			continue
		}
		if what == whatRelease {
			// Held units that are released are not an admission by this process.
			r.fallback.drop(p.query)
		}
		r.settleOn(p.server, p.query, what, p.outcomes)
	}
}

// releaseLate releases units that a server has held for a call that was given up:
// its request was decided here.
func (r *Redis) releaseLate(srv *redisscript.Server, c *redisscript.Call) {
	q := c.Owner.(*query)
	if q.what != whatHold || !q.wrote() {
		return
	}
	held := make([]outcome, len(q.Keys))
	for i := range held {
		held[i].till = q.Reply[4*i+3]
	}
	r.settleOn(srv, q, whatRelease, held)
}

// settleOn commits or releases the units that are held for q.
func (r *Redis) settleOn(srv *redisscript.Server, q *query, what byte, held []outcome) {
	until := r.clock() + heldFor
	q.settle(what, held)
	q.Done = func(err error) { r.afterSettling(q, what, until, err) }
	srv.Submit(&q.Call)
}

// afterSettling handles the result of settling. As long as the units are held and
// it is certain that the server did nothing, it tries again.
func (r *Redis) afterSettling(q *query, what byte, until time.Duration, err error) {
	switch {
	case err == nil:
		r.settled(q, what)
	case !redisscript.NotRun(err):
		r.leaveToServer(q, what)
	default:
		go r.settleLater(q, what, until)
	}
}

// settleLater tries to settle units until they are no longer held.
func (r *Redis) settleLater(q *query, what byte, until time.Duration) {
	q.Done = nil
	for {
		time.Sleep(settleEvery)
		if r.closed.Load() || r.clock() >= until {
			r.leaveToServer(q, what)
			return
		}
		end := redisscript.Deadline{At: time.Now().Add(r.timeout)}
		_, err := r.client.DoAlone(end, &q.Call)
		if err == nil {
			r.settled(q, what)
			return
		}
		if !redisscript.NotRun(err) {
			r.leaveToServer(q, what)
			return
		}
	}
}

// settled records the reply to a query that settles units.
func (r *Redis) settled(q *query, what byte) {
	if what != whatCommit || r.fallback == nil {
		return
	}
	outcomes, err := settledOutcomes(q)
	if err != nil {
		r.leaveToServer(q, what)
		return
	}
	r.fallback.answered(q, outcomes, false)
}

// leaveToServer records that it is unknown whether units are settled. The server
// charges them in the end.
func (r *Redis) leaveToServer(q *query, what byte) {
	if what == whatCommit {
		r.fallback.charge(q)
	}
}

// settledOutcomes returns the outcomes in the reply to a query that settles units.
func settledOutcomes(q *query) ([]outcome, error) {
	req := Request{Buckets: make([]Bucket, len(q.buckets))}
	for i := range q.buckets {
		req.Buckets[i].Limit = q.buckets[i].limit
	}
	outcomes, _, err := req.outcomes(q.Reply, q.what, nil)
	return outcomes, err
}
