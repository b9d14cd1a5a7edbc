package advice

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// drawLimit returns a small limit of any kind that fits knows.
func drawLimit(random *rand.Rand) limiter.Limit {
	n, d := 1+random.Int64N(12), time.Duration(1+random.IntN(12))*time.Second
	switch random.IntN(6) {
	case 0:
		return limiter.FixedWindow(n, d)
	case 1:
		return limiter.ClockWindow(n, d, time.Unix(0, 0))
	case 2:
		return limiter.SlidingLog(n, d)
	case 3:
		return limiter.SlidingWindow(n, d)
	case 4:
		l := bucket.Limit(limiter.Every(d).WithBurst(n))
		l.DripSize = 1 + random.Int64N(3)
		return limiter.Limit(l)
	}
	return limiter.Every(d).WithBurst(n)
}

// TestFits guards that a limit which is said to deny nothing by itself denies no request that a
// tighter one, which gets others too, admits.
func TestFits(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(testseed.Base(), 0))
	fitting := make(map[bucket.Algorithm]int)
	for range 3000 {
		a, b := drawLimit(random), drawLimit(random)
		if !fits(bucket.Limit(a), 0, bucket.Limit(b)) {
			continue
		}
		fitting[b.Algorithm]++
		now := time.Duration(random.Int64N(int64(time.Hour)))
		memory := limiter.NewMemoryWithClock(func() time.Duration { return now })
		pause := 1 + random.Int64N(int64(3*time.Second))
		for range 100 {
			now += time.Duration(random.Int64N(pause))
			cost := 1 + random.Int64N(2)
			asked := []limiter.Bucket{{Name: "a", Limit: a, Cost: cost}, {Name: "b", Limit: b, Cost: cost}}
			if random.IntN(4) == 0 {
				asked = asked[:1]
			}
			got, err := memory.Take(t.Context(), limiter.Request{Buckets: asked}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) > 1 && got[1].Denied && !got[0].Denied {
				t.Fatalf("%+v denies what %+v admits", b, a)
			}
		}
	}
	for _, algorithm := range []bucket.Algorithm{bucket.Leaky, bucket.Fixed, bucket.Log, bucket.Sliding} {
		if fitting[algorithm] < 20 {
			t.Errorf("only %d limits of algorithm %v fit", fitting[algorithm], algorithm)
		}
	}
}
