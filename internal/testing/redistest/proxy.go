package redistest

import (
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Proxy forwards connections to a server until it is made to inject a fault. It
// has one fault at a time: each method that starts a lasting fault replaces the
// one before, for new connections and for open ones. A connection that was closed
// by a fault stays closed.
type Proxy struct {
	Addr string // where it listens: 127.0.0.1:port

	t        testing.TB
	accepted atomic.Int64
	running  sync.WaitGroup

	mu       sync.Mutex // guards what follows
	target   string
	fault    *fault
	listener net.Listener // nil while it refuses
	links    map[*link]struct{}
}

// fault is what a proxy does. It is immutable: another one replaces it.
type fault struct {
	delay, jitter time.Duration
	blackHole     bool
	slice         int              // replies are forwarded in pieces of this many bytes,
	gap           time.Duration    // with this much time between them
	cut           bool             // a reply ends the connection,
	first         int              // after this many of its bytes
	requests      []*regexp.Regexp // requests whose replies are affected; nil means all
	up, down      *line            // with limited bandwidth; nil if unlimited

	over chan struct{} // closed when another fault has replaced this one
}

// link is a client's connection and the matching one to the server.
type link struct {
	proxy  *Proxy
	client net.Conn
	server net.Conn              // nil when the target cannot be reached
	meant  atomic.Pointer[fault] // the fault that applies to a request
	closed chan struct{}
	close  func()
}

// StartProxy runs a proxy until the test ends. The target is the address of a
// server or the path of its unix socket.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p := &Proxy{t: t, target: target, fault: newFault(), links: make(map[*link]struct{})}
	p.accept(listen(t))
	p.Addr = p.listener.Addr().String()
	t.Cleanup(func() {
		p.Refuse()
		p.running.Wait()
	})
	return p
}

// Pass ends the fault. After Refuse it listens again, where it did before.
func (p *Proxy) Pass() { p.set(newFault()) }

// Delay delays each reply by d, plus a random time of up to the jitter if there is
// one.
func (p *Proxy) Delay(d time.Duration, jitter ...time.Duration) {
	f := newFault()
	f.delay = d
	for _, j := range jitter {
		f.jitter += j
	}
	p.set(f)
}

// BlackHole accepts connections and data and forwards nothing in either direction.
// What it accepted is lost, even when the fault ends.
func (p *Proxy) BlackHole() {
	f := newFault()
	f.blackHole = true
	p.set(f)
}

// CutReplies forwards requests and resets the connection when the reply arrives:
// the command ran and the client cannot know. With requests, it does so only for
// replies to a request that contains any of them as a word, such as "evalsha", in
// upper or lower case. So the client's handshake still works. It examines only
// data that arrives in one piece, and no TLS.
func (p *Proxy) CutReplies(requests ...string) { p.cut(0, requests) }

// HalfReply does the same as CutReplies, but forwards the first n bytes of the
// reply and then closes the connection normally.
func (p *Proxy) HalfReply(n int, requests ...string) { p.cut(n, requests) }

func (p *Proxy) cut(first int, requests []string) {
	f := newFault()
	f.cut, f.first = true, first
	for _, r := range requests {
		f.requests = append(f.requests, regexp.MustCompile(`(?i)\b`+regexp.QuoteMeta(r)+`\b`))
	}
	p.set(f)
}

// Slice forwards replies n bytes at a time with a gap between.
func (p *Proxy) Slice(n int, gap time.Duration) {
	f := newFault()
	f.slice, f.gap = n, gap
	p.set(f)
}

// Throttle limits the bandwidth in each direction, for all connections together.
// Excess data waits.
func (p *Proxy) Throttle(bytesPerSecond int) {
	f := newFault()
	f.up, f.down = &line{rate: bytesPerSecond}, &line{rate: bytesPerSecond}
	p.set(f)
}

// Refuse closes all connections and rejects new ones.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.replace(newFault())
	for l := range p.links {
		l.close()
	}
}

// CloseAll closes all open connections, as a load balancer does that finds them
// idle. New connections are treated as before.
func (p *Proxy) CloseAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

// Retarget sends new connections to another server. Open ones stay where they are.
func (p *Proxy) Retarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Connections returns the number of client connections accepted so far. One counts
// a moment after the client has it.
func (p *Proxy) Connections() int { return int(p.accepted.Load()) }

// Open returns the number of open client connections.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// line is one direction with limited bandwidth.
type line struct {
	rate int // bytes a second

	mu   sync.Mutex
	free time.Time // when all data so far will have passed
}

// take returns how long it takes until n more bytes have passed.
func (l *line) take(n int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(n) * time.Second / time.Duration(l.rate))
	return l.free.Sub(now)
}

func newFault() *fault { return &fault{over: make(chan struct{})} }

// means reports whether the reply to the request is affected.
func (f *fault) means(request []byte) bool {
	return slices.ContainsFunc(f.requests, func(word *regexp.Regexp) bool { return word.Match(request) })
}

// set changes the fault to one during which the proxy listens.
func (p *Proxy) set(f *fault) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener == nil {
		l, err := net.Listen("tcp", p.Addr)
		if err != nil {
			p.t.Fatal(err)
		}
		p.accept(l)
	}
	p.replace(f)
}

// replace changes the fault. The lock must be held.
func (p *Proxy) replace(f *fault) {
	close(p.fault.over)
	p.fault = f
}

func (p *Proxy) current() *fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fault
}

// accept accepts the connections of a listener.
func (p *Proxy) accept(listener net.Listener) {
	p.listener = listener
	p.running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.accepted.Add(1)
			p.running.Go(func() { p.serve(listener, client) })
		}
	})
}

// serve runs a connection until one of its sides is closed.
func (p *Proxy) serve(listener net.Listener, client net.Conn) {
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	network := "tcp"
	if strings.HasPrefix(target, "/") {
		network = "unix"
	}
	// The context ends before the test's cleanup.
	server, err := new(net.Dialer).DialContext(p.t.Context(), network, target)

	l := &link{proxy: p, client: client, closed: make(chan struct{})}
	if err == nil {
		l.server = server
	}
	l.close = sync.OnceFunc(func() {
		close(l.closed)
		_ = client.Close()
		if l.server != nil {
			_ = l.server.Close()
		}
	})
	defer l.close()

	p.mu.Lock()
	refused := p.listener != listener
	if !refused {
		p.links[l] = struct{}{}
	}
	p.mu.Unlock()
	if refused {
		return
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.links, l)
	}()

	p.running.Go(l.passRequests)
	l.passReplies()
}

// passRequests forwards what the client sends until it ends.
func (l *link) passRequests() {
	defer l.close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := l.client.Read(buffer)
		f := l.proxy.current()
		if n > 0 && !f.blackHole {
			if l.server == nil {
				return
			}
			if f.means(buffer[:n]) {
				l.meant.Store(f)
			}
			if f.up != nil {
				l.wait(f, f.up.take(n))
			}
			if _, err := l.server.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// piece is a part of what the server sends.
type piece struct {
	text []byte
	came time.Time
}

// replies returns what the server sends, as it comes: what is on its way from far
// away does not hold up what comes behind it.
func (l *link) replies() <-chan piece {
	pieces := make(chan piece, 1<<10)
	if l.server == nil {
		close(pieces)
		return pieces
	}
	l.proxy.running.Go(func() {
		defer close(pieces)
		buffer := make([]byte, 64<<10)
		for {
			n, err := l.server.Read(buffer)
			if n > 0 {
				select {
				case pieces <- piece{slices.Clone(buffer[:n]), time.Now()}:
				case <-l.closed:
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	return pieces
}

// passReplies forwards what the server sends until it ends, or until the end of a
// fault that hides this from the client.
func (l *link) passReplies() {
	for b := range l.replies() {
		if !l.pass(b) {
			return
		}
	}
	for f := l.proxy.current(); f.blackHole; f = l.proxy.current() {
		select {
		case <-f.over:
		case <-l.closed:
			return
		}
	}
}

// pass forwards a reply and reports whether the connection stays open.
func (l *link) pass(p piece) bool {
	for reply := p.text; len(reply) > 0; {
		f, n := l.proxy.current(), len(reply)
		switch {
		case f.blackHole:
			return true
		case f.cut && (len(f.requests) == 0 || l.meant.Load() == f):
			if f.first == 0 {
				_ = l.client.(*net.TCPConn).SetLinger(0)
			} else {
				_, _ = l.client.Write(reply[:min(n, f.first)])
			}
			return false
		case f.delay > 0 || f.jitter > 0:
			//nolint:gosec // no secret
			due := p.came.Add(f.delay + time.Duration(rand.Int64N(int64(f.jitter)+1)))
			if !l.wait(f, time.Until(due)) {
				continue
			}
		case f.slice > 0:
			n = min(n, f.slice)
		case f.down != nil:
			l.wait(f, f.down.take(n))
		}
		if _, err := l.client.Write(reply[:n]); err != nil {
			return false
		}
		if reply = reply[n:]; len(reply) > 0 {
			l.wait(f, f.gap)
		}
	}
	return true
}

// wait waits for d, or until the connection is closed. It returns false as soon as
// another fault has started.
func (l *link) wait(f *fault, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.closed:
	case <-f.over:
		return false
	}
	return true
}
