package ratelimit

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// evaluation collects the buckets that one request has to pass.
type evaluation struct {
	request   *http.Request
	replacer  *caddy.Replacer
	buckets   []limiter.Bucket
	policies  []*policy // one for each bucket
	decisions []limiter.Decision

	// The last fixed key that was expanded: most limits of a request share it.
	key     *key
	keyText string
	keyOwn  bool

	network string // of the client's address; empty until it is needed

	now time.Time // when the request arrived, if that is not now

	stripe uint32 // of counters; the pool keeps an evaluation on one core where it can
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
	clear(e.buckets) // drop references to what clients sent
	*e = evaluation{buckets: e.buckets[:0], policies: e.policies[:0], decisions: e.decisions[:0], stripe: e.stripe}
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

// count counts what was decided on the request, at each limit.
func (e *evaluation) count(a accounting) {
	denied := false
	for i := range e.decisions {
		denied = denied || e.decisions[i].Denied
	}
	for i := range e.decisions {
		d := &e.decisions[i]
		charged := !d.Denied && (!denied || a != accountingAtomic)
		e.policies[i].counters.count(e.stripe, &e.buckets[i], d, denied, charged)
		if d.Denied {
			events.denied(e.policies[i].counters, d)
		}
		if top := e.policies[i].top; top != nil {
			top.record(&e.buckets[i], d.Denied)
		}
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
