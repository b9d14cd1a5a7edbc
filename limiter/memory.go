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
//
// There is a most of buckets, see SetMaxKeys. A bucket that holds something
// never leaves for a newer one, so that no flood of keys can empty it. Once
// there is no room even after drained buckets have left, keys that have no
// bucket share one for each limit and table, chosen by a secret hash.
type Memory struct {
	tables  [tables]table // first, so that each fills a cache line of its own
	seed    maphash.Seed
	clock   func() time.Duration
	maxKeys atomic.Int64
	held    atomic.Int64 // how many buckets there are
	sweptAt atomic.Int64 // when a table was last swept, in µs on clock
	next    atomic.Int64 // which table is next
	soiled  atomic.Int64 // when the last bucket will have drained that is dirty, in µs on clock

	// For the stores that this one stands in for.
	traffic *traffic
	leader  atomic.Pointer[fallback] // whose servers know what the clean buckets hold; nil if none do
}

const (
	// DefaultMaxKeys is the most buckets that a Memory holds unless it is told
	// otherwise. A bucket takes 28 to 36 bytes: a million need less than 50 MB.
	DefaultMaxKeys = 1_000_000

	// tables is how many tables there are: so many that with a million buckets
	// one is rebuilt within some tens of microseconds.
	tables = 1024

	// sweepEvery is the least time, in µs, between two sweeps, each of one
	// table; every table is swept once in ten seconds.
	sweepEvery = 10_000_000 / tables

	// Without room for new buckets a sweep looks for what has drained among
	// this many slots, and is due after this time, in µs.
	crowdedSlots = 4096
	crowdedEvery = 1000

	// shared is how many shared buckets there may be in any case, those of 64
	// limits; beside them one for each four keys.
	shared = 64 * tables
)

// NewMemory returns an empty store. Its clock tells the time since some fixed
// moment and must never go back; nil means the system's monotonic clock.
func NewMemory(clock func() time.Duration) *Memory {
	if clock == nil {
		start := time.Now()
		clock = func() time.Duration { return time.Since(start) }
	}
	m := &Memory{seed: maphash.MakeSeed(), clock: clock, traffic: new(traffic)}
	m.SetMaxKeys(DefaultMaxKeys)
	return m
}

// SetMaxKeys sets the most buckets that are held, of all limits together, at
// least 1, not counting those that keys share, see Bucket.ShareKey. When it is
// lowered, what is too much is forgotten as requests come.
func (m *Memory) SetMaxKeys(n int) { m.maxKeys.Store(int64(n)) }

// LimitUsage tells how much of its room a limit uses.
type LimitUsage struct {
	// The Name of the limit's buckets.
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
func (m *Memory) Limits() []LimitUsage { return nil }

// Take implements Store. It never waits and fails only on malformed requests.
func (m *Memory) Take(_ context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.validate(); err != nil {
		return dst, err
	}
	if m.leader.Load() != nil {
		m.leader.Store(nil) // whose servers do not hear of this
	}
	if len(req.Buckets) == 1 {
		b := &req.Buckets[0]
		s, denied := m.takeOne(b)
		return b.decision(s, denied, dst), nil
	}
	var few [8]outcome
	return req.decisions(m.take(req, few[:0], nil), dst), nil
}

// takeOne decides a request on b alone, as take would, and returns what becomes
// of it, the clear time told from now. Most requests are of this kind, and on a
// bucket that is there already: that one is read and written where it lies.
func (m *Memory) takeOne(b *Bucket) (s state, denied bool) {
	m.makeRoom()
	p := m.place(b)
	t := &m.tables[p.table]
	t.mu.Lock()
	// The clock is read first, so that the processor can fetch the bucket
	// meanwhile.
	now := m.clock().Microseconds()
	if stored := t.own(p.hash); stored != nil {
		s = b.Limit.at(stored.state, now, b.SizeVaries)
		if denied = !b.fits(s, now); !denied {
			s = b.Limit.add(s, b.Cost)
		}
		if s != stored.state && s.clear > now {
			stored.state = s
		}
	} else {
		p.fits = m.look(&p, b, now) && b.fits(p.state, now)
		m.settle(&p, b, now, p.fits)
		s, denied = p.state, !p.fits
	}
	t.mu.Unlock()
	m.sweep(now)
	s.clear -= now
	return s, denied
}

// standIn says how to decide instead of another store, see fallback.go.
type standIn struct {
	inFlight []int64 // units of each bucket that the other store may still admit
	peek     bool    // whether to change nothing
}

// take decides req, which is valid, and appends what becomes of each bucket to
// dst. As a stand-in it makes the buckets dirty that hold something.
func (m *Memory) take(req Request, dst []outcome, as *standIn) []outcome {
	m.makeRoom()
	var few [8]place
	places := few[:0]
	for i := range req.Buckets {
		places = append(places, m.place(&req.Buckets[i]))
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
		room := m.look(p, b, now)
		if as != nil {
			p.inFlight = as.inFlight[i]
			p.unsure = room && p.dirty == clean && p.state.clear > now
		}
		for j := range i {
			// Two keys may share a bucket: this one comes behind.
			if q := &places[j]; q.fits && q.hash == p.hash && q.table == p.table {
				p.state = b.Limit.add(q.state, req.Buckets[j].Cost)
				p.unsure = false
			}
		}
		p.fits = room && b.fitsBeside(p.state, p.inFlight, now)
		admitted = admitted && p.fits
	}
	for i := range places {
		p, b := &places[i], &req.Buckets[i]
		charge := p.fits && (admitted || req.Accounting == Each)
		if as == nil || !as.peek {
			switch {
			case as == nil:
			case charge:
				p.dirty = ahead
			case !p.fits && p.unsure: // for what it holds, which the other store may have lost
				p.dirty, p.stale = unsure, true
			}
			m.settle(p, b, now, charge)
		}
		p.state = b.Limit.atLeast(state{p.state.clear - now, p.state.slack}, p.inFlight)
		dst = append(dst, outcome{state: p.state, denied: !p.fits})
	}
	for _, i := range held {
		m.tables[i].mu.Unlock()
	}

	m.sweep(now)
	return dst
}

// makeRoom sweeps if there is no room for a new bucket.
func (m *Memory) makeRoom() {
	if m.crowded() {
		m.sweep(m.clock().Microseconds())
	}
}

// look finds out how p's bucket stands at now, and whether there is room for it.
func (m *Memory) look(p *place, b *Bucket, now int64) (room bool) {
	stored, dirty, room := m.find(p, b, now)
	p.dirty = dirty
	p.state = b.Limit.at(stored, now, b.SizeVaries)
	p.stale = p.state != stored && p.state.clear > now
	return room
}

// settle charges p's bucket, or does not, and stores it if that changes it.
func (m *Memory) settle(p *place, b *Bucket, now int64, charge bool) {
	if charge {
		p.state = b.Limit.add(p.state, b.Cost)
	}
	if charge || p.stale {
		m.put(p, p.state, now)
	}
}

// crowded reports whether there is no room for a new bucket.
func (m *Memory) crowded() bool { return m.held.Load() >= m.maxKeys.Load() }

// Len returns how many buckets the store holds, drained ones that have not
// left yet included.
func (m *Memory) Len() int { return int(m.held.Load()) }

// place is where one bucket of a request lies and what was found there.
type place struct {
	hash  uint64
	table uint64
	state state
	dirty dirt // whether another store may not know what it holds
	stale bool // what is stored is not what should be
	fits  bool

	unsure bool // whether a denial makes it dirty

	inFlight int64 // units that another store may still admit
}

// place returns where b has its place.
func (m *Memory) place(b *Bucket) place {
	h := m.hash(b)
	return place{hash: h, table: h % tables}
}

// find returns what p's bucket holds. If it is none yet and there is no room
// for one more, p becomes the bucket that b's limit shares among such keys. If
// there is no room for that either, it is full for now.
func (m *Memory) find(p *place, b *Bucket, now int64) (stored state, dirty dirt, room bool) {
	t := &m.tables[p.table]
	if stored, dirty = t.get(p.hash); stored.clear != 0 || !m.crowded() {
		if stored.clear <= now {
			dirty = clean
		}
		return stored, dirty, true
	}
	anyKey := *b
	anyKey.Key = ""
	p.hash = ^m.hash(&anyKey) // and no key's own
	if stored, dirty = t.get(p.hash); stored.clear != 0 || m.held.Load() < m.maxKeys.Load()*5/4+shared {
		return stored, dirty, true
	}
	return state{clear: now + b.Limit.drips()*b.Limit.rate()}, clean, false
}

// put stores the bucket at p.
func (m *Memory) put(p *place, s state, now int64) {
	s.clear = max(s.clear, 1) // 0 is a free slot's
	if p.dirty != clean {
		m.dirtyUntil(s.clear)
	}
	if more := m.tables[p.table].put(p.hash, s, p.dirty, now); more != 0 {
		m.held.Add(int64(more))
	}
}

// hash returns the identity of b in 64 bits.
func (m *Memory) hash(b *Bucket) uint64 { return b.hash(m.seed) }

// hash returns the identity of b in 64 bits. The seed is secret, so nobody can
// aim at another's bucket; that two of a million buckets meet by chance has
// odds of one in 37 million.
func (b *Bucket) hash(seed maphash.Seed) uint64 {
	h := mix(maphash.String(seed, b.Name), maphash.String(seed, b.Key))
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

// sweep lets drained buckets leave, if it is time to.
func (m *Memory) sweep(now int64) {
	every := int64(sweepEvery)
	if m.crowded() {
		every = crowdedEvery
	}
	if last := m.sweptAt.Load(); now-last >= every && m.sweptAt.CompareAndSwap(last, now) {
		m.sweepTables(now, every == crowdedEvery)
	}
}

// sweepTables lets drained buckets leave from the tables that are next: one, or
// more if the store is crowded.
func (m *Memory) sweepTables(now int64, crowded bool) {
	slots := 1
	if crowded {
		slots = crowdedSlots
	}
	for n := 0; n < tables && slots > 0; n++ {
		t := &m.tables[uint64(m.next.Add(1))%tables]
		t.mu.Lock()
		slots -= max(len(t.slots), 1)
		if live := t.live(now); live*4 < t.used*3 || live < t.used && crowded {
			m.held.Add(int64(-t.rebuild(live, now)))
		}
		t.mu.Unlock()
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
// because a bucket is stored when something was put into it. The slack s of one
// that is dirty is held as -1 - s, and with a further 2^50 taken off as what
// makes it so.
type slot struct {
	hash uint64
	state
}

// dirt says whether another store, for which this one stands in, may know less
// of a bucket than this one does.
type dirt int64

const (
	clean  dirt = iota
	unsure      // it may have lost what it knew
	ahead       // something was decided here, which it was not told
)

// soil returns the slack to hold of a bucket that is dirty.
func soil(slack int64, dirty dirt) int64 {
	if dirty == clean {
		return slack
	}
	return -1 - slack - int64(dirty-unsure)<<50
}

// wash returns the slack of a bucket and whether it is dirty.
func wash(slack int64) (int64, dirt) {
	if slack >= 0 {
		return slack, clean
	}
	slack = -1 - slack
	return slack & (1<<50 - 1), unsure + dirt(slack>>50)
}

// get returns the bucket of the given hash, an empty one if there is none, and
// whether it is dirty.
func (t *table) get(hash uint64) (s state, dirty dirt) {
	if t.used == 0 {
		return state{}, clean
	}
	s = t.slots[t.find(hash)].state
	s.slack, dirty = wash(s.slack)
	return s, dirty
}

// own returns the slot of the bucket of the given hash, nil if there is none or
// it is dirty.
func (t *table) own(hash uint64) *slot {
	if t.used == 0 {
		return nil
	}
	s := &t.slots[t.find(hash)]
	if s.clear == 0 || s.slack < 0 {
		return nil
	}
	return s
}

// put stores the bucket of the given hash, and returns how many buckets there
// are more now.
func (t *table) put(hash uint64, s state, dirty dirt, now int64) int {
	s.slack = soil(s.slack, dirty)
	i, more := -1, 0
	if t.used > 0 {
		i = t.find(hash)
	}
	if i < 0 || t.slots[i].clear == 0 {
		if t.used >= len(t.slots)*7/8 {
			more = -t.rebuild(t.live(now)+1, now)
			i = t.find(hash)
		}
		t.used++
		more++
	}
	t.slots[i] = slot{hash: hash, state: s}
	return more
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

// rebuild drops what has drained and makes room for n buckets and half as many
// more. It returns how many buckets left.
func (t *table) rebuild(n int, now int64) int {
	old, before := t.slots, t.used
	t.slots, t.used = nil, 0
	if n == 0 {
		return before
	}
	t.slots = make([]slot, n+n/2+4)
	for _, s := range old {
		if s.clear > now {
			t.slots[t.find(s.hash)] = s
			t.used++
		}
	}
	return before - t.used
}
