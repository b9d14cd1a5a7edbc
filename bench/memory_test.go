package bench

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"io"
	"runtime"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkMemory sends requests to a store in this process. The baseline, x-hash,
// is what every such store has to do: hash the name and key of each bucket, and
// read the clock.
func BenchmarkMemory(b *testing.B) {
	for _, keys := range []int{1, 1_000_000} {
		for _, n := range []int{1, 8} {
			for _, limit := range []limiter.Limit{open, shut} {
				b.Run(fmt.Sprintf("keys=%d/buckets=%d/%s", keys, n, verdict(limit)), func(b *testing.B) {
					store, of := newMemory(n*keys), buckets(n, limit)
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

// newMemory returns a store that is far from full with the given number of
// buckets: a full one looks for drained ones.
func newMemory(buckets int) *limiter.Memory {
	store := limiter.NewMemory()
	store.SetMaxKeys(2 * buckets)
	return store
}

// verdict names a limit by its decision.
func verdict(limit limiter.Limit) string {
	if limit == shut {
		return "denied"
	}
	return "allowed"
}

// hashAndClock returns a task that hashes what take's task would, and reads the
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

// BenchmarkMemoryRestart saves a million buckets, and loads them into another store.
func BenchmarkMemoryRestart(b *testing.B) {
	const keys = 1_000_000
	store := newMemory(keys)
	fill(b, store, buckets(1, open), keys)
	var file bytes.Buffer
	if saved, err := store.Save(&file); err != nil || saved.Buckets != keys {
		b.Fatal(saved, err)
	}
	b.Run("save", func(b *testing.B) {
		for b.Loop() {
			if _, err := store.Save(io.Discard); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("load", func(b *testing.B) {
		for b.Loop() {
			if loaded, err := newMemory(keys).Load(bytes.NewReader(file.Bytes())); err != nil || loaded.Buckets != keys {
				b.Fatal(loaded, err)
			}
		}
	})
}
