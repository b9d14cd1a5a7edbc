package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// held returns what m holds in b, told from now.
func held(m *Memory, b Bucket) state {
	p := m.place(&b)
	s, _ := m.tables[p.table].get(p.hash)
	if s = b.Limit.at(s, m.clock().Microseconds(), b.SizeVaries); s.clear > 0 {
		s.clear -= m.clock().Microseconds()
	}
	return s
}

// TestMirrorKeepsTheFuller tests which level a fallback goes by: what the
// servers report if that is more than what is held here, else that.
func TestMirrorKeepsTheFuller(t *testing.T) {
	for _, tc := range fullerTests {
		for _, other := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,other=%t", tc.name, other), func(t *testing.T) {
				first, second := tc.first, tc.second
				if other {
					first, second = second, first
				}
				m := NewMemory(frozen)
				b := Bucket{Name: "b", Key: "k", Limit: Limit{100, time.Hour, tc.drip}, Cost: 1}
				m.mirror(&b, first, false)
				if got := held(m, b); got != first {
					t.Fatalf("holds %+v, want %+v", got, first)
				}
				m.mirror(&b, second, false)
				want := tc.fuller
				if tc.near {
					want.clear = min(first.clear, second.clear)
				}
				if got := held(m, b); got != want {
					t.Errorf("holds %+v, want %+v", got, want)
				}
				usedSlots(t, m)
			})
		}
	}
}

// TestOwedKeepsTheFuller tests which level the script goes by when it is told
// one that is owed: the fuller, just as above, whether it admits or denies.
func TestOwedKeepsTheFuller(t *testing.T) {
	v := newVirtual(t, redistest.Start(t), "rl:")
	for _, tc := range fullerTests {
		for _, other := range []bool{false, true} {
			for _, admits := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s,other=%t,admits=%t", tc.name, other, admits), func(t *testing.T) {
					stored, owed, want := tc.first, tc.second, tc.fuller
					if other {
						stored, owed = owed, stored
					}
					if tc.near {
						want.clear = stored.clear
					}
					v.flush(t)
					b := Bucket{Name: "b", Key: "k", Limit: Limit{100, time.Hour, tc.drip}, Cost: 101}
					if admits {
						b.Cost = 1
						want = b.Limit.add(want, 1)
					}
					at := func(s state) state {
						if s.clear > 0 {
							s.clear += v.now
						}
						return s
					}
					if stored.clear > 0 {
						err := v.admin.Set(t.Context(), v.keys.of(&b), at(stored).value(), 0).Err()
						if err != nil {
							t.Fatal(err)
						}
					}
					req := Request{Buckets: []Bucket{b}}
					got, err := v.ask(t.Context(), req, []state{owed}, nil)
					if err != nil || got[0].state != want || got[0].denied == admits {
						t.Errorf("decided %+v, error %v, want %+v", got, err, want)
					}
					if got := v.stored(t, req.Buckets)[0]; got != at(want).value() {
						t.Errorf("stored %q, want %q", got, at(want).value())
					}
				})
			}
		}
	}
}

// fullerTests are pairs of levels of one bucket, told from now, as two who see it
// may have them, and the one to go by.
var fullerTests = func() []fullerTest {
	const hour = 3600e6
	return []fullerTest{
		{"one", 1, state{}, state{clear: 3 * hour}, state{clear: 3 * hour}, false},
		{"more", 1, state{clear: 3 * hour}, state{clear: 4 * hour}, state{clear: 4 * hour}, false},
		{"the same", 1, state{clear: hour}, state{clear: hour}, state{clear: hour}, false},
		{"a little later", 1, state{clear: hour}, state{clear: hour + 9}, state{}, true},
		{"more in one drip", 3, state{2 * hour, 2}, state{2 * hour, 1}, state{2 * hour, 1}, false},
		{"more in one drip, a little earlier", 3, state{2*hour + 9, 2}, state{2 * hour, 1}, state{0, 1}, true},
		{"more in one drip, a little later", 3, state{2 * hour, 2}, state{2*hour + 9, 1}, state{0, 1}, true},
		{"next drip", 3, state{2 * hour, 0}, state{3 * hour, 2}, state{3 * hour, 2}, false},
		{"next drip, a little later", 3, state{2 * hour, 0}, state{3*hour + 9, 2}, state{3*hour + 9, 2}, false},
		{"next drip, a little earlier", 3, state{2*hour + 9, 0}, state{3 * hour, 2}, state{3 * hour, 2}, false},
		{"far ahead", 3, state{2 * hour, 0}, state{9 * hour, 2}, state{9 * hour, 2}, false},
	}
}()

type fullerTest struct {
	name                  string
	drip                  int64
	first, second, fuller state

	// Whether both tell of the same drip, one of them late: then a fallback goes
	// by the earlier, and a server by its own.
	near bool
}

// TestMirrorFollows tests a fallback that is told of a bucket elsewhere by
// answers which take their time and overtake each other: once all have come it
// is at that bucket's level, as of at most that time ago; never emptier, nor
// fuller by a single unit.
func TestMirrorFollows(t *testing.T) {
	const delay = int64(50_000)
	slack := 0
	checkTraces(t, 10, func(t *rapid.T) {
		drip := rapid.SampledFrom([]int64{1, 1, 2, 3, 7}).Draw(t, "drip size")
		b := Bucket{Name: "b", Key: "k", Limit: Limit{40, time.Second, drip}}
		now := int64(1_000_000)
		p := plain{}
		m := NewMemory(func() time.Duration { return time.Duration(now) * time.Microsecond })
		type answer struct {
			state
			at int64 // when it comes
		}
		var under []answer
		deliver := func(until int64) {
			slices.SortFunc(under, func(a, b answer) int { return int(a.at - b.at) })
			for len(under) > 0 && under[0].at <= until {
				now = under[0].at
				m.mirror(&b, under[0].state, false)
				under = under[1:]
			}
			now = until
		}
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			deliver(now + rapid.SampledFrom([]int64{0, 1, 1000, 20_000, 400_000, 1_000_000, 3_000_000}).Draw(t, "gap"))
			b.Cost = rapid.Int64Range(1, 9).Draw(t, "cost")
			p.take(Request{Buckets: []Bucket{b}}, now)
			s := b.Limit.at(p[identity(b)], now, false)
			s.clear -= now
			under = append(under, answer{s, now + rapid.Int64Range(0, delay).Draw(t, "delay")})
		}
		deliver(now + delay)
		want, got := p[identity(b)], held(m, b)
		if want.clear <= now {
			if got.clear > delay {
				t.Fatalf("%+v: holds %+v, want next to nothing", b.Limit, got)
			}
			return
		}
		want.clear -= now
		if want.slack > 0 {
			slack++
		}
		if got.slack != want.slack || got.clear < want.clear || got.clear > want.clear+delay {
			t.Fatalf("%+v: holds %+v, want %+v", b.Limit, got, want)
		}
	})
	if slack < 100 {
		t.Errorf("%d buckets with slack: the test shows too little", slack)
	}
}

// TestMirrorWhenCrowded tests that a store which is full mirrors what it knows
// already and nothing else: no bucket more, and none that is shared.
func TestMirrorWhenCrowded(t *testing.T) {
	const hour = 3600e6
	m := NewMemory(frozen)
	m.SetMaxKeys(1)
	b := Bucket{Name: "b", Limit: Limit{100, time.Hour, 1}, Cost: 5}
	keys := inTables(m, 3, 1, b)
	m.mirror(&keys[0], state{clear: 3 * hour}, false)
	decide(t, m, Atomic, keys[1]) // shared
	m.mirror(&keys[0], state{clear: 4 * hour}, false)
	m.mirror(&keys[1], state{clear: 60 * hour}, false)
	m.mirror(&keys[2], state{clear: 70 * hour}, false)
	m.giveBack(&keys[2], false)
	for i, want := range []int64{4, 5, 5} {
		if got := level(t, m, keys[i]); got != want {
			t.Errorf("bucket %d holds %d, want %d", i, got, want)
		}
	}
	if got := usedSlots(t, m); got != 2 {
		t.Errorf("%d buckets, want 2", got)
	}

	m.SetMaxKeys(3)
	m.mirror(&keys[1], state{clear: 60 * hour}, false)
	if got := level(t, m, keys[1]); got != 60 {
		t.Errorf("with room bucket 1 holds %d, want 60", got)
	}
}

// drawTaken draws a bucket that has been through some requests, puts it into
// the stores, and moves the clock on.
func drawTaken(t *rapid.T, v *virtual, p plain, m *Memory) Bucket {
	v.flush(t)
	b := Bucket{Name: "b", Key: "k", Limit: drawShape(t)}
	for range rapid.IntRange(0, 5).Draw(t, "requests") {
		b.Cost = rapid.Int64Range(1, b.Limit.Size).Draw(t, "cost")
		p.take(Request{Buckets: []Bucket{b}}, v.now)
		decide(t, m, Atomic, b)
		decide(t, v, Atomic, b)
		v.at(t, v.now+rapid.SampledFrom([]int64{
			0, 0, 1, b.Limit.rate() - 1, b.Limit.rate(), b.Limit.rate() + 1, b.Limit.rate() * (b.Limit.drips()/2 + 1),
		}).Draw(t, "gap"))
	}
	return b
}

// TestGiveBackUndoesTake tests that what a request was charged can be taken out
// of a bucket again, here and in Redis: all is as if the request had not been.
// What has dripped meanwhile is gone, and no bucket holds less than nothing.
func TestGiveBackUndoesTake(t *testing.T) {
	server := redistest.Start(t)
	v := newVirtual(t, server, "rl:")
	const realTime, ours = "redis.call('TIME')", "redis.call('HMGET', 'clock', 's', 'us')"
	source := strings.Replace(giveBackSource, realTime, ours, 1)
	undone, later, slack := 0, 0, 0
	property := func(t *rapid.T) {
		p := plain{}
		m := NewMemory(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		b := drawTaken(t, v, p, m)
		before := b.Limit.at(p[identity(b)], v.now, false)

		b.Cost = rapid.Int64Range(1, b.Limit.Size).Draw(t, "cost")
		d := p.take(Request{Buckets: []Bucket{b}}, v.now)[0]
		decide(t, m, Atomic, b)
		decide(t, v, Atomic, b)
		if d.Denied {
			return
		}
		others := b
		for range rapid.IntRange(0, 2).Draw(t, "others") {
			others.Cost = rapid.Int64Range(1, b.Limit.Size).Draw(t, "cost")
			if d := p.take(Request{Buckets: []Bucket{others}}, v.now)[0]; !d.Denied {
				before = b.Limit.add(before, others.Cost)
			}
			decide(t, m, Atomic, others)
			decide(t, v, Atomic, others)
		}
		rate := b.Limit.rate()
		g := rapid.SampledFrom([]int64{0, 0, 1, rate, 2 * rate, b.Limit.drips() * rate}).Draw(t, "gap")
		v.at(t, v.now+g)

		want := p[identity(b)]
		if want.clear > v.now {
			want = b.Limit.remove(want, v.now, b.Cost)
		}
		if g == 0 {
			if want != before {
				t.Fatalf("%+v, cost %d: %+v, want %+v as before", b.Limit, b.Cost, want, before)
			}
			undone++
		} else {
			later++
		}
		if want.slack > 0 {
			slack++
		}
		m.giveBack(&b, true)
		args := v.keys.giveBackArguments(&b)
		keys := []string{args[firstKey].(string)}
		err := v.admin.Eval(context.Background(), source, keys, args[firstKey+1:]...).Err()
		if err != nil {
			t.Fatal(err)
		}
		v.denials = newDenials(64)
		place := m.place(&b)
		inMemory, _ := m.tables[place.table].get(place.hash)
		if inMemory != want {
			t.Fatalf("%+v, cost %d: Memory holds %+v, want %+v", b.Limit, b.Cost, inMemory, want)
		}
		if got := v.stored(t, []Bucket{b})[0]; got != want.value() {
			t.Fatalf("%+v, cost %d: Redis holds %q, want %q", b.Limit, b.Cost, got, want.value())
		}
		if want.clear < v.now {
			return
		}
		// The next request finds the same in all of them.
		b.Cost = b.Limit.Size + 1
		d = p.decided(b, want, v.now)
		if got := decide(t, m, Atomic, b)[0]; got != d {
			t.Fatalf("%+v: Memory decides %+v, want %+v", b.Limit, got, d)
		}
		if got := decide(t, v, Atomic, b)[0]; got != d {
			t.Fatalf("%+v: Redis decides %+v, want %+v", b.Limit, got, d)
		}
	}
	for range 5 {
		rapid.Check(t, property)
	}
	if undone < 50 || later < 50 || slack < 50 {
		t.Errorf("%d undone, %d later, %d with slack: the test shows too little", undone, later, slack)
	}
}

// decided returns what p decides on b at the time now if it holds s.
func (p plain) decided(b Bucket, s state, now int64) Decision {
	p[identity(b)] = s
	return p.take(Request{Buckets: []Bucket{b}}, now)[0]
}

// TestGiveBackOfNothing tests the keys to which there is nothing to give back:
// they stay as they are, and none appears.
func TestGiveBackOfNothing(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	b := hourly(5)
	key := r.keys.of(&b)
	past := fmt.Sprint(serverTime(t, server) - 1)
	far := fmt.Sprint(serverTime(t, server) + 2*horizon)
	for _, value := range []string{"", "text", "-5", "0", past, past + ":1", far, strings.Repeat("9", 400)} {
		if value != "" {
			if err := server.Client().Set(t.Context(), key, value, 0).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := r.call(t.Context(), giveBackScript, r.keys.giveBackArguments(&b)); err != nil {
			t.Errorf("%.40q: %v", value, err)
		}
		if got, _ := server.Client().Get(t.Context(), key).Result(); got != value {
			t.Errorf("%.40q became %.40q", value, got)
		}
	}
	list := []any{"RPUSH", "list", 1}
	if err := server.Client().Do(t.Context(), list...).Err(); err != nil {
		t.Fatal(err)
	}
	args := r.keys.giveBackArguments(&b)
	args[firstKey] = "list"
	if _, _, err := r.call(t.Context(), giveBackScript, args); err != nil {
		t.Errorf("list: %v", err)
	}

	// In this process: a bucket that was not mirrored, and one that has drained.
	var now time.Duration
	m := NewMemory(func() time.Duration { return now })
	for _, here := range []bool{false, true} {
		m.giveBack(&b, here)
		if got := usedSlots(t, m); got != 0 {
			t.Errorf("here %t: %d buckets", here, got)
		}
	}
	decide(t, m, Atomic, b)
	now += time.Hour
	m.giveBack(&b, true)
	if got := level(t, m, b); got != 0 {
		t.Errorf("%d units", got)
	}
}

// TestGiveBackKeepsTables tests that buckets which are given back to the last
// unit are still found, and counted, as any other.
func TestGiveBackKeepsTables(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 12))
	for _, start := range []time.Duration{0, time.Hour} {
		now := start
		m := NewMemory(func() time.Duration { return now })
		buckets := inTables(m, 300, 1, Bucket{Name: "b", Limit: Limit{9, time.Hour, 1}, Cost: 1})
		for i := range buckets {
			decide(t, m, Atomic, buckets[i])
		}
		for _, i := range random.Perm(len(buckets))[:200] {
			m.giveBack(&buckets[i], true)
			buckets[i].Cost = 0
		}
		usedSlots(t, m)
		now += time.Microsecond
		for _, b := range buckets {
			if got := level(t, m, b); got != b.Cost {
				t.Fatalf("from %v: a bucket holds %d, want %d", start, got, b.Cost)
			}
		}
	}
}

// TestOwed tests what is owed to the servers after an outage: what was charged
// here meanwhile, until they report it themselves, or it has drained.
func TestOwed(t *testing.T) {
	now := time.Hour
	m := NewMemory(func() time.Duration { return now })
	const hour = 3600e6
	b := Bucket{Name: "b", Key: "k", Limit: Limit{9, time.Hour, 2}, Cost: 3}
	other := b
	other.Key = "other"
	check := func(want ...state) {
		t.Helper()
		if got := m.owed([]Bucket{b, other}); !slices.Equal(got, want) {
			t.Errorf("owed %+v, want %+v", got, want)
		}
	}
	check()
	m.mirror(&b, state{clear: hour}, false)
	check()
	decide(t, m, Atomic, other) // by itself, for nobody else
	check()
	m.take(Request{Buckets: []Bucket{b}}, nil, true)
	check(state{3 * hour, 1}, state{})
	now += time.Minute
	const minute = hour / 60
	check(state{3*hour - minute, 1}, state{})
	m.mirror(&b, state{clear: hour}, true) // an answer from before
	check(state{3*hour - minute, 1}, state{})
	m.mirror(&b, state{clear: 3*hour - minute, slack: 1}, false) // of a server that was not told
	check(state{3*hour - minute, 1}, state{})
	m.giveBack(&b, true)
	check(state{hour - minute, 0}, state{})
	m.take(Request{Buckets: []Bucket{b}}, nil, true)
	m.mirror(&b, state{clear: 3*hour - minute + 100, slack: 1}, true)
	check()
	brief := b
	brief.Name, brief.Limit.DripRate = "brief", time.Second
	m.take(Request{Buckets: []Bucket{other, brief}}, nil, true)
	check(state{}, state{3*hour - minute, 0})
	now += 2 * time.Second
	if got := m.owed([]Bucket{brief}); got != nil {
		t.Errorf("owed %+v of a bucket that has drained", got)
	}
	now += 3*time.Hour - time.Minute
	check()
	usedSlots(t, m)
}
