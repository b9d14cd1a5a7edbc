package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	ulule "github.com/ulule/limiter/v3"
	ululestore "github.com/ulule/limiter/v3/drivers/store/memory"
	"golang.org/x/time/rate"
)

// libraries are libraries that keep buckets in this process, each used as in its
// documentation. Once opened, a library has buckets for the given number of keys,
// with room for any number of requests.
var libraries = []struct {
	name string
	open func(b testing.TB, keys int) task
}{
	{"limiter", func(b testing.TB, keys int) task {
		store, of := newMemory(keys), buckets(1, open)
		fill(b, store, of, keys)
		return take(b, store, of, keys)
	}},
	{"x-time-rate", func(b testing.TB, keys int) task {
		var mu sync.Mutex
		limiters := make(map[string]*rate.Limiter)
		return asking(b, keys, func(key string) (bool, error) {
			mu.Lock()
			l, ok := limiters[key]
			if !ok {
				l = rate.NewLimiter(rate.Every(open.DripInterval), int(open.Size))
				limiters[key] = l
			}
			mu.Unlock()
			return l.Allow(), nil
		})
	}},
	{"go-limiter", func(b testing.TB, keys int) task {
		store, err := memorystore.New(&memorystore.Config{Tokens: uint64(open.Size), Interval: 24 * time.Hour})
		if err != nil {
			b.Fatal(err)
		}
		ctx := context.Background()
		b.Cleanup(func() { store.Close(ctx) })
		return asking(b, keys, func(key string) (bool, error) {
			_, _, _, ok, err := store.Take(ctx, key)
			return ok, err
		})
	}},
	{"throttled", func(b testing.TB, keys int) task {
		store, err := memstore.NewCtx(0)
		if err != nil {
			b.Fatal(err)
		}
		l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{
			MaxRate: throttled.PerDuration(1, open.DripInterval), MaxBurst: int(open.Size),
		})
		if err != nil {
			b.Fatal(err)
		}
		l.SetMaxCASAttemptsLimit(math.MaxInt) // it fails after ten, which two callers on one key can cause
		return asking(b, keys, func(key string) (bool, error) {
			limited, _, err := l.RateLimitCtx(context.Background(), key, 1)
			return !limited, err
		})
	}},
	{"ulule", func(b testing.TB, keys int) task {
		l := ulule.New(ululestore.NewStore(), ulule.Rate{Period: 24 * time.Hour, Limit: open.Size})
		return asking(b, keys, func(key string) (bool, error) {
			got, err := l.Get(context.Background(), key)
			return !got.Reached, err
		})
	}},
}

// asking has a library make its bucket for each key, and returns a task that sends
// requests for them.
func asking(b testing.TB, keys int, allow func(key string) (bool, error)) task {
	ask := func(key string) {
		if allowed, err := allow(key); err != nil || !allowed {
			wrong(b, "allowed %t, %v, want true", allowed, err)
		}
	}
	for _, k := range addresses()[:keys] {
		ask(k)
	}
	return func() func(int) {
		return func(i int) { ask(key(i, keys)) }
	}
}

// BenchmarkProcess sends requests for one limit to a store in this process, and to
// other libraries that have one. Two callers are enough for lock contention. The
// baseline is that of BenchmarkMemory.
func BenchmarkProcess(b *testing.B) {
	for _, library := range libraries {
		for _, keys := range []int{1, 100_000, 1_000_000} {
			b.Run(fmt.Sprintf("%s/keys=%d", library.name, keys), func(b *testing.B) {
				c := comparison{
					task:      library.open(b, keys),
					baselines: []baseline{{"hash", hashAndClock(buckets(1, open), keys)}},
				}
				for _, c.callers = range []int{1, 2} {
					b.Run(fmt.Sprintf("callers=%d", c.callers), c.run)
				}
			})
		}
	}
}

// BenchmarkProcessHeap makes the same libraries hold buckets for a million keys.
// B/key is the growth of the heap after a garbage collection, without the keys'
// text: that is the caller's, although all but the limiter keep references to it.
func BenchmarkProcessHeap(b *testing.B) {
	for _, library := range libraries {
		b.Run(library.name, func(b *testing.B) {
			keys := len(addresses())
			var grown uint64
			for b.Loop() {
				before := heap()
				opened := library.open(b, keys)
				grown += heap() - before
				runtime.KeepAlive(opened)
			}
			b.ReportMetric(float64(grown)/float64(b.N*keys), "B/key")
			b.ReportMetric(0, "ns/op") // it would be the time of the collector
		})
	}
}

// heap returns the number of bytes in use. The first collection runs due
// finalizers, for the second to collect.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
