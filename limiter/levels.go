package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

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

// look reads the level of p's bucket at now.
func (m *Memory) look(p *location, b *Bucket, now int64) {
	stored, dirty := m.read(p)
	if stored.Clear <= now {
		dirty = clean
	}
	p.dirty = dirty
	p.level = stored.At(now)
}

// settle charges p's bucket if charge, or counts a request that is denied if that is
// wanted, and stores it if anything has changed.
func (m *Memory) settle(p *location, b *Bucket, now int64, charge bool) {
	switch {
	case charge || p.fits && b.Limit.CountDenied:
		p.level = b.Limit.of().Add(p.level, b.Cost, m.moment(b.Limit.of(), now))
	case b.Limit.CountDenied:
		p.level = b.Limit.of().Count(p.level, p.inFlight, b.Cost, m.moment(b.Limit.of(), now))
	}
	if charge || p.unsure && p.dirty == unsure || b.Limit.CountDenied && p.level.Clear > now {
		m.put(p, p.level, now)
	}
}

// moment returns now, which m's clock has just shown, with what l needs to know of it.
func (m *Memory) moment(l *bucket.Limit, now int64) bucket.Moment {
	if !l.Aligned {
		return bucket.Moment{Now: now}
	}
	// The monotonic clock does not do for them: it may stop while the machine sleeps.
	return bucket.Moment{Now: now, Unix: m.unix(now)}
}

// put stores s as the level of the bucket at p.
func (m *Memory) put(p *location, s bucket.Level, now int64) {
	s.Clear = max(s.Clear, 1) // 0 marks a free slot
	more, entered := p.table.put(p.hash, s, p.dirty, now)
	if entered {
		m.count(p.partition, more)
		p.entered = true
	}
	if p.partition.entries == nil {
		return
	}
	if entered && more < 1 {
		m.dropAllEntries(p.partition, p.hash%tables, now)
	}
	if m.keepEntries(p); p.entries != nil {
		p.entries.Summary = s
	}
}

// stored returns the level of b, and whether b exists.
func (m *Memory) stored(b *Bucket) (bucket.Level, bool) {
	p := m.location(b)
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	s, _ := p.table.get(p.hash)
	return s, s.Clear != 0
}
