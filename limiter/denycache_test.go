package limiter

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// newClocked returns a store whose deny cache uses a stopped clock
// unless the test moves it.
func newClocked(t testing.TB, server *redistest.Server, change func(*RedisOptions)) (r *Redis, clock *atomic.Int64) {
	t.Helper()
	r, clock = newTestRedis(t, server, change), new(atomic.Int64)
	r.clock = func() time.Duration { return time.Duration(clock.Load()) }
	return r, clock
}

// remembered reports whether req would be denied without a call.
func remembered(r *Redis, req Request) bool {
	_, ok := r.denyCache.decide(req, r.clock().Microseconds(), nil)
	return ok
}

// TestDenyCacheAbsorbsFlood guards what the deny cache is for: of a flood on a
// full bucket, only an occasional request reaches the server.
func TestDenyCacheAbsorbsFlood(t *testing.T) {
	const size, requests = 5, 10_000
	server := redistest.Start(t)
	for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
		t.Run(accounting.String(), func(t *testing.T) {
			r, clock := newClocked(t, server, nil)
			b := hourly(size)
			b.Key = t.Name()
			req := Request{Buckets: []Bucket{b}, Accounting: accounting}
			mustTake(t, r, req)
			c := redistest.CommandCounter{Server: server}
			c.Since(t, "evalsha")
			for n := range requests {
				if d := mustTake(t, r, req); d[0].Denied != (n >= size-1) {
					t.Fatalf("request %d: decided %+v", n, d)
				}
			}
			// The answer to the request that fills the bucket shows that it is
			// full.
			c.Check(t, "evalsha", size-1)
			clock.Add(int64(cacheFor * time.Microsecond))
			for range requests {
				mustTake(t, r, req)
			}
			c.Check(t, "evalsha", 1)
		})
	}
}

// TestDenyCacheExpires guards how long a denial is cached: until the bucket drips,
// but at most a second, after which unforeseeable changes take effect, such as an
// operator deleting the key.
func TestDenyCacheExpires(t *testing.T) {
	server := redistest.Start(t)
	for _, tc := range []struct {
		drip, want time.Duration
	}{
		{time.Hour, time.Second},
		{time.Minute, time.Second},
		{999 * time.Millisecond, 999 * time.Millisecond},
	} {
		t.Run(tc.drip.String(), func(t *testing.T) {
			r, clock := newClocked(t, server, nil)
			b := Bucket{Name: "b", Key: t.Name(), Limit: Limit{Size: 1, DripInterval: tc.drip, DripSize: 1}, Cost: 1}
			req := Request{Buckets: []Bucket{b}}
			mustTake(t, r, req)
			redistest.Done(t, server.Client().Del(t.Context(), r.keys.of(&b)))
			clock.Add(int64(tc.want - time.Microsecond))
			if d := mustTake(t, r, req); !d[0].Denied {
				t.Errorf("decided %+v before it expires", d)
			}
			clock.Add(int64(time.Microsecond))
			if d := mustTake(t, r, req); d[0].Denied {
				t.Errorf("decided %+v after it expires", d)
			}
		})
	}
}

// TestDenyCacheReset guards that the whole cache can be reset at once.
func TestDenyCacheReset(t *testing.T) {
	server := redistest.Start(t)
	r, _ := newClocked(t, server, nil)
	for i := range 100 {
		b := hourly(1)
		b.Key = fmt.Sprint(i)
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	redistest.Done(t, server.Client().FlushAll(t.Context()))
	r.denyCache = newDenyCache(denySlots)
	for i := range 100 {
		b := hourly(1)
		b.Key = fmt.Sprint(i)
		if d := mustTake(t, r, Request{Buckets: []Bucket{b}}); d[0].Denied {
			t.Fatalf("key %d: decided %+v", i, d)
		}
	}
}

// TestDenyCacheAgreesWithServer sends the same random requests at the same times
// to two stores with the same buckets, as TestStoresAgree does, but with a clock
// that only moves forward and mostly by little: many requests are answered without
// a call, with the same numbers to the microsecond.
func TestDenyCacheAgreesWithServer(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen := struct{ steps, unasked, several, dear, never, each, dripped int }{}
	agree := func(t *rapid.T) {
		v.flush(t)
		p := plain{}
		buckets := drawBuckets(t, drawShape)
		var last Decision
		asked := int64(0)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			move := rapid.OneOf(
				rapid.Just(int64(0)), rapid.Int64Range(0, 1000), rapid.Int64Range(0, cacheFor),
				rapid.Just(last.RetryAfter.Microseconds()), rapid.Just(max(last.RetryAfter.Microseconds()-1, 0)),
			).Draw(t, "gap")
			v.at(t, v.keep(v.now+move))
			req := drawRequest(t, buckets)
			if rapid.IntRange(0, 2).Draw(t, "fill: 2") == 2 {
				for i := range req.Buckets {
					b := &req.Buckets[i]
					b.Cost = max(b.Limit.of().Remaining(p[identity(*b)].Level.At(v.now), v.now), 1)
				}
			}
			unasked := remembered(v.Redis, req)
			want := p.take(req, v.now)
			if got := decide(t, v, req.Accounting, req.Buckets...); !slices.Equal(got, want) {
				t.Fatalf("%+v at %d, asked %t: decided\n%+v, want\n%+v", req, v.now, !unasked, got, want)
			}
			sum := Summarize(req.Buckets, want)
			last = want[sum.Deciding]
			seen.steps++
			if !unasked {
				asked = v.now
				continue
			}
			seen.unasked++
			b := req.Buckets[sum.Deciding]
			for _, n := range []struct {
				is bool
				n  *int
			}{
				{len(want) > 1, &seen.several},
				{b.Cost > 1 && !sum.Never, &seen.dear},
				{sum.Never, &seen.never},
				{req.Accounting == AccountingEach, &seen.each},
				{v.now-asked > 0, &seen.dripped},
			} {
				if n.is {
					*n.n++
				}
			}
		}
	}
	checkTraces(t, 3, agree)
	t.Logf("%+v", seen)
	if min(seen.several, seen.dear, seen.never, seen.each, seen.dripped) < 25 || seen.unasked*20 < seen.steps {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestDenyCacheLosesNoDrips guards that two flooded stores, as of two processes,
// that share a bucket admit together over many drips exactly what one bucket
// admits: the cache costs no drip, though only a few requests for each drip reach
// the server.
func TestDenyCacheLosesNoDrips(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	seed := uint64(1)
	for _, tc := range []struct {
		limit Limit
		cost  int64
	}{
		{Limit{Size: 1, DripInterval: 100 * time.Millisecond, DripSize: 1}, 1},
		{Limit{Size: 10, DripInterval: 7 * time.Millisecond, DripSize: 1}, 1},
		{Limit{Size: 10, DripInterval: 300 * time.Millisecond, DripSize: 4}, 1},
		{Limit{Size: 3, DripInterval: 300 * time.Millisecond, DripSize: 5}, 1},
		{Limit{Size: 12, DripInterval: 50 * time.Millisecond, DripSize: 3}, 3},
		{Limit{Size: 2, DripInterval: 90 * time.Second, DripSize: 1}, 1},
	} {
		t.Run(fmt.Sprintf("%+v,cost=%d", tc.limit, tc.cost), func(t *testing.T) {
			const drips = 100
			b := Bucket{Name: "b", Key: "k", Limit: tc.limit, Cost: tc.cost}
			stores := [2]*clockedRedis{newClockedRedis(t, server, "rl:"), newClockedRedis(t, server, "rl:")}
			start := max(stores[0].now, stores[1].now)
			c := redistest.CommandCounter{Server: server}
			stores[0].flush(t)
			reference, now := plain{}, start
			c.Since(t, "evalsha")
			admitted, want, requests := 0, 0, int64(0)
			for now < start+drips*tc.limit.of().Rate() {
				for _, v := range stores {
					v.at(t, now)
				}
				for range 6 {
					for _, v := range stores {
						requests++
						if d := decide(t, v, AccountingAtomic, b); !d[0].Denied {
							admitted++
						}
						if !reference.take(Request{Buckets: []Bucket{b}}, now)[0].Denied {
							want++
						}
					}
					if admitted != want {
						t.Fatalf("%v after the start: admitted %d, want %d",
							time.Duration(now-start)*time.Microsecond, admitted, want)
					}
				}
				seed = mix(seed, uint64(now))
				now += 1 + int64(seed%uint64(max(tc.limit.of().Rate()/5, 1)))
			}
			asked := c.Since(t, "evalsha")
			most := int64(4*want+10) + 4*(now-start)/cacheFor
			if asked > most || asked*2 > requests {
				t.Errorf("%d of %d requests reached the server, which admitted %d", asked, requests, want)
			}
		})
	}
}

// TestDenyCacheAllowsForLatency guards denials decided at an unknown time between
// a call and its answer: whenever that was, no request is denied that the server
// would admit, none gets a time to retry before it would be admitted, and none gets one
// later than that by more than the latency of the answer.
func TestDenyCacheAllowsForLatency(t *testing.T) {
	denials := 0
	inDoubt := func(t *rapid.T) {
		b := Bucket{Name: "b", Key: "k", Limit: drawShape(t), Cost: 1}
		d, p := newDenyCache(denySlots), plain{}
		now := time.Now().UnixMicro()
		// The process's clock started some time ago.
		age := rapid.Int64Range(3e6, 1e12).Draw(t, "age")
		to := rapid.Int64Range(0, 3e6).Draw(t, "way there")
		from := rapid.Int64Range(0, 3e6).Draw(t, "way back")

		// The bucket was full some time ago, and may have dripped once since.
		fill := b
		fill.Cost = b.Limit.Size
		p.take(Request{Buckets: []Bucket{fill}}, now-rapid.Int64Range(0, b.Limit.of().Rate()).Draw(t, "ago"))
		s := p[identity(b)].Level.At(now)
		fits := b.Limit.of().Wait(s, 1, now) == 0
		d.remember(Request{Buckets: []Bucket{b}}, []outcome{{Ahead: s.Ahead(now), denied: !fits}}, age-to, clockAt(age+from))

		later := rapid.OneOf(
			rapid.Int64Range(0, 1e4), rapid.Int64Range(0, 3e6), rapid.Int64Range(0, b.Limit.of().Rate()),
			rapid.Just(b.Limit.of().Wait(s, 1, now)),
		).Draw(t, "later")
		b.Cost = rapid.Int64Range(0, b.Limit.Size).Draw(t, "cost")
		outcomes, denied := d.decide(Request{Buckets: []Bucket{b}}, age+from+later, nil)
		if !denied {
			if b.Cost == 0 || fits || to+from+later >= min(b.Limit.of().Wait(s, 1, now), cacheFor) {
				return
			}
			t.Fatalf("a full bucket of %+v is not cached", b.Limit)
		}
		got := b.Limit.decision(bucket.Level(outcomes[0].Ahead), 0, b.need(), outcomes[0].denied)
		real := p.take(Request{Buckets: []Bucket{b}}, now+from+later)[0]
		denials++
		if !real.Denied || !got.Denied || got.Remaining != 0 || real.Remaining != 0 {
			t.Fatalf("decided %+v where the server would decide %+v", got, real)
		}
		late := time.Duration(to+from) * time.Microsecond
		if got.RetryAfter < real.RetryAfter || got.RetryAfter > real.RetryAfter+late || got.Clear < real.Clear || got.Clear > real.Clear+late {
			t.Fatalf("decided %+v where the server, asked %v before, would decide %+v", got, late, real)
		}
	}
	checkTraces(t, 5, inDoubt)
	if denials < 50 {
		t.Errorf("%d denials: the test covers too little", denials)
	}
}

// TestDenialsCountFromSendTime guards the same through a store: an answer was
// decided at some time between sending the request and receiving the answer.
func TestDenialsCountFromSendTime(t *testing.T) {
	const rate, trip = 500 * time.Millisecond, 200 * time.Millisecond
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 1, DripInterval: rate, DripSize: 1}, Cost: 1}
	req := Request{Buckets: []Bucket{b}}
	frozen, asked := v.clock(), false
	v.clock = func() time.Duration {
		if !asked {
			asked = true // set after this
			return frozen
		}
		return frozen + trip
	}
	mustTake(t, v.Redis, req)
	for _, tc := range []struct {
		at    time.Duration
		clear time.Duration // 0 if the server is called
	}{
		{trip, rate},
		{rate - time.Microsecond, trip + time.Microsecond},
		{rate, 0},
	} {
		outcomes, _ := v.denyCache.decide(req, (frozen + tc.at).Microseconds(), nil)
		d := req.decisions(outcomes, nil)
		switch {
		case tc.clear == 0 && len(d) > 0, tc.clear > 0 && len(d) == 0:
			t.Errorf("%v after it was asked: decided %+v", tc.at, d)
		case len(d) > 0 && (!d[0].Denied || d[0].Clear != tc.clear || d[0].RetryAfter != tc.clear):
			t.Errorf("%v after it was asked: decided %+v, want to wait for %v", tc.at, d, tc.clear)
		}
	}
}

// TestDenyCacheHoldsForAnyCost guards that a cached denial holds for requests of
// any cost: each gets the time when it would have room, or learns that it never
// will.
func TestDenyCacheHoldsForAnyCost(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 10, DripInterval: time.Minute, DripSize: 1}, Cost: 10}
	decide(t, v, AccountingAtomic, b)
	v.advance(t, 500*time.Millisecond)
	for _, tc := range []struct {
		cost  int64
		retry time.Duration
		never bool
	}{
		{1, time.Minute, false},
		{2, 2 * time.Minute, false},
		{10, 10 * time.Minute, false},
		{11, 0, true},
		{math.MaxInt64, 0, true},
	} {
		b.Cost = tc.cost
		if !remembered(v.Redis, Request{Buckets: []Bucket{b}}) {
			t.Errorf("cost %d: not cached", tc.cost)
		}
		want := Decision{Denied: true, Never: tc.never, Size: 10, Clear: 10*time.Minute - 500*time.Millisecond}
		if !tc.never {
			want.RetryAfter = tc.retry - 500*time.Millisecond
		}
		if d := decide(t, v, AccountingAtomic, b); d[0] != want {
			t.Errorf("cost %d: decided %+v, want %+v", tc.cost, d[0], want)
		}
	}
}

// TestDenyCacheCallsWhenUncertain guards that the server is called each time the
// cache does not know enough to decide.
func TestDenyCacheCallsWhenUncertain(t *testing.T) {
	server := redistest.Start(t)
	const requests = 5
	full, room := hourly(1), hourly(100)
	full.Name, room.Name = "full", "room"
	larger, dear := full, hourly(3)
	larger.Limit.Size = 50
	dear.Name, dear.Cost = "dear", 2
	for _, tc := range []struct {
		name       string
		accounting Accounting
		first      []Bucket // requests that fill the buckets
		buckets    []Bucket
		charged    []int64 // what the buckets hold at the end
	}{
		{"each of several", AccountingEach, []Bucket{full}, []Bucket{full, room}, []int64{1, requests}},
		{"a larger size", AccountingAtomic, []Bucket{full}, []Bucket{larger}, []int64{1 + requests}},
		{"a little room", AccountingAtomic, []Bucket{dear}, []Bucket{dear}, []int64{2}},
		{"another that is new", AccountingAtomic, []Bucket{full}, []Bucket{room, full}, []int64{0, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			r, _ := newClocked(t, server, nil)
			mustTake(t, r, Request{Buckets: tc.first})
			req := Request{Buckets: tc.buckets, Accounting: tc.accounting}
			c := redistest.CommandCounter{Server: server}
			c.Since(t, "evalsha")
			want := int64(requests)
			for n := range requests {
				mustTake(t, r, req)
				if n == 0 && tc.name == "another that is new" {
					want = 1 // it is new only once
				}
			}
			c.Check(t, "evalsha", want)
			for i, b := range tc.buckets {
				if got := storedUnits(t, r, server, b); got != tc.charged[i] {
					t.Errorf("bucket %s holds %d, want %d", b.Name, got, tc.charged[i])
				}
			}
		})
	}
}

// TestDenyCacheOfSeveralBuckets guards a request with several buckets, one of
// which is full: it is denied without a call, nothing is charged, and its other
// decisions show the levels that the server last reported, whichever request that
// was for.
func TestDenyCacheOfSeveralBuckets(t *testing.T) {
	server := redistest.Start(t)
	r, clock := newClocked(t, server, nil)
	full, room := hourly(2), hourly(100)
	full.Name, room.Name, full.Cost = "full", "room", 2
	req := Request{Buckets: []Bucket{room, full}}
	mustTake(t, r, req)
	full.Cost = 1
	req.Buckets[1] = full

	c := redistest.CommandCounter{Server: server}
	c.Since(t, "evalsha")
	check := func(held int64) {
		t.Helper()
		for range 3 {
			d := mustTake(t, r, req)
			if d[0].Denied || d[0].Size-d[0].Remaining != held || !d[1].Denied || d[1].Remaining != 0 {
				t.Errorf("decided %+v, want a full bucket and one of %d", d, held)
			}
			if late := time.Duration(held)*time.Hour - d[0].Clear; late < 0 || late > time.Minute {
				t.Errorf("decided %+v", d)
			}
		}
		c.Check(t, "evalsha", 0)
	}
	check(1)
	for range 4 {
		mustTake(t, r, Request{Buckets: []Bucket{room}})
	}
	c.Check(t, "evalsha", 4)
	check(5)
	if got := storedUnits(t, r, server, room); got != 5 {
		t.Errorf("the other bucket holds %d, want 5", got)
	}
	room.Cost = 96 // the other bucket denies it too
	if d := mustTake(t, r, Request{Buckets: []Bucket{room, full}}); !d[0].Denied || !d[1].Denied {
		t.Errorf("decided %+v", d)
	}
	c.Check(t, "evalsha", 0)
	clock.Add(int64(time.Second))
	if remembered(r, req) {
		t.Error("still cached")
	}
}

// TestDenyCacheIdentity guards that a full bucket denies no requests to any other,
// however much they have in common.
func TestDenyCacheIdentity(t *testing.T) {
	server := redistest.Start(t)
	full := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 2, DripInterval: time.Hour, DripSize: 1}, Cost: 2}
	for name, change := range map[string]func(*Bucket){
		"name":      func(b *Bucket) { b.Name = "c" },
		"key":       func(b *Bucket) { b.Key = "l" },
		"no key":    func(b *Bucket) { b.Key = "" },
		"swapped":   func(b *Bucket) { b.Name, b.Key = b.Key, b.Name },
		"drip rate": func(b *Bucket) { b.Limit.DripInterval = time.Hour + time.Microsecond },
		"drip size": func(b *Bucket) { b.Limit.DripSize = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			r, _ := newClocked(t, server, nil)
			mustTake(t, r, Request{Buckets: []Bucket{full}})
			if d := mustTake(t, r, Request{Buckets: []Bucket{full}}); !d[0].Denied {
				t.Fatalf("decided %+v", d)
			}
			other := full
			change(&other)
			if d := mustTake(t, r, Request{Buckets: []Bucket{other}}); d[0].Denied {
				t.Errorf("decided %+v on another bucket", d)
			}
		})
	}
}

// TestDenyCacheIgnoresFallback guards that decisions of the fallback during an
// outage are not cached as answers of the server; cached answers from before still
// hold.
func TestDenyCacheIgnoresFallback(t *testing.T) {
	server := redistest.Start(t)
	r, _ := newClocked(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemoryWithClock(frozen) })
	before, after := hourly(1), hourly(1)
	before.Key, after.Key = "before", "after"
	mustTake(t, r, Request{Buckets: []Bucket{before}})
	server.Kill()
	for n := range manyFailures {
		if d := mustTake(t, r, Request{Buckets: []Bucket{after}}); d[0].Denied != (n > 0) {
			t.Errorf("request %d: decided %+v", n, d)
		}
	}
	if remembered(r, Request{Buckets: []Bucket{after}}) {
		t.Error("cached what the fallback decided")
	}
	d, err := r.Take(t.Context(), Request{Buckets: []Bucket{before}, NoFallback: true}, nil)
	if err != nil || !d[0].Denied {
		t.Errorf("decided %+v, error %v", d, err)
	}
}

// TestDenyCacheInCluster guards requests to several slots of a cluster: once one
// of their buckets is known to be full, they are denied without a call, like those
// to one slot, and the other buckets lose nothing.
func TestDenyCacheInCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 2)
	r := newTestCluster(t, nodes, nil)
	r.clock = frozen
	full := onNode(t, r, nodes, nodes.Nodes[0], hourly(1))
	room := onNode(t, r, nodes, nodes.Nodes[1], hourly(3))
	evals := func() int64 {
		return nodes.Nodes[0].CommandStat(t, "evalsha") + nodes.Nodes[1].CommandStat(t, "evalsha")
	}
	mustTake(t, r, Request{Buckets: []Bucket{room}})
	mustTake(t, r, Request{Buckets: []Bucket{full}})
	before := evals()
	for _, tc := range []struct {
		buckets []Bucket
		calls   int64 // one to each bucket, and one to release held units
	}{
		{[]Bucket{full}, 0},
		{[]Bucket{full, room}, 3},
		{[]Bucket{room, full}, 3},
	} {
		for n := range 10 {
			d := mustTake(t, r, Request{Buckets: tc.buckets})
			if !Denied(d) {
				t.Errorf("request %d: decided %+v", n, d)
			}
			for i, b := range tc.buckets {
				if b == room && (d[i].Denied || d[i].Remaining != 2) {
					t.Errorf("request %d: decided %+v", n, d)
				}
			}
		}
		storedUnits(t, r, nodes.Nodes[0], full)
		storedUnits(t, r, nodes.Nodes[1], room)
		if got := evals() - before; got > tc.calls {
			t.Errorf("%d calls for 10 requests to %d slots, want %d", got, len(tc.buckets), tc.calls)
		}
	}
	for n := range 3 {
		if d := mustTake(t, r, Request{Buckets: []Bucket{room}}); d[0].Denied != (n == 2) {
			t.Errorf("request %d: decided %+v", n, d)
		}
	}
}

// TestDenyCacheIsBounded guards what happens with more full buckets than the cache
// has slots: cached ones are denied correctly, the server decides all
// others, and no more memory is used.
func TestDenyCacheIsBounded(t *testing.T) {
	d := newDenyCache(denySlots)
	full := outcome{Ahead: bucket.Ahead{Clear: time.Hour.Microseconds()}, denied: true, by: DecidedByCache}
	var buckets []Bucket
	for i := range 4 * denySlots {
		b := hourly(int64(1 + i%3))
		b.Key = fmt.Sprint(i)
		full.Clear = b.Limit.Size * b.Limit.of().Rate()
		buckets = append(buckets, b)
		d.remember(Request{Buckets: []Bucket{b}}, []outcome{full}, 1000, clockAt(1000))
	}
	known := 0
	for i, b := range buckets {
		outcomes, ok := d.decide(Request{Buckets: []Bucket{b}}, 1000, nil)
		if !ok {
			continue
		}
		known++
		if full.Clear = b.Limit.Size * b.Limit.of().Rate(); outcomes[0] != full {
			t.Fatalf("bucket %d: %+v, want %+v", i, outcomes, full)
		}
	}
	if known > denySlots || known < denySlots/2 {
		t.Errorf("%d of %d buckets cached, want at most %d", known, len(buckets), denySlots)
	}
	b := hourly(1)
	b.Key = "empty"
	if _, ok := d.decide(Request{Buckets: []Bucket{b}}, 1000, nil); ok {
		t.Error("a bucket that was never used is denied")
	}
}

// TestDenyCacheConcurrently guards concurrent requests on buckets that fill up and
// drip, each with one or several buckets: each bucket admits its size and what has
// dripped since, to the unit.
func TestDenyCacheConcurrently(t *testing.T) {
	const goroutines, requests, size = 16, 500, 40
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	buckets := []Bucket{hourly(size), hourly(100_000), {Name: "quick", Key: "k", Limit: Limit{Size: size, DripInterval: 5 * time.Millisecond, DripSize: 1}, Cost: 1}}
	buckets[1].Name = "other"
	began := serverTime(t, server)
	var slow, quick atomic.Int64
	redistest.Together(t, goroutines, func(g int) {
		for n := range requests {
			req := Request{Buckets: buckets[:1+n%2]}
			admitted := &slow
			if g%2 == 0 {
				req, admitted = Request{Buckets: buckets[2:]}, &quick
			}
			d, err := r.Take(context.Background(), req, nil)
			switch {
			case err != nil:
				t.Error(err)
			case !Denied(d):
				admitted.Add(1)
			case d[0].Denied && (d[0].Remaining > 0 || d[0].RetryAfter > req.Buckets[0].Limit.DripInterval+time.Minute):
				t.Errorf("decided %+v", d)
			}
		}
	})
	took := serverTime(t, server) - began
	if got := slow.Load(); got != size {
		t.Errorf("admitted %d, want %d", got, size)
	}
	if got, most := quick.Load(), fromEmpty(buckets[2].Limit, took); got > most || got < size {
		t.Errorf("admitted %d, want %d to %d", got, size, most)
	}
}

// TestEmptyDenyCacheIsSkipped guards that requests which are not denied do not pay
// for a lookup once the cache has no valid entries.
func TestEmptyDenyCacheIsSkipped(t *testing.T) {
	r, clock := newClocked(t, redistest.Start(t), nil)
	mustTake(t, r, Request{Buckets: []Bucket{hourly(1)}})
	room := hourly(100)
	for range 5 {
		clock.Add(int64(cacheFor * time.Microsecond / 2))
		mustTake(t, r, Request{Buckets: []Bucket{room}})
	}
	if now, until := r.clock().Microseconds(), r.denyCache.latest.Load(); now < until {
		t.Errorf("the cache may have an entry for %d µs more", until-now)
	}
}
