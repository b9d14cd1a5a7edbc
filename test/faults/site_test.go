package faults

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// siteFaults are what clients and operators do to a site.
var siteFaults = []fault{
	{"17", "no fault: three nodes, one key, as fast as 64 connections to each can", crowd},
	{"18a, b", "reloads under load, each third rejected; Redis", func(tr *trial) { reloads(tr, true) }},
	{"18a, b (in process)", "the same; buckets in the process", func(tr *trial) { reloads(tr, false) }},
	{"18c", "reloads that change the limit, and that change Redis's settings, under load", changes},
	{"19", "clients that reset the connection right after their request", resets},
	{"21", "events, an upgraded connection, a large body and trailers through reverse_proxy", streams},
	{"22a", "a flood of distinct keys, buckets in the process, max_keys far fewer", flood},
	{"22c", "the same with Redis; two nodes", floodOfFleet},
	{"22b", "keys of 1 MB, with braces, line breaks and NUL; a secret as a key", strangeKeys},
	{"23", "Redis is killed and restarted again and again", pingPong},
}

func crowd(tr *trial) {
	server := redistest.Start(tr)
	// That many connections keep a small machine so busy that answers are late,
	// and a node that cannot wait for them decides alone.
	nodes := startNodes(tr, 3, caddyfile(redisAt(server.Addr, "timeout 2s"), site))
	for _, n := range nodes {
		n.get("other") // connects
	}
	requests := hammer(tr, nodes, 64, during(3*time.Second, 60*time.Second), mixed())
	admitted := 0
	for _, r := range requests {
		if r.status == http.StatusOK {
			admitted++
		}
	}
	most(tr, "5xx", strange(requests), 0)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "under-admitted", shortfall(requests), 1)
	tr.note("%d of %d admitted", admitted, len(requests))
}

// reloads: a configuration that changes outside of the limits.
func reloads(tr *trial, shared bool) {
	options := ""
	var server *redistest.Server
	if shared {
		server = redistest.Start(tr)
		options = redisAt(server.Addr)
	}
	version := func(i int, extra string) func(*node) string {
		return caddyfile(options, strings.Replace(site, "respond ok", fmt.Sprintf("header X-Version %d\n%s\nrespond ok", i, extra), 1))
	}
	nodes := startNodes(tr, 1, version(0, ""))
	n := nodes[0]
	warm := startLoad(tr, nodes, 200)
	for i := range 3 {
		if err := n.reload(version(i+1, "")); err != nil {
			tr.Fatal(err)
		}
	}
	time.Sleep(time.Second)
	warm.stop()
	time.Sleep(size*rate + 100*time.Millisecond) // until all buckets are empty
	before := n.usage()

	l := startLoad(tr, nodes, 200)
	began := time.Now()
	accepted, rejected := 0, 0
	for i := range int(during(30, 150)) {
		if i%3 < 2 {
			if err := n.reload(version(1000+i, "")); err != nil {
				tr.Fatal(err)
			}
			accepted++
		} else {
			bad := []string{
				"rate_limit { size 0 }",
				"rate_limit { nonsense }",
				// Provisioned after the limits.
				"reverse_proxy localhost:1 {\ntransport http {\ntls_trust_pool file /nowhere\n}\n}",
			}[rejected%3]
			if err := n.reload(version(1000+i, bad)); err == nil {
				tr.Fatalf("accepted %q", bad)
			}
			rejected++
		}
		time.Sleep(during(50*time.Millisecond, 200*time.Millisecond))
	}
	took := time.Since(began)
	requests := l.stop()
	// Caddy closes idle connections when it replaces its listeners, perhaps just
	// when a request is being sent.
	cut := unanswered(requests)
	most(tr, "5xx", strange(requests)-cut, 0)
	most(tr, "connections closed by Caddy", cut, accepted)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "under-admitted", shortfall(requests), 1+cut)
	most(tr, "lines logged", len(n.events(began)), 0)
	var after usage
	eventually(tr, "connections and goroutines are back to where they were", func() bool {
		after = n.usage()
		return after.goroutines <= before.goroutines+5 && after.files <= before.files+5
	})
	tr.note("%d accepted and %d rejected in %s; goroutines %d → %d; files %d → %d; memory %d → %d MB",
		accepted, rejected, show(took), before.goroutines, after.goroutines, before.files, after.files,
		before.rss>>10, after.rss>>10)
	if shared {
		clients, err := server.Client().Do(tr.Context(), "client", "list", "type", "normal").Text()
		if err != nil {
			tr.Fatal(err)
		}
		most(tr, "connections to Redis", strings.Count(clients, "\n"), perServer+3)
	}
}

// changes: other numbers use another bucket; other settings of Redis use another
// client for the same buckets.
func changes(tr *trial) {
	server := redistest.Start(tr)
	config := func(wait, size int) func(*node) string {
		return caddyfile(redisAt(server.Addr, fmt.Sprintf("timeout %dms", wait)),
			strings.Replace(counted, "size 20", fmt.Sprintf("size %d", size), 1))
	}
	nodes := startNodes(tr, 1, config(50, 20))
	n := nodes[0]
	began := time.Now()
	l := startLoad(tr, nodes, 200)
	before := decisions(tr, server)
	times := int(during(6, 30))
	for i := range times {
		time.Sleep(200 * time.Millisecond)
		if err := n.reload(config(51+i%2, 20)); err != nil {
			tr.Fatal(err)
		}
	}
	time.Sleep(300 * time.Millisecond)
	requests := l.stop()
	asked := decisions(tr, server) - before
	cut := unanswered(requests)
	most(tr, "settings changed: 5xx", strange(requests)-cut, 0)
	// Requests that waited for the first connection of a new client share a call.
	strictly(tr, "calls beyond the requests", asked-len(requests), 0)
	least(tr, "decided by Redis", n.decided("redis", "(?:hot|slow)/all", "[a-z_]+"), len(requests)-cut-times)
	most(tr, "decided elsewhere", n.decided("fallback", "(?:hot|slow)/all", "[a-z_]+"), times)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "lines logged", len(n.events(began)), 0)

	l = startLoad(tr, nodes, 200)
	time.Sleep(time.Second)
	if err := n.reload(config(50, 19)); err != nil {
		tr.Fatal(err)
	}
	time.Sleep(time.Second)
	requests = l.stop()
	tr.note("size changed")
	overAdmitted(tr, requests, 19, 0)
}

// resets: a client that disconnects costs no connection, and is charged once.
func resets(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), `
		rate_limit {
			key all
			size 1000000
			drip_rate 10m
		}
		respond ok
	`))
	n := nodes[0]
	began := time.Now()
	n.get("k")
	dials, before := connections(tr, server), decisions(tr, server)
	var wg sync.WaitGroup
	queue := make(chan int)
	for range 16 {
		wg.Go(func() {
			for range queue {
				conn, err := net.Dial("tcp", n.addr)
				if err != nil {
					tr.Error(err)
					continue
				}
				_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", n.addr)
				_ = conn.(*net.TCPConn).SetLinger(0)
				_ = conn.Close()
				time.Sleep(10 * time.Millisecond) // avoid a flood
			}
		})
	}
	requests := int(during(3000, 10000))
	for i := range requests {
		queue <- i
	}
	close(queue)
	wg.Wait()
	time.Sleep(300 * time.Millisecond)
	asked := decisions(tr, server) - before
	remaining, err := strconv.Atoi(n.get("k").Header.Get("X-RateLimit-Remaining"))
	if err != nil {
		tr.Fatal(err)
	}
	charged := 1_000_000 - remaining - 2
	// A call carries several concurrent requests, and each costs a unit.
	tr.is(fmt.Sprintf("%d units by %d calls for %d requests", charged, asked, requests), asked <= charged && charged <= requests)
	least(tr, "decided", charged, requests/4)
	most(tr, "new connections to Redis", connections(tr, server)-dials, perServer)
	most(tr, "lines logged", len(n.events(began)), 0)
}

func streams(tr *trial) {
	const eventsSent = 10
	size := int64(during(64<<20, 1<<30))
	var sent [eventsSent]atomic.Int64
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/events":
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range eventsSent {
				time.Sleep(during(50*time.Millisecond, 5*time.Second))
				sent[i].Store(time.Now().UnixNano())
				_, _ = fmt.Fprintf(w, "data: %d\n\n", i)
				w.(http.Flusher).Flush()
			}
		case "/large":
			w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
			_, _ = io.CopyN(w, zeros{}, size)
		case "/trailers":
			w.Header().Set("Trailer", "X-Sum")
			_, _ = io.WriteString(w, "body")
			w.Header().Set("X-Sum", "42")
		case "/upgrade":
			w.Header().Set("Connection", "Upgrade")
			w.Header().Set("Upgrade", "echo")
			w.WriteHeader(http.StatusSwitchingProtocols)
			conn, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			line, _ := rw.ReadString('\n')
			_, _ = rw.WriteString(line)
			_ = rw.Flush()
		}
	}))
	defer upstream.Close()
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), `
		rate_limit {
			key all
			size 1000
			drip_rate 1h
		}
		reverse_proxy `+strings.TrimPrefix(upstream.URL, "http://")+` {
			flush_interval -1
		}
	`))
	base := "http://" + nodes[0].addr
	get := func(path string) *http.Response {
		res, err := client.Get(base + path)
		if err != nil {
			tr.Fatal(err)
		}
		return res
	}

	res := get("/events")
	lines := bufio.NewScanner(res.Body)
	var latest time.Duration
	i := 0
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data:") {
			latest = max(latest, time.Duration(time.Now().UnixNano()-sent[i].Load()))
			i++
		}
	}
	_ = res.Body.Close()
	least(tr, "events", i, eventsSent)
	most(tr, "flushed after", latest, slack)

	res = get("/large")
	n, err := io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	tr.is(fmt.Sprintf("%d MB passed", n>>20), n == size && err == nil)

	res = get("/trailers")
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	tr.is("trailers", res.Trailer.Get("X-Sum") == "42")

	conn, err := net.Dial("tcp", nodes[0].addr)
	if err != nil {
		tr.Fatal(err)
	}
	defer conn.Close()
	_, _ = fmt.Fprintf(conn, "GET /upgrade HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", nodes[0].addr)
	reader := bufio.NewReader(conn)
	res, err = http.ReadResponse(reader, nil)
	if err != nil {
		tr.Fatal(err)
	}
	_, _ = io.WriteString(conn, "hello\n")
	line, _ := reader.ReadString('\n')
	tr.is("upgraded, with fields", res.StatusCode == 101 && line == "hello\n" && res.Header.Get("X-RateLimit-Remaining") == "996")
	most(tr, "units for 4 requests", 1000-996, 4)
}

// zeros is an endless body.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// flood: new keys are served, but must neither fill the memory nor evict full
// buckets of others.
func flood(tr *trial) {
	maxKeys, keys := int(during(2_000, 100_000)), int(during(20_000, 1_000_000))
	nodes := startNodes(tr, 1, caddyfile(fmt.Sprintf("memory {\nmax_keys %d\n}", maxKeys), `
		rate_limit {
			key {header.X-Key}
			size 3
			drip_rate 1h
		}
		respond ok
	`))
	n := nodes[0]
	for range 3 {
		n.get("blocked")
	}
	fill := func(from, to int) []request { return askForKeys(tr, nodes, from, to) }
	calm := fill(0, maxKeys/2)
	before := n.usage()
	requests := fill(maxKeys/2, keys)
	after := n.usage()
	blocked := n.get("blocked")
	tr.is("a full bucket is still full", blocked.StatusCode == http.StatusTooManyRequests)
	most(tr, "5xx", strange(requests), 0)
	admitted := 0
	for _, r := range requests {
		if r.status == http.StatusOK {
			admitted++
		}
	}
	most(tr, "newcomers denied", len(requests)-admitted, 0)
	most(tr, "memory grew by MB", (after.rss-before.rss)>>10, 64)
	most(tr, "p99: added", percentile(requests, 0.99)-percentile(calm, 0.99), 5*time.Millisecond)
	tr.note("%d keys, max_keys %d", keys, maxKeys)
}

// askForKeys sends one request for each of many keys, to the nodes in turn.
func askForKeys(tr *trial, nodes []*node, from, to int) []request {
	l := newLoad(tr, 8)
	defer l.client.CloseIdleConnections()
	var next atomic.Int64
	next.Store(int64(from))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(to); i = next.Add(1) {
				n := nodes[int(i)%len(nodes)]
				l.do("http://"+n.addr+"/", request{key: fmt.Sprint("flood", i), due: time.Now()})
			}
		})
	}
	wg.Wait()
	return l.requests
}

// floodOfFleet: Redis holds no more buckets than its nodes, and full ones stay.
func floodOfFleet(tr *trial) {
	maxKeys, keys := 2_000, int(during(20_000, 500_000))
	server := redistest.Start(tr)
	// Decisions of a node that had no time to ask Redis are not tested here.
	nodes := startNodes(tr, 2, caddyfile(redisAt(server.Addr, "timeout 1s")+fmt.Sprintf("memory {\nmax_keys %d\n}", 2*maxKeys), `
		rate_limit {
			key {header.X-Key}
			size 3
			drip_rate 1h
		}
		respond ok
	`))
	for range 2 {
		for _, n := range nodes {
			n.get("blocked")
		}
	}
	client := server.Client()
	stop, sampled := make(chan struct{}), make(chan struct{})
	peak := int64(0)
	go func() {
		defer close(sampled)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
				peak = max(peak, client.DBSize(context.Background()).Val())
			}
		}
	}()
	requests := askForKeys(tr, nodes, 0, keys)
	close(stop)
	<-sampled
	for i, n := range nodes {
		tr.is(fmt.Sprintf("a full bucket is still full on node %d", i+1), n.get("blocked").StatusCode == http.StatusTooManyRequests)
	}
	admitted := 0
	for _, r := range requests {
		if r.status == http.StatusOK {
			admitted++
		}
	}
	most(tr, "5xx", strange(requests), 0)
	most(tr, "newcomers denied", len(requests)-admitted, 0)
	// Removals are in flight for a tenth of a second, and some are lost.
	most(tr, "buckets in Redis at most", peak, int64(4*maxKeys))
	time.Sleep(time.Second)
	// Redis leaves about a tenth of its keys when they have expired, until somebody
	// asks for them.
	most(tr, "buckets in Redis afterwards", client.DBSize(context.Background()).Val(), int64(2*maxKeys*5/4))
	tr.note("%d keys, max_keys %d on each node", keys, maxKeys)
}

// strangeKeys: whatever a key is, only a digest of it leaves the process, and it
// collides with no other key.
func strangeKeys(tr *trial) {
	const canary = "canary-7f3a-token"
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), `
		rate_limit {
			key {query.k}
			size 5
			drip_rate 1h
		}
		handle_errors {
			respond "{err.message}"
		}
		respond ok
	`))
	n := nodes[0]
	large := strings.Repeat("x", 1<<20)
	keys := []string{
		canary, "a+b", "a%0Ab", "a%0D%0Ab", "%00", "a%00b", "%7Ba%7D", "%7B", "%7D", "%7Ba%7Db%7Bc%7D", "*", "a:b",
		"%F0%9F%A6%AB", "%ff%fe", large, large + "y",
	}
	wrong := 0
	for round := range 6 {
		for _, key := range keys {
			res, err := client.Get("http://" + n.addr + "/?k=" + key)
			if err != nil {
				tr.Fatal(err)
			}
			body, _ := io.ReadAll(res.Body)
			_ = res.Body.Close()
			want := fmt.Sprint(4 - round)
			if round == 5 {
				want = "0"
			}
			if res.Header.Get("X-RateLimit-Remaining") != want || (res.StatusCode == 200) != (round < 5) {
				wrong++
			}
			if strings.Contains(fmt.Sprint(res.Header, string(body)), "canary") {
				wrong++
			}
		}
	}
	most(tr, fmt.Sprintf("of %d keys six times each, wrong", len(keys)), wrong, 0)

	names, err := server.Client().Keys(tr.Context(), "*").Result()
	if err != nil {
		tr.Fatal(err)
	}
	tr.is(fmt.Sprint(len(names), " buckets in Redis"), len(names) == len(keys))
	longest := 0
	for _, name := range names {
		longest = max(longest, len(name))
	}
	most(tr, "longest name of a key", longest, 64)
	seen := append(names, n.log())
	for _, path := range []string{"/config/", "/metrics"} {
		res, err := admin.Get("http://" + n.admin + path)
		if err != nil {
			tr.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		seen = append(seen, string(body))
	}
	tr.is("the secret is in no key, log, error, metric or admin's answer",
		!strings.Contains(strings.Join(seen, " "), "canary"))
}

func pingPong(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	began := time.Now()
	l := startLoad(tr, nodes, 400)
	for range int(during(3, 10)) {
		time.Sleep(during(1200*time.Millisecond, 3*time.Second))
		server.Kill()
		time.Sleep(during(1200*time.Millisecond, 3*time.Second))
		server.Restart(tr)
	}
	time.Sleep(1500 * time.Millisecond)
	requests := l.stop()
	events := nodes[0].events(began)
	transitions := count(events, lost) + count(events, back)
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	tr.note("%d changes", transitions)
	overAdmitted(tr, requests, 0, 0)
}
