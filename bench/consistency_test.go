package bench

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkConsistency sends requests for one hot key, and for many keys, to a store in a
// Redis server on this machine, by its unix socket, with each consistency. The baselines
// are the same by a store in this process, and by the same store with exact limits.
func BenchmarkConsistency(b *testing.B) {
	srv := redistest.Start(b)
	exact := buckets(1, open)
	for _, keys := range []int{1, 10_000} {
		memory := newMemory(keys)
		fill(b, memory, exact, keys)
		for _, consistency := range []limiter.Consistency{limiter.Lease(100 * time.Millisecond), limiter.Eventual(100 * time.Millisecond)} {
			store := openStore(b, srv.Socket, newMemory(keys))
			of := buckets(1, open)
			of[0].Consistency = consistency
			fill(b, store, exact, keys)
			c := comparison{
				task: take(b, store, of, keys),
				baselines: []baseline{
					{"memory", take(b, memory, exact, keys)},
					{"exact", take(b, store, exact, keys)},
				},
			}
			for _, c.callers = range []int{1, runtime.GOMAXPROCS(0), 64} {
				b.Run(fmt.Sprintf("%v/keys=%d/callers=%d", consistency, keys, c.callers), c.run)
			}
		}
	}
}
