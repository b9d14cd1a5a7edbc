package limiter

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// Held has the units that one request holds, of its Buckets with Hold, until their
// outcome is known. Its zero value is ready for use in one [Request].
type Held struct {
	mu     sync.Mutex
	settle []func(charge int64) // by the index of the bucket; nil if it holds nothing
	kept   []*kept              // what a Redis store knows of it
}

// Settle ends that the bucket with the given index in the Request holds units, and
// charges so many of them, which need not be as many: 0 lets them go. More than the
// bucket has room for overfills it, by its Size at most. It does nothing if the bucket
// holds none, as after a denial, or was settled before. Settle does not wait: what a
// server has to do is sent with the next requests.
//
// Each bucket has to be settled at some time, whatever becomes of the request.
func (h *Held) Settle(bucket int, charge int64) {
	h.mu.Lock()
	var settle func(int64)
	if bucket < len(h.settle) {
		settle, h.settle[bucket] = h.settle[bucket], nil
	}
	h.mu.Unlock()
	if settle != nil {
		settle(max(charge, 0))
	}
}

// hold records how to settle what the bucket with the given index holds. of is the
// number of buckets.
func (h *Held) hold(bucket, of int, settle func(charge int64)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.settle == nil {
		h.settle = make([]func(int64), of)
	}
	h.settle[bucket] = settle
}

// holds reports whether any of req's buckets holds units.
func (req *Request) holds() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Hold {
			return true
		}
	}
	return false
}

// heldHere counts the units that are held in a Memory, by the hash of their bucket.
// They end with their process, so nothing lapses.
type heldHere struct {
	buckets atomic.Int64 // how many have units that are held
	mu      sync.Mutex
	units   map[uint64]int64
}

// of returns how many units of a bucket are held.
func (h *heldHere) of(hash uint64) int64 {
	if h.buckets.Load() == 0 {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.units[hash]
}

// add holds n units of a bucket more, or fewer. The lock of its table must be held.
func (h *heldHere) add(hash uint64, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.units == nil {
		h.units = make(map[uint64]int64)
	}
	if h.units[hash] += n; h.units[hash] == 0 {
		delete(h.units, hash)
	}
	h.buckets.Store(int64(len(h.units)))
}

// anyHeld reports whether there may be requests that hold units: here, or in servers if
// their store has been replaced by m.
func (m *Memory) anyHeld() bool {
	return m.holding.buckets.Load() != 0 || m.traffic.queries.Load() != 0
}

// heldElsewhere appends how many units of each of the buckets requests hold in servers, or
// may be charged there. No table may be locked.
func (m *Memory) heldElsewhere(places []place, buckets []Bucket, dst []int64) []int64 {
	m.traffic.mu.Lock()
	defer m.traffic.mu.Unlock()
	for i := range places {
		dst = append(dst, m.traffic.units(places[i].hash, buckets[i].Limit.Size))
	}
	return dst
}

// hold has h settle what p's bucket, the i-th of req, now holds.
func (m *Memory) hold(req Request, i int, p *place) {
	b := req.Buckets[i]
	m.holding.add(p.hash, b.Cost)
	req.Held.hold(i, len(req.Buckets), func(charge int64) { m.settleHeld(b, charge) })
}

// settleHeld lets go what a request holds of b, and charges so much of it.
func (m *Memory) settleHeld(b Bucket, charge int64) {
	p := m.place(&b)
	m.lock(&p)
	now := m.clock().Microseconds()
	m.holding.add(p.hash, -b.Cost)
	if charge == 0 {
		p.table.mu.Unlock()
		return
	}
	m.look(&p, &b, now)
	if b.Limit.keepsEntries() {
		m.openEntries(&p, &b, now)
	}
	if m.leader.Load() != nil {
		m.leader.Store(nil) // its servers will not know of this charge
	}
	b.Cost = min(charge, max(b.Cost, 2*b.Limit.Size-p.units(&b, now)))
	if p.exact {
		b.Cost = min(b.Cost, MaxLogUnits)
		b.Limit.Size += b.Cost // or it would drop its oldest units
		m.settleEntries(&p, &b, now)
	} else {
		m.settle(&p, &b, now, true)
	}
	p.table.mu.Unlock()
	if p.entered {
		m.makeRoom(&p, b.MaxKeys, b.keeps(), now)
	}
}

// units returns how many units p's bucket has.
func (p *place) units(b *Bucket, now int64) int64 {
	if p.exact {
		return int64(p.entries.total)
	}
	return b.Limit.units(p.level, now)
}

const (
	// renewEvery is the time after which held units are due to be renewed: they are
	// within half of a generation, see held.lua.
	renewEvery = heldFor/2 - renewTick

	// renewTick is how often held units are looked at.
	renewTick = 500 * time.Millisecond

	// renewTogether is how many renewals are sent at once, with renewPause after them, or
	// more if all would take longer than renewPortions such pauses. After a connection broke
	// all are due, and requests would wait for their server to be done with them.
	renewTogether = 64
	renewPause    = 10 * time.Millisecond
	renewPortions = 200
)

// kept is what a request holds of one bucket in a server, or in this process if that
// did not answer, from its decision until it is settled. Meanwhile its query counts as
// in flight, so that the fallback leaves room for it.
type kept struct {
	store *Redis
	query *query

	mu       sync.Mutex
	held     bool
	receipt  int64 // what names the units in the server; 0 if it does not know them
	renewed  time.Duration
	renewing bool
	settled  bool
	charge   int64
}

// keep returns req with what is needed to hold units of each bucket with Hold.
func (r *Redis) keep(req Request, w *scratch) Request {
	w.buckets = append(w.buckets[:0], req.Buckets...)
	req.Buckets = w.buckets
	req.Held.kept = req.Held.kept[:0]
	for i := range req.Buckets {
		if b := &req.Buckets[i]; b.Hold {
			b.keptAs = 0
			k := &kept{store: r, query: r.query(Request{Buckets: req.Buckets[i : i+1]}, whatRenew)}
			k.query.buckets[0].held.kept = k
			req.Held.kept = append(req.Held.kept, k)
			b.keptAs = uint16(len(req.Held.kept)) //nolint:gosec // at most MaxBuckets
		}
	}
	return req
}

// isHeld reports whether anything is held: not if a dry run denied.
func (k *kept) isHeld() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.held
}

// holding records that the units are held, and since when.
func (k *kept) holding(receipt int64, now time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.held, k.receipt, k.renewed = true, receipt, now
}

// known reports whether a server in the given place counts the units as held.
func (k *kept) known(place string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.receipt != 0 && k.renewed >= 0 && k.store.place == place
}

// renewNow has the units renewed at once, since their server may have lost them.
func (k *kept) renewNow() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.renewed = -renewEvery
}

// includeHeld has the levels of buckets with Hold include what is held, as if it were
// charged.
func (req *Request) includeHeld(outcomes []outcome) {
	at := moment{unix: time.Now().UnixMicro()}
	for i := range outcomes {
		b, o := &req.Buckets[i], &outcomes[i]
		if !b.Hold || o.held <= 0 || o.blocked {
			continue
		}
		o.ahead = b.Limit.atLeast(o.after(at.now), o.held, at).ahead(at.now)
		if o.entries != nil {
			*o.entries = o.entries.plus(o.held, &b.Limit)
		}
	}
}

// hand has req.Held settle what req holds now that it is decided, or lets it go if the
// request was denied or, without outcomes, not decided.
func (r *Redis) hand(req Request, outcomes []outcome) {
	admitted := outcomes != nil && !req.denied(outcomes)
	for i := range req.Buckets {
		k := req.keptOf(&req.Buckets[i])
		if k == nil {
			continue
		}
		switch {
		case outcomes != nil && !admitted && req.Buckets[i].Limit.CountDenied: // in another slot than what denied
			k.settle(req.Buckets[i].Cost)
			continue
		case !admitted || !k.isHeld() || outcomes[i].unused:
			k.settle(0)
			continue
		}
		r.renewals.add(k)
		req.Held.hold(i, len(req.Buckets), k.settle)
	}
}

// settle lets go the units, and charges so many of them.
func (k *kept) settle(charge int64) {
	k.mu.Lock()
	held := k.held && !k.settled
	k.settled, k.charge = true, charge
	wait := k.renewing
	receipt := k.receipt
	k.mu.Unlock()
	k.store.renewals.remove(k)
	if !held {
		k.store.fallback.drop(k.query)
		return
	}
	if !wait { // otherwise once the renewal has been answered
		k.send(receipt, charge)
	}
}

// send sends the server what was settled.
func (k *kept) send(receipt, charge int64) {
	q, r := k.query, k.store
	q.what = whatSettle
	q.Replies = q.replies()
	q.buckets[0].held.receipt, q.buckets[0].held.charge = receipt, charge
	if charge == 0 {
		r.fallback.drop(q)
	}
	if receipt == 0 { // no server knows of these units
		r.leaveToServer(q)
		return
	}
	r.settleOn(nil, q)
}

// renewals are the units that requests in progress hold in servers. While there are
// any, they are renewed in the background.
type renewals struct {
	mu      sync.Mutex
	kept    map[*kept]struct{}
	running bool
	store   *Redis
}

func (n *renewals) add(k *kept) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.kept == nil {
		n.kept = make(map[*kept]struct{})
	}
	n.kept[k] = struct{}{}
	if !n.running {
		n.running = true
		go n.run()
	}
}

func (n *renewals) remove(k *kept) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.kept, k)
}

// close charges what requests still hold, as a server would in the end, so that others need
// not wait for that: the process ends, and the requests with it. It waits for the answers
// for no longer than a request would.
func (n *renewals) close() {
	n.mu.Lock()
	all := slices.Collect(maps.Keys(n.kept))
	n.mu.Unlock()
	var answers sync.WaitGroup
	for _, k := range all {
		k.abandon(&answers)
	}
	answered := make(chan struct{})
	go func() {
		answers.Wait()
		close(answered)
	}()
	select {
	case <-answered:
	case <-time.After(n.store.timeout):
	}
}

// abandon charges what is held in a server, once and for all. In this process it stays held.
func (k *kept) abandon(answers *sync.WaitGroup) {
	k.store.renewals.remove(k) // first, since what no server knows is renewed at once
	k.mu.Lock()
	receipt := k.receipt
	if !k.held || k.settled || k.renewing || receipt == 0 {
		k.mu.Unlock()
		return
	}
	k.receipt = 0 // so settling it later is no longer the server's
	k.mu.Unlock()
	p := k.query.buckets[0]
	p.held = &heldCost{receipt: receipt, charge: p.cost}
	q := &query{what: whatSettle, stage: ended, buckets: []asked{p}}
	q.Owner, q.Keys, q.Replies = q, k.query.Keys, q.replies()
	answers.Add(1)
	q.Done = func(error) { answers.Done() }
	if k.store.client.Submit(redisscript.Deadline{At: time.Now().Add(k.store.timeout)}, &q.Call) != nil {
		answers.Done()
	}
}

// run renews what is due until nothing is held.
func (n *renewals) run() {
	for {
		time.Sleep(renewTick)
		n.mu.Lock()
		if len(n.kept) == 0 || n.store.closed.Load() {
			n.running = false
			n.mu.Unlock()
			return
		}
		n.mu.Unlock()
		n.renewDue()
	}
}

// renewDue renews what is due.
func (n *renewals) renewDue() {
	n.mu.Lock()
	all := slices.AppendSeq(make([]*kept, 0, len(n.kept)), maps.Keys(n.kept))
	n.mu.Unlock()
	sent, together := 0, max(renewTogether, len(all)/renewPortions)
	for _, k := range all {
		if !k.due(n.store.clock()) { // asked right before, since who settles it waits for the renewal
			continue
		}
		k.renew()
		if sent++; sent%together == 0 {
			time.Sleep(renewPause)
		}
		if n.store.closed.Load() {
			return
		}
	}
}

// due reports whether the units have to be renewed at now, and if so that they are being
// renewed.
func (k *kept) due(now time.Duration) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.settled || k.renewing || k.receipt != 0 && now-k.renewed < renewEvery {
		return false
	}
	k.renewing = true
	return true
}

// renew sends the server that the units are still held.
func (k *kept) renew() {
	q, r := k.query, k.store
	sent := r.clock()
	q.what = whatRenew
	q.Replies = q.replies()
	k.mu.Lock()
	q.buckets[0].held.receipt = k.receipt
	k.mu.Unlock()
	q.Done = func(err error) { k.renewal(sent, err) }
	end := redisscript.Deadline{At: time.Now().Add(r.timeout)}
	if err := r.client.Submit(end, &q.Call); err != nil {
		k.renewal(sent, err)
	}
}

// renewal records the outcome of a renewal that was sent at a time. After an error it is
// sent again, with the same receipt.
func (k *kept) renewal(sent time.Duration, err error) {
	receipt := int64(0)
	if err == nil {
		if outcomes, _, wrong := k.query.outcomes(nil); wrong == nil {
			receipt = outcomes[0].receipt
		}
	}
	k.mu.Lock()
	k.renewing = false
	if receipt != 0 {
		k.receipt, k.renewed = receipt, sent
	}
	settled, receipt, charge := k.settled, k.receipt, k.charge
	k.mu.Unlock()
	k.store.fallback.renewed(k)
	if settled {
		k.send(receipt, charge)
	}
}
