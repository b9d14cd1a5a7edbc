package bench

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// timeout is far more than any call takes: one that fails measures nothing.
const timeout = 10 * time.Second

// BenchmarkRedis takes requests from a Redis server on this machine. The
// baselines are a PING, the least that a round trip costs, and a script of one
// line, the least that a decision by script does.
func BenchmarkRedis(b *testing.B) {
	const keys = 10_000
	srv := redistest.Start(b)
	networks := []struct{ name, address string }{{"tcp", srv.Addr}, {"unix", srv.Socket}}

	for _, n := range []int{1, 2, 8} {
		for _, limit := range []limiter.Limit{open, shut} {
			b.Run(fmt.Sprintf("buckets=%d/%s", n, verdict(limit)), func(b *testing.B) {
				of, filled := buckets(n, limit), false
				for _, network := range networks {
					store, client := openStore(b, network.name, network.address), dial(b, network.name, network.address)
					if !filled {
						fill(b, store, of, keys)
						filled = true
					}
					c := comparison{
						task:      take(b, store, of, keys),
						baselines: []baseline{{"ping", ping(b, client)}, {"script", script(b, client)}},
						serverCPU: func() time.Duration { return cpuTime(b, srv.Client()) },
					}
					for _, c.callers = range []int{1, 8, 64} {
						b.Run(fmt.Sprintf("%s/callers=%d", network.name, c.callers), c.run)
					}
				}
			})
		}
	}
}

// openStore returns a store that is closed when the benchmark ends.
func openStore(b *testing.B, network, address string) *limiter.Redis {
	store := limiter.NewRedis(limiter.RedisOptions{
		Addresses: []string{address}, KeyPrefix: "rl:", Timeout: timeout,
	})
	b.Cleanup(func() { store.Close() })
	return store
}

// dial returns a client with the settings of limiter.NewRedis.
func dial(b *testing.B, network, address string) *redis.Client {
	client := redis.NewClient(&redis.Options{
		Network:                  network,
		Addr:                     address,
		MaxRetries:               -1,
		ContextTimeoutEnabled:    true,
		DialTimeout:              timeout,
		DialerRetries:            1,
		ReadTimeout:              timeout,
		PoolTimeout:              timeout,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	b.Cleanup(func() { client.Close() })
	return client
}

// ping returns a task that only goes to the server and back, within a deadline
// as a decision has one.
func ping(b *testing.B, client *redis.Client) task {
	return func() func(int) {
		return func(int) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			if err := client.Ping(ctx).Err(); err != nil {
				b.Error(err)
			}
		}
	}
}

// script returns a task that runs the shortest script.
func script(b *testing.B, client *redis.Client) task {
	sha, err := client.ScriptLoad(context.Background(), "return 1").Result()
	if err != nil {
		b.Fatal(err)
	}
	return func() func(int) {
		return func(int) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			if err := client.EvalSha(ctx, sha, []string{"key"}).Err(); err != nil {
				b.Error(err)
			}
		}
	}
}

// BenchmarkRedisMemory puts 100 000 keys into an empty server. B/bucket is what
// the memory it uses grew by, that of its clients not counted. A bucket whose
// drip size is not 1 has more to remember.
func BenchmarkRedisMemory(b *testing.B) {
	const keys = 100_000
	ctx, srv := context.Background(), redistest.Start(b)
	store := openStore(b, "unix", srv.Socket)
	for _, drip := range []int64{1, 3} {
		b.Run(fmt.Sprintf("drip_size=%d", drip), func(b *testing.B) {
			day := limiter.Limit{Size: 100, DripRate: 24 * time.Hour, DripSize: drip}
			var grown float64
			for b.Loop() {
				if err := srv.Client().FlushAll(ctx).Err(); err != nil {
					b.Fatal(err)
				}
				before := usedMemory(b, srv.Client())
				fill(b, store, buckets(1, day), keys)
				grown += usedMemory(b, srv.Client()) - before
				if n, err := srv.Client().DBSize(ctx).Result(); err != nil || n != keys {
					b.Fatalf("%d keys, %v, want %d", n, err, keys)
				}
			}
			b.ReportMetric(grown/float64(b.N*keys), "B/bucket")
			b.ReportMetric(0, "ns/op") // BenchmarkRedis has the times
		})
	}
}

// cpuTime returns the CPU time that the server has used.
func cpuTime(b *testing.B, client *redis.Client) time.Duration {
	stat := info(b, client, "cpu", "used_cpu_user", "used_cpu_sys")
	return time.Duration((stat[0] + stat[1]) * 1e9)
}

// usedMemory returns the bytes that the server uses for its data.
func usedMemory(b *testing.B, client *redis.Client) float64 {
	stat := info(b, client, "memory", "used_memory", "mem_clients_normal")
	return stat[0] - stat[1]
}

// info returns figures of the server's INFO.
func info(b *testing.B, client *redis.Client, section string, names ...string) []float64 {
	text, err := client.Info(context.Background(), section).Result()
	if err != nil {
		b.Fatal(err)
	}
	figures := make([]float64, len(names))
	for i, name := range names {
		_, rest, _ := strings.Cut(text, "\n"+name+":")
		value, _, _ := strings.Cut(rest, "\r\n")
		if figures[i], err = strconv.ParseFloat(value, 64); err != nil {
			b.Fatalf("%s of INFO %s: %v", name, section, err)
		}
	}
	return figures
}
