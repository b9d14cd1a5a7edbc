package faults

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// heldFaults are faults while requests hold units until they end.
var heldFaults = []fault{
	{"45", "Caddy is killed while its requests count as in progress, and a websocket stays open on another node; three nodes", killedWhileHolding},
	{"45 (failover)", "cluster: a failover of the server that has the key, while websockets are open on two nodes", failoverWhileHolding},
	{"45 (cut off)", "one of two nodes is cut off from Redis, while a websocket is open on each", cutOffWhileHolding},
	{"45 (charges)", "requests end while Redis is paused for 0.05 to 2 s, for all or for writes, loses its connections or scripts, or is killed and restarted empty; one node", chargesInFaults},
}

// upgrading starts a server that upgrades connections to /upgrade, and returns its address.
func upgrading(tr *trial) string {
	tr.Helper()
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/upgrade" {
			return
		}
		upgrade(w)
	}))
	tr.Cleanup(upstream.Close)
	return strings.TrimPrefix(upstream.URL, "http://")
}

// upgrade upgrades a connection, and sends back what comes.
func upgrade(w http.ResponseWriter) {
	w.Header().Set("Connection", "Upgrade")
	w.Header().Set("Upgrade", "echo")
	w.WriteHeader(http.StatusSwitchingProtocols)
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		defer conn.Close()
		_, _ = io.Copy(conn, conn)
	}
}

// killedWhileHolding has two upgraded connections fill a limit on requests in progress,
// on two nodes of which one is killed.
func killedWhileHolding(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 3, caddyfile(redisAt(server.Addr, "timeout 2s"), // or a node decides alone on a busy machine
		"rate_limit {\nkey all\nconcurrency 2\n}\nreverse_proxy "+upgrading(tr)))
	stays, err := openUpgrade(nodes[0])
	if err != nil {
		tr.Fatal(err)
	}
	defer stays.Close()
	opened := time.Now()
	dies, err := openUpgrade(nodes[1])
	if err != nil {
		tr.Fatal(err)
	}
	defer dies.Close()

	status := func() int {
		res := nodes[2].ask("/")
		defer res.Body.Close()
		return res.StatusCode
	}
	tr.is("a third request is denied", status() == http.StatusTooManyRequests)
	nodes[1].caddy.Stop()
	killed := time.Now()
	free := time.Duration(0)
	for free == 0 && time.Since(killed) < 30*time.Second {
		if status() == http.StatusOK {
			free = time.Since(killed)
		}
		time.Sleep(100 * time.Millisecond)
	}
	// The node has renewed what it holds every five seconds, and that lasts for ten to
	// twenty: it is free 5 to 20 s after the crash.
	least(tr, "free after", free, 4*time.Second)
	most(tr, "free after", free, 21*time.Second)

	time.Sleep(time.Until(opened.Add(during(25*time.Second, 55*time.Second))))
	tr.note("a websocket was open for %v", time.Since(opened).Round(time.Second))
	second, err := openUpgrade(nodes[2])
	if err != nil {
		tr.Fatal(err)
	}
	tr.is("the websocket still counts", status() == http.StatusTooManyRequests)
	_ = stays.Close()
	_ = second.Close()
	eventually(tr, "both to end", func() bool { return status() == http.StatusOK })
}

// failoverWhileHolding: what requests hold is held by the server that takes over, and let
// go there.
func failoverWhileHolding(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 2, caddyfile(redisAt(c.Addrs()[0], "cluster", "timeout 2s"),
		"rate_limit {\nkey all\nconcurrency 2\n}\nreverse_proxy "+upgrading(tr)))
	replica := c.AddReplica(tr, owner(tr, c, nodes[0], ""))
	status := func() int {
		res := nodes[1].ask("/")
		defer res.Body.Close()
		return res.StatusCode
	}
	var open []net.Conn
	for _, n := range nodes {
		conn, err := openUpgrade(n)
		if err != nil {
			tr.Fatal(err)
		}
		defer conn.Close()
		open = append(open, conn)
	}
	tr.is("a third request is denied", status() == http.StatusTooManyRequests)
	switching := make(chan struct{})
	go func() {
		defer close(switching)
		c.FailOver(tr, replica)
	}()
	passed, began, over := 0, time.Now(), time.Duration(0)
	for over == 0 || time.Since(began) < over+during(time.Second, 25*time.Second) {
		if status() != http.StatusTooManyRequests {
			passed++
		}
		select {
		case <-switching:
			over = max(over, time.Since(began), 1)
			switching = nil
		case <-time.After(5 * time.Millisecond):
		}
	}
	most(tr, "admitted beside them, in and after the failover", passed, 0)
	least(tr, "the server that takes over has decided", decisions(tr, replica), 1)
	_ = open[0].Close()
	eventually(tr, "one may pass", func() bool { return status() == http.StatusOK })
}

// cutOffWhileHolding: what a node holds counts for the others until it could not renew
// that for 5 to 20 s, and again when it can.
func cutOffWhileHolding(tr *trial) {
	server := redistest.Start(tr)
	proxy := redistest.StartProxy(tr, server.Addr)
	var nodes []*node
	var open []net.Conn
	for _, addr := range []string{server.Addr, proxy.Addr} {
		n := startNode(tr, caddyfile(redisAt(addr, "timeout 2s"),
			"rate_limit {\nkey all\nconcurrency 2\n}\nreverse_proxy "+upgrading(tr)))
		conn, err := openUpgrade(n)
		if err != nil {
			tr.Fatal(err)
		}
		defer conn.Close()
		nodes, open = append(nodes, n), append(open, conn)
	}
	denied := func() bool {
		res := nodes[0].ask("/")
		defer res.Body.Close()
		return res.StatusCode == http.StatusTooManyRequests
	}
	// passed returns how many requests pass in some time beside the websockets.
	passed := func(lasts time.Duration) (n int) {
		for end := time.Now().Add(lasts); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			if !denied() {
				n++
			}
		}
		return n
	}
	tr.is("a third request is denied", denied())
	proxy.BlackHole()
	cut := time.Now()
	most(tr, "admitted beside them at first", passed(3*time.Second), 0)
	if *long {
		for denied() && time.Since(cut) < 30*time.Second {
			time.Sleep(100 * time.Millisecond)
		}
		least(tr, "free after", time.Since(cut), 4*time.Second)
		most(tr, "free after", time.Since(cut), 21*time.Second)
	}
	proxy.Pass()
	eventually(tr, "both to count again", denied)
	most(tr, "admitted beside them afterwards", passed(during(time.Second, 25*time.Second)), 0)
	_ = open[1].Close()
	eventually(tr, "one may pass", func() bool { return !denied() })
}

// settledSite has a limit of each kind that is settled when a request ends, by its path.
const settledSite = `
	rate_limit /count count {
		key all
		size 100000
		drip_rate 1h
		count status 401
	}
	rate_limit /actual actual {
		key all
		size 100000
		drip_rate 1h
		actual_cost {http.response.header.X-Cost}
	}
	rate_limit /off off {
		key all
		size 100000
		drip_rate 1h
		count status 401
		hold off
	}
	rate_limit /progress progress {
		key all
		concurrency 100000
	}
`

// settledLimits are the limits of settledSite.
var settledLimits = []string{"count", "actual", "off", "progress"}

// chargesInFaults has requests of all kinds end before, in and after each fault, and counts
// what they are charged: what the upstream has answered, and nothing is held any more.
func chargesInFaults(tr *trial) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		lasts, _ := time.ParseDuration(r.Header.Get("Lasts"))
		time.Sleep(lasts)
		w.Header().Set("X-Cost", r.Header.Get("Cost"))
		if r.Header.Get("Cost") != "2" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	tr.Cleanup(upstream.Close)
	server := redistest.Start(tr)
	n := startNode(tr, caddyfile(redisAt(server.Addr), settledSite+"\nreverse_proxy "+strings.TrimPrefix(upstream.URL, "http://")+
		" {\ntransport http {\nkeepalive_idle_conns_per_host 1000\n}\n}"))
	command := func(args ...any) {
		if err := server.Client().Do(tr.Context(), args...).Err(); err != nil {
			tr.Error(err)
		}
	}
	pause := func(d time.Duration, what string) func() {
		return func() { command("CLIENT", "PAUSE", d.Milliseconds(), what) }
	}
	kill := func() { command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") }
	faults := []struct {
		name   string
		inject func()
	}{
		{"no fault", func() {}},
		{"all paused for 50 ms", pause(50*time.Millisecond, "ALL")}, {"for 300 ms", pause(300*time.Millisecond, "ALL")}, {"for 2 s", pause(2*time.Second, "ALL")},
		{"writes paused for 100 ms", pause(100*time.Millisecond, "WRITE")}, {"for 300 ms", pause(300*time.Millisecond, "WRITE")}, {"for 1 s", pause(time.Second, "WRITE")},
		{"connections killed", func() {
			for range 10 {
				kill()
				time.Sleep(30 * time.Millisecond)
			}
		}},
		{"scripts lost", func() {
			for range 10 {
				command("SCRIPT", "FLUSH")
				time.Sleep(30 * time.Millisecond)
			}
		}},
		{"restarted empty", func() {
			server.Kill()
			time.Sleep(200 * time.Millisecond)
			server.Restart(tr)
		}},
	}
	const inject = 200 * time.Millisecond // from the beginning of the requests on
	charged, total := map[string]int{}, map[string]int{}
	rounds := []int{5, 50} // requests of each kind: five are over before a fault is
	if *long {
		rounds = slices.Repeat(rounds, 10)
	}
	for _, requests := range rounds {
		for _, f := range faults {
			want := map[string]int{}
			var mu sync.Mutex
			var all sync.WaitGroup
			for i := range requests {
				for _, kind := range settledLimits {
					all.Go(func() {
						cost := 1 + i%3
						res := n.ask("/"+kind, "Lasts", (inject + time.Duration(i)*20*time.Millisecond).String(), "Cost", strconv.Itoa(cost))
						mu.Lock()
						defer mu.Unlock()
						switch {
						case res.StatusCode >= http.StatusTooManyRequests:
							tr.Errorf("/%s: %s", kind, res.Status)
						case kind == "actual":
							want[kind] += cost
						case kind != "progress" && res.StatusCode == http.StatusUnauthorized:
							want[kind]++
						}
					})
				}
			}
			time.Sleep(inject)
			f.inject()
			all.Wait()
			for _, kind := range settledLimits {
				var level, held int
				matches := func() bool {
					n.ask("/"+kind, "Cost", "2") // by which the node reports what Redis lost
					if kind == "actual" {
						want[kind] += 2
					}
					level, held = n.peek(kind)
					return level == charged[kind]+want[kind] && held == 0
				}
				for end := time.Now().Add(10 * time.Second); !matches() && time.Now().Before(end); {
					time.Sleep(50 * time.Millisecond)
				}
				if level != charged[kind]+want[kind] || held > 0 {
					tr.is(fmt.Sprintf("%d requests, %s, %s: charged %d of %d, %d held", requests, f.name, kind, level-charged[kind], want[kind], held), false)
				}
				total[kind] += want[kind]
				charged[kind] = level
			}
		}
	}
	for _, kind := range settledLimits {
		tr.is(fmt.Sprintf("%s: charged %d of %d", kind, charged[kind], total[kind]), charged[kind] == total[kind])
	}
}

// peek returns the units in the bucket of a limit with the key all, and those that are held.
func (n *node) peek(limit string) (level, held int) {
	n.t.Helper()
	res, err := admin.Post("http://"+n.admin+"/rate_limit/peek", "application/json", strings.NewReader(`{"limit": "`+limit+`", "key": "all"}`))
	if err != nil {
		n.t.Fatal(err)
	}
	defer res.Body.Close()
	var bucket struct{ Level, Held int }
	if err := json.NewDecoder(res.Body).Decode(&bucket); err != nil {
		n.t.Fatal(err)
	}
	return bucket.Level, bucket.Held
}

// openUpgrade opens an upgraded connection through a node.
func openUpgrade(n *node) (net.Conn, error) {
	conn, err := net.Dial("tcp", n.addr)
	if err != nil {
		return nil, err
	}
	_, _ = fmt.Fprintf(conn, "GET /upgrade HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", n.addr)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err == nil && res.StatusCode != http.StatusSwitchingProtocols {
		err = fmt.Errorf("got %s, want an upgraded connection", res.Status)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}
