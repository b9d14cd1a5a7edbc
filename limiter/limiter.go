package limiter

import (
	"context"
	"fmt"
)

// Limiter asks a [Store] about one limit, for any number of keys: each key, such
// as an address, has a bucket of its own. Set its fields before its first use and
// not after. It may be used by several goroutines at once.
//
// Limiters are cheap, and hold nothing themselves: those of equal Store, Name and
// Limit are one. To ask about several limits in one step use the Store itself.
type Limiter struct {
	// Where the buckets are.
	Store Store

	// What is limited, such as "login". Limiters of one Store that have different
	// names never share buckets. Any characters but spaces and braces are fine,
	// and so is no name.
	Name string

	// How much each key may do.
	Limit Limit
}

// Allow decides one request of the key, at a cost of 1: unless the decision is
// Denied it is admitted and has been charged. See [Limiter.AllowN].
func (l *Limiter) Allow(ctx context.Context, key string) (Decision, error) {
	return l.AllowN(ctx, key, 1)
}

// AllowN decides one request of the key that costs n units, at least 1: all of
// them are charged, or none if it is Denied. It never waits for room; if it is
// denied, RetryAfter tells when there will be room, and Never that there never will.
//
// An error means that nothing was decided, and the caller has to: Limit or n
// is out of range, or the Store can't be asked (see [ErrUnavailable]). How ctx is
// used is up to the Store; see [Redis.Take].
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (Decision, error) {
	if n < 1 {
		return Decision{}, fmt.Errorf("bucket %q: cost %d: must be at least 1", l.Name, n)
	}
	var one [1]Decision
	req := Request{Buckets: []Bucket{{Name: l.Name, Key: key, Limit: l.Limit, Cost: n}}}
	decisions, err := l.Store.Take(ctx, req, one[:0])
	if err != nil {
		return Decision{}, err
	}
	return decisions[0], nil
}
