package limiter

import "math/rand/v2"

// When a limit is full, a new bucket displaces the emptiest one of a sample. That
// comes as close to unlimited memory as a cap allows: an unknown key gets its
// units, and what is lost mattered least. The single requests of a flood of keys
// displace each other, while fuller buckets stay. A client whose bucket is evicted
// gains only what the bucket held.

const (
	// sampled is the number of buckets in a sample, of which the emptiest is
	// evicted.
	sampled = 16

	// forgetAtOnce is the maximum number of buckets evicted for each new one: more
	// than one, so that the number shrinks after the maximum was lowered.
	forgetAtOnce = 8
)

// makeRoom evicts buckets if there are too many after the one at p was added.
// maxKeys and keeps are that bucket's options for its limit. No lock may be held.
func (m *Memory) makeRoom(p *location, maxKeys int, keeps bool, now int64) {
	if p.partition.id.rate != otherNames {
		p.partition.usage.agree(maxKeys, keeps)
	}
	table := p.hash % tables
	for n := 0; n < forgetAtOnce && m.forgetOne(p.partition, table, p.hash, now); n++ {
		table = anyTable() // the first table may have just been emptied
	}
}

// forgetOne evicts a bucket if p's limit, or the process, holds too many, and
// reports whether it did. It spares the bucket with hash except, and prefers the
// given table.
func (m *Memory) forgetOne(p *partition, table, except uint64, now int64) bool {
	u := p.usage
	room := m.room(u)
	if except != 0 && u.entries.Load() {
		room -= room / 16 // see logs.go
	}
	switch {
	case u.held.Load() > room && !u.keeps.Load():
		if u.parts.Load() > 1 {
			p, table = m.largest(u, p), anyTable()
		}
	case m.held.Load() > m.maxKeys.Load():
		if u = m.largestUsage(); u == nil {
			return false
		}
		p, table = m.largest(u, p), anyTable()
	default:
		return false
	}
	return p != nil && m.forget(p, table, except, now, false)
}

// anyTable returns a random table in which to look for a bucket to evict.
func anyTable() uint64 { return rand.Uint64() } //nolint:gosec // nothing secret

// largestUsage returns the usage of the Name with the most buckets among those
// that evict, or nil if there is none.
func (m *Memory) largestUsage() (most *usage) {
	for _, p := range m.directory.Load().all {
		if u := p.usage; !u.keeps.Load() && u.held.Load() > 0 && (most == nil || u.held.Load() > most.held.Load()) {
			most = u
		}
	}
	return most
}

// largest returns the partition of u with the most buckets, or p if none has more.
// It skips partitions of shared buckets.
func (m *Memory) largest(u *usage, p *partition) *partition {
	if p.usage != u || p.id.shared {
		p = nil
	}
	for _, q := range m.directory.Load().all {
		if q.usage == u && !q.id.shared && (p == nil || q.held.Load() > p.held.Load()) {
			p = q
		}
	}
	return p
}

// emptiness returns the order of p's buckets at now.
func (p *partition) emptiness(now int64) emptiness {
	if p.mixed() || p.id.dripSize == 1 {
		return emptiness{now: now}
	}
	return emptiness{&p.limit, now}
}

// forget evicts the emptiest bucket of a sample, and reports whether it did. The
// sample starts in the given table of p, modulo the number of tables. It spares
// the bucket with hash except; with drained it only removes a bucket that is
// empty.
func (m *Memory) forget(p *partition, table, except uint64, now int64, drained bool) bool {
	best, seen, order := slot{}, 0, p.emptiness(now)
	for n := uint64(0); n < tables && seen < sampled; n++ {
		t := &p.tables[(table+n)%tables]
		t.mu.Lock()
		if t.used > 0 {
			seen += t.emptiest(int(rand.Uint32N(uint32(len(t.slots)))), sampled-seen, except, &order, &best) //nolint:gosec // far fewer than 2^32
		}
		if n == 0 && seen == sampled {
			// Usually the whole sample is in one table, whose lock is already
			// held.
			return m.remove(p, t, best, now, drained)
		}
		t.mu.Unlock()
	}
	if best.Clear == 0 {
		return false
	}
	t := &p.tables[best.hash%tables]
	t.mu.Lock()
	return m.remove(p, t, best, now, drained)
}

// remove removes bucket s from t unless it has changed. It unlocks t, which must
// be locked.
func (m *Memory) remove(p *partition, t *table, s slot, now int64, drained bool) bool {
	if t.used == 0 || drained && s.Clear > now {
		t.mu.Unlock()
		return false
	}
	i := t.find(s.hash)
	if t.slots[i] != s {
		t.mu.Unlock()
		return false
	}
	digest := t.remove(i)
	m.count(p, -1)
	m.dropEntries(p, s.hash)
	t.mu.Unlock()
	if s.Clear > now {
		p.usage.forgotten.Add(1)
		if to := m.leader.Load(); to != nil && digest != (keyDigest{}) && !p.mixed() {
			to.evicted(removal{p, s.hash, digest, s.stored()})
		}
	}
	return true
}

// holds reports whether m has a bucket with the removal's identity.
func (m *Memory) holds(r *removal) bool {
	t := &r.partition.tables[r.hash%tables]
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.has(r.hash)
}
