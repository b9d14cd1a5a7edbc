package limiter

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// heldRecord is what core.lua stores of held units, the newer first.
type heldRecord [2]struct{ receipt, units int64 }

// units returns how many are held.
func (h heldRecord) units() int64 { return h[0].units + h[1].units }

// holdsUnits reports whether the value of a bucket in Redis has held units.
func holdsUnits(value string) bool {
	w, ok := parseWritten(value)
	return ok && w.record.units() > 0
}

// heldBucket is a plain model of a bucket with held units: it keeps all generations, the
// newest last.
type heldBucket struct {
	level
	held []heldUnits
}

type heldUnits struct{ receipt, units int64 }

// generation returns the generation of a time.
func generation(at int64) int64 { return at / heldFor.Microseconds() }

// units returns how many are held.
func (h *heldBucket) units() (n int64) {
	for _, u := range h.held {
		n += u.units
	}
	return n
}

// newest returns the newest receipt, or 0.
func (h *heldBucket) newest() int64 {
	if len(h.held) == 0 {
		return 0
	}
	return h.held[len(h.held)-1].receipt
}

// pass has the bucket reach now.
func (h *heldBucket) pass(l Limit, now int64) {
	for len(h.held) > 0 {
		at := (generation(h.held[0].receipt) + 2) * heldFor.Microseconds()
		if at > now {
			break
		}
		if n := h.held[0].units; n > 0 {
			h.level = l.add(h.level.at(at), n, moment{now: at})
		}
		h.held = h.held[1:]
	}
	h.level = h.level.at(now)
	if h.units() == 0 {
		h.held = nil
	}
}

// hold holds units and returns their receipt.
func (h *heldBucket) hold(n, now int64) int64 {
	if generation(h.newest()) < generation(now) {
		h.held = append(h.held, heldUnits{receipt: now})
	}
	h.held[len(h.held)-1].units += n
	return h.newest()
}

// settle lets go units, and reports whether they were held.
func (h *heldBucket) settle(n, receipt int64) bool {
	for i := range h.held {
		if u := &h.held[i]; u.receipt == receipt && u.units >= n {
			u.units -= n
			return true
		}
	}
	return false
}

// room reports whether a request of the given cost fits beside what is held.
func (h *heldBucket) room(l Limit, now, cost int64) bool {
	cost += h.units()
	return cost <= l.Size && l.wait(h.level, cost, now) == 0
}

// toHold returns req with all of its units held.
func toHold(req Request) Request {
	req.Buckets = slices.Clone(req.Buckets)
	for i := range req.Buckets {
		req.Buckets[i].Hold = true
	}
	return req
}

// settleAs turns q, whose units are held since those outcomes, into the query that
// settles them.
func settleAs(q *query, as verdict, since []outcome) {
	q.holdAll()
	for i := range since {
		q.buckets[i].held.receipt = since[i].receipt
	}
	q.settle(as)
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
		if req.Buckets[i].Limit.keepsEntries() {
			n++
		}
	}
	return n
}

// TestHeldUnits guards held units that are let go or charged, against a plain model:
// held units take room and do not drip, and units that are not settled are charged once
// their generation and the next have passed. Those of other times, or of a bucket that
// was lost, are never settled at their expense. Other requests come in between. No more
// than the bucket's bound is ever held or charged.
func TestHeldUnits(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	seen := map[string]int{}
	checkTraces(t, 10, func(t *rapid.T) {
		v.flush(t)
		b := Bucket{Name: "b", Key: "k", Limit: Limit{
			Size:         rapid.Int64Range(1, 12).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second, 7 * time.Second, time.Hour}).Draw(t, "drip rate"),
			DripSize:     rapid.SampledFrom([]int64{1, 1, 2, 5}).Draw(t, "drip size"),
		}}
		model := &heldBucket{}
		receipts := []int64{1}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.at(t, v.now+rapid.SampledFrom([]int64{
				0, 0, 0, 1, 500, b.Limit.rate() - 1, b.Limit.rate(), heldFor.Microseconds() - 1, heldFor.Microseconds(), 3 * heldFor.Microseconds(),
			}).Draw(t, "gap"))
			const hold = 255
			what := rapid.SampledFrom([]byte{0, 0, hold, hold, hold, whatSettle, whatSettle, whatSettle}).Draw(t, "what")
			b.Cost = rapid.Int64Range(1, b.Limit.Size).Draw(t, "cost")
			req := Request{Buckets: []Bucket{b}}
			q := v.query(req, what)
			if what == hold {
				q = v.query(toHold(req), 0)
			}
			as, receipt := verdict(rapid.IntRange(0, 2).Draw(t, "verdict")), int64(0)
			if what == whatSettle {
				latest := receipts[max(0, len(receipts)-3):]
				receipt = rapid.SampledFrom(latest).Draw(t, "receipt")
				settleAs(q, as, []outcome{{receipt: receipt}})
			}
			_, got, err := v.ask(inTime(), q, nil)
			if err != nil {
				t.Fatal(err)
			}
			model.pass(b.Limit, v.now)
			want := outcome{by: DecidedByRedis}
			switch what {
			case 0, hold:
				want.denied = !model.room(b.Limit, v.now, b.Cost)
				want.blocked = want.denied && b.Limit.wait(model.level, b.Cost, v.now) == 0
				switch {
				case want.denied:
					seen["denied"]++
				case what == 0:
					model.level = b.Limit.add(model.level, b.Cost, moment{now: v.now})
				default:
					want.receipt = model.hold(b.Cost, v.now)
					want.held = model.units()
					receipts = append(receipts, want.receipt)
				}
			case whatSettle:
				switch settled := model.settle(b.Cost, receipt); {
				case !settled:
					seen["not held"]++
				case as == verdictAdmitted:
					model.level = b.Limit.add(model.level, b.Cost, moment{now: v.now})
					seen["charged"]++
				default:
					seen["let go"]++
				}
			}
			want.ahead = model.level.ahead(v.now)
			if want.blocked {
				want.ahead = b.Limit.add(model.level, model.units(), moment{now: v.now}).ahead(v.now)
				seen["blocked"]++
			}
			if want.denied {
				got[0].held, got[0].receipt = 0, 0
			}
			if got[0] != want {
				t.Fatalf("%+v: %d of %d: decided %+v, want %+v with %+v", b.Limit, what, b.Cost, got[0], want, model)
			}
			if got, want := peek(t, v.Redis, b), b.inspected(model.level.ahead(v.now), nil, model.units()); got != want {
				t.Fatalf("%+v: %d of %d: peeked at %+v, want %+v", b.Limit, what, b.Cost, got, want)
			}
			if !model.room(b.Limit, v.now, 0) {
				t.Fatalf("%+v: holds more than there is room for: %+v", b.Limit, model)
			}
			if model.units() > 0 {
				expires, err := v.admin.Do(context.Background(), "PEXPIRETIME", v.keys.of(&b)).Int64()
				last := *model
				last.held = slices.Clone(last.held)
				lapse := (generation(model.newest()) + 2) * heldFor.Microseconds()
				if last.pass(b.Limit, lapse); err != nil || expires < max(lapse, last.clear)/1000 {
					t.Fatalf("%q expires at %d ms, before it is empty", v.stored(t, req.Buckets)[0], expires)
				}
			}
		}
	})
	for _, what := range []string{"denied", "blocked", "charged", "let go", "not held"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// lossyNode is a store of its own beside a virtual one, with the same server: a process
// whose calls may get lost.
type lossyNode struct {
	*Redis
	v    *virtual
	sha  string                          // of the script
	lost func() (arrives, answered bool) // what becomes of a call
}

var errLost = errors.New("the answer never came")

// newLossyNode returns a node with the given clock.
func newLossyNode(t testing.TB, v *virtual, clock func() time.Duration) *lossyNode {
	t.Helper()
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	n := &lossyNode{Redis: newRedisWithoutClient(RedisOptions{KeyPrefix: "rl:", Timeout: time.Second}), v: v, sha: sha}
	n.clock, n.client = clock, n
	n.renewals.running = true // not in the background, which does not know the clock
	return n
}

// Do implements client.
func (n *lossyNode) Do(_ redisscript.Deadline, q *redisscript.Call) (*redisscript.Server, error) {
	n.sending(nil, []*redisscript.Call{q})
	arrives, answered := n.lost()
	if !arrives {
		return nil, errLost
	}
	reply, err := n.v.admin.EvalSha(context.Background(), n.sha, q.Keys, q.Arg).Int64Slice()
	if err != nil {
		panic(err)
	}
	if !answered {
		return nil, errLost
	}
	q.Reply = reply
	return nil, nil
}

// DoAlone implements client.
func (n *lossyNode) DoAlone(end redisscript.Deadline, q *redisscript.Call) (*redisscript.Server, error) {
	return n.Do(end, q)
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
// off, calls and replies that are lost, clocks that are set back, and a server that loses
// its data: no more is ever admitted and under way, of requests that their node could renew
// in time, than fits in the bucket; and nothing stays held once all nodes are gone. If
// nothing goes wrong, what is charged in the end is what was admitted.
func TestHeldUnitsOfManyNodes(t *testing.T) {
	singleGoroutine(t)
	v := newVirtual(t, redistest.Start(t), "rl:")
	elapsed := int64(0) // on the nodes' clocks, which are not set back
	var all []*lossyNode
	for range 8 {
		all = append(all, newLossyNode(t, v, func() time.Duration { return time.Duration(elapsed) * time.Microsecond }))
	}
	type open struct {
		*kept
		node  int
		held  *Held
		cost  int64
		tried int64 // when it was last to be renewed
	}
	seen := map[string]int{}
	checkTraces(t, 3, func(t *rapid.T) {
		v.flush(t)
		limit := Limit{Size: rapid.SampledFrom([]int64{1, 2, 5, 20, 1_000_000}).Draw(t, "size"), DripInterval: 10_000 * time.Hour, DripSize: 1 << 20}
		admitted, exact := int64(0), true
		charges := true // and what is charged stays
		switch rapid.IntRange(0, 4).Draw(t, "algorithm") {
		case 1:
			limit = Window(limit.Size, 10_000*time.Hour)
		case 2:
			limit = SlidingLog(min(limit.Size, 1000), 10_000*time.Hour)
		case 3:
			limit, charges = Concurrency(limit.Size), false
		}
		b := Bucket{Name: "b", Key: "k", Limit: limit}
		elapsed = 0
		nodes := all[:rapid.SampledFrom([]int{1, 2, 3, 8}).Draw(t, "nodes")]
		cutOff := make([]int64, len(nodes)) // until when
		loss := rapid.SampledFrom([]int{0, 2, 20}).Draw(t, "lost, of 100")
		for i, n := range nodes {
			n.denyCache = newDenyCache(64)
			clear(n.renewals.kept)
			n.lost = func() (arrives, answered bool) {
				switch {
				case elapsed < cutOff[i]:
				case rapid.IntRange(0, 99).Draw(t, "lost") < loss:
					arrives = rapid.Bool().Draw(t, "arrives")
				default:
					return true, true
				}
				exact = false
				return arrives, false
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
				nodes[h.node].renewals.remove(h.kept)
				exact = false
				seen[why]++
				return true
			})
		}
		renew := func(h *open) {
			if !h.due(nodes[h.node].clock()) {
				return
			}
			h.tried = elapsed
			if h.renew(); h.renewed == nodes[h.node].clock() {
				seen["renewed"]++
			}
		}
		// pass lets time pass, in which nodes renew what is due. They do so in the order of
		// running, or a history would not be the same each time.
		pass := func(gap int64) {
			for until := elapsed + gap; elapsed < until; {
				next := until
				for _, h := range running {
					next = min(next, max((h.renewed+renewEvery).Microseconds(), h.tried+renewTick.Microseconds()))
				}
				v.at(t, v.now+next-elapsed)
				elapsed = next
				end("lapsed", func(h *open) bool { return nodes[h.node].clock()-h.renewed >= heldFor })
				for i := range running {
					renew(&running[i])
				}
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			pass(rapid.SampledFrom([]int64{0, 1, 50_000, 500_000, 3_000_000, 9_999_999, 10_000_000, 21_000_000}).Draw(t, "gap"))
			switch what := rapid.IntRange(0, 99).Draw(t, "what"); {
			case what < 55:
				node := rapid.IntRange(0, len(nodes)-1).Draw(t, "node")
				b.Cost = rapid.Int64Range(1, min(3, limit.Size)).Draw(t, "cost")
				held := new(Held)
				req := toHold(Request{Buckets: []Bucket{b}})
				req.Held = held
				d, err := nodes[node].Take(context.Background(), req, nil)
				switch {
				case err != nil:
					seen["not decided"]++
				case d[0].Denied:
					seen["denied"]++
				default:
					running = append(running, open{held.kept[0], node, held, b.Cost, elapsed})
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
				end("crashed", func(h *open) bool { return h.node == node })
			case what < 93: // or is cut off for a while
				cutOff[rapid.IntRange(0, len(nodes)-1).Draw(t, "node")] = elapsed + rapid.SampledFrom([]int64{1_000_000, 8_000_000, 30_000_000, 30_000_000}).Draw(t, "for")
			case what < 96: // data is lost: what was held of it can no longer be settled
				seen["data lost"]++
				lostAt := v.now
				v.flush(t)
				v.at(t, lostAt+1) // it takes a while, so no receipt is given twice
				clear(cutOff)
				loss, admitted, exact = 0, 0, true
				if rapid.Bool().Draw(t, "held again") {
					for i := range running {
						running[i].renewNow()
						renew(&running[i])
					}
					break
				}
				for _, h := range running {
					h.held.Settle(0, h.cost)
				}
				running = nil
				if l := peek(t, v.Redis, b); l.Units != 0 || l.Held != 0 {
					t.Fatalf("%+v: holds %+v after its data was lost", limit, l)
				}
			case what < 98: // the clock is set back
				seen["set back"]++
				v.at(t, v.now-rapid.SampledFrom([]int64{1, 1_000_000, 15_000_000, 1_000_000_000}).Draw(t, "back"))
				exact = false
				b.Cost = limit.Size + 1 // somebody is denied, so the server sees it
				if _, _, err := v.ask(inTime(), v.query(toHold(Request{Buckets: []Bucket{b}}), 0), nil); err != nil {
					t.Fatal(err)
				}
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
		for _, h := range running {
			h.held.Settle(0, 0)
		}
		if exact {
			seen["nothing lost"]++
			if l := peek(t, v.Redis, b); l.Units != admitted || l.Held != 0 {
				t.Fatalf("%+v: holds %+v, want the %d units that were admitted", limit, l, admitted)
			}
		}
		v.advance(t, 3*heldFor) // one more than without clocks that are set back
		if l := peek(t, v.Redis, b); l.Held != 0 {
			t.Fatalf("%+v: still held: %+v", limit, l)
		}
	})
	t.Logf("%v", seen)
	for _, what := range []string{"renewed", "lapsed", "crashed", "not decided", "denied", "data lost", "set back", "nothing lost"} {
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
	v := newVirtual(t, redistest.Start(t), "rl:")
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
			ask := func(q *query) []outcome {
				_, got, err := v.ask(inTime(), q, nil)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				if !ask(v.query(req, 0))[0].denied {
					admitted = append(admitted, v.now)
				}
			case 1, 2:
				q := v.query(toHold(req), 0)
				if got := ask(q); !got[0].denied {
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
					ask(h.query)
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
			whole, rest := (to-from)/l.rate(), (to-from)%l.rate()
			up := whole
			if rest > 0 {
				up++
			}
			most := max(l.Size+s*whole, l.Size-1+s*up)
			if l.Algorithm == Log {
				most = l.Size * (1 + whole)
			}
			if int64(j+1) > most {
				t.Fatalf("%+v: %d units admitted within %d µs, want at most %d", l, j+1, to-from, most)
			}
		}
	}
}
