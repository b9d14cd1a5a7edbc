package limiter

import (
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestLookLeavesNothing guards that a request which costs nothing stores nothing, in the
// process and in Redis, with each algorithm: no bucket where none is, no window that begins,
// no longer expiry, and nothing if it is denied, also where denied requests count.
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
				if d := decide(t, store, AccountingAtomic, b)[0]; !d.Denied || d.RetryAfter <= 0 || d.RetryAfter > 3*time.Hour {
					t.Errorf("%s, %T: %+v of a full bucket", name, store, d)
				}
			}
		}
		if server.Client().Get(t.Context(), key).Val() != value || server.Client().PExpireTime(t.Context(), key).Val() != expires {
			t.Errorf("%s: a denied look has changed what is stored", name)
		}
	}
}
