// Package wait is how requests wait: until they have a slot, or until the slot that they were charged
// for is due. It knows nothing of limits.
package wait

import (
	"container/list"
	"net/http"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
)

// lookEvery is how often a request that waits looks whether its client is still there.
const lookEvery = 250 * time.Millisecond

// Waiter is a request that waits.
type Waiter struct {
	Left bool // whether its client has left

	request *http.Request
	queues  *Queues
	key     Key
	client  string // by fair_by
	start   time.Time
	end     time.Time    // when the wait is over
	over    *time.Timer  // until then
	look    *time.Ticker // for whether the client is still there
	ready   chan struct{}
	inTurn  bool

	// Guarded by the queues' lock:
	queue  *queue
	number uint64 // in the order in which they came or, at a limit on a rate, in which they were charged
	turn   Turn
	round  uint64        // the number of its client's turn, if it has that
	at     *list.Element // if it waits
}

// NewWaiter returns the request of a client as one that waits until end at most. It is in no queue yet.
func (s *Queues) NewWaiter(r *http.Request, key Key, client string, end time.Time) *Waiter {
	return &Waiter{request: r, queues: s, key: key, client: client, start: time.Now(), end: end, ready: make(chan struct{}, 1)}
}

// Next waits until the request may ask for a slot, and ends the turn before, in which it found none.
// It is false if the wait is over: by max_delay, because a request of another client has displaced
// this one, or because the client has left.
func (w *Waiter) Next() bool {
	again := w.inTurn && w.queues.requeue(w)
	if w.inTurn = true; again {
		return !w.clientLeft()
	}
	if w.over == nil {
		w.over, w.look = time.NewTimer(time.Until(w.end)), time.NewTicker(lookEvery)
	}
	for {
		select {
		case <-w.ready:
			return w.turn != displaced && !w.clientLeft()
		case <-w.over.C:
			return w.queues.atEnd(w) && !w.clientLeft()
		case <-w.look.C:
		case <-w.request.Context().Done():
		}
		if w.clientLeft() {
			return false
		}
	}
}

// clientLeft finds out whether the client has left.
func (w *Waiter) clientLeft() bool {
	w.Left = socket.ClientLeft(w.request)
	return w.Left
}

// Leave ends the wait. served says whether the request has found a slot. It returns how long it has
// waited, and whether another request has displaced it.
func (w *Waiter) Leave(served bool) (waited time.Duration, isDisplaced bool) {
	if w.over != nil {
		w.over.Stop()
		w.look.Stop()
	}
	w.queues.remove(w, served)
	return time.Since(w.start), w.turn == displaced
}
