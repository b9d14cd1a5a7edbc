package limiter

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
)

// TestShareUnderFlood fills a limit that evicts nothing with keys from few or many
// networks, each of which then continues with new keys. It guards that newcomers
// from other networks are served, that those from flooded networks share a bucket,
// and that no bucket is lost.
func TestShareUnderFlood(t *testing.T) {
	racetest.SingleGoroutine(t)
	const most, honest = 5000, 1000
	for _, tc := range []struct{ networks, denied int }{
		{1, 1},
		{10, honest * 2 / 100},
		{100, honest * 13 / 100},
	} {
		t.Run(fmt.Sprint(tc.networks), func(t *testing.T) {
			f := newFlooded(t)
			b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: most}
			b.ShareKey = "kept"
			for range 10 {
				f.call(b, "kept")
			}
			for i := range 10 * most {
				f.now += 10 * time.Microsecond
				b.ShareKey = fmt.Sprint("network ", i%tc.networks*(1000/tc.networks))
				f.call(b, fmt.Sprint("flood", i))
			}
			denied := 0
			for i := range honest {
				b.ShareKey = fmt.Sprint("network ", i)
				if !f.call(b, fmt.Sprint("honest", i)) {
					denied++
				}
			}
			t.Logf("%d of %d denied", denied, honest)
			if denied > tc.denied || denied < tc.networks {
				t.Errorf("denied %d of %d newcomers, want %d to %d", denied, honest, tc.networks, tc.denied)
			}
			if f.call(b, "kept") {
				t.Error("a full bucket was forgotten")
			}
			if u := f.usage("b"); u.Buckets != most || u.Forgotten != 0 || u.Shared < 9*most {
				t.Errorf("%+v", u)
			}
			usedSlots(t, f.m)
		})
	}
}

// TestSharedLevelCarriesOver guards a key whose limit has room again: its own
// bucket starts at the level of the bucket that it shared, so that it does not get
// twice the size.
func TestSharedLevelCarriesOver(t *testing.T) {
	f := newFlooded(t)
	b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: 1, ShareKey: "network"}
	quick := b
	quick.Limit.DripInterval = time.Second
	f.call(quick, "first")
	for i := range 10 {
		if !f.call(b, fmt.Sprint(i%3)) {
			t.Fatalf("request %d on the shared bucket was denied", i)
		}
	}
	if f.call(b, "4") {
		t.Error("the shared bucket is full, and admits")
	}
	other := b
	other.ShareKey = "elsewhere"
	if !f.call(other, "5") {
		t.Error("networks share a bucket")
	}
	f.now += 2 * time.Second
	for range 1100 { // until the first bucket is removed
		f.now += 10 * time.Millisecond
		decide(t, f.m, AccountingAtomic, Bucket{Name: "c", Limit: Limit{Size: 1, DripInterval: time.Microsecond, DripSize: 1}, Cost: 1})
	}
	if f.call(b, "4") {
		t.Error("with room, a key got more than its shared bucket held")
	}
	b.Key = "4"
	if own := ownBuckets(f.m, []Bucket{b}); own != 1 {
		t.Fatalf("%d buckets of its own", own)
	}
	f.now += time.Hour
	if !f.call(b, "4") || f.call(b, "4") {
		t.Error("its own bucket does not drip")
	}
	usedSlots(t, f.m)
}

// TestShareIsBounded guards that the number of shared buckets is capped and that
// all further networks share one: no client can fill the memory by using many
// networks.
func TestShareIsBounded(t *testing.T) {
	f := newFlooded(t)
	b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: 2}
	for i := range 3 * minShared {
		b.ShareKey = fmt.Sprint(i)
		f.call(b, fmt.Sprint(i))
	}
	if n := usedSlots(t, f.m); n != 2+minShared+1 {
		t.Errorf("%d buckets, want %d", n, 2+minShared+1)
	}
	b.ShareKey = "last"
	if f.call(b, "last") {
		t.Error("the last shared bucket is full, and admits")
	}
}

// TestShareTwiceInOneRequest guards a request with two keys of one limit that have
// to share: both are charged.
func TestShareTwiceInOneRequest(t *testing.T) {
	f := newFlooded(t)
	b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 4, MaxKeys: 1, ShareKey: "network"}
	f.call(b, "first")
	one, two := b, b
	one.Key, two.Key = "one", "two"
	for range 2 {
		decide(t, f.m, AccountingAtomic, one, two)
	}
	if d := decide(t, f.m, AccountingAtomic, one, two); !d[0].Denied {
		t.Errorf("decided %+v, want a shared bucket of 8 units", d)
	}
}

// TestDrainedBucketsMakeRoom guards that a full limit has room as soon as its
// buckets have drained, before a sweep has reached them.
func TestDrainedBucketsMakeRoom(t *testing.T) {
	const most = 1000
	f := newFlooded(t)
	b := Bucket{Name: "b", Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: 1}, Cost: 1, MaxKeys: most, ShareKey: "network"}
	for i := range most {
		f.call(b, fmt.Sprint("old", i))
	}
	f.now += time.Hour
	for i := range most / 4 {
		b.Key = fmt.Sprint("new", i)
		if f.call(b, b.Key); ownBuckets(f.m, []Bucket{b}) != 1 {
			t.Fatalf("key %d has to share, though %d buckets have drained", i, most-i)
		}
	}
	if u := f.usage("b"); u.Buckets > most || u.Shared > 0 {
		t.Errorf("%+v", u)
	}
}

// TestSharingLimitsLeaveRoom guards that limits which evict nothing do not take
// the room of others, however many of them are flooded and however large they are:
// a full bucket of another limit stays full.
func TestSharingLimitsLeaveRoom(t *testing.T) {
	racetest.SingleGoroutine(t)
	for _, tc := range []struct{ limits, maxKeys int }{{1, 2000}, {2, 0}, {5, 0}} {
		t.Run(fmt.Sprint(tc), func(t *testing.T) {
			var now time.Duration
			m := NewMemoryWithClock(func() time.Duration { return now })
			m.SetMaxKeys(2000)
			hourly := Limit{Size: 3, DripInterval: time.Hour, DripSize: 1}
			full := keyed(50, Bucket{Name: "api", Limit: hourly, Cost: 3})
			for i := range full {
				decide(t, m, AccountingAtomic, full[i])
			}
			for n := range tc.limits {
				for i := range 4000 {
					now += time.Millisecond
					decide(t, m, AccountingAtomic, Bucket{
						Name: fmt.Sprint("login", n), Key: fmt.Sprint(i), ShareKey: fmt.Sprint(i % 7), MaxKeys: tc.maxKeys, Limit: hourly, Cost: 1,
					})
				}
			}
			for i := range full {
				now += time.Millisecond
				full[i].Cost = 1
				if d := decide(t, m, AccountingAtomic, full[i]); !d[0].Denied {
					t.Fatalf("bucket %d was forgotten: %+v", i, d)
				}
			}
		})
	}
}
