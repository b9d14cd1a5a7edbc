package bench

import (
	"context"
	"encoding/binary"
	"math"
	"strings"
	"testing"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// plain returns a client with default options.
func plain(b testing.TB, address string) *redis.Client {
	client := redis.NewClient(&redis.Options{Addr: address})
	b.Cleanup(func() { client.Close() })
	return client
}

// redisRate returns a task that uses redis_rate.
func redisRate(b testing.TB, client *redis.Client, limit limiter.Limit, keys int) task {
	peer, like, prefix := redis_rate.NewLimiter(client), rateLimit(limit), prefixOf("", limit)
	return func() func(int) {
		return func(i int) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			got, err := peer.Allow(ctx, prefix+key(i, keys), like)
			if err != nil || (got.Allowed == 0) != (limit == shut) {
				wrong(b, "redis_rate: got %+v, %v, want %s", got, err, verdict(limit))
			}
		}
	}
}

// rateLimit returns redis_rate's limit with the same numbers.
func rateLimit(limit limiter.Limit) redis_rate.Limit {
	return redis_rate.Limit{Rate: 1, Period: limit.DripInterval, Burst: int(limit.Size)}
}

// prefixOf returns a prefix for the names of keys, which makes them about as long
// as those of the limiter.
func prefixOf(scheme string, limit limiter.Limit) string {
	return scheme + "{0123456789abcdefghijkl}:api/limit-0:" + verdict(limit) + ":"
}

// script is a limiter's script that is called directly.
type script struct {
	limit  limiter.Limit
	client *redis.Client
	sha    string
	prefix string // of the keys' names

	// args returns the arguments of a call with n decisions, each for a request of
	// that cost.
	args func(cost, decisions int) []any

	// count returns the number of decisions in a reply, and the number of denials.
	count func(reply []any) (decided, denied int)
}

// takeScript returns the limiter's script. A store loads it into the server, whose log of
// slow calls tells its SHA.
func takeScript(b testing.TB, client *redis.Client, limit limiter.Limit) script {
	ctx := context.Background()
	const slower = "slowlog-log-slower-than"
	if err := client.ConfigSet(ctx, slower, "0").Err(); err != nil {
		b.Fatal(err)
	}
	store := openStore(b, client.Options().Addr, nil)
	if _, err := store.Take(ctx, limiter.Request{Buckets: buckets(1, limit)}, nil); err != nil {
		b.Fatal(err)
	}
	calls, err := client.SlowLogGet(ctx, -1).Result()
	if err != nil {
		b.Fatal(err)
	}
	sha := ""
	for _, call := range calls {
		if strings.EqualFold(call.Args[0], "evalsha") {
			sha = call.Args[1]
			break
		}
	}
	if sha == "" {
		b.Fatal("no call of the script")
	}
	if err := client.ConfigSet(ctx, slower, "10000").Err(); err != nil {
		b.Fatal(err)
	}
	return script{
		limit: limit, client: client, sha: sha, prefix: prefixOf("rl:", limit),
		args: func(cost, decisions int) []any { return groups(limit, cost, decisions) },
		count: func(reply []any) (decided, denied int) {
			for i := 1; i < len(reply); i += 2 {
				decided++
				if reply[i].(int64) < 0 {
					denied++
				}
			}
			return decided, denied
		},
	}
}

// groups returns core.lua's arguments for n groups of one bucket, as its header
// describes them.
func groups(limit limiter.Limit, cost, n int) []any {
	run := binary.BigEndian.AppendUint16(nil, uint16(n))
	run = append(run, 0, 1, 0, 0, 0, 0, 0) // of one leaky bucket, atomic, nothing told
	for _, number := range []int64{limit.Size, limit.DripInterval.Microseconds(), limit.DripSize, -1, int64(cost)} {
		run = binary.BigEndian.AppendUint64(run, math.Float64bits(float64(number)))
	}
	return []any{run}
}

// rateScript returns redis_rate's script. It makes one decision per call.
func rateScript(b testing.TB, client *redis.Client, limit limiter.Limit) script {
	heard := &eavesdropper{Client: client}
	peer, like := redis_rate.NewLimiter(heard), rateLimit(limit)
	ask := func(cost int) {
		if _, err := peer.AllowN(context.Background(), "any", like, cost); err != nil {
			b.Fatal(err)
		}
	}
	ask(1)
	return script{
		limit: limit, client: client, sha: heard.sha, prefix: prefixOf("rate:", limit),
		args: func(cost, _ int) []any {
			ask(cost)
			return heard.args
		},
		count: func(reply []any) (decided, denied int) {
			if reply[0].(int64) == 0 {
				return 1, 1
			}
			return 1, 0
		},
	}
}

// eavesdropper records how redis_rate calls its script, which is not exported.
type eavesdropper struct {
	*redis.Client
	sha  string
	args []any
}

func (e *eavesdropper) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	e.sha, e.args = sha, args
	return e.Client.EvalSha(ctx, sha, keys, args...)
}

// each returns a task that calls the script for one decision.
func (s script) each(b testing.TB, keys int) task {
	args := s.args(1, 1)
	return func() func(int) {
		return func(i int) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			s.check(b, s.client.EvalSha(ctx, s.sha, []string{s.prefix + key(i, keys)}, args...), 1)
		}
	}
}

// pipelined returns a task that sends the given number of calls in one pipeline,
// each for one decision.
func (s script) pipelined(b testing.TB, depth, keys int) task {
	args := s.args(1, 1)
	return func() func(int) {
		return func(i int) {
			names := make([]string, depth)
			for j := range names {
				names[j] = s.prefix + key(i*depth+j, keys)
			}
			calls, err := s.pipeline(names, args)
			if err != nil {
				wrong(b, "%v", err)
			}
			for _, call := range calls {
				s.check(b, call.(*redis.Cmd), 1)
			}
		}
	}
}

// grouped returns a task that makes one call for the given number of decisions.
func (s script) grouped(b testing.TB, decisions, keys int) task {
	args := s.args(1, decisions)
	return func() func(int) {
		return func(i int) {
			names := make([]string, decisions)
			for j := range names {
				names[j] = s.prefix + key(i*decisions+j, keys)
			}
			s.check(b, s.client.EvalSha(context.Background(), s.sha, names, args...), decisions)
		}
	}
}

// fill brings the buckets of the given number of keys into the state that is
// measured.
func (s script) fill(b testing.TB, keys int) {
	b.Helper()
	cost := 1
	if s.limit == open {
		cost = hour
	}
	args := s.args(cost, 1)
	for first := 0; first < keys; first += 1000 {
		names := make([]string, min(1000, keys-first))
		for i := range names {
			names[i] = s.prefix + addresses()[first+i]
		}
		if _, err := s.pipeline(names, args); err != nil {
			b.Fatal(err)
		}
	}
}

// pipeline calls the script for all names in one pipeline.
func (s script) pipeline(names []string, args []any) ([]redis.Cmder, error) {
	ctx := context.Background()
	return s.client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, name := range names {
			pipe.EvalSha(ctx, s.sha, []string{name}, args...)
		}
		return nil
	})
}

// check fails the benchmark if a call did not make the given number of decisions,
// or not the expected ones.
func (s script) check(b testing.TB, call *redis.Cmd, decisions int) {
	reply, err := call.Slice()
	if err != nil {
		wrong(b, "%v", err)
		return
	}
	wantDenied := 0
	if s.limit == shut {
		wantDenied = decisions
	}
	if decided, denied := s.count(reply); decided != decisions || denied != wantDenied {
		wrong(b, "%d of %d denied, want %d of %d", denied, decided, wantDenied, decisions)
	}
}
