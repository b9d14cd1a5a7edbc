package limiter

// A Memory can stand in for another store, whose levels it follows. What it has
// charged then is owed to the other store: when that decides again, it is told
// the level here, and goes on from whichever is higher.

// mirror takes over what the other store has reported of b: s, its clear time
// told from now; paid, that the other store had been told what was owed. What is
// held already stays if it is more: reports may overtake each other, and what is
// owed may not have been paid yet. A new bucket enters only if there is room.
func (m *Memory) mirror(b *Bucket, s state, paid bool) {
	if s.clear == 0 {
		return
	}
	p := m.place(b)
	t := &m.tables[p.table]
	t.mu.Lock()
	now := m.clock().Microseconds()
	s.clear += now
	stored, owed := t.get(p.hash)
	p.owed = owed && (!paid || s.clear < stored.clear)
	if stored.clear > now {
		// Both were told with some delay: times that lie less than half a drip
		// apart are the same.
		switch apart := s.clear - stored.clear; {
		case 2*apart <= -b.Limit.rate():
			s = stored
		case 2*apart < b.Limit.rate():
			s = state{clear: min(s.clear, stored.clear), slack: min(s.slack, stored.slack)}
		}
	}
	if (s != stored || owed != p.owed) && (stored.clear != 0 || !m.crowded()) {
		m.put(&p, s, now)
	}
	t.mu.Unlock()
	m.sweep(now)
}

// owe takes note that a bucket is owed that will have drained at clear.
func (m *Memory) owe(clear int64) {
	for {
		last := m.owes.Load()
		if clear <= last || m.owes.CompareAndSwap(last, clear) {
			return
		}
	}
}

// owed returns the levels of the buckets that are owed, the clear times told
// from now, and empty ones for the others; nil if none is owed.
func (m *Memory) owed(buckets []Bucket) []state {
	until := m.owes.Load()
	if until == 0 {
		return nil
	}
	now := m.clock().Microseconds()
	if until <= now {
		return nil
	}
	var levels []state
	for i := range buckets {
		p := m.place(&buckets[i])
		t := &m.tables[p.table]
		t.mu.Lock()
		stored, owed := t.get(p.hash)
		t.mu.Unlock()
		if owed && stored.clear > now {
			if levels == nil {
				levels = make([]state, len(buckets))
			}
			levels[i] = state{clear: stored.clear - now, slack: stored.slack}
		}
	}
	return levels
}

// giveBack takes what a request was charged out of b again. If it was not
// charged here but by the other store, it may not have been mirrored.
func (m *Memory) giveBack(b *Bucket, here bool) {
	p := m.place(b)
	t := &m.tables[p.table]
	t.mu.Lock()
	defer t.mu.Unlock()
	now := m.clock().Microseconds()
	stored, owed := t.get(p.hash)
	room := true
	if here {
		stored, owed, room = m.find(&p, b, now)
	}
	if room && stored.clear > now {
		p.owed = owed
		m.put(&p, b.Limit.remove(stored, now, b.Cost), now)
	}
}
