package limiter

import (
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// What is sent about accounts: settlements and renewals, again and again until they are
// answered.

const (
	// renewEvery is after which time what is held is renewed, if nothing else was answered.
	renewEvery = 5 * time.Second

	// resendEvery is how often what has not been answered is sent again.
	resendEvery = 100 * time.Millisecond

	// sendTogether is how many calls that are due are sent at once, with sendPause after them,
	// or more if all would take longer than sendPortions such pauses. After a connection broke
	// all accounts are due, and requests would wait for their server to be done with them.
	sendTogether = 64
	sendPause    = 10 * time.Millisecond
	sendPortions = 200

	// lookTogether is how many accounts are looked at while requests wait.
	lookTogether = 64

	// maxPast is how many accounts that have ended are remembered at most.
	maxPast = 10_000
)

// advance sends what is to be sent of t. Again says whether that goes for what was not
// answered before.
func (n *ledger) advance(t *account, again bool) {
	if t == nil {
		return
	}
	n.lock()
	n.start()
	q := t.next(again)
	n.unlock()
	n.submit(q)
}

// start has run look after the accounts, if there are any.
func (n *ledger) start() {
	if !n.running && len(n.all) > 0 {
		n.running = true
		go n.run()
	}
}

// next returns the next call for t, or nil if there is nothing to send. Again says whether
// what was not answered is to be sent again.
func (t *account) next(again bool) *query {
	if t.ledger.closed || t.isIdle() {
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
		q.buckets[0].cost = r.units
		h := q.buckets[0].held
		h.before, h.beforeCharged, h.known = r.before, r.charged, t.ledger.known(r.charged-r.owed)
		return q
	}
	if t.receipt < 0 || t.queued || t.totals == t.sent && (!again || t.settling > 0 || t.totals == t.confirmed) {
		return nil
	}
	t.queued = true
	t.settling++
	return t.call(whatSettle)
}

// submit sends q, which next has returned.
func (n *ledger) submit(q *query) {
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

// wasSettled handles the outcome of a settlement. An answer that the server has raised the
// totals goes for whichever account it names.
func (n *ledger) wasSettled(q *query, outcomes []outcome, sent time.Duration, err error) {
	t, held := q.account, q.buckets[0].held
	a := settlement{doubtful: err != nil && !redisscript.NotRun(err)}
	n.lock()
	t.settling--
	switch current := q.number == t.number; {
	case err != nil && current:
		t.queued = false
		a.unknown = t.failed(err)
	case err != nil: // its renewal settles it
	case outcomes[0].receipt == 1 && current && held.receipt == t.receipt:
		a.known, a.doubtless = max(held.charged-t.confirmed.charged, 0), true
		t.confirmed = totals{max(t.confirmed.ended, held.ended), max(t.confirmed.charged, held.charged)}
		t.heard = max(t.heard, sent)
	case outcomes[0].receipt == 1 && t.renewal != nil && t.renewal.before == held.accountName:
		r := t.renewal
		left := min(max(r.charged-held.charged, 0), r.owed)
		a.known, r.owed = r.owed-left, left
	case !current || held.receipt != t.receipt: // its renewal settles it, or the server has opened the account again since, see admitted
	case t.runs(): // lost by the server, or lapsed
		t.lose()
		a.doubtful = true
	default: // it was settled before, has lapsed or was lost
		a.unknown, t.confirmed = t.charged-t.confirmed.charged, t.totals
	}
	n.store.fallback.settled(q, outcomes, a)
	n.unlock()
	if err == nil {
		n.advance(t, false)
	}
}

// wasRenewed handles the outcome of a renewal.
func (n *ledger) wasRenewed(q *query, outcomes []outcome, sent time.Duration, err error) {
	t, held := q.account, q.buckets[0].held
	a := settlement{doubtful: err != nil && !redisscript.NotRun(err)}
	n.lock()
	t.mayExist = t.mayExist || !redisscript.NotRun(err)
	if q.number != t.number { // its place was taken, see forgetOwed
		n.store.fallback.settled(q, nil, settlement{})
		n.unlock()
		return
	}
	r := t.renewal
	r.sent = false
	if err != nil {
		a.unknown = t.failed(err)
		n.store.fallback.settled(q, nil, a)
		n.unlock()
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
	a.known += held.charged - t.confirmed.charged
	t.confirmed = held.totals
	for _, k := range r.running {
		k.inServer = true
	}
	t.lost = t.lost && t.doubt
	t.doubt = t.doubt || r.tries > 1 && r.grew || outcomes[0].receipt < 0
	a.doubtless = !t.doubt
	t.renewal, t.heard = nil, sent
	n.store.fallback.settled(q, outcomes, a)
	n.store.fallback.renewed(r.running, q.server)
	t.recount() // and what was admitted meanwhile
	n.unlock()
	n.advance(t, true)
}

// failed handles that a call failed. If its server is down, it returns all that is owed, to
// be charged here: while it is awaited, nothing of that would drip. The server gets it
// with the next request for the bucket, as a part of the level here. If some was sent
// before, it has charged that or never will: the next account begins with nothing owed.
func (t *account) failed(err error) (here int64) {
	if !redisscript.NotRun(err) || redisscript.Elsewhere(err) || t.ledger.store.fallback == nil ||
		t.settling > 0 || t.renewal != nil && t.renewal.sent {
		return 0
	}
	if here = t.charged - t.confirmed.charged; t.renewal != nil {
		here += t.renewal.owed
	}
	if here > 0 {
		t.forgetOwed()
	}
	return here
}

// run renews what is due, and sends again what was not answered, until nothing is held.
func (n *ledger) run() {
	for {
		time.Sleep(resendEvery)
		n.lock()
		if len(n.all) == 0 || n.closed {
			n.running = false
			n.unlock()
			return
		}
		n.unlock()
		n.tick()
	}
}

// tick renews what is due, and sends again what was not answered. It sends a few calls at a
// time, and releases the lock again and again, so that requests do not wait for all of them.
func (n *ledger) tick() {
	n.lock()
	looked, sent, combine := 0, 0, max(sendTogether, len(n.all)/sendPortions)
	now := n.store.clock()
	n.forgetPast(now)
	for key, t := range n.all {
		if looked++; looked%lookTogether == 0 {
			n.unlock()
			n.lock()
		}
		if n.all[key] != t { // it ended meanwhile
			continue
		}
		if t.recalled && t.lapsed(now) {
			t.mayExist = false
		}
		if t.isIdle() {
			delete(n.all, key)
			n.remember(t)
			continue
		}
		if t.renewal == nil && now-t.heard >= renewEvery && t.runs() {
			t.doubt = true
		}
		q := t.next(true)
		if q == nil {
			continue
		}
		n.unlock()
		n.submit(q)
		if sent++; sent%combine == 0 {
			time.Sleep(sendPause)
			now = n.store.clock()
		}
		n.lock()
		if n.closed {
			break
		}
	}
	n.unlock()
}

// remember keeps t, which has ended, for as long as a server that takes over may still have it.
func (n *ledger) remember(t *account) {
	if !t.mayExist || t.recalled {
		return
	}
	if len(n.past) == maxPast {
		n.past = slices.Delete(n.past, 0, maxPast/10)
	}
	t.owed = nil
	n.past = append(n.past, t)
}

// forgetPast forgets the accounts that no server has any more.
func (n *ledger) forgetPast(now time.Duration) {
	i := 0
	for i < len(n.past) && n.past[i].lapsed(now) {
		i++
	}
	n.past = slices.Delete(n.past, 0, i)
}

// recall has the accounts renewed that have ended lately. A server that has restarted, or has
// been a replica, may lack what ended them: it would hold their units until they lapse, and charge
// them besides.
func (n *ledger) recall() {
	n.lock()
	defer n.unlock()
	n.forgetPast(n.store.clock())
	for _, t := range slices.Backward(n.past) {
		if later := n.all[t.key]; later != nil { // its renewal ends t, too
			later.mayExist = true
		} else {
			n.all[t.key] = t
		}
	}
	for _, t := range n.all {
		if t.mayExist {
			t.recalled = t.recalled || t.isIdle()
			t.doubt = true
		}
	}
	n.past = nil
	n.start()
}
