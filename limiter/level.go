package limiter

import (
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Level is what a bucket held when it was looked at.
type Level struct {
	// The units in the bucket. With several Sizes it may exceed one of them.
	Units int64

	// The units that requests hold which are still being decided, or whose outcome is
	// not known yet.
	Held int64

	// The units that this process has leased and not used, which the server counts among
	// Units; and those that it has admitted and the server does not know of. Both are only
	// reported of this process, see Redis.PeekHere.
	Leased, Unreported int64

	// The units that the bucket has room for, given the size of the Limit.
	Remaining int64

	// The time until the bucket runs empty if nothing more is added.
	Clear time.Duration

	// The time until the bucket has room for Cost units, at least 1; zero if it has, or if it
	// never will, because Cost exceeds the size.
	RetryAfter time.Duration
}

// banned returns b with its default values filled in, and its level if it is banned for d
// from now on; or an error if it can't be.
func (b Bucket) banned(d time.Duration) (Bucket, bucket.Ahead, error) {
	b, err := b.prepared()
	switch {
	case err != nil:
	case !b.Limit.of().CountsDenials():
		err = fmt.Errorf("bucket %q: its limit must be made by BanAfter", b.Name)
	case d < time.Microsecond || d.Microseconds() > MaxUnits:
		err = fmt.Errorf("ban of %v: must be from 1µs to 17 years", d)
	}
	return b, bucket.Ahead{Clear: d.Microseconds() + b.Limit.DripSize, Rest: b.Limit.Size}, err
}

// inspected returns the Level of b, which is at level left, and has the given units
// held. Of a log v is the level, unless only its summary is known.
func (b *Bucket) inspected(left bucket.Ahead, v *bucket.EntriesLevel, held int64) Level {
	if v != nil {
		return Level{
			Units:      v.Units,
			Held:       held,
			Remaining:  max(b.Limit.Size-v.Units-held, 0),
			Clear:      time.Duration(v.Clear) * time.Microsecond,
			RetryAfter: time.Duration(v.Again) * time.Microsecond,
		}
	}
	at := bucket.Moment{Unix: time.Now().UnixMicro()}
	s := left.After(at.Now)
	l := Level{
		Units:     b.Limit.of().Units(s, at.Now),
		Held:      held,
		Remaining: max(b.Limit.of().Remaining(s, at.Now)-held, 0),
		Clear:     time.Duration(left.Clear) * time.Microsecond,
	}
	if b.need() <= b.Limit.Size {
		l.RetryAfter = time.Duration(b.Limit.of().Wait(b.Limit.of().AtLeast(s, held, at), b.need(), at.Now)) * time.Microsecond
	}
	return l
}

// prepared returns b with its default values filled in, or an error if it does not
// describe a bucket that can be decided on.
func (b Bucket) prepared() (Bucket, error) {
	b.Hold, b.Watches, b.Borrows, b.Pool = false, 0, false, false // nothing is going to be held, and no other bucket decides
	req := Request{Buckets: []Bucket{b}}
	if _, err := req.prepareEach(); err != nil {
		return b, err
	}
	return req.Buckets[0], nil
}
