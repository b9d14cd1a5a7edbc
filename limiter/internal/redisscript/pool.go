package redisscript

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// connectWithin is how long it may take to make a connection: to dial, shake
	// hands and log in. No call waits for that longer than its own timeout.
	connectWithin = 5 * time.Second

	// checkEvery is how long a connection is idle before something is sent on it,
	// so that nobody closes it. If the server, or something in between, closes
	// connections sooner, it is sent after half of that time, but not more often
	// than each leastCheckEvery.
	checkEvery      = 30 * time.Second
	leastCheckEvery = 250 * time.Millisecond

	// slowToConnect is how long a first connection may take before the server
	// counts as failing.
	slowToConnect = time.Second
)

// pool is the connections to a server.
//
// They are the client's own, held here from when they are made, logged in and all,
// until they break. The client would make them within the call that first needs
// one, and they would never be ready in time if the server is far away.
type pool struct {
	client   *redis.Client
	script   *Script
	timeout  time.Duration
	clock    func() time.Duration
	breaker  *breaker
	restarts *restarts
	fail     func(*ServerError) // records a failure of the server

	idle   chan *connection // connections that nobody uses
	held   atomic.Int32     // connections there are or are being made, at most the capacity of idle
	made   atomic.Int32     // of these, connections there are
	wanted atomic.Int32     // how many wait for one
	broke  atomic.Int32     // how often a connection broke that was made after others had
	failed signal           // there is none, and none could be made; or the server is down
	dials  atomic.Int32     // how often in a row one more could not be made
	dialAt atomic.Int64     // when one more may be made after one could not be, in µs on clock
	began  atomic.Int64     // when making the first connection began, in µs on clock
	checks atomic.Int64     // how long a connection may be idle until it is tried, in ns

	keeper sync.Once     // starts keep
	wake   chan struct{} // tells keep that the server is down
	done   chan struct{} // closed when the server is no longer used
}

// connection is a connection to a server. The client holds what is behind it, see
// idleConn.
type connection struct {
	*redis.Conn
	broke int32     // the pool's count when it was made
	used  time.Time // when it was put back
}

func newPool(client *redis.Client, script *Script, opt *Options, b *breaker, r *restarts, fail func(*ServerError)) *pool {
	client.AddHook(refusals{})
	client.AddHook(idleHook{})
	start := time.Now()
	p := &pool{
		client:   client,
		script:   script,
		timeout:  opt.Timeout,
		clock:    func() time.Duration { return time.Since(start) },
		breaker:  b,
		restarts: r,
		fail:     fail,
		idle:     make(chan *connection, opt.poolSize()),
		wake:     make(chan struct{}, 1),
		done:     make(chan struct{}),
	}
	p.checks.Store(int64(checkEvery))
	return p
}

// stop ends what the pool does by itself.
func (p *pool) stop() { close(p.done) }

// failure returns what err means for a call.
func (p *pool) failure(err error) *ServerError { return newFailure(p.breaker.server, p.timeout, err) }

// grow makes a connection for the next who asks, if there is none left and none is
// being made.
func (p *pool) grow() {
	if len(p.idle) == 0 && p.held.Load() == p.made.Load() {
		p.connect(false)
	}
}

// clear discards the connections that nobody uses.
func (p *pool) clear() {
	for conn := p.tryGet(); conn != nil; conn = p.tryGet() {
		p.discard(conn)
	}
}

// down tells those who wait for a connection that the server is down.
func (p *pool) down(f *ServerError) {
	p.failed.raise(f)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// broken records that a connection broke, and reports whether it is the first
// of those that were made together.
func (p *pool) broken(conn *connection) (first bool) {
	return p.broke.CompareAndSwap(conn.broke, conn.broke+1)
}

// tryGet returns a connection that nobody uses, or nil. It is none that was made
// with one that has broken.
func (p *pool) tryGet() *connection {
	for {
		select {
		case conn := <-p.idle:
			if conn.broke == p.broke.Load() {
				return conn
			}
			p.discard(conn)
		default:
			return nil
		}
	}
}

// get has one more connection made and returns the first that is ready. It waits
// for half of the time that a call has, so that some is left for the answer: in an
// overload all calls would otherwise be too late. Only patient calls wait for all
// of it. It returns errNoConnection if that was in vain, and the caller takes note
// of it. A probe does not wait.
//
// Nobody waits for a first connection that takes longer than a call may wait. That
// is no failure unless calls have got no answer either: the server may be far
// away. If it takes very long, see dial.
func (p *pool) get(ctx context.Context, probe, patient bool) (*connection, error) {
	failed := p.failed.next()
	p.wanted.Add(1)
	defer p.wanted.Add(-1)
	p.connect(probe)
	if probe {
		return nil, p.failure(errNotConnected)
	}
	longest := p.timeout
	if !patient {
		longest /= 2
	}
	if p.made.Load() == 0 {
		longest = min(longest, p.timeout-p.connecting())
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	select {
	case conn := <-p.idle:
		return conn, nil
	case <-failed:
		f := *p.failed.why()
		f.notRun = true // what has failed was not this call
		return nil, &f
	case <-p.done:
		return nil, p.failure(redis.ErrClosed)
	case <-ctx.Done():
	}
	if p.made.Load() > 0 {
		// The server does answer, but not all of those who ask at once.
		return nil, errNoConnection
	}
	f := p.failure(errConnecting)
	if f.counts = p.breaker.timedOut(); f.counts {
		p.fail(f)
	}
	return nil, f
}

// connecting returns for how long a first connection has been in the making.
func (p *pool) connecting() time.Duration {
	return p.clock() - time.Duration(p.began.Load())*time.Microsecond
}

// connect makes a connection, unless there may be no more. If it is for a probe
// the next call is one.
func (p *pool) connect(probe bool) {
	for {
		n := p.held.Load()
		switch {
		case int(n) >= cap(p.idle):
			return
		case !probe && n > 0 && !p.mayDial():
			return
		case p.held.CompareAndSwap(n, n+1):
			if n == 0 {
				p.began.Store(p.clock().Microseconds())
			}
			p.keeper.Do(func() { go p.keep() })
			go p.dial(probe)
			return
		}
	}
}

// mayDial reports whether to try for one more connection. After one could not be
// made that is only now and then, and one at a time.
func (p *pool) mayDial() bool {
	at, now := p.dialAt.Load(), p.clock()
	return at == 0 || now.Microseconds() >= at &&
		p.dialAt.CompareAndSwap(at, (now+jittered(probeEvery)).Microseconds())
}

// dial makes a connection.
func (p *pool) dial(probe bool) {
	ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
	defer cancel()
	slow := time.AfterFunc(slowToConnect, p.slowToConnect)
	defer slow.Stop()
	// The client dials and logs in for the first command.
	conn := &connection{Conn: p.client.EphemeralConn()}
	var refused error
	seen, before := p.restarts.seen(), p.restarts.latestID.Load()
	id, unknown, err := p.script.load(context.WithValue(ctx, refusedKey{}, &refused), conn.Conn)
	if err == nil {
		// When all connections are gone the next may be to another server, which
		// knows the script from others and has numbered more connections.
		p.restarts.connected(seen, before, id, unknown || p.made.Load() == 0)
		p.made.Add(1)
		p.dials.Store(0)
		p.dialAt.Store(0)
		conn.broke = p.broke.Load()
		p.put(conn)
		if probe {
			p.breaker.probeNow()
		}
		return
	}
	if refused != nil {
		err = refused
	}
	_ = conn.Close()
	p.held.Add(-1)
	p.dialAt.Store((p.clock() + jittered(probeEvery)).Microseconds())
	f := newFailure(p.breaker.server, 0, err)
	if p.made.Load() > 0 {
		// Those there are will do, unless they are broken too and it is not known
		// yet.
		if p.dials.Add(1) > 1 {
			p.breaker.reportError(f)
		}
		return
	}
	p.fail(f)
	p.failed.raise(f)
}

// slowToConnect records that a connection takes very long to make. If there is
// no other, the server counts as down.
func (p *pool) slowToConnect() {
	if p.made.Load() > 0 {
		return
	}
	for range openAfter {
		p.fail(p.failure(errConnecting))
	}
}

// keep maintains the connections while nobody asks: those that are idle are tried,
// and one is made to a server that was down as soon as it is back.
func (p *pool) keep() {
	for {
		next := time.NewTimer(time.Duration(p.checks.Load()) / 2)
		if p.breaker.isOpen() {
			next.Reset(jittered(probeEvery))
		}
		select {
		case <-p.done:
			next.Stop()
			return
		case <-p.wake:
			next.Stop()
			continue
		case <-next.C:
		}
		if !p.breaker.isOpen() {
			p.check()
		} else if p.held.Load() == 0 {
			p.connect(true)
		}
	}
}

// check tries the connections that are idle, and makes one if there is none left.
func (p *pool) check() {
	every := time.Duration(p.checks.Load())
	for range len(p.idle) {
		select {
		case conn := <-p.idle:
			if time.Since(conn.used) < every/2 {
				p.idle <- conn
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
			switch err := conn.Process(ctx, redis.NewCmd(ctx, "hello")); {
			case err == nil:
				p.put(conn)
			case errors.Is(err, errIdleClosed):
				p.idledOut(conn)
			default:
				p.discard(conn)
				p.connect(false)
			}
			cancel()
		default:
			return
		}
	}
}

// idledOut discards a connection that was closed while it was idle, which is no
// failure of the server, and has the others tried sooner from now on.
func (p *pool) idledOut(conn *connection) {
	every := max(time.Since(conn.used)/2, leastCheckEvery)
	for last := p.checks.Load(); int64(every) < last; last = p.checks.Load() {
		if p.checks.CompareAndSwap(last, int64(every)) {
			break
		}
	}
	p.discard(conn)
	if p.made.Load() == 0 {
		p.connect(false)
	}
}

// put gives a connection back, unless others have broken that were made with it.
func (p *pool) put(conn *connection) {
	if conn.broke != p.broke.Load() {
		p.discard(conn)
		return
	}
	conn.used = time.Now()
	p.idle <- conn
}

// discard closes a connection. Nobody waits for that: TLS says goodbye first.
func (p *pool) discard(conn *connection) {
	go func() { _ = conn.Close() }()
	if p.made.Add(-1) == 0 {
		p.began.Store(p.clock().Microseconds())
	}
	p.held.Add(-1)
	if p.wanted.Load() > 0 {
		p.connect(false)
	}
}

// signal tells all who wait for something that it has failed.
type signal struct {
	mu     sync.Mutex
	raised chan struct{} // closed with the next failure; nil if nobody waits
	last   *ServerError
}

// next returns a channel that is closed with the next failure.
func (s *signal) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.raised == nil {
		s.raised = make(chan struct{})
	}
	return s.raised
}

// why returns the last failure.
func (s *signal) why() *ServerError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// raise tells of a failure.
func (s *signal) raise(f *ServerError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = f
	if s.raised != nil {
		close(s.raised)
		s.raised = nil
	}
}

// refusedKey is the key of a context's value that gets what a server replied to
// the first command on a connection, if that was an error. The client goes on
// after it, in case that the server is an old one, and only says that the
// connection was closed.
type refusedKey struct{}

// refusals finds these errors.
type refusals struct{}

func (refusals) DialHook(next redis.DialHook) redis.DialHook { return next }

func (refusals) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if refused, ok := ctx.Value(refusedKey{}).(*error); ok && *refused == nil {
			if reply := redis.Error(nil); errors.As(err, &reply) {
				*refused = err
			}
		}
		return err
	}
}

func (refusals) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
