package bench

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkServer measures the CPU time that a decision costs a Redis server,
// compared with one of redis_rate. With callers, this includes the server's socket
// reads and writes: for the limiter, and for its script called directly for each
// decision. Below script, where 64 decisions at once use one connection, nearly
// all of it is the script: in calls of one group each, or in one call with 64
// groups; redis_rate uses calls of one decision each.
//
// Denials are measured only by direct calls: the limiter caches them and would
// send none.
func BenchmarkServer(b *testing.B) {
	const keys, depth = 100_000, 64
	srv := redistest.Start(b)
	client, store := plain(b, srv.Addr), openStore(b, srv.Addr, nil)
	used := func() time.Duration { return cpuTime(b, srv.Client()) }

	for _, limit := range []limiter.Limit{open, shut} {
		b.Run(verdict(limit), func(b *testing.B) {
			byHand, rate := takeScript(b, client, limit), rateScript(b, client, limit)
			byHand.fill(b, keys)
			rate.fill(b, keys)

			tasks := []baseline{{"evalsha", byHand.each(b, keys)}}
			if limit == open {
				of := buckets(1, limit)
				fill(b, store, of, keys)
				tasks = append(tasks, baseline{"limiter", take(b, store, of, keys)})
			}
			for _, t := range tasks {
				c := comparison{
					task:      t.task,
					baselines: []baseline{{"redis_rate", redisRate(b, client, limit, keys)}},
					whose:     "server",
					used:      used,
				}
				for _, c.callers = range []int{1, 64} {
					b.Run(fmt.Sprintf("%s/callers=%d", t.name, c.callers), c.run)
				}
			}

			for _, t := range []baseline{
				{"each", byHand.pipelined(b, depth, keys)},
				{"groups", byHand.grouped(b, depth, keys)},
			} {
				b.Run("script/"+t.name, comparison{
					task:      t.task,
					baselines: []baseline{{"redis_rate", rate.pipelined(b, depth, keys)}},
					callers:   1,
					decisions: depth,
					whose:     "server",
					used:      used,
				}.run)
			}
		})
	}
}

// BenchmarkServerMemory puts 100,000 buckets into an empty server, with key names
// of equal length. B/bucket is the growth of its used memory, without that of its
// clients. x-two-keys is the ratio to two keys, a time and a counter that expire,
// as in the limiter whose options this one has. A bucket of the limiter with a
// drip size other than 1 has more to store.
func BenchmarkServerMemory(b *testing.B) {
	const keys = 100_000
	ctx, srv := context.Background(), redistest.Start(b)
	store, client := openStore(b, srv.Socket, nil), srv.Client()

	day := func(drip int64) limiter.Limit {
		return limiter.Limit{Size: 100, DripInterval: 24 * time.Hour, DripSize: drip}
	}
	fill(b, store, buckets(1, day(1)), 1)
	name, err := client.RandomKey(ctx).Result()
	if err != nil {
		b.Fatal(err)
	}
	pad := func(suffix string) string { return strings.Repeat("k", len(name)-len(suffix)) + suffix }

	// grown returns the growth in bytes per bucket when put adds them.
	grown := func(b *testing.B, put func(), keysEach int64) float64 {
		if err := client.FlushAll(ctx).Err(); err != nil {
			b.Fatal(err)
		}
		before := usedMemory(b, client)
		put()
		after := usedMemory(b, client)
		if n, err := client.DBSize(ctx).Result(); err != nil || n != keysEach*keys {
			b.Fatalf("%d keys, %v, want %d", n, err, keysEach*keys)
		}
		return (after - before) / keys
	}
	pipelined := func(each func(pipe redis.Pipeliner, i int)) func() {
		return func() {
			for first := 0; first < keys; first += 1000 {
				if _, err := client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
					for i := range 1000 {
						each(pipe, first+i)
					}
					return nil
				}); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	putTwo := pipelined(func(pipe redis.Pipeliner, i int) {
		timestamp, counter := pad(fmt.Sprintf("%d:t", i)), pad(fmt.Sprintf("%d:c", i))
		pipe.Set(ctx, timestamp, time.Now().UnixMilli(), 0)
		pipe.Expire(ctx, timestamp, 100*24*time.Hour)
		pipe.Incr(ctx, counter)
		pipe.Expire(ctx, counter, 100*24*time.Hour)
	})
	twoKeys := sync.OnceValue(func() float64 { return grown(b, putTwo, 2) })

	rate := rateScript(b, client, day(1))
	args := rate.args(1, 1)
	for _, bc := range []struct {
		name string
		put  func()
		keys int64 // of each bucket
	}{
		{"drip_size=1", func() { fill(b, store, buckets(1, day(1)), keys) }, 1},
		{"drip_size=3", func() { fill(b, store, buckets(1, day(3)), keys) }, 1},
		{"redis_rate", pipelined(func(pipe redis.Pipeliner, i int) {
			pipe.EvalSha(ctx, rate.sha, []string{pad(fmt.Sprint(i))}, args...)
		}), 1},
		{"two_keys", putTwo, 2},
	} {
		b.Run(bc.name, func(b *testing.B) {
			var total float64
			for b.Loop() {
				total += grown(b, bc.put, bc.keys)
			}
			b.ReportMetric(total/float64(b.N), "B/bucket")
			b.ReportMetric(total/float64(b.N)/twoKeys(), "x-two-keys")
			b.ReportMetric(0, "ns/op") // BenchmarkServer has the times
		})
	}
}
