package faults

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// burstFaults are faults that affect many concurrent requests, or many
// connections.
var burstFaults = []fault{
	{"1 (512 connections)", "Redis is killed and restarted empty while 512 connections ask as fast as they can; one node", killedInCrowd},
	{"3 (512 connections)", "the same, but it is stopped by SIGSTOP and continues", stoppedInCrowd},
	{"25", "Redis stalls for less than the timeout, and 300 requests come at once; one node", stalls},
	{"25 (far)", "bursts at three nodes at once; Redis is far away and well; `fallback` and `deny`", farBursts},
	{"25 (deny)", "the same with on_error deny; Redis stalls for more than half the timeout", stallsDenied},
}

// volley is a set of connections to a node for sending requests all at once.
type volley struct {
	tr    *trial
	node  *node
	conns []net.Conn
	reads []*bufio.Reader

	stalls, met int // how often Redis stalled, and how often requests met that
}

// newVolley opens the given number of connections to a node.
func newVolley(tr *trial, n *node, connections int) *volley {
	tr.Helper()
	v := &volley{tr: tr, node: n}
	tr.Cleanup(v.close)
	for range connections {
		conn, err := net.Dial("tcp", n.addr)
		if err != nil {
			tr.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		v.conns = append(v.conns, conn)
		v.reads = append(v.reads, bufio.NewReader(conn))
	}
	return v
}

func (v *volley) close() {
	for _, conn := range v.conns {
		_ = conn.Close()
	}
	v.conns = nil
}

// fire sends a request for a key on each connection at once, and returns the
// results.
func (v *volley) fire(path, key string) []request {
	requests := make([]request, len(v.conns))
	text := fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\nX-Key: %s\r\n\r\n", path, v.node.addr, key)
	start := make(chan struct{})
	var ready, done sync.WaitGroup
	for i, conn := range v.conns {
		ready.Add(1)
		done.Go(func() {
			r := &requests[i]
			ready.Done()
			<-start
			r.key, r.sent = key, time.Now()
			r.due = r.sent
			if _, err := conn.Write(text); err == nil {
				if res, err := http.ReadResponse(v.reads[i], nil); err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					r.status = res.StatusCode
				}
			}
			r.got = time.Now()
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
	return requests
}

// fireStalled is fire while Redis stalls. It counts how often a request waited for at
// least four fifths of the stall: otherwise all came before it or after it, and show nothing.
func (v *volley) fireStalled(server *redistest.Server, stall time.Duration, path, key string) []request {
	v.tr.Helper()
	asleep := make(chan error, 1)
	go func() {
		asleep <- server.Client().Do(context.Background(), "debug", "sleep", stall.Seconds()).Err()
	}()
	time.Sleep(2 * time.Millisecond) // until Redis has read that
	requests := v.fire(path, key)
	if err := <-asleep; err != nil {
		v.tr.Fatal(err)
	}
	v.stalls++
	if percentile(requests, 1) >= stall*4/5 {
		v.met++
	}
	return requests
}

// checkMet checks that most stalls were met by requests.
func (v *volley) checkMet() {
	v.tr.Helper()
	if 2*v.met < v.stalls {
		v.tr.Fatalf("requests met %d of %d stalls", v.met, v.stalls)
	}
}

// shape is a limit for bursts, with a path of its own.
type shape struct {
	path string
	size int
	rate time.Duration
}

func (s shape) String() string { return fmt.Sprintf("size %d, drip rate %v", s.size, s.rate) }

// shapes are large and small, fast and slow limits.
var shapes = []shape{
	{"/large-slow", 100, time.Hour},
	{"/large-fast", 100, 100 * time.Millisecond},
	{"/small-slow", 1, time.Hour},
	{"/small-fast", 1, 100 * time.Millisecond},
}

// shaped returns a site with a limit of each shape, and options for all of them.
func shaped(options string) string {
	var text strings.Builder
	for _, s := range shapes {
		fmt.Fprintf(&text, "rate_limit %s %s {\nkey {header.X-Key}\nsize %d\ndrip_rate %v\n%s\n}\n",
			s.path, s.path[1:], s.size, s.rate, options)
	}
	return text.String() + "respond ok\n"
}

const burst = 300

// decides waits until Redis decides a node's requests.
func decides(tr *trial, n *node, server *redistest.Server) {
	tr.Helper()
	i := 0
	eventually(tr, "Redis decides", func() bool {
		i++
		before := decisions(tr, server)
		n.ask(shapes[0].path, "X-Key", fmt.Sprintf("first%d.%d", time.Now().UnixNano(), i))
		return decisions(tr, server) > before
	})
}

// stalls: requests that Redis decides late, and those that it then does not decide
// at all, use one bucket.
func stalls(tr *trial) {
	server := redistest.Start(tr, "--enable-debug-command", "yes")
	n := startNode(tr, caddyfile(redisAt(server.Addr), shaped("")))
	v := newVolley(tr, n, burst)
	failed := 0
	for _, stall := range []time.Duration{25 * time.Millisecond, 30 * time.Millisecond, 45 * time.Millisecond} {
		worst, first := 0, 0
		for _, s := range shapes {
			for round := range int(during(2, 10)) {
				decides(tr, n, server)
				key := fmt.Sprint("k", stall, round)
				requests := v.fireStalled(server, stall, s.path, key)
				atOnce := beyond(requests, leaky(s.size, s.rate))
				// What was decided apart is merged again without loss.
				requests = append(requests, v.fire(s.path, key)...)
				inAll := beyond(requests, leaky(s.size, s.rate))
				if inAll > 0 {
					tr.Logf("%v, stalled for %v: over-admitted %d at once, %d in all", s, stall, atOnce, inAll)
				}
				first, worst = max(first, atOnce), max(worst, inAll)
				failed += strange(requests)
			}
		}
		strictly(tr, fmt.Sprintf("stalled for %v: over-admitted at once", stall), first, 0)
		strictly(tr, "with what comes later", worst, 0)
	}
	v.checkMet()
	most(tr, "5xx", failed, 0)
}

const farBurst = 16 // requests at once at each node

// farBursts: bursts at three nodes at once, whose Redis is far away and well: all
// together admit what one limit allows, and with on_error deny nothing is refused.
func farBursts(tr *trial) {
	server := redistest.Start(tr)
	proxy := redistest.StartProxy(tr, server.Addr)
	failed := 0
	for i, away := range []time.Duration{24 * time.Millisecond, 30 * time.Millisecond, 40 * time.Millisecond} {
		proxy.Delay(away)
		worst := 0
		for _, onError := range []string{"", "on_error deny"} {
			nodes := startNodes(tr, 3, caddyfile(redisAt(proxy.Addr), shaped(onError)))
			var volleys []*volley
			for _, n := range nodes {
				decides(tr, n, server)
				volleys = append(volleys, newVolley(tr, n, farBurst))
			}
			for j := range shapes {
				s := shapes[(2*i+j)%len(shapes)] // another first one for each distance
				key := fmt.Sprint("k", away, onError)
				var requests []request
				for range 2 {
					parts := make([][]request, len(volleys))
					var all sync.WaitGroup
					for k, v := range volleys {
						all.Go(func() { parts[k] = v.fire(s.path, key) })
					}
					all.Wait()
					requests = append(requests, slices.Concat(parts...)...)
				}
				over := beyond(requests, leaky(s.size, s.rate))
				if over > 0 {
					tr.Logf("%v, %v away %s: over-admitted %d", s, away, onError, over)
				}
				worst = max(worst, over)
				failed += strange(requests)
			}
			for _, v := range volleys {
				v.close()
			}
		}
		strictly(tr, fmt.Sprintf("%v away: over-admitted", away), worst, 0)
	}
	most(tr, "5xx", failed, 0)
}

// stallsDenied: a request whose answer can still arrive in time is not refused for
// being late.
func stallsDenied(tr *trial) {
	const timeout, stall = 100 * time.Millisecond, 60 * time.Millisecond
	server := redistest.Start(tr, "--enable-debug-command", "yes")
	n := startNode(tr, caddyfile(redisAt(server.Addr, fmt.Sprintf("timeout %v", timeout)), shaped("on_error deny")))
	v := newVolley(tr, n, burst)
	s := shapes[0]
	refused, over := 0, 0
	for round := range int(during(10, 40)) {
		decides(tr, n, server)
		key := fmt.Sprint("k", round)
		requests := v.fireStalled(server, stall, s.path, key)
		for _, r := range requests {
			if r.status == http.StatusServiceUnavailable {
				refused++
			}
		}
		over = max(over, beyond(requests, leaky(s.size, s.rate)))
	}
	v.checkMet()
	most(tr, "refused", refused, 0)
	strictly(tr, "over-admitted", over, 0)
}

func killedInCrowd(tr *trial) {
	server := redistest.Start(tr)
	inCrowd(tr, server, server.Kill, func() { server.Restart(tr) })
}

func stoppedInCrowd(tr *trial) {
	server := redistest.Start(tr)
	inCrowd(tr, server, func() { server.Pause(tr) }, func() { server.Resume(tr) })
}

// inCrowd runs begin and end while so many clients send requests that a small
// machine is fully busy. Waits are not judged then.
func inCrowd(tr *trial, server *redistest.Server, begin, end func()) {
	tr.Helper()
	const connections = 512
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	nodes[0].get("first") // connects
	began := time.Now()
	third := during(time.Second, 10*time.Second)
	crowd := make(chan []request)
	go func() { crowd <- hammer(tr, nodes, connections, 3*third, mixed()) }()
	time.Sleep(third)
	begin()
	time.Sleep(third)
	ended := time.Now()
	end()
	requests := <-crowd
	eventually(tr, "Redis decides again", func() bool { return count(nodes[0].events(ended), back) > 0 })
	most(tr, "5xx", strange(requests), 0)
	overAdmitted(tr, requests, 0, 0)
	tr.note("%d requests; reasons: %s", len(requests), reasons(nodes[0].events(began)))
	settled(tr, server)
}
