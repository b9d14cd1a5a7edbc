package limiter

import (
	"slices"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// fallback decides requests in this process while their server can't be asked,
// such that one node alone never admits more than its buckets allow, whatever
// the server answers, when, and whatever it has lost. With several nodes each
// knows only what it has admitted itself and what the server has told it.
//
// The memory holds each bucket's level as this process knows it: never less
// than the server's last word, and every admission of this process is in it or
// in flight. From that follows:
//
//   - What is decided here must fit beside the level and everything in flight.
//     It makes the bucket dirty: the server does not know of it. A denial does
//     so too, for the server may have lost what the bucket was full of; and so
//     does, for all buckets, the news that the server has restarted.
//   - All buckets become dirty when something is first sent to a store that keeps
//     its buckets elsewhere than the one before, see lead.
//   - A request for a dirty bucket tells the server the level, as the least that
//     the bucket holds, and what is in flight beside, for which there has to be
//     room too. If nothing was decided here, both know of the same charges, at
//     times that differ only by how long they were on the way.
//   - Its answer makes the bucket clean, unless something was decided here while
//     it was on its way: then the level grows by what the answer admits.
//   - What is given up is no longer in flight. Its late answer changes nothing.
//   - An answer that is newer than all others of a clean bucket, see traces, is
//     all there is to know of it, even if it is lower: then somebody has deleted
//     the key, or Redis has.
//   - What the memory forgets for want of room is forgotten, whoever knew of it;
//     the server is told so, see removals.
type fallback struct {
	*traffic
	memory     *Memory
	timeout    time.Duration // how late an answer may be
	place      string        // where the servers keep the buckets, see place
	generation int           // of those of the memory

	removals removals
}

// traffic is what all fallbacks that share a memory know of requests in flight.
// While a store replaces another, there are two.
type traffic struct {
	// Held while requests begin or end to be in flight and while something is
	// decided here, so that each of the two knows of the other. The memory's
	// tables are locked inside of it.
	mu        sync.Mutex
	inFlight  *query       // the latest of them; a list
	lost      int          // how many of them a server may have forgotten that has restarted
	marks     [marks]int32 // how many buckets in flight have a hash that ends like this
	sent      uint64       // how many requests have been sent
	traces    [traces]trace
	fallbacks int // how many there have been
}

// newFallback returns a fallback to m from servers that may answer late by the
// given time, and keep their buckets at the given place.
func newFallback(m *Memory, timeout time.Duration, place string) *fallback {
	m.traffic.mu.Lock()
	defer m.traffic.mu.Unlock()
	m.traffic.fallbacks++
	return &fallback{traffic: m.traffic, memory: m, timeout: timeout, place: place, generation: m.traffic.fallbacks}
}

// close records that nothing more is sent to f's servers.
func (f *fallback) close() {
	if f != nil {
		f.memory.leader.CompareAndSwap(f, nil)
	}
}

// takeLead reports whether buckets are clean if the servers of f know what they hold.
// Those of the newest fallback that something was sent to have to: what comes
// first to them knows nothing of what others were told, or was decided in the
// process alone.
func (f *fallback) takeLead() bool {
	leader := f.memory.leader.Load()
	switch {
	case leader == f:
		return true
	case leader == nil:
		f.memory.markAllDirty(ahead)
	case leader.generation > f.generation:
		return leader.place == f.place
	case leader.place != f.place:
		f.memory.markAllDirty(unsure)
	}
	f.memory.leader.Store(f)
	if leader == nil || leader.place != f.place {
		for q := f.inFlight; q != nil; q = q.next {
			q.cross()
		}
	}
	return true
}

// hasLead reports what lead last did.
func (f *fallback) hasLead() bool {
	leader := f.memory.leader.Load()
	return leader == f || leader != nil && leader.place == f.place
}

// cross records that q's answer does not tell of all that is known here.
func (q *query) cross() {
	for i := range q.buckets {
		q.buckets[i].crossed = true
	}
}

// trace tells which answers are newer than others. A request that was sent after
// another one's answer had come was decided after that one. So if no other answer
// has come since it was sent, its own is the newest that there is.
//
// Of a bucket that is always asked for by several requests at once no answer is
// of that kind. But of those that come after a given moment, the highest level is
// as new as any as soon as one of them was sent after it.
type trace struct {
	last uint64 // how many requests had been sent when the last answer came

	hash    uint64 // the bucket whose answers are compared
	since   uint64 // how many requests had been sent when that began
	highest state  // what they have told since, the clear time on the memory's clock
}

// marks is how many hashes are told apart to see that nothing is in flight for a
// bucket. To look through all that is in flight would hold up everybody when that is
// much.
const marks = 1 << 14

// mark counts the buckets of q as in flight, or no longer so.
func (f *fallback) mark(q *query, n int32) {
	for i := range q.buckets {
		f.marks[q.buckets[i].hash%marks] += n
	}
}

// traces is how many there are; buckets whose hashes meet share one.
const traces = 1024

// tracked is what the fallback knows of one bucket of a request in flight.
type tracked struct {
	hash    uint64 // the bucket's in the memory
	place   place  // where it lies there
	key     string // its name in the server
	limit   Limit
	cost    int64
	maxKeys int
	keeps   bool
	told    bool // the server was told a level when it was sent
	crossed bool // something was decided here while it was in flight
}

// pending appends what f has to know of req's buckets to dst.
func (f *fallback) pending(req Request, dst []tracked) []tracked {
	for i := range req.Buckets {
		b := &req.Buckets[i]
		p := f.memory.place(b)
		dst = append(dst, tracked{
			hash: p.hash, place: p, limit: b.Limit, cost: b.Cost, maxKeys: b.MaxKeys, keeps: b.keeps(),
		})
	}
	return dst
}

// send records that a batch is about to be sent to a server. It has those
// requests that ask for dirty buckets tell what is known of them here.
func (f *fallback) send(to *redisscript.Server, batch []*redisscript.Call) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	leads := f.takeLead()
	dirty := f.memory.anyDirty() || f.lost > 0
	for _, c := range batch {
		q := c.Owner.(*query)
		f.unlink(q) // it may have been sent to another server before
		f.sent++
		q.Arg, q.order = q.plain, f.sent
		for i := range q.buckets {
			q.buckets[i].told, q.buckets[i].crossed = false, !leads
		}
		if dirty {
			q.tell(f.toldFor(q))
		}
		q.server, q.serverRestarted = to, false
		if !q.abandoned {
			f.link(q)
		}
	}
}

// toldLevel is what a server has to be told of a bucket, clear times told from now.
type toldLevel struct {
	state           // its level
	with  state     // the same with what is in flight, but no more than a full one
	dirty dirtiness // clean: there is nothing to tell
}

// toldFor returns what the server has to be told of q's buckets, nil if all are
// clean, and records which it is told.
func (f *fallback) toldFor(q *query) []toldLevel {
	var levels []toldLevel
	for i := range q.buckets {
		p := &q.buckets[i]
		level, dirty := f.memory.dirty(&p.place)
		if dirty == clean {
			// What was admitted before a server restarted may still be on its way here.
			if !f.anyLost(p.hash) {
				continue
			}
			if dirty = unsure; level.clear <= 0 {
				level = state{}
			}
		}
		if levels == nil {
			levels = make([]toldLevel, len(q.buckets))
		}
		p.told = true
		if level.clear <= int64(f.timeout/time.Microsecond) {
			// The bucket may have drained when the server is told. Units that would
			// have left with its last drip are then no longer free.
			level.slack = 0
		}
		levels[i] = toldLevel{level, p.limit.atLeast(level, f.units(p.hash, p.limit.Size)), dirty}
	}
	return levels
}

// atLeast returns the level of a bucket at s, its clear time told from now, to
// which units are added, though not beyond a full one.
func (l Limit) atLeast(s state, units int64) state {
	full := state{clear: l.drips() * l.rate(), slack: l.drips()*l.DripSize - l.Size}
	if units == 0 || !s.below(full) {
		return s
	}
	if sum := l.add(s, units); sum.below(full) {
		return sum
	}
	return full
}

// below reports whether a bucket at s holds less than one at t.
func (s state) below(t state) bool {
	return s.clear < t.clear || s.clear == t.clear && s.slack > t.slack
}

// units returns how many units are in flight for a bucket, but no more than most.
func (f *fallback) units(hash uint64, most int64) int64 {
	if f.marks[hash%marks] == 0 {
		return 0
	}
	units := int64(0)
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if p := &q.buckets[i]; p.hash == hash {
				if p.cost >= most-units {
					return most
				}
				units += p.cost
			}
		}
	}
	return units
}

// answered records what a server has decided on q's request. If its units
// are only held it stays in flight until they are settled.
func (f *fallback) answered(q *query, outcomes []outcome, held bool) {
	if f == nil {
		return
	}
	admitted := true
	for i := range outcomes {
		admitted = admitted && !outcomes[i].denied
	}
	f.mu.Lock()
	if q.abandoned { // and what it was charged is in the levels here
		f.mu.Unlock()
		return
	}
	if !f.hasLead() {
		q.cross()
	}
	for i := range outcomes {
		o, p := &outcomes[i], &q.buckets[i]
		if !o.blocked {
			charged := !held && !o.denied && (admitted || q.what() != byte(AccountingAtomic))
			s, newest := f.newest(q.order, p, o.state)
			crossed := p.crossed && charged
			f.memory.follow(p, s, f.timeout, newest, crossed)
			if crossed { // which the servers of others in flight need not know of
				f.cross(p.hash)
			}
		}
	}
	for i := range q.buckets {
		f.traces[q.buckets[i].hash%traces].last = f.sent
	}
	switch q.holdsUnits = held && admitted; {
	case !q.holdsUnits:
		f.unlink(q)
	case q.serverRestarted:
		f.chargeHeld(q)
	}
	f.mu.Unlock()
	f.memory.sweep(f.memory.clock().Microseconds())
}

// newest reports whether s, what has been answered of p's bucket to a request
// that was the order-th to be sent, is the newest that is known of it, and if so
// returns the level that is. Clear times are told from now.
func (f *fallback) newest(order uint64, p *tracked, s state) (state, bool) {
	t := &f.traces[p.hash%traces]
	newest := order > t.last
	if !newest && p.hash == t.hash {
		now := f.memory.clock().Microseconds()
		if told := (state{s.clear + now, s.slack}); t.highest.clear <= now {
			t.highest = told
		} else if s.clear > 0 {
			t.highest = p.limit.higher(t.highest, told, f.timeout)
		}
		if newest = order > t.since; newest {
			s = state{t.highest.clear - now, t.highest.slack}
		}
	}
	if newest || p.hash != t.hash {
		t.hash, t.since, t.highest = p.hash, f.sent, state{}
	}
	return s, newest
}

// drop records that nobody waits for the answers to the given requests any
// more, and nothing is admitted by them.
func (f *fallback) drop(queries ...*query) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range queries {
		f.unlink(q)
		q.abandoned = true
	}
}

// anyLost reports whether units of a bucket are in flight that a server may have
// forgotten.
func (f *fallback) anyLost(hash uint64) bool {
	if f.lost == 0 || f.marks[hash%marks] == 0 {
		return false
	}
	for q := f.inFlight; q != nil; q = q.next {
		if q.serverRestarted && slices.ContainsFunc(q.buckets, func(p tracked) bool { return p.hash == hash }) {
			return true
		}
	}
	return false
}

// decide decides req here, instead of the given requests to servers, which are
// given up. It appends to dst. With peek it only tells what would be decided.
func (f *fallback) decide(req Request, dst []outcome, peek bool, instead ...*query) []outcome {
	f.drop(instead...)
	f.mu.Lock()
	defer f.mu.Unlock()
	var few [8]int64
	inFlight := few[:0]
	for i := range req.Buckets {
		b := &req.Buckets[i]
		inFlight = append(inFlight, f.units(f.memory.hash(b), b.Limit.Size))
	}
	before := len(dst)
	dst = f.memory.take(req, dst, &standIn{inFlight: inFlight, peek: peek})
	denied := false
	for i := range dst[before:] {
		denied = denied || dst[before+i].denied
	}
	for i := range dst[before:] {
		o := &dst[before+i]
		o.here = true
		// A bucket that had room, but was not charged for another, is as it was.
		if !peek && (o.denied || !denied || req.Accounting == AccountingEach) {
			f.cross(f.memory.hash(&req.Buckets[i]))
		}
	}
	return dst
}

// charge adds what q's request was charged to the levels here, and ends it: it
// was admitted, but it is not known whether its server will know of it.
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
	if q.abandoned {
		return
	}
	f.unlink(q)
	q.abandoned = true
	for i := range q.buckets {
		p := &q.buckets[i]
		f.memory.charge(p)
		f.cross(p.hash)
	}
}

// restarted records that a server has restarted, or is another, or has lost
// its scripts. Nobody knows which buckets are its, and what it knows of them.
func (f *fallback) restarted(server *redisscript.Server) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.markAllDirty(unsure)
	for q := f.inFlight; q != nil; {
		this := q
		q = q.next
		if this.server != server {
			continue
		}
		if !this.serverRestarted {
			this.serverRestarted = true
			f.lost++
		}
		if this.holdsUnits { // it may be admitted
			f.chargeHeld(this)
			continue
		}
		this.cross()
	}
}

// cross records that something was decided here on a bucket.
func (f *fallback) cross(hash uint64) {
	if f.marks[hash%marks] == 0 {
		return
	}
	for q := f.inFlight; q != nil; q = q.next {
		for i := range q.buckets {
			if p := &q.buckets[i]; p.hash == hash {
				p.crossed = true
			}
		}
	}
}

// link begins to count q as in flight.
func (f *fallback) link(q *query) {
	q.next = f.inFlight
	if q.next != nil {
		q.next.prev = q
	}
	f.inFlight, q.counted = q, true
	f.mark(q, 1)
}

// unlink ends to count q as in flight, if it is.
func (f *fallback) unlink(q *query) {
	if !q.counted {
		return
	}
	f.mark(q, -1)
	if q.serverRestarted {
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
