package limiter

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// pause is an algorithm of a test: after each request that is admitted, the next has to
// wait for the drip interval, whatever it costs.
type pause struct{}

func (pause) Validate(*bucket.Limit) error { return nil }

func (pause) DrainTime(l *bucket.Limit) time.Duration { return l.DripInterval }

func (pause) DripTime(l *bucket.Limit, _ int64) time.Duration { return l.DripInterval }

func (pause) Doubles(l *bucket.Limit, _ int64) (size, rate, drip, phase float64) {
	return float64(l.Size), float64(l.Rate()), 1, -1
}

func (pause) RestEnd(*bucket.Limit) int64 { return 1 }

func (pause) Room(l *bucket.Limit, s bucket.Level, n, now int64) int64 {
	if s.Clear > now || n > 0 {
		return 0
	}
	return l.Size
}

func (a pause) Remaining(l *bucket.Limit, s bucket.Level, now int64) int64 {
	return a.Room(l, s, 0, now)
}

func (pause) Wait(_ *bucket.Limit, s bucket.Level, _, now int64) int64 { return max(s.Clear-now, 0) }

func (pause) Units(_ *bucket.Limit, s bucket.Level, now int64) int64 {
	return min(max(s.Clear-now, 0), 1)
}

func (pause) Add(l *bucket.Limit, s bucket.Level, _ int64, at bucket.Moment) bucket.Level {
	return bucket.Level{Clear: max(s.Clear, at.Now) + l.Rate()}
}

func (pause) AtLeast(l *bucket.Limit, s bucket.Level, _, _ int64, at bucket.Moment) bucket.Level {
	return bucket.Level{Clear: max(s.Clear, at.Now+l.Rate())}
}

func (pause) Count(_ *bucket.Limit, s bucket.Level, _, _ int64, _ bucket.Moment) bucket.Level {
	return s
}

func (pause) Join(_ *bucket.Limit, a, b bucket.Level, _ time.Duration, _ bool) bucket.Level {
	return bucket.Level{Clear: max(a.Clear, b.Clear)}
}

func (pause) Arriving(_ *bucket.Limit, s bucket.Ahead, _ int64) (bucket.Ahead, bool) { return s, false }

func (pause) Ending(_ *bucket.Limit, s bucket.Level, _, _ int64) bucket.Level { return s }

const pauseLua = `
local function pause(what, clear, rest, n, at, size, rate, _, _, other)
  if what == 'room' or what == 'reported' then
    return clear <= at and n == 0 and size or 0
  elseif what == 'add' then
    return math.max(clear, at) + rate, 0
  elseif what == 'near' then
    return other
  elseif what == 'join' then
    return math.max(clear, other), 0
  end
  return clear, rest
end
`

// TestAlgorithmPlugsIn guards that an algorithm is a type in Go, a function in Lua and a
// line in the two lists: with no more than that, both stores decide by it, alone and
// next to others, and a node goes on from what a server reported, and back.
func TestAlgorithmPlugsIn(t *testing.T) {
	toy := bucket.Algorithm(len(bucket.Algorithms))
	bucket.Algorithms = append(bucket.Algorithms, bucket.Kind{Name: "pause", Letter: 'p', Drip: 0, Entries: false, Charging: bucket.AheadNever, Counting: pause{}})
	t.Cleanup(func() { bucket.Algorithms = bucket.Algorithms[:toy] })
	const first = "if kind == FIXED then"
	source := strings.Replace(takeSource, first, fmt.Sprintf("if kind == %d then%sothers[%d] = pause\nelse%s", toy, pauseLua, toy, first), 1)

	server := redistest.Start(t)
	v := newClockedRedisOf(t, server, "rl:", source)
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	trace := 0
	checkTraces(t, 2, func(t *rapid.T) {
		trace++
		rate := rapid.SampledFrom([]time.Duration{time.Second, time.Minute, time.Hour}).Draw(t, "interval")
		b := Bucket{Name: "toy", Key: fmt.Sprint(trace), Limit: Limit{Size: 5, DripInterval: rate, DripSize: 1, Algorithm: toy}, Cost: 1}
		open := b // which always has room
		open.Name, open.Limit, open.Cost = "open", Limit{Size: MaxUnits / 4, DripInterval: time.Microsecond, DripSize: 1}, 1
		until := int64(0)
		for range rapid.IntRange(1, 20).Draw(t, "requests") {
			v.advance(t, time.Duration(rapid.Int64Range(0, 2*rate.Microseconds()).Draw(t, "gap"))*time.Microsecond)
			b.Cost = rapid.Int64Range(1, b.Limit.Size+1).Draw(t, "cost")
			denied := v.now < until || b.Cost > b.Limit.Size
			for _, store := range []Store{v, m} {
				if d := decide(t, store, AccountingAtomic, open, b)[1]; d.Denied != denied || denied && !d.Never && d.RetryAfter != time.Duration(until-v.now)*time.Microsecond {
					t.Fatalf("%T: %+v, want denied %t until %d at %d", store, d, denied, until, v.now)
				}
			}
			if !denied {
				until = v.now + rate.Microseconds()
			}
		}
	})

	// A node that loses its server, and then has one that lost everything.
	b := Bucket{Name: "toy", Key: "outage", Limit: Limit{Size: 5, DripInterval: time.Hour, DripSize: 1, Algorithm: toy}, Cost: 1}
	opt := RedisOptions{Addresses: []string{server.Addr}, KeyPrefix: "node:", Timeout: 50 * time.Millisecond, Fallback: NewMemory()}
	r := newRedis(opt, newScript(source))
	t.Cleanup(func() { _ = r.Close() })
	r.Connect(t.Context())
	if d := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]; d.Denied {
		t.Errorf("at first: %+v", d)
	}
	server.Kill()
	r.denyCache = newDenyCache(64)
	if d := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]; !d.Denied || d.By != DecidedByFallback {
		t.Errorf("without a server: %+v", d)
	}
	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		r.denyCache = newDenyCache(64)
		if d := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]; !d.Denied {
			t.Fatalf("by a server that lost everything: %+v", d)
		} else if d.By != DecidedByRedis {
			return fmt.Errorf("decided by %v", d.By)
		}
		return nil
	})
}
