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

// A request that has no place at a limit on requests in progress may wait for one by
// max_delay, in a line of this process: first come, first served. Each place that is freed
// here gives the next one its turn, in which it asks for it like any other request. Nobody tells
// of places that other instances free, so the first in line also asks now and then.

const (
	// askEvery is how often the first in a line asks without having been given a turn.
	askEvery = 100 * time.Millisecond

	// retryPlace is what is told to those who find no place, since nobody knows when one is
	// free.
	retryPlace = time.Second
)

// Queues are the requests that wait at the limits whose buckets have one name: for room, of
// which only the number is known, or in a line for each key.
type Queues struct {
	count atomic.Int64 // of requests that wait, or may have to

	mu    sync.Mutex
	byKey map[queueKey]*line // in which there is anybody
	last  uint64             // number of the last waiter
	open  atomic.Int64       // how many lines there are
}

// queueKey identifies a line.
type queueKey struct {
	name, key string         // of the bucket in stores
	class     adaptive.Class // of a limit that follows the load
	load      adaptive.Options
}

// line has the requests that wait for places of one key, and those among them that have a turn.
type line struct {
	waits list.List // of *waiter, in the order in which they came
	turns int       // how many have a turn
	freed int       // places that were freed while nobody waited and some had turns, at most so many as these
	asked time.Time // when one last had a turn without a place that was known to be free
}

// waiter is a request in a line.
type waiter struct {
	number uint64        // in the order in which they came
	turn   chan bool     // whether the turn is a guess: no place is known to be free
	at     *list.Element // nil if it has a turn
}

// NewQueues returns lines in which nobody waits.
func NewQueues() *Queues { return &Queues{byKey: make(map[queueKey]*line)} }

// Len returns how many requests wait, or may have to.
func (s *Queues) Len() int64 { return s.count.Load() }

// anyone reports whether anybody waits in a line.
func (s *Queues) hasWaiters(key queueKey) bool {
	if s.open.Load() == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	return l != nil && l.waits.Len() > 0
}

// join adds a waiter to a line, with a turn or behind the others.
func (s *Queues) join(key queueKey, turn bool) *waiter {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	if l == nil {
		l = new(line)
		s.byKey[key] = l
		s.open.Add(1)
	}
	s.last++
	own := &waiter{number: s.last, turn: make(chan bool, 1)}
	if turn {
		l.turns++
	} else {
		own.at = l.waits.PushBack(own)
	}
	return own
}

// yield ends the turn of one that found no place. It reports whether it has another one, as a
// place was freed meanwhile.
func (s *Queues) yield(key queueKey, own *waiter) (again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	if l.freed > 0 {
		l.freed--
		return true
	}
	l.turns--
	before := l.waits.Back()
	for before != nil && before.Value.(*waiter).number > own.number {
		before = before.Prev()
	}
	if before == nil {
		own.at = l.waits.PushFront(own)
	} else {
		own.at = l.waits.InsertAfter(own, before)
	}
	return false
}

// takeTurn gives one that waits a turn if it is the first, and nobody has one, and reports
// whether it does.
func (s *Queues) takeTurn(key queueKey, own *waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	if own.at == nil || l.waits.Front() != own.at || l.turns > 0 {
		return false
	}
	l.next()
	l.asked = time.Now()
	return true
}

// next gives the first that waits a turn, and returns it.
func (l *line) next() *waiter {
	first := l.waits.Remove(l.waits.Front()).(*waiter)
	first.at = nil
	l.turns++
	return first
}

// leave removes one from a line. If it leaves its turn unused, the next one has it. And the next
// one may guess, if nobody has a turn: if the guess of this one was right; or if it was the first
// and nobody has guessed of late, as nobody would if all went on leaving so.
func (s *Queues) leave(key queueKey, own *waiter, guess, found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	mayGuess := guess && found
	if own.at == nil {
		l.turns--
	} else {
		mayGuess = l.waits.Front() == own.at && time.Since(l.asked) >= askEvery
		l.waits.Remove(own.at)
	}
	switch {
	case own.at == nil && !found:
		l.wake(guess)
	case mayGuess && l.turns == 0:
		l.asked = time.Now()
		l.wake(true)
	}
	if l.freed = min(l.freed, l.turns); l.turns == 0 && l.waits.Len() == 0 {
		delete(s.byKey, key)
		s.open.Add(-1)
	}
}

// wake gives the next one in a line a turn, after a place was freed.
func (s *Queues) wake(key queueKey) {
	if s.open.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.byKey[key]; l != nil {
		l.wake(false)
	}
}

// wake gives the next one a turn, of which guess says whether no place is known to be free.
func (l *line) wake(guess bool) {
	if l.waits.Len() > 0 {
		l.next().turn <- guess
		return
	}
	l.freed = min(l.freed+1, l.turns)
}

// waitsForSlot reports whether requests that l has no place for may wait in line.
func (l *Limit) waitsForSlot() bool { return l.MaxDelay > 0 && l.limitsConcurrency() }

// waitsForRoom reports whether requests may wait until units have left l.
func (l *Limit) waitsForRoom() bool { return l.MaxDelay > 0 && !l.limitsConcurrency() }

// limitsConcurrency reports whether l limits the requests in progress.
func (l *Limit) limitsConcurrency() bool { return l.Settlement.InProgress || l.Load != nil }

// line returns the line of e, for requests of a class.
func (e *Entry) line(class adaptive.Class) queueKey {
	key := queueKey{name: e.Query.Name, key: e.Query.Key, class: class}
	if l := e.Limit.Load; l != nil {
		key.load = l.Options // with others, it has other places
	}
	return key
}

// wait has the request wait in a line of e until ask finds a place, or the wait is over; since
// says when it has begun, here or in another line. If the request has asked before, it asks
// again at once, as a place may have been freed right before it was in line. If the line is
// full, or the client leaves, nothing is asked any more.
//
// ask returns whether the request has found a place, and whether that ends the wait, as an
// error does too, or that it lacks another one.
func (q *Request) wait(e *Entry, class adaptive.Class, since time.Time, asked bool, o *outcome.Outcome, ask func() (found, done bool)) {
	if e.waits = e.Limit.mayWait(); !e.waits {
		return
	}
	lines, key, start := e.Limit.Waiting.Queues, e.line(class), time.Now()
	own, guess, found := lines.join(key, asked), false, false
	over, look := time.NewTimer(time.Until(since.Add(time.Duration(e.Limit.MaxDelay)))), time.NewTicker(lookEvery)
	defer func() {
		over.Stop()
		look.Stop()
		lines.leave(key, own, guess, found)
		e.endWait()
		o.AddDelay(time.Since(start))
	}()
	for turn := asked; ; {
		if turn {
			var done bool
			if found, done = ask(); done {
				return
			}
			if turn = lines.yield(key, own); turn {
				continue
			}
		}
		select {
		case guess = <-own.turn:
			turn = true
		case <-look.C:
			if turn = lines.takeTurn(key, own); turn {
				guess = true
				look.Reset(askEvery)
			}
		case <-over.C:
			return
		case <-q.http.Context().Done():
		}
		if clientLeft(q.http) {
			q.left = true
			return
		}
	}
}

// ahead returns the first entry of a store in whose line others wait, or nil.
func (q *Request) ahead() *Entry {
	for i := range q.entries {
		if e := &q.entries[i]; e.Limit.waitsForSlot() && !e.Query.DryRun && e.Query.Cost > 0 && e.Query.Cost <= e.Query.Limit.Size && e.Limit.Waiting.hasWaiters(e.line(0)) {
			return e
		}
	}
	return nil
}

// firstFull returns the first entry that has denied the request, if it may wait for places of
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

// decideOrWait asks a store about all entries, as often as the request may wait for places. It
// does not wait without an Outcome, as in a replay.
func (q *Request) decideOrWait(s limiter.Store, how *How) error {
	short := q.ahead()
	if short == nil || how.Outcome == nil {
		if err := q.decideEntries(s, how, 0, len(q.entries)); err != nil || how.Outcome == nil {
			return err
		}
		if short = q.firstFull(); short == nil {
			return nil
		}
		return q.waitForPlaces(s, *how, short, true)
	}
	return q.waitForPlaces(s, *how, short, false)
}

// waitForPlaces is decideOrWait of a request that has found no place at short, or has not asked
// since others wait for those.
func (q *Request) waitForPlaces(s limiter.Store, how How, short *Entry, asked bool) (err error) {
	waited, since := how.Outcome.Waited(), time.Now()
	var in *Entry // in whose line it waits
	for short != nil && short != in && !q.left && time.Since(since) < time.Duration(short.Limit.MaxDelay) {
		in = short
		q.wait(in, 0, since, asked, how.Outcome, func() (found, done bool) {
			how.Outcome.AddWait(waited - how.Outcome.Waited()) // each time anew
			err, asked = q.decideEntries(s, &how, 0, len(q.entries)), true
			short = q.firstFull()
			return err == nil && q.firstDenied() < 0, err != nil || short != in
		})
		if err != nil {
			return err
		}
	}
	switch {
	case !asked:
		q.denyUnasked(short, &how)
	case q.firstDenied() < 0:
		in.Policy.Counters.CountDelayed(q.stripe)
	}
	return nil
}

// denyUnasked denies the request because of e, in whose line there was no room or no turn: a
// place would not have been for it, so no store was asked.
func (q *Request) denyUnasked(e *Entry, how *How) {
	by := limiter.DecidedByMemory
	if how.Timeout > 0 {
		by = limiter.DecidedByCache
	}
	e.Decided, e.Decision = true, limiter.Decision{Denied: true, By: by, Size: e.Query.Limit.Size, RetryAfter: retryPlace}
}
