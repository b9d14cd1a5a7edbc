package limiter

import (
	"cmp"
	"math/bits"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Decision is the result for one bucket of a request.
type Decision struct {
	// Whether this bucket had no room for the request. Then nothing was added to
	// it.
	Denied bool

	// Whether the request can never be admitted, because its cost exceeds the
	// bucket's size.
	Never bool

	// What decided.
	By Decider

	// Whether the bucket is a dry run: Denied then does not deny the request.
	DryRun bool

	// Whether this request was the one that left this bucket, which watches others, no
	// room. Denied is then true too.
	Began bool

	// Whether the request was admitted because a pool had room for it, and this bucket had
	// none and was not charged; or of a Pool, whether that was charged.
	Borrowed bool

	// Whether the bucket is a Pool. It is never Denied: where it has no room, those that
	// borrow from it deny. In a cluster, a pool is queried only if something is to be
	// borrowed, and its numbers are the ones of an empty bucket if it was not.
	Pool bool

	exact bool // see rest

	// The bucket's size.
	Size int64

	// The units that the bucket still has room for.
	Remaining int64

	// The time until the bucket runs empty if nothing more is added.
	Clear time.Duration

	// The exact time until this bucket, or the pool that it borrows from, has room for
	// the same request: it is denied one microsecond earlier and admitted at that time.
	// Zero if the bucket did not deny, or will never admit; see also Bucket.RoomIn.
	RetryAfter time.Duration

	// What Bucket.RoomIn needs besides: the rest of the level and, if the bucket borrows, the
	// time, in µs, until its pool has room, plus 1. If exact, it is a log, and these are the
	// times until there is room for the same cost, and for one unit, there or in the pool.
	rest, one int64
}

// Decider says what decided on a bucket.
type Decider uint8

const (
	// DecidedByMemory: a [Memory], as the Store.
	DecidedByMemory Decider = iota

	// DecidedByRedis: a server.
	DecidedByRedis

	// DecidedByCache: this process, because a server had reported the bucket full,
	// or another bucket of the request, and it had not dripped since.
	DecidedByCache

	// DecidedByFallback: the Fallback of a [Redis], instead of a server.
	DecidedByFallback

	// DecidedByLease: this process, from units that a server had charged before.
	DecidedByLease

	// DecidedByEventual: this process, which reports its admissions to the server.
	DecidedByEventual

	// DecidedByLoad: no Store, but how fast what is behind a limit answers.
	DecidedByLoad
)

// String returns the name of d: "memory", "redis", "remembered", "fallback", "lease",
// "eventual" or "load".
func (d Decider) String() string {
	switch d {
	case DecidedByRedis:
		return "redis"
	case DecidedByCache:
		return "remembered"
	case DecidedByFallback:
		return "fallback"
	case DecidedByLease:
		return "lease"
	case DecidedByEventual:
		return "eventual"
	case DecidedByLoad:
		return "load"
	case DecidedByMemory:
	}
	return "memory"
}

// Summary combines the Decisions of several buckets on one request. Dry runs and pools are
// left out of it.
type Summary struct {
	// Whether any bucket denied, so that the request is denied.
	Denied bool

	// Whether any bucket can never admit the request. Then retrying does not help.
	Never bool

	// The size of the deciding bucket, and the units that it has room for.
	Size, Remaining int64

	// The time until all buckets have run empty.
	Clear time.Duration

	// The longest RetryAfter of all Decisions. Zero if no bucket denied, or if
	// Never.
	RetryAfter time.Duration

	// The index of the deciding bucket. If the request is denied, that is the bucket which
	// will never admit it or, failing that, the denying bucket with the longest RetryAfter.
	// If it is admitted, it is the bucket that has room for the fewest requests like it; of
	// two with room for as many, the one whose size is of fewer requests or, failing that,
	// takes longer to run empty.
	Deciding int
}

// Denied reports whether any of the decisions on a request denies it.
func Denied(decisions []Decision) bool {
	for i := range decisions {
		if d := &decisions[i]; d.Denied && !d.DryRun && !d.Pool {
			return true
		}
	}
	return false
}

// Summarize combines the decisions on a request that has these buckets. Without any it
// returns the zero Summary: a request that has no bucket to pass is not denied.
func Summarize(buckets []Bucket, decisions []Decision) Summary {
	return SummarizeFunc(len(decisions), func(i int) (*Decision, int64) {
		b := &buckets[i]
		if b.free() {
			return &decisions[i], 0
		}
		return &decisions[i], b.need()
	})
}

// SummarizeFunc is Summarize for n decisions that are not in one slice. at returns the i-th
// and what the request costs there, or nil to leave it out.
func SummarizeFunc(n int, at func(i int) (d *Decision, cost int64)) Summary {
	var decider *Decision
	var cost int64 // at the decider
	var wait time.Duration
	var sum Summary
	for i := range n {
		d, c := at(i)
		if d == nil || d.DryRun || d.Pool {
			continue
		}
		if decider == nil || d.outranks(c, decider, cost) {
			decider, cost, sum.Deciding = d, c, i
		}
		sum.Clear, wait = max(sum.Clear, d.Clear), max(wait, d.RetryAfter)
	}
	if decider == nil {
		return Summary{}
	}
	sum.Size, sum.Remaining = decider.Size, decider.Remaining
	sum.Denied, sum.Never = decider.Denied, decider.Never
	if sum.Denied && !sum.Never {
		sum.RetryAfter = wait
	}
	return sum
}

// outranks reports whether d, where the request costs c, decides rather than e, where it
// costs k. Units of different buckets can't be compared, but requests can.
func (d *Decision) outranks(c int64, e *Decision, k int64) bool {
	switch {
	case d.Denied != e.Denied:
		return d.Denied
	case d.Never != e.Never:
		return d.Never
	case d.Denied:
		return d.RetryAfter > e.RetryAfter
	case c == 0 && k == 0:
		c, k = 1, 1
	case c == 0 || k == 0: // there is room for any number of requests that cost nothing
		return k == 0
	}
	return cmp.Or(
		compareRatios(d.Remaining, c, e.Remaining, k),
		compareRatios(d.Size, c, e.Size, k),
		cmp.Compare(e.Clear, d.Clear),
	) < 0
}

// compareRatios compares a/b with c/d, without rounding. None of them is negative.
func compareRatios(a, b, c, d int64) int {
	high, low := bits.Mul64(uint64(a), uint64(d))
	otherHigh, otherLow := bits.Mul64(uint64(c), uint64(b))
	return cmp.Or(cmp.Compare(high, otherHigh), cmp.Compare(low, otherLow))
}

// RoomIn returns how long b, and the pool that it borrows from, will have no room for the
// same request again, if nothing more is added after d was decided: the request is denied
// one microsecond earlier and admitted at that time. It differs from d.RetryAfter if b
// did not deny: the request may have taken b's last room. Zero if there is room, or never
// will be.
func (b *Bucket) RoomIn(d *Decision) time.Duration {
	cost := b.need()
	switch {
	case d.Denied || d.Remaining >= cost || b.free():
		return d.RetryAfter
	case d.exact || d.one == 0:
		return d.waitIn(b.Limit.of(), cost)
	}
	wait := time.Duration(d.one-1) * time.Microsecond
	if cost <= d.Size {
		wait = min(wait, d.waitIn(b.Limit.of(), cost))
	}
	return wait
}

// waitIn is RoomIn for a bucket of l that has no room for the cost, without its pool.
func (d *Decision) waitIn(l *bucket.Limit, cost int64) time.Duration {
	switch {
	case d.exact && cost == 1:
		return time.Duration(d.one) * time.Microsecond
	case d.exact:
		return time.Duration(d.rest) * time.Microsecond
	}
	if l.DripSize == 0 {
		complete := l.Complete()
		l = &complete
	}
	return time.Duration(l.Wait(bucket.Level{Clear: d.Clear.Microseconds(), Rest: d.rest}, cost, 0)) * time.Microsecond
}

// Delay returns how long the request has to wait that d admitted, from then on, if b's Limit
// has room for that many delayed units, see [Limit.WithDelay]. If all of them wait, no more pass
// in any time than the limit without these units admits: first come, first served. It is 0 if
// d denied.
func (b *Bucket) Delay(d *Decision, delayed int64) time.Duration {
	if d.Denied || delayed == 0 || b.free() {
		return 0
	}
	l := b.Limit.of().Complete()
	s := bucket.Level{Clear: d.Clear.Microseconds(), Rest: d.rest}
	return time.Duration(l.Delay(s, b.need(), delayed, 0)) * time.Microsecond
}

// SpendTime returns over what time to spend the units that d left, so as to keep to l: until
// they have dripped out again or, in windows, until the present one ends. If none are left,
// it is the time until one is. d was made for a limit like l except for its size, at the time of
// at, and admitted the request.
func (l *Limit) SpendTime(d *Decision, at time.Time) time.Duration {
	numbers := l.of()
	if numbers.DripSize == 0 {
		complete := numbers.Complete()
		numbers = &complete
	}
	if d.Remaining == 0 {
		shown := *numbers
		shown.Size = d.Size
		return d.waitIn(&shown, 1)
	}
	return numbers.SpendTime(d.Remaining, d.Clear, at.UnixMicro())
}
