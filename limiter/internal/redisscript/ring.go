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

// ring carries the calls to a server on one connection. Calls gather while others
// are in flight, and are sent together. The server answers in the order in which
// it was asked, so each reply finds its calls.
//
// For how long a call waits for its answer, patience.go says.
type ring struct {
	server  *Server
	timeout time.Duration
	slots   bool // whether an invocation has the keys of one slot

	// Held while a batch is taken and written, so that the order of what is in
	// flight is the order in which it was written.
	sending sync.Mutex
	ready   []*invocation // those of the last batch
	out     []byte

	mu      sync.Mutex
	conn    *connection   // nil while there is none
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
	ours   bool        // whether it only tests the server, for nobody
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

func newRing(s *Server, timeout time.Duration, slots bool) *ring {
	return &ring{server: s, timeout: timeout, slots: slots, lostAt: time.Now()}
}

// do sends c and waits for the answer until end. shortened says that this is sooner
// than the timeout.
func (r *ring) do(c *Call, end time.Time, shortened bool) error {
	if c.done == nil {
		c.done = make(chan struct{}, 1)
	}
	now, until := time.Now(), end
	c.patience = patience{began: now, end: end, kept: now}
	r.lockToAdd()
	if !r.lostAt.IsZero() {
		if until = earlier(end, r.lostAt.Add(r.timeout)); !until.After(now) || r.server.isClosed() {
			lost := r.lostAt
			r.mu.Unlock()
			return r.server.notConnected(lost)
		}
	}
	how := r.add(c, now)
	r.mu.Unlock()
	if c.timer == nil {
		c.timer = time.NewTimer(until.Sub(now))
	} else {
		c.timer.Reset(until.Sub(now))
	}
	r.start(how)
	for {
		select {
		case <-c.done:
			c.timer.Stop()
			return c.err
		case <-c.timer.C:
		}
		if rest, err := r.overdue(c, until, shortened); err != nil {
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
func (r *ring) submit(c *Call) {
	c.end = time.Time{}
	r.lockToAdd()
	if !r.lostAt.IsZero() && r.server.isClosed() {
		r.mu.Unlock()
		c.Done(r.server.notConnected(time.Time{}))
		return
	}
	how := r.add(c, time.Now())
	r.mu.Unlock()
	r.startApart(how) // the reader may have called, which must not wait for a writer
}

// behind reports whether what is in flight waits for its answer for so long that nothing
// more should be submitted: nobody waits for such calls, so nobody would give them up, and
// as many as come would wait for a server that can't keep up.
func (r *ring) behind() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn == nil {
		return false
	}
	in := r.conn.flight.first()
	return in != nil && time.Since(in.began) >= openAfter*r.timeout
}

// lockToAdd locks r. If there is no connection, one is being made then.
func (r *ring) lockToAdd() {
	r.mu.Lock()
	if r.lostAt.IsZero() {
		return
	}
	r.mu.Unlock()
	r.server.connect(false)
	r.mu.Lock()
}

// add adds c to the calls that have not been sent. The lock must be held, and start
// is to be called without it.
func (r *ring) add(c *Call, now time.Time) how {
	c.in, c.lag, c.Reply, c.err = nil, r.lag, nil, nil
	c.over.Store(false)
	r.open = append(r.open, c)
	return r.next(now)
}

// how says how the open calls will be sent.
type how uint8

const (
	already how = iota // somebody else sees to it
	here               // by whoever has added the only one
	apart              // on a goroutine of their own
)

// next decides how the open calls are sent, so that they are as soon as they may be.
// The lock must be held, and start is to be called without it.
func (r *ring) next(now time.Time) how {
	switch {
	case r.writing || len(r.open)+len(r.again) == 0:
	case r.may(now):
		r.writing, r.due = true, now
		if r.conn.batches == 0 && len(r.open) == 1 && r.calls <= fewCalls {
			return here
		}
		return apart
	case r.lostAt.IsZero() && r.took > farAway && !r.paced:
		r.paced = true
		time.AfterFunc(r.last.Add(pace).Sub(now), r.sendPaced)
	}
	return already
}

// start sends the open calls, in the way that next has decided.
func (r *ring) start(how how) {
	if how != here {
		r.startApart(how)
		return
	}
	r.send()
	r.mu.Lock()
	r.writing = false
	how = r.next(r.last) // or a moment later
	r.mu.Unlock()
	r.startApart(how)
}

// startApart is start for who has other things to do.
func (r *ring) startApart(how how) {
	if how != already {
		go r.sendAll()
	}
}

// may reports whether another batch may be sent. The lock must be held.
func (r *ring) may(now time.Time) bool {
	return r.conn != nil && r.lostAt.IsZero() &&
		(r.conn.batches < nearBatches || r.conn.batches < fullBatches && len(r.open) >= maxBatchKeys ||
			r.took > farAway && now.Sub(r.last) >= pace)
}

// sendPaced sends what waits for the pace.
func (r *ring) sendPaced() {
	r.mu.Lock()
	r.paced = false
	how := r.next(time.Now())
	r.mu.Unlock()
	r.startApart(how)
}

// sendAll sends batches as long as there are open calls and the server may have
// more.
func (r *ring) sendAll() {
	runtime.Gosched() // let goroutines that are about to call do so
	for r.send() {
		runtime.Gosched()
	}
}

// send sends a batch, and reports whether there may be another. If not, r.writing
// is no longer set.
func (r *ring) send() bool {
	r.sending.Lock()
	defer r.sending.Unlock()
	conn, ready := r.take()
	if conn == nil {
		return false
	}
	b := &batch{left: len(ready)}
	b.answered = b.first[:0]
	for _, in := range ready {
		r.server.sending(in)
		b.calls += len(in.calls)
	}
	r.mu.Lock()
	if conn.dead {
		for _, in := range ready {
			r.open = append(r.open, in.calls...)
		}
		r.mu.Unlock()
		if r.server.isClosed() { // nobody will send them
			r.server.failOpen()
		}
		return true
	}
	b.began = time.Now()
	r.last, r.calls = b.began, b.calls
	conn.batches++
	for _, in := range ready {
		in.batch = b
		for _, c := range in.calls {
			c.in = in
		}
		r.number++
		in.number, in.whole = r.number, r.unknown || in.tries > 1 // twice, so it is flushed all the time
		if r.unknown {
			r.unknown, r.loaded = false, r.number
		}
		conn.flight.push(in)
	}
	r.mu.Unlock()
	r.out = r.out[:0]
	for _, in := range ready {
		r.out = r.server.script.appendTo(r.out, in)
	}
	if err := conn.write(r.out, b.began, r.timeout); err != nil {
		r.drop(conn, err) // its reader then sees to the calls
	}
	r.mu.Lock()
	b.sent = time.Now()
	if late := b.sent.Sub(r.due); late >= lateAfter {
		r.lag += late
	}
	r.due = b.sent
	r.mu.Unlock()
	return true
}

// take takes calls for the next batch, and returns the connection to send it on: nil
// if there is nothing to send. r.sending must be held.
func (r *ring) take() (*connection, []*invocation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if len(r.open)+len(r.again) == 0 || !r.may(now) {
		r.writing = false
		_ = r.next(now) // which sees to it that they are sent when pace has passed
		return nil, nil
	}
	ready := append(r.ready[:0], r.again...)
	r.again = nil
	n, keys := 0, 0
	for _, c := range r.open {
		if keys += len(c.Keys); n > 0 && keys > maxBatchKeys {
			break
		}
		n++
	}
	taken := slices.Clone(r.open[:n])
	r.open = slices.Delete(r.open, 0, n)
	r.ready = appendInvocations(ready, taken, r.slots)
	return r.conn, r.ready
}

// use makes conn the connection, and sends what is open on it. It reports whether
// there was none, or one that had fallen silent.
func (r *ring) use(conn *connection) bool {
	r.mu.Lock()
	before := r.conn
	if before != nil && r.lostAt.IsZero() {
		r.mu.Unlock()
		return false // it speaks again
	}
	r.conn, r.lostAt = conn, time.Time{}
	r.took, r.rose, r.unknown = conn.trip, time.Time{}, false
	how := r.next(time.Now())
	r.mu.Unlock()
	if before != nil {
		before.close(context.DeadlineExceeded)
	}
	go r.read(conn)
	r.startApart(how)
	return true
}

// abandon closes a connection that has fallen silent, because no other one can be made:
// what is in flight on it is over. Otherwise calls that were submitted would be neither
// answered nor given up, for as long as the server is away.
func (r *ring) abandon() {
	r.mu.Lock()
	conn := r.conn
	if r.lostAt.IsZero() {
		conn = nil // it speaks again
	}
	r.mu.Unlock()
	if conn != nil {
		conn.close(context.DeadlineExceeded)
	}
}

// check asks whether the server still answers.
func (r *ring) check() {
	r.mu.Lock()
	r.again = append(r.again, new(invocation))
	how := r.next(time.Now())
	r.mu.Unlock()
	r.startApart(how)
}

// connections returns the number of connections that are idle and in use: one in
// all, or none.
func (r *ring) connections() (idle, inUse int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.lostAt.IsZero():
		return 0, 0
	case r.conn.batches > 0:
		return 0, 1
	}
	return 1, 0
}

// healthy reports whether there is a connection that answers.
func (r *ring) healthy() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lostAt.IsZero()
}

// drop closes conn: the next call needs another.
func (r *ring) drop(conn *connection, why error) {
	r.mu.Lock()
	conn.dropped = true
	if r.conn == conn && r.lostAt.IsZero() {
		r.lostAt = time.Now()
	}
	r.mu.Unlock()
	conn.close(why)
}

// stop closes the connection, if there is one.
func (r *ring) stop(why error) {
	r.mu.Lock()
	conn := r.conn
	r.mu.Unlock()
	if conn != nil {
		r.drop(conn, why)
	}
}

// lastHeard returns when something has last come, which is the zero time if nothing has.
func (r *ring) lastHeard() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn != nil {
		return r.conn.heard()
	}
	return r.heard
}

// dialing records that a connection is being made.
func (r *ring) dialing() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn == nil {
		r.lostAt = time.Now()
	}
}

// failOpen ends the wait of all calls that have not been sent, with a copy of an
// error that says so.
func (r *ring) failOpen(f *ServerError) {
	r.mu.Lock()
	calls := r.open
	for _, in := range r.again {
		calls = append(calls, in.calls...)
	}
	r.open, r.again = nil, nil
	r.mu.Unlock()
	for _, c := range calls {
		g := *f
		g.notRun = true // it was not this call that failed
		r.server.finish(c, &g)
	}
}

// read reads replies from conn until it breaks.
func (r *ring) read(conn *connection) {
	in := newReplyReader(conn)
	for {
		err := r.readReply(conn, in)
		if err != nil {
			r.lose(conn, err)
			return
		}
	}
}

// readReply reads the next reply and passes it to its calls.
func (r *ring) readReply(conn *connection, from *replyReader) error {
	if err := from.await(); err != nil {
		return err
	}
	r.mu.Lock()
	in := conn.flight.first()
	var how how
	if !r.lostAt.IsZero() && r.conn == conn && !conn.dropped {
		r.lostAt = time.Time{} // it speaks again
		how = r.next(conn.heard())
	}
	r.mu.Unlock()
	r.startApart(how)
	if in == nil {
		return errUnasked
	}
	failure, err := from.reply(in)
	if err != nil {
		return err
	}
	r.answered(conn, in, failure)
	return nil
}

// answered passes an answer to its calls: what they find in Reply, or an error.
func (r *ring) answered(conn *connection, in *invocation, failure error) {
	now := conn.heard()
	b := in.batch
	forgotten := failure != nil && !in.whole && hasCode(failure, "NOSCRIPT")
	r.mu.Lock()
	conn.flight.pop()
	news := false
	if forgotten {
		if in.number > r.loaded && !r.unknown {
			news, r.unknown = true, true
		}
		in.tries++
		r.again = append(r.again, in)
	}
	b.left--
	ended := b.left == 0
	if ended {
		conn.batches--
		r.tookFor(b.began, now)
	}
	how := r.next(now)
	r.mu.Unlock()
	if news {
		r.server.restarted()
	}
	r.startApart(how)
	if !forgotten {
		in.failure = failure
		b.answered = append(b.answered, in)
	}
	if ended {
		r.server.ended(conn, b)
	}
}

// tookFor records that a batch was sent at began and answered at ended. The estimate
// falls at once and rises slowly, and once for all batches that were in flight
// together: when a stall is over, the server is as fast as it was before. The lock
// must be held.
func (r *ring) tookFor(began, ended time.Time) {
	d := ended.Sub(began)
	switch {
	case d < r.took:
		r.took = d
	case !began.Before(r.rose):
		r.took += (d - r.took) / 8
		r.rose = ended
	}
}

// lose records that conn broke. It is unknown whether the script was run for the
// calls in flight.
func (r *ring) lose(conn *connection, err error) {
	conn.close(err)
	r.mu.Lock()
	conn.dead = true
	flight := conn.flight.all()
	current := r.conn == conn
	if current {
		r.conn, r.heard = nil, conn.heard()
		if r.lostAt.IsZero() {
			r.lostAt = time.Now()
		}
	}
	r.mu.Unlock()
	failure := r.server.lost(conn, current, len(flight) > 0)
	if len(flight) > 0 {
		r.server.pass(flight[0].batch)
	}
	for _, in := range flight {
		for _, c := range in.calls {
			r.server.finish(c, failure)
		}
	}
}
