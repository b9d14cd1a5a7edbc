package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

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

// fitsEntries reports whether p's log has room for the request on b next to n other units.
func (p *location) fitsEntries(b *Bucket, n int64) bool {
	return b.need() <= b.Limit.Size && int64(p.entries.Total)+n <= b.Limit.Size-b.need() || b.free()
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
