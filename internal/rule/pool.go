package rule

// What a limit has no room for it may borrow from another one, which is a pool. A store
// decides both in one step, so a pool stands behind those that borrow from it. Of a
// request that borrows nothing it is not seen, nor charged.

// addPoolTo adds to q the entries of the limits that borrow from l and that the request has
// to pass, then that of l, and then those of limits within the former.
func (l *Limit) addPoolTo(q *Request) error {
	var few [4]*Limit
	met, from := few[:0], len(q.entries)
	for _, borrower := range l.Borrowers {
		matches, err := borrower.addOwnTo(q)
		if err != nil {
			return err
		}
		if matches {
			met = append(met, borrower)
		}
	}
	at, cost := len(q.entries), int64(-1) // of the dearest that may borrow
	for i := from; i < at; i++ {
		if e := &q.entries[i]; e.IsMain() {
			cost = max(cost, e.Ask.Cost)
		}
	}
	if cost >= 0 {
		if _, err := l.addOwnTo(q); err != nil {
			return err
		}
	}
	if len(q.entries) > at { // the pool applies
		pool := &q.entries[at]
		if pool.Ask.Pool = true; !l.OwnCost {
			pool.Ask.Cost, pool.Estimate = cost, cost
			pool.Ask.Hold = pool.Ask.Hold && cost > 0
		}
		for i := from; i < at; i++ {
			q.entries[i].Ask.Borrows = q.entries[i].IsMain()
		}
	}
	for _, borrower := range met {
		if err := q.add(borrower.Within); err != nil {
			return err
		}
	}
	return nil
}
