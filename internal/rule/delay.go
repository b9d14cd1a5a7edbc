package rule

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// ErrLeft is the error of a request whose client has left while it waited.
var ErrLeft = RefusalError{Status: statusClientLeft, Err: context.Canceled}

// waitOut has the request, which is admitted, wait until it may pass, and denies it if that is not
// within max_delay. The slot that the store has charged becomes one of a queue, where all requests
// of one cost wait that are delayed by the same buckets: so units pass when they would if each
// request used its own slot, and the clients take turns.
func (q *Request) waitOut(how *How, wait time.Duration) {
	var first *Entry // that delays the request
	var key queueKey
	for i := range q.entries {
		switch e := &q.entries[i]; {
		case !e.waits:
		case first == nil:
			first, key = e, e.queue(0)
		default:
			key.name += fmt.Sprintf("%q%q%d", e.Query.Name, e.Query.Key, e.Query.Cost)
		}
	}
	w := q.newWaiter(first, key)
	first.waits = false // it is the waiter that counts now
	w.queues.addSlot(w, w.start.Add(wait))
	w.setTimers(max(wait, first.Limit.MaxDelay))
	q.waitTurn(how, w, first)
}

// waitTurn has the request wait as w at e.
func (q *Request) waitTurn(how *How, w *waiter, e *Entry) {
	passes := w.nextTurn()
	if w.leave(passes, how.Outcome); !passes {
		q.denyQueued(e, how)
		q.late = true
	}
}

// takeOver finds a slot for the request, which was denied, among those that were charged before: one
// that a request has left or, if its client has fewer waiting, the last one of the client that has
// most. The request is then admitted, and waits as w at e. Of several buckets, the others decide anew.
func (q *Request) takeOver(s limiter.Store, how *How) (w *waiter, e *Entry, err error) {
	i := q.firstDenied()
	if i < 0 || how.Outcome == nil || how.Accounting != Atomic || q.notesDenials() {
		return nil, nil, nil
	}
	for j := range q.entries {
		switch other := &q.entries[j]; {
		case other.waitsForRoom() != (i == j), other.Denies() && i != j, other.Decision.Never:
			return nil, nil, nil
		}
	}
	e = &q.entries[i]
	if !e.Limit.Waiting.hasWaiters(e.queue(0)) {
		return nil, nil, nil
	}
	w = q.newWaiter(e, e.queue(0))
	if !w.queues.addWithoutSlot(w, e.Limit.MaxWaiting) {
		return nil, nil, nil
	}
	w.setTimers(e.Limit.MaxDelay)
	denied := e.Decision
	e.Decision.Denied, e.Decision.RetryAfter, e.tookOver = false, 0, true
	if len(q.entries) > 1 {
		e.withheld = true
		err = q.decideEntries(s, how, 0, len(q.entries))
		e.withheld = false
	}
	if err != nil || q.firstDenied() >= 0 {
		e.Decision, e.tookOver = denied, false
		w.leave(false, how.Outcome)
		return nil, nil, err
	}
	e.Policy.Counters.CountDelayed(q.stripe)
	return w, e, nil
}
