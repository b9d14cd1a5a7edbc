package limiter

import (
	"math"
	"math/bits"
	"sync"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// flights counts what is in flight for each bucket. None of its methods takes longer when
// more is in flight: each finds one bucket, and reads or changes what is counted there.
type flights struct {
	of   map[uint64]*flight // by the hash of the bucket
	last uint64             // number of the last event: a query that set out, or something that met those in flight
}

// spareFlights is a pool of them, so that queries do not allocate.
var spareFlights = sync.Pool{New: func() any { return new(flight) }}

// flight is what is in flight for one bucket. A query counts once for each time that it
// queries the bucket.
type flight struct {
	queries   int // how many there are
	gathering int // how many of them have not been sent, see report.go

	units  total       // of all
	held   []heldTotal // of those that the servers of a fallback count as held themselves
	unsent total       // of those that have not been sent

	lost      int // queries of which the servers that lead may not know
	doubts    int // how many of them owe what a server may have charged
	reporting int // queries that report a level

	crossed [own + 1]meeting // when something was last decided here that made the bucket as dirty as that
	emptied meeting          // when it was last emptied, and the queries that report what it held before

	latest latest
}

// latest is the newest answer about a bucket since something has been in flight for it. All
// others before that were read before what is in flight set out.
type latest struct {
	server *redisscript.Server
	order  uint64 // of the query that it answers, see query
	by     uint64 // number of queries sent when it was read
}

// isBefore reports whether the answer to q is newer, and is the latest now. A server answers
// in the order in which it was queried. Another server's answer is newer if q was sent after the
// latest had been read.
func (a *latest) isBefore(q *query, sent uint64) bool {
	if q.order <= a.by && (q.server != a.server || q.order < a.order) {
		return false
	}
	*a = latest{q.server, q.order, sent}
	return true
}

// meeting counts the queries that were in flight at a moment and still are.
type meeting struct {
	at   uint64 // number of the event
	left int
}

// unsent is when a query begins that has not been sent: nothing meets it.
const unsent = math.MaxUint64

// met reports whether q was in flight then.
func (m *meeting) met(q *query) bool { return q.began < m.at }

// begin has q set out now.
func (x *flights) begin(q *query) {
	x.last++
	if q.began = x.last; q.stage == gathering {
		q.began = unsent
	}
	for i := range q.buckets {
		x.enter(q, &q.buckets[i])
	}
}

// enter counts one of q's buckets.
func (x *flights) enter(q *query, p *bucketQuery) {
	fl := x.of[p.hash]
	if fl == nil {
		fl = spareFlights.Get().(*flight)
		if x.of == nil {
			x.of = make(map[uint64]*flight)
		}
		x.of[p.hash] = fl
	}
	fl.count(q, p, 1)
}

// leave stops counting one of q's buckets.
func (x *flights) leave(q *query, p *bucketQuery) {
	fl := x.of[p.hash]
	if fl.count(q, p, -1); fl.queries > 0 {
		return
	}
	delete(x.of, p.hash)
	clear(fl.held)
	*fl = flight{held: fl.held[:0]}
	spareFlights.Put(fl)
}

// count adds one of q's buckets n times.
func (fl *flight) count(q *query, p *bucketQuery, n int) {
	if fl.queries += n; q.began == unsent {
		fl.gathering += n
	}
	if q.account == nil || q.stage == owing { // otherwise its units belong to other queries, see ledger.go
		fl.add(q, int64(n)*p.cost)
	}
	if q.lost {
		fl.lost += n
		if q.stage == owing {
			fl.doubts += n
		}
	}
	for as := range fl.crossed {
		if m := &fl.crossed[as]; n < 0 && m.met(q) {
			m.left--
		}
	}
	if p.local.dirty != clean {
		fl.reporting += n
		if n < 0 && fl.emptied.met(q) {
			fl.emptied.left--
		}
	}
}

// add adds n units of q.
func (fl *flight) add(q *query, n int64) {
	if fl.units.add(n); q.began == unsent {
		fl.unsent.add(n)
	}
	if q.holder != nil {
		fl.heldBy(q.holder).add(n)
	}
}

// heldBy returns the total of what the servers of f count as held, in the accounts of its store.
func (fl *flight) heldBy(f *fallback) *total {
	for i := range fl.held {
		if fl.held[i].by == f {
			return &fl.held[i].total
		}
	}
	fl.held = append(fl.held, heldTotal{by: f})
	return &fl.held[len(fl.held)-1].total
}

// unitsOfOthers returns the number of units in flight, at most most, except for those that the
// servers of f count as held: in any account or, if f's servers find its own account, in others.
func (fl *flight) unitsOfOthers(f *fallback, ownAccount bool, most int64) int64 {
	n := fl.units
	for i := range fl.held {
		if h := &fl.held[i]; h.by.location == f.location && (!ownAccount || h.by != f) {
			n.sub(h.total)
		}
	}
	return n.atMost(most)
}

// cross records that something was decided here on a bucket, which made it as dirty as
// that: the answers to queries in flight do not include it.
func (x *flights) cross(hash uint64, as dirtiness) {
	if fl := x.of[hash]; fl != nil {
		x.last++
		fl.crossed[as] = meeting{x.last, fl.queries - fl.gathering}
	}
}

// empty records that a bucket was emptied, and what was decided on it before.
func (x *flights) empty(hash uint64) {
	if fl := x.of[hash]; fl != nil {
		x.cross(hash, behind)
		fl.emptied = meeting{x.last, fl.reporting}
	}
}

// crossedBy returns how dirty a bucket is once q has been answered, because of what was
// decided here while q was in flight.
func (fl *flight) crossedBy(q *query) dirtiness {
	as := own
	for as > clean && !fl.crossed[as].met(q) {
		as--
	}
	return as
}

// crossedByOthers returns how dirty the bucket stays when q is answered, because of other
// queries about it that are still in flight. Of one that was sent before something was
// decided here, the server may know what this process does not, next to what q reported of
// that, and the higher of the two levels is less than both.
func (fl *flight) crossedByOthers(q *query, hash uint64) dirtiness {
	as := own
	for as > clean && fl.crossed[as].left <= fl.crossed[as].times(q, hash) {
		as--
	}
	return as
}

// times returns how often m counts q, which queries the bucket with that hash.
func (m *meeting) times(q *query, hash uint64) (n int) {
	if m.left == 0 || !m.met(q) {
		return 0
	}
	for i := range q.buckets { // two keys of a request may share a bucket
		if q.buckets[i].hash == hash {
			n++
		}
	}
	return n
}

// heldTotal is a total of the units that the servers of a fallback hold.
type heldTotal struct {
	by *fallback
	total
}

// total is a sum of units, which is larger than an int64 if many requests request many.
type total struct{ high, low uint64 }

// add adds n, which may be negative.
func (t *total) add(n int64) {
	var carry uint64
	t.low, carry = bits.Add64(t.low, uint64(n), 0)       //nolint:gosec // two's complement
	t.high, _ = bits.Add64(t.high, uint64(n>>63), carry) //nolint:gosec // its sign
}

// sub subtracts other, which is not more.
func (t *total) sub(other total) {
	var borrow uint64
	t.low, borrow = bits.Sub64(t.low, other.low, 0)
	t.high, _ = bits.Sub64(t.high, other.high, borrow)
}

// atMost returns t, or most if it is larger.
func (t *total) atMost(most int64) int64 {
	if t.high != 0 || t.low > uint64(most) { //nolint:gosec // not negative
		return most
	}
	return int64(t.low) //nolint:gosec // not larger
}
