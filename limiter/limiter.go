package limiter

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	// if their names differ. The name may be any text, or empty.
	Name string

	// The limit for each key. One made by [Concurrency] needs Hold: the other methods
	// return an error. One made by [BanAfter] needs the Store itself, since it counts
	// denials by other limits.
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
// An error means that nothing was decided, and the caller has to decide: the Limiter or
// n is not valid, or the Store is unavailable (see [ErrUnavailable]). How ctx
// is used is up to the Store; see [Redis.Take].
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (Decision, error) {
	return l.take(ctx, key, n, nil)
}

// take decides one request, which holds its units if held is not nil.
func (l *Limiter) take(ctx context.Context, key string, n int64, held *Held) (Decision, error) {
	if l.Store == nil {
		return Decision{}, fmt.Errorf("limiter %q: Store is nil: use NewMemory or NewRedis", l.Name)
	}
	one := singles.Get().(*single)
	defer one.release()
	one.bucket[0] = Bucket{Name: l.Name, Key: key, Limit: l.Limit, Cost: n, Hold: held != nil}
	decisions, err := l.Store.Take(ctx, Request{Buckets: one.bucket[:], Held: held}, one.decision[:0])
	if err != nil {
		return Decision{}, err
	}
	return decisions[0], nil
}

// single is the memory that a request of one bucket takes. It is used again, since it would
// be garbage after each request.
type single struct {
	bucket   [1]Bucket
	decision [1]Decision
}

var singles = sync.Pool{New: func() any { return new(single) }}

// release returns s to the pool, without what it refers to.
func (s *single) release() {
	*s = single{}
	singles.Put(s)
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
// There is no queue: the first to try once there is room is admitted, and WaitN tries
// again. So while others keep the bucket full, WaitN may wait without end; one of many
// units starves next to requests of few, which take each unit as it drips. A limit with
// [Limit.WithDelay] queues: it charges requests in the order in which they reach the Store,
// and [Bucket.Delay] says how long each has to wait.
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
