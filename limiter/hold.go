package limiter

import (
	"context"
	"runtime"
)

// Hold is a request that takes room while it lasts, and is charged when it is over: see
// [Limiter.Hold]. It may be copied; the copies are one request. Its zero value holds nothing.
type Hold struct {
	// The decision on the request. If it is Denied, nothing is held.
	Decision

	units *heldUnits // nil if nothing is held
}

// heldUnits are what a Hold holds. Only copies of that refer to them, so they are garbage
// once the request is forgotten.
type heldUnits struct {
	held      *Held
	forgotten runtime.Cleanup
}

// Hold is shorthand for HoldN(ctx, key, 1).
func (l *Limiter) Hold(ctx context.Context, key string) (Hold, error) { return l.HoldN(ctx, key, 1) }

// HoldN is AllowN for a request of which it is only known when it is over whether it counts,
// or what it costs. If it is admitted, it holds n units until Done is called, which says how
// many are charged. Held units take room like charged ones, but do not drip: so with a limit
// made by [Concurrency], at most as many requests as it has units run at one time. With
// n = 0 nothing is held, and requests are admitted as long as there is room for one unit.
//
// Call Done, whatever becomes of the request, even after an error or a denial, when it does
// nothing. A Hold that is forgotten is charged the n units that it holds, once the garbage
// collector finds that nothing refers to it, which takes some minutes. That of a process
// that has died is charged by its Redis 10 to 15 seconds later. The end of ctx does not end
// it: a client that leaves would make room for its next request while this one still runs.
func (l *Limiter) HoldN(ctx context.Context, key string, n int64) (Hold, error) {
	held := new(Held)
	d, err := l.take(ctx, key, n, held)
	if err != nil || d.Denied {
		return Hold{Decision: d}, err
	}
	units := &heldUnits{held: held}
	units.forgotten = runtime.AddCleanup(units, func(held *Held) { held.Settle(0, n) }, held)
	return Hold{d, units}, nil
}

// Done ends the request and charges it: with 0 it counts for nothing. More than the bucket
// has room for overfills it, by its size at most. Only the first call counts. Done does not
// wait for the Store.
func (h Hold) Done(charge int64) {
	if h.units == nil {
		return
	}
	h.units.forgotten.Stop()
	h.units.held.Settle(0, charge)
	runtime.KeepAlive(h.units)
}
