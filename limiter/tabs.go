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
	moved    int64    // units that a Memory holds too
	owed     []owed
	paid     bool // whether close has charged what requests in progress hold

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
	heard   time.Duration // of that tab
	sent    bool          // whether it is in flight
	tries   int           // how often it was sent
	beside  bool          // whether more was held in the new tab before it was answered
}

// tabName names a tab of a process.
type tabName struct{ number, receipt int64 }

// owed is what a request was charged, until a server is known to know it.
type owed struct {
	kept   *kept
	charge int64
	number int64 // of the tab
	upTo   int64 // the total of the tab with it
}

// kept is what a request holds of one bucket in a server, or in this process if that
// did not answer, from its decision until it is settled. Meanwhile its query counts as
// in flight, so that the fallback leaves room for it.
type kept struct {
	store  *Redis // nil if a Memory holds it
	query  *query
	bucket Bucket

	mu      sync.Mutex
	settled bool
	others  []*kept // what stores that have taken over hold for the same request
	latest  *kept   // that of the store that was the last to take over; nil if there is none

	// The lock of the store's tabs guards these.
	tab      *tab
	number   int64         // of the tab for which it was sent; 0 if it was not
	sent     time.Duration // when
	running  bool
	counted  bool // whether the tab has it, or its renewal
	inServer bool // whether a server knows of it, unless its tab is in doubt
	over     bool // whether it was given up
	paid     bool // whether it has lapsed, so that it was charged
	accounts bool // whether the Memory takes over its charge from this one, see settle

	host   *kept // what the store holds that has decided the request, if it is another one
	before *kept // what a store with the same place has held for it, until a server holds this
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

// of returns what the store holds that has decided k's request.
func (k *kept) of() *kept {
	if k.host != nil {
		return k.host
	}
	return k
}

// moved reports whether a Memory has decided k's request, which holds its units too.
func (k *kept) moved() bool { return k.of().store == nil }

// heldBy returns the fallbacks whose servers count the units as held, one of each place. When
// that changes, the fallback is told, which keeps it: see recount.
func (k *kept) heldBy() (all []*fallback) {
	if k.store != nil && k.inPlace() {
		all = append(all, k.store.fallback)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, other := range k.others {
		f := other.store.fallback
		if other.inPlace() && !slices.ContainsFunc(all, func(g *fallback) bool { return g.place == f.place }) {
			all = append(all, f)
		}
	}
	return all
}

// inPlace reports whether the servers of k's store count the units as held.
func (k *kept) inPlace() bool {
	k.store.tabs.mu.Lock()
	defer k.store.tabs.mu.Unlock()
	return k.inServer && !k.tab.lost
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

// heldNow returns what is held for certain, and what has ended and is owed.
func (t *tab) heldNow() []*kept {
	held := make([]*kept, 0, t.running+len(t.owed))
	for k := range t.open {
		if k.running {
			held = append(held, k)
		}
	}
	for _, o := range t.owed {
		held = append(held, o.kept)
	}
	return held
}

// renewNow has the units renewed, since their server may have lost them, or what they were
// charged. It returns what that goes for too, and was not so before.
func (k *kept) renewNow() []*kept {
	k.store.tabs.mu.Lock()
	defer k.store.tabs.mu.Unlock()
	return k.tab.lose()
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
	return !t.asked && len(t.owed) == 0 || !t.doubt && t.renewal == nil && t.totals == t.known
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
	var untold []owed
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
		untold = t.takeOwed(t.number, math.MaxInt64)
		t.receipt, t.totals, t.said, t.known = receipt, totals{}, totals{}, totals{}
		t.heard, t.renewed = k.sent, k.sent
	}
	t.run(k)
	k.counted, k.inServer = true, true
	n.mu.Unlock()
	n.store.fallback.forgotten(forgotten)
	for _, o := range untold {
		n.store.fallback.charge(o.kept.query)
	}
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

// end lets go k's units, and charges so many. It returns how many remain to be charged, as
// some may have been already, and whether that has to happen here: no server will be told.
func (n *tabs) end(k *kept, charge int64) (rest int64, here bool) {
	n.mu.Lock()
	t := k.tab
	if !k.running {
		n.mu.Unlock()
		return 0, false
	}
	if k.paid {
		charge = max(charge-k.cost(), 0)
	}
	k.query.buckets[0].held.charge = charge
	k.running = false
	if _, open := t.open[k]; open { // and was not let go, since the store is being closed
		t.running--
		delete(t.open, k)
	}
	if k.moved() && k.inServer {
		t.moved -= k.cost()
	}
	if n.store.closed.Load() {
		n.mu.Unlock()
		return charge, true
	}
	if t.charged += charge; k.counted {
		t.ended += k.cost()
	}
	if charge > 0 {
		t.owed = append(t.owed, owed{k, charge, t.number, t.charged})
	}
	n.mu.Unlock()
	n.advance(t, false)
	return charge, false
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
	r := &renewal{before: tabName{t.number, t.receipt}, charged: t.charged, heard: t.heard}
	for k := range t.open {
		if r.units += k.cost(); k.running {
			r.running = append(r.running, k)
			k.counted = true
		}
	}
	t.begin()
	t.receipt, t.doubt, t.renewal = 0, false, r
}

// wasSettled handles the outcome of a settlement.
func (n *tabs) wasSettled(q *query, outcomes []outcome, sent time.Duration, err error) {
	t, held := q.tab, q.buckets[0].held
	var known, unknown []owed
	var forgotten []*kept
	n.mu.Lock()
	t.settling--
	current := q.number == t.number
	switch {
	case !current: // its renewal tells
	case err != nil:
		t.queued = false
		unknown = t.notTold(err)
	case held.receipt != t.receipt: // the server has opened the tab anew since, see admitted
	case outcomes[0].receipt == 1:
		t.known = totals{max(t.known.ended, held.ended), max(t.known.charged, held.charged)}
		t.heard = max(t.heard, sent)
		known = t.takeOwed(q.number, held.charged)
	case t.runs(): // lost by the server, or lapsed
		forgotten = t.lose()
	default: // it was settled before, has lapsed or was lost
		t.known = t.totals
		unknown = t.takeOwed(q.number, t.charged)
	}
	n.mu.Unlock()
	n.store.fallback.forgotten(forgotten)
	n.account(q, outcomes, known, unknown, err)
	if err == nil {
		n.advance(t, false)
	}
}

// wasRenewed handles the outcome of a renewal.
func (n *tabs) wasRenewed(q *query, outcomes []outcome, sent time.Duration, err error) {
	t, held := q.tab, q.buckets[0].held
	var known, unknown []owed
	var paid, replaced []*kept
	n.mu.Lock()
	r := t.renewal
	r.sent = false
	t.asked = t.asked || !redisscript.NotRun(err)
	switch {
	case err != nil:
		unknown = t.notTold(err)
		n.mu.Unlock()
		n.account(q, outcomes, nil, unknown, err)
		return
	case outcomes[0].receipt == 1:
		known = t.takeOwed(r.before.number, r.charged)
	default:
		unknown = t.takeOwed(r.before.number, r.charged)
		if r.before.receipt >= 0 && n.store.clock()-r.heard >= lapse {
			for _, k := range r.running {
				if k.running && !k.paid {
					k.paid = true
					paid = append(paid, k)
				}
			}
		}
	}
	known = append(known, t.takeOwed(q.number, held.charged)...)
	t.known = held.totals
	for _, k := range r.running {
		if k.running && k.moved() && !k.inServer {
			t.moved += k.cost()
		}
		k.inServer = true
		if k.before != nil {
			replaced = append(replaced, k.before)
			k.before = nil
		}
	}
	var beside []*kept // what counts again that was admitted meanwhile
	if t.lost && !t.doubt {
		t.lost = false
		beside = t.heldNow()
	}
	t.doubt = t.doubt || r.tries > 1 && r.beside || outcomes[0].receipt < 0
	t.renewal, t.heard, t.renewed = nil, sent, sent
	n.mu.Unlock()
	n.account(q, outcomes, known, unknown, nil)
	n.store.fallback.renewed(r.running, q.server, paid)
	n.store.fallback.forgotten(beside)
	for _, k := range replaced {
		k.end(0)
	}
	n.advance(t, true)
}

// takeOwed removes what is owed up to a total of a tab, and returns it.
func (t *tab) takeOwed(number, upTo int64) (taken []owed) {
	t.owed = slices.DeleteFunc(t.owed, func(o owed) bool {
		if o.number != number || o.upTo > upTo {
			return false
		}
		taken = append(taken, o)
		return true
	})
	return taken
}

// notTold handles that a call failed. If its server is down, it returns all that is owed, to
// be charged here: while it is awaited, nothing of that would drip. The server is told of it
// with the next request for the bucket, as a part of the level here. It may have been told of
// some before, and has charged that or will not: the next tab begins with nothing owed.
func (t *tab) notTold(err error) (here []owed) {
	if !redisscript.NotRun(err) || redisscript.Elsewhere(err) || t.tabs.store.fallback == nil ||
		len(t.owed) == 0 || t.settling > 0 || t.renewal != nil && t.renewal.sent {
		return nil
	}
	here, t.owed, t.charged = t.owed, nil, 0
	last := t.renewal
	t.renew()
	if last != nil && last.before.receipt < 0 {
		t.renewal.before.receipt = -1 // no server has held for these requests
	}
	return here
}

// account has the fallback take over the answer to q, which includes what is known, and
// charge what is not. The level of a server in another place than that where buckets are now
// is not taken over: it may include what another store accounts for, whose server would be
// told that level and charge it too. Nor is one that includes what close has charged for
// requests in progress: that is charged here when they end.
func (n *tabs) account(q *query, outcomes []outcome, known, unknown []owed, err error) {
	f := n.store.fallback
	n.mu.Lock()
	charge, elsewhere := int64(0), q.tab.paid
	n.mu.Unlock()
	elsewhere = elsewhere || f != nil && !f.hasLead()
	for _, o := range known {
		charge += o.charge
		elsewhere = elsewhere || !o.kept.accounts
	}
	if err != nil || elsewhere {
		f.drop(q)
		known, unknown = nil, append(unknown, known...)
	} else {
		q.buckets[0].cost, q.buckets[0].held.charge = 0, charge
		f.answered(q, outcomes)
	}
	for _, o := range known {
		f.drop(o.kept.query)
	}
	for _, o := range unknown {
		f.charge(o.kept.query)
	}
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
// not wait for that: the process ends, and the requests with it. What another store has
// decided is only let go. It waits until the servers know all that, but no longer than a
// request would. What is owed then no longer counts as in flight, but as charged: no answer
// is followed any more, and the Memory may go on with another store.
func (n *tabs) close() {
	until := time.Now().Add(n.store.timeout)
	var moved []*kept
	n.mu.Lock()
	all := slices.Collect(maps.Values(n.all))
	for _, t := range all {
		moved = append(moved, t.letGo()...)
	}
	n.mu.Unlock()
	n.store.fallback.forgotten(moved)
	for _, t := range all {
		n.advance(t, true)
	}
	for _, t := range all {
		for !n.settled(t) && time.Now().Before(until) {
			time.Sleep(time.Millisecond)
		}
	}
	var left []owed
	n.mu.Lock()
	n.closed = true
	for _, t := range all {
		left = append(left, t.owed...)
		t.owed = nil
	}
	n.mu.Unlock()
	for _, o := range left {
		n.store.fallback.charge(o.kept.query)
	}
}

// letGo has t hold nothing more that is held for certain, and returns what another store has
// decided of that.
func (t *tab) letGo() (moved []*kept) {
	if r := t.renewal; r != nil {
		r.running = slices.DeleteFunc(r.running, func(k *kept) bool { return k.running && k.host != nil })
	}
	for k := range t.open {
		if !k.running {
			continue
		}
		if k.host != nil {
			k.inServer = false
			moved = append(moved, k)
		} else if k.counted {
			t.charged += k.cost()
			t.paid = true
		}
		if k.counted {
			t.ended += k.cost()
		}
		delete(t.open, k)
	}
	t.running, t.moved = 0, 0
	return moved
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
		r.fallback.begun(k)
		req.Held.hold(i, len(req.Buckets), func(charge int64) { k.settle(charge) })
	}
}

// settle lets go what k's request holds, wherever that is, and charges so many units. Each
// store charges them in its servers, but only one accounts for them in the Memory of all:
// otherwise it would tell the servers of one what it has from another, beside what they are
// charged themselves. That is the one which goes on with the bucket: the last that took
// over. It reports whether that is another than k's.
func (k *kept) settle(charge int64) (elsewhere bool) {
	k.mu.Lock()
	k.settled = true
	others, accounts := k.others, k.latest
	k.mu.Unlock()
	if accounts == nil || accounts.store != nil && accounts.store.closed.Load() {
		accounts = k
	}
	accounts.accounts = true
	if accounts != k {
		accounts.store.fallback.accountFor(accounts)
	}
	if k.store != nil {
		k.store.fallback.done(k)
		k.end(charge)
	}
	for _, other := range others {
		other.end(charge)
	}
	return accounts != k
}

// end lets go what k's store holds, and charges so many units.
func (k *kept) end(charge int64) {
	k.store.tabs.mu.Lock()
	before := k.before
	k.before = nil
	k.store.tabs.mu.Unlock()
	if before != nil {
		before.end(0)
	}
	f := k.store.fallback
	rest, here := k.store.tabs.end(k, charge)
	switch {
	case rest == 0:
		f.drop(k.query)
	case here:
		f.charge(k.query)
	}
}

// progress is the requests that hold units in a Memory, or in the servers of those stores
// whose fallback it is.
type progress struct {
	mu  sync.Mutex
	all map[*kept]struct{}
}

func (p *progress) add(k *kept) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == nil {
		p.all = make(map[*kept]struct{})
	}
	p.all[k] = struct{}{}
}

func (p *progress) remove(k *kept) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, k)
}

// TakeOver has r's servers hold too what requests in progress hold that another store has
// decided with the same Memory: that Memory, or a Redis whose Fallback it is. It is for who
// goes on with r instead, so that other processes leave room for these requests. It does
// not wait.
func (r *Redis) TakeOver() {
	if r.fallback == nil {
		return
	}
	p := &r.fallback.memory.progress
	p.mu.Lock()
	all := slices.Collect(maps.Keys(p.all))
	p.mu.Unlock()
	for _, k := range all {
		k.holdIn(r)
	}
	go r.tabs.tick()
}

// holdIn has r hold what k's request holds, in place of another store that has taken it over to
// the same place: that one may be closed before the request ends.
func (k *kept) holdIn(r *Redis) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.settled || slices.ContainsFunc(k.others, func(other *kept) bool { return other.store == r }) {
		return
	}
	if k.store != nil && k.store.place == r.place {
		k.latest = k
		return
	}
	other := &kept{store: r, bucket: k.bucket, query: r.query(Request{Buckets: []Bucket{k.bucket}}, whatRenew), host: k}
	other.query.buckets[0].held, other.query.stage = &heldCost{charge: k.bucket.Cost, kept: other}, ended
	same := slices.IndexFunc(k.others, func(other *kept) bool { return other.store.place == r.place })
	if same >= 0 {
		other.before = k.others[same]
		k.others[same] = other
	} else {
		k.others = append(k.others, other)
	}
	k.latest = other
	r.tabs.decidedHere(other)
}

// movedTo returns how many units of p's bucket that this process holds in a Memory the
// servers hold too.
func (n *tabs) movedTo(p *asked) int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.all[p.key]; t != nil && !t.lost {
		return t.moved
	}
	return 0
}
