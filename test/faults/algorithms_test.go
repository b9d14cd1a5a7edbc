package faults

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// algorithmFaults are faults while limits of all algorithms decide.
var algorithmFaults = []fault{
	{"43", "limits of each algorithm; three nodes, without a fault", algorithmsTogether},
	{"43 (killed)", "the same; Redis is killed and restarted empty; one node", algorithmsKilled},
	{"43 (stopped)", "the same; it is stopped by SIGSTOP and continues", algorithmsStopped},
	{"43 (Caddy)", "the same; Caddy is killed and restarted; one node", algorithmsOfRestartedCaddy},
}

// algorithmLimit is a limit of some algorithm, with a path of its own.
type algorithmLimit struct {
	path, options string

	// The most requests that are admitted from one moment to another.
	most func(from, to time.Time) int
}

// algorithmLimits are a slow and a fast limit of each algorithm. Those of an hour
// show a single request too many.
func algorithmLimits() []algorithmLimit {
	var all []algorithmLimit
	for _, w := range []time.Duration{500 * time.Millisecond, time.Hour} {
		const n = 20
		// windows returns how many windows of the clock lie between two moments,
		// in part or whole.
		windows := func(from, to time.Time) int {
			return int(to.UnixNano()/int64(w) - from.UnixNano()/int64(w) + 1)
		}
		limit := func(name, options string, most func(from, to time.Time) int) {
			all = append(all, algorithmLimit{fmt.Sprintf("/%s-%v", name, w), options, most})
		}
		limit("leaky", fmt.Sprintf("size %d\ndrip_rate %v", n, w/n), leaky(n, w/n))
		limit("token", fmt.Sprintf("algorithm token_bucket\nsize %d\ndrip_rate %v", n, w/n), leaky(n, w/n))
		limit("fixed", fmt.Sprintf("algorithm fixed_window\nsize %d\nwindow %v", n, w),
			func(from, to time.Time) int { return n * windows(from, to) })
		limit("first", fmt.Sprintf("algorithm fixed_window\nsize %d\nwindow %v\nwindow_start first", n, w),
			func(from, to time.Time) int { return n * (int(to.Sub(from)/w) + 2) })
		limit("sliding", fmt.Sprintf("algorithm sliding_window\nsize %d\nwindow %v", n, w), func(from, to time.Time) int {
			// See docs/algorithms.md.
			whole, part := to.Sub(from)/w, to.Sub(from)%w
			return n*(int(whole)+1) + int(n*part/w) + 1
		})
		limit("log", fmt.Sprintf("algorithm sliding_log\nsize %d\nwindow %v", n, w),
			func(from, to time.Time) int { return n * (int(to.Sub(from)/w) + 1) })
		limit("warm", fmt.Sprintf("algorithm warm_up\nrate %d/%v\nwarm_up %v", n, w, 5*w),
			func(from, to time.Time) int { return 1 + int(to.Sub(from)/(w/n)) })
		limit("counted", fmt.Sprintf("algorithm sliding_log\nsize %d\nwindow %v\ncount_denied", n, w),
			func(from, to time.Time) int { return n * (int(to.Sub(from)/w) + 1) })
	}
	return all
}

// algorithmSite returns a site with these limits.
func algorithmSite() string {
	var text strings.Builder
	for _, l := range algorithmLimits() {
		fmt.Fprintf(&text, "rate_limit %s %s {\nkey {header.X-Key}\n%s\n}\n", l.path, l.path[1:], l.options)
	}
	return text.String() + "respond ok\n"
}

// useAlgorithms sends requests to all limits in turn over the given number of
// connections to each node, for one key all the time and for another every quarter
// of a second.
func useAlgorithms(tr *trial, nodes []*node, connections int, lasts time.Duration) []request {
	l := newLoad(tr, connections)
	defer l.client.CloseIdleConnections()
	limits, began := algorithmLimits(), time.Now()
	for i, n := range nodes {
		for c := range connections {
			l.wg.Go(func() {
				for turn := c; time.Since(began) < lasts; turn++ {
					r := request{node: i, due: time.Now(), path: limits[turn%len(limits)].path, key: "one"}
					if turn/len(limits)%2 == 1 {
						r.key = fmt.Sprint("new", time.Since(began)/(250*time.Millisecond))
					}
					l.do("http://"+n.addr+r.path, r)
				}
			})
		}
	}
	l.wg.Wait()
	return l.requests
}

// judgeAlgorithms judges how many requests each limit admitted for one key beyond
// its bound, and that each limit has admitted and denied.
func judgeAlgorithms(tr *trial, requests []request) {
	tr.Helper()
	most(tr, "5xx", strange(requests), 0)
	worst := 0
	for _, l := range algorithmLimits() {
		some := slices.DeleteFunc(slices.Clone(requests), func(r request) bool { return r.path != l.path })
		over := beyond(some, l.most)
		if over > 0 {
			tr.Logf("%s: over-admitted %d", l.path, over)
		}
		worst = max(worst, over)
		admitted, denied := 0, 0
		for _, r := range some {
			switch r.status {
			case 200:
				admitted++
			case 429:
				denied++
			}
		}
		if admitted == 0 || denied == 0 {
			tr.is(fmt.Sprintf("%s: admitted %d, denied %d", l.path, admitted, denied), false)
		}
	}
	strictly(tr, "over-admitted", worst, 0)
	tr.note("%d requests", len(requests))
}

func algorithmsTogether(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 3, caddyfile(redisAt(server.Addr), algorithmSite()))
	began := time.Now()
	requests := useAlgorithms(tr, nodes, 8, during(3*time.Second, 20*time.Second))
	broken := tr.broken
	judgeAlgorithms(tr, requests)
	for _, n := range nodes {
		if len(n.events(began)) > 0 { // it did not reach Redis in time, and so did not know of the others
			tr.broken = broken
		}
	}
}

func algorithmsKilled(tr *trial) {
	server := redistest.Start(tr)
	algorithmsInOutage(tr, server, server.Kill, func() { server.Restart(tr) })
}

func algorithmsStopped(tr *trial) {
	server := redistest.Start(tr)
	algorithmsInOutage(tr, server, func() { server.Pause(tr) }, func() { server.Resume(tr) })
}

// algorithmsInOutage is a time under load in which Redis is away for a third of it.
func algorithmsInOutage(tr *trial, server *redistest.Server, begin, end func()) {
	tr.Helper()
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), algorithmSite()))
	nodes[0].get("first") // connects
	third := during(1500*time.Millisecond, 10*time.Second)
	all := make(chan []request)
	go func() { all <- useAlgorithms(tr, nodes, 16, 3*third) }()
	time.Sleep(third)
	begin()
	time.Sleep(third)
	ended := time.Now()
	end()
	requests := <-all
	eventually(tr, "Redis decides again", func() bool { return count(nodes[0].events(ended), back) > 0 })
	judgeAlgorithms(tr, requests)
}

// algorithmsOfRestartedCaddy: what the process admitted is in Redis.
func algorithmsOfRestartedCaddy(tr *trial) {
	server := redistest.Start(tr)
	config := caddyfile(redisAt(server.Addr), algorithmSite())
	var requests []request
	for range 2 {
		n := startNode(tr, config)
		requests = append(requests, useAlgorithms(tr, []*node{n}, 16, during(time.Second, 5*time.Second))...)
		n.caddy.Stop()
	}
	judgeAlgorithms(tr, requests)
}
