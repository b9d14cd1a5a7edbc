package limiter

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Requests to a server that come while others are on their way to it travel
// together: each call takes along all that have come since the last. The server
// has as much to do with a call of many as with two or three calls of one, and
// so have both ends of the connection. A request that finds few on their way
// goes at once and by itself, unless the last call carried a crowd.

const (
	// alone is how many requests may be on their way by themselves.
	alone = 2

	// crowd is how many requests are a crowd. After a call that carried so many
	// none goes by itself: others are about to ask too. And if more wait, a second
	// call is made beside one on its way.
	crowd = 8

	// senders is how many calls of several requests may be on their way, so that
	// one is made while the server works on another. With more each carries fewer,
	// and all that have a part in them have more to do.
	senders = 2

	// patience is how long a request waits for another call to come back before
	// one more is made for it: the server is far away, or slow.
	patience = 2 * time.Millisecond

	// fullCall is how many buckets a call may carry, so that it does not keep the
	// server from others for more than about a millisecond.
	fullCall = 256
)

// queue holds the requests that wait to be taken along to a server.
type queue struct {
	mu        sync.Mutex
	asked     int // how often the server was asked
	alone     int // requests on their way by themselves
	senders   int
	carried   int           // requests in the last call for those who waited
	took      time.Duration // how long calls take, on average of late
	impatient bool          // whether hurry runs
	waiting   []*question
}

// waiting is what a question has that waits.
type waiting struct {
	since time.Time
	sent  bool          // guarded by the queue's lock
	over  atomic.Bool   // whether there is an answer, or nobody waits for one
	done  chan struct{} // gets a word when there is an answer
	timer *time.Timer
}

// take asks a server about one request. It returns when ctx ends at the latest.
func (s *server) take(ctx context.Context, q *question) ([]int64, error) {
	probe, err := s.guard.enter()
	if err != nil {
		return nil, err
	}
	if probe || s.made.Load() == 0 {
		return s.runNow(ctx, probe, q, false)
	}
	if conn := s.pass(q, hurried(ctx)); conn != nil {
		reply, err := s.use(ctx, conn, q, false, false)
		s.queue.mu.Lock()
		s.queue.alone--
		s.queue.mu.Unlock()
		return reply, err
	}
	reply, err := s.await(ctx, q)
	if err != nil && redis.IsTryAgainError(err) {
		// The slot is on its way to another server, and of those who asked together
		// some have their buckets there already. Nothing was done.
		return s.runNow(ctx, false, q, false)
	}
	return reply, err
}

// pass returns a connection if q may go by itself. Otherwise q waits from now on.
func (s *server) pass(q *question, hurried bool) *connection {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	s.queue.asked++
	if !hurried && len(s.queue.waiting) == 0 && s.queue.alone < alone && s.queue.carried < crowd {
		if conn := s.idle(); conn != nil {
			s.queue.alone++
			if len(s.ready) == 0 {
				s.oneMore()
			}
			return conn
		}
	}
	if q.done == nil {
		q.done = make(chan struct{}, 1)
	}
	s.enqueue(q)
	return nil
}

// enqueue has q wait until it is taken along. The lock must be held.
func (s *server) enqueue(q *question) {
	q.since, q.sent = time.Now(), false
	q.reply, q.err = nil, nil // of a server that has sent it on
	q.over.Store(false)
	s.queue.waiting = append(s.queue.waiting, q)
	switch {
	case s.queue.senders < senders && len(s.queue.waiting) > crowd*s.queue.senders:
		s.queue.senders++
		go s.send()
	case !s.queue.impatient:
		s.queue.impatient = true
		go s.hurry()
	}
}

// settle has q taken along with others, and its answer told to q.settled.
func (s *server) settle(q *question) {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	s.enqueue(q)
}

// asked returns how often the server was asked.
func (s *server) asked() int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return s.queue.asked
}

// await waits for the answer to q, but for half of the time that a request has
// at most until it is on its way: those who come when too many do would
// otherwise all be too late. Only who has nobody else to decide waits on.
func (s *server) await(ctx context.Context, q *question) ([]int64, error) {
	end, _ := ctx.Deadline()
	left := end.Sub(q.since)
	first := min(left, s.timeout/2)
	if q.patient {
		first = left
	}
	if q.timer == nil {
		q.timer = time.NewTimer(first)
	} else {
		q.timer.Reset(first)
	}
	defer q.timer.Stop()
	select {
	case <-q.done:
		if errors.Is(q.err, errNoConnection) {
			return nil, s.giveUp(q.err)
		}
		return q.reply, q.err
	case <-q.timer.C:
	}
	if s.withdraw(q) {
		return nil, s.giveUp(errNoConnection)
	}
	q.timer.Reset(time.Until(end))
	select {
	case <-q.done:
	case <-q.timer.C:
		if q.end() {
			return nil, s.giveUp(errLate)
		}
		<-q.done
	}
	return q.reply, q.err
}

// end ends the wait for an answer, because there is one or because nobody waits
// for it any more, and reports whether it had not ended yet.
func (w *waiting) end() bool { return w.over.CompareAndSwap(false, true) }

// withdraw takes q back, unless it is on its way.
func (s *server) withdraw(q *question) bool {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if q.sent {
		return false
	}
	// It is among the first: those behind it have waited for less.
	if i := slices.Index(s.queue.waiting, q); i >= 0 {
		s.queue.waiting = slices.Delete(s.queue.waiting, i, i+1)
	}
	return true
}

// next appends to batch what a call takes along.
func (s *server) next(batch []*question) []*question {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return s.nextLocked(batch)
}

// nextLocked is next with the lock held.
func (s *server) nextLocked(batch []*question) []*question {
	qu := &s.queue
	n, buckets := 0, 0
	for _, q := range qu.waiting {
		if buckets += len(q.keys); n > 0 && buckets > fullCall {
			break
		}
		q.sent = true
		n++
	}
	if n > 0 { // or another call has taken all: that was the last
		qu.carried = n
	}
	// The patient have waited on; by now there may be no time left for an answer.
	latest := time.Now().Add(qu.took - s.timeout)
	for _, q := range qu.waiting[:n] {
		if q.patient && q.settled == nil && q.since.Before(latest) && q.end() {
			q.err = errNoConnection
			q.done <- struct{}{}
			continue
		}
		batch = append(batch, q)
	}
	qu.waiting = slices.Delete(qu.waiting, 0, n)
	return batch
}

// tookFor takes note of how long a call took.
func (qu *queue) tookFor(d time.Duration) {
	qu.mu.Lock()
	defer qu.mu.Unlock()
	qu.took += (d - qu.took) / 8
}

// send makes calls as long as requests wait.
func (s *server) send() {
	var batch []*question
	for s.more() {
		conn, err := s.connection()
		if errors.Is(err, errNoConnection) {
			continue // others have come later, and all know when to give up
		}
		if errors.Is(err, errConnecting) {
			time.Sleep(patience) // nobody waits for a first connection for long
			continue
		}
		runtime.Gosched() // to those who are about to ask too
		batch = s.next(batch[:0])
		switch {
		case err != nil:
			s.answer(batch, err)
		case len(batch) == 0:
			s.put(conn)
		default:
			s.carry(conn, batch)
		}
	}
}

// more reports whether a sender has more to do. If not, it is no longer one.
func (s *server) more() bool {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if len(s.queue.waiting) > 0 {
		return true
	}
	s.queue.senders--
	return false
}

// hurry makes calls beside those of the senders for requests that wait too long.
func (s *server) hurry() {
	for {
		s.queue.mu.Lock()
		if len(s.queue.waiting) == 0 {
			s.queue.impatient = false
			s.queue.mu.Unlock()
			return
		}
		rest := patience - time.Since(s.queue.waiting[0].since)
		var conn *connection
		var batch []*question
		if rest <= 0 {
			if conn = s.idle(); conn != nil {
				batch = s.nextLocked(nil)
			}
			rest = patience
		}
		s.queue.mu.Unlock()
		if len(batch) > 0 {
			go s.carry(conn, batch)
		} else if conn != nil {
			s.put(conn)
		} else {
			time.Sleep(rest)
		}
	}
}

// connection returns a connection for a sender, one that lies idle or the next
// that does.
func (s *server) connection() (*connection, error) {
	if err := s.guard.lost(); err != nil {
		return nil, err
	}
	if conn := s.idle(); conn != nil {
		return conn, nil
	}
	return s.wait(context.Background(), false, false)
}

// carry asks about all requests of a batch at once. A server of a cluster is asked
// in one call for each slot, for no call may have keys of two.
func (s *server) carry(conn *connection, batch []*question) {
	calls := s.calls(batch)
	began := time.Now()
	conn, err := s.sendCalls(within(s.timeout), conn, calls)
	if err != nil {
		s.answer(batch, err)
		return
	}

	// Whatever fails together has failed once.
	var worst error
	wrote := false
	for _, c := range calls {
		wrote = c.split() || wrote
		if s.worse(c.err, worst) {
			worst = c.err
		}
	}
	if worst == nil {
		s.queue.tookFor(time.Since(began))
		s.put(conn)
		s.guard.success(wrote)
	} else {
		_ = s.blame(conn, worst) // each is told its own
	}
	for _, c := range calls {
		if c.err != nil {
			s.answer(c.batch, s.failure(c.err))
		} else {
			s.answer(c.batch, nil)
		}
	}
}

// sendCalls sends the calls on conn, or on another connection if the server has
// closed it, which it returns. An error says that there is none.
func (s *server) sendCalls(ctx context.Context, conn *connection, calls []*call) (*connection, error) {
	for {
		sc, news := calls[0].batch[0].script, s.news.Load()
		s.sendingAll(calls)
		sc.sendAll(ctx, conn.Conn, calls, false)
		if again := unknown(calls); len(again) > 0 {
			s.restart(news)
			s.sendingAll(again)
			sc.sendAll(within(s.timeout), conn.Conn, again, true)
		}
		if !errors.Is(calls[0].err, errIdleClosed) {
			return conn, nil
		}
		s.idledOut(conn)
		var err error
		if conn, err = s.connection(); err != nil {
			return nil, err
		}
	}
}

// sendingAll takes note that the calls are about to be sent.
func (s *server) sendingAll(calls []*call) {
	for _, c := range calls {
		s.tell.sending(s, c.batch)
	}
}

// calls returns the calls that ask about a batch.
func (s *server) calls(batch []*question) []*call {
	if !s.slots {
		return []*call{{batch: batch}}
	}
	slices.SortStableFunc(batch, func(a, b *question) int { return strings.Compare(a.slot(), b.slot()) })
	var calls []*call
	for i, q := range batch {
		if i == 0 || q.slot() != batch[i-1].slot() {
			calls = append(calls, new(call))
		}
		c := calls[len(calls)-1]
		c.batch = append(c.batch, q)
	}
	return calls
}

// worse reports whether err tells more than another about the next call, or even
// about the connection.
func (s *server) worse(err, than error) bool {
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

// answer tells all requests of a batch that there is an answer, or what has
// failed.
func (s *server) answer(batch []*question, err error) {
	for _, q := range batch {
		switch {
		case q.settled != nil:
			q.settled(err)
		case q.end():
			q.err = err
			q.done <- struct{}{}
		case err == nil:
			s.tell.late(s, q)
		}
	}
}
