package limiter

import (
	"context"
	"math"
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
	store *Redis
	v     *clockedRedis
	sha   string
	line  []*redisscript.Call // sent and not run
	late  bool                // whether the server does not answer in time
	down  bool                // whether there is no connection
	pass  func()              // lets a moment pass
	auto  bool                // whether the server runs each call at once
}

// run has the server run the next n calls, of which answers may be lost.
func (w *wire) run(n int, answers bool) {
	for ; n > 0 && len(w.line) > 0; n-- {
		c := w.line[0]
		w.line = w.line[1:]
		w.pass() // no receipt is given twice
		reply, err := w.v.admin.EvalSha(context.Background(), w.sha, c.Keys, c.Arg).Int64Slice()
		if err != nil {
			panic(err)
		}
		if c.Done != nil && answers {
			c.Reply = reply
			c.Done(nil)
		} else if c.Done != nil {
			c.Done(errLost)
		}
	}
}

// cut breaks the connection after the server has run n of the calls on it, and answered none.
// There is another one then.
func (w *wire) cut(n int) {
	w.run(n, false)
	lost := w.line
	w.line = nil
	for _, c := range lost {
		if c.Done != nil {
			c.Done(errLost)
		}
	}
	w.store.fallback.restarted(nil)
}

// send has c sent.
func (w *wire) send(c *redisscript.Call) {
	w.store.sending(nil, []*redisscript.Call{c})
	sent := &redisscript.Call{Keys: []string{strings.Clone(c.Keys[0])}, Arg: strings.Clone(c.Arg)}
	if c.Done != nil {
		sent.Done = func(err error) {
			c.Reply = sent.Reply
			c.Done(err)
		}
	}
	w.line = append(w.line, sent)
}

// Do implements client: it has the server run all calls up to this one, or gives up.
func (w *wire) Do(_ redisscript.Deadline, c *redisscript.Call) (*redisscript.Server, error) {
	if w.down {
		return nil, errNotSent
	}
	w.send(c)
	if w.late {
		return nil, errLost
	}
	last := w.line[len(w.line)-1]
	last.Done = func(error) { c.Reply = last.Reply }
	w.run(len(w.line), true)
	return nil, nil
}

// Submit implements client.
func (w *wire) Submit(_ redisscript.Deadline, c *redisscript.Call) error {
	if w.down {
		return errNotSent
	}
	w.send(c)
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

// TestSettledOnceInHistories guards that one process charges each unit once, by random histories
// of requests that hold their cost, hold nothing, or are charged at once, and of servers that
// answer late or not in time, before and after they have run what they were sent; connections
// that break, outages, data and scripts that are lost, clocks that stand, costs of any size, and
// buckets that move to other places and back, with the old stores closed or not. With two processes, of which one
// may hear nothing for long, nothing is charged twice, and what each was charged is not lost.
func TestSettledOnceInHistories(t *testing.T) {
	t.Parallel()
	findNotSent(t)
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	checkTraces(t, 6, func(t *rapid.T) {
		v.flush(t)
		limit := rapid.SampledFrom([]Limit{
			{Size: 1000, DripInterval: 100 * time.Hour, DripSize: 1},
			FixedWindow(1_000_000, 10_000*time.Hour), SlidingWindow(1_000_000, 10_000*time.Hour), SlidingLog(5000, 10_000*time.Hour),
		}).Draw(t, "limit")
		b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
		huge := rapid.IntRange(0, 3).Draw(t, "huge") == 0 // whether the bucket may become full
		amount := func(least int64) int64 {
			if huge && rapid.IntRange(0, 3).Draw(t, "much") == 0 {
				return rapid.SampledFrom([]int64{limit.Size / 2, limit.Size, 2*limit.Size - 1, MaxUnits, 1 << 53, 1 << 62, math.MaxInt64}).Draw(t, "amount")
			}
			return rapid.Int64Range(least, 3).Draw(t, "units")
		}
		type node struct {
			memory  *Memory
			store   *wire
			old     []*wire
			closed  []*wire
			awake   int64 // what its clock shows
			charged int64
			running []*Held
		}
		asleep := false
		nodes := make([]*node, rapid.IntRange(1, 2).Draw(t, "processes"))
		open := func(n *node, location string) *wire {
			r := newRedisWithoutClient(RedisOptions{KeyPrefix: location, Timeout: 50 * time.Millisecond, Fallback: n.memory})
			r.location, r.fallback.location, r.ledger.running, r.reports.running = location, location, true, true
			c, began, awake := new(clock), v.now, n.awake
			r.clock = func() time.Duration {
				return c.show(time.Duration(n.awake-awake)*time.Microsecond, time.Duration(v.now-began)*time.Microsecond)
			}
			w := &wire{store: r, v: v, sha: sha, pass: func() { v.advance(t, time.Microsecond) }}
			r.client = w
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
		exact, reported := len(nodes) == 1, true
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
		for range rapid.IntRange(5, 40).Draw(t, "steps") {
			n := rapid.SampledFrom(nodes).Draw(t, "process")
			w := n.store
			for _, old := range n.old {
				if rapid.IntRange(0, 9).Draw(t, "old") > 0 { // its server goes on
					old.run(len(old.line), true)
				}
				exact = exact && len(old.line) == 0 // or the new store may tell of what is still to be run
			}
			what := rapid.SampledFrom([]string{
				"begin", "begin", "begin", "end", "end", "end", "take", "look", "serve", "serve", "pass", "pass", "late", "in time", "cut", "error", "down", "up", "scripts", "data", "sleep", "move", "close",
			}).Draw(t, "what")
			switch what {
			case "begin", "take", "look":
				c := b
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
					continue
				}
				if what == "take" {
					n.charged += c.Cost
					exact = exact && (!w.late || len(n.old) == 0) // another connection may tell of it before it is run
				} else {
					n.running = append(n.running, req.Held)
				}
			case "end":
				if len(n.running) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(n.running)-1).Draw(t, "which")
				charge := amount(0)
				n.running[i].Settle(0, charge)
				n.charged += min(charge, 2*limit.Size)
				n.running = append(n.running[:i], n.running[i+1:]...)
			case "serve":
				w.run(rapid.IntRange(1, 3).Draw(t, "calls"), true)
			case "pass":
				pass(rapid.SampledFrom([]time.Duration{resendEvery, time.Second, renewEvery}).Draw(t, "time"))
			case "late", "in time":
				w.late = what == "late"
			case "cut":
				w.cut(rapid.IntRange(0, len(w.line)).Draw(t, "run"))
			case "error": // of a call that the server has run, at least in part
				w.run(1, false)
			case "down":
				w.cut(rapid.IntRange(0, len(w.line)).Draw(t, "run"))
				w.down = true
			case "up":
				if w.down {
					w.down = false
					w.store.fallback.restarted(nil)
				}
			case "scripts":
				w.store.fallback.restarted(nil)
			case "data":
				at := v.now
				v.flush(t)
				v.at(t, at+1)
				all(func(w *wire) { w.cut(0) })
				exact = exact && len(n.old) == 0
			case "sleep":
				asleep = true
				pass(4 * lapse)
				asleep = false
			case "move":
				n.old = append(n.old, w)
				n.store = open(n, rapid.SampledFrom([]string{"rl:a:", "rl:c:"}).Draw(t, "to"))
			case "close":
				if len(n.old) == 0 {
					continue
				}
				w, n.old = n.old[0], n.old[1:]
				w.run(len(w.line), true)
				w.auto = true
				_ = w.store.Close()
				n.closed = append(n.closed, w)
				for _, account := range w.store.ledger.all { // what it could not tell lapses
					reported, exact = reported && account.isIdle(), exact && account.isIdle()
				}
			}
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
		total := int64(0)
		all(func(w *wire) { w.down, w.late = false, false })
		for _, n := range nodes {
			for _, h := range n.running {
				h.Settle(0, 0)
			}
			total += n.charged
		}
		exact = exact && total <= limit.Size // or what is charged may not have fit
		for range 20 {
			all(func(w *wire) { w.run(len(w.line), true) })
			pass(resendEvery)
		}
		for range 2 {
			for _, n := range nodes {
				c, held := b, new(Held)
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
		for _, n := range nodes {
			v.client, v.keys = n.store.store.client, n.store.store.keys
			l, err := n.store.store.Peek(context.Background(), b)
			if err != nil || l.Held != 0 && reported || exact && l.Units != total || l.Units < min(n.charged, limit.Size) {
				t.Fatalf("%+v, %v, want %d of %d units, exactly %t", l, err, n.charged, total, exact)
			}
		}
	})
	t.Log(seen)
}
