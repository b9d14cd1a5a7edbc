package rule

import (
	"context"
	"fmt"
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

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// every is how often a unit drips from the buckets of these tests.
const every = 100 * time.Millisecond

// rates are limits on a rate, for whose units requests wait.
type rates struct {
	store    limiter.Store
	buckets  []*Bucket
	counters *telemetry.Counters

	mu     sync.Mutex
	passed [][]time.Time // when a unit did, for each limit
}

// newRates returns limits with buckets of these sizes, for which requests wait 2 s at most.
func newRates(sizes ...int64) *rates {
	r := &rates{store: limiter.NewMemory(), counters: new(telemetry.Counters), passed: make([][]time.Time, len(sizes))}
	for i, size := range sizes {
		l := &Limit{Path: string(rune('a' + i)), Options: Options{MaxDelay: option.Seconds(2 * time.Second), MaxWaiting: 1000}, Waiting: &Waiters{Queues: wait.New()}}
		l.Turns, _ = key.Parse("fair_by", "{http.request.header.X-Client}", clientip.Prefixes{})
		r.buckets = append(r.buckets, &Bucket{
			Limit: l, Path: l.Path, Name: l.Path, Policy: &Policy{Counters: r.counters},
			Constant: &limiter.Bucket{Limit: limiter.Limit{Size: size, DripInterval: every, DripSize: 1}},
		})
	}
	return r
}

// take has a request pass the limits of these indexes, and reports whether it did.
func (r *rates) take(ctx context.Context, t *testing.T, client string, cost int64, limits ...int) (passes bool, retry time.Duration) {
	q := &Request{http: httptest.NewRequest(http.MethodGet, "/", http.NoBody).WithContext(ctx), mayExceed: true}
	q.http.Header.Set("X-Client", client)
	q.replacer = caddyhttp.NewTestReplacer(q.http)
	for _, i := range limits {
		e := Entry{Bucket: r.buckets[i], Query: *r.buckets[i].Constant}
		e.Query.Name, e.Query.Key, e.Query.Cost = e.Name, "all", cost
		e.addExtra()
		q.entries = append(q.entries, e)
	}
	start := time.Now()
	if err := q.Decide(r.store, How{Accounting: Atomic, Outcome: new(outcome.Outcome), Waits: new(telemetry.Process)}); err != nil {
		t.Error(err)
	}
	if waited := time.Since(start); waited > 2*time.Second {
		t.Errorf("waited %v", waited)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if passes = q.firstDenied() < 0; !passes && !q.decided.Equal(time.Now()) {
		t.Errorf("denied %v after its times count", time.Since(q.decided))
	}
	for i := range q.entries {
		e := &q.entries[i]
		e.endWait()
		retry = max(retry, e.Decision.RetryAfter)
		for n := int64(0); passes && n < cost; n++ {
			r.passed[limits[i]] = append(r.passed[limits[i]], time.Now())
		}
	}
	return passes, retry
}

// check checks that in no time more units have passed than each limit admits for which all requests
// waited alone, and that nothing is left.
func (r *rates) check(t *testing.T, alone ...int) {
	t.Helper()
	for _, b := range r.buckets {
		synctest.Wait()
		if s := b.Limit.Waiting.State(); s != (telemetry.Waiting{}) {
			t.Errorf("left: %+v", s)
		}
	}
	for _, i := range alone {
		b := r.buckets[i]
		var level time.Duration // the time in which it drips
		size := time.Duration(b.Constant.Limit.Size) * every
		for j, at := range r.passed[i] {
			if j > 0 {
				level = max(level-at.Sub(r.passed[i][j-1]), 0)
			}
			if level += every; level > size+time.Microsecond { // to which levels are rounded
				t.Fatalf("after unit %d, bucket %d has %v more than its size", j, i, level-size)
			}
		}
	}
}

// TestClientsTakeTurnsAtRate guards what a client with one request at a time gets of a rate beside
// another one that has many: none of its requests is denied or waits for more than two others,
// although the bucket is full whenever it comes. Without fair_by most are denied. As many pass in
// any time as the rate admits.
func TestClientsTakeTurnsAtRate(t *testing.T) {
	for _, tc := range []struct {
		name       string
		size       int64
		many       int
		maxWaiting int64
		fair       bool
		denied     bool
	}{
		{"20 requests", 1, 20, 1000, true, false},
		{"30 requests", 1, 30, 1000, true, false},
		{"60 requests, size 10", 10, 60, 1000, true, false},
		{"few may wait", 1, 30, 15, true, false},
		{"few may wait, size 10", 10, 30, 5, true, false},
		{"few may wait for all", 1, 30, 15, false, true},
		{"in the order in which they came", 1, 30, 1000, false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRates(tc.size)
				l := r.buckets[0].Limit
				if l.MaxWaiting = tc.maxWaiting; !tc.fair {
					l.Turns = nil
				}
				const run = 2 * time.Minute
				end := time.Now().Add(run)
				var waits []time.Duration
				use := func(client string, pause, backoff time.Duration) (denied int) {
					for time.Now().Before(end) {
						start := time.Now()
						if passes, _ := r.take(t.Context(), t, client, 1, 0); passes {
							if client == "light" {
								waits = append(waits, time.Since(start))
							}
							time.Sleep(pause/2 + rand.N(pause))
						} else {
							denied++
							time.Sleep(backoff/2 + rand.N(backoff))
						}
					}
					return denied
				}
				var all sync.WaitGroup
				for range tc.many {
					all.Go(func() { use("script", 50*time.Millisecond, 100*time.Millisecond) })
				}
				time.Sleep(3 * time.Second)
				denied := use("light", time.Second, time.Second)
				all.Wait()
				slices.Sort(waits)
				if (denied > 0) != tc.denied || !tc.denied && waits[len(waits)-1] > 3*every {
					t.Errorf("denied %d, of %d the median waited %v, the last %v", denied, len(waits), waits[len(waits)/2], waits[len(waits)-1])
				}
				if n := len(r.passed[0]); n < int(run/every*99/100) {
					t.Errorf("%d passed", n)
				}
				r.check(t, 0)
			})
		})
	}
}

// TestRateSlotsAreShared guards who has the slots of a rate, and when: clients in turn; of a request
// that leaves, those that came after it; of the last request of the client with most, one of a client
// with fewer, if there is no other; and that requests of another cost, or that wait for another limit
// too, keep the slots that they have.
func TestRateSlotsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRates(2, 2)
		var mu sync.Mutex
		var got []string
		var all sync.WaitGroup
		var start time.Time
		come := func(ctx context.Context, name string, cost int64, limits ...int) {
			all.Go(func() {
				passes, retry := r.take(ctx, t, name[:1], cost, limits...)
				mu.Lock()
				defer mu.Unlock()
				result := name
				if !passes {
					result += "!" + retry.String()
				}
				got = append(got, fmt.Sprintf("%s@%d", result, time.Since(start).Round(time.Millisecond)/every))
			})
			synctest.Wait()
		}
		expect := func(want string) {
			t.Helper()
			all.Wait()
			if text := strings.Join(got, " "); text != want {
				t.Errorf("got  %s, want %s", text, want)
			}
			got = nil
			time.Sleep(time.Minute)
			start = time.Now()
		}
		expect("")
		for _, name := range []string{"x", "x", "a1", "a2", "a3", "b1", "c1", "a4"} {
			come(t.Context(), name, 1, 0)
		}
		expect("x@0 x@0 a1@1 b1@2 c1@3 a2@4 a3@5 a4@6")

		ctx, leave := context.WithCancel(t.Context())
		for _, name := range []string{"x", "x", "a1"} {
			come(t.Context(), name, 1, 0)
		}
		come(ctx, "b1", 1, 0)
		for _, name := range []string{"a2", "a3"} {
			come(t.Context(), name, 1, 0)
		}
		leave()
		expect("x@0 x@0 b1!100ms@0 a1@1 a2@2 a3@3")

		for i := range 22 {
			come(t.Context(), fmt.Sprintf("a%d", i), 1, 0)
		}
		come(t.Context(), "b1", 1, 0)
		come(t.Context(), "a+", 1, 0)
		time.Sleep(1750 * time.Millisecond)
		mu.Lock()
		got = nil
		mu.Unlock()
		expect("a18@18 a19@19 a20@20")

		for _, name := range []string{"x", "x", "a1", "a2"} {
			come(t.Context(), name, 1, 0)
		}
		come(t.Context(), "b1", 2, 0)
		come(t.Context(), "c1", 1, 0)
		expect("x@0 x@0 a1@1 c1@2 b1@4 a2@5")

		come(t.Context(), "x", 2, 0)
		come(t.Context(), "y", 2, 1)
		come(t.Context(), "a1", 1, 0, 1)
		come(t.Context(), "b1", 1, 0)
		come(t.Context(), "a2", 1, 0, 1)
		come(t.Context(), "c1", 1, 0, 1)
		expect("x@0 y@0 a1@1 b1@2 c1@3 a2@4")
		r.check(t, 0)
	})
}

// TestRateSlotOfDeniedRequest guards that a request which takes over a slot is decided and charged by
// the other limits of its block, and leaves the slot to others if these deny it.
func TestRateSlotOfDeniedRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRates(1, 1)
		other := r.buckets[1]
		other.Limit.MaxDelay, other.Limit.Waiting = 0, nil
		var all sync.WaitGroup
		var served atomic.Int64
		come := func(client string, limits ...int) {
			all.Go(func() {
				if passes, _ := r.take(t.Context(), t, client, 1, limits...); passes {
					served.Add(1)
				}
			})
			synctest.Wait()
		}
		for range 21 {
			come("a", 0)
		}
		come("b", 0, 1)
		come("c", 0, 1) // the other limit has been charged
		if n := r.counters.Totals().Tallies[telemetry.Displaced]; n != 1 {
			t.Errorf("%d were displaced, want 1", n)
		}
		time.Sleep(5 * time.Second)
		all.Wait()
		if n := served.Load(); n != 21 {
			t.Errorf("%d were served, want 21", n)
		}
		other.Limit.Waiting = &Waiters{Queues: wait.New()}
		r.check(t, 0, 1)
	})
}

// TestRateSlotsAtRandom guards, with random requests of a few clients that come, leave, displace one
// another and differ in what they cost and wait for, that never more pass than the limits admit, and
// that nothing is left.
func TestRateSlotsAtRandom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRates(2, 5, 5)
		r.buckets[1].Limit.MaxWaiting = 10
		var all sync.WaitGroup
		for range 5000 {
			for range 1 + rand.IntN(4) {
				all.Go(func() {
					ctx := t.Context()
					if rand.IntN(3) == 0 {
						var cancel func()
						ctx, cancel = context.WithTimeout(ctx, rand.N(2*time.Second))
						defer cancel()
					}
					limits := [][]int{{0}, {1}, {1, 2}}[rand.IntN(3)]
					r.take(ctx, t, string(rune('a'+rand.IntN(9)*rand.IntN(2))), 1+rand.Int64N(5)/4, limits...)
				})
			}
			time.Sleep(rand.N(time.Duration(1+rand.IntN(4)) * every))
		}
		all.Wait()
		r.check(t, 0)
		if r.counters.Totals().Tallies[telemetry.Displaced] == 0 || len(r.passed[0]) < 1000 {
			t.Errorf("%d displaced, %d passed", r.counters.Totals().Tallies[telemetry.Displaced], len(r.passed[0]))
		}
	})
}
