package ratelimit

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// accounting is what to charge when some limits have room for a request and others
// do not.
type accounting string

const (
	accountingAtomic  accounting = "atomic"   // nothing
	accountingEach    accounting = "each"     // every limit that has room
	accountingInOrder accounting = "in_order" // the limits before the first that denies
)

// parseAccounting parses the accounting option.
func parseAccounting(text string) (accounting, string) {
	switch a := accounting(text); a {
	case accountingAtomic, accountingEach, accountingInOrder:
		return a, ""
	}
	return "", "atomic, each or in_order"
}

// inStore returns how a store charges the buckets of one call, see also evaluation.ask.
func (a accounting) inStore() limiter.Accounting {
	if a == accountingEach {
		return limiter.AccountingEach
	}
	return limiter.AccountingAtomic
}

// ask has a store decide on the request. take asks it about all buckets that are in e.
// If limits are asked in order, one call that charges all or none is all it takes for a
// request that is admitted, and another one charges a denied request.
func (e *evaluation) ask(a accounting, take func() error) error {
	if a == accountingInOrder && len(e.buckets) > 1 && e.countsDenied() {
		return e.askInTurn(take)
	}
	if err := take(); err != nil {
		return err
	}
	if a == accountingInOrder && e.firstDenied() >= 0 {
		e.chargeInOrder(take)
	}
	return nil
}

// chargeInOrder charges the buckets of e before the first that has denied, after
// all were asked at once and none was charged. take asks the store once more, about
// the buckets that are left in e. If one of them is full by now, that is the first
// that denies. The buckets behind it are dropped, as if they had not been asked.
func (e *evaluation) chargeInOrder(take func() error) {
	for first := e.firstDenied(); first > 0; {
		bucket, policy, decision := e.buckets[first], e.policies[first], e.decisions[first]
		e.cut(first)
		e.decisions = e.decisions[:0]
		if take() != nil {
			e.cut(0) // the store failed meanwhile, but the request is denied
		} else if first = e.firstDenied(); first >= 0 {
			continue
		}
		e.buckets = append(e.buckets, bucket)
		e.policies = append(e.policies, policy)
		e.decisions = append(e.decisions, decision)
		return
	}
	e.cut(e.firstDenied() + 1)
}

// askInTurn asks a store about one bucket after the other, until one denies, and drops
// those behind it. Asked all at once, limits that count denied requests would count
// them behind that one too, and twice before it.
func (e *evaluation) askInTurn(take func() error) (err error) {
	buckets, decisions := e.buckets, make([]limiter.Decision, 0, len(e.buckets))
	for i := range buckets {
		e.buckets, e.decisions = buckets[i:i+1], e.decisions[:0]
		if err = take(); err != nil {
			break
		}
		decisions = append(decisions, e.decisions...)
		if decisions[i].Denied {
			break
		}
	}
	e.buckets, e.decisions = buckets, append(e.decisions[:0], decisions...)
	if err == nil {
		e.cut(len(decisions))
	}
	return err
}

// countsDenied reports whether any of the buckets counts denied requests.
func (e *evaluation) countsDenied() bool {
	return slices.ContainsFunc(e.buckets, func(b limiter.Bucket) bool { return b.Limit.CountDenied })
}

// firstDenied returns the index of the first bucket that has denied, or -1.
func (e *evaluation) firstDenied() int {
	return slices.IndexFunc(e.decisions, func(d limiter.Decision) bool { return d.Denied })
}

// cut drops all buckets but the first n.
func (e *evaluation) cut(n int) {
	clear(e.buckets[n:])
	e.buckets, e.policies, e.decisions = e.buckets[:n], e.policies[:n], e.decisions[:min(n, len(e.decisions))]
}
