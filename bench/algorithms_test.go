package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// costsTable makes TestAlgorithmCosts and TestPolicyCosts measure for as long as it takes.
var costsTable = flag.String("table", "", "the document whose tables of what algorithms and policies cost are to be written anew")

// hundred is the size of each limit whose cost is told. A key has half of it in use
// before anything is measured.
const hundred = 100

// algorithms are those whose cost is told, with a limit of a hundred an hour.
var algorithms = []struct {
	name  string
	limit limiter.Limit
}{
	{"`leaky_bucket`, `token_bucket`", limiter.Limit{Size: hundred, DripInterval: time.Hour / hundred, DripSize: 1}},
	{"`fixed_window`", limiter.ClockWindow(hundred, time.Hour, time.Unix(0, 0))},
	{"`sliding_window`", limiter.SlidingWindow(hundred, time.Hour)},
	{"`sliding_log`", limiter.SlidingLog(hundred, time.Hour)},
	{"`warm_up`", limiter.WarmingUp(1_000_000, time.Second, time.Second)},
}

// costOf is what a decision costs. A time that was not measured is 0.
type costOf struct {
	name                     string
	server, batched          time.Duration // of the script, alone and among 64
	trip, process            time.Duration
	serverOf, tripOf         float64 // times that of redis_rate
	processOf                float64 // times that of x/time/rate
	serverBytes, processByte float64 // of a key
}

// TestAlgorithmCosts guards that what each algorithm costs can be measured, beside
// redis_rate on Redis, and beside x/time/rate and mholt/caddy-ratelimit in process.
// With -table it measures for a minute, and writes the table.
func TestAlgorithmCosts(t *testing.T) {
	keys, turns, calls := 64, 2, 2 // a power of two, so that no key comes twice among 64
	if *costsTable != "" {
		keys, turns, calls = 1024, 20, 10
	}
	onServer := costsOnServer(t, keys, turns, calls)
	inProcess := costsInProcess(t, 32*keys, turns, 2000*calls)
	var rows []costOf
	for i, c := range onServer {
		if i < len(algorithms) {
			c.process, c.processOf, c.processByte = inProcess[i].process, inProcess[i].processOf, inProcess[i].processByte
		}
		rows = append(rows, c)
	}
	rows = append(rows, inProcess[len(algorithms):]...)
	text := costTable(rows)
	t.Log("\n" + text)
	if *costsTable == "" || t.Failed() {
		return
	}
	writeTable(t, "costs", text)
}

// writeTable replaces a table of the document that the flag names.
func writeTable(t *testing.T, name, text string) {
	document, err := os.ReadFile(*costsTable)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := fmt.Sprintf("<!-- begin: %s -->\n", name), fmt.Sprintf("<!-- end: %s -->", name)
	before, rest, begins := strings.Cut(string(document), begin)
	_, after, ends := strings.Cut(rest, end)
	if !begins || !ends {
		t.Fatalf("%s has no marks %q and %q", *costsTable, begin, end)
	}
	if err := os.WriteFile(*costsTable, []byte(before+begin+text+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// costsOnServer measures each algorithm on a Redis server, and redis_rate.
func costsOnServer(t *testing.T, keys, turns, calls int) []costOf {
	const depth = 64
	srv := redistest.Start(t)
	store, client, admin := openStore(t, srv.Addr, nil), plain(t, srv.Addr), srv.Client()
	scripts, names := make([]script, 0, len(algorithms)+1), make([]string, 0, len(algorithms)+1)
	trips := make([]task, 0, len(algorithms)+1)
	for i, a := range algorithms {
		of := []limiter.Bucket{{Name: fmt.Sprintf("cost-%d", i), Limit: a.limit, Cost: 1}}
		scripts, names = append(scripts, scriptOf(t, store, client, admin, of[0])), append(names, a.name)
		for range hundred / 2 {
			fill(t, store, of, keys)
		}
		trips = append(trips, take(t, store, of, keys))
	}
	leaky := algorithms[0].limit
	rate := rateScript(t, client, leaky)
	rate.prefix = scripts[0].prefix[:len(scripts[0].prefix)-2] + "r:" // names as long as ours
	scripts, names = append(scripts, rate), append(names, "redis_rate")
	trips = append(trips, redisRate(t, client, leaky, keys))
	for _, s := range scripts {
		args := s.args(1, 1)
		for range hundred / 2 {
			for first := 0; first < keys; first += 1000 {
				var some []string
				for i := first; i < min(first+1000, keys); i++ {
					some = append(some, s.prefix+addresses()[i])
				}
				if _, err := s.pipeline(some, args); err != nil {
					t.Fatal(err)
				}
			}
		}
	}

	all := make([]costOf, len(scripts))
	for i, s := range scripts {
		all[i] = costOf{name: names[i], serverBytes: bytesOfKeys(t, admin, s.prefix, min(keys, 100))}
	}
	pipelined, grouped := make([]task, 0, len(scripts)), make([]task, 0, len(scripts))
	for i, s := range scripts {
		pipelined = append(pipelined, s.pipelined(t, depth, keys))
		if i < len(algorithms) {
			grouped = append(grouped, s.grouped(t, depth, keys))
		}
	}
	used := func() time.Duration { return scriptTime(t, admin) }
	server, serverOf := inTurns(1, turns, calls, used, len(scripts)-1, pipelined...)
	batched, _ := inTurns(1, turns, calls, used, 0, grouped...)
	trip, tripOf := inTurns(1, turns, 10*calls, nil, len(scripts)-1, trips...)
	for i := range all {
		all[i].server, all[i].serverOf = server[i]/depth, serverOf[i]
		all[i].trip, all[i].tripOf = trip[i], tripOf[i]
		if i < len(batched) {
			all[i].batched = batched[i] / depth
		}
	}
	return all
}

// scriptOf returns the limiter's script with what the limiter tells it about a
// bucket, which the server's slow log shows.
func scriptOf(t *testing.T, store limiter.Store, client, admin *redis.Client, b limiter.Bucket) script {
	ctx := context.Background()
	b.Key = "10.0.0.0"
	if err := admin.ConfigSet(ctx, "slowlog-log-slower-than", "0").Err(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the first call may have had to send the script
		if _, err := store.Take(ctx, limiter.Request{Buckets: []limiter.Bucket{b}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	log, err := admin.SlowLogGet(ctx, 10).Result()
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.ConfigSet(ctx, "slowlog-log-slower-than", "-1").Err(); err != nil {
		t.Fatal(err)
	}
	for _, entry := range log {
		if a := entry.Args; strings.EqualFold(a[0], "evalsha") && len(a) == 5 && strings.Contains(a[3], b.Name) {
			reply, err := client.EvalSha(ctx, a[1], []string{a[3]}, a[4]).Slice()
			if err != nil {
				t.Fatal(err)
			}
			return script{
				limit: b.Limit, client: client, sha: a[1], prefix: prefixOf("rl:", b.Limit) + b.Name + ":",
				args: func(_, decisions int) []any {
					group := binary.BigEndian.AppendUint16(nil, uint16(decisions))
					return []any{append(group, a[4][2:]...)}
				},
				count: func(decisions []any) (decided, denied int) {
					for i := 1; i < len(decisions); i += len(reply) {
						decided++
						if decisions[i].(int64) < 0 {
							denied++
						}
					}
					return decided, denied
				},
			}
		}
	}
	t.Fatalf("the server was not asked about %s: %v", b.Name, log)
	return script{}
}

// bytesOfKeys returns the bytes that a server needs for a key, as far as it knows.
func bytesOfKeys(t *testing.T, admin *redis.Client, prefix string, keys int) float64 {
	total := int64(0)
	for _, k := range addresses()[:keys] {
		n, err := admin.MemoryUsage(context.Background(), prefix+k).Result()
		if errors.Is(err, redis.Nil) {
			return 0 // it is cold again: at so fast a rate, each permit is stored within a microsecond
		} else if err != nil {
			t.Fatal(err)
		}
		total += n
	}
	return float64(total) / float64(keys)
}

// scriptTime returns the time that a server has spent on scripts.
func scriptTime(t *testing.T, admin *redis.Client) time.Duration {
	text, err := admin.Info(context.Background(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(text, "cmdstat_evalsha:")
	var calls, usec int64
	if _, err := fmt.Sscanf(rest, "calls=%d,usec=%d,", &calls, &usec); err != nil {
		t.Fatalf("commandstats %q: %v", rest, err)
	}
	return time.Duration(usec) * time.Microsecond
}

// costsInProcess measures each algorithm in this process, and the peers.
func costsInProcess(t *testing.T, keys, turns, calls int) []costOf {
	all, tasks := make([]costOf, 0, len(algorithms)+2), make([]task, 0, len(algorithms)+1)
	opened := func(name string, open func() task) {
		before := heap()
		tasks = append(tasks, open())
		all = append(all, costOf{name: name, processByte: float64(heap()-before) / float64(keys)})
	}
	for _, a := range algorithms {
		opened(a.name, func() task {
			store, of := newMemory(32*keys), []limiter.Bucket{{Name: "cost", Limit: a.limit, Cost: 1}}
			for range hundred / 2 {
				fill(t, store, of, keys)
			}
			return take(t, store, of, keys)
		})
	}
	for _, l := range libraries {
		if l.name == "x-time-rate" {
			opened("x/time/rate", func() task { return l.open(t, keys) })
		}
	}
	times, ratios := inTurns(1, turns, calls, nil, len(tasks)-1, tasks...)
	for i := range all {
		all[i].process, all[i].processOf = times[i], ratios[i]
	}
	runtime.KeepAlive(tasks)

	command := exec.CommandContext(t.Context(), "go", "run", "./mholt", "-size", fmt.Sprint(hundred), "-before", fmt.Sprint(hundred/2),
		"-keys", fmt.Sprint(keys), "-turns", fmt.Sprint(turns), "-calls", fmt.Sprint(calls))
	var complaints bytes.Buffer
	command.Stderr = &complaints
	out, err := command.Output()
	if err != nil {
		t.Fatalf("mholt/caddy-ratelimit: %v: %s", err, complaints.String())
	}
	var peer struct{ Nanoseconds, Ratio, Bytes float64 }
	if err := json.Unmarshal(out, &peer); err != nil {
		t.Fatal(err)
	}
	return append(all, costOf{
		name: "mholt/caddy-ratelimit", process: time.Duration(peer.Nanoseconds), processOf: peer.Ratio, processByte: peer.Bytes,
	})
}

// inTurns has so many callers call each task so many times in each turn, and returns the
// median of the times of a call, and of its ratios to that of the base in the same turn.
// The order changes from turn to turn. If used is not nil it tells the time.
func inTurns(callers, turns, calls int, used func() time.Duration, base int, tasks ...task) (times []time.Duration, ratios []float64) {
	c := comparison{used: used}
	took := make([][]float64, len(tasks))
	each := make([][]func(int), len(tasks))
	for i, task := range tasks {
		for range callers {
			each[i] = append(each[i], task())
		}
		took[i] = make([]float64, turns)
	}
	for turn := range turns {
		for j := range tasks {
			i := (turn + j) % len(tasks)
			cost := c.measure(func() { call(each[i], turn*calls, calls) })
			took[i][turn] = float64(cost.wall) / float64(calls)
			if used != nil {
				took[i][turn] = float64(cost.cpu) / float64(calls)
			}
		}
	}
	for _, each := range took {
		to := make([]float64, turns)
		for turn := range to {
			to[turn] = each[turn] / took[base][turn]
		}
		ratios = append(ratios, median(to))
	}
	for _, each := range took {
		times = append(times, time.Duration(median(each)))
	}
	return times, ratios
}

// costTable returns the table of costs.
func costTable(rows []costOf) string {
	var b strings.Builder
	b.WriteString("| | Redis µs | of 64 at once | round trip µs | Redis bytes | in process ns | in process bytes |\n")
	b.WriteString("|---|---:|---:|---:|---:|---:|---:|\n")
	one := func(d, unit time.Duration, format string, ratio float64) string {
		switch {
		case d == 0:
			return ""
		case ratio == 0:
			return fmt.Sprintf(format, float64(d)/float64(unit))
		}
		return fmt.Sprintf(format+" (%.2f)", float64(d)/float64(unit), ratio)
	}
	whole := func(n float64) string {
		if n == 0 {
			return ""
		}
		return fmt.Sprintf("%.0f", n)
	}
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", r.name,
			one(r.server, time.Microsecond, "%.1f", r.serverOf), one(r.batched, time.Microsecond, "%.1f", 0),
			one(r.trip, time.Microsecond, "%.0f", r.tripOf), whole(r.serverBytes),
			one(r.process, time.Nanosecond, "%.0f", r.processOf), whole(r.processByte))
	}
	return b.String()
}
