package limiter

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// newQueued returns a store with one connection, and its server. It does not
// remember denials: all requests are asked for.
func newQueued(t testing.TB, server *redistest.Server, change func(*RedisOptions)) (*Redis, *server) {
	t.Helper()
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.PoolSize = 1
		if change != nil {
			change(opt)
		}
	})
	forgetDenials(r)
	return r, r.servers.(*single).server
}

// forgetDenials lets so much time pass between any two requests that nothing is
// remembered.
func forgetDenials(r *Redis) {
	var now atomic.Int64
	r.clock = func() time.Duration { return time.Duration(now.Add(int64(time.Hour))) }
}

// hold takes the connection of a server that has one, so that requests must wait
// until it is put back.
func hold(t testing.TB, s *server) *connection {
	t.Helper()
	var conn *connection
	waitFor(t, 5*time.Second, func() error {
		if conn = s.idle(); conn == nil {
			s.connect(false)
			return errors.New("no connection")
		}
		return nil
	})
	return conn
}

// waitingAt returns how many requests wait for a server.
func waitingAt(s *server) int {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return len(s.queue.waiting)
}

// atRest waits until nothing is on its way to a server, and nobody sees to it.
func atRest(t testing.TB, s *server) {
	t.Helper()
	waitFor(t, 5*time.Second, func() error {
		s.queue.mu.Lock()
		defer s.queue.mu.Unlock()
		if q := &s.queue; q.alone > 0 || q.senders > 0 || q.impatient || len(s.ready) != int(s.held.Load()) {
			return fmt.Errorf("%d alone, %d senders, impatient %t, %d of %d connections lie idle",
				q.alone, q.senders, q.impatient, len(s.ready), s.held.Load())
		}
		return nil
	})
}

// gather has n requests wait for a server that has one connection, does what is
// to be done meanwhile, lets them go, and returns when all are done.
func gather(t testing.TB, s *server, n int, take func(i int), meanwhile ...func()) {
	t.Helper()
	conn := hold(t, s)
	var all sync.WaitGroup
	defer all.Wait()
	defer func() { s.ready <- conn }()
	for i := range n {
		all.Go(func() { take(i) })
	}
	waitFor(t, 4*time.Second, func() error {
		if waiting := waitingAt(s); waiting < n {
			return fmt.Errorf("%d of %d requests wait", waiting, n)
		}
		return nil
	})
	for _, do := range meanwhile {
		do()
	}
}

// recorded is take.lua, which besides notes down how many buckets each call
// carries.
var recorded = newScript("redis.call('RPUSH', 'carried', #KEYS)\n" + takeSource)

// carried returns how many buckets the calls have carried, in their order.
func carried(t testing.TB, server *redistest.Server) []int {
	t.Helper()
	var buckets []int
	if err := server.Client().LRange(t.Context(), "carried", 0, -1).ScanSlice(&buckets); err != nil {
		t.Fatal(err)
	}
	return buckets
}

// TestQueueExact tests that requests which travel together are decided one after
// the other: many in one call on one bucket admit its size, to the unit, and
// charge the others as the accounting says.
func TestQueueExact(t *testing.T) {
	const requests, size = 100, 30
	server := redistest.Start(t)
	for _, tc := range []struct {
		name       string
		accounting Accounting
		drip, cost int64
		keys       int
		other      int64 // the size of another bucket, if there is one
		held       int64 // units in the other bucket
	}{
		{name: "one bucket", drip: 1, cost: 1, keys: 1},
		{name: "one bucket with slack", drip: 7, cost: 3, keys: 1},
		{name: "several keys", drip: 1, cost: 1, keys: 3},
		{name: "atomic", drip: 1, cost: 1, keys: 1, other: 1000, held: size},
		{name: "atomic, other is full first", drip: 1, cost: 1, keys: 1, other: 20, held: 20},
		{name: "each", accounting: Each, drip: 1, cost: 1, keys: 1, other: 1000, held: requests},
		{name: "each with slack", accounting: Each, drip: 4, cost: 3, keys: 2, other: 1000, held: requests / 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := server.Client().FlushDB(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			r, s := newQueued(t, server, nil)
			r.script = recorded
			request := func(i int) Request {
				b := Bucket{Name: "b", Key: fmt.Sprint(i % tc.keys), Limit: Limit{size, time.Hour, tc.drip}, Cost: tc.cost}
				req := Request{Buckets: []Bucket{b}, Accounting: tc.accounting}
				if tc.other > 0 {
					b.Name, b.Limit, b.Cost = "other", Limit{tc.other, time.Hour, 1}, 1
					req.Buckets = append(req.Buckets, b)
				}
				return req
			}
			admitted := make([]atomic.Int64, tc.keys)
			gather(t, s, requests, func(i int) {
				d, err := r.Take(t.Context(), request(i), nil)
				if err != nil {
					t.Error(err)
				} else if !Summarize(d).Denied {
					admitted[i%tc.keys].Add(1)
				}
			})
			want := int64(size) / tc.cost
			if tc.other > 0 {
				want = min(want, tc.other)
			}
			for key := range tc.keys {
				if got := admitted[key].Load(); got != want {
					t.Errorf("key %d: admitted %d, want %d", key, got, want)
				}
				req := request(key)
				if got := storedUnits(t, r, server, req.Buckets[0]); got != want*tc.cost {
					t.Errorf("key %d: %d units, want %d", key, got, want*tc.cost)
				}
				if tc.other > 0 {
					if got := storedUnits(t, r, server, req.Buckets[1]); got != tc.held {
						t.Errorf("key %d: the other bucket holds %d, want %d", key, got, tc.held)
					}
				}
			}
			if got := carried(t, server); len(got) > 1+requests*2/fullCall {
				t.Errorf("calls with %d buckets", got)
			}
		})
	}
}

// TestQueueOwnAnswers tests that of those who travel together each gets its own
// answer. Whose one is shows in the time to clear: each has a bucket with a drip
// rate of its own.
func TestQueueOwnAnswers(t *testing.T) {
	const callers, rounds = 60, 5
	r, s := newQueued(t, redistest.Start(t), nil)
	for n := range int64(rounds) {
		gather(t, s, callers, func(i int) { takeOwn(t, r, i, n+1, n+1) })
	}
}

// takeOwn takes a request of caller i, whose bucket then holds no fewer and no
// more units than told.
func takeOwn(t testing.TB, r *Redis, i int, least, most int64) {
	rate := time.Duration(i+1) * time.Hour
	req := Request{}
	for n := range 1 + i%3 {
		req.Buckets = append(req.Buckets, Bucket{
			Name: fmt.Sprint("own", n), Key: fmt.Sprint(i), Limit: Limit{1000 + int64(i), rate, 1}, Cost: int64(1 + n),
		})
	}
	d, err := r.Take(context.Background(), req, nil)
	if err != nil || len(d) != len(req.Buckets) {
		t.Errorf("caller %d: decided %+v, error %v", i, d, err)
		return
	}
	for n, d := range d {
		held := d.Size - d.Remaining
		late := time.Duration(held)*rate - d.Clear // since it was charged first
		if cost := int64(1 + n); held < least*cost || held > most*cost || late < 0 || late > 10*time.Minute {
			t.Errorf("caller %d, bucket %d: decided %+v, want %d to %d units", i, n, d, least*cost, most*cost)
		}
	}
}

// TestQueueFewCalls tests what all is done for: many callers need far fewer calls
// than they make requests, though nobody holds a connection back.
func TestQueueFewCalls(t *testing.T) {
	t.Parallel()
	const callers, rounds, size = 64, 8, 200
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Addresses, opt.PoolSize = []string{p.Addr}, 4 })
	b := hourly(size)
	s.ready <- hold(t, s)
	p.Delay(20 * time.Millisecond)
	var admitted atomic.Int64
	c := calls{server: server}
	c.since(t, "evalsha")
	together(t, callers, func(int) {
		for range rounds {
			d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
			if err != nil {
				t.Error(err)
			} else if !d[0].Denied {
				admitted.Add(1)
			}
		}
	})
	if got := c.since(t, "evalsha"); got > callers*rounds/4 {
		t.Errorf("%d calls for %d requests", got, callers*rounds)
	}
	if got := admitted.Load(); got != size {
		t.Errorf("admitted %d, want %d", got, size)
	}
	if got := p.Connections(); got > 4 {
		t.Errorf("%d connections, may be 4", got)
	}
}

// TestQueueLoneRequest guards what a request costs that need not wait: a call of
// its own, and neither a goroutine nor a timer nor a channel.
func TestQueueLoneRequest(t *testing.T) {
	const requests = 1000
	server := redistest.Start(t)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.PoolSize = 2 })
	req := Request{Buckets: []Bucket{hourly(100_000)}}
	mustTake(t, r, req)
	s.connect(false)
	waitFor(t, 5*time.Second, func() error {
		if n := len(s.ready); n < 2 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	created := func() uint64 {
		sample := []metrics.Sample{{Name: "/sched/goroutines-created:goroutines"}}
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	c := calls{server: server}
	c.since(t, "evalsha")
	before := created()
	for range requests {
		mustTake(t, r, req)
	}
	if got := created() - before; got > requests/10 { // the runtime has some of its own
		t.Errorf("%d goroutines for %d requests", got, requests)
	}
	c.check(t, "evalsha", requests)

	used := r.keys.question(r.script, req, nil)
	q := &question{script: used.script, keys: used.keys, group: used.group}
	if _, err := s.take(deadline{Context: t.Context(), at: time.Now().Add(time.Minute)}, q); err != nil {
		t.Error(err)
	}
	if q.done != nil || q.timer != nil {
		t.Error("it was about to wait")
	}
}

// TestQueueCallsAtOnce tests how many calls are under way to a server that does
// not answer: some requests by themselves, those of senders for all others, and
// one more each time that somebody has lost patience.
func TestQueueCallsAtOnce(t *testing.T) {
	t.Parallel()
	const callers, size = 150, 100
	server := redistest.Start(t)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.PoolSize = size })
	mustTake(t, r, Request{Buckets: []Bucket{numbered(0)}})
	connectAll(t, s, size)
	server.Pause(t)
	var asked atomic.Int64
	clock := r.clock
	r.clock = func() time.Duration {
		asked.Add(1)
		return clock()
	}
	began := time.Now()
	var all sync.WaitGroup
	defer all.Wait()
	defer server.Resume(t)
	for i := range callers {
		all.Go(func() {
			if _, err := r.Take(context.Background(), Request{Buckets: []Bucket{numbered(int64(i + 1))}}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	apart, sending := 0, 0
	waitFor(t, 4*time.Second, func() error {
		s.queue.mu.Lock()
		defer s.queue.mu.Unlock()
		if apart, sending = s.queue.alone, s.queue.senders; apart < alone || asked.Load() < 2*callers || len(s.queue.waiting) > 0 {
			return fmt.Errorf("%d under way by themselves, %d wait", apart, len(s.queue.waiting))
		}
		return nil
	})
	underWay, impatient := size-len(s.ready), int(time.Since(began)/patience)+1
	server.Resume(t)
	all.Wait()
	if apart > alone || sending > senders || underWay > apart+sending+impatient {
		t.Errorf("%d calls under way, %d of them by themselves and %d of senders; may be %d more",
			underWay, apart, sending, impatient)
	}
	checkCharged(t, r, callers, 0)
}

// TestQueueCrowd tests when a second call is made beside another: a few gain more
// by waiting for the next.
func TestQueueCrowd(t *testing.T) {
	server := redistest.Start(t)
	r, s := newQueued(t, server, nil)
	mustTake(t, r, Request{Buckets: []Bucket{numbered(0)}})
	for _, tc := range []struct{ waiting, senders int }{
		{1, 1}, {crowd, 1}, {crowd + 1, 2}, {2*crowd + 1, 2}, {5 * crowd, 2},
	} {
		got := 0
		gather(t, s, tc.waiting, func(i int) { takeOwn(t, r, i, 1, 100) }, func() {
			s.queue.mu.Lock()
			defer s.queue.mu.Unlock()
			got = s.queue.senders
		})
		if got != tc.senders {
			t.Errorf("%d wait: %d senders, want %d", tc.waiting, got, tc.senders)
		}
	}
}

// TestQueueAfterCrowd tests that no request goes by itself after a call that
// carried a crowd, for others will be about to ask too; and that the next one does
// if none came.
func TestQueueAfterCrowd(t *testing.T) {
	server := redistest.Start(t)
	r, s := newQueued(t, server, nil)
	mustTake(t, r, Request{Buckets: []Bucket{numbered(0)}})
	alone := func() bool {
		t.Helper()
		atRest(t, s)
		q := r.keys.question(r.script, Request{Buckets: []Bucket{numbered(1)}}, nil)
		conn := s.pass(q)
		if conn == nil {
			<-q.done
			return false
		}
		s.put(conn)
		s.queue.mu.Lock()
		s.queue.alone--
		s.queue.mu.Unlock()
		return true
	}
	for _, tc := range []struct {
		carried int
		alone   bool
	}{
		{1, true}, {crowd - 1, true}, {crowd, false}, {crowd + 1, false}, {5 * crowd, false}, {1, true},
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

// TestQueueSenderWaits tests that a sender which finds all connections in use for
// too long reports nothing: there may be nobody left that it waits for, and those
// who wait report for themselves.
func TestQueueSenderWaits(t *testing.T) {
	var seen events
	r, s := newQueued(t, redistest.Start(t), func(opt *RedisOptions) { opt.Report = seen.report })
	mustTake(t, r, Request{Buckets: []Bucket{hourly(10)}})
	conn := hold(t, s)
	s.timeout = 20 * time.Millisecond
	if _, err := s.connection(); !errors.Is(err, errNoConnection) {
		t.Errorf("error %v, want %v", err, errNoConnection)
	}
	s.put(conn)
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestQueueConnections tests that those who wait make no more connections than
// there may be, however long they wait.
func TestQueueConnections(t *testing.T) {
	t.Parallel()
	const size, callers = 3, 60
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Addresses, opt.PoolSize = []string{p.Addr}, size })
	p.Delay(10*time.Millisecond, 10*time.Millisecond)
	var most atomic.Int32
	together(t, callers, func(i int) {
		for n := range int64(5) {
			takeOwn(t, r, i, n+1, n+1)
			most.Store(max(most.Load(), s.held.Load()))
		}
	})
	if got, taken := most.Load(), p.Connections(); got != size || taken > size {
		t.Errorf("%d connections at a time, %d made, may be %d", got, taken, size)
	}
}

// TestQueueFullCall tests how much a call carries: what has come first, up to so
// many buckets. A request that has more goes by itself, in its turn.
func TestQueueFullCall(t *testing.T) {
	server := redistest.Start(t)
	for _, tc := range []struct {
		name     string
		requests []int // how many buckets each has, in the order in which they come
		want     []int // how many each call carries
	}{
		{"all", slices.Repeat([]int{1}, fullCall), []int{fullCall}},
		{"one too many", slices.Repeat([]int{1}, fullCall+1), []int{fullCall, 1}},
		{"never a part", slices.Repeat([]int{fullCall/2 - 1}, 5), []int{fullCall - 2, fullCall - 2, fullCall/2 - 1}},
		{"exactly", []int{fullCall - 2, 2, fullCall, 1}, []int{fullCall, fullCall, 1}},
		{"more", []int{1, 2, fullCall + 44, 3, 4}, []int{3, fullCall + 44, 7}},
		{"more at first", []int{fullCall + 44, fullCall + 1, 1}, []int{fullCall + 44, fullCall + 1, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := server.Client().FlushDB(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			r, s := newQueued(t, server, nil)
			r.script = recorded
			conn := hold(t, s)
			var all sync.WaitGroup
			defer all.Wait()
			for i, n := range tc.requests {
				req := Request{}
				for j := range n {
					b := hourly(int64(1 + i))
					b.Key = fmt.Sprint(i, j)
					req.Buckets = append(req.Buckets, b)
				}
				all.Go(func() {
					d, err := r.Take(t.Context(), req, nil)
					if err != nil {
						t.Error(err)
						return
					}
					for _, d := range d {
						if d.Denied || d.Size != int64(1+i) || d.Remaining != int64(i) {
							t.Errorf("request %d: decided %+v", i, d)
						}
					}
				})
				for deadline := time.Now().Add(4 * time.Second); waitingAt(s) <= i; runtime.Gosched() {
					if time.Now().After(deadline) {
						t.Fatalf("request %d does not wait", i)
					}
				}
			}
			s.ready <- conn
			all.Wait()
			if got := carried(t, server); !slices.Equal(got, tc.want) {
				t.Errorf("calls with %d buckets, want %d", got, tc.want)
			}
		})
	}
}

// TestQueueFailedCall tests calls of many requests that fail: each of the
// requests fails, once and for the same reason, and none is sent again; the call
// counts as one failure, and only several in a row as an outage.
func TestQueueFailedCall(t *testing.T) {
	t.Parallel()
	const requests = 30
	reply := func(reply string) func(*testing.T, *Redis, *redistest.Server, *redistest.Proxy) {
		return func(_ *testing.T, r *Redis, _ *redistest.Server, _ *redistest.Proxy) {
			r.script = newScript("return redis.error_reply('" + reply + "')")
		}
	}
	for _, tc := range []struct {
		name, reason string
		begin        func(*testing.T, *Redis, *redistest.Server, *redistest.Proxy)
		ran          int64 // units that the requests of one call charge each
	}{
		{"reply lost", "closed", func(_ *testing.T, _ *Redis, _ *redistest.Server, p *redistest.Proxy) {
			p.CutReplies("evalsha")
		}, 1},
		{"reply cut", "closed", func(_ *testing.T, _ *Redis, _ *redistest.Server, p *redistest.Proxy) {
			p.HalfReply(20, "evalsha")
		}, 1},
		{"out of memory", "oom", func(t *testing.T, _ *Redis, s *redistest.Server, _ *redistest.Proxy) {
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
			if err := server.Client().ScriptLoad(t.Context(), takeSource).Err(); err != nil {
				t.Fatal(err)
			}
			p := redistest.StartProxy(t, server.Addr)
			var seen events
			r, s := newQueued(t, server, func(opt *RedisOptions) {
				opt.Addresses, opt.Report = []string{p.Addr}, seen.report
			})
			mustTake(t, r, Request{Buckets: []Bucket{hourly(100)}})
			tc.begin(t, r, server, p)
			for n := range lostAfter {
				if got, want := int(guardOf(r).failures.Load()), n; got != want {
					t.Errorf("%d failures by %d calls", got, want)
				}
				if got := seen.take(); len(got) > 0 {
					t.Errorf("reported %q after %d calls", got, n)
				}
				gather(t, s, requests, func(i int) {
					d, err := r.Take(context.Background(), Request{Buckets: []Bucket{numbered(int64(n*requests + i + 1))}}, nil)
					if len(d) > 0 {
						t.Errorf("decided %+v", d)
					}
					checkError(t, err, p.Addr)
					if f := failureOf(t, err); f.reason != tc.reason {
						t.Errorf("reason %q, want %q: %v", f.reason, tc.reason, err)
					}
				})
			}
			if got, want := seen.take(), []string{"lost " + tc.reason}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			direct := newTestRedis(t, server, nil)
			for n := range int64(lostAfter * requests) {
				b := numbered(n + 1)
				if got := storedUnits(t, direct, server, b); got != tc.ran {
					t.Fatalf("request %d charged %d, want %d", n, got, tc.ran)
				}
			}
		})
	}
}

// TestQueueWrongReplies tests a server that answers a call of many requests with
// more or fewer numbers than they have asked for: whose they are nobody knows,
// and none of the requests is decided by them. That is no outage.
func TestQueueWrongReplies(t *testing.T) {
	const requests = 30
	server := redistest.Start(t)
	for _, script := range []string{
		"return {}",
		"return {1, 0}",
		"local r = {} for i = 1, 2 * #KEYS - 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, 2 * #KEYS - 2 do r[i] = 0 end return r",
		"local r = {} for i = 1, 2 * #KEYS + 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, 2 * #KEYS + 2 do r[i] = 0 end return r",
	} {
		t.Run(script, func(t *testing.T) {
			var seen events
			r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
			r.script = newScript(script)
			gather(t, s, requests, func(i int) {
				d, err := r.Take(context.Background(), Request{Buckets: []Bucket{numbered(int64(i))}}, nil)
				if len(d) > 0 {
					t.Errorf("decided %+v", d)
				}
				checkError(t, err, server.Addr)
				if f := failureOf(t, err); f.reason != "corrupt" {
					t.Errorf("reason %q: %v", f.reason, err)
				}
			})
			if got, want := seen.take(), []string{"lapse corrupt"}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			r.script = takeScript
			gather(t, s, requests, func(i int) { takeOwn(t, r, i, 1, 1<<20) })
		})
	}
}

// TestQueueScriptFlushed tests that a server which forgets the script while
// requests wait disturbs none of them, and that none is charged twice.
func TestQueueScriptFlushed(t *testing.T) {
	server := redistest.Start(t)
	r, s := newQueued(t, server, nil)
	c := calls{server: server}
	for n := range int64(3) {
		gather(t, s, 50, func(i int) { takeOwn(t, r, i, n+1, n+1) }, func() {
			if err := server.Client().ScriptFlush(t.Context()).Err(); err != nil {
				t.Error(err)
			}
		})
		c.check(t, "evalsha", 1)
		c.check(t, "eval", 1)
	}
}

// TestQueueGivesUp tests requests for which no connection gets free in half of
// their time, neither to those who make calls nor because these all are about it:
// they are not charged later, and the server is not blamed.
func TestQueueGivesUp(t *testing.T) {
	t.Parallel()
	const requests, timeout = 20, 100 * time.Millisecond
	for _, making := range []int{0, senders} {
		t.Run(fmt.Sprintf("%d calls", making), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			var seen events
			r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
			mustTake(t, r, Request{Buckets: []Bucket{hourly(100)}})
			conn := hold(t, s)
			calling := func(n int) {
				s.queue.mu.Lock()
				defer s.queue.mu.Unlock()
				s.queue.senders += n
			}
			calling(making)
			r.timeout, s.timeout = timeout, timeout
			together(t, requests, func(i int) {
				began := time.Now()
				_, err := r.Take(context.Background(), Request{Buckets: []Bucket{numbered(int64(i + 1))}}, nil)
				if took := time.Since(began); err == nil || took < timeout/2-time.Millisecond {
					t.Errorf("gave up after %v, error %v", took, err)
					return
				}
				if f := failureOf(t, err); f.reason != "pool" {
					t.Errorf("reason %q: %v", f.reason, err)
				}
			})
			if n := waitingAt(s); n > 0 {
				t.Errorf("%d requests still wait", n)
			}
			waitFor(t, 5*time.Second, func() error {
				s.queue.mu.Lock()
				defer s.queue.mu.Unlock()
				if s.queue.senders > making || s.queue.impatient {
					return errors.New("somebody still calls for them")
				}
				return nil
			})
			calling(-making)
			r.timeout, s.timeout = 10*time.Second, 10*time.Second
			s.ready <- conn
			gather(t, s, requests, func(i int) { takeOwn(t, r, i, 1, 1) })
			for n := range int64(requests) {
				b := numbered(n + 1)
				if got := storedUnits(t, r, server, b); got != 0 {
					t.Errorf("request %d was charged %d after it had given up", n, got)
				}
			}
			if got, want := seen.take(), []string{"lapse pool"}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
		})
	}
}

// TestQueueLateAnswers tests requests that end while they are on their way: they
// return in time. When their answers come at last, which costs no connection and
// is no failure, none of those that wait by then takes them for its own.
func TestQueueLateAnswers(t *testing.T) {
	t.Parallel()
	const requests, timeout = 40, 3 * time.Second
	server := redistest.Start(t)
	var seen events
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Timeout, opt.Report = timeout, seen.report })
	mustTake(t, r, Request{Buckets: []Bucket{hourly(100)}})
	received := infoNumber(t, server, "stats", "total_connections_received")
	gather(t, s, requests, func(i int) {
		began := time.Now()
		_, err := r.Take(context.Background(), Request{Buckets: []Bucket{numbered(int64(i + 1))}}, nil)
		if took := time.Since(began); err == nil || took < timeout-time.Millisecond {
			t.Errorf("returned after %v, error %v", took, err)
			return
		}
		if f := failureOf(t, err); f.reason != "pool" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	}, func() {
		time.Sleep(timeout / 3) // so much longer may the call take
		server.Pause(t)
	})
	var later sync.WaitGroup
	for i := range requests {
		later.Go(func() { takeOwn(t, r, i, 1, 1) })
	}
	waitFor(t, timeout/4, func() error {
		if n := waitingAt(s); n < requests {
			return fmt.Errorf("%d requests wait", n)
		}
		return nil
	})
	server.Resume(t)
	later.Wait()
	checkCharged(t, r, requests, 0)
	if made := infoNumber(t, server, "stats", "total_connections_received") - received; made > 0 {
		t.Errorf("%d connections made", made)
	}
	if got, want := seen.take(), []string{"lapse pool"}; !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// TestQueueLost tests requests that wait when the server is found to be lost:
// they fail at once and for that reason, for nothing will come of waiting.
func TestQueueLost(t *testing.T) {
	t.Parallel()
	const size, timeout = alone + senders + 2, 2 * time.Second
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	var seen events
	r, s := newQueued(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.Timeout = []string{p.Addr}, timeout
		opt.PoolSize, opt.Report = size, seen.report
	})
	connectAll(t, s, size)
	p.BlackHole()
	take := func() *failure {
		_, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(100)}}, nil)
		return failureOf(t, err)
	}
	var all sync.WaitGroup
	for range 10 * size {
		all.Go(func() { take() })
		time.Sleep(patience) // until all connections are in use
	}
	time.Sleep(timeout * 7 / 10)
	for range 20 {
		all.Go(func() {
			if f := take(); f.reason != "timeout" {
				t.Errorf("reason %q, want that of the server's being lost: %v", f.reason, f)
			}
		})
	}
	all.Wait()
	if got := seen.take(); !slices.Contains(got, "lost timeout") {
		t.Errorf("reported %q", got)
	}
}

// TestQueueClose tests that closing a store ends the requests that wait, without
// a word to the operator.
func TestQueueClose(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var seen events
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
	var closed time.Time
	gather(t, s, 30, func(int) {
		_, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(100)}}, nil)
		checkError(t, err, server.Addr)
		if f := failureOf(t, err); f.reason != "unused" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	}, func() {
		closed = time.Now()
		r.Close()
		waitFor(t, 4*time.Second, func() error {
			if n := waitingAt(s); n > 0 {
				return fmt.Errorf("%d requests wait", n)
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

// TestQueueLeavesNothing tests that nothing goes on once nobody asks, and that
// nothing is left of a closed store.
func TestQueueLeavesNothing(t *testing.T) {
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	clients(t, server)
	before := runtime.NumGoroutine()
	for range 5 {
		r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Addresses, opt.PoolSize = []string{p.Addr}, 20 })
		mustTake(t, r, Request{Buckets: []Bucket{hourly(100)}})
		p.Delay(5 * time.Millisecond)
		together(t, 100, func(i int) { takeOwn(t, r, i, 1, 1<<20) })
		atRest(t, s)
		p.Pass()
		r.Close()
	}
	waitFor(t, 10*time.Second, func() error {
		if n := runtime.NumGoroutine(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
}

// TestQueueFarAway tests a server that is so far away that the way there and back
// takes more than half of a request's time, at once and all the time: nobody
// waits for those who went before to come back. All is five times as slow here
// as with the timeout by default and a server 30 ms away.
func TestQueueFarAway(t *testing.T) {
	t.Parallel()
	const times = 5
	const delay, timeout, size = times * 30 * time.Millisecond, times * 50 * time.Millisecond, times * 20
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Addresses, opt.PoolSize = []string{p.Addr}, size })
	b := hourly(100_000)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	connectAll(t, s, size)
	p.Delay(delay)
	r.timeout, s.timeout = timeout, timeout

	const burst, steady = 100, 1000
	var decided atomic.Int64
	take := func() {
		if _, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err == nil {
			decided.Add(1)
		}
	}
	together(t, burst, func(int) { take() })
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

// atNode returns the store's server for a node of a cluster.
func atNode(r *Redis, node *redistest.Server) *server { return r.servers.(*cluster).at(node.Addr) }

// onSlots returns buckets like b with keys of their own that lie in so many
// slots of a node.
func onSlots(t testing.TB, r *Redis, nodes *redistest.Cluster, node *redistest.Server, n int, b Bucket) []Bucket {
	t.Helper()
	var buckets []Bucket
	used := map[int]bool{}
	for i := 0; len(buckets) < n; i++ {
		b.Key = fmt.Sprint(t.Name(), i)
		if slot := nodes.Slot(t, r.keys.of(&b)); !used[slot] && nodes.Owner(t, slot) == node {
			used[slot] = true
			buckets = append(buckets, b)
		}
	}
	return buckets
}

// TestQueueCluster tests requests that travel together to a server of a cluster:
// in one go for all of its slots, with one call for each. What is true of some of
// these calls and not of others disturbs nobody else.
func TestQueueCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	from, to := nodes.Nodes[0], nodes.Nodes[1]
	var seen events
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.PoolSize, opt.Report = 1, seen.report })
	forgetDenials(r)
	for _, node := range nodes.Nodes {
		b := onNode(t, r, nodes, node, hourly(100))
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	s := atNode(r, from)
	// take takes a request and counts it if it is admitted.
	take := func(t *testing.T, b Bucket, admitted *atomic.Int64) {
		if d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err != nil {
			t.Error(err)
		} else if !d[0].Denied {
			admitted.Add(1)
		}
	}
	// check checks that b has admitted what it should, which lies on a node.
	check := func(t *testing.T, b Bucket, node *redistest.Server, admitted *atomic.Int64, want int64) {
		t.Helper()
		if got := admitted.Load(); got != want {
			t.Errorf("%s of key %s: admitted %d, want %d", b.Name, b.Key, got, want)
		}
		if got := storedUnits(t, r, node, b); got != want {
			t.Errorf("%s of key %s: %d units, want %d", b.Name, b.Key, got, want)
		}
	}

	for _, flushed := range []bool{false, true} {
		t.Run(fmt.Sprintf("many slots, flushed=%t", flushed), func(t *testing.T) {
			const keys, each = 40, 5
			buckets := onSlots(t, r, nodes, from, keys, hourly(each-1))
			admitted := make([]atomic.Int64, keys)
			c := calls{server: from}
			c.since(t, "evalsha")
			c.since(t, "eval")
			reads := infoNumber(t, from, "stats", "total_reads_processed")
			gather(t, s, keys*each, func(i int) { take(t, buckets[i%keys], &admitted[i%keys]) }, func() {
				if flushed {
					if err := from.Client().ScriptFlush(t.Context()).Err(); err != nil {
						t.Error(err)
					}
				}
			})
			// A pipeline is read in pieces, and the test and the other node ask too.
			if got := infoNumber(t, from, "stats", "total_reads_processed") - reads; got > keys {
				t.Errorf("%d reads for the calls of %d slots", got, keys)
			}
			if flushed {
				c.check(t, "evalsha", 2*keys-1)
				c.check(t, "eval", 1)
			} else {
				c.check(t, "evalsha", keys)
				c.check(t, "eval", 0)
			}
			for i, b := range buckets {
				check(t, b, from, &admitted[i], each-1)
			}
		})
	}

	t.Run("slot moves", func(t *testing.T) {
		const each = 20
		buckets := onSlots(t, r, nodes, from, 3, hourly(100))
		moving, fresh, alsoFresh := buckets[0], buckets[0], buckets[1]
		fresh.Name = "fresh"
		one, other := nodes.Slot(t, r.keys.of(&moving)), nodes.Slot(t, r.keys.of(&alsoFresh))
		mustTake(t, r, Request{Buckets: []Bucket{moving}})
		nodes.BeginMove(t, one, to)
		nodes.BeginMove(t, other, to)

		// Of one slot some buckets are here and others nowhere yet: TRYAGAIN. Of
		// another all are nowhere yet: ASK. A third stays.
		all := []Bucket{moving, fresh, alsoFresh, buckets[2]}
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

// TestQueueOwed tests requests that travel together to a server which is back
// after an outage: what it is told of the time in between counts once.
func TestQueueOwed(t *testing.T) {
	t.Parallel()
	const before, requests = 30, 20
	server := redistest.Start(t)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory(nil) })
	b, other := hourly(100), hourly(100_000)
	other.Name = "other"
	server.Kill()
	for range before {
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	server.Restart(t)
	waitFor(t, 5*time.Second, func() error {
		mustTake(t, r, Request{Buckets: []Bucket{other}})
		if guardOf(r).isLost() {
			return errors.New("still lost")
		}
		return nil
	})
	gather(t, s, requests, func(int) {
		if d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err != nil || d[0].Denied {
			t.Errorf("decided %+v, error %v", d, err)
		}
	})
	if got := storedUnits(t, r, server, b); got != before+requests {
		t.Errorf("%d units, want %d", got, before+requests)
	}
}

// TestQueueMoved tests slots that have moved while requests wait for the server
// that had them: these are sent on, wait for the other server together, and are
// charged there once.
func TestQueueMoved(t *testing.T) {
	t.Parallel()
	const each = 20
	nodes := redistest.StartCluster(t, 2)
	from, to := nodes.Nodes[0], nodes.Nodes[1]
	var seen events
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.PoolSize, opt.Timeout, opt.Report = 1, time.Minute, seen.report })
	forgetDenials(r)
	buckets := onSlots(t, r, nodes, from, 3, hourly(100))
	for _, b := range append(buckets, onNode(t, r, nodes, to, hourly(100))) {
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	first, second := hold(t, atNode(r, from)), hold(t, atNode(r, to))
	waitAt := func(node *redistest.Server, n int) {
		t.Helper()
		waitFor(t, 4*time.Second, func() error {
			if waiting := waitingAt(atNode(r, node)); waiting != n {
				return fmt.Errorf("%d requests wait, want %d", waiting, n)
			}
			return nil
		})
	}
	var all sync.WaitGroup
	for i := range len(buckets) * each {
		all.Go(func() {
			d, err := r.Take(context.Background(), Request{Buckets: buckets[i%len(buckets) : i%len(buckets)+1]}, nil)
			if err != nil || d[0].Denied {
				t.Errorf("decided %+v, error %v", d, err)
			}
		})
	}
	waitAt(from, len(buckets)*each)
	for _, b := range buckets[:2] {
		nodes.MoveSlot(t, nodes.Slot(t, r.keys.of(&b)), to)
	}
	atNode(r, from).ready <- first
	waitAt(to, 2*each)
	atNode(r, to).ready <- second
	all.Wait()
	for i, node := range []*redistest.Server{to, to, from} {
		if got := storedUnits(t, r, node, buckets[i]); got != each+1 {
			t.Errorf("bucket %d holds %d units after %d requests", i, got, each+1)
		}
	}
	if got := seen.take(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestQueueBrokenConnection tests requests that wait for a connection which then
// breaks: another one is made for them, at once, and they are decided.
func TestQueueBrokenConnection(t *testing.T) {
	t.Parallel()
	const requests = 50
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Addresses = []string{p.Addr} })
	mustTake(t, r, Request{Buckets: []Bucket{hourly(100)}})
	p.BlackHole()
	var all sync.WaitGroup
	all.Go(func() { // which is under way when the connection breaks
		_, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(100)}}, nil)
		checkError(t, err, p.Addr)
	})
	waitFor(t, 5*time.Second, func() error {
		if len(s.ready) > 0 {
			return errors.New("not under way")
		}
		return nil
	})
	for i := range requests {
		all.Go(func() { takeOwn(t, r, i, 1, 1) })
	}
	waitFor(t, 4*time.Second, func() error {
		if n := waitingAt(s); n < requests {
			return fmt.Errorf("%d requests wait", n)
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

// TestQueueOwnTime tests that each request has half of its time to wait for a
// connection: one that comes late does not give up with those who came first.
func TestQueueOwnTime(t *testing.T) {
	t.Parallel()
	const timeout = 2 * time.Second
	server := redistest.Start(t)
	r, s := newQueued(t, server, func(opt *RedisOptions) { opt.Timeout = timeout })
	mustTake(t, r, Request{Buckets: []Bucket{hourly(100)}})
	conn := hold(t, s)
	var all sync.WaitGroup
	all.Go(func() {
		_, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(100)}}, nil)
		checkError(t, err, server.Addr)
	})
	time.Sleep(timeout * 7 / 20)
	all.Go(func() { takeOwn(t, r, 1, 1, 1) })
	time.Sleep(timeout * 5 / 20)
	s.ready <- conn
	all.Wait()
}
