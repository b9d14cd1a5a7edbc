package wait

import (
	"context"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// slots are a few, for which requests wait in the queue of an instance.
type slots struct {
	*sharedSlots
	queues  *Queues
	most    time.Duration // for which requests wait
	waiting int64         // as many as may
	unfair  bool          // whether clients do not take turns

	displaced atomic.Int64
}

// sharedSlots are those that several instances may share.
type sharedSlots struct {
	mu   sync.Mutex
	free int
}

// newSlots returns n slots, for which requests wait at most so long.
func newSlots(n int, most time.Duration) *slots {
	return &slots{sharedSlots: &sharedSlots{free: n}, queues: New(), most: most, waiting: 1000}
}

// take waits for a slot as a request of ctx, and reports whether it got one.
func (p *slots) take(ctx context.Context) bool { return p.takeAs(ctx, "") }

// takeAs is take of a client.
func (p *slots) takeAs(ctx context.Context, client string) (got bool) {
	return p.takeSome(ctx, client, 1)
}

// takeSome is takeAs of a request that needs n slots at once.
func (p *slots) takeSome(ctx context.Context, client string, n int) (got bool) {
	ask := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if got = p.free >= n; got {
			p.free -= n
		}
	}
	t := Waiting
	if !p.queues.HasWaiters(Key{}) {
		t = Granted
		ask()
	}
	if !got {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody).WithContext(ctx)
		fairBy := client
		if p.unfair {
			fairBy = ""
		}
		w := p.queues.NewWaiter(r, Key{}, fairBy, time.Now().Add(p.most))
		if w.Join(t, p.waiting) {
			for !got && w.Next() {
				ask()
			}
			if _, isDisplaced := w.Leave(got); isDisplaced {
				p.displaced.Add(1)
			}
		}
	}
	if got {
		p.count(client, n, true)
	}
	return got
}

// count has n slots count as ones that a client has, or not any more.
func (p *slots) count(client string, n int, counts bool) {
	s := p.queues.NewSlots(Key{}, client, int64(n), false)
	s.counted = !counts
	s.Count(counts)
}

// leaveAs frees a slot that a client has taken.
func (p *slots) leaveAs(client string) {
	p.count(client, 1, false)
	p.leave(true)
}

// leave frees a slot, and tells the queue unless another instance does it.
func (p *slots) leave(told bool) {
	p.mu.Lock()
	p.free++
	p.mu.Unlock()
	if told {
		p.queues.Freed(Key{}, 1, 0)
	}
}

// serve has clients with a request each at a time use slots for some time each, until end. It
// returns how many were served.
func (p *slots) serve(t *testing.T, clients int, hold time.Duration, end time.Time) (served int) {
	var all sync.WaitGroup
	var mu sync.Mutex
	for i := range clients {
		all.Go(func() {
			for time.Now().Before(end) {
				client := string(rune('a' + i))
				if !p.takeAs(t.Context(), client) {
					continue
				}
				time.Sleep(hold)
				p.mu.Lock()
				p.free++
				p.mu.Unlock()
				p.count(client, 1, false)
				p.queues.Freed(Key{}, 1, hold)
				mu.Lock()
				served++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return served
}

// TestQueueInOrder guards that those in a queue get their slots in the order in which they came,
// each as soon as one is free.
func TestQueueInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const hold, few, many = 7 * time.Millisecond, 3, 200 // none ends when the queue is polled
		p := newSlots(few, time.Hour)
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var all sync.WaitGroup
		for i := range many {
			all.Go(func() {
				if !p.take(t.Context()) {
					t.Errorf("%d has no slot", i)
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				time.Sleep(hold)
				p.leaveAs("")
			})
			synctest.Wait()
		}
		all.Wait()
		for i := range many / few {
			if slices.Sort(order[i*few : (i+1)*few]); order[i*few] != i*few || order[i*few+few-1] != i*few+few-1 {
				t.Fatalf("order %v", order)
			}
		}
		if took, want := time.Since(start), (many+few-1)/few*hold; took != want {
			t.Errorf("took %v, want %v", took, want)
		}
		p.checkEmpty(t)
	})
}

// checkNoneLost checks that no slot is free while anybody waits.
func (p *slots) checkNoneLost(t *testing.T) {
	t.Helper()
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.queues.Len(); p.free > 0 && n > 0 {
		t.Fatalf("%d slots are free, and %d wait", p.free, n)
	}
}

// checkEmpty checks that nothing is left of a queue.
func (p *slots) checkEmpty(t *testing.T) {
	t.Helper()
	synctest.Wait()
	if s := p.queues; len(s.byKey) > 0 || s.open.Load() != 0 || s.Len() != 0 || len(s.byLength) != 0 {
		t.Errorf("left: %d queues, %d open, %d waiting, longest %d", len(s.byKey), s.open.Load(), s.Len(), len(s.byLength)-1)
	}
}

// TestQueueEnds guards how a wait ends without a slot: when its time is over, when the queue is
// full, and when the client leaves, which gives its turn to the next one; and that a slot of
// which nobody tells is found anyway.
func TestQueueEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newSlots(0, 2*time.Second)
		start := time.Now()
		if p.take(t.Context()) || time.Since(start) != 2*time.Second {
			t.Errorf("ended after %v, want 2s without a slot", time.Since(start))
		}
		p.waiting = 2
		var all sync.WaitGroup
		ctx, leave := context.WithCancel(t.Context())
		all.Go(func() {
			if p.take(ctx) {
				t.Error("one that has left got a slot")
			}
		})
		synctest.Wait()
		var got bool
		all.Go(func() { got = p.take(t.Context()) })
		synctest.Wait()
		start = time.Now()
		if p.take(t.Context()) || time.Since(start) != 0 {
			t.Errorf("the line is full, and a third one waited %v", time.Since(start))
		}
		leave()
		p.leave(true)
		all.Wait()
		if !got || time.Since(start) != 0 {
			t.Errorf("the second one got a slot: %t, after %v", got, time.Since(start))
		}
		all.Go(func() { got = p.take(t.Context()) })
		synctest.Wait()
		start = time.Now()
		p.leave(false)
		if all.Wait(); !got || time.Since(start) > 2*pollEvery {
			t.Errorf("a slot that another instance freed was got: %t, after %v", got, time.Since(start))
		}
		p.checkEmpty(t)
	})
}

// TestQueueIsPolled guards that slots of which nobody tells are found all at once, also
// where so many come and leave that none waits for long after those before it have left.
func TestQueueIsPolled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, every := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
			for _, most := range []time.Duration{20 * time.Millisecond, 250 * time.Millisecond, time.Second, 1010 * time.Millisecond} {
				p := newSlots(0, most)
				p.waiting = 1e6
				var all sync.WaitGroup
				var got []time.Duration
				var start time.Time
				come := func(n int) {
					for range n {
						all.Go(func() {
							if p.take(t.Context()) {
								p.mu.Lock()
								got = append(got, time.Since(start))
								p.mu.Unlock()
							}
						})
						time.Sleep(every)
					}
				}
				come(int(3 * time.Second / every))
				start = time.Now()
				for range 5 {
					p.leave(false)
				}
				come(max(10, int(time.Second/every)))
				all.Wait()
				slices.Sort(got)
				// Where nobody waits when they are freed, those who come find them.
				if bound := 2*pollEvery + 5*every; len(got) < 5 || got[4] > bound {
					t.Errorf("one each %v that waits %v: got slots after %v, want 5 within %v", every, most, got, bound)
				}
				p.checkEmpty(t)
			}
		}
	})
}

// TestQueueLosesNoSlot guards, with random requests of a few clients that come, leave, displace one
// another and free slots at once, that no slot is free while any request waits for one in its only
// instance, and that of one or more nothing is left; also if waits are over at the moment at which
// a slot is freed, and another request finds it first.
func TestQueueLosesNoSlot(t *testing.T) {
	for _, tc := range []struct {
		instances int
		most      time.Duration // that a request waits
	}{{1, time.Hour}, {1, 2 * time.Millisecond}, {3, 2 * time.Millisecond}, {3, 10 * time.Millisecond}} {
		synctest.Test(t, func(t *testing.T) {
			const free = 5
			shared, all := &sharedSlots{free: free}, make([]*slots, tc.instances)
			for i := range all {
				all[i] = newSlots(0, tc.most)
				all[i].sharedSlots, all[i].waiting = shared, 6
			}
			check := func() {
				if tc.instances == 1 {
					all[0].checkNoneLost(t)
				}
			}
			var requests sync.WaitGroup
			for range 2000 {
				for range 1 + rand.IntN(6*tc.instances) {
					p, client := all[rand.IntN(len(all))], string(rune('a'+rand.IntN(9)*rand.IntN(2)))
					requests.Go(func() {
						ctx := t.Context()
						if rand.IntN(3) == 0 {
							var cancel func()
							ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(20))*time.Millisecond)
							defer cancel()
						}
						start := time.Now()
						got := p.takeAs(ctx, client)
						if waited := time.Since(start); waited > tc.most {
							t.Errorf("waited %v, want at most %v", waited, tc.most)
						}
						if got {
							time.Sleep(time.Duration(1+rand.IntN(3)) * time.Millisecond)
							p.leaveAs(client)
						}
					})
				}
				check()
				time.Sleep(time.Duration(rand.IntN(4)) * time.Millisecond)
				check()
			}
			requests.Wait()
			for _, p := range all {
				if p.checkEmpty(t); p.displaced.Load() == 0 || len(p.queues.slots) > 0 {
					t.Errorf("%d requests displaced, and slots %v are counted", p.displaced.Load(), p.queues.slots)
				}
			}
			if shared.free != free {
				t.Errorf("%d slots at the end, want %d", shared.free, free)
			}
		})
	}
}

// TestClientsTakeTurns guards what a client with one request at a time gets at a limit of one slot
// beside another one that has many: every second slot, and none of its requests is denied,
// however few may wait. Without fair_by it waits behind all of the others, or is denied.
func TestClientsTakeTurns(t *testing.T) {
	const hold, slots = 310 * time.Millisecond, 300
	for _, tc := range []struct {
		name       string
		many       int
		maxWaiting int64
		fair       bool
		min, max   int // requests of the light client that are served
		denied     bool
	}{
		{"20 requests", 20, 1000, true, slots/2 - 1, slots/2 + 1, false},
		{"30 requests", 30, 1000, true, slots/2 - 1, slots/2 + 1, false},
		{"few may wait", 30, 15, true, slots/2 - 1, slots/2 + 1, false},
		{"few may wait for all", 30, 15, false, 0, slots / 10, true},
		{"in the order in which they came", 12, 1000, false, 0, slots / 12, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newSlots(1, 5*time.Second)
				if p.waiting = tc.maxWaiting; !tc.fair {
					p.unfair = true
				}
				end := time.Now().Add(slots * hold)
				var all sync.WaitGroup
				use := func(client string, backoff time.Duration) (served, denied int) {
					for time.Now().Before(end) {
						if !p.takeAs(t.Context(), client) {
							denied++
							time.Sleep(backoff)
							continue
						}
						served++
						time.Sleep(hold)
						p.leaveAs(client)
					}
					return served, denied
				}
				for range tc.many {
					all.Go(func() { use("script", 50*time.Millisecond) })
				}
				served, denied := use("light", time.Second)
				all.Wait()
				if served < tc.min || served > tc.max || (denied > 0) != tc.denied {
					t.Errorf("served %d and denied %d, want %d to %d, any denied: %t", served, denied, tc.min, tc.max, tc.denied)
				}
				if n := p.displaced.Load(); (n > 0) != (tc.fair && tc.maxWaiting < 20) {
					t.Errorf("%d were displaced", n)
				}
				p.checkEmpty(t)
			})
		})
	}
}

// arrivals are requests that have come one after the other, of clients named by their first letters.
type arrivals struct {
	sync.WaitGroup
	mu     sync.Mutex
	served []string
}

// come has requests wait for slots, and notes those that get one.
func (a *arrivals) come(t *testing.T, p *slots, requests ...string) {
	for _, r := range requests {
		a.Go(func() {
			if p.takeAs(t.Context(), r[:1]) {
				a.mu.Lock()
				a.served = append(a.served, r)
				a.mu.Unlock()
			}
		})
		synctest.Wait()
	}
}

// TestClientsShareQueue guards how slots are shared among clients: in turns, however many requests
// each has; the requests of one in the order in which they came, also after polls that found no
// slot; and that the client which was served last goes behind all that come until the next one is.
func TestClientsShareQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, a := newSlots(0, time.Hour), new(arrivals)
		free := func(n int) {
			for range n {
				p.leave(true)
				synctest.Wait()
			}
		}
		a.come(t, p, "a1", "a2", "a3", "b1", "c1", "c2")
		if got, want := p.queues.State(), (telemetry.Waiting{Requests: 6, Clients: 3, Longest: 3}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		time.Sleep(10*pollEvery + 1) // which find nothing
		free(3)
		a.come(t, p, "b2", "d1")
		time.Sleep(10 * pollEvery)
		free(5)
		a.Wait()
		if got, want := strings.Join(a.served, " "), "a1 b1 c1 a2 b2 d1 c2 a3"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		p.checkEmpty(t)
	})
}

// TestNoClientHasMoreThanHalf guards that a client which has half of the slots gets another one only
// when no other client waits, so that slow requests of one leave as many slots to the others.
func TestNoClientHasMoreThanHalf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, a := newSlots(4, time.Hour), new(arrivals)
		a.come(t, p, "a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2", "b3", "c1")
		for _, client := range []string{"a", "a", "a", "c", "b", "b"} {
			p.leaveAs(client)
			synctest.Wait()
		}
		a.Wait()
		if got, want := strings.Join(a.served, " "), "a1 a2 a3 a4 b1 c1 a5 b2 b3 a6"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		for range 3 {
			p.leaveAs("a")
		}
		p.leaveAs("b")
		p.checkEmpty(t)
		if left := p.queues.slots; len(left) > 0 {
			t.Errorf("nobody has a slot, and %v are counted", left)
		}
	})
}

// TestSlowClientHasHalf guards that a client whose requests take 30 times as long as those of three
// others has half of the slots in the long run while they wait, beyond which a request may take it by
// one poll or by what it costs: also where requests cost several slots, and instances share them.
func TestSlowClientHasHalf(t *testing.T) {
	const free, run = 24, 2 * time.Minute
	for _, tc := range []struct {
		instances, cost int // at most; it is random
		most            float64
	}{{1, 1, 0.55}, {1, 3, 0.6}, {3, 1, 0.6}, {3, 3, 0.68}} {
		synctest.Test(t, func(t *testing.T) {
			shared, end := &sharedSlots{free: free}, time.Now().Add(run)
			var mu sync.Mutex
			used := make(map[string]time.Duration)
			var all sync.WaitGroup
			for range tc.instances {
				p := newSlots(0, time.Hour)
				p.sharedSlots = shared
				for i := range 4 * free {
					client, hold := string(rune('a'+i%4)), 100*time.Millisecond
					if client == "a" {
						hold *= 30
					}
					all.Go(func() {
						for time.Now().Before(end) {
							n, took := 1+rand.IntN(tc.cost), hold/2+rand.N(hold)
							p.takeSome(t.Context(), client, n)
							time.Sleep(took)
							mu.Lock()
							used[client] += time.Duration(n) * took
							mu.Unlock()
							p.mu.Lock()
							p.free += n
							p.mu.Unlock()
							p.count(client, n, false)
							p.queues.Freed(Key{}, int64(n), took)
						}
					})
				}
			}
			all.Wait()
			sum := used["a"] + used["b"] + used["c"] + used["d"]
			if part := used["a"].Seconds() / sum.Seconds(); part < 0.4 || part > tc.most {
				t.Errorf("%d instances, costs up to %d: it has %.2f of the slots' time, want 0.4 to %.2f", tc.instances, tc.cost, part, tc.most)
			}
		})
	}
}

// TestInstancesShareSlots guards that of instances whose clients wait for the same slots, each has a
// part of them, however many clients it has: at least half of what the average has in two minutes;
// and how much of the slots is used, also by one instance alone.
func TestInstancesShareSlots(t *testing.T) {
	for _, tc := range []struct {
		slots, instances int
		hold             time.Duration
		use              float64
	}{
		{1, 1, 300 * time.Millisecond, 0.96},
		{1, 2, 300 * time.Millisecond, 0.93},
		{1, 3, 2 * time.Second, 0.93},
		{3, 2, 500 * time.Millisecond, 0.95},
		{3, 3, 50 * time.Millisecond, 0.95},
		{20, 3, 500 * time.Millisecond, 0.95},
	} {
		synctest.Test(t, func(t *testing.T) {
			const run = 2 * time.Minute
			pool, end := &sharedSlots{free: tc.slots}, time.Now().Add(run)
			served := make([]int, tc.instances)
			var all sync.WaitGroup
			for i := range served {
				p := newSlots(0, time.Hour)
				p.sharedSlots = pool
				all.Go(func() {
					served[i] = p.serve(t, (2+tc.slots)*(1+3*i), tc.hold, end)
					p.checkEmpty(t)
				})
			}
			all.Wait()
			sum := 0
			for _, n := range served {
				sum += n
			}
			use := float64(sum) * tc.hold.Seconds() / run.Seconds() / float64(tc.slots)
			if least := slices.Min(served); 2*least*tc.instances < sum || use < tc.use {
				t.Errorf("%d slots for %v: %v were served, and %.3f of the slots used, want %v", tc.slots, tc.hold, served, use, tc.use)
			}
		})
	}
}

// TestSlotsOfCostlyRequestAreLeft guards that a queue leaves a slot to other instances also after
// a request that had so many for so long that their product is more than a time can be.
func TestSlotsOfCostlyRequestAreLeft(t *testing.T) {
	for slots, used := range map[int64]time.Duration{1: 2 * time.Second, 1 << 20: time.Millisecond, 1 << 49: 2 * time.Hour} {
		l := &queue{shareAfter: shareAfter}
		l.ring.PushBack(nil)
		if !l.leaves(slots, used) {
			t.Errorf("%d slots for %v: none was left", slots, used)
		}
	}
}

// TestFreedSlotsAreUsed guards that several slots which are freed at once let as many requests in
// at once, although only one of them is told.
func TestFreedSlotsAreUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newSlots(0, time.Hour)
		var all sync.WaitGroup
		start := time.Now()
		for range 5 {
			all.Go(func() { p.take(t.Context()) })
		}
		synctest.Wait()
		p.mu.Lock()
		p.free = 5
		p.mu.Unlock()
		p.queues.Freed(Key{}, 5, 0)
		if all.Wait(); time.Since(start) != 0 {
			t.Errorf("the last one waited %v", time.Since(start))
		}
		p.checkEmpty(t)
	})
}
