// Package limiter decides whether a request may pass, by leaky buckets that
// any number of processes can share. A bucket stands for one client at one limit:
// it holds up to Size units, drips at a steady rate, and admits what fits. So an
// idle client may send a burst, and a busy one is held to the rate. Buckets are
// kept in this process or in Redis; a key tells whose bucket it is.
//
// Ten requests a second for each address, and up to ten at once:
//
//	api := limiter.Limiter{Store: limiter.NewMemory(nil), Limit: limiter.PerSecond(10)}
//
//	d, err := api.Allow(ctx, "203.0.113.7")
//	if err != nil || d.Denied {
//		// refuse, and say when to come again: d.RetryAfter
//	}
//
// Think of a bucket with a hole. It holds at most Size units. Each request
// that is admitted pours its cost in; every DripInterval, DripSize units drip out.
// A request whose cost no longer fits is denied and adds nothing. Drips are
// counted from the request that found the bucket empty, and an empty bucket stays
// empty however long it is left alone: idle time is not saved up. All that has to
// be remembered of a bucket is when it will run empty; with a DripSize of 1 this
// is the generic cell rate algorithm (GCRA).
//
// A [Store] keeps buckets and decides requests against them: [Memory] in this
// process, [Redis] for all processes that use one Redis. A [Limiter] asks it about
// one limit. A [Request] names several buckets that a request has to pass, and is
// decided in one atomic step: unless asked otherwise it charges all of its buckets
// or none. [Summarize] makes one answer of their decisions.
//
// While a Redis server can't be asked, a Memory stands in for it, if there is
// one: it follows the levels that the server reports, goes on from the last of
// them, and tells the server its own when that is back. So one process alone
// never admits more than its buckets allow, whatever becomes of the server. No
// request waits for longer than its timeout.
//
// Every number is an integer, times are microseconds, and nothing is rounded:
// from empty a bucket admits at most Size + min(DripSize, Size)·⌊T/DripInterval⌋
// in a time T, however many requests come at once, wherever they come in.
package limiter
