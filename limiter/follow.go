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
		p.location.table.name(p.hash, p.key)
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

// raise raises the level of b's bucket to s, if that is higher, and its dirtiness to as.
func (m *Memory) raise(b *Bucket, s bucket.Ahead, as dirtiness) {
	p := m.location(b)
	m.lock(&p)
	now := m.clock().Microseconds()
	m.look(&p, b, now)
	p.dirty = max(p.dirty, as)
	m.put(&p, b.Limit.of().Join(p.level, s.After(now), 0, true), now)
	p.table.mu.Unlock()
	if p.entered {
		m.makeRoom(&p, b.MaxKeys, b.keeps(), now)
	}
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

// tableMark is what all buckets of a table have in common. The lock of the table guards it.
type tableMark struct {
	epoch uint64 // for which the dirtiness in the table holds, see Memory.epoch
	alone uint16 // how often the Memory has decided on one of them alone, while servers led: modulo 2^16, as a word more in each query is slower
}

// mark returns the mark of p's table.
func (p *location) mark() *tableMark { return &p.partition.marks[p.hash%tables] }

// read returns the level that is stored of p's bucket, whose table is locked, and its
// dirtiness. All buckets of a table that is of an older epoch become dirty first.
func (m *Memory) read(p *location) (bucket.Level, dirtiness) {
	if mark, epoch := p.mark(), m.epoch.Load(); mark.epoch != epoch {
		mark.epoch = epoch
		for i := range p.table.slots {
			if s := &p.table.slots[i]; s.Clear != 0 {
				rest, _ := decodeRest(s.Rest)
				s.Rest = encodeRest(rest, own)
			}
		}
	}
	return p.table.get(p.hash)
}

// decidesAlone records that the Memory decides on p's bucket, whose table is locked, as a Store
// of its own: servers that lead do not know of it, and neither do their answers that are on
// their way.
func (m *Memory) decidesAlone(p *location) {
	if m.leader.Load() != nil {
		p.dirty = own
		p.mark().alone++
	}
}
