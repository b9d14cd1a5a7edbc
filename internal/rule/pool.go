package rule

// What a limit has no room for it may borrow from another one, which is a pool. A store
// decides both in one step, so a pool is asked after the limits that borrow from it. A request
// that borrows nothing is invisible to it.

// addPoolTo adds to q the entries of the limits that borrow from l and that the request has
// to pass, then the entry of l, and then the entries of limits within the borrowers.
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
	at, cost := len(q.entries), int64(-1) // the highest cost of those that may borrow
	for i := from; i < at; i++ {
		if e := &q.entries[i]; e.IsMain() {
			cost = max(cost, e.Query.Cost)
		}
	}
	if cost >= 0 {
		if _, err := l.addOwnTo(q); err != nil {
			return err
		}
	}
	if len(q.entries) > at { // the pool applies
		pool := &q.entries[at]
		if pool.Query.Pool = true; !l.OwnCost {
			pool.Query.Cost, pool.Estimate = cost, cost
			pool.Query.Hold = pool.Query.Hold && cost > 0
		}
		for i := from; i < at; i++ {
			q.entries[i].Query.Borrows = q.entries[i].IsMain()
		}
	}
	for _, borrower := range met {
		if err := q.add(borrower.Within); err != nil {
			return err
		}
	}
	return nil
}
