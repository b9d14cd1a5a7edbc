package limiter

import (
	"fmt"
	"time"
)

// Algorithm says how a [Limit] counts units.
type Algorithm uint8

const (
	Leaky   Algorithm = iota // a leaky bucket, see Limit; also fixed windows
	Sliding                  // two counters, see SlidingWindow
	Log                      // the time of each admission, see SlidingLog
	WarmUp                   // rates that grow after idleness, see WarmingUp
)

// algorithms has each Algorithm: its name, the letter that names of its keys in Redis
// end with, unless it is the first, whether it keeps a log of admissions, and how it
// counts. To add one, write the two files that count, in Go and in Lua, and a line here.
var algorithms = [...]struct {
	name   string
	letter byte
	logs   bool
	counting
}{
	Leaky:   {"leaky", 0, false, leaky{}},
	Sliding: {"sliding", 's', false, sliding{}},
	Log:     {"log", 'l', true, logSummary{}},
	WarmUp:  {"warm-up", 'w', false, warm{}},
}

// String returns the algorithm's name.
func (a Algorithm) String() string {
	if int(a) < len(algorithms) {
		return algorithms[a].name
	}
	return fmt.Sprintf("Algorithm(%d)", uint8(a))
}

// counting is how an Algorithm counts units. It is pure: it knows of a limit, a level
// and the time, and nothing of stores, servers, or units that are in flight or held. A
// level at which a bucket runs empty, s.clear, has passed is that of an empty bucket.
// The Lua file of the same name does the same arithmetic.
//
// All times are in µs. now is on the store's clock, and unix is what the clock shows
// then, since the Unix epoch.
type counting interface {
	// validate returns an error that names the first number of l that is out of range.
	// What is said of Size, DripSize and DripInterval of all limits holds.
	validate(l *Limit) error

	// drainTime returns the longest time until a full bucket is as if it had never been
	// used, and dripTime how long one that has just dripped takes to lose some units.
	drainTime(l *Limit) time.Duration
	dripTime(l *Limit, units int64) time.Duration

	// doubles returns the numbers that tell how l's buckets drip, as the script gets
	// them. slackEnd returns a number that is larger than any slack of theirs.
	doubles(l *Limit) (rate, drip, phase float64)
	slackEnd(l *Limit) int64

	// fits reports whether there is room for cost at level s, beside some other units.
	fits(l *Limit, s state, now, cost, beside int64) bool

	// wait returns how long until there is room for cost, or 0 if there is now. The
	// cost must not exceed the size.
	wait(l *Limit, s state, now, cost int64) int64

	// remaining returns the number of units that there is room for, and units the
	// number that there are.
	remaining(l *Limit, s state, now int64) int64
	units(l *Limit, s state, now int64) int64

	// started returns the level to which a charge at now can be added, and add that
	// level with cost more units.
	started(l *Limit, s state, now, unix int64) state
	add(l *Limit, s state, cost int64) state

	// atLeast returns level s, its clear time relative to now, plus some units of which
	// it may have some already, but not beyond a bucket of the given size that is full.
	atLeast(l *Limit, s state, units, size, unix int64) state

	// count returns the level with a denied request, see Limit.CountDenied, for which
	// there was no room beside some other units.
	count(l *Limit, s state, now, unix, cost, beside int64) state

	// higher returns a level that is at least as high as both a and b, from now on.
	// Both were reported with a delay of at most late, unless one is this process's own.
	higher(l *Limit, a, b state, late time.Duration, own bool) state

	// arriving returns level s, its clear time relative to now, as a server is told of
	// it that hears of it up to late afterwards. drained says that all may be gone by
	// then, so that telling it would only delay what the server knows.
	arriving(l *Limit, s state, late int64) (arrived state, drained bool)

	// ending returns level s, by which something is about to be decided, as full if its
	// time may have ended on a server whose reports are up to late late. What is
	// admitted then is of this time or the next, and neither side could tell.
	ending(l *Limit, s state, now, late int64) state

	// tell returns the remaining units after a request of some cost, and two numbers
	// that again needs to tell the wait of the same request if nothing was added since.
	// clear is then relative to now.
	tell(l *Limit, s state, now, cost int64) (remaining, counts, one int64)
	again(l *Limit, clear, remaining, counts, one, cost int64) int64
}

// by returns how l counts. l is valid.
func (l *Limit) by() counting { return algorithms[l.Algorithm].counting }

// logs reports whether l's buckets keep a log of admissions.
func (l *Limit) logs() bool { return algorithms[l.Algorithm].logs }

// What counting says, of l. Leaky buckets are most of all, and called directly where
// each request has to.

func (l *Limit) doubles() (rate, drip, phase float64) { return l.by().doubles(l) }
func (l *Limit) slackEnd() int64                      { return l.by().slackEnd(l) }

func (l *Limit) wait(s state, now, cost int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.wait(l, s, now, cost)
	}
	return l.by().wait(l, s, now, cost)
}

func (l *Limit) remaining(s state, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.remaining(l, s, now)
	}
	return l.by().remaining(l, s, now)
}

func (l *Limit) units(s state, now int64) int64 { return l.by().units(l, s, now) }

func (l *Limit) started(s state, now, unix int64) state { return l.by().started(l, s, now, unix) }

func (l *Limit) add(s state, cost int64) state {
	if l.Algorithm == Leaky {
		return leaky{}.add(l, s, cost)
	}
	return l.by().add(l, s, cost)
}

func (l *Limit) atLeast(s state, units, unix int64) state {
	if units == 0 {
		return s
	}
	return l.by().atLeast(l, s, units, l.Size, unix)
}
func (l *Limit) count(s state, now, unix, cost, beside int64) state {
	return l.by().count(l, s, now, unix, cost, beside)
}
func (l *Limit) higher(a, b state, late time.Duration, own bool) state {
	return l.by().higher(l, a, b, late, own)
}

// sinceDrip returns the time since the last aligned drip, in µs.
func (l *Limit) sinceDrip(unix int64) int64 {
	since := (unix - l.Phase.Microseconds()) % l.rate()
	if since < 0 {
		since += l.rate()
	}
	return since
}
