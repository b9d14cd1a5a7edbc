package redisscript

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// openAfter is the number of failures in a row that open a breaker, except for those
	// of which one is enough, see concernsAll.
	openAfter = 5

	// probeEvery is the time between two probes, give or take a fifth, so that
	// processes do not probe in step.
	probeEvery = 250 * time.Millisecond

	// provingWrites is the number of probes in a row that must write before a
	// server that rejected writes counts as recovered. A server that is out of
	// memory still accepts some writes, as keys expire, and would go down and up
	// many times a second.
	provingWrites = 3

	// If a server goes down again for rejecting writes, within flapsWithin of its
	// recovery, it is not probed for twice as long as the last time, up to
	// maxHold.
	flapsWithin = time.Minute
	maxHold     = 8 * time.Second

	// errorEvery is the minimum time between two reports of errors with the same
	// reason, and between two of another reason why a server is down.
	errorEvery = time.Minute
)

// breakerState is the state of a breaker.
type breakerState int32

const (
	// breakerClosed: calls are sent, and failures in a row are counted.
	breakerClosed breakerState = iota

	// breakerOpen: the server is down, and calls fail at once. The first call
	// after the next probe is due becomes that probe.
	breakerOpen

	// breakerHalfOpen: the server is down, and a probe is in flight.
	breakerHalfOpen
)

// String returns the name of s.
func (s breakerState) String() string {
	switch s {
	case breakerOpen:
		return "open"
	case breakerHalfOpen:
		return "half_open"
	case breakerClosed:
	}
	return "closed"
}

// breaker is a circuit breaker: it knows whether calls may be sent to a server.
type breaker struct {
	server string
	report func(Event) // called with the lock held, so it must not block
	now    func() time.Time
	counts *counts

	// Written with the lock held. While the server is healthy, nothing else is
	// read, except for wrote.
	state    atomic.Int32 // a breakerState
	failures atomic.Int32 // in a row

	wrote atomic.Bool // whether the server has ever accepted a write

	mu       sync.Mutex
	last     *ServerError         // nil if failures is 0
	openedAt time.Time            // when the server went down
	probeAt  time.Time            // when the next probe is due
	reported map[string]time.Time // when an error was last reported, by reason

	// The reported reason why the server is down.
	downReason string
	reasonAt   time.Time // when a later one was last reported
	lasting    int       // how many failures in a row have had the reason of last

	// For a server that rejected writes.
	proofs      int           // number of probes in a row that have written
	hold        time.Duration // how long probes were held back when it last went down
	heldUntil   time.Time     // until when probes are held back
	recoveredAt time.Time     // zero if it has not been down before
}

func newBreaker(server string, report func(Event)) breaker {
	if report == nil {
		report = func(Event) {}
	}
	return breaker{server: server, report: report, now: time.Now, counts: new(counts), reported: make(map[string]time.Time)}
}

// isOpen reports whether the server is down.
func (b *breaker) isOpen() bool { return b.is() != breakerClosed }

// is returns the current state.
func (b *breaker) is() breakerState { return breakerState(b.state.Load()) }

// set changes the state. The lock must be held.
func (b *breaker) set(state breakerState) { b.state.Store(int32(state)) }

// allow returns a nil error if a call may be sent. If probe is true, the server is
// down and the call is a probe; endProbe must be called after it.
func (b *breaker) allow() (probe bool, err error) {
	if b.is() == breakerClosed {
		return false, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch now := b.now(); b.is() {
	case breakerOpen:
		if now.Before(b.probeAt) {
			return false, b.down()
		}
		b.set(breakerHalfOpen)
		b.probeAt = now.Add(jittered(probeEvery))
		return true, nil
	case breakerHalfOpen:
		return false, b.down()
	case breakerClosed: // it was closed just now
	}
	return false, nil
}

// endProbe ends a probe, whatever its outcome.
func (b *breaker) endProbe() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.is() == breakerHalfOpen {
		b.set(breakerOpen)
	}
}

// probeNow makes the next call a probe: there is a connection for it now.
func (b *breaker) probeNow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probeAt = b.heldUntil
}

// down returns why the server is down, for a call that is not sent to it.
func (b *breaker) down() *ServerError {
	f := *b.last
	f.notRun = true
	return &f
}

// timedOut reports whether the server's last failure, with no success since, was a
// timeout.
func (b *breaker) timedOut() bool {
	if b.failures.Load() == 0 {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last != nil && b.last.reason == "timeout"
}

// awaitsWrite reports whether the server is down because it rejects writes.
func (b *breaker) awaitsWrite() bool {
	if !b.isOpen() {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.last != nil && b.last.writes
}

// success records that the server has answered. wrote says that the answer shows
// that the server accepts writes.
func (b *breaker) success(wrote bool) {
	if wrote && !b.wrote.Load() {
		b.wrote.Store(true)
	}
	if b.failures.Load() == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last == nil || b.last.writes && !wrote {
		return
	}
	last, now := b.last, b.now()
	if b.isOpen() {
		if last.intermittent() && !b.provesWrites(now) {
			return
		}
		b.close(EventRecovered, now)
		return
	}
	b.failures.Store(0)
	b.last = nil
	b.reportErrorAt(last, now)
}

// provesWrites records that a server that rejected writes has accepted one, and
// reports whether that is enough for it to count as recovered.
func (b *breaker) provesWrites(now time.Time) bool {
	if b.is() != breakerHalfOpen {
		return false // the call was in flight when the server went down
	}
	if b.proofs++; b.proofs < provingWrites {
		b.probeAt = time.Time{}
		return false
	}
	b.recoveredAt = now
	return true
}

// close closes the breaker and reports an event of the given kind.
func (b *breaker) close(kind EventKind, now time.Time) {
	b.set(breakerClosed)
	b.failures.Store(0)
	b.last = nil
	b.report(Event{Server: b.server, Kind: kind, Downtime: now.Sub(b.openedAt)})
}

// failure records a failure, and reports whether it opened the breaker.
func (b *breaker) failure(f *ServerError) (opened bool) {
	if !f.counts {
		b.reportError(f)
		return false
	}
	b.counts.failed(f)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last == nil || b.last.reason != f.reason {
		b.lasting = 0
	}
	b.lasting++
	b.last, b.proofs = f, 0
	switch failures := b.failures.Add(1); {
	case b.isOpen():
		b.reportReason(f)
		return false
	case failures < openAfter && !b.concernsAll(f):
		return false
	}
	b.set(breakerOpen)
	b.openedAt = b.now()
	b.probeAt = b.openedAt.Add(jittered(probeEvery))
	b.heldUntil = time.Time{}
	if b.flaps(f) {
		b.heldUntil = b.openedAt.Add(jittered(b.hold))
		b.probeAt = b.heldUntil
	}
	b.downReason = f.reason
	b.report(Event{Server: b.server, Kind: EventDown, Reason: f.reason, Err: f})
	return true
}

// concernsAll reports whether a failure is certain to come again with the next call, until
// somebody changes the config or the server: then it opens the breaker on its own. Where a
// server has accepted writes, a command or key that the user has no right to may be needed
// by some calls only.
func (b *breaker) concernsAll(f *ServerError) bool { return f.lasts && (!f.writes || !b.wrote.Load()) }

// reportReason reports why a server is down, if that is no longer what was reported, and has
// lasted. The lock must be held.
func (b *breaker) reportReason(f *ServerError) {
	now := b.now()
	if f.reason == b.downReason || b.lasting < openAfter || now.Sub(b.reasonAt) < errorEvery {
		return
	}
	b.downReason, b.reasonAt = f.reason, now
	b.report(Event{Server: b.server, Kind: EventReason, Reason: f.reason, Err: f, Downtime: now.Sub(b.openedAt)})
}

// intermittent reports whether the server may accept some writes and reject others:
// one that is out of memory, for instance. One that is a replica does not: after a
// failover the next connection is to another server, which is used at once.
func (f *ServerError) intermittent() bool { return f.writes && !f.breaks }

// flaps reports whether the server, which f has just brought down, had only just
// recovered from rejecting writes. It also sets for how long probes are then held
// back.
func (b *breaker) flaps(f *ServerError) bool {
	switch {
	case !f.intermittent():
		return false
	case b.recoveredAt.IsZero() || b.openedAt.Sub(b.recoveredAt) >= flapsWithin:
		b.hold = probeEvery
		return false
	}
	b.hold = min(2*b.hold, maxHold)
	return true
}

// replaced records that other servers have taken this one's place. If it was down,
// that ends: it will not be used again.
func (b *breaker) replaced() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.isOpen() {
		b.close(EventReplaced, b.now())
	}
}

// mute ends all reports.
func (b *breaker) mute() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.report = func(Event) {}
}

// reportError reports a failure that says nothing about other calls.
func (b *breaker) reportError(f *ServerError) {
	b.counts.failed(f)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reportErrorAt(f, b.now())
}

// reportErrorAt reports f, unless an error with the same reason was reported
// within errorEvery.
func (b *breaker) reportErrorAt(f *ServerError, now time.Time) {
	if f.reason == unused {
		return // the client was closed: there is no one to report to
	}
	if last, ok := b.reported[f.reason]; ok && now.Sub(last) < errorEvery {
		return
	}
	b.reported[f.reason] = now
	b.report(Event{Server: b.server, Kind: EventError, Reason: f.reason, Err: f})
}

// jittered returns d give or take a fifth.
func jittered(d time.Duration) time.Duration {
	return d*4/5 + rand.N(d*2/5) //nolint:gosec // nothing secret
}
