package limiter

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// MaxUnits is the largest number of units of a Limit, and the largest cost: 2^49.
const MaxUnits = bucket.MaxUnits

// Limit says how many units a bucket admits in which time. The functions below make one:
// from a rate ([PerSecond], [PerMinute], [Per], [Every]), with fixed windows ([FixedWindow],
// [ClockWindow]) or windows that slide ([SlidingWindow], [SlidingLog]), with a rate that grows
// ([WarmingUp]), and for what is not counted in time ([Concurrency], [BanAfter]). Limits that
// are equal by == are the same. The zero Limit is not valid.
type Limit bucket.Limit

// of returns l as the arithmetic has it.
func (l *Limit) of() *bucket.Limit { return (*bucket.Limit)(l) }

// PerSecond is short for Per(n, time.Second).
func PerSecond(n int64) Limit { return Per(n, time.Second) }

// PerMinute is short for Per(n, time.Minute).
func PerMinute(n int64) Limit { return Per(n, time.Minute) }

// Per returns a Limit that admits n units every d on average, evenly, with bursts of up to
// n: behind a burst, up to 2·n − 1 in one d. [Limit.WithBurst] sets another burst.
//
// In the long run the rate is never exceeded, and missed by less than 1 part in 10,000. The
// drips are n/d reduced to lowest terms in whole microseconds: 60 a second are 3 units every
// 50 ms. If that means several units at a time and more than 100 ms between drips, Per takes
// the fewest units that keep the rate: for 7 a second, 1 unit every 142,858 µs instead of 7
// every second.
//
// n is from 1 to [MaxUnits]; d is a whole number of microseconds, at most 35 years.
// Otherwise the Limit is not valid, and every request returns an error.
func Per(n int64, d time.Duration) Limit { return Limit(bucket.Per(n, d)) }

// Every returns a Limit that admits one unit every d, with no bursts but those that
// [Limit.WithBurst] allows. d is rounded up to whole microseconds. If d is not positive, or
// more than 17 years, the Limit is not valid, and every request returns an error.
func Every(d time.Duration) Limit { return Limit(bucket.Every(d)) }

// WithBurst returns l, which is made by [Per], [PerSecond], [PerMinute] or [Every], with
// bursts of up to n units: up to n − 1 more than its rate in any time. The rate stays if a
// burst has room for what drips at once: of rates up to 100 a second that is 1 unit. Otherwise
// less drips at once, which may cost 1 part in 10,000 of the rate or, with bursts of less than
// some hundredth of a second's units, up to 1 µs of the time in which a burst drips.
//
// n is from 1 to [MaxUnits]. If it is not, l is another limit or a full bucket would take
// more than 35 years to drain, the Limit is not valid, and every request returns an error.
func (l Limit) WithBurst(n int64) Limit { return Limit(bucket.Limit(l).WithBurst(n)) }

// FixedWindow returns a Limit that counts in fixed windows: it admits n units in each,
// and so up to 2·n in a time of d that lies in two windows. A window begins with
// the first request after the one before has ended. n is from 1 to [MaxUnits]; d
// is a whole number of microseconds. Otherwise the Limit is not valid, and every
// request returns an error.
func FixedWindow(n int64, d time.Duration) Limit { return Limit(bucket.FixedWindow(n, d)) }

// ClockWindow is like [FixedWindow], but the windows begin at start and every d before
// and after it, by the store's clock: the server's in a [Redis].
func ClockWindow(n int64, d time.Duration, start time.Time) Limit {
	return Limit(bucket.ClockWindow(n, d, start))
}

// SlidingWindow returns a Limit that admits n units in a time of d, as far as two
// counters can: it estimates that the units of the last window, which began at
// a multiple of d since the Unix epoch by the store's clock, were spread evenly.
// In a time of d it admits up to 2·n, like [ClockWindow], but only if they come
// in two bursts far enough apart. n is from 1 to 2^24 − 1; d is a whole
// number of microseconds, at most 11 years. Otherwise the Limit is not valid, and
// every request returns an error.
func SlidingWindow(n int64, d time.Duration) Limit { return Limit(bucket.SlidingWindow(n, d)) }

// SlidingLog returns a Limit that admits n units in any time of d, exactly: a unit
// has room if fewer than n were admitted in the time of d that ends with it. It
// keeps the time of each admission, at about 10 bytes, which is why n is at most
// 10,000. d is a whole number of microseconds, at most 11 years. Otherwise
// the Limit is not valid, and every request returns an error.
func SlidingLog(n int64, d time.Duration) Limit { return Limit(bucket.SlidingLog(n, d)) }

// WarmingUp returns a Limit that admits n units every d, evenly and without bursts, and slower
// after it was idle: a cold bucket waits three times as long after the first unit, or as
// [Limit.WithColdFactor] says, and in the time of warmUp at most reaches the full rate, if there
// are always requests. A bucket that has been idle for the time of warmUp is cold again, and one
// that was idle for less is so in part.
//
// A request is admitted once the wait after the last one is over, whatever its own cost, and
// makes the next one wait for as long as all its units take. It may cost at most n. With warm
// units that is d/n for each, and so at most 1 + T·n/d requests of one unit are admitted in a
// time T. Each wait is rounded up to whole microseconds, and the idle time that makes up for a
// unit is rounded down to whole microseconds, at least one. So no wait is too short, unless d/n
// is below 1.5 µs; after idle time one may be a little longer than exact.
//
// n is from 1 to the number of microseconds in d; d and warmUp are whole numbers of
// microseconds. All of d and twice warmUp are at most 35 years. Otherwise the Limit is not
// valid, and every request returns an error.
func WarmingUp(n int64, d, warmUp time.Duration) Limit {
	return Limit(bucket.WarmingUp(n, d, warmUp, bucket.DefaultColdFactor))
}

// WithColdFactor returns l, which is made by [WarmingUp], with another factor by which a cold
// bucket waits longer: from 1 to 1,000,000, rounded to thousandths. If it is not, or l is another
// limit, the Limit is not valid, and every request returns an error.
func (l Limit) WithColdFactor(factor float64) Limit {
	return Limit(bucket.Limit(l).WithColdFactor(factor))
}

// Concurrency returns a Limit of n units that are held at one time, for a Bucket with
// Hold. What is charged when they are settled leaves at once, so that only held units
// take room.
func Concurrency(n int64) Limit { return Limit(bucket.Concurrency(n)) }

// BanAfter returns the Limit of a Bucket that bans keys, which is set to watch other
// buckets, see Bucket.Watches: when these have denied a key's requests after times, the
// key is banned for the first of the durations. While it is banned this bucket has no room
// either, and nothing is counted. The next ban takes the next duration, and the last one is
// repeated. All is forgotten once a key was neither banned nor denied for the last
// duration.
//
// after is from 1 to 10,000. There are one to three durations, each in whole
// microseconds, at least 1 s and no less than the one before; twice the last is at most
// 35 years. Otherwise the Limit is not valid, and every request returns an error.
func BanAfter(after int64, durations ...time.Duration) Limit {
	return Limit(bucket.BanAfter(after, durations...))
}

// CountingDenied returns l, but requests that are denied count too, in the bucket that
// denies them and in others of the request that have such a Limit. Then a client that keeps sending
// requests stays locked out, and a RetryAfter only holds for clients that wait for it. A bucket
// that denies a request is filled, and drips again from then on; a fixed window is full until
// it ends, a sliding one counts the units, and one that warms up has no room for the time of
// a unit at its full rate. A bucket that had room, although the request was denied by
// another, is charged. No such request is denied without asking the server.
func (l Limit) CountingDenied() Limit {
	l.CountDenied = true
	return l
}

// WithDelay returns l, with room for that many units more that requests of the given cost are
// admitted if they have to wait for at most d, and how many these are: none if such requests
// can't wait, see the next paragraph. A request to a store with this Limit has to wait for as
// long as [Bucket.Delay] says.
//
// Requests can wait if l is made by [Per], [PerSecond], [PerMinute], [Every] or [WarmingUp],
// and d is long enough for a drip, or the time of a unit. Their cost may be so high that they
// can't: above the burst with rates whose drips are single units.
func (l Limit) WithDelay(d time.Duration, cost int64) (delaying Limit, delayed int64) {
	delayed = bucket.Limit(l).Delayed(d, cost)
	l.Size += delayed
	return l, delayed
}

// Validate returns an error that names the first number of l that is out of range, or nil. A full
// bucket and one more drip must drain within 2^50 µs, which is about 35 years.
func (l Limit) Validate() error { return bucket.Limit(l).Validate() }
