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
	if a == accountingInOrder && len(e.buckets) > 1 && e.notesDenials() {
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
		bucket, of, decision := e.buckets[first], e.of[first], e.decisions[first]
		e.cut(first)
		e.decisions = e.decisions[:0]
		if take() != nil {
			e.cut(0) // the store failed meanwhile, but the request is denied
		} else if first = e.firstDenied(); first >= 0 {
			continue
		}
		e.buckets = append(e.buckets, bucket)
		e.of = append(e.of, of)
		e.decisions = append(e.decisions, decision)
		return
	}
	e.cut(e.firstDenied() + 1)
}

// askInTurn asks a store about one bucket after the other, until one denies, and drops
// those behind it. Asked all at once, limits that count denied requests, or ban for them,
// would do so behind that one too, and twice before it.
func (e *evaluation) askInTurn(take func() error) (err error) {
	buckets, of, decisions := e.buckets, e.of, make([]limiter.Decision, 0, len(e.buckets))
	for i := range buckets {
		e.buckets, e.of = buckets[i:i+1:i+1], of[i:i+1:i+1]
		if err = take(); err != nil {
			break
		}
		of[i] = e.of[0]
		decisions = append(decisions, e.decisions...)
		if decisions[i].Denied && !decisions[i].DryRun {
			break
		}
	}
	e.buckets, e.of, e.decisions = buckets, of, append(e.decisions[:0], decisions...)
	if err == nil {
		e.cut(len(decisions))
	}
	return err
}

// notesDenials reports whether any of the limits counts denied requests, or bans for them.
func (e *evaluation) notesDenials() bool {
	return slices.ContainsFunc(e.of, func(c configured) bool { return c.limit.CountDenied || c.limit.bans != nil })
}

// firstDenied returns the index of the first bucket that has denied, or -1.
func (e *evaluation) firstDenied() int {
	return slices.IndexFunc(e.decisions, func(d limiter.Decision) bool { return d.Denied && !d.DryRun })
}

// cut drops all buckets but the first n.
func (e *evaluation) cut(n int) {
	for i := n; i < len(e.of); i++ {
		e.of[i].endWait()
	}
	clear(e.buckets[n:])
	e.buckets, e.of, e.decisions = e.buckets[:n], e.of[:n], e.decisions[:min(n, len(e.decisions))]
}
