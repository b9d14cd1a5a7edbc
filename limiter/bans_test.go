package limiter

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// bansModel is a plain model of bans of one key: what has happened, in µs.
type bansModel struct {
	until   int64 // when the last ban ended
	heard   int64 // when it was last denied, or the last ban ended
	denials int64 // since then
	bans    int   // since all was forgotten
}

// deny notes a denial, and reports whether it has begun a ban.
func (m *bansModel) deny(now, after int64, durations []time.Duration) bool {
	if now < m.until {
		return false
	}
	if last := durations[len(durations)-1]; now >= m.heard+last.Microseconds() {
		*m = bansModel{}
	}
	m.heard, m.denials = now, m.denials+1
	if m.denials < after {
		return false
	}
	m.until = now + durations[min(m.bans, len(durations)-1)].Microseconds()
	m.heard, m.denials, m.bans = m.until, 0, m.bans+1
	return true
}

// TestBans guards that denials of the limits that a ban watches, and nothing else, begin
// it, that it takes as long as its number says, and that it is forgotten in time: against
// a plain model, in both stores.
func TestBans(t *testing.T) {
	t.Parallel()
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	trace, seen := 0, map[string]int{}
	checkTraces(t, 3, func(t *rapid.T) {
		trace++
		m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
		durations := make([]time.Duration, rapid.IntRange(1, bucket.MaxBans).Draw(t, "durations"))
		for i := range durations {
			durations[i] = rapid.SampledFrom([]time.Duration{time.Second, 2 * time.Second, 10 * time.Second, time.Minute}).Draw(t, "duration")
			if i > 0 {
				durations[i] = max(durations[i], durations[i-1])
			}
		}
		after := rapid.SampledFrom([]int64{1, 1, 2, 3}).Draw(t, "after")
		accounting := Accounting(rapid.IntRange(0, 1).Draw(t, "accounting"))
		key := fmt.Sprint(trace)
		one := Bucket{Name: "one", Key: key, Limit: Limit{Size: rapid.Int64Range(1, 3).Draw(t, "size"), DripInterval: time.Second, DripSize: 1}, Cost: 1}
		two := Bucket{Name: "two", Key: key, Limit: Limit{Size: rapid.Int64Range(1, 3).Draw(t, "size 2"), DripInterval: 700 * time.Millisecond, DripSize: 1}, Cost: 1}
		ban := Bucket{Name: "ban", Key: key, Limit: BanAfter(after, durations...), Cost: 1, Watches: rapid.Uint8Range(1, 2).Draw(t, "watched")}
		other := Bucket{Name: "other", Key: key, Limit: Limit{Size: 2, DripInterval: time.Second, DripSize: 1}, Cost: 1}
		model, levels := bansModel{}, [3]bucket.Level{}
		for range rapid.IntRange(1, 40).Draw(t, "requests") {
			v.advance(t, time.Duration(rapid.SampledFrom([]int64{0, 0, 1, 300_000, 999_999, 1_000_000, 5_000_000, 61_000_000}).Draw(t, "gap"))*time.Microsecond)
			now, banned := bucket.Moment{Now: v.now, Unix: v.now}, v.now < model.until
			limits, fits := []*Limit{&one.Limit, &two.Limit, &other.Limit}, [3]bool{}
			for i, l := range limits {
				levels[i] = levels[i].At(v.now)
				fits[i] = l.of().Room(levels[i], 0, v.now) >= 1
			}
			began := (!fits[1] || ban.Watches == 2 && !fits[0]) && model.deny(v.now, after, durations)
			if banned { // those that it watches have no room either, and are not charged
				fits[1], fits[0] = false, fits[0] && ban.Watches < 2
			}
			all := fits[0] && fits[1] && fits[2]
			for i, l := range limits {
				if fits[i] && (all || accounting == AccountingEach) {
					levels[i] = l.of().Add(levels[i], 1, now)
				}
			}
			for _, store := range []Store{v, m} {
				got := decide(t, store, accounting, one, two, ban, other)
				d := got[2]
				if got[0].Denied == fits[0] || got[1].Denied == fits[1] || got[3].Denied == fits[2] {
					t.Fatalf("%T: %+v, want room %v", store, got, fits)
				}
				if d.Denied != (banned || began) || d.Began != began {
					t.Fatalf("%T: %+v of %+v, want banned %t, began %t", store, d, model, banned, began)
				}
				left := time.Duration(max(model.until-v.now, 0)) * time.Microsecond
				if d.RetryAfter != left {
					t.Fatalf("%T: banned for %v, want %v", store, d.RetryAfter, left)
				}
				if got[1].Denied && got[1].RetryAfter < left {
					t.Fatalf("%T: denied for %v, want at least the ban, %v", store, got[1].RetryAfter, left)
				}
			}
			for what, is := range map[string]bool{"banned": banned, "began": began, "second": model.bans > 1, "admitted": all, "denied": !all && !banned && !began} {
				if is {
					seen[what]++
				}
			}
		}
		for _, store := range []Store{v, m} {
			l := levelNow(t, store, ban)
			if left := time.Duration(max(model.until-v.now, 0)) * time.Microsecond; l.RetryAfter != left {
				t.Fatalf("%T: peek sees a ban of %v, want %v", store, l.RetryAfter, left)
			}
		}
	})
	for _, what := range []string{"banned", "began", "second", "admitted", "denied"} {
		if seen[what] < 100 {
			t.Errorf("%v: the test covers too little", seen)
		}
	}
}

// levelNow returns what b's bucket holds.
func levelNow(t rapid.TB, store Store, b Bucket) (l Level) {
	t.Helper()
	var err error
	switch s := store.(type) {
	case *Memory:
		l, err = s.Peek(context.Background(), b)
	case *Redis:
		l, err = s.Peek(context.Background(), b)
	case *clockedRedis:
		l, err = s.Peek(context.Background(), b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// call decides a request.
func call(t testing.TB, store Store, buckets ...Bucket) []Decision {
	t.Helper()
	d, err := store.Take(t.Context(), Request{Buckets: buckets}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestBansOfManyNodes guards that a ban that one node has begun holds on all others at
// once, that nodes which know of it do not ask again, and that it survives the loss of the
// server's data and an outage.
func TestBansOfManyNodes(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var nodes [3]*Redis
	for i := range nodes {
		nodes[i] = newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 100 * time.Millisecond, Fallback: NewMemory()}, takeScript)
		t.Cleanup(func() { _ = nodes[i].Close() })
		nodes[i].Connect(t.Context())
	}
	limit := Bucket{Name: "login", Key: "k", Limit: Limit{Size: 2, DripInterval: 10 * time.Millisecond, DripSize: 1}, Cost: 1}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(1, time.Hour), Cost: 1, Watches: 1}
	call := func(r *Redis) []Decision { return call(t, r, limit, ban) }
	redistest.WaitFor(t, 5*time.Second, func() error {
		for _, r := range nodes {
			if d := call(r)[1]; d.By != DecidedByRedis && !d.Denied {
				return fmt.Errorf("%+v", d)
			}
		}
		return nil
	})
	redistest.WaitFor(t, 5*time.Second, func() error {
		if d := call(nodes[0]); !d[1].Denied {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	time.Sleep(30 * time.Millisecond) // the limit itself has room again
	for i, r := range nodes {
		if d := call(r); !d[0].Denied || d[0].RetryAfter < 59*time.Minute || !d[1].Denied || d[1].Began || d[1].RetryAfter < 59*time.Minute {
			t.Errorf("node %d does not know of the ban: %+v", i, d)
		}
		if d := call(r); d[1].By != DecidedByCache || !d[1].Denied || !d[0].Denied || d[0].RetryAfter < 59*time.Minute {
			t.Errorf("node %d asks again: %+v", i, d)
		}
	}
	server.Kill()
	denied := func(by Decider) error {
		for i, r := range nodes {
			if d := call(r)[1]; !d.Denied || d.By != by || d.RetryAfter < 59*time.Minute {
				return fmt.Errorf("node %d: %+v", i, d)
			}
		}
		return nil
	}
	redistest.WaitFor(t, 5*time.Second, func() error { return denied(DecidedByFallback) })
	server.Restart(t)
	for i, r := range nodes { // which reports it to the server
		redistest.WaitFor(t, 10*time.Second, func() error {
			if d := call(r)[1]; !d.Denied {
				t.Fatalf("node %d has forgotten the ban: %+v", i, d)
			} else if d.By != DecidedByRedis {
				return fmt.Errorf("node %d: %+v", i, d)
			}
			return nil
		})
	}
	if l := levelNow(t, nodes[0], ban); l.RetryAfter < 59*time.Minute {
		t.Fatalf("the server has not heard of the ban: %+v", l)
	}
	if _, err := nodes[1].Reset(t.Context(), ban); err != nil {
		t.Fatal(err)
	}
	redistest.WaitFor(t, 10*time.Second, func() error {
		for i, r := range nodes {
			if d := call(r); d[1].Denied {
				return fmt.Errorf("node %d: %+v after the ban was lifted", i, d)
			}
			time.Sleep(20 * time.Millisecond)
		}
		return nil
	})
}

// TestBansInOutage guards that a node on its own bans too, and reports to the server later.
func TestBansInOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory()}, takeScript)
	t.Cleanup(func() { _ = r.Close() })
	limit := Bucket{Name: "login", Key: "k", Limit: Limit{Size: 1, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(2, time.Minute, time.Hour), Cost: 1, Watches: 1}
	server.Kill()
	redistest.WaitFor(t, 5*time.Second, func() error {
		if d := call(t, r, limit, ban); !d[1].Denied || d[1].By != DecidedByFallback {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	server.Restart(t)
	redistest.WaitFor(t, 10*time.Second, func() error {
		if d := call(t, r, limit, ban); !d[1].Denied {
			t.Fatalf("the ban is forgotten: %+v", d)
		}
		if l, err := r.Peek(t.Context(), ban); err != nil || l.RetryAfter < 30*time.Second || l.RetryAfter > time.Minute {
			return fmt.Errorf("%+v, %w", l, err)
		}
		return nil
	})
}

// TestBansIgnoreHeldUnits guards that parallel requests which do not fit next to each other
// are no reason for a ban.
func TestBansIgnoreHeldUnits(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	login := Bucket{Name: "login", Key: "k", Limit: Limit{Size: 2, DripInterval: time.Hour, DripSize: 1}, Cost: 1, Hold: true}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(1, time.Minute), Cost: 1, Watches: 1}
	for _, store := range []Store{v, m} {
		var running []*Held
		call := func() []Decision {
			held := new(Held)
			d, err := store.Take(t.Context(), Request{Buckets: []Bucket{login, ban}, Held: held}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !Denied(d) {
				running = append(running, held)
			}
			return d
		}
		call()
		call()
		if d := call(); !d[0].Denied || d[1].Denied {
			t.Errorf("%T: %+v beside two requests in progress", store, d)
		}
		for _, held := range running {
			held.Settle(0, 1)
		}
		heldNow(t, store, login)
		if d := call(); !d[0].Denied || !d[1].Began {
			t.Errorf("%T: %+v when two have been counted", store, d)
		}
	}
}

// TestBansOfDryRuns guards that a ban of a dry run denies nothing, and that what it watches
// is not charged during it, as it would not be if it were no dry run.
func TestBansOfDryRuns(t *testing.T) {
	v := newClockedRedis(t, redistest.Start(t), "rl:")
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond })
	limit := Bucket{Name: "login", Key: "k", Limit: Limit{Size: 2, DripInterval: time.Second, DripSize: 1}, Cost: 1, DryRun: true}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(1, time.Minute), Cost: 1, Watches: 1, DryRun: true}
	other := Bucket{Name: "all", Key: "k", Limit: PerSecond(100), Cost: 1}
	for range 3 {
		for _, store := range []Store{v, m} {
			call(t, store, limit, ban, other)
		}
	}
	v.advance(t, 10*time.Second)
	for _, store := range []Store{v, m} {
		for range 2 {
			if d := call(t, store, limit, ban, other); !d[0].Denied || !d[1].Denied || d[1].Began || d[1].RetryAfter != 50*time.Second || Denied(d) {
				t.Errorf("%T: %+v", store, d)
			}
		}
		if l := levelNow(t, store, limit); l.Units != 0 {
			t.Errorf("%T: %+v during the ban", store, l)
		}
	}
}

// TestBansOverSlots guards bans next to limits of other keys, whose buckets are in other
// slots of a cluster and hold their units meanwhile.
func TestBansOverSlots(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	global := Bucket{Name: "all", Key: "all", Limit: Limit{Size: 1000, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	limit := Bucket{Name: "login", Key: "k", Limit: Limit{Size: 2, DripInterval: 20 * time.Millisecond, DripSize: 1}, Cost: 1}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(1, time.Hour), Cost: 1, Watches: 1}
	admitted := int64(0)
	for range 20 {
		if !Denied(decide(t, r, AccountingAtomic, global, limit, ban)) {
			admitted++
		}
	}
	time.Sleep(50 * time.Millisecond)
	if d := decide(t, r, AccountingAtomic, global, limit, ban); !d[2].Denied || d[2].RetryAfter < 59*time.Minute || admitted < 2 {
		t.Errorf("%d admitted, then %+v", admitted, d)
	}
	redistest.WaitFor(t, 5*time.Second, func() error {
		if l := levelNow(t, r, global); l.Units != admitted || l.Held != 0 {
			return fmt.Errorf("%+v, want %d units", l, admitted)
		}
		return nil
	})
}

// TestBansOfParts guards that a bucket which watches another one that was decided elsewhere,
// as while a slot is being moved, takes no other for that.
func TestBansOfParts(t *testing.T) {
	global := Bucket{Name: "all", Key: "all", Limit: Limit{Size: 1, DripInterval: time.Hour, DripSize: 1}, Cost: 1}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(1, time.Minute), Cost: 1, Watches: 1}
	for _, buckets := range [][]Bucket{{ban}, {global, ban}} {
		m := NewMemory()
		f := newFallback(m, time.Second, "here")
		for range 3 {
			outcomes := f.decide(Request{Buckets: buckets}, nil, false)
			if o := outcomes[len(outcomes)-1]; o.denied || o.Clear > 0 {
				t.Errorf("%d buckets: %+v", len(buckets), o)
			}
		}
		if err := m.Ban(context.Background(), ban, time.Hour); err != nil {
			t.Fatal(err)
		}
		outcomes := f.decide(Request{Buckets: buckets}, nil, false)
		if o := outcomes[len(outcomes)-1]; !o.denied {
			t.Errorf("%d buckets, banned: %+v", len(buckets), o)
		}
	}
}

// TestBan guards bans that somebody places: they hold on all nodes, also if the server
// hears of them later, are never shorter than one that there is, and can be lifted.
func TestBan(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	open := func(fallback *Memory) *Redis {
		r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 200 * time.Millisecond, Fallback: fallback}, takeScript)
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	one, two, bare := open(NewMemory()), open(NewMemory()), open(nil)
	limit := Bucket{Name: "login", Key: "k", Limit: PerSecond(100), Cost: 1}
	ban := Bucket{Name: "login/ban", Key: "k", Limit: BanAfter(1, time.Minute, 2*time.Minute), Cost: 1, Watches: 1}
	left := func(store Store) time.Duration {
		t.Helper()
		d := call(t, store, limit, ban)
		return max(d[1].RetryAfter, 0).Round(time.Second)
	}
	location := func(r *Redis, d time.Duration) {
		t.Helper()
		redistest.WaitFor(t, 5*time.Second, func() error { return r.Ban(t.Context(), ban, d) })
	}
	location(one, time.Hour)
	location(one, time.Minute)
	if a, b, c := left(one), left(two), left(bare); a != time.Hour || b != time.Hour || c != time.Hour {
		t.Errorf("banned for %v, %v, %v", a, b, c)
	}
	reset(t, one, ban, 1)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if a, b, c := left(one), left(two), left(bare); a > 0 || b > 0 || c > 0 {
			return fmt.Errorf("banned for %v, %v, %v, although it was lifted", a, b, c)
		}
		return nil
	})
	location(bare, time.Hour)
	if a := left(two); a != time.Hour {
		t.Errorf("banned for %v by a node without a fallback", a)
	}
	reset(t, two, ban, 1)
	server.Kill()
	if err := one.Ban(t.Context(), ban, time.Hour); !errors.Is(err, ErrUnavailable) {
		t.Errorf("got %v without a server", err)
	}
	if a := left(one); a != time.Hour {
		t.Errorf("banned for %v here", a)
	}
	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if a, b := left(one), left(two); a < 59*time.Minute || b < 59*time.Minute {
			return fmt.Errorf("banned for %v and %v", a, b)
		}
		return nil
	})
	if err := one.Ban(t.Context(), limit, time.Hour); err == nil || !strings.Contains(err.Error(), "BanAfter") {
		t.Errorf("got %v for a limit that is no ban", err)
	}
	m := NewMemory()
	if err := m.Ban(context.Background(), ban, time.Hour); err != nil || left(m) != time.Hour {
		t.Errorf("banned for %v in the process, %v", left(m), err)
	}
}

// TestBansAreValid guards that what no store could decide is refused with its reason.
func TestBansAreValid(t *testing.T) {
	limit := Bucket{Name: "a", Key: "k", Limit: PerSecond(1), Cost: 1}
	counts := limit
	counts.Limit.CountDenied = true
	other := Bucket{Name: "b", Key: "other", Limit: PerSecond(1), Cost: 1}
	ban := Bucket{Name: "ban", Key: "k", Limit: BanAfter(1, time.Minute), Cost: 1, Watches: 1}
	many := ban
	many.Watches = 2
	dry := ban
	dry.DryRun = true
	for _, tc := range []struct {
		buckets []Bucket
		want    string
	}{
		{[]Bucket{limit, ban}, ""},
		{[]Bucket{ban}, `bucket "ban": a bucket may watch`},
		{[]Bucket{limit, many}, `bucket "ban": a bucket may watch`},
		{[]Bucket{other, ban}, `bucket "b", watched by "ban": a bucket may watch`},
		{[]Bucket{limit, dry}, `bucket "a", watched by "ban": a bucket may watch`},
		{[]Bucket{counts, ban}, `bucket "a", watched by "ban": a bucket may watch`},
		{[]Bucket{limit, {Name: "ban", Key: "k", Limit: BanAfter(0, time.Minute), Cost: 1, Watches: 1}}, "size 0: must be from 1"},
		{[]Bucket{limit, {Name: "ban", Key: "k", Limit: BanAfter(10_001, time.Minute), Cost: 1, Watches: 1}}, "at most 10000"},
		{[]Bucket{limit, {Name: "ban", Key: "k", Limit: BanAfter(1, time.Minute, time.Second), Cost: 1, Watches: 1}}, "none shorter than the one before"},
		{[]Bucket{limit, {Name: "ban", Key: "k", Limit: BanAfter(1, time.Millisecond), Cost: 1, Watches: 1}}, "at least 1s"},
		{[]Bucket{limit, {Name: "ban", Key: "k", Limit: BanAfter(1), Cost: 1, Watches: 1}}, "drip"},
		{[]Bucket{limit, {Name: "ban", Key: "k", Limit: BanAfter(1, 18*365*24*time.Hour), Cost: 1, Watches: 1}}, "drip size"},
	} {
		_, err := NewMemory().Take(t.Context(), Request{Buckets: tc.buckets}, nil)
		if got := fmt.Sprint(err); tc.want == "" && err != nil || !strings.Contains(got, tc.want) && tc.want != "" {
			t.Errorf("%+v: got %v, want %q", tc.buckets, err, tc.want)
		}
	}
}
