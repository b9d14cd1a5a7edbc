package limiter

import (
	"fmt"
	"time"
)

// Algorithm says how a [Limit] counts units.
type Algorithm uint8

const (
	Leaky   Algorithm = iota // a leaky bucket, see Limit
	Sliding                  // two counters, see SlidingWindow
	Log                      // the time of each admission, see SlidingLog
	WarmUp                   // rates that grow after idleness, see WarmingUp
	Fixed                    // fixed windows, see FixedWindow
	Bans                     // denials, see BanAfter
)

// algorithms has each Algorithm. To add one, write the two files that count, in Go and in
// Lua, and a line here and in algorithms.lua.
var algorithms = []algorithm{
	Leaky:   {"leaky", 0, 0, false, aheadOfRoom, leaky{}},
	Sliding: {"sliding", 's', slidingDrip, false, aheadOfUse, sliding{}},
	Log:     {"log", 'l', slidingDrip, true, aheadNever, logSummary{}},
	WarmUp:  {"warm-up", 'w', 0, false, aheadNever, warm{}},
	Fixed:   {"fixed", 'f', MaxUnits, false, aheadWithin, window{}},
	Bans:    {"bans", 'b', 0, false, aheadNever, bans{}},
}

// algorithm is what there is to an Algorithm.
type algorithm struct {
	name     string
	letter   byte  // that names of its keys in Redis end with; 0 for the first
	drip     int64 // see Algorithm.DripSize
	entries  bool  // whether it keeps an entry for each admission beside the level
	charging       // whether units can be charged ahead of their use
	counting       // how it counts
}

// charging says whether units of an algorithm can be charged before they are used, and so
// whether this process may decide by itself.
type charging uint8

const (
	aheadNever  charging = iota
	aheadWithin          // and used until the window ends in which they were charged
	aheadOfUse           // and used at any time
	aheadOfRoom          // besides, before there is room for them
)

// charging returns how far ahead of their use units of l can be charged.
func (l *Limit) charging() charging { return algorithms[l.Algorithm].charging }

// String returns the algorithm's name.
func (a Algorithm) String() string {
	if int(a) < len(algorithms) {
		return algorithms[a].name
	}
	return fmt.Sprintf("Algorithm(%d)", uint8(a))
}

// DripSize returns the DripSize that all limits have which count in windows in this way, or
// 0 if a does not count in windows.
func (a Algorithm) DripSize() int64 { return algorithms[a].drip }

// MayWait reports whether requests may wait for room, see [Limit.Delayed].
func (a Algorithm) MayWait() bool {
	_, ok := algorithms[a].counting.(delaying)
	return ok
}

// counting is how an Algorithm counts units. It is pure: it knows of a limit, a level
// and the time, and nothing of stores, servers, or nodes. The Lua file of the same name
// does the same arithmetic. All times are in µs.
type counting interface {
	// validate returns an error that names the first number of l that is out of range.
	// What is said of Size, DripSize and DripInterval of all limits holds.
	validate(l *Limit) error

	// drainTime returns the longest time until a full bucket is as if it had never been
	// used, and dripTime how long one that has just dripped takes to lose some units.
	drainTime(l *Limit) time.Duration
	dripTime(l *Limit, units int64) time.Duration

	// doubles returns the numbers that tell how l's buckets drip and what they hold, as
	// the script gets them for a request of the given cost. restEnd returns a number that
	// is larger than the rest of any level.
	doubles(l *Limit, cost int64) (size, rate, drip, phase float64)
	restEnd(l *Limit) int64

	// room returns how many units fit beside n others: 0 or less if none do. remaining
	// returns how many to tell of.
	room(l *Limit, s level, n, now int64) int64
	remaining(l *Limit, s level, now int64) int64

	// wait returns how long until there is room for n units, at most l.Size, or 0 if
	// there is now.
	wait(l *Limit, s level, n, now int64) int64

	// units returns the number of units that there are.
	units(l *Limit, s level, now int64) int64

	// add returns the level with n units more, which are charged at some moment.
	add(l *Limit, s level, n int64, at moment) level

	// atLeast returns the level with n units more of which it may have some already, but
	// none beyond a bucket of the given size that is full.
	atLeast(l *Limit, s level, n, size int64, at moment) level

	// count returns the level with a denied request of some cost, see Limit.CountDenied,
	// for which there was no room beside n other units.
	count(l *Limit, s level, n, cost int64, at moment) level

	// join returns a level that is at least as high as both a and b, from now on. Both
	// were reported with a delay of at most late, unless one is this process's own.
	join(l *Limit, a, b level, late time.Duration, own bool) level

	// arriving returns level s as a server is told of it that hears of it up to late
	// afterwards. drained says that all may be gone by then, so that telling it would
	// only delay what the server knows.
	arriving(l *Limit, s ahead, late int64) (arrived ahead, drained bool)

	// ending returns level s, by which something is about to be decided, as full if its
	// time may have ended on a server whose reports are up to late late. What is
	// admitted then is of this time or the next, and neither side could tell.
	ending(l *Limit, s level, now, late int64) level
}

// by returns how l counts. l is valid.
func (l *Limit) by() counting { return algorithms[l.Algorithm].counting }

// keepsEntries reports whether l's buckets keep an entry for each admission.
func (l *Limit) keepsEntries() bool { return algorithms[l.Algorithm].entries }

// What counting says, of l. Leaky buckets are most of all, and called directly where
// each request has to.

func (l *Limit) doubles(cost int64) (size, rate, drip, phase float64) { return l.by().doubles(l, cost) }
func (l *Limit) restEnd() int64                                       { return l.by().restEnd(l) }

func (l *Limit) room(s level, n, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.room(l, s, n, now)
	}
	return l.by().room(l, s, n, now)
}

func (l *Limit) remaining(s level, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.remaining(l, s, now)
	}
	return l.by().remaining(l, s, now)
}

func (l *Limit) wait(s level, n, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.wait(l, s, n, now)
	}
	return l.by().wait(l, s, n, now)
}

func (l *Limit) units(s level, now int64) int64 { return l.by().units(l, s, now) }

func (l *Limit) add(s level, n int64, at moment) level {
	if n == 0 { // which begins no window
		return s
	}
	if l.Algorithm == Leaky {
		return leaky{}.add(l, s, n, at)
	}
	return l.by().add(l, s, n, at)
}

func (l *Limit) atLeast(s level, n int64, at moment) level {
	if n == 0 {
		return s
	}
	return l.by().atLeast(l, s, n, l.Size, at)
}

func (l *Limit) count(s level, n, cost int64, at moment) level {
	return l.by().count(l, s, n, cost, at)
}

func (l *Limit) join(a, b level, late time.Duration, own bool) level {
	return l.by().join(l, a, b, late, own)
}

// start returns the time from which a charge at some moment drips: then, or when it last
// dripped by the clock.
func (l *Limit) start(at moment) int64 {
	if !l.Aligned {
		return at.now
	}
	return at.now - l.sinceDrip(at.unix)
}

// ordered returns two levels, the later first, and whether both lie within one drip. Both
// are reported late, so nearly a whole drip apart are two, unless one of them drips at
// times of its own.
func (l *Limit) ordered(a, b level, late time.Duration, own bool) (later, earlier level, same bool) {
	if a.clear < b.clear {
		a, b = b, a
	}
	drip := l.rate()
	if l.DripInterval > 2*late && !own {
		drip -= late.Microseconds()
	}
	return a, b, a.clear-b.clear < drip
}

// sinceDrip returns the time since the last aligned drip, in µs.
func (l *Limit) sinceDrip(unix int64) int64 {
	since := (unix - l.Phase.Microseconds()) % l.rate()
	if since < 0 {
		since += l.rate()
	}
	return since
}
