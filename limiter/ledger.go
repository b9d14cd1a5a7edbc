package limiter

// reserve returns req with what is needed to hold units of each bucket with Hold.
func (r *servers) reserve(req Request, w *scratch) Request {
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
func (r *servers) reserveBucket(req Request, i int) {
	k := &reservation{store: r, bucket: req.Buckets[i], query: r.query(Request{Buckets: req.Buckets[i : i+1]}, whatRenew)}
	k.query.buckets[0].held = &heldCost{charge: req.Buckets[i].Cost, reservation: k}
	req.Held.reservations = append(req.Held.reservations, k)
	req.Buckets[i].reservedAs = uint16(len(req.Held.reservations)) // at most maxBuckets
}

// sending says in q, which is about to be sent, what it requests of its accounts. n is locked.
func (n *ledger) sending(q *query) {
	for i := range q.buckets {
		p := &q.buckets[i]
		if p.held == nil || q.account == nil && p.held.reservation == nil {
			continue
		}
		if t := q.account; t != nil {
			p.held.accountName = accountName{q.number, t.receipt}
			if q.number == t.number { // otherwise it has been renewed since, and this does nothing
				t.queued, t.sent, p.held.totals = false, t.totals, t.totals
				if q.what == whatSettle {
					p.held.known = n.known(t.confirmed.charged)
				}
			}
		} else {
			n.requested(p.held.reservation)
			p.held.number = p.held.reservation.number
		}
		p.held.process = n.process
	}
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
func (r *servers) hand(req Request, outcomes []outcome) {
	admitted := outcomes != nil && !req.denied(outcomes)
	for i := range req.Buckets {
		k := req.newReservation(&req.Buckets[i])
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
		req.Held.hold(i, req.Buckets, k)
	}
}

// settle implements holder.
func (k *reservation) settle(charge int64) { k.store.ledger.end(k, charge) }
