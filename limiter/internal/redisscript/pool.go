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
	// connectWithin is the time limit for making a connection: dialing, TLS
	// handshake and login. No call waits for that longer than its own timeout.
	connectWithin = 5 * time.Second

	// checkEvery is how long a connection may be idle before a command is sent on
	// it to keep it open. If the server, or a proxy in between, closes idle
	// connections sooner, the time is shortened to half of theirs, but not below
	// leastCheckEvery.
	checkEvery      = 30 * time.Second
	leastCheckEvery = 250 * time.Millisecond

	// slowToConnect is how long the first connection may take before the server
	// counts as failing.
	slowToConnect = time.Second
)

// pool keeps the connections to a server.
//
// They are the client's own, but pool holds them from when they are made and
// logged in until they break. The client by itself would make a connection within
// the call that first needs it, which would never be in time if the server is far
// away.
type pool struct {
	client   *redis.Client
	script   *Script
	timeout  time.Duration
	clock    func() time.Duration
	breaker  *breaker
	restarts *restarts
	fail     func(*ServerError) // records a failure of the server

	idle   chan *connection // idle connections
	held   atomic.Int32     // connections that exist or are being made, at most the capacity of idle
	made   atomic.Int32     // those of them that exist
	wanted atomic.Int32     // number of calls waiting for a connection
	broke  atomic.Int32     // how often a connection broke, counting those made before the same break once
	failed signal           // raised when there is no connection and none could be made, or the server went down
	dials  atomic.Int32     // number of failed dials in a row while there are other connections
	dialAt atomic.Int64     // when to try another dial after a failed one, in µs on clock
	began  atomic.Int64     // when dialing the first connection began, in µs on clock
	checks atomic.Int64     // how long a connection may be idle before it is checked, in ns

	keeper sync.Once     // starts keep
	wake   chan struct{} // tells keep that the server is down
	done   chan struct{} // closed when the server is no longer used
}

// connection is a connection to a server. The client holds the network connection
// behind it, see idleConn.
type connection struct {
	*redis.Conn
	broke int32     // the pool's broke when it was made
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

// stop ends the pool's background work.
func (p *pool) stop() { close(p.done) }

// failure converts err to a ServerError of the pool's server.
func (p *pool) failure(err error) *ServerError { return newFailure(p.breaker.server, p.timeout, err) }

// grow starts making a connection for the next call if none is idle and none is
// being made.
func (p *pool) grow() {
	if len(p.idle) == 0 && p.held.Load() == p.made.Load() {
		p.connect(false)
	}
}

// clear discards the idle connections.
func (p *pool) clear() {
	for conn := p.tryGet(); conn != nil; conn = p.tryGet() {
		p.discard(conn)
	}
}

// down tells callers waiting for a connection that the server is down.
func (p *pool) down(f *ServerError) {
	p.failed.raise(f)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// broken records that a connection broke, and reports whether it is the first to
// break among those made since the last break.
func (p *pool) broken(conn *connection) (first bool) {
	return p.broke.CompareAndSwap(conn.broke, conn.broke+1)
}

// tryGet returns an idle connection, or nil. It discards connections that were
// made before another one broke.
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

// get starts making one more connection and returns the first that is ready. It
// waits for at most half of the timeout, so that time is left for the answer: in
// an overload, all answers would otherwise be too late. Only patient calls wait
// for all of it. If the wait is in vain, get returns errNoConnection, which the
// caller records. A probe does not wait.
//
// No call waits for a first connection for longer than the timeout after dialing
// began. That wait is not a failure of the server unless calls have timed out too:
// the server may be far away. For very slow connections, see dial.
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
		f.notRun = true // it was not this call that failed
		return nil, &f
	case <-p.done:
		return nil, p.failure(redis.ErrClosed)
	case <-ctx.Done():
	}
	if p.made.Load() > 0 {
		// The server answers, but not all concurrent calls in time.
		return nil, errNoConnection
	}
	f := p.failure(errConnecting)
	if f.counts = p.breaker.timedOut(); f.counts {
		p.fail(f)
	}
	return nil, f
}

// connecting returns how long the first connection has been in the making.
func (p *pool) connecting() time.Duration {
	return p.clock() - time.Duration(p.began.Load())*time.Microsecond
}

// connect starts making a connection, unless there are as many as allowed. With
// probe, the call after that is a probe.
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

// mayDial reports whether to try for another connection. After a failed dial that
// is only so now and then, for one dial at a time.
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
	// The client dials and logs in with the first command.
	conn := &connection{Conn: p.client.EphemeralConn()}
	var refused error
	seen, before := p.restarts.seen(), p.restarts.latestID.Load()
	id, unknown, err := p.script.load(context.WithValue(ctx, refusedKey{}, &refused), conn.Conn)
	if err == nil {
		// If all connections were gone, the new one may be to another server,
		// which knows the script from other clients and has given out higher
		// connection IDs.
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
		// The existing connections will do, unless they are broken too and that is
		// not known yet.
		if p.dials.Add(1) > 1 {
			p.breaker.reportError(f)
		}
		return
	}
	p.fail(f)
	p.failed.raise(f)
}

// slowToConnect records that a connection takes very long to make. If there is no
// other, the server counts as down.
func (p *pool) slowToConnect() {
	if p.made.Load() > 0 {
		return
	}
	for range openAfter {
		p.fail(p.failure(errConnecting))
	}
}

// keep maintains the connections in the background: it checks idle ones, and
// connects to a server that was down as soon as it is back.
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

// check sends a command on each idle connection, and makes a connection if one was
// broken.
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

// idledOut discards a connection that was closed while it was idle, which is not a
// failure of the server, and has the others checked sooner from now on.
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

// put returns a connection to the pool, unless one that was made with it has
// broken.
func (p *pool) put(conn *connection) {
	if conn.broke != p.broke.Load() {
		p.discard(conn)
		return
	}
	conn.used = time.Now()
	p.idle <- conn
}

// discard closes a connection in the background, because TLS sends a close
// notification first.
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

// signal reports a failure to all goroutines that wait for something.
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

// raise reports a failure.
func (s *signal) raise(f *ServerError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = f
	if s.raised != nil {
		close(s.raised)
		s.raised = nil
	}
}

// refusedKey is the key of a context value that receives the server's reply to the
// first command on a connection if that was an error. The client itself goes on
// after such a reply, in case the server is an old one, and then only reports that
// the connection was closed.
type refusedKey struct{}

// refusals is a hook that catches these errors.
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
