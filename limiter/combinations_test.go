package limiter

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestCombinations guards what becomes of each limit with each way to use it: how many of six
// requests both stores admit, or the error that says what is missing. Limits have two units,
// which leave after days, and nothing that a store takes admits everything: but a cost of 0,
// and requests that have ended where those in progress count.
func TestCombinations(t *testing.T) {
	const want = `
Allow
|  Hold
|  |  Hold, Done
|  |  |  Cost 0
|  |  |  |  Cost 0, settled
|  |  |  |  |  MaxKeys
|  |  |  |  |  |  ShareKey
|  |  |  |  |  |  |  DryRun
|  |  |  |  |  |  |  |  Lease
|  |  |  |  |  |  |  |  |  Eventual
|  |  |  |  |  |  |  |  |  |  Borrows
|  |  |  |  |  |  |  |  |  |  |  Borrows, Hold
|  |  |  |  |  |  |  |  |  |  |  |  Pool
|  |  |  |  |  |  |  |  |  |  |  |  |  Watches
|  |  |  |  |  |  |  |  |  |  |  |  |  |  Watches, Hold
|  |  |  |  |  |  |  |  |  |  |  |  |  |  |  watched
2  2  2  6  2  2  2  2  2  2  3  3  3  1  w  2  Per
2  2  2  6  2  2  2  2  2  2  3  3  3  1  w  2  Every.WithBurst
2  2  2  6  2  2  2  2  e  e  p  p  p  w  w  w  Per.CountingDenied
3  3  3  6  3  3  3  3  3  3  4  4  4  1  w  3  Per.WithDelay
2  2  2  6  2  2  2  2  2  2  3  3  3  1  w  2  FixedWindow
2  2  2  6  2  2  2  2  e  e  p  p  p  w  w  w  FixedWindow.CountingDenied
2  2  2  6  2  2  2  2  2  2  3  3  3  1  w  2  FixedWindow.WithDelay
2  2  2  6  2  2  2  2  2  2  3  3  3  1  w  2  ClockWindow
2  2  2  6  2  2  2  2  2  2  3  3  3  1  w  2  SlidingWindow
2  2  2  6  2  2  2  2  e  e  3  3  3  1  w  2  SlidingLog
2  2  2  6  2  2  2  2  e  e  p  p  p  w  w  w  SlidingLog.CountingDenied
1  1  1  6  1  1  1  1  e  e  2  2  2  1  w  1  WarmingUp
1  1  1  6  1  1  1  1  e  e  2  2  2  1  w  1  WarmingUp.WithColdFactor
3  d  d  6  d  3  3  3  e  e  4  d  4  1  w  3  WarmingUp.WithDelay
h  2  6  6  6  h  h  h  h  h  h  3  h  h  w  h  Concurrency
h  2  6  6  6  h  h  h  e  e  p  p  p  w  w  w  Concurrency.CountingDenied
h  2  6  6  6  h  h  h  h  h  h  3  h  h  w  h  Concurrency.WithDelay
b  b  b  6  2  b  b  b  e  e  b  b  b  1  w  b  BanAfter
b  b  b  6  2  b  b  b  e  e  p  p  p  w  w  w  BanAfter.CountingDenied
r  r  r  r  r  r  r  r  r  r  r  r  r  r  r  r  FixedWindow.WithBurst
r  r  r  r  r  r  r  r  r  r  r  r  r  r  r  r  Concurrency.WithBurst
c  c  c  c  c  c  c  c  c  c  c  c  c  c  c  c  Per.WithColdFactor
z  z  z  z  z  z  z  z  z  z  z  z  z  z  z  z  Limit{}
`
	errors := map[string]string{ // what each contains
		"w": "a bucket may watch those right before it",
		"e": " have to be exact",
		"p": "a bucket that Borrows needs a Pool behind it",
		"d": "a bucket with Hold can't have a Limit with which requests may wait",
		"h": "a Concurrency limit counts what is held: use Limiter.Hold, or set Bucket.Hold",
		"b": "a BanAfter limit counts denials by other buckets of the request: set Bucket.Watches",
		"r": "fixed limits have no burst: leave out WithBurst",
		"c": "leaky limits have no cold factor: leave out WithColdFactor",
		"z": "the zero Limit is not valid: use PerSecond",
	}

	const days = 100 * time.Hour
	delaying := func(l Limit) Limit {
		l, _ = l.WithDelay(days, 1)
		return l
	}
	limits := []struct {
		name  string
		limit Limit
	}{
		{"Per", Per(2, days)}, // as PerSecond and PerMinute
		{"Every.WithBurst", Every(days).WithBurst(2)},
		{"Per.CountingDenied", Per(2, days).CountingDenied()},
		{"Per.WithDelay", delaying(Per(2, 2*days))},
		{"FixedWindow", FixedWindow(2, days)},
		{"FixedWindow.CountingDenied", FixedWindow(2, days).CountingDenied()},
		{"FixedWindow.WithDelay", delaying(FixedWindow(2, days))},
		{"ClockWindow", ClockWindow(2, days, time.Now().Add(-time.Hour))},
		{"SlidingWindow", SlidingWindow(2, days)},
		{"SlidingLog", SlidingLog(2, days)},
		{"SlidingLog.CountingDenied", SlidingLog(2, days).CountingDenied()},
		{"WarmingUp", WarmingUp(1, days, days)},
		{"WarmingUp.WithColdFactor", WarmingUp(1, days, days).WithColdFactor(2)},
		{"WarmingUp.WithDelay", delaying(WarmingUp(2, days, days).WithColdFactor(1))},
		{"Concurrency", Concurrency(2)},
		{"Concurrency.CountingDenied", Concurrency(2).CountingDenied()},
		{"Concurrency.WithDelay", delaying(Concurrency(2))},
		{"BanAfter", BanAfter(2, time.Hour)},
		{"BanAfter.CountingDenied", BanAfter(2, time.Hour).CountingDenied()},
		{"FixedWindow.WithBurst", FixedWindow(2, days).WithBurst(2)},
		{"Concurrency.WithBurst", Concurrency(2).WithBurst(2)},
		{"Per.WithColdFactor", Per(2, days).WithColdFactor(2)},
		{"Limit{}", Limit{}},
	}

	// Each use asks once more: whether that is denied, by the decision if it is a dry run.
	type use func(Store, Bucket) (denied bool, err error)
	hold := func(done bool) use {
		return func(store Store, b Bucket) (bool, error) {
			l := Limiter{Store: store, Name: b.Name, Limit: b.Limit}
			h, err := l.Hold(t.Context(), b.Key)
			if done {
				h.Done(1)
			}
			t.Cleanup(func() { h.Done(0) })
			return h.Denied, err
		}
	}
	take := func(settle int64, buckets func(b Bucket) []Bucket) use {
		return func(store Store, b Bucket) (denied bool, err error) {
			var held Held
			decisions, err := store.Take(t.Context(), Request{Buckets: buckets(b), Held: &held}, nil)
			for _, d := range decisions {
				denied = denied || d.Denied
			}
			if settle > 0 {
				held.Settle(0, settle)
			}
			return denied, err
		}
	}
	with := func(b Bucket, change func(b *Bucket)) Bucket {
		change(&b)
		return b
	}
	alone := func(change func(b *Bucket)) use {
		return take(0, func(b Bucket) []Bucket { return []Bucket{with(b, change)} })
	}
	// one is a bucket of one unit next to b.
	one := func(b Bucket, change func(b *Bucket)) Bucket {
		b.Name, b.Limit = b.Name+"/one", Per(1, days)
		return with(b, change)
	}
	uses := []struct {
		name string
		use  use
	}{
		{"Allow", func(store Store, b Bucket) (bool, error) {
			l := Limiter{Store: store, Name: b.Name, Limit: b.Limit}
			d, err := l.Allow(t.Context(), b.Key)
			return d.Denied, err
		}},
		{"Hold", hold(false)},
		{"Hold, Done", hold(true)},
		{"Cost 0", alone(func(b *Bucket) { b.Cost = 0 })},
		{"Cost 0, settled", take(1, func(b Bucket) []Bucket {
			return []Bucket{with(b, func(b *Bucket) { b.Cost, b.Hold = 0, true })}
		})},
		{"MaxKeys", alone(func(b *Bucket) { b.MaxKeys = 1 })},
		{"ShareKey", alone(func(b *Bucket) { b.ShareKey = "network" })},
		{"DryRun", alone(func(b *Bucket) { b.DryRun = true })},
		{"Lease", alone(func(b *Bucket) { b.Consistency = Lease(MaxConsistency) })},
		{"Eventual", alone(func(b *Bucket) { b.Consistency = Eventual(MaxConsistency) })},
		{"Borrows", take(0, func(b Bucket) []Bucket {
			return []Bucket{with(b, func(b *Bucket) { b.Borrows = true }), one(b, func(b *Bucket) { b.Pool = true })}
		})},
		{"Borrows, Hold", take(0, func(b Bucket) []Bucket {
			return []Bucket{with(b, func(b *Bucket) { b.Borrows, b.Hold = true, true }), one(b, func(b *Bucket) { b.Pool = true })}
		})},
		{"Pool", take(0, func(b Bucket) []Bucket {
			return []Bucket{one(b, func(b *Bucket) { b.Borrows = true }), with(b, func(b *Bucket) { b.Pool = true })}
		})},
		{"Watches", take(0, func(b Bucket) []Bucket {
			return []Bucket{one(b, func(*Bucket) {}), with(b, func(b *Bucket) { b.Watches = 1 })}
		})},
		{"Watches, Hold", take(0, func(b Bucket) []Bucket {
			return []Bucket{one(b, func(*Bucket) {}), with(b, func(b *Bucket) { b.Watches, b.Hold = 1, true })}
		})},
		{"watched", take(0, func(b Bucket) []Bucket {
			return []Bucket{b, one(b, func(b *Bucket) { b.Limit, b.Watches = BanAfter(9, time.Hour), 1 })}
		})},
	}

	redis := newTestRedis(t, redistest.Start(t), func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	beginThere(t, redis, hourly(1))
	cell := func(store Store, b Bucket, call use) string {
		admitted := 0
		for range 6 {
			denied, err := call(store, b)
			if err != nil {
				for _, letter := range slices.Sorted(maps.Keys(errors)) {
					if text := err.Error(); strings.HasPrefix(text, "bucket ") && strings.Contains(text, errors[letter]) {
						return letter
					}
				}
				return err.Error()
			}
			if !denied {
				admitted++
			}
		}
		return fmt.Sprint(admitted)
	}
	got := new(strings.Builder)
	for i, u := range uses {
		fmt.Fprintf(got, "\n%s%s", strings.Repeat("|  ", i), u.name)
	}
	fmt.Fprintln(got)
	for _, l := range limits {
		for _, u := range uses {
			b := Bucket{Name: l.name + " " + u.name, Key: "k", Limit: l.limit, Cost: 1}
			here, there := cell(NewMemory(), b, u.use), cell(redis, b, u.use)
			if here != there {
				here += "/" + there
			}
			fmt.Fprintf(got, "%-3s", here)
		}
		fmt.Fprintln(got, l.name)
	}
	lines := strings.Split(want, "\n")
	for i, line := range strings.Split(got.String(), "\n") {
		if line != lines[min(i, len(lines)-1)] {
			t.Errorf("got\n%s\nwant\n%s", line, lines[min(i, len(lines)-1)])
		}
	}
}
