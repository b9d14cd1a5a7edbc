package limiter

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// operation is what the script has to do with a group of buckets, for any of its
// operations.
type operation struct {
	what         byte
	buckets      []bucketQuery // without keys
	ahead, least int64         // to lease
}

// drawOperated draws a limit of any algorithm and magnitude.
func drawOperated(t *rapid.T) Limit {
	switch rapid.IntRange(0, 3).Draw(t, "any, log, bans, hours") {
	case 1:
		return drawLog(t)
	case 2:
		return BanAfter(rapid.Int64Range(1, 3).Draw(t, "after"), time.Second, time.Minute, time.Hour)
	case 3: // so that something is left of it at the next operation
		return Limit{Size: rapid.Int64Range(1, 400).Draw(t, "size"), DripInterval: time.Hour, DripSize: rapid.Int64Range(1, 3).Draw(t, "drip size")}
	}
	return drawShape(t)
}

// drawOperation draws one of the script's operations on a group of buckets with the given
// limits. receipts are some of held units.
func drawOperation(t *rapid.T, limits []Limit, receipts []int64) operation {
	op := operation{what: rapid.ByteRange(0, whatClear).Draw(t, "operation")}
	decides := op.what <= byte(AccountingEach)
	tells := op.what == whatRemove || rapid.Bool().Draw(t, "tells")
	for _, l := range limits {
		p := bucketQuery{limit: bucket.Limit(l), cost: rapid.SampledFrom([]int64{1, 1, 2, l.Size/9 + 1, l.Size/3 + 1, l.Size, min(l.Size+1, MaxUnits)}).Draw(t, "cost")}
		if tells {
			p.local = drawLevels(t, []Bucket{{Limit: l, Cost: 1}})[0]
			if p.local.dirty == clean { // the node may know of units that the server does not
				p.local.inFlight = rapid.SampledFrom([]int64{0, 1, l.Size/3 + 1}).Draw(t, "not reported")
			}
		}
		if op.what == whatRemove {
			p.local.dirty = unsure
			if rapid.Bool().Draw(t, "of a full bucket") {
				p.local.Clear = l.of().DrainTime().Microseconds()
			}
		}
		switch {
		case decides:
			p.dryRun = rapid.IntRange(0, 4).Draw(t, "dry run: 0") == 0
			p.limit.CountDenied = rapid.IntRange(0, 3).Draw(t, "counts denied: 0") == 0
			if !l.of().Waits() && rapid.Bool().Draw(t, "holds") {
				p.held = drawAccount(t, receipts)
			}
		case op.what == whatSettle, op.what == whatRenew:
			p.held = drawAccount(t, receipts)
		case op.what == whatReport:
			p.cost = rapid.SampledFrom([]int64{0, p.cost}).Draw(t, "reported")
		}
		op.buckets = append(op.buckets, p)
	}
	if decides {
		drawRoles(t, op.buckets)
	}
	op.ahead = rapid.SampledFrom([]int64{0, 0, 5}).Draw(t, "ahead")
	op.least = rapid.SampledFrom([]int64{0, 2, 10}).Draw(t, "least")
	return op
}

// drawRoles draws what the buckets of a request are to each other, as far as a request may
// have it: any number next to each other are plain ones, or one that watches and some before
// it, or a pool and those before it that borrow.
func drawRoles(t *rapid.T, buckets []bucketQuery) {
	for len(buckets) > 0 {
		n := rapid.IntRange(1, len(buckets)).Draw(t, "of one kind")
		these, last := buckets[:n], &buckets[n-1]
		buckets = buckets[n:]
		kind := rapid.IntRange(0, 2).Draw(t, "plain, watched, borrow")
		if n == 1 || kind == 0 {
			continue
		}
		for i := range these {
			these[i].dryRun, these[i].limit.CountDenied = last.dryRun, false
			these[i].borrows = kind == 2 && i < n-1
		}
		if last.pool = kind == 2; !last.pool {
			last.watches, last.held = uint8(rapid.IntRange(1, n-1).Draw(t, "watches")), nil
		}
	}
}

// drawAccount draws what is to be done with an account, of which there are few, so that it may be there.
func drawAccount(t *rapid.T, receipts []int64) *heldCost {
	number, receipt := rapid.Int64Range(1, 4), rapid.SampledFrom(append([]int64{0}, receipts...))
	total := rapid.Int64Range(0, 12)
	return &heldCost{
		process: rapid.Int64Range(1, 2).Draw(t, "process"), accountName: accountName{number.Draw(t, "number"), receipt.Draw(t, "receipt")},
		totals: totals{total.Draw(t, "ended"), total.Draw(t, "charged")},
		before: accountName{number.Draw(t, "before"), receipt.Draw(t, "receipt before")}, beforeCharged: total.Draw(t, "charged before"), known: total.Draw(t, "known"),
	}
}

// on returns the query that requests op on a key's buckets.
func (op operation) on(v *clockedRedis, key string) *query {
	req := Request{}
	for i := range op.buckets {
		req.Buckets = append(req.Buckets, Bucket{Name: fmt.Sprint("b", i), Key: key, Limit: Limit(op.buckets[i].limit), Cost: 1})
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
func (v *clockedRedis) run(t rapid.TB, sha string, queries []*query, args ...any) (all [][]outcome) {
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
func (v *clockedRedis) peeked(t rapid.TB, sha string, op operation, key string) []outcome {
	t.Helper()
	op.buckets = slices.Clone(op.buckets)
	for i := range op.buckets {
		op.buckets[i] = bucketQuery{limit: op.buckets[i].limit, cost: op.buckets[i].cost}
	}
	op.what = whatPeek
	q := op.on(v, key)
	return v.run(t, sha, []*query{q}, q.appendGroup(nil))[0]
}

// TestAnswersAreStored guards that what the script answers to a node is what its server has
// stored, for each operation, algorithm, state and level that a node reports: another node,
// which reports nothing, sees the same then. A node takes what it reported for known, and so
// something that is only answered would be unknown.
func TestAnswersAreStored(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	seen := [whatClear + 1]struct{ all, reported, changed int }{}
	checkTraces(t, few(6), func(t *rapid.T) {
		v.flush(t)
		limits := rapid.SliceOfN(rapid.Custom(drawOperated), 1, 4).Draw(t, "limits")
		receipts := []int64{1}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			v.at(t, v.keep(v.now+drawOperatedGap(t, limits[0])))
			op := drawOperation(t, limits, receipts[max(0, len(receipts)-3):])
			q := op.on(v, "k")
			before := v.peeked(t, sha, op, "k")
			answers := v.run(t, sha, []*query{q}, q.appendGroup(nil))[0]
			after := v.peeked(t, sha, op, "k")
			for i := range op.buckets {
				p, was, is := &op.buckets[i], before[i], after[i]
				seen[op.what].all++
				if p.local.dirty != clean {
					seen[op.what].reported++
				}
				if was.Ahead != is.Ahead {
					seen[op.what].changed++
				}
				fail := func(want string) {
					t.Helper()
					t.Fatalf("operation %d on %+v at %d: found\n%+v, is\n%+v, want %s", op.what, *p, v.now, was, is, want)
				}
				empty := is.Clear == 0 && is.held == 0
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
				case whatClear:
					if answer := answers[i]; is.Clear != 0 || is.held != was.held || !sameLevel(&answer, &is) {
						fail(fmt.Sprintf("what is held, got\n%+v", answer))
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
				others := p.local.inFlight
				if p.held != nil && p.local.dirty != clean {
					others = max(others-v.heldBy(q.Keys[i], p.held.process), 0)
				}
				if others += is.held; answer.blocked && others > 0 { // reported as if they were charged
					is.Ahead = p.limit.Add(is.After(v.now), others, bucket.Moment{Now: v.now, Unix: v.now}).Ahead(v.now)
					is.Clear = min(is.Clear, bucket.Horizon)
					if p.limit.KeepsEntries() {
						continue
					}
				}
				if op.what != whatPeek && q.replyCount(i) == 2 || op.what == whatLease {
					answer.held = is.held
				}
				if !sameLevel(&answer, &is) {
					fail(fmt.Sprintf("the answer\n%+v", answer))
				}
			}
		}
	})
	t.Logf("%+v", seen)
	for what, n := range seen {
		changes := what != whatProbe && what != whatPeek
		if n.all < 100 || n.reported < 30 || changes && n.changed < 10 {
			t.Errorf("operation %d: %+v: the test covers too little", what, n)
		}
	}
}

// heldBy returns how many units a process holds of a bucket.
func (v *clockedRedis) heldBy(key string, process int64) (n int64) {
	w, _ := parseWritten(v.admin.Get(context.Background(), key).Val())
	for _, account := range w.record {
		if account.process == process && min(account.seen, v.now)+lapse.Microseconds() > v.now {
			n += account.held
		}
	}
	return n
}

// sameLevel reports whether two answers tell the same of a bucket.
func sameLevel(a, b *outcome) bool {
	if a.Ahead != b.Ahead || a.held != b.held {
		return false
	}
	return a.held > 0 || (a.entries == nil) == (b.entries == nil) && (a.entries == nil || *a.entries == *b.entries)
}

// drawOperatedGap draws the time to the next operation, in µs.
func drawOperatedGap(t *rapid.T, l Limit) int64 {
	return rapid.SampledFrom([]int64{
		0, 0, 1, 500, l.of().Rate() - 1, l.of().Rate(), l.of().DrainTime().Microseconds() / 2,
		lapse.Microseconds(), 3 * lapse.Microseconds(), -l.of().Rate(), -lapse.Microseconds(),
	}).Draw(t, "gap")
}

// batch is some calls of the script that are sent together. Equal ones next to each other
// are a run.
type batch struct {
	queries []*query
	args    []any
}

// add adds a query to the batch.
func (b *batch) add(q *query) {
	arg := q.appendGroup(nil)
	if n := len(b.args); n > 0 {
		if last := b.args[n-1].([]byte); bytes.Equal(last[2:], arg[2:]) {
			last[1]++
			arg = nil
		}
	}
	if arg != nil {
		b.args = append(b.args, arg)
	}
	b.queries = append(b.queries, q)
}

// keys returns the keys of all queries.
func (b *batch) keys() (keys []string) {
	for _, q := range b.queries {
		keys = append(keys, q.Keys...)
	}
	return keys
}

// takeValues returns the values of keys, of which those that have been removed are gone from
// then on, and of strings only.
func (v *clockedRedis) takeValues(t rapid.TB, keys []string) []any {
	t.Helper()
	values, err := v.admin.MGet(context.Background(), keys...).Result()
	if err != nil {
		t.Fatal(err)
	}
	var removed []string
	for i, value := range values {
		if value == "" {
			removed = append(removed, keys[i])
		}
	}
	if len(removed) > 0 {
		v.admin.Del(context.Background(), removed...)
	}
	return values
}

// spoil puts something that is no bucket into keys.
func (v *clockedRedis) spoil(t *rapid.T, keys ...string) {
	value := rapid.SampledFrom([]string{"", "x", strings.Repeat("\xff", 12), strings.Repeat("\x08", 25+56), strings.Repeat("l", 80)}).Draw(t, "value")
	for _, key := range keys {
		v.admin.Del(context.Background(), key)
		if value == "" {
			v.admin.LPush(context.Background(), key, "x")
		} else {
			v.admin.Set(context.Background(), key, value, 0)
		}
	}
}

// TestBatchesAreCallsOneByOne guards that what the script does for one group depends on no
// other of the call: a batch of calls, in which equal ones are a run of groups, answers and
// stores what the calls do one by one. That is so for each operation, algorithm, mix of
// roles, state and level that is reported.
func TestBatchesAreCallsOneByOne(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	// What is removed stays as it is until the batch has been compared.
	sha, err := v.admin.ScriptLoad(t.Context(), strings.ReplaceAll(v.source, "'PX', 1)", "'PX', 1000000)")).Result()
	if err != nil {
		t.Fatal(err)
	}
	seen := [whatClear + 1][8]int{}
	var batches, runs, mixed, leased, late, lent, watched int
	checkTraces(t, few(14), func(t *rapid.T) {
		v.flush(t)
		limits := rapid.SliceOfN(rapid.Custom(drawOperated), 1, 5).Draw(t, "limits")
		receipts := []int64{1}
		for range rapid.IntRange(10, 30).Draw(t, "steps") {
			v.at(t, v.keep(v.now+drawOperatedGap(t, limits[0])))
			if rapid.IntRange(0, 19).Draw(t, "spoilt: 0") == 0 {
				q := operation{buckets: []bucketQuery{{limit: bucket.Limit(limits[0])}}}
				v.spoil(t, q.on(v, "0 apart").Keys[0], q.on(v, "0 together").Keys[0])
			}
			var apart, combine batch
			for range rapid.IntRange(1, 3).Draw(t, "calls") {
				op := drawOperation(t, limits[:rapid.IntRange(1, len(limits)).Draw(t, "buckets")], receipts[max(0, len(receipts)-3):])
				first := rapid.IntRange(0, 2).Draw(t, "first key")
				for k := range rapid.SampledFrom([]int{1, 1, 2, 4}).Draw(t, "groups") {
					key := fmt.Sprint((first + k) % 3)
					apart.add(op.on(v, key+" apart"))
					combine.add(op.on(v, key+" together"))
				}
			}
			for _, q := range apart.queries {
				for i := range q.buckets {
					seen[q.what][q.buckets[i].limit.Algorithm]++
				}
				for i, o := range v.run(t, sha, []*query{q}, q.appendGroup(nil))[0] {
					p := &q.buckets[i]
					switch {
					case o.receipt < 0:
						late++
					case q.what == whatLease && q.Reply[4*i+2] > 0:
						leased++
					case p.pool && !o.denied && !o.unused:
						lent++
					case p.watches > 0 && o.denied:
						watched++
					}
					if o.receipt > 0 && p.held != nil && q.what <= byte(AccountingEach) {
						receipts = append(receipts, o.receipt)
					}
				}
			}
			v.run(t, sha, combine.queries, combine.args...)
			batches++
			if len(combine.args) < len(combine.queries) {
				runs++
			}
			if len(combine.args) > 1 {
				mixed++
			}
			for k, q := range apart.queries {
				if want, got := q.Reply, combine.queries[k].Reply; !slices.Equal(got, want) {
					t.Fatalf("operation %d on %+v at %d, which is %d of %d in a batch: answered %d, by itself %d",
						q.what, q.buckets, v.now, k+1, len(apart.queries), got, want)
				}
			}
			if want, got := v.takeValues(t, apart.keys()), v.takeValues(t, combine.keys()); !slices.Equal(got, want) {
				t.Fatalf("a batch of %d at %d: stored %q, the calls %q", len(apart.queries), v.now, got, want)
			}
		}
	})
	t.Logf("%d batches, %d with runs, %d of several, %d leased, %d late, %d lent, %d full ones that watch; by operation and algorithm %v",
		batches, runs, mixed, leased, late, lent, watched, seen)
	if !testing.Short() && batches < 20_000 || min(runs, mixed) < batches/4 || min(leased, late, lent, watched) < batches/100 {
		t.Error("the test covers too little")
	}
	for what := range seen {
		for kind := range bucket.Algorithms {
			if seen[what][kind] < batches/200 {
				t.Errorf("operation %d on %s: %d buckets, the test covers too little", what, bucket.Algorithms[kind].Name, seen[what][kind])
			}
		}
	}
}
