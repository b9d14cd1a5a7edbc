package limiter

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// mustNewRedis returns a store with valid options.
func mustNewRedis(t testing.TB, opt RedisOptions) *Redis {
	t.Helper()
	r, err := NewRedis(opt)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// newTestRedis returns a store in the given server with plenty of time; change may
// change its options.
func newTestRedis(t testing.TB, server *redistest.Server, change func(*RedisOptions)) *Redis {
	t.Helper()
	opt := RedisOptions{Addresses: []string{server.Addr}, KeyPrefix: "rl:", Timeout: 10 * time.Second}
	if change != nil {
		change(&opt)
	}
	r := mustNewRedis(t, opt)
	t.Cleanup(func() { r.Close() })
	return r
}

// hourly returns a bucket of the given size that drips one unit an hour, and so
// not during a test.
func hourly(size int64) Bucket {
	return Bucket{Name: "b", Key: "k", Limit: Limit{Size: size, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
}

// serverTime returns the server's clock, in µs.
func serverTime(t testing.TB, server *redistest.Server) int64 {
	t.Helper()
	now, err := server.Client().Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return now.UnixMicro()
}

// storedState returns the state stored under key, which must be in the right
// format, and when the key expires, in ms.
func storedState(t testing.TB, server *redistest.Server, key string) (s bucket.Level, expires int64) {
	t.Helper()
	value, err := server.Client().Get(t.Context(), key).Result()
	if err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	w, ok := parseWritten(value)
	if !ok || value != w.value() {
		t.Fatalf("%s holds %q, which is no state", key, value)
	}
	s = w.Level
	if expires, err = server.Client().Do(t.Context(), "PEXPIRETIME", key).Int64(); err != nil {
		t.Fatal(err)
	}
	return s, expires
}

// checkExpiry checks that a key expires when its bucket is empty: never before, and
// not much later. A key expires when the clock has passed the given millisecond. The
// script says how many milliseconds are left, which the server adds to its own clock,
// a moment after the script has read it.
func checkExpiry(t testing.TB, s bucket.Level, expires int64) {
	t.Helper()
	if want := s.Clear / 1000; expires < want || expires > want+1000 {
		t.Errorf("bucket is empty at %d µs, its key expires at %d ms", s.Clear, expires)
	}
}

// TestRedisKeys pins the names of keys, by which all nodes and all releases find
// the same buckets: the prefix, 128 bits of the SHA-256 of the user's key in
// base64url, the bucket's name, and its drips in base 36.
func TestRedisKeys(t *testing.T) {
	limit := Limit{Size: 16, DripInterval: 2 * time.Second, DripSize: 1}
	tests := []struct {
		prefix string
		bucket Bucket
		want   string
	}{
		{
			"rl:", Bucket{Name: "default", Key: "203.0.113.7", Limit: limit, Cost: 1},
			"rl:{_sUlZaoM8Y9X189bOscoUA}:default:16v7k.1",
		}, {
			"rl:", Bucket{Name: "user/trade", Key: "2001:db8::/64", Limit: Limit{Size: 36, DripInterval: time.Hour, DripSize: 35}, Cost: 1},
			"rl:{si6RIWL4MZXCBDx37WqVCQ}:user/trade:1njchs0.z",
		}, {
			"a:b:", Bucket{Name: "x:1.2.3", Key: "", Limit: Limit{Size: MaxUnits, DripInterval: time.Microsecond, DripSize: 7}, Cost: 1},
			"a:b:{47DEQpj8HBSa-_TImW-5JA}:x:1.2.3:1.7",
		}, {
			"", Bucket{Name: "odd", Key: "alice{1}\r\n\x00\xff", Limit: limit, Cost: 1},
			"{2T0FuUBtSpjg5umgndGNwQ}:odd:16v7k.1",
		}, {
			"rl:", Bucket{Name: "long", Key: strings.Repeat("x", 100_000), Limit: limit, Cost: 1},
			"rl:{1p5omIFXgzJyMFqvIfRTyA}:long:16v7k.1",
		},
	}
	server := redistest.Start(t)
	for _, tc := range tests {
		t.Run(tc.bucket.Name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.KeyPrefix = tc.prefix })
			tc.bucket.Cost = tc.bucket.Limit.Size
			decide(t, r, AccountingAtomic, tc.bucket)
			got, err := server.Client().Keys(t.Context(), "*").Result()
			if err != nil || len(got) != 1 || got[0] != tc.want {
				t.Errorf("keys %q, error %v, want %q", got, err, tc.want)
			}
		})
	}
}

// TestKeysWithSecret guards the names of keys that a secret hides: they must stay, or
// an upgrade would lose all buckets. A MAC that is used again has forgotten the last key.
func TestKeysWithSecret(t *testing.T) {
	k := newKeys("rl:", "s3cret")
	for range 3 {
		for key, want := range map[string]string{
			"203.0.113.7": "rl:{eqx8kiJh7sY6jLALuk3hPw}:default:16v7k.1",
			"":            "rl:{kd-scMU0iwThuruLQhrJLA}:default:16v7k.1",
		} {
			b := Bucket{Name: "default", Key: key, Limit: Limit{Size: 16, DripInterval: 2 * time.Second, DripSize: 1}, Cost: 1}
			if got := k.of(&b); got != want {
				t.Errorf("key %q: got %q, want %q", key, got, want)
			}
		}
	}
}

// TestRedisKeepsNoUserBytes guards user data: none of it is in the names or values
// of keys.
func TestRedisKeepsNoUserBytes(t *testing.T) {
	const canary = "s3cret"
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	for _, drip := range []int64{1, 4} {
		for _, key := range []string{canary, "Bearer " + canary, "{" + canary + "}", canary + "\r\nDEL x"} {
			limit := Limit{Size: 9, DripInterval: time.Hour, DripSize: drip}
			decide(t, r, AccountingAtomic, Bucket{Name: "login", Key: key, Limit: limit, Cost: 1})
		}
	}
	keys, err := server.Client().Keys(t.Context(), "*").Result()
	if err != nil || len(keys) != 8 {
		t.Fatalf("keys %q, error %v", keys, err)
	}
	for _, key := range keys {
		storedState(t, server, key)
		if strings.Contains(key, canary) {
			t.Errorf("key %q", key)
		}
	}
}

// TestRedisStoredState guards the value of a key: the time on the server's clock
// at which the bucket runs empty and when that was written, in as few bytes as fit
// into Redis's next size of memory, or the rest too if it is not 0.
func TestRedisStoredState(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	const rate = 100 * time.Second
	tests := []struct {
		size, dripSize, cost int64
		drips, slack         int64
		length               int
	}{
		{10, 1, 1, 1, 0, 12},
		{10, 1, 10, 10, 0, 12},
		{10, 4, 4, 1, 0, 12},
		{10, 4, 8, 2, 0, 12},
		{10, 4, 1, 1, 3, 25},
		{10, 4, 10, 3, 2, 25},
		{1, 5, 1, 1, 4, 25},
	}
	for _, tc := range tests {
		t.Run(fmt.Sprintf("size=%d,drip=%d,cost=%d", tc.size, tc.dripSize, tc.cost), func(t *testing.T) {
			b := Bucket{Name: "b", Key: t.Name(), Limit: Limit{Size: tc.size, DripInterval: rate, DripSize: tc.dripSize}, Cost: tc.cost}
			before := serverTime(t, server)
			d := decide(t, r, AccountingAtomic, b)[0]
			after := serverTime(t, server)

			drain := time.Duration(tc.drips) * rate
			if want := (Decision{Size: tc.size, Remaining: tc.size - tc.cost, Clear: drain}); plainDecision(d) != want {
				t.Errorf("decided %+v, want %+v", d, want)
			}
			s, expires := storedState(t, server, r.keys.of(&b))
			if at := s.Clear - drain.Microseconds(); at < before || at > after || s.Rest != tc.slack {
				t.Errorf("stored %+v between %d and %d", s, before, after)
			}
			checkExpiry(t, s, expires)
			if got := server.Client().StrLen(t.Context(), r.keys.of(&b)).Val(); got != int64(tc.length) {
				t.Errorf("stored in %d bytes, want %d", got, tc.length)
			}
		})
	}
}

// TestRedisNumbersAreExact guards that the largest numbers reach the script and
// come back unchanged.
func TestRedisNumbersAreExact(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	const us = time.Microsecond
	limits := []Limit{
		{Size: MaxUnits, DripInterval: us, DripSize: 1},
		{Size: MaxUnits - 1, DripInterval: 2 * us, DripSize: 1},
		{Size: MaxUnits - 2, DripInterval: 2 * us, DripSize: 1},
		{Size: MaxUnits, DripInterval: 5 * us, DripSize: 3},
		{Size: MaxUnits, DripInterval: MaxUnits * us, DripSize: MaxUnits},
		{Size: MaxUnits - 1, DripInterval: MaxUnits * us, DripSize: MaxUnits},
		{Size: 1, DripInterval: MaxUnits * us, DripSize: MaxUnits},
		{Size: 1, DripInterval: MaxUnits * us, DripSize: 1},
		{Size: 1<<25 - 1, DripInterval: 1 << 25 * us, DripSize: 1},
		{Size: 999_999_999_999_999 / 7 * 3, DripInterval: 333_333_333 * us, DripSize: 128_000_000_001},
		{Size: 123_456_789_012_345, DripInterval: 987_654_321 * us, DripSize: 1_234_567_891},
	}
	for _, l := range limits {
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		for _, cost := range []int64{l.Size, l.Size - 1, l.Size/2 + 1, l.Size/3 + 1} {
			if cost < 1 {
				continue
			}
			t.Run(fmt.Sprintf("%+v,cost=%d", l, cost), func(t *testing.T) {
				b := Bucket{Name: "b", Key: t.Name(), Limit: l, Cost: cost}
				drips := (cost + l.DripSize - 1) / l.DripSize
				drain, slack := time.Duration(drips)*l.DripInterval, drips*l.DripSize-cost

				before := serverTime(t, server)
				d := decide(t, r, AccountingAtomic, b)[0]
				after := serverTime(t, server)
				if want := (Decision{Size: l.Size, Remaining: l.Size - cost, Clear: drain}); plainDecision(d) != want {
					t.Errorf("decided %+v, want %+v", d, want)
				}
				s, expires := storedState(t, server, r.keys.of(&b))
				if at := s.Clear - drain.Microseconds(); at < before || at > after || s.Rest != slack {
					t.Errorf("stored %+v between %d and %d, want slack %d", s, before, after, slack)
				}
				checkExpiry(t, s, expires)

				// Another whole bucketful has to wait until what is there has
				// drained, except for the slack.
				b.Cost = l.Size
				d = decide(t, r, AccountingAtomic, b)[0]
				want := d.Clear - time.Duration(slack/l.DripSize)*l.DripInterval
				if !d.Denied || d.RetryAfter != want {
					t.Errorf("decided %+v on a full bucket, want to wait for %v", d, want)
				}
				if d.Clear > drain || d.Clear < drain-time.Minute {
					t.Errorf("%v until empty, %v before", d.Clear, drain)
				}
			})
		}
	}
}

// TestRedisKeyExpiresWhenBucketIsEmpty guards that the server itself removes a key
// once its bucket has drained, and that the bucket then starts afresh.
func TestRedisKeyExpiresWhenBucketIsEmpty(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 3, DripInterval: 100 * time.Millisecond, DripSize: 1}, Cost: 3}
	decide(t, r, AccountingAtomic, b)
	s, _ := storedState(t, server, r.keys.of(&b))
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		before := serverTime(t, server)
		n, err := server.Client().Exists(t.Context(), r.keys.of(&b)).Result()
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			if after := serverTime(t, server); after < s.Clear {
				t.Fatalf("the key went %d µs before its bucket was empty", s.Clear-after)
			}
			break
		}
		if before > s.Clear+5_000_000 || time.Now().After(deadline) {
			t.Fatalf("the key is there %d µs after its bucket was empty", before-s.Clear)
		}
	}
	if d := decide(t, r, AccountingAtomic, b)[0]; d.Denied || d.Clear != 300*time.Millisecond {
		t.Errorf("decided %+v after the key went", d)
	}
}

// TestRedisDenialWritesNothing guards the cost of a denied request: the server
// only reads, and the bucket and the TTL of its key do not change.
func TestRedisDenialWritesNothing(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	full, room, empty := hourly(5), hourly(9), hourly(5)
	full.Key, room.Key, empty.Key = "full", "room", "empty"
	full.Cost = 5
	decide(t, r, AccountingAtomic, full, room)
	wantFull, wantFullExpires := storedState(t, server, r.keys.of(&full))
	wantRoom, wantRoomExpires := storedState(t, server, r.keys.of(&room))

	sets, dirty := redistest.CommandCounter{Server: server}, changes(t, server)
	sets.Since(t, "set")
	full.Cost = 1
	for range 10 {
		for _, req := range []Request{
			{Buckets: []Bucket{full}},
			{Buckets: []Bucket{full}, Accounting: AccountingEach},
			{Buckets: []Bucket{room, full, empty}},
			{Buckets: []Bucket{empty, room, full}},
		} {
			if !Denied(decide(t, r, req.Accounting, req.Buckets...)) {
				t.Fatalf("%+v admitted", req)
			}
		}
		never := empty
		never.Cost = 6
		decide(t, r, AccountingEach, never)
	}
	sets.Check(t, "set", 0)
	if now := changes(t, server); now != dirty {
		t.Errorf("%d changes to the data", now-dirty)
	}
	if s, expires := storedState(t, server, r.keys.of(&full)); s != wantFull || expires != wantFullExpires {
		t.Errorf("full bucket: %+v until %d, was %+v until %d", s, expires, wantFull, wantFullExpires)
	}
	if s, expires := storedState(t, server, r.keys.of(&room)); s != wantRoom || expires != wantRoomExpires {
		t.Errorf("other bucket: %+v until %d, was %+v until %d", s, expires, wantRoom, wantRoomExpires)
	}
	if n := server.Client().Exists(t.Context(), r.keys.of(&empty)).Val(); n != 0 {
		t.Error("a denied request left a key")
	}
}

// changes returns the number of changes to its data that the server has counted.
func changes(t testing.TB, server *redistest.Server) int64 {
	t.Helper()
	return server.InfoNumber(t, "persistence", "rdb_changes_since_last_save")
}

// TestRedisOneCall guards that a request is one command to the server, however
// many buckets it has. Only the first one after the server's start is sent twice,
// because the server does not know the script yet.
func TestRedisOneCall(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	buckets := make([]Bucket, 4)
	for i := range buckets {
		buckets[i] = hourly(100)
		buckets[i].Key = fmt.Sprint(i)
	}
	c := redistest.CommandCounter{Server: server}

	decide(t, r, AccountingAtomic, buckets...)
	c.Check(t, "evalsha", 1)
	c.Check(t, "eval", 1)
	for _, name := range []string{"time", "get", "set"} {
		c.Since(t, name)
	}

	for range 10 {
		decide(t, r, AccountingAtomic, buckets...)
	}
	c.Check(t, "evalsha", 10)
	c.Check(t, "eval", 0)
	c.Check(t, "time", 10)
	c.Check(t, "get", 40)
	c.Check(t, "set", 40)
	for i := range buckets {
		if got := unitsIn(t, r, buckets[i]); got != 11 {
			t.Errorf("bucket %d holds %d units after 11 requests", i, got)
		}
	}
	if got := c.Since(t, "evalsha"); got != 4 {
		t.Errorf("%d calls for 4 requests", got)
	}
}

// TestRedisScriptFlushed guards that flushing the server's scripts at any moment
// fails no request, and that no request is charged twice.
func TestRedisScriptFlushed(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	b := hourly(100_000)
	c := redistest.CommandCounter{Server: server}
	flush := func() {
		if err := server.Client().ScriptFlush(t.Context()).Err(); err != nil {
			t.Error(err)
		}
	}
	for n := range int64(20) {
		flush()
		decide(t, r, AccountingAtomic, b)
		decide(t, r, AccountingAtomic, b)
		if got := unitsIn(t, r, b); got != 2*n+2 {
			t.Fatalf("%d units after %d requests", got, 2*n+2)
		}
	}
	c.Check(t, "evalsha", 60)
	// New connections load the script on the server too.
	if got, most := c.Since(t, "eval"), 20+c.Since(t, "evalsha_ro"); got < 20 || got > most {
		t.Errorf("%d calls of eval, want 20 to %d", got, most)
	}

	var admitted atomic.Int64
	redistest.Together(t, 9, func(g int) {
		for range 200 {
			if g == 0 {
				flush()
				continue
			}
			d, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			if err != nil || d[0].Denied {
				t.Errorf("decided %+v, error %v", d, err)
				return
			}
			admitted.Add(1)
		}
	})
	if got, want := unitsIn(t, r, b), 40+admitted.Load(); got != want {
		t.Errorf("%d units after %d requests", got, want)
	}
	if c.Since(t, "eval") == 0 {
		t.Error("the script was never forgotten: the test proves nothing")
	}
}

// TestRedisGroups guards that several requests in one call of the script are
// decided as if one after the other, even if they use the same bucket, are equal,
// or report levels that buckets have at least.
func TestRedisGroups(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	one, all := newClockedRedis(t, server, "one:"), newClockedRedis(t, server, "all:")
	groups, shared, alike, leveled := 0, 0, 0, 0
	checkTraces(t, 1, func(t *rapid.T) {
		one.flush(t)
		buckets, last, limit := drawBuckets(t, drawAnyShape), Decision{}, Limit{Size: 1, DripInterval: time.Second, DripSize: 1}
		for range rapid.IntRange(1, 20).Draw(t, "calls") {
			one.at(t, one.keep(one.now+drawMove(t, limit, last, true)))
			var reqs []reported
			for range rapid.IntRange(1, 8).Draw(t, "requests") {
				req := reported{Request: drawRequest(t, buckets)}
				if rapid.Bool().Draw(t, "levels") {
					req.levels = drawLevels(t, req.Buckets)
				}
				times := rapid.IntRange(1, 3).Draw(t, "times")
				reqs = append(reqs, slices.Repeat([]reported{req}, times)...)
				if alike += times - 1; times > 1 && req.levels != nil {
					leveled++
				}
			}

			want := checkGroups(t, one, all, reqs)
			used := map[string]bool{}
			for _, req := range reqs {
				groups++
				for _, b := range req.Buckets {
					if used[all.keys.of(&b)] {
						shared++
					}
					used[all.keys.of(&b)] = true
				}
			}
			i := rapid.IntRange(0, len(want)-1).Draw(t, "watched")
			last, limit = want[i], reqs[0].Buckets[0].Limit
		}
	})
	if groups < 500 || shared < 500 || alike < 500 || leveled < 100 {
		t.Errorf("%d requests, %d buckets shared in one call, %d requests like the last, %d such with levels: the test covers too little",
			groups, shared, alike, leveled)
	}
}

// checkGroups has one store decide requests one after the other, and another all of
// them in one call, checks that they agree, and returns the Decisions.
func checkGroups(t rapid.TB, one, all *clockedRedis, reqs []reported) (want []Decision) {
	t.Helper()
	for _, req := range reqs {
		outcomes, err := callWithLevels(one.Redis, req.Request, req.levels)
		if err != nil {
			t.Fatal(err)
		}
		want = req.decisions(outcomes, want)
	}
	var got []Decision
	reply := callScript(t, all, reqs)
	for _, req := range reqs {
		n := 2*len(req.Buckets) + 4*entriesOf(req.Request)
		for _, b := range req.Buckets {
			if b.Cost == 0 { // and what is held
				n += 2
			}
		}
		if len(reply) < n {
			t.Fatalf("%+v: %d numbers missing from the reply", reqs, n-len(reply))
		}
		outcomes, _, err := outcomesOf(req.Request, reply[:n], nil)
		if err != nil {
			t.Fatal(err)
		}
		got, reply = req.decisions(outcomes, got), reply[n:]
	}
	if !slices.Equal(got, want) || len(reply) > 0 {
		t.Fatalf("%+v: decided\n%+v and %d numbers, want\n%+v", reqs, got, len(reply), want)
	}
	for _, req := range reqs {
		got, want := all.stored(t, req.Buckets), one.stored(t, req.Buckets)
		if !slices.Equal(got, want) {
			t.Fatalf("%+v: stored %q, want %q", req, got, want)
		}
	}
	return want
}

// TestRedisEqualGroups guards the same in a case that was drawn once: what a level
// becomes that the first of two equal requests reports is not what the second reports.
func TestRedisEqualGroups(t *testing.T) {
	server := redistest.Start(t)
	one, all := newClockedRedis(t, server, "one:"), newClockedRedis(t, server, "all:")
	threes := Limit{Size: 3, DripInterval: time.Hour, DripSize: 3}
	aligned := threes
	aligned.Aligned = true
	for _, l := range []Limit{threes, aligned} {
		one.flush(t)
		request := func(size int64, count bool) Request {
			b := Bucket{Name: "b", Key: "k", Limit: l, Cost: 1}
			b.Limit.Size, b.Limit.CountDenied = size, count
			return Request{Buckets: []Bucket{b}}
		}
		of := func(s bucket.Ahead, dirty dirtiness) []localLevel { return []localLevel{{s, 0, dirty}} }
		checkGroups(t, one, all, []reported{{request(3, false), of(bucket.Ahead{Clear: 1, Rest: 0}, unsure)}})
		equal := reported{request(2, true), of(bucket.Ahead{Clear: 2, Rest: 1}, own)}
		checkGroups(t, one, all, []reported{equal, equal, {Request: request(3, false)}})
	}
}

// reported is a request as it is sent to the script, with levels that its buckets have
// at least.
type reported struct {
	Request
	levels []localLevel
}

// drawLevels draws such levels. Not every bucket has one.
func drawLevels(t *rapid.T, buckets []Bucket) []localLevel {
	levels := make([]localLevel, len(buckets))
	for i, b := range buckets {
		if rapid.Bool().Draw(t, "this") {
			levels[i].dirty = rapid.SampledFrom([]dirtiness{unsure, own}).Draw(t, "dirty")
			levels[i].Clear = rapid.Int64Range(1, b.Limit.of().DrainTime().Microseconds()).Draw(t, "clear")
			levels[i].Rest = rapid.Int64Range(0, min(b.Limit.DripSize, b.Limit.Size)-1).Draw(t, "slack")
			switch b.Limit.Algorithm {
			case bucket.Sliding, bucket.Log:
				levels[i].Rest |= rapid.Int64Range(0, b.Limit.Size).Draw(t, "before") << bucket.CountBits
			case bucket.WarmUp:
				levels[i].Rest = rapid.Int64Range(0, min(b.Limit.of().WarmUp(), levels[i].Clear)).Draw(t, "to be cold")
			case bucket.Fixed:
				levels[i].Rest = rapid.Int64Range(1, b.Limit.Size).Draw(t, "units")
			case bucket.Leaky, bucket.Bans:
			}
			levels[i].inFlight = rapid.Int64Range(0, b.Limit.Size).Draw(t, "in flight")
		}
	}
	return levels
}

// callScript has the script of v decide several requests in one call, by the
// interface that core.lua describes.
func callScript(t rapid.TB, v *clockedRedis, reqs []reported) []int64 {
	t.Helper()
	truth := map[bool]byte{true: 1}
	var keys []string
	var args []any
	var last []byte
	for _, req := range reqs {
		tells := slices.ContainsFunc(req.levels, func(k localLevel) bool { return k.dirty != clean })
		run := []byte{0, 1, 0, byte(len(req.Buckets)), truth[req.Accounting == AccountingEach], truth[tells]}
		for i, b := range req.Buckets {
			keys = append(keys, v.keys.of(&b))
			size := float64(b.Limit.Size)
			rate, drip, phase := float64(b.Limit.DripInterval.Microseconds()), float64(b.Limit.DripSize), float64(b.Limit.Phase.Microseconds())
			switch {
			case b.Limit.Algorithm == bucket.WarmUp:
				if waiting := size - drip; waiting > 0 && b.Cost <= b.Limit.Size {
					size = -math.Floor(waiting * (rate / drip))
				}
				rate, drip, phase = rate/drip, float64(b.Limit.Phase.Microseconds()+1), float64(b.Limit.ColdFactor)/1000
			case !b.Limit.Aligned:
				phase = -1
			}
			run = append(run, byte(b.Limit.Algorithm), truth[b.Limit.CountDenied]|truth[b.Cost == 0]<<2, 0)
			numbers := []float64{size, rate, drip, phase, float64(b.Cost)}
			if tells {
				k := req.levels[i]
				numbers = append(numbers, float64(k.Clear), float64(k.Rest), float64(k.inFlight))
			}
			for _, n := range numbers {
				run = binary.BigEndian.AppendUint64(run, math.Float64bits(n))
			}
			if tells {
				run = append(run, truth[req.levels[i].dirty == own])
			}
			if b.Cost == 0 { // no account
				run = append(run, make([]byte, 16)...)
			}
		}
		if last != nil && bytes.Equal(run[2:], last[2:]) {
			last[1]++
			continue
		}
		args, last = append(args, run), run
	}
	reply, err := v.admin.Eval(context.Background(), v.source, keys, args...).Int64Slice()
	if err != nil {
		t.Fatal(err)
	}
	return reply
}

// TestRedisForeignValues guards that any other value of a key counts as an empty
// bucket: the request is decided, and the next charge replaces the value by a
// bucket. Most of these values would be full buckets if they were parsed less
// strictly.
func TestRedisForeignValues(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	soon := serverTime(t, server) + (2 * time.Hour).Microseconds()
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 5, DripInterval: time.Hour, DripSize: 3}, Cost: 4}

	fill := map[string]func(key string) error{}
	hold := func(values ...string) {
		for _, value := range values {
			fill[fmt.Sprintf("%.40q", value)] = func(key string) error {
				return server.Client().Set(t.Context(), key, value, 0).Err()
			}
		}
	}
	hold("", " ", "text", "nan", "12", "99999999999999999999", strings.Repeat("9", 19), strings.Repeat("9", 400),
		"\x00", strings.Repeat("\x00", 12), strings.Repeat("\xff", 12), strings.Repeat("\x00", 25), strings.Repeat("\xff", 81),
		strings.Repeat("x", 1<<20), "{}")
	full := written{Level: bucket.Level{Clear: soon, Rest: 0}, when: soon - 7200e6}
	packed, long := full.value(), func(numbers ...float64) string { return string(appendDoubles([]byte{8}, numbers...)) }
	hold(packed+" ", packed[1:], strings.Replace(packed, packed[:1], "\x90", 1)) // too long, too short, a sliding window
	from := float64(soon - 7200e6)
	for _, numbers := range [][]float64{
		{float64(soon), 3, from}, {float64(soon), 4, from}, {float64(soon), -1, from}, // a full drip and more, and less than none
		{float64(soon), 0.5, from}, {float64(soon) + 0.5, 0, from}, {float64(soon), 0, from + 0.5},
		{math.NaN(), 0, from}, {float64(soon), math.NaN(), from}, {float64(soon), 0, math.NaN()},
		{math.Inf(1), 0, from}, {math.Inf(1), 0, math.Inf(1)}, {math.Inf(-1), 0, from}, {float64(soon), math.Inf(1), from}, {float64(soon), 0, math.Inf(-1)},
		{from + 3*bucket.Horizon, 0, from}, {float64(soon), 0, -3 * bucket.Horizon}, {1e300, 0, from}, // further ahead than any bucket can be
		{from - 1, 0, from - 2}, {from - 1, 2, from - 2}, {-1e300, 0, from}, // nothing left
	} {
		hold(long(numbers...))
	}
	for name, command := range map[string][]any{
		"list": {"RPUSH", "", 1, 2}, "hash": {"HSET", "", "a", 1}, "set": {"SADD", "", soon},
		"sorted set": {"ZADD", "", soon, "a"}, "stream": {"XADD", "", "*", "a", 1},
	} {
		fill[name] = func(key string) error {
			command[1] = key
			return server.Client().Do(t.Context(), command...).Err()
		}
	}

	for name, fill := range fill {
		t.Run(name, func(t *testing.T) {
			key := r.keys.of(&b)
			redistest.Done(t, server.Client().Del(t.Context(), key))
			if err := fill(key); err != nil {
				t.Fatal(err)
			}
			never := b
			never.Cost = 6
			d := decide(t, r, AccountingEach, never)[0]
			want := Decision{Size: 5, Remaining: 5, Denied: true, Never: true}
			if plainDecision(d) != want {
				t.Errorf("decided %+v, want %+v", d, want)
			}
			before := serverTime(t, server)
			d = decide(t, r, AccountingAtomic, b)[0]
			want = Decision{Size: 5, Remaining: 1, Clear: 2 * time.Hour}
			if plainDecision(d) != want {
				t.Errorf("decided %+v, want %+v", d, want)
			}
			s, expires := storedState(t, server, key)
			if at := s.Clear - 2*3600e6; at < before || at > serverTime(t, server) || s.Rest != 2 {
				t.Errorf("stored %+v", s)
			}
			checkExpiry(t, s, expires)
			if d := decide(t, r, AccountingAtomic, b)[0]; !d.Denied {
				t.Errorf("the charge is not kept: %+v", d)
			}
		})
	}
}

// TestRedisCorruptValues guards that changed bytes of a stored bucket, of any
// algorithm, make no request fail, no peek and no reset, nor one that reports what a
// node knows: each gets numbers that such a bucket can have.
func TestRedisCorruptValues(t *testing.T) {
	t.Parallel()
	v := newPagedVirtual(t)
	checkTraces(t, 2, func(t *rapid.T) {
		v.flush(t)
		b := Bucket{Name: "b", Key: "k", Limit: drawAnyShape(t), Cost: 1}
		b.Limit.CountDenied = rapid.Bool().Draw(t, "counts denied")
		req := func() Request { return Request{Buckets: []Bucket{b}} }
		pass := func() {
			v.advance(t, time.Duration(rapid.Int64Range(0, b.Limit.of().Rate()).Draw(t, "µs"))*time.Microsecond)
		}
		for range rapid.IntRange(1, 8).Draw(t, "charges") {
			b.Cost = rapid.Int64Range(1, min(3, b.Limit.Size)).Draw(t, "cost")
			decide(t, v, AccountingAtomic, b)
			pass()
		}
		if rapid.Bool().Draw(t, "hold") {
			q := asProcess(v.query(toHold(req()), 0))
			redistest.Done(t, v.admin.Eval(context.Background(), v.source, q.Keys, string(q.appendGroup(nil))))
		}
		value := []byte(v.stored(t, []Bucket{b})[0])
		if len(value) == 0 {
			return
		}
		for range rapid.IntRange(1, 4).Draw(t, "changes") {
			value[rapid.IntRange(0, len(value)-1).Draw(t, "index")] = rapid.OneOf(rapid.Byte(), rapid.ByteRange('0', ':')).Draw(t, "byte")
		}
		value = value[:len(value)-rapid.SampledFrom([]int{0, 0, 0, 1, 2, 8, 10}).Draw(t, "cut")%len(value)]
		check := func(what string, clear, retry time.Duration, remaining int64, err error) {
			if err != nil || min(clear, retry) < 0 || max(clear, retry) > bucket.Horizon*time.Microsecond || remaining < 0 || remaining > b.Limit.Size {
				t.Fatalf("%s with %q: clear in %v, retry in %v, %d remaining, error %v", what, value, clear, retry, remaining, err)
			}
		}
		set := func() {
			redistest.Done(t, v.admin.Set(context.Background(), v.keys.of(&b), value, 0))
		}
		set()
		l, err := v.Peek(context.Background(), b)
		check("a peek", l.Clear, l.RetryAfter, l.Remaining, err)
		l, err = v.Reset(context.Background(), b)
		check("a reset", l.Clear, l.RetryAfter, l.Remaining, err)
		set()
		if rapid.Bool().Draw(t, "tell") {
			if _, err := callWithLevels(v.Redis, req(), drawLevels(t, []Bucket{b})); err != nil {
				t.Fatalf("a request that tells with %q: %v", value, err)
			}
		}
		for i := range int64(8) {
			v.denyCache = newDenyCache(64)
			b.Cost = min(1+i, b.Limit.Size)
			reply, err := v.Take(context.Background(), req(), nil)
			check("a request", reply[0].Clear, reply[0].RetryAfter, reply[0].Remaining, err)
			if reply[0].By != DecidedByRedis {
				t.Fatalf("with %q: %+v", value, reply)
			}
			l, err := v.Peek(context.Background(), b)
			check("a peek after it", l.Clear, l.RetryAfter, l.Remaining, err)
			pass()
		}
	})
}

// TestRedisForeignHolds guards that no number of held units in a key makes requests
// fail: they count, so the request is denied, for no longer than any bucket takes to
// drain.
func TestRedisForeignHolds(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	for _, held := range []int64{5, MaxUnits, bucket.Horizon - 1, bucket.Horizon} {
		b := Bucket{Name: "b", Key: fmt.Sprint(held), Limit: Limit{Size: 5, DripInterval: time.Hour, DripSize: 3}, Cost: 1}
		now := serverTime(t, server)
		value := written{Level: bucket.Level{Clear: now + time.Hour.Microseconds(), Rest: 2}, when: now, record: heldRecord{{1, 1, now, now, held - 2, 0, 0}, {2, 1, now, now - 1, 2, 0, 0}}}.value()
		redistest.Done(t, server.Client().Set(t.Context(), r.keys.of(&b), value, 0))
		if l := peek(t, r, b); l.Held != held || l.Remaining != 0 || l.RetryAfter == 0 {
			t.Errorf("%d held: peek says %+v", held, l)
		}
		d, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
		if err != nil || !d[0].Denied || d[0].Clear > bucket.Horizon*time.Microsecond {
			t.Errorf("%d held: %+v, error %v", held, d, err)
		}
	}

	// Numbers that are none.
	b := Bucket{Name: "b", Key: "none", Limit: Limit{Size: 5, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	now := float64(serverTime(t, server))
	for _, held := range [][4]float64{
		{now, -1, 0, 0}, {now, 2, now, -1}, {now, 1.5, 0, 0}, {math.NaN(), 1, 0, 0}, {now, 1, math.NaN(), 0}, {now, math.Inf(1), 0, 0},
		{now, 1, now + 1, 1}, {math.Inf(1), 1, 0, 0}, {now, 1, math.Inf(-1), 1}, {now, 0, 0, bucket.Horizon + 1},
	} {
		value := appendDoubles([]byte{8}, now+3600e6, 0, now, held[0], held[1], held[2], held[3])
		redistest.Done(t, server.Client().Set(t.Context(), r.keys.of(&b), value, 0))
		if l := peek(t, r, b); l.Units != 0 || l.Held != 0 {
			t.Errorf("%v held: peek says %+v", held, l)
		}
	}
}

// TestRedisClockWrongByDecades guards that a server whose clock is wrong by
// decades can read the buckets that it has stored: its times have fewer digits.
func TestRedisClockWrongByDecades(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 5, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	for _, year := range []int{1971, 1999, 2030} {
		now := time.Date(year, time.June, 1, 0, 0, 0, 0, time.UTC).UnixMicro()
		v.at(t, now)
		full := b.Limit.written(bucket.Level{Clear: now + b.Limit.of().DrainTime().Microseconds()}, now)
		if err := v.admin.Set(t.Context(), v.keys.of(&b), full.value(), 0).Err(); err != nil { // or it might expire
			t.Fatal(err)
		}
		want := Decision{Size: 5, Denied: true, Clear: 5 * time.Hour, RetryAfter: time.Hour}
		if d := plainDecision(decide(t, v, AccountingAtomic, b)[0]); d != want {
			t.Errorf("in %d: decided %+v, want %+v", year, d, want)
		}
	}
}

// TestRedisExpiryIsInTheFuture guards that no key is set to expire in the current
// millisecond, however soon its bucket is empty: servers refuse that. It also guards
// that no key expires before, or much after, its bucket is empty.
func TestRedisExpiryIsInTheFuture(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 4, DripInterval: 250 * time.Microsecond, DripSize: 1}, Cost: 1}
	for offset := int64(0); offset < 1000; offset += 50 {
		for b.Cost = 1; b.Cost <= 4; b.Cost++ {
			v.flush(t)
			v.at(t, v.start/1000*1000+offset)
			decide(t, v, AccountingAtomic, b)
			key := v.keys.of(&b)
			expires, err := v.admin.Do(t.Context(), "PEXPIRETIME", key).Int64()
			if err != nil {
				t.Fatal(err)
			}
			clear := v.now + b.Cost*250
			if expires <= v.now/1000 || expires < clear/1000 || expires > clear/1000+1 {
				t.Errorf("%d units at %d µs: the key expires at %d ms", b.Cost, v.now, expires)
			}
		}
	}
}

// TestRedisExactConcurrently floods buckets through two stores at once, as two
// nodes would: together they admit exactly the size.
func TestRedisExactConcurrently(t *testing.T) {
	server := redistest.Start(t)
	tests := []struct {
		size                         int64
		goroutines, requests, stores int
	}{
		{size: 1, goroutines: 100, requests: 1, stores: 1},
		{size: 1, goroutines: 50, requests: 2, stores: 2},
		{size: 1000, goroutines: 128, requests: 40, stores: 2},
	}
	for _, tc := range tests {
		t.Run(fmt.Sprintf("%+v", tc), func(t *testing.T) {
			var stores []*Redis
			for range tc.stores {
				stores = append(stores, newTestRedis(t, server, nil))
			}
			b := hourly(tc.size)
			b.Key = t.Name()
			var admitted atomic.Int64
			redistest.Together(t, tc.goroutines, func(g int) {
				r := stores[g%tc.stores]
				for range tc.requests {
					d, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
					if err != nil {
						t.Error(err)
						return
					}
					if !d[0].Denied {
						admitted.Add(1)
					}
				}
			})
			if got := admitted.Load(); got != tc.size {
				t.Errorf("admitted %d of %d requests, want %d", got, tc.goroutines*tc.requests, tc.size)
			}
		})
	}
}

// TestRedisIdentity guards which fields identify a bucket in Redis.
func TestRedisIdentity(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	testIdentity(t, func(t testing.TB) Store {
		t.Helper()
		redistest.Done(t, server.Client().FlushDB(t.Context()))
		return r
	})
}

// TestRedisRejectsMalformedRequests guards the requests that never reach the
// server.
func TestRedisRejectsMalformedRequests(t *testing.T) {
	server := redistest.Start(t)
	testMalformed(t, newTestRedis(t, server, nil))
	c := redistest.CommandCounter{Server: server}
	c.Check(t, "evalsha", 0)
	c.Check(t, "eval", 0)
}

// TestRedisOptions guards the ways to reach a server: by TCP and by a unix socket,
// with a password, in another database.
func TestRedisOptions(t *testing.T) {
	server := redistest.Start(t)
	acl := []any{"ACL", "SETUSER", "limiter", "reset", "on", ">pass word", "~*", "+@all"}
	redistest.Done(t, server.Client().Do(t.Context(), acl...))
	tests := []struct {
		name   string
		change func(*RedisOptions)
		db     int
	}{
		{"tcp", func(opt *RedisOptions) { opt.Addresses = []string{server.Addr} }, 0},
		{"unix", func(opt *RedisOptions) { opt.Addresses = []string{server.Socket} }, 0},
		{"user", func(opt *RedisOptions) { opt.Username, opt.Password = "limiter", "pass word" }, 0},
		{"database", func(opt *RedisOptions) { opt.DB = 3 }, 3},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			r := newTestRedis(t, server, tc.change)
			b := hourly(5)
			b.Name = tc.name
			decide(t, r, AccountingAtomic, b)
			admin := server.Client().Conn()
			defer admin.Close()
			redistest.Done(t, admin.Select(t.Context(), tc.db))
			if n, err := admin.Exists(t.Context(), r.keys.of(&b)).Result(); n != 1 || err != nil {
				t.Errorf("%d keys in database %d, error %v", n, tc.db, err)
			}
		})
	}
}

// TestRedisPermissions guards the server's access control: the documented commands
// are enough, and if any of them is missing, a request fails and is not admitted.
func TestRedisPermissions(t *testing.T) {
	server := redistest.Start(t)
	good := newTestRedis(t, server, nil)
	full := hourly(3)
	full.Key = "full"
	full.Cost = 3
	decide(t, good, AccountingAtomic, full)
	full.Cost = 1

	tests := []struct {
		less   string // the permission that the user lacks
		loaded bool   // whether the server knows the script already
		works  bool
		denies bool // whether a denied request, which only reads, is still answered
	}{
		{"", false, true, true},
		{"", true, true, true},
		{"-eval", true, true, true},
		{"-eval", false, false, false},
		{"-evalsha", true, false, false},
		{"-get", true, false, false},
		{"-get", false, false, false},
		{"-time", true, false, false},
		{"-set", true, false, true},
		{"resetkeys", true, false, false},
		{"nopass", true, true, true},
		{"off", true, false, false},
	}
	for _, tc := range tests {
		t.Run(fmt.Sprintf("%s,loaded=%t", tc.less, tc.loaded), func(t *testing.T) {
			setUser(t, server, strings.Fields(tc.less)...)
			prepare := func() {
				t.Helper()
				err := server.Client().ScriptFlush(t.Context()).Err()
				if err == nil && tc.loaded {
					err = server.Client().ScriptLoad(t.Context(), takeSource).Err()
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Username, opt.Password = "limiter", "pass"
			})
			room := hourly(5)
			room.Key = t.Name()

			// First, as the server counts as down once it has refused anything.
			prepare()
			d, err := r.Take(t.Context(), Request{Buckets: []Bucket{full}}, nil)
			if tc.denies != (err == nil) || err == nil && !d[0].Denied {
				t.Errorf("decided %+v on a full bucket, error %v; answered %t", d, err, tc.denies)
			}

			prepare()
			d, err = r.Take(t.Context(), Request{Buckets: []Bucket{room}}, nil)
			if tc.works != (err == nil) {
				t.Errorf("decided %+v, error %v; works %t", d, err, tc.works)
			}
			if err != nil {
				checkError(t, err, server.Addr)
				if len(d) > 0 {
					t.Errorf("decided %+v with error %v", d, err)
				}
			}
			if n := server.Client().Exists(t.Context(), r.keys.of(&room)).Val(); (n == 1) != tc.works {
				t.Errorf("%d buckets charged", n)
			}
		})
	}
}

// TestRedisPermissionsForDatabase guards that a database other than 0 needs one
// more permission, and nothing else.
func TestRedisPermissionsForDatabase(t *testing.T) {
	server := redistest.Start(t)
	for _, right := range []string{"+select", "-select"} {
		setUser(t, server, right)
		r := newTestRedis(t, server, func(opt *RedisOptions) {
			opt.Username, opt.Password, opt.DB = "limiter", "pass", 3
		})
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(5)}}, nil)
		if right == "-select" {
			checkError(t, err, server.Addr, "NOPERM")
		} else if err != nil {
			t.Error(err)
		}
	}
}

// TestErrorAfterWrites guards that an error of a batch of which a part was run does not say
// that nothing was: here the second of two requests needs a right that is missing.
func TestErrorAfterWrites(t *testing.T) {
	server := redistest.Start(t)
	setUser(t, server)
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Username, opt.Password = "limiter", "pass" })
	r.Connect(t.Context())
	b := hourly(5)
	if _, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err != nil {
		t.Fatal(err)
	}
	server.Pause(t) // so that what follows two calls in flight gathers in one batch
	log := logBucket(5, time.Hour, 1)
	var all sync.WaitGroup
	outcomes := make([]error, 4)
	for i, b := range []Bucket{b, b, b, log} {
		q := r.query(Request{Buckets: []Bucket{b}}, byte(AccountingAtomic))
		q.Owner = q
		all.Add(1)
		q.Done = func(err error) { outcomes[i] = err; all.Done() }
		if err := r.client.Submit(redisscript.Deadline{At: time.Now().Add(r.timeout)}, &q.Call); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond) // until it is in flight
	}
	server.Resume(t)
	all.Wait()
	l, err := server.Client().Exists(t.Context(), r.keys.of(&b)).Result()
	if err != nil || l != 1 || outcomes[2] == nil {
		t.Fatalf("%d keys, %v, outcomes %v", l, err, outcomes)
	}
	for i, err := range outcomes {
		if err != nil && redisscript.NotRun(err) {
			t.Errorf("request %d was not run: %v", i, err)
		}
	}
	setUser(t, server, "+getrange", "+setrange", "+strlen", "+pexpireat")
	if peeked, err := r.Peek(t.Context(), b); err != nil || peeked.Units != 4 {
		t.Errorf("%+v, %v, want 4 units", peeked, err)
	}
}

// setUser makes a user with the documented permissions, and more.
func setUser(t testing.TB, server *redistest.Server, more ...string) {
	t.Helper()
	server.SetUser(t, append([]string{"+evalsha", "+eval", "+get", "+set", "+time"}, more...)...)
}

// checkError checks that an error is one line that contains each of the given
// strings.
func checkError(t testing.TB, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Error("no error")
		return
	}
	text := err.Error()
	if strings.ContainsAny(text, "\r\n") || !strings.HasPrefix(text, "no decision: redis at ") {
		t.Errorf("error %q, want one line about the Redis", text)
	}
	if !errors.Is(err, ErrUnavailable) {
		t.Errorf("error %q is not ErrUnavailable", text)
	}
	for _, word := range says {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

// TestTimedRedisUnreachable guards that a request never waits longer for Redis than its
// timeout, and that the error says where to look.
func TestTimedRedisUnreachable(t *testing.T) {
	const timeout, margin = 250 * time.Millisecond, 2 * time.Second
	req := Request{Buckets: []Bucket{hourly(1000)}}
	take := func(t *testing.T, r *Redis, says ...string) {
		t.Helper()
		kept := []Decision{{Size: 1234}}
		began := time.Now()
		d, err := r.Take(context.Background(), req, kept)
		if took := time.Since(began); took > timeout+margin {
			t.Errorf("waited %v, want at most %v", took, timeout)
		}
		if !slices.Equal(d, kept) {
			t.Errorf("decided %+v", d)
		}
		checkError(t, err, says...)
	}
	short := func(opt *RedisOptions) { opt.Timeout = timeout }

	t.Run("closed", func(t *testing.T) {
		server := redistest.Start(t)
		r := newTestRedis(t, server, short)
		r.Close()
		take(t, r, server.Addr, "closed")
	})

	t.Run("killed", func(t *testing.T) {
		server := redistest.Start(t)
		r := newTestRedis(t, server, func(opt *RedisOptions) {
			opt.Addresses, opt.Timeout = []string{server.Socket}, timeout
		})
		other := newTestRedis(t, server, func(opt *RedisOptions) { opt.Timeout = timeout })
		decide(t, r, AccountingAtomic, req.Buckets...)
		decide(t, other, AccountingAtomic, req.Buckets...)
		server.Kill()
		for range 10 {
			take(t, r, server.Socket)
			take(t, other, server.Addr)
		}
		server.Restart(t)
		deadline := time.Now().Add(10 * time.Second)
		for _, r := range []*Redis{r, other} {
			for {
				d, err := r.Take(t.Context(), req, nil)
				if err == nil && !d[0].Denied {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("decided %+v, error %v after a restart", d, err)
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	})

	t.Run("stopped", func(t *testing.T) {
		server := redistest.Start(t)
		admin := server.Client()
		connected := newTestRedis(t, server, short)
		decide(t, connected, AccountingAtomic, req.Buckets...)
		unconnected := newTestRedis(t, server, short)
		crowded := newTestRedis(t, server, short)
		decide(t, crowded, AccountingAtomic, req.Buckets...)
		c := redistest.CommandCounter{Server: server}
		c.Since(t, "evalsha")

		server.Pause(t)
		attempts := int64(0)
		for _, r := range []*Redis{connected, unconnected} {
			for range 2 {
				take(t, r, server.Addr, timeout.String())
				attempts++
			}
		}
		redistest.Together(t, 8, func(int) { take(t, crowded, server.Addr, timeout.String()) })
		attempts += 8
		server.Resume(t)

		redistest.Done(t, admin.Ping(t.Context()))
		if n := c.Since(t, "evalsha"); n > attempts {
			t.Errorf("%d calls arrived from %d requests", n, attempts)
		}
		deadline := time.Now().Add(10 * time.Second)
		for _, r := range []*Redis{connected, unconnected, crowded} {
			for {
				if _, err := r.Take(t.Context(), req, nil); err == nil {
					break
				} else if time.Now().After(deadline) {
					t.Fatalf("after the server went on: %v", err)
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	})
}

// TestTimedRedisTimeoutIncludesEverything guards that a request that takes several
// steps, each of them quick enough, has one timeout for all of them: here the wait
// for a first connection, the call, and the call with the whole script.
func TestTimedRedisTimeoutIncludesEverything(t *testing.T) {
	const timeout = 400 * time.Millisecond
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	slow := func(opt *RedisOptions) { opt.Addresses, opt.Timeout = []string{p.Addr}, timeout }
	greeted := newTestRedis(t, server, slow)
	b := hourly(1000)
	decide(t, greeted, AccountingAtomic, b)
	ungreeted := newTestRedis(t, server, slow)

	p.Delay(timeout * 3 / 4)
	redistest.Done(t, server.Client().ScriptFlush(t.Context()))
	for _, r := range []*Redis{ungreeted, greeted} {
		began := time.Now()
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
		checkError(t, err, timeout.String())
		if took := time.Since(began); took > timeout*5/4 {
			t.Errorf("waited %v, want at most %v", took, timeout)
		}
	}
}

// TestRedisRunsScriptOnce guards that a request whose answer is lost is never sent
// again: the server has decided it, and would charge it twice. No store is used so
// often here that its breaker opens.
func TestRedisRunsScriptOnce(t *testing.T) {
	server := redistest.Start(t)
	redistest.Done(t, server.Client().ScriptLoad(t.Context(), takeSource))
	const stores, requests = 5, 4
	b := hourly(1000)
	for _, half := range []int{0, 1} {
		p := redistest.StartProxy(t, server.Addr)
		for range stores {
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Addresses = []string{p.Addr} })
			for range requests {
				p.HalfReply(half, "evalsha")
				d, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
				if len(d) > 0 {
					t.Fatalf("decided %+v", d)
				}
				checkError(t, err, p.Addr)
			}
		}
	}
	c := redistest.CommandCounter{Server: server}
	c.Check(t, "evalsha", 2*stores*requests)
	if got := unitsIn(t, newTestRedis(t, server, nil), b); got != 2*stores*requests {
		t.Errorf("%d units from %d requests", got, 2*stores*requests)
	}
}

// TestRedisChargesCancelledRequests guards that a request whose client has
// disconnected is still decided and charged: otherwise disconnecting early would
// be a way around the limit.
func TestRedisChargesCancelledRequests(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	b := hourly(2)
	for i, ctx := range []context.Context{cancelled, cancelled, cancelled} {
		d, err := r.Take(ctx, Request{Buckets: []Bucket{b}}, nil)
		if err != nil || d[0].Denied != (i == 2) {
			t.Errorf("request %d: decided %+v, error %v", i, d, err)
		}
	}
	if got := unitsIn(t, r, b); got != 2 {
		t.Errorf("%d units after 2 requests", got)
	}
}

// TestTimedRedisKeepsDeadlines guards requests whose context leaves less time than the
// store's timeout: they are decided by the deadline, in this process if the server
// has not answered, and that is not a failure of the server.
func TestTimedRedisKeepsDeadlines(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	var seen events
	memory := NewMemory()
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.Fallback, opt.Report, opt.Timeout = []string{proxy.Addr}, memory, seen.report, 5*time.Second
	})
	b := hourly(1000)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	proxy.Delay(2 * time.Second)
	for _, left := range []time.Duration{-time.Second, 0, time.Millisecond, 50 * time.Millisecond} {
		for _, noFallback := range []bool{false, true} {
			for range manyFailures {
				ctx, cancel := context.WithTimeout(t.Context(), left)
				began := time.Now()
				_, err := r.Take(ctx, Request{Buckets: []Bucket{b}, NoFallback: noFallback}, nil)
				if took := time.Since(began); took > max(left, 0)+time.Second {
					t.Errorf("waited %v of %v", took, left)
				}
				if errors.Is(err, ErrUnavailable) != noFallback {
					t.Errorf("with %v left: error %v", left, err)
				}
				cancel()
			}
		}
	}
	proxy.Pass()
	for _, what := range seen.take() {
		if what != "error backlog" {
			t.Errorf("reported %q", what)
		}
	}
	if got := proxy.Connections(); got != 1 {
		t.Errorf("%d connections were made", got)
	}
}

// TestRedisUnknownReplies guards that a server with any other reply than the
// script's decides nothing.
func TestRedisUnknownReplies(t *testing.T) {
	server := redistest.Start(t)
	b := hourly(5)
	for _, script := range []string{
		"return 'OK'", "return 7", "return nil", "return {}", "return {1}", "return {1, 2, 3}",
		"return {'a', 'b'}", "return {{1, 2}, {3, 4}}", "return {ok='fine'}", "return {err='ERR no'}",
		"return {-1, 1}", "return {0, 1}", "return {5, -3}", "return {2 ^ 50 + 1, 0}", "return {-2 ^ 50 - 2, 0}",
		"return {redis.error_reply('ERR inside'), 0}", "return 1 +", "error('thrown')",
		"return redis.call('NOSUCH')", "return redis.call('INCR', KEYS[1])",
	} {
		t.Run(script, func(t *testing.T) {
			r := newRedis(RedisOptions{Addresses: []string{server.Socket}, Timeout: 10 * time.Second}, newScript(script))
			defer r.Close()
			d, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			if err == nil || len(d) > 0 {
				t.Fatalf("decided %+v, error %v", d, err)
			}
			checkError(t, err, server.Socket)
		})
	}
}

// TestReplyToSeveralBuckets guards that a reply which is invalid at a later bucket
// leaves no outcomes of earlier ones behind: a caller that asks another store next
// would take them for that store's. Outcomes from before stay.
func TestReplyToSeveralBuckets(t *testing.T) {
	req := Request{Buckets: []Bucket{hourly(5), hourly(6)}}
	kept := outcome{Ahead: bucket.Ahead{Clear: 1234}}
	for _, reply := range [][]int64{
		{}, {1}, {1, 0}, {1, 0, 1}, {1, 0, 1, 1}, {1, 0, 0, 1}, {1, 0, -1, 1}, {1, 0, bucket.Horizon + 1, 0},
		{-2, 0, -2 - bucket.Horizon, 0}, {1, 0, 1, 0, 1}, {1, 0, 1, 0, 1, 0},
	} {
		got, corrupt, err := outcomesOf(req, reply, []outcome{kept})
		if err == nil || corrupt || len(got) != 1 || got[0] != kept {
			t.Errorf("reply %d: %+v, corrupt %t, error %v", reply, got, corrupt, err)
		}
	}
	const hour = 3600e6
	admitted := outcome{Ahead: bucket.Ahead{Clear: hour}, by: DecidedByRedis}
	denied := outcome{Ahead: bucket.Ahead{Clear: 6 * hour}, denied: true, by: DecidedByRedis}
	for _, tc := range []struct {
		reply   []int64
		foreign int // which outcome is foreign, if any
	}{
		{[]int64{hour, 0, 6 * hour, -1}, 0},
		{[]int64{-1 - hour, 0, 6 * hour, -1}, 1},
		{[]int64{hour, 0, -1 - 6*hour, -1}, 2},
	} {
		got, corrupt, err := outcomesOf(req, tc.reply, []outcome{kept})
		want := []outcome{kept, admitted, denied}
		want[tc.foreign].foreign = tc.foreign > 0
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("reply %d: %+v, error %v, want %+v", tc.reply, got, err, want)
		}
		if corrupt != (tc.foreign > 0) {
			t.Errorf("reply %d: corrupt %t", tc.reply, corrupt)
		}
		d := req.decisions(got[1:], []Decision{{Size: 1234}})
		decisions := []Decision{
			{Size: 1234},
			{Size: 5, Remaining: 4, Clear: time.Hour, By: DecidedByRedis},
			{Size: 6, Clear: 6 * time.Hour, Denied: true, RetryAfter: time.Hour, By: DecidedByRedis},
		}
		if !slices.Equal(d, decisions) {
			t.Errorf("decided %+v, want %+v", d, decisions)
		}
	}
}

// FuzzReply guards that a reply with any numbers leads to an error or to decisions
// that a bucket could have made.
func FuzzReply(f *testing.F) {
	add := func(buckets uint8, size, rate, dripSize, cost int64, reply ...int64) {
		var data []byte
		for _, n := range reply {
			data = binary.BigEndian.AppendUint64(data, uint64(n))
		}
		f.Add(buckets, size, rate, dripSize, cost, data)
	}
	const hour = 3600e6
	add(0, 5, hour, 1, 1)
	add(1, 5, hour, 1, 1, hour, 0)
	add(1, 5, hour, 1, 1, 5*hour, -1)
	add(2, 5, hour, 3, 4, hour, 2, 2*hour, -2)
	add(1, 5, hour, 3, 6, 0, -1)
	add(1, 5, hour, 1, 1, hour)
	add(1, 5, hour, 1, 1, hour, 0, 0)
	add(1, 5, hour, 3, 1, 0, 2)
	add(1, 5, hour, 3, 1, hour, 3)
	add(1, 5, hour, 3, 1, hour, -4)
	add(1, 5, 1, 1, 1, -1, 0)
	add(1, 5, 1, 1, 1, -2, 0)
	add(2, 5, hour, 3, 4, -1-hour, 2, 2*hour, -2)
	add(1, 5, hour, 3, 1, -1, -1)
	add(1, 5, hour, 3, 1, -1, 2)
	add(1, 5, hour, 3, 1, -1-hour, 3)
	add(1, MaxUnits, 1, 1, MaxUnits, -1-bucket.Horizon, 0)
	add(1, MaxUnits, 1, 1, MaxUnits, -2-bucket.Horizon, 0)
	add(1, MaxUnits, 1, 1, MaxUnits, bucket.Horizon, 0)
	add(1, MaxUnits, 1, 1, MaxUnits, bucket.Horizon+1, 0)
	add(1, MaxUnits, MaxUnits, MaxUnits, math.MaxInt64, bucket.Horizon, -MaxUnits)
	add(1, MaxUnits, MaxUnits, MaxUnits, 1, bucket.Horizon, MaxUnits-1)
	add(1, 1, 1, MaxUnits, 1, bucket.Horizon, -MaxUnits)
	for _, n := range []int64{math.MinInt64, math.MinInt64 + 1, math.MaxInt64} {
		add(1, 5, hour, 3, 1, n, 0)
		add(1, 5, hour, 3, 1, 0, n)
		add(1, MaxUnits, 1, MaxUnits, math.MaxInt64, n, n)
	}

	f.Fuzz(func(t *testing.T, buckets uint8, size, rate, dripSize, cost int64, data []byte) {
		if rate > bucket.Horizon { // a Duration cannot hold more
			return
		}
		limit := Limit{Size: size, DripInterval: time.Duration(rate) * time.Microsecond, DripSize: dripSize}
		if limit.Validate() != nil || cost < 1 || buckets > 8 {
			return
		}
		var req Request
		for i := range buckets {
			req.Buckets = append(req.Buckets, Bucket{Name: "b", Key: fmt.Sprint(i), Limit: limit, Cost: cost})
		}
		var reply []int64
		for ; len(data) >= 8; data = data[8:] {
			reply = append(reply, int64(binary.BigEndian.Uint64(data)))
		}

		kept := outcome{Ahead: bucket.Ahead{Clear: 1234}}
		outcomes, corrupt, err := outcomesOf(req, reply, []outcome{kept})
		if outcomes[0] != kept {
			t.Fatalf("%+v in place of what was there before", outcomes[0])
		}
		outcomes = outcomes[1:]
		if err != nil {
			if len(outcomes) > 0 || corrupt || strings.Contains(err.Error(), "\n") {
				t.Fatalf("%+v, corrupt %t, with error %q", outcomes, corrupt, err)
			}
			return
		}
		got := req.decisions(outcomes, nil)
		if len(got) != int(buckets) || len(reply) != 2*int(buckets) {
			t.Fatalf("%d decisions on %d buckets by %d numbers", len(got), buckets, len(reply))
		}
		foreign := false
		for i, d := range got {
			ahead, slack := reply[2*i], reply[2*i+1]
			if ahead < 0 {
				ahead, foreign = -1-ahead, true
			}
			switch {
			case d.Size != size,
				d.Remaining < 0 || d.Remaining > size,
				d.Clear != time.Duration(ahead)*time.Microsecond,
				d.Denied != (slack < 0),
				d.Never != (d.Denied && cost > size),
				d.RetryAfter < 0 || d.RetryAfter > d.Clear,
				d.RetryAfter > 0 && (!d.Denied || d.Never),
				outcomes[i].by == DecidedByFallback:
				t.Errorf("%+v, cost %d, reply %d: decided %+v", limit, cost, reply[2*i:2*i+2], d)
			}
		}
		if corrupt != foreign {
			t.Errorf("reply %d: corrupt %t", reply, corrupt)
		}
	})
}

// FuzzStoredValue guards that no value of a key makes a request fail or admits
// more than the bucket's size, and that it is replaced by a bucket.
func FuzzStoredValue(f *testing.F) {
	server := redistest.Start(f)
	r := newTestRedis(f, server, nil)
	for _, value := range []string{"", "0", "1", "text", "99999999999999999999:2", strings.Repeat("\x00", 12), strings.Repeat("\xff", 25), strings.Repeat("\x88", 81)} {
		f.Add(value, int64(0), int64(5))
		f.Add(value, int64(3600e6), int64(1))
	}
	for _, ahead := range []int64{-1, 1, 3600e6, 2 * 3600e6, 3 * 3600e6, bucket.Horizon - 60e6, bucket.Horizon + 60e6} {
		for _, w := range []written{
			{}, {when: -1}, {when: 1}, {when: -3600e6}, {when: 3600e6}, {when: -4 * bucket.Horizon}, {when: 2 * bucket.Horizon},
			{Level: bucket.Level{Rest: 1}}, {Level: bucket.Level{Rest: 2}}, {Level: bucket.Level{Rest: 3}}, {Level: bucket.Level{Rest: -1}}, {Level: bucket.Level{Rest: bucket.Horizon}},
			{record: heldRecord{{held: 1}}}, {record: heldRecord{{seen: 1, held: 2}, {process: 1, seen: -9e6, held: 3}}}, {record: heldRecord{{seen: -9e6, held: 3, ended: 2, charged: -1}}},
			{record: heldRecord{{held: bucket.Horizon}, {number: 1, held: bucket.Horizon}}}, {record: heldRecord{{seen: 99e6, held: 1}, {seen: -16e6, held: 2}}}, {record: heldRecord{{held: 0}}}, {record: heldRecord{{held: -1}, {held: 2}}},
		} {
			f.Add(w.value(), ahead, int64(5))
			f.Add(w.value(), ahead, int64(9))
		}
	}
	f.Fuzz(func(t *testing.T, value string, ahead, size int64) {
		if size < 1 || size > 9 {
			return
		}
		if w, ok := parseWritten(value); ok { // with times of today
			now := serverTime(t, server)
			w.Clear, w.when = w.Clear+now+ahead, w.when+now
			for i := range w.record {
				w.record[i].seen += now
			}
			value = w.value()
		}
		b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: size, DripInterval: time.Hour, DripSize: 3}, Cost: 1}
		key := r.keys.of(&b)
		set := func() {
			t.Helper()
			redistest.Done(t, server.Client().Set(t.Context(), key, value, 0))
		}
		set()
		admitted := 0
		for range 11 {
			d := decide(t, r, AccountingAtomic, b)[0]
			if d.Remaining < 0 || d.Remaining > size || d.Clear < 0 || d.RetryAfter < 0 || d.RetryAfter > d.Clear {
				t.Fatalf("%.40q: decided %+v", value, d)
			}
			if !d.Denied {
				admitted++
			}
		}
		if admitted > int(size) {
			t.Fatalf("%.40q: %d admitted", value, admitted)
		}
		stored, err := server.Client().Get(t.Context(), key).Result()
		if admitted > 0 && holdsUnits(stored) {
			if ttl := server.Client().PTTL(t.Context(), key).Val(); ttl <= 0 {
				t.Fatalf("%.40q: expires in %v", stored, ttl)
			}
		} else if err == nil && admitted > 0 {
			s, expires := storedState(t, server, key)
			checkExpiry(t, s, expires)
		}
		for _, what := range []byte{byte(AccountingAtomic), whatSettle, whatRenew} {
			set()
			req := toHold(Request{Buckets: []Bucket{b}})
			if _, _, err := r.call(inTime(), asProcess(r.query(req, what)), nil); err != nil {
				t.Fatalf("%.40q: %d: %v", value, what, err)
			}
		}
	})
}

// TestFullBucketsShowAcceptedWrites guards that a server which was out of memory is
// used again although all requests since are for a full bucket, whatever its
// algorithm: the server denies them, and so shows nothing of whether it takes writes.
func TestFullBucketsShowAcceptedWrites(t *testing.T) {
	t.Parallel()
	for name, l := range countingLimits {
		t.Run(name, func(t *testing.T) { checkAcceptedWrites(t, l) })
	}
	t.Run("log", func(t *testing.T) { checkAcceptedWrites(t, SlidingLog(1, time.Minute)) })
}

func checkAcceptedWrites(t *testing.T, l Limit) {
	t.Helper()
	l.CountDenied, l.DripInterval = false, time.Hour
	server := redistest.Start(t)
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	call := func(key string) Decider {
		r.denyCache = newDenyCache(64)
		b := Bucket{Name: "b", Key: key, Limit: l, Cost: 1}
		return mustTake(t, r, Request{Buckets: []Bucket{b}})[0].By
	}
	limit := func(memory string) {
		redistest.Done(t, server.Client().ConfigSet(t.Context(), "maxmemory", memory))
	}
	call("full")
	limit("1")
	for i := range 20 {
		call(fmt.Sprint("new", i))
	}
	limit("0")
	redistest.WaitFor(t, 5*time.Second, func() error {
		for range 10 { // some of them probe the server even while it counts as down
			if by := call("full"); by != DecidedByRedis {
				return fmt.Errorf("decided by %v", by)
			}
		}
		return nil
	})
}

// TestEmptyWindowReportedToRedis guards that a window which a node reports to be empty, while
// all that it admits is in flight, denies and breaks nothing: it may have begun before
// the call, and so be written as a bucket of the past.
func TestEmptyWindowReportedToRedis(t *testing.T) {
	r := newTestRedis(t, redistest.Start(t), nil)
	b := Bucket{Name: "b", Key: "k", Limit: ClockWindow(10, time.Hour, time.Unix(0, 0)), Cost: 1}
	req := Request{Buckets: []Bucket{b}}
	q := r.query(req, byte(AccountingAtomic))
	q.buckets[0].local = localLevel{bucket.Ahead{}, 10, unsure}
	_, outcomes, err := r.call(inTime(), q, nil)
	if err != nil || !outcomes[0].denied || !outcomes[0].blocked {
		t.Errorf("%+v, error %v", outcomes, err)
	}
	if d := decide(t, r, AccountingAtomic, b)[0]; d.Denied || d.Remaining != 9 {
		t.Errorf("then decided %+v", d)
	}
}
