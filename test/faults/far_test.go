package faults

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// farFaults are faults of connections: that they are closed while idle, and that
// making one takes a while.
var farFaults = []fault{
	{"26", "idle connections are closed: by `timeout 1`, by CLIENT KILL, by what is between; three nodes", idleClosed},
	{"27", "all connections are closed every 50 ms: by CLIENT KILL, by what is 5 ms between; one node", killedClients},
	{"28", "Redis is 30 ms away: a start under load, a reload that changes its settings, SCRIPT FLUSH; 24 clients", far},
	{"28 (fallback)", "the same, with limits that deny", farFallback},
}

// idleClosed: a connection that was closed while idle is not a failure.
func idleClosed(tr *trial) {
	const limit = 5
	for _, kind := range []struct {
		name   string
		args   []string
		rounds int
		idle   func(*redistest.Server, *redistest.Proxy)
	}{
		{"timeout 1", []string{"--timeout", "1"}, 3, func(*redistest.Server, *redistest.Proxy) {
			time.Sleep(3200 * time.Millisecond) // Redis checks once a second
		}},
		{"CLIENT KILL", nil, 4, func(s *redistest.Server, _ *redistest.Proxy) {
			time.Sleep(20 * time.Millisecond)
			killClients(tr, s)
			time.Sleep(20 * time.Millisecond)
		}},
		{"closed on the way", nil, 4, func(_ *redistest.Server, p *redistest.Proxy) {
			time.Sleep(20 * time.Millisecond)
			p.CloseAll()
			time.Sleep(20 * time.Millisecond)
		}},
	} {
		server := redistest.Start(tr, kind.args...)
		proxy := redistest.StartProxy(tr, server.Addr)
		// A timeout long enough for a busy machine: nodes that decide alone may
		// admit more.
		nodes := startNodes(tr, 3, caddyfile(redisAt(proxy.Addr, "timeout 1s"), fmt.Sprintf(`
			rate_limit {
				key all
				size %d
				drip_rate 1h
			}
			respond ok
		`, limit)))
		began := time.Now()
		admitted := 0
		for round := range kind.rounds {
			if round > 0 {
				kind.idle(server, proxy)
			}
			for _, n := range nodes {
				if n.get("k").StatusCode == http.StatusOK {
					admitted++
				}
			}
		}
		lines := 0
		for _, n := range nodes {
			events := n.events(began)
			lines += count(events, lost) + count(events, lapse)
		}
		tr.note("%s", kind.name)
		strictly(tr, "admitted", admitted, limit)
		least(tr, "and", admitted, limit)
		most(tr, "lines of a failure", lines, 0)
	}
}

// killClients closes the connections of all clients but this one.
func killClients(tr *trial, s *redistest.Server) {
	tr.Helper()
	redistest.Done(tr, s.Client().Do(tr.Context(), "client", "kill", "type", "normal", "skipme", "yes"))
}

// killedClients: requests in flight may or may not have been charged.
func killedClients(tr *trial) {
	server := redistest.Start(tr)
	proxy := redistest.StartProxy(tr, server.Addr)
	for _, kind := range []struct {
		name        string
		addr        string
		delay       time.Duration
		connections int // client connections
		kill        func()
	}{
		{"CLIENT KILL", server.Addr, 0, 64, func() { killClients(tr, server) }},
		{"closed on the way", proxy.Addr, 5 * time.Millisecond, 16, proxy.CloseAll},
	} {
		if kind.delay > 0 {
			proxy.Delay(kind.delay)
		}
		nodes := startNodes(tr, 1, caddyfile(redisAt(kind.addr), site))
		nodes[0].get("first") // connects
		lasts := during(2*time.Second, 20*time.Second)
		crowd := make(chan []request)
		go func() { crowd <- hammer(tr, nodes, kind.connections, lasts, mixed()) }()
		var requests []request
		for requests == nil {
			select {
			case requests = <-crowd:
			case <-time.After(50 * time.Millisecond):
				kind.kill()
			}
		}
		tr.note("%s, %d requests", kind.name, len(requests))
		most(tr, "5xx", strange(requests), 0)
		overAdmitted(tr, requests, 0, 0)
	}
}

const (
	// away is the distance of Redis in the following faults: on an existing
	// connection well within the timeout, but more than half of it.
	away = 30 * time.Millisecond

	farClients = 24

	// soon is how long it may take until there is a connection over which Redis
	// has answered: several round trips.
	soon = 10 * away

	// firstConnection is how long a config waits at most for its first connection, and
	// with it the requests that come meanwhile.
	firstConnection = 250 * time.Millisecond
)

// undecided returns how many of the requests sent in a time were refused because
// Redis had not decided them, and how many of these were refused before their
// timeout.
func undecided(requests []request, from, to time.Time) (refused, early int) {
	for _, r := range requests {
		if r.status == http.StatusServiceUnavailable && !r.sent.Before(from) && r.sent.Before(to) {
			refused++
			if r.got.Sub(r.sent) < timeout-5*time.Millisecond {
				early++
			}
		}
	}
	return refused, early
}

// firstAnswer returns when the first request sent after the given time was
// answered by Redis.
func firstAnswer(requests []request, from time.Time) time.Time {
	first := from.Add(patience)
	for _, r := range requests {
		if r.status == http.StatusOK && !r.sent.Before(from) && r.got.Before(first) {
			first = r.got
		}
	}
	return first
}

// far: with on_error deny, a request that Redis does not decide is refused, so
// that clients notice.
func far(tr *trial) {
	server := redistest.Start(tr)
	proxy := redistest.StartProxy(tr, server.Addr)
	proxy.Delay(away)
	config := func(timeout time.Duration) func(*node) string {
		return caddyfile(redisAt(proxy.Addr, fmt.Sprintf("timeout %v", timeout)), `
			rate_limit {
				key all
				size 1000000
				drip_rate 1m
				on_error deny
			}
			respond ok
		`)
	}
	began := time.Now()
	nodes := startNodes(tr, 1, config(timeout))
	n, served := nodes[0], time.Now()
	lasts := during(1500*time.Millisecond, 10*time.Second)
	all := func(int) request { return request{key: "k"} }
	ask := func(meanwhile func()) []request {
		answered := make(chan []request)
		go func() { answered <- hammer(tr, nodes, farClients, lasts, all) }()
		meanwhile()
		return <-answered
	}
	// A few requests may be late because the machine is slow, but not those that
	// did not wait.
	judge := func(what string, requests []request, from, to time.Time, late int) {
		refused, early := undecided(requests, from, to)
		most(tr, what+": given up before their time", early, 0)
		most(tr, "late", refused-early, late)
	}

	requests := ask(func() {})
	total, _ := undecided(requests, began, time.Now())
	most(tr, "first answer after", firstAnswer(requests, began).Sub(served), soon)
	judge("after the first answer", requests, firstAnswer(requests, began), time.Now(), len(requests)/200)
	most(tr, "Redis lost", count(n.events(began), lost), 0)
	tr.note("%d of %d not decided by Redis", total, len(requests))

	var reloading, reloaded time.Time
	requests = ask(func() {
		time.Sleep(lasts / 3)
		reloading = time.Now()
		if err := n.reload(config(timeout + time.Millisecond)); err != nil {
			tr.Fatal(err)
		}
		reloaded = time.Now()
	})
	total, _ = undecided(requests, began, time.Now())
	judge("before a reload", requests, began, reloading, len(requests)/200)
	most(tr, "first answer after a reload", firstAnswer(requests, reloaded).Sub(reloaded), soon)
	judge("after a reload and the first answer", requests, firstAnswer(requests, reloaded), time.Now(), len(requests)/200)
	most(tr, "Redis lost", count(n.events(reloading), lost), 0)
	tr.note("%d of %d not decided by Redis", total, len(requests))

	var flushed []time.Time
	const flushes = 3
	requests = ask(func() {
		for range flushes {
			time.Sleep(lasts / (flushes + 1))
			flushed = append(flushed, time.Now())
			redistest.Done(tr, server.Client().ScriptFlush(tr.Context()))
		}
	})
	// Each client has one request in flight, which may be refused until the node
	// learns of the flush.
	total, _ = undecided(requests, began, time.Now())
	meanwhile := 0
	for _, at := range flushed {
		refused, _ := undecided(requests, at.Add(-timeout), at.Add(2*away))
		most(tr, "SCRIPT FLUSH: not decided of those on their way", refused, farClients)
		meanwhile += refused
	}
	most(tr, "and of others", total-meanwhile, len(requests)/200)
	most(tr, "Redis lost", count(n.events(flushed[0]), lost), 0)
}

// farFallback: whatever decides meanwhile, nothing extra is admitted.
func farFallback(tr *trial) {
	server := redistest.Start(tr)
	proxy := redistest.StartProxy(tr, server.Addr)
	proxy.Delay(away)
	config := func(timeout time.Duration) func(*node) string {
		return caddyfile(redisAt(proxy.Addr, fmt.Sprintf("timeout %v", timeout)), site)
	}
	began := time.Now()
	nodes := startNodes(tr, 1, config(timeout))
	loads := [][2]time.Time{{began, time.Now().Add(firstConnection)}} // when configs may wait for their first connection
	l := startLoad(tr, nodes, 400)
	pause := during(700*time.Millisecond, 5*time.Second)
	time.Sleep(pause)
	for i := range int(during(2, 5)) {
		from := time.Now()
		if err := nodes[0].reload(config(timeout + time.Duration(1+i)*time.Millisecond)); err != nil {
			tr.Fatal(err)
		}
		loads = append(loads, [2]time.Time{from, time.Now()})
		time.Sleep(pause)
		for range 3 {
			redistest.Done(tr, server.Client().ScriptFlush(tr.Context()))
			time.Sleep(100 * time.Millisecond)
		}
	}
	requests := l.stop()
	most(tr, "5xx", strange(requests)-unanswered(requests), 0)
	var others, meanwhile []request
	for _, r := range requests {
		if slices.ContainsFunc(loads, func(load [2]time.Time) bool { return !r.sent.Before(load[0]) && r.sent.Before(load[1]) }) {
			meanwhile = append(meanwhile, r)
		} else {
			others = append(others, r)
		}
	}
	most(tr, "longest wait", percentile(others, 1), timeout+slack)
	most(tr, "longest wait for the first connection of a config", percentile(meanwhile, 1), firstConnection+slack)
	most(tr, "Redis lost", count(nodes[0].events(began), lost), 0)
	overAdmitted(tr, requests, 0, 0)
}
