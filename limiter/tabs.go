package limiter

import (
	"sync"
	"time"
)

// tabs are what the requests of a store hold in its servers, by the names of the buckets' keys.
// While there are any, a goroutine renews them, and sends again what was not answered.
type tabs struct {
	store   *Redis
	process int64 // names this store in servers; random

	mu      sync.Mutex // of a store without a fallback, see lock
	all     map[string]*tab
	number  int64 // the latest of a tab
	running bool
	closed  bool // whether nothing is sent any more
}

// lock locks n, with what the fallback has in flight.
func (n *tabs) lock() { n.mutex().Lock() }

// unlock is the reverse of lock.
func (n *tabs) unlock() { n.mutex().Unlock() }

func (n *tabs) mutex() *sync.Mutex {
	if f := n.store.fallback; f != nil {
		return &f.mu
	}
	return &n.mu
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
	paid     bool     // whether the server was told to charge what requests in progress hold, see close
	owed     *query   // in flight for what is charged and not answered, see fallback.owe

	heard   time.Duration // when the last call was sent that the server has answered
	renewed time.Duration // and the last renewal
}

// totals are how many units the requests of a tab have let go and been charged.
type totals struct{ ended, charged int64 }

// most is up to where the script can count. A tab with half of that is renewed, and begins anew.
const most = 1<<53 - 1

// add adds to the totals of t.
func (t *tab) add(ended, charged int64) {
	t.ended, t.charged = min(t.ended+ended, most), min(t.charged+charged, most)
	t.doubt = t.doubt || max(t.ended, t.charged) > most/2
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
	paid     bool // whether it has lapsed, so that it was charged
}

// cost returns how many units it holds, or may hold: what costs more than the size is denied.
func (k *kept) cost() int64 { return min(k.query.buckets[0].cost, k.bucket.Limit.Size) }

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
	k.store.tabs.lock()
	defer k.store.tabs.unlock()
	return k.running
}

// lose has t renewed, since its server may have lost what it holds, or what was charged.
func (t *tab) lose() {
	was := t.lost
	if t.doubt, t.lost = true, true; !was {
		t.recount()
	}
}

// recount has the fallback find out again whether servers count what is held for certain.
func (t *tab) recount() {
	for k := range t.open {
		if k.running {
			k.recount()
		}
	}
}

// doubts returns 1 if the server may have charged what t owes, and 0 otherwise.
func (t *tab) doubts() int {
	if t != nil && t.owed != nil && t.owed.counted && t.owed.lost {
		return 1
	}
	return 0
}

// tells returns how many of the units that q tells to be charged are not in the level here.
func (t *tab) tells(q *query) (units int64) {
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
		n.lock()
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
		n.unlock()
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
	n.lock()
	t := k.tab
	switch {
	case k.number != t.number: // a renewal has counted it
	case t.renewal != nil:
		t.renewal.beside = true
	case t.receipt == receipt:
		t.heard = max(t.heard, k.sent)
	case t.receipt == 0 || t.runs(): // the server has lost the tab, or it has lapsed
		t.lose()
	default: // it opened the tab, and what was owed in the one before can't be told any more
		n.store.fallback.chargeOwed(t, t.charged-t.known.charged)
		t.receipt, t.totals, t.said, t.known = receipt, totals{}, totals{}, totals{}
		t.heard, t.renewed = k.sent, k.sent
	}
	t.run(k)
	k.counted, k.inServer = true, true
	n.unlock()
	n.advance(t, true)
}

// refused records that no server holds k's units because of its call: it was denied, was
// not run, or was late.
func (n *tabs) refused(k *kept) {
	n.lock()
	t := k.tab
	if t != nil {
		n.forget(k)
	}
	k.number = 0
	n.unlock()
	n.advance(t, false)
}

// forget removes k, which is not held, unless it was given up before. A renewal may have counted
// it.
func (n *tabs) forget(k *kept) {
	t := k.tab
	if _, open := t.open[k]; !open {
		return
	}
	delete(t.open, k)
	if k.number != t.number {
		t.add(k.cost(), 0)
	}
}

// lost records that k's call was given up, so that it is not known whether a server holds
// its units.
func (n *tabs) lost(k *kept) {
	n.lock()
	n.asking(k) // it may still be sent, as one for this tab
	t := k.tab
	n.forget(k)
	t.doubt = t.doubt || k.number == t.number
	n.unlock()
	n.advance(t, false)
}

// decidedHere records that k's units are held which no server knows of. n is locked.
func (n *tabs) decidedHere(k *kept) {
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
	n.lock()
	defer n.unlock()
	f, t := n.store.fallback, k.tab
	if f != nil {
		f.end(k.query)
	}
	here := n.store.closed.Load() || f != nil && !f.leads()
	if !k.running {
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
			t.add(k.cost(), 0)
		}
	}
	switch {
	case !here:
		t.add(0, charge)
		f.owe(t, charge, k.query.server)
	case f != nil && charge > 0:
		f.chargeHere(&k.query.buckets[0])
	}
	return t
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
		req.Held.hold(i, req.Buckets, k.settle)
	}
}

// settle lets go what k's request holds, and charges so many units.
func (k *kept) settle(charge int64) { k.store.tabs.end(k, charge) }
