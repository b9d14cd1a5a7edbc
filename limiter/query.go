package limiter

import (
	"sync"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// query queries a server about the buckets of a request: one group of core.lua, in an
// invocation of its own or in a batch with others. It is encoded when it is sent, and
// again each time that it is.
type query struct {
	redisscript.Call
	what    byte // what to do with the buckets
	buckets []bucketQuery
	account *account // the one that it settles, renews or owes
	number  int64    // of that when it was made
	ahead   int64    // how many units may be leased before there is room for them
	least   int64    // how many are to be leased at least, or none

	// State of the fallback, guarded by its lock.
	server     *redisscript.Server // the server that it was last sent to
	order      uint64              // its number among all queries sent
	stage      stage
	began      uint64    // when it began to count as in flight, see flights
	counted    bool      // whether it does
	holder     *fallback // whose servers count its units as held; nil if none do
	lost       bool      // whether the servers that lead may not know of it: one has restarted since, or it was sent to others
	next, prev *query

	// Memory for Keys and Arg. The next query that reuses q overwrites it.
	names, group []byte
	ends         []int // where each key ends in names
}

// stage is how far a query is.
type stage uint8

const (
	asking    stage = iota // its answer decides
	gathering              // it has not been sent, and its units become more, see report.go
	holding                // its units are held until the request is settled
	owing                  // its units are charged, and its server may not know that yet: it is never sent
	ended                  // nothing follows from its answer: it was given up, or never to decide
)

// bucketQuery is the part of a query about one bucket.
type bucketQuery struct {
	limit bucket.Limit
	cost  int64
	local localLevel // what is reported of it
	held  *heldCost  // if its cost is only held, or it costs nothing and reads what is held

	dryRun  bool  // whether its denial denies nothing
	borrows bool  // whether a pool may have room instead
	pool    bool  // whether it is one
	watches uint8 // how many of the buckets right before this one it watches
	keeps   bool

	// How dirty the bucket is once the server has answered, because of what was
	// decided here while the query was in flight, or others that still are.
	crossed dirtiness
	alone   uint16 // of the table when it was sent, see tableMark

	// For the fallback.
	location        // its location in the memory
	key      string // its Redis key
	maxKeys  int
}

// heldCost is the cost of a bucket that is only held, with what is requested of its account.
type heldCost struct {
	charge      int64        // how many units are charged when they are settled
	reservation *reservation // what holds them
	process     int64
	accountName
	totals
	before        accountName // to renew: the account before
	beforeCharged int64       // and how many units its requests have been charged
}

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

// localLevel is what a query reports about a bucket: its level in this process.
type localLevel struct {
	bucket.Ahead           // its level
	inFlight     int64     // units that are in flight next to it
	dirty        dirtiness // if clean, no level is reported, and inFlight is what has not been reported
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
		if k := req.reservationOf(b); k != nil || b.Hold || b.free() && what <= byte(AccountingEach) {
			q.buckets[i].held = &heldCost{charge: b.Cost, reservation: k}
		}
		from = to
	}
	q.Replies = q.replies()
	return q
}

// text returns b as a string that is b's memory.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// encode makes q's Arg.
func (q *query) encode() {
	q.group = q.appendGroup(q.group[:0])
	q.Arg = text(q.group)
}

// replies returns the number of integers in the reply to q.
func (q *query) replies() int {
	n := 0
	for i := range q.buckets {
		n += q.repliesOf(i)
		if q.buckets[i].limit.KeepsEntries() && q.what != whatRemove {
			n += entriesReplies
		}
	}
	return n
}

// repliesOf returns the number of integers that there are for the i-th bucket, besides
// the entriesReplies that follow for each log.
func (q *query) repliesOf(i int) int {
	switch {
	case q.what == whatRemove:
		return 0
	case q.buckets[i].held != nil || q.what == whatLease || q.what == whatPeek || q.what == whatReset:
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
		from += q.repliesOf(i)
	}
	return charged
}

// release returns q to the pool. Nothing may still refer to it or to its memory.
func (q *query) release() {
	q.Reset()
	queries.Put(q)
}
