package limiter

import (
	"context"
	"fmt"
	"time"
)

// MaxBans is the largest number of durations of [BanAfter].
const MaxBans = 3

// BanAfter returns the Limit of a Bucket that bans keys, which is set to watch other
// buckets, see Bucket.Watches: when these have denied a key's requests after times, the
// key is banned for the first of the durations. While it is banned this bucket has no room
// either, and nothing is counted. The next ban takes the next duration, and the last one is
// repeated. All is forgotten once a key was neither banned nor denied for the last
// duration.
//
// after is from 1 to 10,000. There are one to [MaxBans] durations, each in whole
// microseconds, at least 1 s and no less than the one before; twice the last is at most
// 35 years. Otherwise the Limit is not valid, and every request returns an error.
func BanAfter(after int64, durations ...time.Duration) Limit {
	l := Limit{Size: after, Aligned: true, Algorithm: Bans}
	if n := len(durations); n > 0 && n <= MaxBans {
		l.DripInterval, l.Phase = durations[0], durations[min(1, n-1)]
		l.DripSize = durations[n-1].Microseconds()
	}
	return l
}

// bans counts denials.
type bans struct{}

// maxBanAfter is the largest number of denials before a ban.
const maxBanAfter = 10_000

func (bans) validate(l *Limit) error {
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

func (bans) drainTime(l *Limit) time.Duration {
	return 2 * time.Duration(l.DripSize) * time.Microsecond
}

func (bans) dripTime(l *Limit, _ int64) time.Duration {
	return time.Duration(l.DripSize) * time.Microsecond
}

func (bans) doubles(l *Limit, _ int64) (size, rate, drip, phase float64) {
	return float64(l.Size), float64(l.rate()), float64(l.DripSize), float64(l.Phase.Microseconds())
}

// restEnd: a second's microseconds are more than the denials that are counted.
func (bans) restEnd(l *Limit) int64 { return l.DripSize }

// room: a request that passes takes none.
func (a bans) room(l *Limit, s level, _, now int64) int64 {
	if a.wait(l, s, 1, now) > 0 {
		return 0
	}
	return l.Size
}

func (a bans) remaining(l *Limit, s level, now int64) int64 { return a.room(l, s, 0, now) }

func (bans) wait(l *Limit, s level, _, now int64) int64 { return max(s.clear-l.DripSize-now, 0) }

// units are denials.
func (bans) units(_ *Limit, s level, now int64) int64 {
	if s.clear <= now {
		return 0
	}
	return s.rest
}

// add adds one denial, whatever n is.
func (a bans) add(l *Limit, s level, _ int64, at moment) level {
	if s.clear <= at.now {
		s.rest = 0
	} else if a.wait(l, s, 1, at.now) > 0 {
		return s // a ban does not grow while it lasts
	}
	s.rest++
	if s.rest%l.Size > 0 {
		return level{at.now + l.DripSize, s.rest}
	}
	ban := l.DripSize
	switch s.rest {
	case l.Size:
		ban = l.rate()
	case 2 * l.Size:
		ban = l.Phase.Microseconds()
	}
	return level{at.now + ban + l.DripSize, min(s.rest, 2*l.Size)}
}

// atLeast: whether requests in flight will be denied is not known.
func (bans) atLeast(_ *Limit, s level, _, _ int64, _ moment) level { return s }

func (bans) count(_ *Limit, s level, _, _ int64, _ moment) level { return s }

// join returns the later: a ban that two sides know is a little longer for the one that
// has heard of it.
func (bans) join(_ *Limit, a, b level, _ time.Duration, _ bool) level {
	if b.clear > a.clear {
		return b
	}
	return a
}

func (bans) arriving(_ *Limit, s ahead, _ int64) (arrived ahead, drained bool) { return s, false }

func (bans) ending(_ *Limit, s level, _, _ int64) level { return s }

// banned returns b with its default values filled in, and its level if it is banned for d
// from now on; or an error if it can't be.
func (b Bucket) banned(d time.Duration) (Bucket, ahead, error) {
	b, err := b.prepared()
	switch {
	case err != nil:
	case b.Limit.Algorithm != Bans:
		err = fmt.Errorf("bucket %q: its limit must be made by BanAfter", b.Name)
	case d < time.Microsecond || d.Microseconds() > MaxUnits:
		err = fmt.Errorf("ban of %v: must be from 1µs to 17 years", d)
	}
	return b, ahead{d.Microseconds() + b.Limit.DripSize, b.Limit.Size}, err
}

// Ban bans b's key for d, unless it is banned for longer already, as if its first ban had
// begun. b's Limit is made by [BanAfter].
func (m *Memory) Ban(_ context.Context, b Bucket, d time.Duration) error {
	b, s, err := b.banned(d)
	if err == nil {
		m.raise(&b, s, clean)
	}
	return err
}

// Ban is as that of a [Memory], on all nodes. The error wraps [ErrUnavailable] if the
// server does not answer in time: then the key is banned in this process, if there is a
// Fallback, which tells the server later.
func (r *Redis) Ban(ctx context.Context, b Bucket, d time.Duration) error {
	b, s, err := b.banned(d)
	if err != nil {
		return err
	}
	r.fallback.raise(&b, s)
	end, _ := r.deadline(ctx)
	q := r.query(Request{Buckets: []Bucket{b}}, byte(AccountingAtomic))
	q.buckets[0].told = toldLevel{ahead: s, dirty: own} // if there is no fallback, which would
	_, outcomes, err := r.ask(end, q, nil)
	if err != nil {
		r.fallback.drop(q)
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	r.answered(q, outcomes)
	q.release()
	return nil
}
