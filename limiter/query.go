package limiter

import (
	"sync"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// query asks a server about the buckets of a request: one group of core.lua, in an
// invocation of its own or in a batch with others. It is encoded when it is sent, and
// anew each time that it is.
type query struct {
	redisscript.Call
	what    byte // what to do with the buckets
	buckets []asked

	// State of the fallback, guarded by its lock.
	server          *redisscript.Server // the server that it was last sent to
	order           uint64              // its number among all queries sent
	counted         bool                // whether it counts as in flight
	abandoned       bool                // whether nothing is decided by its answer: it was given up, or never to decide
	holdsUnits      bool                // whether a server holds its units
	countsRelease   bool                // whether its request, when its units are released, counts as a denied one
	serverRestarted bool                // whether a server has restarted since it was sent
	next, prev      *query

	// Memory for Keys and Arg. The next query that reuses q overwrites it.
	names, group []byte
	ends         []int // where each key ends in names
}

// asked is what a query asks about one bucket.
type asked struct {
	limit Limit
	cost  int64
	till  int64     // until when its units are held, if they are to be settled
	told  toldLevel // what the server is told of it

	// For the fallback.
	place          // its location in the memory
	key     string // its Redis key
	maxKeys int
	keeps   bool
	emptied bool // the bucket was reset while it was in flight

	// How dirty the bucket is once the server has answered, because of what was
	// decided here while the query was in flight.
	crossed dirtiness
}

// toldLevel is what a query tells a server about a bucket.
type toldLevel struct {
	ahead              // its level
	inFlight int64     // units that are in flight beside it
	dirty    dirtiness // if clean, nothing is told
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
	q.what, q.abandoned, q.holdsUnits, q.countsRelease = what, false, false, false
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
		q.buckets = append(q.buckets, asked{limit: b.Limit, cost: b.Cost, key: names[from:to], maxKeys: b.MaxKeys, keeps: b.keeps()})
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
	n := repliesEach(q.what) * len(q.Keys)
	for i := range q.buckets {
		if q.buckets[i].limit.logs() && q.what != whatRemove {
			n += logReplies
		}
	}
	return n
}

// tells reports whether q tells a level of any of its buckets.
func (q *query) tells() bool {
	for i := range q.buckets { // without a copy, since others may be changing its other fields
		if q.buckets[i].told.dirty != clean {
			return true
		}
	}
	return false
}

// settles reports whether q settles units that are held.
func (q *query) settles() bool { return q.what == whatCommit || q.what == whatRelease }

// settle turns q, whose units are held, into the query that settles them.
func (q *query) settle(what byte, held []outcome) {
	q.what = what
	for i := range held {
		q.buckets[i].till = held[i].till
	}
	q.Replies = q.replies()
}

// wrote reports whether the reply to q shows that the server has written: that is so if
// no bucket denied.
func (q *query) wrote() bool {
	if len(q.Reply) == 0 || q.what > whatHold {
		return false
	}
	each := repliesEach(q.what)
	for i := range q.Keys {
		if q.Reply[each*i+1] < 0 {
			return false
		}
	}
	return true
}

// release returns q to the pool. Nothing may still refer to it or to its memory.
func (q *query) release() {
	q.Reset()
	queries.Put(q)
}
