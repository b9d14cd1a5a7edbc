package limiter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// operation is what the script is asked to do with a group of buckets, for any of its
// operations.
type operation struct {
	what         byte
	buckets      []asked // without keys
	ahead, least int64   // to lease
}

// drawOperated draws a limit of any algorithm and magnitude.
func drawOperated(t *rapid.T) Limit {
	switch rapid.IntRange(0, 3).Draw(t, "any, log, bans, hours") {
	case 1:
		return drawLog(t)
	case 2:
		return BansFor(rapid.Int64Range(1, 3).Draw(t, "after"), time.Second, time.Minute, time.Hour)
	case 3: // so that something is left of it at the next operation
		return Limit{Size: rapid.Int64Range(1, 400).Draw(t, "size"), DripInterval: time.Hour, DripSize: rapid.Int64Range(1, 3).Draw(t, "drip size")}
	}
	return drawShape(t)
}

// drawOperation draws one of the script's operations on a group of buckets with the given
// limits. receipts are some of held units.
func drawOperation(t *rapid.T, limits []Limit, receipts []int64) operation {
	op := operation{what: rapid.ByteRange(0, whatReset).Draw(t, "operation")}
	decides := op.what <= byte(AccountingEach)
	role := 0
	if decides && len(limits) > 1 {
		role = rapid.IntRange(0, 2).Draw(t, "alike, watched, borrows")
	}
	tells := op.what == whatRemove || rapid.Bool().Draw(t, "tells")
	for i, l := range limits {
		p := asked{limit: l, cost: rapid.SampledFrom([]int64{1, 1, 2, l.Size/9 + 1, l.Size/3 + 1, l.Size, min(l.Size+1, MaxUnits)}).Draw(t, "cost")}
		if tells {
			p.told = drawLevels(t, []Bucket{{Limit: l}})[0]
		}
		if op.what == whatRemove {
			p.told.dirty = unsure
			if rapid.Bool().Draw(t, "of a full bucket") {
				p.told.clear = l.DrainTime().Microseconds()
			}
		}
		switch {
		case decides:
			p.dryRun = rapid.IntRange(0, 4).Draw(t, "dry run: 0") == 0
			last := i == len(limits)-1
			switch {
			case role == 1 && last:
				p.watches = 1
			case role == 2:
				p.borrows, p.pool = !last, last
			default:
				p.limit.CountDenied = rapid.IntRange(0, 3).Draw(t, "counts denied: 0") == 0
			}
			if p.watches == 0 && !l.waits() && rapid.Bool().Draw(t, "holds") {
				p.held = drawTab(t, receipts)
			}
		case op.what == whatSettle, op.what == whatRenew:
			p.held = drawTab(t, receipts)
		case op.what == whatReport:
			p.cost = rapid.SampledFrom([]int64{0, p.cost}).Draw(t, "reported")
		}
		op.buckets = append(op.buckets, p)
	}
	op.ahead = rapid.SampledFrom([]int64{0, 0, 5}).Draw(t, "ahead")
	op.least = rapid.SampledFrom([]int64{0, 2, 10}).Draw(t, "least")
	return op
}

// drawTab draws what is asked of a tab, of which there are few, so that it may be there.
func drawTab(t *rapid.T, receipts []int64) *heldCost {
	number, receipt := rapid.Int64Range(1, 4), rapid.SampledFrom(append([]int64{0}, receipts...))
	total := rapid.Int64Range(0, 12)
	return &heldCost{
		process: rapid.Int64Range(1, 2).Draw(t, "process"), tabName: tabName{number.Draw(t, "number"), receipt.Draw(t, "receipt")},
		totals: totals{total.Draw(t, "ended"), total.Draw(t, "charged")},
		before: tabName{number.Draw(t, "before"), receipt.Draw(t, "receipt before")}, beforeCharged: total.Draw(t, "charged before"),
	}
}

// on returns the query that asks for op on a key's buckets.
func (op operation) on(v *virtual, key string) *query {
	req := Request{}
	for i := range op.buckets {
		req.Buckets = append(req.Buckets, Bucket{Name: fmt.Sprint("b", i), Key: key, Limit: op.buckets[i].limit})
	}
	q := v.keys.query(req, op.what)
	for i, p := range op.buckets {
		p.key = q.buckets[i].key
		q.buckets[i] = p
	}
	q.ahead, q.least = op.ahead, op.least
	return q
}

// run has the script answer several queries in one call, with the given arguments.
func (v *virtual) run(t rapid.TB, sha string, queries []*query, args ...any) (all [][]outcome) {
	t.Helper()
	var keys []string
	for _, q := range queries {
		keys = append(keys, q.Keys...)
	}
	reply, err := v.admin.EvalSha(context.Background(), sha, keys, args...).Int64Slice()
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range queries {
		n := q.replies()
		if n > len(reply) {
			t.Fatalf("%d numbers missing from the reply to %d", n-len(reply), q.what)
		}
		q.Reply, reply = reply[:n], reply[n:]
		var outcomes []outcome
		if q.what != whatRemove {
			if outcomes, _, err = q.outcomes(nil); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, outcomes)
	}
	if len(reply) > 0 {
		t.Fatalf("%d numbers too many", len(reply))
	}
	return all
}

// peeked returns what another node that knows nothing sees of the buckets of q.
func (v *virtual) peeked(t rapid.TB, sha string, op operation, key string) []outcome {
	t.Helper()
	op.buckets = slices.Clone(op.buckets)
	for i := range op.buckets {
		op.buckets[i] = asked{limit: op.buckets[i].limit, cost: op.buckets[i].cost}
	}
	op.what = whatPeek
	q := op.on(v, key)
	return v.run(t, sha, []*query{q}, q.appendGroup(nil))[0]
}

// storedOf returns the stored value of each of q's buckets, "" for one that is absent or has
// been removed. Such a one is gone from then on, and not only after a millisecond of the
// server's own clock.
func (v *virtual) storedOf(t rapid.TB, q *query) []string {
	t.Helper()
	values := make([]string, len(q.Keys))
	for i, key := range q.Keys {
		value, err := v.admin.Get(context.Background(), key).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
		if values[i] = value; value == "" {
			v.admin.Del(context.Background(), key)
		}
	}
	return values
}

// eachOperation draws traces of operations and has do run each. What do returns are receipts
// that later operations of the trace may have.
func (v *virtual) eachOperation(t *testing.T, traces int, do func(*rapid.T, operation) (receipts []int64)) {
	t.Helper()
	checkTraces(t, traces, func(t *rapid.T) {
		v.flush(t)
		limits := rapid.SliceOfN(rapid.Custom(drawOperated), 1, 2).Draw(t, "limits")
		receipts := []int64{1}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.at(t, v.keep(v.now+drawOperatedGap(t, limits[0])))
			op := drawOperation(t, limits, receipts[max(0, len(receipts)-3):])
			receipts = append(receipts, do(t, op)...)
		}
	})
}

// TestAnswersAreStored guards that what the script answers to a node is what its server has
// stored, for each operation, algorithm, state and level that a node tells: another node,
// which tells nothing, sees the same then. A node takes what it told for known, and so
// something that is only answered would be known to nobody.
func TestAnswersAreStored(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	seen := [whatReset + 1]struct{ all, told, changed int }{}
	v.eachOperation(t, few(6), func(t *rapid.T, op operation) (receipts []int64) {
		q := op.on(v, "k")
		before := v.peeked(t, sha, op, "k")
		answers := v.run(t, sha, []*query{q}, q.appendGroup(nil))[0]
		after := v.peeked(t, sha, op, "k")
		for i := range op.buckets {
			p, was, is := &op.buckets[i], before[i], after[i]
			seen[op.what].all++
			if p.told.dirty != clean {
				seen[op.what].told++
			}
			if was.ahead != is.ahead {
				seen[op.what].changed++
			}
			fail := func(want string) {
				t.Helper()
				t.Fatalf("operation %d on %+v at %d: found\n%+v, is\n%+v, want %s", op.what, *p, v.now, was, is, want)
			}
			empty := is.clear == 0 && is.held == 0
			switch op.what {
			case whatRemove:
				if !empty && !sameLevel(&was, &is) {
					fail("the same, or nothing")
				}
				continue
			case whatProbe:
				if !sameLevel(&was, &is) {
					fail("the same")
				}
				continue
			case whatReset:
				if answer := answers[i]; !sameLevel(&answer, &was) || !empty {
					fail(fmt.Sprintf("nothing, and an answer of what was found, got\n%+v", answer))
				}
				continue
			case whatPeek:
				if !sameLevel(&was, &is) {
					fail("the same")
				}
			}
			answer := answers[i]
			if answer.receipt > 0 && p.held != nil && op.what != whatSettle {
				receipts = append(receipts, answer.receipt)
			}
			if beside := is.held + p.told.inFlight; answer.blocked && beside > 0 { // told as if they were charged
				is.ahead = p.limit.add(is.after(v.now), beside, moment{v.now, v.now}).ahead(v.now)
				is.clear = min(is.clear, horizon)
				if p.limit.keepsEntries() {
					continue
				}
			}
			if op.what != whatPeek && q.repliesOf(i) == 2 || op.what == whatLease {
				answer.held = is.held
			}
			if !sameLevel(&answer, &is) {
				fail(fmt.Sprintf("the answer\n%+v", answer))
			}
		}
		return receipts
	})
	t.Logf("%+v", seen)
	for what, n := range seen {
		changes := what != whatProbe && what != whatPeek
		if n.all < 100 || n.told < 30 || changes && n.changed < 10 {
			t.Errorf("operation %d: %+v: the test covers too little", what, n)
		}
	}
}

// sameLevel reports whether two answers tell the same of a bucket.
func sameLevel(a, b *outcome) bool {
	if a.ahead != b.ahead || a.held != b.held {
		return false
	}
	return a.held > 0 || (a.entries == nil) == (b.entries == nil) && (a.entries == nil || *a.entries == *b.entries)
}

// drawOperatedGap draws the time to the next operation, in µs.
func drawOperatedGap(t *rapid.T, l Limit) int64 {
	return rapid.SampledFrom([]int64{
		0, 0, 1, 500, l.rate() - 1, l.rate(), l.DrainTime().Microseconds() / 2,
		lapse.Microseconds(), 3 * lapse.Microseconds(), -l.rate(), -lapse.Microseconds(),
	}).Draw(t, "gap")
}

// TestEqualGroupsAreApart guards that a run of equal groups, which is what a batch of equal
// operations is sent as, decides and stores what as many runs of one group do, one after the
// other: for each operation, algorithm, state and level that is told.
func TestEqualGroupsAreApart(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	seen := [whatReset + 1]int{}
	leased := 0
	v.eachOperation(t, few(4), func(t *rapid.T, op operation) (receipts []int64) {
		var apart, together []*query
		first := rapid.IntRange(0, 2).Draw(t, "first key")
		for k := range rapid.IntRange(1, 3).Draw(t, "groups") {
			key := fmt.Sprint((first + k) % 3)
			apart, together = append(apart, op.on(v, key+" apart")), append(together, op.on(v, key+" together"))
		}
		arg := apart[0].appendGroup(nil)
		for _, q := range apart {
			for i, o := range v.run(t, sha, []*query{q}, arg)[0] {
				if o.receipt > 0 && op.buckets[i].held != nil && op.what <= byte(AccountingEach) {
					receipts = append(receipts, o.receipt)
				}
			}
		}
		arg = together[0].appendGroup(nil)
		arg[1] = byte(len(together))
		v.run(t, sha, together, arg)
		for k := range apart {
			if want, got := apart[k].Reply, together[k].Reply; !slices.Equal(got, want) {
				t.Fatalf("operation %d on %+v at %d: group %d of %d: decided %d, apart %d", op.what, op.buckets, v.now, k+1, len(apart), got, want)
			}
			if want, got := v.storedOf(t, apart[k]), v.storedOf(t, together[k]); !slices.Equal(got, want) {
				t.Fatalf("operation %d on %+v at %d: group %d of %d: stored %q, apart %q", op.what, op.buckets, v.now, k+1, len(apart), got, want)
			}
			if op.what == whatLease && apart[k].Reply[2] > 0 {
				leased++
			}
		}
		if len(apart) > 1 {
			seen[op.what]++
		}
		return receipts
	})
	t.Logf("%v, %d leased", seen, leased)
	if slices.Min(seen[:]) < 20 || leased < 50 {
		t.Errorf("%v, %d leased: the test covers too little", seen, leased)
	}
}
