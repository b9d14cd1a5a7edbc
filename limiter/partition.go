package limiter

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// A Memory keeps the buckets of each limit in tables of their own, a partition, so
// that no limit takes another's room. Buckets are counted and capped for each
// Name; several limits with different drips may have the same Name.

const (
	// tables is the number of tables in a partition: enough that with a million
	// buckets one table is rebuilt within some tens of microseconds.
	tables = 256

	// maxPartitions is the maximum number of partitions, and maxShapes of the partitions of
	// one Name. Further limits share one partition per Name; when there are too
	// many Names, they all share one.
	maxPartitions = 4096
	maxShapes     = 64

	// sweepEvery is the minimum time, in µs, between two sweeps. sweepSteps of
	// them sweep every table once: in ten seconds.
	sweepSteps = 1024
	sweepEvery = 10_000_000 / sweepSteps
)

// The drip rates that mark partitions for limits that have none of their own.
const (
	otherShapes = -1 // for limits of one Name
	otherNames  = -2
)

// limitID identifies a limit, and so a partition.
type limitID struct {
	name      string
	rate      time.Duration
	dripSize  int64
	aligned   bool
	algorithm bucket.Algorithm
	cold      uint32 // the cold factor
	phase     time.Duration
	shared    bool // whether these are shared buckets
}

// limitID returns the identity of b's limit.
func (b *Bucket) limitID() limitID {
	l := &b.Limit
	return limitID{
		name: b.Name, rate: l.DripInterval, dripSize: l.DripSize, aligned: l.Aligned, algorithm: l.Algorithm, cold: l.ColdFactor,
		phase: l.Phase, shared: b.shared,
	}
}

// bucket returns a bucket of the limit, without a key.
func (id limitID) bucket() Bucket {
	return Bucket{
		Name: id.name,
		Limit: Limit{
			DripInterval: id.rate, DripSize: id.dripSize, Aligned: id.aligned, Algorithm: id.algorithm, ColdFactor: id.cold,
			Phase: id.phase,
		},
		shared: id.shared,
	}
}

// partition holds the buckets of one limit, or of several that have no partition
// of their own.
type partition struct {
	tables  [tables]table // first, so that each fills a cache line of its own
	id      limitID
	limit   Limit  // of buckets with that id, without a Size
	order   uint64 // unique; tables are locked in this order
	salt    uint64 // the hash of id, by which it is found
	keySalt uint64 // that which the hashes of its buckets include, unless it is mixed
	usage   *usage
	entries []map[uint64]*bucket.EntryLog // of each table, by the hash of the bucket; nil if there can be none. See logs.go
	dead    bool                          // no longer in the directory; guarded by the lock of each table
	idle    bool                          // whether it was empty at the last sweep; guarded by Memory.mu
	marks   [tables]tableMark

	largest atomic.Int64 // the largest Size that a fallback has met

	_    [64]byte // what is above is only read
	held atomic.Int64
}

// mixed reports whether p holds buckets of several limits.
func (p *partition) mixed() bool { return p.id.rate < 0 }

// sized records the Size of one of p's buckets.
func (p *partition) sized(size int64) {
	for {
		if n := p.largest.Load(); size <= n || p.largest.CompareAndSwap(n, size) {
			return
		}
	}
}

// usage holds the counters for all limits of one Name.
type usage struct {
	name    string
	maxKeys atomic.Int64 // as set by buckets, 0 if they leave it open
	keeps   atomic.Bool  // whether nothing is evicted
	entries atomic.Bool  // whether there were buckets with entries, which take more room
	parts   atomic.Int32 // number of partitions

	_         [64]byte // what is above is only read
	held      atomic.Int64
	shared    atomic.Int64 // shared buckets, not included in held
	forgotten atomic.Uint64
	onShared  atomic.Uint64 // requests decided on a shared bucket
}

// agree records a bucket's options for its limit.
func (u *usage) agree(maxKeys int, keeps bool) {
	if n := int64(maxKeys); u.maxKeys.Load() != n {
		u.maxKeys.Store(n)
	}
	if u.keeps.Load() != keeps {
		u.keeps.Store(keeps)
	}
}

// directory finds partitions. It is immutable: changes replace it.
type directory struct {
	partitions map[limitID]*partition
	bySalt     []*partition // the same by salt: a hash table with linear probing
	all        []*partition
	usages     map[string]*usage
	others     *usage // for all limits that have no partition for their Name
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

// partition returns the partition of b's limit; salt is the hash of that limit.
func (m *Memory) partition(b *Bucket, salt uint64) *partition {
	all := m.directory.Load().bySalt
	mask := uint64(len(all) - 1)
	for i := salt & mask; all[i] != nil; i = (i + 1) & mask {
		if all[i].salt == salt {
			return all[i]
		}
	}
	p := m.partitionOf(b.limitID())
	if p.id.rate != otherNames { // a bucket that is only looked at never needs room, and Usage reports how much there is
		p.usage.agree(b.MaxKeys, b.keeps())
	}
	return p
}

// partitionOf returns the partition of a limit.
func (m *Memory) partitionOf(id limitID) *partition {
	if p := m.directory.Load().partition(id); p != nil {
		return p
	}
	return m.newPartition(id)
}

// partition returns the partition of a limit, or nil if there is none.
func (d *directory) partition(id limitID) *partition {
	if p := d.partitions[id]; p != nil {
		return p
	}
	for _, rate := range [...]time.Duration{otherShapes, otherNames} {
		if p := d.partitions[id.other(rate)]; p != nil {
			return p
		}
	}
	return nil
}

// other returns the identity of the partition that limits like id share if they
// have none of their own.
func (id limitID) other(rate time.Duration) limitID {
	if rate == otherNames {
		id.name = ""
	}
	return limitID{name: id.name, rate: rate, shared: id.shared}
}

// newPartition makes a partition for a limit, or returns the one that it has to
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
	p := &partition{id: id, limit: b.Limit, order: m.made, salt: b.limitHash(m.seed), keySalt: m.limitSalt(&b), usage: u}
	if bucket.Algorithms[id.algorithm].Entries || p.mixed() {
		p.entries = make([]map[uint64]*bucket.EntryLog, tables)
	}
	u.parts.Add(1)
	usages := old.usages
	if u != old.others && usages[u.name] != u {
		usages = maps.Clone(usages)
		usages[u.name] = u
	}
	m.directory.Store(newDirectory(append(slices.Clip(old.all), p), usages, old.others))
	return p
}

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
}

// Usage returns the usage of each limit that has, or has had, buckets, sorted by
// Name. It is cheap enough to be called every few seconds.
func (m *Memory) Usage() []LimitUsage {
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

// count adds more to the number of buckets in p. The lock of one of p's tables
// must be held.
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
