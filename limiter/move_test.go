package limiter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestMoveWithRequestsInFlight guards a store that replaces another while requests for an
// empty bucket are on their way to the old one: they are reported to the new one, and both
// together admit what the bucket allows.
func TestMoveWithRequestsInFlight(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for name, limit := range map[string]Limit{
		"bucket": {Size: 10, DripInterval: time.Hour, DripSize: 1}, "window": FixedWindow(10, time.Hour),
		"sliding": SlidingWindow(10, time.Hour), "log": SlidingLog(10, time.Hour),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, m := redistest.StartProxy(t, server.Addr), NewMemory()
			store := func(addr, prefix string) *Redis {
				r := newRedis(RedisOptions{Addresses: []string{addr}, Timeout: 10 * time.Second, Fallback: m, KeyPrefix: name + prefix}, takeScript)
				t.Cleanup(func() { _ = r.Close() })
				r.Connect(t.Context())
				return r
			}
			old, next := store(p.Addr, "old:"), store(server.Addr, "next:")
			p.Delay(300 * time.Millisecond)
			b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
			var admitted atomic.Int64
			call := func(r *Redis, b Bucket) {
				t.Helper()
				d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
				if err != nil || d[0].By == DecidedByFallback {
					t.Errorf("%+v, %v", d, err)
				} else if !d[0].Denied {
					admitted.Add(b.Cost)
				}
			}
			another := b
			another.Key = "another"
			call(old, another) // which is not delayed yet, perhaps
			admitted.Store(0)
			var wg sync.WaitGroup
			for range 7 {
				wg.Go(func() { call(old, b) })
			}
			redistest.WaitFor(t, 5*time.Second, func() error {
				if n := m.queries.Load(); n < 7 {
					return fmt.Errorf("%d are in flight", n)
				}
				return nil
			})
			many := b
			many.Cost = 4
			call(next, many)
			for range 7 {
				call(next, b)
			}
			if n := admitted.Load(); n != 3 {
				t.Errorf("%d admitted beside 7 in flight, want 3", n)
			}
			wg.Wait()
			for range 7 {
				call(next, b)
			}
			if n := admitted.Load(); n != 10 {
				t.Errorf("%d admitted, want 10", n)
			}
		})
	}
}
