package faults

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// topologyFaults are those of servers that take each other's place.
var topologyFaults = []fault{
	{"10a", "sentinels: the master is killed, its replica takes over", masterKilled},
	{"10b", "sentinels: a failover, the old master goes on as a replica", failover},
	{"11a", "cluster: the slots of all keys move to another server", slotsMove},
	{"11b", "cluster: one of three servers is killed, cluster-require-full-coverage no", serverKilled},
	{"11c", "cluster: the same, cluster-require-full-coverage yes", coverageLost},
}

// sentinelSite returns the configuration of nodes that find Redis by sentinels.
func sentinelSite(s *redistest.Sentinel, site string) func(*node) string {
	return caddyfile(redisAt(strings.Join(s.SentinelAddrs(), " "), "master_name "+redistest.MasterName), site)
}

func masterKilled(tr *trial) {
	s := redistest.StartSentinel(tr)
	nodes := startNodes(tr, 2, sentinelSite(s, site))
	l := startLoad(tr, nodes, 200)
	time.Sleep(during(2*time.Second, 5*time.Second))
	from := time.Now()
	s.Master.Kill()
	outageEnds := eventually(tr, "the replica decides", func() bool {
		for _, n := range nodes {
			if count(n.events(from), back) == 0 {
				return false
			}
		}
		return true
	})
	time.Sleep(during(time.Second, 5*time.Second))
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "back after", outageEnds, 6*time.Second)
	others := (len(nodes) - 1) * (size + int((outageEnds+rate-1)/rate))
	most(tr, "over-admitted", excess(requests), others+inFlight)
}

func failover(tr *trial) {
	s := redistest.StartSentinel(tr)
	nodes := startNodes(tr, 2, sentinelSite(s, counted))
	began := time.Now()
	l := startLoad(tr, nodes, 200)
	time.Sleep(during(2*time.Second, 5*time.Second))
	from := time.Now()
	old := s.MasterAddr(tr)
	dials := connections(tr, s.Master)
	s.Failover(tr)
	s.WaitMasterNot(tr, old)
	switched := time.Since(from)
	time.Sleep(2 * time.Second)
	at := time.Now()
	before := decisions(tr, s.Replica)
	time.Sleep(during(time.Second, 5*time.Second))
	asked, to := decisions(tr, s.Replica)-before, time.Now()
	dials = connections(tr, s.Master) - dials
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "2 s after, not decided by the new master", len(between(requests, at, to))-asked, 4)
	most(tr, "connections to the old master", dials, len(nodes)*(5+poolSize)+int(10*(switched.Seconds()+2)))
	others := (len(nodes) - 1) * (size + int((switched+2*time.Second)/rate))
	most(tr, "over-admitted", excess(requests), others+inFlight)
	tr.note("reasons: %s", reasons(append(nodes[0].events(began), nodes[1].events(began)...)))
}

// connections returns how many connections a server has accepted so far.
func connections(tr *trial, s *redistest.Server) int {
	tr.Helper()
	info, err := s.Client().Info(tr.Context(), "stats").Result()
	if err != nil {
		tr.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "total_connections_received:")
	var n int
	if _, err := fmt.Sscan(rest, &n); err != nil {
		tr.Fatal(err)
	}
	return n
}

// clusterSite returns the configuration of nodes that use a cluster.
func clusterSite(c *redistest.Cluster, site string) func(*node) string {
	return caddyfile(redisAt(c.Addrs()[0], "cluster"), site)
}

// owners returns which server has the bucket of each hot key.
func owners(tr *trial, c *redistest.Cluster, n *node) map[string]*redistest.Server {
	tr.Helper()
	of := make(map[string]*redistest.Server)
	for i := range hotKeys {
		key := fmt.Sprintf("hot%d", i)
		before := make([]int, len(c.Nodes))
		for j, s := range c.Nodes {
			before[j] = decisions(tr, s)
		}
		n.get(key)
		for j, s := range c.Nodes {
			if decisions(tr, s) > before[j] {
				of[key] = s
			}
		}
		if of[key] == nil {
			tr.Fatalf("no server has decided on %s", key)
		}
	}
	return of
}

func slotsMove(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 2, clusterSite(c, counted))
	owners(tr, c, nodes[0]) // connects to all
	owners(tr, c, nodes[1])
	var slots []int
	for _, s := range c.Nodes {
		keys, err := s.Client().Keys(tr.Context(), "rl:*").Result()
		if err != nil {
			tr.Fatal(err)
		}
		for _, key := range keys {
			slots = append(slots, c.Slot(tr, key))
		}
	}
	slices.Sort(slots)
	slots = slices.Compact(slots)
	time.Sleep(size*rate + 100*time.Millisecond) // until all buckets are empty
	began := time.Now()
	before := decisions(tr, c.Nodes...)
	l := startLoad(tr, nodes, 200)
	moves := 0
	for _, slot := range slots {
		from := c.Owner(tr, slot)
		for i, s := range c.Nodes {
			if s == from {
				c.MoveSlot(tr, slot, c.Nodes[(i+1)%len(c.Nodes)])
				moves++
				break
			}
		}
		time.Sleep(during(0, time.Second))
	}
	time.Sleep(500 * time.Millisecond)
	requests := l.stop()
	asked := decisions(tr, c.Nodes...) - before
	most(tr, "5xx", strange(requests), 0)
	most(tr, "not decided by Redis", len(requests)-asked, len(requests)/1000)
	most(tr, "over-admitted", excess(requests), 0)
	most(tr, "under-admitted", shortfall(requests), 1)
	most(tr, "servers lost", count(append(nodes[0].events(began), nodes[1].events(began)...), lost), 0)
	settled(tr, c.Nodes...)
	tr.note("%d slots moved; logged: %s", moves, reasons(append(nodes[0].events(began), nodes[1].events(began)...)))
}

// serverKilled: the keys on other servers must not notice.
func serverKilled(tr *trial) {
	c := redistest.StartCluster(tr, 3, "--cluster-require-full-coverage", "no")
	nodes := startNodes(tr, 1, clusterSite(c, counted))
	of := owners(tr, c, nodes[0])
	dead := of["hot0"]
	var live []*redistest.Server
	for _, s := range c.Nodes {
		if s != dead {
			live = append(live, s)
		}
	}
	began := time.Now()
	l := startLoad(tr, nodes, 400)
	time.Sleep(during(2*time.Second, 5*time.Second))
	before, from := decisions(tr, live...), time.Now()
	dead.Kill()
	time.Sleep(during(4*time.Second, 15*time.Second))
	asked, to := decisions(tr, live...)-before, time.Now()
	dead.Restart(tr)
	recovery := eventually(tr, "the server decides again", func() bool {
		return count(nodes[0].events(to), back) > 0
	})
	time.Sleep(time.Second)
	requests := l.stop()

	of2 := func(requests []request, alive bool) []request {
		var some []request
		for _, r := range requests {
			if (of[r.key] != dead) == alive {
				some = append(some, r)
			}
		}
		return some
	}
	calm := percentile(of2(between(requests, began, from), true), 0.99)
	unaffected := of2(between(requests, from, to), true)
	most(tr, "5xx", strange(requests), 0)
	most(tr, "keys of live servers: not decided by Redis", len(unaffected)-asked, 8) // those under way
	most(tr, "p99: added", percentile(unaffected, 0.99)-calm, 5*time.Millisecond)
	most(tr, "over-admitted", excess(of2(requests, true)), 0)
	most(tr, "all keys: longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "keys of the dead server: over-admitted", excess(of2(requests, false)), inFlight)
	most(tr, "back after", recovery, 5*time.Second)
	most(tr, "servers lost", count(nodes[0].events(began), lost), 1)
}

func coverageLost(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 1, clusterSite(c, counted))
	of := owners(tr, c, nodes[0])
	dead, live := of["hot0"], c.Nodes[0]
	for _, s := range of {
		if s != dead {
			live = s
		}
	}
	began := time.Now()
	l := startLoad(tr, nodes, 400)
	time.Sleep(during(2*time.Second, 5*time.Second))
	dead.Kill()
	time.Sleep(during(5*time.Second, 15*time.Second))
	before := decisions(tr, live)
	time.Sleep(500 * time.Millisecond)
	still := decisions(tr, live) - before
	before = decisions(tr, live)
	dead.Restart(tr)
	recovery := eventually(tr, "the live servers decide again", func() bool {
		return decisions(tr, live) > before+10
	})
	time.Sleep(time.Second)
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "decided by live servers while the cluster is down", still, 0)
	most(tr, "back after", recovery, 5*time.Second)
	most(tr, "over-admitted", excess(requests), inFlight)
	found := reasons(nodes[0].events(began))
	tr.is("reasons "+found, strings.Contains(found, "clusterdown") && strings.Contains(found, "refused"))
}
