package limiter

import (
	"container/heap"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

var histories = flag.Int("histories", 600, "how many histories of faults to simulate")

// TestNoFaultOverAdmits guards that one node never admits more than its buckets
// allow, to the unit and the microsecond, whatever happens to its server and to
// messages in flight. It runs random histories of requests, stalls, lost answers
// and calls, crashes that lose all data, restarts, unnoticed failovers to servers
// that have no data, and operators who delete keys, on a virtual clock. What is
// admitted after a key was deleted is checked against a bucket that was empty
// then. The same goes for a failover if nothing was decided here on that bucket
// meanwhile: nothing else may be forgotten. The script and the fallback are the
// real ones. Drips take from a millisecond to an hour; requests have one or
// several buckets, in one slot or two, with different sizes, cost one unit or
// more, and may borrow from a pool.
//
// The simulated network stands between script and fallback and carries the content
// of each call.
func TestNoFaultOverAdmits(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	v := newClockedRedis(t, server, "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	total := simulated{}
	all := *histories
	if racetest.Enabled || testing.Short() {
		all /= 4 // they run in one goroutine
	}
	for seed := range uint64(all) {
		h := newHistory(t, v, testseed.Base()-1+seed)
		h.sha = sha
		h.run()
		if t.Failed() {
			t.Fatalf("history %d from %s=%d", seed, testseed.Env, testseed.Base())
		}
		total.add(h.simulated)
	}
	t.Logf("%d histories: %+v", all, total)
	least := all / 8 // half of what is usual: some events are rare in few histories
	for what, n := range map[string]int{
		"by the server": total.there, "here": total.here, "denied here": total.deniedHere, "given up": total.givenUp, "restarts": total.restarts,
		"lost": total.lost, "over two slots": total.split, "settled too late": total.leaves,
		"deleted": total.deleted, "followed": total.followed,
		"kept over a failover": total.kept, "borrowed": total.borrowed, "reset": total.resets,
	} {
		if n < least {
			t.Errorf("%d %s: the test covers too little", n, what)
		}
	}
}

// simulated counts events.
type simulated struct {
	there, here, deniedHere, givenUp, restarts, lost, split, leaves int
	deleted, followed, kept, borrowed, resets                       int
}

func (s *simulated) add(other simulated) {
	s.there += other.there
	s.here += other.here
	s.deniedHere += other.deniedHere
	s.givenUp += other.givenUp
	s.restarts += other.restarts
	s.lost += other.lost
	s.split += other.split
	s.leaves += other.leaves
	s.deleted += other.deleted
	s.followed += other.followed
	s.kept += other.kept
	s.borrowed += other.borrowed
	s.resets += other.resets
}

// history is one random history.
type history struct {
	simulated
	t        *testing.T
	v        *clockedRedis
	random   *rand.Rand
	events   agenda
	sha      string // of the script
	buckets  []Bucket
	admitted [][]charge // of each bucket
	wasted   [][]charge // what the server charged each bucket by replies that came too late or never
	lifetime []int      // how often each bucket's key has been deleted
	decided  []bool     // whether each bucket was decided here since the server died
	pool     bool       // whether the last bucket lends to the others
	moved    []bool     // whether each bucket's level was sent to another server after a failover
	timeout  int64

	up           bool
	lives        int      // how often the server has been restarted
	stalledUntil int64    // when it continues
	line         []func() // the calls that it has not run, in the order in which they were sent
}

// charge is an admission of units, and how often the bucket's key had been deleted
// before.
type charge struct {
	at, units int64
	lifetime  int
}

// exchange is a request in flight.
type exchange struct {
	req   Request
	split bool // the first bucket is in another slot than the others
	parts []*simulatedPart
	done  bool
}

// simulatedPart is the part of an exchange in one slot.
type simulatedPart struct {
	*part
	answered bool
	at       int64 // when the server decided
	lifetime []int // of all buckets, at that time
}

// longestStall is how late a server may learn of a level, in µs.
const longestStall = 11_000_000

func newHistory(t *testing.T, v *clockedRedis, seed uint64) *history {
	v.flush(t)
	h := &history{t: t, v: v, random: rand.New(rand.NewPCG(seed, 1)), up: true, timeout: 50_000}
	v.fallback = newFallback(
		NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond }),
		time.Duration(h.timeout)*time.Microsecond, "")
	v.ledger.all, v.client = nil, h
	v.ledger.process++
	rates := []time.Duration{time.Millisecond, 20 * time.Millisecond, time.Second, time.Hour}
	for i := range 1 + h.random.IntN(3) {
		h.buckets = append(h.buckets, Bucket{Name: fmt.Sprint("b", i), Key: "k", Limit: Limit{
			Size:         pick[int64](h.random, 1, 2, 5, 20),
			DripInterval: rates[h.random.IntN(len(rates))],
			DripSize:     pick[int64](h.random, 1, 1, 1, 2, 3, MaxUnits),
		}, Cost: 1})
		l := &h.buckets[i].Limit
		if l.DripSize == MaxUnits {
			l.Algorithm = bucket.Fixed
		}
		if h.random.IntN(4) == 0 {
			l.Aligned, l.Phase = true, time.Duration(h.random.Int64N(l.of().Rate()))*time.Microsecond
			switch h.random.IntN(4) {
			case 0:
				l.DripSize, l.Algorithm = bucket.SlidingDrip, bucket.Sliding
			case 1, 2:
				*l = SlidingLog(l.Size, l.DripInterval)
			}
		} else if h.random.IntN(4) == 0 {
			*l = warmingUp(pick[int64](h.random, 1, 2, 5, 20), l.DripInterval, time.Duration(pick(h.random, 1, 4, 30))*l.DripInterval/4,
				pick[float64](h.random, 1, 2, 3, 10, 1000))
		}
	}
	for i := range h.buckets {
		h.buckets[i].Limit.CountDenied = h.random.IntN(5) == 0
	}
	if len(h.buckets) > 1 && h.random.IntN(2) == 0 {
		h.pool = true
		for i := range h.buckets {
			h.buckets[i].Limit.CountDenied = false
		}
	} else {
		h.buckets[0].Key = "first"
	}
	h.admitted = make([][]charge, len(h.buckets))
	h.wasted = make([][]charge, len(h.buckets))
	h.lifetime = make([]int, len(h.buckets))
	h.decided = make([]bool, len(h.buckets))
	h.moved = make([]bool, len(h.buckets))
	return h
}

// pick returns one of the values.
func pick[T any](random *rand.Rand, values ...T) T { return values[random.IntN(len(values))] }

// run plays the history and checks what was admitted.
func (h *history) run() {
	now := h.v.now
	for range 10 + h.random.IntN(30) {
		rate := h.buckets[h.random.IntN(len(h.buckets))].Limit.of().Rate()
		now += pick(h.random, 0, 3, 50, 700, 5000, 20_000, 30_000, 60_000, rate, 2*rate)
		for range pick(h.random, 1, 1, 2, 6) {
			h.events.at(now+h.random.Int64N(5), h.arrive)
		}
		switch x := h.random.IntN(100); {
		case x < 15:
			until := now + pick[int64](h.random, 5000, 30_000, 45_000, 80_000, longestStall)
			h.events.at(now, func() { h.stalledUntil = max(h.stalledUntil, until) })
		case x < 22:
			h.events.at(now, h.die)
			h.events.at(now+h.random.Int64N(pick[int64](h.random, 100, 200_000)), h.restart)
		case x < 37:
			h.events.at(now, h.deleteKeys)
		case x < 42:
			h.events.at(now, h.die)
			h.events.at(now+h.random.Int64N(200_000), h.failover)
		case x < 57:
			i := h.random.IntN(len(h.buckets))
			h.events.at(now, func() { h.reset(i, true) })
		}
	}
	for len(h.events.all) > 0 && !h.t.Failed() {
		e := heap.Pop(&h.events).(event)
		h.v.at(h.t, e.when)
		e.do()
	}
	if h.v.fallback.inFlight != nil {
		h.t.Error("something is in flight forever")
	}
	for i, b := range h.buckets {
		lifetimes := make([][]charge, h.lifetime[i]+1)
		for _, c := range h.admitted[i] {
			lifetimes[c.lifetime] = append(lifetimes[c.lifetime], c)
		}
		for n, admitted := range lifetimes {
			checkUnits(h.t, b.Limit, admitted, h.wasted[i], n > 0 || h.moved[i])
		}
	}
}

// deleteKeys deletes all keys, or some, as an operator might.
func (h *history) deleteKeys() {
	if !h.up {
		return
	}
	h.deleted++
	all := h.random.IntN(2) == 0
	for i := range h.buckets {
		if !all && h.random.IntN(2) == 0 {
			continue
		}
		if err := h.v.admin.Del(context.Background(), h.v.keys.of(&h.buckets[i])).Err(); err != nil {
			h.t.Fatal(err)
		}
		h.lifetime[i]++
	}
}

// reset empties a bucket as Redis.reset does: again when nothing is in flight any more
// that reports to the server what it held.
func (h *history) reset(i int, again bool) {
	b := &h.buckets[i]
	q := h.v.keys.query(Request{Buckets: []Bucket{*b}}, whatReset)
	q.stage = ended
	q.locate(h.v.fallback.memory, Request{Buckets: []Bucket{*b}})
	h.v.sending(nil, callsOf(q))
	over, x := false, h.v.fallback.resetting(b)
	end := func() {
		over = true
		h.v.fallback.wasReset(x)
	}
	h.events.at(h.v.now+h.timeout, end)
	h.call(q, func([]outcome, int64, []int) {
		if over {
			return
		}
		h.resets++
		h.v.forget(b, x)
		end()
		if again {
			h.resetAgain(i, h.v.now+2*h.timeout)
		}
	})
}

// resetAgain empties a bucket a second time when that does away with what was reported, but no
// later than at a time.
func (h *history) resetAgain(i int, end int64) {
	if h.v.fallback.reportsEmptied(&h.buckets[i]) && h.v.now < end {
		h.events.at(h.v.now+1000, func() { h.resetAgain(i, end) })
		return
	}
	h.reset(i, false)
}

// die loses the server's data and everything in flight to it.
func (h *history) die() {
	h.up = false
	h.lives++
	clear(h.decided)
	if err := h.v.admin.Eval(context.Background(), "for _, k in ipairs(redis.call('KEYS', 'rl:*')) do redis.call('DEL', k) end", nil).Err(); err != nil && err.Error() != "redis: nil" {
		h.t.Fatal(err)
	}
}

// restart makes the server answer again. It does not know the script, which is
// noticed before anything else is sent to it.
func (h *history) restart() {
	if !h.up {
		h.up = true
		h.restarts++
		h.v.fallback.restarted(nil)
	}
}

// failover makes another server answer, unnoticed. It knows the script but no
// buckets. Only what was decided here meanwhile is not forgotten, because it is
// sent to that server. Units held by the old server are lost.
func (h *history) failover() {
	if h.up {
		return
	}
	h.up = true
	for q := h.v.fallback.inFlight; q != nil; q = q.next {
		for i := range h.buckets {
			if q.stage == holding && slices.ContainsFunc(q.buckets, func(p bucketQuery) bool {
				return p.hash == h.v.fallback.memory.hash(&h.buckets[i])
			}) {
				h.decided[i] = false
			}
		}
	}
	for i, decided := range h.decided {
		if decided {
			h.kept++
			h.moved[i] = true
		} else {
			h.lifetime[i]++
		}
	}
}

// arrive makes a request arrive, for some of the buckets.
func (h *history) arrive() {
	x := &exchange{req: Request{Accounting: Accounting(h.random.IntN(4) / 3)}}
	for i := range h.buckets {
		if h.random.IntN(2) == 0 || h.pool && h.random.IntN(4) > 0 || i == len(h.buckets)-1 && len(x.req.Buckets) == 0 {
			b := h.buckets[i]
			if h.random.IntN(4) == 0 { // for a request, or a node, with a smaller size
				b.Limit.Size = 1 + h.random.Int64N(b.Limit.Size)
			}
			b.Cost = min(pick[int64](h.random, 0, 1, 1, 1, 2, 3), b.Limit.Size)
			x.req.Buckets = append(x.req.Buckets, b)
		}
	}
	if last := len(x.req.Buckets) - 1; h.pool && last > 0 && x.req.Buckets[last].Name == h.buckets[len(h.buckets)-1].Name {
		x.req.Buckets[last].Pool = true
		x.req.Buckets[last-1].Borrows = true
		x.req.Buckets[0].Borrows = h.random.IntN(2) == 0 || last == 1
	}
	if !h.up && h.random.IntN(2) == 0 { // the outage is known
		h.here(x, x.req, nil, false)
		return
	}
	parts := []*part{{Request: x.req}}
	if x.req.severalKeys() {
		x.req = h.v.reserveParts(x.req)
		parts = x.req.byKey()
	}
	if len(parts) > 1 {
		h.split++
		x.split = true
	}
	var batch []*query
	for _, p := range parts {
		p.query = h.v.query(p.Request, byte(x.req.Accounting))
		x.parts = append(x.parts, &simulatedPart{part: p})
		batch = append(batch, p.query)
	}
	// Requests that wait too long for a connection are decided here.
	if h.stalledUntil > h.v.now && h.random.IntN(7) == 0 {
		h.events.at(h.v.now+h.timeout/2, func() { h.giveUp(x) })
		return
	}
	h.v.sending(nil, callsOf(batch...))
	for _, p := range x.parts {
		p.err = errLate // until it is answered
		h.call(p.query, func(outcomes []outcome, at int64, lifetime []int) {
			if isOvertaken(outcomes) { // nothing was done, and it is decided here
				h.v.eachReservation(p.query, h.v.ledger.refused)
				return
			}
			if p.outcomes, p.at, p.lifetime, p.answered = outcomes, at, lifetime, true; x.done {
				h.waste(p.query.buckets, outcomes, at)
				return // too late: the query was given up
			}
			p.err = nil
			before := h.levels(p.query)
			h.v.answered(p.query, p.outcomes)
			for i, level := range h.levels(p.query) {
				if level.Clear < before[i].Clear-h.timeout {
					h.followed++
				}
				// Units whose settlement is lost count here, and again in their server.
				if p := &p.query.buckets[i]; h.split == 0 && level.Clear > h.drain(p.hash)+longestStall {
					h.t.Errorf("a bucket of %+v drains in %d µs: it holds more than it can", p.limit, level.Clear)
				}
			}
			for _, p := range x.parts {
				if !p.answered {
					return
				}
			}
			h.finish(x)
		})
	}
	h.events.at(h.v.now+h.timeout, func() { h.giveUp(x) })
}

// call carries q to the server and its answer back, unless one of the two is lost.
func (h *history) call(q *query, answered func(_ []outcome, at int64, lifetime []int)) {
	group, keys, life := strings.Clone(q.Arg), append([]string(nil), q.Keys...), h.lives
	if !h.up {
		life = -1 // the connection is to a server that is gone
	}
	sent := query{what: q.what, buckets: slices.Clone(q.buckets)}
	h.line = append(h.line, func() {
		if !h.up || h.lives != life {
			h.lost++
			return
		}
		reply, err := h.v.admin.EvalSha(context.Background(), h.sha, keys, group).Int64Slice()
		if err != nil {
			h.t.Fatal(err)
		}
		sent.Reply = reply
		outcomes, _, err := sent.outcomes(nil)
		if err != nil {
			h.t.Fatal(err)
		}
		if sent.what == whatReset {
			h.lifetime[h.indexOf(sent.buckets[0].hash)]++
		}
		lifetime := slices.Clone(h.lifetime)
		at := h.v.now
		if h.random.IntN(20) == 0 {
			h.lost++
			h.waste(sent.buckets, outcomes, at)
			return
		}
		h.events.at(at+h.random.Int64N(300), func() {
			q.Reply = reply
			answered(outcomes, at, lifetime)
		})
	})
	h.events.at(h.v.now+h.random.Int64N(300), h.serve)
}

// serve has the server run the next call. All come on one connection.
func (h *history) serve() {
	if h.up && h.stalledUntil > h.v.now {
		h.events.at(h.stalledUntil, h.serve)
		return
	}
	next := h.line[0]
	h.line = h.line[1:]
	next()
}

// waste records what a server charged at a time by a reply that is not used.
func (h *history) waste(buckets []bucketQuery, outcomes []outcome, at int64) {
	for i, o := range outcomes {
		if o.denied || o.unused || buckets[i].held != nil {
			continue
		}
		j := h.indexOf(buckets[i].hash)
		h.wasted[j] = append(h.wasted[j], charge{at: at, units: buckets[i].cost})
	}
}

// levels returns the levels of q's buckets in this process.
func (h *history) levels(q *query) []bucket.Level {
	var levels []bucket.Level
	for i := range q.buckets {
		s, _ := h.v.fallback.memory.dirty(&q.buckets[i], h.v.now)
		levels = append(levels, bucket.Level(s.Ahead(h.v.now)))
	}
	return levels
}

// drain returns how long a bucket takes to drain that is as full as any request may
// find it.
func (h *history) drain(hash uint64) int64 {
	return h.buckets[h.indexOf(hash)].Limit.of().DrainTime().Microseconds()
}

// indexOf returns the index of the bucket with that hash.
func (h *history) indexOf(hash uint64) int {
	return slices.IndexFunc(h.buckets, func(b Bucket) bool { return h.v.fallback.memory.hash(&b) == hash })
}

// giveUp decides an exchange that has timed out.
func (h *history) giveUp(x *exchange) {
	if x.done {
		return
	}
	h.givenUp++
	h.finish(x)
}

// finish combines the parts of an exchange, as Redis.decide and Redis.decideSplit
// do: parts that no server has decided are decided here.
func (h *history) finish(x *exchange) {
	x.done = true
	var failed []*part
	denied := false
	for _, p := range x.parts {
		if !p.answered {
			failed = append(failed, p.part)
			h.v.eachReservation(p.query, h.v.ledger.lost)
			continue
		}
		denied = denied || p.denied()
		h.there++
	}
	if len(failed) > 0 {
		var here Request
		here.Accounting = x.req.Accounting
		var instead []*query
		for _, p := range failed {
			here.Buckets = append(here.Buckets, p.Buckets...)
			instead = append(instead, p.query)
		}
		denied = h.here(x, here, instead, denied) || denied
	}
	for _, p := range x.parts {
		if !p.answered || p.denied() && x.req.Accounting == AccountingAtomic {
			continue
		}
		if !denied || x.req.Accounting == AccountingEach {
			for i, b := range p.Buckets {
				if o := &p.outcomes[i]; !o.denied && !o.unused && (!denied || !b.Pool) {
					h.admit(b, p.at, p.lifetime)
					h.borrow(b)
				}
			}
		}
		if x.split && x.req.Accounting == AccountingAtomic {
			as := verdictAdmitted
			if denied {
				as = verdict(h.random.IntN(2)) // or no decision was made
			}
			h.settle(p, as)
		}
	}
}

// here decides req in this process, and reports whether it is denied.
func (h *history) here(x *exchange, req Request, instead []*query, denied bool) bool {
	x.done = true
	h.simulated.here++
	peek := denied && req.Accounting == AccountingAtomic
	outcomes := h.v.fallback.decide(req, nil, denied, instead...)
	denied = denied || req.denied(outcomes)
	if denied {
		h.deniedHere++
	}
	for i, b := range req.Buckets {
		admitted := !outcomes[i].denied && !outcomes[i].unused && (!denied || req.Accounting == AccountingEach && !b.Pool)
		if admitted {
			h.admit(b, h.v.now, h.lifetime)
			h.borrow(b)
		}
		if admitted && b.Cost > 0 || outcomes[i].denied && !peek { // a cost of 0 only looks
			h.decided[h.index(b)] = true
		}
	}
	return denied
}

// settle settles the units that are held for a part, sooner or later.
func (h *history) settle(p *simulatedPart, as verdict) {
	p.err = nil
	h.events.at(h.v.now+pick[int64](h.random, 0, 0, 20, 2000, 9_900_000), func() { h.v.settle([]*part{p.part}, as) })
}

// Submit implements client: it carries what settles and renews units.
func (h *history) Submit(_ redisscript.Deadline, c *redisscript.Call) error {
	q := c.Owner.(*query)
	h.v.sending(nil, callsOf(q))
	answered := false
	end := func(err error) {
		if answered {
			return
		}
		if answered = true; err != nil {
			h.leaves++
			h.events.at(h.v.now+500_000, h.v.ledger.tick) // which sends it again
		}
		q.Done(err)
	}
	h.call(q, func([]outcome, int64, []int) { end(nil) })
	h.events.at(h.v.now+h.timeout, func() { end(errLost) })
	return nil
}

// The other methods of client are not used.
func (h *history) Do(redisscript.Deadline, *redisscript.Call) (*redisscript.Server, error) {
	return nil, errLost
}

func (*history) OneServer() bool            { return true }
func (*history) Connect()                   {}
func (*history) Stats() []redisscript.Stats { return nil }
func (*history) Close() error               { return nil }

// admit records that units of b were admitted.
func (h *history) admit(b Bucket, at int64, lifetime []int) {
	if b.Cost == 0 { // it only looked, perhaps while another request was decided here
		return
	}
	i := h.index(b)
	h.admitted[i] = append(h.admitted[i], charge{at, b.Cost, lifetime[i]})
}

// borrow counts that b, to which something was charged, was a pool.
func (h *history) borrow(b Bucket) {
	if b.Pool {
		h.borrowed++
	}
}

// index returns the index of b among the buckets.
func (h *history) index(b Bucket) int {
	return slices.IndexFunc(h.buckets, func(other Bucket) bool { return other.Name == b.Name })
}

// checkUnits checks that no more units are admitted in any time than a bucket of
// limit l allows. If a key was lost, or deleted while its bucket was dirty, the
// server is sent the level it had, and the next drip may be that of the earlier
// bucket. A log takes what was wasted for what is admitted in the process in the same
// window, and as many more can pass once it has left the log. A bucket that warms up is
// warmer for what was wasted.
func checkUnits(t *testing.T, l Limit, admitted, wasted []charge, lost bool) {
	t.Helper()
	if l.Algorithm == bucket.WarmUp {
		checkWarmUp(t, l, admitted, lost || len(wasted) > 0)
		return
	}
	s := min(l.DripSize, l.Size)
	for _, from := range admitted {
		for _, to := range admitted {
			if to.at < from.at {
				continue
			}
			units := int64(0)
			for _, a := range admitted {
				if a.at >= from.at && a.at <= to.at {
					units += a.units
				}
			}
			time := to.at - from.at
			most := max(l.Size+s*(time/l.of().Rate()), l.Size-1+s*bucket.CeilDiv(time, l.of().Rate()))
			switch {
			case l.Algorithm == bucket.Log:
				most = l.Size * (1 + time/l.of().Rate())
				for _, w := range wasted {
					if w.at > from.at-l.of().Rate() && w.at <= to.at {
						most += w.units
					}
				}
			case lost || l.Aligned:
				most = l.Size + s*bucket.CeilDiv(time, l.of().Rate())
			}
			if units > most {
				t.Errorf("%+v: %d units admitted within %d µs, want at most %d", l, units, time, most)
				return
			}
		}
	}
}

// event is an event at a time.
type event struct {
	when int64
	nth  int
	do   func()
}

// agenda is the queue of events: the earliest first, and in order of insertion at
// equal times.
type agenda struct {
	all []event
	n   int
}

func (a *agenda) at(when int64, do func()) {
	a.n++
	heap.Push(a, event{when, a.n, do})
}

func (a *agenda) Len() int      { return len(a.all) }
func (a *agenda) Swap(i, j int) { a.all[i], a.all[j] = a.all[j], a.all[i] }
func (a *agenda) Push(x any)    { a.all = append(a.all, x.(event)) }
func (a *agenda) Less(i, j int) bool {
	return a.all[i].when < a.all[j].when || a.all[i].when == a.all[j].when && a.all[i].nth < a.all[j].nth
}
func (a *agenda) Pop() any {
	last := a.all[len(a.all)-1]
	a.all = a.all[:len(a.all)-1]
	return last
}

// TestLocalLevelsLeaveNoRoom guards histories in which a server has lost a bucket, in
// whole or in part, and gets a report of it: no more is admitted than fits next to what the
// node knows and what it has in flight.
func TestLocalLevelsLeaveNoRoom(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	const second = 1_000_000
	window := func(units int64) bucket.Level { return bucket.Level{Clear: 1800 * second, Rest: units} }
	sevens := Limit{Size: 14, DripInterval: 10 * time.Second, DripSize: 7}
	for _, tc := range []struct {
		name   string
		limit  Limit
		stored int64        // units that the server has
		level  bucket.Level // that the node knows
		flight int64        // units that it has in flight
		own    bool
		into   int64 // seconds since an hour began
		want   int64 // units that are admitted
	}{
		{"a window, nothing in flight", FixedWindow(10, time.Hour), 0, window(5), 0, true, 0, 5},
		{"a window, as much in flight", FixedWindow(10, time.Hour), 0, window(5), 5, true, 0, 0},
		{"a window, some in flight", FixedWindow(10, time.Hour), 0, window(5), 3, true, 0, 2},
		{"a window that the server knows less of", FixedWindow(10, time.Hour), 2, window(5), 3, true, 0, 2},
		{"a window of the clock that has ended", ClockWindow(10, time.Hour, time.Unix(0, 0)), 2, bucket.Level{Clear: second, Rest: 9}, 3, false, 0, 5},
		{"slack, with units in flight", sevens, 0, bucket.Level{Clear: second, Rest: 5}, 3, true, 0, 9},
		{"an empty bucket, with units in flight", sevens, 0, bucket.Level{}, 12, true, 0, 2},
		{"a later drip that holds fewer units", sevens, 8, bucket.Level{Clear: 14 * second, Rest: 0}, 0, true, 0, 0},
		{"the same, in part", sevens, 8, bucket.Level{Clear: 14 * second, Rest: 3}, 0, true, 0, 3},
		{"an earlier drip that holds more", sevens, 1, bucket.Level{Clear: 7 * second, Rest: 0}, 0, true, 0, 7},
		{"an empty window of the clock, with units in flight", ClockWindow(10, time.Hour, time.Unix(0, 0)), 0, bucket.Level{}, 7, true, 3000, 3},
	} {
		v.flush(t)
		v.at(t, v.now-v.now%(3600*second)+3600*second+tc.into*second)
		b := Bucket{Name: "b", Key: "k", Limit: tc.limit, Cost: 1}
		if tc.stored > 0 {
			b.Cost = tc.stored
			decide(t, v, AccountingAtomic, b)
		}
		reported := []localLevel{{bucket.Ahead(tc.level), tc.flight, unsure}}
		if tc.own {
			reported[0].dirty = own
		}
		admitted := int64(0)
		b.Cost = 1
		for range tc.limit.Size {
			outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, reported)
			if err != nil {
				t.Fatal(err)
			}
			if !outcomes[0].denied {
				admitted++
				// The node knows it now.
				if s := outcomes[0].Ahead; reported[0].Clear == 0 {
					reported[0].Ahead = s
				} else {
					reported[0].Ahead = bucket.Ahead(b.Limit.of().Join(reported[0].After(0), s.After(0), 2*time.Second, tc.own))
				}
			}
		}
		if admitted != tc.want {
			t.Errorf("%s: %d units admitted, want %d", tc.name, admitted, tc.want)
		}
	}
}
