package limiter

import (
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// clockedRedis is a Redis store whose script gets its time from the test.
type clockedRedis struct {
	*Redis
	now   int64 // µs; set it with at
	start int64 // where the clock started
	admin *redis.Client

	source string // of the script
}

// newClockedRedis returns a virtual store in the given server.
//
// Its keys still expire on the server's own clock, when they would on the virtual one.
// That starts ten years ahead: no key expires while the test runs, and drained buckets
// are found as the script left them, which must make no difference.
func newClockedRedis(t testing.TB, server *redistest.Server, prefix string) *clockedRedis {
	t.Helper()
	return newClockedRedisOf(t, server, prefix, takeSource)
}

// newVirtualOf is newClockedRedis with another script.
func newClockedRedisOf(t testing.TB, server *redistest.Server, prefix, source string) *clockedRedis {
	t.Helper()
	const real, ours = "redis.call('TIME')", "redis.call('HMGET', 'clock', 's', 'us')"
	if n := strings.Count(source, real); n != 1 {
		t.Fatalf("the script reads the time %d times", n)
	}
	source = strings.NewReplacer(real, ours, "'PX', 1)", "'PX', 1)", "'PX', ", "'PXAT', floor(now / 1000) + ").Replace(source)
	r := newRedis(RedisOptions{Addresses: []string{server.Socket}, KeyPrefix: prefix, Timeout: 10 * time.Second}, newScript(source))
	t.Cleanup(func() { _ = r.Close() })
	r.ledger.running = true // not in the background, which does not know the clock
	start := time.Now().AddDate(10, 0, 0).UnixMicro()
	v := &clockedRedis{
		Redis: r,
		start: start,
		admin: server.Client(),

		source: source,
	}
	r.clock = func() time.Duration { return time.Duration(v.now-v.start) * time.Microsecond }
	v.at(t, start)
	return v
}

// at sets the clock. If that is back in time, the deny cache is reset, because the
// clock of a process never goes back.
func (v *clockedRedis) at(t rapid.TB, now int64) {
	t.Helper()
	if now < v.now {
		v.denyCache = newDenyCache(64)
	}
	v.now = now
	redistest.Done(t, v.admin.HSet(context.Background(), "clock", "s", now/1e6, "us", now%1e6))
}

// advance moves the clock forward.
func (v *clockedRedis) advance(t rapid.TB, d time.Duration) {
	t.Helper()
	v.at(t, v.now+d.Microseconds())
}

// flush starts afresh: with no keys, and the clock at its start.
func (v *clockedRedis) flush(t rapid.TB) {
	t.Helper()
	redistest.Done(t, v.admin.FlushDB(context.Background()))
	v.at(t, v.start)
	v.denyCache = newDenyCache(64)
}

// dump returns all that is stored but the clock, by key.
func (v *clockedRedis) dump(t rapid.TB) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, key := range v.admin.Keys(context.Background(), "*").Val() {
		if value, err := v.admin.Dump(context.Background(), key).Result(); err == nil && key != "clock" { // or it expired
			all[key] = value
		}
	}
	return all
}

// restore has all stored that dump has returned, and nothing else.
func (v *clockedRedis) restore(t rapid.TB, all map[string]string) {
	t.Helper()
	now := v.now
	v.flush(t)
	v.at(t, now)
	for key, value := range all {
		redistest.Done(t, v.admin.Restore(context.Background(), key, 0, value))
	}
}

// stored returns the stored value of each bucket, "" for one that is absent.
func (v *clockedRedis) stored(t rapid.TB, buckets []Bucket) []string {
	t.Helper()
	keys := make([]string, len(buckets))
	for i := range buckets {
		keys[i] = v.keys.of(&buckets[i])
	}
	reply, err := v.admin.MGet(context.Background(), keys...).Result()
	if err != nil {
		t.Fatal(err)
	}
	values := make([]string, len(reply))
	for i := range reply {
		values[i], _ = reply[i].(string)
	}
	return values
}

// drawShape draws a limit of any magnitude.
func drawShape(t *rapid.T) Limit {
	var l Limit
	switch rapid.IntRange(0, 5).Draw(t, "small, any, largest, window, sliding, warm-up") {
	case 0:
		l.Size = rapid.Int64Range(1, 20).Draw(t, "size")
		l.DripSize = rapid.SampledFrom([]int64{1, 1, 2, 3, 7, 20, 25}).Draw(t, "drip size")
		l.DripInterval = rapid.SampledFrom([]time.Duration{
			time.Microsecond, 7 * time.Microsecond, 999 * time.Microsecond, time.Millisecond,
			333_333 * time.Microsecond, time.Second, time.Hour,
		}).Draw(t, "drip rate")
	case 1:
		bits := rapid.IntRange(1, 49)
		l.Size = rapid.Int64Range(1, 1<<bits.Draw(t, "size bits")).Draw(t, "size")
		l.DripSize = rapid.Int64Range(1, 1<<bits.Draw(t, "drip size bits")).Draw(t, "drip size")
		most := bucket.Horizon / (bucket.CeilDiv(l.Size, l.DripSize) + 1)
		l.DripInterval = time.Duration(rapid.Int64Range(1, most).Draw(t, "drip rate")) * time.Microsecond
	case 2: // (drips + 1) · rate is 2^50, to the unit
		bits := rapid.IntRange(1, 49).Draw(t, "drip rate bits")
		drips := int64(bucket.Horizon>>bits) - 1
		l.DripInterval = time.Duration(int64(1)<<bits) * time.Microsecond
		l.DripSize = rapid.Int64Range(1, max(MaxUnits/drips, 1)).Draw(t, "drip size")
		l.Size = rapid.Int64Range((drips-1)*l.DripSize+1, min(drips*l.DripSize, MaxUnits)).Draw(t, "size")
		if (bucket.CeilDiv(l.Size, l.DripSize)+1)*l.of().Rate() != bucket.Horizon {
			t.Fatalf("%+v is not the largest", l)
		}
	case 3:
		l = FixedWindow(rapid.Int64Range(1, 1<<rapid.IntRange(1, 49).Draw(t, "size bits")).Draw(t, "size"),
			rapid.SampledFrom([]time.Duration{
				2 * time.Microsecond, 7 * time.Microsecond, time.Second, time.Minute, 23 * time.Hour, 366 * 24 * time.Hour,
			}).Draw(t, "window"))
	case 4:
		l = drawSliding(t)
	case 5:
		if l = drawWarm(t); l.Validate() != nil {
			l = warmingUp(2, time.Second, 4*time.Second, 3)
		}
		l = drawWaiting(t, l)
	}
	if (l.Algorithm == bucket.Leaky || l.Algorithm == bucket.Fixed) && rapid.Bool().Draw(t, "aligned") || l.Algorithm == bucket.Sliding {
		l.Aligned = true
		l.Phase = time.Duration(rapid.Int64Range(0, l.of().Rate()-1).Draw(t, "phase")) * time.Microsecond
	}
	if err := l.Validate(); err != nil {
		t.Fatal(err)
	}
	return l
}

// drawBuckets draws the few buckets that a trace of requests uses, with limits of the
// given kind. No two have the same name and key.
func drawBuckets(t *rapid.T, shape func(*rapid.T) Limit) []Bucket {
	shapes := rapid.SliceOfN(rapid.Custom(shape), 1, 3).Draw(t, "limits")
	buckets := make([]Bucket, rapid.IntRange(1, 6).Draw(t, "buckets"))
	for i := range buckets {
		buckets[i] = Bucket{
			Name:  []string{"a", "b"}[i%2],
			Key:   []string{"x", "y", "z"}[i/2],
			Limit: rapid.SampledFrom(shapes).Draw(t, "limit"), Cost: 1,
		}
	}
	return buckets
}

// drawRequest draws a request to one to four of the buckets.
func drawRequest(t *rapid.T, buckets []Bucket) Request {
	req := Request{Accounting: rapid.SampledFrom([]Accounting{AccountingAtomic, AccountingEach}).Draw(t, "accounting")}
	first := rapid.IntRange(0, len(buckets)-1).Draw(t, "first")
	for i := range rapid.IntRange(1, min(len(buckets), 4)).Draw(t, "number") {
		b := buckets[(first+i)%len(buckets)]
		if rapid.IntRange(0, 3).Draw(t, "another size: 3") == 3 {
			b.Limit.Size = rapid.SampledFrom([]int64{
				b.Limit.Size, b.Limit.Size/2 + 1, b.Limit.Size/1000 + 1, 1,
			}).Draw(t, "size")
		}
		size := b.Limit.Size
		b.Cost = rapid.SampledFrom([]int64{
			0, 1, 2, 3, b.Limit.DripSize, size/9 + 1, size/3 + 1, size/2 + 1, max(size-1, 1), size,
		}).Draw(t, "cost")
		if rapid.IntRange(0, 19).Draw(t, "never: 19") == 19 {
			b.Cost = rapid.SampledFrom([]int64{size + 1, math.MaxInt64}).Draw(t, "cost")
		}
		b.Limit.CountDenied = rapid.IntRange(0, 3).Draw(t, "counts denied: 3") == 3
		req.Buckets = append(req.Buckets, b)
	}
	return req
}

// drawMove draws how far the clock moves before the next request: hardly at all,
// by about the time of a drip, of a full bucket or of the last RetryAfter, or by
// any time; and, with back, sometimes backwards.
func drawMove(t *rapid.T, l Limit, last Decision, back bool) int64 {
	near := rapid.Int64Range(-2, 2)
	gap, kinds := int64(0), 7
	if back {
		kinds = 9
	}
	switch rapid.IntRange(0, kinds).Draw(t, "gap") {
	case 0, 1:
	case 2:
		gap = rapid.Int64Range(1, 1000).Draw(t, "µs")
	case 3:
		gap = l.of().Rate() + near.Draw(t, "near")
	case 4:
		gap = rapid.Int64Range(1, 3*l.of().Rate()).Draw(t, "drips")
	case 5:
		gap = last.RetryAfter.Microseconds() + near.Draw(t, "near")
	case 6:
		gap = last.Clear.Microseconds() + near.Draw(t, "near")
	case 7:
		gap = rapid.Int64Range(1, 1<<rapid.IntRange(1, 50).Draw(t, "bits")).Draw(t, "µs")
	case 8: // back a little, and by just enough to be noticed
		return -max(rapid.Int64Range(0, 2).Draw(t, "drips")*l.of().Rate()+near.Draw(t, "near"), 1)
	case 9:
		return -rapid.Int64Range(1, 1<<rapid.IntRange(1, 50).Draw(t, "bits")).Draw(t, "back")
	}
	return max(gap, 0)
}

// keep brings a time on the virtual clock back into the fifty years after its
// start: before that keys may expire, and after it numbers would exceed what a
// time may be.
func (v *clockedRedis) keep(now int64) int64 {
	const span = 50 * 365 * 24 * 3600 * 1e6
	return v.start + ((now-v.start)%span+span)%span
}

// evaluate has the script answer q, a query about req, whose only bucket's outcome it
// returns. It asks without all that a Redis store does besides.
func (v *clockedRedis) evaluate(t rapid.TB, req Request, q *query) outcome {
	t.Helper()
	reply, err := v.admin.Eval(context.Background(), v.source, q.Keys, string(q.appendGroup(nil))).Int64Slice()
	if err != nil {
		t.Fatal(err)
	}
	if len(reply) != q.Replies {
		t.Errorf("%d numbers in a reply to %d, want %d", len(reply), q.what, q.Replies)
	}
	q.Reply = reply
	outcomes, _, err := q.outcomes(nil)
	if err != nil {
		t.Fatal(err)
	}
	return outcomes[0]
}

// described is a trace of requests to one bucket whose answers are known.
type described struct {
	limit Limit
	gap   func(last Decision) int64      // the time to the next request, in µs
	cost  func(last Decision) int64      // what it costs
	take  func(now, cost int64) Decision // how it has to be decided
	value func() string                  // what is stored then, if that is known; take knows the whole Decision then
}

// checkRedisTraces checks what Redis decides in n hundred traces, or in as many as the
// flag says, each with a bucket of its own, from the same moment on.
func checkRedisTraces(t *testing.T, n int, draw func(*rapid.T) described) {
	t.Helper()
	v, trace := newClockedRedis(t, redistest.Start(t), "rl:"), 0
	checkTraces(t, n, func(t *rapid.T) {
		d, last := draw(t), Decision{}
		trace++
		v.at(t, v.start)
		b := Bucket{Name: "b", Key: strconv.Itoa(trace), Limit: d.limit, Cost: 1}
		for i := range rapid.IntRange(1, 30).Draw(t, "requests") {
			v.at(t, v.now+d.gap(last))
			b.Cost = d.cost(last)
			want := d.take(v.now, b.Cost)
			last = decide(t, v, AccountingAtomic, b)[0]
			got := last
			if d.value == nil {
				got = plainDecision(last)
			} else if got, want := v.stored(t, []Bucket{b})[0], d.value(); got != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs: stored %q, want %q", b.Limit, i, b.Cost, v.now, got, want)
			}
			if got != want {
				t.Fatalf("%+v, request %d, cost %d, at %d µs:\n got %+v\nwant %+v", b.Limit, i, b.Cost, v.now, got, want)
			}
		}
	})
}

// TestRedisBuckets guards buckets in Redis: every number in every decision is what the
// described bucket would give, drip by drip.
func TestRedisBuckets(t *testing.T) {
	t.Parallel()
	seen := struct{ admitted, denied, never int }{}
	checkRedisTraces(t, 10, func(t *rapid.T) described {
		l, m := drawLimit(t), new(model)
		return described{
			limit: l,
			gap:   func(last Decision) int64 { return drawGap(t, l, last) },
			cost:  func(Decision) int64 { return drawCost(t, l) },
			take: func(now, cost int64) Decision {
				d := m.take(l, now, cost)
				switch {
				case d.Never:
					seen.never++
				case d.Denied:
					seen.denied++
				default:
					seen.admitted++
				}
				return d
			},
		}
	})
	if min(seen.admitted, seen.denied, seen.never) < 500 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestStoresAgree sends the same random requests at the same times to the script
// in Redis, to Memory, and to limit.go over a plain map. It requires the same
// decisions from all, and in Redis the state that limit.go computes.
//
// In half of the traces the clock also goes back, which Memory's clock never may:
// Memory is left out from then on.
func TestStoresAgree(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	v := newClockedRedis(t, server, "rl:")
	seen := struct{ steps, both, admitted, denied, never, overfull, reset, slack, partly int }{}
	agree := func(t *rapid.T) {
		v.flush(t)
		p := plain{}
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		buckets, last, limit := drawBuckets(t, drawShape), Decision{}, Limit{Size: 1, DripInterval: time.Second, DripSize: 1}
		back, went := rapid.Bool().Draw(t, "back"), false
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			now := v.keep(v.now + drawMove(t, limit, last, back))
			went = went || now < v.now
			v.at(t, now)
			req := drawRequest(t, buckets)
			before := make([]written, len(req.Buckets))
			for i, b := range req.Buckets {
				before[i] = p[identity(b)]
			}

			want := p.take(req, v.now)
			if !went {
				seen.both++
				if got := decide(t, m, req.Accounting, req.Buckets...); !slices.Equal(got, want) {
					t.Fatalf("%+v at %d of\n%+v:\nMemory decided\n%+v, want\n%+v", req, v.now, before, got, want)
				}
			}
			if got := decide(t, v, req.Accounting, req.Buckets...); !slices.Equal(got, want) {
				t.Fatalf("%+v at %d of\n%+v:\nRedis decided\n%+v, want\n%+v, stored %q", req, v.now, before, got, want, v.stored(t, req.Buckets))
			}
			for i, got := range v.stored(t, req.Buckets) {
				s := p[identity(req.Buckets[i])]
				if got != s.value() {
					t.Fatalf("%+v at %d of\n%+v:\nstored %q, want %q", req, v.now, before, got, s.value())
				}
				if s.Level != before[i].Level && want[i].Denied {
					seen.reset++
				}
				if s.Clear-v.now > req.Buckets[i].Limit.of().DrainTime().Microseconds() {
					seen.overfull++
				}
				if s.Rest > 0 {
					seen.slack++
				}
			}

			i := rapid.IntRange(0, len(want)-1).Draw(t, "watched")
			last, limit = want[i], req.Buckets[i].Limit
			sum := Summarize(req.Buckets, want)
			seen.steps++
			switch {
			case sum.Never:
				seen.never++
			case sum.Denied:
				seen.denied++
				if slices.ContainsFunc(want, func(d Decision) bool { return !d.Denied }) {
					seen.partly++
				}
			default:
				seen.admitted++
			}
		}
	}
	checkTraces(t, 8, agree)
	t.Logf("%+v", seen)
	if min(seen.both, seen.admitted, seen.denied, seen.never, seen.overfull, seen.slack) < 200 || min(seen.reset, seen.partly) < 20 {
		t.Errorf("the test covers too little: %+v", seen)
	}
}

// TestSeed001Redis guards that Redis decides the example of seed 001 as in its
// table.
func TestSeed001Redis(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	testSeed001(t, v, func(d time.Duration) { v.advance(t, d) })
}
