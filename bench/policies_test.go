package bench

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// policies are those whose cost is told, as what they ask of a store, beside requests with
// one limit and with two. All requests are admitted. Those that are not here ask for
// nothing more than a limit without them.
var policies = []struct {
	name  string
	of    []limiter.Bucket
	holds bool // until the end of the request, which settles it
}{
	{"one limit", []limiter.Bucket{{Limit: open, Cost: 1}}, false},
	{"`dry_run`", []limiter.Bucket{{Limit: open, Cost: 1, DryRun: true}}, false},
	{"`count`, `actual_cost`", []limiter.Bucket{{Limit: open, Cost: 1}}, true},
	{"`concurrency`", []limiter.Bucket{{Limit: limiter.Concurrency(1 << 40), Cost: 1}}, true},
	{"`ban`", []limiter.Bucket{{Limit: open, Cost: 1}, {Limit: limiter.BanAfter(1, time.Hour), Cost: 1, Watches: 1}}, false},
	{"`borrow`", []limiter.Bucket{{Limit: open, Cost: 1, Borrows: true}, {Limit: open, Cost: 1, Pool: true}}, false},
	{"two limits", []limiter.Bucket{{Limit: open, Cost: 1}, {Limit: open, Cost: 1}}, false},
}

// TestPolicyCosts guards that what each policy costs can be measured, beside a limit
// without it. With -table it measures for a minute, and writes the table.
func TestPolicyCosts(t *testing.T) {
	const keys = 1024
	turns, calls := 2, 64
	if *costsTable != "" {
		turns, calls = 20, 2048
	}
	srv := redistest.Start(t)
	store, memory, admin := openStore(t, srv.Addr, nil), newMemory(2*len(policies)*keys), srv.Client()
	var onServer, inProcess []task
	for i, p := range policies {
		for j := range p.of {
			p.of[j].Name = fmt.Sprintf("policy-%d-%d", i, j)
		}
		if p.of[0].Limit == open {
			fill(t, store, p.of, keys)
			fill(t, memory, p.of, keys)
		}
		if p.holds {
			onServer = append(onServer, holdAndSettle(t, store, p.of, keys))
			inProcess = append(inProcess, holdAndSettle(t, memory, p.of, keys))
			continue
		}
		onServer = append(onServer, take(t, store, p.of, keys))
		inProcess = append(inProcess, take(t, memory, p.of, keys))
	}
	used := func() time.Duration { return scriptTime(t, admin) }
	alone, aloneOf := inTurns(1, turns, calls, used, 0, onServer...)
	batched, batchedOf := inTurns(64, turns, 2*calls, used, 0, onServer...)
	process, processOf := inTurns(1, turns, 4*calls, nil, 0, inProcess...)
	var b strings.Builder
	b.WriteString("| | Redis µs | of 64 at once | in process ns |\n|---|---:|---:|---:|\n")
	for i, p := range policies {
		fmt.Fprintf(&b, "| %s | %.1f (%.2f) | %.1f (%.2f) | %d (%.2f) |\n", p.name,
			float64(alone[i])/1e3, aloneOf[i], float64(batched[i])/1e3, batchedOf[i], process[i].Nanoseconds(), processOf[i])
	}
	t.Log("\n" + b.String())
	if *costsTable != "" && !t.Failed() {
		writeTable(t, "policies", b.String())
	}
}
