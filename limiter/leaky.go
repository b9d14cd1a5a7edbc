package limiter

import (
	"fmt"
	"math"
	"math/bits"
	"time"
)

// leaky counts units in a leaky bucket, see Limit. Its level is when the bucket runs
// empty, and by how many units the last drip before that falls short of a full one. A
// fixed window is a leaky bucket that loses all it holds with each drip. Its methods
// are small enough to be inlined where that counts.
type leaky struct{}

func (leaky) validate(l *Limit) error {
	if err := l.validatePhase(); err != nil {
		return err
	}
	if over, drain := bits.Mul64(uint64(leaky{}.drips(l)+1), uint64(l.rate())); over != 0 || drain > horizon { //nolint:gosec // neither is negative
		return fmt.Errorf("size %d, drip rate %v, drip size %d: a full bucket and one drip more must drain within 35 years",
			l.Size, l.DripInterval, l.DripSize)
	}
	return nil
}

// drips returns the number of drips that empty a full bucket.
func (leaky) drips(l *Limit) int64 { return ceilDiv(l.Size, l.DripSize) }

func (a leaky) drainTime(l *Limit) time.Duration {
	return time.Duration(a.drips(l)) * l.DripInterval
}

func (leaky) dripTime(l *Limit, units int64) time.Duration {
	return time.Duration(ceilDiv(units, l.DripSize)) * l.DripInterval
}

func (leaky) doubles(l *Limit) (rate, drip, phase float64) {
	return float64(l.rate()), float64(l.DripSize), float64(l.Phase.Microseconds())
}

func (leaky) slackEnd(l *Limit) int64 { return l.DripSize }

func (a leaky) fits(l *Limit, s state, now, cost, beside int64) bool {
	return cost <= l.Size-beside && a.wait(l, s, now, cost+beside) == 0
}

func (leaky) wait(l *Limit, s state, now, cost int64) int64 {
	fits := floorDiv(l.Size-cost+s.slack, l.DripSize) * l.rate()
	return max(s.clear-now-fits, 0)
}

func (a leaky) remaining(l *Limit, s state, now int64) int64 { return a.room(l, s, l.Size, now) }

// room is remaining for a bucket of the given size.
func (leaky) room(l *Limit, s state, size, now int64) int64 {
	// The bucket holds drips·DripSize − slack units. The product is computed only
	// where it is known to be small: the level may far exceed this size if
	// requests with a larger one have filled the bucket.
	drips, room := ceilDiv(s.clear-now, l.rate()), size+s.slack
	if drips > floorDiv(room, l.DripSize) {
		return 0
	}
	return room - drips*l.DripSize
}

func (leaky) units(l *Limit, s state, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	over, units := bits.Mul64(uint64(ceilDiv(s.clear-now, l.rate())), uint64(l.DripSize))
	if over != 0 || units > math.MaxInt64 {
		return math.MaxInt64 // something else has written to the bucket
	}
	return int64(units) - s.slack
}

func (leaky) started(l *Limit, s state, now, unix int64) state {
	if l.Aligned && s.clear <= now {
		return state{clear: now - l.sinceDrip(unix)}
	}
	return s
}

func (leaky) add(l *Limit, s state, cost int64) state {
	drips := ceilDiv(cost-s.slack, l.DripSize)
	return state{
		clear: s.clear + drips*l.rate(),
		slack: s.slack + drips*l.DripSize - cost,
	}
}

func (a leaky) atLeast(l *Limit, s state, units, size, unix int64) state {
	room := a.room(l, s, size, 0)
	if room > 0 {
		s = a.add(l, a.started(l, s, 0, unix), min(units, room))
	}
	if units > room && !isWindow(l) {
		if full := a.add(l, a.started(l, state{}, 0, unix), size); s.below(full) {
			return full
		}
	}
	return s
}

// isWindow reports whether l's buckets are fixed windows.
func isWindow(l *Limit) bool { return l.DripSize == MaxUnits }

// count fills the bucket, as of now.
func (a leaky) count(l *Limit, s state, now, unix, _, beside int64) state {
	units := l.Size - beside
	if units < 1 {
		return s
	}
	full := a.add(l, a.started(l, state{clear: now}, now, unix), units)
	if isWindow(l) && s.clear > now {
		full.clear = s.clear // the window ends when it would
	}
	if s.clear <= now {
		return full
	}
	return a.higher(l, s, full, 0, false) // a request with a larger size may have filled it further
}

// higher returns the later level, unless both lie within one drip. Then it may hold
// less than the other, and the smaller slack counts. Both are reported late, so nearly
// a whole drip is one, unless one of them drips at times of its own.
func (leaky) higher(l *Limit, a, b state, late time.Duration, own bool) state {
	if a.clear < b.clear {
		a, b = b, a
	}
	same := l.rate()
	if l.DripInterval > 2*late && !own {
		same -= late.Microseconds()
	}
	if a.clear-b.clear < same {
		a.slack = min(a.slack, b.slack)
	}
	return a
}

// arriving: a bucket may have drained by then, and its slack no longer counts. Aligned
// drips cannot be delayed.
func (leaky) arriving(l *Limit, s state, late int64) (arrived state, drained bool) {
	if l.Aligned || s.clear > late {
		return s, false
	}
	return state{clear: s.clear}, s.clear <= l.rate()
}

// ending: windows of the clock end.
func (leaky) ending(l *Limit, s state, now, late int64) state {
	if l.Aligned && isWindow(l) && s.clear > now && s.clear-now <= late {
		s.slack = min(s.slack, MaxUnits-l.Size)
	}
	return s
}

func (a leaky) tell(l *Limit, s state, now, _ int64) (remaining, counts, one int64) {
	return a.remaining(l, s, now), 0, 0
}

// again: a bucket that had room holds Size − Remaining units, and that many units plus
// slack leave it until it is clear.
func (a leaky) again(l *Limit, clear, remaining, _, _, cost int64) int64 {
	slack := ceilDiv(clear, l.rate())*l.DripSize - (l.Size - remaining)
	return a.wait(l, state{clear, slack}, 0, cost)
}
