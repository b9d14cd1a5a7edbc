package limiter

import (
	"cmp"
	"maps"
	"slices"
)

// drop removes p if it has been empty for a whole sweep. Its counters stay.
func (m *Memory) drop(p *partition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !p.idle {
		p.idle = true
		return
	}
	empty := true
	for i := range p.tables {
		p.tables[i].mu.Lock()
		empty = empty && p.tables[i].used == 0
	}
	if empty && p.holds.Load() == 0 && !p.dead {
		p.dead = true
		old := m.directory.Load()
		all := slices.DeleteFunc(slices.Clone(old.all), func(q *partition) bool { return q == p })
		usages := old.usages
		if u := p.usage; u.parts.Add(-1) == 0 && u != old.others && u.forgotten.Load() == 0 && u.onShared.Load() == 0 {
			usages = maps.Clone(usages)
			delete(usages, u.name)
		}
		m.directory.Store(newDirectory(all, usages, old.others))
	}
	for i := range p.tables {
		p.tables[i].mu.Unlock()
	}
}

// LimitUsage reports how much of its room a limit uses.
type LimitUsage struct {
	// The Name of the limit's buckets. It is also empty for limits that have no
	// room of their own because there are more than 4096 Names.
	Name string

	// The number of buckets held, including drained ones that have not been
	// removed yet, and the maximum. Neither includes shared buckets. In a Memory
	// that is a Store of its own, a sliding log counts as five buckets, and as one
	// more for each four entries.
	Buckets, MaxKeys int

	// The number of buckets evicted since the Memory was made, to make room for
	// others, while they still held something.
	Forgotten uint64

	// The number of requests decided on a shared bucket since the Memory was made.
	Shared uint64

	// The number of units that requests hold, see Bucket.Hold.
	Held int64
}

// Usage returns the usage of each limit that has, or has had, buckets, sorted by
// Name. It is cheap enough to be called every few seconds.
func (m *Memory) Usage() []LimitUsage {
	d := m.directory.Load()
	limits := make([]LimitUsage, 0, len(d.usages)+1)
	held := make(map[*usage]int64)
	for _, p := range d.all {
		held[p.usage] += p.holds.Load()
	}
	add := func(u *usage) {
		limits = append(limits, LimitUsage{
			Name:      u.name,
			Buckets:   int(u.held.Load()),
			MaxKeys:   int(m.room(u)),
			Forgotten: u.forgotten.Load(),
			Shared:    u.onShared.Load(),
			Held:      held[u],
		})
	}
	for _, u := range d.usages {
		add(u)
	}
	if d.others.parts.Load() > 0 || d.others.forgotten.Load() > 0 {
		add(d.others)
	}
	slices.SortFunc(limits, func(a, b LimitUsage) int { return cmp.Compare(a.Name, b.Name) })
	return limits
}

// sweep removes drained buckets if a sweep is due. All that changes buckets calls it, and so Unsaved
// learns that something has changed.
func (m *Memory) sweep(now int64) {
	if last := m.sweptAt.Load(); now-last >= sweepEvery && m.sweptAt.CompareAndSwap(last, now) {
		m.sweepTables(now, 1)
	}
}

// Sweep removes buckets that have drained. Take does so too, but some at a time and
// hundreds of times a second at most, so with few requests their memory is kept for
// long. Called every second, Sweep looks at all buckets within ten seconds.
func (m *Memory) Sweep() {
	now := m.clock().Microseconds()
	if steps := min((now-m.sweepAt.Swap(now))/sweepEvery, sweepSteps); steps > 0 {
		m.sweepTables(now, int(steps))
	}
}

// sweepTables removes drained buckets from the next tables, that many that sweepSteps
// steps are all, and evicts buckets where there are too many since the maximum was
// lowered.
func (m *Memory) sweepTables(now int64, steps int) {
	kept := int64(0) // recounted, because a limit may have started or stopped evicting
	for _, u := range m.directory.Load().usages {
		if u.keeps.Load() {
			kept += u.held.Load()
		}
	}
	m.kept.Store(kept)

	all := m.directory.Load().all
	for range (len(all)*tables*steps + sweepSteps - 1) / sweepSteps {
		next := m.next.Add(1) - 1
		p := all[next/tables%uint64(len(all))]
		if next%tables == 0 && p.held.Load() == 0 {
			m.drop(p)
			m.next.Add(tables - 1)
			continue
		}
		t := &p.tables[next%tables]
		t.mu.Lock()
		if live := t.live(now); live*4 < t.used*3 {
			m.count(p, -t.rebuild(live, now))
		}
		m.dropAllEntries(p, next%tables, now)
		t.mu.Unlock()
		if next%tables == 0 {
			m.mu.Lock()
			p.idle = false
			m.mu.Unlock()
		}
		for n := 0; n < 64 && m.forgetOne(p, anyTable(), 0, now); n++ {
		}
	}
}
