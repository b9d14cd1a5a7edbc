package limiter

import (
	"context"
	"time"
)

// Store keeps buckets and decides requests against them. Its methods are safe for
// concurrent use, and each request is decided in one atomic step.
type Store interface {
	// Take decides one request and charges its buckets. It appends a Decision for
	// each bucket to dst, in order, and returns the extended slice. The request is
	// admitted if no Decision is Denied.
	//
	// Neither req.Buckets nor dst is used after Take has returned.
	//
	// Take does not wait beyond the deadline of ctx. Cancelling ctx need not end
	// it: a request that has already been sent may be charged anyway, and then its
	// decision is worth more than an error.
	//
	// An error means that nothing was decided: the request is malformed, or the
	// store did not answer in time. In the latter case the buckets may or may not
	// have been charged.
	Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error)
}

// Keeper is a [Store] whose buckets can be looked at and changed, one at a time: a
// [Memory] or a [Redis]. An error wraps [ErrUnavailable] if a server did not answer in time.
type Keeper interface {
	Store

	// Peek returns the level of a bucket. It changes nothing.
	Peek(ctx context.Context, b Bucket) (Level, error)

	// Reset empties a bucket, and returns what it held.
	Reset(ctx context.Context, b Bucket) (Level, error)

	// Ban bans a bucket's key for d. The bucket's Limit is made by [BanAfter].
	Ban(ctx context.Context, b Bucket, d time.Duration) error
}
