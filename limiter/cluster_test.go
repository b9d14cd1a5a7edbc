package limiter

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
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// newTestCluster returns a store in the given cluster.
func newTestCluster(t testing.TB, nodes *redistest.Cluster, change func(*RedisOptions)) *Redis {
	t.Helper()
	return newTestRedis(t, nodes.Nodes[0], func(opt *RedisOptions) {
		opt.Cluster = true
		if change != nil {
			change(opt)
		}
	})
}

// onNode returns a bucket like b with a key of its own that lies on the given
// node.
func onNode(t testing.TB, r *Redis, nodes *redistest.Cluster, node *redistest.Server, b Bucket) Bucket {
	t.Helper()
	for n := range 1000 {
		b.Key = fmt.Sprint(t.Name(), n)
		if nodes.Owner(t, nodes.Slot(t, r.keys.of(&b))) == node {
			return b
		}
	}
	t.Fatal("no such key")
	return b
}

// storedUnits returns how many units b holds on the given node, by what is
// stored there once all that was held is settled; no drip must have passed.
func storedUnits(t testing.TB, r *Redis, node *redistest.Server, b Bucket) int64 {
	t.Helper()
	key := r.keys.of(&b)
	waitFor(t, 5*time.Second, func() error { return unsettled(t, node, key) })
	if node.Client().Exists(t.Context(), key).Val() == 0 {
		return 0
	}
	s, _ := storedState(t, node, key)
	s.clear -= serverTime(t, node)
	return b.Limit.Size - b.Limit.remaining(s, 0)
}

// unsettled returns an error if units are held under key.
func unsettled(t testing.TB, node *redistest.Server, key string) error {
	t.Helper()
	if value := node.Client().Get(t.Context(), key).Val(); strings.Count(value, ":") == 3 {
		return fmt.Errorf("%s holds %q", key, value)
	}
	return nil
}

// TestCluster tests requests to a healthy cluster: to one node and to several,
// with the rights that are documented, and by a store that takes a node for a
// server of its own.
func TestCluster(t *testing.T) {
	nodes := redistest.StartCluster(t, 3)
	evals := func() []int64 {
		var n []int64
		for _, node := range nodes.Nodes {
			n = append(n, node.CommandStat(t, "evalsha"))
		}
		return n
	}
	// grew returns by how much the counts have grown.
	grew := func(before []int64) []int64 {
		after := evals()
		for i := range after {
			after[i] -= before[i]
		}
		return after
	}
	var seen events
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Report = seen.report })
	several := Limit{100, time.Hour, 3}

	t.Run("one key", func(t *testing.T) {
		req := Request{}
		for i := range 5 {
			req.Buckets = append(req.Buckets, Bucket{
				Name: fmt.Sprint("b", i), Key: t.Name(), Limit: Limit{int64(3 + i), time.Hour, 1}, Cost: 1,
			})
		}
		mustTake(t, r, req) // which tells the node the script
		before := evals()
		for n := range 4 {
			d := mustTake(t, r, req)
			if got := Summarize(d).Denied; got != (n > 1) {
				t.Errorf("request %d: decided %+v", n, d)
			}
		}
		got := grew(before)
		slices.Sort(got)
		if want := []int64{0, 0, 2}; !slices.Equal(got, want) { // the others are known to be denied
			t.Errorf("%d calls on the nodes, want %d", got, want)
		}
		for _, b := range req.Buckets {
			if got := level(t, r, b); got != 3 {
				t.Errorf("bucket %s holds %d, want 3", b.Name, got)
			}
		}
	})

	t.Run("several keys", func(t *testing.T) {
		for _, accounting := range []Accounting{Atomic, Each} {
			t.Run(accounting.String(), func(t *testing.T) {
				var buckets []Bucket
				for i, node := range nodes.Nodes {
					for j := range 2 {
						b := Bucket{Name: fmt.Sprint("b", i, j), Limit: several, Cost: int64(1 + i + j)}
						if i+j == 0 {
							b.Limit.Size = 7
						}
						buckets = append(buckets, onNode(t, r, nodes, node, b))
					}
				}
				for n := range int64(12) {
					d := mustTake(t, r, Request{Buckets: buckets, Accounting: accounting})
					if got := Summarize(d).Denied; got != (n >= 7) {
						t.Fatalf("request %d: decided %+v", n, d)
					}
					for i, b := range buckets {
						want := (n + 1) * b.Cost
						if accounting == Atomic || b.Limit.Size == 7 {
							want = min(n+1, 7) * b.Cost
						}
						if got := storedUnits(t, r, nodes.Nodes[i/2], b); got != want {
							t.Fatalf("after request %d bucket %s holds %d, want %d", n, b.Name, got, want)
						}
						if got := d[i].Size - d[i].Remaining; got != want {
							t.Fatalf("request %d: bucket %s is said to hold %d, want %d", n, b.Name, got, want)
						}
					}
				}
			})
		}
	})

	t.Run("many at once", func(t *testing.T) {
		a := onNode(t, r, nodes, nodes.Nodes[0], hourly(50))
		b := onNode(t, r, nodes, nodes.Nodes[1], hourly(100_000))
		b.Name = "other"
		b = onNode(t, r, nodes, nodes.Nodes[1], b)
		var admitted atomic.Int64
		together(t, 16, func(int) {
			for range 25 {
				d, err := r.Take(context.Background(), Request{Buckets: []Bucket{a, b}}, nil)
				if err != nil {
					t.Error(err)
				} else if !Summarize(d).Denied {
					admitted.Add(1)
				}
			}
		})
		if got := admitted.Load(); got != 50 {
			t.Errorf("admitted %d, want 50", got)
		}
		for i, b := range []Bucket{a, b} {
			if got := storedUnits(t, r, nodes.Nodes[i], b); got != 50 {
				t.Errorf("bucket %d holds %d, want 50", i, got)
			}
		}
	})

	t.Run("decides nothing", func(t *testing.T) {
		checkDecidesNothing(t, r)
	})

	t.Run("permissions", func(t *testing.T) {
		for _, right := range []string{"+cluster|slots", "-cluster"} {
			for _, node := range nodes.Nodes {
				setUser(t, node, right)
			}
			r := newTestCluster(t, nodes, func(opt *RedisOptions) {
				opt.Username, opt.Password, opt.Timeout = "limiter", "pass", 2*time.Second
			})
			for _, node := range nodes.Nodes {
				b := onNode(t, r, nodes, node, hourly(100))
				_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
				if right == "-cluster" {
					checkError(t, err, nodes.Nodes[0].Addr)
				} else if err != nil {
					t.Error(err)
				}
			}
		}
	})

	t.Run("not told that it is one", func(t *testing.T) {
		var seen events
		single := newTestRedis(t, nodes.Nodes[0], func(opt *RedisOptions) { opt.Report = seen.report })
		b := onNode(t, r, nodes, nodes.Nodes[1], hourly(5))
		for range 2 * lostAfter {
			_, err := single.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			checkError(t, err, nodes.Nodes[0].Addr)
			if f := failureOf(t, err); f.reason != "moved" {
				t.Errorf("reason %q: %v", f.reason, err)
			}
		}
		mustTake(t, single, Request{Buckets: []Bucket{onNode(t, r, nodes, nodes.Nodes[0], hourly(5))}})
		if got, want := seen.take(), []string{"lapse moved"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, want %q", got, want)
		}
	})

	t.Run("replies cut", func(t *testing.T) {
		b := onNode(t, r, nodes, nodes.Nodes[2], hourly(100_000))
		mustTake(t, r, Request{Buckets: []Bucket{b}})
		s := r.servers.(*cluster).at(nodes.Nodes[2].Addr)
		before := evals()
		failed := int64(0)
		for range lostAfter - 1 {
			// The next call finds its connection closed before it has an answer.
			do := make(chan struct{})
			go func() {
				defer close(do)
				_, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
				if err != nil {
					failed++
				}
			}()
			nodes.Nodes[2].Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal")
			<-do
		}
		ran := grew(before)[2]
		if ran > lostAfter-1 || ran < lostAfter-1-failed {
			t.Errorf("%d calls for %d requests, of which %d failed", ran, lostAfter-1, failed)
		}
		if got := storedUnits(t, r, nodes.Nodes[2], b); got != ran+1 {
			t.Errorf("%d units by %d calls", got, ran+1)
		}
		s.guard.success(true)
		seen.take()
	})
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestClusterMovesSlots tests requests while a slot goes back and forth between
// nodes: all but next to none are decided there, and to the unit. They have the
// rights that are documented and no more.
func TestClusterMovesSlots(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			nodes := redistest.StartCluster(t, 2)
			for _, node := range nodes.Nodes {
				setUser(t, node, "+cluster|slots", "+asking")
			}
			r := newTestCluster(t, nodes, func(opt *RedisOptions) {
				opt.Username, opt.Password = "limiter", "pass"
			})
			buckets := []Bucket{hourly(400), hourly(100_000)}[:n]
			for i := range buckets {
				buckets[i].Key, buckets[i].Name = t.Name(), fmt.Sprint("b", i)
			}
			slot := nodes.Slot(t, r.keys.of(&buckets[0]))
			stop := make(chan struct{})
			var admitted, decided, failed, tries atomic.Int64
			var busy sync.WaitGroup
			for range 4 {
				busy.Go(func() {
					for {
						d, err := r.Take(context.Background(), Request{Buckets: buckets}, nil)
						switch {
						case err != nil:
							if failed.Add(1) < 5 {
								t.Log(err)
							}
						case !Summarize(d).Denied:
							admitted.Add(1)
							decided.Add(1)
						default:
							decided.Add(1)
						}
						tries.Add(1)
						select {
						case <-stop:
							return
						case <-time.After(500 * time.Microsecond):
						}
					}
				})
			}
			time.Sleep(20 * time.Millisecond)
			for range 6 {
				from := nodes.Owner(t, slot)
				to := nodes.Nodes[0]
				if from == to {
					to = nodes.Nodes[1]
				}
				nodes.BeginMove(t, slot, to)
				time.Sleep(20 * time.Millisecond)
				nodes.MoveKeys(t, slot, to, r.keys.of(&buckets[0]))
				time.Sleep(20 * time.Millisecond) // one key here, one there
				nodes.MoveKeys(t, slot, to)
				time.Sleep(20 * time.Millisecond)
				nodes.EndMove(t, slot, to)
				time.Sleep(20 * time.Millisecond)
			}
			waitFor(t, 10*time.Second, func() error {
				if n := admitted.Load(); n < 400 {
					return fmt.Errorf("%d admitted", n)
				}
				return nil
			})
			close(stop)
			busy.Wait()
			if got := failed.Load(); got*1000 > decided.Load() {
				t.Errorf("%d of %d requests were not decided", got, tries.Load())
			}
			if got := admitted.Load(); got != 400 {
				t.Errorf("admitted %d, want 400", got)
			}
			for i, b := range buckets {
				if got := storedUnits(t, r, nodes.Owner(t, slot), b); got != 400 {
					t.Errorf("bucket %d holds %d, want 400", i, got)
				}
			}
			t.Logf("%d decided", decided.Load())
		})
	}
}

// TestClusterAskingRefused tests a user who lacks the right to follow a slot that
// is on its way: the operator is told so.
func TestClusterAskingRefused(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	for _, node := range nodes.Nodes {
		setUser(t, node, "+cluster|slots")
	}
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Username, opt.Password = "limiter", "pass" })
	b := onNode(t, r, nodes, nodes.Nodes[0], hourly(5))
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	nodes.BeginMove(t, nodes.Slot(t, r.keys.of(&b)), nodes.Nodes[1])
	nodes.MoveKeys(t, nodes.Slot(t, r.keys.of(&b)), nodes.Nodes[1])
	_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
	checkError(t, err, nodes.Nodes[1].Addr, "asking")
	if f := failureOf(t, err); f.reason != "noperm" {
		t.Errorf("reason %q: %v", f.reason, err)
	}
}

// TestClusterLosesNode tests a cluster of which a node is gone: its buckets are
// decided here, and those of the others by them as before.
func TestClusterLosesNode(t *testing.T) {
	t.Parallel()
	const timeout = 250 * time.Millisecond
	nodes := redistest.StartCluster(t, 3, "--cluster-require-full-coverage", "no")
	var seen events
	memory := NewMemory(nil)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) {
		opt.Fallback, opt.Report = memory, seen.report
	})
	dead := nodes.Nodes[1]
	var buckets []Bucket
	for i, node := range nodes.Nodes {
		b := hourly(1000)
		b.Name = fmt.Sprint("b", i)
		buckets = append(buckets, onNode(t, r, nodes, node, b))
	}
	want := int64(0)
	check := func() {
		t.Helper()
		for _, i := range []int{0, 2} {
			if got := storedUnits(t, r, nodes.Nodes[i], buckets[i]); got != want {
				t.Fatalf("the bucket on node %d holds %d, want %d", i, got, want)
			}
		}
	}
	take := func() {
		t.Helper()
		want++
		for _, d := range mustTake(t, r, Request{Buckets: buckets}) {
			if got := d.Size - d.Remaining; got != want {
				t.Fatalf("after %d requests it is said to hold %d", want, got)
			}
		}
	}
	for range 10 {
		take()
	}
	check()
	r.timeout = timeout
	for _, s := range r.servers.(*cluster).servers {
		s.timeout = timeout
	}

	dead.Kill()
	worst := time.Duration(0)
	for n := range 200 {
		began := time.Now()
		take()
		if n > 50 {
			worst = max(worst, time.Since(began))
		}
		check()
	}
	if worst > timeout {
		t.Errorf("waited %v though it is known that the node is gone", worst)
	}
	got := seen.take()
	if len(got) == 0 || got[0] != "lost refused" && got[0] != "lost closed" {
		t.Errorf("reported %q", got)
	}
	// Where nothing may be decided here, what the others charged is given back.
	for range 5 {
		d, err := r.Take(t.Context(), Request{Buckets: buckets, NoFallback: true}, nil)
		checkError(t, err, dead.Addr)
		if len(d) > 0 {
			t.Errorf("decided %+v", d)
		}
		check()
	}

	dead.Restart(t)
	nodes.WaitOK(t)
	waitFor(t, 5*time.Second, func() error {
		take()
		if dead.Client().Exists(t.Context(), r.keys.of(&buckets[1])).Val() == 0 {
			return fmt.Errorf("not decided by the node that is back, reported %q", seen.take())
		}
		return nil
	})
	check()
	if got := storedUnits(t, r, dead, buckets[1]); got != want {
		t.Errorf("the bucket on the node that is back holds %d, want %d", got, want)
	}
}

// TestClusterUnreachable tests a cluster of which nobody knows anything yet: no
// request waits longer than it may, and it decides as soon as it is there.
func TestClusterUnreachable(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	nodes := redistest.StartCluster(t, 1)
	p := redistest.StartProxy(t, nodes.Nodes[0].Addr)
	p.Refuse()
	var seen events
	r := newTestCluster(t, nodes, func(opt *RedisOptions) {
		opt.Addresses, opt.Timeout, opt.Report = []string{p.Addr}, timeout, seen.report
	})
	for n := range 3 * lostAfter {
		began := time.Now()
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(5)}}, nil)
		checkError(t, err, p.Addr)
		if f := failureOf(t, err); f.reason != "refused" {
			t.Errorf("request %d: reason %q: %v", n, f.reason, err)
		}
		if took := time.Since(began); took > 2*timeout {
			t.Errorf("waited %v", took)
		}
	}
	if got, want := seen.take(), []string{"lost refused"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
	p.Pass()
	waitFor(t, 5*time.Second, func() error {
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(5)}}, nil)
		return err
	})
	if got, want := seen.take(), []string{"back"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// TestClusterTLS tests a cluster that speaks TLS only and wants certificates.
func TestClusterTLS(t *testing.T) {
	t.Parallel()
	authority := redistest.NewAuthority(t)
	nodes := redistest.StartClusterTLS(t, authority, true, 2)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.TLS = clientTLS(t, authority) })
	for i, node := range nodes.Nodes {
		b := onNode(t, r, nodes, node, hourly(5))
		mustTake(t, r, Request{Buckets: []Bucket{b}})
		if got := storedUnits(t, r, node, b); got != 1 {
			t.Errorf("the bucket on node %d holds %d", i, got)
		}
	}
}

// TestClusterCloseLeavesNothing tests that of a closed store of a cluster neither
// connections nor goroutines remain.
func TestClusterCloseLeavesNothing(t *testing.T) {
	nodes := redistest.StartCluster(t, 2)
	for _, node := range nodes.Nodes {
		clients(t, node)
	}
	before, own := runtime.NumGoroutine(), clients(t, nodes.Nodes[0]) // those of the nodes among themselves
	for range 5 {
		r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.PoolSize = 3 })
		together(t, 6, func(i int) {
			b := hourly(100)
			b.Key = fmt.Sprint(i)
			if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err != nil {
				t.Error(err)
			}
		})
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100)}}, nil); err == nil {
			t.Error("decided by a closed store")
		}
	}
	waitFor(t, 10*time.Second, func() error {
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

// TestClusterConnectAhead tests that a store which was told to connect does, to
// all servers of a cluster and before there is any request.
func TestClusterConnectAhead(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, nil)
	r.Connect()
	c := r.servers.(*cluster)
	waitFor(t, 5*time.Second, func() error {
		c.mu.RLock()
		defer c.mu.RUnlock()
		for _, node := range nodes.Nodes {
			if s := c.servers[node.Addr]; s == nil || len(s.ready) != 1 {
				return fmt.Errorf("no connection to %s", node.Addr)
			}
		}
		return nil
	})
}

// TestClusterFirstSlot tests a server that has no slot and gets its first one: a
// store that has never heard of it finds it, all is decided, and what it has
// connected to is what the client takes over.
func TestClusterFirstSlot(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	all, none := nodes.Nodes[0], nodes.Nodes[1]
	id, err := all.Client().ClusterMyID(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	// So that nobody believes the other, which has them until it is told.
	if err := all.Client().Do(t.Context(), "CLUSTER", "BUMPEPOCH").Err(); err != nil {
		t.Fatal(err)
	}
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
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Report = seen.report })
	b := hourly(100)
	want := int64(0)
	take := func() {
		t.Helper()
		for range 3 {
			want++
			if d := mustTake(t, r, Request{Buckets: []Bucket{b}}); d[0].Size-d[0].Remaining != want {
				t.Fatalf("request %d: decided %+v", want, d)
			}
		}
	}
	take()
	c := r.servers.(*cluster)
	find := func() (s *server, known bool) {
		c.mu.RLock()
		defer c.mu.RUnlock()
		s = c.servers[none.Addr]
		return s, s != nil && s.known
	}
	if s, _ := find(); s != nil {
		t.Fatal("the server without slots is known: the test shows nothing")
	}
	slot := nodes.Slot(t, r.keys.of(&b))
	nodes.BeginMove(t, slot, none)
	take()
	nodes.MoveKeys(t, slot, none)
	take()
	first, _ := find()
	nodes.EndMove(t, slot, none)
	take()
	waitFor(t, 5*time.Second, func() error {
		take()
		if _, known := find(); !known {
			return errors.New("the client does not know the server")
		}
		return nil
	})
	if s, _ := find(); s != first || first == nil {
		t.Error("its connections were given up")
	}
	if got := storedUnits(t, r, none, b); got != want {
		t.Errorf("%d units after %d requests", got, want)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestClusterRedirects tests which server is meant by a reply that names one:
// servers write addresses of IPv6 in their own way.
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
			c := newCluster(RedisOptions{Addresses: []string{redistest.FreeAddr(t)}, Timeout: time.Second}, listener{})
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

// TestUnknownEndpoints tests that a server which a cluster names without a host
// is asked under the one of the server that named it: when the cluster is met, and
// when it begins to do so later and then sends on to a server.
func TestUnknownEndpoints(t *testing.T) {
	for _, when := range []string{"before", "later"} {
		t.Run(when, func(t *testing.T) {
			nodes := redistest.StartCluster(t, 2)
			var seen events
			r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Report = seen.report })
			var buckets []Bucket
			for i, node := range nodes.Nodes {
				buckets = append(buckets, onNode(t, r, nodes, node, Bucket{Name: fmt.Sprint(i), Limit: Limit{100, time.Hour, 1}, Cost: 1}))
			}
			on := slices.Clone(nodes.Nodes)
			if when == "later" {
				mustTake(t, r, Request{Buckets: buckets}) // connects
				nodes.MoveSlot(t, nodes.Slot(t, r.keys.of(&buckets[0])), nodes.Nodes[1])
				on[0] = nodes.Nodes[1]
			}
			for _, node := range nodes.Nodes {
				if err := node.Client().ConfigSet(t.Context(), "cluster-preferred-endpoint-type", "unknown-endpoint").Err(); err != nil {
					t.Fatal(err)
				}
			}
			var calls int64
			for i := range buckets {
				before := on[i].CommandStat(t, "evalsha")
				mustTake(t, r, Request{Buckets: buckets[i : i+1]})
				calls += on[i].CommandStat(t, "evalsha") - before
			}
			if calls == 0 {
				t.Error("no server was asked")
			}
			if got := seen.take(); len(got) > 0 {
				t.Errorf("reported %q", got)
			}
			c := r.servers.(*cluster)
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

// TestReplacedServer tests that the loss of a server whose slots others have
// taken over is reported as ended, once.
func TestReplacedServer(t *testing.T) {
	nodes := redistest.StartCluster(t, 3)
	var seen events
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Report = seen.report })
	gone := nodes.Nodes[0]
	mustTake(t, r, Request{Buckets: []Bucket{onNode(t, r, nodes, gone, hourly(100))}})
	s := r.servers.(*cluster).at(gone.Addr)
	nodes.Remove(t, gone)
	for range lostAfter {
		s.guard.failure(s.failure(io.EOF))
	}
	s.changed()
	if got := seen.take(); !slices.Equal(got, []string{"lost closed"}) {
		t.Fatalf("reported %q", got)
	}
	waitFor(t, 20*time.Second, func() error {
		if s.guard.isLost() {
			return errors.New("the server still counts as lost")
		}
		return nil
	})
	if got := seen.take(); !slices.Equal(got, []string{"replaced"}) {
		t.Errorf("reported %q", got)
	}
}

// TestClusterSlotsReply tests how a reply to CLUSTER SLOTS is read, and that one
// which makes no sense is an error.
func TestClusterSlotsReply(t *testing.T) {
	node := func(host any, port any) []any { return []any{host, port, "id", []any{}} }
	for _, tc := range []struct {
		name  string
		reply any
		want  string // the addresses, or none if it is an error
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
			slots, err := endpoints{"asked.test:7000"}.slots(tc.reply)
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

// fakeServer runs what greets as a server of Redis does, and otherwise replies
// what it is told to; it returns its address.
func fakeServer(t testing.TB, reply func(command string) string) string {
	t.Helper()
	return tcpServer(t, func(c *net.TCPConn) {
		defer c.Close()
		r := bufio.NewReader(c)
		for {
			var words, length int
			if _, err := fmt.Fscanf(r, "*%d\r\n", &words); err != nil {
				return
			}
			command := ""
			for n := range words {
				if _, err := fmt.Fscanf(r, "$%d\r\n", &length); err != nil {
					return
				}
				word := make([]byte, length+len("\r\n"))
				if _, err := io.ReadFull(r, word); err != nil {
					return
				}
				if n == 0 {
					command = strings.ToLower(string(word[:length]))
				}
			}
			answer := "+OK\r\n"
			if command == "hello" {
				answer = "*2\r\n$5\r\nproto\r\n:2\r\n"
			} else if a := reply(command); a != "" {
				answer = a
			}
			if _, err := io.WriteString(c, answer); err != nil {
				return
			}
		}
	})
}

// redisError returns the error that the client makes of what a server replies.
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

// TestClusterMovedToItself tests a server that for a while says of itself that it
// is the one to ask instead, as may happen when a name stands for another server
// than before: the client gives connections up for that, and none of them is
// kept.
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
			return "*2\r\n:1\r\n:0\r\n"
		}
		return ""
	})
	own.Store(addr)
	r := mustNewRedis(t, RedisOptions{Addresses: []string{addr}, Cluster: true, Timeout: 10 * time.Second})
	t.Cleanup(func() { r.Close() })
	req := Request{Buckets: []Bucket{hourly(100)}}
	mustTake(t, r, req)
	for range 3 {
		lost.Store(true)
		for range 5 {
			_, err := r.Take(t.Context(), req, nil)
			checkError(t, err, addr)
			if f := failureOf(t, err); f.reason != "moved" {
				t.Errorf("reason %q: %v", f.reason, err)
			}
		}
		lost.Store(false)
		before := ran.Load()
		for range 20 {
			mustTake(t, r, req)
		}
		if got := ran.Load() - before; got != 20 {
			t.Errorf("%d calls for 20 requests", got)
		}
	}
}
