package limiter

import "sync"

// mostWaiting is how many events may wait to be reported. Of more the oldest are
// dropped: the latest tell how things are.
const mostWaiting = 64

// reporter tells events to who wants to know, in their order, while nobody waits
// for it: what is told may be a log that takes nothing any more, and those who
// have something to report hold locks that requests need.
type reporter struct {
	tell func(Event)

	mu      sync.Mutex
	waiting []Event
	dropped int  // before the first that waits
	telling bool // whether there is a goroutine that tells
	closed  bool
}

// newReporter returns a reporter to tell, which may be nil.
func newReporter(tell func(Event)) *reporter {
	return &reporter{tell: tell, closed: tell == nil}
}

// report has an event told. It does not wait.
func (r *reporter) report(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	if len(r.waiting) == mostWaiting {
		r.waiting = r.waiting[1:]
		r.dropped++
	}
	r.waiting = append(r.waiting, e)
	if !r.telling {
		r.telling = true
		go r.run()
	}
}

// run tells all that wait.
func (r *reporter) run() {
	for {
		e, ok := r.next()
		if !ok {
			return
		}
		r.tell(e)
	}
}

// next returns the next event to tell, or false if none waits.
func (r *reporter) next() (e Event, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 {
		r.waiting, r.telling = nil, false
		return e, false
	}
	e, r.waiting = r.waiting[0], r.waiting[1:]
	e.Dropped, r.dropped = r.dropped, 0
	return e, true
}

// close drops what waits, and all that comes.
func (r *reporter) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed, r.waiting, r.dropped = true, nil, 0
}
