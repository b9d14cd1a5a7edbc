package limiter

import (
	"math"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// newFallback returns a fallback to m for servers that may answer late by up to
// timeout, and keep their buckets at the given location.
func newFallback(m *Memory, timeout time.Duration, location string) *fallback {
	m.mu.Lock()
	if m.inFlight == nil {
		m.inFlight = new(traffic)
	}
	f := &fallback{traffic: m.inFlight.(*traffic), memory: m, timeout: timeout}
	m.mu.Unlock()
	f.original = original{location, f.removals.add}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open = append(f.open, &f.original)
	return f
}

// isReplaced reports whether another store goes on with the memory.
func (f *fallback) isReplaced() bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.open) > 0 && f.open[len(f.open)-1] != &f.original
}

// close records that nothing more will be sent to f's servers.
func (f *fallback) close() {
	if f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.open = slices.DeleteFunc(f.open, func(other *original) bool { return other == &f.original })
		f.memory.leader.CompareAndSwap(&f.original, nil)
	}
}

// takeLead reports whether a bucket may be marked clean when f's servers know its
// level. That is so for the newest fallback that has sent something, which leads,
// and others with the same location. When the lead changes, the new servers know
// nothing of what others were sent, so buckets become dirty, and what is charged and not
// answered is known here alone.
func (f *fallback) takeLead() bool {
	leader := f.memory.leader.Load()
	switch {
	case leader == &f.original:
		return true
	case leader != nil && slices.Index(f.open, leader) > slices.Index(f.open, &f.original):
		return leader.location == f.location
	}
	f.memory.leader.Store(&f.original) // first: from now on, what the Memory decides alone is marked
	if leader == nil || leader.location != f.location {
		f.memory.epoch.Add(1)
		for q := f.inFlight; q != nil; {
			this := q
			q = q.next
			f.crossAll(this)
			switch {
			case this.stage == asking || this.stage == holding && !f.holds(this):
				f.lose(this)
			case this.stage == owing:
				this.account.forgetOwed()
				f.chargeOwed(this.account, math.MaxInt64)
			}
		}
	}
	return true
}

// leads reports what takeLead would, without taking the lead.
func (f *fallback) leads() bool {
	leader := f.memory.leader.Load()
	return leader == &f.original || leader != nil && leader.location == f.location
}

// send records that a batch is about to be sent to a server. It adds the levels of
// dirty buckets to the queries about them. The lock must be held.
func (f *fallback) send(to *redisscript.Server, batch []*redisscript.Call) {
	if f == nil {
		return
	}
	leads := f.takeLead()
	for _, c := range batch {
		q := c.Owner.(*query)
		f.unlink(q) // it may have been sent to another server before
		f.sent++
		q.order, q.server, q.lost, q.failed = f.sent, to, false, false
		if q.account != nil && q.account.owed != nil {
			q.account.owed.server = to
		}
		if q.stage == gathering {
			q.stage = asking
		}
		if q.what == whatRemove {
			continue // what it reports is what is removed
		}
		for i := range q.buckets {
			p := &q.buckets[i]
			if p.local = (localLevel{}); q.stage != ended {
				p.local = f.localLevelFor(q, p)
			}
		}
		if q.stage == ended {
			continue
		}
		f.link(q)
		if !leads {
			f.crossAll(q)
		}
	}
}

// localLevelFor returns what q is to report of p's bucket, which it queries. q must not
// be in flight.
func (f *fallback) localLevelFor(q *query, p *bucketQuery) localLevel {
	now := f.memory.clock().Microseconds()
	s, dirty := f.memory.dirty(p, now)
	fl := f.flights.of[p.hash]
	if dirty == clean {
		// The answer to a request that was admitted before a server restarted
		// may still be in flight, and requests hold units that other servers, or this
		// process alone, have admitted.
		if (fl == nil || fl.lost == 0) && f.memory.holding.of(p.hash) == 0 {
			// What has not been reported takes room in addition to what the server knows. A
			// report is charged in any case.
			if fl == nil || q.what == whatReport {
				return localLevel{}
			}
			return localLevel{inFlight: fl.unsent.atMost(p.limit.Size)}
		}
		dirty = own
	}
	if q.account != nil && q.account.owed != nil {
		s = f.memory.plus(p, s, min(q.account.unconfirmed(q), q.account.owed.buckets[0].cost), now)
	}
	level, drained := p.limit.Arriving(s.Ahead(now), f.timeout.Microseconds())
	if drained && dirty == unsure {
		return localLevel{}
	}
	// A call that names an account reports what that holds too: the server counts no unit twice.
	others := f.memory.holding.of(p.hash)
	if fl != nil {
		others += fl.unitsOfOthers(f, p.held != nil, p.limit.Size)
	}
	return localLevel{level, min(others, p.limit.Size), dirty}
}

// answered records what a server has decided on q. What it holds for q stays in flight until
// it is settled.
func (f *fallback) answered(q *query, outcomes []outcome) {
	if f == nil {
		return
	}
	f.mu.Lock()
	f.join(q, outcomes)
	f.mu.Unlock()
	f.memory.sweep(f.memory.clock().Microseconds())
}

// join is answered with the lock held.
func (f *fallback) join(q *query, outcomes []outcome) {
	if q.what == whatClear { // what was answered before was run before, and what is in flight was not
		f.memory.drain(&q.buckets[0].location)
	}
	if q.stage == ended { // the levels here already include what it may have been charged
		return
	}
	now := f.memory.clock().Microseconds()
	admitted, decides := !q.denied(outcomes), q.what != whatSettle && q.what != whatRenew
	for i := range outcomes {
		o, p := &outcomes[i], &q.buckets[i]
		s, newest, others := bucket.Level{}, false, clean
		if p.crossed = clean; q.counted {
			fl := f.flights.of[p.hash]
			p.crossed = fl.crossedBy(q)
			switch {
			case fl.doubts > 0: // whether the level has what is owed will be known soon, but not by this answer
				p.crossed = own
			case !fl.emptied.met(q) && !o.blocked: // or the level may be from before that, or include units that are only held
				s, newest = o.After(now), fl.latest.isBefore(q, f.sent)
			}
		}
		if k := p.reservation(); k != nil && decides && admitted && !o.denied && !o.unused {
			if q.lost { // since its server has restarted
				k.account.lose()
			}
			f.hold(k, q.server)
		}
		charged := !o.denied && !o.unused && (admitted || q.what != byte(AccountingAtomic) && !p.pool) &&
			p.charge() > 0 && (p.held == nil || !decides)
		if charged {
			f.sinceReset(p.hash, p.charge())
		}
		if q.counted {
			others = f.flights.of[p.hash].crossedByOthers(q, p.hash)
		}
		if f.memory.follow(p, s, f.timeout, newest, charged, others, now) { // the servers of other queries in flight may not know of this charge
			f.flights.cross(p.hash, behind)
		}
	}
	f.end(q)
}

// end stops counting q as in flight: nothing follows from its answer.
func (f *fallback) end(q *query) {
	f.unlink(q)
	q.stage = ended
}

// settled records the outcome of q, which settles or renews an account, and what follows from it.
// outcomes is nil if there is no answer. What it says of what is owed comes first: what the server
// has not charged goes into the level here, and what it has is no longer owed. Then the answer
// joins the level here like any other: not if it may have more of what is still owed.
func (f *fallback) settled(q *query, outcomes []outcome, a settlement) {
	if f == nil {
		return
	}
	owed, p := q.account.owed, &q.buckets[0]
	if outcomes == nil || !f.leads() || q.account.paid { // the level is from another server, or has what is charged here later
		outcomes, a.unknown, a.known = nil, a.unknown+a.known, 0
	}
	if p.cost = 0; a.lapsed > 0 {
		p.held.charge = a.lapsed
		f.chargeHere(p)
	}
	if p.held.charge = 0; owed != nil {
		p.held.charge = min(a.known, owed.buckets[0].cost)
		f.owes(owed, -p.held.charge)
		f.chargeOwed(q.account, a.unknown)
	}
	switch {
	case owed == nil || !owed.counted:
	case a.doubtful:
		f.lose(owed)
	case a.doubtless && owed.lost:
		f.unlink(owed)
		owed.lost = false
		f.link(owed)
	}
	if outcomes == nil {
		f.end(q)
	} else {
		f.join(q, outcomes)
	}
}

// owe counts units as in flight that a request of t was charged, until its server is known to
// have charged them.
func (f *fallback) owe(t *account, units int64, server *redisscript.Server) {
	if f == nil || units == 0 {
		return
	}
	if t.owed == nil {
		t.owed = t.call(whatSettle)
		t.owed.stage, t.owed.buckets[0].held = owing, nil
	}
	if t.owed.server == nil {
		t.owed.server = server
	}
	f.owes(t.owed, units)
}

// owes counts that many more units of a query of that kind.
func (f *fallback) owes(owed *query, units int64) {
	if owed == nil || units == 0 {
		return
	}
	p := &owed.buckets[0]
	if !owed.counted {
		p.cost, owed.lost = 0, false
		f.link(owed)
	}
	if f.costs(owed, p.cost+units); p.cost == 0 {
		f.unlink(owed)
	}
}

// chargeOwed adds so much of what t owes to the level here, or all.
func (f *fallback) chargeOwed(t *account, units int64) {
	if f == nil || t.owed == nil {
		return
	}
	p := t.owed.buckets[0]
	if p.cost = min(units, p.cost); p.cost > 0 {
		f.owes(t.owed, -p.cost)
		f.chargeHere(&p)
	}
}

// charged records how much a server has charged q's one bucket, as it has decided.
func (f *fallback) charged(q *query, n int64) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.costs(q, n)
}

// drop records that queries were given up and admit nothing.
func (f *fallback) drop(queries ...*query) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range queries {
		f.end(q)
	}
}

// decide decides req here, in place of the given queries, which are given up. It
// appends to dst. If the request is denied elsewhere and charging is atomic, this only
// reports what would be decided, and counts it where that is wanted.
func (f *fallback) decide(req Request, dst []outcome, denied bool, instead ...*query) []outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range instead {
		f.end(q)
	}
	w := scratches.Get().(*scratch)
	defer w.release()
	f.findInFlight(req, w)
	before, peek := len(dst), denied && req.Accounting == AccountingAtomic
	dst = f.memory.take(w, req, dst, &standIn{late: f.timeout, denied: denied, peek: peek})
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
			k := req.newReservation(b)
			k.store.ledger.decidedHere(k)
			f.hold(k, nil)
			continue
		case b.Cost == 0 && !o.denied:
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
		hash := f.memory.hash(b)
		f.flights.cross(hash, as)
		if !o.denied && b.Watches == 0 {
			f.sinceReset(hash, b.Cost)
		}
	}
	return dst
}

// findInFlight appends to w.inFlight how many units are in flight for each bucket of req.
func (f *fallback) findInFlight(req Request, w *scratch) {
	for i := range req.Buckets {
		b := &req.Buckets[i]
		partition, hash := f.memory.locate(b)
		partition.sized(b.Limit.Size)
		w.inFlight = append(w.inFlight, f.units(hash, b.Limit.Size))
	}
}

// hold starts counting as in flight what a request holds until it is settled, of which that
// server knows, if any.
func (f *fallback) hold(k *reservation, server *redisscript.Server) {
	if k.query.counted {
		return
	}
	k.query.stage, k.query.server, k.query.lost, k.query.holder = holding, server, false, nil
	f.link(k.query)
	f.loseUnknown(k)
}

// renewed records that a server now holds these units.
func (f *fallback) renewed(held []*reservation, server *redisscript.Server) {
	if f == nil {
		return
	}
	for _, k := range held {
		if q := k.query; q.stage == holding && q.counted {
			f.unlink(q)
			q.server, q.lost = server, false
			f.link(q)
			f.loseUnknown(k)
		}
	}
}

// loseUnknown finds out whether k's servers count what it holds. If they do not, it is marked as
// lost, so that those that lead are told.
func (f *fallback) loseUnknown(k *reservation) {
	k.recount()
	if q := k.query; q.counted && (q.holder == nil || !f.leads()) {
		f.lose(q)
	}
}

// holds reports whether f's servers count q's units as held.
func (f *fallback) holds(q *query) bool { return q.holder != nil && q.holder.location == f.location }

// charge adds what q's request was charged to the levels here and ends q: the
// request was admitted, but it is not known whether its server will know of it.
func (f *fallback) charge(q *query) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if q.stage == ended {
		return
	}
	f.end(q)
	for i := range q.buckets {
		f.chargeHere(&q.buckets[i])
	}
}

// chargeHere adds p's charge to the level here.
func (f *fallback) chargeHere(p *bucketQuery) {
	f.flights.cross(p.hash, f.memory.charge(p))
	f.sinceReset(p.hash, p.charge())
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
	f.memory.epoch.Add(1)
	for q := f.inFlight; q != nil; {
		this := q
		q = q.next
		if this.server != server {
			continue
		}
		f.lose(this)
		f.crossAll(this)
		switch k := this.buckets[0].reservation(); this.stage {
		case holding:
			k.account.lose()
		case owing:
			this.account.lose()
		case asking, gathering, ended:
		}
	}
}

// raise raises the level of a bucket to s, if that is higher, which is reported to servers.
func (f *fallback) raise(b *Bucket, s bucket.Ahead) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.raise(b, s, own)
	f.flights.cross(f.memory.hash(b), own)
}

// resetting records that b is about to be emptied by its server.
func (f *fallback) resetting(b *Bucket) *emptying {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	x := &emptying{hash: f.memory.hash(b)}
	f.resets = append(f.resets, x)
	return x
}

// wasReset records that x is no longer in flight.
func (f *fallback) wasReset(x *emptying) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resets = slices.DeleteFunc(f.resets, func(other *emptying) bool { return other == x })
}

// empty empties a bucket, which its server has emptied by x, if not nil, except for what was
// charged since x was sent. Answers that are in flight may be from before that, so their
// levels no longer count.
func (f *fallback) empty(b *Bucket, x *emptying) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.memory.empty(b)
	hash := f.memory.hash(b)
	f.flights.empty(hash)
	if x != nil && x.units > 0 {
		since := bucketQuery{limit: bucket.Limit(b.Limit), cost: x.units, location: f.memory.location(b), maxKeys: b.MaxKeys, keeps: b.keeps()}
		f.flights.cross(hash, f.memory.charge(&since))
	}
}

// reportsEmptied reports whether a query is in flight that reports what a bucket held
// before it was emptied.
func (f *fallback) reportsEmptied(b *Bucket) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	fl := f.flights.of[f.memory.hash(b)]
	return fl != nil && fl.emptied.left > 0
}
