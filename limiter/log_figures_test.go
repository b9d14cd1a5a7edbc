package limiter

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// zset is the recipe of seed 002 for a log in a sorted set, as its steps say, by
// commands of its own on a Redis server: nothing of it is shared with SlidingLog.
// Its numbers refer to the steps. As in the library that the recipe describes, an
// action that is exactly as old as the interval has left, and the action itself is
// among those that are counted.
type zset struct {
	client   *redis.Client
	key      string
	interval time.Duration
	max      int64
	distance time.Duration // the least time between two actions, if any

	// With oneMember, members are times, as in the recipe, so that two actions of one
	// microsecond are one. With onlyAdmitted, an action that is blocked leaves the set
	// again, which is all that SlidingLog does otherwise.
	oneMember, onlyAdmitted bool
	actions                 int
}

// allow takes an action at the time now, in µs, and reports whether it is allowed.
func (z *zset) allow(t rapid.TB, now int64) bool {
	t.Helper()
	ctx := context.Background()
	z.actions++
	member := fmt.Sprint(now)
	if !z.oneMember {
		member += fmt.Sprintf(":%d", z.actions)
	}
	var last, all *redis.ZSliceCmd
	_, err := z.client.TxPipelined(ctx, func(tx redis.Pipeliner) error { // 8: one transaction
		tx.ZRemRangeByScore(ctx, z.key, "-inf", fmt.Sprint(now-z.interval.Microseconds())) // 2
		last = tx.ZRevRangeWithScores(ctx, z.key, 0, 0)                                    // for 4
		tx.ZAdd(ctx, z.key, redis.Z{Score: float64(now), Member: member})                  // 1, 5, 6
		all = tx.ZRangeWithScores(ctx, z.key, 0, -1)                                       // for 3
		tx.Expire(ctx, z.key, time.Hour)                                                   // by the server's clock, which does not stand still
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	blocked := int64(len(all.Val())) > z.max // 3
	if v := last.Val(); len(v) > 0 && float64(now)-v[0].Score < float64(z.distance.Microseconds()) {
		blocked = true // 4
	}
	if blocked && z.onlyAdmitted {
		redistest.Done(t, z.client.ZRem(ctx, z.key, member))
	}
	return !blocked
}

// TestSlidingLogMatchesRecipe guards the figures of seed 004 and what a sliding log
// decides next to the recipe of seed 002, step by step: what is admitted alike, and,
// with the reason, what is not.
func TestSlidingLogMatchesRecipe(t *testing.T) {
	at := func(minute, second int, more ...time.Duration) time.Duration {
		d := time.Duration(minute)*time.Minute + time.Duration(second)*time.Second
		for _, m := range more {
			d += m
		}
		return d
	}
	const logged = "the recipe counts what it has denied"
	type action struct {
		at           time.Duration // since 1:00:00
		ours, theirs bool
		why          string // they differ
	}
	tests := map[string]struct {
		max      int64
		interval time.Duration
		distance time.Duration
		actions  []action
	}{
		"seed 004": {2, time.Minute, 0, []action{
			{at: at(0, 1), ours: true, theirs: true},
			{at: at(0, 30), ours: true, theirs: true},
			{at: at(0, 50)},
			{at: at(1, 40), ours: true, theirs: true}, // theirs still has 1:00:50, ours has nothing
			{at: at(1, 41), ours: true, why: logged},
			{at: at(1, 42)},
			{at: at(2, 40), ours: true, why: logged}, // 1:40 is no longer within a minute
			{at: at(2, 41, -time.Microsecond)},       // 1:41 still is
		}},
		"the edge": {2, time.Minute, 0, []action{
			{at: at(0, 0), ours: true, theirs: true},
			{at: at(0, 0, time.Microsecond), ours: true, theirs: true},
			{at: at(1, 0, -time.Microsecond)},
			{at: at(1, 0), ours: true, why: logged},
		}},
		"one microsecond": {2, time.Minute, 0, []action{
			{at: at(0, 0), ours: true, theirs: true},
			{at: at(0, 0), ours: true, theirs: true},
			{at: at(0, 0), theirs: true, why: "a time is in the set once"},
			{at: at(0, 1), theirs: true, why: "so it has room for another one"},
			{at: at(0, 2)},
		}},
		"hammering": {1, time.Second, 0, []action{
			{at: 0, ours: true, theirs: true},
			{at: 600 * time.Millisecond},
			{at: 1200 * time.Millisecond, ours: true, why: logged},
			{at: 1800 * time.Millisecond},
			{at: 2400 * time.Millisecond, ours: true, why: logged},
		}},
		"a distance": {3, 10 * time.Second, time.Second, []action{
			{at: 0, ours: true, theirs: true},
			{at: 999_999 * time.Microsecond},
			{at: 1200 * time.Millisecond, ours: true, why: logged},
			{at: 2200 * time.Millisecond, ours: true, why: logged},
			{at: 3200 * time.Millisecond},
			{at: 11 * time.Second, ours: true, why: logged},
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			v := newClockedRedis(t, redistest.Start(t), "rl:")
			begin := v.start - v.start%3600e6 + 3600e6
			recipe := &zset{client: v.admin, key: "recipe", interval: tc.interval, max: tc.max, distance: tc.distance, oneMember: true}
			var now int64
			memory := NewMemoryWithClock(func() time.Duration { return time.Duration(now) * time.Microsecond })
			buckets := []Bucket{{Name: "log", Key: "k", Limit: SlidingLog(tc.max, tc.interval), Cost: 1}}
			if tc.distance > 0 { // which is a bucket of its own here
				buckets = append(buckets, Bucket{Name: "apart", Key: "k", Limit: Limit{Size: 1, DripInterval: tc.distance, DripSize: 1}, Cost: 1})
			}
			for _, a := range tc.actions {
				now = begin + a.at.Microseconds()
				v.at(t, now)
				if theirs := recipe.allow(t, now); theirs != a.theirs {
					t.Errorf("%v: the recipe says %t, want %t", a.at, theirs, a.theirs)
				}
				for name, store := range map[string]Store{"memory": memory, "redis": v} {
					if ours := !Denied(decide(t, store, AccountingAtomic, buckets...)); ours != a.ours {
						t.Errorf("%v: %s says %t, want %t", a.at, name, ours, a.ours)
					}
				}
				if (a.ours == a.theirs) != (a.why == "") {
					t.Errorf("%v: differ %t, because %q", a.at, a.ours != a.theirs, a.why)
				}
			}
		})
	}
}

// TestSlidingLogIsRecipe guards that this is all: on random requests a sliding log in
// Redis decides as the recipe does, if that forgets what it has denied and distinguishes two
// requests of one microsecond apart.
func TestSlidingLogIsRecipe(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	seen, trace := map[bool]int{}, 0
	checkTraces(t, 5, func(t *rapid.T) {
		l := SlidingLog(rapid.Int64Range(1, 8).Draw(t, "size"),
			rapid.SampledFrom([]time.Duration{7 * time.Microsecond, time.Second, time.Minute}).Draw(t, "window"))
		trace++
		v.at(t, v.start)
		recipe := &zset{client: v.admin, key: fmt.Sprint("recipe:", trace), interval: time.Hour, max: l.Size, onlyAdmitted: true}
		recipe.interval = l.DripInterval
		b := Bucket{Name: "log", Key: fmt.Sprint(trace), Limit: l, Cost: 1}
		var last Decision
		for i := range rapid.IntRange(1, 30).Draw(t, "requests") {
			v.at(t, v.now+drawWindowGap(t, l, last))
			want := recipe.allow(t, v.now)
			if last = decide(t, v, AccountingAtomic, b)[0]; last.Denied == want {
				t.Fatalf("%+v, request %d, at %d µs: %+v, the recipe says %t", l, i, v.now, last, want)
			}
			seen[want]++
		}
	})
	if min(seen[true], seen[false]) < 700 {
		t.Errorf("the test covers too little: %v", seen)
	}
}

// TestSlidingLogBounds guards that no window has more units than the size, wherever
// it begins, and that a log reaches that.
func TestSlidingLogBounds(t *testing.T) {
	reached := 0
	checkTraces(t, 20, func(t *rapid.T) {
		l := SlidingLog(rapid.Int64Range(1, 30).Draw(t, "size"),
			rapid.SampledFrom([]time.Duration{time.Microsecond, 7 * time.Microsecond, time.Second, time.Minute}).Draw(t, "window"))
		now, last := int64(1_790_000_000_123_456), Decision{}
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(now) * time.Microsecond })
		var log []charge
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			now += drawWindowGap(t, l, last)
			cost := drawSlidingCost(t, l, last)
			if last = decide(t, m, AccountingAtomic, Bucket{Name: "log", Key: "k", Limit: l, Cost: cost})[0]; !last.Denied {
				log = append(log, charge{at: now, units: cost})
			}
			units := int64(0)
			for _, c := range log {
				if c.at > now-l.of().Rate() {
					units += c.units
				}
			}
			if units > l.Size || last.Remaining != l.Size-units {
				t.Fatalf("%+v: %d units in a window, %+v", l, units, last)
			}
			if units == l.Size {
				reached++
			}
		}
	})
	if reached < 1000 {
		t.Errorf("the bound was reached %d times: the test covers too little", reached)
	}
}
