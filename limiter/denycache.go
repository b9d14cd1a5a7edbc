package limiter

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

const (
	// denySlots is the maximum number of buckets in the cache, which takes 1 MB.
	// Of two buckets that fall into one slot, the later one stays.
	denySlots = 1 << 14

	// cacheFor is the longest time, in µs, that a bucket is cached. A change that
	// cannot be foreseen, such as an operator deleting keys, takes effect after
	// that time.
	cacheFor = 1_000_000
)

// denyCache remembers buckets that a server has reported full. Nothing fits into a
// full bucket before its next drip: until then every request to it, whatever its
// cost, is denied without asking the server. So a flood of denied requests costs
// the server nothing.
//
// Whether a bucket is full depends on the size in the request. Requests with a
// larger size may still add to it, but that only makes it fuller: a bucket that
// was full for one size stays full for that size until the next drip that counts.
// A bucket that denies only because of held units is not full, since those may be
// released; see crossslot.go. If one of several buckets in a request is full, the
// others are cached too, because their levels are part of the answer. These levels
// are then the last that the server reported.
//
// A request that a bucket counts even if it is denied is never decided here, and neither
// is one whose denial another bucket watches, before that is full too. A full bucket that
// borrows denies if its pool is full too.
type denyCache struct {
	seed   maphash.Seed
	latest atomic.Int64 // until when any entry is valid
	forgot atomic.Int64 // when an entry was last forgotten; 0 if none was
	slots  []denySlot
}

// denySlot holds one bucket.
type denySlot struct {
	mu sync.Mutex
	cachedDenial
}

// cachedDenial is what is cached of one bucket. Times are in µs on a monotonic
// clock of this process.
type cachedDenial struct {
	hash uint64
	bucket.Level
	doubt int64 // how much earlier it may run empty
	until int64 // until when the entry is valid

	entries *cachedEntries // if it keeps entries
}

// cachedEntries is what is cached of a log. Its times depend on the numbers of the
// request.
type cachedEntries struct {
	bucket.EntriesLevel
	at         int64 // when the answer arrived
	size, cost int64
}

// full reports whether a bucket of limit l has no room at all at now.
func (e *cachedDenial) full(l *Limit, now int64) bool {
	if e.entries != nil {
		return e.entries.at+e.entries.One-e.doubt > now
	}
	return l.of().Wait(bucket.Level{Clear: e.Clear - e.doubt, Rest: e.Rest}, 1, now) > 0
}

// newDenyCache returns a cache with the given number of slots.
func newDenyCache(slots int) *denyCache {
	return &denyCache{seed: maphash.MakeSeed(), slots: make([]denySlot, slots)}
}

// slot returns the slot for b, and b's hash.
func (d *denyCache) slot(b *Bucket) (*denySlot, uint64) {
	hash := b.hash(d.seed)
	return &d.slots[hash%uint64(len(d.slots))], hash
}

// deniedAlike reports whether one full bucket denies req and nothing is charged,
// whatever its other buckets hold.
func (req Request) deniedAlike() bool {
	return req.Accounting == AccountingAtomic || len(req.Buckets) == 1
}

// decide appends the outcomes of req to dst if it is certain to be denied, and
// reports whether it is.
func (d *denyCache) decide(req Request, now int64, dst []outcome) ([]outcome, bool) {
	if now >= d.latest.Load() || !req.deniedAlike() || req.counting() {
		return dst, false
	}
	before, denied := len(dst), false
	var pools lending
	for i := range req.Buckets {
		b := &req.Buckets[i]
		e, ok := d.get(b, now)
		if !ok && !b.Pool {
			return dst[:before], false
		}
		denies, _ := pools.next(b.Borrows, b.Pool, !ok || b.free() || !e.full(&b.Limit, now))
		denied = denied || denies && !b.DryRun
		if !ok { // a pool need not be known if another bucket denies
			dst = append(dst, outcome{denied: true, unasked: true, by: DecidedByCache})
			continue
		}
		s := e.Level.At(now)
		if e.entries != nil {
			v := e.entries.Later(now - e.entries.at)
			dst = append(dst, outcome{denied: (v.Again > 0 || b.need() > b.Limit.Size) && !b.free(), by: DecidedByCache, entries: &v})
			continue
		}
		dst = append(dst, outcome{Ahead: s.Ahead(now), denied: !b.fits(s, 0, now), by: DecidedByCache})
	}
	if !denied || req.chargesWatcher(dst[before:]) {
		return dst[:before], false
	}
	req.bar(dst[before:])
	return dst, true
}

// remember caches what a server has decided on req, which was sent at the given time
// and has just been answered. The server read its clock somewhere in between. The denial
// is cached as if that was when the request was sent, so not for too long; its times
// are computed as if it was when the answer arrived, so that no client has to
// retry too early.
func (d *denyCache) remember(req Request, outcomes []outcome, sent int64, clock func() time.Duration) {
	keep := false
	var pools lending
	for i := range outcomes {
		b, o := &req.Buckets[i], &outcomes[i]
		denies, _ := pools.next(b.Borrows, b.Pool, o.unasked || o.mayBeLetGo(b) || o.full(&b.Limit) <= 0)
		keep = keep || denies && !b.DryRun
	}
	keep = keep && req.deniedAlike()
	if !keep && sent >= d.latest.Load() {
		return
	}
	if forgot := d.forgot.Load(); forgot != 0 && sent <= forgot {
		return // the answer may be from before a reset
	}
	answered := clock().Microseconds()
	for i, o := range outcomes {
		b := &req.Buckets[i]
		if o.mayBeLetGo(b) || o.foreign || o.unasked {
			continue
		}
		e := cachedDenial{Level: o.After(answered), doubt: answered - sent, until: sent + cacheFor}
		wait := o.full(&b.Limit)
		if wait > 0 {
			e.until = sent + min(wait, cacheFor)
		}
		if o.entries != nil {
			e.entries = &cachedEntries{*o.entries, answered, b.Limit.Size, b.need()}
			if o.entries.Again > 0 { // after that it is not known what it holds
				e.until = min(e.until, sent+o.entries.Again)
			}
		}
		d.put(b, e, wait > 0, keep, answered)
	}
}

// get returns the entry for b, and whether there is a valid one.
func (d *denyCache) get(b *Bucket, now int64) (cachedDenial, bool) {
	slot, hash := d.slot(b)
	slot.mu.Lock()
	defer slot.mu.Unlock()
	e := slot.cachedDenial
	known := e.hash == hash && e.until > now && (e.entries == nil || e.entries.size == b.Limit.Size && e.entries.cost == b.need())
	return e, known
}

// forget removes the entry for b, which a server has emptied by now. The answer to
// a request that was sent before now is not cached.
func (d *denyCache) forget(b *Bucket, now int64) {
	d.forgot.Store(now)
	slot, hash := d.slot(b)
	slot.mu.Lock()
	defer slot.mu.Unlock()
	if slot.hash == hash {
		slot.cachedDenial = cachedDenial{}
	}
}

// put stores the entry e for b, which was answered at now. Without replace it only
// replaces a valid entry.
func (d *denyCache) put(b *Bucket, e cachedDenial, full, replace bool, now int64) {
	slot, hash := d.slot(b)
	e.hash = hash
	slot.mu.Lock()
	defer slot.mu.Unlock()
	if !replace && (slot.hash != e.hash || slot.until <= now) {
		return
	}
	if !replace && !full {
		e.until = slot.until // or it would stay as long as requests keep coming
	}
	slot.cachedDenial = e
	for latest := d.latest.Load(); e.until > latest && !d.latest.CompareAndSwap(latest, e.until); {
		latest = d.latest.Load()
	}
}
