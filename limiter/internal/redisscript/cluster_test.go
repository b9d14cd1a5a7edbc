package redisscript

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// newTestCluster returns a client of the given cluster.
func newTestCluster(t testing.TB, nodes *redistest.Cluster, change func(*Options)) *testClient {
	t.Helper()
	return newTestClient(t, nodes.Nodes[0], func(opt *Options) {
		opt.Cluster = true
		if change != nil {
			change(opt)
		}
	})
}

// cluster returns the servers of c's cluster.
func (c *testClient) cluster() *cluster { return c.topology.(*cluster) }

// onNode returns a counter like c with a key of its own in a slot of the given
// node.
func onNode(t testing.TB, nodes *redistest.Cluster, node *redistest.Server, c counter) counter {
	t.Helper()
	return onSlots(t, nodes, node, 1, c)[0]
}

// onSlots returns counters like c with keys of their own in n slots of a node.
func onSlots(t testing.TB, nodes *redistest.Cluster, node *redistest.Server, n int, c counter) []counter {
	t.Helper()
	var counters []counter
	used := map[int]bool{}
	for i := 0; len(counters) < n; i++ {
		c.key = fmt.Sprintf("rl:{%s%d}", t.Name(), i)
		if slot := nodes.Slot(t, c.key); !used[slot] && nodes.Owner(t, slot) == node {
			used[slot] = true
			counters = append(counters, c)
		}
	}
	return counters
}

// TestClusterAskingRefused guards that the operator learns if the user has no
// permission to follow a slot that is being moved.
func TestClusterAskingRefused(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	for _, node := range nodes.Nodes {
		setUser(t, node, "+cluster|slots")
	}
	r := newTestCluster(t, nodes, func(opt *Options) { opt.Username, opt.Password = "limiter", "pass" })
	b := onNode(t, nodes, nodes.Nodes[0], upTo(5))
	mustCount(t, r, b)
	nodes.BeginMove(t, nodes.Slot(t, b.key), nodes.Nodes[1])
	nodes.MoveKeys(t, nodes.Slot(t, b.key), nodes.Nodes[1])
	_, err := r.count(t.Context(), b)
	checkError(t, err, nodes.Nodes[1].Addr, "asking")
	if f := failureOf(t, err); f.reason != "noperm" {
		t.Errorf("reason %q: %v", f.reason, err)
	}
}

// TestClusterUnreachable guards a cluster that has never been reached: no call
// waits longer than its timeout, and calls are answered as soon as the cluster is
// there.
func TestClusterUnreachable(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	nodes := redistest.StartCluster(t, 1)
	p := redistest.StartProxy(t, nodes.Nodes[0].Addr)
	p.Refuse()
	var seen events
	r := newTestCluster(t, nodes, func(opt *Options) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
	})
	for n := range 3 * openAfter {
		began := time.Now()
		_, err := r.count(t.Context(), upTo(5))
		checkError(t, err, p.Addr)
		if f := failureOf(t, err); f.reason != "refused" {
			t.Errorf("request %d: reason %q: %v", n, f.reason, err)
		}
		if took := time.Since(began); took > 2*timeout {
			t.Errorf("waited %v", took)
		}
	}
	if got, want := seen.take(), []string{"down refused"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
	p.Pass()
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, err := r.count(t.Context(), upTo(5))
		return err
	})
	if got, want := seen.take(), []string{"recovered"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// TestClusterTLS guards a cluster that requires TLS and client certificates.
func TestClusterTLS(t *testing.T) {
	t.Parallel()
	authority := redistest.NewAuthority(t)
	nodes := redistest.StartClusterTLS(t, authority, true, 2)
	r := newTestCluster(t, nodes, func(opt *Options) { opt.TLS = authority.ClientConfig(t) })
	for i, node := range nodes.Nodes {
		b := onNode(t, nodes, node, upTo(5))
		mustCount(t, r, b)
		if got := stored(t, node, b.key); got != 1 {
			t.Errorf("the bucket on node %d holds %d", i, got)
		}
	}
}

// TestClusterCloseLeaksNothing guards that a closed client of a cluster leaves no
// connections or goroutines behind.
func TestClusterCloseLeaksNothing(t *testing.T) {
	nodes := redistest.StartCluster(t, 2)
	for _, node := range nodes.Nodes {
		clients(t, node)
	}
	before, own := runtime.NumGoroutine(), clients(t, nodes.Nodes[0]) // connections between the nodes
	for range 5 {
		r := newTestCluster(t, nodes, nil)
		redistest.Together(t, 6, func(i int) {
			b := upTo(100)
			b.key = fmt.Sprintf("rl:{%d}", i)
			if _, err := r.count(t.Context(), b); err != nil {
				t.Error(err)
			}
		})
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := r.count(t.Context(), upTo(100)); err == nil {
			t.Error("decided by a closed store")
		}
	}
	redistest.WaitFor(t, 10*time.Second, func() error {
		for i, node := range nodes.Nodes {
			if n := clients(t, node); n > own {
				return fmt.Errorf("%d connections to node %d, were %d", n, i, own)
			}
		}
		if n := runtime.NumGoroutine(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
}

// TestClusterConnect guards that Connect connects to all servers of a cluster
// before there is any call.
func TestClusterConnect(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, nil)
	r.Connect()
	c := r.cluster()
	redistest.WaitFor(t, 5*time.Second, func() error {
		c.mu.RLock()
		defer c.mu.RUnlock()
		for _, node := range nodes.Nodes {
			if s := c.servers[node.Addr]; s == nil || !s.pipeline.healthy() {
				return fmt.Errorf("no connection to %s", node.Addr)
			}
		}
		return nil
	})
}

// TestClusterFirstSlot guards a server without slots that gets its first one: a
// client that has never heard of it finds it, all calls are answered, and go-redis
// takes over the connections made to it.
func TestClusterFirstSlot(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	all, none := nodes.Nodes[0], nodes.Nodes[1]
	id, err := all.Client().ClusterMyID(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	// So that no client believes the other node, which has them until it learns.
	redistest.Done(t, all.Client().Do(t.Context(), "CLUSTER", "BUMPEPOCH"))
	for _, node := range nodes.Nodes {
		_, err := node.Client().Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
			for slot := 16384 / 2; slot < 16384; slot++ {
				pipe.Do(t.Context(), "CLUSTER", "SETSLOT", slot, "NODE", id)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	nodes.WaitOK(t)

	var seen events
	r := newTestCluster(t, nodes, func(opt *Options) { opt.Report = seen.report })
	b := upTo(100_000)
	want := int64(0)
	take := func() {
		t.Helper()
		for range 3 {
			want++
			if d := mustCount(t, r, b); d[0].n != want {
				t.Fatalf("request %d: decided %+v", want, d)
			}
		}
	}
	take()
	c := r.cluster()
	find := func() (s *Server, known bool) {
		c.mu.RLock()
		defer c.mu.RUnlock()
		s = c.servers[none.Addr]
		return s, s != nil && s.master.Load()
	}
	if s, _ := find(); s != nil {
		t.Fatal("the server without slots is known: the test proves nothing")
	}
	slot := nodes.Slot(t, b.key)
	nodes.BeginMove(t, slot, none)
	take()
	nodes.MoveKeys(t, slot, none)
	take()
	first, _ := find()
	nodes.EndMove(t, slot, none)
	take()
	redistest.WaitFor(t, 5*time.Second, func() error {
		take()
		if _, known := find(); !known {
			return errors.New("the client does not know the server")
		}
		return nil
	})
	if s, _ := find(); s != first || first == nil {
		t.Error("its connections were given up")
	}
	if got := stored(t, none, b.key); got != want {
		t.Errorf("%d units after %d requests", got, want)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestClusterRedirects guards which server a redirection means: servers have their
// own way of writing IPv6 addresses.
func TestClusterRedirects(t *testing.T) {
	for _, tc := range []struct{ named, meant string }{
		{"127.0.0.1:7000", "127.0.0.1:7000"},
		{"redis.test:7000", "redis.test:7000"},
		{"::1:7000", "[::1]:7000"},
		{"[::1]:7000", "[::1]:7000"},
		{"2001:db8::a:b:7000", "[2001:db8::a:b]:7000"},
		{"fe80::1%eth0:7000", "[fe80::1%eth0]:7000"},
		{":7000", "asked.test:7000"},
	} {
		t.Run(tc.named, func(t *testing.T) {
			c := newCluster(Options{Addresses: []string{redistest.FreeAddr(t)}, Timeout: time.Second}, newCounting(counting), Hooks{Restarted: func(*Server) {}})
			defer c.close()
			c.newClient(&redis.Options{Addr: "asked.test:7001"})
			c.newClient(&redis.Options{Addr: tc.meant})
			want := c.at(tc.meant)
			for reply, wantAsking := range map[string]bool{"MOVED": false, "ASK": true} {
				err := newFailure("", 0, fmt.Errorf("wrapped: %w", redisError(t, reply+" 1 "+tc.named)))
				if next, asking := c.redirected(c.at("asked.test:7001"), err); next != want || asking != wantAsking {
					t.Errorf("%s: not the server at %s, or asking %t, want %t", reply, tc.meant, asking, wantAsking)
				}
			}
		})
	}
}

// TestUnknownEndpoints guards that when a cluster names a server without a host,
// the host of the server that named it is used: when connecting to the cluster,
// and when the cluster starts to do so later and then redirects to a server.
func TestUnknownEndpoints(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before", "later"} {
		t.Run(when, func(t *testing.T) {
			nodes := redistest.StartCluster(t, 2)
			var seen events
			r := newTestCluster(t, nodes, func(opt *Options) { opt.Report = seen.report })
			var buckets []counter
			for _, node := range nodes.Nodes {
				buckets = append(buckets, onNode(t, nodes, node, upTo(100)))
			}
			on := slices.Clone(nodes.Nodes)
			if when == "later" {
				for _, b := range buckets { // connects
					mustCount(t, r, b)
				}
				nodes.MoveSlot(t, nodes.Slot(t, buckets[0].key), nodes.Nodes[1])
				on[0] = nodes.Nodes[1]
			}
			for _, node := range nodes.Nodes {
				redistest.Done(t, node.Client().ConfigSet(t.Context(), "cluster-preferred-endpoint-type", "unknown-endpoint"))
			}
			var calls int64
			for i := range buckets {
				before := on[i].CommandStat(t, "evalsha")
				mustCount(t, r, buckets[i])
				calls += on[i].CommandStat(t, "evalsha") - before
			}
			if calls == 0 {
				t.Error("no server was asked")
			}
			if got := seen.take(); len(got) > 0 {
				t.Errorf("reported %q", got)
			}
			c := r.cluster()
			c.mu.RLock()
			defer c.mu.RUnlock()
			for addr := range c.servers {
				if host, _, _ := net.SplitHostPort(addr); host != "127.0.0.1" {
					t.Errorf("a server is known by the address %q", addr)
				}
			}
		})
	}
}

// TestReplacedServer guards that an outage of a server whose slots others have
// taken over is reported as ended, once.
func TestReplacedServer(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	var seen events
	r := newTestCluster(t, nodes, func(opt *Options) { opt.Report = seen.report })
	gone := nodes.Nodes[0]
	mustCount(t, r, onNode(t, nodes, gone, upTo(100)))
	s := r.cluster().at(gone.Addr)
	nodes.Remove(t, gone)
	for range openAfter {
		s.breaker.failure(s.failure(syscall.ECONNREFUSED))
	}
	s.changed()
	if got := seen.take(); !slices.Equal(got, []string{"down refused"}) {
		t.Fatalf("reported %q", got)
	}
	redistest.WaitFor(t, 20*time.Second, func() error {
		if s.breaker.isOpen() {
			return errors.New("the server still counts as lost")
		}
		return nil
	})
	if got := seen.take(); !slices.Equal(got, []string{"replaced"}) {
		t.Errorf("reported %q", got)
	}
}

// TestClusterSlotsReply guards how a reply to CLUSTER SLOTS is parsed, and that an
// invalid one is an error.
func TestClusterSlotsReply(t *testing.T) {
	node := func(host any, port any) []any { return []any{host, port, "id", []any{}} }
	for _, tc := range []struct {
		name  string
		reply any
		want  string // the addresses, empty for an error
	}{
		{"hosts", []any{[]any{int64(0), int64(9), node("a.test", int64(1)), node("::1", int64(2))}}, "[a.test:1 [::1]:2]"},
		{"no hosts", []any{[]any{int64(0), int64(9), node(nil, int64(1)), node("", int64(2))}}, "[asked.test:1 asked.test:2]"},
		{"nothing", []any{}, "[]"},
		{"no list", "OK", ""},
		{"no ranges", []any{int64(1)}, ""},
		{"no numbers", []any{[]any{"0", "9"}}, ""},
		{"no server", []any{[]any{int64(0), int64(9), "a.test"}}, ""},
		{"no port", []any{[]any{int64(0), int64(9), node("a.test", nil)}}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			slots, err := endpoints{addr: "asked.test:7000"}.slots(tc.reply)
			if (err != nil) != (tc.want == "") {
				t.Fatalf("error %v", err)
			}
			addrs := []string{}
			for _, s := range slots {
				for _, n := range s.Nodes {
					addrs = append(addrs, n.Addr)
				}
			}
			if got := fmt.Sprint(addrs); err == nil && got != tc.want {
				t.Errorf("servers %s, want %s", got, tc.want)
			}
		})
	}
}

// fakeServer runs a server that does Redis's handshake and otherwise sends the
// given replies; it returns its address.
func fakeServer(t testing.TB, reply func(command string) string) string {
	t.Helper()
	return scriptedServer(t, func(words []string) (string, then) { return reply(words[0]), goOn })
}

// then is what a scripted server does after a reply.
type then uint8

const (
	goOn    then = iota
	hangUp       // close the connection
	beQuiet      // answer nothing more on the connection
)

// scriptedServer runs a server that does Redis's handshake and otherwise answers each
// command, whose name is in lower case, as answer says; it returns its address.
func scriptedServer(t testing.TB, answer func(words []string) (reply string, next then)) string {
	t.Helper()
	return tcpServer(t, func(c *net.TCPConn) {
		defer c.Close()
		r := bufio.NewReader(c)
		for {
			words, err := readCommand(r)
			if err != nil {
				return
			}
			reply, next := answer(words)
			switch {
			case words[0] == "hello":
				reply = "*2\r\n$5\r\nproto\r\n:2\r\n"
			case reply == "" && next == goOn:
				reply = "+OK\r\n"
			}
			if _, err := io.WriteString(c, reply); err != nil {
				return
			}
			switch next {
			case hangUp:
				_ = c.CloseWrite()
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				_, _ = io.Copy(io.Discard, r) // otherwise a reset may overtake the reply
				return
			case beQuiet:
				_, _ = io.Copy(io.Discard, r)
				return
			case goOn:
			}
		}
	})
}

// readCommand reads a command: its name, in lower case, and its arguments.
func readCommand(r *bufio.Reader) ([]string, error) {
	var words []string
	var n, length int
	if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
		return nil, err
	}
	for range n {
		if _, err := fmt.Fscanf(r, "$%d\r\n", &length); err != nil {
			return nil, err
		}
		word := make([]byte, length+len("\r\n"))
		if _, err := io.ReadFull(r, word); err != nil {
			return nil, err
		}
		words = append(words, string(word[:length]))
	}
	words[0] = strings.ToLower(words[0])
	return words, nil
}

// redisError returns the error that the client makes of a server's reply.
func redisError(t testing.TB, reply string) error {
	t.Helper()
	addr := fakeServer(t, func(command string) string {
		if command == "ping" {
			return "-" + reply + "\r\n"
		}
		return ""
	})
	client := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, Protocol: 2, DisableIdentity: true})
	defer client.Close()
	return client.Ping(t.Context()).Err()
}

// TestClusterMovedToItself guards a server that for a while redirects to itself,
// as may happen when an address has moved to another server: the client gives
// connections up for that, and none of them is kept.
func TestClusterMovedToItself(t *testing.T) {
	var lost atomic.Bool
	var ran atomic.Int64
	var own atomic.Value
	own.Store("")
	addr := fakeServer(t, func(command string) string {
		host, port, _ := net.SplitHostPort(own.Load().(string))
		switch command {
		case "cluster":
			const slots = "*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$%d\r\n%s\r\n:%s\r\n$1\r\nx\r\n"
			return fmt.Sprintf(slots, len(host), host, port)
		case "evalsha":
			if lost.Load() {
				return fmt.Sprintf("-MOVED 1 %s\r\n", own.Load())
			}
			ran.Add(1)
			return "*1\r\n:1\r\n"
		}
		return ""
	})
	own.Store(addr)
	r := newHookedClient(t, nil, newCounting(counting), Hooks{}, func(opt *Options) { opt.Addresses, opt.Cluster = []string{addr}, true })
	req := upTo(100)
	mustCount(t, r, req)
	for range 3 {
		lost.Store(true)
		for range 5 {
			_, err := r.count(t.Context(), req)
			checkError(t, err, addr)
			if f := failureOf(t, err); f.reason != "moved" {
				t.Errorf("reason %q: %v", f.reason, err)
			}
		}
		lost.Store(false)
		before := ran.Load()
		for range 20 {
			mustCount(t, r, req)
		}
		if got := ran.Load() - before; got != 20 {
			t.Errorf("%d calls for 20 requests", got)
		}
	}
}

// atNode returns the client's server for a node of a cluster.
func atNode(r *testClient, node *redistest.Server) *Server { return r.cluster().at(node.Addr) }

// TestBatchesToCluster guards calls that are batched to a cluster server: one
// pipeline for all of its slots, with one invocation for each. An error for some
// of these invocations does not affect the others.
func TestBatchesToCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	from, to := nodes.Nodes[0], nodes.Nodes[1]
	var seen events
	r := newTestCluster(t, nodes, func(opt *Options) { opt.Report = seen.report })
	for _, node := range nodes.Nodes {
		b := onNode(t, nodes, node, upTo(100))
		mustCount(t, r, b)
	}
	s := atNode(r, from)
	// take makes a call and counts it if it is admitted.
	take := func(t *testing.T, b counter, admitted *atomic.Int64) {
		if d, err := r.count(context.Background(), b); err != nil {
			t.Error(err)
		} else if !d[0].denied {
			admitted.Add(1)
		}
	}
	// check checks that b, which is on a node, has admitted what it should.
	check := func(t *testing.T, b counter, node *redistest.Server, admitted *atomic.Int64, want int64) {
		t.Helper()
		if got := admitted.Load(); got != want {
			t.Errorf("%s: admitted %d, want %d", b.key, got, want)
		}
		if got := stored(t, node, b.key); got != want {
			t.Errorf("%s: %d units, want %d", b.key, got, want)
		}
	}

	for _, flushed := range []bool{false, true} {
		t.Run(fmt.Sprintf("many slots, flushed=%t", flushed), func(t *testing.T) {
			const keys, each = 40, 5
			buckets := onSlots(t, nodes, from, keys, upTo(each-1))
			admitted := make([]atomic.Int64, keys)
			c := redistest.CommandCounter{Server: from}
			c.Since(t, "evalsha")
			c.Since(t, "eval")
			c.Since(t, "evalsha_ro")
			reads := from.InfoNumber(t, "stats", "total_reads_processed")
			gather(t, s, keys*each, func(i int) { take(t, buckets[i%keys], &admitted[i%keys]) }, func() {
				if flushed {
					if err := from.Client().ScriptFlush(t.Context()).Err(); err != nil {
						t.Error(err)
					}
				}
			})
			// A pipeline is read in pieces, and the test and the other node send
			// commands too.
			if got := from.InfoNumber(t, "stats", "total_reads_processed") - reads; got > keys {
				t.Errorf("%d reads for the calls of %d slots", got, keys)
			}
			small, whole := int64(keys), int64(0)
			if flushed {
				small, whole = 2*keys-1, 1
			}
			loads := c.Since(t, "evalsha_ro") // of new connections, which load the script on the server too
			if got := c.Since(t, "evalsha"); got > small || got < small && loads == 0 {
				t.Errorf("%d calls of evalsha, want %d; %d loads", got, small, loads)
			}
			if got := c.Since(t, "eval"); got < whole || got > whole+loads {
				t.Errorf("%d calls of eval, want %d; %d loads", got, whole, loads)
			}
			for i, b := range buckets {
				check(t, b, from, &admitted[i], each-1)
			}
		})
	}

	t.Run("slot moves", func(t *testing.T) {
		const each = 20
		buckets := onSlots(t, nodes, from, 3, upTo(100))
		moving, fresh, alsoFresh := buckets[0], buckets[0], buckets[1]
		fresh.key += ":fresh"
		one, other := nodes.Slot(t, moving.key), nodes.Slot(t, alsoFresh.key)
		mustCount(t, r, moving)
		nodes.BeginMove(t, one, to)
		nodes.BeginMove(t, other, to)

		// Some keys of one slot are here and others do not exist yet: TRYAGAIN.
		// All keys of another slot do not exist yet: ASK. A third slot stays.
		all := []counter{moving, fresh, alsoFresh, buckets[2]}
		admitted := make([]atomic.Int64, len(all))
		admitted[0].Store(1)
		gather(t, s, each*len(all), func(i int) { take(t, all[i%len(all)], &admitted[i%len(all)]) })
		for _, slot := range []int{one, other} {
			nodes.MoveKeys(t, slot, to)
			nodes.EndMove(t, slot, to)
		}
		check(t, moving, to, &admitted[0], each+1)
		check(t, fresh, to, &admitted[1], each)
		check(t, alsoFresh, to, &admitted[2], each)
		check(t, buckets[2], from, &admitted[3], each)
		if got := seen.take(); len(got) > 0 {
			t.Errorf("reported %q", got)
		}
	})
}

// TestBatchedCallsFollowMovedSlots guards slots that have moved while calls wait
// for the server that had them: these calls are redirected, are batched again for
// the other server, and are charged there once.
func TestBatchedCallsFollowMovedSlots(t *testing.T) {
	t.Parallel()
	const each = 20
	nodes := redistest.StartCluster(t, 2)
	from, to := nodes.Nodes[0], nodes.Nodes[1]
	var seen events
	r := newTestCluster(t, nodes, func(opt *Options) { opt.Timeout, opt.Report = time.Minute, seen.report })
	buckets := onSlots(t, nodes, from, 3, upTo(100))
	for _, b := range append(buckets, onNode(t, nodes, to, upTo(100))) {
		mustCount(t, r, b)
	}
	first, second := hold(t, atNode(r, from)), hold(t, atNode(r, to))
	waitAt := func(node *redistest.Server, n int) {
		t.Helper()
		redistest.WaitFor(t, 4*time.Second, func() error {
			if waiting := waitingAt(atNode(r, node)); waiting != n {
				return fmt.Errorf("%d requests wait, want %d", waiting, n)
			}
			return nil
		})
	}
	var all sync.WaitGroup
	for i := range len(buckets) * each {
		all.Go(func() {
			d, err := r.count(context.Background(), buckets[i%len(buckets)])
			if err != nil || d[0].denied {
				t.Errorf("decided %+v, error %v", d, err)
			}
		})
	}
	waitAt(from, len(buckets)*each)
	for _, b := range buckets[:2] {
		nodes.MoveSlot(t, nodes.Slot(t, b.key), to)
	}
	first()
	waitAt(to, 2*each)
	second()
	all.Wait()
	for i, node := range []*redistest.Server{to, to, from} {
		if got := stored(t, node, buckets[i].key); got != each+1 {
			t.Errorf("bucket %d holds %d units after %d requests", i, got, each+1)
		}
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestSubmittedCallsFollowMovedSlots guards that a call that is submitted follows a slot
// that has moved, or is being moved, as one that is awaited does: no other would report it
// the server what it reports.
func TestSubmittedCallsFollowMovedSlots(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	r := newTestCluster(t, nodes, func(opt *Options) { opt.Timeout = time.Second })
	from, to := nodes.Nodes[0], nodes.Nodes[1]
	several := onSlots(t, nodes, from, 1, upTo(100))
	slot := nodes.Slot(t, several[0].key)
	for i := range 2 { // of the same slot
		another := upTo(100)
		another.key = several[0].key + fmt.Sprint(i)
		several = append(several, another)
	}
	// submit submits a call for each counter, together, and checks that all are run.
	submit := func(when string) {
		t.Helper()
		errs := make(chan error, len(several))
		release := hold(t, atNode(r, from))
		for _, c := range several {
			call := callOf(c)
			call.Done = func(err error) { errs <- err }
			if err := r.Submit(Deadline{At: time.Now().Add(r.timeout)}, call); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
		}
		release()
		for range several {
			if err := <-errs; err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
	}
	mustCount(t, r, several[0]) // connects
	submit("before")
	nodes.BeginMove(t, slot, to)
	nodes.MoveKeys(t, slot, to, several[0].key)
	submit("some keys are there")
	nodes.MoveKeys(t, slot, to)
	submit("all keys are there")
	nodes.EndMove(t, slot, to)
	submit("it has moved")
	for i, want := range []int64{5, 4, 4} {
		if got := stored(t, to, several[i].key); got != want {
			t.Errorf("%s holds %d, want %d", several[i].key, got, want)
		}
	}
}
