package limiter

import (
	"sync"
	"time"
)

// ledger has what the requests of a store hold in its servers: an account for each bucket, by
// the name of its key. While there are any, a goroutine renews them, and sends again what was
// not answered.
type ledger struct {
	store   *Redis
	process int64 // names this store in servers; random

	mu      sync.Mutex // of a store without a fallback, see lock
	all     map[string]*account
	number  int64 // the latest of an account
	running bool
	closed  bool // whether nothing is sent any more
}

// lock locks n, with what the fallback has in flight.
func (n *ledger) lock() { n.mutex().Lock() }

// unlock is the reverse of lock.
func (n *ledger) unlock() { n.mutex().Unlock() }

func (n *ledger) mutex() *sync.Mutex {
	if f := n.store.fallback; f != nil {
		return &f.mu
	}
	return &n.mu
}

// account is what this process holds of one bucket in a server, as held.lua says: it sends the
// server totals, and may do so as often as it likes. When it is in doubt about what the
// server has, it renews the account: it opens another one with all that it holds. Both are sent
// until they are answered. The lock of the ledger guards it.
type account struct {
	ledger *ledger
	bucket Bucket
	open   map[*reservation]struct{} // what is held, or has been requested

	mayExist  bool // whether a server may know of it, or of one that it represents
	number    int64
	receipt   int64  // -1 until a hold is admitted
	totals           // since it was opened
	sent      totals // in the latest call
	confirmed totals // what the server has answered to

	settling int      // how many settlements are in flight
	queued   bool     // whether one of them has yet to be sent, with the totals of then
	doubt    bool     // whether it is to be renewed
	lost     bool     // since the server may not have what it held
	renewal  *renewal // until it is answered
	paid     bool     // whether the server is to charge what requests in progress hold, see close
	owed     *query   // in flight for what is charged and not answered, see fallback.owe

	heard time.Duration // when the last call was sent that the server has answered
}

// totals are how many units the requests of an account have released and been charged.
type totals struct{ ended, charged int64 }

// maxTotal is up to where the script can count. An account with half of that is renewed, and
// starts over.
const maxTotal = 1<<53 - 1

// add adds to the totals of t.
func (t *account) add(ended, charged int64) {
	t.ended, t.charged = min(t.ended+ended, maxTotal), min(t.charged+charged, maxTotal)
	t.doubt = t.doubt || max(t.ended, t.charged) > maxTotal/2
}

// accountName names an account of a process.
type accountName struct{ number, receipt int64 }

// reservation is what a request holds of one bucket in a server, or in this process if that
// did not answer, from its decision until it is settled. Meanwhile its query counts as
// in flight, so that the fallback leaves room for it.
type reservation struct {
	store  *Redis
	query  *query
	bucket Bucket

	// The lock of the store's ledger guards these.
	account  *account
	number   int64         // of the account for which it was sent; 0 if it was not
	sent     time.Duration // when
	running  bool
	counted  bool // whether the account has it, or its renewal
	inServer bool // whether a server has it, unless its account is in doubt
	paid     bool // whether it has lapsed, so that it was charged
}

// cost returns how many units it holds, or may hold: what costs more than the size is denied.
func (k *reservation) cost() int64 { return min(k.query.buckets[0].cost, k.bucket.Limit.Size) }

// reserve returns req with what is needed to hold units of each bucket with Hold.
func (r *Redis) reserve(req Request, w *scratch) Request {
	w.buckets = append(w.buckets[:0], req.Buckets...)
	req.Buckets = w.buckets
	req.Held.reservations = req.Held.reservations[:0]
	for i := range req.Buckets {
		if b := &req.Buckets[i]; b.Hold {
			b.reservedAs = 0
			r.reserveBucket(req, i)
		}
	}
	return req
}

// reserveBucket adds what is needed to hold units of req's i-th bucket.
func (r *Redis) reserveBucket(req Request, i int) {
	k := &reservation{store: r, bucket: req.Buckets[i], query: r.query(Request{Buckets: req.Buckets[i : i+1]}, whatRenew)}
	k.query.buckets[0].held = &heldCost{charge: req.Buckets[i].Cost, reservation: k}
	req.Held.reservations = append(req.Held.reservations, k)
	req.Buckets[i].reservedAs = uint16(len(req.Held.reservations)) //nolint:gosec // at most maxBuckets
}

// isHeld reports whether anything is held: not if a dry run denied.
func (k *reservation) isHeld() bool {
	k.store.ledger.lock()
	defer k.store.ledger.unlock()
	return k.running
}

// lose has t renewed, since its server may have lost what it holds, or what was charged.
func (t *account) lose() {
	was := t.lost
	if t.doubt, t.lost = true, true; !was {
		t.recount()
	}
}

// recount has the fallback find out again whether servers count what is held for certain.
func (t *account) recount() {
	for k := range t.open {
		if k.running {
			k.recount()
		}
	}
}

// doubts returns 1 if the server may have charged what t owes, and 0 otherwise.
func (t *account) doubts() int {
	if t != nil && t.owed != nil && t.owed.counted && t.owed.lost {
		return 1
	}
	return 0
}

// unconfirmed returns how many of the units that q says were charged are not in the level here.
func (t *account) unconfirmed(q *query) (units int64) {
	if q.number != t.number { // it has been renewed since, and q does nothing
		return 0
	}
	if units = t.charged - t.confirmed.charged; t.renewal != nil {
		units += t.renewal.owed
	}
	return units
}

// of returns the account of k's bucket, and makes one if there is none. One of which nothing is
// left starts over.
func (n *ledger) of(k *reservation) *account {
	p := &k.query.buckets[0]
	t := n.all[p.key]
	if t == nil {
		t = &account{ledger: n, open: make(map[*reservation]struct{})}
		if n.all == nil {
			n.all = make(map[string]*account)
		}
		n.all[p.key] = t
		if !n.running {
			n.running = true
			go n.run()
		}
	}
	if t.isIdle() {
		t.begin()
		t.mayExist, t.doubt, t.lost, t.renewal = false, false, false, nil
		t.heard = n.store.clock()
	}
	t.bucket = k.bucket
	k.account = t
	return t
}

// begin gives t the next number.
func (t *account) begin() {
	t.ledger.number++
	t.queued = false // what was, is for the account before
	t.number, t.receipt, t.totals, t.sent, t.confirmed = t.ledger.number, -1, totals{}, totals{}, totals{}
}

// isIdle reports whether nothing is left of t to be settled. While its server does not
// answer, that is so once all has ended that the server has never heard of: in an outage
// there would be an account for each key otherwise.
func (t *account) isIdle() bool {
	if len(t.open) > 0 || t.settling > 0 || t.renewal != nil && t.renewal.sent {
		return false
	}
	return !t.mayExist && t.charged == t.confirmed.charged && (t.renewal == nil || t.renewal.owed == 0) || !t.doubt && t.renewal == nil && t.totals == t.confirmed
}

// runs reports whether anything is held for certain.
func (t *account) runs() bool {
	for k := range t.open {
		if k.running {
			return true
		}
	}
	return false
}

// sending says in q, which is about to be sent, what it requests of its accounts.
func (n *ledger) sending(q *query) {
	for i := range q.buckets {
		p := &q.buckets[i]
		if p.held == nil || q.account == nil && p.held.reservation == nil {
			continue
		}
		n.lock()
		if t := q.account; t != nil {
			p.held.accountName = accountName{q.number, t.receipt}
			if q.number == t.number { // otherwise it has been renewed since, and this does nothing
				t.queued, t.sent, p.held.totals = false, t.totals, t.totals
			}
		} else {
			n.requested(p.held.reservation)
			p.held.number = p.held.reservation.number
		}
		p.held.process = n.process
		n.unlock()
	}
}

// requested records a call to a server to hold k's units.
func (n *ledger) requested(k *reservation) {
	if k.number != 0 { // it may have been sent before, or has been given up
		return
	}
	t := n.of(k)
	t.mayExist = true
	k.number, k.sent = t.number, n.store.clock()
	t.open[k] = struct{}{}
}

// admitted records that a server holds k's units, in an account with that receipt.
func (n *ledger) admitted(k *reservation, receipt int64) {
	n.lock()
	t := k.account
	switch {
	case k.number != t.number: // a renewal has counted it
	case t.renewal != nil:
		t.renewal.grew = true
	case t.receipt == receipt:
		t.heard = max(t.heard, k.sent)
	case t.receipt == 0 || t.runs(): // the server has lost the account, or it has lapsed
		t.lose()
	default: // it opened the account, so what is owed in the one before can't be settled any more
		n.store.fallback.chargeOwed(t, t.charged-t.confirmed.charged)
		t.receipt, t.totals, t.sent, t.confirmed = receipt, totals{}, totals{}, totals{}
		t.heard = k.sent
	}
	k.running, k.counted, k.inServer = true, true, true
	n.unlock()
	n.advance(t, true)
}

// refused records that no server holds k's units because of its call: it was denied, was
// not run, or was late.
func (n *ledger) refused(k *reservation) {
	n.lock()
	t := k.account
	if t != nil {
		n.forget(k)
	}
	k.number = 0
	n.unlock()
	n.advance(t, false)
}

// forget removes k, which is not held, unless it was given up before. A renewal may have counted
// it.
func (n *ledger) forget(k *reservation) {
	t := k.account
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
func (n *ledger) lost(k *reservation) {
	n.lock()
	n.requested(k) // it may still be sent, as one for this account
	t := k.account
	n.forget(k)
	t.doubt = t.doubt || k.number == t.number
	n.unlock()
	n.advance(t, false)
}

// decidedHere records that k's units are held, and that no server has them. n is locked.
func (n *ledger) decidedHere(k *reservation) {
	t := n.of(k)
	t.open[k] = struct{}{}
	k.running, t.doubt = true, true
}

// end releases k's units, and charges that many.
func (n *ledger) end(k *reservation, charge int64) { n.advance(n.ended(k, charge), false) }

// ended is end before anything is sent. It returns the account that has something to send, if
// any. A request is charged in one place: by its server or, if that no longer decides on the
// bucket, here, and the server that does gets it with the level that is known here.
func (n *ledger) ended(k *reservation, charge int64) *account {
	n.lock()
	defer n.unlock()
	f, t := n.store.fallback, k.account
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
	if _, open := t.open[k]; open { // and was not released, since the store is being closed
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
		k := req.reservationOf(&req.Buckets[i])
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
			r.ledger.advance(k.account, false)
		}
		req.Held.hold(i, req.Buckets, k.settle)
	}
}

// settle releases what k's request holds, and charges that many units.
func (k *reservation) settle(charge int64) { k.store.ledger.end(k, charge) }
