package limiter

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestRedisJoinsAsHere guards that the server joins a level that is reported to it with its own as
// this process does, for every algorithm that keeps no entries.
func TestRedisJoinsAsHere(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen := map[bucket.Algorithm]int{}
	checkTraces(t, 20, func(t *rapid.T) {
		l := drawOperated(t)
		if l.of().KeepsEntries() || l.Size >= MaxUnits {
			return
		}
		now := v.start + rapid.Int64Range(0, 1e12).Draw(t, "now")
		v.at(t, now)
		drain := l.of().DrainTime().Microseconds()
		draw := func(label string) bucket.Level {
			var s bucket.Level
			at := now - rapid.Int64Range(0, drain).Draw(t, label+" since")
			for range rapid.IntRange(1, 3).Draw(t, label+" charges") {
				s = l.of().Add(s.At(at), rapid.Int64Range(1, l.Size).Draw(t, label+" units"), bucket.Moment{Now: at, Unix: at})
				at += rapid.Int64Range(0, now-at).Draw(t, label+" later")
			}
			return s
		}
		stored, reported := draw("stored"), draw("reported")
		if stored.Clear <= now || reported.Clear <= now || stored.Clear-now > bucket.Horizon || reported.Clear-now > bucket.Horizon {
			return
		}
		b := Bucket{Name: "s", Key: "k", Limit: l, Cost: l.Size + 1}
		redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), l.written(stored, now).value(), 0))
		want := l.of().Join(stored, reported, 0, true)
		outcomes, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{reported.Ahead(now), 0, own}})
		if err != nil {
			t.Fatal(err)
		}
		if got := outcomes[0].After(now); got != want {
			t.Fatalf("%+v at %d: %+v, reported %+v: %+v, want %+v", l, now, stored, reported, got, want)
		}
		inFlight, cost := rapid.Int64Range(0, l.Size).Draw(t, "in flight"), rapid.Int64Range(1, l.Size).Draw(t, "cost")
		b.Cost, b.Key = cost, "k2"
		redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), l.written(stored, now).value(), 0))
		fits := l.of().Room(want, 0, now) >= cost && l.of().Room(reported, inFlight, now) >= cost
		if outcomes, err = callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, []localLevel{{reported.Ahead(now), inFlight, own}}); err != nil {
			t.Fatal(err)
		}
		if outcomes[0].denied == fits {
			t.Fatalf("%+v at %d: %+v, reported %+v with %d in flight, cost %d: %+v, want admitted %t", l, now, stored, reported, inFlight, cost, outcomes[0], fits)
		}
		if stored != reported {
			seen[l.Algorithm]++
		}
	})
	for a, k := range bucket.Algorithms {
		if !k.Entries && seen[bucket.Algorithm(a)] < 20 {
			t.Errorf("the test covers too little: %v", seen)
		}
	}
}
