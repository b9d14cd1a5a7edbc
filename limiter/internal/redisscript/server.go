package redisscript

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Server is one Redis server. It is composed of a pool of connections, a breaker
// that knows whether the server is down, and a batcher.
type Server struct {
	script  *Script
	timeout time.Duration
	hooks   Hooks
	changed func() // called after failures: the server may no longer be the right one

	breaker  breaker
	pool     *pool
	batcher  *batcher
	restarts *restarts
	calls    atomic.Int64 // number of calls so far

	known  bool        // whether the cluster client knows the server
	master atomic.Bool // whether it had slots of its cluster when that was last checked
	slots  bool        // whether it is in a cluster, so that an invocation has the keys of one slot
	closed sync.Once
}

func newServer(name string, client *redis.Client, opt *Options, script *Script, hooks Hooks, changed func()) *Server {
	s := &Server{
		script:  script,
		timeout: opt.Timeout,
		hooks:   hooks,
		changed: changed,
		breaker: newBreaker(name, opt.Report),
	}
	s.restarts = &restarts{tell: func() { hooks.Restarted(s) }}
	s.pool = newPool(client, script, opt, &s.breaker, s.restarts, s.fail)
	s.batcher = newBatcher(opt.Timeout, s.pool, &s.breaker, s.flush, s.complete)
	return s
}

// close closes all connections.
func (s *Server) close() error {
	s.closed.Do(func() {
		s.breaker.mute()
		s.pool.stop()
	})
	return s.pool.client.Close()
}

// failure converts err to a ServerError of this server.
func (s *Server) failure(err error) *ServerError { return newFailure(s.breaker.server, s.timeout, err) }

// ReportCorrupt reports that the server holds, or has replied, something that the
// script cannot have written, and returns an error that says so.
func (s *Server) ReportCorrupt(err error) error {
	f := s.failure(corrupt{err})
	s.breaker.reportError(f)
	return f
}

// do runs the script for a call, batched with others. It returns by the deadline
// of ctx.
func (s *Server) do(ctx context.Context, c *Call) error {
	probe, err := s.breaker.allow()
	if err != nil {
		return err
	}
	s.calls.Add(1)
	if probe || s.pool.made.Load() == 0 {
		return s.doNow(ctx, probe, c, false)
	}
	if conn := s.batcher.tryDirect(c, hurried(ctx)); conn != nil {
		err := s.send(ctx, conn, c, false, false)
		s.batcher.endDirect()
		return err
	}
	err = s.batcher.wait(ctx, c)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errNoConnection), errors.Is(err, errLate):
		return s.giveUp(err)
	case MovingSlot(err):
		// Some keys of the batched calls are on the other server already. Nothing
		// was done.
		s.calls.Add(1)
		return s.doNow(ctx, false, c, false)
	}
	return err
}

// doAlone runs the script for a call without batching.
func (s *Server) doAlone(ctx context.Context, c *Call, asking bool) error {
	probe, err := s.breaker.allow()
	if err != nil {
		return err
	}
	s.calls.Add(1)
	return s.doNow(ctx, probe, c, asking)
}

// doNow runs the script, without batching, for a call that the breaker has
// allowed.
func (s *Server) doNow(ctx context.Context, probe bool, c *Call, asking bool) error {
	if probe {
		defer s.breaker.endProbe()
	}
	if conn := s.pool.tryGet(); conn != nil {
		if !probe {
			s.pool.grow()
		}
		if !hurried(ctx) {
			return s.send(ctx, conn, c, asking, false)
		}
		s.pool.put(conn)
	}
	conn, err := s.connection(ctx, probe, c.Patient)
	if err != nil {
		return err
	}
	return s.inTime(ctx, c, func() error { return s.send(within(s.timeout), conn, c, asking, true) })
}

// Submit runs the script for a call, batched with others, and passes the outcome
// to its Done. It does not wait.
func (s *Server) Submit(c *Call) { s.batcher.add(c) }

// connection waits for a connection for a call.
func (s *Server) connection(ctx context.Context, probe, patient bool) (*connection, error) {
	ctx, cancel := timed(ctx)
	defer cancel()
	conn, err := s.pool.get(ctx, probe, patient)
	if errors.Is(err, errNoConnection) {
		return nil, s.giveUp(err)
	}
	return conn, err
}

// inTime waits for the answer to a call that has less time left than a server is
// allowed. If the answer takes longer, the call gives up, and neither the server
// nor the connection is blamed. ask waits for the answer and stores the reply in c.
func (s *Server) inTime(ctx context.Context, c *Call, ask func() error) error {
	answered := make(chan error, 1)
	c.over.Store(false)
	go func() {
		err := ask()
		switch {
		case c.end():
			answered <- err
		case err == nil:
			s.hooks.Late(s, c)
		}
	}()
	ctx, cancel := timed(ctx)
	defer cancel()
	select {
	case err := <-answered:
		return err
	case <-ctx.Done():
		if c.end() {
			return s.giveUp(errLate)
		}
		return <-answered
	}
}

// giveUp records a call that has timed out without a command being to blame, and
// returns its ServerError.
func (s *Server) giveUp(why error) *ServerError {
	f := s.failure(why)
	s.breaker.failure(f)
	return f
}

// send runs the script for one call on a connection, or on another one if the
// server has closed it. With apart, send runs apart from its caller, who stops
// waiting by itself; otherwise ctx is the time that the call has.
func (s *Server) send(ctx context.Context, conn *connection, c *Call, asking, apart bool) error {
	for {
		seen := s.restarts.seen()
		s.hooks.Sending(s, c.batch())
		s.breaker.counts.ran(1, 1)
		reply, err := s.script.send(ctx, conn.Conn, c, false, asking)
		switch {
		case err == nil:
			return s.sent(ctx, conn, c, asking, reply, nil)
		case redis.HasErrorPrefix(err, "NOSCRIPT"):
			s.restarts.since(seen)
			if apart {
				return s.sendWhole(conn, c, asking)
			}
			return s.inTime(ctx, c, func() error { return s.sendWhole(conn, c, asking) })
		case !errors.Is(err, errIdleClosed):
			return s.sent(ctx, conn, c, asking, reply, err)
		}
		s.pool.idledOut(conn)
		if conn = s.pool.tryGet(); conn != nil {
			continue
		}
		if conn, err = s.connection(ctx, false, c.Patient); err != nil {
			return err
		}
	}
}

// sendWhole sends one call with the whole script, which the server does not know.
func (s *Server) sendWhole(conn *connection, c *Call, asking bool) error {
	s.hooks.Sending(s, c.batch())
	reply, err := s.script.send(within(s.timeout), conn.Conn, c, true, asking)
	return s.sent(within(s.timeout), conn, c, asking, reply, err)
}

// sent records the result of a call on a connection.
func (s *Server) sent(ctx context.Context, conn *connection, c *Call, asking bool, reply []int64, err error) error {
	if err != nil {
		c.Reply = nil
		return s.blame(conn, err)
	}
	if len(reply) != c.Replies {
		reply = nil // the script cannot have sent it
	}
	c.Reply = reply
	wrote := s.script.Wrote(c)
	if !wrote && s.breaker.awaitsWrite() {
		// The reply does not show whether the server accepts writes again.
		wrote, err = s.script.probe(ctx, conn.Conn, c.Keys[0], asking)
		if err != nil {
			_ = s.blame(conn, err)
			return nil
		}
	}
	s.pool.put(conn)
	s.breaker.success(wrote)
	return nil
}

// blame records an error on a connection and returns it as a ServerError.
//
// After a reply the connection is as good as before; but the client closes those
// to a replica, for its name may by now stand for another server. An error that
// only wraps a reply is the client's, of a connection it has closed.
func (s *Server) blame(conn *connection, err error) *ServerError {
	f := s.failure(err)
	_, replied := err.(redis.Error) //nolint:errorlint // see above
	first := true
	if replied && !f.breaks {
		s.pool.put(conn)
	} else {
		s.pool.discard(conn)
		if f.breaks && !replied {
			first = s.pool.broken(conn)
		}
	}
	switch {
	case f.elsewhere:
		s.breaker.success(false)
	case !first:
		// It broke together with others, which count as one failure.
		s.breaker.reportError(f)
	default:
		s.fail(f)
	}
	return f
}

// fail records a failure.
func (s *Server) fail(f *ServerError) {
	opened := s.breaker.failure(f)
	if opened || f.breaks {
		s.pool.clear() // idle connections are probably broken too
	}
	if opened {
		s.pool.down(f)
	}
	s.changed()
}

// flush sends a batch on a connection. A cluster server gets one invocation for
// each slot.
func (s *Server) flush(conn *connection, batch []*Call) {
	all := invocations(batch, s.slots)
	s.breaker.counts.ran(len(all), len(batch))
	began := time.Now()
	conn, err := s.sendAll(conn, all)
	if err != nil {
		s.complete(batch, err)
		return
	}

	// Failures in one batch count as one.
	var worst error
	wrote := false
	for _, in := range all {
		wrote = s.script.split(in) || wrote
		if s.worse(in.err, worst) {
			worst = in.err
		}
	}
	if worst == nil {
		s.batcher.tookFor(began, time.Now())
		s.pool.put(conn)
		s.breaker.success(wrote)
	} else {
		_ = s.blame(conn, worst) // each call gets its own error
	}
	for _, in := range all {
		if in.err != nil {
			s.complete(in.batch, s.failure(in.err))
		} else {
			s.complete(in.batch, nil)
		}
	}
}

// sendAll sends invocations on conn, or on another connection if the server has
// closed conn. It returns the connection used, or an error if there is none.
func (s *Server) sendAll(conn *connection, all []*invocation) (*connection, error) {
	ctx := within(s.timeout)
	for {
		seen := s.restarts.seen()
		s.sending(all)
		s.script.sendAll(ctx, conn.Conn, all, false)
		if again := unknown(all); len(again) > 0 {
			s.restarts.since(seen)
			s.sending(again)
			s.script.sendAll(within(s.timeout), conn.Conn, again, true)
		}
		if !errors.Is(all[0].err, errIdleClosed) {
			return conn, nil
		}
		s.pool.idledOut(conn)
		var err error
		if conn, err = s.batcher.connection(); err != nil {
			return nil, err
		}
	}
}

// sending calls the Sending hook before invocations are sent.
func (s *Server) sending(all []*invocation) {
	for _, in := range all {
		s.hooks.Sending(s, in.batch)
	}
}

// worse reports whether err says more than another about the next call, or even
// about the connection.
func (s *Server) worse(err, than error) bool {
	rank := func(err error) int {
		switch _, replied := err.(redis.Error); { //nolint:errorlint // as in blame
		case err == nil:
			return 0
		case !replied:
			return 3
		case s.failure(err).counts:
			return 2
		}
		return 1
	}
	return rank(err) > rank(than)
}

// complete passes a reply or an error to all calls of a batch.
func (s *Server) complete(batch []*Call, err error) {
	for _, c := range batch {
		switch {
		case c.Done != nil:
			c.Done(err)
		case c.end():
			c.err = err
			c.done <- struct{}{}
		case err == nil:
			s.hooks.Late(s, c)
		}
	}
}

// restarts records whether a server has restarted, or been replaced by another.
type restarts struct {
	tell func()

	mu       sync.Mutex   // held while calling tell
	count    atomic.Int64 // number of restarts
	latestID atomic.Int64 // the highest connection ID that the server has given out
}

// seen returns the number of restarts known so far.
func (r *restarts) seen() int64 { return r.count.Load() }

// since records a restart that was noticed by something sent when the given number
// of restarts had been seen. If there are more by now, it is one of those.
func (r *restarts) since(seen int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count.Load() == seen {
		r.tell()
		r.latestID.Store(0)
		r.count.Add(1)
	}
}

// connected records a new connection with the given ID. another says that there is
// another sign of a restart, such as that the server did not know the script. seen
// is the number of restarts and before the highest ID from before the connection
// was made.
func (r *restarts) connected(seen, before, id int64, another bool) {
	if another || id < before {
		r.since(seen)
	}
	for last := r.latestID.Load(); id > last && !r.latestID.CompareAndSwap(last, id); {
		last = r.latestID.Load()
	}
}
