package faults

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// serverFaults are faults of a single server.
var serverFaults = []fault{
	{"1", "Redis is killed and restarted empty; one node", func(tr *trial) { killed(tr, 1) }},
	{"1 (3 nodes)", "the same; three nodes", func(tr *trial) { killed(tr, 3) }},
	{"2", "Redis with an append-only file, written each second, is killed and restarted; one node", killedWithFile},
	{"3", "Redis is stopped by SIGSTOP and continues; one node", func(tr *trial) { stopped(tr, 1) }},
	{"3 (3 nodes)", "the same; three nodes", func(tr *trial) { stopped(tr, 3) }},
}

func killed(tr *trial, count int) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, count, caddyfile(redisAt(server.Addr), site))
	cycles := 1
	if *long {
		cycles = 5
	}
	outage{
		nodes: nodes, server: server, rate: 400, cycles: cycles, reason: "refused",
		before: during(1500*time.Millisecond, 5*time.Second), lasts: during(2*time.Second, 10*time.Second),
		after: during(time.Second, 3*time.Second),
		begin: server.Kill, end: func() { server.Restart(tr) },
	}.run(tr)
}

func killedWithFile(tr *trial) {
	server := redistest.Start(tr, "--appendonly", "yes", "--appendfsync", "everysec")
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	outage{
		nodes: nodes, server: server, rate: 400, reason: "refused",
		before: during(1500*time.Millisecond, 5*time.Second), lasts: during(2*time.Second, 10*time.Second),
		after: time.Second,
		begin: func() {
			set(tr, server, "marker", "kept")
			time.Sleep(1100 * time.Millisecond) // until it is written
			server.Kill()
		},
		end: func() {
			server.Restart(tr)
			tr.is("the file is read", server.Client().Get(tr.Context(), "marker").Val() == "kept")
			server.Client().Del(tr.Context(), "marker")
		},
	}.run(tr)
}

// set sets a key in Redis, bypassing the limiter.
func set(tr *trial, s *redistest.Server, key, value string) {
	tr.Helper()
	redistest.Done(tr, s.Client().Set(tr.Context(), key, value, 0))
}

// stopped: requests sent before the stop run when the server continues, which
// charges them twice, but admits nothing.
func stopped(tr *trial, count int) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, count, caddyfile(redisAt(server.Addr), site))
	outage{
		nodes: nodes, server: server, rate: 400, reason: "timeout",
		before: during(1500*time.Millisecond, 5*time.Second), lasts: during(2*time.Second, 10*time.Second),
		after: during(time.Second, 5*time.Second),
		begin: func() { server.Pause(tr) }, end: func() { server.Resume(tr) },
	}.run(tr)
}
