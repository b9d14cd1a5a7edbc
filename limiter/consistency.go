package limiter

import (
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Consistency says who decides on a bucket of a [Redis], and so how exactly the limit is
// kept by all processes together. Its zero value is exact: a server decides each request.
//
// Only leaky buckets, fixed and sliding windows can have another one, without Hold,
// Watches, Borrows and Pool, and without [Limit.CountingDenied].
type Consistency struct {
	within int32 // of a lease, or negative between reports; in µs
}

const (
	// MinConsistency and MaxConsistency bound the time of a [Lease] and of [Eventual].
	MinConsistency = time.Millisecond
	MaxConsistency = time.Minute
)

// Lease lets a process decide from units that it has charged to the server at most d
// before. It charges them ahead where the key is requested often, and has the server decide
// all other requests. In any time T, all processes together admit at most what the limit
// allows in T + d; in windows, no more than the limit. d is from [MinConsistency] to
// [MaxConsistency].
func Lease(d time.Duration) Consistency { return newConsistency(d, 1) }

// Eventual lets a process decide by what it has last heard of a bucket and what it has
// admitted since, which it reports every d. No request waits for the server. Each process
// may admit what the others have not reported yet: up to the size of the bucket and what
// drips in d. What exceeds the limit is a debt, for which all of them wait, so that the
// long-run rate is kept; but windows forget it when they end, and each process may admit
// as much in each. Where a server decides, since the Request has other buckets that are
// exact, what this process has not reported takes room too. What is known is in
// RedisOptions.Fallback: without one, Take returns an error. d is from [MinConsistency] to
// [MaxConsistency].
func Eventual(d time.Duration) Consistency { return newConsistency(d, -1) }

// newConsistency returns a Consistency whose time is d, or one that is out of range too.
func newConsistency(d time.Duration, sign int32) Consistency {
	d = min(max(d, time.Microsecond), MaxConsistency+time.Microsecond)
	return Consistency{sign * int32(d.Microseconds())}
}

// lease returns for how long units may be charged ahead of their use, or 0.
func (c Consistency) lease() time.Duration { return time.Duration(max(c.within, 0)) * time.Microsecond }

// IsLease reports whether c is a [Lease].
func (c Consistency) IsLease() bool { return c.within > 0 }

// IsEventual reports whether c is [Eventual].
func (c Consistency) IsEventual() bool { return c.within < 0 }

// reports returns the time between reports, or 0.
func (c Consistency) reports() time.Duration {
	return time.Duration(max(-c.within, 0)) * time.Microsecond
}

// String returns c as it is written in a configuration, such as "lease 100ms".
func (c Consistency) String() string {
	switch {
	case c.within > 0:
		return "lease " + c.lease().String()
	case c.within < 0:
		return "eventual " + c.reports().String()
	}
	return "exact"
}

// Validate returns an error if limits like l can't be kept with c, whatever else their
// buckets have.
func (c Consistency) Validate(l Limit) error {
	switch d := max(c.lease(), c.reports()); {
	case d == 0:
		return nil
	case d < MinConsistency || d > MaxConsistency:
		return fmt.Errorf("%v: must be from %v to %v", c, MinConsistency, MaxConsistency)
	case l.of().Charging() == bucket.AheadNever:
		return fmt.Errorf("%v: %v limits have to be exact", c, l.Algorithm)
	case l.CountDenied:
		return fmt.Errorf("%v: limits that count denied requests have to be exact", c)
	}
	return nil
}
