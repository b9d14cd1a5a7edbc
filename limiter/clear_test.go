package limiter

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// clear ends h, which empties its bucket.
func (h inProgress) clear(t rapid.TB) {
	t.Helper()
	if err := h.held.Clear(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
}

// TestClearInHistories guards requests that empty their bucket, by random histories of several
// processes with one server: it has what was charged since, and what others hold stays held and is
// charged when these end, whichever process they are in. What one process has been told, the next
// request finds in any.
func TestClearInHistories(t *testing.T) {
	t.Parallel()
	server := newWired(t)
	v := server.v
	seen := map[string]int{}
	checkTraces(t, 6, func(t *rapid.T) {
		v.flush(t)
		limit := rapid.SampledFrom([]Limit{
			{Size: 9, DripInterval: 10_000 * time.Hour, DripSize: 1}, FixedWindow(9, 10_000*time.Hour), SlidingWindow(9, 10_000*time.Hour), SlidingLog(9, 10_000*time.Hour),
		}).Draw(t, "limit")
		b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
		nodes := make([]*wire, rapid.IntRange(1, 3).Draw(t, "processes"))
		for i := range nodes {
			var fallback *Memory
			if rapid.IntRange(0, 3).Draw(t, "no fallback: 0") > 0 {
				fallback = NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
			}
			nodes[i] = server.open(t, "rl:", fallback, 3)
			nodes[i].auto = rapid.Bool().Draw(t, "auto")
			nodes[i].store.clock = func() time.Duration { return time.Duration(v.now-v.start) * time.Microsecond }
		}
		run := func() {
			for _, w := range nodes {
				w.run(len(w.line), true)
			}
		}
		var running []inProgress
		units, held := int64(0), int64(0)
		for range rapid.IntRange(5, 40).Draw(t, "steps") {
			w := rapid.SampledFrom(nodes).Draw(t, "process")
			what := rapid.SampledFrom([]string{"begin", "begin", "begin", "take", "charge", "charge", "release", "clear", "pass"}).Draw(t, "what")
			of := -1
			if what != "begin" && what != "take" && what != "pass" {
				of = rapid.IntRange(-1, len(running)-1).Draw(t, "which")
			}
			switch what {
			case "begin", "take":
				b.Cost = rapid.Int64Range(1, 3).Draw(t, "cost")
				var d Decision
				h := inProgress{cost: b.Cost}
				if what == "take" {
					all, err := w.store.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
					if err != nil {
						t.Fatal(err)
					}
					d = all[0]
				} else {
					d, h = begin(t, w.store, b)
				}
				switch fits := units+held+b.Cost <= limit.Size; {
				case d.Denied == fits:
					t.Fatalf("%+v with %d units and %d held, cost %d", d, units, held, b.Cost)
				case !fits:
					what = "deny"
				case what == "take":
					units += b.Cost
				default:
					running, held = append(running, h), held+b.Cost
				}
			case "pass":
				for range rapid.SampledFrom([]time.Duration{1, renewEvery / resendEvery, 2 * lapse / resendEvery}).Draw(t, "time") {
					v.advance(t, resendEvery)
					for _, w := range nodes {
						w.store.ledger.tick()
					}
					run()
				}
			}
			if of < 0 {
				seen[what]++
				continue
			}
			h := running[of]
			running, held = append(running[:of], running[of+1:]...), held-h.cost
			switch what {
			case "charge":
				h.held.Settle(0, h.cost)
				units += h.cost
			case "release":
				h.held.Settle(0, 0)
			case "clear":
				h.clear(t)
				units = 0
				if len(running) > 0 {
					what = "clear beside others"
				}
			}
			seen[what]++
			run() // what has ended is sent before the response
			for i, w := range nodes {
				if l := peek(t, w.store, b); l.Units != units || l.Held != held {
					t.Fatalf("process %d, after %s: %+v, want %d units, %d held", i, what, l, units, held)
				}
			}
		}
	})
	t.Log(seen)
	for _, what := range []string{"deny", "take", "charge", "release", "clear", "clear beside others", "pass"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// TestClearIsSeen guards that a key which was denied, by any process, is admitted once its bucket is
// cleared: no process remembers it as full.
func TestClearIsSeen(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	one, _ := testNode(t, server)
	two, _ := testNode(t, server)
	for name, limit := range map[string]Limit{"bucket": hourly(3).Limit, "window": FixedWindow(3, time.Hour), "log": SlidingLog(3, time.Hour)} {
		b := Bucket{Name: name, Key: "k", Limit: limit, Cost: 1}
		h := beginThere(t, one, b)
		beginThere(t, two, b).held.Settle(0, 3)
		peek(t, two, b) // on the same connection, so that it is charged
		for _, r := range []*Redis{one, two, two} {
			if d, _ := begin(t, r, b); !d.Denied {
				t.Errorf("%s: %+v, and it is full", name, d)
			}
		}
		h.clear(t)
		for _, r := range []*Redis{two, one} {
			if d, h := begin(t, r, b); d.Denied || d.Remaining != 2 {
				t.Errorf("%s: %+v, and it was cleared", name, d)
			} else {
				h.held.Settle(0, 0)
				peek(t, r, b) // on the same connection, so that it is released
			}
		}
	}
}

// TestClearShared guards that the bucket which new keys share is not cleared: others' units are in it.
func TestClearShared(t *testing.T) {
	t.Parallel()
	m := NewMemory()
	r, _ := testNode(t, redistest.Start(t))
	for _, store := range []Keeper{m, r} {
		b := hourly(9)
		b.MaxKeys, b.ShareKey = 1, "network"
		for i := range 3 {
			b.Key = fmt.Sprint("k", i)
			_, h := begin(t, store, b)
			h.held.Settle(0, 2)
			levelNow(t, store, b) // on the same connection, so that it is charged
		}
		_, h := begin(t, store, b)
		h.clear(t)
		if l := levelNow(t, store, b); l.Units != 4 || l.Held != 0 {
			t.Errorf("%T: %+v, want 4 units", store, l)
		}
	}
}

// TestClearInOutage guards that a process whose server does not answer clears the bucket that it
// decides by, also without a server that ever answered, and says so; and what others hold stays held.
func TestClearInOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r, _ := testNode(t, server)
	b := hourly(4)
	clears, other := beginThere(t, r, b), beginThere(t, r, b)
	beginThere(t, r, b).held.Settle(0, 2)
	peek(t, r, b) // on the same connection, so that it is charged
	server.Kill()
	awaitDown(t, r, numbered(1))
	if d, _ := begin(t, r, b); !d.Denied {
		t.Errorf("%+v, and it is full", d)
	}
	if err := clears.held.Clear(t.Context(), 0); !errors.Is(err, ErrUnavailable) {
		t.Error(err)
	}
	for i := range 4 {
		d, h := begin(t, r, b)
		if h.held.Settle(0, 1); d.Denied != (i == 3) {
			t.Errorf("%d: %+v, with one held", i, d)
		}
	}
	other.held.Settle(0, 0)
	if d, _ := begin(t, r, b); d.Denied {
		t.Errorf("%+v, and nothing is held", d)
	}
}
