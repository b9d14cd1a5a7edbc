package limiter

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// fallback decides requests in this process while their server is unavailable,
// such that one process alone never admits more than its buckets allow, whatever
// the server answers, and when, and whatever it has lost. With several processes,
// each knows only what it has admitted itself and what the server has reported.
//
// The memory holds each bucket's level as this process knows it: never less than
// the server last reported. Every admission of this process is either in that
// level or in flight. It follows that:
//
//   - A request that is decided here must fit beside the level and everything in
//     flight. It makes the bucket dirty: the server does not know of it. So does a
//     denial, because the server may have lost what the bucket was full of. All
//     buckets become dirty when a server is found to have restarted.
//   - All buckets become dirty when something is first sent to a store that keeps
//     its buckets in another place than the one before, see takeLead.
//   - A request for a dirty bucket tells the server the level that the bucket holds, and
//     how many units are in flight beside it, for which there must be room too. If nothing
//     was decided here, both sides know the same charges, and their times differ only by
//     network delay.
//   - The answer makes the bucket clean, unless something was decided here while
//     the request was in flight: then the charge is added to the level here.
//   - A query that was given up is no longer in flight. A late answer to it changes
//     nothing.
//   - An answer that is newer than all others for a clean bucket (see trace) is
//     authoritative, even if its level is lower: then somebody has deleted the key,
//     or Redis has.
//   - A bucket that the memory evicts is gone, even if a server knew of it; it is
//     removed from the server too, see removals.
type fallback struct {
	*traffic
	memory     *Memory
	timeout    time.Duration // how late an answer may arrive
	place      string        // identifies where the servers keep the buckets
	generation int           // its number among the memory's fallbacks

	removals removals

	// moved returns how many of the units that the memory holds servers hold too.
	moved func(*asked) int64
}

// traffic tracks the requests in flight of all fallbacks that share a memory.
// While one store replaces another, there are two.
type traffic struct {
	// Held while a query starts or stops being in flight and while something is
	// decided here, so that each sees the other. The memory's table locks are
	// taken while holding it.
	mu        sync.Mutex
	inFlight  *query       // the latest one; the head of a list
	queries   atomic.Int64 // how many there are
	lost      int          // how many of them the servers that lead may not know of, see query
	marks     [marks]int32 // number of buckets in flight by the end of their hash
	sent      uint64       // number of queries sent
	traces    [traces]trace
	fallbacks int // number of fallbacks ever made
}

// newFallback returns a fallback to m for servers that may answer late by up to
// timeout, and keep their buckets in the given place.
func newFallback(m *Memory, timeout time.Duration, place string) *fallback {
	m.traffic.mu.Lock()
	defer m.traffic.mu.Unlock()
	m.traffic.fallbacks++
	return &fallback{traffic: m.traffic, memory: m, timeout: timeout, place: place, generation: m.traffic.fallbacks}
}

// close records that nothing more will be sent to f's servers.
func (f *fallback) close() {
	if f != nil {
		f.memory.leader.CompareAndSwap(f, nil)
	}
}

// takeLead reports whether a bucket may be marked clean when f's servers know its
// level. That is so for the newest fallback that has sent something, which leads,
// and others with the same place. When the lead changes, the new servers know
// nothing of what others were sent or of what was decided by the Memory alone, so
// buckets become dirty.
func (f *fallback) takeLead() bool {
	leader := f.memory.leader.Load()
	switch {
	case leader == f:
		return true
	case leader == nil:
		f.memory.markAllDirty(own)
	case leader.generation > f.generation:
		return leader.place == f.place
	case leader.place != f.place:
		f.memory.markAllDirty(own)
	}
	f.memory.leader.Store(f)
	if leader == nil || leader.place != f.place {
		for q := f.inFlight; q != nil; q = q.next {
			q.cross()
			if q.stage == keeping && !q.buckets[0].held.kept.known(f.place) {
				f.lose(q)
			}
		}
	}
	return true
}

// hasLead reports what takeLead would, without taking the lead.
func (f *fallback) hasLead() bool {
	leader := f.memory.leader.Load()
	return leader == f || leader != nil && leader.place == f.place
}

// cross records that q's answer does not include all that is known here.
func (q *query) cross() {
	for i := range q.buckets {
		q.buckets[i].crossed = own
	}
}

// trace finds out which answers are newer than others. A query that was sent after
// another one's answer had arrived was decided after that one. So if no other
// answer has arrived since a query was sent, its own answer is the newest.
//
// For a bucket that several concurrent requests always ask about, no answer meets
// that condition. But among the answers that arrive after a given moment, the
// highest level is up to date as soon as one of their queries was sent after that
// moment.
type trace struct {
	last uint64 // number of queries sent when the last answer arrived

	hash    uint64 // the bucket whose answers are being compared
	since   uint64 // number of queries sent when that began
	highest level  // the highest level reported since
}

// marks is the number of counters that show whether anything is in flight for a
// bucket. Searching all queries in flight would delay every request when there are
// many.
const marks = 1 << 14

// mark adds n to the counters of q's buckets.
func (f *fallback) mark(q *query, n int32) {
	for i := range q.buckets {
		f.marks[q.buckets[i].hash%marks] += n
	}
}

// traces is the number of traces. Buckets whose hashes collide share one.
const traces = 1024

// locate finds the buckets of q, the query about req, in the memory.
func (f *fallback) locate(req Request, q *query) {
	key := uint64(0)
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if i == 0 || b.Key != req.Buckets[i-1].Key {
			key = maphash.String(f.memory.seed, b.Key)
		}
		f.memory.find(&q.buckets[i].place, b, key)
		q.buckets[i].partition.sized(b.Limit.Size)
	}
}

// send records that a batch is about to be sent to a server. It adds the levels of
// dirty buckets to the queries that ask about them.
func (f *fallback) send(to *redisscript.Server, batch []*redisscript.Call) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	leads := f.takeLead()
	dirty := f.memory.anyDirty() || f.lost > 0 || f.memory.holding.buckets.Load() > 0
	for _, c := range batch {
		q := c.Owner.(*query)
		f.unlink(q) // it may have been sent to another server before
		f.sent++
		q.order, q.server, q.lost = f.sent, to, false
		if q.what == whatRemove {
			continue // what it tells is what is removed
		}
		for i := range q.buckets {
			p := &q.buckets[i]
			p.told, p.crossed, p.emptied = toldLevel{}, clean, false
			if dirty && q.stage != ended {
				p.told = f.toldOf(p)
			}
		}
		if q.stage == ended {
			continue
		}
		f.link(q)
		if !leads {
			q.cross()
		}
	}
}

// toldOf returns what a server is to be told of p's bucket.
func (f *fallback) toldOf(p *asked) toldLevel {
	now := f.memory.clock().Microseconds()
	s, dirty := f.memory.dirty(&p.place, now)
	if dirty == clean {
		// The answer to a request that was admitted before a server restarted
		// may still be in flight, and requests hold units that other servers, or this
		// process alone, have admitted.
		if !f.anyLost(p.hash) && f.heldHere(p) == 0 {
			return toldLevel{}
		}
		dirty = own
	}
	told, drained := p.limit.by().arriving(&p.limit, s.ahead(now), f.timeout.Microseconds())
	if drained && dirty == unsure {
		return toldLevel{}
	}
	beside := f.units(p.hash, p.limit.Size, f.place)
	return toldLevel{told, min(beside+f.heldHere(p), p.limit.Size), dirty}
}

// heldHere returns how many units of p's bucket the memory holds, and no server.
func (f *fallback) heldHere(p *asked) int64 {
	n := f.memory.holding.of(p.hash)
	if n > 0 && f.moved != nil {
		n = max(n-f.moved(p), 0)
	}
	return n
}

// units returns the number of units in flight for a bucket, at most most. It leaves out
// those that servers in the given place count as held.
func (f *traffic) units(hash uint64, most int64, place string) int64 {
	if f.marks[hash%marks] == 0 {
		return 0
	}
	units := int64(0)
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if p := &q.buckets[i]; p.hash == hash && (q.stage != keeping || !p.held.kept.known(place)) {
				if p.cost >= most-units {
					return most
				}
				units += p.cost
			}
		}
	}
	return units
}

// answered records what a server has decided on q. What it holds for q stays in flight until
// it is settled.
func (f *fallback) answered(q *query, outcomes []outcome) {
	if f == nil {
		return
	}
	admitted := !q.denied(outcomes)
	f.mu.Lock()
	if q.stage == ended { // the levels here already include what it may have been charged
		f.mu.Unlock()
		return
	}
	if !f.hasLead() {
		q.cross()
	}
	now := f.memory.clock().Microseconds()
	decides := q.what != whatSettle && q.what != whatRenew
	for i := range outcomes {
		o, p := &outcomes[i], &q.buckets[i]
		if k := p.kept(); k != nil && decides && admitted && !o.denied && !o.unused {
			if q.lost { // since its server has restarted
				k.renewNow()
			}
			f.keep(k, q.server)
		}
		charged := !o.denied && !o.unused && (admitted || q.what != byte(AccountingAtomic) && !p.pool) && p.crossed >= behind &&
			p.charge() > 0 && (p.held == nil || !decides)
		p.crossed = max(p.crossed, f.crossedBeside(q, p.hash, now))
		s, newest := level{}, false
		if !p.emptied && !o.blocked { // or the level may be from before that, or include units that are only held
			s, newest = f.newest(q.order, p, o.after(now), now)
		}
		f.memory.follow(p, s, f.timeout, newest, charged, now)
		if charged { // the servers of other queries in flight may not know of this charge
			f.cross(p.hash, behind)
		}
	}
	for i := range q.buckets {
		f.traces[q.buckets[i].hash%traces].last = f.sent
	}
	q.stage = ended
	f.unlink(q)
	f.mu.Unlock()
	f.memory.sweep(now)
}

// charged records how much a server has charged q's one bucket, which it was not told.
func (f *fallback) charged(q *query, n int64) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	q.buckets[0].cost = n
}

// newest reports whether an answer is the newest for p's bucket, and if so returns
// its level. The answer is to the query with the given order and reported level s.
func (f *fallback) newest(order uint64, p *asked, s level, now int64) (level, bool) {
	t := &f.traces[p.hash%traces]
	newest := order > t.last
	if !newest && p.hash == t.hash {
		if t.highest.clear <= now {
			t.highest = s
		} else if s.clear > now {
			t.highest = p.limit.join(t.highest, s, f.timeout, false)
		}
		if newest = order > t.since; newest {
			s = t.highest
		}
	}
	if newest || p.hash != t.hash {
		t.hash, t.since, t.highest = p.hash, f.sent, level{}
	}
	return s, newest
}

// drop records that queries were given up and admit nothing.
func (f *fallback) drop(queries ...*query) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range queries {
		f.unlink(q)
		q.stage = ended
	}
}

// lose records that servers which lead may not know of q, which is in flight.
func (f *traffic) lose(q *query) {
	if !q.lost {
		q.lost = true
		f.lost++
	}
}

// anyLost reports whether the servers that lead may not know of units in flight for a
// bucket.
func (f *fallback) anyLost(hash uint64) bool {
	if f.lost == 0 || f.marks[hash%marks] == 0 {
		return false
	}
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if q.lost && q.buckets[i].hash == hash {
				return true
			}
		}
	}
	return false
}

// decide decides req here, in place of the given queries, which are given up. It
// appends to dst. If the request is denied elsewhere and charging is atomic, this only
// reports what would be decided, and counts it where that is wanted.
func (f *fallback) decide(req Request, dst []outcome, denied bool, instead ...*query) []outcome {
	f.drop(instead...)
	f.mu.Lock()
	defer f.mu.Unlock()
	w := scratches.Get().(*scratch)
	defer w.release()
	for i := range req.Buckets {
		b := &req.Buckets[i]
		partition, hash := f.memory.locate(b)
		partition.sized(b.Limit.Size)
		w.inFlight = append(w.inFlight, f.units(hash, b.Limit.Size, ""))
	}
	before, peek := len(dst), denied && req.Accounting == AccountingAtomic
	dst = f.memory.take(w, req, dst, &standIn{inFlight: w.inFlight, late: f.timeout, denied: denied, peek: peek})
	denied = denied || req.denied(dst[before:])
	for i := range dst[before:] {
		o, b := &dst[before+i], &req.Buckets[i]
		o.by = DecidedByFallback
		// A bucket that had room, but was not charged because another denied, is
		// unchanged.
		as := behind
		switch {
		case o.unused:
			continue
		case b.Hold && !denied && !o.denied:
			k := req.keptOf(b)
			k.store.tabs.decidedHere(k)
			f.keep(k, nil)
			continue
		case b.Limit.CountDenied, b.Watches > 0:
		case peek || !o.denied && denied && (req.Accounting == AccountingAtomic || b.Hold || b.Pool):
			continue
		case o.denied:
			as = unsure
		}
		if o.begun && as == behind {
			as = own
		}
		f.cross(f.memory.hash(b), as)
	}
	return dst
}

// keep starts counting as in flight what a request holds until it is settled, of which that
// server knows, if any.
func (f *fallback) keep(k *kept, server *redisscript.Server) {
	if k.query.counted {
		return
	}
	k.query.stage, k.query.server, k.query.lost = keeping, server, false
	f.link(k.query)
	f.loseUnknown(k)
}

// renewed records that a server now holds these units, of which some had lapsed, so that
// they were charged too.
func (f *fallback) renewed(held []*kept, server *redisscript.Server, lapsed []*kept) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range held {
		if q := k.query; q.stage == keeping && q.counted {
			f.unlink(q)
			f.link(q)
			q.server, q.lost, q.buckets[0].crossed = server, false, clean
			f.loseUnknown(k)
		}
	}
	for _, k := range lapsed {
		if q := k.query; q.stage == keeping && q.counted {
			p := q.buckets[0]
			p.held = nil
			f.cross(p.hash, f.memory.charge(&p))
		}
	}
}

// begun and done record which requests are in progress.
func (f *fallback) begun(k *kept) {
	if f != nil {
		f.memory.progress.add(k)
	}
}

func (f *fallback) done(k *kept) {
	if f != nil {
		f.memory.progress.remove(k)
	}
}

// loseUnknown has servers that lead be told of what k holds, if they do not know of it.
func (f *fallback) loseUnknown(k *kept) {
	if !f.hasLead() || !k.known(f.place) {
		f.lose(k.query)
	}
}

// charge adds what q's request was charged to the levels here and ends q: the
// request was admitted, but it is not known whether its server will know of it.
func (f *fallback) charge(q *query) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.chargeHeld(q)
}

// chargeHeld is charge with the lock held.
func (f *fallback) chargeHeld(q *query) {
	if q.stage == ended {
		return
	}
	f.unlink(q)
	q.stage = ended
	for i := range q.buckets {
		p := &q.buckets[i]
		f.cross(p.hash, f.memory.charge(p))
	}
}

// restarted records that a server has restarted, has been replaced by another, or
// has lost its scripts. It is not known which buckets it has, or what it knows of
// them.
func (f *fallback) restarted(server *redisscript.Server) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.markAllDirty(own)
	for q := f.inFlight; q != nil; {
		this := q
		q = q.next
		if this.server != server {
			continue
		}
		f.lose(this)
		if this.stage == keeping {
			this.buckets[0].held.kept.renewNow()
		}
		this.cross()
	}
}

// cross records that something was decided here on a bucket, which made it as dirty
// as that.
func (f *fallback) cross(hash uint64, as dirtiness) {
	if f.marks[hash%marks] == 0 {
		return
	}
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if p := &q.buckets[i]; p.hash == hash {
				p.crossed = max(p.crossed, as)
			}
		}
	}
}

// crossedBeside returns how dirty a bucket stays when q is answered, because of other
// queries about it that are still in flight. Of one that was sent before something was
// decided here, the server may know what this process does not, beside what q told of
// that, and the higher of the two levels is less than both.
func (f *fallback) crossedBeside(q *query, hash uint64, now int64) (as dirtiness) {
	if f.memory.dirtyEnd.Load() <= now || f.marks[hash%marks] == 0 {
		return clean
	}
	for other := f.inFlight; other != nil; other = other.next {
		for i := range other.buckets {
			if p := &other.buckets[i]; p.hash == hash && other != q {
				as = max(as, p.crossed)
			}
		}
	}
	return as
}

// link starts counting q as in flight.
func (f *fallback) link(q *query) {
	q.next = f.inFlight
	if q.next != nil {
		q.next.prev = q
	}
	f.inFlight, q.counted = q, true
	f.queries.Add(1)
	f.mark(q, 1)
}

// unlink stops counting q as in flight, if it does.
func (f *fallback) unlink(q *query) {
	if !q.counted {
		return
	}
	f.mark(q, -1)
	f.queries.Add(-1)
	if q.lost {
		f.lost--
	}
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

// raise raises the level of a bucket to s, if that is higher, of which servers are told.
func (f *fallback) raise(b *Bucket, s ahead) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.raise(b, s, own)
	f.cross(f.memory.hash(b), own)
}

// empty empties a bucket, which its server has emptied. Answers that are in flight
// may be from before that, so their levels no longer count.
func (f *fallback) empty(b *Bucket) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.empty(b)
	hash := f.memory.hash(b)
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if p := &q.buckets[i]; p.hash == hash {
				p.crossed, p.emptied = max(p.crossed, behind), true
			}
		}
	}
	t := &f.traces[hash%traces]
	t.last = f.sent
	if t.hash == hash {
		t.since, t.highest = f.sent, level{}
	}
}

// tells reports whether a query is in flight that tells a server what a bucket held
// before it was emptied.
func (f *fallback) tells(b *Bucket) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	hash := f.memory.hash(b)
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if p := &q.buckets[i]; p.hash == hash && p.emptied && p.told.dirty != clean {
				return true
			}
		}
	}
	return false
}
