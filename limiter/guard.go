package limiter

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// lostAfter is how many failures in a row make a server count as lost.
	lostAfter = 5

	// probeEvery is the time between two attempts to ask a lost server, give or
	// take a fifth, so that processes do not ask in step.
	probeEvery = 250 * time.Millisecond

	// lapseEvery is the least time between two reports of lapses for one reason.
	lapseEvery = time.Minute
)

// Event is something about a server that an operator should know.
type Event struct {
	// The server's address.
	Server string

	// What happened.
	Kind EventKind

	// Why, in a word, such as "refused", "timeout" or "oom". Empty with Back.
	Reason string

	// Why, in full. Nil with Back.
	Err error

	// With Back, how long the server was lost.
	Lost time.Duration
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
)

// failure is why a server could not be asked, or did not answer as it should.
type failure struct {
	server string
	reason string
	text   string
	err    error

	// Whether it tells that the next request will fail too.
	counts bool
	// Whether only a reply that has written can prove it over.
	writes bool
	// Whether connections that lie idle are likely to be broken too.
	breaks bool
	// Whether the server is well, only not the one to ask.
	elsewhere bool
}

func (f *failure) Error() string {
	text := "redis at " + f.server
	if f.text != "" {
		text += " " + f.text
	}
	return fmt.Sprintf("%s: %v", text, f.err)
}

func (f *failure) Unwrap() error { return f.err }

var (
	// errCorrupt is the failure of a server with a key of ours that something
	// else has written to.
	errCorrupt = errors.New("the value of a key is no bucket's")

	// errNoConnection is the failure to get one of the connections there are.
	errNoConnection = errors.New("all connections are in use")

	// errLate is the failure to be answered after a wait for a connection.
	errLate = errors.New("no time was left after the wait for a connection")

	// errConnecting is the failure to get a first connection.
	errConnecting = errors.New("a connection was not made in time")

	// errNotConnected is the failure of a server that is lost and to which there
	// is no connection yet.
	errNotConnected = errors.New("there is no connection yet")
)

// replies tells the errors that servers reply apart by their first word.
var replies = map[string]failure{
	"OOM":         {reason: "oom", text: "is out of memory", counts: true, writes: true},
	"MISCONF":     {reason: "misconf", text: "can't save its data and takes no writes", counts: true, writes: true},
	"NOREPLICAS":  {reason: "noreplicas", text: "has too few replicas to take writes", counts: true, writes: true},
	"READONLY":    {reason: "readonly", text: "is a replica and takes no writes", counts: true, writes: true, breaks: true},
	"LOADING":     {reason: "loading", text: "is loading its data", counts: true},
	"BUSY":        {reason: "busy", text: "is busy with a script", counts: true},
	"MASTERDOWN":  {reason: "masterdown", text: "is a replica without a master", counts: true},
	"NOAUTH":      {reason: "noauth", text: "wants a password", counts: true},
	"WRONGPASS":   {reason: "wrongpass", text: "does not accept the user or password", counts: true},
	"NOPERM":      {reason: "noperm", text: "does not allow this user a command or key", counts: true},
	"CLUSTERDOWN": {reason: "clusterdown", text: "serves no such slot, a part of its cluster is down"},
	"MOVED":       {reason: "moved", text: "is a cluster's and not the one to ask; is the option for clusters set?", elsewhere: true},
	"ASK":         {reason: "moved", text: "is a cluster's and not the one to ask; is the option for clusters set?", elsewhere: true},
	"TRYAGAIN":    {reason: "tryagain", text: "is moving the slot to another server", elsewhere: true},
}

// replyTexts tells those apart that all begin with "ERR".
var replyTexts = map[string]failure{
	"max number of clients":     {reason: "maxclients", text: "has too many clients", counts: true},
	"user executing the script": {reason: "noperm", text: "does not allow this user a command or key", counts: true},
}

// newFailure returns what err means to those who have waited for the timeout, or
// for as long as it takes if that is 0.
func newFailure(server string, timeout time.Duration, err error) *failure {
	f := failure{reason: "error", counts: true}
	late := "did not answer in time"
	if timeout > 0 {
		late = fmt.Sprintf("did not answer within %v", timeout)
	}
	var reply redis.Error
	var netErr net.Error
	var dns *net.DNSError
	switch {
	case errors.Is(err, errCorrupt):
		f = failure{reason: "corrupt"}
	case errors.Is(err, errNoConnection), errors.Is(err, errLate):
		f = failure{reason: "pool", text: late}
	case errors.Is(err, errNotConnected):
		f = failure{reason: "lost", text: "is lost"}
	case errors.As(err, &reply):
		word, _, _ := strings.Cut(reply.Error(), " ")
		if known, ok := replies[word]; ok {
			f = known
			break
		}
		for text, known := range replyTexts {
			if strings.Contains(reply.Error(), text) {
				f = known
			}
		}
	case errors.As(err, &dns):
		f.reason, f.text = "dns", "is not known by that name"
	case errors.Is(err, errConnecting), errors.Is(err, context.DeadlineExceeded),
		errors.As(err, &netErr) && netErr.Timeout():
		f.reason, f.text = "timeout", late
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		f.reason, f.text, f.breaks = "refused", "can't be connected to", true
	case isTLS(err):
		f.reason, f.text = "tls", "can't be connected to by TLS"
	case errors.Is(err, redis.ErrClosed):
		f = failure{reason: "unused", text: "is no longer in use"}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		f.reason, f.text, f.breaks = "closed", "closed the connection", true
	}
	f.server, f.err = server, err
	return &f
}

// isTLS reports whether err comes of a TLS handshake.
func isTLS(err error) bool {
	var alert tls.AlertError
	var record tls.RecordHeaderError
	var verify *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	return errors.As(err, &alert) || errors.As(err, &record) || errors.As(err, &verify) ||
		errors.As(err, &authority) || strings.Contains(err.Error(), "tls: ")
}

// guard knows whether a server can be asked: a circuit breaker.
type guard struct {
	server string
	report func(Event)
	now    func() time.Time

	failures atomic.Int32 // in a row; from lostAfter on the server is lost

	mu      sync.Mutex
	since   time.Time // when it was lost
	last    *failure
	probeAt time.Time // when a lost server may be asked again
	probing bool      // whether it is being asked
	lapses  map[string]time.Time
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
		return false, g.last
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
	g.probeAt = time.Time{}
}

// isLost reports whether the server is lost.
func (g *guard) isLost() bool { return g.failures.Load() >= lostAfter }

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
	g.last = f
	if g.failures.Add(1) < lostAfter || !g.since.IsZero() {
		return false
	}
	g.since = g.now()
	g.probeAt = g.since.Add(jittered(probeEvery))
	g.report(Event{Server: g.server, Kind: Lost, Reason: f.reason, Err: f})
	return true
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
