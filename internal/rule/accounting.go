package rule

import (
	"context"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Accounting is what to charge when some limits have room for a request and others
// do not.
type Accounting string

// The ways of accounting.
const (
	Atomic  Accounting = "atomic"   // nothing
	Each    Accounting = "each"     // every limit that has room
	InOrder Accounting = "in_order" // the limits before the first that denies
)

// ParseAccounting parses the option accounting.
var ParseAccounting = option.OneOf(Atomic, Each, InOrder)

// inStore returns how a store charges the buckets of one call.
func (a Accounting) inStore() limiter.Accounting {
	if a == Each {
		return limiter.AccountingEach
	}
	return limiter.AccountingAtomic
}

// How is how a request is decided.
type How struct {
	Accounting Accounting
	NoFallback bool // whether a store fails that can't ask its server

	// For how long the request may wait for Redis, at all handlers together; 0 if it need
	// not. Time spent elsewhere between them does not count.
	Timeout time.Duration
	Outcome *outcome.Outcome   // which has how long it waited so far; nil if it can't wait
	Waits   *telemetry.Process // which counts how long requests wait
}

// Decide has a store decide on the request. If it is admitted, it has waited for as long as it has
// to. With an error, nothing was decided. What policies did, such as a delay or a ban, is counted
// here; who was admitted or denied by Count.
//
// Only limits that are asked in order may take more than one call: one that charges all or
// none is all it takes for a request that is admitted, and another one charges a denied
// request. A request that waits for a slot is decided anew each time that one may be free.
func (q *Request) Decide(s limiter.Store, how How) (err error) {
	switch n := len(q.entries); {
	case how.Accounting == InOrder && n > 1 && q.notesDenials():
		err = q.decideInOrder(s, &how)
	case how.Accounting == InOrder:
		if err = q.decideEntries(s, &how, 0, n); err == nil {
			q.chargeInOrder(s, &how)
		}
	case q.mayQueue && how.Outcome != nil:
		err = q.decideOrWait(s, &how)
	default:
		err = q.decideEntries(s, &how, 0, n)
	}
	var w *waiter
	var in *Entry
	if err == nil {
		w, in, err = q.takeOver(s, &how)
	}
	if err != nil {
		q.settleUnpassed()
		return err
	}
	switch delay := q.removeExtra(); {
	case w != nil:
		q.waitTurn(&how, w, in)
	case delay > 0 && how.Outcome != nil:
		q.waitOut(&how, delay)
	}
	if q.firstDenied() >= 0 {
		q.settleUnpassed()
	}
	return nil
}

// chargeInOrder charges the buckets before the first that has denied, after
// all were asked at once and none was charged. The store is asked once more, about
// these. If one of them is full by now, that is the first that denies. Decisions on later ones
// do not count, as if they had not been asked.
func (q *Request) chargeInOrder(s limiter.Store, how *How) {
	first := q.firstDenied()
	if first < 0 {
		return
	}
	for more := true; more && first > 0; {
		q.undecide(first+1, len(q.entries))
		if q.decideEntries(s, how, 0, first) != nil { // the store failed meanwhile, but the request is denied
			q.undecide(0, first)
			return
		}
		earlier := q.firstDenied()
		more = earlier < first
		first = earlier
	}
	q.undecide(first+1, len(q.entries))
}

// decideInOrder asks a store about one bucket after the other, until one denies. Asked all at
// once, limits that count denied requests, or ban for them, would do so after that one too,
// and twice before it.
func (q *Request) decideInOrder(s limiter.Store, how *How) error {
	for i := range q.entries {
		if err := q.decideEntries(s, how, i, i+1); err != nil {
			return err
		}
		if d := &q.entries[i].Decision; d.Denied && !d.DryRun {
			q.undecide(i+1, len(q.entries))
			break
		}
	}
	return nil
}

// undecide forgets what was decided on the entries from one index to another.
func (q *Request) undecide(from, to int) {
	for i := from; i < to; i++ {
		q.entries[i].Decided = false
		q.entries[i].endWait()
	}
}

// notesDenials reports whether any of the limits counts denied requests, or bans for them.
func (q *Request) notesDenials() bool {
	for i := range q.entries {
		if l := q.entries[i].Limit; l.CountDenied || l.Bans != nil {
			return true
		}
	}
	return false
}

// firstDenied returns the index of the first entry that has denied, or -1.
func (q *Request) firstDenied() int {
	for i := range q.entries {
		if q.entries[i].Denies() {
			return i
		}
	}
	return -1
}

// decideEntries has a store decide on the entries from one index to another, in one step. It is
// asked about their buckets, and about the buckets that ban their keys.
func (q *Request) decideEntries(s limiter.Store, how *How, from, to int) error {
	q.asked, q.about = q.asked[:0], q.about[:0]
	req := limiter.Request{Accounting: how.Accounting.inStore(), NoFallback: how.NoFallback}
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
	if to-from == 1 {
		req.Accounting = limiter.AccountingAtomic // no difference for one bucket, but denials are remembered
	}
	req.Buckets = q.asked
	var err error
	if q.answers, err = q.callStore(s, how, req); err != nil {
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
func (q *Request) callStore(s limiter.Store, how *How, req limiter.Request) ([]limiter.Decision, error) {
	q.decided = time.Now()
	if how.Timeout == 0 {
		return s.Take(context.Background(), req, q.answers[:0])
	}
	ctx := context.Background()
	if waited := how.Outcome.Waited(); waited > 0 {
		ctx = deadline{ctx, q.decided.Add(how.Timeout - waited)}
	}
	answers, err := s.Take(ctx, req, q.answers[:0])
	waited := time.Since(q.decided)
	how.Outcome.AddWait(waited)
	how.Waits.ObserveRedisWait(waited, answers)
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
