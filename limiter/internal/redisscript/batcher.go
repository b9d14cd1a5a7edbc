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
	// maxDirect is the maximum number of calls in flight that are not batched.
	maxDirect = 2

	// largeBatch is the number of calls that make a batch large. After a large
	// batch, no call is sent directly, because others are about to come. And when
	// more calls than that are pending, a second batch is sent beside the one in
	// flight.
	largeBatch = 8

	// maxInFlight is the maximum number of batches in flight, so that one is
	// filled while the server works on another. With more, each would carry fewer
	// calls, and all sides would have more work.
	maxInFlight = 2

	// maxLinger is how long a call waits for a batch in flight before an extra one
	// is sent for it: the server is far away, or slow.
	maxLinger = 2 * time.Millisecond

	// maxBatchKeys is the maximum number of keys in a batch, so that it does not
	// block the server for more than about a millisecond.
	maxBatchKeys = 256
)

// batcher batches the calls to a server. Calls that arrive while others are in
// flight wait, and each batch takes all calls that have arrived since the last
// one. A batch of many calls costs the server, and both ends of the connection, as
// much as two or three single calls. A call that finds few others in flight is
// sent at once and alone, unless the last batch was large.
type batcher struct {
	timeout  time.Duration
	pool     *pool
	breaker  *breaker
	flush    func(*connection, []*Call) // sends a batch
	complete func([]*Call, error)       // passes an error to all calls of a batch

	mu        sync.Mutex
	direct    int           // direct calls in flight
	inFlight  int           // goroutines that send batches, each one at a time
	lastBatch int           // calls in the last batch
	took      time.Duration // an estimate of how long a batch takes
	rose      time.Time     // when took last rose
	watched   bool          // whether flushOverdue is running
	queue     []*Call
}

// pending is the state of a call that is waiting.
type pending struct {
	since time.Time
	taken bool          // whether a batch has taken it; guarded by the batcher's lock
	over  atomic.Bool   // whether it was answered or given up
	done  chan struct{} // receives a value when there is an answer
	err   error         // the outcome, if there is no reply
	timer *time.Timer
}

// end ends the wait for an answer, because it has arrived or because the caller
// has given up. It reports whether the wait had not ended before.
func (p *pending) end() bool { return p.over.CompareAndSwap(false, true) }

func newBatcher(timeout time.Duration, p *pool, b *breaker, flush func(*connection, []*Call), complete func([]*Call, error)) *batcher {
	return &batcher{timeout: timeout, pool: p, breaker: b, flush: flush, complete: complete}
}

// tryDirect returns a connection if c may be sent directly; endDirect must be
// called once it is answered. Otherwise it queues c and returns nil.
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

// endDirect records that a direct call has ended.
func (b *batcher) endDirect() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.direct--
}

// add queues c for the next batch.
func (b *batcher) add(c *Call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.enqueue(c)
}

// enqueue is add with the lock held.
func (b *batcher) enqueue(c *Call) {
	c.since, c.taken = time.Now(), false
	c.Reply, c.err = nil, nil // left by a server that redirected it
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

// wait waits for the answer to c, which is queued. Unless c is Patient, it waits
// for at most half of the timeout until a batch takes c: in an overload, all
// answers would otherwise be too late. It returns errNoConnection or errLate if
// the wait was in vain.
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

// cancel removes c from the queue, unless a batch has taken it, and reports
// whether it did.
func (b *batcher) cancel(c *Call) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.taken {
		return false
	}
	// It is near the front: calls behind it have waited for less.
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
	if n > 0 { // otherwise another batch has taken all calls, and that was the last
		b.lastBatch = n
	}
	// Patient calls may have waited so long that no time is left for an answer.
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

// tookFor records that a batch was sent at began and answered at ended. The estimate
// falls at once and rises slowly, and once for all batches that were in flight
// together: when a stall is over, the server is as fast as it was before.
func (b *batcher) tookFor(began, ended time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := ended.Sub(began)
	switch {
	case d < b.took:
		b.took = d
	case !began.Before(b.rose):
		b.took += (d - b.took) / 8
		b.rose = ended
	}
}

// run sends batches as long as calls are queued.
func (b *batcher) run() {
	var batch []*Call
	for b.more() {
		conn, err := b.connection()
		if errors.Is(err, errNoConnection) {
			continue // calls may have arrived later, and each knows when to give up
		}
		if errors.Is(err, errConnecting) {
			time.Sleep(maxLinger) // callers do not wait long for a first connection
			continue
		}
		runtime.Gosched() // let goroutines that are about to call do so
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

// more reports whether calls are queued. If not, the goroutine that sends batches
// must end.
func (b *batcher) more() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) > 0 {
		return true
	}
	b.inFlight--
	return false
}

// flushOverdue sends extra batches, beside those of run, for calls that have
// waited too long.
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

// connection returns a connection for a batch: an idle one, or the next to become
// idle.
func (b *batcher) connection() (*connection, error) {
	if err := b.breaker.openError(); err != nil {
		return nil, err
	}
	if conn := b.pool.tryGet(); conn != nil {
		return conn, nil
	}
	return b.pool.get(context.Background(), false, false)
}
