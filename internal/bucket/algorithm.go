package bucket

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

// Algorithms has each Algorithm. To add one, write the two files that count, in Go and in
// Lua, and a line here and in algorithms.lua; docs/internals/architecture.md has all steps.
var Algorithms = []Kind{
	Leaky:   {"leaky", 0, 0, false, AheadOfRoom, leaky{}},
	Sliding: {"sliding", 's', SlidingDrip, false, AheadOfUse, sliding{}},
	Log:     {"log", 'l', SlidingDrip, true, AheadNever, logSummary{}},
	WarmUp:  {"warm-up", 'w', 0, false, AheadNever, warm{}},
	Fixed:   {"fixed", 'f', MaxUnits, false, AheadWithin, window{}},
	Bans:    {"bans", 'b', 0, false, AheadNever, bans{}},
}

// Kind is what there is to an Algorithm.
type Kind struct {
	Name     string
	Letter   byte  // that names of its keys in Redis end with; 0 for the first
	Drip     int64 // see Algorithm.DripSize
	Entries  bool  // whether it keeps an entry for each admission next to the level
	Charging       // whether units can be charged ahead of their use
	Counting       // how it counts
}

// Charging says whether units of an algorithm can be charged before they are used, and so
// whether this process may decide locally.
type Charging uint8

const (
	AheadNever  Charging = iota
	AheadWithin          // and used until the window ends in which they were charged
	AheadOfUse           // and used at any time
	AheadOfRoom          // besides, before there is room for them
)

// Charging returns how far ahead of their use units of l can be charged.
func (l *Limit) Charging() Charging { return Algorithms[l.Algorithm].Charging }

// String returns the algorithm's name.
func (a Algorithm) String() string {
	if int(a) < len(Algorithms) {
		return Algorithms[a].Name
	}
	return fmt.Sprintf("Algorithm(%d)", uint8(a))
}

// DripSize returns the DripSize that all limits have which count in windows in this way, or
// 0 if a does not count in windows.
func (a Algorithm) DripSize() int64 { return Algorithms[a].Drip }

// MayWait reports whether requests may wait for room, see [Limit.Delayed].
func (a Algorithm) MayWait() bool {
	_, ok := Algorithms[a].Counting.(delaying)
	return ok
}

// Counting is how an Algorithm counts units. It is pure: it knows of a limit, a level
// and the time, and nothing of stores, servers, or nodes. The Lua file of the same name
// does the same arithmetic. All times are in µs.
type Counting interface {
	// Validate returns an error that names the first number of l that is out of range.
	// What is said of Size, DripSize and DripInterval of all limits holds.
	Validate(l *Limit) error

	// DrainTime returns the longest time until a full bucket is as if it had never been
	// used, and DripTime how long one that has just dripped takes to lose some units.
	DrainTime(l *Limit) time.Duration
	DripTime(l *Limit, units int64) time.Duration

	// Doubles returns the numbers that say how l's buckets drip and what they hold, as
	// the script gets them for a request of the given cost. RestEnd returns a number that
	// is larger than the rest of any level.
	Doubles(l *Limit, cost int64) (size, rate, drip, phase float64)
	RestEnd(l *Limit) int64

	// Room returns how many units fit next to n others: 0 or less if none do. Remaining
	// returns how many to report.
	Room(l *Limit, s Level, n, now int64) int64
	Remaining(l *Limit, s Level, now int64) int64

	// Wait returns how long until there is room for n units, at most l.Size, or 0 if
	// there is now.
	Wait(l *Limit, s Level, n, now int64) int64

	// Units returns the number of units that there are.
	Units(l *Limit, s Level, now int64) int64

	// Add returns the level with n units more, which are charged at some moment.
	Add(l *Limit, s Level, n int64, at Moment) Level

	// AtLeast returns the level with n units more of which it may have some already, but
	// none beyond a bucket of the given size that is full.
	AtLeast(l *Limit, s Level, n, size int64, at Moment) Level

	// Count returns the level with a denied request of some cost, see Limit.CountDenied,
	// for which there was no room next to n other units.
	Count(l *Limit, s Level, n, cost int64, at Moment) Level

	// Join returns a level that is at least as high as both a and b, from now on. Both
	// were reported with a delay of at most late, unless one is this process's own.
	Join(l *Limit, a, b Level, late time.Duration, own bool) Level

	// Arriving returns level s as it is reported to a server that hears of it up to late
	// afterwards. drained says that all may be gone by then, so that reporting it would
	// only delay what the server knows.
	Arriving(l *Limit, s Ahead, late int64) (arrived Ahead, drained bool)

	// Ending returns level s, by which something is about to be decided, as full if its
	// time may have ended on a server whose reports are up to late late. What is
	// admitted then is of this time or the next, and neither side could know which.
	Ending(l *Limit, s Level, now, late int64) Level
}

// by returns how l counts. l is valid.
func (l *Limit) by() Counting { return Algorithms[l.Algorithm].Counting }

// KeepsEntries reports whether l's buckets keep an entry for each admission.
func (l *Limit) KeepsEntries() bool { return Algorithms[l.Algorithm].Entries }

// What Counting says, of l. Leaky buckets are most of all, and called directly where
// each request has to.

func (l *Limit) Doubles(cost int64) (size, rate, drip, phase float64) { return l.by().Doubles(l, cost) }
func (l *Limit) RestEnd() int64                                       { return l.by().RestEnd(l) }

// Widest returns a limit whose RestEnd is at least the RestEnd of any other.
func Widest() *Limit { return &Limit{DripSize: MaxUnits, Algorithm: Fixed} }

func (l *Limit) Room(s Level, n, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.Room(l, s, n, now)
	}
	return l.by().Room(l, s, n, now)
}

func (l *Limit) Remaining(s Level, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.Remaining(l, s, now)
	}
	return l.by().Remaining(l, s, now)
}

func (l *Limit) Wait(s Level, n, now int64) int64 {
	if l.Algorithm == Leaky {
		return leaky{}.Wait(l, s, n, now)
	}
	return l.by().Wait(l, s, n, now)
}

func (l *Limit) Units(s Level, now int64) int64 { return l.by().Units(l, s, now) }

func (l *Limit) Add(s Level, n int64, at Moment) Level {
	if n == 0 { // which begins no window
		return s
	}
	if l.Algorithm == Leaky {
		return leaky{}.Add(l, s, n, at)
	}
	return l.by().Add(l, s, n, at)
}

func (l *Limit) AtLeast(s Level, n int64, at Moment) Level {
	if n == 0 {
		return s
	}
	return l.by().AtLeast(l, s, n, l.Size, at)
}

func (l *Limit) Count(s Level, n, cost int64, at Moment) Level {
	return l.by().Count(l, s, n, cost, at)
}

func (l *Limit) Join(a, b Level, late time.Duration, own bool) Level {
	return l.by().Join(l, a, b, late, own)
}

// AtLeastOf is AtLeast for a bucket that is full at another size.
func (l *Limit) AtLeastOf(size int64, s Level, n int64, at Moment) Level {
	return l.by().AtLeast(l, s, n, size, at)
}

// Arriving returns level s as it is reported to a server that hears of it up to late µs
// afterwards, and whether all may be gone by then.
func (l *Limit) Arriving(s Ahead, late int64) (arrived Ahead, drained bool) {
	return l.by().Arriving(l, s, late)
}

// Ending returns level s as full if its time may have ended on a server whose reports are up
// to late µs late.
func (l *Limit) Ending(s Level, now, late int64) Level { return l.by().Ending(l, s, now, late) }

// start returns the time from which a charge at some moment drips: then, or when it last
// dripped by the clock.
func (l *Limit) start(at Moment) int64 {
	if !l.Aligned {
		return at.Now
	}
	return at.Now - l.SinceDrip(at.Unix)
}

// ordered returns two levels, the later first, and whether both lie within one drip. Both
// are reported late, so nearly a whole drip apart are two, unless one of them drips at
// times of its own.
func (l *Limit) ordered(a, b Level, late time.Duration, own bool) (later, earlier Level, same bool) {
	if a.Clear < b.Clear {
		a, b = b, a
	}
	drip := l.Rate()
	if l.DripInterval > 2*late && !own {
		drip -= late.Microseconds()
	}
	return a, b, a.Clear-b.Clear < drip
}

// SinceDrip returns the time since the last aligned drip, in µs.
func (l *Limit) SinceDrip(unix int64) int64 {
	since := (unix - l.Phase.Microseconds()) % l.Rate()
	if since < 0 {
		since += l.Rate()
	}
	return since
}
