package limiter

import (
	"sync"
	"unsafe"
)

// charge returns what a server charges a request that is admitted, now or when the units
// are settled.
func (p *bucketQuery) charge() int64 {
	if p.watches > 0 {
		return 0
	}
	if p.held != nil {
		return p.held.charge
	}
	return p.cost
}

// reservation returns what is held until the request is settled, or nil.
func (p *bucketQuery) reservation() *reservation {
	if p.held == nil {
		return nil
	}
	return p.held.reservation
}

// queries is a pool of queries, which keep their memory.
var queries = sync.Pool{New: func() any {
	q := new(query)
	q.Owner = q
	return q
}}

// query returns a query about req.
func (k keys) query(req Request, what byte) *query {
	q := queries.Get().(*query)
	q.what, q.stage, q.ahead, q.lost, q.holder, q.account = what, asking, 0, false, nil, nil
	q.failed = false
	q.names, q.ends, q.Keys, q.buckets = q.names[:0], q.ends[:0], q.Keys[:0], q.buckets[:0]
	var slot []byte // the part of the last name that buckets of one key have in common
	for i := range req.Buckets {
		b, from := &req.Buckets[i], len(q.names)
		if i > 0 && b.sameKey(&req.Buckets[i-1]) {
			q.names = append(q.names, slot...)
		} else {
			q.names = k.appendSlot(q.names, b)
		}
		slot = q.names[from:]
		q.names = b.appendRest(q.names)
		q.ends = append(q.ends, len(q.names))
	}
	names, from := text(q.names), 0
	for i, to := range q.ends {
		b := &req.Buckets[i]
		q.Keys = append(q.Keys, names[from:to])
		q.buckets = append(q.buckets, bucketQuery{
			limit: *b.Limit.of(), cost: b.Cost, dryRun: b.DryRun, borrows: b.Borrows, pool: b.Pool, watches: b.Watches,
			key: names[from:to], maxKeys: b.MaxKeys, keeps: b.keeps(),
		})
		if k := req.newReservation(b); k != nil || b.Hold || b.free() && what <= byte(AccountingEach) {
			q.buckets[i].held = &heldCost{charge: b.Cost, reservation: k}
		}
		from = to
	}
	q.Replies = q.replies()
	return q
}

// text returns b as a string that is b's memory.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// replies returns the number of integers in the reply to q.
func (q *query) replies() int {
	n := 0
	for i := range q.buckets {
		n += q.replyCount(i)
		if q.buckets[i].limit.KeepsEntries() && q.what != whatRemove {
			n += entriesReplies
		}
	}
	return n
}

// replyCount returns the number of integers that there are for the i-th bucket, besides
// the entriesReplies that follow for each log.
func (q *query) replyCount(i int) int {
	switch {
	case q.what == whatRemove:
		return 0
	case q.buckets[i].held != nil || q.what == whatLease || q.what >= whatPeek:
		return 4
	}
	return 2
}

// reports returns whether q reports a level, or what is in flight, of any of its buckets.
func (q *query) reports() bool {
	for i := range q.buckets { // without a copy, since others may be changing its other fields
		if t := &q.buckets[i].local; t.dirty != clean || t.inFlight > 0 {
			return true
		}
	}
	return false
}

// isInDoubt reports whether a server may have charged what q owes, or what its request is yet to be
// charged here.
func (q *query) isInDoubt() bool { return q.failed || q.lost && q.stage == owing }

// holds reports whether a server that has admitted a request holds units of p's bucket,
// by its outcome.
func (p *bucketQuery) holds(o *outcome) bool { return p.held != nil && !o.denied && !o.unused }

// denied reports whether outcomes, which answer q, deny it.
func (q *query) denied(outcomes []outcome) bool {
	var pools lending
	for i := range outcomes {
		p := &q.buckets[i]
		if denies, _ := pools.next(p.borrows, p.pool, !outcomes[i].denied); denies && !p.dryRun {
			return true
		}
	}
	return false
}

// wrote reports whether the reply to q shows that the server has written: that is so if
// every bucket had room, and any was charged.
func (q *query) wrote() bool {
	if len(q.Reply) == 0 || q.what > byte(AccountingEach) {
		return false
	}
	from, charged := 0, false
	for i := range q.buckets {
		p := &q.buckets[i]
		if q.Reply[from+1] < 0 {
			return false
		}
		charged = charged || p.cost > 0 && !p.pool && p.watches == 0
		from += q.replyCount(i)
	}
	return charged
}

// release returns q to the pool. Nothing may still refer to it or to its memory.
func (q *query) release() {
	q.Reset()
	queries.Put(q)
}

// newReservation returns what a Redis store knows of the units that are held of b, or nil.
func (req *Request) newReservation(b *Bucket) *reservation {
	if b.reservedAs == 0 {
		return nil
	}
	return req.Held.reservations[b.reservedAs-1]
}

// query returns the query that has a server decide req.
func (r *servers) query(req Request, what byte) *query {
	q := r.keys.query(req, what)
	if r.fallback != nil {
		q.locate(r.fallback.memory, req)
	}
	return q
}

// locate finds the buckets of q, which is about req, in the memory of the fallback.
func (q *query) locate(m *Memory, req Request) {
	key := uint64(0)
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if i == 0 || b.Key != req.Buckets[i-1].Key {
			key = m.key.sum(b.Key)
		}
		m.find(&q.buckets[i].location, b, key)
		q.buckets[i].partition.sized(b.Limit.Size)
	}
}

// What core.lua can do with a request's buckets, besides the values of Accounting.
const (
	whatSettle = 2
	whatRenew  = 3
	whatLease  = 4
	whatReport = 5
	whatProbe  = 6
	whatRemove = 7 // see removals
	whatPeek   = 8
	whatReset  = 9
	whatClear  = 10
)

// entriesReplies is the number of integers in a reply that are a entriesLevel.
const entriesReplies = 4
