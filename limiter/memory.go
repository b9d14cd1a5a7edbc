package limiter

import (
	"cmp"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Memory is a Store that keeps its buckets in this process. The zero value is not
// usable; use [NewMemory].
//
// Buckets are spread over many small tables, each with its own lock, so that
// requests rarely contend. The tables hold no pointers, so the garbage collector
// does not scan them, however many buckets there are. A drained bucket counts as
// absent. It is removed when its table is next rebuilt: when the table is full, one
// table at a time as requests come in, or by Sweep.
//
// The number of buckets is capped: for each limit by Bucket.MaxKeys, and in total
// by SetMaxKeys. When there are too many, the emptiest of a sample are evicted or,
// with Bucket.ShareKey, keys that have no bucket share one.
type Memory struct {
	directory atomic.Pointer[directory]
	seed      maphash.Seed // of the hashes by which partitions are found
	key       sipKey       // of the hashes of buckets, which are saved with it
	clock     func() time.Duration
	unix      func(now int64) int64 // the time of day, in µs, when clock shows now
	maxKeys   atomic.Int64
	savedAt   atomic.Int64 // when Save was last called, in µs on clock

	savedClear atomic.Int64 // when the last of the buckets has drained that were saved then, in µs on clock

	// For the stores that use this one as their fallback.
	leader   atomic.Pointer[original] // whose servers know the levels of the clean buckets; nil if none do
	epoch    atomic.Uint64            // number of times that servers may have lost what they knew of all buckets, see read
	inFlight inFlight                 // what these stores have in flight; nil before the first

	holding heldUnitsHere

	_       [64]byte      // what is above is rarely written
	held    atomic.Int64  // number of buckets, without shared ones
	kept    atomic.Int64  // number of those in limits that evict none
	shared  atomic.Int64  // number of shared buckets
	sweptAt atomic.Int64  // when tables were last swept by what changes buckets, in µs on clock, for Unsaved
	sweepAt atomic.Int64  // when Sweep was last called
	next    atomic.Uint64 // which table to sweep next
	queries atomic.Int64  // number of those that are in flight

	mu   sync.Mutex // held while the directory changes; table locks are taken while holding it
	made uint64     // number of partitions ever made
}

// DefaultMaxKeys is the maximum number of buckets in a Memory unless SetMaxKeys
// changes it. A bucket takes 28 to 36 bytes, or 46 to 60 in the fallback of a
// Redis.
const DefaultMaxKeys = 1_000_000

var _ Keeper = (*Memory)(nil)

// NewMemory returns an empty Memory.
func NewMemory() *Memory {
	start := time.Now()
	m := NewMemoryWithClock(func() time.Duration { return time.Since(start) })
	m.unix = func(int64) int64 { return time.Now().UnixMicro() }
	return m
}

// NewMemoryWithClock returns an empty Memory that uses a clock of the caller's, as in
// tests. clock returns the time since some fixed moment, which is the Unix epoch if any
// Limit uses the time of day or if the Memory is saved, and must never go back.
func NewMemoryWithClock(clock func() time.Duration) *Memory {
	m := &Memory{seed: maphash.MakeSeed(), key: newSipKey(), clock: clock}
	m.unix = func(now int64) int64 { return now }
	m.directory.Store(newDirectory(nil, map[string]*usage{}, new(usage)))
	m.SetMaxKeys(DefaultMaxKeys)
	return m
}

// SetMaxKeys sets the maximum number of buckets of all limits together, at least
// 1, not counting shared ones (see Bucket.ShareKey). After it is lowered, surplus
// buckets are evicted as requests come in.
func (m *Memory) SetMaxKeys(n int) { m.maxKeys.Store(int64(n)) }

// scratch is the memory that deciding a request of several buckets takes. It is used
// again: arrays for a few buckets on the stack have to be cleared as a whole each time,
// and more buckets would make garbage.
type scratch struct {
	buckets   []Bucket
	locations []location
	held      []ordered
	outcomes  []outcome
	inFlight  []int64
}

// scratches is a pool of them.
var scratches = sync.Pool{New: func() any { return new(scratch) }}

// release returns w to the pool, without what it refers to.
func (w *scratch) release() {
	clear(w.buckets)
	clear(w.locations)
	clear(w.held)
	clear(w.outcomes)
	*w = scratch{w.buckets[:0], w.locations[:0], w.held[:0], w.outcomes[:0], w.inFlight[:0]}
	scratches.Put(w)
}

// Len returns the number of buckets held, including drained ones that have not
// been removed yet.
func (m *Memory) Len() int { return int(m.held.Load() + m.shared.Load()) }

// locations appends the locations of buckets to dst. Those of one request often have
// their key in common, so that is hashed once.
func (m *Memory) locations(buckets []Bucket, dst []location) []location {
	key := uint64(0)
	for i := range buckets {
		b := &buckets[i]
		if i == 0 || b.Key != buckets[i-1].Key {
			key = m.key.sum(b.Key)
		}
		dst = append(dst, location{})
		m.find(&dst[len(dst)-1], b, key)
	}
	return dst
}

// location returns the location of b.
func (m *Memory) location(b *Bucket) (p location) {
	m.find(&p, b, m.key.sum(b.Key))
	return p
}

// find sets p to the location of b, given the hash of its key.
func (m *Memory) find(p *location, b *Bucket, key uint64) {
	p.partition = m.partition(b, b.limitHash(m.seed))
	p.hash = mix(m.saltIn(p.partition, b), key)
	p.table = &p.partition.tables[p.hash%tables]
}

// locate returns b's partition and b's hash.
func (m *Memory) locate(b *Bucket) (*partition, uint64) {
	p := m.partition(b, b.limitHash(m.seed))
	return p, mix(m.saltIn(p, b), m.key.sum(b.Key))
}

// saltIn returns the hash of b's limit that b's hash includes, given b's partition.
func (m *Memory) saltIn(p *partition, b *Bucket) uint64 {
	if p.mixed() {
		return m.limitSalt(b)
	}
	return p.keySalt
}

// limitSalt is saltIn for any partition. It is slower.
func (m *Memory) limitSalt(b *Bucket) uint64 { return b.mixLimit(m.key.sum(b.Name)) }

// hash returns the identity of b as 64 bits. The key of the hash is secret, so no client can aim
// at another client's bucket. The odds that any two of a million buckets collide by chance are
// one in 37 million.
func (m *Memory) hash(b *Bucket) uint64 { return mix(m.limitSalt(b), m.key.sum(b.Key)) }

// hash returns the identity of b, see Bucket, as 64 bits, in this process.
func (b *Bucket) hash(seed maphash.Seed) uint64 {
	return mix(b.limitHash(seed), maphash.String(seed, b.Key))
}

// limitHash returns the identity of b's limit as 64 bits.
func (b *Bucket) limitHash(seed maphash.Seed) uint64 {
	return b.mixLimit(maphash.String(seed, b.Name))
}

// mixLimit returns the identity of b's limit, given the hash of its name.
func (b *Bucket) mixLimit(h uint64) uint64 {
	if b.shared {
		h = ^h
	}
	h = mix(h, uint64(b.Limit.of().Rate()))
	h = mix(h, uint64(b.Limit.DripSize))
	if b.Limit.Aligned {
		h = mix(h, uint64(b.Limit.Phase))
	}
	if a := b.Limit.Algorithm; a != 0 {
		h = mix(h, uint64(a)|uint64(b.Limit.ColdFactor)<<8)
	}
	return h
}

// ordered is a table and its rank in the order in which tables are locked, so that
// no two requests can deadlock.
type ordered struct {
	order uint64
	table *table
}

// lockAll locks the tables of all locations and appends them to dst.
func lockAll(locations []location, dst []ordered) []ordered {
	last, inOrder := uint64(0), true
	for i := range locations {
		p := &locations[i]
		order := p.partition.order*tables + p.hash%tables
		inOrder = inOrder && order > last // partitions are often in the order of the request
		last = order
		dst = append(dst, ordered{order, p.table})
	}
	if !inOrder {
		slices.SortFunc(dst, func(a, b ordered) int { return cmp.Compare(a.order, b.order) })
		dst = slices.Compact(dst)
	}
	for i := range dst {
		dst[i].table.mu.Lock()
	}
	return dst
}

// unlockAll unlocks tables.
func unlockAll(held []ordered) {
	for i := range held {
		held[i].table.mu.Unlock()
	}
}

// room returns the maximum number of buckets of a limit.
func (m *Memory) room(u *usage) int64 {
	n := u.maxKeys.Load()
	if n <= 0 {
		n = max(m.maxKeys.Load()/2, 1)
	}
	if u.entries.Load() {
		n = max(n, bucket.MinEntriesRoom)
	}
	return n
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
	p := m.partitionFor(b.limitID())
	if p.id.rate != otherNames { // a bucket that is only looked at never needs room, and Usage reports how much there is
		p.usage.agree(b.MaxKeys, b.keeps())
	}
	return p
}

// partitionFor returns the partition of a limit.
func (m *Memory) partitionFor(id limitID) *partition {
	if p := m.directory.Load().partition(id); p != nil {
		return p
	}
	return m.newPartition(id)
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

// full reports whether there is no room for another bucket in a limit that evicts
// none. All limits of that kind together have half of the room of the Memory:
// otherwise they could fill it, and the buckets of other limits would be evicted.
func (m *Memory) full(u *usage) bool {
	return u.held.Load() >= m.room(u) || m.kept.Load() >= max(m.maxKeys.Load()/2, 1)
}

// lock locks p's table. If its partition is dead, it moves p to the new one.
func (m *Memory) lock(p *location) {
	for {
		p.table.mu.Lock()
		if !p.partition.dead {
			return
		}
		p.table.mu.Unlock()
		dead := p.partition
		p.partition = m.partitionFor(dead.id)
		p.partition.sized(dead.largest.Load())
		p.table = &p.partition.tables[p.hash%tables]
	}
}

// minShared is the number of shared buckets that a limit may always have. Larger
// limits may have one for every eight keys.
const minShared = 1024
