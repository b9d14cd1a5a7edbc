package limiter

import "time"

// A Memory that stands in for a Redis store holds each bucket at least as full as
// the server does, and knows which buckets are dirty: of which the server may know
// less.

// follow takes over what a server has reported of a bucket: s, its clear time
// told from now. It is told at most late after it was so, and so is never too
// low. What is held already stays if it is more, unless the report is the newest
// and was made of the same charges. With charged, what the report admits is not
// in the level here. A new bucket may displace another.
func (m *Memory) follow(p *tracked, s state, late time.Duration, newest, charged bool) {
	m.lock(&p.place)
	t := p.place.table
	now := m.clock().Microseconds()
	stored, dirty := t.get(p.hash)
	level := stored
	if charged {
		if level.clear <= now {
			level = state{clear: now}
		}
		level = p.limit.add(level, p.cost)
	}
	s.clear += now
	switch newest = newest && dirty == clean && !p.told && !p.crossed; {
	case newest && s.clear > now:
		level = s
	case newest && level.clear > now:
		level = state{clear: now} // it has been emptied
	case s.clear > now:
		level = p.limit.higher(level, s, late)
	}
	if level.clear <= now && stored.clear <= now {
		t.mu.Unlock()
		return
	}
	// What was decided here meanwhile, or lost there, is not in the report.
	switch {
	case !p.crossed:
		dirty = clean
	case charged:
		dirty = ahead
	}
	m.enter(p, level, dirty, now)
}

// enter stores p's bucket, whose table is locked, and unlocks that.
func (m *Memory) enter(p *tracked, level state, dirty dirtiness, now int64) {
	p.place.dirty, p.place.entered = dirty, false
	m.put(&p.place, level, now)
	if p.key != "" {
		p.place.table.name(p.hash, p.key)
	}
	p.place.table.mu.Unlock()
	if p.place.entered {
		m.makeRoom(&p.place, p.maxKeys, p.keeps, now)
	}
}

// higher returns the higher of two levels of one bucket, which were told with
// delays of at most late. Of two that tell of the same drip, the one with the
// later time may be the one that holds less, and so has more slack.
func (l Limit) higher(a, b state, late time.Duration) state {
	if a.clear < b.clear {
		a, b = b, a
	}
	same := l.rate() / 2
	if l.DripInterval <= 2*late {
		same = l.rate() // or so it may be
	}
	if a.clear-b.clear < same {
		a.slack = min(a.slack, b.slack)
	}
	return a
}

// charge adds p's cost to its bucket, whether there is room or not, and makes it
// dirty.
func (m *Memory) charge(p *tracked) {
	m.lock(&p.place)
	now := m.clock().Microseconds()
	stored, _ := p.place.table.get(p.hash)
	if stored.clear <= now {
		stored = state{clear: now}
	}
	m.enter(p, p.limit.add(stored, p.cost), ahead, now)
}

// anyDirty reports whether any bucket may be dirty.
func (m *Memory) anyDirty() bool {
	until := m.dirtyEnd.Load()
	return until != 0 && until > m.clock().Microseconds()
}

// dirty returns the level of a bucket, its clear time told from now, and whether
// it is dirty.
func (m *Memory) dirty(p *place) (s state, dirty dirtiness) {
	m.lock(p)
	defer p.table.mu.Unlock()
	s, dirty = p.table.get(p.hash)
	if s.clear -= m.clock().Microseconds(); s.clear <= 0 {
		return s, clean
	}
	return s, dirty
}

// dirtyUntil records that a bucket is dirty that will have drained at clear.
func (m *Memory) dirtyUntil(clear int64) {
	for {
		last := m.dirtyEnd.Load()
		if clear <= last || m.dirtyEnd.CompareAndSwap(last, clear) {
			return
		}
	}
}

// markAllDirty makes all buckets dirty, at least like that, that hold something.
func (m *Memory) markAllDirty(as dirtiness) {
	now := m.clock().Microseconds()
	for _, p := range m.directory.Load().all {
		for i := range p.tables {
			t := &p.tables[i]
			t.mu.Lock()
			for j := range t.slots {
				s := &t.slots[j]
				if s.clear > now {
					slack, dirty := decodeSlack(s.slack)
					s.slack = encodeSlack(slack, max(dirty, as))
					m.dirtyUntil(s.clear)
				}
			}
			t.mu.Unlock()
		}
	}
}
