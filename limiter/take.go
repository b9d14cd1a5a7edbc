package limiter

import (
	"context"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Take implements Store. It never waits and ignores the context. It returns an
// error only for malformed requests.
func (m *Memory) Take(_ context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.prepare(); err != nil {
		return dst, err
	}
	from := len(dst)
	if req.mayShare() {
		w := scratches.Get().(*scratch)
		w.buckets = m.shareBuckets(req.Buckets, clean, w.buckets)
		shared := req
		shared.Buckets = w.buckets
		dst = m.decide(shared, dst)
		w.release()
	} else {
		dst = m.decide(req, dst)
	}
	req.deferCharges(dst[from:], m)
	return dst, nil
}

// decide decides req, which is valid, and appends the Decisions to dst.
func (m *Memory) decide(req Request, dst []Decision) []Decision {
	if len(req.Buckets) == 1 && !req.Buckets[0].Limit.of().KeepsEntries() && !req.Buckets[0].Hold && m.queries.Load() == 0 {
		b := &req.Buckets[0]
		if s, denied, ok := m.takeOne(b); ok {
			return b.decision(s, denied, DecidedByMemory, dst)
		}
	}
	w := scratches.Get().(*scratch)
	w.outcomes = m.take(w, req, w.outcomes, nil)
	dst = req.decisions(w.outcomes, dst)
	w.release()
	return dst
}

// takeOne decides a request on b alone, as take would, and returns the level. Most requests are of this kind, for a bucket that
// already exists: that bucket is read and written in place. ok is false, and nothing done, if requests hold
// units of any bucket of b's limit.
func (m *Memory) takeOne(b *Bucket) (left bucket.Ahead, denied, ok bool) {
	part, hash := m.locate(b)
	if part.holds.Load() != 0 {
		return left, false, false
	}
	t := &part.tables[hash%tables]
	t.mu.Lock()
	// Read the clock first, so that the processor can fetch the bucket meanwhile.
	now := m.clock().Microseconds()
	var s bucket.Level
	if stored := t.cleanSlot(hash); stored != nil && m.leader.Load() == nil {
		s = stored.At(now)
		if denied = (b.need() > b.Limit.Size || b.Limit.of().Wait(s, b.need(), now) > 0) && !b.free(); !denied {
			s = b.Limit.of().Add(s, b.Cost, m.moment(b.Limit.of(), now))
			stored.Level = s
		} else if b.Limit.CountDenied {
			s = b.Limit.of().Count(s, 0, b.Cost, m.moment(b.Limit.of(), now))
			stored.Level = s
		}
		t.mu.Unlock()
	} else {
		p := location{hash: hash, partition: part, table: t}
		if part.dead {
			t.mu.Unlock()
			m.lock(&p)
			now = m.clock().Microseconds()
		}
		m.look(&p, b, now)
		m.decidesAlone(&p)
		p.fits = b.fits(p.level, 0, now)
		m.settle(&p, b, now, p.fits && b.Cost > 0)
		s, denied = p.level, !p.fits
		p.table.mu.Unlock()
		if p.entered {
			m.makeRoom(&p, b.MaxKeys, b.keeps(), now)
		}
	}
	m.sweep(now)
	return s.Ahead(now), denied, true
}

// standIn says how to decide in place of an original, see fallback.go. What that may still
// admit is in scratch.inFlight.
type standIn struct {
	late   time.Duration // how much later than there a bucket may drain here
	denied bool          // whether the request is denied elsewhere
	peek   bool          // whether nothing is charged
}

// taking is the decision on one request. As in decide.lua there are two passes, since whether
// a bucket is charged depends on the others: the first looks at each bucket and decides whether
// it has room, the second charges.
type taking struct {
	m         *Memory
	req       Request
	locations []location
	inFlight  []int64  // for each bucket, the units that originals may still admit; empty if there are none
	as        *standIn // nil if the Memory is a Store of its own
	now       int64
	pools     lending
	admitted  bool
}

// take decides req, which is valid, and appends the outcome for each bucket to
// dst. With as, it marks buckets that hold something as dirty. w is memory for it. Steps as
// functions of their own would make requests of several buckets 5 % slower.
func (m *Memory) take(w *scratch, req Request, dst []outcome, as *standIn) []outcome {
	m.lockBuckets(w, req, as)
	t := taking{m: m, req: req, locations: w.locations, inFlight: w.inFlight, as: as, now: m.clock().Microseconds()}
	t.admitted = as == nil || !as.denied
	for i := range t.locations {
		p, b := &t.locations[i], &req.Buckets[i]
		t.look(p, b, i)

		// Decide: find whether there is room, and what follows from that for the request and for
		// the buckets that this one watches.
		if p.entries != nil {
			p.fits = p.fitsEntries(b, p.claimed)
			p.blocked = !p.fits && p.inFlight > 0 && p.fitsEntries(b, 0)
		} else {
			p.fits = b.fits(p.level, p.inFlight, t.now)
			p.blocked = !p.fits && p.inFlight > 0 && b.fits(p.level, 0, t.now)
		}
		t.pools.short = t.pools.short || b.lent
		var denies bool
		denies, p.skipped = t.pools.next(b.Borrows, b.Pool, p.fits)
		t.admitted = t.admitted && (!denies || b.DryRun)
		if b.Watches > 0 && !p.fits {
			for j := firstWatched(t.req.Buckets, i); j < i; j++ {
				t.locations[j].skipped = true
			}
		}
	}
	for i := range t.locations {
		p, b := &t.locations[i], &req.Buckets[i]
		t.charge(p, b, i)

		// Report: fill in the outcome in place, once the bucket has been charged if it is to be.
		dst = append(dst, outcome{})
		o := &dst[len(dst)-1]
		s := p.level
		if p.inFlight > 0 {
			s = b.Limit.of().AtLeast(s, p.inFlight, t.m.moment(b.Limit.of(), t.now))
		}
		o.Ahead = s.Ahead(t.now)
		o.denied, o.blocked, o.unused = !p.fits || p.skipped && !b.Pool, p.blocked, p.skipped && b.Pool
		o.begun = t.as != nil && !p.found
		if p.entries != nil {
			others := p.inFlight
			if !p.fits && !p.blocked { // there is no room either when these are released
				others = 0
			}
			o.entries = p.entries.Level(b.Limit.of(), b.need(), others, t.now)
			*o.entries = o.entries.Plus(p.inFlight, b.Limit.of())
		}
	}
	unlockAll(w.held)

	for i := range t.locations {
		if p, b := &t.locations[i], &req.Buckets[i]; p.entered {
			m.makeRoom(p, b.MaxKeys, b.keeps(), t.now)
		}
	}
	m.sweep(t.now)
	return dst
}

// lockBuckets finds and locks the tables of req's buckets. Unless as has them already, it finds
// what originals have in flight too.
func (m *Memory) lockBuckets(w *scratch, req Request, as *standIn) {
	for {
		w.locations = m.locations(req.Buckets, w.locations[:0])
		if as == nil {
			if w.inFlight = w.inFlight[:0]; m.queries.Load() != 0 {
				w.inFlight = m.inFlight.appendUnits(w.locations, req.Buckets, w.inFlight)
			}
		}
		w.held = lockAll(w.locations, w.held[:0])
		if !anyDead(w.locations) {
			return
		}
		unlockAll(w.held)
	}
}

// anyDead reports whether the partition of any location is no longer in the directory.
func anyDead(locations []location) bool {
	for i := range locations {
		if locations[i].partition.dead {
			return true
		}
	}
	return false
}

// look reads what p's bucket holds, and what is in flight or held next to that.
func (t *taking) look(p *location, b *Bucket, i int) {
	t.m.look(p, b, t.now)
	if t.as != nil {
		p.found = p.level.Clear > t.now
		p.unsure = p.dirty == clean && p.found
		if p.dirty != own {
			p.level = b.Limit.of().Ending(p.level, t.now, t.as.late.Microseconds())
		}
	} else {
		t.m.decidesAlone(p)
		if b.Limit.of().KeepsEntries() {
			t.m.openEntries(p, b, t.now)
		}
	}
	if p.partition.holds.Load() != 0 {
		p.inFlight = t.m.holding.of(p.hash)
	}
	if len(t.inFlight) > 0 {
		p.inFlight += t.inFlight[i]
	}
	p.claimed = p.inFlight
	for j := 0; j < i && b.shared; j++ {
		// Two keys may share a bucket: this one is charged after that one.
		if q := &t.locations[j]; q.fits && q.hash == p.hash {
			p.level = b.Limit.of().Add(q.level, t.req.Buckets[j].Cost, t.m.moment(b.Limit.of(), t.now))
			p.unsure = false
			p.claimed += t.req.Buckets[j].Cost
		}
	}
}

// charge charges p's bucket, or holds units of it, as follows from what was decided on all.
func (t *taking) charge(p *location, b *Bucket, i int) {
	if b.Watches > 0 {
		if p.fits && t.watchedDenied(i) {
			t.mark(p, true)
			t.m.settle(p, b, t.now, true)
		}
		return
	}
	peek := t.as != nil && t.as.peek
	mayCharge := p.fits && !p.skipped && !peek
	if mayCharge && b.Hold && t.admitted {
		if t.as == nil {
			t.m.hold(t.req, i, p)
		}
		p.inFlight += b.Cost
		return
	}
	charge := mayCharge && b.Cost > 0 && (t.admitted || t.req.Accounting == AccountingEach && !b.Hold && !b.Pool)
	changes := charge || b.Limit.CountDenied
	switch {
	case p.entries == nil && (changes || !peek):
		t.mark(p, changes)
		t.m.settle(p, b, t.now, charge)
	case p.entries != nil && changes:
		t.m.settleEntries(p, b, t.now)
	case p.made: // entries that are not stored yet
		t.m.put(p, p.level, t.now)
	}
}

// mark marks p's bucket as dirty where an original does not know what becomes of it.
func (t *taking) mark(p *location, changes bool) {
	switch {
	case t.as == nil:
	case changes && p.found:
		p.dirty = max(p.dirty, behind)
	case changes:
		p.dirty = own
	case !p.fits && p.unsure: // the original may have lost what it holds
		p.dirty = unsure
	}
}

// watchedDenied reports whether a bucket that the i-th watches has no room for the request,
// and not only because of units that are held.
func (t *taking) watchedDenied(i int) bool {
	for j := firstWatched(t.req.Buckets, i); j < i; j++ {
		if p := &t.locations[j]; !p.fits && !p.blocked {
			return true
		}
	}
	return false
}

// firstWatched returns the index of the first bucket that the i-th one watches, or i. Of a
// part of a request it may lack them.
func firstWatched(buckets []Bucket, i int) int {
	first := i
	for first > 0 && i-first < int(buckets[i].Watches) && buckets[first-1].sameKey(&buckets[i]) {
		first--
	}
	return first
}
