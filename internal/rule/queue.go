package rule

import (
	"container/list"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A request for which a limit on requests in progress has no slot may wait for one by max_delay,
// in a queue of this process: first come, first served. Each slot that is freed here gives the
// next request its turn, in which it is decided like any other. Slots that other instances free
// are unknown here, so the first in a queue also has a turn now and then.

const (
	// pollEvery is how often the first in a queue has a turn without a slot known to be free.
	pollEvery = 100 * time.Millisecond

	// retrySlot is the wait that is reported to requests that find no slot, since it is unknown
	// when one is free.
	retrySlot = time.Second
)

// Queues are the requests that wait at the limits whose buckets have one name: in a queue for
// each key, or for room, of which only the number is known.
type Queues struct {
	count atomic.Int64 // requests that wait, or may have to

	mu    sync.Mutex
	byKey map[queueKey]*queue // those that are in use
	last  uint64              // number of the last waiter
	open  atomic.Int64        // how many queues there are
}

// queueKey identifies a queue.
type queueKey struct {
	name, key string         // of the bucket in stores
	class     adaptive.Class // of a limit that follows the load
	load      adaptive.Options
}

// queue has the requests that wait for a slot of one key, and counts those that have a turn.
type queue struct {
	waiters list.List   // those without a turn, in the order in which they came
	turns   int         // how many have one
	freed   int         // slots freed while none waited and some had turns, at most as many as these
	polling bool        // whether one of the turns is a poll
	timer   *time.Timer // of polls
}

// turn is whether a request in a queue may ask for a slot.
type turn uint8

const (
	waiting turn = iota // it may not yet
	granted             // a slot is known to be free
	poll                // none is
)

// waiter is a request in a queue.
type waiter struct {
	request *Request
	entry   *Entry
	queues  *Queues
	key     queueKey
	start   time.Time
	over    *time.Timer  // until the wait is over
	look    *time.Ticker // for whether the client is still there
	ready   chan struct{}
	inTurn  bool

	// Guarded by the queues' lock:
	queue  *queue
	number uint64 // in the order in which they came
	turn   turn
	at     *list.Element // if it waits
}

// NewQueues returns queues in which no request waits.
func NewQueues() *Queues { return &Queues{byKey: make(map[queueKey]*queue)} }

// Len returns how many requests wait, or may have to.
func (s *Queues) Len() int64 { return s.count.Load() }

// hasWaiters reports whether any request waits in a queue.
func (s *Queues) hasWaiters(key queueKey) bool {
	if s.open.Load() == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	return l != nil && l.waiters.Len() > 0
}

// add adds w to its queue.
func (s *Queues) add(w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[w.key]
	if l == nil {
		l = new(queue)
		l.timer = time.AfterFunc(pollEvery, func() { s.poll(w.key, l) })
		s.byKey[w.key] = l
		s.open.Add(1)
	}
	s.last++
	w.queue, w.number = l, s.last
	if w.turn == waiting {
		w.at = l.waiters.PushBack(w)
	} else {
		l.turns++
	}
}

// requeue ends the turn of a request that found no slot. It reports whether the request has
// another turn, as a slot was freed meanwhile.
func (s *Queues) requeue(w *waiter) (again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := w.queue
	l.polling = l.polling && w.turn != poll
	if l.freed > 0 {
		l.freed--
		w.turn = granted
		return true
	}
	l.turns--
	w.turn = waiting
	before := l.waiters.Back()
	for before != nil && before.Value.(*waiter).number > w.number {
		before = before.Prev()
	}
	if before == nil {
		w.at = l.waiters.PushFront(w)
	} else {
		w.at = l.waiters.InsertAfter(w, before)
	}
	return false
}

// remove removes w from its queue. A turn that it has not used goes to the next request. If it
// was served, and there may be another slot, the next one has a poll.
func (s *Queues) remove(w *waiter, served, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, next := w.queue, w.turn
	l.polling = l.polling && w.turn != poll
	switch {
	case w.turn == waiting:
		l.waiters.Remove(w.at)
	case served && (more || w.turn == poll):
		l.turns--
		next = poll
	case served:
		l.turns--
		next = waiting
	default:
		l.turns--
	}
	l.wake(next)
	if l.freed = min(l.freed, l.turns); l.turns == 0 && l.waiters.Len() == 0 {
		l.timer.Stop()
		delete(s.byKey, w.key)
		s.open.Add(-1)
	}
}

// wake gives the next request in a queue a turn, after a slot was freed.
func (s *Queues) wake(key queueKey) {
	if s.open.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.byKey[key]; l != nil {
		l.wake(granted)
	}
}

// poll gives the first request in a queue a turn, and does so again until the queue is empty.
func (s *Queues) poll(key queueKey, l *queue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[key] == l {
		l.wake(poll)
		l.timer.Reset(pollEvery)
	}
}

// wake gives the next request a turn, if there is one to give: one poll at a time is enough.
func (l *queue) wake(t turn) {
	switch {
	case t == waiting, t == poll && l.polling:
	case l.waiters.Len() > 0:
		w := l.waiters.Remove(l.waiters.Front()).(*waiter)
		w.turn, w.at = t, nil
		l.turns++
		l.polling = l.polling || t == poll
		w.ready <- struct{}{}
	case t == granted:
		l.freed = min(l.freed+1, l.turns)
	}
}

// waitsForSlot reports whether requests that l has no slot for may wait in a queue.
func (l *Limit) waitsForSlot() bool { return l.MaxDelay > 0 && l.limitsConcurrency() }

// waitsForRoom reports whether requests may wait until units have left l.
func (l *Limit) waitsForRoom() bool { return l.MaxDelay > 0 && !l.limitsConcurrency() }

// limitsConcurrency reports whether l limits the requests in progress.
func (l *Limit) limitsConcurrency() bool { return l.Settlement.InProgress || l.Load != nil }

// queue returns the queue of e, for requests of a class.
func (e *Entry) queue(class adaptive.Class) queueKey {
	key := queueKey{name: e.Query.Name, key: e.Query.Key, class: class}
	if l := e.Limit.Load; l != nil {
		key.load = l.Options // with others, it has other slots
	}
	return key
}

// join adds the request to a queue of e, until max_delay after since: it may have waited in
// another queue before. It has a turn at once if t says so. The waiter is nil if the queue is
// full.
func (q *Request) join(e *Entry, class adaptive.Class, since time.Time, t turn) *waiter {
	if e.waits = e.Limit.mayWait(); !e.waits {
		return nil
	}
	w := &waiter{
		request: q, entry: e, queues: e.Limit.Waiting.Queues, key: e.queue(class), start: time.Now(), turn: t,
		over: time.NewTimer(time.Until(since.Add(time.Duration(e.Limit.MaxDelay)))), look: time.NewTicker(lookEvery),
		ready: make(chan struct{}, 1),
	}
	if t != waiting {
		w.ready <- struct{}{}
	}
	w.queues.add(w)
	return w
}

// nextTurn waits until the request may ask for a slot, and ends the turn before, in which it
// found none. It is false if the wait is over, or the client has left.
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
			return !w.clientLeft()
		case <-w.over.C:
			return false
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

// leave ends the wait. served says whether the request has found a slot, and more whether
// another one is free.
func (w *waiter) leave(served, more bool, o *outcome.Outcome) {
	if w == nil {
		return
	}
	w.over.Stop()
	w.look.Stop()
	w.queues.remove(w, served, more)
	w.entry.endWait()
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
	for full != nil && full != in && !q.left && time.Since(since) < time.Duration(full.Limit.MaxDelay) {
		in = full
		w := q.join(in, 0, since, t)
		for full == in && err == nil && w.nextTurn() {
			how.Outcome.AddWait(waited - how.Outcome.Waited()) // each time anew
			err, decided = q.decideEntries(s, how, 0, len(q.entries)), true
			full = q.firstFull()
		}
		w.leave(err == nil && decided && q.firstDenied() < 0, in.Decision.Remaining > 0, how.Outcome)
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

// denyQueued denies the request because of e, in whose queue there was no room or no turn: a
// slot would not have been for it, so no store was asked.
func (q *Request) denyQueued(e *Entry, how *How) {
	by := limiter.DecidedByMemory
	if how.Timeout > 0 {
		by = limiter.DecidedByCache
	}
	e.Decided, e.Decision = true, limiter.Decision{Denied: true, By: by, Size: e.Query.Limit.Size, RetryAfter: retrySlot}
}
