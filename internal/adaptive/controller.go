// Package adaptive limits how many requests are in progress at an upstream, by how fast it
// answers. It knows nothing of HTTP.
package adaptive

import (
	"sync"
	"time"
)

// Options say what a controller keeps to.
type Options struct {
	Latency  time.Duration // a mean response time that is still good
	Min, Max int           // of the limit
	High     bool          // whether any request is more important than normal ones, for which room is kept
}

// Class is how important a request is.
type Class uint8

// The classes. While any request of one is turned away, those below it get less room.
const (
	High Class = iota
	Normal
	Low
	Classes int = iota
)

const (
	// counted is for how many latencies a request counts. Little is lost by it: what hangs for longer
	// is bounded by the answers a second times this part of a latency.
	counted = 2

	// beyondLimit is the part of the limit up to which a route with none in progress gets a place.
	// Others, which ask more often, would have all that become free.
	beyondLimit = 1.25
)

// Counted returns for how long a request takes room, at most: starts are kept by spans.
func (o *Options) Counted() time.Duration { return (spans + 1) * (counted * o.Latency / spans) }

// Controller limits the requests in progress at one upstream, so that the mean time until
// they are answered stays below a latency that is good enough.
//
// The latency is not learned: a controller can't tell the requests of others, who share the
// upstream, from an upstream that is slow by itself, and would follow them.
//
// All methods may be called by several goroutines at the same time. Times must not run
// backwards by more than goroutines overtake each other.
type Controller struct {
	options Options
	epoch   time.Time

	mu     sync.Mutex
	all    meter
	routes [routes]*route // nil as long as there was no request
	slots  Slot           // the first and the last of a ring of all, in the order in which they were acquired
	held   int            // how many these are
	waits  int            // how many of these wait for their client
	shed   [Classes]uint64

	atMin   time.Duration // so far
	slowFor time.Duration // at the least limit, in windows one after the other
	told    bool          // of that
}

// Slot is what a request has while it is in progress.
type Slot struct {
	controller *Controller
	route      *route
	prev, next *Slot
	acquired   time.Duration
	started    time.Duration // later than that by the time for which it has waited for its client
	waiting    bool          // for its client, since stopped
	counts     [2]bool       // whether it has counted until it stopped, among all and in its route
	stopped    time.Duration
}

// Verdict is what a controller made of a window.
type Verdict uint8

// The verdicts.
const (
	Idle    Verdict = iota // nothing was turned away, and nothing was slow
	Slow                   // the mean was above the latency, so the limit went down
	Filling                // requests were turned away although the mean was good, so the limit went up
)

// String returns the name of a class.
func (c Class) String() string { return [...]string{"high", "normal", "low"}[c] }

// String returns the verdict as operators see it.
func (v Verdict) String() string { return [...]string{"idle", "slow", "filling"}[v] }

// New returns a controller.
func New(o Options, now time.Time) *Controller {
	c := &Controller{options: o, epoch: now}
	c.all.init(&c.options, counted, 0)
	c.slots.prev, c.slots.next = &c.slots, &c.slots
	return c
}

// Request is what a controller is told of a request.
type Request struct {
	Class  Class
	Route  Route
	DryRun bool
}

// Acquire gives a request a slot if there is room, and reports whether there is. In a
// dry run it gets one in any case. The slot must be released.
func (c *Controller) Acquire(s *Slot, r *Request, now time.Time) (room bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.advance(now)
	route := c.routeFor(r.Route, at)
	route.advance(at, c.all.rate)
	switch {
	case !c.all.room(r.Class, 1) && (route.present > 0 || !c.all.room(r.Class, beyondLimit)):
		c.all.turnedAway[r.Class]++
	case route.limited && !route.room(r.Class, 1):
		route.turnedAway[r.Class]++
	default:
		room = true
	}
	if room || r.DryRun {
		c.all.start(at)
		route.start(at)
		route.present++
		*s = Slot{controller: c, route: route, prev: c.slots.prev, next: &c.slots, acquired: at, started: at}
		s.prev.next, c.slots.prev = s, s
		c.held++
	}
	return room
}

// Queue notes that a request of a class does not ask yet, since others wait for room.
func (c *Controller) Queue(class Class, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance(now)
	c.all.turnedAway[class]++
}

// Shed counts a request that is turned away, since Acquire has found no room for it as often as
// it has asked.
func (c *Controller) Shed(class Class) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shed[class]++
}

// Wait notes that the upstream waits for the request's client: until Resume the request takes
// no room, and the time is not the upstream's. It reports whether there is more room than before.
func (s *Slot) Wait(now time.Time) bool {
	c := s.controller
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.next == nil || s.waiting {
		return false
	}
	s.waiting, s.stopped = true, c.advance(now)
	s.stop()
	c.waits++
	return s.counts[0]
}

// Resume ends Wait. It returns for how long the request then takes room again, at most.
func (s *Slot) Resume(now time.Time) time.Duration {
	c := s.controller
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.next == nil || !s.waiting {
		return 0
	}
	at := c.advance(now)
	s.waiting, s.started = false, s.started+max(0, at-s.stopped)
	c.waits--
	s.route.advance(at, c.all.rate)
	s.route.present++
	if s.counts[0] {
		c.all.start(s.started)
	}
	if s.counts[1] {
		s.route.start(s.started)
	}
	if !s.counts[0] {
		return 0
	}
	return c.options.Counted() - (at - s.started)
}

// stop has the slot take no room any more.
func (s *Slot) stop() {
	c := s.controller
	s.route.advance(c.all.last, c.all.rate)
	s.route.present--
	s.counts = [2]bool{c.all.stop(s.started), s.route.stop(s.started)}
}

// Release gives the slot back, and tells whether the upstream has answered. A failure that is
// fast is no answer, and neither is its time one of waiting for one. It reports, once, that all
// windows at the least limit have been slow for so long that the latency may be less than the
// upstream can keep, however few it gets.
func (s *Slot) Release(now time.Time, answered bool) (isUseless bool) {
	c := s.controller
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.advance(now)
	if s.waiting {
		c.waits--
		s.route.advance(at, c.all.rate)
		had := s.stopped - s.started
		s.started = at - had
		if answered { // without the end of the request, so it was at work meanwhile, or who never ends requests would not count
			c.all.area += max(0, min(at-s.acquired, counted*c.options.Latency)-had)
			s.route.area += max(0, min(at-s.acquired, routeCounted*c.options.Latency)-had)
		}
	} else {
		s.stop()
	}
	c.all.finish(s.started, s.counts[0], answered)
	s.route.finish(s.started, s.counts[1], answered)
	s.prev.next, s.next.prev = s.next, s.prev
	s.prev, s.next = nil, nil
	c.held--
	isUseless = c.slowFor >= useless && !c.told
	c.told = c.told || isUseless
	return isUseless
}

// State returns what the slot's controller does at now.
func (s *Slot) State(now time.Time) State { return s.controller.State(now) }

// advance has the time be now, and ends the window if that is due. It returns the time since
// the epoch.
func (c *Controller) advance(now time.Time) time.Duration {
	at := max(0, now.Sub(c.epoch))
	if length := c.all.advance(at); length > 0 {
		c.end(length)
	}
	return at
}

// end ends the window, which was so long.
func (c *Controller) end(length time.Duration) {
	overloaded := c.all.filling()
	c.all.end(length)
	slow := c.all.verdict == Slow
	if atMin := int(c.all.limit) == c.options.Min; atMin && (slow || overloaded) {
		c.atMin += length
		if slow {
			c.slowFor += length
			return
		}
	}
	c.slowFor, c.told = 0, false
}

// State is what a controller does, or what several do together, to be shown.
type State struct {
	Keys       int // how many have a controller of their own
	Limit      int
	InProgress int           // that count
	Overdue    int           // that count no more
	Waiting    int           // for their clients
	Oldest     time.Duration // for how long any of these is in progress
	Routes     []string      // those that are limited
	Mean       time.Duration // response time in the last window; of several the longest; 0 if there were no answers
	Verdict    Verdict       // on that window
	Shed       [Classes]uint64
	AtMin      time.Duration // for how long the limit has been the least one while there was more to do, so far; of several the sum
}

// State returns what c does at now.
func (c *Controller) State(now time.Time) State {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.advance(now)
	s := State{
		Keys: 1, Limit: int(c.all.limit), InProgress: c.all.inProgress, Overdue: c.held - c.waits - c.all.inProgress, Waiting: c.waits,
		Mean: c.all.mean, Verdict: c.all.verdict, Shed: c.shed, AtMin: c.atMin,
	}
	for _, r := range c.routes {
		if r == nil {
			continue
		}
		if r.advance(at, c.all.rate); r.limited {
			s.Routes = append(s.Routes, r.name)
		}
	}
	if first := c.slots.next; first != &c.slots {
		s.Oldest = at - first.acquired
	}
	return s
}
