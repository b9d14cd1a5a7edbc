package pace

import (
	"container/heap"
	"sync"
	"sync/atomic"
	"time"
)

// queue has the responses that wait for room in one bucket. First is the one whose piece would end first
// if all clients that wait were served at once, bit by bit (fair queueing). So clients get as many bytes,
// however many responses each has and however long their pieces are, and those of one client are first
// come, first served.
//
// Its lock is held while the first asks for room: that is a matter of this process. Locks of two queues
// are never held together.
type queue struct {
	responses int          // that are sent; guarded by the lock of the Speed
	length    atomic.Int64 // of waiting

	mu      sync.Mutex
	waiting waiters
	now     int64            // when the last piece that was let go began, in bytes: as many as each client would have been sent
	last    map[string]int64 // when the last piece of a client ends, unless that is long ago
	most    int              // how many of these there may be until old ones are dropped
	timer   *time.Timer      // until the first asks again
}

// leastClients is for how many clients a queue has room before it drops any.
const leastClients = 16

// waiter is a response in the queue of one of its buckets.
type waiter struct {
	response *Response
	client   string
	bytes    int64 // that wait
	end      int64 // when they end, by the queue's time
	entered  bool  // whether end is set, since the response was last let go
	index    int   // in the queue; -1 if it is not there
}

// turn is what a response is told when it leaves a queue: that its piece has been charged, or the index of
// the bucket that has no room for it.
type turn int

const charged turn = -1

// join adds w to the queue. wait is the time until there is room, if that is known, and otherwise 0.
// credit is how many bytes a client may be behind without losing its turn: it may have been writing.
func (q *queue) join(w *waiter, n, credit int64, wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.bytes = n; !w.entered {
		w.end, w.entered = q.begin(w.client, credit)+n, true
		q.note(w.client, w.end, credit)
	}
	heap.Push(&q.waiting, w)
	q.length.Add(1)
	switch {
	case w.index > 0: // the first asks for room
	case wait > 0:
		q.askIn(wait)
	default:
		q.serve()
	}
}

// begin returns when the next piece of a client begins.
func (q *queue) begin(client string, credit int64) int64 {
	if last, ok := q.last[client]; ok {
		return max(last, q.now-credit)
	}
	return q.now
}

// count notes n bytes of a client that were charged while it waited elsewhere.
func (q *queue) count(w *waiter, n, credit int64) {
	if q.length.Load() == 0 {
		w.entered = false
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if !w.entered {
		q.note(w.client, q.begin(w.client, credit)+n, credit)
	}
	w.entered = false
}

// forget forgets w, which has left: its client has its turn back.
func (q *queue) forget(w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if last, ok := q.last[w.client]; ok && w.entered {
		q.last[w.client] = last - w.bytes
	}
	w.entered = false
}

// note notes when the last piece of a client ends, and drops what makes no difference any more.
func (q *queue) note(client string, end, credit int64) {
	if q.last[client] = end; len(q.last) <= q.most {
		return
	}
	for other, at := range q.last {
		if at <= q.now-credit {
			delete(q.last, other)
		}
	}
	q.most = 2*len(q.last) + leastClients
}

// remove ends the wait of w. It reports whether w still waited.
func (q *queue) remove(w *waiter) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w.index < 0 {
		return false
	}
	first := w.index == 0
	if q.take(w); first {
		q.serve()
	}
	return true
}

// take takes w out of the queue.
func (q *queue) take(w *waiter) {
	heap.Remove(&q.waiting, w.index)
	q.length.Add(-1)
}

// askIn has the first ask for room after a while.
func (q *queue) askIn(wait time.Duration) {
	if q.timer == nil {
		q.timer = time.AfterFunc(wait, func() {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.serve()
		})
		return
	}
	q.timer.Reset(wait)
}

// serve lets go what there is room for, in order, until the first has to wait.
func (q *queue) serve() {
	for len(q.waiting) > 0 {
		w := q.waiting[0]
		full, wait := w.response.charge(w.bytes)
		if int(full) == w.response.in {
			q.askIn(wait)
			return
		}
		if q.take(w); full == charged {
			q.now = max(q.now, w.end-w.bytes)
		}
		w.response.ready <- full
	}
	if q.timer != nil {
		q.timer.Stop()
	}
	clear(q.last)
	q.most = leastClients
}

// waiters is a heap of what waits.
type waiters []*waiter

// Len implements heap.Interface.
func (h waiters) Len() int { return len(h) }

// Less implements heap.Interface.
func (h waiters) Less(i, j int) bool { return h[i].end < h[j].end }

// Swap implements heap.Interface.
func (h waiters) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *waiters) Push(x any) {
	w := x.(*waiter)
	w.index = len(*h)
	*h = append(*h, w)
}

// Pop implements heap.Interface.
func (h *waiters) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	w.index = -1
	return w
}
