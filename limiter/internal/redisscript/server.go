package redisscript

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// checkEvery is how long a connection may be idle before it is checked whether the
	// server still answers on it, and recheckEvery is that after failures.
	checkEvery   = 5 * time.Second
	recheckEvery = time.Second

	// upFor is how long a server counts as up after an answer. Since it is checked while
	// it is idle, it does not just lack requests if there was none for longer.
	upFor = 2 * checkEvery
)

// Server is one Redis server. It is composed of a pipeline, which carries the calls on
// one connection, a greeter that makes connections, and a breaker that knows
// whether the server is down.
type Server struct {
	script  *Script
	hooks   Hooks
	timeout time.Duration
	changed func() // called after failures: the server may no longer be the right one

	breaker  breaker
	greeter  *greeter
	pipeline *pipeline
	calls    atomic.Int64 // number of calls so far

	dialing atomic.Bool // whether a connection is being made
	keeper  sync.Once   // starts keep
	done    chan struct{}
	closed  sync.Once

	master atomic.Bool // whether it had slots of its cluster when that was last checked
}

func newServer(name string, client *redis.Client, opt *Options, script *Script, hooks Hooks, slots bool, changed func()) *Server {
	s := &Server{
		script:  script,
		hooks:   hooks,
		timeout: opt.Timeout,
		changed: changed,
		breaker: newBreaker(name, opt.Report),
		greeter: newGreeter(client, script),
		done:    make(chan struct{}),
	}
	s.pipeline = newPipeline(s, opt.Timeout, slots)
	return s
}

// close closes the connection.
func (s *Server) close() error {
	s.closed.Do(func() {
		s.breaker.mute()
		close(s.done)
		s.pipeline.stop(redis.ErrClosed)
		s.failOpen()
	})
	return s.greeter.client.Close()
}

// failOpen ends the wait of all calls that have not been sent when the server is closed.
func (s *Server) failOpen() { s.pipeline.failOpen(s.failure(redis.ErrClosed)) }

// isClosed reports whether the server is no longer used.
func (s *Server) isClosed() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
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

// do runs the script for a call, batched with others unless it is asking. It returns
// by the deadline, unless this process is late.
func (s *Server) do(end Deadline, c *Call, asking bool) error {
	probe, err := s.breaker.allow()
	if err != nil {
		return err
	}
	s.calls.Add(1)
	c.alone, c.asking = asking, asking // an ASK is for a single invocation
	if probe {
		return s.probe(end, c)
	}
	err = s.await(end, c)
	if !asking && MovingSlot(err) {
		// Some keys of the batched calls are on the other server already. Nothing
		// was done.
		c.alone = true
		return s.await(end, c)
	}
	return err
}

// await sends a call and waits for its answer.
func (s *Server) await(end Deadline, c *Call) error { return s.pipeline.do(c, end.At, end.Shortened) }

// probe makes a call that shows whether the server is back. It does not wait for a
// connection.
func (s *Server) probe(end Deadline, c *Call) error {
	defer s.breaker.endProbe()
	if !s.pipeline.healthy() {
		s.connect(true)
		return s.failure(errNotConnected)
	}
	err := s.await(end, c)
	if write := s.proof(c, err); write != nil {
		_ = s.await(end, write)
	}
	return err
}

// proof returns a call that shows whether the server accepts writes again, if a probe was
// answered and the reply does not show it. Otherwise it returns nil.
func (s *Server) proof(c *Call, err error) *Call {
	if err != nil || s.script.Wrote(c) || !s.breaker.awaitsWrite() {
		return nil
	}
	key := strings.Clone(c.Keys[0]) // c may be reused before this is sent
	write := &Call{Keys: []string{key}, Arg: s.script.ProbeArg, Replies: s.script.ProbeReplies}
	write.alone, write.ours, write.asking = true, true, c.asking
	return write
}

// offer submits a call, unless the server is down or far behind. There may be no other
// calls than those that are submitted, so if a probe is due, this is it.
func (s *Server) offer(c *Call, alone, asking bool) error {
	probe, err := s.breaker.allow()
	switch {
	case err != nil:
		return err
	case probe && !s.pipeline.healthy():
		s.connect(true)
		s.breaker.endProbe()
		return s.failure(errNotConnected)
	case !probe && s.pipeline.behind():
		return s.behind()
	case probe:
		done := c.Done
		c.Done = func(err error) {
			c.Done = done
			if write := s.proof(c, err); write != nil {
				write.Done = func(error) { s.breaker.endProbe() }
				s.pipeline.submit(write)
			} else {
				s.breaker.endProbe()
			}
			done(err)
		}
	}
	s.calls.Add(1)
	c.alone, c.asking = alone, asking
	s.pipeline.submit(c)
	return nil
}

// Submit runs the script for a call, batched with others, and passes the outcome
// to its Done. It does not wait.
func (s *Server) Submit(c *Call) {
	c.alone, c.asking = false, false
	s.pipeline.submit(c)
}

// sending calls the Sending hook before an invocation is sent.
func (s *Server) sending(in *invocation) {
	if len(in.calls) == 0 || in.calls[0].ours {
		return
	}
	s.breaker.counts.ran(1, len(in.calls))
	s.hooks.Sending(s, in.calls)
}

// finish passes the outcome to a call: nil if there is a reply.
func (s *Server) finish(c *Call, err error) {
	switch {
	case c.Done != nil:
		c.Done(err)
	default:
		inTime := c.finish()
		if !c.ours {
			s.hooks.Answered(c, err, inTime)
		}
		if inTime {
			c.err = err
			c.done <- struct{}{}
		}
	}
}

// ended records the answers to a batch, and passes them to its calls. They find the
// breaker as the answers leave it.
func (s *Server) ended(conn *connection, b *batch) {
	inTime, wrote := false, false
	var worst error
	for _, in := range b.answered {
		if in.failure != nil {
			if f := s.failure(in.failure); worst == nil || f.counts && !s.failure(worst).counts {
				worst = in.failure
			}
			continue
		}
		inTime = inTime || len(in.calls) == 0 && conn.heard().Sub(b.began) < s.timeout
		for _, c := range in.calls {
			inTime = inTime || c.Done != nil || !c.over.Load()
			wrote = wrote || len(c.Reply) > 0 && s.script.Wrote(c)
		}
	}
	switch {
	case worst != nil:
		s.refused(conn, worst) // each call gets its own error
	case inTime:
		s.breaker.success(wrote)
	}
	s.pass(b)
}

// pass passes the answers to a batch to its calls.
func (s *Server) pass(b *batch) {
	for _, in := range b.answered {
		var err error
		if in.failure != nil {
			err = s.failure(in.failure)
		}
		for _, c := range in.calls {
			s.finish(c, err)
		}
	}
}

// refused records an error that the server has replied.
func (s *Server) refused(conn *connection, err error) {
	f := s.failure(err)
	if f.elsewhere {
		s.breaker.success(false)
		return
	}
	if f.breaks { // its address may by now stand for another server
		s.pipeline.drop(conn, errDropped)
	}
	s.fail(f)
}

// fail records a failure.
func (s *Server) fail(f *ServerError) {
	if s.breaker.failure(f) {
		s.pipeline.failOpen(f)
	}
	s.changed()
}

// timedOut records that a call was not answered in time, and returns its error. blame
// says that the server is to blame, and that others have not been recorded that
// timed out together with it.
func (s *Server) timedOut(why error, blame bool) error {
	f := s.failure(why)
	if blame {
		s.fail(f)
		return f
	}
	f.counts = false
	s.breaker.reportError(f)
	return f
}

// notConnected returns the error of a call that has waited in vain for a connection,
// which has been missing since lost. That is no failure of the server, which may be
// far away, unless calls have timed out too, and it has had the timeout to make
// another one. For very slow connections, see slowToConnect.
func (s *Server) notConnected(lost time.Time) error {
	if s.isClosed() {
		return s.failure(redis.ErrClosed)
	}
	f := s.failure(errConnecting)
	if f.counts = time.Since(lost) >= s.timeout && s.breaker.timedOut(); f.counts {
		s.fail(f)
	}
	return f
}

// behind returns the error of a call that was not sent, because the answers to those
// before it took too long.
func (s *Server) behind() error { return s.timedOut(errBehind, false) }

// lost records that a connection broke, and returns the error of the calls in flight.
// current says that there is no other connection.
func (s *Server) lost(conn *connection, current, inFlight bool) error {
	why := conn.cause()
	f := s.failure(why)
	if s.isClosed() || !current {
		return f
	}
	if inFlight && why != errDropped { // it is recorded why
		s.fail(f)
	}
	if time.Since(conn.made) > probeEvery { // otherwise keep or the next call will
		s.reconnect()
	}
	return f
}

// restarted records that the server has restarted, was replaced by another, or has
// lost its scripts.
func (s *Server) restarted() { s.hooks.Restarted(s) }

// connect starts making a connection, unless one is being made. With probe, the call
// after that is a probe.
func (s *Server) connect(probe bool) {
	if s.isClosed() || !s.dialing.CompareAndSwap(false, true) {
		return
	}
	s.keeper.Do(func() { go s.keep() })
	s.pipeline.dialing()
	go s.dial(probe)
}

// reconnect starts making a connection in the background, if it will be needed.
func (s *Server) reconnect() {
	if s.master.Load() {
		s.connect(s.breaker.isOpen())
	}
}

// dial makes a connection.
func (s *Server) dial(probe bool) {
	ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
	defer cancel()
	greeted := make(chan struct{})
	go s.slowToConnect(greeted)
	conn, err := s.greeter.greet(ctx)
	close(greeted)
	if err != nil {
		s.dialing.Store(false)
		f := newConnectFailure(s.breaker.server, err)
		if s.isClosed() || s.pipeline.healthy() {
			return
		}
		s.pipeline.abandon()
		if f.reason != "timeout" { // which slowToConnect has recorded, unless this process was stopped
			s.fail(f)
		}
		s.pipeline.failOpen(f)
		return
	}
	if !s.pipeline.use(conn) {
		conn.close(errDropped)
	}
	s.dialing.Store(false)
	if s.isClosed() {
		s.pipeline.stop(redis.ErrClosed)
	}
	if probe {
		s.breaker.probeNow()
	}
}

// slowToConnect records that a connection takes very long to make. If there is no
// other, the server counts as down. It waits step by step, so that the time for which
// this process is stopped counts as one of them.
func (s *Server) slowToConnect(greeted <-chan struct{}) {
	const steps = 10
	step := time.NewTicker(slowToConnect / steps)
	defer step.Stop()
	for range steps {
		select {
		case <-greeted:
			return
		case <-step.C:
		}
	}
	if s.pipeline.healthy() {
		return
	}
	s.pipeline.abandon()
	for range openAfter {
		s.fail(s.failure(errConnecting))
	}
}

// keep maintains the connection in the background: it notices a server that has
// fallen silent, or has gone, and connects to one that was down as soon as it is back.
func (s *Server) keep() {
	for {
		select {
		case <-s.done:
			return
		case <-time.After(jittered(probeEvery)):
		}
		idle := s.pipeline.watch()
		switch {
		case !s.pipeline.healthy():
			s.reconnect()
		case idle >= checkEvery, idle >= recheckEvery && s.breaker.failures.Load() > 0:
			s.pipeline.check()
		}
	}
}
