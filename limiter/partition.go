package limiter

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"
)

// A Memory keeps the buckets of each limit in tables of their own, a partition,
// so that no limit takes another's room. It counts and bounds them for each
// Name, of which there may be several limits if their numbers differ.

const (
	// tables is how many tables a partition has: so many that with a million
	// buckets one is rebuilt within some tens of microseconds.
	tables = 256

	// maxPartitions is the most partitions there are, and maxShapes those of one
	// Name. Limits beyond share one of their Name; where even Names are too many,
	// they share one.
	maxPartitions = 4096
	maxShapes     = 64

	// sweepEvery is the least time, in µs, between two sweeps, and sweepSteps how
	// many of them sweep every table once: in ten seconds.
	sweepSteps = 1024
	sweepEvery = 10_000_000 / sweepSteps
)

// The drip rates of partitions for limits that have none of their own.
const (
	otherShapes = -1 // of one Name
	otherNames  = -2
)

// limitID is what tells limits, and so partitions, apart.
type limitID struct {
	name     string
	rate     time.Duration
	dripSize int64
	shared   bool // whether these are the buckets that keys share
}

// limitID returns the identity of b's limit.
func (b *Bucket) limitID() limitID {
	return limitID{name: b.Name, rate: b.Limit.DripInterval, dripSize: b.Limit.DripSize, shared: b.shared}
}

// bucket returns a bucket of the limit, without a key.
func (id limitID) bucket() Bucket {
	return Bucket{Name: id.name, Limit: Limit{DripInterval: id.rate, DripSize: id.dripSize}, shared: id.shared}
}

// partition holds the buckets of one limit, or of several that have none.
type partition struct {
	tables [tables]table // first, so that each fills a cache line of its own
	id     limitID
	order  uint64 // unlike any other's; tables are locked in this order
	salt   uint64 // the hash of id
	usage  *usage
	dead   bool // no longer in the directory; guarded by the lock of each table
	idle   bool // whether it was empty when it was last swept; guarded by Memory.mu

	_    [64]byte // what is above is only read
	held atomic.Int64
}

// mixed reports whether p has buckets of several limits.
func (p *partition) mixed() bool { return p.id.rate < 0 }

// usage is what is counted for all limits of a Name.
type usage struct {
	name    string
	maxKeys atomic.Int64 // as buckets say, 0 if they leave it open
	keeps   atomic.Bool  // whether nothing is forgotten
	parts   atomic.Int32 // how many partitions there are

	_         [64]byte // what is above is only read
	held      atomic.Int64
	shared    atomic.Int64 // buckets that keys share, not in held
	forgotten atomic.Uint64
	onShared  atomic.Uint64 // requests decided on a shared bucket
}

// agree records what b says about its limit.
func (u *usage) agree(maxKeys int, keeps bool) {
	if n := int64(maxKeys); u.maxKeys.Load() != n {
		u.maxKeys.Store(n)
	}
	if u.keeps.Load() != keeps {
		u.keeps.Store(keeps)
	}
}

// directory finds partitions. It never changes: a new one replaces it.
type directory struct {
	partitions map[limitID]*partition
	bySalt     []*partition // the same by their salts: a hash table with linear probing
	all        []*partition
	usages     map[string]*usage
	others     *usage // of all limits that have no partition of their Name
}

// newDirectory returns a directory of the given partitions and usages.
func newDirectory(all []*partition, usages map[string]*usage, others *usage) *directory {
	d := &directory{map[limitID]*partition{}, nil, all, usages, others}
	d.bySalt = make([]*partition, 2<<bits.Len(uint(len(all))))
	for _, p := range all {
		d.partitions[p.id] = p
		i := p.salt
		for d.bySalt[i%uint64(len(d.bySalt))] != nil {
			i++
		}
		d.bySalt[i%uint64(len(d.bySalt))] = p
	}
	return d
}

// partition returns the partition of b's limit, of which the hash is given.
func (m *Memory) partition(b *Bucket, salt uint64) *partition {
	all := m.directory.Load().bySalt
	mask := uint64(len(all) - 1)
	for i := salt & mask; all[i] != nil; i = (i + 1) & mask {
		if all[i].salt == salt {
			return all[i]
		}
	}
	return m.partitionOf(b.limitID())
}

// partitionOf returns the partition of a limit.
func (m *Memory) partitionOf(id limitID) *partition {
	d := m.directory.Load()
	if p := d.partitions[id]; p != nil {
		return p
	}
	for _, rate := range [...]time.Duration{otherShapes, otherNames} {
		if p := d.partitions[id.other(rate)]; p != nil {
			return p
		}
	}
	return m.newPartition(id)
}

// other returns the identity of the partition for limits like id that have none
// of their own.
func (id limitID) other(rate time.Duration) limitID {
	if rate == otherNames {
		id.name = ""
	}
	return limitID{name: id.name, rate: rate, shared: id.shared}
}

// newPartition makes a partition for a limit, or returns the one that it is to
// share with others.
func (m *Memory) newPartition(id limitID) *partition {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.directory.Load()
	u := old.usages[id.name]
	switch {
	case id.rate == otherNames || u == nil && (len(old.all) >= maxPartitions || len(old.usages) >= maxPartitions):
		id, u = id.other(otherNames), old.others
	case u != nil && (int(u.parts.Load()) >= maxShapes || len(old.all) >= maxPartitions):
		id = id.other(otherShapes)
	case u == nil:
		u = &usage{name: id.name}
	}
	if p := old.partitions[id]; p != nil {
		return p
	}
	m.made++
	b := id.bucket()
	p := &partition{id: id, order: m.made, salt: b.limitHash(m.seed), usage: u}
	u.parts.Add(1)
	usages := old.usages
	if u != old.others && usages[u.name] != u {
		usages = maps.Clone(usages)
		usages[u.name] = u
	}
	m.directory.Store(newDirectory(append(slices.Clip(old.all), p), usages, old.others))
	return p
}

// drop removes p if it has been empty for as long as a sweep takes. What was
// counted stays.
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
	if empty && !p.dead {
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

// LimitUsage tells how much of its room a limit uses.
type LimitUsage struct {
	// The Name of the limit's buckets. It is empty also for what has no room
	// of its own because there are more than 4096 Names.
	Name string

	// The buckets that are held, drained ones that have not left yet included,
	// and the most that may be, without those that keys share.
	Buckets, MaxKeys int

	// How many buckets that held something were forgotten since the Memory was
	// made, to make room for others.
	Forgotten uint64

	// How many requests were decided on a shared bucket since then.
	Shared uint64
}

// Limits returns the usage of each limit that has, or had, buckets, sorted by
// Name. It is cheap enough to be called every few seconds.
func (m *Memory) Limits() []LimitUsage {
	d := m.directory.Load()
	limits := make([]LimitUsage, 0, len(d.usages)+1)
	add := func(u *usage) {
		limits = append(limits, LimitUsage{
			Name:      u.name,
			Buckets:   int(u.held.Load()),
			MaxKeys:   int(m.room(u)),
			Forgotten: u.forgotten.Load(),
			Shared:    u.onShared.Load(),
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

// hash returns the identity of b in 64 bits.
func (m *Memory) hash(b *Bucket) uint64 { return b.hash(m.seed) }

// sweep lets drained buckets leave, if it is time to.
func (m *Memory) sweep(now int64) {
	if last := m.sweptAt.Load(); now-last >= sweepEvery && m.sweptAt.CompareAndSwap(last, now) {
		m.sweepTables(now)
	}
}

// sweepTables lets drained buckets leave from the tables that are next, and
// forgets some where there are too many since the bounds were lowered.
func (m *Memory) sweepTables(now int64) {
	kept := int64(0) // anew, since a limit may have begun to forget, or to keep
	for _, u := range m.directory.Load().usages {
		if u.keeps.Load() {
			kept += u.held.Load()
		}
	}
	m.kept.Store(kept)

	all := m.directory.Load().all
	for range (len(all)*tables + sweepSteps - 1) / sweepSteps {
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

// count records that p has so many buckets more. The lock of one of its
// tables must be held.
func (m *Memory) count(p *partition, more int) {
	n := int64(more)
	if n == 0 {
		return
	}
	p.held.Add(n)
	if p.id.shared {
		p.usage.shared.Add(n)
		m.shared.Add(n)
	} else {
		p.usage.held.Add(n)
		m.held.Add(n)
		if p.usage.keeps.Load() {
			m.kept.Add(n)
		}
	}
}
