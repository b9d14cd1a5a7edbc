package limiter

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// lostAfter is how many failures in a row make a server count as lost.
	lostAfter = 5

	// probeEvery is the time between two attempts to ask a lost server, give or
	// take a fifth, so that processes do not ask in step.
	probeEvery = 250 * time.Millisecond

	// provenBy is how many probes in a row have to write until a server is back
	// that took no writes. One that has no memory left still takes some, as keys
	// expire, and would be lost and back many times a second.
	provenBy = 3

	// Such a server may be back for a moment only, and lost again. Then it is not
	// asked for twice as long as it was last time, up to longestHold. After it was
	// well for quietFor that begins anew.
	longestHold = 8 * time.Second
	quietFor    = time.Minute

	// lapseEvery is the least time between two reports of lapses for one reason.
	lapseEvery = time.Minute
)

// Event is something about a server that an operator should know.
type Event struct {
	// The server's address.
	Server string

	// What happened.
	Kind EventKind

	// Why, in a word, such as "refused", "timeout" or "oom". Empty with Back and Replaced.
	Reason string

	// Why, in full. Nil with Back and Replaced.
	Err error

	// With Back and Replaced, how long the server was lost.
	Lost time.Duration

	// How many events before this one were dropped, since too many waited to be
	// reported.
	Dropped int
}

// EventKind is a kind of event.
type EventKind uint8

const (
	// Lost: the server has failed several times in a row. It is no longer asked,
	// but for a probe now and then.
	Lost EventKind = iota

	// Back: the server has answered a probe and decides again.
	Back

	// Lapse: the server failed in single cases. Reported at most once a minute
	// for each reason.
	Lapse

	// Replaced: a lost server of a cluster has no slots any more, as after a
	// failover. Others decide on its keys.
	Replaced
)

// guard knows whether a server can be asked: a circuit breaker.
type guard struct {
	server string
	report func(Event) // called with the lock held, so it must not wait
	now    func() time.Time

	failures atomic.Int32 // in a row; from lostAfter on the server is lost

	mu      sync.Mutex
	since   time.Time // when it was lost
	last    *failure
	probeAt time.Time // when a lost server may be asked again
	probing bool      // whether it is being asked
	lapses  map[string]time.Time

	// Of a server that took no writes.
	proofs    int           // how many probes in a row have written
	hold      time.Duration // how long it was not asked when it was last lost
	heldUntil time.Time     // until when it is not asked
	backAt    time.Time     // when it was back; zero if that is long ago
}

func newGuard(server string, report func(Event)) guard {
	if report == nil {
		report = func(Event) {}
	}
	return guard{server: server, report: report, now: time.Now, lapses: make(map[string]time.Time)}
}

// enter returns nil if the server may be asked. If it is lost that is only now
// and then, for a single probe; leave must be called after it.
func (g *guard) enter() (probe bool, err error) {
	if !g.isLost() {
		return false, nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch now := g.now(); {
	case g.since.IsZero():
		return false, nil
	case g.probing || now.Before(g.probeAt):
		return false, g.unasked()
	default:
		g.probing, g.probeAt = true, now.Add(jittered(probeEvery))
		return true, nil
	}
}

// leave ends a probe.
func (g *guard) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.probing = false
}

// soon makes the next request a probe: the connection for it is there.
func (g *guard) soon() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.probeAt = g.heldUntil
}

// timedOut reports whether the last that is known of the server is that it did
// not answer in time.
func (g *guard) timedOut() bool {
	if g.failures.Load() == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last != nil && g.last.reason == "timeout"
}

// isLost reports whether the server is lost.
func (g *guard) isLost() bool { return g.failures.Load() >= lostAfter }

// lost returns why the server is lost, or nil if it is not.
func (g *guard) lost() error {
	if !g.isLost() {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since.IsZero() {
		return nil
	}
	return g.unasked()
}

// unasked returns why the server is lost, for a request that is not sent to it.
func (g *guard) unasked() *failure {
	f := *g.last
	f.undone = true
	return &f
}

// doubtsWrites reports whether the server is lost for not taking writes.
func (g *guard) doubtsWrites() bool {
	if !g.isLost() {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last != nil && g.last.writes
}

// success takes note that the server has answered; wrote, that it has shown to
// take writes.
func (g *guard) success(wrote bool) {
	if g.failures.Load() == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.last == nil || g.last.writes && !wrote {
		return
	}
	last, now := g.last, g.now()
	if last.writes && !g.since.IsZero() {
		if !g.probing {
			return // it was under way when the server was lost
		}
		if g.proofs++; g.proofs < provenBy {
			g.probeAt = time.Time{}
			return
		}
		g.backAt = now
	}
	g.failures.Store(0)
	g.last = nil
	if g.since.IsZero() {
		g.reportLapse(last, now)
		return
	}
	lost := now.Sub(g.since)
	g.since = time.Time{}
	g.report(Event{Server: g.server, Kind: Back, Lost: lost})
}

// failure takes note of a failure, and reports whether the server is lost by
// it.
func (g *guard) failure(f *failure) (lost bool) {
	if !f.counts {
		g.lapse(f)
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last, g.proofs = f, 0
	if g.failures.Add(1) < lostAfter || !g.since.IsZero() {
		return false
	}
	g.since = g.now()
	if g.heldUntil = (time.Time{}); g.backTooSoon(f) {
		g.probeAt = g.since.Add(jittered(g.hold))
		g.heldUntil = g.probeAt
	} else {
		g.probeAt = g.since.Add(jittered(probeEvery))
	}
	g.report(Event{Server: g.server, Kind: Lost, Reason: f.reason, Err: f})
	return true
}

// backTooSoon reports whether the server, now lost by f, was back from not taking
// writes for a moment only, and decides for how long it is not asked then.
func (g *guard) backTooSoon(f *failure) bool {
	switch {
	case !f.writes:
		return false
	case g.backAt.IsZero() || g.since.Sub(g.backAt) >= quietFor:
		g.hold = probeEvery
		return false
	}
	g.hold = min(2*g.hold, longestHold)
	return true
}

// replaced takes note that others have taken the server's place. If it was lost
// that is over: nobody will ask it.
func (g *guard) replaced() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since.IsZero() {
		return
	}
	lost := g.now().Sub(g.since)
	g.failures.Store(0)
	g.since, g.last = time.Time{}, nil
	g.report(Event{Server: g.server, Kind: Replaced, Lost: lost})
}

// silence ends all reports.
func (g *guard) silence() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.report = func(Event) {}
}

// lapse reports a failure that tells nothing of other requests.
func (g *guard) lapse(f *failure) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reportLapse(f, g.now())
}

// reportLapse reports f, unless one for its reason was reported just now.
func (g *guard) reportLapse(f *failure, now time.Time) {
	if f.reason == "unused" {
		return // by nobody who could be told
	}
	if last, ok := g.lapses[f.reason]; ok && now.Sub(last) < lapseEvery {
		return
	}
	g.lapses[f.reason] = now
	g.report(Event{Server: g.server, Kind: Lapse, Reason: f.reason, Err: f})
}

// jittered returns d give or take a fifth.
func jittered(d time.Duration) time.Duration {
	return d*4/5 + rand.N(d*2/5) //nolint:gosec // nothing secret
}
