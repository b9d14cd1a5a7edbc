package telemetry

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Result is the outcome of a request at one limit.
type Result uint8

// The results.
const (
	Admitted  Result = iota
	Near             // admitted, and the bucket is at least 80 % full now, though one request does not fill it
	Denied           // this limit had no room
	Banned           // this limit had banned the key before
	Shed             // this limit follows the load, and turned the request away
	Spared           // this limit had room, but another one denied
	WouldDeny        // this limit is a dry run and had no room
	results
)

// Tally is what is counted at limits besides results.
type Tally uint8

// What is counted. All but units only happens at limits with the option that tallyOptions has.
const (
	Units     Tally = iota // charged
	OverSize               // requests that filled a bucket above its size
	Delayed                // requests that waited for room
	Displaced              // requests that lost their places in a queue to requests of other clients
	BansBegun
	Borrowed // requests for which a pool had room instead
	Unclear  // requests of which a field in the key is unclear
	tallies
)

var tallyOptions = [tallies]Policies{OverSize: Soft, Delayed: Delays, Displaced: Delays, BansBegun: Bans, Borrowed: Borrows, Unclear: Fields}

// Has reports whether what is counted of limits with some options.
func (what Tally) Has(options Policies) bool { return what == Units || options.Has(tallyOptions[what]) }

// deciders is the number of limiter.Deciders.
const deciders = int(limiter.DecidedByLoad) + 1

// Counters counts what happened at the limits of one path. They are kept across
// reloads, as long as any config in use has a limit of that path.
//
// All cores count on one limit, so each counts in a stripe of its own as far as
// possible, which the caller chooses.
type Counters struct {
	Path    string
	stripes [stripes]stripe

	reported [len(denialEvents)]reported // guarded by the lock of the Process
}

// reported is what events of one kind have reported.
type reported struct {
	denials uint64
	next    time.Time // when one may be emitted again
}

// stripes is the number of stripes, a power of two up to 256.
const stripes = 8

// stripe is one stripe of counters, on cache lines of its own.
type stripe struct {
	_         [64]byte
	decisions [results][deciders]atomic.Uint64
	tallies   [tallies]atomic.Uint64

	waits [len(denialEvents)]atomic.Int64 // of the last denial, see encodeWait; 0 if an event has reported it
}

// Count counts what the limit decided on a request for b, given whether it had banned the
// key before, whether the request is denied by any limit, and whether b was charged.
func (c *Counters) Count(on uint32, b *limiter.Bucket, d *limiter.Decision, banned, denied, charged bool) {
	s := &c.stripes[on%stripes]
	kind := Admitted
	switch {
	case d.Denied && d.DryRun:
		kind = WouldDeny
		s.waits[wouldDeny].Store(encodeWait(d))
	case d.Denied:
		event := exceeded
		switch kind = Denied; {
		case banned:
			kind = Banned
		case d.By == limiter.DecidedByLoad:
			kind, event = Shed, shed
		}
		s.waits[event].Store(encodeWait(d))
	case denied:
		kind = Spared
	case d.Remaining <= d.Size/5 && !filledByOne(b, d.Size):
		kind = Near
	}
	s.decisions[kind][d.By].Add(1)
	if charged {
		s.tallies[Units].Add(uint64(b.Cost))
	}
}

// Add counts n more of what is counted besides results.
func (c *Counters) Add(on uint32, what Tally, n int64) {
	c.stripes[on%stripes].tallies[what].Add(uint64(n))
}

// filledByOne reports whether any request leaves b, of the given size, at least 80 %
// full, even if b was empty: that says nothing then, as with a size of 1 or a warm-up.
func filledByOne(b *limiter.Bucket, size int64) bool {
	return b.Limit.Algorithm == bucket.WarmUp || size-b.Cost <= size/5
}

// waitForever is the wait of a request that will never be admitted.
const waitForever = math.MaxInt64

// encodeWait returns the wait of a denial, which is never zero.
func encodeWait(d *limiter.Decision) int64 {
	if d.Never {
		return waitForever
	}
	return max(int64(d.RetryAfter), 1)
}

// lastWait returns the longest of the last waits of each stripe that events of a kind report
// of, and forgets them.
func (c *Counters) lastWait(kind int) (wait int64) {
	for i := range c.stripes {
		wait = max(wait, c.stripes[i].waits[kind].Swap(0))
	}
	return max(wait, 1)
}

// Totals is the sum of all stripes of counters.
type Totals struct {
	decisions [results][deciders]uint64
	Tallies   [tallies]uint64
}

// Totals returns the sums so far.
func (c *Counters) Totals() (t Totals) {
	for i := range c.stripes {
		s := &c.stripes[i]
		for kind := range s.decisions {
			for by := range s.decisions[kind] {
				t.decisions[kind][by] += s.decisions[kind][by].Load()
			}
		}
		for what := range s.tallies {
			t.Tallies[what] += s.tallies[what].Load()
		}
	}
	return t
}

// denied returns the number of denials so far that events of a kind report.
func (c *Counters) denied(kind int) (sum uint64) {
	for i := range c.stripes {
		for _, result := range denialEvents[kind].results {
			for by := range deciders {
				sum += c.stripes[i].decisions[result][by].Load()
			}
		}
	}
	return sum
}

// by returns the number of decisions with the given results, by limiter.Decider.
func (t *Totals) by(kinds ...Result) (n [deciders]uint64) {
	for _, kind := range kinds {
		for by := range n {
			n[by] += t.decisions[kind][by]
		}
	}
	return n
}

// All returns the number of all decisions, by limiter.Decider.
func (t *Totals) All() [deciders]uint64 {
	return t.by(Admitted, Near, Denied, Banned, Shed, Spared, WouldDeny)
}

// Of returns the number of decisions with the given results, by any decider.
func (t *Totals) Of(kinds ...Result) (sum uint64) {
	for _, n := range t.by(kinds...) {
		sum += n
	}
	return sum
}

// Checked is the outcome of a request that met a limit.
type Checked uint8

// What may become of requests.
const (
	CheckedAdmitted  Checked = iota
	CheckedDenied            // by a limit
	CheckedUndecided         // the store did not decide, so on_error applied
	CheckedRefused           // a value or a matcher could not be evaluated
	CheckedEarlyData         // the client's address was not verified yet
	checkedKinds
)

// String returns the name of c.
func (c Checked) String() string {
	return [checkedKinds]string{"admitted", "denied", "undecided", "refused", "early_data"}[c]
}

// CheckedSet is a set of outcomes of one request.
type CheckedSet uint8

// Add adds to s and reports whether s did not have it yet.
func (s *CheckedSet) Add(what Checked) (added bool) {
	before := *s
	*s |= 1 << what
	return *s != before
}

// CountRequest counts a request.
func (p *Process) CountRequest(on uint32, what Checked) { p.checked[on%stripes].n[what].Add(1) }

// Requests returns the number of requests so far, by outcome.
func (p *Process) Requests() map[Checked]uint64 {
	n := make(map[Checked]uint64, checkedKinds)
	for what := range checkedKinds {
		n[what] = 0
		for i := range p.checked {
			n[what] += p.checked[i].n[what].Load()
		}
	}
	return n
}
