package redisscript

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// newBatched returns a client with one connection to a server, and that server.
func newBatched(t testing.TB, server *redistest.Server, change func(*Options)) (*testClient, *Server) {
	t.Helper()
	r := newTestClient(t, server, func(opt *Options) {
		opt.PoolSize = 1
		if change != nil {
			change(opt)
		}
	})
	return r, r.server()
}

// setTimeout changes the timeout of calls to c's one server, once nothing is in
// flight to it.
func (c *testClient) setTimeout(t testing.TB, d time.Duration) {
	t.Helper()
	s := c.server()
	redistest.WaitFor(t, 5*time.Second, func() error {
		s.batcher.mu.Lock()
		defer s.batcher.mu.Unlock()
		if s.batcher.inFlight > 0 || s.batcher.watched {
			return errors.New("batches are sent")
		}
		return nil
	})
	c.timeout, s.timeout, s.pool.timeout, s.batcher.timeout = d, d, d, d
}

// waitingAt returns the number of calls queued for a server.
func waitingAt(s *Server) int {
	s.batcher.mu.Lock()
	defer s.batcher.mu.Unlock()
	return len(s.batcher.queue)
}

// atRest waits until nothing is in flight to a server and none of its goroutines
// run.
func atRest(t testing.TB, s *Server) {
	t.Helper()
	redistest.WaitFor(t, 5*time.Second, func() error {
		s.batcher.mu.Lock()
		defer s.batcher.mu.Unlock()
		if b := s.batcher; b.direct > 0 || b.inFlight > 0 || b.watched || len(s.pool.idle) != int(s.pool.held.Load()) {
			return fmt.Errorf("%d by themselves, %d senders, watched %t, %d of %d connections idle",
				b.direct, b.inFlight, b.watched, len(s.pool.idle), s.pool.held.Load())
		}
		return nil
	})
}

// gather queues n calls for a server that has one connection, does meanwhile, lets
// the calls go, and returns when all are done.
func gather(t testing.TB, s *Server, n int, take func(i int), meanwhile ...func()) {
	t.Helper()
	conn := hold(t, s)
	var all sync.WaitGroup
	defer all.Wait()
	defer func() { s.pool.idle <- conn }()
	for i := range n {
		all.Go(func() { take(i) })
	}
	redistest.WaitFor(t, 4*time.Second, func() error {
		if waiting := waitingAt(s); waiting < n {
			return fmt.Errorf("%d of %d calls wait", waiting, n)
		}
		return nil
	})
	for _, do := range meanwhile {
		do()
	}
}

// recording is a script that counts and also records the number of keys it is run
// with.
var recording = newCounting("redis.call('RPUSH', 'carried', #KEYS)\n" + counting)

// carried returns the number of keys in each invocation, in order.
func carried(t testing.TB, server *redistest.Server) []int {
	t.Helper()
	var buckets []int
	if err := server.Client().LRange(t.Context(), "carried", 0, -1).ScanSlice(&buckets); err != nil {
		t.Fatal(err)
	}
	return buckets
}

// TestBatchesAreExact guards that batched calls run one after the other: many in
// one batch count exactly up to the limit, and a call on several keys counts on
// all or none.
func TestBatchesAreExact(t *testing.T) {
	const calls, limit = 100, 30
	server := redistest.Start(t)
	for _, tc := range []struct {
		name  string
		add   int64
		keys  int   // whose calls are batched
		other int64 // the limit of another key in every call, if there is one
	}{
		{name: "one key", add: 1, keys: 1},
		{name: "more than one at a time", add: 3, keys: 1},
		{name: "several keys", add: 1, keys: 3},
		{name: "two keys in a call", add: 1, keys: 1, other: 1000},
		{name: "the other reaches its limit first", add: 1, keys: 1, other: 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := server.Client().FlushDB(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			r, s := newBatched(t, server, nil)
			s.script = recording
			on := func(i int) []counter {
				all := []counter{{key: fmt.Sprintf("rl:{%d}", i%tc.keys), add: tc.add, limit: limit}}
				if tc.other > 0 {
					all = append(all, counter{key: "rl:{0}:other", add: 1, limit: tc.other})
				}
				return all
			}
			admitted := make([]atomic.Int64, tc.keys)
			gather(t, s, calls, func(i int) {
				d, err := r.count(t.Context(), on(i)...)
				if err != nil {
					t.Error(err)
				} else if !d[0].denied {
					admitted[i%tc.keys].Add(1)
				}
			})
			want := limit / tc.add
			if tc.other > 0 {
				want = min(want, tc.other)
			}
			for key := range tc.keys {
				if got := admitted[key].Load(); got != want {
					t.Errorf("key %d: %d calls counted, want %d", key, got, want)
				}
				for _, c := range on(key) {
					if got := stored(t, server, c.key); got != want*c.add {
						t.Errorf("%s holds %d, want %d", c.key, got, want*c.add)
					}
				}
			}
			if got := carried(t, server); len(got) > 1+calls*2/maxBatchKeys {
				t.Errorf("batches of %d keys", got)
			}
		})
	}
}

// takeOwn makes a call by caller i and checks that its keys have counted at least
// least and at most most. What an answer adds shows whose it is.
func takeOwn(t testing.TB, r *testClient, i int, least, most int64) {
	var own []counter
	for n := range 1 + i%3 {
		own = append(own, counter{key: fmt.Sprintf("rl:{own%d}:%d", i, n), add: int64(1000*(n+1) + i), limit: 1 << 30})
	}
	all, err := r.count(context.Background(), own...)
	if err != nil || len(all) != len(own) {
		t.Errorf("caller %d: counted %+v, error %v", i, all, err)
		return
	}
	for n, c := range all {
		if add := own[n].add; c.denied || c.n%add != 0 || c.n < least*add || c.n > most*add {
			t.Errorf("caller %d, key %d: counted %+v, want %d to %d times %d", i, n, c, least, most, add)
		}
	}
}

// checkCharged checks that calls on the counters numbered from 1 on have counted
// once each, and those that failed at most once.
func checkCharged(t testing.TB, server *redistest.Server, calls, failed int64) {
	t.Helper()
	missing := int64(0)
	for n := range calls {
		switch got := stored(t, server, numbered(n+1).key); got {
		case 1:
		case 0:
			missing++
		default:
			t.Fatalf("call %d counted %d times", n, got)
		}
	}
	if missing > failed {
		t.Errorf("%d calls were not counted, %d failed", missing, failed)
	}
}

// TestBatchedCallsGetTheirOwnAnswers guards that each call in a batch gets its own
// answer.
func TestBatchedCallsGetTheirOwnAnswers(t *testing.T) {
	const callers, rounds = 60, 5
	r, s := newBatched(t, redistest.Start(t), nil)
	for n := range int64(rounds) {
		gather(t, s, callers, func(i int) { takeOwn(t, r, i, n+1, n+1) })
	}
}

// TestManyCallsTakeFewInvocations guards the purpose of batching: the server runs
// the script far less often than it is called, although connections are available.
func TestManyCallsTakeFewInvocations(t *testing.T) {
	t.Parallel()
	const callers, rounds, size = 64, 8, 200
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newBatched(t, server, func(opt *Options) { opt.Addresses, opt.PoolSize = []string{p.Addr}, 4 })
	b := upTo(size)
	s.pool.idle <- hold(t, s)
	p.Delay(20 * time.Millisecond)
	var admitted atomic.Int64
	c := redistest.CommandCounter{Server: server}
	c.Since(t, "evalsha")
	redistest.Together(t, callers, func(int) {
		for range rounds {
			d, err := r.count(context.Background(), b)
			if err != nil {
				t.Error(err)
			} else if !d[0].denied {
				admitted.Add(1)
			}
		}
	})
	if got := c.Since(t, "evalsha"); got > callers*rounds/4 {
		t.Errorf("%d invocations for %d calls", got, callers*rounds)
	}
	if got := admitted.Load(); got != size {
		t.Errorf("admitted %d, want %d", got, size)
	}
	if got := p.Connections(); got > 4 {
		t.Errorf("%d connections, want at most 4", got)
	}
}

// TestLoneCallIsCheap guards the cost of a call that need not wait: one
// invocation, and no goroutine, timer or channel.
func TestLoneCallIsCheap(t *testing.T) {
	const requests = 1000
	server := redistest.Start(t)
	r, s := newBatched(t, server, func(opt *Options) { opt.PoolSize = 2 })
	req := upTo(100_000)
	mustCount(t, r, req)
	s.pool.connect(false)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if n := len(s.pool.idle); n < 2 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	created := func() uint64 {
		sample := []metrics.Sample{{Name: "/sched/goroutines-created:goroutines"}}
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	c := redistest.CommandCounter{Server: server}
	c.Since(t, "evalsha")
	before := created()
	for range requests {
		mustCount(t, r, req)
	}
	if got := created() - before; got > requests/10 { // the runtime has some of its own
		t.Errorf("%d goroutines for %d requests", got, requests)
	}
	c.Check(t, "evalsha", requests)

	q := callOf(req)
	if err := s.do(within(time.Minute), q); err != nil {
		t.Error(err)
	}
	if q.done != nil || q.timer != nil {
		t.Error("it was about to wait")
	}
}

// TestInvocationsInFlight guards the number of invocations in flight to a server
// that does not answer: some direct calls, the batches of all other calls, and one
// more each time a call has waited too long.
func TestInvocationsInFlight(t *testing.T) {
	t.Parallel()
	const callers, size = 150, 100
	server := redistest.Start(t)
	r, s := newBatched(t, server, func(opt *Options) { opt.PoolSize = size })
	mustCount(t, r, numbered(0))
	connectAll(t, s, size)
	server.Pause(t)
	before := s.calls.Load()
	began := time.Now()
	var all sync.WaitGroup
	defer all.Wait()
	defer server.Resume(t)
	for i := range callers {
		all.Go(func() {
			if _, err := r.count(context.Background(), numbered(int64(i+1))); err != nil {
				t.Error(err)
			}
		})
	}
	apart, sending := 0, 0
	redistest.WaitFor(t, 4*time.Second, func() error {
		s.batcher.mu.Lock()
		defer s.batcher.mu.Unlock()
		if apart, sending = s.batcher.direct, s.batcher.inFlight; apart < maxDirect || s.calls.Load()-before < callers || len(s.batcher.queue) > 0 {
			return fmt.Errorf("%d under way by themselves, %d wait", apart, len(s.batcher.queue))
		}
		return nil
	})
	underWay, impatient := size-len(s.pool.idle), int(time.Since(began)/maxLinger)+1
	server.Resume(t)
	all.Wait()
	if apart > maxDirect || sending > maxInFlight || underWay > apart+sending+impatient {
		t.Errorf("%d invocations in flight, %d of them direct and %d of batch goroutines; want at most %d more",
			underWay, apart, sending, impatient)
	}
	checkCharged(t, server, callers, 0)
}

// TestSecondBatchWhenManyWait guards when a second batch is sent beside another: a
// few calls gain more by waiting for the next one.
func TestSecondBatchWhenManyWait(t *testing.T) {
	server := redistest.Start(t)
	r, s := newBatched(t, server, nil)
	mustCount(t, r, numbered(0))
	for _, tc := range []struct{ waiting, senders int }{
		{1, 1}, {largeBatch, 1}, {largeBatch + 1, 2}, {2*largeBatch + 1, 2}, {5 * largeBatch, 2},
	} {
		got := 0
		gather(t, s, tc.waiting, func(i int) { takeOwn(t, r, i, 1, 100) }, func() {
			s.batcher.mu.Lock()
			defer s.batcher.mu.Unlock()
			got = s.batcher.inFlight
		})
		if got != tc.senders {
			t.Errorf("%d wait: %d senders, want %d", tc.waiting, got, tc.senders)
		}
	}
}

// TestBatchingContinuesAfterLargeBatch guards that no call is sent directly after
// a large batch, because others are about to come; and that the next one is if
// none came.
func TestBatchingContinuesAfterLargeBatch(t *testing.T) {
	server := redistest.Start(t)
	r, s := newBatched(t, server, nil)
	mustCount(t, r, numbered(0))
	alone := func() bool {
		t.Helper()
		atRest(t, s)
		q := callOf(numbered(1))
		conn := s.batcher.tryDirect(q, false)
		if conn == nil {
			<-q.done
			return false
		}
		s.pool.put(conn)
		s.batcher.endDirect()
		return true
	}
	for _, tc := range []struct {
		carried int
		alone   bool
	}{
		{1, true}, {largeBatch - 1, true}, {largeBatch, false}, {largeBatch + 1, false}, {5 * largeBatch, false}, {1, true},
	} {
		gather(t, s, tc.carried, func(i int) { takeOwn(t, r, i, 1, 100) })
		if got := alone(); got != tc.alone {
			t.Errorf("after a call of %d a request goes by itself: %t, want %t", tc.carried, got, tc.alone)
		}
		if !alone() {
			t.Errorf("after a call of %d, and one of 1, a request does not go by itself", tc.carried)
		}
	}
}

// TestBatchWithoutConnectionReportsNothing guards a batch that waits too long
// because all connections are in use: its callers may have given up, and each of
// them reports its own failure.
func TestBatchWithoutConnectionReportsNothing(t *testing.T) {
	var seen events
	r, s := newBatched(t, redistest.Start(t), func(opt *Options) { opt.Report = seen.report })
	mustCount(t, r, upTo(10))
	conn := hold(t, s)
	r.setTimeout(t, 20*time.Millisecond)
	if _, err := s.batcher.connection(); !errors.Is(err, errNoConnection) {
		t.Errorf("error %v, want %v", err, errNoConnection)
	}
	s.pool.put(conn)
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestPendingCallsMakeFewConnections guards that pending calls make no more
// connections than allowed, however long they wait.
func TestPendingCallsMakeFewConnections(t *testing.T) {
	t.Parallel()
	const size, callers = 3, 60
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newBatched(t, server, func(opt *Options) { opt.Addresses, opt.PoolSize = []string{p.Addr}, size })
	p.Delay(10*time.Millisecond, 10*time.Millisecond)
	var most atomic.Int32
	redistest.Together(t, callers, func(i int) {
		for n := range int64(5) {
			takeOwn(t, r, i, n+1, n+1)
			most.Store(max(most.Load(), s.pool.held.Load()))
		}
	})
	if got, taken := most.Load(), p.Connections(); got != size || taken > size {
		t.Errorf("%d connections at a time, %d made, want at most %d", got, taken, size)
	}
}

// TestBatchSize guards the size of a batch: the earliest calls, up to a number of
// keys. A call with more keys than that is sent alone, in its turn.
func TestBatchSize(t *testing.T) {
	server := redistest.Start(t)
	for _, tc := range []struct {
		name  string
		calls []int // the number of keys of each call, in order of arrival
		want  []int // the number of keys in each batch
	}{
		{"all", slices.Repeat([]int{1}, maxBatchKeys), []int{maxBatchKeys}},
		{"one too many", slices.Repeat([]int{1}, maxBatchKeys+1), []int{maxBatchKeys, 1}},
		{"never a part", slices.Repeat([]int{maxBatchKeys/2 - 1}, 5), []int{maxBatchKeys - 2, maxBatchKeys - 2, maxBatchKeys/2 - 1}},
		{"exactly", []int{maxBatchKeys - 2, 2, maxBatchKeys, 1}, []int{maxBatchKeys, maxBatchKeys, 1}},
		{"more", []int{1, 2, maxBatchKeys + 44, 3, 4}, []int{3, maxBatchKeys + 44, 7}},
		{"more at first", []int{maxBatchKeys + 44, maxBatchKeys + 1, 1}, []int{maxBatchKeys + 44, maxBatchKeys + 1, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := server.Client().FlushDB(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			r, s := newBatched(t, server, nil)
			s.script = recording
			conn := hold(t, s)
			var all sync.WaitGroup
			defer all.Wait()
			for i, n := range tc.calls {
				var own []counter
				for j := range n {
					own = append(own, counter{key: fmt.Sprintf("rl:{%d}:%d", i, j), add: int64(1 + i), limit: 1 << 30})
				}
				all.Go(func() {
					d, err := r.count(t.Context(), own...)
					if err != nil {
						t.Error(err)
						return
					}
					for _, d := range d {
						if d.denied || d.n != int64(1+i) {
							t.Errorf("call %d: counted %+v", i, d)
						}
					}
				})
				for deadline := time.Now().Add(4 * time.Second); waitingAt(s) <= i; runtime.Gosched() {
					if time.Now().After(deadline) {
						t.Fatalf("call %d does not wait", i)
					}
				}
			}
			s.pool.idle <- conn
			all.Wait()
			if got := carried(t, server); !slices.Equal(got, tc.want) {
				t.Errorf("batches of %d keys, want %d", got, tc.want)
			}
		})
	}
}

// TestBatchFails guards batches that fail: each of their calls fails, once and for
// the same reason, and none is sent again. The batch counts as one failure, and
// only several in a row count as an outage.
func TestBatchFails(t *testing.T) {
	t.Parallel()
	const calls = 30
	reply := func(reply string) func(*testing.T, *Server, *redistest.Server, *redistest.Proxy) {
		return func(_ *testing.T, s *Server, _ *redistest.Server, _ *redistest.Proxy) {
			s.script = newCounting("return redis.error_reply('" + reply + "')")
		}
	}
	for _, tc := range []struct {
		name, reason string
		begin        func(*testing.T, *Server, *redistest.Server, *redistest.Proxy)
		ran          int64 // units that each batch charges
	}{
		{"reply lost", "closed", func(_ *testing.T, _ *Server, _ *redistest.Server, p *redistest.Proxy) {
			p.CutReplies("evalsha")
		}, 1},
		{"reply cut", "closed", func(_ *testing.T, _ *Server, _ *redistest.Server, p *redistest.Proxy) {
			p.HalfReply(20, "evalsha")
		}, 1},
		{"out of memory", "oom", func(t *testing.T, _ *Server, s *redistest.Server, _ *redistest.Proxy) {
			if err := s.Client().ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
				t.Fatal(err)
			}
		}, 0},
		{"loading", "loading", reply("LOADING Redis is loading the dataset in memory"), 0},
		{"busy", "busy", reply("BUSY Redis is busy running a script"), 0},
		{"unknown", "error", reply("ERR something else"), 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			if err := server.Client().ScriptLoad(t.Context(), counting).Err(); err != nil {
				t.Fatal(err)
			}
			p := redistest.StartProxy(t, server.Addr)
			var seen events
			r, s := newBatched(t, server, func(opt *Options) {
				opt.Addresses, opt.Report = []string{p.Addr}, seen.report
			})
			mustCount(t, r, upTo(100))
			tc.begin(t, s, server, p)
			for n := range openAfter {
				if got, want := int(s.breaker.failures.Load()), n; got != want {
					t.Errorf("%d failures by %d batches", got, want)
				}
				if got := seen.take(); len(got) > 0 {
					t.Errorf("reported %q after %d batches", got, n)
				}
				gather(t, s, calls, func(i int) {
					d, err := r.count(context.Background(), numbered(int64(n*calls+i+1)))
					if len(d) > 0 {
						t.Errorf("counted %+v", d)
					}
					checkError(t, err, p.Addr)
					if f := failureOf(t, err); f.reason != tc.reason {
						t.Errorf("reason %q, want %q: %v", f.reason, tc.reason, err)
					}
				})
			}
			if got, want := seen.take(), []string{"down " + tc.reason}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			for n := range int64(openAfter * calls) {
				if got := stored(t, server, numbered(n+1).key); got != tc.ran {
					t.Fatalf("call %d counted %d, want %d", n, got, tc.ran)
				}
			}
		})
	}
}

// TestRepliesOfWrongLength guards that when a server answers a batch with too many
// or too few numbers, no call gets any of them, because it is unknown which number
// belongs to which call.
func TestRepliesOfWrongLength(t *testing.T) {
	const calls = 30
	server := redistest.Start(t)
	for _, script := range []string{
		"return {}",
		"return {1}",
		"local r = {} for i = 1, #KEYS - 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, #KEYS + 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, 2 * #KEYS do r[i] = 0 end return r",
	} {
		t.Run(script, func(t *testing.T) {
			r, s := newBatched(t, server, nil)
			s.script = newCounting(script)
			gather(t, s, calls, func(i int) {
				if d, err := r.count(context.Background(), numbered(int64(i))); err == nil || !strings.HasPrefix(err.Error(), "reply []") {
					t.Errorf("counted %+v, error %v, want no reply", d, err)
				}
			})
			s.script = newCounting(counting)
			gather(t, s, calls, func(i int) { takeOwn(t, r, i, 1, 1<<20) })
		})
	}
}

// TestScriptFlushedWithPendingCalls guards that flushing the server's scripts
// while calls are pending fails none of them, and that none counts twice.
func TestScriptFlushedWithPendingCalls(t *testing.T) {
	server := redistest.Start(t)
	r, s := newBatched(t, server, nil)
	c := redistest.CommandCounter{Server: server}
	for n := range int64(3) {
		gather(t, s, 50, func(i int) { takeOwn(t, r, i, n+1, n+1) }, func() {
			if err := server.Client().ScriptFlush(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		})
		c.Check(t, "evalsha", 1)
		// New connections load the script on the server too.
		if got, most := c.Since(t, "eval"), 1+c.Since(t, "evalsha_ro"); got < 1 || got > most {
			t.Errorf("%d calls of eval, want 1 to %d", got, most)
		}
	}
}

// TestCallsGiveUpWithoutConnection guards calls that get no connection in half of
// the timeout, whether for a batch of their own or because all batches are in
// flight: they do not count later, and the server is not blamed.
func TestCallsGiveUpWithoutConnection(t *testing.T) {
	t.Parallel()
	const calls, timeout = 20, 100 * time.Millisecond
	for _, making := range []int{0, maxInFlight} {
		t.Run(fmt.Sprintf("%d batches", making), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			var seen events
			r, s := newBatched(t, server, func(opt *Options) { opt.Report = seen.report })
			mustCount(t, r, upTo(100))
			r.patient = false
			conn := hold(t, s)
			calling := func(n int) {
				s.batcher.mu.Lock()
				defer s.batcher.mu.Unlock()
				s.batcher.inFlight += n
			}
			r.setTimeout(t, timeout)
			calling(making)
			redistest.Together(t, calls, func(i int) {
				began := time.Now()
				_, err := r.count(context.Background(), numbered(int64(i+1)))
				if took := time.Since(began); err == nil || took < timeout/2-time.Millisecond {
					t.Errorf("gave up after %v, error %v", took, err)
					return
				}
				if f := failureOf(t, err); f.reason != "pool" {
					t.Errorf("reason %q: %v", f.reason, err)
				}
			})
			if n := waitingAt(s); n > 0 {
				t.Errorf("%d calls still wait", n)
			}
			redistest.WaitFor(t, 5*time.Second, func() error {
				s.batcher.mu.Lock()
				defer s.batcher.mu.Unlock()
				if s.batcher.inFlight > making || s.batcher.watched {
					return errors.New("somebody still calls for them")
				}
				return nil
			})
			calling(-making)
			r.setTimeout(t, 10*time.Second)
			s.pool.idle <- conn
			gather(t, s, calls, func(i int) { takeOwn(t, r, i, 1, 1) })
			for n := range int64(calls) {
				if got := stored(t, server, numbered(n+1).key); got != 0 {
					t.Errorf("call %d counted %d after it had given up", n, got)
				}
			}
			if got, want := seen.take(), []string{"error pool"}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
		})
	}
}

// TestStallsHardlyCountAsSlowBatches guards the estimate of how long a batch
// takes: it follows a server that is slow for long, and hardly one that stalls, however
// many batches wait for it and however often. Otherwise calls that wait for a stall to
// end would be given up with time left for their answers.
func TestStallsHardlyCountAsSlowBatches(t *testing.T) {
	t.Parallel()
	type batch struct{ began, ended int } // in ms
	for _, tc := range []struct {
		name        string
		times       int
		batches     []batch // of each time
		every       int     // ms until they come again
		least, most time.Duration
	}{
		{"quick ones", 100, []batch{{0, 1}}, 2, 900 * time.Microsecond, time.Millisecond},
		{"slow ones", 100, []batch{{0, 60}}, 60, 59 * time.Millisecond, 60 * time.Millisecond},
		{"slow ones, two in flight", 100, []batch{{0, 60}, {30, 90}}, 60, 59 * time.Millisecond, 60 * time.Millisecond},
		{"first stall", 1, slices.Repeat([]batch{{0, 60}}, 16), 0, 7 * time.Millisecond, 8 * time.Millisecond},
		{"stalls", 100, append([]batch{{0, 1}}, slices.Repeat([]batch{{2, 62}}, 16)...), 100, 7 * time.Millisecond, 9 * time.Millisecond},
		{"stalls are over", 100, append(slices.Repeat([]batch{{2, 62}}, 16), batch{62, 63}), 100, 900 * time.Microsecond, time.Millisecond},
	} {
		var b batcher
		start := time.Now()
		for i := range tc.times {
			for _, sent := range tc.batches {
				at := func(ms int) time.Time { return start.Add(time.Duration(i*tc.every+ms) * time.Millisecond) }
				b.tookFor(at(sent.began), at(sent.ended))
			}
		}
		if b.took < tc.least || b.took > tc.most {
			t.Errorf("%s: estimated as %v, want %v to %v", tc.name, b.took, tc.least, tc.most)
		}
	}
}

// TestLateAnswersOfBatches guards calls that time out in flight: they return in
// time. When their answers arrive at last, no connection is lost, that is not a
// failure, and no call pending by then takes them for its own.
func TestLateAnswersOfBatches(t *testing.T) {
	t.Parallel()
	const requests, timeout = 40, 3 * time.Second
	server := redistest.Start(t)
	var seen events
	r, s := newBatched(t, server, func(opt *Options) { opt.Timeout, opt.Report = timeout, seen.report })
	mustCount(t, r, upTo(100))
	received := server.InfoNumber(t, "stats", "total_connections_received")
	gather(t, s, requests, func(i int) {
		began := time.Now()
		_, err := r.count(context.Background(), numbered(int64(i+1)))
		if took := time.Since(began); err == nil || took < timeout-time.Millisecond {
			t.Errorf("returned after %v, error %v", took, err)
			return
		}
		if f := failureOf(t, err); f.reason != "pool" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	}, func() {
		time.Sleep(timeout / 3) // the rest of the call's time
		server.Pause(t)
	})
	var later sync.WaitGroup
	for i := range requests {
		later.Go(func() { takeOwn(t, r, i, 1, 1) })
	}
	redistest.WaitFor(t, timeout/4, func() error {
		if n := waitingAt(s); n < requests {
			return fmt.Errorf("%d calls wait", n)
		}
		return nil
	})
	server.Resume(t)
	later.Wait()
	checkCharged(t, server, requests, 0)
	if made := server.InfoNumber(t, "stats", "total_connections_received") - received; made > 0 {
		t.Errorf("%d connections made", made)
	}
	if got, want := seen.take(), []string{"error pool"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// TestPendingCallsFailWhenServerGoesDown guards calls that are pending when the
// breaker opens: they fail at once and with its reason, because waiting is
// useless.
func TestPendingCallsFailWhenServerGoesDown(t *testing.T) {
	t.Parallel()
	const size, timeout = maxDirect + maxInFlight + 2, 2 * time.Second
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r, s := newBatched(t, server, func(opt *Options) {
		opt.Addresses, opt.Timeout = []string{p.Addr}, timeout
		opt.PoolSize, opt.Report = size, seen.report
	})
	connectAll(t, s, size)
	p.BlackHole()
	take := func() *ServerError {
		_, err := r.count(context.Background(), upTo(100))
		return failureOf(t, err)
	}
	var all sync.WaitGroup
	for range 10 * size {
		all.Go(func() { take() })
		time.Sleep(maxLinger) // until all connections are in use
	}
	time.Sleep(timeout * 7 / 10)
	for range 20 {
		all.Go(func() {
			if f := take(); f.reason != "timeout" {
				t.Errorf("reason %q, want why the server is down: %v", f.reason, f)
			}
		})
	}
	all.Wait()
	if got := seen.take(); !slices.Contains(got, "down timeout") {
		t.Errorf("reported %q", got)
	}
}

// TestCloseEndsPendingCalls guards that closing a client ends pending calls,
// without reporting an event.
func TestCloseEndsPendingCalls(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var seen events
	r, s := newBatched(t, server, func(opt *Options) { opt.Report = seen.report })
	var closed time.Time
	gather(t, s, 30, func(int) {
		_, err := r.count(context.Background(), upTo(100))
		checkError(t, err, server.Addr)
		if f := failureOf(t, err); f.reason != "unused" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	}, func() {
		closed = time.Now()
		r.Close()
		redistest.WaitFor(t, 4*time.Second, func() error {
			if n := waitingAt(s); n > 0 {
				return fmt.Errorf("%d calls wait", n)
			}
			return nil
		})
	})
	if took := time.Since(closed); took > r.timeout/4 {
		t.Errorf("waited %v for what can't be", took)
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestBatcherLeaksNothing guards that a batcher without calls runs no goroutines,
// and that nothing is left of a closed client.
func TestBatcherLeaksNothing(t *testing.T) {
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	clients(t, server)
	before := runtime.NumGoroutine()
	for range 5 {
		r, s := newBatched(t, server, func(opt *Options) { opt.Addresses, opt.PoolSize = []string{p.Addr}, 20 })
		mustCount(t, r, upTo(100))
		p.Delay(5 * time.Millisecond)
		redistest.Together(t, 100, func(i int) { takeOwn(t, r, i, 1, 1<<20) })
		atRest(t, s)
		p.Pass()
		r.Close()
	}
	redistest.WaitFor(t, 10*time.Second, func() error {
		if n := runtime.NumGoroutine(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
}

// TestBatchesToDistantServer guards a server so far away that the round trip takes
// more than half of the timeout, under constant load: no call waits for an earlier
// one's answer. All times are five times those of the default timeout and a server
// 30 ms away.
func TestBatchesToDistantServer(t *testing.T) {
	t.Parallel()
	const times = 5
	const delay, timeout, size = times * 30 * time.Millisecond, times * 50 * time.Millisecond, times * 20
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newBatched(t, server, func(opt *Options) { opt.Addresses, opt.PoolSize = []string{p.Addr}, size })
	b := upTo(100_000)
	mustCount(t, r, b)
	connectAll(t, s, size)
	p.Delay(delay)
	r.setTimeout(t, timeout)

	const burst, steady = 100, 1000
	var decided atomic.Int64
	take := func() {
		if _, err := r.count(context.Background(), b); err == nil {
			decided.Add(1)
		}
	}
	redistest.Together(t, burst, func(int) { take() })
	if got := decided.Load(); got < burst*9/10 {
		t.Errorf("%d of %d requests at once decided", got, burst)
	}
	decided.Store(0)
	var all sync.WaitGroup
	for began, n := time.Now(), 0; n < steady; n++ {
		time.Sleep(time.Until(began.Add(time.Duration(n) * time.Millisecond)))
		all.Go(take)
	}
	all.Wait()
	if got := decided.Load(); got < steady*9/10 {
		t.Errorf("%d of %d requests decided that came one each millisecond", got, steady)
	}
}

// TestPendingCallsGetAnotherConnection guards calls that wait for a connection
// which then breaks: another one is made at once, and they are answered.
func TestPendingCallsGetAnotherConnection(t *testing.T) {
	t.Parallel()
	const requests = 50
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newBatched(t, server, func(opt *Options) { opt.Addresses = []string{p.Addr} })
	mustCount(t, r, upTo(100))
	p.BlackHole()
	var all sync.WaitGroup
	all.Go(func() { // in flight when the connection breaks
		_, err := r.count(context.Background(), upTo(100))
		checkError(t, err, p.Addr)
	})
	redistest.WaitFor(t, 5*time.Second, func() error {
		if len(s.pool.idle) > 0 {
			return errors.New("not under way")
		}
		return nil
	})
	for i := range requests {
		all.Go(func() { takeOwn(t, r, i, 1, 1) })
	}
	redistest.WaitFor(t, 4*time.Second, func() error {
		if n := waitingAt(s); n < requests {
			return fmt.Errorf("%d calls wait", n)
		}
		return nil
	})
	began := time.Now()
	if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err(); err != nil {
		t.Fatal(err)
	}
	p.Pass()
	all.Wait()
	if took := time.Since(began); took > r.timeout/4 {
		t.Errorf("waited %v for another connection", took)
	}
}

// TestEachCallHasItsOwnTimeout guards that each call may wait half of its timeout
// for a connection: a late one does not give up with the first ones.
func TestEachCallHasItsOwnTimeout(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second
	r, s := newBatched(t, redistest.Start(t), func(opt *Options) { opt.Timeout = timeout })
	mustCount(t, r, upTo(100))
	r.patient = false
	conn := hold(t, s)
	var all sync.WaitGroup
	all.Go(func() {
		began := time.Now()
		_, err := r.count(t.Context(), upTo(100))
		if took := time.Since(began); took > timeout*11/20 || failureOf(t, err).reason != "pool" {
			t.Errorf("waited %v of %v for a connection, error %v", took, timeout, err)
		}
	})
	time.Sleep(timeout * 7 / 20)
	all.Go(func() { takeOwn(t, r, 1, 1, 1) })
	time.Sleep(timeout * 5 / 20)
	s.pool.idle <- conn
	all.Wait()
}

// TestBatcherDoesNotSpin guards a batcher with pending calls and no connection: it
// retries now and then, and does not keep a CPU busy.
func TestBatcherDoesNotSpin(t *testing.T) {
	t.Parallel()
	hangs := tcpServer(t, func(c *net.TCPConn) {
		defer c.Close()
		_, _ = c.Read(make([]byte, 4096))
		_ = c.SetReadDeadline(time.Now().Add(3 * time.Second))
		_, _ = c.Read(make([]byte, 1))
	})
	refuses, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refuses.Close()
	server := redistest.Start(t)
	for _, tc := range []struct {
		name, addr string
		inUse      bool
	}{
		{"connections take long", hangs, false},
		{"connections are refused", refuses.Addr().String(), false},
		{"all connections are in use", server.Addr, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r, s := newBatched(t, server, func(opt *Options) {
				opt.Addresses, opt.Timeout = []string{tc.addr}, 20*time.Millisecond
			})
			var looks atomic.Int64 // reads of the clock, several in each attempt
			clock := s.pool.clock
			s.pool.clock = func() time.Duration {
				looks.Add(1)
				return clock()
			}
			if tc.inUse {
				defer s.pool.put(hold(t, s))
			} else {
				r.Connect()
				time.Sleep(2 * r.timeout) // so long that all callers have given up
			}
			looks.Store(0)
			q := callOf(upTo(10))
			q.Done = func(error) {}
			s.Submit(q) // nobody cancels it
			const whole = 400 * time.Millisecond
			time.Sleep(whole)
			if n := looks.Load(); n > 6*int64(whole/maxLinger) {
				t.Errorf("the clock was looked at %d times", n)
			}
			_ = r.Close()
		})
	}
}

// TestSubmittedCallReportsNotRun guards a submitted call whose connection was
// closed while it was idle, when there is no other connection: its Done learns
// that the script was not run, so that the call can be retried.
func TestSubmittedCallReportsNotRun(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		connections int
		fault       func(*redistest.Proxy) // after the connection is closed
	}{
		{"all others are in use", 2, (*redistest.Proxy).BlackHole},
		{"no other, the next takes long", 1, (*redistest.Proxy).BlackHole},
		{"no other, the next is refused", 1, (*redistest.Proxy).Refuse},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			p := redistest.StartProxy(t, server.Addr)
			r, s := newBatched(t, server, func(opt *Options) {
				opt.Addresses, opt.PoolSize, opt.Timeout = []string{p.Addr}, tc.connections, 200*time.Millisecond
			})
			connectAll(t, s, tc.connections)
			conn := hold(t, s)
			if tc.connections > 1 {
				other := hold(t, s) // as if a call used it
				defer s.pool.put(other)
			}
			id, err := conn.ClientID(t.Context()).Result()
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "ID", id).Err(); err != nil {
				t.Fatal(err)
			}
			redistest.WaitFor(t, 5*time.Second, func() error {
				if n := p.Open(); n >= tc.connections {
					return errors.New("the connection is still open")
				}
				return nil
			})
			time.Sleep(5 * idleFor)
			tc.fault(p)
			s.pool.put(conn)
			c, done := callOf(upTo(10)), make(chan error, 1)
			c.Done = func(err error) { done <- err }
			s.Submit(c)
			select {
			case err := <-done:
				if !NotRun(err) {
					t.Errorf("error %v, want one that says that nothing was run", err)
				}
			case <-time.After(5 * time.Second):
				t.Error("Done was not called")
			}
			if got := stored(t, server, "rl:{k}"); got != 0 {
				t.Errorf("counted %d", got)
			}
			_ = r
		})
	}
}
