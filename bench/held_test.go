package bench

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkHeld measures requests that hold a unit and charge it at their end, in this
// process and on Redis. The baseline charges it at once. On Redis that counts the CPU
// time of the server too.
func BenchmarkHeld(b *testing.B) {
	const keys = 1000
	of := buckets(1, open)
	b.Run("memory", comparison{
		task:      holdAndSettle(b, newMemory(keys), of, keys),
		baselines: []baseline{{"charged-at-once", take(b, newMemory(keys), of, keys)}},
		callers:   1,
	}.run)
	srv := redistest.Start(b)
	store := openStore(b, srv.Addr, nil)
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprintf("redis/callers=%d", callers), comparison{
			task:      holdAndSettle(b, store, of, keys),
			baselines: []baseline{{"charged-at-once", take(b, store, of, keys)}},
			callers:   callers,
			whose:     "server",
			used:      func() time.Duration { return cpuTime(b, srv.Client()) },
		}.run)
	}
}

// holdAndSettle returns a task like take's, whose units are held and then charged.
func holdAndSettle(b testing.TB, store limiter.Store, of []limiter.Bucket, keys int) task {
	return func() func(int) {
		req := limiter.Request{Buckets: slices.Clone(of)}
		for j := range req.Buckets {
			req.Buckets[j].Hold = true
			req.Buckets[j].Name += "-held"
		}
		decisions := make([]limiter.Decision, 0, len(of))
		return func(i int) {
			req.Held = new(limiter.Held)
			for j := range req.Buckets {
				req.Buckets[j].Key = key(i, keys)
			}
			got, err := store.Take(context.Background(), req, decisions)
			if err != nil || got[0].Denied {
				wrong(b, "got %+v, %v", got, err)
			}
			for j := range req.Buckets {
				req.Held.Settle(j, 1)
			}
		}
	}
}
