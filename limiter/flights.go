package limiter

import (
	"math"
	"math/bits"
	"sync"
)

// spareFlights is a pool of them, so that queries do not allocate.
var spareFlights = sync.Pool{New: func() any { return new(flight) }}

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
	}
	if q.isInDoubt() {
		fl.doubts += n
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

// add adds n, which may be negative.
func (t *total) add(n int64) {
	var carry uint64
	t.low, carry = bits.Add64(t.low, uint64(n), 0)       // two's complement
	t.high, _ = bits.Add64(t.high, uint64(n>>63), carry) // its sign
}

// sub subtracts other, which is not more.
func (t *total) sub(other total) {
	var borrow uint64
	t.low, borrow = bits.Sub64(t.low, other.low, 0)
	t.high, _ = bits.Sub64(t.high, other.high, borrow)
}

// atMost returns t, or most if it is larger.
func (t *total) atMost(most int64) int64 {
	if t.high != 0 || t.low > uint64(most) { // not negative
		return most
	}
	return int64(t.low) // not larger
}

// crossAll records that the answer to q does not include all that is known here.
func (f *fallback) crossAll(q *query) {
	for i := range q.buckets {
		f.flights.cross(q.buckets[i].hash, own)
	}
}

// appendUnits implements inFlight.
func (f *traffic) appendUnits(locations []location, buckets []Bucket, dst []int64) []int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range locations {
		dst = append(dst, f.units(locations[i].hash, buckets[i].Limit.Size))
	}
	return dst
}

// units returns the number of units in flight for a bucket, at most most.
func (f *traffic) units(hash uint64, most int64) int64 {
	fl := f.flights.of[hash]
	if fl == nil {
		return 0
	}
	return fl.units.atMost(most)
}

// costs records that q requests that many units of its one bucket.
func (f *traffic) costs(q *query, n int64) {
	p := &q.buckets[0]
	if q.counted {
		f.flights.of[p.hash].add(q, n-p.cost)
	}
	p.cost = n
}

// lose records that servers which lead may not know of q, which is in flight.
func (f *traffic) lose(q *query) {
	if q.lost {
		return
	}
	q.lost = true
	for i := range q.buckets {
		fl := f.flights.of[q.buckets[i].hash]
		if fl.lost++; q.stage == owing {
			fl.doubts++
		}
	}
}

// failed records that q was not answered, or too late, before its request goes on.
func (f *fallback) failed(q *query) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if q.stage != asking || !q.counted || q.failed {
		return
	}
	q.failed = true
	for i := range q.buckets {
		f.flights.of[q.buckets[i].hash].doubts++
	}
}

// setHolder records whose servers count q's units as held.
func (f *traffic) setHolder(q *query, holder *fallback) {
	p := &q.buckets[0]
	fl := f.flights.of[p.hash]
	fl.add(q, -p.cost)
	q.holder = holder
	fl.add(q, p.cost)
}

// link starts counting q as in flight.
func (f *fallback) link(q *query) {
	q.next = f.inFlight
	if q.next != nil {
		q.next.prev = q
	}
	f.inFlight, q.counted = q, true
	f.memory.queries.Add(1)
	f.flights.begin(q)
}

// unlink stops counting q as in flight, if it does.
func (f *fallback) unlink(q *query) {
	if !q.counted {
		return
	}
	for i := range q.buckets {
		f.flights.leave(q, &q.buckets[i])
	}
	f.memory.queries.Add(-1)
	if q.prev != nil {
		q.prev.next = q.next
	} else {
		f.inFlight = q.next
	}
	if q.next != nil {
		q.next.prev = q.prev
	}
	q.next, q.prev, q.counted = nil, nil, false
}

// sinceReset records that units were charged to a bucket, which its server may be emptying.
func (f *traffic) sinceReset(hash uint64, units int64) {
	for _, x := range f.resets {
		if x.hash == hash {
			x.units = min(x.units+min(units, MaxUnits), MaxUnits)
		}
	}
}
