package limiter

import (
	"maps"
	"math"
	"slices"
	"time"
)

// close has the servers charge what requests still hold, as they would in the end, so that
// others need not wait for that: the process ends, and the requests with it. If another store
// goes on with the Memory, they only let it go. Requests that end later are charged here. It
// waits until the servers know all that, but no longer than a request would. What is owed
// then no longer counts as in flight, but as charged: no answer is followed any more.
func (n *ledger) close() {
	until := time.Now().Add(n.store.timeout)
	f := n.store.fallback
	replaced := f.isReplaced()
	n.lock()
	all := slices.Collect(maps.Values(n.all))
	n.unlock()
	for _, t := range all {
		n.letGo(t, replaced)
		n.advance(t, true)
	}
	for _, t := range all {
		for !n.settled(t) && time.Now().Before(until) {
			time.Sleep(time.Millisecond)
		}
	}
	n.lock()
	defer n.unlock()
	n.closed = true
	for _, t := range all {
		f.chargeOwed(t, math.MaxInt64)
	}
}

// letGo has t hold nothing more that is held for certain, and has the server charge it unless
// another store goes on.
func (n *ledger) letGo(t *account, replaced bool) {
	n.lock()
	defer n.unlock()
	for k := range t.open {
		if !k.running {
			continue
		}
		delete(t.open, k)
		if k.counted {
			t.add(k.cost(), 0)
		}
		k.inServer = false
		if !replaced {
			t.add(0, k.cost())
			t.paid = true
		}
		n.store.fallback.loseUnknown(k)
	}
}

// settled reports whether nothing is left of t to be settled.
func (n *ledger) settled(t *account) bool {
	n.lock()
	defer n.unlock()
	return t.isIdle()
}
