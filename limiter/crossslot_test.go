package limiter

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// heldBucket is a bucket with held units as core.lua stores it, in a plain form.
type heldBucket struct {
	level
	held, till int64
}

// at returns the bucket at now.
func (h heldBucket) at(l Limit, now int64) heldBucket {
	if h.held > 0 && now >= h.till {
		h.level = l.add(h.level.at(h.till), h.held, moment{now: h.till})
		h.held = 0
	}
	h.level = h.level.at(now)
	return h
}

// room reports whether a request of the given cost fits beside what is held.
func (h heldBucket) room(l Limit, now, cost int64) bool {
	return cost+h.held <= l.Size && l.wait(h.level, cost+h.held, now) == 0
}

// TestHeldUnits guards held units that are committed or released, against a plain
// model: held units take room and do not drip, and units that are not settled in
// time are charged when the time is up. Other requests come in between. No more
// than the bucket's bound is ever held or charged.
func TestHeldUnits(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	seen := map[string]int{}
	checkTraces(t, 10, func(t *rapid.T) {
		v.flush(t)
		b := Bucket{Name: "b", Key: "k", Limit: Limit{
			Size:         rapid.Int64Range(1, 12).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second, 7 * time.Second, time.Hour}).Draw(t, "drip rate"),
			DripSize:     rapid.SampledFrom([]int64{1, 1, 2, 5}).Draw(t, "drip size"),
		}}
		var model heldBucket
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.at(t, v.now+rapid.SampledFrom([]int64{
				0, 0, 0, 1, 500, b.Limit.rate() - 1, b.Limit.rate(), heldFor.Microseconds() - 1, heldFor.Microseconds(), 3 * heldFor.Microseconds(),
			}).Draw(t, "gap"))
			what := rapid.SampledFrom([]byte{0, 0, whatHold, whatHold, whatHold, whatCommit, whatCommit, whatRelease}).Draw(t, "what")
			b.Cost = rapid.Int64Range(1, b.Limit.Size).Draw(t, "cost")
			req := Request{Buckets: []Bucket{b}}
			q := v.query(req, what)
			before := model.at(b.Limit, v.now)
			due := before.till
			if what > whatHold {
				if rapid.IntRange(0, 4).Draw(t, "late") == 0 {
					due -= 1 + heldFor.Microseconds() // of units that were held earlier
				}
				q.settle(what, []outcome{{till: due}})
			}
			_, got, err := v.ask(inTime(), req, q, nil)
			if err != nil {
				t.Fatal(err)
			}
			model = before
			want := outcome{by: DecidedByRedis}
			switch what {
			case 0, whatHold:
				want.denied = !before.room(b.Limit, v.now, b.Cost)
				want.blocked = want.denied && b.Limit.wait(before.level, b.Cost, v.now) == 0
				switch {
				case want.denied:
					seen["denied"]++
				case what == 0:
					model.level = b.Limit.add(before.level, b.Cost, moment{now: v.now})
				default:
					if model.held == 0 {
						model.till = v.now + heldFor.Microseconds()
					}
					model.held += b.Cost
				}
			case whatCommit:
				if before.held >= b.Cost && due == before.till {
					model.held -= b.Cost
					model.level = b.Limit.add(before.level, b.Cost, moment{now: v.now})
					seen["committed"]++
				}
			case whatRelease:
				if before.held >= b.Cost && due == before.till {
					model.held -= b.Cost
					seen["released"]++
				}
			}
			want.ahead = model.level.ahead(v.now)
			if want.blocked {
				want.ahead = b.Limit.add(model.level, model.held, moment{now: v.now}).ahead(v.now)
				seen["blocked"]++
			}
			if what == whatHold {
				want.held, want.till = model.held, model.till
				if want.denied {
					got[0].held, got[0].till, want.held, want.till = 0, 0, 0, 0
				}
			}
			if got[0] != want {
				t.Fatalf("%+v: %d of %d: decided %+v, want %+v with %+v", b.Limit, what, b.Cost, got[0], want, model)
			}
			if got, want := peek(t, v.Redis, b), b.inspected(model.level.ahead(v.now), nil, model.held); got != want {
				t.Fatalf("%+v: %d of %d: peeked at %+v, want %+v", b.Limit, what, b.Cost, got, want)
			}
			if !model.room(b.Limit, v.now, 0) {
				t.Fatalf("%+v: holds more than there is room for: %+v", b.Limit, model)
			}
			stored := v.stored(t, req.Buckets)[0]
			if w, ok := parseWritten(stored); model.held > 0 {
				if !ok || w.held != model.held || w.till != model.till {
					t.Fatalf("stored %q, want %+v", stored, model)
				}
				expires, err := v.admin.Do(context.Background(), "PEXPIRETIME", v.keys.of(&b)).Int64()
				if last := model.at(b.Limit, model.till); err != nil || expires < max(model.till, last.clear)/1000 {
					t.Fatalf("%q expires at %d ms, before it is empty", stored, expires)
				}
			} else if ok && w.held > 0 {
				seen["expired"]++ // and nothing was written since
			}
		}
	})
	for _, what := range []string{"denied", "blocked", "committed", "released"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// TestHeldUnitsNeverOverAdmit guards the times at which whole requests are
// admitted by buckets that hold units for them: however long settling takes, and
// even if it never happens, no more is admitted in any time than the bucket
// allows.
func TestHeldUnitsNeverOverAdmit(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	checkTraces(t, 3, func(t *rapid.T) {
		v.flush(t)
		limit := Limit{
			Size:         rapid.Int64Range(1, 6).Draw(t, "size"),
			DripInterval: rapid.SampledFrom([]time.Duration{time.Millisecond, time.Second, time.Hour}).Draw(t, "drip rate"),
			DripSize:     rapid.Int64Range(1, 3).Draw(t, "drip size"),
		}
		if rapid.IntRange(0, 2).Draw(t, "log: 2") == 2 {
			limit = SlidingLog(limit.Size, limit.DripInterval)
		}
		b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
		req := Request{Buckets: []Bucket{b}}
		type open struct {
			query    *query
			outcomes []outcome
			admitted bool
		}
		var holding []open
		var admitted []int64
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			v.at(t, v.now+rapid.SampledFrom([]int64{0, 1, 900, 1000, 999_000, 1_000_000, 5_000_000, 11_000_000}).Draw(t, "gap"))
			ask := func(q *query) []outcome {
				_, got, err := v.ask(inTime(), req, q, nil)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				if !ask(v.query(req, 0))[0].denied {
					admitted = append(admitted, v.now)
				}
			case 1, 2:
				q := v.query(req, whatHold)
				if got := ask(q); !got[0].denied {
					holding = append(holding, open{q, got, rapid.Bool().Draw(t, "admitted")})
					if holding[len(holding)-1].admitted {
						admitted = append(admitted, v.now)
					}
				}
			case 3:
				if len(holding) > 0 {
					i := rapid.IntRange(0, len(holding)-1).Draw(t, "which")
					h := holding[i]
					what := byte(whatRelease)
					if h.admitted {
						what = whatCommit
					}
					h.query.settle(what, h.outcomes)
					ask(h.query)
					holding = slices.Delete(holding, i, i+1)
				}
			}
		}
		checkBound(t, limit, admitted)
	})
}

// checkBound checks that no more units are admitted in any time than a bucket of
// limit l allows, given the times of admissions.
func checkBound(t rapid.TB, l Limit, admitted []int64) {
	t.Helper()
	s := min(l.DripSize, l.Size)
	for i, from := range admitted {
		for j, to := range admitted[i:] {
			whole, rest := (to-from)/l.rate(), (to-from)%l.rate()
			up := whole
			if rest > 0 {
				up++
			}
			most := max(l.Size+s*whole, l.Size-1+s*up)
			if l.Algorithm == Log {
				most = l.Size * (1 + whole)
			}
			if int64(j+1) > most {
				t.Fatalf("%+v: %d units admitted within %d µs, want at most %d", l, j+1, to-from, most)
			}
		}
	}
}

// TestFloodOfOneKey guards limits with several keys in a cluster while one client
// floods them: the limit shared by all clients loses only what that client is
// admitted, for any number of callers and whichever limit comes first.
func TestFloodOfOneKey(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	for _, callers := range []int{1, 16, 512} {
		for _, drip := range []time.Duration{100 * time.Millisecond, time.Hour} {
			t.Run(fmt.Sprintf("callers=%d,drip=%v", callers, drip), func(t *testing.T) {
				r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Timeout = 5 * time.Second })
				client := onNode(t, r, nodes, nodes.Nodes[0], Bucket{Name: "ip", Limit: Limit{Size: 10, DripInterval: drip, DripSize: 1}, Cost: 1})
				everybody := onNode(t, r, nodes, nodes.Nodes[1], Bucket{Name: "everybody", Limit: Limit{Size: 5000, DripInterval: time.Hour, DripSize: 1}, Cost: 1})
				var admitted atomic.Int64
				end := time.Now().Add(time.Second)
				redistest.Together(t, callers, func(g int) {
					req := Request{Buckets: []Bucket{client, everybody}}
					if g%2 == 0 {
						slices.Reverse(req.Buckets)
					}
					for time.Now().Before(end) {
						d, err := r.Take(context.Background(), req, nil)
						if err != nil {
							t.Error(err)
						} else if !Summarize(d).Denied {
							admitted.Add(1)
						}
					}
				})
				if got, want := storedUnits(t, r, nodes.Nodes[1], everybody), admitted.Load(); got != want {
					t.Errorf("%d admitted, and the shared limit has lost %d", want, got)
				}
			})
		}
	}
}
