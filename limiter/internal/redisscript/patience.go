package redisscript

import (
	"context"
	"slices"
	"time"
)

// A process with thousands of runnable goroutines is late to send and late to read,
// while the server is well. So a call whose time is over is not given up at once: its
// caller first looks whether this process has kept it from its answer.

const (
	// lateAfter is how late a goroutine must be before that counts: they always are a
	// little.
	lateAfter = time.Millisecond

	// maxLate is the most that a call waits beyond its time because this process
	// is late.
	maxLate = 5 * time.Second
)

// patience is how long a call waits for its answer.
type patience struct {
	began  time.Time     // when it began to wait
	end    time.Time     // when its time is over; zero if no call waits
	lag    time.Duration // the pipeline's when it began
	kept   time.Time     // when this process was last seen to keep it from its answer
	unread time.Time     // when the reader had last gone on, if there was more to read
	stuck  bool          // whether it had not gone on between two looks
}

// allowed returns how long a call may take.
func (p *patience) allowed() time.Duration { return p.end.Sub(p.began) }

// looked records what a call has found: when it was sent, zero if it was not; whether
// something has come that was not read; and when the reader last went on. It reports
// whether the reader has not gone on since the last look.
func (p *patience) looked(now, sent time.Time, unread bool, heard time.Time) (stuck bool) {
	if sent.Sub(p.end) >= lateAfter {
		p.kept = later(p.kept, sent)
	}
	stuck = unread && p.unread.Equal(heard)
	if stuck || p.stuck {
		p.kept = now
	}
	if p.stuck, p.unread = stuck, (time.Time{}); unread {
		p.unread = heard
	}
	return stuck
}

// missed records that a call has missed its time by as much, so that all of this process
// may have been stopped. Then the call began later, and gets as much again, but no more
// than it had, for what it waits for.
func (p *patience) missed(now time.Time, by time.Duration) {
	p.kept = later(p.kept, now.Add(min(by, p.allowed())-p.allowed()))
	p.began, p.end = p.began.Add(by), p.end.Add(by)
}

// rest returns how much longer the call may take, given the pipeline's lag. By as much as
// this process was late to send batches there is more time, and if it kept the call
// beyond its time, that starts over.
func (p *patience) rest(now time.Time, lag time.Duration) time.Duration {
	return later(p.end.Add(lag-p.lag), p.kept.Add(p.allowed())).Sub(now)
}

// cancel removes c from the calls that have not been sent, and reports whether it
// was among them.
func (p *pipeline) cancel(c *Call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.open, c) // near the front: those behind it have waited for less
	if i >= 0 {
		p.open = slices.Delete(p.open, i, i+1)
	}
	return i >= 0
}

// overdue decides what becomes of a call whose time is over. It returns for how long the
// call waits on, or the error with which it gives up; neither if it was answered meanwhile.
//
// A server that is silent is to blame, whatever this process does: something has been
// in flight for the timeout, and not a byte has come. Otherwise the call waits as long
// as it is for this process to go on, to send it or to read what may be the answer, and
// as it has patience.
//
// Until is when the call's timer was to fire; overdue may run later than that.
func (p *pipeline) overdue(c *Call, until time.Time, shortened bool) (time.Duration, error) {
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	unread, heard := false, time.Time{}
	if conn != nil {
		unread, heard = conn.answers()
	}
	now := time.Now()
	p.mu.Lock()
	if c.over.Load() {
		p.mu.Unlock()
		return 0, nil
	}
	in, lost, sent := c.in, p.lostAt, time.Time{}
	if in != nil {
		sent = in.sent
	}
	late := in == nil && lost.IsZero() && p.writing && now.Sub(p.due) >= lateAfter // to send it
	ours := late || unread || in != nil && sent.IsZero()
	if c.looked(now, sent, unread, heard) {
		p.stuck = now
	}
	c.kept = later(c.kept, p.stuck) // which others may have found
	if missed := now.Sub(until); !until.IsZero() && missed >= lateAfter {
		c.missed(now, missed)
	}
	rest := c.rest(now, p.lag)
	switch beyond := now.Sub(c.end); {
	case beyond >= maxLate:
		rest = 0
	case ours:
		rest = max(beyond, c.allowed()/8) // so that thousands do not look all the time
	case conn == nil || conn.silent(now) >= p.timeout:
		rest = 0
	}
	p.mu.Unlock()
	switch {
	case in == nil && !lost.IsZero():
		if p.cancel(c) {
			return 0, p.server.notConnected(lost)
		}
	case rest > 0:
		if late && p.sending.TryLock() {
			p.sending.Unlock()
			p.send()
		}
	case in == nil:
		if p.cancel(c) {
			return 0, p.server.behind()
		}
	case !c.finish():
		return 0, nil
	default:
		return 0, p.giveUp(conn, sent, now, shortened, ours)
	}
	return max(rest, lateAfter), nil // it has just been sent, or waits
}

// giveUp records that a call was not answered in time, and returns its error. What
// times out together counts once: calls that were in flight when another one timed
// out do not count again. If ours, this process has kept the call from its answer, and
// the server is not to blame.
func (p *pipeline) giveUp(conn *connection, sent, now time.Time, shortened, ours bool) error {
	p.mu.Lock()
	silent := !ours && conn != nil && p.conn == conn && conn.silent(now) >= p.timeout-min(lateAfter, p.timeout/2)
	first := (silent || !shortened && !ours) && sent.After(p.failed)
	if first {
		p.failed = now
	}
	suspect := silent && p.lostAt.IsZero()
	blocked := suspect && conn.flight.blocked()
	if suspect {
		p.lostAt = now
	}
	p.mu.Unlock()
	why := context.DeadlineExceeded
	switch {
	case ours:
		why = errKept
	case shortened && !silent:
		why = errLate
	}
	err := p.server.timedOut(why, first)
	if blocked {
		conn.stopWriting()
	}
	if suspect {
		p.failOverdue(now)
		p.server.connect(false)
	}
	return err
}

// failOverdue ends the wait of calls that have not been sent, whose time is over.
func (p *pipeline) failOverdue(now time.Time) {
	p.mu.Lock()
	var overdue []*Call
	p.open = slices.DeleteFunc(p.open, func(c *Call) bool {
		is := !c.end.IsZero() && c.end.Before(now)
		if is {
			overdue = append(overdue, c)
		}
		return is
	})
	p.mu.Unlock()
	for _, c := range overdue {
		p.server.finish(c, p.server.failure(errConnecting))
	}
}

// watch suspects a connection that has been silent for the timeout, or for longer,
// while calls are in flight for which no caller waits. It returns for how long
// nothing has come while nothing is in flight.
func (p *pipeline) watch() (idle time.Duration) {
	now := time.Now()
	p.mu.Lock()
	conn := p.conn
	if conn == nil || !p.lostAt.IsZero() {
		p.mu.Unlock()
		return 0
	}
	in := conn.flight.first()
	if in == nil {
		silent := conn.silent(now)
		p.mu.Unlock()
		return silent
	}
	p.mu.Unlock()
	unread, _ := conn.answers()
	p.mu.Lock()
	silent, sent := conn.silent(now), in.sent
	p.mu.Unlock()
	if silent >= p.timeout && !unread {
		_ = p.giveUp(conn, sent, now, false, false)
	}
	return 0
}

// earlier returns the earlier of two times.
func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
