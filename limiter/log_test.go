package limiter

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// journal is a sliding log as its description says: it keeps every admission and
// adds up those of the time of one window.
type journal struct{ admitted []charge }

// units returns the units in the window that ends at now.
func (j *journal) units(l Limit, now int64) (units int64) {
	for _, a := range j.admitted {
		if a.at > now-l.of().Rate() {
			units += a.units
		}
	}
	return units
}

// wait returns the time until there is room for cost, by trying when each admission
// leaves the window.
func (j *journal) wait(l Limit, now, cost int64) time.Duration {
	if cost == 0 || cost > l.Size || j.units(l, now)+cost <= l.Size {
		return 0
	}
	first := int64(-1)
	for _, a := range j.admitted {
		at := a.at + l.of().Rate()
		if at > now && j.units(l, at)+cost <= l.Size && (first < 0 || at < first) {
			first = at
		}
	}
	return time.Duration(first-now) * time.Microsecond
}

// take decides a request at the time now, in µs.
func (j *journal) take(l Limit, now, cost int64) Decision {
	units := j.units(l, now)
	d := Decision{Size: l.Size, Denied: cost > max(l.Size-units, 0), Never: cost > l.Size}
	if !d.Denied && cost > 0 {
		j.admitted = append(j.admitted, charge{at: now, units: cost})
		units += cost
	}
	d.Remaining = max(l.Size-units, 0)
	for _, a := range j.admitted {
		d.Clear = max(d.Clear, time.Duration(a.at+l.of().Rate()-now)*time.Microsecond)
	}
	if d.Denied {
		d.RetryAfter = j.wait(l, now, cost)
	}
	return d
}

// prune forgets what no later time counts.
func (j *journal) prune(l Limit, now int64) {
	j.admitted = slices.DeleteFunc(j.admitted, func(a charge) bool { return a.at <= now-l.of().Rate() })
}

// drawLog draws a log of any magnitude.
func drawLog(t *rapid.T) Limit {
	return SlidingLog(
		rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, bucket.MaxLogUnits), rapid.Just[int64](bucket.MaxLogUnits)).Draw(t, "size"),
		rapid.SampledFrom([]time.Duration{
			time.Microsecond, 7 * time.Microsecond, 999_983 * time.Microsecond, time.Second, time.Minute, time.Hour,
			31 * 24 * time.Hour, bucket.Horizon / 3 * time.Microsecond,
		}).Draw(t, "window"))
}

// drawLogGap draws the time to the next request, in µs: none, hardly any, part of a
// window, or about as long as the last Decision says.
func drawLogGap(t *rapid.T, l Limit, last *Decision) int64 {
	off, gap := rapid.Int64Range(-1, 1), int64(0)
	switch rapid.IntRange(0, 7).Draw(t, "gap") {
	case 2:
		gap = rapid.Int64Range(1, 3).Draw(t, "µs")
	case 3:
		gap = rapid.Int64Range(0, l.of().Rate()/5).Draw(t, "µs")
	case 4:
		gap = last.RetryAfter.Microseconds() + off.Draw(t, "off by")
	case 5:
		gap = last.Clear.Microseconds() + off.Draw(t, "off by")
	case 6:
		gap = l.of().Rate() + off.Draw(t, "off by")
	case 7:
		gap = last.one + off.Draw(t, "off by")
	}
	return max(gap, 0)
}

// drawLogCost draws a cost, which may be 0.
func drawLogCost(t *rapid.T, l Limit, last *Decision) int64 {
	return rapid.SampledFrom([]int64{
		0, 1, 1, 1, 2, l.Size/9 + 1, l.Size/3 + 1, l.Size/2 + 1, l.Size, l.Size + 1, last.Remaining, last.Remaining + 1,
	}).Draw(t, "cost")
}

// checkLog compares what a store has decided with what the journal does, also in how
// long the same request, and one of a single unit, would have no room then.
func checkLog(t rapid.TB, j *journal, l Limit, now, cost int64, got Decision) {
	t.Helper()
	want := j.take(l, now, cost)
	if plain := plainDecision(got); plain != want {
		t.Fatalf("%+v, cost %d, at %d µs:\n got %+v\nwant %+v", l, cost, now, plain, want)
	}
	for _, c := range []int64{cost, 1} {
		b := Bucket{Limit: l, Cost: c}
		if want := j.wait(l, now, c); (c == cost || !got.Denied) && b.RoomIn(&got) != want {
			t.Fatalf("%+v, cost %d, at %d µs: cost %d would wait %v, want %v", l, cost, now, c, b.RoomIn(&got), want)
		}
	}
	j.prune(l, now)
}

// logsSeen counts what a test of logs has covered.
type logsSeen struct{ admitted, denied, never, retried int }

func (s *logsSeen) add(d, before *Decision, gap int64) {
	switch {
	case d.Never:
		s.never++
	case d.Denied:
		s.denied++
	case before.RetryAfter > 0 && gap == before.RetryAfter.Microseconds():
		s.retried++
	default:
		s.admitted++
	}
}

// TestLogFollowsDescription guards logs in memory: every number in every decision is
// what adding up the admissions gives. So no window has more than Size units, a
// request is denied 1 µs before the time to retry, and admitted then.
func TestLogFollowsDescription(t *testing.T) {
	t.Parallel()
	seen := logsSeen{}
	checkTraces(t, 120, func(t *rapid.T) {
		l, last := drawLog(t), Decision{}
		now := rapid.SampledFrom([]int64{0, 1, 1_790_000_000_123_456}).Draw(t, "now")
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(now) * time.Microsecond })
		j := &journal{}
		for range rapid.IntRange(1, 40).Draw(t, "requests") {
			gap := drawLogGap(t, l, &last)
			now += gap
			b := Bucket{Name: "l", Key: "k", Limit: l, Cost: drawLogCost(t, l, &last)}
			got := decide(t, m, AccountingAtomic, b)[0]
			checkLog(t, j, l, now, b.Cost, got)
			seen.add(&got, &last, gap)
			last = got
		}
	})
	if min(seen.admitted, seen.denied, seen.never, seen.retried) < 3000 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestRedisLogs guards the same in Redis, on the server's clock.
func TestRedisLogs(t *testing.T) {
	t.Parallel()
	v := newPagedVirtual(t)
	seen, trace := logsSeen{}, 0
	checkTraces(t, 8, func(t *rapid.T) {
		trace++
		l, last, j := drawLog(t), Decision{}, &journal{}
		v.at(t, v.start)
		b := Bucket{Name: "l", Key: fmt.Sprint(trace), Limit: l, Cost: 1}
		remembers := rapid.Bool().Draw(t, "remembers denials")
		for range rapid.IntRange(1, 40).Draw(t, "requests") {
			gap := drawLogGap(t, l, &last)
			v.at(t, v.now+gap)
			if !remembers {
				v.denyCache = newDenyCache(64)
			}
			b.Cost = drawLogCost(t, l, &last)
			got, err := v.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			checkLog(t, j, l, v.now, b.Cost, got[0])
			seen.add(&got[0], &last, gap)
			last = got[0]
		}
	})
	if min(seen.admitted, seen.denied, seen.never, seen.retried) < 200 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestLogOfManyEntries guards logs of the largest size that are full of single units,
// in both stores: as entries leave one by one, others take their place. It shows how
// much memory a full log takes in Redis.
func TestLogOfManyEntries(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	b := logBucket(bucket.MaxLogUnits, time.Minute, 1)
	for i := range bucket.MaxLogUnits + 3000 {
		v.at(t, v.now+5000) // a window is as long as 12 000 of them
		here, there := decide(t, m, AccountingAtomic, b)[0], decide(t, v, AccountingAtomic, b)[0]
		if want := i >= bucket.MaxLogUnits && i < 12_000; here.Denied != want || here != there {
			t.Fatalf("request %d: Memory %+v, Redis %+v", i, here, there)
		}
	}
	size, err := v.admin.MemoryUsage(t.Context(), v.keys.of(&b)).Result()
	if err != nil {
		t.Fatal(err)
	}
	if size > 21*bucket.MaxLogUnits { // of which half may be spare
		t.Errorf("a full log takes %d bytes", size)
	}
	t.Logf("a log of %d entries takes %d bytes", bucket.MaxLogUnits, size)
}

// TestLogTakesFewSteps guards that no request makes Redis, which does nothing else
// meanwhile, go through a long log: neither one that is denied until nearly all has
// left, nor one that is denied after much has left, nor one that counts although it is
// denied.
func TestLogTakesFewSteps(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	server := redistest.Start(t)
	v := newClockedRedis(t, server, "rl:")
	b := logBucket(bucket.MaxLogUnits, time.Minute, 1)
	for range bucket.MaxLogUnits {
		v.advance(t, 5*time.Millisecond)
		decide(t, v, AccountingAtomic, b)
	}
	for _, test := range []struct {
		name   string
		cost   int64
		counts bool
		left   time.Duration // since the log was filled
		wait   time.Duration
	}{
		{name: "nearly all have to leave", cost: bucket.MaxLogUnits - 1, wait: 59_995 * time.Millisecond},
		{name: "half of them have to leave", cost: bucket.MaxLogUnits / 2, wait: 35 * time.Second},
		{name: "half of them have left", cost: bucket.MaxLogUnits, left: 35 * time.Second, wait: 25 * time.Second},
		{name: "nearly all have left", cost: bucket.MaxLogUnits, left: 59_990 * time.Millisecond, wait: 10 * time.Millisecond},
		{name: "a denied one takes the place of all", cost: bucket.MaxLogUnits, counts: true, left: 59_990 * time.Millisecond, wait: time.Minute},
	} {
		filled := v.now
		v.advance(t, test.left)
		v.denyCache = newDenyCache(64)
		before := server.CommandStat(t, "getrange")
		b.Cost, b.Limit.CountDenied = test.cost, test.counts
		d := decide(t, v, AccountingAtomic, b)[0]
		if !d.Denied || d.RetryAfter != test.wait {
			t.Errorf("%s: %+v, want a wait of %v", test.name, d, test.wait)
		}
		if reads := server.CommandStat(t, "getrange") - before; reads < 1 || reads > 40 { // of 100 pages
			t.Errorf("%s: %d reads", test.name, reads)
		}
		v.at(t, filled)
	}
}

// TestLogSumsBeginAnew guards logs that have been in use for so long that the sums of
// units in their entries start over: both stores still agree on every request.
func TestLogSumsBeginAnew(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	const sums = 1 << 24
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	b := logBucket(bucket.MaxLogUnits, time.Second, 5000)
	var sum, denied int64
	random := rand.New(rand.NewPCG(1, 2))
	for sum < sums+20_000 {
		gap := 600 * time.Millisecond
		if sum > sums-20_000 { // of many entries, of which some are before, some after
			b.Cost, gap = 1+random.Int64N(300), time.Duration(random.IntN(30))*time.Millisecond
			if random.IntN(4) == 0 {
				b.Cost = 1 + random.Int64N(bucket.MaxLogUnits)
			}
		}
		v.advance(t, gap)
		here, there := decide(t, m, AccountingAtomic, b)[0], decide(t, v, AccountingAtomic, b)[0]
		if here != there {
			t.Fatalf("after %d units: Memory %+v, Redis %+v", sum, here, there)
		}
		if here.Denied {
			denied++
		} else {
			sum += b.Cost
		}
	}
	if denied < 10 {
		t.Errorf("only %d requests were denied", denied)
	}
}

// TestLogInsertsBeforeOthers guards a server that gets a report of units which a node has
// admitted in the window before, and has admitted others itself since: they leave when
// that window has left, and the others when they would have.
func TestLogInsertsBeforeOthers(t *testing.T) {
	v := newPagedVirtual(t)
	b := logBucket(10, time.Minute, 1)
	begin := v.start - v.start%b.Limit.of().Rate() + b.Limit.of().Rate()
	for _, at := range []time.Duration{10 * time.Second, 65 * time.Second, 66 * time.Second, 67 * time.Second, 68 * time.Second} {
		v.at(t, begin+at.Microseconds())
		decide(t, v, AccountingAtomic, b)
	}
	v.advance(t, time.Second)
	reported := bucket.Ahead(bucket.Counted((111 * time.Second).Microseconds(), 4, 4)) // three more than the server, in the first minute
	never := b
	never.Cost = bucket.MaxLogUnits + 1
	if _, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{never}}, []localLevel{{reported, 0, unsure}}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		at    time.Duration
		units int64
	}{
		{69 * time.Second, 8},
		{70 * time.Second, 7},
		{2*time.Minute - 2*time.Microsecond, 7},
		{2*time.Minute - time.Microsecond, 4},
		{125 * time.Second, 3},
		{126 * time.Second, 2},
		{127 * time.Second, 1},
		{128 * time.Second, 0},
	} {
		v.at(t, begin+tc.at.Microseconds())
		if l, err := v.Peek(t.Context(), b); err != nil || l.Units != tc.units {
			t.Errorf("at %v: %+v, %v, want %d units", tc.at, l, err, tc.units)
		}
	}
}

// newPagedVirtual returns a virtual store whose script reads logs in pages of two
// entries, so that short logs are read and written in parts, as long ones are.
func newPagedVirtual(t testing.TB) *clockedRedis {
	t.Helper()
	const page, small = "PAGE = 100 ", "PAGE = 2 "
	if n := strings.Count(takeSource, page); n != 1 {
		t.Fatalf("the script has %d sizes of pages", n)
	}
	return newClockedRedisOf(t, redistest.Start(t), "rl:", strings.Replace(takeSource, page, small, 1))
}

// logBucket returns a bucket of a log.
func logBucket(size int64, window time.Duration, cost int64) Bucket {
	return Bucket{Name: "l", Key: "k", Limit: SlidingLog(size, window), Cost: cost}
}

// drawAnyShape draws a limit of any algorithm and magnitude.
func drawAnyShape(t *rapid.T) Limit {
	if rapid.Bool().Draw(t, "log") {
		return drawLog(t)
	}
	return drawShape(t)
}

// TestStoresAgreeOnLogs sends the same random requests at the same times to the
// script in Redis and to Memory, and requires the same decisions. A request may have
// buckets of several algorithms, and a bucket is charged with several sizes.
func TestStoresAgreeOnLogs(t *testing.T) {
	t.Parallel()
	v := newPagedVirtual(t)
	seen := struct{ logs, mixed, denied, admitted, partly int }{}
	checkTraces(t, 4, func(t *rapid.T) {
		v.flush(t)
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		buckets, last, limit := drawBuckets(t, drawAnyShape), Decision{}, SlidingLog(1, time.Second)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			var gap int64
			if limit.Algorithm == bucket.Log {
				gap = drawLogGap(t, limit, &last)
			} else {
				gap = drawMove(t, limit, last, false)
			}
			if v.keep(v.now+gap) != v.now+gap {
				break // the clock of a Memory can't go back
			}
			v.at(t, v.now+gap)
			req := drawRequest(t, buckets)
			v.denyCache = newDenyCache(64) // which does not know when single units leave a log
			want := decide(t, m, req.Accounting, req.Buckets...)
			got := decide(t, v, req.Accounting, req.Buckets...)
			if !slices.Equal(got, want) {
				t.Fatalf("%+v at %d: Redis decided\n%+v, Memory\n%+v", req, v.now, got, want)
			}
			i := rapid.IntRange(0, len(want)-1).Draw(t, "watched")
			last, limit = want[i], req.Buckets[i].Limit
			if n := entriesOf(req); n > 0 {
				seen.logs++
				if n < len(req.Buckets) {
					seen.mixed++
				}
			}
			if sum := Summarize(req.Buckets, want); !sum.Denied {
				seen.admitted++
			} else if seen.denied++; slices.ContainsFunc(want, func(d Decision) bool { return !d.Denied }) {
				seen.partly++
			}
		}
	})
	if min(seen.logs, seen.denied, seen.admitted) < 1000 || min(seen.mixed, seen.partly) < 300 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestLogBoundsConcurrentRequests guards the bound where many requests come at once:
// what was admitted within one window for certain, because it began and ended in it,
// is no more than the size. Stores count in whole microseconds.
func TestLogBoundsConcurrentRequests(t *testing.T) {
	r := newTestRedis(t, redistest.Start(t), nil)
	for name, store := range map[string]Store{"memory": NewMemory(), "redis": r} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			type admission struct{ from, to time.Time }
			var mu sync.Mutex
			var admitted []admission
			b := logBucket(40, 100*time.Millisecond, 1)
			end := time.Now().Add(time.Second)
			var all sync.WaitGroup
			for range 16 {
				all.Go(func() {
					for time.Now().Before(end) {
						from := time.Now()
						d, err := store.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
						if err != nil {
							t.Error(err)
							return
						}
						if !d[0].Denied {
							mu.Lock()
							admitted = append(admitted, admission{from, time.Now()})
							mu.Unlock()
						}
					}
				})
			}
			all.Wait()
			for _, first := range admitted {
				n := int64(0)
				for _, a := range admitted {
					if !a.from.Before(first.from) && a.to.Sub(first.from) < b.Limit.DripInterval-time.Microsecond {
						n++
					}
				}
				if n > b.Limit.Size {
					t.Fatalf("%d admitted within a window, want at most %d", n, b.Limit.Size)
				}
			}
			if n := int64(len(admitted)); n <= b.Limit.Size {
				t.Errorf("only %d admitted in ten windows", n)
			}
		})
	}
}

// TestLogClockSetBack guards that a server's clock that is set back neither empties a
// log nor keeps it full for longer than one window more: what lies ahead counts as of
// then. When the clock is set ahead, what has left the window is gone.
func TestLogClockSetBack(t *testing.T) {
	v := newPagedVirtual(t)
	for _, back := range []time.Duration{
		time.Microsecond, time.Second, 20 * time.Second, 59 * time.Second, time.Minute, 2 * time.Minute, time.Hour, 365 * 24 * time.Hour,
	} {
		v.flush(t)
		b := logBucket(10, time.Minute, 5)
		v.advance(t, 10*365*24*time.Hour)
		decide(t, v, AccountingAtomic, b)
		v.advance(t, 30*time.Second)
		decide(t, v, AccountingAtomic, b)
		v.advance(t, -back)
		set := v.now
		b.Cost = 1
		d := decide(t, v, AccountingAtomic, b)[0]
		first := min(30*time.Second+back, time.Minute) // until the first five leave
		if !d.Denied || d.Remaining != 0 || d.RetryAfter != first || d.Clear != time.Minute {
			t.Errorf("back by %v: %+v, want a denial for %v, clear in a minute", back, d, first)
		}
		v.at(t, set+first.Microseconds()-1)
		if d := decide(t, v, AccountingAtomic, b)[0]; !d.Denied {
			t.Errorf("back by %v: admitted too early", back)
		}
		v.at(t, set+first.Microseconds())
		if d := decide(t, v, AccountingAtomic, b)[0]; d.Denied {
			t.Errorf("back by %v: denied at the reported time", back)
		}
		v.advance(t, 2*time.Minute)
		if d := decide(t, v, AccountingAtomic, b)[0]; d.Remaining != 9 {
			t.Errorf("back by %v: %+v two minutes later", back, d)
		}
	}

	// Several that lie ahead leave together, a window after the clock was set back.
	v.flush(t)
	b := logBucket(10, time.Minute, 1)
	for range 5 {
		v.advance(t, time.Second)
		decide(t, v, AccountingAtomic, b)
	}
	v.advance(t, -time.Hour)
	for _, tc := range []struct {
		after     time.Duration
		remaining int64
	}{{0, 4}, {5 * time.Second, 3}, {55*time.Second - time.Microsecond, 2}, {time.Microsecond, 7}, {5 * time.Second, 7}} {
		v.advance(t, tc.after)
		if d := decide(t, v, AccountingAtomic, b)[0]; d.Denied || d.Remaining != tc.remaining {
			t.Errorf("%v later: %+v, want room for %d", tc.after, d, tc.remaining)
		}
	}
}

// TestRedisLogCorruptValues guards that no value of a log's key makes a request
// fail, or lasts: neither what something else has stored, nor any bytes changed in
// a log.
func TestRedisLogCorruptValues(t *testing.T) {
	t.Parallel()
	v := newPagedVirtual(t)
	b := logBucket(10, time.Minute, 1)
	key := v.keys.of(&b)
	try := func(t rapid.TB, value string) (first Decision) {
		redistest.Done(t, v.admin.Set(context.Background(), key, value, 0))
		for i := range 14 {
			v.denyCache = newDenyCache(64)
			b.Cost = int64(1 + i%12)
			reply, err := v.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
			if err != nil || reply[0].By != DecidedByRedis {
				t.Fatalf("%q: %+v, error %v", value, reply, err)
			}
			if d := reply[0]; d.Clear > 2*time.Minute || d.RetryAfter > time.Minute || d.Remaining > 10 {
				t.Fatalf("%q: %+v", value, d)
			}
			if i == 0 {
				first = reply[0]
			}
			if i == 7 {
				v.advance(t, 59*time.Second)
			}
		}
		v.advance(t, 3*time.Minute)
		return first
	}
	for _, value := range []string{
		"", "0", "l", "H", "text", strings.Repeat("9", 19), fmt.Sprintf("%d001", v.now+1000), strings.Repeat("l", 43),
		strings.Repeat("l", 44), strings.Repeat("l", 2000), "l" + strings.Repeat("\x00", 43), "l" + strings.Repeat("\xff", 60),
	} {
		if d := try(t, value); d.Denied || d.Remaining != 9 {
			t.Errorf("%.40q: %+v, want an empty log", value, d)
		}
	}
	for what, change := range map[string]func(header []byte){
		"more units in the future than in all": func(header []byte) {
			header[21] = 2
			binary.BigEndian.PutUint64(header[24:], math.Float64bits(float64(v.now+1e9)))
		},
		"a fraction of a microsecond": func(header []byte) { header[8]++ },
	} {
		for _, b.Cost = range []int64{3, 1} {
			decide(t, v, AccountingAtomic, b)
			v.advance(t, time.Second)
		}
		value := []byte(v.stored(t, []Bucket{b})[0])
		change(value)
		if d := try(t, string(value)); d.Denied || d.Remaining != 9 {
			t.Errorf("%s: %+v, want an empty log", what, d)
		}
	}
	redistest.Done(t, v.admin.Del(t.Context(), key))
	redistest.Done(t, v.admin.RPush(t.Context(), key, "x"))
	if d := decide(t, v, AccountingAtomic, b)[0]; d.Denied {
		t.Errorf("a list: %+v, want an empty log", d)
	}
	checkTraces(t, 3, func(t *rapid.T) {
		v.flush(t)
		for range rapid.IntRange(1, 5).Draw(t, "charges") {
			b.Cost = rapid.Int64Range(1, 3).Draw(t, "cost")
			decide(t, v, AccountingAtomic, b)
			v.advance(t, time.Duration(rapid.Int64Range(0, 20e6).Draw(t, "µs"))*time.Microsecond)
		}
		value := []byte(v.stored(t, []Bucket{b})[0])
		for range rapid.IntRange(1, 4).Draw(t, "changes") {
			value[rapid.IntRange(0, len(value)-1).Draw(t, "index")] = rapid.Byte().Draw(t, "byte")
		}
		try(t, string(value[:len(value)-rapid.SampledFrom([]int{0, 0, 1, 2, 8, 10}).Draw(t, "cut")]))
	})
}

// TestLogHoldsUnits guards units that are held for a request which has buckets in
// other slots: they take room; they count from when they are committed, or as of the
// time until which they were held; and not once they are released.
func TestLogHoldsUnits(t *testing.T) {
	v := newPagedVirtual(t)
	b := logBucket(10, time.Minute, 4)
	req := Request{Buckets: []Bucket{b}}
	call := func(q *query) outcome {
		t.Helper()
		return v.evaluate(t, req, q)
	}
	peek := func(what string, want Level) {
		t.Helper()
		if l, err := v.Peek(t.Context(), b); err != nil || l != want {
			t.Errorf("%s: %+v, error %v, want %+v", what, l, err, want)
		}
	}
	for _, end := range []string{"committed", "released", "left"} {
		v.flush(t)
		v.at(t, v.start-v.start%60e6+3600e6)
		decide(t, v, AccountingAtomic, b)
		v.advance(t, 20*time.Second)
		q := asProcess(v.query(toHold(req), 0))
		o := call(q)
		if o.denied || o.held != 4 || o.receipt != v.now || *o.entries != (bucket.EntriesLevel{Units: 4, Clear: 40e6, Again: 40e6, One: 0}) {
			t.Errorf("held: %+v, %+v", o, o.entries)
		}
		expires, err := v.admin.PExpireTime(t.Context(), v.keys.of(&b)).Result()
		if least := time.Duration(o.receipt+60e6)*time.Microsecond + lapse; err != nil || expires < least {
			t.Errorf("the key expires at %v, error %v, want %v, when units would leave that are never settled", expires, err, least)
		}
		peek("held", Level{Units: 4, Held: 4, Remaining: 2, Clear: 40 * time.Second, RetryAfter: 40 * time.Second})
		again := call(asProcess(v.query(toHold(req), 0)))
		if !again.denied || !again.blocked || *again.entries != (bucket.EntriesLevel{Units: 8, Clear: 40e6, Again: 40e6, One: 0}) {
			t.Errorf("a request that has no room beside held units: %+v, %+v", again, again.entries)
		}
		v.advance(t, 5*time.Second)
		switch end {
		case "committed":
			settleAs(q, verdictAdmitted, []outcome{o})
			call(q)
			peek(end, Level{Units: 8, Remaining: 2, Clear: time.Minute, RetryAfter: 35 * time.Second})
		case "released":
			settleAs(q, verdictNone, []outcome{o})
			call(q)
			peek(end, Level{Units: 4, Remaining: 6, Clear: 35 * time.Second})
		case "left":
			v.advance(t, 10*time.Second-time.Microsecond)
			peek("still held", Level{Units: 4, Held: 4, Remaining: 2, Clear: 25*time.Second + 1000, RetryAfter: 25*time.Second + 1000})
			v.advance(t, time.Microsecond)
			peek("just left", Level{Units: 8, Remaining: 2, Clear: time.Minute, RetryAfter: 25 * time.Second})
			v.advance(t, 35*time.Second)
			peek(end, Level{Units: 4, Remaining: 6, Clear: 25 * time.Second})
			settleAs(q, verdictAdmitted, []outcome{o})
			if o := call(q); o.entries.Units != 4 {
				t.Errorf("settled too late: %+v", o.entries)
			}
			v.advance(t, 25*time.Second)
			peek("a window later", Level{Remaining: 10})
		}
	}
}

// TestLogJoinsReports guards a server that gets a report of what a node knows of a log: it
// holds no less than before, and no less than what that node has admitted if it is
// the only one, at any time from then on, although the report has only how many units
// there were in each window, and windows end later for the node. Its summary, which
// is what nodes know of the log, counts all of them. Telling it again changes nothing.
func TestLogJoinsReports(t *testing.T) {
	t.Parallel()
	v := newPagedVirtual(t)
	seen := struct{ added, known int }{}
	checkTraces(t, 10, func(t *rapid.T) {
		v.flush(t)
		b := logBucket(bucket.MaxLogUnits, rapid.SampledFrom([]time.Duration{10 * time.Microsecond, time.Second, time.Hour}).Draw(t, "window"), 1)
		l, rate := b.Limit, b.Limit.of().Rate()
		v.at(t, v.start-v.start%rate+10*rate+rapid.Int64Range(0, rate-1).Draw(t, "begins"))
		late := rapid.SampledFrom([]int64{0, 0, rapid.Int64Range(0, (rate-1)/2).Draw(t, "late")}).Draw(t, "is late")

		// Requests that only the server, only the node, or both know of.
		kinds := []int{1, 2}
		if rapid.Bool().Draw(t, "others") {
			kinds = append(kinds, 0)
		}
		there, node := &journal{}, &journal{}
		known, reported, entries := bucket.Level{}, bucket.Level{}, rapid.IntRange(0, 8).Draw(t, "requests")
		for range entries {
			v.at(t, v.now+rapid.Int64Range(0, rate/2).Draw(t, "gap"))
			b.Cost = rapid.Int64Range(1, 9).Draw(t, "cost")
			where := rapid.SampledFrom(kinds).Draw(t, "server, node, both")
			if where != 1 {
				there.admitted = append(there.admitted, charge{at: v.now, units: b.Cost})
				decide(t, v, AccountingAtomic, b)
			}
			if where != 0 {
				node.admitted = append(node.admitted, charge{at: v.now, units: b.Cost})
				shown := v.now - late
				known = l.of().Add(known, b.Cost, bucket.Moment{Now: shown, Unix: shown})
				if where == 2 {
					reported = l.of().Add(reported, b.Cost, bucket.Moment{Now: v.now, Unix: v.now})
					known = l.of().Join(known, reported, 0, false)
				}
			}
		}
		v.at(t, v.now+rapid.Int64Range(0, rate).Draw(t, "last gap"))
		known.Clear += late - v.now
		if known.Clear <= 0 {
			return
		}
		report := func() outcome {
			b.Cost = bucket.MaxLogUnits + 1 // never admitted, so nothing is charged
			outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{bucket.Ahead(known), 0, unsure}})
			if err != nil {
				t.Fatal(err)
			}
			return outcomes[0]
		}
		before := there.units(l, v.now)
		shown := report()
		first, summary := shown.entries, shown.After(0)
		stored := v.stored(t, []Bucket{b})[0]
		if again := report().entries; *again != *first || v.stored(t, []Bucket{b})[0] != stored {
			t.Fatalf("reported %+v twice: %+v, then %+v", known, first, again)
		}
		if _, last := known.Counts(); first.Units > before+known.Rest>>bucket.CountBits+last {
			t.Fatalf("reported %+v: %d units became %d", known, before, first.Units)
		}
		if first.Units > before {
			seen.added++
		} else {
			seen.known++
		}
		for from := v.now; v.now < from+2*rate; {
			l, err := v.Peek(context.Background(), b)
			if err != nil {
				t.Fatal(err)
			}
			least := there.units(b.Limit, v.now)
			if len(kinds) == 2 {
				least = max(least, node.units(b.Limit, v.now))
			}
			if counts := b.Limit.of().Units(summary, v.now-from); counts < l.Units {
				t.Fatalf("reported %+v: the summary, %+v, counts %d of %d units at %d", known, summary, counts, l.Units, v.now-from)
			}
			if l.Units < least {
				t.Fatalf("reported %+v: holds %d at %d, want at least %d: %+v, %+v", known, l.Units, v.now-from, least, there.admitted, node.admitted)
			}
			if l.Clear == 0 {
				break
			}
			v.at(t, v.now+max(rate/16, 1))
		}
	})
	if min(seen.added, seen.known) < 100 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestLogDistinguishesWindows guards a server that gets a report of two windows while it has
// nothing, and then of more units in the later one: it adds those too. If a window ends
// later for the node, or by the time that a call takes, units of the earlier one may count
// in both, but not for those of the later one.
func TestLogDistinguishesWindows(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := logBucket(20, time.Second, bucket.MaxLogUnits+1) // never admitted, so nothing is charged
	l := b.Limit
	for _, late := range []int64{0, 83, 300_000} {
		v.flush(t)
		v.at(t, v.start-v.start%1e6+10e6+100_000+late)
		at := v.now - late // of the node's windows
		known := l.of().Add(bucket.Level{}, 14, bucket.Moment{Now: at - 400_000, Unix: at - 400_000})
		held := int64(14)
		for _, units := range []int64{1, 3} {
			known = l.of().Add(known, units, bucket.Moment{Now: at, Unix: at})
			held += units
			for range 2 { // the second time it knows of them
				outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{known.Ahead(at), 0, behind}})
				if err != nil {
					t.Fatal(err)
				}
				before, last := outcomes[0].After(0).Counts()
				if before != 14 || last != held-14 && (late == 0 || last != held) {
					t.Errorf("%d µs late, reported 14 and %d units: counts %d and %d", late, held-14, before, last)
				}
				if got := outcomes[0].entries.Units; got != held {
					t.Errorf("%d µs late, reported 14 and %d units: holds %d", late, held-14, got)
				}
			}
			v.advance(t, 50*time.Millisecond)
			at += 50_000
		}
	}
}

// TestLogRights guards that logs need no rights in Redis but those that docs/redis.md
// names for them: short logs, long ones, and while units leave them.
func TestLogRights(t *testing.T) {
	server := redistest.Start(t)
	server.SetUser(t, "+evalsha", "+eval", "+get", "+set", "+time", "+getrange", "+setrange", "+strlen", "+pexpireat")
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Username, opt.Password = "limiter", "pass" })
	b := logBucket(bucket.MaxLogUnits, 200*time.Millisecond, 1)
	for range 2 {
		for i := range 1500 {
			d, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			if err != nil || d[0].By != DecidedByRedis {
				t.Fatalf("request %d: %+v, %v", i, d, err)
			}
		}
	}
}
