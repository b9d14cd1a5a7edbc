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
	if len(req.Buckets) == 1 && !req.Buckets[0].Limit.of().KeepsEntries() && !req.Buckets[0].Hold && !m.anyHeld() {
		b := &req.Buckets[0]
		s, denied := m.takeOne(b)
		return b.decision(s, denied, DecidedByMemory, dst)
	}
	w := scratches.Get().(*scratch)
	w.outcomes = m.take(w, req, w.outcomes, nil)
	dst = req.decisions(w.outcomes, dst)
	w.release()
	return dst
}

// takeOne decides a request on b alone, as take would, and returns the level. Most requests are of this kind, for a bucket that
// already exists: that bucket is read and written in place.
func (m *Memory) takeOne(b *Bucket) (left bucket.Ahead, denied bool) {
	part, hash := m.locate(b)
	t := &part.tables[hash%tables]
	t.mu.Lock()
	// Read the clock first, so that the processor can fetch the bucket meanwhile.
	now := m.clock().Microseconds()
	var s bucket.Level
	if stored := t.own(hash); stored != nil && m.leader.Load() == nil {
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
	return s.Ahead(now), denied
}

// standIn says how to decide in place of another store, see fallback.go.
type standIn struct {
	inFlight []int64       // for each bucket, the units that the other store may still admit
	late     time.Duration // how much later than there a bucket may drain here
	denied   bool          // whether the request is denied elsewhere
	peek     bool          // whether nothing is charged
}

// take decides req, which is valid, and appends the outcome for each bucket to
// dst. With as, it marks buckets that hold something as dirty. w is memory for it.
func (m *Memory) take(w *scratch, req Request, dst []outcome, as *standIn) []outcome {
	w.locations = m.locations(req.Buckets, w.locations[:0])
	if as == nil {
		if w.inFlight = w.inFlight[:0]; m.queries.Load() != 0 {
			w.inFlight = m.inFlight.appendUnits(w.locations, req.Buckets, w.inFlight)
		}
	}
	w.held = lockAll(w.locations, w.held[:0])
	locations := w.locations
	for i := range locations {
		if locations[i].partition.dead {
			unlockAll(w.held)
			return m.take(w, req, dst, as)
		}
	}
	now := m.clock().Microseconds()
	admitted := as == nil || !as.denied
	var pools lending
	for i := range locations {
		p, b := &locations[i], &req.Buckets[i]
		m.look(p, b, now)
		p.inFlight = m.holding.of(p.hash)
		if as != nil {
			p.inFlight += as.inFlight[i]
			p.found = p.level.Clear > now
			p.unsure = p.dirty == clean && p.found
			if p.dirty != own {
				p.level = b.Limit.of().Ending(p.level, now, as.late.Microseconds())
			}
		} else {
			m.decidesAlone(p)
			if b.Limit.of().KeepsEntries() {
				m.openEntries(p, b, now)
			}
			if len(w.inFlight) > 0 {
				p.inFlight += w.inFlight[i]
			}
			p.claimed = p.inFlight
		}
		for j := 0; j < i && b.shared; j++ {
			// Two keys may share a bucket: this one is charged after that one.
			if q := &locations[j]; q.fits && q.hash == p.hash {
				p.level = b.Limit.of().Add(q.level, req.Buckets[j].Cost, m.moment(b.Limit.of(), now))
				p.unsure = false
				p.claimed += req.Buckets[j].Cost
			}
		}
		if p.exact {
			p.fits = p.fitsEntries(b)
		} else {
			p.fits = b.fits(p.level, p.inFlight, now)
		}
		pools.short = pools.short || b.lent
		var denies bool
		denies, p.spared = pools.next(b.Borrows, b.Pool, p.fits)
		admitted = admitted && (!denies || b.DryRun)
		if b.Watches > 0 && !p.fits {
			for j := firstWatched(req.Buckets, i); j < i; j++ {
				locations[j].spared = true
			}
		}
	}
	for i := range locations {
		p, b := &locations[i], &req.Buckets[i]
		peek := as != nil && as.peek
		charge := p.fits && b.Cost > 0 && !p.spared && !peek && (admitted || req.Accounting == AccountingEach && !b.Hold && !b.Pool)
		blocked := !p.fits && p.inFlight > 0 && p.fitsAlone(b, now)
		switch {
		case b.Watches > 0:
			if from := firstWatched(req.Buckets, i); p.fits && watchedDenied(locations[from:i], req.Buckets[from:i], now) {
				if as != nil {
					p.dirty = max(p.dirty, behind)
					if !p.found {
						p.dirty = own
					}
				}
				m.settle(p, b, now, true)
			}
		case b.Hold && p.fits && !p.spared && admitted && !peek:
			if as == nil {
				m.hold(req, i, p)
			}
			p.inFlight += b.Cost
		case p.exact && (charge || b.Limit.CountDenied):
			m.settleEntries(p, b, now)
		case p.exact && p.made:
			m.put(p, p.level, now)
		case p.exact:
		case !peek || b.Limit.CountDenied:
			switch {
			case as == nil:
			case (charge || b.Limit.CountDenied) && p.found:
				p.dirty = max(p.dirty, behind)
			case charge || b.Limit.CountDenied:
				p.dirty = own
			case !p.fits && p.unsure: // the other store may have lost what it holds
				p.dirty = unsure
			}
			m.settle(p, b, now, charge)
		}
		s := p.level
		if p.inFlight > 0 {
			s = b.Limit.of().AtLeast(s, p.inFlight, m.moment(b.Limit.of(), now))
		}
		dst = append(dst, outcome{
			Ahead: s.Ahead(now), denied: !p.fits || p.spared && !b.Pool, blocked: blocked, unused: p.spared && b.Pool, begun: as != nil && !p.found,
		})
		if p.exact {
			others := p.inFlight
			if !p.fits && !blocked { // there is no room either when these are released
				others = 0
			}
			v := p.entries.Level(b.Limit.of(), b.need(), others, now)
			*v = v.Plus(p.inFlight, b.Limit.of())
			dst[len(dst)-1].entries = v
		}
	}
	unlockAll(w.held)

	for i := range locations {
		if p, b := &locations[i], &req.Buckets[i]; p.entered {
			m.makeRoom(p, b.MaxKeys, b.keeps(), now)
		}
	}
	m.sweep(now)
	return dst
}

// watchedDenied reports whether one of the buckets at places has no room for the request,
// and not only because of units that are held.
func watchedDenied(locations []location, buckets []Bucket, now int64) bool {
	for i := range locations {
		if !locations[i].fits && !locations[i].fitsAlone(&buckets[i], now) {
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
