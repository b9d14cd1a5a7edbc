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
	traffic *traffic
	leader  atomic.Pointer[fallback] // whose servers know the levels of the clean buckets; nil if none do
	epoch   atomic.Uint64            // number of times that servers may have lost what they knew of all buckets, see read

	holding heldUnitsHere

	_       [64]byte      // what is above is rarely written
	held    atomic.Int64  // number of buckets, without shared ones
	kept    atomic.Int64  // number of those in limits that evict none
	shared  atomic.Int64  // number of shared buckets
	sweptAt atomic.Int64  // when tables were last swept by what changes buckets, in µs on clock, for Unsaved
	sweepAt atomic.Int64  // when Sweep was last called
	next    atomic.Uint64 // which table to sweep next

	mu   sync.Mutex // held while the directory changes; table locks are taken while holding it
	made uint64     // number of partitions ever made
}

// DefaultMaxKeys is the maximum number of buckets in a Memory unless SetMaxKeys
// changes it. A bucket takes 28 to 36 bytes, or 46 to 60 in the fallback of a
// Redis.
const DefaultMaxKeys = 1_000_000

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
	m := &Memory{seed: maphash.MakeSeed(), key: newSipKey(), clock: clock, traffic: new(traffic)}
	m.unix = func(now int64) int64 { return now }
	m.directory.Store(newDirectory(nil, map[string]*usage{}, new(usage)))
	m.SetMaxKeys(DefaultMaxKeys)
	return m
}

// SetMaxKeys sets the maximum number of buckets of all limits together, at least
// 1, not counting shared ones (see Bucket.ShareKey). After it is lowered, surplus
// buckets are evicted as requests come in.
func (m *Memory) SetMaxKeys(n int) { m.maxKeys.Store(int64(n)) }

// Take implements Store. It never waits and ignores the context. It returns an
// error only for malformed requests.
func (m *Memory) Take(_ context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.prepare(); err != nil {
		return dst, err
	}
	from := len(dst)
	if req.mayShare() {
		w := scratches.Get().(*scratch)
		w.buckets = m.shareBuckets(req.Buckets, clean, w.buckets)
		shared := req
		shared.Buckets = w.buckets
		dst = m.decide(shared, dst)
		w.release()
	} else {
		dst = m.decide(req, dst)
	}
	req.deferCharges(dst[from:], m)
	return dst, nil
}

// decide decides req, which is valid, and appends the Decisions to dst.
func (m *Memory) decide(req Request, dst []Decision) []Decision {
	if len(req.Buckets) == 1 && !req.Buckets[0].Limit.of().KeepsEntries() && !req.Buckets[0].Hold && !m.anyHeld() {
		b := &req.Buckets[0]
		s, denied := m.takeOne(b)
		return b.decision(s, denied, DecidedByMemory, dst)
	}
	w := scratches.Get().(*scratch)
	w.outcomes = m.take(w, req, w.outcomes, nil)
	dst = req.decisions(w.outcomes, dst)
	w.release()
	return dst
}

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

// takeOne decides a request on b alone, as take would, and returns the level. Most requests are of this kind, for a bucket that
// already exists: that bucket is read and written in place.
func (m *Memory) takeOne(b *Bucket) (left bucket.Ahead, denied bool) {
	part, hash := m.locate(b)
	t := &part.tables[hash%tables]
	t.mu.Lock()
	// Read the clock first, so that the processor can fetch the bucket meanwhile.
	now := m.clock().Microseconds()
	var s bucket.Level
	if stored := t.own(hash); stored != nil && m.leader.Load() == nil {
		s = stored.At(now)
		if denied = (b.need() > b.Limit.Size || b.Limit.of().Wait(s, b.need(), now) > 0) && !b.free(); !denied {
			s = b.Limit.of().Add(s, b.Cost, m.moment(b.Limit.of(), now))
			stored.Level = s
		} else if b.Limit.CountDenied {
			s = b.Limit.of().Count(s, 0, b.Cost, m.moment(b.Limit.of(), now))
			stored.Level = s
		}
		t.mu.Unlock()
	} else {
		p := location{hash: hash, partition: part, table: t}
		if part.dead {
			t.mu.Unlock()
			m.lock(&p)
			now = m.clock().Microseconds()
		}
		m.look(&p, b, now)
		m.decidesAlone(&p)
		p.fits = b.fits(p.level, 0, now)
		m.settle(&p, b, now, p.fits && b.Cost > 0)
		s, denied = p.level, !p.fits
		p.table.mu.Unlock()
		if p.entered {
			m.makeRoom(&p, b.MaxKeys, b.keeps(), now)
		}
	}
	m.sweep(now)
	return s.Ahead(now), denied
}

// standIn says how to decide in place of another store, see fallback.go.
type standIn struct {
	inFlight []int64       // for each bucket, the units that the other store may still admit
	late     time.Duration // how much later than there a bucket may drain here
	denied   bool          // whether the request is denied elsewhere
	peek     bool          // whether nothing is charged
}

// take decides req, which is valid, and appends the outcome for each bucket to
// dst. With as, it marks buckets that hold something as dirty. w is memory for it.
func (m *Memory) take(w *scratch, req Request, dst []outcome, as *standIn) []outcome {
	w.locations = m.locations(req.Buckets, w.locations[:0])
	if as == nil {
		if w.inFlight = w.inFlight[:0]; m.traffic.queries.Load() != 0 {
			w.inFlight = m.heldElsewhere(w.locations, req.Buckets, w.inFlight)
		}
	}
	w.held = lockAll(w.locations, w.held[:0])
	locations := w.locations
	for i := range locations {
		if locations[i].partition.dead {
			unlockAll(w.held)
			return m.take(w, req, dst, as)
		}
	}
	now := m.clock().Microseconds()
	admitted := as == nil || !as.denied
	var pools lending
	for i := range locations {
		p, b := &locations[i], &req.Buckets[i]
		m.look(p, b, now)
		p.inFlight = m.holding.of(p.hash)
		if as != nil {
			p.inFlight += as.inFlight[i]
			p.found = p.level.Clear > now
			p.unsure = p.dirty == clean && p.found
			if p.dirty != own {
				p.level = b.Limit.of().Ending(p.level, now, as.late.Microseconds())
			}
		} else {
			m.decidesAlone(p)
			if b.Limit.of().KeepsEntries() {
				m.openEntries(p, b, now)
			}
			if len(w.inFlight) > 0 {
				p.inFlight += w.inFlight[i]
			}
			p.claimed = p.inFlight
		}
		for j := 0; j < i && b.shared; j++ {
			// Two keys may share a bucket: this one is charged after that one.
			if q := &locations[j]; q.fits && q.hash == p.hash {
				p.level = b.Limit.of().Add(q.level, req.Buckets[j].Cost, m.moment(b.Limit.of(), now))
				p.unsure = false
				p.claimed += req.Buckets[j].Cost
			}
		}
		if p.exact {
			p.fits = p.fitsEntries(b)
		} else {
			p.fits = b.fits(p.level, p.inFlight, now)
		}
		pools.short = pools.short || b.lent
		var denies bool
		denies, p.spared = pools.next(b.Borrows, b.Pool, p.fits)
		admitted = admitted && (!denies || b.DryRun)
		if b.Watches > 0 && !p.fits {
			for j := firstWatched(req.Buckets, i); j < i; j++ {
				locations[j].spared = true
			}
		}
	}
	for i := range locations {
		p, b := &locations[i], &req.Buckets[i]
		peek := as != nil && as.peek
		charge := p.fits && b.Cost > 0 && !p.spared && !peek && (admitted || req.Accounting == AccountingEach && !b.Hold && !b.Pool)
		blocked := !p.fits && p.inFlight > 0 && p.fitsAlone(b, now)
		switch {
		case b.Watches > 0:
			if from := firstWatched(req.Buckets, i); p.fits && watchedDenied(locations[from:i], req.Buckets[from:i], now) {
				if as != nil {
					p.dirty = max(p.dirty, behind)
					if !p.found {
						p.dirty = own
					}
				}
				m.settle(p, b, now, true)
			}
		case b.Hold && p.fits && !p.spared && admitted && !peek:
			if as == nil {
				m.hold(req, i, p)
			}
			p.inFlight += b.Cost
		case p.exact && (charge || b.Limit.CountDenied):
			m.settleEntries(p, b, now)
		case p.exact && p.made:
			m.put(p, p.level, now)
		case p.exact:
		case !peek || b.Limit.CountDenied:
			switch {
			case as == nil:
			case (charge || b.Limit.CountDenied) && p.found:
				p.dirty = max(p.dirty, behind)
			case charge || b.Limit.CountDenied:
				p.dirty = own
			case !p.fits && p.unsure: // the other store may have lost what it holds
				p.dirty = unsure
			}
			m.settle(p, b, now, charge)
		}
		s := p.level
		if p.inFlight > 0 {
			s = b.Limit.of().AtLeast(s, p.inFlight, m.moment(b.Limit.of(), now))
		}
		dst = append(dst, outcome{
			Ahead: s.Ahead(now), denied: !p.fits || p.spared && !b.Pool, blocked: blocked, unused: p.spared && b.Pool, begun: as != nil && !p.found,
		})
		if p.exact {
			others := p.inFlight
			if !p.fits && !blocked { // there is no room either when these are released
				others = 0
			}
			v := p.entries.Level(b.Limit.of(), b.need(), others, now)
			*v = v.Plus(p.inFlight, b.Limit.of())
			dst[len(dst)-1].entries = v
		}
	}
	unlockAll(w.held)

	for i := range locations {
		if p, b := &locations[i], &req.Buckets[i]; p.entered {
			m.makeRoom(p, b.MaxKeys, b.keeps(), now)
		}
	}
	m.sweep(now)
	return dst
}

// firstWatched returns the index of the first bucket that the i-th one watches, or i. Of a
// part of a request it may lack them.
func firstWatched(buckets []Bucket, i int) int {
	first := i
	for first > 0 && i-first < int(buckets[i].Watches) && buckets[first-1].sameKey(&buckets[i]) {
		first--
	}
	return first
}

// watchedDenied reports whether one of the buckets at places has no room for the request,
// and not only because of units that are held.
func watchedDenied(locations []location, buckets []Bucket, now int64) bool {
	for i := range locations {
		if !locations[i].fits && !locations[i].fitsAlone(&buckets[i], now) {
			return true
		}
	}
	return false
}

// fitsAlone reports whether p's bucket has room for the request on b next to no others.
func (p *location) fitsAlone(b *Bucket, now int64) bool {
	if p.exact {
		return b.need() <= b.Limit.Size-int64(p.entries.Total) || b.free()
	}
	return b.fits(p.level, 0, now)
}

// look reads the level of p's bucket at now.
func (m *Memory) look(p *location, b *Bucket, now int64) {
	stored, dirty := m.read(p)
	if stored.Clear <= now {
		dirty = clean
	}
	p.dirty = dirty
	p.level = stored.At(now)
}

// settle charges p's bucket if charge, or counts a request that is denied if that is
// wanted, and stores it if anything has changed.
func (m *Memory) settle(p *location, b *Bucket, now int64, charge bool) {
	switch {
	case charge || p.fits && b.Limit.CountDenied:
		p.level = b.Limit.of().Add(p.level, b.Cost, m.moment(b.Limit.of(), now))
	case b.Limit.CountDenied:
		p.level = b.Limit.of().Count(p.level, p.inFlight, b.Cost, m.moment(b.Limit.of(), now))
	}
	if charge || p.unsure && p.dirty == unsure || b.Limit.CountDenied && p.level.Clear > now {
		m.put(p, p.level, now)
	}
}

// moment returns now, which m's clock has just shown, with what l needs to know of it.
func (m *Memory) moment(l *bucket.Limit, now int64) bucket.Moment {
	if !l.Aligned {
		return bucket.Moment{Now: now}
	}
	// The monotonic clock does not do for them: it may stop while the machine sleeps.
	return bucket.Moment{Now: now, Unix: m.unix(now)}
}

// Len returns the number of buckets held, including drained ones that have not
// been removed yet.
func (m *Memory) Len() int { return int(m.held.Load() + m.shared.Load()) }

// location is where one bucket of a request is, and what was found there.
type location struct {
	hash      uint64
	partition *partition
	table     *table
	level     bucket.Level
	inFlight  int64 // units that another store may still admit

	dirty   dirtiness // whether another store may know less than this one
	unsure  bool      // whether a denial makes the bucket dirty
	found   bool      // whether it holds something
	fits    bool
	spared  bool // whether a bucket that watches it has no room, or it is a pool of which nothing is borrowed
	entered bool // whether the bucket is new

	// Of a bucket that has a log, which decides.
	exact   bool
	made    bool // whether the entries were made again, from the summary
	entries *bucket.EntryLog
	claimed int64 // what other keys of the request will have added
}

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

// put stores s as the level of the bucket at p.
func (m *Memory) put(p *location, s bucket.Level, now int64) {
	s.Clear = max(s.Clear, 1) // 0 marks a free slot
	more, entered := p.table.put(p.hash, s, p.dirty, now)
	if entered {
		m.count(p.partition, more)
		p.entered = true
	}
	if p.partition.entries == nil {
		return
	}
	if entered && more < 1 {
		m.dropAllEntries(p.partition, p.hash%tables, now)
	}
	if m.keepEntries(p); p.entries != nil {
		p.entries.Summary = s
	}
}

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

// mix returns a hash of h and v that depends on their order.
func mix(h, v uint64) uint64 {
	hi, lo := bits.Mul64(h^0x9e3779b97f4a7c15, v^0xd1b54a32d192ed03)
	return hi ^ lo
}

// ordered is a table and its rank in the order in which tables are locked, so that
// no two requests can deadlock.
type ordered struct {
	order uint64
	table *table
}

// lockAll locks the tables of all places and appends them to dst.
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
