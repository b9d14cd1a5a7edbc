package rule

import (
	"context"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
)

// slots are a few, for which requests wait in a queue.
type slots struct {
	mu    sync.Mutex
	free  int
	limit *Limit
}

// newSlots returns n slots, for which requests wait at most so long.
func newSlots(n int, most time.Duration) *slots {
	l := &Limit{Waiting: &Waiters{Queues: NewQueues()}, Settlement: Settlement{InProgress: true}}
	l.MaxDelay, l.MaxWaiting = adminjson.Seconds(most), 1000
	return &slots{free: n, limit: l}
}

// take waits for a slot as a request of ctx, and reports whether it got one.
func (p *slots) take(ctx context.Context) (got bool) {
	e := &Entry{Bucket: &Bucket{Limit: p.limit}}
	ask := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if got = p.free > 0; got {
			p.free--
		}
	}
	t := waiting
	if !p.limit.Waiting.hasWaiters(e.queue(0)) {
		t = granted
		ask()
	}
	if !got {
		q := &Request{http: httptest.NewRequest(http.MethodGet, "/", http.NoBody).WithContext(ctx)}
		w := q.join(e, 0, time.Now(), t)
		for !got && w.nextTurn() {
			ask()
		}
		w.leave(got, false, new(outcome.Outcome))
	}
	return got
}

// leave frees a slot, and tells the queue unless another instance does it.
func (p *slots) leave(told bool) {
	p.mu.Lock()
	p.free++
	p.mu.Unlock()
	if told {
		p.limit.Waiting.wake(queueKey{})
	}
}

// TestQueueInOrder guards that those in a queue get their slots in the order in which they came,
// each as soon as one is free.
func TestQueueInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const hold, few, many = 10 * time.Millisecond, 3, 200
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
				p.leave(true)
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
	if n := p.limit.Waiting.Len(); p.free > 0 && n > 0 {
		t.Fatalf("%d slots are free, and %d wait", p.free, n)
	}
}

// checkEmpty checks that nothing is left of a queue.
func (p *slots) checkEmpty(t *testing.T) {
	t.Helper()
	if s := p.limit.Waiting; len(s.byKey) > 0 || s.open.Load() != 0 || s.Len() != 0 {
		t.Errorf("left: %d queues, %d open, %d waiting", len(s.byKey), s.open.Load(), s.Len())
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
		p.limit.MaxWaiting = 2
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
		if all.Wait(); !got || time.Since(start) > pollEvery {
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
				p.limit.MaxWaiting = 1e6
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
				if bound := pollEvery + 5*every; len(got) < 5 || got[4] > bound {
					t.Errorf("one each %v that waits %v: got slots after %v, want 5 within %v", every, most, got, bound)
				}
				p.checkEmpty(t)
			}
		}
	})
}

// TestQueueLosesNoSlot guards, with random requests that come, leave and free slots at once,
// that no slot is free while anybody waits for one.
func TestQueueLosesNoSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newSlots(5, time.Hour)
		var all sync.WaitGroup
		for range 2000 {
			for range 1 + rand.IntN(4) {
				all.Go(func() {
					ctx := t.Context()
					if rand.IntN(3) == 0 {
						var cancel func()
						ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(20))*time.Millisecond)
						defer cancel()
					}
					if p.take(ctx) {
						time.Sleep(time.Duration(1+rand.IntN(3)) * time.Millisecond)
						p.leave(true)
					}
				})
			}
			p.checkNoneLost(t)
			time.Sleep(time.Duration(rand.IntN(4)) * time.Millisecond)
			p.checkNoneLost(t)
		}
		all.Wait()
		p.checkEmpty(t)
		if p.free != 5 {
			t.Errorf("%d slots at the end", p.free)
		}
	})
}
