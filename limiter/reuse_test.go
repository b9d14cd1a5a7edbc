package limiter

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// pooled returns the queries that the next requests would use, and removes them
// from the pool.
func pooled() map[*query]bool {
	all := make(map[*query]bool)
	for {
		q := queries.Get().(*query)
		if q.Keys == nil {
			return all // a new one: the pool is empty
		}
		all[q] = true
	}
}

// TestQueriesInUseAreNotReused guards that no request reuses a query that a queue
// or a late answer may still touch: neither one that was given up, nor one that
// settles units. One that was answered is reused.
func TestQueriesInUseAreNotReused(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // all use one pool
	node := redistest.Start(t)
	p := redistest.StartProxy(t, node.Addr)
	r := newTestRedis(t, node, func(opt *RedisOptions) {
		opt.Addresses, opt.Fallback, opt.Timeout = []string{p.Addr}, NewMemory(), 100*time.Millisecond
	})
	req := Request{Buckets: []Bucket{hourly(1000)}}
	redistest.WaitFor(t, 5*time.Second, func() error { return unconnected(t, r, node, req) })
	pooled()
	again := 0
	for range 20 {
		mustTake(t, r, req)
		again += len(pooled())
	}
	if again == 0 {
		t.Error("no query is reused, so the test proves nothing")
	}

	for _, charge := range []int64{1, 0} {
		held := new(Held)
		mustTake(t, r, Request{Buckets: toHold(req).Buckets, Held: held})
		q := held.reservations[0].query
		held.Settle(0, charge)
		key := r.keys.of(&req.Buckets[0])
		redistest.WaitFor(t, 5*time.Second, func() error { return unsettled(t, node, key) })
		if pooled()[q] {
			t.Errorf("one whose units are settled, %d, is reused", charge)
		}
	}

	// The answers arrive after the callers have given up.
	p.Delay(3 * r.timeout)
	for range 3 {
		mustTake(t, r, req)
		if n := len(pooled()); n > 0 {
			t.Error("one that was given up is reused")
		}
	}
	time.Sleep(3 * r.timeout)
	if n := len(pooled()); n > 0 {
		t.Error("one that was given up is reused after its answer")
	}
}

// unconnected returns an error unless a server decides req.
func unconnected(t testing.TB, r *Redis, node *redistest.Server, req Request) error {
	t.Helper()
	c := redistest.CommandCounter{Server: node}
	c.Since(t, "evalsha")
	mustTake(t, r, req)
	if c.Since(t, "evalsha") == 0 {
		return errNotDecided
	}
	return nil
}

var errNotDecided = errors.New("not decided by the server")
