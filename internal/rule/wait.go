package rule

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// How a request waits: until it has a slot, or until the slot that it was charged for is due.

// waitsForSlot reports whether requests that l has no slot for may wait in a queue.
func (l *Limit) waitsForSlot() bool { return l.MaxDelay > 0 && l.limitsConcurrency() }

// waitsForRoom reports whether requests may wait until units have left l.
func (l *Limit) waitsForRoom() bool { return l.MaxDelay > 0 && !l.limitsConcurrency() }

// waitsForRoom reports whether requests may wait until units have left b.
func (b *Bucket) waitsForRoom() bool { return b.IsMain() && b.Limit.waitsForRoom() }

// limitsConcurrency reports whether l limits the requests in progress.
func (l *Limit) limitsConcurrency() bool { return l.Settlement.InProgress || l.Load != nil }

// queue returns the queue of e, for requests of a class.
func (e *Entry) queue(class adaptive.Class) queueKey {
	key := queueKey{name: e.Query.Name, key: e.Query.Key, class: class}
	switch l := e.Limit; {
	case l.Load != nil:
		key.load = l.Load.Options // with others, it has other slots
	case !l.limitsConcurrency():
		key.cost = e.Query.Cost
	}
	return key
}

// join adds the request to a queue of e, until max_delay after since: it may have waited in
// another queue before. It has a turn at once if t says so. The waiter is nil if too many wait.
func (q *Request) join(e *Entry, class adaptive.Class, since time.Time, t turn) *waiter {
	w := q.newWaiter(e, e.queue(class))
	if w.turn = t; t != waiting {
		w.ready <- struct{}{}
	}
	if !w.queues.add(w, e.Limit.MaxWaiting) {
		return nil
	}
	w.setTimers(time.Until(since.Add(e.Limit.MaxDelay)))
	return w
}

// newWaiter returns a waiter for the queue of a key at e, which is not in it yet.
func (q *Request) newWaiter(e *Entry, key queueKey) *waiter {
	return &waiter{
		request: q, policy: e.Policy, queues: e.Limit.Waiting.Queues, key: key, client: q.fairBy(e.Limit),
		start: time.Now(), ready: make(chan struct{}, 1),
	}
}

// setTimers sets the timers of w, whose wait is over after most.
func (w *waiter) setTimers(most time.Duration) {
	w.over, w.look = time.NewTimer(most), time.NewTicker(lookEvery)
}

// fairBy returns which client the request is of, where clients wait for l: "" if they do not
// take turns, and for all clients without a value.
func (q *Request) fairBy(l *Limit) string {
	if l.FairBy == nil {
		return ""
	}
	text, _, _ := l.FairBy.Of(q.http, q.replacer) // one that can't be verified yet is as good as none
	return text
}

// nextTurn waits until the request may ask for a slot, and ends the turn before, in which it
// found none. It is false if the wait is over: by max_delay, because a request of another client
// has displaced this one, or because the client has left.
func (w *waiter) nextTurn() bool {
	if w == nil {
		return false
	}
	again := w.inTurn && w.queues.requeue(w)
	if w.inTurn = true; again {
		return !w.clientLeft()
	}
	for {
		select {
		case <-w.ready:
			return w.turn != displaced && !w.clientLeft()
		case <-w.over.C:
			return w.queues.atEnd(w) && !w.clientLeft()
		case <-w.look.C:
		case <-w.request.http.Context().Done():
		}
		if w.clientLeft() {
			return false
		}
	}
}

// clientLeft reports, also to the request, whether its client has left.
func (w *waiter) clientLeft() bool {
	w.request.left = clientLeft(w.request.http)
	return w.request.left
}

// leave ends the wait. served says whether the request has found a slot.
func (w *waiter) leave(served bool, o *outcome.Outcome) {
	if w == nil {
		return
	}
	w.over.Stop()
	w.look.Stop()
	w.queues.remove(w, served)
	if w.turn == displaced {
		w.policy.Counters.CountDisplaced(w.request.stripe)
	}
	o.AddDelay(time.Since(w.start))
}

// ahead returns the first entry in whose queue others wait, or nil.
func (q *Request) ahead() *Entry {
	for i := range q.entries {
		e := &q.entries[i]
		fits := !e.Query.DryRun && e.Query.Cost > 0 && e.Query.Cost <= e.Query.Limit.Size
		if e.Limit.waitsForSlot() && fits && e.Limit.Waiting.hasWaiters(e.queue(0)) {
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
func (q *Request) decideOrWait(s limiter.Store, how *How) error {
	full := q.ahead()
	if full != nil {
		return q.waitForSlots(s, how, full, waiting)
	}
	if err := q.decideEntries(s, how, 0, len(q.entries)); err != nil {
		return err
	}
	if full = q.firstFull(); full == nil {
		return nil
	}
	return q.waitForSlots(s, how, full, granted) // as a slot may have been freed before it is in the queue
}

// waitForSlots is decideOrWait of a request that has found no slot at full, or has not asked
// since others wait there: then it has no turn at once.
func (q *Request) waitForSlots(s limiter.Store, how *How, full *Entry, t turn) (err error) {
	waited, since := how.Outcome.Waited(), time.Now()
	decided := t != waiting
	var in *Entry // in whose queue it waits
	for full != nil && full != in && !q.left && time.Since(since) < full.Limit.MaxDelay {
		in = full
		w := q.join(in, 0, since, t)
		for full == in && err == nil && w.nextTurn() {
			how.Outcome.AddWait(waited - how.Outcome.Waited()) // each time anew
			err, decided = q.decideEntries(s, how, 0, len(q.entries)), true
			full = q.firstFull()
		}
		w.leave(err == nil && decided && q.firstDenied() < 0, how.Outcome)
		if err != nil {
			return err
		}
		t = granted
	}
	switch {
	case !decided:
		q.denyQueued(full, how)
	case q.firstDenied() < 0:
		in.Policy.Counters.CountDelayed(q.stripe)
	}
	return nil
}

// denyQueued denies the request because of e, in whose queue there was no room, or no turn in time.
// That was decided here, whatever the store has charged.
func (q *Request) denyQueued(e *Entry, how *How) {
	by, retry := limiter.DecidedByMemory, retrySlot
	if how.Timeout > 0 {
		by = limiter.DecidedByCache
	}
	if e.Limit.waitsForRoom() {
		retry = (*bucket.Limit)(&e.Query.Limit).DripTime(e.Query.Cost)
	}
	q.decided = time.Now()
	e.Decided, e.Decision = true, limiter.Decision{Denied: true, By: by, Size: e.Size(), Clear: e.Decision.Clear, RetryAfter: retry}
}
