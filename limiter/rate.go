package limiter

import (
	"fmt"
	"time"
)

const (
	// evenly is the longest time between two drips of more than one unit that
	// still counts as even.
	evenly = 100 * time.Millisecond

	// tolerance says how much of a rate may be lost to drips of whole units at
	// whole microseconds: less than one in so many.
	tolerance = 10_000
)

// PerSecond returns the limit that admits n units a second, evenly, and up to n
// at once from an idle client. Use [NewLimit] for other bursts. If n is not from 1
// to [MaxUnits] the limit is not valid, and every request is an error.
func PerSecond(n int64) Limit { return per(n, time.Second) }

// PerMinute returns the limit that admits n units a minute, evenly, and up to
// n at once from an idle client. See [PerSecond].
func PerMinute(n int64) Limit { return per(n, time.Minute) }

// Every returns the limit that admits one unit every d, none sooner. Set its
// Size to let an idle client send several at once. d is rounded up to whole
// microseconds. If it is not positive, or more than 17 years, the limit is not
// valid, and every request is an error.
func Every(d time.Duration) Limit {
	if d > 0 { // one that overflows is not valid
		d = (d + time.Microsecond - 1).Truncate(time.Microsecond)
	}
	return Limit{Size: 1, DripInterval: d, DripSize: 1}
}

// per returns the limit of n units each d, which is a second or a minute.
func per(n int64, d time.Duration) Limit {
	l, err := NewLimit(n, d, n)
	if err != nil {
		return Limit{Size: n, DripInterval: d, DripSize: n} // not valid, as n is not
	}
	return l
}

// NewLimit returns the limit of the given size that admits n units each d,
// evenly: never more, and less by less than one in 10 000. n and size are from 1
// to [MaxUnits]; d is a whole number of microseconds, at least one.
//
// What drips is n/d reduced to whole microseconds, such as 3 units every 50 ms for
// 60 a second. Where that would be several units at a time and more than 100 ms
// apart, or more than the size, it is the fewest units that keep the rate: for
// 7 a second not 7 every second but one every 142 858 µs. For rates of up to 100 a
// second one unit keeps it, so any size will do.
//
// It returns an error that says which number is out of range, that the size
// is too small for drips of the rate, or that a full bucket would take more than
// 35 years to drain.
func NewLimit(n int64, d time.Duration, size int64) (Limit, error) {
	l := Limit{Size: size, DripInterval: d, DripSize: n}
	switch {
	case n < 1 || n > MaxUnits:
		return Limit{}, fmt.Errorf("rate of %d units: must be from 1 to %d", n, int64(MaxUnits))
	case d < time.Microsecond || d%time.Microsecond != 0:
		return Limit{}, fmt.Errorf("rate of %d/%v: must be for a whole number of microseconds, at least 1µs", n, d)
	case l.rate() > horizon:
		return Limit{}, fmt.Errorf("rate of %d/%v: must be for at most 35 years", n, d)
	}
	divisor := gcd(n, l.rate())
	l.DripSize /= divisor
	l.DripInterval /= time.Duration(divisor)
	if l.DripSize > 1 && (l.DripInterval > evenly || l.DripSize > size) {
		l = l.finest()
	}
	if err := l.Validate(); err != nil {
		return Limit{}, err
	}
	if l.DripSize > size {
		return Limit{}, fmt.Errorf("size %d: must be at least %d for a rate of %d/%v; the nearest rates for it are %s",
			size, l.DripSize, n, d, nearest(n, d, size))
	}
	return l, nil
}

// finest returns l with the fewest units a drip that keep its rate: never above
// it, and below by less than the tolerance allows. Of all S units every P µs that
// do, those of the least P are also those of the least S.
func (l Limit) finest() Limit {
	n, d := l.DripSize, l.rate()
	// Of every p both S units every ⌈S·d/n⌉ µs and, if n ≥ d, ⌊p·n/d⌋ every p µs
	// are short by less than one in p. So one that is at most 10 000 + d/n will do,
	// and p·n stays below 2^63.
	for p := ceilDiv(d, n); ; p++ {
		units, lost := p*n/d, p*n%d
		if lost <= (p*n-1)/tolerance { // lost·tolerance < p·n
			return Limit{Size: l.Size, DripInterval: time.Duration(p) * time.Microsecond, DripSize: units}
		}
	}
}

// nearest returns the rates nearest to n/d, below it and above, that drip size
// units, which are fewer than drip at that rate.
func nearest(n int64, d time.Duration, size int64) string {
	faster := size * d.Microseconds() / n // size·d < p·n, see finest
	rates := fmt.Sprintf("%d/%v", size, time.Duration(faster+1)*time.Microsecond)
	if faster > 0 {
		rates += fmt.Sprintf(" and %d/%v", size, time.Duration(faster)*time.Microsecond)
	}
	return rates
}

// gcd returns the greatest common divisor of two positive numbers.
func gcd(a, b int64) int64 {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}
