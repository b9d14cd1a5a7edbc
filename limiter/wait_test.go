package limiter

import (
	"context"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestWaitIsExact guards that a client which waits as long as Wait says is
// admitted, and one that comes a microsecond earlier is not, even for a bucket
// that did not deny but whose last room was charged.
func TestWaitIsExact(t *testing.T) {
	checkTraces(t, 1, func(t *rapid.T) {
		var now time.Duration
		units := rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, MaxUnits))
		l := Limit{
			Size:         units.Draw(t, "size"),
			DripInterval: time.Microsecond * time.Duration(rapid.Int64Range(1, 1e7).Draw(t, "drip rate")),
			DripSize:     units.Draw(t, "drip size"),
		}
		if l.Validate() != nil { // it drains too slowly
			l.DripSize = l.Size
		}
		b := Bucket{Name: "a", Key: "k", Limit: l, Cost: 1}
		take := func(store *Memory, at time.Duration) *Decision {
			now = at
			d, err := store.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			return &d[0]
		}
		// past is an earlier request. The history is replayed to decide the next
		// one at different times.
		type past struct {
			at   time.Duration
			cost int64
		}
		var history []past
		replay := func(at time.Duration, cost int64) *Decision {
			store := NewMemoryWithClock(func() time.Duration { return now })
			for _, p := range history {
				b.Cost = p.cost
				take(store, p.at)
			}
			b.Cost = cost
			return take(store, at)
		}
		at := time.Duration(0)
		for range rapid.IntRange(1, 8).Draw(t, "requests") {
			at += time.Microsecond * time.Duration(rapid.Int64Range(0, 2e7).Draw(t, "passes"))
			cost := rapid.OneOf(rapid.Int64Range(1, min(l.Size, 20)), rapid.Int64Range(1, l.Size)).Draw(t, "cost")
			d := replay(at, cost)
			wait := b.RoomIn(d)
			history = append(history, past{at, cost})
			if again := replay(at+wait, cost); again.Denied {
				t.Fatalf("%+v, cost %d: %+v, but denied after %v", l, cost, d, wait)
			}
			if wait > 0 && !replay(at+wait-time.Microsecond, cost).Denied {
				t.Fatalf("%+v, cost %d: %+v, but admitted 1 µs before %v", l, cost, d, wait)
			}
			if d.Denied && wait != d.RetryAfter {
				t.Fatalf("%+v, cost %d: %+v, but waits %v", l, cost, d, wait)
			}
		}
	})
}

// TestWaitOfNeverAdmitted guards that Wait is zero for a cost above the size, for
// which waiting does not help.
func TestWaitOfNeverAdmitted(t *testing.T) {
	b := Bucket{Name: "a", Key: "k", Limit: Limit{Size: 2, DripInterval: time.Second, DripSize: 1}, Cost: 3}
	d, err := NewMemoryWithClock(func() time.Duration { return 0 }).Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if wait := b.RoomIn(&d[0]); !d[0].Never || wait != 0 {
		t.Errorf("got %+v and a wait of %v, want never and none", d[0], wait)
	}
}
