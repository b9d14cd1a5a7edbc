package limiter

import (
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

const (
	// lapse is the time after which a server charges what a process holds that it has not
	// heard of, see held.lua.
	lapse = 15 * time.Second

	// renewEvery is how often what is held is renewed.
	renewEvery = 5 * time.Second

	// tellEvery is how often what has not been answered is sent again.
	tellEvery = 100 * time.Millisecond

	// sendTogether is how many calls that are due are sent at once, with sendPause after them,
	// or more if all would take longer than sendPortions such pauses. After a connection broke
	// all tabs are due, and requests would wait for their server to be done with them.
	sendTogether = 64
	sendPause    = 10 * time.Millisecond
	sendPortions = 200

	// lookTogether is how many tabs are looked at while requests wait.
	lookTogether = 64
)

// tabs are what the requests of a store hold in its servers, by the names of the buckets' keys.
// While there are any, a goroutine renews them, and sends again what was not answered.
type tabs struct {
	store   *Redis
	process int64 // names this store in servers; random

	mu      sync.Mutex
	all     map[string]*tab
	number  int64 // the latest of a tab
	running bool
	closed  bool // whether nothing is sent any more
}

// tab is what this process holds of one bucket in a server, as held.lua says: it tells the
// server totals, and may do so as often as it likes. When it is in doubt about what the
// server has, it renews the tab: it opens another one with all that it holds. Both are sent
// until they are answered. The lock of tabs guards it.
type tab struct {
	tabs   *tabs
	bucket Bucket
	open   map[*kept]struct{} // what is held, or has been asked for

	running int // how many of them are held for certain

	asked   bool // whether a server may know of it, or of one that it stands for
	number  int64
	receipt int64  // -1 until a hold is admitted
	totals         // since it was opened
	said    totals // what the latest call tells
	known   totals // what the server has answered to

	settling int      // how many settlements are in flight
	queued   bool     // whether one of them will tell the totals of a later time
	doubt    bool     // whether it is to be renewed
	lost     bool     // since the server may not have what it held
	renewal  *renewal // until it is answered
	owed     *query   // in flight for what is charged and not answered, see fallback.owe; its lock guards this

	heard   time.Duration // when the last call was sent that the server has answered
	renewed time.Duration // and the last renewal
}

// totals are how many units the requests of a tab have let go and been charged.
type totals struct{ ended, charged int64 }

// renewal is the renewal of a tab, which stands for the one before.
type renewal struct {
	units   int64
	running []*kept // what is held for certain
	before  tabName
	charged int64         // in total, by requests of the tab before
	owed    int64         // how much of that the server has not answered to
	heard   time.Duration // of that tab
	sent    bool          // whether it is in flight
	tries   int           // how often it was sent
	beside  bool          // whether more was held in the new tab before it was answered
}

// tabName names a tab of a process.
type tabName struct{ number, receipt int64 }

// kept is what a request holds of one bucket in a server, or in this process if that
// did not answer, from its decision until it is settled. Meanwhile its query counts as
// in flight, so that the fallback leaves room for it.
type kept struct {
	store  *Redis
	query  *query
	bucket Bucket

	// The lock of the store's tabs guards these.
	tab      *tab
	number   int64         // of the tab for which it was sent; 0 if it was not
	sent     time.Duration // when
	running  bool
	counted  bool // whether the tab has it, or its renewal
	inServer bool // whether a server knows of it, unless its tab is in doubt
	over     bool // whether it was given up
	paid     bool // whether it has lapsed, or its store was closed, so that it was charged
}

// cost returns how many units it holds.
func (k *kept) cost() int64 { return k.query.buckets[0].cost }

// keep returns req with what is needed to hold units of each bucket with Hold.
func (r *Redis) keep(req Request, w *scratch) Request {
	w.buckets = append(w.buckets[:0], req.Buckets...)
	req.Buckets = w.buckets
	req.Held.kept = req.Held.kept[:0]
	for i := range req.Buckets {
		if b := &req.Buckets[i]; b.Hold {
			b.keptAs = 0
			r.keepBucket(req, i)
		}
	}
	return req
}

// keepBucket adds what is needed to hold units of req's i-th bucket.
func (r *Redis) keepBucket(req Request, i int) {
	k := &kept{store: r, bucket: req.Buckets[i], query: r.query(Request{Buckets: req.Buckets[i : i+1]}, whatRenew)}
	k.query.buckets[0].held = &heldCost{charge: req.Buckets[i].Cost, kept: k}
	req.Held.kept = append(req.Held.kept, k)
	req.Buckets[i].keptAs = uint16(len(req.Held.kept)) //nolint:gosec // at most maxBuckets
}

// isHeld reports whether anything is held: not if a dry run denied.
func (k *kept) isHeld() bool {
	k.store.tabs.mu.Lock()
	defer k.store.tabs.mu.Unlock()
	return k.running
}

// holder returns the fallback whose servers count the units as held, or nil. When that
// changes, the fallback is told, which keeps it: see recount.
func (k *kept) holder() *fallback {
	k.store.tabs.mu.Lock()
	defer k.store.tabs.mu.Unlock()
	if k.inServer && !k.tab.lost {
		return k.store.fallback
	}
	return nil
}

// lose records that the server may not have what t held. It returns what that is, unless
// that was so before.
func (t *tab) lose() (held []*kept) {
	if !t.lost {
		held = t.heldNow()
	}
	t.doubt, t.lost = true, true
	return held
}

// heldNow returns what is held for certain.
func (t *tab) heldNow() []*kept {
	held := make([]*kept, 0, t.running)
	for k := range t.open {
		if k.running {
			held = append(held, k)
		}
	}
	return held
}

// lostNow has t renewed, since its server may have lost what it holds, or what was charged. It
// returns what that goes for, and was not so before.
func (n *tabs) lostNow(t *tab) []*kept {
	n.mu.Lock()
	defer n.mu.Unlock()
	return t.lose()
}

// tells returns how many of the units that q tells to be charged are not in the level here.
func (t *tab) tells(q *query) (units int64) {
	t.tabs.mu.Lock()
	defer t.tabs.mu.Unlock()
	if q.number != t.number { // it has been renewed since, and q tells nothing
		return 0
	}
	if units = t.charged - t.known.charged; t.renewal != nil {
		units += t.renewal.owed
	}
	return units
}

// of returns the tab of k's bucket, and makes one if there is none. One of which nothing is
// left begins anew.
func (n *tabs) of(k *kept) *tab {
	p := &k.query.buckets[0]
	t := n.all[p.key]
	if t == nil {
		t = &tab{tabs: n, open: make(map[*kept]struct{})}
		if n.all == nil {
			n.all = make(map[string]*tab)
		}
		n.all[p.key] = t
		if !n.running {
			n.running = true
			go n.run()
		}
	}
	if t.isIdle() {
		t.begin()
		t.asked, t.doubt, t.lost, t.renewal = false, false, false, nil
		t.heard, t.renewed = n.store.clock(), n.store.clock()
	}
	t.bucket = k.bucket
	k.tab = t
	return t
}

// begin gives t the next number.
func (t *tab) begin() {
	t.tabs.number++
	t.queued = false // what was, tells of the tab before
	t.number, t.receipt, t.totals, t.said, t.known = t.tabs.number, -1, totals{}, totals{}, totals{}
}

// isIdle reports whether nothing is left of t to be settled. While its server does not
// answer, that is so once all has ended that the server was never asked for: in an outage
// there would be a tab for each key otherwise.
func (t *tab) isIdle() bool {
	if len(t.open) > 0 || t.settling > 0 || t.renewal != nil && t.renewal.sent {
		return false
	}
	return !t.asked && t.charged == t.known.charged && (t.renewal == nil || t.renewal.owed == 0) || !t.doubt && t.renewal == nil && t.totals == t.known
}

// runs reports whether anything is held for certain.
func (t *tab) runs() bool { return t.running > 0 }

// run records that what k asked for is held for certain.
func (t *tab) run(k *kept) {
	if !k.running {
		k.running = true
		t.running++
	}
}

// sending says in q, which is about to be sent, what it asks of its tabs.
func (n *tabs) sending(q *query) {
	for i := range q.buckets {
		p := &q.buckets[i]
		if p.held == nil || q.tab == nil && p.held.kept == nil {
			continue
		}
		n.mu.Lock()
		if t := q.tab; t != nil {
			p.held.tabName = tabName{q.number, t.receipt}
			if q.number == t.number { // otherwise it has been renewed since, and this tells nothing
				t.queued, t.said, p.held.totals = false, t.totals, t.totals
			}
		} else {
			n.asking(p.held.kept)
			p.held.number = p.held.kept.number
		}
		p.held.process = n.process
		n.mu.Unlock()
	}
}

// asking records that a server is asked to hold k's units.
func (n *tabs) asking(k *kept) {
	if k.number != 0 { // it may have been sent before, or has been given up
		return
	}
	t := n.of(k)
	t.asked = true
	k.number, k.sent = t.number, n.store.clock()
	t.open[k] = struct{}{}
}

// admitted records that a server holds k's units, in a tab with that receipt.
func (n *tabs) admitted(k *kept, receipt int64) {
	var forgotten []*kept
	untold := int64(0)
	n.mu.Lock()
	t := k.tab
	switch {
	case k.number != t.number: // a renewal has counted it
	case t.renewal != nil:
		t.renewal.beside = true
	case t.receipt == receipt:
		t.heard = max(t.heard, k.sent)
	case t.receipt == 0 || t.runs(): // the server has lost the tab, or it has lapsed
		forgotten = t.lose()
	default: // it opened the tab, and what was owed in the one before can't be told any more
		untold = t.charged - t.known.charged
		t.receipt, t.totals, t.said, t.known = receipt, totals{}, totals{}, totals{}
		t.heard, t.renewed = k.sent, k.sent
	}
	t.run(k)
	k.counted, k.inServer = true, true
	n.mu.Unlock()
	n.store.fallback.forgotten(forgotten)
	n.store.fallback.chargeOwed(t, untold)
	n.advance(t, true)
}

// refused records that no server holds k's units because of its call: it was denied, was
// not run, or was late.
func (n *tabs) refused(k *kept) {
	n.mu.Lock()
	t := k.tab
	if k.number != 0 && !k.over {
		n.forget(k)
	}
	k.number = 0
	n.mu.Unlock()
	n.advance(t, false)
}

// forget removes k, which is not held. A renewal may have counted it.
func (n *tabs) forget(k *kept) {
	t := k.tab
	delete(t.open, k)
	if k.number != t.number {
		t.ended += k.cost()
	}
}

// lost records that k's call was given up, so that it is not known whether a server holds
// its units.
func (n *tabs) lost(k *kept) {
	n.mu.Lock()
	n.asking(k) // it may still be sent, as one for this tab
	t := k.tab
	n.forget(k)
	if k.over = true; k.number == t.number {
		t.doubt = true
	}
	n.mu.Unlock()
	n.advance(t, false)
}

// decidedHere records that k's units are held which no server knows of.
func (n *tabs) decidedHere(k *kept) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.of(k)
	t.open[k] = struct{}{}
	t.run(k)
	t.doubt = true
}

// end lets go k's units, and charges so many.
func (n *tabs) end(k *kept, charge int64) { n.advance(n.ended(k, charge), false) }

// ended is end before the server is told. It returns the tab that has something to tell, if
// any. A request is charged in one place: by its server or, if that no longer decides on the
// bucket, here, and whichever does is told of it as of all that is known here.
func (n *tabs) ended(k *kept, charge int64) *tab {
	f := n.store.fallback
	if f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.end(k.query)
	}
	here := n.store.closed.Load() || f != nil && !f.leads()
	n.mu.Lock()
	t := k.tab
	if !k.running {
		n.mu.Unlock()
		return nil
	}
	if k.paid {
		charge = max(charge-k.cost(), 0)
	}
	k.query.buckets[0].held.charge = charge
	k.running = false
	if _, open := t.open[k]; open { // and was not let go, since the store is being closed
		t.running--
		delete(t.open, k)
		if k.counted {
			t.ended += k.cost()
		}
	}
	if !here {
		t.charged += charge
	}
	n.mu.Unlock()
	switch {
	case f == nil || charge == 0:
	case here:
		f.chargeHere(&k.query.buckets[0])
	default:
		f.owe(t, charge, k.query.server)
	}
	return t
}

// advance sends what is to be sent of t. Again says whether that goes for what was not
// answered before.
func (n *tabs) advance(t *tab, again bool) {
	if t == nil {
		return
	}
	n.mu.Lock()
	q := t.next(again)
	n.mu.Unlock()
	n.submit(q)
}

// next returns the next call for t, or nil if there is nothing to tell. Again says whether
// what was not answered is to be sent again.
func (t *tab) next(again bool) *query {
	if t.tabs.closed || t.isIdle() {
		return nil
	}
	if t.renewal == nil && t.doubt {
		t.renew()
		again = true
	}
	if r := t.renewal; r != nil {
		if r.sent || !again {
			return nil
		}
		r.sent = true
		r.tries++
		q := t.call(whatRenew)
		q.buckets[0].cost, q.buckets[0].held.before, q.buckets[0].held.beforeCharged = r.units, r.before, r.charged
		return q
	}
	if t.receipt < 0 || t.queued || t.totals == t.said && (!again || t.settling > 0 || t.totals == t.known) {
		return nil
	}
	t.queued = true
	t.settling++
	return t.call(whatSettle)
}

// call returns a call for t.
func (t *tab) call(what byte) *query {
	b := t.bucket
	b.keptAs, b.Hold, b.Pool, b.Borrows, b.Watches, b.Cost = 0, false, false, false, 0, 0
	q := t.tabs.store.query(Request{Buckets: []Bucket{b}}, what)
	q.tab, q.number = t, t.number
	q.buckets[0].held = new(heldCost)
	q.Replies = q.replies()
	return q
}

// submit sends q, which next has returned.
func (n *tabs) submit(q *query) {
	if q == nil {
		return
	}
	sent := n.store.clock()
	q.Done = func(err error) {
		var outcomes []outcome
		if err == nil {
			outcomes, _, err = q.outcomes(nil)
		}
		if q.what == whatRenew {
			n.wasRenewed(q, outcomes, sent, err)
		} else {
			n.wasSettled(q, outcomes, sent, err)
		}
	}
	end := redisscript.Deadline{At: time.Now().Add(n.store.timeout)}
	if err := n.store.client.Submit(end, &q.Call); err != nil {
		q.Done(err)
	}
}

// renew begins a renewal: the next tab has all that is held or may be.
func (t *tab) renew() {
	r := &renewal{before: tabName{t.number, t.receipt}, charged: t.charged, owed: t.charged - t.known.charged, heard: t.heard}
	for k := range t.open {
		if r.units += k.cost(); k.running {
			r.running = append(r.running, k)
			k.counted = true
		}
	}
	t.begin()
	t.receipt, t.doubt, t.renewal = 0, false, r
}

// wasSettled handles the outcome of a settlement. An answer that the server has raised the
// totals goes for whichever tab it names.
func (n *tabs) wasSettled(q *query, outcomes []outcome, sent time.Duration, err error) {
	t, held := q.tab, q.buckets[0].held
	a := accounts{doubtful: err != nil && !redisscript.NotRun(err)}
	var forgotten []*kept
	n.mu.Lock()
	t.settling--
	switch current := q.number == t.number; {
	case err != nil && current:
		t.queued = false
		a.unknown = t.notTold(err)
	case err != nil: // its renewal tells
	case outcomes[0].receipt == 1 && current && held.receipt == t.receipt:
		a.known, a.doubtless = max(held.charged-t.known.charged, 0), true
		t.known = totals{max(t.known.ended, held.ended), max(t.known.charged, held.charged)}
		t.heard = max(t.heard, sent)
	case outcomes[0].receipt == 1 && t.renewal != nil && t.renewal.before == held.tabName:
		r := t.renewal
		left := min(r.charged-held.charged, r.owed)
		a.known, r.owed = r.owed-left, left
	case !current || held.receipt != t.receipt: // its renewal tells, or the server has opened the tab anew since, see admitted
	case t.runs(): // lost by the server, or lapsed
		forgotten, a.doubtful = t.lose(), true
	default: // it was settled before, has lapsed or was lost
		a.unknown, t.known = t.charged-t.known.charged, t.totals
	}
	n.mu.Unlock()
	n.store.fallback.forgotten(forgotten)
	n.store.fallback.settled(q, outcomes, a)
	if err == nil {
		n.advance(t, false)
	}
}

// wasRenewed handles the outcome of a renewal.
func (n *tabs) wasRenewed(q *query, outcomes []outcome, sent time.Duration, err error) {
	t, held := q.tab, q.buckets[0].held
	a := accounts{doubtful: err != nil && !redisscript.NotRun(err)}
	n.mu.Lock()
	r := t.renewal
	r.sent = false
	t.asked = t.asked || !redisscript.NotRun(err)
	if err != nil {
		a.unknown = t.notTold(err)
		n.mu.Unlock()
		n.store.fallback.settled(q, nil, a)
		return
	}
	if outcomes[0].receipt == 1 {
		a.known = r.owed
	} else {
		a.unknown = r.owed
		if r.before.receipt >= 0 && n.store.clock()-r.heard >= lapse {
			for _, k := range r.running {
				if k.running && !k.paid {
					k.paid = true
					a.lapsed = min(a.lapsed+k.cost(), MaxUnits)
				}
			}
		}
	}
	a.known += held.charged - t.known.charged
	t.known = held.totals
	for _, k := range r.running {
		k.inServer = true
	}
	var beside []*kept // what counts again that was admitted meanwhile
	if t.lost && !t.doubt {
		t.lost = false
		beside = t.heldNow()
	}
	t.doubt = t.doubt || r.tries > 1 && r.beside || outcomes[0].receipt < 0
	a.doubtless = !t.doubt
	t.renewal, t.heard, t.renewed = nil, sent, sent
	n.mu.Unlock()
	n.store.fallback.settled(q, outcomes, a)
	n.store.fallback.renewed(r.running, q.server)
	n.store.fallback.forgotten(beside)
	n.advance(t, true)
}

// accounts is what follows from the outcome of a settlement or a renewal: of what is owed, how
// much the server has charged, and how much it has not been told and will not be, or may have
// charged with a tab that is gone; and how much more it has charged, since it had lapsed.
type accounts struct {
	known, unknown, lapsed int64

	doubtless bool // whether the server has what is still owed as it is told
	doubtful  bool // whether it may have charged any of it, unless that is still known
}

// notTold handles that a call failed. If its server is down, it returns all that is owed, to
// be charged here: while it is awaited, nothing of that would drip. The server is told of it
// with the next request for the bucket, as a part of the level here. It may have been told of
// some before, and has charged that or will not: the next tab begins with nothing owed.
func (t *tab) notTold(err error) (here int64) {
	if !redisscript.NotRun(err) || redisscript.Elsewhere(err) || t.tabs.store.fallback == nil ||
		t.settling > 0 || t.renewal != nil && t.renewal.sent {
		return 0
	}
	last := t.renewal
	if here = t.charged - t.known.charged; last != nil {
		here += last.owed
	}
	if here == 0 {
		return 0
	}
	t.charged, t.known.charged = 0, 0
	t.renew()
	if last != nil && last.before.receipt < 0 {
		t.renewal.before.receipt = -1 // no server has held for these requests
	}
	return here
}

// run renews what is due, and sends again what was not answered, until nothing is held.
func (n *tabs) run() {
	for {
		time.Sleep(tellEvery)
		n.mu.Lock()
		if len(n.all) == 0 || n.closed {
			n.running = false
			n.mu.Unlock()
			return
		}
		n.mu.Unlock()
		n.tick()
	}
}

// tick renews what is due, and sends again what was not answered. It sends a few calls at a
// time, and lets go the lock again and again, so that requests do not wait for all of them.
func (n *tabs) tick() {
	n.mu.Lock()
	looked, sent, together := 0, 0, max(sendTogether, len(n.all)/sendPortions)
	now := n.store.clock()
	for key, t := range n.all {
		if looked++; looked%lookTogether == 0 {
			n.mu.Unlock()
			n.mu.Lock()
		}
		if n.all[key] != t { // it ended meanwhile
			continue
		}
		if t.isIdle() {
			delete(n.all, key)
			continue
		}
		if t.renewal == nil && now-t.renewed >= renewEvery && t.runs() {
			t.doubt = true
		}
		q := t.next(true)
		if q == nil {
			continue
		}
		n.mu.Unlock()
		n.submit(q)
		if sent++; sent%together == 0 {
			time.Sleep(sendPause)
			now = n.store.clock()
		}
		n.mu.Lock()
		if n.closed {
			break
		}
	}
	n.mu.Unlock()
}

// close charges what requests still hold, as a server would in the end, so that others need
// not wait for that: the process ends, and the requests with it. If another store goes on with
// the Memory, they are only let go, and are charged there when they end. It waits until the
// servers know all that, but no longer than a request would. What is owed then no longer
// counts as in flight, but as charged: no answer is followed any more.
func (n *tabs) close() {
	until := time.Now().Add(n.store.timeout)
	f := n.store.fallback
	replaced := f.isReplaced()
	n.mu.Lock()
	all := slices.Collect(maps.Values(n.all))
	n.mu.Unlock()
	for _, t := range all {
		n.letGo(t, replaced)
		n.advance(t, true)
	}
	for _, t := range all {
		for !n.settled(t) && time.Now().Before(until) {
			time.Sleep(time.Millisecond)
		}
	}
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	for _, t := range all {
		f.chargeOwed(t, math.MaxInt64)
	}
}

// letGo has t hold nothing more that is held for certain, and charges it unless another store
// goes on.
func (n *tabs) letGo(t *tab, replaced bool) {
	f := n.store.fallback
	if f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
	}
	n.mu.Lock()
	held := t.heldNow()
	for _, k := range held {
		delete(t.open, k)
		if k.counted {
			t.ended += k.cost()
		}
		k.inServer = false
		if k.paid = !replaced; k.paid {
			t.charged += k.cost()
		}
	}
	t.running = 0
	n.mu.Unlock()
	for _, k := range held {
		switch {
		case f == nil:
		case replaced:
			f.loseUnknown(k)
		default:
			f.end(k.query)
			f.owe(t, k.cost(), k.query.server)
		}
	}
}

// settled reports whether nothing is left of t to be settled.
func (n *tabs) settled(t *tab) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return t.isIdle()
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
		if outcomes[i].by == DecidedByFallback {
			r.tabs.advance(k.tab, false)
		}
		req.Held.hold(i, len(req.Buckets), k.settle)
	}
}

// settle lets go what k's request holds, and charges so many units.
func (k *kept) settle(charge int64) { k.store.tabs.end(k, charge) }
