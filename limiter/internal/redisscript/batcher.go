package redisscript

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxDirect is how many calls may be on their way by themselves.
	maxDirect = 2

	// largeBatch is how many calls make a large batch. After one, no call goes by
	// itself: others are about to come. And if more calls wait, a second batch is
	// sent beside one on its way.
	largeBatch = 8

	// maxInFlight is how many batches may be on their way, so that one is made
	// while the server works on another. With more each carries fewer calls, and
	// all sides have more to do.
	maxInFlight = 2

	// maxLinger is how long a call waits for a batch to come back before one more
	// is sent for it: the server is far away, or slow.
	maxLinger = 2 * time.Millisecond

	// maxBatchKeys is how many keys a batch may have, so that it does not keep the
	// server from others for more than about a millisecond.
	maxBatchKeys = 256
)

// batcher batches the calls to a server: those that come while others are on their
// way wait, and each batch takes along all that have come since the last. The
// server has as much to do with a batch of many as with two or three single calls,
// and so have both ends of the connection. A call that finds few on their way goes
// at once and by itself, unless the last batch was large.
type batcher struct {
	timeout  time.Duration
	pool     *pool
	breaker  *breaker
	flush    func(*connection, []*Call) // sends a batch
	complete func([]*Call, error)       // tells a batch what has failed

	mu        sync.Mutex
	direct    int           // calls on their way by themselves
	inFlight  int           // goroutines that send batches, one after the other
	lastBatch int           // calls in the last batch
	took      time.Duration // how long batches take, on average of late
	watched   bool          // whether flushOverdue runs
	queue     []*Call
}

// pending is what a call has that waits.
type pending struct {
	since time.Time
	taken bool          // by a batch; guarded by the batcher's lock
	over  atomic.Bool   // whether there is an answer, or nobody waits for one
	done  chan struct{} // gets a word when there is an answer
	err   error         // the answer, if there is no reply
	timer *time.Timer
}

// end ends the wait for an answer, because there is one or because nobody waits
// for it any more, and reports whether it had not ended yet.
func (p *pending) end() bool { return p.over.CompareAndSwap(false, true) }

func newBatcher(timeout time.Duration, p *pool, b *breaker, flush func(*connection, []*Call), complete func([]*Call, error)) *batcher {
	return &batcher{timeout: timeout, pool: p, breaker: b, flush: flush, complete: complete}
}

// tryDirect returns a connection if c may go by itself; endDirect must be called
// when there is an answer. Otherwise c is in the queue from now on.
func (b *batcher) tryDirect(c *Call, hurried bool) *connection {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !hurried && len(b.queue) == 0 && b.direct < maxDirect && b.lastBatch < largeBatch {
		if conn := b.pool.tryGet(); conn != nil {
			b.direct++
			b.pool.grow()
			return conn
		}
	}
	if c.done == nil {
		c.done = make(chan struct{}, 1)
	}
	b.enqueue(c)
	return nil
}

// endDirect records that a call that went by itself is over.
func (b *batcher) endDirect() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.direct--
}

// add has c taken along by a batch.
func (b *batcher) add(c *Call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.enqueue(c)
}

// enqueue is add with the lock held.
func (b *batcher) enqueue(c *Call) {
	c.since, c.taken = time.Now(), false
	c.Reply, c.err = nil, nil // of a server that has redirected it
	c.over.Store(false)
	b.queue = append(b.queue, c)
	switch {
	case b.inFlight < maxInFlight && len(b.queue) > largeBatch*b.inFlight:
		b.inFlight++
		go b.run()
	case !b.watched:
		b.watched = true
		go b.flushOverdue()
	}
}

// wait waits for the answer to c, which is in the queue: for half of the time that
// a call has at most until it is on its way, since in an overload all would
// otherwise be too late. Only patient calls wait on. It returns errNoConnection or
// errLate if the wait was in vain.
func (b *batcher) wait(ctx context.Context, c *Call) error {
	end, _ := ctx.Deadline()
	left := end.Sub(c.since)
	first := min(left, b.timeout/2)
	if c.Patient {
		first = left
	}
	if c.timer == nil {
		c.timer = time.NewTimer(first)
	} else {
		c.timer.Reset(first)
	}
	defer c.timer.Stop()
	select {
	case <-c.done:
		return c.err
	case <-c.timer.C:
	}
	if b.cancel(c) {
		return errNoConnection
	}
	c.timer.Reset(time.Until(end))
	select {
	case <-c.done:
	case <-c.timer.C:
		if c.end() {
			return errLate
		}
		<-c.done
	}
	return c.err
}

// cancel takes c out of the queue, unless a batch has taken it, and reports whether
// it did.
func (b *batcher) cancel(c *Call) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.taken {
		return false
	}
	// It is among the first: those behind it have waited for less.
	if i := slices.Index(b.queue, c); i >= 0 {
		b.queue = slices.Delete(b.queue, i, i+1)
	}
	return true
}

// next appends the calls of the next batch to batch.
func (b *batcher) next(batch []*Call) []*Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nextLocked(batch)
}

// nextLocked is next with the lock held.
func (b *batcher) nextLocked(batch []*Call) []*Call {
	n, keys := 0, 0
	for _, c := range b.queue {
		if keys += len(c.Keys); n > 0 && keys > maxBatchKeys {
			break
		}
		c.taken = true
		n++
	}
	if n > 0 { // or another batch has taken all: that was the last
		b.lastBatch = n
	}
	// Patient calls have waited on; by now there may be no time left for an answer.
	latest := time.Now().Add(b.took - b.timeout)
	for _, c := range b.queue[:n] {
		if c.Patient && c.Done == nil && c.since.Before(latest) && c.end() {
			c.err = errNoConnection
			c.done <- struct{}{}
			continue
		}
		batch = append(batch, c)
	}
	b.queue = slices.Delete(b.queue, 0, n)
	return batch
}

// tookFor records how long a batch took.
func (b *batcher) tookFor(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.took += (d - b.took) / 8
}

// run sends batches as long as calls wait.
func (b *batcher) run() {
	var batch []*Call
	for b.more() {
		conn, err := b.connection()
		if errors.Is(err, errNoConnection) {
			continue // others have come later, and all know when to give up
		}
		if errors.Is(err, errConnecting) {
			time.Sleep(maxLinger) // nobody waits for a first connection for long
			continue
		}
		runtime.Gosched() // to those who are about to call too
		batch = b.next(batch[:0])
		switch {
		case err != nil:
			b.complete(batch, err)
		case len(batch) == 0:
			b.pool.put(conn)
		default:
			b.flush(conn, batch)
		}
	}
}

// more reports whether there is more to do for a goroutine that sends batches. If
// not, it has ended.
func (b *batcher) more() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) > 0 {
		return true
	}
	b.inFlight--
	return false
}

// flushOverdue sends batches beside those of run for calls that wait too long.
func (b *batcher) flushOverdue() {
	for {
		b.mu.Lock()
		if len(b.queue) == 0 {
			b.watched = false
			b.mu.Unlock()
			return
		}
		rest := maxLinger - time.Since(b.queue[0].since)
		var conn *connection
		var batch []*Call
		if rest <= 0 {
			if conn = b.pool.tryGet(); conn != nil {
				batch = b.nextLocked(nil)
			}
			rest = maxLinger
		}
		b.mu.Unlock()
		if len(batch) > 0 {
			go b.flush(conn, batch)
		} else if conn != nil {
			b.pool.put(conn)
		} else {
			time.Sleep(rest)
		}
	}
}

// connection returns a connection for a batch: an idle one, or the next that is.
func (b *batcher) connection() (*connection, error) {
	if err := b.breaker.openError(); err != nil {
		return nil, err
	}
	if conn := b.pool.tryGet(); conn != nil {
		return conn, nil
	}
	return b.pool.get(context.Background(), false, false)
}
