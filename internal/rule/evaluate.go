package rule

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/field"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Evaluate finds out which buckets of limits r has to pass if it arrives at the given time,
// or now if that is zero. Its error is a RefusalError, or the error of a matcher; the Request
// then has the buckets that were found before. In any case it must be released.
func Evaluate(r *http.Request, limits []*Limit, at time.Time) (*Request, error) {
	q := requests.Get().(*Request)
	q.http, q.at = r, at
	q.replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if err := q.addReading(limits); err != nil {
		return q, err
	}
	// Not before: what is evaluated may fail, or wait for the body of another limit's cost.
	for i := range q.entries {
		e := &q.entries[i]
		if e.Query.Hold && e.Limit.Settlement.HoldOff {
			e.Query.Cost = 0
		}
		if l := e.Limit; l.Soft > 0 || l.MaxDelay > 0 || e.Query.Limit.Size == 0 {
			e.addExtra()
			q.mayQueue, q.mayExceed = q.mayQueue || l.waitsForSlot(), true
		}
	}
	return q, nil
}

// addReading is add, and sees to it that the fields of what the client submits are known where a limit
// names any.
func (q *Request) addReading(limits []*Limit) error {
	for _, l := range limits {
		if l.ReadBody == 0 {
			continue
		}
		q.reads = true
		field.Register(q.http, q.replacer, l.ReadBody)
		err := q.add(limits)
		if status, why := field.Err(q.replacer); why != nil {
			return RefusalError{status, why} // whatever came of the values that were missing
		}
		return err
	}
	return q.add(limits)
}

// addExtra adds to the size that e asks for what may be above it for one more request. Without a
// quota, e asks for more than there is, and fills nothing.
func (e *Entry) addExtra() {
	e.extra = e.extraCapacity((*bucket.Limit)(&e.Query.Limit), e.Query.Cost)
	if e.extra.delayed > 0 {
		if e.waits = e.Limit.Waiting.Reserve(e.Limit.MaxWaiting); !e.waits {
			e.extra.delayed = 0
		}
	}
	if e.Query.Limit.Size+e.extra.units() == 0 {
		if e.extra.unusable, e.Query.Limit.CountDenied = 1, false; e.need() > 0 {
			e.Query.Cost = max(e.Query.Cost, 2)
		}
	}
	e.Query.Limit.Size += e.extra.units()
}

// add adds entries for limits, and for those within them, that the request has to pass.
func (q *Request) add(limits []*Limit) (err error) {
	for _, l := range limits {
		matches := false
		switch {
		case l.Lender != nil: // that adds it
		case l.Pool:
			err = l.addPoolTo(q)
		default:
			matches, err = l.addOwnTo(q)
		}
		if matches {
			err = q.add(l.Within)
		}
		if err != nil {
			return err
		}
	}
	return nil
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

// What a limit has no room for it may borrow from another one, which is a pool. A store
// decides both in one step, so a pool is asked after the limits that borrow from it. A request
// that borrows nothing is invisible to it.

// addPoolTo adds to q the entries of the limits that borrow from l and that the request has
// to pass, then the entry of l, and then the entries of limits within the borrowers.
func (l *Limit) addPoolTo(q *Request) error {
	var few [4]*Limit
	met, from := few[:0], len(q.entries)
	for _, borrower := range l.Borrowers {
		matches, err := borrower.addOwnTo(q)
		if err != nil {
			return err
		}
		if matches {
			met = append(met, borrower)
		}
	}
	at, cost := len(q.entries), int64(-1) // the highest cost of those that may borrow
	for i := from; i < at; i++ {
		if e := &q.entries[i]; e.IsMain() {
			cost = max(cost, e.Query.Cost)
		}
	}
	if cost >= 0 {
		if _, err := l.addOwnTo(q); err != nil {
			return err
		}
	}
	if len(q.entries) > at { // the pool applies
		pool := &q.entries[at]
		if pool.Query.Pool = true; !l.OwnCost {
			pool.Query.Cost, pool.Estimate = cost, cost
			pool.Query.Hold = pool.Query.Hold && cost > 0
		}
		for i := from; i < at; i++ {
			q.entries[i].Query.Borrows = q.entries[i].IsMain()
		}
	}
	for _, borrower := range met {
		if err := q.add(borrower.Within); err != nil {
			return err
		}
	}
	return nil
}

// addTo adds an entry for the bucket to q, unless it is off.
func (b *Bucket) addTo(q *Request) error {
	if b.Off {
		return nil
	}
	var ask limiter.Bucket
	if b.Constant != nil {
		ask = *b.Constant
	} else {
		now := q.at
		if now.IsZero() {
			now = time.Now()
		}
		numbers, off, err := b.numbers(q.replacer, now)
		if err != nil || off {
			return q.valueError(b, http.StatusInternalServerError, err)
		}
		ask.Limit = limiter.Limit(numbers)
		if ask.Cost, err = b.knownCost(q); err != nil {
			return err
		}
	}
	text, own, err := q.keyFor(b)
	if err != nil {
		return err
	}
	if !own && b.Limit.Connections {
		return nil // as on a unix socket, where one client must not keep out the others
	}
	ask.Name, ask.Key = b.Name, text
	// What costs nothing is charged nothing, whatever its response is.
	ask.DryRun, ask.Hold, ask.Consistency = b.Limit.DryRun, b.Holds && ask.Cost > 0, b.Consistency
	if !own {
		ask.Name = b.AddressName
		b.Limit.Reporter.NoKey(text)
	}
	if b.Limit.Reporter.WatchesProxies() && !q.direct {
		q.direct = !b.Limit.Reporter.SharedByProxy(q.http)
	}
	if ask.MaxKeys = b.Limit.MaxKeys; b.Limit.ShareWhenFull {
		if q.network == "" {
			q.network = key.NetworkOfClient(q.http)
		}
		ask.ShareKey = q.network
	}
	e := Entry{Bucket: b, Query: ask, Estimate: ask.Cost}
	switch {
	case b.Limit.Load != nil:
		q.loads = append(q.loads, e)
	case b.Limit.Pace != nil:
		q.paced = append(q.paced, e)
	default:
		q.entries = append(q.entries, e)
	}
	return nil
}

// errNoLength rejects a request whose cost is the length of its body, if that is unknown
// before the body has arrived. It could be counted as it is read, but then an upstream would
// have a part of what is denied, and it would be unknown whether parallel requests fit.
var errNoLength = RefusalError{
	Status: http.StatusLengthRequired,
	Err:    errors.New("the cost is the length of the body, and the request does not tell it"),
}

// knownCost returns what the request costs, as far as that is known before its response: with an
// actual cost of bytes, the bytes of the response are added. To a dry run, which must not reject
// it, a body of unknown length is one that does not fit.
func (b *Bucket) knownCost(q *Request) (int64, error) {
	if !b.CostIsBody {
		cost, err := b.Cost.At(q.replacer)
		return cost, q.valueError(b, http.StatusBadRequest, err)
	}
	switch length, known := bodyLength(q.http); {
	case known:
		return min(max(length, 1), limiter.MaxUnits), nil
	case b.Limit.DryRun:
		return limiter.MaxUnits, nil
	}
	return 0, errNoLength
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
