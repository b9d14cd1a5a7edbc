package limiter

import (
	"context"
	"hash/maphash"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Memory is a Store that keeps its buckets in this process. The zero value is
// not usable; use NewMemory.
//
// Buckets are spread over many small tables, each with a lock of its own, so
// that requests seldom meet. The tables hold no pointers: the garbage
// collector does not look into them, however many buckets there are. A bucket
// that has drained is as good as absent; it leaves when its table is next
// rebuilt, which happens when that is full and, one table at a time, as
// requests come in.
type Memory struct {
	seed    maphash.Seed
	clock   func() time.Duration
	sweepAt atomic.Int64 // when the next table is due to be swept, in µs on clock
	next    atomic.Int64 // which table that is
	tables  [tables]table
}

const (
	// tables is how many tables there are: so many that with a million buckets
	// one is rebuilt within some tens of microseconds.
	tables = 1024

	// sweepEvery is the least time, in µs, between two sweeps, each of one
	// table; every table is swept once in ten seconds.
	sweepEvery = 10_000_000 / tables
)

// NewMemory returns an empty store. Its clock tells the time since some fixed
// moment and must never go back; nil means the system's monotonic clock.
func NewMemory(clock func() time.Duration) *Memory {
	if clock == nil {
		start := time.Now()
		clock = func() time.Duration { return time.Since(start) }
	}
	return &Memory{seed: maphash.MakeSeed(), clock: clock}
}

// Take implements Store. It never waits and fails only on malformed requests.
func (m *Memory) Take(_ context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.validate(); err != nil {
		return dst, err
	}
	var few [8]place
	places := few[:0]
	for i := range req.Buckets {
		h := m.hash(&req.Buckets[i])
		places = append(places, place{hash: h, table: h % tables})
	}

	var fewTables [8]uint64
	held := tablesOf(places, fewTables[:0])
	for _, i := range held {
		m.tables[i].mu.Lock()
	}
	now := m.clock().Microseconds()
	admitted := true
	for i := range places {
		p, b := &places[i], &req.Buckets[i]
		stored := m.tables[p.table].get(p.hash)
		p.state = b.Limit.at(stored, now, b.SizeVaries)
		p.stale = p.state != stored && p.state.clear > now
		p.fits = b.Cost <= b.Limit.Size && b.Limit.wait(p.state, now, b.Cost) == 0
		admitted = admitted && p.fits
	}
	for i := range places {
		p, b := &places[i], &req.Buckets[i]
		charge := p.fits && (admitted || req.Accounting == Each)
		if charge {
			p.state = b.Limit.add(p.state, b.Cost)
		}
		if charge || p.stale {
			m.tables[p.table].put(p.hash, p.state, now)
		}
		dst = append(dst, b.Limit.decision(p.state, now, b.Cost, !p.fits))
	}
	for _, i := range held {
		m.tables[i].mu.Unlock()
	}

	m.sweep(now)
	return dst, nil
}

// Len returns how many buckets the store holds, drained ones that have not
// left yet included.
func (m *Memory) Len() int {
	n := 0
	for i := range m.tables {
		t := &m.tables[i]
		t.mu.Lock()
		n += t.used
		t.mu.Unlock()
	}
	return n
}

// place is where one bucket of a request lies and what was found there.
type place struct {
	hash  uint64
	table uint64
	state state
	stale bool // what is stored is from before the clock was set back
	fits  bool
}

// hash returns the identity of b in 64 bits. The seed is secret, so nobody can
// aim at another's bucket; that two of a million buckets meet by chance has
// odds of one in 37 million.
func (m *Memory) hash(b *Bucket) uint64 {
	h := mix(maphash.String(m.seed, b.Name), maphash.String(m.seed, b.Key))
	h = mix(h, uint64(b.Limit.rate()))
	h = mix(h, uint64(b.Limit.DripSize))
	if b.SizeVaries {
		return h
	}
	return mix(h, uint64(b.Limit.Size))
}

// mix returns a hash of h and v, in which their order matters.
func mix(h, v uint64) uint64 {
	hi, lo := bits.Mul64(h^0x9e3779b97f4a7c15, v^0xd1b54a32d192ed03)
	return hi ^ lo
}

// tablesOf appends the tables of all places to dst, each once and in ascending
// order: locked in this order no two requests can wait for each other.
func tablesOf(places []place, dst []uint64) []uint64 {
	for i := range places {
		dst = append(dst, places[i].table)
	}
	slices.Sort(dst)
	return slices.Compact(dst)
}

// sweep lets drained buckets leave from the next table, if one is due.
func (m *Memory) sweep(now int64) {
	due := m.sweepAt.Load()
	if now < due || !m.sweepAt.CompareAndSwap(due, now+sweepEvery) {
		return
	}
	t := &m.tables[uint64(m.next.Add(1))%tables]
	t.mu.Lock()
	defer t.mu.Unlock()
	if live := t.live(now); live*4 < t.used*3 {
		t.rebuild(live, now)
	}
}

// table is an open-addressing hash table with linear probing.
type table struct {
	mu    sync.Mutex
	used  int
	slots []slot
	_     [24]byte // keeps neighbours' locks off this cache line
}

// slot holds one bucket. A slot whose clear time is 0 is free; no bucket's is,
// because a bucket is stored when something was put into it.
type slot struct {
	hash uint64
	state
}

// get returns the bucket of the given hash, an empty one if there is none.
func (t *table) get(hash uint64) state {
	if t.used == 0 {
		return state{}
	}
	return t.slots[t.find(hash)].state
}

// put stores the bucket of the given hash.
func (t *table) put(hash uint64, s state, now int64) {
	i := -1
	if t.used > 0 {
		i = t.find(hash)
	}
	if i < 0 || t.slots[i].clear == 0 {
		if t.used >= len(t.slots)*7/8 {
			t.rebuild(t.live(now)+1, now)
			i = t.find(hash)
		}
		t.used++
	}
	t.slots[i] = slot{hash: hash, state: s}
}

// find returns the index of the slot that holds the bucket of the given hash,
// or of the free one where it belongs. At least one slot must be free.
func (t *table) find(hash uint64) int {
	home, _ := bits.Mul64(hash, uint64(len(t.slots)))
	i := int(home)
	for t.slots[i].clear != 0 && t.slots[i].hash != hash {
		if i++; i == len(t.slots) {
			i = 0
		}
	}
	return i
}

// live returns how many buckets in t have not drained.
func (t *table) live(now int64) int {
	n := 0
	for i := range t.slots {
		if t.slots[i].clear > now {
			n++
		}
	}
	return n
}

// rebuild drops what has drained and makes room for n buckets and half as
// many more.
func (t *table) rebuild(n int, now int64) {
	old := t.slots
	t.slots, t.used = nil, 0
	if n == 0 {
		return
	}
	t.slots = make([]slot, n+n/2+4)
	for _, s := range old {
		if s.clear > now {
			t.slots[t.find(s.hash)] = s
			t.used++
		}
	}
}
