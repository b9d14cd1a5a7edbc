package limiter

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestConsistencyIsValid guards which buckets have to be exact: a request is refused on which
// a process may not decide locally.
func TestConsistencyIsValid(t *testing.T) {
	const role, counted = "a bucket with Hold, Watches, Borrows or Pool has to be exact", "limits that count denied requests have to be exact"
	limit := PerSecond(100)
	counts := limit
	counts.CountDenied = true
	for _, c := range []Consistency{Lease(time.Second), Eventual(time.Second)} {
		for want, buckets := range map[string][]Bucket{
			"":                                {{Limit: limit}, {Limit: FixedWindow(100, time.Minute)}, {Limit: SlidingWindow(100, time.Minute)}},
			role:                              {{Limit: limit, Hold: true}, {Limit: limit, Watches: 1}, {Limit: limit, Borrows: true}, {Limit: limit, Pool: true}},
			counted:                           {{Limit: counts}},
			"log limits have to be exact":     {{Limit: SlidingLog(100, time.Minute)}},
			"warm-up limits have to be exact": {{Limit: warmingUp(1, time.Second, 10*time.Second, 3)}},
			"bans limits have to be exact":    {{Limit: BanAfter(1, time.Minute)}},
		} {
			for _, b := range buckets {
				b.Name, b.Key, b.Cost, b.Consistency = "b", "k", 1, c
				_, err := NewMemory().Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
				if got := fmt.Sprint(err); want == "" && err != nil || !strings.Contains(got, want) && want != "" || want == role && !errors.Is(err, errConsistency) {
					t.Errorf("%v, %+v: got %v, want %q", c, b, err, want)
				}
			}
		}
	}
	for _, d := range []time.Duration{0, MinConsistency - time.Microsecond, MaxConsistency + time.Microsecond, time.Hour} {
		for _, c := range []Consistency{Lease(d), Eventual(d)} {
			if err := c.Validate(limit); err == nil {
				t.Errorf("%v is accepted", c)
			}
		}
	}
}

// TestEventualNeedsFallback guards that a Redis without a Fallback does not decide exactly,
// and so with a wait for the server, what is to be eventual, but says what is missing: also
// if another bucket of the request would be decided by a server in any case.
func TestEventualNeedsFallback(t *testing.T) {
	eventual := Bucket{Name: "b", Key: "k", Limit: PerSecond(10), Cost: 1, Consistency: Eventual(time.Second)}
	exact := Bucket{Name: "exact", Key: "k", Limit: PerSecond(10), Cost: 1}
	leased := Bucket{Name: "leased", Key: "k", Limit: PerSecond(10), Cost: 1, Consistency: Lease(time.Second)}
	const want = `bucket "b": eventual 1s: a Redis without a Fallback knows nothing to decide by: set RedisOptions.Fallback, or use a Lease`
	server := redistest.Start(t)
	for _, buckets := range [][]Bucket{{eventual}, {exact, eventual}, {leased, eventual}} {
		if _, err := newTestRedis(t, server, nil).Take(t.Context(), Request{Buckets: buckets}, nil); err == nil || err.Error() != want {
			t.Errorf("%d buckets: got error %v, want %s", len(buckets), err, want)
		}
		with := newTestRedis(t, server, func(o *RedisOptions) { o.Fallback = NewMemory() })
		if _, err := with.Take(t.Context(), Request{Buckets: buckets}, nil); err != nil {
			t.Errorf("%d buckets, with a fallback: %v", len(buckets), err)
		}
	}
}
