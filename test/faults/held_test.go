package faults

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// heldFaults are faults while requests hold units until they end.
var heldFaults = []fault{
	{"45", "Caddy is killed while its requests count as in progress, and a websocket stays open on another node; three nodes", killedWhileHolding},
	{"45 (failover)", "cluster: a failover of the server that has the key, while websockets are open on two nodes", failoverWhileHolding},
	{"45 (cut off)", "one of two nodes is cut off from Redis, while a websocket is open on each", cutOffWhileHolding},
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
