package rule

import (
	"context"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// decideEntries has a store decide on the entries from one index to another, in one step. It is
// asked about their buckets, and about the buckets that ban their keys.
func (q *Request) decideEntries(from, to int) error {
	q.asked, q.about = q.asked[:0], q.about[:0]
	req := limiter.Request{NoFallback: q.how.NoFallback}
	if q.how.Accounting == Each && to-from > 1 { // no difference for one bucket, but denials are remembered
		req.Accounting = limiter.AccountingEach
	}
	same := 0 // entries of one limit that are asked
	for i := from; i < to; i++ {
		e := &q.entries[i]
		if e.withheld {
			continue
		}
		q.asked, q.about = append(q.asked, e.Query), append(q.about, entryRange{i, i + 1})
		if e.Query.Hold && req.Held == nil {
			req.Held = new(limiter.Held)
		}
		if same++; i+1 == to || q.entries[i+1].Limit != e.Limit {
			if e.Limit.Bans != nil {
				q.addBan(entryRange{i + 1 - same, i + 1})
			}
			same = 0
		}
	}
	req.Buckets = q.asked
	var err error
	if q.answers, err = q.callStore(req); err != nil {
		return err
	}
	for j, of := range q.about {
		d := &q.answers[j]
		if q.asked[j].Watches > 0 {
			q.applyBan(d, of)
			continue
		}
		e := &q.entries[of.from]
		e.Decision, e.Decided = *d, !d.Pool || d.Borrowed
	}
	if req.Held != nil {
		q.hold(req.Held)
	}
	return nil
}

// callStore has a store decide. The request's own context is ignored: a client that
// disconnects is charged like any other.
func (q *Request) callStore(req limiter.Request) ([]limiter.Decision, error) {
	q.decided = time.Now()
	if q.how.Timeout == 0 {
		return q.store.Take(context.Background(), req, q.answers[:0])
	}
	ctx := context.Background()
	if waited := q.how.Outcome.Waited; waited > 0 {
		ctx = deadline{ctx, q.decided.Add(q.how.Timeout - waited)}
	}
	answers, err := q.store.Take(ctx, req, q.answers[:0])
	waited := time.Since(q.decided)
	q.how.Outcome.Waited += waited
	q.how.Waits.ObserveRedisWait(waited, answers)
	return answers, err
}

// deadline is a context that reports a deadline but is never done, which saves a
// timer: the store enforces the deadline itself.
type deadline struct {
	context.Context
	at time.Time
}

// Deadline implements context.Context.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// addBan adds the bucket that bans the key to those that are asked, after the entries of one
// limit.
func (q *Request) addBan(of entryRange) {
	e := &q.entries[of.from]
	ban := e.BanOf(&e.Query)
	ban.Watches = uint8(of.to - of.from) // at most two
	q.asked, q.about = append(q.asked, ban), append(q.about, of)
}

// applyBan applies the decision of a bucket that bans to the entries that it watches. The
// request that begins a ban was denied by one of them anyway: the first has the ban then.
func (q *Request) applyBan(d *limiter.Decision, of entryRange) {
	if !d.Denied {
		return
	}
	if d.Began {
		of.to = of.from + 1
	}
	for i := of.from; i < of.to; i++ {
		e := &q.entries[i]
		e.Banned, e.Began = d.RetryAfter, d.Began
		e.Decision.Denied, e.Decision.Remaining = true, 0
		e.Decision.Clear = max(e.Decision.Clear, d.RetryAfter)
		if !e.Decision.Never {
			e.Decision.RetryAfter = max(e.Decision.RetryAfter, d.RetryAfter)
		}
	}
}

// hold notes what the buckets that were asked hold, if they have admitted the request.
func (q *Request) hold(held *limiter.Held) {
	for j, of := range q.about {
		if q.asked[j].Watches == 0 && q.entries[of.from].Denies() {
			return
		}
	}
	for j, of := range q.about {
		if d := &q.answers[j]; q.asked[j].Hold && !d.Denied && d.Borrowed == d.Pool {
			e := &q.entries[of.from]
			h := settle.Holding{Terms: &e.Limit.Settlement, Held: held, Index: j, Cost: e.Estimate, Entry: of.from, Own: e.hasOwnKey()}
			if e.Limit.waitsForSlot() {
				h.Slots = e.Limit.Waiting.NewSlots(e.queue(0), q.fairBy(e), h.Cost, d.By == limiter.DecidedByRedis)
				h.Slots.Count(true)
			}
			q.holdings = append(q.holdings, h)
		}
	}
}

// settleUnpassed settles what a request holds that is not passed on: a limit that was asked
// later has denied it, or its client has left while it waited.
func (q *Request) settleUnpassed() {
	for i := range q.holdings {
		if h := &q.holdings[i]; h.Held != nil {
			charge := h.Unpassed()
			if h.Outcome == nil {
				q.entries[h.Entry].Charged = charge
			}
			h.Settle(charge)
		}
	}
	q.holdings = nil
}
