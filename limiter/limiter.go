package limiter

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Limiter applies one limit to any number of keys: each key, such as an address,
// has a bucket of its own in the [Store]. Set the fields before the first use and
// do not change them afterwards. A Limiter is safe for concurrent use.
//
// Limiters are cheap and have no state: those with equal Store, Name and Limit are
// interchangeable. To check several limits in one atomic step, use the Store
// itself.
type Limiter struct {
	// The Store that keeps the buckets.
	Store Store

	// What is limited, such as "login". Limiters of one Store never share buckets
	// if their names differ. The name may be empty, and may contain any characters
	// except spaces and braces.
	Name string

	// The limit for each key.
	Limit Limit
}

// Allow is shorthand for AllowN(ctx, key, 1).
func (l *Limiter) Allow(ctx context.Context, key string) (Decision, error) {
	return l.AllowN(ctx, key, 1)
}

// AllowN decides one request of the key that costs n units. Either all of them are
// charged, or the Decision is Denied and none are. With n = 0 nothing is charged and it is
// never Denied: that is a look at what Remaining is. AllowN never waits for
// room: after a denial, RetryAfter says when there will be room, and Never whether
// there never will be.
//
// An error means that nothing was decided, and the caller has to decide: Limit or
// n is out of range, or the Store is unavailable (see [ErrUnavailable]). How ctx
// is used is up to the Store; see [Redis.Take].
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (Decision, error) {
	var one [1]Decision
	req := Request{Buckets: []Bucket{{Name: l.Name, Key: key, Limit: l.Limit, Cost: n}}}
	decisions, err := l.Store.Take(ctx, req, one[:0])
	if err != nil {
		return Decision{}, err
	}
	return decisions[0], nil
}

// ErrTooLong is returned, wrapped, by Wait if it would not be admitted before the deadline,
// or never.
var ErrTooLong = errors.New("no room in time")

// Wait is shorthand for WaitN(ctx, key, 1).
func (l *Limiter) Wait(ctx context.Context, key string) error { return l.WaitN(ctx, key, 1) }

// WaitN waits until a request of the key that costs n units is admitted, and charges it
// then. It fails at once, with an error that wraps [ErrTooLong], if there will not be room
// before the deadline of ctx, or never; with that of ctx if it is done; and with those of
// AllowN. Then nothing is charged, unless the Store was unavailable.
//
// There is no queue: whoever asks first once there is room is admitted. So WaitN may have to
// wait several times, and others may go before it.
func (l *Limiter) WaitN(ctx context.Context, key string, n int64) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		d, err := l.AllowN(ctx, key, n)
		if err != nil || !d.Denied {
			return err
		}
		if d.Never {
			return fmt.Errorf("bucket %q: %w: %d units in a bucket of %d", l.Name, ErrTooLong, n, d.Size)
		}
		wait := max(d.RetryAfter, time.Microsecond)
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < wait {
			return fmt.Errorf("bucket %q: %w: room in %v, deadline in %v", l.Name, ErrTooLong, wait, time.Until(deadline))
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}
