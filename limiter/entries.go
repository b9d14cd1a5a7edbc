package limiter

import "maps"

// A Memory that is a Store of its own keeps a log of units beside the slot of each
// bucket of a [Log] Limit. The slot has the summary. A log counts only while the
// summary is the one that was stored with it: once a Redis store has used the
// Memory as its fallback, the log is made anew from the summary, with units as late
// as they can have been. It is kept even if the request is denied: made anew for the next
// one, its units would be later still, and the time to retry wrong.
//
// A log takes room: it counts as several buckets, according to its size. It never
// takes that of others, which would then gain what they have used. Where there is
// no room for it to grow, two neighbouring entries become one at the later time:
// that is never too little, and with many entries hardly too much. So that a flood
// of keys leaves logs some room, new keys evict others before their limit is full.

// entryLog is the log of one bucket: the units in the window that ends now, and
// those that have left it but are still in memory. A zero entryLog is not usable;
// see newEntryLog.
type entryLog struct {
	entries []uint64 // oldest first, see entry; those before head have left
	base    int64    // the time, in µs, from which those of entries count
	rate    int64    // the length of the window, in µs
	summary level    // what is stored in the slot
	head    int32
	total   int32 // the units of all entries from head on
	counted int32 // as how many buckets the log was counted
}

const (
	// unitBits is the number of bits of an entry that are its units. The other
	// bits are its time.
	unitBits = 14

	// entriesPerKey is the number of entries that count as one bucket more, and
	// entriesKeys the number of buckets as which a log without entries counts, besides
	// the bucket itself.
	entriesPerKey = 4
	entriesKeys   = 4

	// minEntriesRoom is the least number of buckets that there is room for in a limit
	// with logs, so that one log always fits.
	minEntriesRoom = 16
)

// newEntryLog returns an empty log of a window of the given length.
func newEntryLog(rate int64) *entryLog { return &entryLog{rate: rate} }

// entryLogOf returns a log of the units that a summary counts, as late as they can have
// been.
func entryLogOf(s level, rate, now int64) *entryLog {
	g := newEntryLog(rate)
	before, last := s.counts()
	g.append(min(s.clear-2*rate-1, now), min(before, MaxLogUnits), true)
	g.append(min(s.clear-rate-1, now), min(last, MaxLogUnits), true)
	g.trim(now)
	return g
}

// keys returns as how many buckets g counts.
func (g *entryLog) keys() int { return entriesKeys + (cap(g.entries)+entriesPerKey-1)/entriesPerKey }

// time returns when the units of an entry were charged, in µs.
func (g *entryLog) time(entry uint64) int64 { return g.base + int64(entry>>unitBits) } //nolint:gosec // less than 2^50

// units returns the units of an entry.
func units(entry uint64) int64 { return int64(entry & (1<<unitBits - 1)) } //nolint:gosec // less than 2^14

// live returns the entries that have not left the window.
func (g *entryLog) live() []uint64 { return g.entries[g.head:] }

// trim removes what has left the window that ends now.
func (g *entryLog) trim(now int64) {
	for int(g.head) < len(g.entries) && g.time(g.entries[g.head]) <= now-g.rate {
		g.total -= int32(units(g.entries[g.head])) //nolint:gosec // less than 2^14
		g.head++
	}
	if int(g.head) == len(g.entries) {
		g.entries, g.head = g.entries[:0], 0
	}
}

// clear returns the time from now until nothing is left in the window, in µs. g
// must be trimmed.
func (g *entryLog) clear(now int64) int64 {
	if len(g.entries) == 0 {
		return 0
	}
	return g.time(g.entries[len(g.entries)-1]) + g.rate - now
}

// append adds units at a time that is no earlier than that of any entry. With grow
// it may take more memory.
func (g *entryLog) append(at, more int64, grow bool) {
	if more == 0 {
		return
	}
	g.total += int32(more) //nolint:gosec // at most MaxLogUnits
	if n := len(g.entries); n > int(g.head) {
		if last := &g.entries[n-1]; g.time(*last) == at && units(*last)+more < 1<<unitBits {
			*last += uint64(more) //nolint:gosec // not negative
			return
		}
	} else {
		g.base = at
	}
	if len(g.entries) == cap(g.entries) {
		g.makeRoom(grow)
	}
	if at-g.base >= horizon/2 { // a window is shorter
		from := g.time(g.entries[g.head])
		for i := range g.live() {
			g.live()[i] -= uint64(from-g.base) << unitBits //nolint:gosec // not negative
		}
		g.base = from
	}
	g.entries = append(g.entries, uint64(at-g.base)<<unitBits|uint64(more)) //nolint:gosec // not negative
}

// makeRoom makes room for at least one entry more.
func (g *entryLog) makeRoom(grow bool) {
	live := g.live()
	switch n := len(live); {
	case n > 0 && !grow && int(g.head) <= n/8:
		g.coarsen()
	case int(g.head) <= n/8, cap(g.entries) > 2*(n+n/4+4):
		g.entries, g.head = append(make([]uint64, 0, n+n/4+4), live...), 0
	default:
		g.entries, g.head = append(g.entries[:0], live...), 0
	}
}

// coarsen joins pairs of entries, at the time of the later one.
func (g *entryLog) coarsen() {
	live := g.live()
	kept := g.entries[:0]
	for i := 0; i < len(live); i++ {
		if i+1 < len(live) && units(live[i])+units(live[i+1]) < 1<<unitBits {
			i++
			kept = append(kept, live[i]+uint64(units(live[i-1]))) //nolint:gosec // not negative
			continue
		}
		kept = append(kept, live[i])
	}
	g.entries, g.head = kept, 0
}

// wait returns the time from now until so many units have left the window, in µs.
// There must be as many.
func (g *entryLog) wait(leave, now int64) int64 {
	if leave <= 0 {
		return 0
	}
	for _, entry := range g.live() {
		if leave -= units(entry); leave <= 0 {
			return g.time(entry) + g.rate - now
		}
	}
	return g.rate
}

// level returns what g holds for a request of the given cost, and the times until it has
// room beside so many units that are held. g must be trimmed.
func (g *entryLog) level(l *Limit, cost, beside, now int64) *entriesLevel {
	most := l.Size - beside
	v := &entriesLevel{units: int64(g.total), clear: g.clear(now), one: g.wait(int64(g.total)+1-most, now)}
	if v.again = v.one; cost != 1 {
		if v.again = 0; cost <= l.Size {
			v.again = g.wait(int64(g.total)+cost-most, now)
		}
	}
	return v
}

// openEntries sets p's log, trimmed, and the summary that goes with it.
func (m *Memory) openEntries(p *place, b *Bucket, now int64) {
	p.exact = true
	switch p.entries = p.partition.entries[p.hash%tables][p.hash]; {
	case p.level.clear <= now:
		p.entries = newEntryLog(b.Limit.rate())
		return
	case p.entries == nil || p.entries.summary != p.level:
		p.entries, p.made = entryLogOf(p.level, b.Limit.rate(), now), true
	}
	if p.entries.trim(now); p.entries.total == 0 {
		p.level = level{clear: now}
	}
}

// fitsEntries reports whether p's log has room for the request on b.
func (p *place) fitsEntries(b *Bucket) bool {
	return b.need() <= b.Limit.Size && int64(p.entries.total)+p.claimed <= b.Limit.Size-b.need()
}

// settleEntries charges p's log, whether or not it has room.
func (m *Memory) settleEntries(p *place, b *Bucket, now int64) {
	if b.shared { // another key of the request may have just charged it
		m.look(p, b, now)
		m.openEntries(p, b, now)
	}
	p.level = b.Limit.add(p.level, b.Cost, m.moment(&b.Limit, now))
	most := max(b.Limit.Size, int64(p.entries.total)) // or requests with a larger size would have room
	p.entries.append(now, min(b.Cost, b.Limit.Size), m.mayGrow(p.partition, int64(len(p.entries.entries)/(4*entriesPerKey)+2)))
	p.entries.keep(most)
	m.put(p, p.level, now)
}

// keep drops the oldest units beyond the given number, which denied requests may have
// added: they leave first, and make nobody wait. Of an entry that is partly beyond it,
// the others stay: if it stayed as a whole, each denied request would make the log
// longer.
func (g *entryLog) keep(most int64) {
	for over := int64(g.total) - most; over > 0; over = int64(g.total) - most {
		oldest := &g.entries[g.head]
		if n := units(*oldest); n <= over {
			g.total -= int32(n) //nolint:gosec // less than 2^14
			g.head++
			continue
		}
		*oldest -= uint64(over) //nolint:gosec // less than 2^14
		g.total = int32(most)   //nolint:gosec // less than g.total
	}
}

// mayGrow reports whether a log of p may take the room of so many buckets more.
func (m *Memory) mayGrow(p *partition, more int64) bool {
	u := p.usage
	if p.id.shared {
		return u.shared.Load()+more <= max(m.room(u)/8, minShared)
	}
	return u.held.Load()+more <= m.room(u) && m.held.Load()+more <= m.maxKeys.Load() &&
		(!u.keeps.Load() || m.kept.Load()+more <= m.maxKeys.Load()/2)
}

// keepEntries stores p's log, or removes that of p's bucket if p has none, and counts
// it. The lock of p's table must be held.
func (m *Memory) keepEntries(p *place) {
	if p.entries == nil {
		m.dropEntries(p.partition, p.hash)
		return
	}
	logs := &p.partition.entries[p.hash%tables]
	if old := (*logs)[p.hash]; old != p.entries {
		m.dropEntries(p.partition, p.hash)
		if *logs == nil {
			*logs = make(map[uint64]*entryLog)
			p.partition.usage.entries.Store(true)
		}
		(*logs)[p.hash] = p.entries
	}
	keys := p.entries.keys()
	m.count(p.partition, keys-int(p.entries.counted))
	p.entries.counted = int32(keys) //nolint:gosec // a few thousand
}

// dropEntries removes the log of a bucket, if it has one. The lock of its table must be
// held.
func (m *Memory) dropEntries(p *partition, hash uint64) {
	if p.entries == nil {
		return
	}
	if g := p.entries[hash%tables][hash]; g != nil {
		m.count(p, -int(g.counted))
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
		if g.trim(now); g.total > 0 && known {
			continue
		}
		if known {
			t.slots[t.find(hash)].level = level{clear: max(now, 1)} // as if it had drained just now
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
