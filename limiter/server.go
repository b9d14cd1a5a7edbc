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

	// checkEvery is how long a connection lies idle before something is sent on
	// it, so that nobody closes it. If a server or whatever is in between closes
	// connections sooner, it is sent in half of the time that it took them, but
	// not more often than each leastCheckEvery.
	checkEvery      = 30 * time.Second
	leastCheckEvery = 250 * time.Millisecond

	// slowToConnect is how long a first connection may take before the server
	// counts as failing.
	slowToConnect = time.Second
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
	clock   func() time.Duration
	known   bool // whether the client of a cluster knows the server
	slots   bool // whether it is a cluster's, and a call has keys of one slot

	tell listener

	ready    chan *connection // connections that nobody uses
	held     atomic.Int32     // connections there are or are being made, at most what ready can hold
	made     atomic.Int32     // of these, connections there are
	wanted   atomic.Int32     // how many wait for one
	broke    atomic.Int32     // how often a connection broke that was made after others had
	failed   signal           // there is none, and none could be made; or the server is lost
	dials    atomic.Int32     // how often in a row one more could not be made
	dialAt   atomic.Int64     // when one more may be made after one could not be, in µs on clock
	began    atomic.Int64     // when making the first connection began, in µs on clock
	latestID atomic.Int64     // the highest number that the server has given a connection
	checks   atomic.Int64     // how long a connection may lie idle until it is tried, in ns

	queue queue

	newsMu sync.Mutex   // held while the news is told
	news   atomic.Int64 // how often the server has turned out to be another, or to have restarted

	keeper sync.Once     // starts keep
	lost   chan struct{} // tells keep that the server is lost
	done   chan struct{} // closed when the server is no longer used
	closed sync.Once
}

// listener is told what happens to requests on their way to a server.
type listener struct {
	sending   func(*server, []*question) // they are about to be sent
	restarted func(*server)              // the server may have lost what it knew
	late      func(*server, *question)   // there is an answer for which nobody waits any more
}

// connection is a connection to a server. The client holds what is behind it, see
// idleConn.
type connection struct {
	*redis.Conn
	broke int32     // the server's count when it was made
	used  time.Time // when it was laid down
}

func newServer(name string, client *redis.Client, opt *RedisOptions, tell listener, changed func()) *server {
	client.AddHook(refusals{})
	client.AddHook(idleHook{})
	start := time.Now()
	s := &server{
		guard:   newGuard(name, opt.Report),
		client:  client,
		timeout: opt.Timeout,
		changed: changed,
		clock:   func() time.Duration { return time.Since(start) },
		ready:   make(chan *connection, opt.poolSize()),
		lost:    make(chan struct{}, 1),
		done:    make(chan struct{}),
		tell:    tell,
	}
	s.checks.Store(int64(checkEvery))
	return s
}

// close closes all connections.
func (s *server) close() error {
	s.closed.Do(func() {
		s.guard.silence()
		close(s.done)
	})
	return s.client.Close()
}

// capacity returns the most connections that there can be.
func (s *server) capacity() int { return cap(s.ready) }

// failure returns what err means for a request.
func (s *server) failure(err error) *failure { return newFailure(s.guard.server, s.timeout, err) }

// run asks about one request, in a call of its own. It returns when ctx ends at
// the latest.
func (s *server) run(ctx context.Context, q *question, asking bool) ([]int64, error) {
	probe, err := s.guard.enter()
	if err != nil {
		return nil, err
	}
	return s.runNow(ctx, probe, q, asking)
}

// runNow asks about the request of one who has entered.
func (s *server) runNow(ctx context.Context, probe bool, q *question, asking bool) ([]int64, error) {
	s.queue.mu.Lock()
	s.queue.asked++
	s.queue.mu.Unlock()
	if probe {
		defer s.guard.leave()
	}
	if conn := s.idle(); conn != nil {
		if !probe && len(s.ready) == 0 {
			s.oneMore()
		}
		if !hurried(ctx) {
			return s.use(ctx, conn, q, asking, false)
		}
		s.put(conn)
	}
	end, cancel := timed(ctx)
	defer cancel()
	conn, err := s.wait(end, probe, q.patient)
	switch {
	case errors.Is(err, errNoConnection):
		return nil, s.giveUp(err)
	case err != nil:
		return nil, err
	}

	return s.inTime(ctx, q, func() ([]int64, error) {
		return s.use(within(s.timeout), conn, q, asking, true)
	})
}

// inTime waits for the answer to q, for which there is less time left than a
// server is given. If it takes longer the request gives up, and neither server
// nor connection is blamed. ask gets the answer.
func (s *server) inTime(ctx context.Context, q *question, ask func() ([]int64, error)) ([]int64, error) {
	type answer struct {
		reply []int64
		err   error
	}
	answers := make(chan answer, 1)
	q.over.Store(false)
	go func() {
		reply, err := ask()
		switch {
		case q.end():
			answers <- answer{reply, err}
		case err == nil:
			q.reply = reply
			s.tell.late(s, q)
		}
	}()
	ctx, cancel := timed(ctx)
	defer cancel()
	select {
	case a := <-answers:
		return a.reply, a.err
	case <-ctx.Done():
		if q.end() {
			return nil, s.giveUp(errLate)
		}
		a := <-answers
		return a.reply, a.err
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

// use asks about one request on a connection, or on another one if the server has
// closed it. With apart, nobody waits longer for that than he may: otherwise ctx
// is the time that the request has.
func (s *server) use(ctx context.Context, conn *connection, q *question, asking, apart bool) ([]int64, error) {
	for {
		news := s.news.Load()
		s.tell.sending(s, q.alone())
		reply, err := q.script.send(ctx, conn.Conn, q, false, asking)
		switch {
		case err == nil:
			return s.used(ctx, conn, q, asking, reply, nil)
		case redis.HasErrorPrefix(err, "NOSCRIPT"):
			s.restart(news)
			if apart {
				return s.useWhole(conn, q, asking)
			}
			return s.useWholeInTime(ctx, conn, q, asking)
		case !errors.Is(err, errIdleClosed):
			return s.used(ctx, conn, q, asking, reply, err)
		}
		s.idledOut(conn)
		if conn = s.idle(); conn != nil {
			continue
		}
		end, cancel := timed(ctx)
		conn, err = s.wait(end, false, q.patient)
		cancel()
		switch {
		case errors.Is(err, errNoConnection):
			return nil, s.giveUp(err)
		case err != nil:
			return nil, err
		}
	}
}

// useWhole asks about one request by the whole script, which the server does not
// know.
func (s *server) useWhole(conn *connection, q *question, asking bool) ([]int64, error) {
	s.tell.sending(s, q.alone())
	reply, err := q.script.send(within(s.timeout), conn.Conn, q, true, asking)
	return s.used(within(s.timeout), conn, q, asking, reply, err)
}

// useWholeInTime is useWhole for one who waits.
func (s *server) useWholeInTime(ctx context.Context, conn *connection, q *question, asking bool) ([]int64, error) {
	return s.inTime(ctx, q, func() ([]int64, error) { return s.useWhole(conn, q, asking) })
}

// used takes note of what came of a call about q on a connection.
func (s *server) used(ctx context.Context, conn *connection, q *question, asking bool, reply []int64, err error) ([]int64, error) {
	if err != nil {
		return nil, s.blame(conn, err)
	}
	wrote := q.wrote(reply)
	if !wrote && s.guard.doubtsWrites() {
		// A denial does not tell whether the server takes writes again.
		nothing, err := q.script.probe(ctx, conn.Conn, q.keys[0], asking)
		if err != nil {
			_ = s.blame(conn, err)
			return reply, nil
		}
		wrote = len(nothing) == 2 && nothing[0] > 0
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
// in: those who come when too many do would otherwise all be too late. Only the
// patient wait for all of it. That this was in vain, errNoConnection, is for the
// request to take note of. A probe does not wait.
//
// Nobody waits for a first connection that takes longer than a request may wait.
// That is no failure unless calls have got no answer either: the server may be
// far away. If it takes very long, see dial.
func (s *server) wait(ctx context.Context, probe, patient bool) (*connection, error) {
	failed := s.failed.next()
	s.wanted.Add(1)
	defer s.wanted.Add(-1)
	s.connect(probe)
	if probe {
		return nil, s.failure(errNotConnected)
	}
	longest := s.timeout
	if !patient {
		longest /= 2
	}
	if s.made.Load() == 0 {
		longest = min(longest, s.timeout-s.connecting())
	}
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	select {
	case conn := <-s.ready:
		return conn, nil
	case <-failed:
		f := *s.failed.last()
		f.undone = true // whatever has failed was not for this one
		return nil, &f
	case <-s.done:
		return nil, s.failure(redis.ErrClosed)
	case <-ctx.Done():
	}
	if s.made.Load() > 0 {
		// The server does answer, but not all of those who ask at once.
		return nil, errNoConnection
	}
	f := s.failure(errConnecting)
	if f.counts = s.guard.timedOut(); f.counts {
		s.fail(f)
	}
	return nil, f
}

// connecting returns for how long a first connection has been in the making.
func (s *server) connecting() time.Duration {
	return s.clock() - time.Duration(s.began.Load())*time.Microsecond
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
			if n == 0 {
				s.began.Store(s.clock().Microseconds())
			}
			s.keeper.Do(func() { go s.keep() })
			go s.dial(probe)
			return
		}
	}
}

// mayDial reports whether to try for one more connection. After one could not be
// made that is only now and then, and one at a time.
func (s *server) mayDial() bool {
	at, now := s.dialAt.Load(), s.clock()
	return at == 0 || now.Microseconds() >= at &&
		s.dialAt.CompareAndSwap(at, (now+jittered(probeEvery)).Microseconds())
}

// dial makes a connection.
func (s *server) dial(probe bool) {
	ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
	defer cancel()
	slow := time.AfterFunc(slowToConnect, s.slowToConnect)
	defer slow.Stop()
	// The client dials and logs in for the first command.
	conn := &connection{Conn: s.client.EphemeralConn()}
	var refused error
	news, before := s.news.Load(), s.latestID.Load()
	id, unknown, err := takeScript.load(context.WithValue(ctx, refusedKey{}, &refused), conn.Conn)
	if err == nil {
		if unknown || id < before {
			s.restart(news)
		}
		for last := s.latestID.Load(); id > last && !s.latestID.CompareAndSwap(last, id); {
			last = s.latestID.Load()
		}
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
	s.dialAt.Store((s.clock() + jittered(probeEvery)).Microseconds())
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

// slowToConnect takes note that a connection takes very long to make. If there is
// none, the server is as good as lost.
func (s *server) slowToConnect() {
	if s.made.Load() > 0 {
		return
	}
	for range lostAfter {
		s.fail(s.failure(errConnecting))
	}
}

// keep keeps connections well while nobody asks: those that lie idle are tried,
// and a lost server is connected to when it is back.
func (s *server) keep() {
	for {
		next := time.NewTimer(time.Duration(s.checks.Load()) / 2)
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

// check tries the connections that lie idle, and makes one if there is none left.
func (s *server) check() {
	every := time.Duration(s.checks.Load())
	for range len(s.ready) {
		select {
		case conn := <-s.ready:
			if time.Since(conn.used) < every/2 {
				s.ready <- conn
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
			switch err := conn.Process(ctx, redis.NewCmd(ctx, "hello")); {
			case err == nil:
				s.put(conn)
			case errors.Is(err, errIdleClosed):
				s.idledOut(conn)
			default:
				s.discard(conn)
				s.connect(false)
			}
			cancel()
		default:
			return
		}
	}
}

// idledOut discards a connection that was closed while it lay idle, which is no
// failure of the server, and has the others tried sooner from now on.
func (s *server) idledOut(conn *connection) {
	every := max(time.Since(conn.used)/2, leastCheckEvery)
	for last := s.checks.Load(); int64(every) < last; last = s.checks.Load() {
		if s.checks.CompareAndSwap(last, int64(every)) {
			break
		}
	}
	s.discard(conn)
	if s.made.Load() == 0 {
		s.connect(false)
	}
}

// restart takes note that the server has restarted, or is another, as became
// clear from something that was sent after the given news. If there is more by
// now, that told of the same.
func (s *server) restart(news int64) {
	s.newsMu.Lock()
	defer s.newsMu.Unlock()
	if s.news.Load() == news {
		s.tell.restarted(s)
		s.latestID.Store(0)
		s.news.Add(1)
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

// discard closes a connection. Nobody waits for that: TLS says goodbye first.
func (s *server) discard(conn *connection) {
	go func() { _ = conn.Close() }()
	if s.made.Add(-1) == 0 {
		s.began.Store(s.clock().Microseconds())
	}
	s.held.Add(-1)
	if s.wanted.Load() > 0 {
		s.connect(false)
	}
}

// signal tells all who wait for something that it has failed.
type signal struct {
	mu     sync.Mutex
	raised chan struct{} // closed with the next failure; nil if nobody waits
	err    *failure
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
func (s *signal) last() *failure {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// raise tells of a failure.
func (s *signal) raise(err *failure) {
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
