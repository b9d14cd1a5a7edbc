package limiter

import (
	"cmp"
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
// The number of buckets is capped, for each limit by Bucket.MaxKeys and for all
// by SetMaxKeys. Where there are too many the emptiest are forgotten, or, with
// Bucket.ShareKey, keys that have no bucket share some.
type Memory struct {
	directory atomic.Pointer[directory]
	seed      maphash.Seed
	clock     func() time.Duration
	maxKeys   atomic.Int64

	// For the stores that this one stands in for.
	traffic *traffic
	leader  atomic.Pointer[fallback] // whose servers know what the clean buckets hold; nil if none do

	_        [64]byte      // what is above is seldom written
	held     atomic.Int64  // how many buckets there are, without those that keys share
	kept     atomic.Int64  // of those held, how many limits have that forget none
	shared   atomic.Int64  // how many there are that keys share
	sweptAt  atomic.Int64  // when tables were last swept, in µs on clock
	next     atomic.Uint64 // which table is next
	dirtyEnd atomic.Int64  // when the last bucket will have drained that is dirty, in µs on clock

	mu   sync.Mutex // held while the directory changes; tables are locked inside of it
	made uint64     // how many partitions there have been
}

// DefaultMaxKeys is the most buckets that a Memory holds unless it is told
// otherwise. A bucket takes 28 to 36 bytes, or 46 to 60 where it follows
// a server's.
const DefaultMaxKeys = 1_000_000

// NewMemory returns an empty store. Its clock tells the time since some fixed
// moment and must never go back; nil means the system's monotonic clock.
func NewMemory(clock func() time.Duration) *Memory {
	if clock == nil {
		start := time.Now()
		clock = func() time.Duration { return time.Since(start) }
	}
	m := &Memory{seed: maphash.MakeSeed(), clock: clock, traffic: new(traffic)}
	m.directory.Store(newDirectory(nil, map[string]*usage{}, new(usage)))
	m.SetMaxKeys(DefaultMaxKeys)
	return m
}

// SetMaxKeys sets the most buckets that are held, of all limits together, at
// least 1, not counting those that keys share, see Bucket.ShareKey. When it is
// lowered, what is too much is forgotten as requests come.
func (m *Memory) SetMaxKeys(n int) { m.maxKeys.Store(int64(n)) }

// Take implements Store. It never waits, so the context does not matter to it,
// and fails only on malformed requests.
func (m *Memory) Take(_ context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.prepare(); err != nil {
		return dst, err
	}
	if m.leader.Load() != nil {
		m.leader.Store(nil) // whose servers do not hear of this
	}
	if req.mayShare() {
		var few [8]Bucket
		req.Buckets = m.shareBuckets(req.Buckets, clean, few[:0])
		return m.decide(req, dst), nil
	}
	return m.decide(req, dst), nil
}

// decide appends what becomes of req, which is valid, to dst.
func (m *Memory) decide(req Request, dst []Decision) []Decision {
	if len(req.Buckets) == 1 {
		b := &req.Buckets[0]
		s, denied := m.takeOne(b)
		return b.decision(s, denied, dst)
	}
	var few [8]outcome
	return req.decisions(m.take(req, few[:0], nil), dst)
}

// takeOne decides a request on b alone, as take would, and returns what becomes
// of it, the clear time told from now. Most requests are of this kind, and on a
// bucket that is there already: that one is read and written where it lies.
func (m *Memory) takeOne(b *Bucket) (s state, denied bool) {
	part, hash := m.locate(b)
	t := &part.tables[hash%tables]
	t.mu.Lock()
	// The clock is read first, so that the processor can fetch the bucket
	// meanwhile.
	now := m.clock().Microseconds()
	if stored := t.own(hash); stored != nil {
		s = stored.at(now)
		if denied = !b.fits(s, now); !denied {
			s = b.Limit.add(s, b.Cost)
			stored.state = s
		}
		t.mu.Unlock()
	} else {
		p := place{hash: hash, partition: part, table: t}
		if part.dead {
			t.mu.Unlock()
			m.lock(&p)
			now = m.clock().Microseconds()
		}
		m.look(&p, b, now)
		p.fits = b.fits(p.state, now)
		m.settle(&p, b, now, p.fits)
		s, denied = p.state, !p.fits
		p.table.mu.Unlock()
		if p.entered {
			m.makeRoom(&p, b.MaxKeys, b.keeps(), now)
		}
	}
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
	var few [8]place
	places := few[:0]
	for i := range req.Buckets {
		places = append(places, m.place(&req.Buckets[i]))
	}
	var fewTables [8]ordered
	held := lockAll(places, fewTables[:0])
	for i := range places {
		if places[i].partition.dead {
			unlockAll(held)
			return m.take(req, dst, as)
		}
	}
	now := m.clock().Microseconds()
	admitted := true
	for i := range places {
		p, b := &places[i], &req.Buckets[i]
		m.look(p, b, now)
		if as != nil {
			p.inFlight = as.inFlight[i]
			p.unsure = p.dirty == clean && p.state.clear > now
		}
		for j := 0; j < i && b.shared; j++ {
			// Two keys may share a bucket: this one comes behind.
			if q := &places[j]; q.fits && q.hash == p.hash {
				p.state = b.Limit.add(q.state, req.Buckets[j].Cost)
				p.unsure = false
			}
		}
		p.fits = b.fitsBeside(p.state, p.inFlight, now)
		admitted = admitted && p.fits
	}
	for i := range places {
		p, b := &places[i], &req.Buckets[i]
		charge := p.fits && (admitted || req.Accounting == AccountingEach)
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
	unlockAll(held)

	for i := range places {
		if p, b := &places[i], &req.Buckets[i]; p.entered {
			m.makeRoom(p, b.MaxKeys, b.keeps(), now)
		}
	}
	m.sweep(now)
	return dst
}

// look finds out how p's bucket stands at now.
func (m *Memory) look(p *place, b *Bucket, now int64) {
	stored, dirty := p.table.get(p.hash)
	if stored.clear <= now {
		dirty = clean
	}
	p.dirty = dirty
	p.state = stored.at(now)
}

// settle charges p's bucket, or does not, and stores it if that changes anything.
func (m *Memory) settle(p *place, b *Bucket, now int64, charge bool) {
	if charge {
		p.state = b.Limit.add(p.state, b.Cost)
	}
	if charge || p.stale {
		m.put(p, p.state, now)
	}
}

// Len returns how many buckets the store holds, drained ones that have not
// left yet included.
func (m *Memory) Len() int { return int(m.held.Load() + m.shared.Load()) }

// place is where one bucket of a request lies and what was found there.
type place struct {
	hash      uint64
	partition *partition
	table     *table
	state     state
	dirty     dirtiness // whether another store may not know what it holds
	stale     bool      // whether it is to be stored though nothing is charged
	fits      bool
	entered   bool // whether there was no such bucket before

	unsure bool // whether a denial makes it dirty

	inFlight int64 // units that another store may still admit
}

// place returns where b has its place.
func (m *Memory) place(b *Bucket) place {
	p, h := m.locate(b)
	return place{hash: h, partition: p, table: &p.tables[h%tables]}
}

// locate returns the partition that b lies in, and b's hash.
func (m *Memory) locate(b *Bucket) (*partition, uint64) {
	salt := b.limitHash(m.seed)
	return m.partition(b, salt), mix(salt, maphash.String(m.seed, b.Key))
}

// put stores the bucket at p.
func (m *Memory) put(p *place, s state, now int64) {
	s.clear = max(s.clear, 1) // 0 is a free slot's
	if p.dirty != clean {
		m.dirtyUntil(s.clear)
	}
	more, entered := p.table.put(p.hash, s, p.dirty, now)
	if entered {
		m.count(p.partition, more)
		p.entered = true
	}
}

// hash returns the identity of b, see Bucket, in 64 bits. The seed is secret, so nobody can
// aim at another's bucket; that two of a million buckets meet by chance has
// odds of one in 37 million.
func (b *Bucket) hash(seed maphash.Seed) uint64 {
	return mix(b.limitHash(seed), maphash.String(seed, b.Key))
}

// limitHash returns the identity of b's limit in 64 bits.
func (b *Bucket) limitHash(seed maphash.Seed) uint64 {
	h := maphash.String(seed, b.Name)
	if b.shared {
		h = ^h
	}
	h = mix(h, uint64(b.Limit.rate()))
	return mix(h, uint64(b.Limit.DripSize))
}

// mix returns a hash of h and v, in which their order matters.
func mix(h, v uint64) uint64 {
	hi, lo := bits.Mul64(h^0x9e3779b97f4a7c15, v^0xd1b54a32d192ed03)
	return hi ^ lo
}

// ordered is a table, and what comes before it in the order in which tables are
// locked: so no two requests can wait for each other.
type ordered struct {
	order uint64
	table *table
}

// lockAll locks the tables of all places, and appends them to dst.
func lockAll(places []place, dst []ordered) []ordered {
	for i := range places {
		p := &places[i]
		dst = append(dst, ordered{p.partition.order*tables + p.hash%tables, p.table})
	}
	slices.SortFunc(dst, func(a, b ordered) int { return cmp.Compare(a.order, b.order) })
	dst = slices.Compact(dst)
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
