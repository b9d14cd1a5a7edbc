package bench

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkArithmetic decides requests on one bucket under a clock that stands
// still. It includes finding the bucket, which is the same in all cases; the
// differences come from the arithmetic on the bucket's numbers. The baseline is
// that of BenchmarkMemory.
func BenchmarkArithmetic(b *testing.B) {
	stopped := func() time.Duration { return time.Hour }
	thirds := open
	thirds.DripSize = 3
	for _, bc := range []struct {
		name   string
		bucket limiter.Bucket
	}{
		{"drip_size=1", limiter.Bucket{Limit: open, Cost: 1}},
		{"drip_size=3", limiter.Bucket{Limit: thirds, Cost: 1}},
		{"denied", limiter.Bucket{Limit: shut, Cost: 1}},
	} {
		b.Run(bc.name, func(b *testing.B) {
			bc.bucket.Name, bc.bucket.Cost = "api/limit-0", 1
			store, of := limiter.NewMemoryWithClock(stopped), []limiter.Bucket{bc.bucket}
			fill(b, store, of, 1)
			comparison{
				callers:   1,
				task:      take(b, store, of, 1),
				baselines: []baseline{{"hash", hashAndClock(of, 1)}},
			}.run(b)
		})
	}
}

// BenchmarkSummarize combines several decisions into one.
func BenchmarkSummarize(b *testing.B) {
	for _, n := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("buckets=%d", n), func(b *testing.B) {
			buckets, decisions := make([]limiter.Bucket, n), make([]limiter.Decision, n)
			for i := range decisions {
				decisions[i] = limiter.Decision{Size: 10, Remaining: int64(n - i)}
				buckets[i].Cost = 1
			}
			b.ReportAllocs()
			for b.Loop() {
				limiter.Summarize(buckets, decisions)
			}
		})
	}
}
