package redisscript

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// nearBatches is the maximum number of batches in flight to a server nearby, so
	// that one is filled while the server works on another. With more, each would
	// carry fewer calls, and both sides would have more work.
	nearBatches = 2

	// fullBatches is that number as long as there are enough calls to fill another.
	fullBatches = 16

	// farAway is the round trip from which on a server is far away. Calls to it do
	// not wait for the answers to others, only for pace, so that they are batched.
	farAway = 4 * time.Millisecond
	pace    = time.Millisecond

	// fewCalls is the number of calls in a batch after which a caller who finds the
	// connection idle sends his call by himself, instead of waiting for others.
	fewCalls = 2

	// maxBatchKeys is the maximum number of keys in a batch, so that it does not
	// block the server for more than about a millisecond.
	maxBatchKeys = 256
)

// pipeline carries the calls to a server on one connection. Calls gather while others
// are in flight, and are sent together. The server answers in the order in which
// it was sent, so each reply finds its calls.
//
// For how long a call waits for its answer, patience.go says.
type pipeline struct {
	server  *Server
	timeout time.Duration
	slots   bool // whether an invocation has the keys of one slot

	// Held while a batch is taken and written, so that the order of what is in
	// flight is the order in which it was written.
	sending sync.Mutex
	ready   []*invocation // of the last batch
	out     []byte

	mu      sync.Mutex
	conn    *connection   // nil while there is none
	ended   chan struct{} // closed when all calls of the last connection have ended
	lostAt  time.Time     // since when there is none, or conn has been silent for too long
	heard   time.Time     // when something had come on the connection before; zero if there was none
	open    []*Call       // calls that have not been sent
	again   []*invocation // invocations that were certainly not run
	writing bool          // whether a goroutine is about to send a batch
	due     time.Time     // since when it could have
	paced   bool          // whether one will be as soon as pace has passed
	last    time.Time     // when the last batch was written
	calls   int           // calls in it
	stuck   time.Time     // when a call last found that the reader does not go on
	lag     time.Duration // by how much this process was late to send batches, in all
	took    time.Duration // how long a batch takes: falls at once, rises slowly
	rose    time.Time     // when took last rose
	failed  time.Time     // when a call last timed out
	number  uint64        // number of invocations sent
	loaded  uint64        // the number of the last one that carried the whole script
	unknown bool          // whether the server does not know the script
}

// batch is a number of invocations that are sent together.
type batch struct {
	began    time.Time // when it was about to be written
	sent     time.Time // when it had been; zero before
	left     int       // invocations without an answer
	calls    int
	answered []*invocation
	first    [1]*invocation // memory for answered: most batches are one invocation
}

// invocation is one run of the script on a server, for several calls. One for none
// checks whether the server answers.
type invocation struct {
	*batch // with which it was sent; nil before
	calls  []*Call
	asking bool   // whether to send ASKING first
	whole  bool   // whether it carries the whole script
	number uint64 // its number among all that were sent
	tries  int    // how often the server did not know the script

	failure error // the server's reply, if that is an error
}

// pending is the state of a call that is waiting.
type pending struct {
	patience
	in     *invocation // what carries it; nil until it is being sent
	alone  bool        // whether nothing else may be in its invocation
	ours   bool        // whether it only tests the server
	asking bool        // whether to send ASKING first
	over   atomic.Bool // whether it was answered or given up
	done   chan struct{}
	err    error // the outcome, if there is no reply
	timer  *time.Timer

	numbers []int64 // memory for the reply
}

// finish ends the wait for an answer, because it has arrived or because the caller
// has given up. It reports whether the wait had not ended before.
func (p *pending) finish() bool { return p.over.CompareAndSwap(false, true) }

func newPipeline(s *Server, timeout time.Duration, slots bool) *pipeline {
	p := &pipeline{server: s, timeout: timeout, slots: slots, lostAt: time.Now(), ended: make(chan struct{})}
	close(p.ended)
	return p
}

// do sends c and waits for the answer until end. shortened says that this is sooner
// than the timeout.
func (p *pipeline) do(c *Call, end time.Time, shortened bool) error {
	if c.done == nil {
		c.done = make(chan struct{}, 1)
	}
	now, until := time.Now(), end
	c.patience = patience{began: now, end: end, kept: now}
	p.lockToAdd()
	if !p.lostAt.IsZero() {
		if until = earlier(end, p.lostAt.Add(p.timeout)); !until.After(now) || p.server.isClosed() {
			lost := p.lostAt
			p.mu.Unlock()
			return p.server.notConnected(lost)
		}
	}
	how := p.add(c, now)
	p.mu.Unlock()
	if c.timer == nil {
		c.timer = time.NewTimer(until.Sub(now))
	} else {
		c.timer.Reset(until.Sub(now))
	}
	p.start(how)
	for {
		select {
		case <-c.done:
			c.timer.Stop()
			return c.err
		case <-c.timer.C:
		}
		if rest, err := p.overdue(c, until, shortened); err != nil {
			return err
		} else if rest > 0 {
			until = time.Time{}
			c.timer.Reset(rest)
			continue
		}
		<-c.done
		return c.err
	}
}

// submit sends c, whose Done receives the outcome.
func (p *pipeline) submit(c *Call) {
	c.end = time.Time{}
	p.lockToAdd()
	if !p.lostAt.IsZero() && p.server.isClosed() {
		p.mu.Unlock()
		c.Done(p.server.notConnected(time.Time{}))
		return
	}
	how := p.add(c, time.Now())
	p.mu.Unlock()
	p.goSend(how) // the reader may have called, which must not wait for a writer
}

// behind reports whether what is in flight waits for its answer for so long that nothing
// more should be submitted: no caller waits for such calls, so none would give them up, and
// as many as come would wait for a server that can't keep up.
func (p *pipeline) behind() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return false
	}
	in := p.conn.flight.first()
	return in != nil && time.Since(in.began) >= openAfter*p.timeout
}

// lockToAdd locks p. If there is no connection, one is being made then.
func (p *pipeline) lockToAdd() {
	p.mu.Lock()
	if p.lostAt.IsZero() {
		return
	}
	p.mu.Unlock()
	p.server.connect(false)
	p.mu.Lock()
}

// add adds c to the calls that have not been sent. The lock must be held, and start
// is to be called without it.
func (p *pipeline) add(c *Call, now time.Time) how {
	c.in, c.lag, c.Reply, c.err = nil, p.lag, nil, nil
	c.over.Store(false)
	p.open = append(p.open, c)
	return p.next(now)
}

// how says how the open calls will be sent.
type how uint8

const (
	already how = iota // somebody else sees to it
	here               // by the caller that has added the only one
	apart              // on a goroutine of their own
)

// next decides how the open calls are sent, so that they are as soon as they may be.
// The lock must be held, and start is to be called without it.
func (p *pipeline) next(now time.Time) how {
	switch {
	case p.writing || len(p.open)+len(p.again) == 0:
	case p.may(now):
		p.writing, p.due = true, now
		if p.conn.batches == 0 && len(p.open) == 1 && p.calls <= fewCalls {
			return here
		}
		return apart
	case p.lostAt.IsZero() && p.took > farAway && !p.paced:
		p.paced = true
		time.AfterFunc(p.last.Add(pace).Sub(now), p.sendPaced)
	}
	return already
}

// start sends the open calls, in the way that next has decided.
func (p *pipeline) start(how how) {
	if how != here {
		p.goSend(how)
		return
	}
	p.send()
	p.mu.Lock()
	p.writing = false
	how = p.next(p.last) // or a moment later
	p.mu.Unlock()
	p.goSend(how)
}

// goSend sends the open calls in a goroutine.
func (p *pipeline) goSend(how how) {
	if how != already {
		go p.sendAll()
	}
}

// may reports whether another batch may be sent. The lock must be held.
func (p *pipeline) may(now time.Time) bool {
	return p.conn != nil && p.lostAt.IsZero() &&
		(p.conn.batches < nearBatches || p.conn.batches < fullBatches && len(p.open) >= maxBatchKeys ||
			p.took > farAway && now.Sub(p.last) >= pace)
}

// sendPaced sends what waits for the pace.
func (p *pipeline) sendPaced() {
	p.mu.Lock()
	p.paced = false
	how := p.next(time.Now())
	p.mu.Unlock()
	p.goSend(how)
}

// sendAll sends batches as long as there are open calls and the server may have
// more.
func (p *pipeline) sendAll() {
	runtime.Gosched() // let goroutines that are about to call do so
	for p.send() {
		runtime.Gosched()
	}
}

// send sends a batch, and reports whether there may be another. If not, p.writing
// is no longer set.
func (p *pipeline) send() bool {
	p.sending.Lock()
	defer p.sending.Unlock()
	conn, ready := p.take()
	if conn == nil {
		return false
	}
	b := &batch{left: len(ready)}
	b.answered = b.first[:0]
	for _, in := range ready {
		p.server.sending(in)
		b.calls += len(in.calls)
	}
	p.mu.Lock()
	if conn.dead {
		for _, in := range ready {
			p.open = append(p.open, in.calls...)
		}
		p.mu.Unlock()
		if p.server.isClosed() { // no one will send them
			p.server.failOpen()
		}
		return true
	}
	b.began = time.Now()
	p.last, p.calls = b.began, b.calls
	conn.batches++
	for _, in := range ready {
		in.batch = b
		for _, c := range in.calls {
			c.in = in
		}
		p.number++
		in.number, in.whole = p.number, p.unknown || in.tries > 1 // twice, so it is flushed all the time
		if p.unknown {
			p.unknown, p.loaded = false, p.number
		}
		conn.flight.push(in)
	}
	p.mu.Unlock()
	p.out = p.out[:0]
	for _, in := range ready {
		p.out = p.server.script.appendTo(p.out, in)
	}
	if err := conn.write(p.out, b.began, p.timeout); err != nil {
		p.drop(conn, err) // its reader then sees to the calls
	}
	p.mu.Lock()
	b.sent = time.Now()
	if late := b.sent.Sub(p.due); late >= lateAfter {
		p.lag += late
	}
	p.due = b.sent
	p.mu.Unlock()
	return true
}

// take takes calls for the next batch, and returns the connection to send it on: nil
// if there is nothing to send. p.sending must be held.
func (p *pipeline) take() (*connection, []*invocation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if len(p.open)+len(p.again) == 0 || !p.may(now) {
		p.writing = false
		_ = p.next(now) // which sees to it that they are sent when pace has passed
		return nil, nil
	}
	ready := append(p.ready[:0], p.again...)
	p.again = nil
	n, keys := 0, 0
	for _, c := range p.open {
		if keys += len(c.Keys); n > 0 && keys > maxBatchKeys {
			break
		}
		n++
	}
	taken := slices.Clone(p.open[:n])
	p.open = slices.Delete(p.open, 0, n)
	p.ready = appendInvocations(ready, taken, p.slots)
	return p.conn, p.ready
}

// use makes conn the connection, and sends what is open on it. It reports whether
// there was none, or one that had fallen silent. No call is sent before those of the
// connection before have ended: its answer would show what they did, and they fail.
func (p *pipeline) use(conn *connection) bool {
	p.mu.Lock()
	before, ended := p.conn, p.ended
	if before != nil && p.lostAt.IsZero() {
		p.mu.Unlock()
		return false // it speaks again
	}
	if before != nil {
		before.dropped = true
	}
	p.mu.Unlock()
	if before != nil {
		before.close(context.DeadlineExceeded)
	}
	<-ended
	p.server.restarted()
	p.mu.Lock()
	ended = make(chan struct{})
	p.conn, p.lostAt, p.ended = conn, time.Time{}, ended
	p.took, p.rose, p.unknown = conn.trip, time.Time{}, false
	how := p.next(time.Now())
	p.mu.Unlock()
	go p.read(conn, ended)
	p.goSend(how)
	return true
}

// abandon closes a connection that has fallen silent, because no other one can be made:
// what is in flight on it is over. Otherwise calls that were submitted would be neither
// answered nor given up, for as long as the server is away.
func (p *pipeline) abandon() {
	p.mu.Lock()
	conn := p.conn
	if p.lostAt.IsZero() {
		conn = nil // it speaks again
	}
	p.mu.Unlock()
	if conn != nil {
		conn.close(context.DeadlineExceeded)
	}
}

// check asks whether the server still answers.
func (p *pipeline) check() {
	p.mu.Lock()
	p.again = append(p.again, new(invocation))
	how := p.next(time.Now())
	p.mu.Unlock()
	p.goSend(how)
}

// connections returns the number of connections that are idle and in use: one in
// all, or none.
func (p *pipeline) connections() (idle, inUse int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !p.lostAt.IsZero():
		return 0, 0
	case p.conn.batches > 0:
		return 0, 1
	}
	return 1, 0
}

// healthy reports whether there is a connection that answers.
func (p *pipeline) healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lostAt.IsZero()
}

// drop closes conn: the next call needs another.
func (p *pipeline) drop(conn *connection, why error) {
	p.mu.Lock()
	conn.dropped = true
	if p.conn == conn && p.lostAt.IsZero() {
		p.lostAt = time.Now()
	}
	p.mu.Unlock()
	conn.close(why)
}

// stop closes the connection, if there is one.
func (p *pipeline) stop(why error) {
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	if conn != nil {
		p.drop(conn, why)
	}
}

// lastHeard returns when something has last come, which is the zero time if nothing has.
func (p *pipeline) lastHeard() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn != nil {
		return p.conn.heard()
	}
	return p.heard
}

// dialing records that a connection is being made.
func (p *pipeline) dialing() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		p.lostAt = time.Now()
	}
}

// failOpen ends the wait of all calls that have not been sent, with a copy of an
// error that says so.
func (p *pipeline) failOpen(f *ServerError) {
	p.mu.Lock()
	calls := p.open
	for _, in := range p.again {
		calls = append(calls, in.calls...)
	}
	p.open, p.again = nil, nil
	p.mu.Unlock()
	for _, c := range calls {
		g := *f
		g.notRun = true // it was not this call that failed
		p.server.finish(c, &g)
	}
}

// read reads replies from conn until it breaks, and closes ended when all its calls have
// ended.
func (p *pipeline) read(conn *connection, ended chan<- struct{}) {
	defer close(ended)
	in := newReplyReader(conn)
	for {
		err := p.readReply(conn, in)
		if err != nil {
			p.lose(conn, err)
			return
		}
	}
}

// readReply reads the next reply and passes it to its calls.
func (p *pipeline) readReply(conn *connection, from *replyReader) error {
	if err := from.await(); err != nil {
		return err
	}
	p.mu.Lock()
	in := conn.flight.first()
	var how how
	if !p.lostAt.IsZero() && p.conn == conn && !conn.dropped {
		p.lostAt = time.Time{} // it speaks again
		how = p.next(conn.heard())
	}
	p.mu.Unlock()
	p.goSend(how)
	if in == nil {
		return errUnasked
	}
	failure, err := from.reply(in)
	if err != nil {
		return err
	}
	p.answered(conn, in, failure)
	return nil
}

// answered passes an answer to its calls: what they find in Reply, or an error.
func (p *pipeline) answered(conn *connection, in *invocation, failure error) {
	now := conn.heard()
	b := in.batch
	forgotten := failure != nil && !in.whole && hasCode(failure, "NOSCRIPT")
	p.mu.Lock()
	conn.flight.pop()
	news := false
	if forgotten {
		if in.number > p.loaded && !p.unknown {
			news, p.unknown = true, true
		}
		in.tries++
		p.again = append(p.again, in)
	}
	b.left--
	ended := b.left == 0
	if ended {
		conn.batches--
		p.tookFor(b.began, now)
	}
	how := p.next(now)
	p.mu.Unlock()
	if news {
		p.server.restarted()
	}
	p.goSend(how)
	if !forgotten {
		in.failure = failure
		b.answered = append(b.answered, in)
	}
	if ended {
		p.server.ended(conn, b)
	}
}

// tookFor records that a batch was sent at began and answered at ended. The estimate
// falls at once and rises slowly, and once for all batches that were in flight
// together: when a stall is over, the server is as fast as it was before. The lock
// must be held.
func (p *pipeline) tookFor(began, ended time.Time) {
	d := ended.Sub(began)
	switch {
	case d < p.took:
		p.took = d
	case !began.Before(p.rose):
		p.took += (d - p.took) / 8
		p.rose = ended
	}
}

// lose records that conn broke. It is unknown whether the script was run for the
// calls in flight.
func (p *pipeline) lose(conn *connection, err error) {
	conn.close(err)
	p.mu.Lock()
	conn.dead = true
	flight := conn.flight.all()
	current := p.conn == conn
	if current {
		p.conn, p.heard = nil, conn.heard()
		if p.lostAt.IsZero() {
			p.lostAt = time.Now()
		}
	}
	p.mu.Unlock()
	failure := p.server.lost(conn, current, len(flight) > 0)
	if len(flight) > 0 {
		p.server.pass(flight[0].batch)
	}
	for _, in := range flight {
		for _, c := range in.calls {
			p.server.finish(c, failure)
		}
	}
	if p.server.isClosed() { // no one will send what is open, or was to be sent again
		p.server.failOpen()
	}
}
