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
// charged, the charge that the report admits is not in the stored level yet. A new
// bucket may displace another.
func (m *Memory) follow(p *asked, s bucket.Level, late time.Duration, newest, charged bool, now int64) {
	m.lock(&p.place)
	t := p.place.table
	stored, dirty := t.get(p.hash)
	known := stored
	if charged {
		known = m.charged(p, known, now)
	}
	switch newest = newest && dirty == clean && p.told.dirty == clean && p.crossed == clean; {
	case s.Clear > now && (newest || known.Clear <= now):
		known = s
	case newest && known.Clear > now:
		known = bucket.Level{Clear: now} // the server's bucket was emptied
	case s.Clear > now:
		known = p.limit.Join(known, s, late, dirty == own)
	}
	if known.Clear <= now && stored.Clear <= now {
		t.mu.Unlock()
		return
	}
	// The report includes all that the server was told, but not what was decided here
	// meanwhile, or what was lost there.
	dirty = p.crossed
	switch {
	case p.limit.Aligned: // and its time may be a report's
		dirty = min(dirty, behind)
	case charged && stored.Clear <= now && s.Clear <= now:
		dirty = own
	}
	m.enter(p, known, dirty, now)
}

// charged returns the level s plus p's charge. As this process alone has admitted no
// more than a bucket holds, the sum is beyond a full one only if the server has
// told the charge before, in the answer to another request.
func (m *Memory) charged(p *asked, s bucket.Level, now int64) bucket.Level {
	l, size := &p.limit, p.place.partition.largest.Load() // other requests may have been admitted with it
	if s.Clear <= now {
		s = bucket.Level{Clear: now}
	}
	return l.AtLeastOf(size, s, p.charge(), m.moment(l, now))
}

// enter stores the level of p's bucket. It unlocks its table, which must be
// locked.
func (m *Memory) enter(p *asked, s bucket.Level, dirty dirtiness, now int64) {
	p.place.dirty, p.place.entered = dirty, false
	m.put(&p.place, s, now)
	if p.key != "" {
		p.place.table.name(p.hash, p.key)
	}
	p.place.table.mu.Unlock()
	if p.place.entered {
		m.makeRoom(&p.place, p.maxKeys, p.keeps, now)
	}
}

// charge adds p's charge to its bucket, marks it as dirty, and returns how dirty it is.
func (m *Memory) charge(p *asked) dirtiness {
	m.lock(&p.place)
	now := m.clock().Microseconds()
	stored, dirty := p.place.table.get(p.hash)
	if dirty = max(dirty, behind); stored.Clear <= now {
		dirty = own
	}
	m.enter(p, m.charged(p, stored, now), dirty, now)
	return dirty
}

// raise raises the level of b's bucket to s, if that is higher, and its dirtiness to as.
func (m *Memory) raise(b *Bucket, s bucket.Ahead, as dirtiness) {
	p := m.place(b)
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

// anyDirty reports whether any bucket may be dirty.
func (m *Memory) anyDirty() bool {
	until := m.dirtyEnd.Load()
	return until != 0 && until > m.clock().Microseconds()
}

// dirty returns the level of a bucket at now, and its dirtiness.
func (m *Memory) dirty(p *place, now int64) (s bucket.Level, dirty dirtiness) {
	m.lock(p)
	defer p.table.mu.Unlock()
	s, dirty = p.table.get(p.hash)
	if s.Clear <= now {
		return bucket.Level{Clear: now}, clean
	}
	return s, dirty
}

// dirtyUntil records that there is a dirty bucket which will have drained at
// clear.
func (m *Memory) dirtyUntil(clear int64) {
	for {
		last := m.dirtyEnd.Load()
		if clear <= last || m.dirtyEnd.CompareAndSwap(last, clear) {
			return
		}
	}
}

// markAllDirty raises the dirtiness of all buckets that hold something to at least
// as.
func (m *Memory) markAllDirty(as dirtiness) {
	now := m.clock().Microseconds()
	for _, p := range m.directory.Load().all {
		for i := range p.tables {
			t := &p.tables[i]
			t.mu.Lock()
			for j := range t.slots {
				s := &t.slots[j]
				if s.Clear > now {
					rest, dirty := decodeRest(s.Rest)
					s.Rest = encodeRest(rest, max(dirty, as))
					m.dirtyUntil(s.Clear)
				}
			}
			t.mu.Unlock()
		}
	}
}
