package limiter

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// peek returns the level of b in Redis.
func peek(t rapid.TB, r *Redis, b Bucket) Level {
	t.Helper()
	level, err := r.Peek(context.Background(), b)
	if err != nil {
		t.Fatal(err)
	}
	return level
}

// peekHere returns what r's process knows of b.
func peekHere(t testing.TB, r *Redis, b Bucket) (Level, bool) {
	t.Helper()
	level, remembered, err := r.PeekHere(b)
	if err != nil {
		t.Fatal(err)
	}
	return level, remembered
}

// reset empties b and checks how many units it held in Redis.
func reset(t testing.TB, r *Redis, b Bucket, want int64) {
	t.Helper()
	level, err := r.Reset(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if level.Units != want {
		t.Errorf("it held %+v, want %d units", level, want)
	}
}

// TestInspectAgreesWithArithmetic guards what Peek and Reset return, and that they
// leave behind what they should: at random times in random traces, from Memory and
// from Redis, with limits of any magnitude, several sizes and a clock that is set
// back. What they say of room and waiting is what the next request then meets.
func TestInspectAgreesWithArithmetic(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen := struct{ steps, room, none, never, slack, overfull, reset, back int }{}
	checkTraces(t, 3, func(t *rapid.T) {
		v.flush(t)
		p := plain{}
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		buckets, last, limit := drawBuckets(t, drawShape), Decision{}, Limit{Size: 1, DripInterval: time.Second, DripSize: 1}
		back, went := rapid.Bool().Draw(t, "back"), false
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			now := v.keep(v.now + drawMove(t, limit, last, back))
			went = went || now < v.now
			v.at(t, now)
			req := drawRequest(t, buckets)
			b := req.Buckets[0]
			s, changed := p[identity(b)].at(now)
			want := b.inspected(s.Ahead(now), nil, 0)
			before := v.stored(t, []Bucket{b})[0]

			got := []Level{peek(t, v.Redis, b)}
			if after := v.stored(t, []Bucket{b})[0]; after != before {
				t.Fatalf("Peek at %q left %q", before, after)
			}
			here, err := m.Peek(context.Background(), b)
			if !went {
				got = append(got, here)
			}
			emptied := err == nil && rapid.IntRange(0, 4).Draw(t, "reset: 0") == 0
			if emptied {
				var inRedis Level
				if inRedis, err = v.Reset(context.Background(), b); err != nil {
					t.Fatal(err)
				}
				got = append(got, inRedis)
				here, err = m.Reset(context.Background(), b)
				if !went {
					got = append(got, here)
				}
				if after := v.stored(t, []Bucket{b})[0]; after != "" {
					t.Fatalf("Reset of %q left %q", before, after)
				}
				delete(p, identity(b))
				v.denyCache = newDenyCache(64) // the clock may stand still, and then nothing is cached
				seen.reset++
			}
			if err != nil {
				t.Fatal(err)
			}
			for i, level := range got {
				if level != want {
					t.Fatalf("%+v at %d, %q, level %d: %+v, want %+v", b, now, before, i, level, want)
				}
			}
			expected := p.take(req, now)
			if d := expected[0]; !emptied && !b.Limit.CountDenied && b.Cost > 0 && (d.Denied != (want.RetryAfter > 0 || d.Never) || d.RetryAfter != want.RetryAfter ||
				d.Denied && (d.Remaining != want.Remaining || d.Clear != want.Clear)) {
				t.Fatalf("%+v: decided %+v after %+v", b, d, want)
			}
			decide(t, v, req.Accounting, req.Buckets...)
			decide(t, m, req.Accounting, req.Buckets...)
			last, limit = expected[0], b.Limit

			seen.steps++
			for _, n := range []struct {
				is bool
				n  *int
			}{
				{want.Remaining > 0, &seen.room}, {want.RetryAfter > 0, &seen.none}, {b.Cost > b.Limit.Size, &seen.never},
				{s.Rest > 0, &seen.slack}, {want.Units > b.Limit.Size, &seen.overfull}, {changed, &seen.back},
			} {
				if n.is {
					*n.n++
				}
			}
		}
	})
	t.Logf("%+v", seen)
	if min(seen.room, seen.none, seen.never, seen.slack, seen.overfull, seen.reset, seen.back) < 20 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestInspectValidates guards that a bucket which Take would refuse is refused, by
// each method, and that zero values mean the same as in Take.
func TestInspectValidates(t *testing.T) {
	server := redistest.Start(t)
	r, m := testNode(t, server)
	methods := map[string]func(Bucket) error{
		"Memory.Peek":    func(b Bucket) error { _, err := m.Peek(context.Background(), b); return err },
		"Memory.Reset":   func(b Bucket) error { _, err := m.Reset(context.Background(), b); return err },
		"Redis.Peek":     func(b Bucket) error { _, err := r.Peek(t.Context(), b); return err },
		"Redis.Reset":    func(b Bucket) error { _, err := r.Reset(t.Context(), b); return err },
		"Redis.PeekHere": func(b Bucket) error { _, _, err := r.PeekHere(b); return err },
	}
	for name, method := range methods {
		for _, b := range []Bucket{
			{Name: "b"},
			{Name: "b", Limit: Limit{Size: -1, DripInterval: time.Second}, Cost: 1},
			{Name: "b", Limit: Limit{Size: MaxUnits + 1, DripInterval: time.Second}, Cost: 1},
			{Name: "b", Limit: Limit{Size: 5, DripInterval: time.Nanosecond}, Cost: 1},
			{Name: "b", Limit: Limit{Size: 5, DripInterval: time.Second, DripSize: -1}, Cost: 1},
			{Name: "b", Limit: PerSecond(5), Cost: -1},
		} {
			err := method(b)
			_, want := m.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			if err == nil || want == nil || err.Error() != want.Error() {
				t.Errorf("%s of %+v: error %v, want %v", name, b, err, want)
			}
		}
		if err := method(Bucket{Name: "b", Key: "k", Limit: Limit{Size: 5, DripInterval: time.Second}, Cost: 1}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := server.Client().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys", n)
	}
}

// TestPeekChangesNothing guards that looking writes nothing, on the server or here,
// does not count as a request, and makes no room in the memory.
func TestPeekChangesNothing(t *testing.T) {
	server := redistest.Start(t)
	r, m := testNode(t, server)
	b := hourly(5)
	absent := b
	absent.Name = "another limit"
	decide(t, r, AccountingAtomic, b)
	sets := redistest.CommandCounter{Server: server}
	sets.Since(t, "set")
	expires := server.Client().Do(t.Context(), "PEXPIRETIME", r.keys.of(&b)).Val()
	partitions := len(m.directory.Load().all)
	for range 5 {
		if got := peek(t, r, b); got.Units != 1 || got.Remaining != 4 || got.Held != 0 || got.RetryAfter != 0 || got.Clear > time.Hour {
			t.Errorf("the bucket holds %+v", got)
		}
		if got, remembered := peekHere(t, r, b); got.Units != 1 || remembered {
			t.Errorf("here it holds %+v, remembered %t", got, remembered)
		}
		if got := peek(t, r, absent); got != (Level{Remaining: 5}) {
			t.Errorf("an absent bucket holds %+v", got)
		}
		if got, _ := peekHere(t, r, absent); got != (Level{Remaining: 5}) {
			t.Errorf("here an absent bucket holds %+v", got)
		}
	}
	sets.Check(t, "set", 0)
	if after := server.Client().Do(t.Context(), "PEXPIRETIME", r.keys.of(&b)).Val(); after != expires {
		t.Errorf("expires at %v, before at %v", after, expires)
	}
	if n := len(m.directory.Load().all); n != partitions || m.Len() != 1 {
		t.Errorf("%d partitions and %d buckets", n, m.Len())
	}
}

// TestResetEverywhere guards that Reset empties a bucket on the server and in this
// process, which forgets that it was full: a bucketful is admitted at once, and
// again when the server is gone.
func TestResetEverywhere(t *testing.T) {
	const size = 5
	server := redistest.Start(t)
	r, _ := testNode(t, server)
	b := hourly(size)
	req := Request{Buckets: []Bucket{b}}
	fill := func() {
		t.Helper()
		for n := range size + 2 {
			if d := mustTake(t, r, req); d[0].Denied != (n >= size) {
				t.Fatalf("request %d: decided %+v", n, d)
			}
		}
		if got, remembered := peekHere(t, r, b); got.Units != size || !remembered {
			t.Fatalf("here it holds %+v, remembered %t", got, remembered)
		}
	}
	fill()
	reset(t, r, b, size)
	if got := peek(t, r, b); got.Units != 0 {
		t.Errorf("the bucket holds %+v", got)
	}
	if got, remembered := peekHere(t, r, b); got.Units != 0 || remembered {
		t.Errorf("here it holds %+v, remembered %t", got, remembered)
	}
	fill()
	reset(t, r, b, size)
	server.Kill()
	for n := range size + 1 {
		if d := mustTake(t, r, req); d[0].Denied != (n >= size) || d[0].By != DecidedByFallback {
			t.Fatalf("request %d without a server: decided %+v", n, d)
		}
	}
}

// TestResetWithoutServer guards that a reset of a server that is down fails and
// resets nothing: not here either.
func TestResetWithoutServer(t *testing.T) {
	server := redistest.Start(t)
	r, _ := testNode(t, server)
	b := hourly(1)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	server.Kill()
	for range manyFailures {
		if level, err := r.Reset(t.Context(), b); !errors.Is(err, ErrUnavailable) || level != (Level{}) {
			t.Errorf("reset %+v, error %v", level, err)
		}
		if level, err := r.Peek(t.Context(), b); !errors.Is(err, ErrUnavailable) || level != (Level{}) {
			t.Errorf("peeked at %+v, error %v", level, err)
		}
	}
	if got, remembered := peekHere(t, r, b); got.Units != 1 || !remembered {
		t.Errorf("here it holds %+v, remembered %t", got, remembered)
	}
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	if _, err := r.Reset(late, b); !errors.Is(err, ErrUnavailable) {
		t.Errorf("too late: error %v", err)
	}
}

// TestResetOfDirtyBuckets guards that what was decided here during an outage, and
// would be reported to the server, does not put back what a reset has taken.
func TestResetOfDirtyBuckets(t *testing.T) {
	const size = 5
	server := redistest.Start(t)
	r, m := testNode(t, server)
	b := hourly(size)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	for _, restarted := range []bool{false, true} {
		takeInstead(m, Request{Buckets: []Bucket{b, {Name: "other", Key: "k", Limit: b.Limit, Cost: 1}}})
		if restarted {
			r.fallback.restarted(nil)
		}
		if dirtyLevels(m, []Bucket{b}) == nil {
			t.Fatal("the bucket is not dirty")
		}
		if _, err := r.Reset(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		if reported := dirtyLevels(m, []Bucket{b}); reported != nil {
			t.Errorf("reported %+v", reported)
		}
		if d := mustTake(t, r, Request{Buckets: []Bucket{b}}); d[0].Remaining != size-1 {
			t.Errorf("decided %+v", d)
		}
	}
}

// TestResetWhileInFlight guards requests that are in flight while a bucket is
// reset. Their answers may be from before that, and do not put back what the reset
// has taken, neither here nor as remembered denials; but what they have charged
// counts.
func TestResetWhileInFlight(t *testing.T) {
	const hour = 3600e6
	for _, tc := range []struct {
		name     string
		cost     int64
		answer   outcome
		resent   bool
		want     int64 // the level here in the end
		newcomer bool  // whether another request, sent later, is answered first
	}{
		{"admitted", 2, outcome{Ahead: bucket.Ahead{Clear: 4 * hour}}, false, 2, false},
		{"denied", 2, outcome{Ahead: bucket.Ahead{Clear: 5 * hour}, denied: true}, false, 0, false},
		{"admitted, and sent again", 2, outcome{Ahead: bucket.Ahead{Clear: 4 * hour}}, true, 4, false},
		{"admitted after another", 2, outcome{Ahead: bucket.Ahead{Clear: 4 * hour}}, false, 3, true},
		{"denied after another", 2, outcome{Ahead: bucket.Ahead{Clear: 5 * hour}, denied: true}, false, 1, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := NewMemoryWithClock(frozen)
			f := newFallback(m, 50*time.Millisecond, "")
			b := hourly(5)
			b.Cost = tc.cost
			follow(m, &b, bucket.Ahead{Clear: 2 * hour})
			send := func(b Bucket) *query {
				q := queryOf(f, Request{Buckets: []Bucket{b}})
				f.send(nil, callsOf(q))
				return q
			}
			q := send(b)
			f.empty(&b, nil)
			if tc.resent {
				f.send(nil, callsOf(q))
			}
			if tc.newcomer {
				one := b
				one.Cost = 1
				f.answered(send(one), []outcome{{Ahead: bucket.Ahead{Clear: hour}}})
			}
			f.answered(q, []outcome{tc.answer})
			if got := unitsHere(m, b); got != tc.want {
				t.Errorf("holds %d, want %d", got, tc.want)
			}
			// The next answer is the newest, and authoritative if all is settled.
			if p := dirtyLevels(m, []Bucket{b}); p == nil {
				f.answered(send(b), []outcome{{Ahead: bucket.Ahead{Clear: hour}}})
				if got := unitsHere(m, b); got != 1 {
					t.Errorf("then holds %d, want 1", got)
				}
			}
		})
	}
	t.Run("remembered", func(t *testing.T) {
		d := newDenyCache(64)
		b := hourly(1)
		full := []outcome{{Ahead: bucket.Ahead{Clear: hour}, denied: true}}
		req := Request{Buckets: []Bucket{b}}
		d.forget(&b, 2000)
		for sent, want := range map[int64]bool{1000: false, 2000: false, 2001: true} {
			d.remember(req, full, sent, clockAt(3000))
			if _, ok := d.decide(req, 3000, nil); ok != want {
				t.Errorf("sent at %d: remembered %t", sent, ok)
			}
			d.slots = make([]denySlot, 64)
		}
	})
}

// TestTimedResetReachesOtherProcesses guards that within a second of a reset all
// processes admit again, and that none of them puts the level back later, when the
// server may have lost it and gets a report of what each process knows.
func TestTimedResetReachesOtherProcesses(t *testing.T) {
	const size = 12
	server := redistest.Start(t)
	b := hourly(size)
	req := Request{Buckets: []Bucket{b}}
	var nodes [3]*Redis
	for i := range nodes {
		nodes[i], _ = testNode(t, server)
		for range size {
			mustTake(t, nodes[i], req)
		}
		if got, remembered := peekHere(t, nodes[i], b); got.Units != size || !remembered {
			t.Fatalf("node %d knows of %+v, remembered %t", i, got, remembered)
		}
	}
	reset(t, nodes[0], b, size)
	began := time.Now()
	for i, node := range nodes {
		redistest.WaitFor(t, 2*time.Second, func() error {
			if d := mustTake(t, node, req); d[0].Denied {
				return fmt.Errorf("node %d: decided %+v", i, d)
			}
			return nil
		})
	}
	if took := time.Since(began); took > 1100*time.Millisecond {
		t.Errorf("the others followed after %v", took)
	}
	for i, node := range nodes {
		if got, _ := peekHere(t, node, b); got.Units != int64(i+1) {
			t.Errorf("node %d knows of %+v, want %d", i, got, i+1)
		}
	}
	for range 2 {
		redistest.Done(t, server.Client().ScriptFlush(t.Context()))
		for _, node := range nodes {
			mustTake(t, node, req)
		}
	}
	if got := peek(t, nodes[0], b); got.Units != 9 {
		t.Errorf("after nine requests it holds %+v", got)
	}
}

// TestInspectSizes guards that one bucket is looked at, and reset, with whatever
// Size the caller gives.
func TestInspectSizes(t *testing.T) {
	server := redistest.Start(t)
	r, m := testNode(t, server)
	small, large := hourly(5), hourly(10)
	large.Cost = 8
	decide(t, r, AccountingAtomic, large)
	want := Level{Units: 8, RetryAfter: 4 * time.Hour, Clear: 8 * time.Hour}
	got := peek(t, r, small)
	if got.Units != want.Units || got.Remaining != 0 || got.Clear > want.Clear || got.Clear < want.Clear-time.Minute ||
		got.RetryAfter > want.RetryAfter || got.RetryAfter < want.RetryAfter-time.Minute {
		t.Errorf("holds %+v, want %+v", got, want)
	}
	if here, err := m.Peek(context.Background(), small); err != nil || here.Units != 8 {
		t.Errorf("here it holds %+v, error %v", here, err)
	}
	reset(t, r, small, 8)
	if got := peek(t, r, large); got != (Level{Remaining: 10}) {
		t.Errorf("holds %+v", got)
	}
}

// TestResetOfForeignValues guards that whatever a key holds, it holds no bucket
// after a reset, and that it is reported as holding nothing.
func TestResetOfForeignValues(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	b := hourly(5)
	key := r.keys.of(&b)
	for _, command := range [][]any{
		{"SET", key, "something"}, {"RPUSH", key, 1, 2}, {"HSET", key, "a", 1}, {"SET", key, ""},
	} {
		server.Client().Del(t.Context(), key) // what a reset leaves is gone a millisecond later
		redistest.Done(t, server.Client().Do(t.Context(), command...))
		if got := peek(t, r, b); got != (Level{Remaining: 5}) {
			t.Errorf("%v: holds %+v", command, got)
		}
		if n := server.Client().Exists(t.Context(), key).Val(); n != 1 {
			t.Errorf("%v: Peek removed it", command)
		}
		reset(t, r, b, 0)
		if filled(t, server, key) > 0 {
			t.Errorf("%v: still there", command)
		}
	}
}

// TestResetOfLogs guards that a reset says of a log what a peek says, whichever of its
// entries it has to read for that, and leaves nothing.
func TestResetOfLogs(t *testing.T) {
	v := newPagedVirtual(t)
	for size := int64(1); size <= 8; size++ {
		for cost := int64(1); cost <= size+1; cost++ {
			b := logBucket(8, time.Minute, 1)
			for range b.Limit.Size {
				v.advance(t, time.Second)
				decide(t, v, AccountingAtomic, b)
			}
			b.Limit.Size, b.Cost = size, cost
			want := Level{Units: 8, Clear: time.Minute}
			if cost <= size {
				want.RetryAfter = time.Minute - time.Duration(size-cost)*time.Second
			}
			if got := peek(t, v.Redis, b); got != want {
				t.Errorf("peek at %d of %d: %+v, want %+v", cost, size, got, want)
			}
			if got, err := v.Reset(t.Context(), b); got != want || err != nil {
				t.Errorf("reset for %d of %d: %+v, error %v, want %+v", cost, size, got, err, want)
			}
			if left := v.stored(t, []Bucket{b})[0]; left != "" {
				t.Errorf("reset for %d of %d left %q", cost, size, left)
			}
		}
	}
}

// TestInspectCluster guards a cluster, with only the documented permissions: keys
// in slots of each node, and one whose slot is being moved and then is elsewhere.
func TestInspectCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	for _, node := range nodes.Nodes {
		setUser(t, node, "+cluster|slots", "+asking")
	}
	r := newTestCluster(t, nodes, func(opt *RedisOptions) {
		opt.Username, opt.Password, opt.Fallback = "limiter", "pass", NewMemory()
	})
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, err := r.Peek(t.Context(), hourly(5))
		return err
	})
	// inspects fills b on the given node and then resets it.
	inspects := func(b Bucket) {
		t.Helper()
		if d := mustTake(t, r, Request{Buckets: []Bucket{b}}); d[0].By != DecidedByRedis {
			t.Fatalf("decided %+v", d)
		}
		if got := peek(t, r, b); got.Units != b.Cost {
			t.Errorf("holds %+v, want %d", got, b.Cost)
		}
		reset(t, r, b, b.Cost)
		if got := peek(t, r, b); got.Units != 0 {
			t.Errorf("after a reset it holds %+v", got)
		}
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	var all Request
	for i, node := range nodes.Nodes {
		b := onNode(t, r, nodes, node, hourly(50))
		b.Cost = int64(i + 1)
		inspects(b)
		all.Buckets = append(all.Buckets, b)
	}
	// Of a request with buckets on each node, only one is reset.
	for range 2 {
		mustTake(t, r, all)
	}
	reset(t, r, all.Buckets[1], 6)
	for i, want := range []int64{3, 0, 9} {
		redistest.WaitFor(t, 5*time.Second, func() error { // until held units are settled
			if got := peek(t, r, all.Buckets[i]); got.Units != want || got.Held != 0 {
				return fmt.Errorf("bucket %d holds %+v, want %d", i, got, want)
			}
			return nil
		})
	}

	b := onNode(t, r, nodes, nodes.Nodes[0], hourly(7))
	b.Name = "moved"
	key := r.keys.of(&b)
	slot := nodes.Slot(t, key)
	b.Cost = 2
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	nodes.BeginMove(t, slot, nodes.Nodes[1])
	if got := peek(t, r, b); got.Units != 2 {
		t.Errorf("before its key is moved it holds %+v", got)
	}
	nodes.MoveKeys(t, slot, nodes.Nodes[1], key)
	if got := peek(t, r, b); got.Units != 2 {
		t.Errorf("while its slot is being moved it holds %+v", got)
	}
	reset(t, r, b, 2)
	inspects(b)
	nodes.MoveKeys(t, slot, nodes.Nodes[1]) // what else is in it
	nodes.EndMove(t, slot, nodes.Nodes[1])
	reset(t, r, b, 2)
	inspects(b)
}

// TestInspectPermissions guards that Peek and Reset need no more than the
// documented permissions.
func TestInspectPermissions(t *testing.T) {
	server := redistest.Start(t)
	setUser(t, server)
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Username, opt.Password = "limiter", "pass" })
	b := hourly(5)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	if got := peek(t, r, b); got.Units != 1 {
		t.Errorf("holds %+v", got)
	}
	reset(t, r, b, 1)
	if filled(t, server, r.keys.of(&b)) > 0 {
		t.Error("after a reset its key exists")
	}
}

// TestResetOfHeldUnits guards units that are held for a request while their bucket
// is reset: they are gone, and settling them afterwards changes nothing.
func TestResetOfHeldUnits(t *testing.T) {
	for _, as := range []verdict{verdictAdmitted, verdictNone} {
		v := newClockedRedis(t, redistest.Start(t), "rl:")
		b := hourly(5)
		b.Cost = 2
		decide(t, v, AccountingAtomic, b)
		req := Request{Buckets: []Bucket{b}}
		q := asProcess(v.query(toHold(req), 0))
		_, held, err := v.call(inTime(), q, nil)
		if err != nil {
			t.Fatal(err)
		}
		b.Cost = 3
		want := Level{Units: 2, Held: 2, Remaining: 1, Clear: 2 * time.Hour, RetryAfter: 2 * time.Hour}
		if got := peek(t, v.Redis, b); got != want {
			t.Errorf("holds %+v, want %+v", got, want)
		}
		if got, err := v.Reset(t.Context(), b); got != want || err != nil {
			t.Errorf("held %+v, want %+v, error %v", got, want, err)
		}
		settleAs(q, as, held)
		if _, _, err := v.call(inTime(), q, nil); err != nil {
			t.Fatal(err)
		}
		if got := peek(t, v.Redis, b); got != (Level{Remaining: 5}) {
			t.Errorf("after settling it holds %+v", got)
		}
	}
}

// TestInspectSharedBuckets guards keys that have to share a bucket because their
// limit is full: that one is looked at and reset, but not for a key that has a
// bucket of its own. A shared bucket whose level a key's own would start at counts
// too.
func TestInspectSharedBuckets(t *testing.T) {
	server := redistest.Start(t)
	r, m := testNode(t, server)
	b := hourly(3)
	b.MaxKeys, b.ShareKey, b.Key = 1, "network", "first"
	own, second := b, b
	second.Key = "second"
	decide(t, r, AccountingAtomic, own)
	for range 4 {
		decide(t, r, AccountingAtomic, second)
	}
	// levels checks the levels on the server, here and in the memory alone.
	levels := func(b Bucket, want int64) {
		t.Helper()
		here, _ := peekHere(t, r, b)
		alone, err := m.Peek(context.Background(), b)
		if got := peek(t, r, b); err != nil || got.Units != want || here.Units != want || alone.Units != want {
			t.Errorf("%s holds %+v, here %+v, alone %+v, want %d, error %v", b.Key, got, here, alone, want, err)
		}
	}
	levels(own, 1)
	levels(second, 3)
	third := b
	third.Key = "third"
	levels(third, 3)
	if u := m.Usage()[0]; u.Shared != 4 || u.Buckets != 1 {
		t.Errorf("looking has changed %+v", u)
	}
	room := second
	room.MaxKeys = 10
	decide(t, r, AccountingAtomic, Bucket{Name: "b", Key: "elsewhere", Limit: room.Limit, Cost: 1, MaxKeys: 10, ShareKey: "another network"})
	levels(third, 3)
	reset(t, r, own, 1)
	levels(own, 0)
	levels(second, 3)
	reset(t, r, second, 3)
	levels(second, 0)
	levels(third, 0)
	for n := range 4 {
		if d := decide(t, r, AccountingAtomic, second)[0]; d.Denied != (n == 3) {
			t.Errorf("request %d: decided %+v", n, d)
		}
	}
	if level, err := m.Reset(context.Background(), second); err != nil || level.Units != 3 {
		t.Errorf("held %+v, error %v", level, err)
	}
	if level, err := m.Peek(context.Background(), second); err != nil || level.Units != 0 {
		t.Errorf("holds %+v, error %v", level, err)
	}
}

// unitsHere returns the units in b's bucket as m knows it.
func unitsHere(m *Memory, b Bucket) int64 {
	s, _ := m.levelOf(&b)
	return b.Limit.of().Units(s.After(0), 0)
}
