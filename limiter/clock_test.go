package limiter

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// written is the value of a bucket in Redis: its level, when that was written, and what
// is held.
type written struct {
	bucket.Level
	when      int64
	algorithm bucket.Algorithm
	record    heldRecord
}

// written returns the value of a bucket at s that is written at now.
func (l Limit) written(s bucket.Level, now int64) written {
	return written{Level: s, when: now, algorithm: l.Algorithm}
}

// at returns the level at now, and whether the clock has been set back since the value
// was written: then the bucket holds what it held then.
func (w written) at(now int64) (s bucket.Level, back bool) {
	if back = w.when > now; back {
		w.Clear -= w.when - now
	}
	return w.Level.At(now), back
}

// value returns w as a string in Redis, see value.lua.
func (w written) value() string {
	if w.Level == (bucket.Level{}) {
		return ""
	}
	kind, ahead := uint64(w.algorithm)+8, uint64(w.Clear-w.when)
	if w.Rest == 0 && len(w.record) == 0 && ahead < 1<<40 {
		b := binary.BigEndian.AppendUint64(nil, kind<<60|uint64(w.Clear)<<8|ahead>>32)
		return string(binary.BigEndian.AppendUint32(b, uint32(ahead)))
	}
	b := appendDoubles([]byte{byte(kind)}, float64(w.Clear), float64(w.Rest), float64(w.when))
	for _, t := range w.record {
		b = appendDoubles(b, float64(t.process), float64(t.number), float64(t.receipt), float64(t.seen), float64(t.held), float64(t.ended), float64(t.charged))
	}
	return string(b)
}

// parseWritten parses a string in Redis, and reports whether it is valid.
func parseWritten(value string) (w written, ok bool) {
	b := []byte(value)
	switch {
	case len(b) == 12:
		first := binary.BigEndian.Uint64(b)
		w.algorithm, w.Clear = bucket.Algorithm(first>>60-8), int64(first>>8&(1<<52-1))
		w.when = w.Clear - int64(first&0xff<<32|uint64(binary.BigEndian.Uint32(b[8:])))
		return w, true
	case len(b) >= 25 && (len(b)-25)%56 == 0:
		w.algorithm = bucket.Algorithm(b[0] - 8)
		double := func(i int) int64 {
			return int64(math.Float64frombits(binary.BigEndian.Uint64(b[1+8*i:])))
		}
		w.Clear, w.Rest, w.when = double(0), double(1), double(2)
		for i := 3; i < len(b)/8; i += 7 {
			w.record = append(w.record, heldAccount{double(i), double(i + 1), double(i + 2), double(i + 3), double(i + 4), double(i + 5), double(i + 6)})
		}
		return w, true
	}
	return w, false
}

// TestRedisClockSetBack guards what clients see when Redis's clock is set back, or
// when a master with a slower clock takes over: a bucket holds no more than when
// it was last charged, and clients wait no longer than they would have then. After
// that the bucket drips, even while requests keep coming.
func TestRedisClockSetBack(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	minutely := Limit{Size: 10, DripInterval: time.Minute, DripSize: 1}
	for _, tc := range []struct {
		name         string
		limit        Limit
		filled       int64
		dripped      time.Duration // before the clock is set back
		back         time.Duration
		want         int64 // units that are left then
		clear, retry time.Duration
	}{
		{"full", minutely, 10, 0, 600 * time.Second, 0, 10 * time.Minute, time.Minute},
		{"full, a little", minutely, 10, 0, 2 * time.Microsecond, 0, 10 * time.Minute, time.Minute},
		{"full, years", minutely, 10, 0, 30 * 365 * 24 * time.Hour, 0, 10 * time.Minute, time.Minute},
		{"by what has passed", minutely, 10, 90 * time.Second, 90 * time.Second, 0, 10 * time.Minute, time.Minute},
		{"by less", minutely, 10, 90 * time.Second, 80 * time.Second, 0, 590 * time.Second, 50 * time.Second},
		{"after drips", minutely, 10, 5 * time.Minute, 600 * time.Second, 0, 10 * time.Minute, time.Minute},
		{"half full", minutely, 5, 0, 600 * time.Second, 5, 5 * time.Minute, 0},
		{"slack", Limit{Size: 10, DripInterval: time.Minute, DripSize: 3}, 7, 0, time.Hour, 3, 3 * time.Minute, 0},
		{"slack, full", Limit{Size: 10, DripInterval: time.Minute, DripSize: 3}, 10, 0, time.Hour, 0, 4 * time.Minute, time.Minute},
		{"256 drips", Limit{Size: 1000, DripInterval: time.Second, DripSize: 1}, 256, 0, time.Hour, 744, 256 * time.Second, 0},
		{"many drips", Limit{Size: 1000, DripInterval: time.Second, DripSize: 1}, 257, 0, time.Hour, 743, 257 * time.Second, 0},
		{"many drips, full", Limit{Size: 1000, DripInterval: time.Second, DripSize: 1}, 1000, 0, time.Hour, 0, 1000 * time.Second, time.Second},
		{"many drips and slack, full", Limit{Size: 3000, DripInterval: time.Second, DripSize: 7}, 3000, 0, time.Hour, 0, 429 * time.Second, time.Second},
		{"the most drips, full", Limit{Size: MaxUnits, DripInterval: time.Microsecond, DripSize: 1}, MaxUnits, 0, time.Hour, 0, MaxUnits * time.Microsecond, time.Microsecond},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v.flush(t)
			v.advance(t, 40*365*24*time.Hour)
			b := Bucket{Name: "b", Key: "k", Limit: tc.limit, Cost: tc.filled}
			decide(t, v, AccountingAtomic, b)
			v.advance(t, tc.dripped)
			v.advance(t, -tc.back)

			b.Cost = 1
			if tc.retry == 0 {
				b.Cost = tc.limit.Size + 1 // only to read the level
			}
			want := Decision{Denied: true, Never: tc.retry == 0, Size: tc.limit.Size, Remaining: tc.want, Clear: tc.clear, RetryAfter: tc.retry}
			for _, wait := range []time.Duration{0, tc.retry - time.Microsecond} {
				if wait > 0 {
					v.advance(t, wait)
					want.Clear -= wait
					want.RetryAfter -= wait
				}
				if got := plainDecision(decide(t, v, AccountingAtomic, b)[0]); got != want {
					t.Fatalf("%v after that: decided %+v, want %+v", wait, got, want)
				}
			}
			v.advance(t, time.Microsecond)
			if d := decide(t, v, AccountingAtomic, b)[0]; d.Denied == (tc.retry > 0) {
				t.Errorf("when it is time: decided %+v", d)
			}
		})
	}
}

// TestRedisClockSetBackWithSeveralSizes guards that a request with a small size,
// which finds more in a bucket than its own limit ever adds, does not mistake that
// for a clock that was set back; and what happens if the clock was set back.
func TestRedisClockSetBackWithSeveralSizes(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	of := func(size, cost int64) Bucket {
		return Bucket{Name: "b", Key: "k", Limit: Limit{Size: size, DripInterval: time.Minute, DripSize: 1}, Cost: cost}
	}
	remaining := func(want int64) {
		t.Helper()
		if d := decide(t, v, AccountingAtomic, of(100, 101))[0]; d.Remaining != want {
			t.Errorf("%d remaining, want %d", d.Remaining, want)
		}
	}
	decide(t, v, AccountingAtomic, of(100, 90))
	for range 3 {
		v.advance(t, time.Minute)
		decide(t, v, AccountingAtomic, of(10, 1))
	}
	remaining(13)
	v.advance(t, -time.Hour)
	want := Decision{Denied: true, Size: 10, Clear: 90 * time.Minute, RetryAfter: 81 * time.Minute}
	if d := decide(t, v, AccountingAtomic, of(10, 1))[0]; d != want {
		t.Errorf("decided %+v, want %+v", d, want)
	}
	remaining(10)
	v.advance(t, time.Minute)
	remaining(11)
}

// TestRedisClockSetAhead guards the documented bound when Redis's clock, or that
// of a new master, is ahead: a bucket admits up to one more bucketful, once, and
// nothing more when the clock is set back again.
func TestRedisClockSetAhead(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 10, DripInterval: time.Minute, DripSize: 1}, Cost: 1}
	flood := func() (n int) {
		t.Helper()
		for !decide(t, v, AccountingAtomic, b)[0].Denied {
			n++
		}
		return n
	}
	var got []int
	for _, move := range []time.Duration{0, 600 * time.Second, -600 * time.Second, time.Minute, 5 * time.Minute, -time.Hour} {
		v.advance(t, move)
		got = append(got, flood())
	}
	if want := []int{10, 10, 0, 1, 5, 0}; !slices.Equal(got, want) {
		t.Errorf("%d admitted, want %d", got, want)
	}
}

// TestSizesShareBucket guards a deployment that changes a size from one node to
// the next: together, nodes with both sizes admit what the larger size allows, and
// no more.
func TestSizesShareBucket(t *testing.T) {
	server := redistest.Start(t)
	var now time.Duration
	m := NewMemoryWithClock(func() time.Duration { return now })
	v, other := newClockedRedis(t, server, "rl:"), newClockedRedis(t, server, "rl:")
	v.start = other.start // both have the server's clock
	v.flush(t)
	for _, tc := range []struct {
		name    string
		stores  []Store
		advance func(time.Duration)
	}{
		{"Memory", []Store{m, m}, func(d time.Duration) { now += d }},
		{"Redis", []Store{v, other}, func(d time.Duration) {
			v.advance(t, d)
			other.now = v.now
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			smaller := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 20, DripInterval: time.Second, DripSize: 1}, Cost: 1}
			larger := smaller
			larger.Limit.Size = 21
			admitted := int64(0)
			for second := range int64(100) {
				for range 30 {
					for i, b := range []Bucket{smaller, larger} {
						if !decide(t, tc.stores[i], AccountingAtomic, b)[0].Denied {
							admitted++
						}
					}
				}
				if want := 21 + second; admitted != want {
					t.Fatalf("%d admitted in %d s, want %d", admitted, second, want)
				}
				tc.advance(time.Second)
			}
		})
	}
}

// TestDenyCacheOfSeveralSizes guards cached denials of a bucket that is used with
// several sizes: each size is denied without a call as long as the bucket is full
// for it, and RetryAfter includes what the others have added.
func TestDenyCacheOfSeveralSizes(t *testing.T) {
	server := redistest.Start(t)
	v := newClockedRedis(t, server, "rl:")
	of := func(size, cost int64) Bucket {
		return Bucket{Name: "b", Key: "k", Limit: Limit{Size: size, DripInterval: time.Minute, DripSize: 1}, Cost: cost}
	}
	c := redistest.CommandCounter{Server: server}
	c.Since(t, "evalsha")
	for _, st := range []struct {
		bucket Bucket
		denied bool
		retry  time.Duration
		calls  int64
	}{
		{of(5, 5), false, 0, 1},
		{of(5, 1), true, time.Minute, 0},
		{of(3, 1), true, 3 * time.Minute, 0}, // the bucket is even fuller for a smaller size
		{of(9, 2), false, 0, 1},              // not full for a larger size
		{of(5, 1), true, 3 * time.Minute, 0},
		{of(9, 2), false, 0, 1},
		{of(9, 1), true, time.Minute, 0},
		{of(5, 1), true, 5 * time.Minute, 0},
		{of(10, 1), false, 0, 1},
	} {
		d := decide(t, v, AccountingAtomic, st.bucket)[0]
		if d.Denied != st.denied || d.RetryAfter != st.retry {
			t.Errorf("size %d, cost %d: decided %+v, want a wait of %v", st.bucket.Limit.Size, st.bucket.Cost, d, st.retry)
		}
		c.Check(t, "evalsha", st.calls)
	}
}

// TestDenyCacheOfSeveralSizesAllowsForLatency guards that the answer to a request
// with a small size denies a request with a larger one no longer than the server
// might: the server may have read its clock as soon as it got the first request.
func TestDenyCacheOfSeveralSizesAllowsForLatency(t *testing.T) {
	const sent, answered, rate = 5_000_000, 5_300_000, 400_000
	of := func(size int64) Request {
		l := Limit{Size: size, DripInterval: rate * time.Microsecond, DripSize: 1}
		return Request{Buckets: []Bucket{{Name: "b", Key: "k", Limit: l, Cost: 1}}}
	}
	d := newDenyCache(denySlots)
	d.remember(of(5), []outcome{{Ahead: bucket.Ahead{Clear: 9 * rate}, denied: true}}, sent, clockAt(answered))
	for _, tc := range []struct {
		size, now int64
		denied    bool
	}{
		{9, sent + rate - 1, true},
		{9, sent + rate, false},
		{5, sent + rate, true},
		{5, sent + cacheFor - 1, true},
		{5, sent + cacheFor, false},
	} {
		if _, denied := d.decide(of(tc.size), tc.now, nil); denied != tc.denied {
			t.Errorf("size %d, %d µs after it was sent: denied %t", tc.size, tc.now-sent, denied)
		}
	}
}
