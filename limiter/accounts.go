package limiter

import (
	"sync"
	"time"
)

// recount finds out whether servers count what k holds, and which.
func (k *reservation) recount() {
	f, holder := k.store.fallback, (*fallback)(nil)
	if k.inServer && !k.account.lost {
		holder = f
	}
	if f != nil && k.query.stage == holding && k.query.counted && k.query.holder != holder {
		f.setHolder(k.query, holder)
	}
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

// lapse is the time after which a server charges what a process holds that it has not heard of,
// see held.lua.
const lapse = 15 * time.Second

// maxTotal is up to where the script can count. An account with half of that is renewed, and
// starts over.
const maxTotal = 1<<53 - 1

// add adds to the totals of t.
func (t *account) add(ended, charged int64) {
	t.ended, t.charged = min(t.ended+ended, maxTotal), min(t.charged+charged, maxTotal)
	t.doubt = t.doubt || max(t.ended, t.charged) > maxTotal/2
}

// cost returns how many units it holds, or may hold: what costs more than the size is denied.
func (k *reservation) cost() int64 { return min(k.query.buckets[0].cost, k.bucket.Limit.Size) }

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

// of returns the account of k's bucket, and makes one if there is none. An account that has
// nothing left starts over.
func (n *ledger) of(k *reservation) *account {
	p := &k.query.buckets[0]
	t := n.all[p.key]
	if t == nil {
		t = &account{ledger: n, key: p.key, open: make(map[*reservation]struct{})}
		if n.all == nil {
			n.all = make(map[string]*account)
		}
		n.all[p.key] = t
	}
	if t.isIdle() {
		now := n.store.clock()
		t.begin()
		t.mayExist = t.mayExist && !t.lapsed(now) // a server that takes over may lack what ended the last one
		t.doubt, t.lost, t.renewal, t.heard = false, false, nil, now
	}
	t.bucket, t.recalled = k.bucket, false
	k.account = t
	return t
}

// begin gives t the next number.
func (t *account) begin() {
	t.ledger.number++
	t.queued = false // what was, is for the account before
	t.number, t.receipt, t.totals, t.sent, t.confirmed = t.ledger.number, -1, totals{}, totals{}, totals{}
}

// lapsed reports whether no server has what t held any more, if nothing was sent since it was heard of.
func (t *account) lapsed(now time.Duration) bool { return now-t.heard >= lapse }

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

// known returns how many of the units that a server has answered to be charged are in the level
// here, which is reported: a server that lacks them, as a replica may, is not to charge them again.
func (n *ledger) known(confirmed int64) int64 {
	if n.store.fallback == nil {
		return 0
	}
	return confirmed
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

// decidedHere records that k's units are held, and that no server has them. n is locked.
func (n *ledger) decidedHere(k *reservation) {
	t := n.of(k)
	t.open[k] = struct{}{}
	k.running, t.doubt = true, true
}

// call returns a call for t.
func (t *account) call(what byte) *query {
	b := t.bucket
	b.reservedAs, b.Hold, b.Pool, b.Borrows, b.Watches, b.Cost = 0, false, false, false, 0, 0
	q := t.ledger.store.query(Request{Buckets: []Bucket{b}}, what)
	q.account, q.number = t, t.number
	q.buckets[0].held = new(heldCost)
	q.Replies = q.replies()
	return q
}

// renew begins a renewal: the next account has all that is held or may be.
func (t *account) renew() {
	r := &renewal{before: accountName{t.number, t.receipt}, charged: t.charged, owed: t.charged - t.confirmed.charged, heard: t.heard}
	for k := range t.open {
		if r.units = min(r.units+k.cost(), MaxUnits); k.running {
			r.running = append(r.running, k)
			k.counted = true
		}
	}
	t.begin()
	t.receipt, t.doubt, t.renewal = 0, false, r
}

// forgetOwed has t no longer send what it owes, which is charged here: the server gets it as a
// part of the level. The next account begins with nothing owed, also if the one before has not been
// answered.
func (t *account) forgetOwed() {
	last := t.renewal
	t.charged = t.confirmed.charged
	t.renew()
	if last != nil && last.before.receipt < 0 {
		t.renewal.before.receipt = -1 // no server has held for these requests
	}
}
