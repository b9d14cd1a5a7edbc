package limiter

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
	// hands and log in. No request waits for that longer than its own timeout.
	connectWithin = 5 * time.Second

	// checkEvery is how long a connection lies idle before it is seen whether
	// the server has closed it.
	checkEvery = 30 * time.Second
)

// server is a Redis server: the connections to it, and a guard.
//
// The connections are the client's own, held by the server here from when they
// are made, logged in and all, until they break. The client would make them
// within the request that first needs one, and they would never be ready in
// time if the server is far away.
type server struct {
	guard   guard
	client  *redis.Client
	timeout time.Duration
	changed func() // called after failures: the server may not be the right one any more
	known   bool   // whether the client of a cluster knows the server
	slots   bool   // whether it is a cluster's, and a call has keys of one slot

	ready  chan *connection // connections that nobody uses
	held   atomic.Int32     // connections there are or are being made, at most what ready can hold
	made   atomic.Int32     // of these, connections there are
	wanted atomic.Int32     // how many wait for one
	broke  atomic.Int32     // how often a connection broke that was made after others had
	failed signal           // there is none, and none could be made; or the server is lost
	dials  atomic.Int32     // how often in a row one more could not be made
	dialAt atomic.Int64     // when one more may be made after one could not be, in Unix µs

	queue queue

	keeper sync.Once     // starts keep
	lost   chan struct{} // tells keep that the server is lost
	done   chan struct{} // closed when the server is no longer used
	closed sync.Once
}

// connection is a connection to a server.
type connection struct {
	*redis.Conn
	broke int32     // the server's count when it was made
	used  time.Time // when it was laid down
}

func newServer(name string, client *redis.Client, opt *RedisOptions, changed func()) *server {
	client.AddHook(refusals{})
	return &server{
		guard:   newGuard(name, opt.Report),
		client:  client,
		timeout: opt.Timeout,
		changed: changed,
		ready:   make(chan *connection, opt.poolSize()),
		lost:    make(chan struct{}, 1),
		done:    make(chan struct{}),
	}
}

// close closes all connections.
func (s *server) close() error {
	s.closed.Do(func() {
		s.guard.silence()
		close(s.done)
	})
	return s.client.Close()
}

// failure returns what err means for a request.
func (s *server) failure(err error) *failure { return newFailure(s.guard.server, s.timeout, err) }

// run runs a script. It returns when ctx ends at the latest.
func (s *server) run(ctx context.Context, sc *script, args []any, asking bool) ([]int64, error) {
	probe, err := s.guard.enter()
	if err != nil {
		return nil, err
	}
	return s.runNow(ctx, probe, sc, args, asking)
}

// runNow runs a script for one who has entered.
func (s *server) runNow(ctx context.Context, probe bool, sc *script, args []any, asking bool) ([]int64, error) {
	if probe {
		defer s.guard.leave()
	}
	if conn := s.idle(); conn != nil {
		if !probe && len(s.ready) == 0 {
			s.oneMore()
		}
		return s.use(ctx, conn, sc, args, asking)
	}
	ctx, cancel := timed(ctx)
	defer cancel()
	conn, err := s.wait(ctx, probe)
	switch {
	case errors.Is(err, errNoConnection):
		return nil, s.giveUp(err)
	case err != nil:
		return nil, err
	}

	// There is less time left than a server is given to answer. If it takes
	// longer the request gives up, and neither server nor connection is blamed.
	type answer struct {
		reply []int64
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		reply, err := s.use(within(s.timeout), conn, sc, args, asking)
		answers <- answer{reply, err}
	}()
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-ctx.Done():
		return nil, s.giveUp(errLate)
	}
}

// giveUp takes note that a request has waited in vain, for which no call is to
// blame, and returns what that means.
func (s *server) giveUp(why error) *failure {
	f := s.failure(why)
	s.guard.failure(f)
	return f
}

// oneMore makes a connection for the next who asks, unless one is being made.
func (s *server) oneMore() {
	if s.held.Load() == s.made.Load() {
		s.connect(false)
	}
}

// idle returns a connection that nobody uses, or nil. It is none that was made
// with one that has broken.
func (s *server) idle() *connection {
	for {
		select {
		case conn := <-s.ready:
			if conn.broke == s.broke.Load() {
				return conn
			}
			s.discard(conn)
		default:
			return nil
		}
	}
}

// use runs a script on a connection.
func (s *server) use(ctx context.Context, conn *connection, sc *script, args []any, asking bool) ([]int64, error) {
	reply, err := sc.run(ctx, conn.Conn, args, asking)
	if err != nil {
		return nil, s.blame(conn, err)
	}
	wrote := charged(reply)
	if !wrote && s.guard.doubtsWrites() {
		// A denial does not tell whether the server takes writes again. To give
		// nothing back does.
		nothing := []any{nil, nil, 1, args[firstKey], 1, int64(MaxUnits), 0}
		written, err := giveBackScript.run(ctx, conn.Conn, nothing, asking)
		if err != nil {
			_ = s.blame(conn, err)
			return reply, nil
		}
		wrote = charged(written)
	}
	s.put(conn)
	s.guard.success(wrote)
	return reply, nil
}

// blame takes note of what failed on a connection, and returns what it means.
//
// After a reply the connection is as good as before; but the client closes
// those to a replica, for its name may by now stand for another server. An error
// that only wraps a reply is the client's, of a connection it has closed.
func (s *server) blame(conn *connection, err error) *failure {
	f := s.failure(err)
	_, replied := err.(redis.Error) //nolint:errorlint // see above
	if replied && !f.breaks {
		s.put(conn)
	} else {
		s.discard(conn)
	}
	switch {
	case f.elsewhere:
		s.guard.success(false)
	case f.breaks && !replied && !s.broke.CompareAndSwap(conn.broke, conn.broke+1):
		// It broke together with others, for which one failure counts.
		s.guard.lapse(f)
	default:
		s.fail(f)
	}
	return f
}

// fail takes note of a failure.
func (s *server) fail(f *failure) {
	lost := s.guard.failure(f)
	if lost || f.breaks {
		// Those that lie idle will hardly be any better.
		for conn := s.idle(); conn != nil; conn = s.idle() {
			s.discard(conn)
		}
	}
	if lost {
		s.failed.raise(f)
		select {
		case s.lost <- struct{}{}:
		default:
		}
	}
	s.changed()
}

// wait has one more connection made and returns the first that is ready. It
// waits for half of the time that a request has, so that some is left to answer
// in: those who come when too many do would otherwise all be too late. That this
// was in vain, errNoConnection, is for the request to take note of. A probe does
// not wait.
func (s *server) wait(ctx context.Context, probe bool) (*connection, error) {
	failed := s.failed.next()
	s.wanted.Add(1)
	defer s.wanted.Add(-1)
	s.connect(probe)
	if probe {
		return nil, s.failure(errNotConnected)
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout/2)
	defer cancel()
	select {
	case conn := <-s.ready:
		return conn, nil
	case <-failed:
		return nil, s.failed.last()
	case <-s.done:
		return nil, s.failure(redis.ErrClosed)
	case <-ctx.Done():
	}
	if s.made.Load() > 0 {
		// The server does answer, but not all of those who ask at once.
		return nil, errNoConnection
	}
	f := s.failure(errConnecting)
	s.fail(f)
	return nil, f
}

// connect makes a connection, unless there may be no more. If it is for a probe
// the next request is one.
func (s *server) connect(probe bool) {
	for {
		n := s.held.Load()
		switch {
		case int(n) >= cap(s.ready):
			return
		case !probe && n > 0 && !s.mayDial():
			return
		case s.held.CompareAndSwap(n, n+1):
			s.keeper.Do(func() { go s.keep() })
			go s.dial(probe)
			return
		}
	}
}

// mayDial reports whether to try for one more connection. After one could not be
// made that is only now and then, and one at a time.
func (s *server) mayDial() bool {
	at, now := s.dialAt.Load(), time.Now()
	return at == 0 || now.UnixMicro() >= at &&
		s.dialAt.CompareAndSwap(at, now.Add(jittered(probeEvery)).UnixMicro())
}

// dial makes a connection.
func (s *server) dial(probe bool) {
	ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
	defer cancel()
	// The client dials and logs in for the first command. This one is allowed to
	// everybody who has.
	conn := &connection{Conn: s.client.EphemeralConn()}
	var refused error
	err := conn.Process(context.WithValue(ctx, refusedKey{}, &refused), redis.NewCmd(ctx, "hello"))
	if err == nil {
		s.made.Add(1)
		s.dials.Store(0)
		s.dialAt.Store(0)
		conn.broke = s.broke.Load()
		s.put(conn)
		if probe {
			s.guard.soon()
		}
		return
	}
	if refused != nil {
		err = refused
	}
	_ = conn.Close()
	s.held.Add(-1)
	s.dialAt.Store(time.Now().Add(jittered(probeEvery)).UnixMicro())
	f := newFailure(s.guard.server, 0, err)
	if s.made.Load() > 0 {
		// Those there are will do, unless they are broken too and it is not known
		// yet.
		if s.dials.Add(1) > 1 {
			s.guard.lapse(f)
		}
		return
	}
	s.fail(f)
	s.failed.raise(f)
}

// keep keeps connections well while nobody asks: those that lie idle are tried,
// and a lost server is connected to when it is back.
func (s *server) keep() {
	for {
		next := time.NewTimer(checkEvery)
		if s.guard.isLost() {
			next.Reset(jittered(probeEvery))
		}
		select {
		case <-s.done:
			next.Stop()
			return
		case <-s.lost:
			next.Stop()
			continue
		case <-next.C:
		}
		if !s.guard.isLost() {
			s.check()
		} else if s.held.Load() == 0 {
			s.connect(true)
		}
	}
}

// check tries the connections that lie idle.
func (s *server) check() {
	for range len(s.ready) {
		select {
		case conn := <-s.ready:
			if time.Since(conn.used) < checkEvery {
				s.ready <- conn
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
			if err := conn.Process(ctx, redis.NewCmd(ctx, "hello")); err == nil {
				s.put(conn)
			} else {
				s.discard(conn)
				s.connect(false)
			}
			cancel()
		default:
			return
		}
	}
}

// put lays a connection down, unless others have broken that were made with it.
func (s *server) put(conn *connection) {
	if conn.broke != s.broke.Load() {
		s.discard(conn)
		return
	}
	conn.used = time.Now()
	s.ready <- conn
}

// discard closes a connection.
func (s *server) discard(conn *connection) {
	_ = conn.Close()
	s.made.Add(-1)
	s.held.Add(-1)
	if s.wanted.Load() > 0 {
		s.connect(false)
	}
}

// signal tells all who wait for something that it has failed.
type signal struct {
	mu     sync.Mutex
	raised chan struct{} // closed with the next failure; nil if nobody waits
	err    error
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

// last returns the last failure.
func (s *signal) last() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// raise tells of a failure.
func (s *signal) raise(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
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
