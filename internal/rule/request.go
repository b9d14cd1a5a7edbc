package rule

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Request is one request, and the buckets that it has to pass at one handler.
type Request struct {
	http     *http.Request
	replacer *caddy.Replacer
	at       time.Time // when the request arrived, if that is not now
	decided  time.Time // when the decisions were begun, since a request may wait for that
	entries  []Entry
	loads    []Entry   // of limits that follow the load, which no store is asked about
	holdings []Holding // what has to be settled

	// What a store is asked about, the entries that each of these buckets decides, and the
	// answers.
	asked   []limiter.Bucket
	about   []entryRange
	answers []limiter.Decision

	// The last fixed key that was expanded: most limits of a request share it.
	key     *key.Key
	keyText string
	keyOwn  bool

	mayQueue bool   // whether the request may wait for a slot
	left     bool   // whether its client has left while it waited
	late     bool   // whether it was denied while it waited, after it was charged
	direct   bool   // whether no proxy is known to have passed it on
	network  string // of the client's address; empty until it is needed
	stripe   uint32 // of counters; the pool keeps a Request on one core where it can
}

// entryRange is a range of entries, from the first to before the last.
type entryRange struct{ from, to int }

// Entry is one bucket, and all that is decided on it for a request.
type Entry struct {
	*Bucket
	Query    limiter.Bucket // what a store is asked about it; its size has the extraCapacity too
	Estimate int64          // what the request costs, as far as that is known before its response

	Decision limiter.Decision // about the size of the limit
	Decided  bool             // whether there is one that counts
	Over     bool             // whether the request filled the bucket above the size of the limit
	Began    bool             // whether the request began that the limit bans the key
	Banned   time.Duration    // for how long the limit bans the key; 0 if it does not
	Charged  int64            // what it was charged, as far as that is known before its response
	Delay    time.Duration    // how long the request has to wait for it, or would without dry_run

	extra    extraCapacity // in the size that is asked
	waits    bool          // whether the request counts as one that waits
	tookOver bool          // whether it has a slot that another request was charged for
	withheld bool          // whether no store is asked about it
}

// Denies reports whether the request was denied because of e.
func (e *Entry) Denies() bool { return e.Decided && e.Decision.Denied && !e.Decision.DryRun }

// ByAddress reports whether the client's address replaces the key.
func (e *Entry) ByAddress() bool { return e.Query.Name == e.AddressName }

// Size returns the size of the limit for the request.
func (e *Entry) Size() int64 { return e.Query.Limit.Size - e.extra.units() }

// need returns for how many units there has to be room.
func (e *Entry) need() int64 {
	if e.Query.Hold {
		return max(e.Query.Cost, 1) // of what holds nothing, it is not known yet whether it costs anything
	}
	return e.Query.Cost
}

// RefusalError is the error of a request that is rejected for another reason than
// its rate.
type RefusalError struct {
	Status int
	Err    error
}

// Error returns why the request is rejected.
func (r RefusalError) Error() string { return r.Err.Error() }

// StatusCode returns the status of the response.
func (r RefusalError) StatusCode() int { return r.Status }

// requests pools them for the memory of their slices.
var requests = sync.Pool{New: func() any { return &Request{stripe: made.Add(1)} }}

// made is the number of requests ever made.
var made atomic.Uint32

// Evaluate finds out which buckets of limits r has to pass if it arrives at the given time,
// or now if that is zero. Its error is a RefusalError, or the error of a matcher; the Request
// then has the buckets that were found before. In any case it must be released.
func Evaluate(r *http.Request, limits []*Limit, at time.Time) (*Request, error) {
	q := requests.Get().(*Request)
	q.http, q.at = r, at
	q.replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if err := q.add(limits); err != nil {
		return q, err
	}
	// Not before: what is evaluated may fail, or wait for the body of another limit's cost.
	for i := range q.entries {
		e := &q.entries[i]
		if e.Query.Hold && e.Limit.Settlement.HoldOff {
			e.Query.Cost = 0
		}
		e.addExtra()
		q.mayQueue = q.mayQueue || e.Limit.waitsForSlot()
	}
	return q, nil
}

// Release gives q back. It must not be used any more, nor anything that it returned but the
// Holdings.
func (q *Request) Release() {
	for i := range q.entries {
		q.entries[i].endWait()
	}
	clear(q.entries) // drop references to what clients sent
	clear(q.loads)
	clear(q.asked[:cap(q.asked)])
	*q = Request{entries: q.entries[:0], loads: q.loads[:0], asked: q.asked[:0], about: q.about[:0], answers: q.answers[:0], stripe: q.stripe}
	requests.Put(q)
}

// Entries returns the entries of q: its buckets, in the order in which they are decided. Some
// are not decided by Decide: those after the first that denies, if limits are decided in order,
// and pools of which nothing was borrowed.
func (q *Request) Entries() []Entry { return q.entries }

// Withhold has the i-th entry not asked about. A pool lends nothing then, and one from which
// nothing can be borrowed is not asked about either.
func (q *Request) Withhold(i int) {
	e := &q.entries[i]
	e.withheld = true
	e.endWait()
	pool, borrows := -1, false
	for j := range q.entries {
		switch other := &q.entries[j]; {
		case other.Query.Pool && other.Limit == e.Limit.Lender:
			pool = j
		case e.Query.Pool && other.Limit.Lender == e.Limit:
			other.Query.Borrows = false
		case other.Query.Borrows && !other.withheld && other.Limit.Lender == e.Limit.Lender:
			borrows = true
		}
	}
	if pool >= 0 && !borrows {
		q.entries[pool].withheld = true
	}
}

// SetHeaders adds what was decided to o, which sets header fields. It returns what o.Add does.
func (q *Request) SetHeaders(o *outcome.Outcome, how outcome.How, h http.Header) (decider *outcome.Entry, wait time.Duration) {
	n, at, first := 0, -1, o.Entries()
	for i := range q.entries {
		if q.entries[i].Decided {
			n++
		}
	}
	decider, wait = o.Add(n, func(int) outcome.Entry {
		for at++; !q.entries[at].Decided; at++ {
		}
		e := &q.entries[at]
		return outcome.Entry{
			Policy: &e.Policy.Policy, Name: e.Query.Name, Limit: e.Query.Limit, Cost: e.need(),
			Over: e.Over, Banned: e.Banned > 0, Decision: e.Decision,
		}
	}, how, h)
	at = first
	for i := range q.entries {
		if q.entries[i].Decided {
			q.reportCharge(o, i, at)
			at++
		}
	}
	return decider, wait
}

// reportCharge reports to o, whose at-th entry it is, what the bucket of the i-th entry was
// charged, now or once that is settled.
func (q *Request) reportCharge(o *outcome.Outcome, i, at int) {
	o.Charge(at, q.entries[i].Charged)
	for j := range q.holdings {
		if h := &q.holdings[j]; h.outcome == nil && h.entry == i {
			h.outcome, h.entry = o, at
			return
		}
	}
}

// Count counts what was decided on the request, at each limit, and notes what it was charged.
func (q *Request) Count(a Accounting) {
	denied := q.firstDenied() >= 0
	for i := range q.entries {
		e := &q.entries[i]
		if !e.Decided {
			continue
		}
		d := &e.Decision
		charged := !d.Denied && (!denied || a != Atomic || q.late) && !e.Query.Hold && d.Borrowed == d.Pool
		if charged {
			e.Charged = e.Query.Cost
		}
		e.Policy.Counters.Count(q.stripe, &e.Query, d, e.Banned > 0 && !e.Began, denied, charged)
		if e.Banned > 0 {
			q.noteBan(e)
		}
		if d.Borrowed && !d.Pool {
			e.Policy.Counters.CountBorrowed(q.stripe)
		}
		if top := e.Policy.Top; top != nil {
			top.Record(e.Query.Key, e.ByAddress(), d.Denied)
		}
	}
}

// add adds entries for limits, and for those within them, that the request has to pass.
func (q *Request) add(limits []*Limit) error {
	for _, l := range limits {
		if err := l.addTo(q); err != nil {
			return err
		}
	}
	return nil
}

// addTo adds to q entries for l, and for its nested limits, that the request has to pass.
func (l *Limit) addTo(q *Request) error {
	switch {
	case l.Lender != nil:
		return nil // that adds it
	case l.Pool:
		return l.addPoolTo(q)
	}
	if matches, err := l.addOwnTo(q); err != nil || !matches {
		return err
	}
	return q.add(l.Within)
}

// addOwnTo adds to q entries for l alone, if the request has to pass it. It reports
// whether it has to.
func (l *Limit) addOwnTo(q *Request) (matches bool, err error) {
	if matches, err = l.Matchers.AnyMatchWithError(q.http); err != nil || !matches {
		return false, err
	}
	for _, b := range l.Buckets {
		if err := b.addTo(q); err != nil {
			return false, err
		}
	}
	return true, nil
}

// keyFor returns the request's key for b. If the request has none, own is false
// and the key is the client's address.
func (q *Request) keyFor(b *Bucket) (text string, own bool, err error) {
	k := b.Limit.Key
	if q.key == k {
		return q.keyText, q.keyOwn, nil
	}
	text, own, err = k.Of(q.http, q.replacer)
	if err == nil && !own {
		text, err = k.ClientAddress(q.http)
	}
	if err != nil {
		return "", false, RefusalError{http.StatusTooEarly, err}
	}
	if k.Fixed {
		q.key, q.keyText, q.keyOwn = k, text, own
	}
	return text, own, nil
}

// time returns when the request arrived.
func (q *Request) time() time.Time {
	if q.at.IsZero() {
		return time.Now()
	}
	return q.at
}

// clientNetwork returns the network of the client's address.
func (q *Request) clientNetwork() string {
	if q.network == "" {
		q.network = key.NetworkOfClient(q.http)
	}
	return q.network
}

// valueError returns the refusal of a request for which a placeholder had no
// usable value, or nil if err is nil.
func (q *Request) valueError(b *Bucket, status int, err error) error {
	if err == nil {
		return nil
	}
	b.Limit.Reporter.BadValue(err)
	return RefusalError{status, fmt.Errorf("limit %q: %w", b.Path, err)}
}
