package limiter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// deadline returns when a call that is made for ctx now must be answered, and now.
func (r *servers) deadline(ctx context.Context) (end redisscript.Deadline, now time.Time) {
	now = time.Now()
	end.At = now.Add(r.timeout)
	if sooner, ok := ctx.Deadline(); ok && sooner.Before(end.At) {
		end = redisscript.Deadline{At: sooner, Shortened: true}
	}
	return end, now
}

// sending is called before calls are sent to a server.
func (r *servers) sending(to *redisscript.Server, batch []*redisscript.Call) {
	r.ledger.lock() // for all: what a call says of its account and the level that it reports go together
	r.fallback.send(to, batch)
	for _, c := range batch {
		r.ledger.sending(c.Owner.(*query))
	}
	r.ledger.unlock()
	for _, c := range batch {
		c.Owner.(*query).encode()
	}
}

// restarted is called when a server may have restarted, or be another one.
func (r *servers) restarted(server *redisscript.Server) {
	r.fallback.restarted(server)
	r.ledger.recall()
}

// call sends q to the server that has its buckets, and appends the outcomes to dst, which are
// recorded by then, see heard. After an
// error q may still be in flight. If a renewal of what this process holds has overtaken q, it
// is queried again.
func (r *servers) call(end redisscript.Deadline, q *query, dst []outcome) (srv *redisscript.Server, outcomes []outcome, err error) {
	for range 2 {
		srv, outcomes, err = r.callOnce(end, q, dst)
		if err != nil || !isOvertaken(outcomes[len(dst):]) {
			return srv, outcomes, err
		}
		r.eachReservation(q, r.ledger.refused)
	}
	return srv, dst, errOvertaken
}

// callOnce is call without a second attempt.
func (r *servers) callOnce(end redisscript.Deadline, q *query, dst []outcome) (*redisscript.Server, []outcome, error) {
	srv, err := r.client.Do(end, &q.Call)
	if err != nil {
		r.eachReservation(q, func(k *reservation) {
			if redisscript.NotRun(err) {
				r.ledger.refused(k)
			} else {
				r.ledger.lost(k)
			}
		})
		return srv, dst, err
	}
	if q.answer.corrupt {
		_ = srv.ReportCorrupt(errCorrupt)
	}
	if err = q.answer.err; err != nil {
		r.eachReservation(q, r.ledger.lost)
		return srv, dst, srv.ReportCorrupt(fmt.Errorf("%w: %w", errCorrupt, err))
	}
	return srv, append(dst, q.answer.outcomes...), nil
}

// heard reads the answer to a call, and records what was decided. It is called in the order of
// the answers, since what one says includes what those before it do. If there is none in time, what
// the request that waits for it then decides here is not included either.
func (r *servers) heard(c *redisscript.Call, err error, inTime bool) {
	q := c.Owner.(*query)
	if err != nil || !inTime {
		r.fallback.failed(q)
		return
	}
	a := &q.answer
	if a.outcomes, a.corrupt, a.err = q.outcomes(a.outcomes[:0]); a.err == nil && !isOvertaken(a.outcomes) {
		r.answered(q, a.outcomes)
	}
}

// isOvertaken reports whether a renewal of what this process holds has overtaken the call with
// these outcomes, so that it did nothing.
func isOvertaken(outcomes []outcome) bool {
	return slices.ContainsFunc(outcomes, func(o outcome) bool { return o.receipt < 0 })
}

// eachReservation calls do with what q was to hold.
func (r *servers) eachReservation(q *query, do func(*reservation)) {
	for i := range q.buckets {
		if k := q.buckets[i].reservation(); k != nil {
			do(k)
		}
	}
}

// answered records what a server has decided on q.
func (r *servers) answered(q *query, outcomes []outcome) {
	admitted := !q.denied(outcomes)
	for i := range q.buckets {
		switch k := q.buckets[i].reservation(); {
		case k == nil:
		case admitted && q.buckets[i].holds(&outcomes[i]):
			r.ledger.admitted(k, outcomes[i].receipt)
		default:
			r.ledger.refused(k)
		}
	}
	r.fallback.answered(q, outcomes)
}

// errCorrupt is the error for a key of ours that something else has written to.
var errCorrupt = errors.New("a key does not hold a bucket")

// errOvertaken is the error for a request that renewals have overtaken twice.
var errOvertaken = errors.New("what this process holds was renewed meanwhile")

// errLate is the error for a request whose deadline passed before it was sent.
var errLate = errors.New("no time was left to query a server")
