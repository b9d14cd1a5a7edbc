package limiter

import (
	"maps"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// mayGrow reports whether a log of p may take the room of that many buckets more.
func (m *Memory) mayGrow(p *partition, more int64) bool {
	u := p.usage
	if p.id.shared {
		return u.shared.Load()+more <= max(m.room(u)/8, minShared)
	}
	return u.held.Load()+more <= m.room(u) && m.held.Load()+more <= m.maxKeys.Load() &&
		(!u.keeps.Load() || m.kept.Load()+more <= m.maxKeys.Load()/2)
}

// keepEntries stores p's log, or removes the log of p's bucket if p has none, and counts
// it. The lock of p's table must be held.
func (m *Memory) keepEntries(p *location) {
	if p.entries == nil {
		m.dropEntries(p.partition, p.hash)
		return
	}
	logs := &p.partition.entries[p.hash%tables]
	if old := (*logs)[p.hash]; old != p.entries {
		m.dropEntries(p.partition, p.hash)
		if *logs == nil {
			*logs = make(map[uint64]*bucket.EntryLog)
			p.partition.usage.entries.Store(true)
		}
		(*logs)[p.hash] = p.entries
	}
	keys := p.entries.Keys()
	m.count(p.partition, keys-int(p.entries.Counted))
	p.entries.Counted = int32(keys) // a few thousand
}

// dropEntries removes the log of a bucket, if it has one. The lock of its table must be
// held.
func (m *Memory) dropEntries(p *partition, hash uint64) {
	if p.entries == nil {
		return
	}
	if g := p.entries[hash%tables][hash]; g != nil {
		m.count(p, -int(g.Counted))
		delete(p.entries[hash%tables], hash)
	}
}

// dropAllEntries removes the logs of the buckets that have left the i-th table of p, and
// those from which all units have left: then those buckets are empty. The lock of
// the table must be held.
func (m *Memory) dropAllEntries(p *partition, i uint64, now int64) {
	if p.entries == nil || p.entries[i] == nil {
		return
	}
	t, before := &p.tables[i], len(p.entries[i])
	for hash, g := range p.entries[i] {
		known := t.has(hash)
		if g.Trim(now); g.Total > 0 && known {
			continue
		}
		if known {
			t.slots[t.find(hash)].Level = bucket.Level{Clear: max(now, 1)} // as if it had drained just now
		}
		m.dropEntries(p, hash)
	}
	switch n := len(p.entries[i]); {
	case n == 0:
		p.entries[i] = nil
	case n < before/2: // maps do not shrink
		p.entries[i] = maps.Collect(maps.All(p.entries[i]))
	}
}
