package adaptive

import (
	"hash/maphash"
	"math"
	"strings"
	"time"
)

// Cheap answers of one route would hide another one that drowns: the mean of all stays good. So
// each route, which is a method and the first segment of a path, is measured alone too. What it may
// have in progress is limited only while there is evidence that it is overloaded, or what is slow
// by nature would be cut: it has to be above the latency, and far above its own least recently.
const (
	routes        = 64  // routes of the same number by a hash are one
	routeCounted  = 8   // latencies for which a request of a route counts
	risen         = 4   // times the least mean of a route, by requests in progress
	risenTook     = 1.5 // the same, by those that have ended
	risenFailing  = 3   // as risen, if most of its requests fail slowly
	failing       = 5   // slow failures are enough for that, if there are as many answers at most
	leastGrows    = 10 * time.Minute
	calm          = 30 * time.Second // without turning away, after which a route is not limited
	longestShown  = 64               // bytes of the name of a route
	routesPerMean = 10               // answers
)

// Route is a kind of request by which those are told apart that need different parts of an upstream.
type Route struct{ Method, Segment string }

// route measures the requests of one route.
type route struct {
	meter
	name    string // of the first one
	limited bool
	quiet   time.Duration // for which none was turned away

	// Its mean, in which requests count until they end. By requests in progress it shows at once that
	// they take longer, but also seems to rise if many begin or end together; by those that have ended
	// it is late, and at first too low.
	present  int // in progress
	lasted   time.Duration
	presence time.Duration // sum of the times for which requests were in progress, since the last mean
	took     time.Duration // sum of the times of those that have ended, since then
	answered int           // since then
	lost     int           // slow failures, in the window
	least    float64       // recent mean, in seconds
	leastAt  time.Duration
	risen    bool // whether the last mean was far above the least before
}

var seed = maphash.MakeSeed()

// number returns the number of a route.
func (r Route) number() uint64 {
	return (maphash.String(seed, r.Method) ^ 3*maphash.String(seed, r.Segment)) % routes
}

// routeFor returns the route of a request, and makes it if there is none.
func (c *Controller) routeFor(r Route, at time.Duration) *route {
	i := r.number()
	if c.routes[i] == nil {
		name := r.Method + " /" + r.Segment
		c.routes[i] = &route{name: strings.Clone(name[:min(len(name), longestShown)]), lasted: at}
		c.routes[i].init(&c.options, routeCounted, at)
	}
	return c.routes[i]
}

// advance has the time be now. rate is the rate of all answers.
func (r *route) advance(now time.Duration, rate float64) {
	if passed := now - r.lasted; passed > 0 {
		r.presence += time.Duration(r.present) * passed
		r.lasted = now
	}
	if length := r.meter.advance(now); length > 0 {
		r.judge(length, rate)
		r.end(length)
		r.lost = 0
	}
}

// finish notes the outcome of a request that has stopped, having counted until then or not.
func (r *route) finish(started time.Duration, counted, answered bool) {
	r.meter.finish(started, counted, answered)
	took := r.last - started
	if answered || took >= r.options.Latency {
		r.took += took
	}
	if !answered && took >= r.options.Latency {
		r.lost++
	}
}

// judge decides at the end of a window whether the route is limited.
func (r *route) judge(length time.Duration, rate float64) {
	r.answered += r.answers
	long := r.least > 0 && r.presence.Seconds()/max(10, float64(r.answered)) > risenFailing*r.least
	if r.answered >= routesPerMean {
		present, took := r.presence.Seconds()/float64(r.answered), r.took.Seconds()/float64(r.answered)
		mean := max(present, took)
		r.risen = r.least > 0 && present > risen*r.least && took > risenTook*r.least
		r.presence, r.took, r.answered = 0, 0, 0
		r.least *= math.Exp((r.last - r.leastAt).Seconds() / leastGrows.Seconds())
		if r.least == 0 || mean < r.least {
			r.least = mean
		}
		r.leastAt = r.last
	}
	if r.limited {
		if r.quiet += length; r.filling() {
			r.quiet = 0
		}
		r.limited = r.quiet < calm
		return
	}
	r.limit = float64(max(r.top, r.options.Min)) // from which it begins
	slow := r.area/time.Duration(max(r.answers, 1)) > r.options.Latency && r.top > r.options.Min
	part := float64(r.answers)/length.Seconds() <= rate/2 // or there is nothing that it hides behind
	lost := r.lost >= failing && r.lost >= r.answers && long
	r.limited, r.quiet = slow && part && (r.risen || lost), 0
}
