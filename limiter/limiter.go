package limiter

import (
	"context"
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
// charged, or the Decision is Denied and none are. With n = 0 nothing is charged, and it
// is Denied if Allow would be: that is a look at what is left. AllowN never waits for
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
