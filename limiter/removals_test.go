package limiter

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// settledRemovals waits until the store's removals are complete.
func (f *fallback) settledRemovals(t testing.TB) {
	t.Helper()
	redistest.WaitFor(t, 10*time.Second, func() error {
		f.removals.mu.Lock()
		defer f.removals.mu.Unlock()
		if f.removals.sending > 0 || len(f.removals.waiting) > 0 || f.removals.timed {
			return fmt.Errorf("%d calls in flight, %d buckets waiting", f.removals.sending, len(f.removals.waiting))
		}
		return nil
	})
}

// testNode returns a store with a memory of its own.
func testNode(t testing.TB, server *redistest.Server) (*Redis, *Memory) {
	m := NewMemory()
	return newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = m }), m
}

// TestFloodLeavesRedisBounded floods an hourly limit through two nodes. It guards
// that the server holds no more buckets than the nodes, whose caps apply to it
// too, with hardly any extra calls; and that each node knows everything that the
// server decided for it.
func TestFloodLeavesRedisBounded(t *testing.T) {
	t.Parallel()
	const most, callers, each = 300, 16, 400
	server := redistest.Start(t)
	var nodes [2]*Redis
	var memories [2]*Memory
	for i := range nodes {
		nodes[i], memories[i] = testNode(t, server)
		decide(t, nodes[i], AccountingAtomic, Bucket{Name: "warm", Limit: Limit{Size: 1, DripInterval: time.Microsecond, DripSize: 1}, Cost: 1})
	}
	calls := server.CommandStat(t, "evalsha")
	var asked atomic.Int64
	redistest.Together(t, callers, func(g int) {
		b := hourly(10)
		b.MaxKeys = most
		for i := range each {
			b.Key = fmt.Sprint(g, i)
			if d := decide(t, nodes[g%2], AccountingAtomic, b); d[0].Denied {
				t.Errorf("newcomer denied: %+v", d)
			}
			asked.Add(1)
		}
	})
	for _, node := range nodes {
		node.fallback.settledRemovals(t)
	}
	calls = server.CommandStat(t, "evalsha") - calls
	t.Logf("%d decisions, %.3f calls each, %d removals", asked.Load(), float64(calls)/float64(asked.Load()), memories[0].Usage()[0].Forgotten+memories[1].Usage()[0].Forgotten)
	var n int64
	redistest.WaitFor(t, 10*time.Second, func() error {
		if n = server.Client().DBSize(t.Context()).Val(); n > 2*most {
			return fmt.Errorf("%d keys, want at most %d", n, 2*most)
		}
		return nil
	})
	if n < 2*most*9/10 {
		t.Errorf("%d keys, want nearly %d", n, 2*most)
	}
	for i, m := range memories {
		usedSlots(t, m)
		if got := m.Len(); got < most || got > most+2 {
			t.Errorf("node %d holds %d buckets", i, got)
		}
	}
}

// TestRemovalsAreBatched guards that removals are sent together: for a single
// caller, whose requests are each sent alone, they hardly add any calls.
func TestRemovalsAreBatched(t *testing.T) {
	const requests = 640
	server := redistest.Start(t)
	node, _ := testNode(t, server)
	b := hourly(10)
	b.MaxKeys = 10
	decide(t, node, AccountingAtomic, b)
	calls := server.CommandStat(t, "evalsha")
	for i := range requests {
		b.Key = fmt.Sprint(i)
		decide(t, node, AccountingAtomic, b)
	}
	node.fallback.settledRemovals(t)
	calls = server.CommandStat(t, "evalsha") - calls
	if calls < requests || calls > requests*11/10+10 {
		t.Errorf("%d calls for %d decisions", calls, requests)
	}
}

// TestRemovalSparesBucketsInUse guards which evicted buckets a node removes from
// the server: not those that another node has charged meanwhile, that are held
// here again, that have held units, or that are not our buckets.
func TestRemovalSparesBucketsInUse(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	nothing := func(*testing.T, *redistest.Server, *Redis, *Redis, Bucket) {}
	charge := func(t *testing.T, _ *redistest.Server, _, other *Redis, b Bucket) {
		decide(t, other, AccountingAtomic, b)
	}
	call := func(t *testing.T, _ *redistest.Server, _, other *Redis, b Bucket) {
		b.Cost = 9 // denied
		decide(t, other, AccountingAtomic, b)
	}
	for _, tc := range []struct {
		name string
		drip int64 // 0 if it is a sliding window, -1 if it warms up, -2 if it is a log
		do   func(t *testing.T, server *redistest.Server, node, other *Redis, b Bucket)
		kept bool
	}{
		{"nothing", 1, nothing, false},
		{"another's drip", 1, charge, true},
		{"another's units within a drip", 5, charge, true},
		{"another's denial", 1, call, false},
		{"held again", 1, func(t *testing.T, _ *redistest.Server, node, _ *Redis, b Bucket) {
			b.Cost = 9 // denied, but followed
			decide(t, node, AccountingAtomic, b)
		}, true},
		{"units are held", 1, func(t *testing.T, server *redistest.Server, node, _ *Redis, b Bucket) {
			key := node.keys.of(&b)
			v := server.Client().Get(t.Context(), key).Val()
			server.Client().Set(t.Context(), key, fmt.Sprintf("%s:0:1:%d", v, serverTime(t, server)+5e6), time.Hour)
		}, true},
		{"no bucket", 1, func(t *testing.T, server *redistest.Server, node, _ *Redis, b Bucket) {
			server.Client().Set(t.Context(), node.keys.of(&b), "something", time.Hour)
		}, true},
		{"a list", 1, func(t *testing.T, server *redistest.Server, node, _ *Redis, b Bucket) {
			server.Client().Del(t.Context(), node.keys.of(&b))
			server.Client().LPush(t.Context(), node.keys.of(&b), "x")
		}, true},
		{"nothing, of a sliding window", 0, nothing, false},
		{"another's units in a sliding window", 0, charge, true},
		{"another's denial by a sliding window", 0, call, false},
		{"nothing, of one that warms up", -1, nothing, false},
		{"another's units in one that warms up", -1, func(t *testing.T, server *redistest.Server, node, _ *Redis, b Bucket) {
			key := node.keys.of(&b)
			s, _ := storedState(t, server, key)
			s = b.Limit.of().Add(s, 1, bucket.Moment{Now: s.Free()}) // as soon as it is free
			server.Client().Set(t.Context(), key, b.Limit.written(s, serverTime(t, server)).value(), time.Hour)
		}, true},
		{"another's denial by one that warms up", -1, call, false},
		{"nothing, of a log", -2, nothing, false},
		{"another's units in a log", -2, charge, true},
		{"another's denial by a log", -2, call, false},
		{"no log", -2, func(t *testing.T, server *redistest.Server, node, _ *Redis, b Bucket) {
			server.Client().Set(t.Context(), node.keys.of(&b), "L", time.Hour)
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			node, m := testNode(t, server)
			other, _ := testNode(t, server)
			b := hourly(10)
			switch b.Limit.DripSize = tc.drip; tc.drip {
			case 0:
				b.Limit = SlidingWindow(10, 24*time.Hour)
			case -1:
				b.Limit = warmingUp(8, 8*time.Hour, 24*time.Hour, 3)
			case -2:
				b.Limit = SlidingLog(10, 24*time.Hour)
			}
			b.Cost, b.MaxKeys = 2, 1
			decide(t, node, AccountingAtomic, b)
			send, waiting := node.fallback.removals.send, make(chan []removal, 1)
			node.fallback.removals.send = func(list []removal) { waiting <- list }
			next := b
			next.Key, next.Cost = "next", 3
			decide(t, node, AccountingAtomic, next)
			if b.MaxKeys = 10; ownBuckets(m, []Bucket{b}) > 0 {
				t.Fatal("the bucket was not forgotten")
			}
			tc.do(t, server, node, other, b)
			send(<-waiting)
			redistest.WaitFor(t, 10*time.Second, func() error {
				node.fallback.removals.mu.Lock()
				defer node.fallback.removals.mu.Unlock()
				if node.fallback.removals.sending > 0 {
					return fmt.Errorf("a removal is in flight")
				}
				return nil
			})
			kept := filled(t, server, node.keys.of(&b)) == 1
			if kept != tc.kept {
				t.Errorf("the key is there: %t, want %t", kept, tc.kept)
			}
			if server.Client().Exists(t.Context(), node.keys.of(&next)).Val() != 1 {
				t.Error("the bucket that displaced it is gone")
			}
		})
	}
}

// TestRemovalsInCluster guards that removals go to the server with each key's
// slot.
func TestRemovalsInCluster(t *testing.T) {
	t.Parallel()
	const most, requests = 20, 300
	cluster := redistest.StartCluster(t, 3)
	m := NewMemory()
	node := newTestRedis(t, cluster.Nodes[0], func(opt *RedisOptions) { opt.Cluster, opt.Fallback = true, m })
	b := hourly(10)
	b.MaxKeys = most
	for i := range requests {
		b.Key = fmt.Sprint(i)
		decide(t, node, AccountingAtomic, b)
	}
	node.fallback.settledRemovals(t)
	redistest.WaitFor(t, 10*time.Second, func() error {
		n := int64(0)
		for _, server := range cluster.Nodes {
			n += server.Client().DBSize(t.Context()).Val()
		}
		if n > most {
			return fmt.Errorf("%d keys, want at most %d", n, most)
		}
		return nil
	})
}

// TestShareOnRedis guards a full limit that evicts nothing: the server is asked
// about the shared bucket, which no key can name, and a key's own bucket later
// starts at its level on the server too.
func TestShareOnRedis(t *testing.T) {
	server := redistest.Start(t)
	node, m := testNode(t, server)
	b := hourly(3)
	b.MaxKeys, b.ShareKey, b.Key = 1, "network", "first"
	decide(t, node, AccountingAtomic, b)
	for i := range 4 {
		b.Key = fmt.Sprint(i)
		if d := decide(t, node, AccountingAtomic, b)[0]; d.Denied != (i == 3) {
			t.Fatalf("request %d: %+v", i, d)
		}
	}
	if n := server.Client().DBSize(t.Context()).Val(); n != 2 {
		t.Errorf("%d keys, want 2", n)
	}
	for _, key := range []string{"network", "network\x00", ""} {
		own := hourly(3)
		own.Key = key
		if server.Client().Exists(t.Context(), node.keys.of(&own)).Val() != 0 {
			t.Errorf("the shared bucket is that of key %q", key)
		}
	}
	if u := m.Usage()[0]; u.Buckets != 1 || u.Shared != 4 {
		t.Errorf("%+v", u)
	}

	b.MaxKeys, b.Key = 10, "later"
	if d := decide(t, node, AccountingAtomic, b)[0]; !d.Denied {
		t.Errorf("its own bucket began empty: %+v", d)
	}
	if got := storedUnits(t, node, server, b); got != 3 {
		t.Errorf("the server holds %d units, want 3", got)
	}
}

// TestShareTwiceOnRedis guards that a request is charged for each of two keys that
// have to share, although one request cannot name a bucket twice.
func TestShareTwiceOnRedis(t *testing.T) {
	server := redistest.Start(t)
	node, _ := testNode(t, server)
	b := hourly(10)
	b.MaxKeys, b.ShareKey = 1, "network"
	decide(t, node, AccountingAtomic, b)
	one, two := b, b
	one.Key, two.Key = "one", "two"
	for i := range 12 {
		if d := decide(t, node, AccountingAtomic, one, two); Denied(d) != (i >= 10) {
			t.Fatalf("request %d: %+v", i, d)
		}
	}
	one.shared, one.Key = true, "network"
	two.shared, two.Key = true, "network\x00"
	for _, b := range []Bucket{one, two} {
		if got := storedUnits(t, node, server, b); got != 10 {
			t.Errorf("the bucket shared by %q holds %d, want 10", b.Key, got)
		}
	}
}

// TestEqualRemovals guards equal removals, which form one run of the script: each
// is made, and what follows them in the batch is charged to its own bucket.
func TestEqualRemovals(t *testing.T) {
	server := redistest.Start(t)
	client, now := server.Client(), serverTime(t, server)
	limit := Limit{Size: 5, DripInterval: time.Hour, DripSize: 1}
	for _, buckets := range []int{1, 2} {
		q := query{what: whatRemove}
		for range buckets {
			q.buckets = append(q.buckets, bucketQuery{limit: bucket.Limit(limit), local: localLevel{bucket.Ahead{Clear: limit.of().Rate(), Rest: 0}, 0, unsure}})
		}
		removal := q.appendGroup(nil)
		removal[1] = 2 // a run of two
		var keys []string
		for i := range 2 * buckets {
			keys = append(keys, fmt.Sprint("gone", i))
			redistest.Done(t, client.Set(t.Context(), keys[i], limit.written(bucket.Level{Clear: now + limit.of().Rate()}, now).value(), 0))
		}
		charged := fmt.Sprint("charged", buckets)
		q = query{buckets: []bucketQuery{{limit: bucket.Limit(limit), cost: 1}}}
		take := q.appendGroup(nil)
		redistest.Done(t, client.Eval(t.Context(), takeSource, append(keys, charged), removal, take))
		if n := filled(t, server, keys...); n > 0 {
			t.Errorf("%d of %d keys are still there", n, len(keys))
		}
		if client.Exists(t.Context(), charged).Val() != 1 {
			t.Error("the request behind them is charged to another key")
		}
	}
}
