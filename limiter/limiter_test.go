package limiter

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// storeFunc is a function that implements Store.
type storeFunc func(ctx context.Context, req Request, dst []Decision) ([]Decision, error)

func (f storeFunc) Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error) {
	return f(ctx, req, dst)
}

// TestLimiterCallsStore guards the request that a Limiter makes, and what it
// returns for the answer.
func TestLimiterCallsStore(t *testing.T) {
	type contextKey struct{}
	ctx := context.WithValue(t.Context(), contextKey{}, "ours")
	want := Decision{Denied: true, Size: 10, Remaining: 2, Clear: 8 * time.Second, RetryAfter: time.Second}
	failed := errors.New("failed")
	var asked []Bucket
	var fail error
	l := Limiter{Name: "login", Limit: PerSecond(10)}
	l.Store = storeFunc(func(got context.Context, req Request, dst []Decision) ([]Decision, error) {
		if got.Value(contextKey{}) != "ours" || req.Accounting != AccountingAtomic || req.NoFallback {
			t.Errorf("asked with %v for %+v", got, req)
		}
		asked = append(asked, req.Buckets...)
		if fail != nil {
			return dst, fail
		}
		return append(dst, want), nil
	})

	if d, err := l.Allow(ctx, "a"); d != want || err != nil {
		t.Errorf("Allow returns %+v, %v", d, err)
	}
	if d, err := l.AllowN(ctx, "b", 7); d != want || err != nil {
		t.Errorf("AllowN returns %+v, %v", d, err)
	}
	fail = failed
	if d, err := l.Allow(ctx, "c"); d != (Decision{}) || !errors.Is(err, failed) {
		t.Errorf("of a store that fails Allow returns %+v, %v", d, err)
	}
	limit := PerSecond(10)
	if want := []Bucket{
		{Name: "login", Key: "a", Limit: limit, Cost: 1},
		{Name: "login", Key: "b", Limit: limit, Cost: 7},
		{Name: "login", Key: "c", Limit: limit, Cost: 1},
	}; !slices.Equal(asked, want) {
		t.Errorf("asked for %+v\nwant %+v", asked, want)
	}
}

// TestLimitersShareBuckets guards which buckets are shared: limiters with equal
// store, name and limit are interchangeable, and different keys, names or limits
// use different buckets.
func TestLimitersShareBuckets(t *testing.T) {
	store := NewMemoryWithClock(func() time.Duration { return time.Hour })
	once := Every(time.Hour)
	tests := []struct {
		name     string
		l        Limiter
		key      string
		admitted bool
	}{
		{"first", Limiter{store, "a", once}, "k", true},
		{"the same", Limiter{store, "a", once}, "k", false},
		{"another key", Limiter{store, "a", once}, "k2", true},
		{"another name", Limiter{store, "b", once}, "k", true},
		{"another limit", Limiter{store, "a", Every(time.Minute)}, "k", true},
		{"no name", Limiter{store, "", once}, "k", true},
		{"no name again", Limiter{store, "", once}, "k", false},
		{"no key", Limiter{store, "a", once}, "", true},
		{"no key again", Limiter{store, "a", once}, "", false},
	}
	for _, tc := range tests {
		if d, err := tc.l.Allow(t.Context(), tc.key); err != nil || d.Denied == tc.admitted {
			t.Errorf("%s: denied %t, %v, want admitted %t", tc.name, d.Denied, err, tc.admitted)
		}
	}
}

// TestLimiterRejectsInvalidNumbers guards that numbers which cannot be intended
// are errors: a cost of 0 would be free, and a limit that is not valid has no
// rate.
func TestLimiterRejectsInvalidNumbers(t *testing.T) {
	store := NewMemory()
	for _, tc := range []struct {
		limit Limit
		n     int64
		want  string
	}{
		{PerSecond(1), -1, `bucket "api": cost -1: must not be negative`},
		{PerSecond(0), 1, `bucket "api": size 0: must be from 1 to 562949953421312`},
		{PerMinute(-5), 1, `bucket "api": size -5: must be from 1 to 562949953421312`},
		{Every(0), 1, `bucket "api": drip rate 0s: must be a whole number of microseconds, at least 1µs`},
		{Limit{}, 1, `bucket "api": the zero Limit is not valid: use PerSecond, FixedWindow or another function that makes one`},
		{Limit{Size: 1}, 1, `bucket "api": drip rate 0s: must be a whole number of microseconds, at least 1µs`},
	} {
		l := Limiter{Store: store, Name: "api", Limit: tc.limit}
		if d, err := l.AllowN(t.Context(), "k", tc.n); err == nil || err.Error() != tc.want || d != (Decision{}) {
			t.Errorf("%+v, cost %d: got %+v, %v, want error %s", tc.limit, tc.n, d, err, tc.want)
		}
	}
	if n := store.Len(); n > 0 {
		t.Errorf("%d buckets", n)
	}
}

// TestLimiterNeedsStore guards that a Limiter without a Store says so, whatever is called.
func TestLimiterNeedsStore(t *testing.T) {
	l := Limiter{Name: "api", Limit: PerSecond(1)}
	const want = `limiter "api": Store is nil: use NewMemory or NewRedis`
	_, allow := l.Allow(t.Context(), "k")
	h, hold := l.Hold(t.Context(), "k")
	h.Done(1)
	for _, err := range []error{allow, hold, l.Wait(t.Context(), "k")} {
		if err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// TestNamesAreAnyText guards that names, which users choose, may have any characters, those
// that mean something in Redis too: each name has buckets of its own.
func TestNamesAreAnyText(t *testing.T) {
	limit := FixedWindow(1, 100*time.Hour)
	cluster := redistest.StartCluster(t, 2)
	for _, store := range []Store{NewMemory(), newTestRedis(t, redistest.Start(t), nil), newTestCluster(t, cluster, nil)} {
		for _, name := range []string{"", " ", "sign in", "{a}", "}{", "a:b", "a:b:1.1", "ä\n\r\x00\xff", strings.Repeat("long ", 1000)} {
			l := Limiter{Store: store, Name: name, Limit: limit}
			for i := range 2 {
				if d, err := l.Allow(t.Context(), "k"); err != nil || d.Denied != (i == 1) {
					t.Errorf("%T, %q: %+v, error %v", store, name, d, err)
				}
			}
		}
	}
}

// TestAllowAllocatesNothing guards that a request of one bucket makes no garbage, whether it
// is admitted or denied.
func TestAllowAllocatesNothing(t *testing.T) {
	racetest.SingleGoroutine(t)
	l := Limiter{Store: NewMemory(), Name: "api", Limit: FixedWindow(500, time.Hour)}
	if n := testing.AllocsPerRun(1000, func() { _, _ = l.Allow(t.Context(), "k") }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestZeroMeansOne guards that a zero DripSize means 1 in both stores, and uses the same
// bucket as 1. The caller's buckets, which others may be reading,
// are not changed.
func TestZeroMeansOne(t *testing.T) {
	clock := func() time.Duration { return time.Hour }
	server := redistest.Start(t)
	for name, store := range map[string]Store{
		"memory": NewMemoryWithClock(clock), "redis": newClockedRedis(t, server, "v:"),
	} {
		t.Run(name, func(t *testing.T) {
			full := Limit{Size: 3, DripInterval: time.Hour, DripSize: 1}
			left := Limit{Size: 3, DripInterval: time.Hour}
			said := []Bucket{{Name: "a", Key: "k", Limit: full, Cost: 1}, {Name: "b", Key: "k", Limit: full, Cost: 1}}
			for _, buckets := range [][]Bucket{
				{{Name: "a", Key: "k", Limit: left, Cost: 1}, {Name: "b", Key: "k", Limit: left, Cost: 1}},
				{{Name: "a", Key: "k", Limit: full, Cost: 1}, {Name: "b", Key: "k", Limit: left, Cost: 1}},
				said,
				{{Name: "a", Key: "k", Limit: left, Cost: 1}, {Name: "b", Key: "k", Limit: full, Cost: 1}},
			} {
				before := slices.Clone(buckets)
				d, err := store.Take(t.Context(), Request{Buckets: buckets}, nil)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(buckets, before) {
					t.Fatalf("%+v became %+v", before, buckets)
				}
				for i := range d {
					if got, want := buckets[i].RoomIn(&d[i]), said[i].RoomIn(&d[i]); got != want {
						t.Errorf("%+v: waits %v, want %v", buckets[i], got, want)
					}
				}
			}
			// Three were admitted, the fourth was denied.
			d, err := store.Take(t.Context(), Request{Buckets: said}, nil)
			if err != nil || !d[0].Denied || !d[1].Denied || d[0].Remaining != 0 || d[1].Clear.Round(time.Second) != 3*time.Hour {
				t.Errorf("decided %+v, %v, want both full", d, err)
			}
		})
	}

	left, full := Limit{Size: 3, DripInterval: time.Hour}, Limit{Size: 3, DripInterval: time.Hour, DripSize: 1}
	if got, want := fmt.Sprint(left.of().DrainTime(), left.of().DripTime(2), left.Validate()),
		fmt.Sprint(full.of().DrainTime(), full.of().DripTime(2), full.Validate()); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestNegativeNumbersAreRejected guards that negative numbers are errors, unlike
// zero.
func TestNegativeNumbersAreRejected(t *testing.T) {
	for _, b := range []Bucket{
		{Name: "a", Limit: Limit{Size: 1, DripInterval: time.Second}, Cost: -1},
		{Name: "a", Limit: Limit{Size: 1, DripInterval: time.Second, DripSize: -1}, Cost: 1},
	} {
		if d, err := NewMemory().Take(t.Context(), Request{Buckets: []Bucket{b}}, nil); err == nil {
			t.Errorf("%+v: decided %+v", b, d)
		}
	}
}

// TestSummarizeNothing guards that a request with no buckets to pass is admitted.
func TestSummarizeNothing(t *testing.T) {
	for _, none := range [][]Decision{nil, {}} {
		if got := Summarize(nil, none); got != (Summary{}) {
			t.Errorf("got %+v", got)
		}
	}
}

// TestTimedLimiterWaits guards when Wait returns, and with what: once there is room, or at once
// if there will be none before the deadline, or as soon as the context is done. Only what
// was admitted is charged.
func TestTimedLimiterWaits(t *testing.T) {
	for _, tc := range []struct {
		name     string
		limit    Limit
		cost     int64
		deadline time.Duration // from now on
		cancel   time.Duration // the same; 0 if never
		want     error
		least    time.Duration // how long it takes
		most     time.Duration
	}{
		{"there will be room", Every(100 * time.Millisecond), 1, time.Minute, 0, nil, 90 * time.Millisecond, 10 * time.Second},
		{"the deadline is too soon", Every(time.Hour), 1, time.Minute, 0, ErrTooLong, 0, 10 * time.Second},
		{"it costs too much", Every(time.Hour), 2, 2 * time.Hour, 0, ErrTooLong, 0, 10 * time.Second},
		{"cancelled meanwhile", Every(time.Hour), 1, 2 * time.Hour, 50 * time.Millisecond, context.Canceled, 40 * time.Millisecond, 10 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), tc.deadline)
			defer cancel()
			m := NewMemory()
			l := Limiter{Store: m, Name: "mail", Limit: tc.limit}
			if err := l.Wait(ctx, "k"); err != nil { // of an empty bucket
				t.Fatal(err)
			}
			if tc.cancel > 0 {
				time.AfterFunc(tc.cancel, cancel)
			}
			start := time.Now()
			err := l.WaitN(ctx, "k", tc.cost)
			if took := time.Since(start); !errors.Is(err, tc.want) || took < tc.least || took > tc.most {
				t.Errorf("%v after %v, want %v", err, took, tc.want)
			}
			level, err := m.Peek(t.Context(), Bucket{Name: "mail", Key: "k", Limit: tc.limit, Cost: 1})
			if err != nil || level.Units > 1 {
				t.Errorf("%+v, error %v, want at most one unit", level, err)
			}
		})
	}
}

// holdStores are both kinds of stores.
func holdStores(t *testing.T) map[string]Store {
	t.Helper()
	return map[string]Store{"memory": NewMemory(), "redis": newTestRedis(t, redistest.Start(t), nil)}
}

// mustHold asks l for one unit of key "k".
func mustHold(t *testing.T, l *Limiter, denied bool) Hold {
	t.Helper()
	h, err := l.Hold(t.Context(), "k")
	if err != nil || h.Denied != denied {
		t.Fatalf("denied %t, error %v, want denied %t", h.Denied, err, denied)
	}
	return h
}

// awaitRoom waits until l has room for a unit, or none, as wanted: a settlement is sent to a
// server in the background.
func awaitRoom(t *testing.T, l *Limiter, want bool) {
	t.Helper()
	redistest.WaitFor(t, 10*time.Second, func() error {
		if d, err := l.AllowN(t.Context(), "k", 0); err != nil || (d.Remaining > 0) != want {
			return fmt.Errorf("%d remain, error %v", d.Remaining, err)
		}
		return nil
	})
}

// TestHoldOfConcurrency guards that as many requests as the limit has units run at one time,
// and that the end of one makes room for another: neither its context nor its denial does.
func TestHoldOfConcurrency(t *testing.T) {
	for name, store := range holdStores(t) {
		t.Run(name, func(t *testing.T) {
			l := &Limiter{Store: store, Name: "running", Limit: Concurrency(2)}
			ctx, cancel := context.WithCancel(t.Context())
			first, err := l.Hold(ctx, "k")
			if err != nil || first.Denied {
				t.Fatal(first, err)
			}
			second := mustHold(t, l, false)
			mustHold(t, l, true).Done(1)
			cancel()
			mustHold(t, l, true)
			first.Done(0)
			awaitRoom(t, l, true)
			third := mustHold(t, l, false)
			first.Done(0) // again
			mustHold(t, l, true)
			second.Done(0)
			third.Done(0)
			awaitRoom(t, l, true)
		})
	}
}

// TestHoldOfFailures guards that only what Done charges counts, once, and that requests in
// progress take room meanwhile, so that guesses made at the same time are no more than others.
func TestHoldOfFailures(t *testing.T) {
	for name, store := range holdStores(t) {
		t.Run(name, func(t *testing.T) {
			l := &Limiter{Store: store, Name: "login", Limit: FixedWindow(3, 100*time.Hour)}
			for range 10 {
				mustHold(t, l, false).Done(0)
				awaitRoom(t, l, true)
			}
			guesses := []Hold{mustHold(t, l, false), mustHold(t, l, false), mustHold(t, l, false)}
			mustHold(t, l, true)
			guesses[0].Done(0)
			awaitRoom(t, l, true)
			for _, h := range guesses {
				h.Done(1)
				h.Done(1)
			}
			last := mustHold(t, l, false) // two are charged
			mustHold(t, l, true)
			last.Done(1)
			awaitRoom(t, l, false)
		})
	}
}

// TestHoldChargesTheCost guards that a request of which nothing is held is charged what it
// turned out to cost, above the size too.
func TestHoldChargesTheCost(t *testing.T) {
	for name, store := range holdStores(t) {
		t.Run(name, func(t *testing.T) {
			l := &Limiter{Store: store, Name: "bytes", Limit: FixedWindow(1000, 100*time.Hour)}
			for _, admitted := range []bool{true, true, false} {
				awaitRoom(t, l, admitted)
				h, err := l.HoldN(t.Context(), "k", 0)
				if err != nil || h.Denied == admitted {
					t.Errorf("%+v, error %v", h.Decision, err)
				}
				h.Done(700)
			}
		})
	}
}

// TestForgottenHold guards that a request whose Done is never called is charged what it holds
// once nothing refers to it, and not before: a mistake locks no one out for ever.
func TestForgottenHold(t *testing.T) {
	for name, store := range holdStores(t) {
		t.Run(name, func(t *testing.T) {
			running := &Limiter{Store: store, Name: "running", Limit: Concurrency(1)}
			login := &Limiter{Store: store, Name: "login", Limit: FixedWindow(2, 100*time.Hour)}
			mustHold(t, running, false)
			mustHold(t, login, false)
			kept := mustHold(t, login, false)
			redistest.WaitFor(t, 10*time.Second, func() error {
				runtime.GC()
				if d, err := running.AllowN(t.Context(), "k", 0); err != nil || d.Remaining == 0 {
					return fmt.Errorf("%d remain, error %v", d.Remaining, err)
				}
				return nil
			})
			kept.Done(0)
			awaitRoom(t, login, true)
			if d, err := login.AllowN(t.Context(), "k", 0); err != nil || d.Remaining != 1 {
				t.Errorf("%+v, error %v, want the forgotten one to be charged", d, err)
			}
		})
	}
}
