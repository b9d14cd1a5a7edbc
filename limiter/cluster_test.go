package limiter

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
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

// onNode returns a bucket like b with a key of its own in a slot of the given
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

// storedUnits returns the number of units in b on the given node, read from the
// stored value after all held units are settled. No drip must have passed.
func storedUnits(t testing.TB, r *Redis, node *redistest.Server, b Bucket) int64 {
	t.Helper()
	key := r.keys.of(&b)
	redistest.WaitFor(t, 5*time.Second, func() error { return unsettled(t, node, key) })
	if node.Client().Exists(t.Context(), key).Val() == 0 {
		return 0
	}
	s, _ := storedState(t, node, key)
	s.Clear -= serverTime(t, node)
	return b.Limit.Size - b.Limit.of().Remaining(s, 0)
}

// unsettled returns an error if units are held under key.
func unsettled(t testing.TB, node *redistest.Server, key string) error {
	t.Helper()
	if value := node.Client().Get(t.Context(), key).Val(); holdsUnits(value) {
		return fmt.Errorf("%s holds %q", key, value)
	}
	return nil
}

// TestCluster guards requests to a healthy cluster: to one node and to several,
// with the documented permissions, and from a store that takes a cluster node for
// a single server.
func TestCluster(t *testing.T) {
	t.Parallel()
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
	several := Limit{Size: 100, DripInterval: time.Hour, DripSize: 3}

	t.Run("one key", func(t *testing.T) {
		req := Request{}
		for i := range 5 {
			req.Buckets = append(req.Buckets, Bucket{
				Name: fmt.Sprint("b", i), Key: t.Name(), Limit: Limit{Size: int64(3 + i), DripInterval: time.Hour, DripSize: 1}, Cost: 1,
			})
		}
		mustTake(t, r, req) // loads the script on the node
		before := evals()
		for n := range 4 {
			d := mustTake(t, r, req)
			if got := Denied(d); got != (n > 1) {
				t.Errorf("request %d: decided %+v", n, d)
			}
		}
		got := grew(before)
		slices.Sort(got)
		if want := []int64{0, 0, 2}; !slices.Equal(got, want) { // the deny cache answers the others
			t.Errorf("%d calls on the nodes, want %d", got, want)
		}
		for _, b := range req.Buckets {
			if got := unitsIn(t, r, b); got != 3 {
				t.Errorf("bucket %s holds %d, want 3", b.Name, got)
			}
		}
	})

	t.Run("several keys", func(t *testing.T) {
		for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
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
					if got := Denied(d); got != (n >= 7) {
						t.Fatalf("request %d: decided %+v", n, d)
					}
					for i, b := range buckets {
						want := (n + 1) * b.Cost
						if accounting == AccountingAtomic || b.Limit.Size == 7 {
							want = min(n+1, 7) * b.Cost
						}
						if got := storedUnits(t, r, nodes.Nodes[i/2], b); got != want {
							t.Fatalf("after request %d bucket %s holds %d, want %d", n, b.Name, got, want)
						}
						if got := d[i].Size - d[i].Remaining; got != want {
							t.Fatalf("request %d: bucket %s is reported to hold %d, want %d", n, b.Name, got, want)
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
		redistest.Together(t, 16, func(int) {
			for range 25 {
				d, err := r.Take(context.Background(), Request{Buckets: []Bucket{a, b}}, nil)
				if err != nil {
					t.Error(err)
				} else if !Denied(d) {
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

	t.Run("not known to be one", func(t *testing.T) {
		var seen events
		single := newTestRedis(t, nodes.Nodes[0], func(opt *RedisOptions) { opt.Report = seen.report })
		b := onNode(t, r, nodes, nodes.Nodes[1], hourly(5))
		for range manyFailures {
			_, err := single.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			checkError(t, err, nodes.Nodes[0].Addr)
			if reason := reasonOf(t, err); reason != "moved" {
				t.Errorf("reason %q: %v", reason, err)
			}
		}
		mustTake(t, single, Request{Buckets: []Bucket{onNode(t, r, nodes, nodes.Nodes[0], hourly(5))}})
		seen.check(t, "error moved")
	})
	seen.check(t)
}

// TestClusterMovesSlots guards requests while a slot moves back and forth between
// nodes: nearly all of them are decided by the nodes, exactly to the unit, and
// with only the documented permissions.
func TestClusterMovesSlots(t *testing.T) {
	t.Parallel()
	own, pool := borrowing("", 150, 250)
	for name, buckets := range map[string][]Bucket{"1": {hourly(400)}, "2": {hourly(400), hourly(100_000)}, "pool": {own, pool}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nodes := redistest.StartCluster(t, 2)
			for _, node := range nodes.Nodes {
				setUser(t, node, "+cluster|slots", "+asking")
			}
			r := newTestCluster(t, nodes, func(opt *RedisOptions) {
				opt.Username, opt.Password = "limiter", "pass"
			})
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
						case !Denied(d):
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
				time.Sleep(20 * time.Millisecond) // one key on each node
				nodes.MoveKeys(t, slot, to)
				time.Sleep(20 * time.Millisecond)
				nodes.EndMove(t, slot, to)
				time.Sleep(20 * time.Millisecond)
			}
			redistest.WaitFor(t, 10*time.Second, func() error {
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
				want := int64(400)
				if b.elastic() {
					want = b.Limit.Size
				}
				if got := storedUnits(t, r, nodes.Owner(t, slot), b); got != want {
					t.Errorf("bucket %d holds %d, want %d", i, got, want)
				}
			}
			t.Logf("%d decided", decided.Load())
		})
	}
}

// TestTimedClusterLosesNode guards a cluster that loses a node: requests to its buckets
// are decided in this process, and requests to other buckets by the other nodes as
// before.
func TestTimedClusterLosesNode(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	const timeout = 2 * time.Second // only a failure ends a wait, however slow this machine is
	nodes := redistest.StartCluster(t, 3, "--cluster-require-full-coverage", "no")
	var seen events
	memory := NewMemory()
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
		for i, d := range mustTake(t, r, Request{Buckets: buckets}) {
			if got := d.Size - d.Remaining; got != want {
				t.Fatalf("after %d requests it is reported to hold %d", want, got)
			}
			if i != 1 && d.By != DecidedByRedis {
				t.Fatalf("request %d: the bucket on node %d is decided by %v", want, i, d.By)
			}
		}
	}
	for range 10 {
		take()
	}
	check()
	r.timeout = timeout

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
	if worst > timeout*3/4 { // it is what a wait takes, and this machine may be busy
		t.Errorf("waited %v though it is known that the node is gone", worst)
	}
	got := seen.take()
	if len(got) == 0 || got[0] != "down refused" && got[0] != "down closed" {
		t.Errorf("reported %q", got)
	}
	// If nothing may be decided in this process, units held by the other nodes are
	// released.
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
	redistest.WaitFor(t, 5*time.Second, func() error {
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
