package faults

import (
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// topologyFaults are faults in which servers take each other's place.
var topologyFaults = []fault{
	{"10a", "sentinels: the master is killed, its replica takes over", masterKilled},
	{"10b", "sentinels: a failover, the old master goes on as a replica", failover},
	{"11a", "cluster: the slots of all keys move to another server, key by key", slotsMove},
	{"11b", "cluster: one of three servers is killed, cluster-require-full-coverage no", serverKilled},
	{"11c", "cluster: the same, cluster-require-full-coverage yes", coverageLost},
	{"30", "cluster: limits of several keys in one block, a flood from one client over 16, 128 and 512 connections", severalKeys},
	{"31", "cluster: of four servers one dies and is forgotten, one leaves, one is replaced by its replica", serversLeave},
}

// sentinelSite returns the configuration of nodes that find Redis through
// sentinels.
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
	hot, slow := apart(len(nodes), outageEnds)
	overAdmitted(tr, requests, hot, slow)
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
	decidedOnce(tr, "2 s after, not decided by the new master", len(between(requests, at, to)), asked, 4, 4) // requests in flight
	most(tr, "connections to the old master", dials, len(nodes)*(5+perServer)+int(10*(switched.Seconds()+2)))
	hot, slow := apart(len(nodes), switched+2*time.Second)
	overAdmitted(tr, requests, hot, slow)
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
		of[key] = owner(tr, c, n, key)
	}
	return of
}

// owner returns which server has the buckets of a key, by asking the hot limit.
func owner(tr *trial, c *redistest.Cluster, n *node, key string) *redistest.Server {
	tr.Helper()
	before := make([]int, len(c.Nodes))
	for i, s := range c.Nodes {
		before[i] = decisions(tr, s)
	}
	n.get(key)
	for i, s := range c.Nodes {
		if decisions(tr, s) > before[i] {
			return s
		}
	}
	tr.Fatalf("no server has decided on %s", key)
	return nil
}

// moveByKey moves a slot one key at a time, so that some requests have one of their
// buckets on each server.
func moveByKey(tr *trial, c *redistest.Cluster, slot int, to *redistest.Server) {
	tr.Helper()
	from := c.Owner(tr, slot)
	c.BeginMove(tr, slot, to)
	for {
		keys, err := from.Client().ClusterGetKeysInSlot(tr.Context(), slot, 1).Result()
		if err != nil {
			tr.Fatal(err)
		}
		if len(keys) == 0 {
			break
		}
		c.MoveKeys(tr, slot, to, keys...)
		time.Sleep(100 * time.Millisecond)
	}
	c.EndMove(tr, slot, to)
}

func slotsMove(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 2, clusterSite(c, counted))
	owners(tr, c, nodes[0]) // connects to all
	owners(tr, c, nodes[1])
	time.Sleep(size*rate + 100*time.Millisecond) // until all buckets are empty
	began := time.Now()
	before := decisions(tr, c.Nodes...)
	l := startLoad(tr, nodes, 200)
	time.Sleep(500 * time.Millisecond) // until buckets of the slow limit are there
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
	moves := 0
	for _, slot := range slots {
		from := c.Owner(tr, slot)
		for i, s := range c.Nodes {
			if s == from {
				moveByKey(tr, c, slot, c.Nodes[(i+1)%len(c.Nodes)])
				moves++
				break
			}
		}
		time.Sleep(during(0, time.Second))
	}
	time.Sleep(500 * time.Millisecond)
	requests := l.stop()
	asked := decisions(tr, c.Nodes...) - before
	// While only one of a request's two buckets has moved, a server refuses it once or
	// twice. If it goes on to do so, each bucket is asked for by a call of its own.
	refused, elsewhere := 0, 0
	for _, s := range c.Nodes {
		refused += int(s.ErrorStat(tr, "TRYAGAIN"))
	}
	for _, n := range nodes {
		elsewhere += n.decided("fallback", "(?:hot|slow)/all", "[a-z_]+")
	}
	most(tr, "5xx", strange(requests), 0)
	most(tr, "decided elsewhere", elsewhere, len(requests)/1000)
	decidedOnce(tr, "not run by Redis", len(requests), asked, refused, len(requests)/1000)
	overAdmittedTogether(tr, nodes, began, requests)
	most(tr, "under-admitted", shortfall(requests), 1)
	most(tr, "servers lost", count(append(nodes[0].events(began), nodes[1].events(began)...), lost), 0)
	settled(tr, c.Nodes...)
	tr.note("%d slots moved; %d calls refused; logged: %s", moves, refused, reasons(append(nodes[0].events(began), nodes[1].events(began)...)))
}

// serverKilled: keys on other servers must not be affected.
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
	time.Sleep(during(3*time.Second, 15*time.Second))
	asked, to := decisions(tr, live...)-before, time.Now()
	dead.Restart(tr)
	recovery := eventually(tr, "the server decides again", func() bool {
		return count(nodes[0].events(to), back) > 0
	})
	time.Sleep(time.Second)
	requests := l.stop()
	for _, r := range requests {
		if of[r.key] == nil {
			of[r.key] = owner(tr, c, nodes[0], r.key)
		}
	}

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
	decidedOnce(tr, "keys of live servers: not decided by Redis", len(unaffected), asked, 8, 8) // requests in flight
	most(tr, "p99: added", percentile(unaffected, 0.99)-calm, 5*time.Millisecond)
	overAdmitted(tr, of2(requests, true), 0, 0)
	most(tr, "all keys: longest wait", percentile(requests, 1), timeout+slack)
	tr.note("keys of the dead server")
	overAdmitted(tr, of2(requests, false), 0, 0)
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
	time.Sleep(during(4*time.Second, 15*time.Second))
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
	overAdmitted(tr, requests, 0, 0)
	found := reasons(nodes[0].events(began))
	tr.is("reasons "+found, strings.Contains(found, "clusterdown") && strings.Contains(found, "refused"))
}

// severalKeys: a flood of one client costs the shared limit only what that client
// was admitted.
func severalKeys(tr *trial) {
	const all, each = 5000, 10
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 1, clusterSite(c, fmt.Sprintf(`
		rate_limit site {
			headers ratelimit-11
			limit everybody {
				key all
				size %d
				drip_rate 1h
			}
			limit ip {
				key {header.X-Key}
				size %d
				drip_rate 1h
			}
		}
		respond ok
	`, all, each)))
	n := nodes[0]
	others, refused := 0, 0
	// left sends a request of a new client, and returns what is left to all
	// clients then.
	left := func() int {
		others++
		res := n.get(fmt.Sprint("other", others))
		if res.StatusCode != http.StatusOK {
			refused++
			return 0
		}
		_, rest, _ := strings.Cut(res.Header.Get("RateLimit"), `"site/everybody";r=`)
		var units int
		if _, err := fmt.Sscan(strings.SplitN(rest, ";", 2)[0], &units); err != nil {
			tr.Fatalf("%v in %q", err, res.Header)
		}
		return units
	}
	for range 2 * hotKeys {
		left() // connects to all
	}
	for _, connections := range []int{16, 128, 512} {
		before, asked := left(), others
		refused = 0
		crowd := make(chan []request)
		go func() {
			crowd <- hammer(tr, nodes, connections, during(1500*time.Millisecond, 3*time.Second), func(int) request {
				return request{key: fmt.Sprint("flood", connections)}
			})
		}()
		var requests []request
		for requests == nil {
			select {
			case requests = <-crowd:
			case <-time.After(100 * time.Millisecond):
				left()
			}
		}
		admitted := 0
		for _, r := range requests {
			if r.status == http.StatusOK {
				admitted++
			}
		}
		// Units that are still to be released may take a moment.
		var lost int
		for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			if lost = before - left() - (others - asked) - admitted; lost <= 0 {
				break
			}
		}
		tr.note("%d connections, %d requests", connections, len(requests))
		most(tr, "5xx", strange(requests), 0)
		strictly(tr, "admitted", admitted, each)
		most(tr, "units that all have lost beyond that", lost, 0)
		strictly(tr, "and that they have gained", max(-lost, 0), 0)
		most(tr, "others refused", refused, 0)
	}
}

// serversLeave: a server that has left a cluster is no longer used.
func serversLeave(tr *trial) {
	c := redistest.StartCluster(tr, 4, "--cluster-require-full-coverage", "no")
	nodes := startNodes(tr, 1, clusterSite(c, site))
	l := startLoad(tr, nodes, 200)
	time.Sleep(time.Second)
	var attempts atomic.Int64
	for _, leave := range []func(*redistest.Server){
		func(s *redistest.Server) { // found dead by requests
			s.Kill()
			time.Sleep(time.Second)
			l.stop()
			c.Remove(tr, s)
		},
		func(s *redistest.Server) { c.Remove(tr, s) },
		func(s *redistest.Server) { c.Replace(tr, s) },
	} {
		gone := c.Nodes[len(c.Nodes)-1]
		leave(gone)
		listener, err := net.Listen("tcp", gone.Addr)
		if err != nil {
			tr.Fatal(err)
		}
		tr.Cleanup(func() { _ = listener.Close() })
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				attempts.Add(1)
				_ = conn.Close()
			}
		}()
	}
	l = startLoad(tr, nodes, 200)
	// A server that is still used is connected to four times a second. go-redis, which tries all addresses that
	// it has known in the last minute, learns the slots anew every two seconds.
	const quiet, patience = 1500 * time.Millisecond, 14 * time.Second
	began, last, seen := time.Now(), time.Now(), attempts.Load()
	for time.Since(last) < quiet && time.Since(began) < patience {
		time.Sleep(20 * time.Millisecond)
		if now := attempts.Load(); now != seen {
			last, seen = time.Now(), now
		}
	}
	requests := l.stop()
	tr.is(fmt.Sprintf("left alone after %s", show(last.Sub(began))), time.Since(last) >= quiet)
	tr.note("%d attempts to connect", seen)
	most(tr, "5xx", strange(requests), 0)
	overAdmitted(tr, requests, 0, 0)
}
