package faults

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// localFaults are faults while nodes decide by themselves, with a Redis that is far away.
var localFaults = []fault{
	{"44", "Redis is 20 ms away in each direction, `consistency lease 100ms`; three nodes: no fault, FLUSHALL, one crashes, Redis is stopped, killed", leased},
	{"44 (eventual)", "the same, `consistency eventual 100ms`", reported},
	{"44 (cut off)", "`consistency lease 100ms`; one of three nodes is cut off from Redis, with `on_error deny` and with `fallback`", leasedCutOff},
	{"44 (failover)", "cluster: a failover of the server that has the key, `consistency lease 100ms`; two nodes", leasedFailover},
	{"44 (down)", "all limits have `consistency eventual 100ms`, then `lease 100ms`: Redis is stopped, killed, cut off for longer; one node", localWhileDown},
}

const (
	within    = 100 * time.Millisecond // of a lease, or between reports
	roundTrip = 40 * time.Millisecond
	patient   = 250 * time.Millisecond // the timeout

	// The limit, which the nodes flood.
	localSize = 100
	localRate = 10 * time.Millisecond
)

// leased: what was charged at most so long before is used, in all nodes together.
func leased(tr *trial) { decidedLocally(tr, "lease", within, 0) }

// reported: each node may admit what it has not heard of yet.
func reported(tr *trial) { decidedLocally(tr, "eventual", 0, within+roundTrip) }

// decidedLocally floods one key on three nodes during each fault. In any time a limit may
// admit what it may in that time and ahead, and what nodes admit that do not know of each
// other for a time of unaware, or as long as Redis is away.
func decidedLocally(tr *trial, by string, ahead, unaware time.Duration) {
	tr.Helper()
	site := localSite(by, "fallback")
	const three = 3
	third := during(700*time.Millisecond, 5*time.Second)
	for _, kind := range []struct {
		name    string
		full    int // buckets that are emptied
		fault   func(*redistest.Server, []*node)
		outage  bool
		crashes bool
	}{
		{name: "no fault"},
		{name: "FLUSHALL", full: 1, fault: func(s *redistest.Server, _ []*node) {
			redistest.Done(tr, s.Client().FlushAll(tr.Context()))
		}},
		{name: "a node crashes", crashes: true, fault: func(_ *redistest.Server, nodes []*node) { nodes[three-1].caddy.Stop() }},
		{name: "stopped", outage: true, fault: func(s *redistest.Server, _ []*node) {
			s.Pause(tr)
			time.Sleep(third)
			s.Resume(tr)
		}},
		{name: "killed", outage: true, fault: func(s *redistest.Server, _ []*node) {
			s.Kill()
			time.Sleep(third)
			s.Restart(tr)
		}},
	} {
		server := redistest.Start(tr)
		proxy := redistest.StartProxy(tr, server.Addr)
		proxy.Delay(roundTrip)
		nodes := startNodes(tr, three, caddyfile(redisAt(proxy.Addr, fmt.Sprintf("timeout %v", patient)), site))
		for _, n := range nodes {
			n.get("first") // connects
		}
		time.Sleep(4 * roundTrip)
		began := time.Now()
		all := make(chan []request)
		go func() {
			all <- hammer(tr, nodes, 8, 3*third, func(int) request { return request{key: "one"} })
		}()
		time.Sleep(third)
		away := time.Now()
		if kind.fault != nil {
			kind.fault(server, nodes)
		}
		apart := unaware + slack
		if kind.outage {
			ended := time.Now()
			for _, n := range nodes {
				if count(n.events(away), lost) > 0 { // with few reports, none may notice
					eventually(tr, "Redis decides again", func() bool { return count(n.events(ended), back) > 0 })
				}
			}
			apart += time.Since(away) + 2*patient // until a report is given up, and the next one answered
		}
		requests := <-all

		tr.note("%s, %d requests", kind.name, len(requests))
		gone := 0
		if kind.crashes {
			gone = unanswered(requests)
		}
		most(tr, "5xx", strange(requests)-gone, 0)
		more := kind.full * localSize
		if unaware > 0 || kind.outage {
			each := localSize + int((apart+localRate-1)/localRate)
			more += (three - 1) * each * (1 + kind.full)
			if kind.crashes && unaware > 0 {
				more += each // which it has not reported
			}
		}
		limit := leaky(localSize, localRate)
		over := beyond(requests, func(from, to time.Time) int { return limit(from, to.Add(ahead)) })
		strictly(tr, "over-admitted", over, more)
		admitted := 0
		for _, r := range requests {
			if r.status == http.StatusOK {
				admitted++
			}
		}
		least(tr, "admitted", admitted, limit(began, began.Add(3*third))/2)
		decided := 0
		for _, n := range nodes[:three-1] {
			decided += n.admittedBy(by)
		}
		least(tr, "of two nodes, by "+by, decided, localSize/10)
	}
}

// localSite returns a site with the limit.
func localSite(by, onError string) string {
	return fmt.Sprintf("rate_limit hot {\nkey {header.X-Key}\nsize %d\ndrip_rate %v\nconsistency %s %v\non_error %s\n}\nrespond ok\n",
		localSize, localRate, by, within, onError)
}

// localWhileDown: while the only server is down, units drip out here, and afterwards it is
// used again, although no request may wait for it.
func localWhileDown(tr *trial) {
	for _, by := range []string{"eventual", "lease"} {
		for _, kind := range []struct {
			name       string
			begin, end func(*redistest.Server, *redistest.Proxy)
		}{
			{"stopped", func(s *redistest.Server, _ *redistest.Proxy) { s.Pause(tr) }, func(s *redistest.Server, _ *redistest.Proxy) { s.Resume(tr) }},
			{"killed", func(s *redistest.Server, _ *redistest.Proxy) { s.Kill() }, func(s *redistest.Server, _ *redistest.Proxy) { s.Restart(tr) }},
			{"cut off", func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole() }, func(_ *redistest.Server, p *redistest.Proxy) { p.Pass() }},
		} {
			server := redistest.Start(tr)
			proxy := redistest.StartProxy(tr, server.Addr)
			n := startNode(tr, caddyfile(redisAt(proxy.Addr), localSite(by, "fallback")))
			flood := make(chan []request)
			over := make(chan struct{})
			go func() {
				var all []request
				for {
					select {
					case <-over:
						flood <- all
						return
					default:
						all = append(all, hammer(tr, []*node{n}, 4, 100*time.Millisecond, func(int) request { return request{key: "one"} })...)
					}
				}
			}()
			time.Sleep(during(500*time.Millisecond, 2*time.Second))
			began := time.Now()
			kind.begin(server, proxy)
			eventually(tr, "Redis is down", func() bool { return count(n.events(began), lost) > 0 })
			down := time.Now()
			time.Sleep(during(2*time.Second, 30*time.Second))
			ended := time.Now()
			kind.end(server, proxy)
			eventually(tr, "it is back", func() bool { return count(n.events(ended), back) > 0 })
			before := decisions(tr, server)
			time.Sleep(10 * within)
			least(tr, fmt.Sprintf("%s, %s: by Redis afterwards", by, kind.name), decisions(tr, server)-before, 5)
			close(over)
			requests := <-flood
			admitted := 0
			for _, r := range requests {
				if r.status == http.StatusOK && r.sent.After(down) && r.got.Before(ended) {
					admitted++
				}
			}
			least(tr, "admitted while it was down", admitted, int(ended.Sub(down)/localRate)*9/10)
			most(tr, "5xx", strange(requests), 0)
			strictly(tr, "over-admitted", beyond(requests, leaky(localSize, localRate)), 0)
		}
	}
}

// leasedCutOff: what a node has leased it uses up, and then on_error decides there. The
// others have all that it does not use.
func leasedCutOff(tr *trial) {
	third := during(700*time.Millisecond, 5*time.Second)
	for _, onError := range []string{"deny", "fallback"} {
		server := redistest.Start(tr)
		proxy := redistest.StartProxy(tr, server.Addr)
		proxy.Delay(roundTrip)
		at := func(addr string) func(*node) string {
			return caddyfile(redisAt(addr, fmt.Sprintf("timeout %v", patient)), localSite("lease", onError))
		}
		nodes := append(startNodes(tr, 2, at(server.Addr)), startNode(tr, at(proxy.Addr)))
		cut := nodes[2]
		for _, n := range nodes {
			n.get("first") // connects
		}
		time.Sleep(4 * roundTrip)
		began := time.Now()
		stop := floodOne(tr, nodes)
		time.Sleep(third)
		leases := cut.admittedBy("lease")
		away := time.Now()
		proxy.BlackHole()
		time.Sleep(third)
		healed := time.Now()
		proxy.Delay(roundTrip)
		if count(cut.events(away), lost) > 0 {
			eventually(tr, "Redis decides again", func() bool { return count(cut.events(healed), back) > 0 })
		}
		apart := time.Since(away) + patient + slack
		time.Sleep(third)
		requests := stop()

		tr.note("on_error %s, %d requests", onError, len(requests))
		more, gone := 0, 0
		if onError == "fallback" {
			more = localSize + int((apart+localRate-1)/localRate)
		}
		var others []request
		for _, r := range requests {
			// Units that it has leased ahead of room can be used for as long again.
			switch late := r.sent.After(away.Add(2*within + roundTrip)); {
			case r.node != 2:
				others = append(others, r)
			case r.status == http.StatusOK && late && r.got.Before(healed):
				gone++
			}
		}
		limit := leaky(localSize, localRate)
		strictly(tr, "over-admitted", beyond(requests, func(from, to time.Time) int { return limit(from, to.Add(within)) }), more)
		if onError == "deny" {
			strictly(tr, "by the node without Redis and leases", gone, 0)
		}
		most(tr, "5xx of the others", strange(others), 0)
		admitted := 0
		for _, r := range others {
			if r.status == http.StatusOK {
				admitted++
			}
		}
		least(tr, "admitted by the others", admitted, limit(began, healed)/3)
		least(tr, "by lease of the node before", leases, 1)
	}
}

// leasedFailover: a server that becomes a master has what the one before it was charged,
// and leases are used and renewed as before.
func leasedFailover(tr *trial) {
	third := during(700*time.Millisecond, 5*time.Second)
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 2, caddyfile(redisAt(c.Addrs()[0], "cluster", fmt.Sprintf("timeout %v", patient)), localSite("lease", "fallback")))
	nodes[1].get("first") // connects
	replica := c.AddReplica(tr, owner(tr, c, nodes[0], "one"))
	byLease := func() int { return nodes[0].admittedBy("lease") + nodes[1].admittedBy("lease") }
	stop := floodOne(tr, nodes)
	time.Sleep(third)
	before, from := byLease(), time.Now()
	c.FailOver(tr, replica)
	switched := time.Since(from)
	time.Sleep(third)
	requests := stop()
	time.Sleep(localSize * localRate) // until there is room to lease
	later := byLease()
	requests = append(requests, hammer(tr, nodes, 8, third, func(int) request { return request{key: "one"} })...)
	last := byLease()
	most(tr, "5xx", strange(requests), 0)
	apart := switched + 2*patient + slack
	limit := leaky(localSize, localRate)
	over := beyond(requests, func(from, to time.Time) int { return limit(from, to.Add(within)) })
	strictly(tr, "over-admitted", over, localSize+int((apart+localRate-1)/localRate))
	least(tr, "by lease before", before, localSize/10)
	least(tr, "by lease afterwards", last-later, localSize/10)
	tr.note("%d requests; reasons: %s", len(requests), reasons(append(nodes[0].events(from), nodes[1].events(from)...)))
}

// floodOne floods one key on nodes until it is told to stop, which returns the requests.
func floodOne(tr *trial, nodes []*node) (stop func() []request) {
	tr.Helper()
	end, all := make(chan struct{}), make(chan []request)
	go func() {
		var requests []request
		for {
			select {
			case <-end:
				all <- requests
				return
			default:
				requests = append(requests, hammer(tr, nodes, 8, 100*time.Millisecond, func(int) request { return request{key: "one"} })...)
			}
		}
	}()
	return func() []request {
		close(end)
		return <-all
	}
}

// admittedBy returns how many requests a node has admitted that were decided so.
func (n *node) admittedBy(by string) int { return n.decided(by, "hot", "admitted") }

// decided returns how many requests a node has decided so, by patterns of the limit and of
// the result.
func (n *node) decided(by, limit, result string) (total int) {
	n.t.Helper()
	for _, v := range n.metric(`decisions_total\{by="` + by + `",limit="` + limit + `",result="` + result + `"\}`) {
		total += v
	}
	return total
}

// metric returns the values of a node's metrics that match a pattern of name and labels.
func (n *node) metric(pattern string) (values []int) {
	n.t.Helper()
	res, err := admin.Get("http://" + n.admin + "/metrics")
	if err != nil {
		n.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, found := range regexp.MustCompile(`caddy_rate_limit_`+pattern+` (\S+)`).FindAllSubmatch(text, -1) {
		v, _ := strconv.ParseFloat(string(found[1]), 64)
		values = append(values, int(v))
	}
	return values
}
