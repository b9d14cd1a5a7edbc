package ratelimit

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// evaluation collects the buckets that one request has to pass.
type evaluation struct {
	request   *http.Request
	replacer  *caddy.Replacer
	buckets   []limiter.Bucket
	of        []configured // what each is configured by
	decisions []limiter.Decision
	holdings  []holding // what has to be settled

	// The last fixed key that was expanded: most limits of a request share it.
	key     *key
	keyText string
	keyOwn  bool

	pools bool // whether a limit may borrow

	network string // of the client's address; empty until it is needed

	now time.Time // when the request arrived, if that is not now

	stripe uint32 // of counters; the pool keeps an evaluation on one core where it can
}

// configured is what a bucket of a request is configured by.
type configured struct {
	*bucket
	above above // how much larger than its limit the bucket is for this request
	over  bool  // whether the request filled it above the size of the limit
	waits bool  // whether the request counts as one that waits
	began bool  // whether this request began that the limit bans the key

	banned time.Duration // for how long the limit bans the key; 0 if it does not
	delay  time.Duration // how long the request has to wait for it, or would without dry_run
}

// evaluations pools them for the memory of their slices.
var evaluations = sync.Pool{New: func() any { return &evaluation{stripe: evaluationsMade.Add(1)} }}

// evaluationsMade is the number of evaluations ever made.
var evaluationsMade atomic.Uint32

// evaluationOf returns an evaluation of r. The caller must release it.
func evaluationOf(r *http.Request) *evaluation {
	e := evaluations.Get().(*evaluation)
	e.request = r
	e.replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return e
}

// release returns e to the pool.
func (e *evaluation) release() {
	for i := range e.of {
		e.of[i].endWait()
	}
	clear(e.of)
	clear(e.buckets) // drop references to what clients sent
	*e = evaluation{buckets: e.buckets[:0], of: e.of[:0], decisions: e.decisions[:0], stripe: e.stripe}
	evaluations.Put(e)
}

// add adds the buckets of limits, and of those nested in them, that the request has
// to pass.
func (e *evaluation) add(limits []*Limit) error {
	for _, l := range limits {
		if err := l.addTo(e); err != nil {
			return err
		}
	}
	return nil
}

// take has store decide on the buckets of e and those that watch them, of which only the
// decisions on e's own are left. req says how; its Buckets and Held are set here.
func (e *evaluation) take(ctx context.Context, store limiter.Store, req limiter.Request) (err error) {
	if len(e.buckets) == 1 {
		req.Accounting = limiter.AccountingAtomic // all the same, but denials are remembered
	}
	if e.holds() {
		req.Held = new(limiter.Held)
	}
	e.addBans()
	e.linkPools()
	req.Buckets = e.buckets
	if e.decisions, err = store.Take(ctx, req, e.decisions[:0]); err == nil && req.Held != nil {
		e.hold(req.Held)
	}
	e.foldPools()
	e.foldBans()
	return err
}

// count counts what was decided on the request, at each limit.
func (e *evaluation) count(a accounting) {
	denied := false
	for i := range e.decisions {
		denied = denied || e.decisions[i].Denied && !e.decisions[i].DryRun
	}
	for i := range e.decisions {
		d := &e.decisions[i]
		charged := !d.Denied && (!denied || a != accountingAtomic) && !e.buckets[i].Hold && d.Borrowed == d.Pool
		policy := e.of[i].policy
		banned := e.of[i].banned > 0
		policy.counters.Count(e.stripe, &e.buckets[i], d, banned && !e.of[i].began, denied, charged)
		if banned {
			e.noteBan(i)
		}
		if d.Borrowed && !d.Pool {
			policy.counters.CountBorrowed(e.stripe)
		}
		if top := policy.top; top != nil {
			top.record(&e.buckets[i], d.Denied)
		}
	}
}

// outcome returns the outcome of the request.
func (e *evaluation) outcome() *outcome.Outcome { return outcome.Of(e.request, e.replacer, e.stripe) }

// entry returns how to show what e's i-th bucket has decided, in families of header fields.
func (e *evaluation) entry(i int, in outcome.Families) outcome.Entry {
	b, of := &e.buckets[i], &e.of[i]
	return outcome.Entry{
		Policy: &of.policy.Policy, Name: b.Name, Limit: b.Limit, Cost: b.Cost, Families: in, Over: of.over, Banned: of.banned > 0,
	}
}

// keyFor returns the request's key for b. If the request has none, own is false
// and the key is the client's address.
func (e *evaluation) keyFor(b *bucket) (text string, own bool, err error) {
	k := b.limit.key
	if e.key == k {
		return e.keyText, e.keyOwn, nil
	}
	text, own, err = k.expand(e.request, e.replacer)
	if err == nil && !own {
		text, err = k.clientAddress(e.request)
	}
	if err == nil && k.fixed {
		e.key, e.keyText, e.keyOwn = k, text, own
	}
	return text, own, err
}

// time returns when the request arrived.
func (e *evaluation) time() time.Time {
	if e.now.IsZero() {
		return time.Now()
	}
	return e.now
}

// clientNetwork returns the network of the client's address.
func (e *evaluation) clientNetwork() string {
	if e.network == "" {
		e.network = networkOfClient(e.request)
	}
	return e.network
}

// valueError returns the refusal of a request for which a placeholder had no
// usable value, or nil if err is nil.
func (e *evaluation) valueError(b *bucket, status int, err error) error {
	if err == nil {
		return nil
	}
	b.limit.reportBadValue(err)
	return refusal{status: status, err: fmt.Errorf("limit %q: %w", b.path, err)}
}
