package bench

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkClient has many concurrent goroutines send requests to one Redis server
// by TCP. The baselines are clients with go-redis's defaults: pool calls the
// limiter's script directly for each decision, as most programs would, and
// redis_rate uses that library.
func BenchmarkClient(b *testing.B) {
	const keys = 100_000
	srv := redistest.Start(b)
	of := buckets(1, open)
	alone, followed := openStore(b, srv.Addr, nil), openStore(b, srv.Addr, limiter.NewMemory())
	fill(b, followed, of, keys)
	client := plain(b, srv.Addr)
	byHand, rate := takeScript(b, client, open), rateScript(b, client, open)
	byHand.fill(b, keys)
	rate.fill(b, keys)
	pool := baseline{"pool", byHand.each(b, keys)}
	redisRate := baseline{"redis_rate", redisRate(b, client, open, keys)}

	for _, bc := range []struct {
		name      string
		task      task
		baselines []baseline
	}{
		{"limiter", take(b, alone, of, keys), []baseline{pool, redisRate}},
		{"fallback", take(b, followed, of, keys), []baseline{pool, redisRate}},
		{"redis_rate", redisRate.task, []baseline{pool}},
	} {
		c := comparison{task: bc.task, baselines: bc.baselines, rates: true, whose: "client", used: ownCPU}
		for _, c.callers = range []int{1, 8, 64, 256} {
			b.Run(fmt.Sprintf("%s/callers=%d", bc.name, c.callers), c.run)
		}
	}
}

// ownCPU returns the CPU time that this process has used.
func ownCPU() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		panic(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
