package redisscript

import (
	"sync"
	"time"
)

// Event is something about a server that an operator should know.
type Event struct {
	// The server's address.
	Server string

	// What happened.
	Kind EventKind

	// Why, in a word, such as "refused", "timeout" or "oom". Empty with
	// EventRecovered and EventReplaced.
	Reason string

	// Why, in full. Nil with EventRecovered and EventReplaced.
	Err error

	// With EventRecovered and EventReplaced, how long the server was down.
	Downtime time.Duration

	// How many events before this one were dropped, since too many waited to be
	// reported.
	Dropped int
}

// EventKind is a kind of event.
type EventKind uint8

const (
	// The server has failed several times in a row. Calls to it fail at once,
	// except for a probe now and then.
	EventDown EventKind = iota

	// The server has answered a probe and is used again.
	EventRecovered

	// A single call failed, or several apart from each other. Reported at most once
	// a minute for each reason.
	EventError

	// A server of a cluster that was down has no slots any more, as after a
	// failover. Other servers have its keys.
	EventReplaced
)

// maxQueuedEvents is how many events may wait to be reported. Of more the oldest
// are dropped: the latest tell how things are.
const maxQueuedEvents = 64

// eventQueue reports events in order, while nobody waits for it: the report may go
// to a log that has stopped taking lines, and those who have something to report
// hold locks that calls need.
type eventQueue struct {
	report func(Event)

	mu      sync.Mutex
	queue   []Event
	dropped int  // before the first in the queue
	running bool // whether there is a goroutine that reports
	closed  bool
}

// newEventQueue returns a queue of events to report, which may be nil.
func newEventQueue(report func(Event)) *eventQueue {
	return &eventQueue{report: report, closed: report == nil}
}

// add has an event reported. It does not wait.
func (q *eventQueue) add(e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	if len(q.queue) == maxQueuedEvents {
		q.queue = q.queue[1:]
		q.dropped++
	}
	q.queue = append(q.queue, e)
	if !q.running {
		q.running = true
		go q.run()
	}
}

// run reports all events in the queue.
func (q *eventQueue) run() {
	for {
		e, ok := q.next()
		if !ok {
			return
		}
		q.report(e)
	}
}

// next returns the next event to report, or false if there is none.
func (q *eventQueue) next() (e Event, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		q.queue, q.running = nil, false
		return e, false
	}
	e, q.queue = q.queue[0], q.queue[1:]
	e.Dropped, q.dropped = q.dropped, 0
	return e, true
}

// close drops what is in the queue, and all that comes.
func (q *eventQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed, q.queue, q.dropped = true, nil, 0
}
