package limiter

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// held returns the level of b in m.
func held(m *Memory, b Bucket) bucket.Ahead {
	p, now := m.location(&b), m.clock().Microseconds()
	s, _ := p.table.get(p.hash)
	return s.At(now).Ahead(now)
}

// takeInstead has m decide req in place of a server.
func takeInstead(m *Memory, req Request) []outcome {
	return m.take(new(scratch), req, nil, new(standIn))
}

// dirtyLevels returns the levels that would be sent for the buckets, nil if none
// of them is dirty in m.
func dirtyLevels(m *Memory, buckets []Bucket) []localLevel {
	f := &fallback{traffic: noTraffic, memory: m}
	return localLevelsFor(f, queryOf(f, Request{Buckets: buckets}))
}

// queryOf returns the query about req that a store with f would send.
func queryOf(f *fallback, req Request) *query {
	q := keys{}.query(req, byte(req.Accounting))
	q.locate(f.memory, req)
	for i := range q.buckets {
		q.buckets[i].key = "" // its digest is not needed
	}
	return q
}

// localLevelsFor returns what f would tell a server of q's buckets, nil if nothing.
func localLevelsFor(f *fallback, q *query) []localLevel {
	reported := make([]localLevel, len(q.buckets))
	for i := range q.buckets {
		reported[i] = f.localLevelFor(q, &q.buckets[i])
	}
	if slices.ContainsFunc(reported, func(k localLevel) bool { return k.dirty != clean }) {
		return reported
	}
	return nil
}

// noTraffic has nothing in flight.
var noTraffic = new(traffic)

// follow has m follow a server's report about b.
func follow(m *Memory, b *Bucket, s bucket.Ahead) {
	q, now := queryOf(newFallback(m, 0, ""), Request{Buckets: []Bucket{*b}}), m.clock().Microseconds()
	m.follow(&q.buckets[0], s.After(now), 50*time.Millisecond, false, false, clean, now)
}

// unsureOf returns the levels to send for buckets that a server may have lost. For
// empty buckets nothing is sent.
func unsureOf(levels ...bucket.Level) []localLevel {
	var reported []localLevel
	for _, s := range levels {
		k := localLevel{Ahead: bucket.Ahead(s)}
		if s != (bucket.Level{}) {
			k.dirty = unsure
		}
		reported = append(reported, k)
	}
	return reported
}

// callWithLevels has a server decide req, and sends it levels that the buckets have at
// least.
func callWithLevels(r *Redis, req Request, reported []localLevel) ([]outcome, error) {
	q := r.query(req, byte(req.Accounting))
	for i := range reported {
		q.buckets[i].local = reported[i]
	}
	_, outcomes, err := r.call(inTime(), q, nil)
	return outcomes, err
}

// TestFollowKeepsHigherLevel guards that a fallback uses the higher of the level
// that the server reports and its own.
func TestFollowKeepsHigherLevel(t *testing.T) {
	for _, tc := range fullerTests {
		for _, other := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,other=%t", tc.name, other), func(t *testing.T) {
				first, second := bucket.Ahead(tc.first), bucket.Ahead(tc.second)
				if other {
					first, second = second, first
				}
				m := NewMemoryWithClock(frozen)
				b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 100, DripInterval: time.Hour, DripSize: tc.drip}, Cost: 1}
				follow(m, &b, first)
				if got := held(m, b); got != first {
					t.Fatalf("holds %+v, want %+v", got, first)
				}
				follow(m, &b, second)
				want := bucket.Ahead(tc.fuller)
				if tc.near {
					want.Clear = max(first.Clear, second.Clear)
				}
				if got := held(m, b); got != want {
					t.Errorf("holds %+v, want %+v", got, want)
				}
				usedSlots(t, m)
			})
		}
	}
}

// TestScriptKeepsHigherLevel guards that the script uses the higher of the level
// it is sent and its own, as above, whether it admits or denies.
func TestScriptKeepsHigherLevel(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	for _, tc := range fullerTests {
		for _, other := range []bool{false, true} {
			for _, admits := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s,other=%t,admits=%t", tc.name, other, admits), func(t *testing.T) {
					stored, owed, want := tc.first, tc.second, tc.fuller
					if other {
						stored, owed = owed, stored
					}
					if tc.near || stored.Clear > 0 { // its drips are the server's
						drips := math.Round(float64(max(stored.Clear, owed.Clear)-stored.Clear) / 3600e6)
						want.Clear = stored.Clear + int64(drips)*3600e6
					}
					v.flush(t)
					b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 100, DripInterval: time.Hour, DripSize: tc.drip}, Cost: 101}
					if admits {
						b.Cost = 1
						want = b.Limit.of().Add(want, 1, bucket.Moment{})
					}
					at := func(s bucket.Level) bucket.Level {
						if s.Clear > 0 {
							s.Clear += v.now
						}
						return s
					}
					if stored.Clear > 0 {
						err := v.admin.Set(t.Context(), v.keys.of(&b), b.Limit.written(at(stored), v.now).value(), 0).Err()
						if err != nil {
							t.Fatal(err)
						}
					}
					req := Request{Buckets: []Bucket{b}}
					got, err := callWithLevels(v.Redis, req, unsureOf(owed))
					if err != nil || bucket.Level(got[0].Ahead) != want || got[0].denied == admits {
						t.Errorf("decided %+v, error %v, want %+v", got, err, want)
					}
					if got, want := v.stored(t, req.Buckets)[0], b.Limit.written(at(want), v.now).value(); got != want {
						t.Errorf("stored %q, want %q", got, want)
					}
				})
			}
		}
	}
}

// TestScriptJoinsTimes guards which drip a server takes a reported level for
// later than it was known. If both sides drip at the same times, it is the nearest of
// its own, so that the delay adds nothing. If they may not, the later time counts, and
// within one drip the smaller rest: the later level may hold fewer units.
func TestScriptJoinsTimes(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	const ms = 1000
	free := Limit{Size: 100, DripInterval: 100 * time.Millisecond, DripSize: 10}
	aligned, window := free, FixedWindow(100, 100*time.Millisecond)
	aligned.Aligned = true
	clock := ClockWindow(100, 100*time.Millisecond, time.Unix(0, 0))
	for _, tc := range []struct {
		name                   string
		limit                  Limit
		own                    bool
		stored, reported, want bucket.Level
	}{
		{"the same drip", free, false, bucket.Level{Clear: 500 * ms, Rest: 2}, bucket.Level{Clear: 540 * ms, Rest: 7}, bucket.Level{Clear: 500 * ms, Rest: 2}},
		{"the same drip, more units", free, false, bucket.Level{Clear: 500 * ms, Rest: 7}, bucket.Level{Clear: 540 * ms, Rest: 2}, bucket.Level{Clear: 500 * ms, Rest: 2}},
		{"the next drip", free, false, bucket.Level{Clear: 500 * ms, Rest: 2}, bucket.Level{Clear: 640 * ms, Rest: 7}, bucket.Level{Clear: 600 * ms, Rest: 7}},
		{"the drip before", free, false, bucket.Level{Clear: 500 * ms, Rest: 7}, bucket.Level{Clear: 440 * ms, Rest: 2}, bucket.Level{Clear: 500 * ms, Rest: 7}},
		{"the server has none", free, false, bucket.Level{}, bucket.Level{Clear: 440 * ms, Rest: 2}, bucket.Level{Clear: 440 * ms, Rest: 2}},
		{"other times, later", free, true, bucket.Level{Clear: 500 * ms, Rest: 2}, bucket.Level{Clear: 540 * ms, Rest: 7}, bucket.Level{Clear: 540 * ms, Rest: 2}},
		{"other times, later by more than a drip", free, true, bucket.Level{Clear: 500 * ms, Rest: 2}, bucket.Level{Clear: 640 * ms, Rest: 7}, bucket.Level{Clear: 640 * ms, Rest: 7}},
		{"other times, earlier", free, true, bucket.Level{Clear: 500 * ms, Rest: 7}, bucket.Level{Clear: 440 * ms, Rest: 2}, bucket.Level{Clear: 500 * ms, Rest: 2}},
		{"other times, earlier by a drip", free, true, bucket.Level{Clear: 500 * ms, Rest: 7}, bucket.Level{Clear: 400 * ms, Rest: 2}, bucket.Level{Clear: 500 * ms, Rest: 7}},
		{"drips of the clock", aligned, true, bucket.Level{Clear: 500 * ms, Rest: 7}, bucket.Level{Clear: 540 * ms, Rest: 2}, bucket.Level{Clear: 500 * ms, Rest: 2}},
		{"drips of the clock, the server has none", aligned, true, bucket.Level{}, bucket.Level{Clear: 540 * ms, Rest: 2}, bucket.Level{Clear: 500 * ms, Rest: 2}},
		{"drips of the clock, drained", aligned, true, bucket.Level{}, bucket.Level{Clear: 40 * ms, Rest: 2}, bucket.Level{}},
		{"a window", window, false, bucket.Level{Clear: 60 * ms, Rest: 5}, bucket.Level{Clear: 90 * ms, Rest: 7}, bucket.Level{Clear: 60 * ms, Rest: 7}},
		{"a window that has ended", window, false, bucket.Level{Clear: 90 * ms, Rest: 5}, bucket.Level{Clear: 30 * ms, Rest: 7}, bucket.Level{Clear: 90 * ms, Rest: 5}},
		{"a window that began here", window, true, bucket.Level{Clear: 90 * ms, Rest: 5}, bucket.Level{Clear: 30 * ms, Rest: 7}, bucket.Level{Clear: 90 * ms, Rest: 7}},
		{"a window that began here later", window, true, bucket.Level{Clear: 30 * ms, Rest: 7}, bucket.Level{Clear: 90 * ms, Rest: 5}, bucket.Level{Clear: 90 * ms, Rest: 7}},
		{"a window of the clock", clock, false, bucket.Level{Clear: 100 * ms, Rest: 5}, bucket.Level{Clear: 140 * ms, Rest: 7}, bucket.Level{Clear: 100 * ms, Rest: 7}},
		{"a window of the clock, too late", clock, false, bucket.Level{Clear: 100 * ms, Rest: 5}, bucket.Level{Clear: 170 * ms, Rest: 7}, bucket.Level{Clear: 100 * ms, Rest: 7}},
		{"a window of the clock that has ended", clock, true, bucket.Level{Clear: 100 * ms, Rest: 5}, bucket.Level{Clear: 40 * ms, Rest: 7}, bucket.Level{Clear: 100 * ms, Rest: 5}},
		{"a window of the clock that has ended, the server has none", clock, true, bucket.Level{}, bucket.Level{Clear: 40 * ms, Rest: 7}, bucket.Level{}},
	} {
		v.flush(t)
		v.at(t, v.now-v.now%(100*ms)+100*ms)
		b := Bucket{Name: "b", Key: "k", Limit: tc.limit, Cost: 101}
		stored := tc.stored
		if stored.Clear > 0 {
			stored.Clear += v.now
			redistest.Done(t, v.admin.Set(t.Context(), v.keys.of(&b), b.Limit.written(stored, v.now).value(), 0))
		}
		reported := unsureOf(tc.reported)
		if tc.own {
			reported[0].dirty = own
		}
		got, err := callWithLevels(v.Redis, Request{Buckets: []Bucket{b}}, reported)
		if err != nil || bucket.Level(got[0].Ahead) != tc.want {
			t.Errorf("%s: %+v, %v, want %+v", tc.name, got, err, tc.want)
		}
	}
}

// fullerTests are pairs of levels of one bucket, with clear times relative to now,
// as two sides may know them, and the level to use.
var fullerTests = func() []fullerTest {
	const hour = 3600e6
	return []fullerTest{
		{"one", 1, bucket.Level{}, bucket.Level{Clear: 3 * hour}, bucket.Level{Clear: 3 * hour}, false},
		{"more", 1, bucket.Level{Clear: 3 * hour}, bucket.Level{Clear: 4 * hour}, bucket.Level{Clear: 4 * hour}, false},
		{"the same", 1, bucket.Level{Clear: hour}, bucket.Level{Clear: hour}, bucket.Level{Clear: hour}, false},
		{"a little later", 1, bucket.Level{Clear: hour}, bucket.Level{Clear: hour + 9}, bucket.Level{}, true},
		{"more in one drip", 3, bucket.Level{Clear: 2 * hour, Rest: 2}, bucket.Level{Clear: 2 * hour, Rest: 1}, bucket.Level{Clear: 2 * hour, Rest: 1}, false},
		{"more in one drip, a little earlier", 3, bucket.Level{Clear: 2*hour + 9, Rest: 2}, bucket.Level{Clear: 2 * hour, Rest: 1}, bucket.Level{Clear: 0, Rest: 1}, true},
		{"more in one drip, a little later", 3, bucket.Level{Clear: 2 * hour, Rest: 2}, bucket.Level{Clear: 2*hour + 9, Rest: 1}, bucket.Level{Clear: 0, Rest: 1}, true},
		{"next drip", 3, bucket.Level{Clear: 2 * hour, Rest: 0}, bucket.Level{Clear: 3 * hour, Rest: 2}, bucket.Level{Clear: 3 * hour, Rest: 2}, false},
		{"next drip, a little later", 3, bucket.Level{Clear: 2 * hour, Rest: 0}, bucket.Level{Clear: 3*hour + 9, Rest: 2}, bucket.Level{Clear: 3*hour + 9, Rest: 2}, false},
		{"next drip, a little earlier", 3, bucket.Level{Clear: 2*hour + 9, Rest: 0}, bucket.Level{Clear: 3 * hour, Rest: 2}, bucket.Level{Clear: 3 * hour, Rest: 2}, false},
		{"far ahead", 3, bucket.Level{Clear: 2 * hour, Rest: 0}, bucket.Level{Clear: 9 * hour, Rest: 2}, bucket.Level{Clear: 9 * hour, Rest: 2}, false},
	}
}()

type fullerTest struct {
	name                  string
	drip                  int64
	first, second, fuller bucket.Level

	// Whether both levels include the same drip, one of them with a delay: then a
	// fallback uses the later one, which is never too low, and a server its own.
	near bool
}

// TestFollow guards a fallback that follows a bucket on a server by answers that
// are delayed and overtake each other: once all have arrived, it has that bucket's
// level as of at most the delay ago, exactly to the unit.
func TestFollow(t *testing.T) {
	const delay = int64(50_000)
	slack := 0
	checkTraces(t, 10, func(t *rapid.T) {
		drip := rapid.SampledFrom([]int64{1, 1, 2, 3, 7}).Draw(t, "drip size")
		b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 40, DripInterval: time.Second, DripSize: drip}, Cost: 1}
		now := int64(1_000_000)
		p := plain{}
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(now) * time.Microsecond })
		type answer struct {
			bucket.Ahead
			at int64 // when the answer arrives
		}
		var under []answer
		deliver := func(until int64) {
			slices.SortFunc(under, func(a, b answer) int { return int(a.at - b.at) })
			for len(under) > 0 && under[0].at <= until {
				now = under[0].at
				follow(m, &b, under[0].Ahead)
				under = under[1:]
			}
			now = until
		}
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			deliver(now + rapid.SampledFrom([]int64{0, 1, 1000, 20_000, 400_000, 1_000_000, 3_000_000}).Draw(t, "gap"))
			b.Cost = rapid.Int64Range(1, 9).Draw(t, "cost")
			p.take(Request{Buckets: []Bucket{b}}, now)
			s := p[identity(b)].Level.At(now)
			under = append(under, answer{s.Ahead(now), now + rapid.Int64Range(0, delay).Draw(t, "delay")})
		}
		deliver(now + delay)
		want, got := p[identity(b)].Level, held(m, b)
		if want.Clear <= now {
			if got.Clear > delay {
				t.Fatalf("%+v: holds %+v, want next to nothing", b.Limit, got)
			}
			return
		}
		want.Clear -= now
		if want.Rest > 0 {
			slack++
		}
		if got.Rest != want.Rest || got.Clear < want.Clear || got.Clear > want.Clear+delay {
			t.Fatalf("%+v: holds %+v, want %+v", b.Limit, got, want)
		}
	})
	if slack < 100 {
		t.Errorf("%d buckets with slack: the test covers too little", slack)
	}
}

// TestFollowDeletedKeys guards that a level goes down when somebody deletes the
// key, as soon as an answer shows it that is the newest: the one to the query that was
// sent last, of those answered. Nothing that a server has admitted since is forgotten.
func TestFollowDeletedKeys(t *testing.T) {
	const hour = 3600e6
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 20, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	type step struct {
		send, answer string  // which request, as a letter
		level        float64 // what the server answers, in hours
		want         float64 // the level in this process afterwards
	}
	for _, tc := range []struct {
		name  string
		steps []step
	}{
		{"one at a time", []step{
			{send: "a"}, {answer: "a", level: 9, want: 9},
			{send: "b"}, {answer: "b", level: 1, want: 1},
			{send: "c"}, {answer: "c", level: 0, want: 0},
			{send: "d"}, {answer: "d", level: 2, want: 2},
		}},
		{"an answer that was overtaken", []step{
			{send: "a"}, {send: "b"},
			{answer: "b", level: 9, want: 9},
			{answer: "a", level: 8, want: 9},
		}},
		{"an answer that was overtaken by a lower one", []step{
			{send: "a"}, {answer: "a", level: 9, want: 9},
			{send: "b"}, {send: "c"},
			{answer: "c", level: 2, want: 2},
			{answer: "b", level: 1, want: 2},
			{send: "d"}, {answer: "d", level: 3, want: 3},
		}},
		{"always two on their way", []step{
			{send: "a"}, {send: "b"},
			{answer: "a", level: 9, want: 9}, {send: "c"},
			{answer: "b", level: 1, want: 1}, {send: "d"},
			{answer: "c", level: 2, want: 2}, {send: "e"},
			{answer: "d", level: 3, want: 3}, {send: "f"},
			{answer: "f", level: 5, want: 5}, {answer: "e", level: 4, want: 5},
		}},
		{"two of one call", []step{
			{send: "a"}, {answer: "a", level: 9, want: 9},
			{send: "b"}, {send: "c"},
			{answer: "b", level: 1, want: 1},
			{answer: "c", level: 2, want: 2},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := NewMemoryWithClock(frozen)
			f := newFallback(m, 50*time.Millisecond, "")
			sent := make(map[string]*query)
			for i, st := range tc.steps {
				if st.send != "" {
					q := queryOf(f, Request{Buckets: []Bucket{b}})
					f.send(nil, callsOf(q))
					sent[st.send] = q
					continue
				}
				f.answered(sent[st.answer], []outcome{{Ahead: bucket.Ahead{Clear: int64(st.level * hour)}}})
				if got := held(m, b); got.Clear != int64(st.want*hour) {
					t.Fatalf("step %d: holds %v hours, want %v", i+1, float64(got.Clear)/hour, st.want)
				}
			}
			usedSlots(t, m)
		})
	}
}

// TestDirtyBuckets guards for which buckets a server is sent levels: those on
// which something was decided here, even a denial, until a server that was sent
// the level has answered or the bucket has drained.
func TestDirtyBuckets(t *testing.T) {
	now := time.Hour
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, 0, "")
	const hour, minute = 3600e6, 60e6
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 9, DripInterval: time.Hour, DripSize: 2}, Cost: 3}
	other := b
	other.Key = "other"
	check := func(want ...localLevel) {
		t.Helper()
		if got := dirtyLevels(m, []Bucket{b, other}); !slices.Equal(got, want) {
			t.Errorf("dirty %+v, want %+v", got, want)
		}
	}
	call := func(buckets ...Bucket) *query {
		q := queryOf(f, Request{Buckets: buckets})
		f.send(nil, callsOf(q))
		return q
	}
	answer := func(q *query, s bucket.Ahead) { f.answered(q, []outcome{{Ahead: s}}) }
	here := func(buckets ...Bucket) { f.decide(Request{Buckets: buckets}, nil, false) }

	check()
	follow(m, &b, bucket.Ahead{Clear: hour})
	check()
	decide(t, m, AccountingAtomic, other) // on its own, not as a fallback
	m.leader.Store(&f.original)           // whose servers know of that
	check()
	here(b)
	check(localLevel{bucket.Ahead{Clear: 3 * hour, Rest: 1}, 0, behind}, localLevel{})
	now += time.Minute
	check(localLevel{bucket.Ahead{Clear: 3*hour - minute, Rest: 1}, 0, behind}, localLevel{})

	before := call(b)
	b.Cost = 1
	here(b)
	b.Cost = 3
	check(localLevel{bucket.Ahead{Clear: 3*hour - minute, Rest: 0}, 0, behind}, localLevel{})
	answer(before, bucket.Ahead{Clear: 4*hour - minute, Rest: 0}) // it was not sent what was decided meanwhile
	check(localLevel{bucket.Ahead{Clear: 5*hour - minute, Rest: 1}, 0, behind}, localLevel{})
	denied := call(b)
	here(b, b)
	if f.flights.of[denied.buckets[0].hash].crossedBy(denied) == clean {
		t.Error("a denial here is not reported to the server")
	}
	f.drop(denied)
	answer(call(b), bucket.Ahead{Clear: 5*hour - minute, Rest: 1})
	check()

	full := b
	full.Cost = 9
	here(full) // denied
	check(localLevel{bucket.Ahead{Clear: 5*hour - minute, Rest: 1}, 0, unsure}, localLevel{})
	answer(call(b), bucket.Ahead{Clear: 5*hour - minute, Rest: 1})
	check()
	f.restarted(nil)
	check(localLevel{bucket.Ahead{Clear: 5*hour - minute, Rest: 1}, 0, own}, localLevel{bucket.Ahead{Clear: 2*hour - minute, Rest: 1}, 0, own})
	answer(call(b), bucket.Ahead{Clear: 5*hour - minute, Rest: 1})
	check(localLevel{}, localLevel{bucket.Ahead{Clear: 2*hour - minute, Rest: 1}, 0, own})
	now += 2 * time.Hour
	check()
	if f.inFlight != nil {
		t.Error("something is still in flight")
	}
	usedSlots(t, m)
}

// TestFallbackLeavesRoomForInFlight guards that a decision in this process leaves
// room for what a server may still admit, and for no more than that.
func TestFallbackLeavesRoomForInFlight(t *testing.T) {
	m := NewMemoryWithClock(frozen)
	f := newFallback(m, 0, "")
	b := hourly(10)
	var sent []*query
	for range 3 {
		q := queryOf(f, Request{Buckets: []Bucket{b}})
		f.send(nil, callsOf(q))
		sent = append(sent, q)
	}
	take := func(cost int64) outcome {
		b.Cost = cost
		return f.decide(Request{Buckets: []Bucket{b}}, nil, false)[0]
	}
	if o := take(8); !o.denied {
		t.Errorf("admitted 8 of 10 beside 3 in flight: %+v", o)
	}
	if o := take(7); o.denied || o.Clear != 10*time.Hour.Microseconds() {
		t.Errorf("decided %+v, want 7 admitted beside 3 in flight, and nothing left", o)
	}
	if o := take(1); !o.denied || b.Limit.of().Wait(o.After(0), 1, 0) != time.Hour.Microseconds() {
		t.Errorf("decided %+v, want a full bucket", o)
	}
	f.drop(sent[0])
	if o := take(1); o.denied {
		t.Errorf("decided %+v after a request in flight was given up", o)
	}
}

// TestDirtyWithInFlight guards a bucket of which something was decided here while a
// query was in flight: it stays dirty when a later query is answered, as long as the
// first is not, since the server may know of the first but not of what was decided here,
// and what was reported to it the other way round.
func TestDirtyWithInFlight(t *testing.T) {
	now := time.Hour
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, 0, "")
	b := hourly(5)
	hour := time.Hour.Microseconds()
	call := func() *query {
		q := queryOf(f, Request{Buckets: []Bucket{b}})
		f.send(nil, callsOf(q))
		return q
	}
	first := call()
	f.decide(Request{Buckets: []Bucket{b}}, nil, false)
	second := call()
	if got := second.buckets[0].local; got.Clear != hour || got.inFlight != 1 || got.dirty == clean {
		t.Fatalf("reported %+v", got)
	}
	// The server has charged the first too, and takes the higher level for both.
	f.answered(second, []outcome{{Ahead: bucket.Ahead{Clear: 2 * hour}}})
	if got := dirtyLevels(m, []Bucket{b}); len(got) != 1 || got[0].Clear != 2*hour {
		t.Errorf("after the second answer dirty %+v, want both units that are known", got)
	}
	f.answered(first, []outcome{{Ahead: bucket.Ahead{Clear: hour}}})
	if got := dirtyLevels(m, []Bucket{b}); len(got) != 1 || got[0].Clear != 3*hour {
		t.Errorf("after the first answer dirty %+v, want all three units", got)
	}
	f.answered(call(), []outcome{{Ahead: bucket.Ahead{Clear: 4 * hour}}})
	if got := dirtyLevels(m, []Bucket{b}); got != nil {
		t.Errorf("when the server knows all, dirty %+v", got)
	}
}

// TestFollowAfterDrain guards a bucket that has drained in this process, which does not
// count with what a server reports next: nothing is left of it.
func TestFollowAfterDrain(t *testing.T) {
	now := time.Hour
	m := NewMemoryWithClock(func() time.Duration { return now })
	f := newFallback(m, 50*time.Millisecond, "")
	b := Bucket{Name: "b", Key: "k", Limit: FixedWindow(20, time.Second), Cost: 1}
	follow(m, &b, bucket.Ahead{Clear: 40_000, Rest: 20})
	f.restarted(nil)
	now += 50 * time.Millisecond // it ended 10 ms ago, and on the server some time before
	if follow(m, &b, bucket.Ahead{Clear: 980_000, Rest: 1}); unitsIn(t, m, b) != 1 {
		t.Errorf("holds %d units, want 1", unitsIn(t, m, b))
	}
}
