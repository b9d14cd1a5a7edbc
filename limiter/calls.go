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
	r.fallback.send(to, batch)
	for _, c := range batch {
		q := c.Owner.(*query)
		r.ledger.sending(q)
		q.encode()
	}
}

// call sends q to the server that has its buckets, and appends the outcomes to dst. After an
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
	outcomes, corrupt, err := q.outcomes(dst)
	if err == nil && corrupt {
		_ = srv.ReportCorrupt(errCorrupt)
	}
	if err != nil {
		r.eachReservation(q, r.ledger.lost)
		return srv, dst, srv.ReportCorrupt(fmt.Errorf("%w: %w", errCorrupt, err))
	}
	return srv, outcomes, nil
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
