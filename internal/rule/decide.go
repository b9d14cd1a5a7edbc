package rule

import (
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Decide has a store decide on the request. If it is admitted, it has waited for as long as it has
// to. With an error, nothing was decided. What policies did, such as a delay or a ban, is counted
// here; who was admitted or denied by count.
//
// Only zones, which are asked in order, may take more than one call: one that charges all or
// none is all it takes for a request that is admitted, and another one charges a denied
// request. A request that waits for a slot is decided anew each time that one may be free.
func (q *Request) Decide(s limiter.Store, how How) (err error) {
	if q.store, q.how = s, how; len(q.entries) == 0 {
		return nil
	}
	switch n := len(q.entries); {
	case how.Accounting == InOrder:
		if err = q.decideEntries(0, n); err == nil {
			q.chargeInOrder()
		}
	case q.mayQueue && how.Outcome != nil:
		err = q.decideOrWait()
	default:
		err = q.decideEntries(0, n)
	}
	if err == nil && q.mayExceed {
		err = q.waitForRoom()
	}
	if len(q.holdings) > 0 && (err != nil || q.firstDenied() >= 0) {
		q.settleUnpassed()
	}
	return err
}

// chargeInOrder charges the buckets before the first that has denied, after
// all were asked at once and none was charged. The store is asked once more, about
// these. If one of them is full by now, that is the first that denies. Decisions on later ones
// do not count, as if they had not been asked.
func (q *Request) chargeInOrder() {
	first := q.firstDenied()
	if first < 0 {
		return
	}
	for more := true; more && first > 0; {
		q.undecide(first+1, len(q.entries))
		if q.decideEntries(0, first) != nil { // the store failed meanwhile, but the request is denied
			q.undecide(0, first)
			return
		}
		earlier := q.firstDenied()
		more = earlier < first
		first = earlier
	}
	q.undecide(first+1, len(q.entries))
}

// Withhold has the i-th entry not asked about. A pool lends nothing then, and one from which
// nothing can be borrowed is not asked about either.
func (q *Request) Withhold(i int) {
	e := &q.entries[i]
	e.withheld = true
	e.endWait()
	pool, borrows := -1, false
	for j := range q.entries {
		switch other := &q.entries[j]; {
		case other.Query.Pool && other.Limit == e.Limit.Lender:
			pool = j
		case e.Query.Pool && other.Limit.Lender == e.Limit:
			other.Query.Borrows = false
		case other.Query.Borrows && !other.withheld && other.Limit.Lender == e.Limit.Lender:
			borrows = true
		}
	}
	if pool >= 0 && !borrows {
		q.entries[pool].withheld = true
	}
}

// report adds the entries from one index on to the outcome, which placeholders show from now on. It
// returns the index of the first one there.
func (q *Request) report(from int, families outcome.Families) (first int) {
	o := q.how.Outcome
	first = o.Grow(len(q.entries)-from, q.decided)
	for i := from; i < len(q.entries); i++ {
		e := &q.entries[i]
		if !e.Decided {
			continue
		}
		e.shown = o.Append(outcome.Entry{
			Policy: &e.Policy.Policy, Name: e.Query.Name, Limit: e.Query.Limit, Cost: e.need(), Families: families,
			Over: e.Over, Banned: e.Banned > 0, Decision: e.Decision,
		})
		o.Charge(e.shown, e.Charged)
	}
	for i := range q.holdings {
		if held := &q.holdings[i]; held.Place == nil && held.Outcome == nil {
			held.Outcome, held.Entry = o, q.entries[held.Entry].shown
		}
	}
	return first
}

// count counts what was decided on the request, at each limit, and notes what it was charged.
func (q *Request) count() {
	denied := q.firstDenied() >= 0
	for i := range q.entries {
		e := &q.entries[i]
		if !e.Decided {
			continue
		}
		d := &e.Decision
		charged := !d.Denied && (!denied || q.how.Accounting != Atomic || q.deniedWaiting) && !e.Query.Hold && d.Borrowed == d.Pool
		if charged {
			e.Charged = e.Query.Cost
		}
		q.countEntry(e, denied, charged)
		if e.Banned > 0 {
			q.noteBan(e)
		}
		if d.Borrowed && !d.Pool {
			e.Policy.Counters.Add(q.stripe, telemetry.Borrowed, 1)
		}
	}
}

// countEntry counts what one limit decided, given whether the request is denied by any limit, and whether this one
// charged it.
func (q *Request) countEntry(e *Entry, denied, charged bool) {
	d := &e.Decision
	e.Policy.Counters.Count(q.stripe, &e.Query, d, e.Banned > 0 && !e.Began, denied, charged)
	if q.reads && !e.ByAddress() && e.Limit.Key.IsUnclear(e.Query.Key) {
		e.Policy.Counters.Add(q.stripe, telemetry.Unclear, 1)
		if d.Denied {
			e.Limit.Reporter.UnclearFull()
		}
	}
	if top := e.Policy.Top; top != nil {
		top.Record(e.Query.Key, e.ByAddress(), d.Denied)
	}
}

// noteBan notes that the limit of e bans the request's key.
func (q *Request) noteBan(e *Entry) {
	bans := e.Limit.Bans
	if e.Began || e.Decision.By != limiter.DecidedByCache { // or it is noted already
		bans.List.Note(BannedKey{e.Query.Key, e.ByAddress()}, e.Banned)
	}
	if !e.Began {
		return
	}
	e.Policy.Counters.Add(q.stripe, telemetry.BansBegun, 1)
	if e.Query.DryRun {
		return
	}
	var key *string
	if e.Policy.Top != nil {
		text := strings.Clone(keytext.Of(e.Query.Key))
		key = &text
	}
	bans.Events.Banned(e.Limit.Path, e.Banned, key)
}
