package limiter

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// heldRecord is what is stored of held units, see held.lua.
type heldRecord []heldAccount

// heldAccount is one account of a record, see held.lua.
type heldAccount struct{ process, number, receipt, seen, held, ended, charged int64 }

// units returns how many are held.
func (h heldRecord) units() (n int64) {
	for i := range h {
		n += h[i].held
	}
	return n
}

// holdsUnits reports whether the value of a bucket in Redis has held units.
func holdsUnits(value string) bool {
	w, ok := parseWritten(value)
	return ok && w.record.units() > 0
}

// heldBucket is a plain model of a bucket with held units.
type heldBucket struct {
	bucket.Level
	ledger heldRecord
}

// pass has the bucket reach now.
func (h *heldBucket) pass(l Limit, now int64) {
	slices.SortStableFunc(h.ledger, func(a, b heldAccount) int { return cmp.Compare(a.seen, b.seen) })
	for len(h.ledger) > 0 && h.ledger[0].seen+lapse.Microseconds() <= now {
		at := h.ledger[0].seen + lapse.Microseconds()
		if n := h.ledger[0].held; n > 0 {
			h.Level = l.of().Add(h.Level.At(at), n, bucket.Moment{Now: at})
		}
		h.ledger = h.ledger[1:]
	}
	h.Level = h.Level.At(now)
}

// find returns the account with a name, or nil.
func (h *heldBucket) find(process, number int64) *heldAccount {
	for i := range h.ledger {
		if t := &h.ledger[i]; t.process == process && t.number == number {
			return t
		}
	}
	return nil
}

// isLate reports whether a call for an account is late.
func (h *heldBucket) isLate(process, number int64) bool {
	return slices.ContainsFunc(h.ledger, func(t heldAccount) bool { return t.process == process && t.number > number })
}

// open returns the account with a name, which is made if it is not there.
func (h *heldBucket) open(process, number, now int64) *heldAccount {
	if h.find(process, number) == nil {
		h.ledger = append(h.ledger, heldAccount{process: process, number: number, receipt: now})
	}
	t := h.find(process, number)
	t.seen = now
	return t
}

// raise raises the totals of an account, and returns what that releases and charges.
func (t *heldAccount) raise(to totals, known int64) (gone, charge int64) {
	gone, charge = max(to.ended-t.ended, 0), max(to.charged-max(t.charged, known), 0)
	t.held, t.ended, t.charged = max(t.held-gone, 0), t.ended+gone, max(t.charged, to.charged)
	return gone, charge
}

// settle settles by an account, and returns what that releases and charges, and whether the account was
// there.
func (h *heldBucket) settle(process int64, name accountName, to totals, known, now int64) (gone, charge int64, ok bool) {
	t := h.find(process, name.number)
	if t == nil || t.receipt != name.receipt {
		return 0, 0, false
	}
	t.seen = now
	gone, charge = t.raise(to, known)
	if t.held == 0 && t.receipt != 0 {
		h.ledger = slices.DeleteFunc(h.ledger, func(t heldAccount) bool { return t.process == process && t.number == name.number })
	}
	return gone, charge, true
}

// renew renews an account, and returns what that releases and charges, and whether the one before
// was there.
func (h *heldBucket) renew(asked *heldCost, units, now int64) (gone, charge int64, ok bool) {
	ok = true
	if t := h.open(asked.process, asked.number, now); t.receipt != 0 {
		old := h.find(asked.process, asked.before.number)
		if ok = old != nil && old.receipt == asked.before.receipt; ok {
			gone, charge = old.held, max(asked.beforeCharged-max(old.charged, asked.known), 0)
		}
		t.receipt, t.held = 0, t.held+units
		h.ledger = slices.DeleteFunc(h.ledger, func(t heldAccount) bool { return t.process == asked.process && t.number < asked.number })
	}
	moreGone, moreCharge := h.find(asked.process, asked.number).raise(asked.totals, 0)
	return gone + moreGone, charge + moreCharge, ok
}

// room reports whether a request of the given cost fits next to what is held.
func (h *heldBucket) room(l Limit, now, cost int64) bool {
	cost += h.ledger.units()
	return cost <= l.Size && l.of().Wait(h.Level, cost, now) == 0
}

// toHold returns req with all of its units held.
func toHold(req Request) Request {
	req.Buckets = slices.Clone(req.Buckets)
	for i := range req.Buckets {
		req.Buckets[i].Hold = true
	}
	return req
}

// processes is the number of processes of which queries have been made by asProcess.
var processes atomic.Int64

// asProcess returns q, which holds units of its buckets, as the query of a process of its own.
func asProcess(q *query) *query {
	process := processes.Add(1)
	for i := range q.buckets {
		if h := q.buckets[i].held; h != nil {
			h.process, h.number = process, 1
		}
	}
	return q
}

// settleAs turns q, whose units are held since those outcomes, into the query that
// settles them.
func settleAs(q *query, as verdict, since []outcome) {
	q.what = whatSettle
	for i := range since {
		p := &q.buckets[i]
		p.held.receipt, p.held.totals = since[i].receipt, totals{ended: p.cost}
		if as == verdictAdmitted || as == verdictDenied && p.limit.CountDenied {
			p.held.charged = p.cost
		}
	}
	q.Replies = q.replies()
}

// outcomesOf returns the outcomes in a reply to a query about req.
func outcomesOf(req Request, reply []int64, dst []outcome) ([]outcome, bool, error) {
	q := keys{}.query(req, 0)
	q.Reply = reply
	return q.outcomes(dst)
}

// entriesOf returns the number of req's buckets that keep entries.
func entriesOf(req Request) (n int) {
	for i := range req.Buckets {
		if req.Buckets[i].Limit.of().KeepsEntries() {
			n++
		}
	}
	return n
}

// TestHeldUnits guards held units that are released or charged, against a plain model:
// held units take room and do not drip, and units that are not settled are charged once
// their generation and the next have passed. Those of other times, or of a bucket that
// was lost, are never settled at their expense. Other requests come in between. No more
// than the bucket's bound is ever held or charged.
func TestHeldUnits(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen := map[string]int{}
	checkTraces(t, 10, func(t *rapid.T) {
		v.flush(t)
		b := Bucket{Name: "b", Key: "k", Limit: Limit{
			Size:         rapid.Int64Range(1, 12).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second, 7 * time.Second, time.Hour}).Draw(t, "drip rate"),
			DripSize:     rapid.SampledFrom([]int64{1, 1, 2, 5}).Draw(t, "drip size"),
		}, Cost: 1}
		model := &heldBucket{}
		names := []accountName{{100, 1}}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.at(t, v.now+rapid.SampledFrom([]int64{
				0, 0, 0, 1, 500, b.Limit.of().Rate() - 1, b.Limit.of().Rate(), lapse.Microseconds() - 1, lapse.Microseconds(), 3 * lapse.Microseconds(),
			}).Draw(t, "gap"))
			const plain = 255
			what := rapid.SampledFrom([]byte{plain, plain, 0, 0, 0, whatSettle, whatSettle, whatSettle, whatRenew, whatClear}).Draw(t, "what")
			b.Cost = rapid.Int64Range(1, b.Limit.Size).Draw(t, "cost")
			req := Request{Buckets: []Bucket{b}}
			q := v.query(req, 0)
			switch what {
			case plain:
			case whatClear:
				q = v.query(req, whatClear)
			default:
				q = v.query(toHold(req), what)
				h := q.buckets[0].held
				h.process = rapid.Int64Range(1, 3).Draw(t, "process")
				h.totals = totals{rapid.Int64Range(0, 9).Draw(t, "ended"), rapid.Int64Range(0, 3*b.Limit.Size).Draw(t, "charged")}
				h.accountName = rapid.SampledFrom(names[max(0, len(names)-3):]).Draw(t, "account")
				h.known = rapid.Int64Range(0, 9).Draw(t, "known")
				if h.before = h.accountName; what != whatSettle {
					h.beforeCharged = rapid.Int64Range(0, 9).Draw(t, "charged before")
					h.number, h.receipt = h.number+rapid.Int64Range(-1, 1).Draw(t, "higher"), 0
				}
			}
			got := v.evaluate(t, req, q)
			model.pass(b.Limit, v.now)
			var want outcome
			gone, charge := int64(0), int64(0)
			h := q.buckets[0].held
			switch {
			case what == plain || what == 0:
				want.denied = !model.room(b.Limit, v.now, b.Cost)
				want.blocked = want.denied && b.Limit.of().Wait(model.Level, b.Cost, v.now) == 0
				switch {
				case what == 0 && model.isLate(h.process, h.number):
					want.receipt = -1
					seen["late"]++
				case want.denied:
					seen["denied"]++
				case what == plain:
					gone, charge = b.Cost, b.Cost
				default:
					account := model.open(h.process, h.number, v.now)
					account.held += b.Cost
					want.receipt = account.receipt
					names = append(names, accountName{h.number, account.receipt})
				}
				want.Ahead = model.Level.Ahead(v.now)
				if want.blocked {
					want.Ahead = b.Limit.of().Add(model.Level, model.ledger.units(), bucket.Moment{Now: v.now}).Ahead(v.now)
					seen["blocked"]++
				}
			case what == whatSettle:
				var ok bool
				if gone, charge, ok = model.settle(h.process, h.accountName, h.totals, h.known, v.now); ok {
					want.receipt = 1
				}
				seen[map[bool]string{true: "settled", false: "not held"}[ok]]++
			case what == whatClear:
				model.Level = bucket.Level{Clear: v.now}
				seen["cleared"]++
			case model.isLate(h.process, h.number):
				want.receipt = -1
				seen["late"]++
			default:
				var ok bool
				if gone, charge, ok = model.renew(h, b.Cost, v.now); ok {
					want.receipt = 1
				}
				names = append(names, accountName{h.number, 0})
				seen["renewed"]++
			}
			if charge > 0 {
				seen["charged"]++
				charge = min(charge, max(gone, 2*b.Limit.Size-b.Limit.of().Units(model.Level, v.now)))
				model.Level = b.Limit.of().Add(model.Level, charge, bucket.Moment{Now: v.now})
			}
			if !want.blocked {
				want.Ahead = model.Level.Ahead(v.now)
			}
			if what != plain {
				want.held = model.ledger.units()
			}
			if got.by = 0; got != want {
				t.Fatalf("%+v: %d of %d: decided %+v, want %+v with %+v", b.Limit, what, b.Cost, got, want, model)
			}
			if got, want := peek(t, v.Redis, b), b.inspected(model.Level.Ahead(v.now), nil, model.ledger.units()); got != want {
				t.Fatalf("%+v: %d of %d: peeked at %+v, want %+v", b.Limit, what, b.Cost, got, want)
			}
			if len(model.ledger) > 0 {
				expires, err := v.admin.Do(context.Background(), "PEXPIRETIME", v.keys.of(&b)).Int64()
				last := heldBucket{model.Level, slices.Clone(model.ledger)}
				newest := slices.MaxFunc(model.ledger, func(a, b heldAccount) int { return cmp.Compare(a.seen, b.seen) }).seen + lapse.Microseconds()
				if last.pass(b.Limit, newest); err != nil || expires < max(newest, last.Clear)/1000 {
					t.Fatalf("%q expires at %d ms, before it is empty", v.stored(t, req.Buckets)[0], expires)
				}
			}
		}
	})
	for _, what := range []string{"denied", "blocked", "charged", "settled", "not held", "renewed", "late", "cleared"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// lossyNode is a store of its own next to a virtual one, with the same server: a process
// whose calls may get lost, or run when it has given them up.
type lossyNode struct {
	*Redis
	v       *clockedRedis
	sha     string                                // of the script
	fate    func() (arrives, late, answered bool) // what becomes of a call
	took    func()                                // lets the time pass that a call takes: no receipt is given twice
	delayed []delayedCall                         // calls that have not arrived yet
}

// delayedCall is a call that arrives late.
type delayedCall struct {
	sent time.Duration
	run  func() []int64
}

var errLost = errors.New("the answer never came")

// newLossyNode returns a node with the given clock.
func newLossyNode(t testing.TB, v *clockedRedis, clock func() time.Duration) *lossyNode {
	t.Helper()
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	n := &lossyNode{Redis: newRedisWithoutClient(RedisOptions{KeyPrefix: "rl:", Timeout: time.Second}), v: v, sha: sha}
	n.clock, n.client = clock, n
	n.ledger.running = true // not in the background, which does not know the clock
	return n
}

// Do implements client.
func (n *lossyNode) Do(_ redisscript.Deadline, q *redisscript.Call) (*redisscript.Server, error) {
	n.sending(nil, []*redisscript.Call{q})
	arrives, late, answered := n.fate()
	keys, arg := []string{strings.Clone(q.Keys[0])}, strings.Clone(q.Arg)
	run := func() []int64 {
		n.took()
		reply, err := n.v.admin.EvalSha(context.Background(), n.sha, keys, arg).Int64Slice()
		if err != nil {
			panic(err)
		}
		return reply
	}
	switch {
	case !arrives && late:
		n.delayed = append(n.delayed, delayedCall{n.clock(), run})
		return nil, errLost
	case !arrives:
		return nil, errLost
	}
	if reply := run(); answered {
		q.Reply = reply
		n.heard(q, nil, true)
		return nil, nil
	}
	return nil, errLost
}

// arrive has what was delayed arrive. It reports whether any of it was sent so long before
// that the server does not know any more what the process has reported since.
func (n *lossyNode) arrive() (forgotten bool) {
	for _, call := range n.delayed {
		call.run()
		forgotten = forgotten || n.clock()-call.sent >= lapse
	}
	n.delayed = nil
	return forgotten
}

// crash has n start over, as another process.
func (n *lossyNode) crash() {
	n.ledger.all, n.ledger.process = nil, n.ledger.process+1
}

// Submit implements client. It is done when it returns.
func (n *lossyNode) Submit(end redisscript.Deadline, q *redisscript.Call) error {
	_, err := n.Do(end, q)
	q.Done(err)
	return nil
}

// OneServer implements client.
func (n *lossyNode) OneServer() bool { return true }

// Connect implements client.
func (n *lossyNode) Connect() {}

// Stats implements client.
func (n *lossyNode) Stats() []redisscript.Stats { return nil }

// Close implements client.
func (n *lossyNode) Close() error { return nil }

// TestHeldUnitsOfManyNodes guards the rules of held units for nodes that crash or are cut
// off, calls and replies that are lost, repeated and reordered, clocks that are set back, and
// a server that loses its data: no more is ever admitted and under way, of requests that their
// node could renew in time, than fits in the bucket; and nothing stays held once all nodes are
// gone. Whatever is lost on the way, what is charged in the end is what was admitted, once,
// and what has ended is not held, unless a node crashed or was cut off for too long.
func TestHeldUnitsOfManyNodes(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	elapsed := int64(0) // on the nodes' clocks, which are not set back
	var all []*lossyNode
	for range 8 {
		all = append(all, newLossyNode(t, v, func() time.Duration { return time.Duration(elapsed) * time.Microsecond }))
	}
	type open struct {
		*reservation
		node int
		held *Held
		cost int64
	}
	seen := map[string]int{}
	checkTraces(t, 3, func(t *rapid.T) {
		v.flush(t)
		limit := Limit{Size: rapid.SampledFrom([]int64{1, 2, 5, 20, 1_000_000}).Draw(t, "size"), DripInterval: 10_000 * time.Hour, DripSize: 1 << 20}
		admitted, exact := int64(0), true
		charges := true // and what is charged stays
		switch rapid.IntRange(0, 4).Draw(t, "algorithm") {
		case 1:
			limit = FixedWindow(limit.Size, 10_000*time.Hour)
		case 2:
			limit = SlidingLog(min(limit.Size, 1000), 10_000*time.Hour)
		case 3:
			limit, charges = Concurrency(limit.Size), false
		}
		b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
		elapsed = 0
		nodes := all[:rapid.SampledFrom([]int{1, 2, 3, 8}).Draw(t, "nodes")]
		cutOff := make([]int64, len(nodes)) // until when
		loss := rapid.SampledFrom([]int{0, 2, 20}).Draw(t, "lost, of 100")
		for i, n := range nodes {
			n.denyCache, n.delayed = newDenyCache(64), nil
			n.crash()
			n.took = func() {
				v.at(t, v.now+1)
				elapsed++
			}
			n.fate = func() (arrives, late, answered bool) {
				switch {
				case elapsed < cutOff[i]:
					return false, false, false
				case rapid.IntRange(0, 99).Draw(t, "lost") < loss:
					seen["lost"]++
					arrives = rapid.Bool().Draw(t, "arrives")
					return arrives, rapid.Bool().Draw(t, "late"), false
				}
				return true, false, true
			}
		}
		var running []open
		// end forgets requests whose nodes have crashed, or could not renew their units: they
		// no longer count, and others run in their place.
		end := func(why string, these func(h *open) bool) {
			running = slices.DeleteFunc(running, func(h open) bool {
				if !these(&h) {
					return false
				}
				h.held.Settle(0, 0)
				exact = false
				seen[why]++
				return true
			})
		}
		tick := func() {
			for _, n := range nodes {
				// What a node could not tell for so long was charged as it stood.
				lapsed := func(t *account) bool { return !t.isIdle() && n.clock()-t.heard >= lapse }
				exact = exact && !slices.ContainsFunc(slices.Collect(maps.Values(n.ledger.all)), lapsed)
				n.ledger.tick()
			}
		}
		// pass lets time pass, in which nodes renew what is due.
		pass := func(gap int64) {
			for until := elapsed + gap; elapsed < until; {
				next := min(until, elapsed+500_000)
				v.at(t, v.now+next-elapsed)
				elapsed = next
				end("lapsed", func(h *open) bool { return nodes[h.node].clock()-h.account.heard >= lapse })
				tick()
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			pass(rapid.SampledFrom([]int64{0, 1, 50_000, 500_000, 3_000_000, 9_999_999, 10_000_000, 21_000_000}).Draw(t, "gap"))
			for _, n := range nodes {
				exact = !n.arrive() && exact
			}
			switch what := rapid.IntRange(0, 99).Draw(t, "what"); {
			case what < 55:
				node := rapid.IntRange(0, len(nodes)-1).Draw(t, "node")
				b.Cost = rapid.Int64Range(1, min(3, limit.Size)).Draw(t, "cost")
				held := new(Held)
				req := toHold(Request{Buckets: []Bucket{b}})
				req.Held = held
				nodes[node].denyCache = newDenyCache(64)
				d, err := nodes[node].Take(context.Background(), req, nil)
				switch {
				case err != nil:
					seen["not decided"]++
				case d[0].Denied:
					seen["denied"]++
				default:
					running = append(running, open{held.reservations[0], node, held, b.Cost})
				}
			case what < 80 && len(running) > 0:
				i := rapid.IntRange(0, len(running)-1).Draw(t, "which")
				h := running[i]
				running = slices.Delete(running, i, i+1)
				charge := int64(0)
				if charges {
					charge = rapid.Int64Range(0, h.cost).Draw(t, "charge")
				}
				admitted += charge
				h.held.Settle(0, charge)
			case what < 84: // a node crashes, and its requests with it
				node := rapid.IntRange(0, len(nodes)-1).Draw(t, "node")
				nodes[node].crash()
				exact = false
				end("crashed", func(h *open) bool { return h.node == node })
				nodes[node].crash()
			case what < 93: // or is cut off for a while
				cutOff[rapid.IntRange(0, len(nodes)-1).Draw(t, "node")] = elapsed + rapid.SampledFrom([]int64{1_000_000, 8_000_000, 30_000_000, 30_000_000}).Draw(t, "for")
			case what < 96: // data is lost: what was held of it can no longer be settled
				seen["data lost"]++
				lostAt := v.now
				for _, n := range nodes {
					n.delayed = nil
				}
				v.flush(t)
				v.at(t, lostAt+1) // it takes a while, so no receipt is given twice
				clear(cutOff)
				loss, admitted, exact = 0, 0, false
				for _, h := range running {
					h.store.ledger.lock()
					h.account.lose()
					h.store.ledger.unlock()
				}
				tick()
			case what < 98: // the clock is set back
				seen["set back"]++
				v.at(t, v.now-rapid.SampledFrom([]int64{1, 1_000_000, 15_000_000, 1_000_000_000}).Draw(t, "back"))
				b.Cost = limit.Size + 1 // somebody is denied, so the server sees it
				v.evaluate(t, Request{Buckets: []Bucket{b}}, v.query(Request{Buckets: []Bucket{b}}, 0))
			}
			b.Cost = 1
			l, busy := peek(t, v.Redis, b), admitted
			for _, h := range running {
				busy += h.cost
			}
			if busy > l.Units+l.Held || busy > limit.Size {
				t.Fatalf("%+v: %d admitted or under way, holds %+v", limit, busy, l)
			}
		}
		for _, n := range nodes {
			exact = !n.arrive() && exact
		}
		for _, h := range running {
			h.held.Settle(0, 0)
		}
		clear(cutOff)
		loss = 0
		pass(1_000_000) // a calm second
		l := peek(t, v.Redis, b)
		if exact {
			seen["exact"]++
			if l.Units != admitted || l.Held != 0 {
				t.Fatalf("%+v: holds %+v, want the %d units that were admitted", limit, l, admitted)
			}
		}
		for _, n := range nodes {
			if len(n.ledger.all) > 0 {
				t.Fatalf("%+v: nodes still have to tell of what has ended", limit)
			}
		}
		v.advance(t, 2*lapse)
		if l := peek(t, v.Redis, b); l.Held != 0 {
			t.Fatalf("%+v: still held: %+v", limit, l)
		}
	})
	t.Logf("%v", seen)
	for _, what := range []string{"lost", "lapsed", "crashed", "not decided", "denied", "data lost", "set back", "exact"} {
		if seen[what] < 20 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// TestHeldUnitsNeverOverAdmit guards the times at which whole requests are
// admitted by buckets that hold units for them: however long settling takes, and
// even if it never happens, no more is admitted in any time than the bucket
// allows.
func TestHeldUnitsNeverOverAdmit(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	checkTraces(t, 3, func(t *rapid.T) {
		v.flush(t)
		limit := Limit{
			Size:         rapid.Int64Range(1, 6).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second, time.Hour}).Draw(t, "drip rate"),
			DripSize:     rapid.Int64Range(1, 3).Draw(t, "drip size"),
		}
		if rapid.IntRange(0, 2).Draw(t, "log: 2") == 2 {
			limit = SlidingLog(limit.Size, limit.DripInterval)
		}
		b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
		req := Request{Buckets: []Bucket{b}}
		type open struct {
			query    *query
			outcomes []outcome
			admitted bool
		}
		var holding []open
		var admitted []int64
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			v.at(t, v.now+rapid.SampledFrom([]int64{0, 1, 900, 1000, 999_000, 1_000_000, 5_000_000, 11_000_000}).Draw(t, "gap"))
			call := func(q *query) []outcome {
				_, got, err := v.call(inTime(), q, nil)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				if !call(v.query(req, 0))[0].denied {
					admitted = append(admitted, v.now)
				}
			case 1, 2:
				q := asProcess(v.query(toHold(req), 0))
				if got := call(q); !got[0].denied {
					holding = append(holding, open{q, got, rapid.Bool().Draw(t, "admitted")})
					if holding[len(holding)-1].admitted {
						admitted = append(admitted, v.now)
					}
				}
			case 3:
				if len(holding) > 0 {
					i := rapid.IntRange(0, len(holding)-1).Draw(t, "which")
					h := holding[i]
					as := verdictNone
					if h.admitted {
						as = verdictAdmitted
					}
					settleAs(h.query, as, h.outcomes)
					call(h.query)
					holding = slices.Delete(holding, i, i+1)
				}
			}
		}
		checkBound(t, limit, admitted)
	})
}

// checkBound checks that no more units are admitted in any time than a bucket of
// limit l allows, given the times of admissions.
func checkBound(t rapid.TB, l Limit, admitted []int64) {
	t.Helper()
	s := min(l.DripSize, l.Size)
	for i, from := range admitted {
		for j, to := range admitted[i:] {
			whole, rest := (to-from)/l.of().Rate(), (to-from)%l.of().Rate()
			up := whole
			if rest > 0 {
				up++
			}
			most := max(l.Size+s*whole, l.Size-1+s*up)
			if l.Algorithm == bucket.Log {
				most = l.Size * (1 + whole)
			}
			if int64(j+1) > most {
				t.Fatalf("%+v: %d units admitted within %d µs, want at most %d", l, j+1, to-from, most)
			}
		}
	}
}
