package limiter

import (
	"context"
	"runtime"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// logsOf returns the logs in m, and as how many buckets they count.
func logsOf(m *Memory) (logs, keys int) {
	for _, p := range m.directory.Load().all {
		for _, of := range p.entries {
			for _, g := range of {
				logs, keys = logs+1, keys+g.Keys()
			}
		}
	}
	return logs, keys
}

// checkCounted checks that m counts each of its buckets once, and its logs by their
// size.
func checkCounted(t testing.TB, m *Memory) {
	t.Helper()
	buckets := 0
	for _, table := range tablesOf(m) {
		buckets += table.used
	}
	if _, keys := logsOf(m); m.Len() != buckets+keys {
		t.Fatalf("%d counted: %d buckets, and %d for their logs", m.Len(), buckets, keys)
	}
}

// TestMemoryOfLogs guards that max_keys bounds memory where buckets are logs: each
// key that counts takes no more of the heap than a bucket that follows Redis, whether logs
// are short or long, and however many keys come, or units for each. Sizes stay
// bounds: no log admits more while it has to do with less memory.
func TestMemoryOfLogs(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	racetest.SingleGoroutine(t)
	for _, tc := range []struct {
		name                string
		keys, units, limits int
		keeps               bool
	}{
		{"of one entry", 100_000, 1, 1, false},
		{"short", 10_000, 20, 1, false},
		{"long", 200, 3000, 1, false},
		{"full", 30, bucket.MaxLogUnits, 1, false},
		{"in two limits", 200, 500, 2, false},
		{"never evicted", 1000, 300, 1, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := heapInUse(t)
			now := time.Duration(0)
			m := NewMemoryWithClock(func() time.Duration { now += time.Microsecond; return now })
			const most = 20_000
			m.SetMaxKeys(most)
			b := logBucket(bucket.MaxLogUnits, time.Hour, 1)
			b.MaxKeys = most / 2
			if tc.keeps {
				b.ShareKey = "network"
			}
			for n := range tc.units {
				for i := range tc.keys {
					b.Name, b.Key = strconv.Itoa(i%tc.limits), strconv.Itoa(i)
					if d := decide(t, m, AccountingAtomic, b)[0]; int64(n) >= d.Size && !d.Denied {
						t.Fatalf("unit %d: %+v", n, d)
					}
				}
			}
			checkCounted(t, m)
			room := most / 2 * tc.limits
			if n := int(m.held.Load()); n > room {
				t.Errorf("%d keys counted, want about %d at most", n, room)
			}
			taken, keys := heapInUse(t)-before, max(m.Len(), 2000)
			logs, _ := logsOf(m)
			t.Logf("%d logs count as %d keys and take %d bytes, %.1f for each key", logs, m.Len(), taken, float64(taken)/float64(keys))
			if taken > 64*int64(keys) {
				t.Errorf("%d keys take %d bytes, %.1f each", keys, taken, float64(taken)/float64(keys))
			}
			runtime.KeepAlive(m)
		})
	}
}

// TestLogsInLittleMemory guards logs that have no room to grow: they admit no more
// than exact ones in any window, their numbers are true to what they do, and the
// bookkeeping holds.
func TestLogsInLittleMemory(t *testing.T) {
	coarse := 0
	checkTraces(t, 5, func(t *rapid.T) {
		now := time.Duration(0)
		m := NewMemoryWithClock(func() time.Duration { return now })
		l := SlidingLog(bucket.MaxLogUnits, time.Second)
		var admitted []charge
		b := Bucket{Name: "l", Key: "k", Limit: l, Cost: 1, MaxKeys: 1}
		units := func(from, to int64) (n int64) {
			for _, a := range admitted {
				if a.at > from && a.at <= to {
					n += a.units
				}
			}
			return n
		}
		b.Limit.Size = rapid.Int64Range(400, 900).Draw(t, "size")
		for range 1500 {
			now += time.Duration(rapid.Int64Range(0, 3000).Draw(t, "gap")) * time.Microsecond
			b.Cost = rapid.Int64Range(1, 3).Draw(t, "cost")
			d, _ := m.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
			if at := now.Microseconds(); !d[0].Denied {
				admitted = append(admitted, charge{at: at, units: b.Cost})
			}
			exact := b.Limit.Size - units(now.Microseconds()-l.of().Rate(), now.Microseconds())
			if d[0].Remaining > exact {
				t.Fatalf("%+v, want at most %d remaining", d[0], exact)
			}
			if d[0].Remaining < exact {
				coarse++
			}
			if d[0].Denied {
				now += d[0].RetryAfter - time.Microsecond
				if d, _ := m.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); !d[0].Denied {
					t.Fatalf("admitted too early: %+v", d)
				}
				now += time.Microsecond
				if d, _ := m.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); d[0].Denied {
					t.Fatalf("denied at the time local: %+v", d)
				}
				admitted = append(admitted, charge{at: now.Microseconds(), units: b.Cost})
			}
		}
	})
	if coarse < 1000 {
		t.Errorf("%d decisions by coarse logs: the test covers too little", coarse)
	}
}

// TestLogsLeaveMemory guards that logs are freed: when a bucket is reset, when
// another takes its place, and soon after all units have left, even if no request
// comes for that bucket; and then it is empty.
func TestLogsLeaveMemory(t *testing.T) {
	now := time.Duration(0)
	m := NewMemoryWithClock(func() time.Duration { return now })
	check := func(what string, want int) {
		t.Helper()
		checkCounted(t, m)
		if got, _ := logsOf(m); got != want {
			t.Errorf("%s: %d logs, want %d", what, got, want)
		}
	}
	b := logBucket(10, time.Minute, 10)
	b.MaxKeys = 100
	decide(t, m, AccountingAtomic, b)
	check("charged", 1)
	if l, err := m.Peek(context.Background(), b); err != nil || l != (Level{Units: 10, Clear: time.Minute, RetryAfter: time.Minute}) {
		t.Errorf("peeked at %+v, error %v", l, err)
	}
	if l, err := m.Reset(context.Background(), b); err != nil || l.Units != 10 {
		t.Errorf("reset %+v, error %v", l, err)
	}
	check("reset", 0)
	if d := decide(t, m, AccountingAtomic, b)[0]; d.Denied {
		t.Errorf("after a reset: %+v", d)
	}
	for i := range 200 {
		b.Key = strconv.Itoa(i)
		decide(t, m, AccountingAtomic, b)
	}
	if n, _ := logsOf(m); n > 40 || n < 10 {
		t.Errorf("%d logs in a limit of 100 keys", n)
	}
	checkCounted(t, m)
	other := hourly(5)
	for range 2 * sweepSteps { // by the time that every table was swept, all have drained
		now += time.Minute / sweepSteps
		decide(t, m, AccountingAtomic, other)
	}
	check("drained", 0)
	for i := range 200 {
		b.Key = strconv.Itoa(i)
		if d := decide(t, m, AccountingAtomic, b)[0]; d.Denied {
			t.Fatalf("key %d is full", i)
		}
	}
}

// TestLogAfterFallback guards a Memory that changes between a store of its own and
// the fallback of a Redis: what it has counted in one way still counts in the other,
// at no time less.
func TestLogAfterFallback(t *testing.T) {
	now := time.Duration(0)
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, 50*time.Millisecond, "")
	b := logBucket(10, time.Minute, 3)
	take := func(d time.Duration, want bool) {
		t.Helper()
		now = d
		if d := decide(t, m, AccountingAtomic, b)[0]; d.Denied == want {
			t.Errorf("at %v: %+v", now, d)
		}
		checkCounted(t, m)
	}
	take(10*time.Second, true)
	take(20*time.Second, true)
	now = 70 * time.Second // three have left the window, but not the summary
	if o := f.decide(Request{Buckets: []Bucket{b}}, nil, false)[0]; o.denied || o.entries != nil {
		t.Errorf("the fallback decided %+v", o)
	}
	if o := f.decide(Request{Buckets: []Bucket{b}}, nil, false)[0]; !o.denied {
		t.Errorf("the fallback decided %+v", o)
	}
	checkCounted(t, m)
	if n, _ := logsOf(m); n > 0 {
		t.Errorf("%d logs are left that know less than their summary", n)
	}
	// Six units count as of the end of the first minute, three as of its tenth second.
	take(80*time.Second, false)
	take(2*time.Minute-2*time.Microsecond, false)
	take(2*time.Minute, true)
}

// TestLogAfterFallbackReportsTime guards that a Memory which was the fallback of a Redis
// has the exact time to retry, also while no request is admitted, and that operators who
// look at a bucket see what requests see.
func TestLogAfterFallbackReportsTime(t *testing.T) {
	for _, first := range []time.Duration{10 * time.Second, 60 * time.Second} {
		for at := 61 * time.Second; at < 3*time.Minute; at += 7 * time.Second {
			now := first
			m := NewMemoryWithClock(func() time.Duration { return now })
			f := newFallback(m, 50*time.Millisecond, "")
			b := logBucket(10, time.Minute, 4)
			for _, now = range []time.Duration{first, 61 * time.Second} {
				f.decide(Request{Buckets: []Bucket{b}}, nil, false)
			}
			now = at
			level, err := m.Peek(context.Background(), b)
			d := decide(t, m, AccountingAtomic, b)[0]
			if d.Denied != (at < first.Truncate(time.Minute)+2*time.Minute-time.Microsecond) {
				t.Fatalf("first at %v, at %v: %+v", first, at, d)
			}
			if !d.Denied {
				continue
			}
			if level.RetryAfter != d.RetryAfter || level.Clear != d.Clear || level.Remaining != d.Remaining || err != nil {
				t.Errorf("first at %v, at %v: peek says %+v, error %v, the request got %+v", first, at, level, err, d)
			}
			now += d.RetryAfter - time.Microsecond
			if again := decide(t, m, AccountingAtomic, b)[0]; !again.Denied || again.RetryAfter != time.Microsecond {
				t.Errorf("first at %v, at %v: %+v, too early: %+v", first, at, d, again)
			}
			now += time.Microsecond
			if again := decide(t, m, AccountingAtomic, b)[0]; again.Denied {
				t.Errorf("first at %v, at %v: %+v, in time: %+v", first, at, d, again)
			}
			checkCounted(t, m)
		}
	}
}

// TestLogInCluster guards requests with logs in two slots of a cluster: both are
// charged, or neither.
func TestLogInCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r, err := NewRedis(RedisOptions{Addresses: nodes.Addrs(), KeyPrefix: "rl:", Timeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	x, y := logBucket(5, time.Hour, 2), logBucket(8, time.Hour, 3)
	x.Key, y.Key = "x", "yy"
	for i, want := range [][2]Decision{
		{{Size: 5, Remaining: 3}, {Size: 8, Remaining: 5}},
		{{Size: 5, Remaining: 1}, {Size: 8, Remaining: 2}},
		{{Size: 5, Remaining: 1, Denied: true}, {Size: 8, Remaining: 2, Denied: true}},
	} {
		d, err := r.Take(t.Context(), Request{Buckets: []Bucket{x, y}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for j := range d {
			got := Decision{Size: d[j].Size, Remaining: d[j].Remaining, Denied: d[j].Denied}
			if got != want[j] || d[j].Clear > time.Hour || d[j].Clear < 59*time.Minute || (d[j].RetryAfter > 0) != d[j].Denied {
				t.Errorf("request %d: %+v, want %+v", i, d[j], want[j])
			}
		}
	}
	x.Cost = 1
	y.Cost = 3
	if d, err := r.Take(t.Context(), Request{Buckets: []Bucket{x, y}}, nil); err != nil || d[0].Denied || !d[1].Denied || d[0].Remaining != 1 {
		t.Errorf("%+v, error %v: want a denial by one, and nothing charged", d, err)
	}
}

// TestLogDenialsAreRemembered guards that a flood on a full log costs the server
// nothing until the first entry leaves, with the numbers that it would reply; that a
// request of another cost, whose times are not known, is decided by the server; and that
// another bucket of the request does not keep it from being remembered.
func TestLogDenialsAreRemembered(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := logBucket(3, 800*time.Millisecond, 1)
	for i := range 3 {
		v.advance(t, time.Duration(i)*100*time.Millisecond)
		decide(t, v, AccountingAtomic, b)
	}
	call := func(b Bucket, by Decider, denied bool, retry time.Duration) {
		t.Helper()
		d, err := v.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
		if err != nil || d[0].By != by || d[0].Denied != denied || d[0].RetryAfter != retry {
			t.Errorf("%+v, error %v, want a decision by %v, denied %t, for %v", d, err, by, denied, retry)
		}
	}
	call(b, DecidedByCache, true, 500*time.Millisecond)
	v.advance(t, 200*time.Millisecond)
	call(b, DecidedByCache, true, 300*time.Millisecond)
	two := b
	two.Cost = 2
	call(two, DecidedByRedis, true, 400*time.Millisecond)
	call(two, DecidedByCache, true, 400*time.Millisecond)
	larger := b
	larger.Limit.Size = 4
	call(larger, DecidedByRedis, false, 0)
	v.advance(t, 300*time.Millisecond-time.Microsecond)
	call(b, DecidedByRedis, true, 100*time.Millisecond+time.Microsecond)
	v.advance(t, 100*time.Millisecond)
	call(b, DecidedByCache, true, time.Microsecond)
	v.advance(t, time.Microsecond)
	call(b, DecidedByRedis, false, 0)
}
