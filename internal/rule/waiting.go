package rule

import (
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// How a request waits: until it has a slot, or until the slot that it was charged for is due.

// retrySlot is the wait that is reported to requests that find no slot, since it is unknown when one
// is free.
const retrySlot = time.Second

// newWaiter returns the request as one that waits at e until max_delay after since: it may have
// waited in another queue before.
func (q *Request) newWaiter(e *Entry, key wait.Key, since time.Time) *wait.Waiter {
	return e.Limit.Waiting.NewWaiter(q.http, key, q.fairBy(e), since.Add(time.Duration(e.Limit.MaxDelay)))
}

// leave ends the wait of w at e. served says whether the request has found a slot.
func (q *Request) leave(w *wait.Waiter, e *Entry, served bool) {
	waited, displaced := w.Leave(served)
	if q.clientLeft = w.Left; displaced {
		e.Policy.Counters.Add(q.stripe, telemetry.Displaced, 1)
	}
	q.how.Outcome.Delayed += waited
}

// ahead returns the first entry in whose queue others wait, or nil.
func (q *Request) ahead() *Entry {
	for i := range q.entries {
		e := &q.entries[i]
		fits := !e.Query.DryRun && e.Query.Cost > 0 && e.Query.Cost <= e.Query.Limit.Size
		if e.Limit.waitsForSlot() && fits && e.Limit.Waiting.HasWaiters(e.queue(0)) {
			return e
		}
	}
	return nil
}

// firstFull returns the first entry that has denied the request, if it may wait for slots of
// all that have, or nil.
func (q *Request) firstFull() (first *Entry) {
	for i := range q.entries {
		switch e := &q.entries[i]; {
		case !e.Denies():
		case !e.Limit.waitsForSlot(), e.Decision.Never:
			return nil
		case first == nil:
			first = e
		}
	}
	return first
}

// decideOrWait has a store decide on all entries, as often as the request may wait for slots.
func (q *Request) decideOrWait() error {
	full := q.ahead()
	if full != nil {
		return q.waitForSlots(full, wait.Waiting)
	}
	if err := q.decideEntries(0, len(q.entries)); err != nil {
		return err
	}
	if full = q.firstFull(); full == nil {
		return nil
	}
	return q.waitForSlots(full, wait.Granted) // as a slot may have been freed before it is in the queue
}

// waitForSlots has a store decide on a request that has found no slot at full, each time that there
// may be one. Where others wait already it has not asked yet, and has no turn at once.
func (q *Request) waitForSlots(full *Entry, t wait.Turn) (err error) {
	waited, since := q.how.Outcome.Waited, time.Now()
	decided := t != wait.Waiting
	var in *Entry // in whose queue it waits
	for full != nil && full != in && !q.clientLeft && time.Since(since) < time.Duration(full.Limit.MaxDelay) {
		in = full
		w := q.newWaiter(in, in.queue(0), since)
		if !w.Join(t, in.Limit.MaxWaiting) {
			break
		}
		for full == in && err == nil && w.Next() {
			q.how.Outcome.Waited = waited // each time anew
			err, decided = q.decideEntries(0, len(q.entries)), true
			full = q.firstFull()
		}
		q.leave(w, in, err == nil && decided && q.firstDenied() < 0)
		if err != nil {
			return err
		}
		t = wait.Granted
	}
	switch {
	case !decided:
		q.denyQueued(full)
	case q.firstDenied() < 0:
		in.Policy.Counters.Add(q.stripe, telemetry.Delayed, 1)
	}
	return nil
}

// denyQueued denies the request because of e, in whose queue there was no room, or no turn in time.
// That was decided here, whatever the store has charged.
func (q *Request) denyQueued(e *Entry) {
	by, retry := limiter.DecidedByMemory, retrySlot
	if q.how.Timeout > 0 {
		by = limiter.DecidedByCache
	}
	if e.Limit.waitsForRoom() {
		retry = (*bucket.Limit)(&e.Query.Limit).DripTime(e.Query.Cost)
	}
	q.decided = time.Now()
	e.Decided, e.Decision = true, limiter.Decision{Denied: true, By: by, Size: e.Size(), Clear: e.Decision.Clear, RetryAfter: retry}
}

// waitForRoom has a request wait that the store has decided on, if one of its limits lets requests
// exceed its size. The decisions are about the sizes then, and no longer about what may be above them.
func (q *Request) waitForRoom() error {
	w, in, err := q.takeOver()
	if err != nil {
		return err
	}
	switch delay := q.removeExtra(); {
	case w != nil:
		q.waitTurn(w, in)
	case delay > 0 && q.how.Outcome != nil:
		q.waitOut(delay)
	}
	return nil
}

// waitOut has the request, which is admitted, wait until it may pass, and denies it if that is not
// within max_delay. The slot that the store has charged becomes one of a queue, where all requests
// of one cost wait that are delayed by the same buckets: so units pass when they would if each
// request used its own slot, and the clients take turns.
func (q *Request) waitOut(delay time.Duration) {
	var first *Entry // that delays the request
	var key wait.Key
	for i := range q.entries {
		switch e := &q.entries[i]; {
		case !e.waits:
		case first == nil:
			first, key = e, e.queue(0)
		default:
			key.Name += fmt.Sprintf("%q%q%d", e.Query.Name, e.Query.Key, e.Query.Cost)
		}
	}
	now := time.Now()
	w := q.newWaiter(first, key, now.Add(max(delay-time.Duration(first.Limit.MaxDelay), 0)))
	first.waits = false // it is the waiter that counts now
	w.JoinWithSlot(now.Add(delay))
	q.waitTurn(w, first)
}

// waitTurn has the request wait as w at e.
func (q *Request) waitTurn(w *wait.Waiter, e *Entry) {
	passes := w.Next()
	if q.leave(w, e, passes); !passes {
		q.denyQueued(e)
		q.deniedWaiting = true
	}
}

// takeOver finds a slot for the request, which was denied, among those that were charged before: one
// that a request has left or, if its client has fewer waiting, the last one of the client that has
// most. The request is then admitted, and waits as w at e. Of several buckets, the others decide anew.
func (q *Request) takeOver() (w *wait.Waiter, e *Entry, err error) {
	i := q.firstDenied()
	if i < 0 || q.how.Outcome == nil || q.how.Accounting != Atomic || q.notesDenials() {
		return nil, nil, nil
	}
	for j := range q.entries {
		switch other := &q.entries[j]; {
		case other.waitsForRoom() != (i == j), other.Denies() && i != j, other.Decision.Never:
			return nil, nil, nil
		}
	}
	e = &q.entries[i]
	if !e.Limit.Waiting.HasWaiters(e.queue(0)) {
		return nil, nil, nil
	}
	if w = q.newWaiter(e, e.queue(0), time.Now()); !w.TakeOver(e.Limit.MaxWaiting) {
		return nil, nil, nil
	}
	denied := e.Decision
	e.Decision.Denied, e.Decision.RetryAfter, e.tookOver = false, 0, true
	if len(q.entries) > 1 {
		e.withheld = true
		err = q.decideEntries(0, len(q.entries))
		e.withheld = false
	}
	if err != nil || q.firstDenied() >= 0 {
		e.Decision, e.tookOver = denied, false
		q.leave(w, e, false)
		return nil, nil, err
	}
	e.Policy.Counters.Add(q.stripe, telemetry.Delayed, 1)
	return w, e, nil
}

// removeExtra makes the decisions on a request ones about the sizes of the limits. If the
// request is admitted, it returns how long it has to wait. What need not wait does not
// count as waiting from then on. A dry run only counts what would have waited.
func (q *Request) removeExtra() (delay time.Duration) {
	all := q.firstDenied() < 0
	for i := range q.entries {
		e := &q.entries[i]
		if e.extra == (extraCapacity{}) || !e.Decided {
			continue
		}
		d := &e.Decision
		admitted := all && !d.Denied
		var own time.Duration
		if admitted && !e.tookOver {
			own = e.Query.Delay(d, e.extra.delayed)
		}
		if own > 0 {
			e.Delay = own
			e.Policy.Counters.Add(q.stripe, telemetry.Delayed, 1)
		}
		if d.DryRun {
			own = 0
		}
		if delay = max(delay, own); own == 0 {
			e.endWait()
		}
		if admitted && !d.Borrowed && e.extra.soft > 0 && d.Remaining < e.extra.units() {
			e.Over = true
			e.Policy.Counters.Add(q.stripe, telemetry.OverSize, 1)
		}
		d.Size -= e.extra.units()
		d.Remaining = max(d.Remaining-e.extra.units(), 0)
	}
	return delay
}
