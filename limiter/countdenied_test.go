package limiter

import (
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestCountDeniedFollowsDescription guards limits that count denied requests: every
// number in every decision is what their descriptions give if a denial fills a leaky
// bucket, whose drips start over, fills a fixed window until it ends, or is added to
// a sliding window.
func TestCountDeniedFollowsDescription(t *testing.T) {
	t.Parallel()
	seen := struct{ leaky, window, sliding int }{}
	checkTraces(t, 110, func(t *rapid.T) {
		var l Limit
		var take func(now, cost int64) Decision
		kind := rapid.IntRange(0, 2).Draw(t, "leaky, window, sliding")
		switch kind {
		case 0:
			m := new(model)
			if l = drawLimit(t); l.DripSize == MaxUnits {
				l.DripSize, l.Algorithm = 1, bucket.Leaky
			}
			take = func(now, cost int64) Decision {
				d := m.take(l, now, cost)
				if d.Denied { // full, as of now
					m.level, m.next = l.Size, firstDrip(l, now)
					d = denied(l, cost, 0, m.until(l, now, 0), func() time.Duration { return m.until(l, now, l.Size-cost) })
				}
				return d
			}
		case 1:
			l = drawWindow(t)
			w := newWindowed(l)
			take = func(now, cost int64) Decision {
				d := w.take(l, now, cost)
				if d.Denied {
					if w.used == 0 { // it has not begun
						w.ends = w.begin(now) + l.of().Rate()
					}
					w.used = l.Size
					ends := time.Duration(w.ends-now) * time.Microsecond
					d = denied(l, cost, 0, ends, func() time.Duration { return ends })
				}
				return d
			}
		case 2:
			l = drawSliding(t)
			m := &slider{phase: l.Phase.Microseconds()}
			take = func(now, cost int64) Decision {
				d := m.take(l, now, cost)
				if d.Denied {
					m.admitted = append(m.admitted, charge{at: now, units: cost})
					again := slider{m.phase, append([]charge(nil), m.admitted...)}
					if d = again.take(l, now, cost); !d.Denied {
						t.Fatalf("%+v: admitted after a denial of the same request", l)
					}
				}
				return d
			}
		}
		l.CountDenied = true
		s, last := newSubject(1_790_000_000_123_456), Decision{}
		total := int64(0)
		for i := range rapid.IntRange(1, 40).Draw(t, "requests") {
			gap := drawWindowGap
			if kind == 0 {
				gap = drawGap
			}
			s.now += gap(t, l, last)
			cost := rapid.SampledFrom([]int64{1, 1, 1, 2, l.Size/2 + 1, l.Size, l.Size + 1}).Draw(t, "cost")
			if total += cost; kind == 2 && total > bucket.MaxSlidingUnits {
				return // it counts no more
			}
			want := take(s.now, cost)
			if last = plainDecision(s.take(t, l, cost)); last != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", l, i, cost, s.now, last, want)
			}
			if last.Denied {
				*[]*int{&seen.leaky, &seen.window, &seen.sliding}[kind]++
			}
		}
	})
	if min(seen.leaky, seen.window, seen.sliding) < 3000 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// denied returns the decision that denies a request. retry is called unless it costs
// more than the size.
func denied(l Limit, cost, remaining int64, clear time.Duration, retry func() time.Duration) Decision {
	d := Decision{Denied: true, Never: cost > l.Size, Size: l.Size, Remaining: remaining, Clear: clear}
	if !d.Never {
		d.RetryAfter = retry()
	}
	return d
}

// countingLimits are limits of each algorithm that admit one request and then, some
// time later, the next.
var countingLimits = map[string]Limit{
	"leaky":          {Size: 1, DripInterval: 10 * time.Second, DripSize: 1, CountDenied: true},
	"fixed window":   {Size: 1, DripInterval: 10 * time.Second, DripSize: MaxUnits, Aligned: true, CountDenied: true},
	"sliding window": {Size: 1, DripInterval: 10 * time.Second, DripSize: bucket.SlidingDrip, Aligned: true, Algorithm: bucket.Sliding, CountDenied: true},
	"warm-up":        {Size: 1, DripInterval: 10 * time.Second, DripSize: 1, Aligned: true, Algorithm: bucket.WarmUp, Phase: time.Minute, ColdFactor: 3000, CountDenied: true},
}

// TestCountDeniedLocksOut guards what the option is for, in both stores: a client that
// keeps asking is admitted once, except for a fixed window, which ends anyway; and
// one that then waits for as long as its response says is admitted at that time.
func TestCountDeniedLocksOut(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for name, l := range countingLimits {
		for _, store := range []string{"Memory", "Redis"} {
			t.Run(name+" in "+store, func(t *testing.T) {
				v.flush(t)
				v.at(t, v.start-v.start%10e6+10e6)
				var s Store = v
				if store == "Memory" {
					s = NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
				}
				b := Bucket{Name: "b", Key: "k", Limit: l, Cost: 1}
				admitted, last := 0, Decision{}
				for range 100 { // within 95 seconds
					if last = decide(t, s, AccountingAtomic, b)[0]; !last.Denied {
						admitted++
					}
					v.advance(t, 950*time.Millisecond)
				}
				want := 1
				if name == "fixed window" {
					want = 10
				}
				if admitted != want || !last.Denied || last.RetryAfter <= 950*time.Millisecond {
					t.Fatalf("%d admitted, want %d; at last %+v", admitted, want, last)
				}
				v.advance(t, last.RetryAfter-950*time.Millisecond)
				if d := decide(t, s, AccountingAtomic, b)[0]; d.Denied {
					t.Errorf("denied after waiting for %v: %+v", last.RetryAfter, d)
				}
			})
		}
	}
}

// TestCountDeniedAmongOthers guards requests with several buckets: one that is denied
// by any of them counts once in each bucket that counts denied requests, even if that
// had room, and in no other.
func TestCountDeniedAmongOthers(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for name, store := range map[string]Store{
		"Memory": NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond }), "Redis": v,
	} {
		t.Run(name, func(t *testing.T) {
			one, counting, other := hourly(1), hourly(10), hourly(10)
			one.Name, counting.Name, other.Name = "one", "counting", "other"
			counting.Limit.CountDenied = true
			for i, want := range [][3]int64{{0, 9, 9}, {0, 8, 9}, {0, 7, 9}} {
				d := decide(t, store, AccountingAtomic, one, counting, other)
				if got := [3]int64{d[0].Remaining, d[1].Remaining, d[2].Remaining}; got != want || d[0].Denied != (i > 0) || d[1].Denied || d[2].Denied {
					t.Errorf("request %d: %+v, want %d remaining", i, d, want)
				}
			}
			counting.Cost = 8 // it has no room for that
			d := decide(t, store, AccountingAtomic, counting, other)
			if !d[0].Denied || d[0].Remaining != 0 || d[0].RetryAfter != 8*time.Hour || d[0].Clear != 10*time.Hour || d[1].Remaining != 9 {
				t.Errorf("a denial: %+v", d)
			}
		})
	}
}

// TestCountDeniedCallsServer guards that a request which counts even if it is denied
// is never denied without asking the server, whatever else was denied, and that operators who
// look at its bucket see nothing else.
func TestCountDeniedCallsServer(t *testing.T) {
	r, _ := testNode(t, redistest.Start(t))
	full, counting := hourly(1), hourly(5)
	full.Name, counting.Name = "full", "counting"
	counting.Limit.CountDenied = true
	both := Request{Buckets: []Bucket{full, counting}}
	for range 3 {
		checkDeciders(t, r, both, "redis", "redis")
	}
	checkDeciders(t, r, Request{Buckets: []Bucket{full}}, "remembered")
	checkDeciders(t, r, both, "redis", "redis")
	if d := decide(t, r, AccountingAtomic, counting)[0]; d.Remaining != 0 || d.Denied {
		t.Errorf("the fifth: %+v", d)
	}
	for b, want := range map[Bucket]bool{full: true, counting: false} {
		checkDeciders(t, r, Request{Buckets: []Bucket{counting}}, "redis")
		if level, remembered, err := r.PeekHere(b); err != nil || remembered != want {
			t.Errorf("%s: %+v, remembered as full: %v, error %v", b.Name, level, remembered, err)
		}
	}
}

// TestCountDeniedInFallback guards that denied requests count while Redis is
// unavailable, that it is reported to the server, and that one which another part of the
// request denies counts too, although nothing is charged.
func TestCountDeniedInFallback(t *testing.T) {
	now := time.Hour
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, 0, "")
	counting, other := hourly(10), hourly(10)
	counting.Name, other.Name = "counting", "other"
	counting.Limit.CountDenied = true
	req := Request{Buckets: []Bucket{counting, other}}
	const hour = 3600e6

	o := f.decide(req, nil, true) // denied elsewhere
	if o[0].Clear != hour || o[1].Clear != 0 || o[0].denied || o[1].denied {
		t.Errorf("peeking: %+v", o)
	}
	now += 30 * time.Minute
	req.Buckets[0].Cost = 10
	o = f.decide(req, nil, false)
	if !o[0].denied || o[0].Clear != 10*hour || o[1].Clear != 0 {
		t.Errorf("denied: %+v", o)
	}
	if got := dirtyLevels(m, req.Buckets); len(got) != 2 || got[0].dirty != own || got[0].Clear != 10*hour || got[1].dirty != clean {
		t.Errorf("reported %+v", got)
	}
	// Beside units in flight, it is full with those.
	now += 5 * time.Hour
	q := queryOf(f, Request{Buckets: []Bucket{other}})
	f.send(nil, callsOf(q))
	other.Limit.CountDenied, other.Cost = true, 10
	if o := f.decide(Request{Buckets: []Bucket{other}}, nil, false)[0]; !o.denied || o.Clear != 10*hour {
		t.Errorf("denied beside a unit in flight: %+v", o)
	}
	if s := held(m, other); s.Clear != 9*hour {
		t.Errorf("holds %+v, want nine units", s)
	}
}

// TestCountDeniedReportedLog guards a server that gets a report of units in a log of which it
// knows nothing, next to units in flight, which it has: a denied request that counted does
// not make room for one more.
func TestCountDeniedReportedLog(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := logBucket(5, time.Hour, 3)
	b.Limit.CountDenied = true
	call := func(size, cost int64, reported ...localLevel) outcome {
		t.Helper()
		b.Limit.Size, b.Cost = size, cost
		o, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, reported)
		if err != nil {
			t.Fatal(err)
		}
		return o[0]
	}
	call(5, 3) // its answer is still in flight
	known := localLevel{bucket.Ahead{Clear: 2*time.Hour.Microseconds() - b.Limit.of().SinceDrip(v.now), Rest: 2}, 3, own}
	for range 2 {
		if o := call(3, 1, known); !o.denied {
			t.Errorf("with a smaller size %+v", o)
		}
	}
	if o := call(5, 1, known); !o.denied {
		t.Errorf("%+v, want it denied: 2 are known, and 3 in flight", o)
	}
}

// TestCountDeniedHoldsUnits guards units that are held for a request with buckets in
// other slots: if it is denied there, it counts, and the units are charged; if it was
// not decided, they are not.
func TestCountDeniedHoldsUnits(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for name, l := range countingLimits {
		l.Size = 4
		b := Bucket{Name: "b", Key: "k", Limit: l, Cost: 1}
		req := Request{Buckets: []Bucket{b}}
		for _, counts := range []bool{true, false} {
			v.flush(t)
			q := asProcess(v.query(toHold(req), 0))
			held := v.evaluate(t, req, q)
			if held.denied {
				t.Fatalf("held: %+v", held)
			}
			settleAs(q, map[bool]verdict{true: verdictDenied}[counts], []outcome{held})
			v.evaluate(t, req, q)
			level, err := v.Peek(t.Context(), b)
			if want := map[bool]int64{true: 1}[counts]; err != nil || level.Units != want || level.Held != 0 {
				t.Errorf("%s, counts %t: %+v, error %v, want %d units", name, counts, level, err, want)
			}
		}
	}
}

// TestCountDeniedInCluster guards the same for requests that the servers of a cluster
// decide in parts.
func TestCountDeniedInCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback, opt.Timeout = NewMemory(), time.Second })
	one, counting := onNode(t, r, nodes, nodes.Nodes[0], hourly(1)), onNode(t, r, nodes, nodes.Nodes[1], hourly(10))
	counting.Limit.CountDenied = true
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, err := r.Peek(t.Context(), one)
		return err
	})
	for i := range int64(4) {
		d := decide(t, r, AccountingAtomic, one, counting)
		if d[0].Denied != (i > 0) || d[1].Denied || d[1].Remaining != 9-i {
			t.Errorf("request %d: %+v", i, d)
		}
	}
	redistest.WaitFor(t, 5*time.Second, func() error { // for the last to be settled
		level, err := r.Peek(t.Context(), counting)
		if err == nil && (level.Units != 4 || level.Held != 0) {
			t.Logf("%+v", level)
			err = errLate
		}
		return err
	})
}

// TestCountDeniedKeepsLogsShort guards logs under a flood of denied requests, in both
// stores: each of them counts, in place of the oldest units, so a log holds no more
// than before, whatever its entries cost. The time to retry, and what a larger size
// has room for later, is that of the newest units.
func TestCountDeniedKeepsLogsShort(t *testing.T) {
	t.Parallel()
	v := newPagedVirtual(t) // parts of short logs are read and written too
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	logs := 0
	checkTraces(t, few(5), func(t *rapid.T) {
		b := logBucket(rapid.SampledFrom([]int64{1, 2, 5, 30}).Draw(t, "size"), time.Minute, 1)
		logs++
		b.Key = strconv.Itoa(logs)
		b.Limit.CountDenied = true
		var asked []charge // the newest units of all that count
		first := b.Limit.Size
		for i := range rapid.IntRange(1, 200).Draw(t, "requests") {
			v.advance(t, time.Duration(rapid.SampledFrom([]int64{0, 0, 1, 7, 1000, 900_000, 20_000_000}).Draw(t, "gap"))*time.Microsecond)
			b.Cost = rapid.Int64Range(0, first).Draw(t, "cost")
			b.Limit.Size = rapid.SampledFrom([]int64{first, first, first/2 + 1}).Draw(t, "its size")
			// The model: requests as single units, of which the newest stay.
			for len(asked) > 0 && asked[0].at <= v.now-b.Limit.of().Rate() {
				asked = asked[1:]
			}
			holds := int64(len(asked))
			need := max(b.Cost, 1)
			denied := holds+need > b.Limit.Size && b.Cost > 0
			most := max(holds, b.Limit.Size)
			for range min(b.Cost, b.Limit.Size) {
				asked = append(asked, charge{at: v.now, units: 1})
			}
			if n := int64(len(asked)); denied && b.Cost > 0 && n > most {
				asked = asked[n-most:]
			}
			holds = int64(len(asked))
			var retry time.Duration
			if leave := holds + need - b.Limit.Size; denied && need <= b.Limit.Size {
				retry = time.Duration(asked[leave-1].at+b.Limit.of().Rate()-v.now) * time.Microsecond
			}
			here, there := decide(t, m, AccountingAtomic, b)[0], decide(t, v, AccountingAtomic, b)[0]
			if here != there {
				t.Fatalf("request %d: Memory %+v, Redis %+v", i, here, there)
			}
			if here.Denied != denied || here.RetryAfter != retry || here.Remaining != max(b.Limit.Size-holds, 0) {
				t.Fatalf("request %d of %d: %+v, want denied %t, a wait of %v and %d units", i, b.Cost, here, denied, retry, holds)
			}
			mine, err := m.Peek(t.Context(), b)
			if theirs := peek(t, v.Redis, b); mine != theirs || err != nil || mine.Units != holds {
				t.Fatalf("request %d: Memory holds %+v, Redis %+v, want %d units, error %v", i, mine, theirs, holds, err)
			}
			if text := v.stored(t, []Bucket{b})[0]; int64(len(text)) > 44+10*2*(first+1) {
				t.Fatalf("request %d: %d bytes stored", i, len(text))
			}
		}
	})
}

// TestCountDeniedOfSmallerSize guards a bucket that a request with a larger size has
// filled: a denied request with a smaller one, which counts as if the bucket were full
// by its own size, takes none of what it holds.
func TestCountDeniedOfSmallerSize(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	for name, store := range map[string]Store{"memory": m, "redis": v} {
		b := Bucket{Name: name, Key: "k", Limit: Limit{Size: 2, DripInterval: time.Hour, DripSize: 3, CountDenied: true}, Cost: 2}
		call := func(size, cost int64) bool {
			b.Limit.Size, b.Cost = size, cost
			v.advance(t, time.Microsecond)
			return !decide(t, store, AccountingAtomic, b)[0].Denied
		}
		if !call(2, 2) || call(1, 1) || call(2, 1) {
			t.Errorf("%s: a unit was admitted beside two of two", name)
		}
	}
}
