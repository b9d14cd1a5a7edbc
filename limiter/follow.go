package limiter

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// A Memory that is the fallback of a Redis store holds each bucket at least as
// full as the server does, and knows which buckets are dirty: those of which the
// server may know less.

// follow takes over a level that a server has reported: s, which has arrived by now. The
// report is at most late old, so s is never too low. A higher level that is already
// stored stays, unless the report is the newest and covers the same charges. With
// charges, the report admits a charge. It is in s, but not in what was decided here while the
// query was in flight: follow adds it to that, and reports whether it did. others is how dirty
// the bucket stays because of others that are. A new bucket may displace another.
func (m *Memory) follow(p *bucketQuery, s bucket.Level, late time.Duration, newest, charges bool, others dirtiness, now int64) (charged bool) {
	m.lock(&p.location)
	t := p.location.table
	stored, dirty := m.read(&p.location)
	if p.alone != p.location.mark().alone {
		p.crossed = own
	}
	charged = charges && p.crossed >= behind
	known := stored
	if charged {
		known = m.plus(p, known, p.charge(), now)
	}
	switch newest = newest && max(dirty, p.local.dirty, p.crossed, others) == clean; {
	case s.Clear > now && (newest || known.Clear <= now):
		known = s
	case newest && known.Clear > now:
		known = bucket.Level{Clear: now} // the server's bucket was emptied
	case s.Clear > now:
		known = p.limit.Join(known, s, late, dirty == own)
	}
	if known.Clear <= now && stored.Clear <= now {
		t.mu.Unlock()
		return charged
	}
	// The report includes all that was reported to the server, but not what was decided here
	// meanwhile, or what was lost there.
	dirty = max(p.crossed, others)
	switch {
	case p.limit.Aligned: // and its time may be a report's
		dirty = min(dirty, behind)
	case charged && stored.Clear <= now && s.Clear <= now:
		dirty = own
	}
	m.enter(p, known, dirty, now)
	return charged
}

// plus returns the level s of p's bucket with that many units more. As this process alone has
// admitted no more than a bucket holds, the sum is beyond a full one only if the server has
// reported the charge before, in the answer to another request.
func (m *Memory) plus(p *bucketQuery, s bucket.Level, units, now int64) bucket.Level {
	l, size := &p.limit, p.location.partition.largest.Load() // other requests may have been admitted with it
	if s.Clear <= now {
		s = bucket.Level{Clear: now}
	}
	return l.AtLeastOf(size, s, units, m.moment(l, now))
}

// enter stores the level of p's bucket. It unlocks its table, which must be
// locked.
func (m *Memory) enter(p *bucketQuery, s bucket.Level, dirty dirtiness, now int64) {
	p.location.dirty, p.location.entered = dirty, false
	m.put(&p.location, s, now)
	if p.key != "" {
		if d := p.location.table.digest(p.hash); *d == (keyDigest{}) {
			*d = digestOf(p.key)
		}
	}
	p.location.table.mu.Unlock()
	if p.location.entered {
		m.makeRoom(&p.location, p.maxKeys, p.keeps, now)
	}
}

// charge adds p's charge to its bucket, marks it as dirty, and returns how dirty it is.
func (m *Memory) charge(p *bucketQuery) dirtiness {
	m.lock(&p.location)
	now := m.clock().Microseconds()
	stored, dirty := m.read(&p.location)
	if dirty = max(dirty, behind); stored.Clear <= now {
		dirty = own
	}
	m.enter(p, m.plus(p, stored, p.charge(), now), dirty, now)
	return dirty
}

// dirty returns the level of p's bucket at now, and its dirtiness, and notes in p what the Memory
// has decided alone up to now.
func (m *Memory) dirty(p *bucketQuery, now int64) (s bucket.Level, dirty dirtiness) {
	m.lock(&p.location)
	defer p.location.table.mu.Unlock()
	s, dirty = m.read(&p.location)
	if p.alone = p.location.mark().alone; s.Clear <= now {
		return bucket.Level{Clear: now}, clean
	}
	return s, dirty
}
