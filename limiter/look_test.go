package limiter

import (
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestLookLeavesNothing guards that a request which costs nothing stores nothing, in the
// process and in Redis, with each algorithm: no bucket where none is, no window that begins,
// no longer expiry, and nothing of a full one, also where denied requests count.
func TestLookLeavesNothing(t *testing.T) {
	server := redistest.Start(t)
	r, err := NewRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 10 * time.Second, Fallback: NewMemory()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	for name, limit := range map[string]Limit{
		"leaky": {Size: 1, DripInterval: time.Hour, DripSize: 1}, "window": FixedWindow(1, time.Hour), "sliding": SlidingWindow(1, time.Hour),
		"log": SlidingLog(1, time.Hour), "warm-up": warmingUp(1, time.Hour, time.Hour, 3),
	} {
		m, before := NewMemory(), r.fallback.memory.Len()
		b := Bucket{Name: name, Key: "k", Limit: limit}
		b.Limit.CountDenied = true
		other := Bucket{Name: name, Key: "other", Limit: limit} // of another slot
		key := r.keys.of(&b)
		for _, store := range []Store{m, r} {
			if d := decide(t, store, AccountingAtomic, b, other); d[0].Denied || d[0].Clear != 0 {
				t.Errorf("%s, %T: %+v of an empty bucket", name, store, d[0])
			}
		}
		if m.Len() != 0 || r.fallback.memory.Len() != before || filled(t, server, key) != 0 {
			t.Errorf("%s: a look has made a bucket: %d in the process, %d in the fallback", name, m.Len(), r.fallback.memory.Len()-before)
		}
		charged := b
		charged.Cost = 1
		decide(t, r, AccountingAtomic, charged)
		decide(t, m, AccountingAtomic, charged)
		value := server.Client().Get(t.Context(), key).Val()
		expires := server.Client().PExpireTime(t.Context(), key).Val()
		for _, store := range []Store{m, r} {
			for range 3 {
				if d := decide(t, store, AccountingAtomic, b)[0]; d.Denied || d.Remaining != 0 || d.Clear <= 0 || d.RetryAfter != 0 {
					t.Errorf("%s, %T: %+v of a full bucket", name, store, d)
				}
			}
		}
		if server.Client().Get(t.Context(), key).Val() != value || server.Client().PExpireTime(t.Context(), key).Val() != expires {
			t.Errorf("%s: a look at a full bucket has changed what is stored", name)
		}
	}
}

// TestFreeRequests guards that a request which costs nothing is admitted whatever a bucket
// holds, and reports how much that is with what is held, and that neither another bucket's denial
// nor a ban is passed by that; but a request whose cost is not known yet needs room for a unit.
func TestFreeRequests(t *testing.T) {
	server := redistest.Start(t)
	r, err := NewRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 10 * time.Second, Fallback: NewMemory()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	bucketOf := func(name string, l Limit, cost int64) Bucket {
		return Bucket{Name: name, Key: "k", Limit: l, Cost: cost}
	}
	take := func(store Store, buckets ...Bucket) []Decision {
		t.Helper()
		decisions, err := store.Take(t.Context(), Request{Buckets: buckets, Held: new(Held)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return decisions
	}
	for name, limit := range map[string]Limit{
		"leaky": {Size: 3, DripInterval: time.Hour, DripSize: 1}, "window": FixedWindow(3, time.Hour), "sliding": SlidingWindow(3, time.Hour), "log": SlidingLog(3, time.Hour),
	} {
		for _, store := range []Store{NewMemory(), r} {
			held := bucketOf(name, limit, 2)
			held.Hold = true
			holding := new(Held)
			if _, err := store.Take(t.Context(), Request{Buckets: []Bucket{held}, Held: holding}, nil); err != nil {
				t.Fatal(err)
			}
			if d := take(store, bucketOf(name, limit, 0))[0]; d.Denied || d.Remaining != 1 {
				t.Errorf("%s, %T: %+v with 2 of 3 held", name, store, d)
			}
			holding.Settle(0, 9) // overfills it
			other := bucketOf(name+" other", limit, 4)
			for range 3 {
				if d := take(store, bucketOf(name, limit, 0))[0]; d.Denied || d.Remaining != 0 || d.Clear <= 0 {
					t.Errorf("%s, %T: %+v of an overfull bucket", name, store, d)
				}
				if d := take(store, bucketOf(name, limit, 0), other); d[0].Denied || !d[1].Denied {
					t.Errorf("%s, %T: %+v beside a bucket that denies", name, store, d)
				}
				unknown := bucketOf(name, limit, 0)
				unknown.Hold = true
				if d := take(store, unknown)[0]; !d.Denied {
					t.Errorf("%s, %T: %+v of a request whose cost is not known yet", name, store, d)
				}
				if d := take(store, bucketOf(name, limit, 1))[0]; !d.Denied {
					t.Errorf("%s, %T: %+v of a unit", name, store, d)
				}
			}
			for _, c := range []Consistency{Lease(time.Second), Eventual(time.Second)} {
				b := bucketOf(name, limit, 0)
				if b.Consistency = c; name == "log" {
					continue // which is exact
				}
				if d := take(store, b)[0]; d.Denied || d.Remaining != 0 {
					t.Errorf("%s, %T, %v: %+v of an overfull bucket", name, store, c, d)
				}
			}
			bans := bucketOf(name+" bans", BanAfter(1, time.Hour), 1)
			bans.Watches = 1
			if d := take(store, bucketOf(name, limit, 0), bans); d[0].Denied || d[1].Denied {
				t.Errorf("%s, %T: a request that costs nothing began a ban: %+v", name, store, d)
			}
			take(store, bucketOf(name, limit, 1), bans)
			for _, cost := range []int64{0, 1} { // of the bucket that bans
				if bans.Cost = cost; !Denied(take(store, bucketOf(name, limit, 0), bans)) {
					t.Errorf("%s, %T: a request that costs nothing passed a ban", name, store)
				}
			}
		}
	}
}
