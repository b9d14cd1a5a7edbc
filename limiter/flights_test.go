package limiter

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
)

// flying is a query in flight as a list has it, with what each of its buckets has met.
type flying struct {
	*query
	crossed []dirtiness
	emptied []bool
}

// TestFlightsCountWhatAListHas guards that what is reported of the queries in flight for a bucket
// is what a walk through all of them would find, whatever they are and in whatever order they
// begin and end.
func TestFlightsCountWhatAListHas(t *testing.T) {
	checkTraces(t, few(10), func(t *rapid.T) {
		m := NewMemoryWithClock(frozen)
		f, others, there := newFallback(m, 0, "here"), newFallback(m, 0, "here"), newFallback(m, 0, "there")
		var all []*flying
		hash := rapid.Uint64Range(1, 3)
		cost := rapid.SampledFrom([]int64{1, 2, 5, MaxUnits})
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				q := &flying{query: &query{stage: rapid.SampledFrom([]stage{asking, gathering, holding, owing}).Draw(t, "stage")}}
				buckets := 1
				if q.stage == asking {
					buckets = rapid.IntRange(1, 3).Draw(t, "buckets")
				}
				for range buckets {
					p := bucketQuery{cost: cost.Draw(t, "cost")}
					p.hash = hash.Draw(t, "hash") // of which two may be the same
					if q.stage != gathering {     // which is reported once it is sent
						p.local.dirty = rapid.SampledFrom([]dirtiness{clean, own}).Draw(t, "reported")
					}
					q.buckets, q.Keys = append(q.buckets, p), append(q.Keys, "")
				}
				q.crossed, q.emptied = make([]dirtiness, buckets), make([]bool, buckets)
				f.link(q.query)
				all = append(all, q)
			},
			"change": func(t *rapid.T) {
				if len(all) == 0 {
					t.Skip("nothing is in flight")
				}
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				q := all[i]
				switch what := rapid.IntRange(0, 3).Draw(t, "how"); {
				case what == 0:
					f.lose(q.query)
				case what == 1 && q.stage == holding:
					f.setHolder(q.query, rapid.SampledFrom([]*fallback{nil, f, others, there}).Draw(t, "by"))
				case what == 2 && len(q.buckets) == 1:
					f.costs(q.query, cost.Draw(t, "now"))
				default:
					f.unlink(q.query)
					all = slices.Delete(all, i, i+1)
				}
			},
			"cross": func(t *rapid.T) {
				h, as := hash.Draw(t, "hash"), rapid.SampledFrom([]dirtiness{unsure, behind, own}).Draw(t, "as")
				empty := rapid.Bool().Draw(t, "empty")
				if empty {
					f.flights.empty(h)
					as = behind
				} else {
					f.flights.cross(h, as)
				}
				for _, q := range all {
					for i := range q.buckets {
						if q.buckets[i].hash == h && q.stage != gathering {
							q.crossed[i], q.emptied[i] = max(q.crossed[i], as), q.emptied[i] || empty
						}
					}
				}
			},
			"": func(t *rapid.T) { checkFlights(t, f, all) },
		})
		for _, q := range all {
			f.unlink(q.query)
		}
		if len(f.flights.of) > 0 {
			t.Fatalf("when nothing is in flight: %+v", f.traffic)
		}
	})
}

// checkFlights compares f with the list of all that is in flight.
func checkFlights(t *rapid.T, f *fallback, all []*flying) {
	t.Helper()
	for hash := uint64(1); hash <= 3; hash++ {
		const most = 20
		units, unknown, elsewhere, gathered, lost, doubts, tells := int64(0), int64(0), int64(0), int64(0), 0, 0, false
		worst := func(except *flying) (as dirtiness) {
			for _, q := range all {
				for i := range q.buckets {
					if q != except && q.buckets[i].hash == hash {
						as = max(as, q.crossed[i])
					}
				}
			}
			return as
		}
		for _, q := range all {
			for i := range q.buckets {
				p := &q.buckets[i]
				if p.hash != hash {
					continue
				}
				units = min(units+p.cost, most)
				if !f.holds(q.query) {
					unknown = min(unknown+p.cost, most)
				}
				if !f.holds(q.query) || q.holder == f {
					elsewhere = min(elsewhere+p.cost, most)
				}
				if q.lost {
					lost++
				}
				if q.lost && q.stage == owing {
					doubts++
				}
				if q.stage == gathering {
					gathered = min(gathered+p.cost, most)
				}
				tells = tells || q.emptied[i] && p.local.dirty != clean
				fl := f.flights.of[hash]
				if got := fl.crossedBy(q.query); got != q.crossed[i] {
					t.Fatalf("bucket %d: a query was crossed by %d, want %d", hash, got, q.crossed[i])
				}
				if got := fl.emptied.met(q.query); got != q.emptied[i] {
					t.Fatalf("bucket %d: a query has met that it was emptied: %t, want %t", hash, got, q.emptied[i])
				}
				if got, want := fl.crossedByOthers(q.query, hash), worst(q); got != want {
					t.Fatalf("bucket %d: beside a query others were crossed by %d, want %d", hash, got, want)
				}
			}
		}
		var got flight
		if fl := f.flights.of[hash]; fl != nil {
			got = *fl
		}
		if n := f.units(hash, most); n != units {
			t.Fatalf("bucket %d: %d units, want %d", hash, n, units)
		}
		if n := got.unitsOfOthers(f, false, most); n != unknown {
			t.Fatalf("bucket %d: %d units that servers here do not count, want %d", hash, n, unknown)
		}
		if n := got.unitsOfOthers(f, true, most); n != elsewhere {
			t.Fatalf("bucket %d: %d units that are in no other account here, want %d", hash, n, elsewhere)
		}
		if n := got.unsent.atMost(most); n != gathered {
			t.Fatalf("bucket %d: %d units were not sent, want %d", hash, n, gathered)
		}
		if got.lost != lost || got.doubts != doubts || got.emptied.left > 0 != tells {
			t.Fatalf("bucket %d: %+v, want %d lost of which %d are owed, some that tell what it held: %t", hash, got, lost, doubts, tells)
		}
	}
}

// busy returns a fallback with n queries in flight, each about a bucket of its own or all
// about b's, and what a decision on b does there: healthy, after a break, and in an outage.
func busy(b Bucket, n int, same bool) (*fallback, map[string]func()) {
	now := time.Hour
	f := newFallback(NewMemoryWithClock(func() time.Duration { return now }), 0, "")
	for i := range n {
		other := b
		if !same {
			other.Key = fmt.Sprint(i)
		}
		f.send(nil, callsOf(queryOf(f, Request{Buckets: []Bucket{other}})))
	}
	req := Request{Buckets: []Bucket{b}}
	call := func() {
		now += time.Hour // or the bucket would fill
		q := queryOf(f, req)
		f.send(nil, callsOf(q))
		f.answered(q, []outcome{{Ahead: bucket.Ahead{Clear: time.Hour.Microseconds()}}})
		q.release()
	}
	return f, map[string]func(){
		"answered": call,
		"answered after a break": func() {
			f.memory.raise(&b, bucket.Ahead{Clear: time.Hour.Microseconds()}, own)
			f.flights.cross(f.memory.hash(&b), own)
			call()
		},
		"outage": func() {
			now += time.Hour
			f.decide(req, nil, false)
		},
	}
}

// TestTimedDecisionsDoNotWalkWhatIsInFlight guards that what is in flight, for other buckets or
// for the same one, does not delay a decision: with 20 000 in flight, a walk through them
// takes some hundred times as long as all else.
func TestTimedDecisionsDoNotWalkWhatIsInFlight(t *testing.T) {
	racetest.SingleGoroutine(t)
	const n, calls, most = 20_000, 50, 4
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 1 << 40, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	_, alone := busy(b, 0, false)
	for _, same := range []bool{false, true} {
		_, others := busy(b, n, same)
		for what, do := range others {
			t.Run(fmt.Sprintf("%s, the same bucket %t", what, same), func(t *testing.T) {
				took := func(do func()) time.Duration {
					start := time.Now()
					for range calls {
						do()
					}
					return time.Since(start)
				}
				least, without := time.Hour, time.Hour
				for range 20 { // in turns, since other load on the machine changes
					least, without = min(least, took(do)), min(without, took(alone[what]))
				}
				if least > most*without {
					t.Errorf("%v beside %d in flight, %v beside none, want no more than %d times as long", least/calls, n, without/calls, most)
				}
			})
		}
	}
}

// TestFlightsAllocateNothing guards that queries which come and go need no memory again,
// however many others are in flight.
func TestFlightsAllocateNothing(t *testing.T) {
	racetest.SingleGoroutine(t)
	f, _ := busy(hourly(10), 20_000, false)
	var queries []*query
	for i := range 500 {
		b := hourly(10)
		b.Key = fmt.Sprint("other", i)
		queries = append(queries, queryOf(f, Request{Buckets: []Bucket{b}}))
	}
	i := 0
	if n := testing.AllocsPerRun(20_000, func() {
		q := queries[i%len(queries)]
		i++
		f.unlink(q)
		f.link(q)
	}); n > 0 {
		t.Errorf("%v allocations for each", n)
	}
}
