package bucket

import (
	"cmp"
	"fmt"
	"time"
)

const (
	// evenly is the longest interval between drips of several units that still
	// counts as even.
	evenly = 100 * time.Millisecond

	// tolerance bounds how much of a rate may be lost to drips of whole units at
	// whole microseconds: less than 1 part in this many.
	tolerance = 10_000
)

// Per returns a Limit of n units every d, with bursts of up to n, as [OfRate] does. It is not
// valid if that returns an error.
func Per(n int64, d time.Duration) Limit {
	l, err := OfRate(n, d, n)
	if err != nil {
		return Limit{Size: n, DripInterval: d, DripSize: cmp.Or(n, -1)} // not valid, because n or d is not
	}
	return l
}

// Every returns a Limit of one unit every d, rounded up to whole microseconds.
func Every(d time.Duration) Limit {
	if d > 0 { // a d that overflows is not valid
		d = (d + time.Microsecond - 1).Truncate(time.Microsecond)
	}
	return Limit{Size: 1, DripInterval: d, DripSize: 1}
}

// WithBurst returns l, whose units drip as with a rate, with bursts of up to n units. If
// that is less than a drip, fewer units drip at once, at a rate that may be a little lower.
func (l Limit) WithBurst(n int64) Limit {
	if l.Algorithm != 0 { // it has no burst
		return Limit{Algorithm: l.Algorithm}
	}
	if n < 1 || l.DripSize <= n || l.Validate() != nil {
		l.Size = n
		return l
	}
	drips := l.finest()
	if drips.DripSize > n {
		interval := mulDiv(n, l.Rate(), l.DripSize)
		if interval*l.DripSize != n*l.Rate() {
			interval++
		}
		drips = Limit{DripInterval: time.Duration(interval) * time.Microsecond, DripSize: n}
	}
	l.Size, l.DripInterval, l.DripSize = n, drips.DripInterval, drips.DripSize
	return l
}

// OfRate returns a Limit that admits n units every d on average, evenly, with bursts of up to
// size units: up to size + n − 1 in one d. In the long run the rate is never exceeded, and missed
// by less than 1 part in 10,000. n and size are from 1 to [MaxUnits]; d is a whole number of
// microseconds, at least 1 µs.
//
// The drips are n/d reduced to lowest terms in whole microseconds: 60 a second are
// 3 units every 50 ms. If that means several units at a time and either more than
// 100 ms between drips or more units than size, OfRate takes the fewest units
// that keep the rate: for 7 a second, 1 unit every 142,858 µs instead of 7 every
// second. Rates of up to 100 a second need only 1 unit at a time, so they work
// with any size.
//
// OfRate returns an error if a number is out of range, if size is too small for
// the drips of the rate, or if a full bucket would take more than 35 years to
// drain.
func OfRate(n int64, d time.Duration, size int64) (Limit, error) {
	l := Limit{Size: size, DripInterval: d, DripSize: n}
	switch {
	case n < 1 || n > MaxUnits:
		return Limit{}, fmt.Errorf("rate of %d units: must be from 1 to %d", n, int64(MaxUnits))
	case d < time.Microsecond || d%time.Microsecond != 0:
		return Limit{}, fmt.Errorf("rate of %d/%v: must be for a whole number of microseconds, at least 1µs", n, d)
	case l.Rate() > Horizon:
		return Limit{}, fmt.Errorf("rate of %d/%v: must be for at most 35 years", n, d)
	}
	divisor := gcd(n, l.Rate())
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

// Smooth returns l with the smallest drips that keep its rate: never above it, and below it by less than 1
// part in 10,000.
func (l Limit) Smooth() Limit {
	if l.DripSize == 1 {
		return l
	}
	return l.finest()
}

// finest returns l with the fewest units per drip that keep its rate: never above
// it, and below it by less than the tolerance. Of all S units every P µs that do,
// those with the least P also have the least S.
func (l Limit) finest() Limit {
	n, d := l.DripSize, l.Rate()
	// for every p, both S units every ⌈S·d/n⌉ µs and, if n ≥ d, ⌊p·n/d⌋ units
	// every p µs fall short by less than 1 part in p. So some p of at most 10,000
	// + d/n will do, and p·n stays below 2^63.
	for p := CeilDiv(d, n); ; p++ {
		units, lost := p*n/d, p*n%d
		if lost <= (p*n-1)/tolerance { // lost·tolerance < p·n
			return Limit{Size: l.Size, DripInterval: time.Duration(p) * time.Microsecond, DripSize: units}
		}
	}
}

// nearest returns the rates nearest to n/d, below and above it, whose drip is size
// units. At n/d itself a drip is more than size.
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
