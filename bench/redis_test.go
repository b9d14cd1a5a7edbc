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

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// timeout is far more than any call takes: a failed call would measure nothing.
const timeout = 10 * time.Second

// BenchmarkRedis sends requests for one limit and for several to a Redis server on
// this machine, by its unix socket. The baselines are a PING, the minimum cost of
// a round trip, and a script of one line, the minimum cost of a decision by a
// script.
func BenchmarkRedis(b *testing.B) {
	const keys = 10_000
	srv := redistest.Start(b)
	store, client := openStore(b, srv.Socket, nil), dial(b, "unix", srv.Socket)
	for _, n := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("buckets=%d", n), func(b *testing.B) {
			of := buckets(n, open)
			fill(b, store, of, keys)
			c := comparison{
				task:      take(b, store, of, keys),
				baselines: []baseline{{"ping", ping(b, client)}, {"script", oneLine(b, client)}},
				whose:     "server",
				used:      func() time.Duration { return cpuTime(b, srv.Client()) },
			}
			for _, c.callers = range []int{1, 64} {
				b.Run(fmt.Sprintf("callers=%d", c.callers), c.run)
			}
		})
	}
}

// openStore returns a store that is closed when the benchmark ends. The benchmark
// fails if a request was not decided by the server.
func openStore(b testing.TB, address string, fallback *limiter.Memory) *limiter.Redis {
	store, err := limiter.NewRedis(limiter.RedisOptions{
		Addresses: []string{address}, KeyPrefix: "rl:", Timeout: timeout, Fallback: fallback,
		Report: func(e limiter.Event) { wrong(b, "not decided by the server: %v", e.Err) },
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { store.Close() })
	return store
}

// dial returns a client with the settings of limiter.NewRedis.
func dial(b testing.TB, network, address string) *redis.Client {
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

// ping returns a task that only makes a round trip to the server, with a deadline
// as a decision has.
func ping(b testing.TB, client *redis.Client) task {
	return func() func(int) {
		return func(int) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			if err := client.Ping(ctx).Err(); err != nil {
				wrong(b, "%v", err)
			}
		}
	}
}

// oneLine returns a task that runs the shortest script.
func oneLine(b testing.TB, client *redis.Client) task {
	sha, err := client.ScriptLoad(context.Background(), "return 1").Result()
	if err != nil {
		b.Fatal(err)
	}
	return func() func(int) {
		return func(int) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			if err := client.EvalSha(ctx, sha, []string{"key"}).Err(); err != nil {
				wrong(b, "%v", err)
			}
		}
	}
}

// cpuTime returns the CPU time that the server has used.
func cpuTime(b testing.TB, client *redis.Client) time.Duration {
	stat := info(b, client, "cpu", "used_cpu_user", "used_cpu_sys")
	return time.Duration((stat[0] + stat[1]) * 1e9)
}

// usedMemory returns the bytes that the server uses for its data.
func usedMemory(b testing.TB, client *redis.Client) float64 {
	stat := info(b, client, "memory", "used_memory", "mem_clients_normal")
	return stat[0] - stat[1]
}

// info returns figures of the server's INFO.
func info(b testing.TB, client *redis.Client, section string, names ...string) []float64 {
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
