// Package limiter is a rate limiter made of leaky buckets that any number of
// processes can share. A bucket belongs to one client at one limit: it holds so
// many units, drains at a steady rate, and admits what fits. So a client that has
// been idle may send a burst, and a busy one is held to the rate. Buckets are kept
// in this process or in Redis, one for each key of a limit.
//
// Ten requests a second for each address, and up to ten at once:
//
//	api := limiter.Limiter{Store: limiter.NewMemory(), Limit: limiter.PerSecond(10)}
//
//	d, err := api.Allow(ctx, "203.0.113.7")
//	if err != nil || d.Denied {
//		// refuse the request; d.RetryAfter says when to try again
//	}
//
// Think of a bucket with a hole. It holds a limited number of units: its size, which is the burst
// of a rate or the units of a window. Each admitted request pours in its cost, and units drip
// out at the rate. A request whose cost no longer fits is denied and adds nothing. Drips are
// counted from the request that found the bucket empty, and an empty bucket stays empty however
// long it is left alone: idle time is not saved up. All that a bucket has to remember is when it
// will run empty; with drips of one unit this is the generic cell rate algorithm (GCRA).
//
// A [Store] keeps buckets and decides requests: a [Memory] keeps them in this
// process, a [Redis] shares them among all processes that use the same Redis. A
// [Limiter] applies one limit. A [Request] names several buckets that a request
// has to pass, and is decided in one atomic step: unless asked otherwise it
// charges all of its buckets or none. [Summarize] combines their decisions into
// one.
//
// A Redis store can have a Memory as its fallback. The Memory follows the levels
// that the servers report, takes over from the last of them while a server is
// unavailable, and reports its own levels when the server is back. So a single
// process never admits more than its buckets allow, whatever happens to the
// server, except for its clock: each step of that forward lets buckets drip. No request
// waits for longer than its timeout.
//
// All numbers of such a bucket are integers, times are microseconds, and nothing is rounded: in a
// time of n drips, from empty, it admits its size and n times what a drip lets out, however many
// requests come at once, wherever they come in. Other algorithms count in other ways:
// [SlidingWindow] estimates, and [WarmingUp] rounds.
package limiter
