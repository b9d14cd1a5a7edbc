package bucket

// EntryLog is the log of one bucket: the units in the window that ends now, and
// those that have left it but are still in memory. A zero EntryLog is not usable;
// see NewEntryLog.
type EntryLog struct {
	Entries []uint64 // oldest first, see entry; those before head have left
	base    int64    // the time, in µs, from which the times of entries count
	rate    int64    // the length of the window, in µs
	Summary Level    // what is stored in the slot
	head    int32
	Total   int32 // the units of all entries from head on
	Counted int32 // as how many buckets the log was counted
}

const (
	// unitBits is the number of bits of an entry that are its units. The other
	// bits are its time.
	unitBits = 14

	// EntriesPerKey is the number of entries that count as one bucket more, and
	// entriesKeys the number of buckets as which a log without entries counts, besides
	// the bucket itself.
	EntriesPerKey = 4
	entriesKeys   = 4

	// MinEntriesRoom is the least number of buckets that there is room for in a limit
	// with logs, so that one log always fits.
	MinEntriesRoom = 16
)

// NewEntryLog returns an empty log of a window of the given length.
func NewEntryLog(rate int64) *EntryLog { return &EntryLog{rate: rate} }

// EntryLogOf returns a log of the units that a summary counts, as late as they can have
// been.
func EntryLogOf(s Level, rate, now int64) *EntryLog {
	g := NewEntryLog(rate)
	before, last := s.Counts()
	g.Append(min(s.Clear-2*rate-1, now), min(before, MaxLogUnits), true)
	g.Append(min(s.Clear-rate-1, now), min(last, MaxLogUnits), true)
	g.Trim(now)
	return g
}

// Saved returns what LoadEntryLog makes a log like g of. Entries are the log's own.
func (g *EntryLog) Saved() (rate, base int64, entries []uint64) { return g.rate, g.base, g.live() }

// LoadEntryLog returns the log of which Saved has returned that, or nil if there is none. The
// entries become its own, and none is later than the given time.
func LoadEntryLog(rate, base int64, entries []uint64, latest int64) *EntryLog {
	g := &EntryLog{Entries: entries, base: base, rate: rate}
	before, total := uint64(0), int64(0)
	for _, e := range entries {
		if UnitsOf(e) == 0 || e>>unitBits < before || g.time(e) > latest {
			return nil
		}
		before = e >> unitBits
		total += UnitsOf(e)
	}
	g.Total = int32(total) // checked
	if rate <= 0 || rate > Horizon/3 || base < latest-2*Horizon || total > 2*MaxLogUnits {
		return nil
	}
	return g
}

// Keys returns as how many buckets g counts.
func (g *EntryLog) Keys() int { return entriesKeys + (cap(g.Entries)+EntriesPerKey-1)/EntriesPerKey }

// time returns when the units of an entry were charged, in µs.
func (g *EntryLog) time(entry uint64) int64 { return g.base + int64(entry>>unitBits) } // less than 2^50

// UnitsOf returns the units of an entry.
func UnitsOf(entry uint64) int64 { return int64(entry & (1<<unitBits - 1)) } // less than 2^14

// live returns the entries that have not left the window.
func (g *EntryLog) live() []uint64 { return g.Entries[g.head:] }

// Trim removes what has left the window that ends now.
func (g *EntryLog) Trim(now int64) {
	for int(g.head) < len(g.Entries) && g.time(g.Entries[g.head]) <= now-g.rate {
		g.Total -= int32(UnitsOf(g.Entries[g.head])) // less than 2^14
		g.head++
	}
	if int(g.head) == len(g.Entries) {
		g.Entries, g.head = g.Entries[:0], 0
	}
}

// clear returns the time from now until nothing is left in the window, in µs. g
// must be trimmed.
func (g *EntryLog) clear(now int64) int64 {
	if len(g.Entries) == 0 {
		return 0
	}
	return g.time(g.Entries[len(g.Entries)-1]) + g.rate - now
}

// Append adds units at a time that is no earlier than any entry. With grow
// it may take more memory.
func (g *EntryLog) Append(at, more int64, grow bool) {
	if more == 0 {
		return
	}
	g.Total += int32(more) // at most MaxLogUnits
	if n := len(g.Entries); n > int(g.head) {
		if last := &g.Entries[n-1]; g.time(*last) == at && UnitsOf(*last)+more < 1<<unitBits {
			*last += uint64(more) // not negative
			return
		}
	} else {
		g.base = at
	}
	if len(g.Entries) == cap(g.Entries) {
		g.makeRoom(grow)
	}
	if at-g.base >= Horizon/2 { // a window is shorter
		from := g.time(g.Entries[g.head])
		for i := range g.live() {
			g.live()[i] -= uint64(from-g.base) << unitBits // not negative
		}
		g.base = from
	}
	g.Entries = append(g.Entries, uint64(at-g.base)<<unitBits|uint64(more)) // not negative
}

// makeRoom makes room for at least one entry more.
func (g *EntryLog) makeRoom(grow bool) {
	live := g.live()
	switch n := len(live); {
	case n > 0 && !grow && int(g.head) <= n/8:
		g.coarsen()
	case int(g.head) <= n/8, cap(g.Entries) > 2*(n+n/4+4):
		g.Entries, g.head = append(make([]uint64, 0, n+n/4+4), live...), 0
	default:
		g.Entries, g.head = append(g.Entries[:0], live...), 0
	}
}

// coarsen joins pairs of entries, at the time of the later one.
func (g *EntryLog) coarsen() {
	live := g.live()
	kept := g.Entries[:0]
	for i := 0; i < len(live); i++ {
		if i+1 < len(live) && UnitsOf(live[i])+UnitsOf(live[i+1]) < 1<<unitBits {
			i++
			kept = append(kept, live[i]+uint64(UnitsOf(live[i-1]))) // not negative
			continue
		}
		kept = append(kept, live[i])
	}
	g.Entries, g.head = kept, 0
}

// Wait returns the time from now until that many units have left the window, in µs.
// There must be as many.
func (g *EntryLog) Wait(leave, now int64) int64 {
	if leave <= 0 {
		return 0
	}
	for _, entry := range g.live() {
		if leave -= UnitsOf(entry); leave <= 0 {
			return g.time(entry) + g.rate - now
		}
	}
	return g.rate
}

// Level returns what g holds for a request of the given cost, and the times until it has
// room next to that many units that are held. g must be trimmed.
func (g *EntryLog) Level(l *Limit, cost, others, now int64) *EntriesLevel {
	most := l.Size - others
	v := &EntriesLevel{Units: int64(g.Total), Clear: g.clear(now), One: g.Wait(int64(g.Total)+1-most, now)}
	if v.Again = v.One; cost != 1 {
		if v.Again = 0; cost <= l.Size {
			v.Again = g.Wait(int64(g.Total)+cost-most, now)
		}
	}
	return v
}

// Keep drops the oldest units beyond the given number, which denied requests may have
// added: they leave first, and make no request wait. Of an entry that is partly beyond it,
// the others stay: if it stayed as a whole, each denied request would make the log
// longer.
func (g *EntryLog) Keep(most int64) {
	for over := int64(g.Total) - most; over > 0; over = int64(g.Total) - most {
		oldest := &g.Entries[g.head]
		if n := UnitsOf(*oldest); n <= over {
			g.Total -= int32(n) // less than 2^14
			g.head++
			continue
		}
		*oldest -= uint64(over) // less than 2^14
		g.Total = int32(most)   // less than g.total
	}
}
