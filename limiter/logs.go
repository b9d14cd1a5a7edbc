package limiter

import (
	"maps"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// A Memory that is a Store of its own keeps a log of units next to the slot of each
// bucket of a [SlidingLog]. The slot has the summary. A log counts only while the
// summary is the one that was stored with it: once a Redis store has used the
// Memory as its fallback, the log is made again from the summary, with units as late
// as they can have been. It is kept even if the request is denied: made again for the next
// one, its units would be later still, and the time to retry wrong.
//
// A log takes room: it counts as several buckets, according to its size. It never
// takes the room of others, which would then gain what they have used. Where there is
// no room for it to grow, two neighbouring entries become one at the later time:
// that is never too little, and with many entries hardly too much. So that a flood
// of keys leaves logs some room, new keys evict others before their limit is full.

// openEntries sets p's log, trimmed, and the summary that goes with it.
func (m *Memory) openEntries(p *location, b *Bucket, now int64) {
	p.exact = true
	switch p.entries = p.partition.entries[p.hash%tables][p.hash]; {
	case p.level.Clear <= now:
		p.entries = bucket.NewEntryLog(b.Limit.of().Rate())
		return
	case p.entries == nil || p.entries.Summary != p.level:
		p.entries, p.made = bucket.EntryLogOf(p.level, b.Limit.of().Rate(), now), true
	}
	if p.entries.Trim(now); p.entries.Total == 0 {
		p.level = bucket.Level{Clear: now}
	}
}

// fitsEntries reports whether p's log has room for the request on b.
func (p *location) fitsEntries(b *Bucket) bool {
	return b.need() <= b.Limit.Size && int64(p.entries.Total)+p.claimed <= b.Limit.Size-b.need() || b.free()
}

// settleEntries charges p's log, whether or not it has room.
func (m *Memory) settleEntries(p *location, b *Bucket, now int64) {
	if b.shared { // another key of the request may have just charged it
		m.look(p, b, now)
		m.openEntries(p, b, now)
	}
	p.level = b.Limit.of().Add(p.level, b.Cost, m.moment(b.Limit.of(), now))
	most := max(b.Limit.Size, int64(p.entries.Total)) // or requests with a larger size would have room
	p.entries.Append(now, min(b.Cost, b.Limit.Size), m.mayGrow(p.partition, int64(len(p.entries.Entries)/(4*bucket.EntriesPerKey)+2)))
	p.entries.Keep(most)
	m.put(p, p.level, now)
}

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
	p.entries.Counted = int32(keys) //nolint:gosec // a few thousand
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
