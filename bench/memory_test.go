package bench

import (
	"fmt"
	"hash/maphash"
	"runtime"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkMemory takes requests from the store of this process. The baseline,
// x-hash, is what no such store can do without: to hash name and key of each
// bucket, and to read the clock.
func BenchmarkMemory(b *testing.B) {
	for _, keys := range []int{1, 100_000, 1_000_000} {
		for _, n := range []int{1, 2, 8} {
			for _, limit := range []limiter.Limit{open, shut} {
				b.Run(fmt.Sprintf("keys=%d/buckets=%d/%s", keys, n, verdict(limit)), func(b *testing.B) {
					store, of := limiter.NewMemory(nil), buckets(n, limit)
					fill(b, store, of, keys)
					c := comparison{
						task:      take(b, store, of, keys),
						baselines: []baseline{{"hash", hashAndClock(of, keys)}},
					}
					for _, c.callers = range []int{1, runtime.GOMAXPROCS(0)} {
						b.Run(fmt.Sprintf("callers=%d", c.callers), c.run)
					}
				})
			}
		}
	}
}

// verdict names a limit by how it decides.
func verdict(limit limiter.Limit) string {
	if limit == shut {
		return "denied"
	}
	return "allowed"
}

// hashAndClock returns a task that hashes what take's would, and reads the
// clock.
func hashAndClock(of []limiter.Bucket, keys int) task {
	seed, start := maphash.MakeSeed(), time.Now()
	return func() func(int) {
		return func(i int) {
			k, sum := key(i, keys), uint64(0)
			for j := range of {
				sum ^= maphash.String(seed, of[j].Name) ^ maphash.String(seed, k)
			}
			runtime.KeepAlive(sum)
			runtime.KeepAlive(time.Since(start))
		}
	}
}

// BenchmarkMemoryHeap puts a million keys into an empty store. B/key is what
// the heap has grown by when garbage is collected, the keys' text not counted:
// that is the caller's.
func BenchmarkMemoryHeap(b *testing.B) {
	of, keys := buckets(1, open), len(addresses())
	var grown uint64
	for b.Loop() {
		before := heap()
		store := limiter.NewMemory(nil)
		fill(b, store, of, keys)
		grown += heap() - before
		if store.Len() != keys {
			b.Fatalf("%d buckets, want %d", store.Len(), keys)
		}
	}
	b.ReportMetric(float64(grown)/float64(b.N*keys), "B/key")
	b.ReportMetric(0, "ns/op") // it would be that of the collector
}

// heap returns how many bytes are in use.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
