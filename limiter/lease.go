package limiter

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// A lease is units of a bucket that this process has charged to the server before it uses
// them, see [Lease]. A unit that is admitted was charged at most the time of the lease
// before, and what is charged obeys the limit: that is all there is to the bound. It needs
// no clock but this process's own, and a crash, a partition or a lost answer means only
// that units are not used.
//
// Who leases how much follows from demand: what the key used in the last half of that
// time. The server grants a quarter of its room at most, so that idle nodes cannot starve
// busy ones, and a lease is renewed in the background once half of it is used. So keys
// that are requested rarely have none, and one that is requested often, at any rate below
// its limit, hardly waits.
//
// Over the limit there is nothing to lease: each drip is taken as it comes. Then units are
// leased before there is room for them, up to half the time of the lease, or all of it where
// answers take long. Each may be used from the time on at which there would have been room
// for it, and until then the process denies on its own.
//
// The rest of the limiter need not know: to the server and to the fallback, leased units
// are charged like others. Nothing is given back, as it is unknown how much of it has
// dripped.

// leaseSlots is the maximum number of buckets that have leases or are candidates. Of two
// that fall into one slot, the earlier one stays while it is in use.
const leaseSlots = 1 << 14

// A server leases a share of the room at most, and no fewer units than what that many requests
// cost: see upkeep.lua.
const (
	leasedShare = 4
	minLease    = 2
)

// leases are the leases of one store.
type leases struct {
	store *servers
	made  sync.Once
	slots []leaseSlot   // a power of two of them
	calls atomic.Uint64 // number of renewals so far

	mu    sync.Mutex
	usage map[string]*leaseCounters // by Bucket.Name
}

// LeaseUsage is the outcome of the units that a process has leased for buckets of one
// Name. Those that are neither used nor Held expired unused.
type LeaseUsage struct {
	Name    string
	Granted int64 // by servers
	Used    int64 // by requests
}

// leaseCounters count for a LeaseUsage.
type leaseCounters struct{ granted, used atomic.Int64 }

// leaseSlot holds the lease of one bucket.
type leaseSlot struct {
	mu sync.Mutex
	lease
}

// lease is what a process has leased of a bucket. Times are in µs, on the store's clock.
type lease struct {
	hash     uint64
	size     int64        // of the bucket: a unit that fits into a larger one may not fit into this one
	grants   [2]grant     // the earlier first
	reported bucket.Level // as the server last reported it, to any request

	// How many units were requested, in the present period of half the lease's time and
	// in the one before.
	period          int64
	before, present int64
	lastDemand      int64 // when the last were

	renewal uint64 // the number of the call that is to renew it, or 0
	took    int64  // how long the last answer took
	next    int64  // when it may be renewed again
	refused bool   // whether the last renewal granted nothing
	counts  *leaseCounters
}

// grant is units that were leased together.
type grant struct {
	units, used int64
	within      int64 // for how long each may be used after it was charged
	sent        int64 // when they were requested: they were charged then or later
	doubt       int64 // how much earlier than sent says that may have been
	until       int64 // when none can be used any more

	// If drips, the level with them, as reported: as much of it as exceeds the size
	// can't be used before it has dripped.
	drips    bool
	reported bucket.Level
}

// usable returns how many units of g a request on b may use at now, and how many are left,
// now or later. If b's leases are for less time than when g was granted, for that: the
// configuration has changed meanwhile.
func (g *grant) usable(b *Bucket, now int64) (usable, left int64) {
	within := min(g.within, b.Consistency.lease().Microseconds())
	if now >= g.until || !g.drips && now >= g.sent+within {
		return 0, 0
	}
	valid, gone := g.units, g.used
	if g.drips {
		valid = g.valid(&b.Limit, now)
		if before := now - within; before >= g.sent {
			gone = max(gone, g.valid(&b.Limit, before+g.doubt))
		}
	}
	return max(valid-gone, 0), g.units - gone
}

// valid returns for how many units of g there would have been room by now.
func (g *grant) valid(l *Limit, now int64) int64 {
	return max(g.units-max(l.of().Units(g.reported, now)-l.Size, 0), 0)
}

// take reports whether n units may be used at now for a request on b, and uses them unless
// only to look. It returns how many others may be used now, and how many are left, now or later.
func (s *lease) take(b *Bucket, n, now int64, look bool) (others, left int64, ok bool) {
	var usable, lefts [len(s.grants)]int64
	all := int64(0)
	for i := range s.grants {
		usable[i], lefts[i] = s.grants[i].usable(b, now)
		all, left = all+usable[i], left+lefts[i]
	}
	if all < n {
		return all, left, false
	}
	others, left = all-n, left-n
	for i := range s.grants {
		if look {
			break
		}
		g, used := &s.grants[i], min(n, usable[i])
		if used > 0 {
			g.used = g.units - lefts[i] + used
			n -= used
		}
	}
	return others, left, true
}

// demand notes that n units are requested at now.
func (s *lease) demand(half, n, now int64) {
	s.turn(half, now)
	s.present = min(s.present+min(n, s.size), MaxUnits)
	s.lastDemand = now
}

// wish returns how many units were requested in the last half of the lease's time.
func (s *lease) wish(half, now int64) int64 {
	s.turn(half, now)
	return s.present + int64(float64(s.before)*float64(half-now%half)/float64(half))
}

// turn begins another period if the present one is over.
func (s *lease) turn(half, now int64) {
	switch period := now / half; period {
	case s.period, s.period - 1: // of a request that another one has overtaken
	case s.period + 1:
		s.period, s.before, s.present = period, s.present, 0
	default:
		s.period, s.before, s.present = period, 0, 0
	}
}

// isIdle reports whether nothing is left and it has had no requests lately.
func (s *lease) isIdle(half, now int64) bool {
	return s.hash == 0 || s.renewal == 0 && now >= s.grants[0].until && now >= s.grants[1].until && now-s.lastDemand >= 2*half
}

// make makes the slots, once a lease is wanted.
func (ls *leases) make() { ls.made.Do(func() { ls.slots = make([]leaseSlot, leaseSlots) }) }

// of returns the slot of b, locked, or nil if it is another bucket's. With claim it becomes
// b's if that is idle.
func (ls *leases) of(b *Bucket, now int64, claim bool) *leaseSlot {
	hash := b.hash(ls.store.denyCache.seed)
	slot := &ls.slots[hash&uint64(len(ls.slots)-1)]
	slot.mu.Lock()
	switch half := b.Consistency.lease().Microseconds() / 2; {
	case slot.hash == hash && slot.size == b.Limit.Size:
		return slot
	case claim && slot.isIdle(half, now):
		slot.lease = lease{hash: hash, size: b.Limit.Size, counts: ls.count(b.Name)}
		return slot
	}
	slot.mu.Unlock()
	return nil
}

// count returns the counters for buckets of a name.
func (ls *leases) count(name string) *leaseCounters {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.usage == nil {
		ls.usage = make(map[string]*leaseCounters)
	}
	c := ls.usage[name]
	if c == nil {
		c = new(leaseCounters)
		ls.usage[name] = c
	}
	return c
}

// decide decides req if enough units are leased of each of its buckets, or if it has to
// wait for some of them, and reports whether it has. It appends to dst.
func (ls *leases) decide(req Request, now int64, dst []outcome) ([]outcome, bool) {
	ls.make()
	before, unknown, denied := len(dst), false, false
	several := len(req.Buckets) > 1
	for i := range req.Buckets {
		b := &req.Buckets[i]
		o, ok := ls.serve(b, now, several)
		dst = append(dst, o)
		unknown = unknown || !ok && !o.denied
		denied = denied || o.denied && !b.DryRun
	}
	if unknown {
		return dst[:before], false
	}
	charges := several && (!denied || !req.deniedAlike())
	for i := before; charges && i < len(dst); i++ {
		if b, o := &req.Buckets[i-before], &dst[i]; !o.denied {
			if !ls.use(b, now) {
				// Another request has taken units meanwhile. Those that this one has
				// taken of other buckets are lost, and a server decides.
				return dst[:before], false
			}
			o.leased -= b.Cost
		}
	}
	ls.note(req, dst[before:], now)
	return dst, true
}

// serve reports whether enough units are leased for a request on b. Unless it is only to look
// it uses them. o is the outcome then, or if there is no room before units that are leased
// may be used.
func (ls *leases) serve(b *Bucket, now int64, look bool) (o outcome, ok bool) {
	slot := ls.of(b, now, false)
	if slot == nil {
		return o, false
	}
	defer slot.mu.Unlock()
	look = look || b.Cost == 0
	others, left, ok := slot.take(b, b.need(), now, look)
	if s := slot.reported.At(now); ok || left > 0 && !b.fits(s, 0, now) {
		o = outcome{Ahead: s.Ahead(now), denied: !ok, leased: others, by: DecidedByLease}
	}
	switch {
	case ok && look: // it is used later, unless another bucket denies
		o.leased += b.need()
	case ok:
		slot.counts.used.Add(b.Cost)
	}
	return o, ok
}

// note notes the demand of req, which has been decided, and renews the leases that are due.
// What another bucket has denied is no demand: otherwise a flood that this one never sees
// would use it up. And nothing is leased if any bucket of req is not in demand: then a
// server decides anyway, and what is leased of the others expires.
func (ls *leases) note(req Request, outcomes []outcome, now int64) {
	all := req.Accounting == AccountingEach || !req.denied(outcomes)
	serve, due := true, false
	for i := range req.Buckets {
		b := &req.Buckets[i]
		slot := ls.of(b, now, true)
		if slot == nil {
			serve = false
			continue
		}
		half := b.Consistency.lease().Microseconds() / 2
		if all || outcomes[i].denied {
			slot.demand(half, b.Cost, now)
		}
		wish := slot.wish(half, now)
		serve = serve && slot.canServe(b, wish, now)
		due = due || slot.isDue(b, half, wish, now)
		slot.mu.Unlock()
	}
	if !due {
		return
	}
	for i := range req.Buckets {
		b := &req.Buckets[i]
		slot := ls.of(b, now, false)
		if slot == nil {
			continue
		}
		half := b.Consistency.lease().Microseconds() / 2
		wish, ahead, renewal := slot.wish(half, now), slot.ahead(half), uint64(0)
		if (serve || slot.refused) && slot.isDue(b, half, wish, now) {
			renewal = ls.calls.Add(1)
			slot.renewal = renewal
		}
		slot.mu.Unlock()
		if renewal != 0 {
			ls.renew(*b, wish, ahead, renewal)
		}
	}
}

// use uses the leased units that a request on b takes, and reports whether there are as
// many.
func (ls *leases) use(b *Bucket, now int64) bool {
	slot := ls.of(b, now, false)
	if slot == nil {
		return false
	}
	defer slot.mu.Unlock()
	_, _, ok := slot.take(b, b.Cost, now, false)
	if ok {
		slot.counts.used.Add(b.Cost)
	}
	return ok
}

// isWanted reports whether that many units of b are worth a lease. One request wants none,
// whatever it costs: it would have less room itself.
func (s *lease) isWanted(b *Bucket, wish int64) bool {
	least := b.minLease()
	return wish >= least && s.size/leasedShare >= least
}

// canServe reports whether units of b are leased, or may soon be.
func (s *lease) canServe(b *Bucket, wish, now int64) bool {
	if !s.refused && s.isWanted(b, wish) {
		return true
	}
	_, left, _ := s.take(b, 0, now, true)
	return left > 0
}

// isDue reports whether that many units should be leased of b, given how many are left: of one
// grant, and no more than half of it or of what is wanted; or where answers take long, than
// may be used in twice that time.
func (s *lease) isDue(b *Bucket, half, wish, now int64) bool {
	if s.renewal != 0 || now < s.next || !s.isWanted(b, wish) {
		return false
	}
	_, left, _ := s.take(b, 0, now, true)
	used := int64(float64(wish) * min(2*float64(s.took)/float64(half), 1)) // while two answers come
	return left <= max(min(wish, max(s.grants[1].units, b.minLease()))/2, used) && (s.grants[0].spent(b, now) || s.grants[1].spent(b, now))
}

// minLease returns the fewest units of b that are worth a lease, but no more than any
// bucket holds.
func (b *Bucket) minLease() int64 { return minLease * min(b.need(), MaxUnits) }

// ahead returns how long before there is room for them units are leased, in µs. A quarter
// of that is leased at a time, and has to last until the next answer.
func (s *lease) ahead(half int64) int64 { return min(max(half, (leasedShare+1)*s.took), 2*half) }

// spent reports whether nothing is left of g for requests on b.
func (g *grant) spent(b *Bucket, now int64) bool {
	_, left := g.usable(b, now)
	return left == 0
}

// renew has b's server lease up to that many units, at most so long before there is room
// for them. It does not wait for the answer.
func (ls *leases) renew(b Bucket, wish, ahead int64, renewal uint64) {
	r, least := ls.store, b.minLease()
	b.Cost = wish
	q := r.query(Request{Buckets: []Bucket{b}}, whatLease)
	q.least = least
	// What is above a size would drip faster than the bucket if a drip were larger than that.
	if b.Limit.of().Charging() == bucket.AheadOfRoom && b.Limit.DripSize <= b.Limit.Size {
		q.ahead = ahead / b.Limit.of().Rate() * b.Limit.DripSize
	}
	sent := r.clock().Microseconds()
	q.Done = func(err error) { ls.renewed(&b, q, renewal, sent, err) }
	if err := r.client.Submit(redisscript.Deadline{At: time.Now().Add(r.timeout)}, &q.Call); err != nil {
		ls.renewed(&b, q, renewal, sent, err)
	}
}

// renewed records the answer to a renewal of b's lease. If there was none, what the server
// may have charged is not used.
func (ls *leases) renewed(b *Bucket, q *query, renewal uint64, sent int64, err error) {
	r, granted := ls.store, int64(0)
	var outcomes []outcome
	if err == nil {
		outcomes, _, err = q.outcomes(nil)
	}
	if err != nil {
		r.fallback.drop(q)
	} else {
		granted, outcomes[0].held = outcomes[0].held, 0
		r.fallback.charged(q, granted)
		r.answered(q, outcomes)
		r.denyCache.remember(Request{Buckets: []Bucket{*b}}, outcomes, sent, r.clock)
	}
	slot := ls.of(b, sent, false)
	if slot == nil {
		return
	}
	defer slot.mu.Unlock()
	if slot.renewal != renewal { // it was forgotten meanwhile
		return
	}
	slot.renewal = 0
	within, answered := b.Consistency.lease().Microseconds(), r.clock().Microseconds()
	slot.took = answered - sent
	switch slot.next = answered; {
	case slot.took >= within: // what was granted has expired
		slot.next += cacheFor
	case granted == 0:
		slot.next += within / 2
	}
	if err != nil {
		return
	}
	slot.reported, slot.refused = outcomes[0].After(answered), granted == 0
	if granted == 0 { // until there is room for a lease, as far as is known
		l := b.Limit
		l.Size += q.ahead
		wait := l.of().Wait(slot.reported, min(leasedShare*q.least, l.Size), answered)
		slot.next = max(slot.next, answered+min(wait, cacheFor))
		return
	}
	slot.counts.granted.Add(granted)
	g := grant{units: granted, within: within, sent: sent, doubt: answered - sent, until: sent + within}
	switch b.Limit.of().Charging() {
	case bucket.AheadWithin:
		g.until = min(g.until, sent+outcomes[0].Clear)
	case bucket.AheadOfRoom:
		g.drips, g.reported, g.until = true, slot.reported, answered+2*within
	case bucket.AheadNever, bucket.AheadOfUse:
	}
	if !slot.grants[1].spent(b, answered) {
		slot.grants[0] = slot.grants[1]
	}
	slot.grants[1] = g
}

// heard records the levels of buckets after req, which a server has decided, and has the
// outcomes say what is leased. The server may have decided after the last renewal, or
// before, and then knew nothing of that: the bucket is fuller after the later of them.
func (ls *leases) heard(req Request, outcomes []outcome) {
	now := ls.store.clock().Microseconds()
	for i := range req.Buckets {
		b := &req.Buckets[i]
		slot := ls.known(b)
		if slot == nil {
			continue
		}
		if after := outcomes[i].After(now); b.Limit.of().Units(after, now) >= b.Limit.of().Units(slot.reported, now) {
			slot.reported = after
			outcomes[i].leased, _, _ = slot.take(b, 0, now, true)
		}
		slot.mu.Unlock()
	}
	if req.leased() {
		ls.note(req, outcomes, now)
	}
}

// forget forgets what is leased of b.
func (ls *leases) forget(b *Bucket) {
	if slot := ls.known(b); slot != nil {
		slot.lease = lease{}
		slot.mu.Unlock()
	}
}

// left returns how many units are leased of b that have not been used.
func (ls *leases) left(b *Bucket) (left int64) {
	slot := ls.known(b)
	if slot == nil {
		return 0
	}
	defer slot.mu.Unlock()
	_, left, _ = slot.take(b, 0, ls.store.clock().Microseconds(), true)
	return left
}

// known returns the slot of b, locked, or nil if nothing is known of it.
func (ls *leases) known(b *Bucket) *leaseSlot {
	if b.Consistency.lease() == 0 {
		return nil
	}
	ls.make()
	return ls.of(b, 0, false)
}
