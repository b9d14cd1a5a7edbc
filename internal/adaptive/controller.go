// Package adaptive limits how many requests are in progress at an upstream, by how fast it
// answers. It knows nothing of HTTP.
package adaptive

import (
	"math"
	"sync"
	"time"
)

// Options say what a controller keeps to.
type Options struct {
	Latency  time.Duration // a mean response time that is still good
	Min, Max int           // of the limit
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

// shares are the parts of the limit that classes may fill while nothing is turned away.
var shares = [Classes]float64{1, 0.9, 0.75}

const (
	initial = 20 // limit of a new controller, and what it allows at least while all is well

	// A window ends after shortWindow if it has manyAnswers, after longWindow if it has
	// fewAnswers, or so many slow failures besides, and after lastWindow in any case; the last
	// two are at least twice the latency. In a shorter window a pause of the upstream, such as one
	// of its garbage collector, would look like an overload.
	shortWindow = time.Second
	longWindow  = 2 * time.Second
	lastWindow  = 10 * time.Second
	manyAnswers = 30
	fewAnswers  = 10

	fade    = 30 * time.Second // in which the recent peak falls to 1/e
	useless = 10 * time.Second // that all windows are slow at the least limit, after which that is reported
)

// Controller limits the requests in progress at one upstream, so that the mean time until
// they are answered stays below a latency that is good enough. By Little's law, that mean is
// the mean number in progress divided by the answers a second. Both are counted, so a cut is
// seen at once and not one latency later, and requests that never end count too.
//
// The latency is not learned: a controller can't tell the requests of others, who share the
// upstream, from an upstream that is slow by itself, and would follow them.
//
// All methods may be called by several goroutines at the same time. Times must not run
// backwards by more than goroutines overtake each other.
type Controller struct {
	options Options

	mu         sync.Mutex
	limit      float64
	inProgress int
	share      [Classes]float64
	peak       float64 // in progress of late
	shed       [Classes]uint64
	mean       time.Duration // of the last window
	verdict    Verdict       // on it

	atMin   time.Duration // so far
	slowFor time.Duration // at the least limit, in windows one after the other
	told    bool          // of that

	// The present window.
	began, last time.Time
	area        time.Duration // sum of the times for which requests were in progress
	answers     int
	slow        int // failures that took longer than the latency
	top         int
	turnedAway  [Classes]int
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
	return &Controller{options: o, limit: min(max(initial, float64(o.Min)), float64(o.Max)), share: shares, began: now, last: now}
}

// Admit reports whether there is room for a request of a class, which is in progress from
// then on until Finish is called for it. In a dry run it is so in any case.
func (c *Controller) Admit(class Class, dryRun bool, now time.Time) (room bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance(now)
	if room = c.inProgress < int(math.Round(c.limit*c.share[class])); !room {
		c.turnedAway[class]++
	}
	if room || dryRun {
		c.inProgress++
		c.top = max(c.top, c.inProgress)
	}
	return room
}

// Queue notes that a request of a class does not ask yet, since others wait for room.
func (c *Controller) Queue(class Class, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance(now)
	c.turnedAway[class]++
}

// Shed counts a request that is turned away, since Admit has found no room for it as often as
// it has asked.
func (c *Controller) Shed(class Class) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shed[class]++
}

// Finish notes that a request is in progress no more that was admitted at some time, and
// whether the upstream has answered it. A failure that is fast is no answer, and neither is
// its time one of waiting for one. It reports, once, that all windows at the least limit have
// been slow for so long that the latency may be less than the upstream can keep, however few
// it gets.
func (c *Controller) Finish(admitted, now time.Time, answered bool) (isUseless bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance(now)
	c.inProgress--
	switch {
	case answered:
		c.answers++
	case now.Sub(admitted) < c.options.Latency:
		if admitted.Before(c.began) {
			admitted = c.began // what was before is in an earlier window
		}
		c.area = max(0, c.area-now.Sub(admitted))
	default:
		c.slow++
	}
	isUseless = c.slowFor >= useless && !c.told
	c.told = c.told || isUseless
	return isUseless
}

// advance adds the time until now to the window, and ends that if it is due.
func (c *Controller) advance(now time.Time) {
	if passed := now.Sub(c.last); passed > 0 {
		c.area += time.Duration(c.inProgress) * passed
		c.last = now
	}
	switch length := c.last.Sub(c.began); {
	case length < shortWindow:
		return
	case c.answers >= manyAnswers, length >= max(lastWindow, 2*c.options.Latency),
		c.answers+c.slow >= fewAnswers && length >= max(longWindow, 2*c.options.Latency):
		c.end(length)
		c.began, c.area, c.answers, c.slow, c.top = c.last, 0, 0, 0, c.inProgress
		c.turnedAway = [Classes]int{}
	}
}

// end judges the window and sets the limit for the next one.
func (c *Controller) end(length time.Duration) {
	least, most := float64(c.options.Min), float64(c.options.Max)
	c.peak = max(float64(c.top), c.peak*math.Exp(-length.Seconds()/fade.Seconds()))
	c.mean = c.area / time.Duration(max(c.answers, 1))
	good := float64(c.answers)/length.Seconds()*c.options.Latency.Seconds() + 1 // in progress at that latency
	switch room := max(initial, 2*c.peak); {
	case c.mean > c.options.Latency && c.top > c.options.Min: // a few that hang are no overload
		c.verdict, c.limit = Slow, min(c.limit, max(good, c.limit/4))
	case c.turnedAway != [Classes]int{}:
		c.verdict, c.limit = Filling, min(max(good, c.limit), 2*c.limit)
	case room > c.limit:
		c.verdict, c.limit = Idle, room
	default:
		c.verdict, c.limit = Idle, c.limit+(room-c.limit)/10
	}
	if c.mean > c.options.Latency && c.verdict == Filling { // also with no more than the least
		c.verdict = Slow
	}
	c.limit = min(max(c.limit, least), most)

	above := 0
	for class := 1; class < Classes; class++ {
		if above += c.turnedAway[class-1]; above > 0 {
			c.share[class] *= 0.7
		} else {
			c.share[class] = min(shares[class], c.share[class]+0.03)
		}
	}

	overloaded := c.verdict == Slow || c.turnedAway != [Classes]int{}
	if int(c.limit) == c.options.Min && overloaded {
		c.atMin += length
	}
	if int(c.limit) == c.options.Min && overloaded && c.mean > c.options.Latency {
		c.slowFor += length
	} else {
		c.slowFor, c.told = 0, false
	}
}

// State is what a controller does, or what several do together, to be shown.
type State struct {
	Keys       int // how many have a controller of their own
	Limit      int
	InProgress int
	Mean       time.Duration // response time in the last window; of several the longest
	Verdict    Verdict       // on that window
	Shed       [Classes]uint64
	AtMin      time.Duration // for how long the limit has been the least one while there was more to do, so far; of several the sum
}

// State returns what c does at now.
func (c *Controller) State(now time.Time) State {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advance(now)
	return State{1, int(c.limit), c.inProgress, c.mean, c.verdict, c.shed, c.atMin}
}
