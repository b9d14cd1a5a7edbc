package faults

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// fleetFaults are faults of long-running fleets: processes that stop and start,
// servers that forget or disagree, links with too little bandwidth.
var fleetFaults = []fault{
	{"33", "all connections are closed every 50 ms by CLIENT KILL; three nodes", killedClientsOfFleet},
	{"34", "Caddy is restarted twice while Redis is down; one node", restartedWithoutRedis},
	{"35", "Caddy is stopped by SIGSTOP and continues; one node", func(tr *trial) { frozen(tr, 1) }},
	{"35 (3 nodes)", "the same, one of three nodes", func(tr *trial) { frozen(tr, 3) }},
	{"36", "Caddy is killed and started with `caddy run --resume`; Redis", func(tr *trial) { resumed(tr, true) }},
	{"36 (in process)", "the same; buckets in the process", func(tr *trial) { resumed(tr, false) }},
	{"36 (under load)", "Caddy is killed at random moments under load, and started; a quota of a month in the process", killedUnderLoad},
	{"37", "reloads that change Redis's settings while requests over HTTP/1.1, 2 and 3 are under way between two limits", reloadedBetween},
	{"38", "Redis is killed and restarted with an older RDB or append-only file", restored},
	{"39", "two masters after a split, one for two nodes and one for the third, then one for all", splitBrain},
	{"40", "cluster: all three servers are killed, and restarted empty; one node", clusterDown},
	{"41", "the link to Redis passes 20 kB a second, then 2 kB; one node", narrow},
	{"42", "a hundred nodes at one Redis, which then takes fewer connections than there are nodes", hundredNodes},
}

// killedClientsOfFleet: requests in flight when a connection is closed are decided
// by a node that does not know what others have admitted at that moment, and
// Redis, which keeps the higher of two levels, never learns their sum.
func killedClientsOfFleet(tr *trial) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, 3, caddyfile(redisAt(server.Addr), site))
	lasts := during(1500*time.Millisecond, 20*time.Second)
	for _, kind := range []struct {
		name string
		ask  func() []request
	}{
		{"200 requests a second to each", func() []request {
			l := startLoad(tr, nodes, 200)
			time.Sleep(lasts)
			return l.stop()
		}},
		{"as fast as 16 connections to each can", func() []request {
			return hammer(tr, nodes, 16, lasts, mixed())
		}},
	} {
		time.Sleep(size*rate + 100*time.Millisecond) // until all buckets are empty
		for _, n := range nodes {
			n.get("first") // connects
		}
		began := time.Now()
		answered := make(chan []request)
		go func() { answered <- kind.ask() }()
		var requests []request
		for requests == nil {
			select {
			case requests = <-answered:
			case <-time.After(50 * time.Millisecond):
				killClients(tr, server)
			}
		}
		hot, slow := apart(len(nodes), time.Since(began))
		tr.note("%s, %d requests", kind.name, len(requests))
		most(tr, "5xx", strange(requests), 0)
		overAdmitted(tr, requests, hot, slow)
		for i, n := range nodes {
			events := n.events(began)
			tr.note("by node %d alone, which lost Redis %d times (%s)", i+1, count(events, lost), reasons(events))
			overAdmitted(tr, ofNode(requests, i), 0, 0)
		}
	}
}

// ofNode returns the requests to one node.
func ofNode(requests []request, index int) []request {
	var own []request
	for _, r := range requests {
		if r.node == index {
			own = append(own, r)
		}
	}
	return own
}

// fill sends a node n requests for a key of the slow limit, and returns the number
// admitted.
func fill(n *node, key string, requests int) int {
	admitted := 0
	for range requests {
		if n.ask(slowPath, "X-Key", key).StatusCode == http.StatusOK {
			admitted++
		}
	}
	return admitted
}

// restartedWithoutRedis: what a process has admitted is unknown once it has ended.
func restartedWithoutRedis(tr *trial) {
	const restarts = 2
	server := redistest.Start(tr)
	n := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))[0]
	full, fresh := fill(n, "full", 3*slowSize), 0
	server.Kill()
	for range restarts {
		fresh += fill(n, "new", 3*slowSize)
		n.caddy.Stop()
		if err := n.launch("--config", n.file()); err != nil {
			tr.Fatal(err)
		}
	}
	full += fill(n, "full", 3*slowSize)
	fresh += fill(n, "new", 3*slowSize)
	began := time.Now()
	server.Restart(tr)
	eventually(tr, "Redis decides again", func() bool {
		n.get("other")
		return count(n.events(began), back) > 0
	})
	strictly(tr, "one that was full before: over-admitted", full-slowSize, slowSize)
	strictly(tr, "one that was filled after each start: over-admitted", fresh-slowSize, restarts*slowSize)
	strictly(tr, "when Redis is back, admitted more", fill(n, "full", 3*slowSize)+fill(n, "new", 3*slowSize), 0)
}

// frozen: a process that stops for a while, such as a paused container or a
// virtual machine whose clock continues.
func frozen(tr *trial, count int) {
	server := redistest.Start(tr)
	nodes := startNodes(tr, count, caddyfile(redisAt(server.Addr), site))
	for _, n := range nodes {
		n.get("first") // connects
	}
	l := startLoad(tr, nodes, 200)
	for range int(during(2, 5)) {
		time.Sleep(during(500*time.Millisecond, 2*time.Second))
		stop(tr, nodes[0], during(time.Second, 10*time.Second))
		time.Sleep(during(500*time.Millisecond, 2*time.Second))
	}
	before := decisions(tr, server)
	nodes[0].get("other")
	least(tr, "decided by Redis afterwards", decisions(tr, server)-before, 1)
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	if count == 1 {
		overAdmitted(tr, requests, 0, 0)
		return
	}
	// It decides alone the requests that were in flight when it stopped, and those
	// that arrived meanwhile and were sent to Redis too late.
	hot, slow := apart(count, timeout)
	overAdmitted(tr, requests, hot, slow)
}

// stop suspends a node's process for a time.
func stop(tr *trial, n *node, lasts time.Duration) {
	tr.Helper()
	for _, signal := range []os.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		if err := n.caddy.Signal(signal); err != nil {
			tr.Fatal(err)
		}
		if signal == syscall.SIGSTOP {
			time.Sleep(lasts)
		}
	}
}

// resumed: Caddy runs the configuration that it ran last, and not its Caddyfile.
func resumed(tr *trial, shared bool) {
	options, want := "", slowSize
	if shared {
		// A timeout long enough for a busy machine: a node that has just started
		// and cannot ask Redis in time knows nothing.
		options = redisAt(redistest.Start(tr, "--requirepass", "secret").Addr, "password {env.REDIS_PASSWORD}", "timeout 2s")
		want = 0
	}
	tr.Setenv("REDIS_PASSWORD", "secret")
	persisted := func(site string) func(*node) string {
		return func(n *node) string {
			return strings.Replace(caddyfile(options, site)(n), "persist_config off\n", "", 1)
		}
	}
	n := startNodes(tr, 1, persisted("respond old"))[0]
	if err := n.reload(persisted(site)); err != nil {
		tr.Fatal(err)
	}
	if got := fill(n, "k", 3*slowSize); got != slowSize {
		tr.Fatalf("admitted %d at first, want %d", got, slowSize)
	}
	saved := filetest.Read(tr, filepath.Join(n.dir, "caddy", "autosave.json"))
	tr.is("no password is saved", !strings.Contains(string(saved), "secret"))
	n.caddy.Stop()
	if err := n.launch("--resume"); err != nil {
		tr.Fatal(err)
	}
	strictly(tr, "admitted more after the start", fill(n, "k", 3*slowSize), want)
	tr.is("the limits of the last reload", n.ask(slowPath, "X-Key", "k").StatusCode == http.StatusTooManyRequests)
}

// killedUnderLoad: what was admitted long enough before a crash is known after it.
func killedUnderLoad(tr *trial) {
	const quota = 1_000_000
	n := startNodes(tr, 1, caddyfile("", "rate_limit {\nkey all\nalgorithm fixed_window\nperiod month\nsize 1000000\n}\nrespond ok"))[0]
	charged := func() int { // with this request
		remaining, err := strconv.Atoi(n.ask("/").Header.Get("X-RateLimit-Remaining"))
		if err != nil {
			tr.Fatal(err)
		}
		return quota - remaining
	}
	for range during(1, 4) {
		before, l := charged(), startLoad(tr, []*node{n}, 200)
		time.Sleep(written + time.Duration(rand.Int64N(int64(during(5*time.Second, written)))))
		killed := time.Now()
		n.caddy.Stop()
		known, sent := before, before
		for _, r := range l.stop() {
			if r.sent.Before(killed) {
				sent++
			}
			if r.status == http.StatusOK && r.got.Before(killed.Add(-written)) {
				known++
			}
		}
		if err := n.launch("--config", n.file()); err != nil {
			tr.Fatal(err)
		}
		after := charged() - 1
		least(tr, "charged after a crash", after, known)
		strictly(tr, "which was sent", after, sent)
	}
	damaged, _ := filepath.Glob(filepath.Join(n.dir, "caddy", "rate_limit", "*.damaged*"))
	most(tr, "damaged files", len(damaged), 0)
}

// written is after how long a charge is in the file of buckets: it is looked at each second
// whether 30 have passed.
const written = 32 * time.Second

// reloadedBetween: a request has passed one limit and meets the next one when its
// configuration, and the connections to its Redis, are long gone.
func reloadedBetween(tr *trial) {
	const each = 4
	lasts := during(1500*time.Millisecond, 25*time.Second) // the old store stays for ten
	began := make(chan struct{}, 3*each)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		began <- struct{}{}
		time.Sleep(lasts / 2)
		_, _ = io.WriteString(w, "begin ")
		_ = http.NewResponseController(w).Flush()
		time.Sleep(lasts / 2)
		_, _ = io.WriteString(w, "end")
	}))
	defer upstream.Close()
	server := redistest.Start(tr)
	config := func(wait int) func(*node) string {
		return func(n *node) string {
			text := caddyfile(redisAt(server.Addr, fmt.Sprintf("timeout %dms", wait)), `
				tls internal
				rate_limit first {
					key all
					size 100
					drip_rate 1h
					on_error deny
				}
				reverse_proxy `+strings.TrimPrefix(upstream.URL, "http://")+` {
					flush_interval -1
					@ok status 200
					handle_response @ok {
						rate_limit second {
							key all
							size 50
							drip_rate 1h
							on_error deny
						}
						copy_response
					}
				}
			`)(n)
			text = strings.Replace(text, "grace_period 1s", "grace_period 1m\nskip_install_trust\nauto_https disable_redirects", 1)
			return strings.Replace(text, "http://"+n.addr, "https://"+n.addr, 1)
		}
	}
	n := startNodes(tr, 1, config(500))[0]
	trusting := &tls.Config{InsecureSkipVerify: true}
	eventually(tr, "a certificate", func() bool {
		conn, err := tls.Dial("tcp", n.addr, trusting)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	only := func(set func(*http.Protocols)) http.RoundTripper {
		transport := &http.Transport{TLSClientConfig: trusting.Clone(), Protocols: new(http.Protocols)}
		set(transport.Protocols)
		return transport
	}
	h3 := &http3.Transport{TLSClientConfig: trusting.Clone()}
	defer h3.Close()
	clients := []struct {
		proto string
		http.Client
	}{
		{"HTTP/1.1", http.Client{Transport: only(func(p *http.Protocols) { p.SetHTTP1(true) })}},
		{"HTTP/2.0", http.Client{Transport: only(func(p *http.Protocols) { p.SetHTTP2(true) })}},
		{"HTTP/3.0", http.Client{Transport: h3}},
	}
	from := time.Now()
	round := func(meanwhile func()) (whole map[string]int, least int) {
		var mu sync.Mutex
		var wg sync.WaitGroup
		whole, least = make(map[string]int), 100
		for i := range clients {
			for range each {
				wg.Go(func() {
					res, err := clients[i].Get("https://" + n.addr)
					if err != nil {
						tr.Error(clients[i].proto, err)
						return
					}
					body, err := io.ReadAll(res.Body)
					_ = res.Body.Close()
					remaining, _ := strconv.Atoi(res.Header.Get("X-RateLimit-Remaining"))
					mu.Lock()
					defer mu.Unlock()
					if err == nil && string(body) == "begin end" && res.Proto == clients[i].proto {
						whole[res.Proto]++
					} else {
						tr.Logf("%s: status %d, %q, %v", res.Proto, res.StatusCode, body, err)
					}
					least = min(least, remaining)
				})
			}
		}
		for range len(clients) * each {
			select {
			case <-began:
			case <-time.After(patience):
				tr.Fatal("not all requests have passed the first limit")
			}
		}
		meanwhile()
		wg.Wait()
		return whole, least
	}
	whole, remaining := round(func() {
		for wait := 501; wait < 504; wait++ {
			if err := n.reload(config(wait)); err != nil {
				tr.Fatal(err)
			}
			time.Sleep(lasts / 10)
		}
	})
	for _, c := range clients {
		least(tr, c.proto+" over three reloads, whole", whole[c.proto], each)
	}
	most(tr, "units of the second limit", 50-remaining, 3*each)
	least(tr, "and", 50-remaining, 3*each)
	whole, remaining = round(func() {})
	for _, c := range clients {
		least(tr, c.proto+" by the same client again, whole", whole[c.proto], each)
	}
	most(tr, "units of the second limit", 50-remaining, 6*each)
	least(tr, "and", 50-remaining, 6*each)
	events := n.events(from)
	tr.note("logged: %s", reasons(events))
	most(tr, "servers lost", count(events, lost), 0)
}

// restored: a Redis that has an older state than the nodes is sent their levels,
// by those that know them.
func restored(tr *trial) {
	const early = 4
	for _, kind := range []struct {
		name string
		args []string
		save func(*redistest.Server, string) // saves the state that it will have later
	}{
		{"RDB", nil, func(s *redistest.Server, _ string) {
			redistest.Done(tr, s.Client().Save(tr.Context()))
		}},
		{"append-only file", []string{"--appendonly", "yes", "--appendfsync", "always"}, func(_ *redistest.Server, dir string) {
			if err := os.CopyFS(filepath.Join(dir, "copy"), os.DirFS(filepath.Join(dir, "appendonlydir"))); err != nil {
				tr.Fatal(err)
			}
		}},
	} {
		server := redistest.Start(tr, kind.args...)
		nodes := startNodes(tr, 3, caddyfile(redisAt(server.Addr, "timeout 2s"), site)) // as above
		n := nodes[0]
		for _, other := range nodes {
			fill(other, "first", 1) // connects
		}
		for _, key := range []string{"knows", "asks", "others"} {
			if got := fill(n, key, early); got != early {
				tr.Fatalf("%s: admitted %d, want %d", key, got, early)
			}
		}
		dir := server.Client().ConfigGet(tr.Context(), "dir").Val()["dir"]
		kind.save(server, dir)
		for _, key := range []string{"knows", "asks", "others"} {
			if got := fill(n, key, 3*slowSize); got != slowSize-early {
				tr.Fatalf("%s: admitted %d, want %d", key, got, slowSize-early)
			}
		}
		server.Kill()
		if len(kind.args) > 0 {
			live := filepath.Join(dir, "appendonlydir")
			if err := os.RemoveAll(live); err != nil {
				tr.Fatal(err)
			}
			if err := os.Rename(filepath.Join(dir, "copy"), live); err != nil {
				tr.Fatal(err)
			}
		}
		server.Restart(tr)
		keys, err := server.Client().Keys(tr.Context(), "*:slow:*").Result()
		if err != nil {
			tr.Fatal(err)
		}
		least(tr, kind.name+": buckets that it has", len(keys), 4)
		time.Sleep(1100 * time.Millisecond) // until no denial is remembered
		for _, other := range nodes {
			eventually(tr, "Redis decides again", func() bool {
				before := decisions(tr, server)
				other.get(fmt.Sprint("other", time.Now().UnixNano()))
				return decisions(tr, server) > before
			})
		}
		strictly(tr, "the node that knows: admitted more", fill(n, "knows", 3*slowSize), 0)
		strictly(tr, "others after it", fill(nodes[1], "knows", 3*slowSize)+fill(nodes[2], "knows", 3*slowSize), 0)
		strictly(tr, "others before it",
			fill(nodes[1], "others", 3*slowSize)+fill(nodes[2], "others", 3*slowSize)+fill(n, "others", 3*slowSize),
			slowSize-early)
	}
}

// splitBrain: each side has a bucket of its own. A node that moves from one side
// to the other reports its levels.
func splitBrain(tr *trial) {
	const now = "--repl-diskless-sync-delay"
	a, b := redistest.Start(tr, now, "0"), redistest.Start(tr, now, "0")
	replicate := func(of, s *redistest.Server) {
		host, port, _ := strings.Cut(of.Addr, ":")
		redistest.Done(tr, s.Client().ReplicaOf(tr.Context(), host, port))
		eventually(tr, "the replica follows", func() bool {
			return strings.Contains(s.Client().Info(tr.Context(), "replication").Val(), "master_link_status:up")
		})
	}
	replicate(a, b)
	proxies := make([]*redistest.Proxy, 3)
	nodes := make([]*node, 3)
	for i := range nodes {
		proxies[i] = redistest.StartProxy(tr, a.Addr)
		nodes[i] = startNode(tr, caddyfile(redisAt(proxies[i].Addr), site))
		fill(nodes[i], "first", 1) // connects
	}
	to := func(s *redistest.Server, some ...*redistest.Proxy) {
		for _, p := range some {
			p.Retarget(s.Addr)
			p.CloseAll()
		}
	}
	l := startLoad(tr, nodes, 200)
	time.Sleep(during(time.Second, 5*time.Second))
	var longest time.Duration
	for _, winner := range []*redistest.Server{a, b} {
		loser := b
		if winner == b {
			loser = a
		}
		redistest.Done(tr, b.Client().ReplicaOf(tr.Context(), "no", "one"))
		split := time.Now()
		to(b, proxies[2])
		time.Sleep(during(2*time.Second, 10*time.Second))
		to(winner, proxies...)
		longest = max(longest, time.Since(split))
		replicate(winner, loser)
		time.Sleep(during(time.Second, 3*time.Second))
	}
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	hot, slow := apart(2, longest) // two sides, twice
	overAdmitted(tr, requests, 2*hot, 2*slow)
	for i := range nodes {
		tr.note("by node %d alone", i+1)
		overAdmitted(tr, ofNode(requests, i), 0, 0)
	}

	// A node that moves to the other side and back brings the level of what it
	// admitted there.
	redistest.Done(tr, a.Client().ReplicaOf(tr.Context(), "no", "one"))
	const here, there = 4, 3
	back := fill(nodes[2], "back", here)
	to(a, proxies[2])
	time.Sleep(50 * time.Millisecond)
	back += fill(nodes[2], "back", there)
	to(b, proxies[2])
	time.Sleep(50 * time.Millisecond)
	back += fill(nodes[2], "back", 3*slowSize)
	strictly(tr, "there and back: admitted", back, slowSize)
	least(tr, "and", back, slowSize)
}

// clusterDown: a cluster that disappears and comes back empty.
func clusterDown(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	nodes := startNodes(tr, 1, clusterSite(c, site))
	owners(tr, c, nodes[0]) // connects to all
	began := time.Now()
	l := startLoad(tr, nodes, 400)
	time.Sleep(during(1500*time.Millisecond, 5*time.Second))
	for _, s := range c.Nodes {
		s.Kill()
	}
	time.Sleep(during(2*time.Second, 15*time.Second))
	for _, s := range c.Nodes {
		s.Restart(tr)
	}
	c.WaitOK(tr)
	from := time.Now()
	recovery := eventually(tr, "all servers decide again", func() bool {
		return count(nodes[0].events(began), back) == count(nodes[0].events(began), lost)
	})
	time.Sleep(time.Second)
	before := decisions(tr, c.Nodes...)
	time.Sleep(500 * time.Millisecond)
	least(tr, "decided by Redis in half a second afterwards", decisions(tr, c.Nodes...)-before, 20)
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "back after the cluster is", recovery, 5*time.Second)
	overAdmitted(tr, requests, 0, 0)
	tr.note("logged: %d lines; reasons: %s; %s", len(nodes[0].events(began)), reasons(nodes[0].events(began)), show(time.Since(from)))
	settled(tr, c.Nodes...)
}

// narrow: on a link with too little bandwidth, calls wait for those before them.
func narrow(tr *trial) {
	server, proxy, nodes := behindProxy(tr, site)
	nodes[0].get("first") // connects
	before := nodes[0].usage()
	began := time.Now()
	l := startLoad(tr, nodes, 200)
	for _, bandwidth := range []int{20_000, 2_000} {
		time.Sleep(500 * time.Millisecond)
		asked := decisions(tr, server)
		proxy.Throttle(bandwidth)
		from := time.Now()
		time.Sleep(during(2*time.Second, 15*time.Second))
		tr.note("%d B/s: %.0f calls a second", bandwidth, float64(decisions(tr, server)-asked)/time.Since(from).Seconds())
	}
	ended := time.Now()
	proxy.Pass()
	recovery := eventually(tr, "Redis decides again", func() bool {
		events := nodes[0].events(began)
		return count(events, lost) == count(events, back)
	})
	time.Sleep(500 * time.Millisecond)
	asked := decisions(tr, server)
	time.Sleep(500 * time.Millisecond)
	least(tr, "decided by Redis in half a second afterwards", decisions(tr, server)-asked, 20)
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	most(tr, "back after", recovery, 2*time.Second)
	overAdmitted(tr, requests, 0, 0)
	most(tr, "under-admitted", shortfall(requests), 2*size)
	tr.note("logged: %d lines; reasons: %s; %s", len(nodes[0].events(began)), reasons(nodes[0].events(began)), show(time.Since(ended)))
	eventually(tr, "goroutines and connections are back to where they were", func() bool {
		now := nodes[0].usage()
		return now.goroutines <= before.goroutines+5 && now.files <= before.files+perServer+5
	})
}

// hundredNodes: how many connections a fleet needs, and how nodes without one
// decide. The nodes are stores in this process, each with its own fallback.
func hundredNodes(tr *trial) {
	const fleet = 100
	server := redistest.Start(tr)
	var events atomic.Int64
	stores := make([]*limiter.Redis, fleet)
	for i := range stores {
		var err error
		stores[i], err = limiter.NewRedis(limiter.RedisOptions{
			Addresses: []string{server.Addr}, KeyPrefix: "rl:", Timeout: 2 * time.Second,
			Fallback: limiter.NewMemory(), Report: func(limiter.Event) { events.Add(1) },
		})
		if err != nil {
			tr.Fatal(err)
		}
		tr.Cleanup(func() { _ = stores[i].Close() })
	}
	bucket := func(key string) limiter.Bucket {
		return limiter.Bucket{Name: "b", Key: key, Limit: limiter.Limit{Size: 150, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	}
	// ask sends each node a number of concurrent requests, and returns the number
	// admitted.
	ask := func(key string, atOnce int) int {
		var admitted atomic.Int64
		var wg sync.WaitGroup
		for _, s := range stores {
			for range atOnce {
				wg.Go(func() {
					d, err := s.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{bucket(key)}}, nil)
					if err != nil {
						tr.Error(err)
					} else if !d[0].Denied {
						admitted.Add(1)
					}
				})
			}
		}
		wg.Wait()
		return int(admitted.Load())
	}
	before := ask("one", 1)
	strictly(tr, "a request each: admitted", before, fleet)
	most(tr, "connections", clients(tr, server), 2*fleet)
	strictly(tr, "and more", ask("one", 1), 150-fleet)
	ask("two", 64)
	tr.note("64 at once each: connections %d", clients(tr, server))
	most(tr, "of at most", clients(tr, server), fleet*perServer)
	for i := range 20 {
		ask(fmt.Sprint("hot", i), 64)
	}
	tr.note("and 20 times: connections %d", clients(tr, server))
	most(tr, "of at most", clients(tr, server), fleet*perServer)
	strictly(tr, "events", int(events.Load()), 0)

	// Fewer connections than nodes: those without one apply the limit by
	// themselves.
	redistest.Done(tr, server.Client().ConfigSet(tr.Context(), "maxclients", strconv.Itoa(fleet/2+1)))
	killClients(tr, server)
	time.Sleep(50 * time.Millisecond)
	few := 0
	for i := range 5 {
		few = max(few, ask(fmt.Sprint("few", i), 4))
	}
	most(tr, "room for half: connections", clients(tr, server), fleet/2)
	strictly(tr, "admitted", few, 4*fleet)
	tr.note("events %d", events.Load())
	redistest.Done(tr, server.Client().ConfigSet(tr.Context(), "maxclients", "10000"))
	tries := 0
	back := eventually(tr, "room for all again: they share a bucket", func() bool {
		tries++
		return ask(fmt.Sprint("again", tries), 4) == 150
	})
	most(tr, "room for all again: they share a bucket after", back, 5*time.Second)
}
