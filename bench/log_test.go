package bench

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkLog measures what a sliding log gains by reading and writing only parts of its
// string, by the number of entries: the time of the script in Redis, and the bytes written
// to the append-only file, which replicas get too. The baseline reads and writes the whole
// string, and does nothing else.
func BenchmarkLog(b *testing.B) {
	for _, entries := range []int{100, 1000, 9000} {
		b.Run(fmt.Sprint(entries), func(b *testing.B) {
			const keys = 100 // so that a log hardly grows
			ctx, srv := context.Background(), redistest.Start(b, "--appendonly", "yes", "--auto-aof-rewrite-percentage", "0", "--save", "")
			store, client := openStore(b, srv.Addr, nil), srv.Client()
			limit := limiter.SlidingLog(bucket.MaxLogUnits, time.Hour)
			take := func(i int) {
				got, err := store.Take(ctx, limiter.Request{Buckets: []limiter.Bucket{
					{Name: "log", Key: fmt.Sprint(i), Limit: limit, Cost: 1},
				}}, nil)
				if err != nil || got[0].Denied {
					b.Fatalf("got %+v, %v", got, err)
				}
			}
			for i := range keys {
				take(i)
			}
			names, err := client.Keys(ctx, "*").Result()
			if err != nil || len(names) != keys {
				b.Fatalf("%d keys, %v", len(names), err)
			}
			for range entries {
				take(0)
			}
			full := names[0]
			for _, name := range names {
				if client.StrLen(ctx, name).Val() > client.StrLen(ctx, full).Val() {
					full = name
				}
			}
			for _, name := range names {
				if err := client.Copy(ctx, full, name, 0, true).Err(); name != full && err != nil {
					b.Fatal(err)
				}
			}
			measure := func(what, command string, do func(int)) (µs float64) {
				if err := client.ConfigResetStat(ctx).Err(); err != nil {
					b.Fatal(err)
				}
				from := infoNumber(b, srv, "aof_current_size")
				n := max(b.N, 2*keys)
				for i := range n {
					do(i % keys)
				}
				info, err := client.Info(ctx, "commandstats").Result()
				if err != nil {
					b.Fatal(err)
				}
				m := regexp.MustCompile(`cmdstat_` + command + `:.*usec_per_call=([0-9.]+)`).FindStringSubmatch(info)
				if m == nil {
					b.Fatalf("no %s in %s", command, info)
				}
				µs, _ = strconv.ParseFloat(m[1], 64)
				b.ReportMetric(µs, "µs/"+what)
				b.ReportMetric((infoNumber(b, srv, "aof_current_size")-from)/float64(n), "B/"+what)
				return µs
			}
			parts := measure("call", "evalsha", take)
			const whole = `local v = redis.call('GET', KEYS[1])
				redis.call('SET', KEYS[1], string.sub(v, 1, 38) .. string.sub(v, 49) .. '0123456789', 'PX', 3600000)`
			all := measure("whole", "eval", func(i int) {
				if err := client.Eval(ctx, whole, names[i:i+1]).Err(); err != nil && err.Error() != "redis: nil" {
					b.Fatal(err)
				}
			})
			b.ReportMetric(parts/all, "x-whole")
		})
	}
}

// infoNumber returns a number of the server's INFO.
func infoNumber(b *testing.B, srv *redistest.Server, name string) float64 {
	b.Helper()
	info, err := srv.Client().Info(context.Background(), "everything").Result()
	if err != nil {
		b.Fatal(err)
	}
	m := regexp.MustCompile(name + `:([0-9.]+)`).FindStringSubmatch(info)
	if m == nil {
		b.Fatalf("no %s", name)
	}
	n, _ := strconv.ParseFloat(m[1], 64)
	return n
}
