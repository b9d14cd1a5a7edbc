package limiter

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

const (
	// denySlots is how many buckets are remembered at most, which takes 1 MB.
	// Of two that fall into one slot the later is.
	denySlots = 1 << 14

	// cacheFor is how long a bucket is remembered at most, in µs. What nobody
	// foresees, such as an operator who deletes keys, shows after that time.
	cacheFor = 1_000_000
)

// denyCache remembers buckets that a server has reported full. Nothing can enter a
// full bucket before its next drip: until then every request on it, of whatever
// cost, is denied, and the server need not be asked. So a flood of requests that
// are denied costs it nothing.
//
// Whether a bucket is full depends on the size that the request goes by. What
// requests of a larger size may still add makes it only fuller: until the next drip
// that counts, a bucket that was full for a size stays so. A bucket is not full
// that denies only for units that are held, see crossslot.go: they may come back.
// Of a request with several buckets, of which one is full, the others are
// remembered too, for what they hold shows in the answer. It is then what the server
// last said of them.
type denyCache struct {
	seed   maphash.Seed
	latest atomic.Int64 // until when anything is remembered
	slots  []denySlot
}

// denySlot has room for one bucket.
type denySlot struct {
	mu sync.Mutex
	cachedDenial
}

// cachedDenial is what is remembered of one bucket. Times are in µs on a monotonic
// clock of this process.
type cachedDenial struct {
	hash uint64
	state
	doubt int64 // how much sooner it may run empty
	until int64 // when it is to be asked for again
}

// full reports whether a bucket of limit l has room for nothing at now.
func (e *cachedDenial) full(l *Limit, now int64) bool {
	return l.wait(state{e.clear - e.doubt, e.slack}, now, 1) > 0
}

// newDenyCache returns room for so many buckets.
func newDenyCache(slots int) *denyCache {
	return &denyCache{seed: maphash.MakeSeed(), slots: make([]denySlot, slots)}
}

// slot returns the slot in which b belongs, and b's hash.
func (d *denyCache) slot(b *Bucket) (*denySlot, uint64) {
	hash := b.hash(d.seed)
	return &d.slots[hash%uint64(len(d.slots))], hash
}

// deniedAlike reports whether a full bucket denies req whatever its other buckets
// hold, and nothing is charged then.
func (req Request) deniedAlike() bool {
	return req.Accounting == AccountingAtomic || len(req.Buckets) == 1
}

// decide appends the outcomes of req to dst, if it is denied for sure, and
// reports whether it is.
func (d *denyCache) decide(req Request, now int64, dst []outcome) ([]outcome, bool) {
	if now >= d.latest.Load() || !req.deniedAlike() {
		return dst, false
	}
	before, denied := len(dst), false
	for i := range req.Buckets {
		b := &req.Buckets[i]
		e, ok := d.get(b, now)
		if !ok {
			return dst[:before], false
		}
		denied = denied || e.full(&b.Limit, now)
		s := e.state.at(now)
		dst = append(dst, outcome{state: state{s.clear - now, s.slack}, denied: !b.fits(s, now)})
	}
	if !denied {
		return dst[:before], false
	}
	return dst, true
}

// remember records what a server has decided on req, which was sent and
// answered at these times. Somewhere between is when the server looked at the
// clock: a bucket is denied for no longer than if that was at once, and drips as
// if it was at last, so that no client is told to come too early.
func (d *denyCache) remember(req Request, outcomes []outcome, sent, answered int64) {
	keep := false
	for i := range outcomes {
		keep = keep || !outcomes[i].blocked && req.Buckets[i].Limit.wait(outcomes[i].state, 0, 1) > 0
	}
	keep = keep && req.deniedAlike()
	if !keep && answered >= d.latest.Load() {
		return
	}
	for i, o := range outcomes {
		b := &req.Buckets[i]
		if o.blocked || o.foreign {
			continue
		}
		e := cachedDenial{state: state{o.clear + answered, o.slack}, doubt: answered - sent, until: sent + cacheFor}
		wait := b.Limit.wait(o.state, 0, 1)
		if wait > 0 {
			e.until = sent + min(wait, cacheFor)
		}
		d.put(b, e, wait > 0, keep, answered)
	}
}

// get returns what is remembered of b, and whether that is anything.
func (d *denyCache) get(b *Bucket, now int64) (cachedDenial, bool) {
	slot, hash := d.slot(b)
	slot.mu.Lock()
	defer slot.mu.Unlock()
	return slot.cachedDenial, slot.hash == hash && slot.until > now
}

// put remembers e of b, which is answered now and full or not: anew, or only if
// something is remembered.
func (d *denyCache) put(b *Bucket, e cachedDenial, full, anew bool, now int64) {
	slot, hash := d.slot(b)
	e.hash = hash
	slot.mu.Lock()
	defer slot.mu.Unlock()
	if !anew && (slot.hash != e.hash || slot.until <= now) {
		return
	}
	if !anew && !full {
		e.until = slot.until // or it would be remembered as long as anybody asks
	}
	slot.cachedDenial = e
	for latest := d.latest.Load(); e.until > latest && !d.latest.CompareAndSwap(latest, e.until); {
		latest = d.latest.Load()
	}
}
