package redisscript

import (
	"sync"
	"time"
)

// Event reports a change in the state of a server, or an error.
type Event struct {
	// The server's address.
	Server string

	// What happened.
	Kind EventKind

	// The reason as one word, such as "refused", "timeout" or "oom". Empty with
	// EventRecovered and EventReplaced.
	Reason string

	// The reason in full. Nil with EventRecovered and EventReplaced.
	Err error

	// With EventRecovered, EventReplaced and EventReason, how long the server has been
	// down.
	Downtime time.Duration

	// The number of events that were dropped before this one because too many were
	// waiting to be reported.
	Dropped int
}

// EventKind is a kind of event.
type EventKind uint8

const (
	// EventDown: the server has failed several times in a row. Calls to it fail at
	// once, except for occasional probes.
	EventDown EventKind = iota

	// EventRecovered: the server has answered a probe and is used again.
	EventRecovered

	// EventError: calls failed, but not enough of them in a row for EventDown.
	// Reported at most once a minute for each reason.
	EventError

	// EventReplaced: a cluster server that was down no longer has any slots, as
	// after a failover. Other servers have its keys.
	EventReplaced

	// EventReason: the server is still down, for another reason than was last reported,
	// which has lasted for several failures. Reported at most once a minute.
	EventReason
)

// maxQueuedEvents is the maximum number of events waiting to be reported. Beyond
// that the oldest are dropped, because the latest show the current state.
const maxQueuedEvents = 64

// eventQueue reports events in order and asynchronously: the report may go to a
// log that has stalled, and those who add events hold locks that calls need.
type eventQueue struct {
	report func(Event)

	mu      sync.Mutex
	queue   []Event
	dropped int  // since the last report
	running bool // whether run is running
	closed  bool
}

// newEventQueue returns a queue that passes events to report, which may be nil.
func newEventQueue(report func(Event)) *eventQueue {
	return &eventQueue{report: report, closed: report == nil}
}

// add queues an event. It does not block.
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

// run reports events until the queue is empty.
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

// close drops the queued events and all that follow.
func (q *eventQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed, q.queue, q.dropped = true, nil, 0
}
