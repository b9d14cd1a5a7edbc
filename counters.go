package ratelimit

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// counted is what became of a request at one limit.
type counted uint8

const (
	countedAdmitted counted = iota
	countedNear             // admitted, and the bucket is at least 80 % full now, though one request does not fill it
	countedDenied           // this limit had no room
	countedSpared           // this limit had room, but another one denied
	countedKinds
)

// deciders is the number of limiter.Deciders.
const deciders = int(limiter.DecidedByFallback) + 1

// counters counts what happened at the limits of one path. They are kept across
// reloads, as long as any config in use has a limit of that path.
//
// All cores count on one limit, so each counts in a stripe of its own as far as
// possible: see evaluation.stripe.
type counters struct {
	path    string
	denials denials
	stripes [stripes]stripe
}

// stripes is the number of stripes, a power of two.
const stripes = 8

// stripe is one stripe of counters, on cache lines of its own.
type stripe struct {
	_         [64]byte
	decisions [countedKinds][deciders]atomic.Uint64
	units     atomic.Uint64 // charged
}

// limitCounters holds the counters of all limits by path.
var limitCounters = caddy.NewUsagePool()

// countersOf returns the counters of a path. The caller must release them.
func countersOf(path string) *counters {
	c, _, _ := limitCounters.LoadOrNew(path, func() (caddy.Destructor, error) { return &counters{path: path}, nil })
	return c.(*counters)
}

// release releases the counters, which end with the last config that uses them.
func (c *counters) release() { _, _ = limitCounters.Delete(c.path) }

// Destruct implements caddy.Destructor.
func (*counters) Destruct() error { return nil }

// count counts what the limit decided on a request for b, given whether the request
// is denied by any limit, and whether b was charged.
func (c *counters) count(on uint32, b *limiter.Bucket, d *limiter.Decision, denied, charged bool) {
	kind := countedAdmitted
	switch {
	case d.Denied:
		kind = countedDenied
	case denied:
		kind = countedSpared
	case d.Remaining <= d.Size/5 && !filledByOne(b):
		kind = countedNear
	}
	s := &c.stripes[on%stripes]
	s.decisions[kind][d.By].Add(1)
	if charged {
		s.units.Add(uint64(b.Cost)) //nolint:gosec // costs are positive
	}
}

// filledByOne reports whether any request leaves b at least 80 % full, even if b was
// empty: that tells nothing then, as with a size of 1 or a warm-up.
func filledByOne(b *limiter.Bucket) bool {
	return b.Limit.Algorithm == limiter.WarmUp || b.Limit.Size-b.Cost <= b.Limit.Size/5
}

// limitTotals is the sum of all stripes of counters.
type limitTotals struct {
	decisions [countedKinds][deciders]uint64
	units     uint64
}

// totals returns the sums so far.
func (c *counters) totals() (t limitTotals) {
	for i := range c.stripes {
		s := &c.stripes[i]
		for kind := range s.decisions {
			for by := range s.decisions[kind] {
				t.decisions[kind][by] += s.decisions[kind][by].Load()
			}
		}
		t.units += s.units.Load()
	}
	return t
}

// by returns the number of decisions of the given kinds, by limiter.Decider.
func (t *limitTotals) by(kinds ...counted) (n [deciders]uint64) {
	for _, kind := range kinds {
		for by := range n {
			n[by] += t.decisions[kind][by]
		}
	}
	return n
}

// of returns the number of decisions of the given kinds, whoever decided.
func (t *limitTotals) of(kinds ...counted) (sum uint64) {
	for _, n := range t.by(kinds...) {
		sum += n
	}
	return sum
}

// checked is what became of a request that met a limit.
type checked uint8

const (
	checkedAdmitted  checked = iota
	checkedDenied            // by a limit
	checkedUndecided         // the store did not decide, so on_error applied
	checkedRefused           // a value or a matcher could not be evaluated
	checkedEarlyData         // the client's address was not verified yet
	checkedKinds
)

// String returns the name of c.
func (c checked) String() string {
	return [checkedKinds]string{"admitted", "denied", "undecided", "refused", "early_data"}[c]
}

// checkedRequests counts the requests of this process by what became of them.
var checkedRequests [stripes]struct {
	_ [64]byte
	n [checkedKinds]atomic.Uint64
}

// countChecked counts a request.
func countChecked(on uint32, what checked) { checkedRequests[on%stripes].n[what].Add(1) }

// checkedSet is a set of what became of a request.
type checkedSet uint8

// add adds to s and reports whether s did not have it yet.
func (s *checkedSet) add(what checked) (added bool) {
	before := *s
	*s |= 1 << what
	return *s != before
}

// refusedAs returns what becomes of a request on whose limits a matcher or a value
// failed.
func refusedAs(err error) checked {
	if ref, ok := err.(refusal); ok && ref.status == errEarlyData.status { //nolint:errorlint // as addTo returns it
		return checkedEarlyData
	}
	return checkedRefused
}

// checkedTotal returns the number of requests so far.
func checkedTotal(what checked) (n uint64) {
	for i := range checkedRequests {
		n += checkedRequests[i].n[what].Load()
	}
	return n
}
