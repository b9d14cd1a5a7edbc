package wait

import (
	"container/list"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// A request for which a limit on requests in progress has no slot may wait for one by max_delay, in
// a queue of this process. The clients that wait there take turns, and the requests of one client
// are first come, first served. A client with half of the slots that requests have here is passed
// over as long as one with less than half waits. Each slot that is freed here gives the next
// request its turn, in which it is decided like any other. Slots that other instances free are
// unknown here, so the next in a queue also has a turn now and then, a poll.
//
// At a limit on a rate, slots are times. A request is charged when it arrives, which determines the
// slot that it brings along; when that is due, the next request in the queue has its turn and passes.
//
// So an instance would keep the slots that it has for as long as any request waits there, and those
// that wait in others would get none. Therefore a queue leaves a slot now and then to the first that
// polls, after its requests have had slots for shareAfter. If that was of no use, because none has
// taken the slot, the next one is left later.

const (
	// pollEvery is how often the first in a queue has a turn without a slot known to be free, on
	// average: the interval is random, so that no instance is always the first to see a slot.
	pollEvery = 100 * time.Millisecond

	// shareAfter is the time with slots, of all requests together, after which a queue leaves one
	// to other instances. It doubles up to mostShareAfter while no other one takes it.
	shareAfter     = time.Second
	mostShareAfter = 4 * time.Second
)

// Queues are the requests that wait at the limits whose buckets have one name: in a queue for
// each key, or for room, of which only the number is known.
type Queues struct {
	count atomic.Int64 // requests that wait, or may have to

	mu    sync.Mutex
	byKey map[Key]*queue // those that are in use
	last  uint64         // number of the last waiter, or of the last client
	open  atomic.Int64   // how many queues there are

	byLength [][]*client // by the number of their requests without a turn; the last one is not empty

	slots map[slotsOf]int64 // that requests have; none of a rate
}

// Key identifies a queue.
type Key struct {
	Name, Key string         // of the bucket in stores
	Cost      int64          // of the requests, at a limit on a rate; they take slots of one another
	Class     adaptive.Class // of a limit that follows the load
	Load      adaptive.Options
}

// queue has the requests that wait for a slot of one key, and counts those that have a turn.
type queue struct {
	key     Key
	clients map[string]*client // that have requests without a turn, by fair_by
	ring    list.List          // of these, in the order of their next turns
	waiting int                // how many requests these are

	slots []time.Time // of a rate, in order: at least as many as requests wait without a turn

	served    string // the client whose request was served last
	anyServed bool   // whether there is one

	turns int         // how many requests have a turn
	polls int         // how many of these turns are polls
	freed int         // slots freed while none waited and some had turns, at most as many as these
	timer *time.Timer // of polls, or of the first slot of a rate

	used       time.Duration // for which slots were used since one was left to other instances
	shareAfter time.Duration // of this
	left       bool          // whether a slot is left, and it is unknown whether another instance takes it
}

// client has the requests of a client that wait in a queue without a turn.
type client struct {
	name    string
	queue   *queue
	waiters list.List     // in the order in which they came
	number  uint64        // of its next turn, in the order of the ring
	at      *list.Element // in the ring
	index   int           // in byLength
}

// Turn is whether a request in a queue may ask for a slot.
type Turn uint8

const (
	Waiting   Turn = iota // it may not yet
	Granted               // one slot is known to be free
	poll                  // none is, or several are: if it finds one, the next request polls too
	displaced             // it has lost its place in the queue to a request of another client
)

// New returns queues in which no request waits.
func New() *Queues {
	return &Queues{byKey: make(map[Key]*queue), slots: make(map[slotsOf]int64)}
}

// Len returns how many requests wait, or may have to.
func (s *Queues) Len() int64 { return s.count.Load() }

// State returns how many requests wait, or may have to, and of how many clients those in queues are.
func (s *Queues) State() telemetry.Waiting {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := telemetry.Waiting{Requests: int(s.count.Load()), Longest: max(len(s.byLength)-1, 0)}
	for _, clients := range s.byLength {
		state.Clients += len(clients)
	}
	return state
}

// Reserve counts a request that may have to wait, if no more than most do. It reports whether.
func (s *Queues) Reserve(most int64) bool {
	if s.count.Add(1) <= most {
		return true
	}
	s.count.Add(-1)
	return false
}

// Unreserve counts one request less that may have to wait.
func (s *Queues) Unreserve() { s.count.Add(-1) }

// HasWaiters reports whether any request waits in a queue.
func (s *Queues) HasWaiters(key Key) bool {
	if s.open.Load() == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	return l != nil && l.ring.Len() > 0
}

// Join adds w to its queue, and counts it, if no more than most wait, or if it displaces another
// request. It has a turn at once if t says so. Join reports whether w is added.
func (w *Waiter) Join(t Turn, most int64) bool {
	s := w.queues
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.Reserve(most) && !s.displaceFor(w, false) {
		return false
	}
	if w.turn = t; t != Waiting {
		w.ready <- struct{}{}
	}
	s.enter(w)
	return true
}

// JoinWithSlot adds w, which is counted already, to its queue, and the slot that it brings along.
func (w *Waiter) JoinWithSlot(slot time.Time) {
	s := w.queues
	s.mu.Lock()
	defer s.mu.Unlock()
	w.number = uint64(slot.UnixNano())
	l := s.enter(w)
	i, _ := slices.BinarySearchFunc(l.slots, slot, time.Time.Compare)
	if l.slots = slices.Insert(l.slots, i, slot); i == 0 {
		l.timer.Reset(time.Until(slot))
	}
}

// TakeOver adds w to its queue, and counts it, if that has a slot that a request has left, or if w
// displaces another request of the queue. It reports whether w is added.
func (w *Waiter) TakeOver(most int64) bool {
	s := w.queues
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[w.key]
	if l == nil {
		return false
	}
	if all := len(l.slots) == l.waiting; (all || !s.Reserve(most)) && !s.displaceFor(w, true) {
		return false
	}
	w.number = math.MaxUint64
	s.enter(w)
	return true
}

// enter adds w, which is counted already, to its queue.
func (s *Queues) enter(w *Waiter) *queue {
	l := s.byKey[w.key]
	if l == nil {
		l = &queue{key: w.key, clients: make(map[string]*client), shareAfter: shareAfter}
		l.timer = time.AfterFunc(nextPoll(), func() { s.poll(l) })
		s.byKey[w.key] = l
		s.open.Add(1)
	}
	s.last++
	if w.queue = l; w.number == 0 {
		w.number = s.last
	}
	if w.turn == Waiting {
		s.wait(w, s.last)
	} else {
		w.round = s.last
		s.beginTurn(w, w.turn)
	}
	return l
}

// displaceFor displaces the last request of the client that has most, in any queue or only in w's,
// if that has two more than w's client. It reports whether it did.
func (s *Queues) displaceFor(w *Waiter, only bool) bool {
	l, least := s.byKey[w.key], 2
	if l != nil && l.clients[w.client] != nil {
		least += l.clients[w.client].waiters.Len()
	}
	for n := len(s.byLength) - 1; n >= least; n-- {
		for _, c := range s.byLength[n] {
			if !only || c.queue == l {
				s.displace(c)
				return true
			}
		}
	}
	return false
}

// displace ends the wait of the last request of c.
func (s *Queues) displace(c *client) {
	w := c.waiters.Back().Value.(*Waiter)
	s.unwait(w)
	w.turn = displaced
	w.ready <- struct{}{}
}

// wait adds w to the requests of its client that wait without a turn. If these are the first,
// the client's next turn has the number round.
func (s *Queues) wait(w *Waiter, round uint64) {
	l := w.queue
	c := l.clients[w.client]
	switch {
	case c == nil:
		c = &client{name: w.client, queue: l, number: round}
		l.clients[w.client] = c
		c.at = insert(&l.ring, c, func(other *client) bool { return other.number < round })
	case round < c.number: // the turn of its request that has found no slot
		c.number = round
		l.ring.Remove(c.at)
		c.at = insert(&l.ring, c, func(other *client) bool { return other.number < round })
	}
	l.waiting++
	s.setLength(c, func() {
		w.at = insert(&c.waiters, w, func(other *Waiter) bool { return other.number < w.number })
	})
}

// unwait removes w from the requests that wait without a turn. Its client is removed with the
// last one.
func (s *Queues) unwait(w *Waiter) {
	l := w.queue
	l.waiting--
	c := l.clients[w.client]
	s.setLength(c, func() { c.waiters.Remove(w.at) })
	if w.at = nil; c.waiters.Len() == 0 {
		l.ring.Remove(c.at)
		delete(l.clients, c.name)
	}
}

// setLength keeps byLength right while change changes the number of c's requests by one.
func (s *Queues) setLength(c *client, change func()) {
	if n := c.waiters.Len(); n > 0 {
		same := s.byLength[n]
		last := same[len(same)-1]
		same[c.index], last.index = last, c.index
		same[len(same)-1] = nil
		s.byLength[n] = same[:len(same)-1]
	}
	change()
	if n := c.waiters.Len(); n > 0 {
		for len(s.byLength) <= n {
			s.byLength = append(s.byLength, nil)
		}
		c.index = len(s.byLength[n])
		s.byLength[n] = append(s.byLength[n], c)
	}
	for n := len(s.byLength); n > 0 && len(s.byLength[n-1]) == 0; n-- {
		s.byLength = s.byLength[:n-1]
	}
}

// insert inserts v into l behind those elements that are before it. Most are the last ones, or
// the first.
func insert[T any](l *list.List, v T, before func(T) bool) *list.Element {
	if front := l.Front(); front == nil || !before(front.Value.(T)) {
		return l.PushFront(v)
	}
	at := l.Back()
	for !before(at.Value.(T)) {
		at = at.Prev()
	}
	return l.InsertAfter(v, at)
}

// requeue ends the turn of a request that found no slot. It reports whether the request has
// another turn, as a slot was freed meanwhile.
func (s *Queues) requeue(w *Waiter) (again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := w.queue
	s.endTurn(w, false)
	if l.freed > 0 {
		l.freed--
		s.beginTurn(w, Granted)
		return true
	}
	w.turn = Waiting
	s.wait(w, w.round)
	return false
}

// remove removes w from its queue. A turn in which it was not served goes to the next request,
// and so does a poll in any case.
func (s *Queues) remove(w *Waiter, served bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := w.queue
	switch w.turn {
	case displaced: // it does not wait any more
	case Waiting:
		s.unwait(w)
	case Granted, poll:
		if s.endTurn(w, served); served {
			l.served, l.anyServed = w.client, true
		}
		if !served || w.turn == poll {
			s.wake(l, w.turn)
		}
	}
	if w.turn != displaced { // or another request is counted instead
		s.Unreserve()
	}
	if l.freed = min(l.freed, l.turns); l.turns == 0 && l.ring.Len() == 0 && s.byKey[w.key] == l {
		l.timer.Stop()
		delete(s.byKey, w.key)
		s.open.Add(-1)
	}
}

// Freed gives the next request in a queue a turn, after this many slots were freed. Where other instances
// share them, used is for how long a request had one.
func (s *Queues) Freed(key Key, slots int64, used time.Duration) {
	if s.open.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.byKey[key]
	switch {
	case l == nil:
	case l.leaves(slots, used):
		l.timer.Reset(pollEvery)
	case slots > 1:
		s.wake(l, poll)
	default:
		s.wake(l, Granted)
	}
}

// leaves reports whether a slot that was freed is left to other instances, after a request has used
// this many slots for this long.
func (l *queue) leaves(slots int64, used time.Duration) bool {
	l.used += time.Duration(min(float64(slots)*float64(used), float64(mostShareAfter))) // more makes no difference
	if used == 0 || l.used < l.shareAfter || l.ring.Len() == 0 {
		return false
	}
	l.used, l.left = 0, true
	return true
}

// poll gives the first request in a queue a turn, and does so again until the queue is empty. At
// a limit on a rate it does so for each slot that is due.
func (s *Queues) poll(l *queue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.byKey[l.key] != l:
	case l.key.Cost > 0:
		s.handOut(l)
	default:
		if l.polls == 0 && l.ring.Len() > 0 {
			s.wake(l, poll)
		}
		l.timer.Reset(nextPoll())
	}
}

// handOut gives requests turns for the slots of a rate that are due.
func (s *Queues) handOut(l *queue) {
	for now := time.Now(); len(l.slots) > 0; l.slots = l.slots[1:] {
		if wait := l.slots[0].Sub(now); wait > 0 {
			l.timer.Reset(wait)
			return
		}
		s.wake(l, Granted)
	}
}

// atEnd reports whether w has a turn although its wait is over: at a limit on a rate, the slot that
// it has brought along may be due now. Elsewhere a turn may find no slot, and is left to the next
// request.
func (s *Queues) atEnd(w *Waiter) bool {
	if w.key.Cost == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handOut(w.queue)
	return w.turn == Granted
}

// nextPoll returns the time until the next poll.
func nextPoll() time.Duration {
	return pollEvery/10 + rand.N(2*pollEvery-pollEvery/5) //nolint:gosec // not a secret
}

// wake gives the next request a turn, and its client's next turn is after the turns of all others, also
// of those that come before the next request is served. If none waits, a request that has a turn may
// have another one.
func (s *Queues) wake(l *queue, t Turn) {
	if l.ring.Len() == 0 {
		l.freed = min(l.freed+1, l.turns)
		return
	}
	if c := l.clients[l.served]; l.anyServed && c != nil {
		s.moveBack(c) // also behind those who have come since
	}
	c := s.next(l)
	w := c.waiters.Front().Value.(*Waiter)
	s.unwait(w)
	if w.round = c.number; c.waiters.Len() > 0 {
		s.moveBack(c)
	}
	s.beginTurn(w, t)
	w.ready <- struct{}{}
}

// moveBack has the next turn of c be after those of all others.
func (s *Queues) moveBack(c *client) {
	s.last++
	c.number = s.last
	c.queue.ring.MoveToBack(c.at)
}

// next returns the client that has the next turn: the first one in the ring that has less than
// half of the slots, or the first one if all have half.
func (s *Queues) next(l *queue) *client {
	first := l.ring.Front()
	for at := first; at != nil; at = at.Next() {
		c := at.Value.(*client)
		if own, all := l.key.slots(c.name); s.slots[own] == 0 || 2*s.slots[own] < s.slots[all] {
			return c
		}
	}
	return first.Value.(*client)
}

// beginTurn counts a turn of w. Until it ends, its client is taken to have a slot by it.
func (s *Queues) beginTurn(w *Waiter, t Turn) {
	w.turn = t
	if w.queue.turns++; t == poll {
		w.queue.polls++
	}
	s.countSlots(w.key, w.client, 1)
}

// endTurn counts a turn of w no more, in which it has found a slot or not.
func (s *Queues) endTurn(w *Waiter, found bool) {
	s.countSlots(w.key, w.client, -1)
	l := w.queue
	if l.turns--; w.turn != poll {
		return
	}
	l.polls--
	switch {
	case !l.left:
	case found: // the one that was left
		l.shareAfter = min(2*l.shareAfter, mostShareAfter)
	default:
		l.shareAfter = shareAfter
	}
	l.left = false
}
