package limiter

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// wire is a client with one connection to the server of a virtual store, which runs calls in
// the order in which they were sent, when the test says so.
type wire struct {
	store     *Redis
	v         *clockedRedis
	sha       string
	line      []*redisscript.Call // sent and not run
	unsent    []unsentCall        // until there is a connection
	together  int                 // how many calls an invocation has at most
	late      bool                // whether the server does not answer in time
	away      bool                // whether the connection is lost, and another one is being made
	down      bool                // whether there is none, and what is submitted fails
	auto      bool                // whether the server runs each call at once
	pass      func()              // lets a moment pass
	meanwhile func()              // what happens while a request waits for its answer
}

// wired is the server of stores whose clients are wires.
type wired struct {
	v   *clockedRedis
	sha string // of the script that it has
}

// newWired starts a server.
func newWired(t *testing.T) wired {
	t.Helper()
	findNotSent(t)
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	return wired{v, sha}
}

// open returns the client of a new store, which does nothing by itself: the test has its accounts and reports sent.
func (s wired) open(t rapid.TB, keyPrefix string, fallback *Memory, together int) *wire {
	r := newRedisWithoutClient(RedisOptions{KeyPrefix: keyPrefix, Timeout: 50 * time.Millisecond, Fallback: fallback})
	r.ledger.running, r.reports.running = true, true
	w := &wire{store: r, v: s.v, sha: s.sha, together: together, pass: func() { s.v.advance(t, time.Microsecond) }, meanwhile: func() {}}
	r.client = w
	return w
}

// unsentCall is a call, with what its outcome is passed to.
type unsentCall struct {
	*redisscript.Call
	done func(error)
}

// run has the server run the next n calls, of which answers may be lost.
func (w *wire) run(n int, answers bool) {
	for n > 0 && len(w.line) > 0 {
		calls := w.line[:min(n, w.together, len(w.line))]
		w.line, n = w.line[len(calls):], n-len(calls)
		var keys []string
		var args []any
		for _, c := range calls {
			keys, args = append(keys, c.Keys...), append(args, c.Arg)
		}
		w.pass() // no receipt is given twice
		reply, err := w.v.admin.EvalSha(context.Background(), w.sha, keys, args...).Int64Slice()
		if err != nil {
			panic(err)
		}
		for _, c := range calls {
			c.Reply, reply = reply[:c.Replies:c.Replies], reply[c.Replies:]
			err := errLost
			if answers {
				err = nil
			}
			if c.Done != nil {
				c.Done(err)
			}
		}
	}
}

// lose breaks the connection after the server has run n of the calls on it, and answered none.
func (w *wire) lose(n int) {
	w.run(n, false)
	lost := w.line
	w.line, w.away = nil, true
	for _, c := range lost {
		if c.Done != nil {
			c.Done(errLost)
		}
	}
}

// connect makes a connection if there is none, on which what has waited for it is sent.
func (w *wire) connect() {
	if !w.away || w.down {
		return
	}
	w.store.restarted(nil)
	w.away = false
	unsent := w.unsent
	w.unsent = nil
	w.send(unsent...)
}

// cut loses the connection, and makes another one at once.
func (w *wire) cut(n int) {
	w.lose(n)
	w.connect()
}

// fail ends what waits for a connection.
func (w *wire) fail() {
	unsent := w.unsent
	w.unsent = nil
	for _, c := range unsent {
		c.done(errNotSent)
	}
}

// send has calls sent, in one batch.
func (w *wire) send(batch ...unsentCall) {
	if w.away {
		w.unsent = append(w.unsent, batch...)
		return
	}
	var calls []*redisscript.Call
	for _, c := range batch {
		calls = append(calls, c.Call)
	}
	w.store.sending(nil, calls)
	for _, c := range batch {
		sent := &redisscript.Call{Keys: []string{strings.Clone(c.Keys[0])}, Arg: strings.Clone(c.Arg), Replies: c.Replies}
		if c.done != nil {
			sent.Done = func(err error) {
				c.Reply = sent.Reply
				c.done(err)
			}
		}
		w.line = append(w.line, sent)
	}
}

// Do implements client: it has the server run all calls up to this one, or gives up.
func (w *wire) Do(_ redisscript.Deadline, c *redisscript.Call) (*redisscript.Server, error) {
	if w.down {
		return nil, errNotSent
	}
	var reply []int64
	var failure error
	over, given := false, false
	w.send(unsentCall{c, func(err error) {
		if w.store.heard(c, err, !given); !given {
			reply, failure, over = c.Reply, err, true
		}
	}})
	w.meanwhile() // and the request comes to its answer later
	if given = !over && w.late; given {
		w.meanwhile() // before it notices
	}
	if i := slices.IndexFunc(w.unsent, func(u unsentCall) bool { return u.Call == c }); i >= 0 {
		w.unsent = slices.Delete(w.unsent, i, i+1)
		return nil, errNotSent
	}
	if given {
		return nil, errLost
	}
	for !over {
		w.run(len(w.line), true)
	}
	c.Reply = reply
	return nil, failure
}

// Submit implements client.
func (w *wire) Submit(_ redisscript.Deadline, c *redisscript.Call) error {
	if w.down {
		return errNotSent
	}
	w.send(unsentCall{c, c.Done})
	if w.auto {
		w.run(len(w.line), true)
	}
	return nil
}

func (*wire) OneServer() bool            { return true }
func (*wire) Connect()                   {}
func (*wire) Stats() []redisscript.Stats { return nil }
func (w *wire) Close() error {
	w.run(len(w.line), false)
	w.fail()
	w.down = true
	return nil
}

// errNotSent is the error of a call that no server can have run.
var errNotSent error

// findNotSent finds errNotSent.
func findNotSent(t *testing.T) {
	t.Helper()
	client := redisscript.Open(redisscript.Options{Addresses: []string{"127.0.0.1:1"}, Timeout: time.Second}, takeScript, redisscript.Hooks{})
	t.Cleanup(func() { _ = client.Close() })
	failed := make(chan error, 1)
	if err := client.Submit(inTime(), &redisscript.Call{Keys: []string{"k"}, Done: func(err error) { failed <- err }}); err != nil {
		failed <- err
	}
	if errNotSent = <-failed; !redisscript.NotRun(errNotSent) {
		t.Fatal(errNotSent)
	}
}

// TestSettledAgainWhileInDoubt guards a charge whose answer was lost with the connection: the
// settlement that is sent again is overtaken by a renewal, since another request is decided here.
// Its answer does not say whether the level that it has includes the charge, which is settled by the
// renewal. It is charged once.
func TestSettledAgainWhileInDoubt(t *testing.T) {
	server := newWired(t)
	v := server.v
	w := server.open(t, "rl:", NewMemory(), 3)
	r := w.store
	b := hourly(1000)
	a := beginThere(t, r, b)
	a.held.Settle(0, 13)
	w.lose(1) // once it has been charged
	r.ledger.tick()
	_, other := begin(t, r, b)
	w.connect()
	for range 3 {
		w.run(len(w.line), true)
	}
	other.held.Settle(0, 8)
	w.run(len(w.line), true)
	beginThere(t, r, b).held.Settle(0, 0) // reports what is known here
	w.run(len(w.line), true)
	v.client, v.keys = w, r.keys
	if l, err := r.Peek(t.Context(), b); err != nil || l.Units != 21 || l.Held != 0 {
		t.Errorf("%+v, %v, want 21 units", l, err)
	}
}

// TestNothingHeldByAPromotedReplica guards that a replica that takes over without what ended an account
// does not hold its units, whatever has become of the account here: they would be charged later, too.
func TestNothingHeldByAPromotedReplica(t *testing.T) {
	server := newWired(t)
	v := server.v
	b := hourly(1000)
	type run struct {
		*wire
		request inProgress // which is in progress as the replica takes over, if any
	}
	for _, tc := range []struct {
		name   string
		before func(t *testing.T, r *run) // after the account has ended
		alone  bool                       // whether there is no server meanwhile
	}{
		{"just ended", func(*testing.T, *run) {}, false},
		{"ended a moment ago", func(_ *testing.T, r *run) { r.store.ledger.tick() }, false},
		{"another request, admitted by the old server", func(t *testing.T, r *run) {
			r.request = beginThere(t, r.store, b)
		}, false},
		{"another request a moment later, admitted by the old server", func(t *testing.T, r *run) {
			r.store.ledger.tick()
			r.request = beginThere(t, r.store, b)
		}, false},
		{"another request, decided here", func(t *testing.T, r *run) {
			r.lose(0)
			r.down = true
			_, r.request = begin(t, r.store, b)
		}, true},
		{"another request a moment later, decided here", func(t *testing.T, r *run) {
			r.store.ledger.tick()
			r.lose(0)
			r.down = true
			_, r.request = begin(t, r.store, b)
		}, true},
	} {
		for _, fallback := range []*Memory{NewMemory(), nil} {
			if tc.alone && fallback == nil {
				continue
			}
			t.Run(fmt.Sprintf("%s, fallback %t", tc.name, fallback != nil), func(t *testing.T) {
				v.flush(t)
				w := server.open(t, "rl:", fallback, 1)
				store := w.store
				first := beginThere(t, store, b)
				replica := v.dump(t)
				first.held.Settle(0, 1)
				w.run(len(w.line), true)
				r := &run{wire: w}
				tc.before(t, r)
				v.restore(t, replica)
				w.lose(0)
				w.down = false
				w.connect()
				if r.request.held != nil {
					r.request.held.Settle(0, 0)
				}
				for range 3 {
					store.ledger.tick()
					w.run(len(w.line), true)
				}
				beginThere(t, store, b).held.Settle(0, 0) // reports what is known here
				w.run(len(w.line), true)
				v.client, v.keys = w, store.keys
				if l, err := store.Peek(t.Context(), b); err != nil || l.Held != 0 || fallback != nil && l.Units != 1 {
					t.Errorf("%+v, %v, want none held and one charged", l, err)
				}
			})
		}
	}
}

// TestSettledOnceInHistories guards that one process charges each unit once, by random histories
// of requests that hold their cost, hold nothing, or are charged at once, and of servers that
// answer late or not in time, before and after they have run what they were sent, one by one or
// several together; of connections that break, also while requests wait for their answers, and calls
// that wait to be sent until there is another one; of requests that come to their answers after later
// ones have; outages, data and scripts that are lost, clocks
// that stand, costs of any size, and buckets that move to other places and back, with the old
// stores closed or not. With two processes, of which one may hear nothing for long, nothing is
// charged twice, and what each was charged is not lost.
func TestSettledOnceInHistories(t *testing.T) {
	t.Parallel()
	server := newWired(t)
	v := server.v
	seen := map[string]int{}
	checkTraces(t, 6, func(t *rapid.T) {
		v.flush(t)
		limit := rapid.SampledFrom([]Limit{
			{Size: 1000, DripInterval: 100 * time.Hour, DripSize: 1},
			FixedWindow(1_000_000, 10_000*time.Hour), SlidingWindow(1_000_000, 10_000*time.Hour), SlidingLog(5000, 10_000*time.Hour),
		}).Draw(t, "limit")
		keys := []string{"k", "l"}[:rapid.IntRange(1, 2).Draw(t, "keys")]
		bucketOf := func(key int) Bucket { return Bucket{Name: "b", Key: keys[key], Limit: limit, Cost: 1} }
		huge := rapid.IntRange(0, 3).Draw(t, "huge") == 0 // whether the bucket may become full
		amount := func(least int64) int64 {
			if huge && rapid.IntRange(0, 3).Draw(t, "much") == 0 {
				return rapid.SampledFrom([]int64{limit.Size / 2, limit.Size, 2*limit.Size - 1, MaxUnits, 1 << 53, 1 << 62, math.MaxInt64}).Draw(t, "amount")
			}
			return rapid.Int64Range(least, 3).Draw(t, "units")
		}
		type request struct {
			key  int
			held *Held
		}
		type node struct {
			memory  *Memory
			store   *wire
			old     []*wire
			closed  []*wire
			awake   int64    // what its clock shows
			charged [2]int64 // by key
			running []request
		}
		asleep, together := false, rapid.IntRange(1, 3).Draw(t, "together")
		var meanwhile func(n *node)
		nodes := make([]*node, rapid.IntRange(1, 3).Draw(t, "processes"))
		open := func(n *node, location string) *wire {
			w := server.open(t, location, n.memory, together)
			r := w.store
			r.location, r.fallback.location = location, location
			c, began, awake := new(clock), v.now, n.awake
			r.clock = func() time.Duration {
				return c.show(time.Duration(n.awake-awake)*time.Microsecond, time.Duration(v.now-began)*time.Microsecond)
			}
			w.meanwhile = func() { meanwhile(n) }
			return w
		}
		for i := range nodes {
			n := &node{}
			n.memory = NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
			n.store = open(n, "rl:a:")
			nodes[i] = n
		}
		all := func(do func(w *wire)) {
			for _, n := range nodes {
				for _, w := range append(n.old, n.store) {
					do(w)
				}
			}
		}
		exact, reported := true, true
		replica, replicated := map[string]string{}, v.now // the data that it has, as of then
		pass := func(d time.Duration) {
			for ; d > 0; d -= resendEvery {
				v.advance(t, min(d, resendEvery))
				for _, n := range nodes {
					if !asleep {
						n.awake += min(d, resendEvery).Microseconds()
					}
				}
				all(func(w *wire) {
					for _, account := range w.store.ledger.all { // what it could not tell for so long was charged as it stood
						exact = exact && (account.isIdle() || w.store.clock()-account.heard < lapse)
					}
					if !asleep {
						w.store.ledger.tick()
						w.store.reports.sendDue()
					}
				})
			}
		}
		alone := func() bool { return !slices.ContainsFunc(nodes, func(n *node) bool { return len(n.old) > 0 }) }
		step := func(n *node, what string) {
			w, key := n.store, rapid.IntRange(0, len(keys)-1).Draw(t, "key")
			switch what {
			case "begin", "take", "look":
				c := bucketOf(key)
				c.Hold, c.Cost = what != "take", amount(1)
				if what == "look" {
					c.Cost = 0
				}
				req := Request{Buckets: []Bucket{c}, Held: new(Held)}
				d, err := w.store.Take(context.Background(), req, nil)
				if err != nil || d[0].Denied && !huge {
					t.Fatalf("%+v, %v", d, err)
				}
				if d[0].Denied {
					exact = exact && (what != "take" || d[0].By == DecidedByRedis) // which may charge it later
					return
				}
				if what == "take" {
					n.charged[key] += c.Cost
					exact = exact && (!w.late || len(n.old) == 0) // another connection may tell of it before it is run
				} else {
					n.running = append(n.running, request{key, req.Held})
				}
			case "end":
				if len(n.running) == 0 {
					return
				}
				i := rapid.IntRange(0, len(n.running)-1).Draw(t, "which")
				charge, of := amount(0), n.running[i]
				n.running = append(n.running[:i], n.running[i+1:]...)
				of.held.Settle(0, charge)
				n.charged[of.key] += min(charge, 2*limit.Size)
			case "serve":
				w.run(rapid.IntRange(1, 3).Draw(t, "calls"), true)
			case "pass":
				pass(rapid.SampledFrom([]time.Duration{resendEvery, time.Second, renewEvery}).Draw(t, "time"))
			case "wait":
				pass(resendEvery)
			case "late", "in time":
				w.late = what == "late"
			case "cut":
				w.cut(rapid.IntRange(0, len(w.line)).Draw(t, "run"))
			case "lose":
				w.lose(rapid.IntRange(0, len(w.line)).Draw(t, "run"))
			case "connect":
				w.connect()
			case "error": // of a call that the server has run, at least in part
				w.run(1, false)
			case "down":
				w.lose(rapid.IntRange(0, len(w.line)).Draw(t, "run"))
				w.down = true
				w.fail()
			case "up":
				if w.down {
					w.down = false
					w.connect()
				}
			case "scripts":
				w.store.restarted(nil)
			case "data":
				at := v.now
				v.flush(t)
				v.at(t, at+1)
				all(func(w *wire) { w.cut(0) })
				exact = exact && alone()
			case "replicate":
				replica, replicated = v.dump(t), v.now
			case "fail over": // the replica may still have what has been settled
				v.restore(t, replica)
				all(func(w *wire) { w.cut(0) })
				for _, n := range nodes { // what a store that is closed has held there lapses
					exact, reported = exact && len(n.closed) == 0, reported && len(n.closed) == 0
				}
				exact = exact && alone() && time.Duration(v.now-replicated)*time.Microsecond < renewEvery
			case "sleep":
				asleep = true
				pass(4 * lapse)
				asleep = false
			case "move":
				n.old = append(n.old, w)
				n.store = open(n, rapid.SampledFrom([]string{"rl:a:", "rl:c:"}).Draw(t, "to"))
			case "close":
				if len(n.old) == 0 {
					return
				}
				w, n.old = n.old[0], n.old[1:]
				w.connect()
				w.run(len(w.line), true)
				w.auto = true
				_ = w.store.Close()
				n.closed = append(n.closed, w)
				for _, account := range w.store.ledger.all { // what it could not tell lapses
					reported, exact = reported && account.isIdle(), exact && account.isIdle()
				}
			}
		}
		waiting := 0 // requests
		meanwhile = func(n *node) {
			if waiting++; waiting < 3 {
				for range rapid.SampledFrom([]int{0, 0, 0, 0, 1, 2, 3}).Draw(t, "meanwhile") {
					step(n, rapid.SampledFrom([]string{"begin", "end", "end", "take", "look", "serve", "wait", "late", "lose", "connect", "cut", "error"}).Draw(t, "what"))
				}
			}
			waiting--
		}
		for range rapid.IntRange(5, 40).Draw(t, "steps") {
			n := rapid.SampledFrom(nodes).Draw(t, "process")
			for _, old := range n.old {
				if rapid.IntRange(0, 9).Draw(t, "old") > 0 { // its server goes on
					old.connect()
					old.run(len(old.line), true)
				}
				exact = exact && len(old.line)+len(old.unsent) == 0 // or the new store may tell of what is still to be run
			}
			what := rapid.SampledFrom([]string{
				"begin", "begin", "begin", "end", "end", "end", "take", "look", "serve", "serve", "pass", "pass", "late", "in time", "cut", "lose", "lose", "connect", "connect", "connect", "error", "down", "up", "scripts", "data", "replicate", "replicate", "fail over", "sleep", "move", "close",
			}).Draw(t, "what")
			step(n, what)
			for _, n := range nodes {
				for _, w := range n.closed {
					w.store.reports.sendDue()
				}
			}
			all(func(w *wire) { // as soon as they are due
				if rapid.Bool().Draw(t, "report") {
					w.store.reports.sendDue()
				}
			})
			seen[what]++
		}
		waiting = 3 // nothing happens meanwhile any more
		all(func(w *wire) {
			w.down, w.late = false, false
			w.connect()
		})
		total, most := [2]int64{}, int64(0)
		for _, n := range nodes {
			for _, of := range n.running {
				of.held.Settle(0, 0)
			}
			for key := range keys {
				total[key] += n.charged[key]
				most = max(most, total[key])
			}
		}
		exact = exact && most <= limit.Size // or what is charged may not have fit
		for range 20 {
			all(func(w *wire) { w.run(len(w.line), true) })
			pass(resendEvery)
		}
		for range 2 {
			for _, n := range nodes {
				for key := range keys {
					c, held := bucketOf(key), new(Held)
					c.Hold = true
					n.store.store.denyCache = newDenyCache(denySlots) // it is called, although it may be full
					d, err := n.store.store.Take(context.Background(), Request{Buckets: []Bucket{c}, Held: held}, nil)
					if err != nil || d[0].By != DecidedByRedis {
						t.Fatalf("%+v, %v", d, err)
					}
					held.Settle(0, 0)
					n.store.run(len(n.store.line), true)
				}
			}
		}
		for _, n := range nodes {
			v.client, v.keys = n.store.store.client, n.store.store.keys
			for key := range keys {
				l, err := n.store.store.Peek(context.Background(), bucketOf(key))
				if err != nil || l.Held != 0 && reported || exact && (l.Units > total[key] || len(nodes) == 1 && l.Units < total[key]) || l.Units < min(n.charged[key], limit.Size) {
					t.Fatalf("%+v, %v, want %d of %d units, exactly %t", l, err, n.charged[key], total[key], exact)
				}
			}
		}
	})
	t.Log(seen)
}
