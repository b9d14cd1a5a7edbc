package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkBeside measures requests for an exact limit while many others are in progress
// that hold a unit each, of one bucket or of one each: while all is well, right after all
// connections broke, in an outage, and right after it. The baseline is the same beside none.
func BenchmarkBeside(b *testing.B) {
	const keys, callers = 10_000, 16
	of := buckets(1, open)
	store := func(srv *redistest.Server) *limiter.Redis {
		s, err := limiter.NewRedis(limiter.RedisOptions{
			Addresses: []string{srv.Addr}, KeyPrefix: "rl:", Timeout: timeout, Fallback: newMemory(1_000_000),
		})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { s.Close() })
		fill(b, s, of, keys)
		return s
	}
	for _, held := range []int{1000, 20_000, 200_000} {
		for _, buckets := range []int{held, 1} {
			if buckets > 20_000 { // each is renewed every five seconds, which is more than a server can do
				continue
			}
			srv := redistest.Start(b)
			alone, beside := store(srv), store(srv)
			hold(b, beside, held, buckets)
			c := comparison{
				task:      take(b, beside, of, keys),
				baselines: []baseline{{"none", take(b, alone, of, keys)}},
				callers:   callers,
			}
			for _, phase := range []struct {
				name  string
				begin func()
			}{
				{"healthy", func() {}},
				{"break", func() {
					if err := srv.Client().Do(context.Background(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
						b.Fatal(err)
					}
				}},
				{"outage", func() { srv.Kill() }},
				{"back", func() {
					srv.Restart(b)
					for _, s := range []*limiter.Redis{alone, beside} {
						for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
							if d, err := s.Take(context.Background(), limiter.Request{Buckets: of}, nil); err == nil && d[0].By == limiter.DecidedByRedis {
								break
							}
						}
					}
				}},
			} {
				begun := sync.OnceFunc(phase.begin)
				b.Run(fmt.Sprintf("%s/held=%d/buckets=%d", phase.name, held, buckets), func(b *testing.B) {
					begun()
					c.run(b)
				})
			}
			beside.Close()
			alone.Close()
			srv.Kill()
		}
	}
}

// hold has n requests hold a unit each, of so many buckets, for as long as store is open.
func hold(b *testing.B, store *limiter.Redis, n, buckets int) {
	b.Helper()
	const callers = 64
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for i := c; i < n; i += callers {
				got, err := store.Take(context.Background(), limiter.Request{
					Buckets: []limiter.Bucket{{Name: "in progress", Key: addresses()[i%buckets], Limit: limiter.Concurrency(int64(n)), Cost: 1, Hold: true}},
					Held:    new(limiter.Held),
				}, nil)
				if err != nil || got[0].Denied {
					wrong(b, "got %+v, %v", got, err)
				}
			}
		})
	}
	wg.Wait()
}
