package limiter

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// connectWithin is how long it may take to make a connection: to dial, shake
// hands and log in. No request waits for that longer than its own timeout.
const connectWithin = 5 * time.Second

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

	ready  chan *redis.Conn // connections that nobody uses
	held   atomic.Int32     // connections there are or are being made, at most what ready can hold
	made   atomic.Int32     // of these, connections there are
	failed signal           // there is none, and none could be made
}

func newServer(name string, client *redis.Client, opt RedisOptions, changed func()) *server {
	client.AddHook(refusals{})
	return &server{
		guard:   newGuard(name, opt.Report),
		client:  client,
		timeout: opt.Timeout,
		changed: changed,
		ready:   make(chan *redis.Conn, opt.poolSize()),
	}
}

// failure returns what err means.
func (s *server) failure(err error) *failure { return newFailure(s.guard.server, s.timeout, err) }

// run runs a script. It returns when ctx ends at the latest.
func (s *server) run(ctx context.Context, sc *script, args []any, asking bool) ([]int64, error) {
	probe, err := s.guard.enter()
	if err != nil {
		return nil, err
	}
	if probe {
		defer s.guard.leave()
	}
	select {
	case conn := <-s.ready:
		if !probe && len(s.ready) == 0 {
			s.connect(false) // for the next who asks meanwhile
		}
		return s.use(ctx, conn, sc, args, asking)
	default:
	}
	conn, err := s.wait(ctx, probe)
	if err != nil {
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
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.timeout)
		defer cancel()
		reply, err := s.use(ctx, conn, sc, args, asking)
		answers <- answer{reply, err}
	}()
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-ctx.Done():
	}
	f := s.failure(errNoConnection)
	s.guard.failure(f)
	return nil, f
}

// use runs a script on a connection.
func (s *server) use(ctx context.Context, conn *redis.Conn, sc *script, args []any, asking bool) ([]int64, error) {
	reply, err := sc.run(ctx, conn, args, asking)
	if err == nil {
		s.ready <- conn
		s.guard.success(charged(reply))
		return reply, nil
	}

	// After a reply the connection is as good as before; but the client closes
	// those to a replica, for its name may by now stand for another server.
	f := s.failure(err)
	if reply := redis.Error(nil); errors.As(err, &reply) && !f.breaks {
		s.ready <- conn
	} else {
		s.discard(conn)
	}
	if f.elsewhere {
		s.guard.success(false)
	} else {
		s.fail(f)
	}
	return nil, f
}

// fail takes note of a failure.
func (s *server) fail(f *failure) {
	if s.guard.failure(f) || f.breaks {
		// Those that lie idle will hardly be any better.
		for {
			select {
			case conn := <-s.ready:
				s.discard(conn)
				continue
			default:
			}
			break
		}
	}
	s.changed()
}

// wait has one more connection made and returns the first that is ready. A
// probe does not wait.
func (s *server) wait(ctx context.Context, probe bool) (*redis.Conn, error) {
	failed := s.failed.next()
	s.connect(probe)
	if probe {
		return nil, s.failure(errConnecting)
	}
	select {
	case conn := <-s.ready:
		return conn, nil
	case <-failed:
		return nil, s.failed.last()
	case <-ctx.Done():
	}
	if s.made.Load() > 0 {
		// The server does answer, but not all of those who ask at once.
		f := s.failure(errNoConnection)
		s.guard.failure(f)
		return nil, f
	}
	f := s.failure(errConnecting)
	s.fail(f)
	return nil, f
}

// connect makes a connection, unless there may be no more. If it is for a probe
// the next request is one.
func (s *server) connect(probe bool) {
	if int(s.held.Add(1)) > cap(s.ready) {
		s.held.Add(-1)
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
		defer cancel()
		// The client dials and logs in for the first command. This one is
		// allowed to everybody who has.
		conn := s.client.Conn()
		var refused error
		ctx = context.WithValue(ctx, refusedKey{}, &refused)
		err := conn.Process(ctx, redis.NewCmd(ctx, "hello"))
		if err != nil && refused != nil {
			err = refused
		}
		if err == nil {
			s.made.Add(1)
			s.ready <- conn
			if probe {
				s.guard.soon()
			}
			return
		}
		_ = conn.Close()
		s.held.Add(-1)
		f := newFailure(s.guard.server, connectWithin, err)
		if s.fail(f); s.made.Load() == 0 {
			s.failed.raise(f)
		}
	}()
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

// discard closes a connection.
func (s *server) discard(conn *redis.Conn) {
	_ = conn.Close()
	s.made.Add(-1)
	s.held.Add(-1)
}
