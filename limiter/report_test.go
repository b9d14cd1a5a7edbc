package limiter

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// report has a node send what is due, and waits for the answers.
func (f *fleet) report(t rapid.TB, node int) {
	t.Helper()
	f.nodes[node].reports.sendDue()
	f.settle(t, node)
}

// TestReportsKeepBound guards what eventual consistency admits: in any time what the limit
// allows, and for each node but one what fits into the bucket and drips between reports;
// and in the long run no more than one node alone. One node alone is exact. No request
// asks the server.
func TestReportsKeepBound(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	fleets := map[int]*fleet{1: newFleet(t, server, 1), 3: newFleet(t, server, 3), 8: newFleet(t, server, 8)}
	trace, over := 0, 0
	checkTraces(t, few(10), func(t *rapid.T) {
		trace++
		nodes := rapid.SampledFrom([]int{1, 3, 8}).Draw(t, "nodes")
		f := fleets[nodes]
		every := rapid.SampledFrom([]time.Duration{10 * time.Millisecond, 100 * time.Millisecond}).Draw(t, "every")
		l := Limit{
			Size:         rapid.SampledFrom([]int64{1, 8, 40, 200}).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, 20 * time.Millisecond}).Draw(t, "interval"),
			DripSize:     rapid.SampledFrom([]int64{1, 1, 3}).Draw(t, "drip size"),
		}
		b := Bucket{Name: "b", Key: fmt.Sprint(trace), Limit: l, Cost: 1, Consistency: Eventual(every)}
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		step := rapid.SampledFrom([]int64{100, 1000}).Draw(t, "step")
		var times []int64
		for range rapid.IntRange(50, 400).Draw(t, "requests") {
			f.advance(t, time.Duration(random.Int64N(2*step))*time.Microsecond)
			node := random.IntN(nodes)
			d := f.take(t, node, b)[0]
			if d.By != DecidedByEventual {
				t.Fatalf("decided by %v", d.By)
			}
			if !d.Denied {
				times = append(times, f.now)
			}
			for node := range f.nodes {
				f.nodes[node].reports.sendDue()
			}
			f.settle(t, node)
		}
		for node := range f.nodes { // or an answer would meet the next trace
			f.settle(t, node)
		}
		rate, drip := l.of().Rate(), l.DripSize // a debt of more than the size drips as fast
		extra := int64(nodes-1) * (l.Size + drip*bucket.CeilDiv(every.Microseconds()+2*step, rate))
		for i := range times {
			for j := i; j < len(times); j++ {
				length, n := times[j]-times[i], int64(j-i+1)
				most := max(l.Size+drip*(length/rate), l.Size-1+drip*bucket.CeilDiv(length, rate))
				if n > most+extra {
					t.Fatalf("%d nodes, %+v: %d admitted in %d µs, want at most %d + %d", nodes, l, n, length, most, extra)
				}
				if n > most {
					over++
				}
			}
		}
	})
	if over == 0 {
		t.Error("no trace exceeded the limit itself: the test covers too little")
	}
}

// TestReportsKeepRate guards that what nodes admit beyond the limit is a debt: under a flood
// from many nodes that lasts, they admit the rate of the limit.
func TestReportsKeepRate(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	const nodes, seconds = 5, 20
	f := newFleet(t, redistest.Start(t), nodes)
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 50, DripInterval: 10 * time.Millisecond, DripSize: 1}, Cost: 1, Consistency: Eventual(100 * time.Millisecond)}
	admitted := 0
	for range seconds * 200 {
		f.advance(t, 5*time.Millisecond)
		for node := range nodes {
			if !f.take(t, node, b)[0].Denied {
				admitted++
			}
			f.report(t, node)
		}
	}
	// Each node may have admitted a bucketful before it heard of the others.
	ideal := 50 + seconds*100
	t.Logf("%d admitted, ideal %d", admitted, ideal)
	if most := ideal + (nodes-1)*(50+11); admitted > most || admitted < ideal*9/10 {
		t.Errorf("%d admitted, want from %d to %d", admitted, ideal*9/10, most)
	}
}

// TestReportsInOutage guards that a node which can't report decides alone, by what it knows,
// and that the server learns of it later.
func TestReportsInOutage(t *testing.T) {
	server := redistest.Start(t)
	f := newFleet(t, server, 1)
	r := f.nodes[0]
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, Consistency: Eventual(time.Millisecond)}
	admitted := 0
	flood := func(n int) {
		for range n {
			if !f.take(t, 0, b)[0].Denied {
				admitted++
			}
		}
	}
	flood(4)
	f.advance(t, time.Millisecond)
	f.report(t, 0)
	server.Kill()
	flood(3)
	f.now += 1000
	f.clock.Store(f.now - f.start)
	r.reports.sendDue()
	redistest.WaitFor(t, time.Minute, func() error {
		if r.reports.inProgress() {
			return errors.New("the report has not failed")
		}
		return nil
	})
	flood(10)
	if admitted != 10 {
		t.Fatalf("%d admitted with the outage, want 10", admitted)
	}
	server.Restart(t)
	f.advance(t, 2*time.Hour) // two drips
	flood(1)
	f.advance(t, time.Millisecond)
	redistest.WaitFor(t, time.Minute, func() error {
		r.reports.sendDue()
		l, err := r.Peek(context.Background(), b)
		if err == nil && l.Units != 9 {
			err = fmt.Errorf("the server knows of %d units, want 8 and 1", l.Units)
		}
		return err
	})
}

// TestUnreportedWithExact guards that what a node has admitted and not reported counts when
// a server decides on the same bucket, because another limit of the request is exact, and when
// the node does in its place: one node alone admits no more than the limit allows, whether
// reports are sent by themselves or late, the server is near or far, and requests come one by
// one or all at once.
func TestUnreportedWithExact(t *testing.T) {
	slow := func(size int64) Limit { return Limit{Size: size, DripInterval: time.Minute, DripSize: 1} }
	for _, tc := range []struct {
		name       string
		size, cost int64
		every, far time.Duration
		gets       int // that only the eventual limit decides; then come POSTs, which pass both
		at         int // how many POSTs at once
		outage     bool
	}{
		{name: "few", size: 100, cost: 1, every: time.Minute, gets: 9, at: 1},
		{name: "all", size: 100, cost: 1, every: time.Minute, gets: 150, at: 1},
		{name: "one", size: 1, cost: 1, every: time.Minute, gets: 1, at: 1},
		{name: "dear", size: 1_000_000, cost: 90_000, every: time.Minute, gets: 1, at: 1},
		{name: "in turns with reports", size: 100, cost: 1, every: time.Millisecond, gets: 60, at: 8},
		{name: "burst", size: 1000, cost: 1, every: time.Minute, gets: 1000, at: 50},
		{name: "far", size: 1000, cost: 1, every: time.Minute, far: 100 * time.Millisecond, gets: 95, at: 50},
		{name: "far burst", size: 1000, cost: 1, every: 10 * time.Millisecond, far: 100 * time.Millisecond, gets: 1000, at: 50},
		{name: "outage", size: 100, cost: 1, every: time.Minute, gets: 60, at: 8, outage: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			proxy := redistest.StartProxy(t, server.Addr)
			proxy.Delay(tc.far)
			r := newTestRedis(t, server, func(o *RedisOptions) {
				o.Addresses, o.Timeout, o.Fallback = []string{proxy.Addr}, 10*time.Second, NewMemory()
				if tc.outage {
					o.Timeout = 50 * time.Millisecond
				}
			})
			lax := Bucket{Name: "lax", Key: "k", Cost: tc.cost, Limit: slow(tc.size), Consistency: Eventual(tc.every)}
			strict := Bucket{Name: "strict", Key: "k", Limit: slow(10_000), Cost: 1}
			var admitted atomic.Int64
			take := func(buckets ...Bucket) {
				d, err := r.Take(context.Background(), Request{Buckets: buckets}, nil)
				if err != nil {
					t.Error(err)
				} else if !Denied(d) {
					admitted.Add(tc.cost)
				}
			}
			take(strict) // so that there is a connection
			admitted.Store(0)
			if tc.outage {
				server.Kill()
			}
			for range tc.gets {
				take(lax)
			}
			redistest.Together(t, tc.at, func(int) {
				for range max(200, 2*int(tc.size/tc.cost)) / tc.at {
					take(lax, strict)
					if tc.at > 1 {
						take(lax)
					}
				}
			})
			if n := admitted.Load(); n > tc.size || n <= tc.size-tc.cost {
				t.Errorf("one node admitted %d, want %d", n, tc.size-tc.size%tc.cost)
			}
		})
	}
}

// TestUnreportedTakesRoom guards that what a node has not reported takes room
// next to what the server knows of all nodes, and that no level is reported to the server with it:
// a bucket whose key was deleted stays empty.
func TestUnreportedTakesRoom(t *testing.T) {
	f := newFleet(t, redistest.Start(t), 2)
	lax := Bucket{Name: "lax", Key: "k", Limit: Limit{Size: 100, DripInterval: time.Hour, DripSize: 1}, Cost: 1, Consistency: Eventual(time.Minute)}
	strict := Bucket{Name: "strict", Key: "k", Limit: Limit{Size: 1000, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	admitted := func(node, n int, buckets ...Bucket) (admitted int) {
		for range n {
			if !Denied(f.take(t, node, buckets...)) {
				admitted++
			}
		}
		return admitted
	}
	if n := admitted(0, 9, lax) + admitted(1, 60, lax, strict) + admitted(0, 100, lax, strict); n != 100 {
		t.Errorf("both nodes admitted %d, want 100", n)
	}
	redistest.Done(t, f.admin.Del(t.Context(), f.keys.of(&lax)))
	if n := admitted(0, 200, lax, strict); n != 91 {
		t.Errorf("admitted %d of 100 when the key was deleted, beside 9 that were not reported", n)
	}
}

// TestReportsSeeResets guards that a node which only denies reads the level once a
// second, and so sees that another has emptied the bucket.
func TestReportsSeeResets(t *testing.T) {
	f := newFleet(t, redistest.Start(t), 2)
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 2, DripInterval: time.Hour, DripSize: 1}, Cost: 1, Consistency: Eventual(time.Millisecond)}
	for range 3 {
		f.take(t, 0, b)
		f.advance(t, time.Millisecond)
		f.report(t, 0)
	}
	if _, err := f.nodes[1].Reset(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	if d := f.take(t, 0, b)[0]; !d.Denied {
		t.Error("admitted before it could know")
	}
	f.advance(t, time.Second)
	f.take(t, 0, b)
	f.report(t, 0)
	if d := f.take(t, 0, b)[0]; d.Denied {
		t.Errorf("denied after the reset: %+v", d)
	}
}

// TestResetKeepsUnreported guards that a reset forgets what has not been reported, except for
// what was admitted since it was sent: the server may have run it before that.
func TestResetKeepsUnreported(t *testing.T) {
	for _, tc := range []struct {
		name          string
		before, since int
		reported      bool // whether what was admitted before is reported meanwhile
	}{
		{"nothing since", 3, 0, false},
		{"nothing before", 0, 2, false},
		{"both", 3, 2, false},
		{"another report", 3, 2, true},
	} {
		f := newFleet(t, redistest.Start(t), 1)
		b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 100, DripInterval: time.Hour}, Cost: 1, Consistency: Eventual(time.Minute)}
		r := f.nodes[0]
		admit := func(n int) {
			for range n {
				f.take(t, 0, b)
			}
		}
		admit(tc.before)
		b, _ = b.prepared()
		x := r.fallback.resetting(&b)
		if tc.reported {
			f.advance(t, time.Minute)
			f.report(t, 0)
		}
		admit(tc.since)
		r.forget(&b, x)
		level, _, err := r.PeekHere(b)
		if err != nil || level.Unreported != int64(tc.since) {
			t.Errorf("%s: %+v is left, error %v, want %d not reported", tc.name, level, err, tc.since)
		}
	}
}

// TestReportsSurviveEmptyRestart guards that a full bucket stays full if Redis restarts
// without its data, time and again: a report of no units, which only reads the level, puts
// back what the server has lost. Otherwise the node would take the answer, which repeats what
// it reported, for what the server knows, and the next answer for a bucket that somebody emptied.
func TestReportsSurviveEmptyRestart(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestRedis(t, server, func(o *RedisOptions) { o.Fallback, o.Timeout = NewMemory(), 50*time.Millisecond })
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 100, DripInterval: time.Hour, DripSize: 1}, Cost: 1, Consistency: Eventual(10 * time.Millisecond)}
	admitted := 0
	flood := func(lasts time.Duration) {
		for start := time.Now(); time.Since(start) < lasts; time.Sleep(time.Millisecond) {
			if !mustTake(t, r, Request{Buckets: []Bucket{b}})[0].Denied {
				admitted++
			}
		}
	}
	flood(refreshAfter / 2)
	for range 2 {
		server.Kill()
		server.Restart(t)
		flood(3 * refreshAfter) // two reports of no units at least
		if level := peek(t, r, b); level.Units != 100 || admitted != 100 {
			t.Fatalf("admitted %d of 100, and Redis has %d", admitted, level.Units)
		}
	}
}
