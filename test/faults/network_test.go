package faults

import (
	"net"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// networkFaults are faults between nodes and Redis.
var networkFaults = []fault{
	{"4a", "answers take 20 ms", slowAnswers},
	{"4b", "answers take 200 ms, give or take 50", tooSlowAnswers},
	{"4c", "answers take 40 and 60 ms in turn, a second each", flappingAnswers},
	{"5a", "Redis runs calls, but the connections break before the answers come", cutAnswers},
	{"5a (cluster)", "the same in a cluster", cutAnswersInCluster},
	{"5b", "answers come a byte at a time", slicedAnswers},
	{"5c", "a black hole: connections are accepted, nothing passes", blackHole},
	{"5d", "connections are refused", refused},
}

// behindProxy starts a server and a node that reaches it through a proxy.
func behindProxy(tr *trial, site string) (*redistest.Server, *redistest.Proxy, []*node) {
	server := redistest.Start(tr)
	proxy := redistest.StartProxy(tr, server.Addr)
	return server, proxy, startNodes(tr, 1, caddyfile(redisAt(proxy.Addr), site))
}

func slowAnswers(tr *trial) {
	server, proxy, nodes := behindProxy(tr, counted)
	l := startLoad(tr, nodes, 50) // so few that none are batched
	time.Sleep(time.Second)
	proxy.Delay(20 * time.Millisecond)
	from := time.Now()
	before := decisions(tr, server)
	time.Sleep(during(3*time.Second, 20*time.Second))
	to := time.Now()
	asked := decisions(tr, server) - before
	requests := l.stop()
	slow := between(requests, from, to)
	most(tr, "5xx", strange(requests), 0)
	decidedOnce(tr, "not decided by Redis", len(slow), asked, 10, 10) // requests in flight
	most(tr, "p99", percentile(slow, 0.99), 30*time.Millisecond+slack)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "servers lost", count(nodes[0].events(from), lost), 0)
}

func tooSlowAnswers(tr *trial) {
	server, proxy, nodes := behindProxy(tr, site)
	lasts := during(2500*time.Millisecond, 20*time.Second)
	before, asked := 0, 0
	outage{
		// So many that the probes, which do wait, are less than one percent.
		nodes: nodes, server: server, rate: 800, reason: "timeout",
		before: during(1500*time.Millisecond, 5*time.Second), lasts: lasts, after: time.Second,
		begin: func() {
			before = decisions(tr, server)
			proxy.Delay(200*time.Millisecond, 50*time.Millisecond)
		},
		end: func() {
			asked = decisions(tr, server) - before
			proxy.Pass()
		},
	}.run(tr)
	// This includes requests in flight at the start of the fault.
	most(tr, "calls that reached Redis meanwhile", asked, 5+int(8*lasts.Seconds()))
}

func flappingAnswers(tr *trial) {
	_, proxy, nodes := behindProxy(tr, site)
	began := time.Now()
	l := startLoad(tr, nodes, 200)
	for range int(during(6, 60)) {
		proxy.Delay(40 * time.Millisecond)
		time.Sleep(500 * time.Millisecond)
		proxy.Delay(60 * time.Millisecond)
		time.Sleep(500 * time.Millisecond)
	}
	requests := l.stop()
	events := nodes[0].events(began)
	changes := count(events, lost) + count(events, back)
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "changes of state", changes, int(4*time.Since(began).Seconds()))
	overAdmitted(tr, requests, 0, 0)
}

// cutAnswers: a call whose answer is lost may have charged. It must not be sent
// again.
func cutAnswers(tr *trial) {
	server, proxy, nodes := behindProxy(tr, site)
	before := decisions(tr, server)
	proxy.CutReplies("evalsha")
	l := startLoad(tr, nodes, 200)
	lasts := during(2*time.Second, 10*time.Second)
	time.Sleep(lasts)
	requests := l.stop()
	ran := decisions(tr, server) - before
	most(tr, "5xx", strange(requests), 0)
	most(tr, "calls run", ran, len(requests))
	least(tr, "of which answers were lost", ran, 5)
	most(tr, "a second", float64(ran)/lasts.Seconds(), 10+perServer/lasts.Seconds())
	overAdmitted(tr, requests, 0, 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
}

// cutAnswersInCluster: nor may it be sent to another server.
func cutAnswersInCluster(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	var proxies []*redistest.Proxy
	for _, s := range c.Nodes {
		proxy := redistest.StartProxy(tr, s.Addr)
		_, port, _ := net.SplitHostPort(proxy.Addr)
		redistest.Done(tr, s.Client().ConfigSet(tr.Context(), "cluster-announce-port", port))
		proxies = append(proxies, proxy)
	}
	eventually(tr, "all servers know the new ports", func() bool {
		for _, s := range c.Nodes {
			text, err := s.Client().Do(tr.Context(), "cluster", "nodes").Text()
			if err != nil {
				tr.Fatal(err)
			}
			for _, proxy := range proxies {
				if !strings.Contains(text, proxy.Addr+"@") {
					return false
				}
			}
		}
		return true
	})
	nodes := startNodes(tr, 1, caddyfile(redisAt(proxies[0].Addr, "cluster"), site))
	owners(tr, c, nodes[0]) // connects to all
	before := decisions(tr, c.Nodes...)
	for _, proxy := range proxies {
		proxy.CutReplies("evalsha")
	}
	l := startLoad(tr, nodes, 200)
	time.Sleep(during(2*time.Second, 10*time.Second))
	requests := l.stop()
	ran := decisions(tr, c.Nodes...) - before
	most(tr, "5xx", strange(requests), 0)
	most(tr, "calls run", ran, len(requests))
	least(tr, "of which answers were lost", ran, 15)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
}

func slicedAnswers(tr *trial) {
	_, proxy, nodes := behindProxy(tr, site)
	l := startLoad(tr, nodes, 200)
	time.Sleep(time.Second)
	proxy.Slice(1, 0)
	from := time.Now()
	time.Sleep(during(1500*time.Millisecond, 10*time.Second))
	to := time.Now()
	proxy.Slice(1, 10*time.Millisecond)
	time.Sleep(during(1500*time.Millisecond, 10*time.Second))
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "servers lost while bytes are some µs apart", count(eventsUntil(nodes[0], from, to), lost), 0)
	overAdmitted(tr, requests, 0, 0)
}

// eventsUntil returns what a node logged within a time.
func eventsUntil(n *node, from, to time.Time) []event {
	var events []event
	for _, e := range n.events(from) {
		if e.at().Before(to) {
			events = append(events, e)
		}
	}
	return events
}

func blackHole(tr *trial) {
	server, proxy, nodes := behindProxy(tr, site)
	cutOff(tr, server, nodes, "timeout", during(3*time.Second, 60*time.Second), proxy.BlackHole, proxy.Pass)
}

func refused(tr *trial) {
	server, proxy, nodes := behindProxy(tr, site)
	cutOff(tr, server, nodes, "refused", during(2*time.Second, 60*time.Second), proxy.Refuse, proxy.Pass)
}

// cutOff prevents requests from reaching the server for a time.
func cutOff(
	tr *trial, server *redistest.Server, nodes []*node, reason string, lasts time.Duration, begin, end func(),
) {
	outage{
		nodes: nodes, server: server, rate: 400, reason: reason,
		before: during(1500*time.Millisecond, 5*time.Second), lasts: lasts, after: time.Second,
		begin: begin, end: end,
	}.run(tr)
}
