package bucket

import (
	"fmt"
	"time"
)

// MaxBans is the largest number of durations of [BanAfter].
const MaxBans = 3

// BanAfter returns the Limit of a bucket that bans keys after that many denials, for the first of
// the durations, then the next, and so on.
func BanAfter(after int64, durations ...time.Duration) Limit {
	l := Limit{Size: after, Aligned: true, Algorithm: Bans}
	if n := len(durations); n > 0 && n <= MaxBans {
		l.DripInterval, l.Phase = durations[0], durations[min(1, n-1)]
		l.DripSize = durations[n-1].Microseconds()
	}
	return l
}

// CountsDenials reports whether l is made by [BanAfter].
func (l *Limit) CountsDenials() bool { return l.Algorithm == Bans }

// bans counts denials.
type bans struct{}

// maxBanAfter is the largest number of denials before a ban.
const maxBanAfter = 10_000

func (bans) Validate(l *Limit) error {
	first, second, last := l.DripInterval, l.Phase, time.Duration(l.DripSize)*time.Microsecond
	switch {
	case !l.Aligned || l.ColdFactor != 0:
		return fmt.Errorf("%v: must be made by BanAfter", l.Algorithm)
	case l.Size > maxBanAfter:
		return fmt.Errorf("ban after %d denials: must be at most %d", l.Size, maxBanAfter)
	case first < time.Second || second < first || last < second || second%time.Microsecond != 0:
		return fmt.Errorf("bans of %v, %v, %v: must be whole numbers of microseconds, at least 1s, and none shorter than the one before",
			first, second, last)
	}
	return nil
}

func (bans) DrainTime(l *Limit) time.Duration {
	return 2 * time.Duration(l.DripSize) * time.Microsecond
}

func (bans) DripTime(l *Limit, _ int64) time.Duration {
	return time.Duration(l.DripSize) * time.Microsecond
}

func (bans) Doubles(l *Limit, _ int64) (size, rate, drip, phase float64) {
	return float64(l.Size), float64(l.Rate()), float64(l.DripSize), float64(l.Phase.Microseconds())
}

// RestEnd: a second's microseconds are more than the denials that are counted.
func (bans) RestEnd(l *Limit) int64 { return l.DripSize }

// Room: a request that passes takes none.
func (a bans) Room(l *Limit, s Level, _, now int64) int64 {
	if a.Wait(l, s, 1, now) > 0 {
		return 0
	}
	return l.Size
}

func (a bans) Remaining(l *Limit, s Level, now int64) int64 { return a.Room(l, s, 0, now) }

func (bans) Wait(l *Limit, s Level, _, now int64) int64 { return max(s.Clear-l.DripSize-now, 0) }

// Units are denials.
func (bans) Units(_ *Limit, s Level, now int64) int64 {
	if s.Clear <= now {
		return 0
	}
	return s.Rest
}

// Add adds one denial, whatever n is.
func (a bans) Add(l *Limit, s Level, _ int64, at Moment) Level {
	if s.Clear <= at.Now {
		s.Rest = 0
	} else if a.Wait(l, s, 1, at.Now) > 0 {
		return s // a ban does not grow while it lasts
	}
	s.Rest++
	if s.Rest%l.Size > 0 {
		return Level{at.Now + l.DripSize, s.Rest}
	}
	ban := l.DripSize
	switch s.Rest {
	case l.Size:
		ban = l.Rate()
	case 2 * l.Size:
		ban = l.Phase.Microseconds()
	}
	return Level{at.Now + ban + l.DripSize, min(s.Rest, 2*l.Size)}
}

// AtLeast: whether requests in flight will be denied is not known.
func (bans) AtLeast(_ *Limit, s Level, _, _ int64, _ Moment) Level { return s }

func (bans) Count(_ *Limit, s Level, _, _ int64, _ Moment) Level { return s }

// Join returns the later: a ban that two sides know is a little longer for the one that
// has heard of it.
func (bans) Join(_ *Limit, a, b Level, _ time.Duration, _ bool) Level {
	if b.Clear > a.Clear {
		return b
	}
	return a
}

func (bans) Arriving(_ *Limit, s Ahead, _ int64) (arrived Ahead, drained bool) { return s, false }

func (bans) Ending(_ *Limit, s Level, _, _ int64) Level { return s }
