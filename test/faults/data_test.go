package faults

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// dataFaults are faults in what Redis holds, or accepts.
var dataFaults = []fault{
	{"6", "SCRIPT FLUSH every 100 ms", scriptFlush},
	{"7", "FLUSHALL every 2 s", flushAll},
	{"8a", "out of memory, noeviction", outOfMemory},
	{"8b", "out of memory, allkeys-lru, many cold keys", eviction},
	{"9", "busy with a script; CLIENT PAUSE; too many clients", busy},
	{"16", "values of ours replaced by garbage", garbage},
	{"29", "Redis is killed and restarted empty; meanwhile requests are only denied; one node", lostData},
}

func scriptFlush(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 2, caddyfile(redisAt(server.Addr), site))
	began := time.Now()
	l := startLoad(tr, nodes, 200)
	flushes := 0
	for range int(during(20, 200)) {
		time.Sleep(100 * time.Millisecond)
		redistest.Done(tr, server.Client().ScriptFlush(tr.Context()))
		flushes++
	}
	requests := l.stop()
	events := 0
	for _, n := range nodes {
		events += len(n.events(began))
	}
	evals := int(server.CommandStat(tr, "eval"))
	most(tr, "5xx", strange(requests), 0)
	overAdmittedTogether(tr, nodes, began, requests)
	most(tr, "under-admitted", shortfall(requests), 1)
	most(tr, "EVAL", evals, (flushes+1)*(len(nodes)*perServer+1))
	most(tr, "calls", decisions(tr, server), len(requests))
	most(tr, "lines logged", events, 0)
}

func flushAll(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	began := time.Now()
	l := startLoad(tr, nodes, 400)
	flushes := int(during(2, 10))
	for range flushes {
		time.Sleep(2 * time.Second)
		redistest.Done(tr, server.Client().FlushAll(tr.Context()))
	}
	time.Sleep(time.Second)
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	overAdmitted(tr, requests, flushes*size, flushes*slowSize)
	most(tr, "lines logged", len(nodes[0].events(began)), 0)
}

func outOfMemory(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	limit := func(memory string) {
		redistest.Done(tr, server.Client().ConfigSet(tr.Context(), "maxmemory", memory))
	}
	outage{
		nodes: nodes, server: server, rate: 400, reason: "oom",
		before: during(1500*time.Millisecond, 5*time.Second), lasts: during(2*time.Second, 10*time.Second), after: time.Second,
		begin: func() { limit("1") }, end: func() { limit("0") },
	}.run(tr)
}

// eviction: buckets in use are not the ones that Redis evicts.
func eviction(tr *trial) {
	server := redistest.Start(tr, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru", "--maxmemory-samples", "10")
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	cold := 0
	fill := func(keys int, pause time.Duration) {
		pipe := server.Client().Pipeline()
		for range keys / 100 {
			for range 100 {
				pipe.Set(tr.Context(), fmt.Sprintf("cold:%d", cold), strings.Repeat("x", 64), 0)
				cold++
			}
			if _, err := pipe.Exec(tr.Context()); err != nil {
				tr.Fatal(err)
			}
			time.Sleep(pause)
		}
	}
	// Redis measures age in seconds: until the cold keys are older, any key may be
	// evicted.
	fill(60_000, 0)
	time.Sleep(1500 * time.Millisecond)
	began := time.Now()
	l := startLoad(tr, nodes, 400)
	fill(int(during(10_000, 140_000)), 20*time.Millisecond)
	requests := l.stop()
	stats, err := server.Client().Info(tr.Context(), "stats").Result()
	if err != nil {
		tr.Fatal(err)
	}
	tr.is("keys were evicted", !strings.Contains(stats, "evicted_keys:0\r"))
	most(tr, "5xx", strange(requests), 0)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "servers lost", count(nodes[0].events(began), lost), 0)
}

// busy goes through states in which Redis answers, but with errors.
func busy(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	admin := server.Client()
	lasts := during(1500*time.Millisecond, 6*time.Second)
	for _, state := range []struct {
		reason     string
		begin, end func()
	}{
		{"busy", func() {
			redistest.Done(tr, admin.ConfigSet(tr.Context(), "busy-reply-threshold", "10"))
			go admin.Eval(context.Background(), "while true do end", nil)
		}, func() {
			eventually(tr, "SCRIPT KILL", func() bool { return admin.ScriptKill(tr.Context()).Err() == nil })
		}},
		{"timeout", func() {
			redistest.Done(tr, admin.ClientPause(tr.Context(), lasts+100*time.Millisecond))
		}, func() {
			// Nothing else may end the pause: a command to end it would have to
			// wait for it.
			redistest.Done(tr, admin.Ping(tr.Context()))
		}},
		{"maxclients", func() {
			redistest.Done(tr, admin.ConfigSet(tr.Context(), "maxclients", "1"))
			redistest.Done(tr, admin.Do(tr.Context(), "client", "kill", "type", "normal", "skipme", "yes"))
		}, func() {
			redistest.Done(tr, admin.ConfigSet(tr.Context(), "maxclients", "1000"))
		}},
	} {
		began := time.Now()
		l := startLoad(tr, nodes, 200)
		time.Sleep(time.Second)
		state.begin()
		time.Sleep(lasts)
		ended := time.Now()
		state.end()
		recovery := eventually(tr, "Redis decides again after "+state.reason, func() bool {
			return count(nodes[0].events(ended), back) > 0
		})
		time.Sleep(200 * time.Millisecond)
		requests := l.stop()
		found := reasons(nodes[0].events(began))
		tr.is("reason "+found, strings.Contains(found, state.reason))
		most(tr, "5xx", strange(requests), 0)
		most(tr, "longest wait", percentile(requests, 1), timeout+slack)
		most(tr, "back after", recovery, 2*time.Second)
		overAdmitted(tr, requests, 0, 0)
	}
}

// garbage: whatever something else writes to a key of ours counts as an empty
// bucket, or as a full one if its time is in the future, and is replaced by the
// next request.
func garbage(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	admin := server.Client()
	began := time.Now()
	nodes[0].get("k")
	keys, err := admin.Keys(tr.Context(), "rl:*").Result()
	if err != nil || len(keys) != 1 {
		tr.Fatal(keys, err)
	}
	values := []string{"text", "nan", "-1", "1e300", "", "inf", "0x10", "1:2:3", "99999999999999999999"}
	for _, value := range values {
		set(tr, server, keys[0], value)
		if res := nodes[0].get("k"); res.StatusCode != 200 || res.Header.Get("X-RateLimit-Remaining") != "19" {
			tr.Errorf("%q: status %d, remaining %s", value, res.StatusCode, res.Header.Get("X-RateLimit-Remaining"))
		}
		if ttl := admin.PTTL(tr.Context(), keys[0]).Val(); ttl <= 0 || ttl > size*rate {
			tr.Errorf("%q: expires in %v afterwards", value, ttl)
		}
	}
	redistest.Done(tr, admin.Del(tr.Context(), keys[0]))
	redistest.Done(tr, admin.LPush(tr.Context(), keys[0], "a"))
	res := nodes[0].get("k")
	tr.is("a list counts as empty", res.StatusCode == 200 && res.Header.Get("X-RateLimit-Remaining") == "19")

	// A bucket that was full when it was written, in two hours: the clock was set
	// back. The bucket is full, for no longer than it takes to drain.
	const drain = uint32(size * rate / time.Microsecond)
	clear := uint64(time.Now().Add(2*time.Hour).UnixMicro()) + uint64(drain)
	value := binary.BigEndian.AppendUint64(nil, 8<<60|clear<<8)
	set(tr, server, keys[0], string(binary.BigEndian.AppendUint32(value, drain)))
	res = nodes[0].get("k")
	tr.is("two hours ahead counts as full", res.StatusCode == 429 && res.Header.Get("X-RateLimit-Clear") == "2.000")
	events := nodes[0].events(began)
	tr.is("reason "+reasons(events), reasons(events) == "corrupt")
	most(tr, "lines logged", len(events), 1)
	tr.note("%d kinds of values", len(values)+2)
}

// lostData: a bucket that only denies while Redis is down is as full when Redis is
// back as it was before.
func lostData(tr *trial) {
	const size = 10
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), fmt.Sprintf(`
		rate_limit {
			key {header.X-Key}
			size %d
			drip_rate 1h
			cost {header.X-Cost}
		}
		respond ok
	`, size)))
	n := nodes[0]
	// ask returns how many units the requests with a cost were admitted.
	ask := func(key string, cost, requests int) int {
		admitted := 0
		for range requests {
			if n.ask("/", "X-Key", key, "X-Cost", fmt.Sprint(cost)).StatusCode == http.StatusOK {
				admitted += cost
			}
		}
		return admitted
	}
	kinds := []struct {
		name         string
		cost, before int // the cost of earlier requests, and the units they have together
		denied       int // the number of requests denied meanwhile
		deniedCost   int // and the cost of each
	}{
		{"full", 1, size, 250, 1},
		{"filled at once", size, size, 25, size},
		{"half full", 1, size / 2, 25, size/2 + 1},
	}
	for _, k := range kinds {
		if got := ask(k.name, k.cost, k.before/k.cost); got != k.before {
			tr.Fatalf("%s: %d units admitted at first, want %d", k.name, got, k.before)
		}
	}
	server.Kill()
	began := time.Now()
	meanwhile := make([]int, len(kinds))
	for i, k := range kinds {
		meanwhile[i] = ask(k.name, k.deniedCost, k.denied)
	}
	server.Restart(tr)
	eventually(tr, "Redis decides again", func() bool {
		n.ask("/", "X-Key", "other", "X-Cost", "1")
		return count(n.events(began), back) > 0
	})
	time.Sleep(1100 * time.Millisecond) // until the deny cache has expired
	for i, k := range kinds {
		strictly(tr, k.name+": units admitted while Redis is down", meanwhile[i], 0)
		strictly(tr, "and afterwards", ask(k.name, 1, 2*size), size-k.before)
	}
}
