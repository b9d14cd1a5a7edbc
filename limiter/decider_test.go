package limiter

import (
	"slices"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// deciders returns what decided on each bucket.
func deciders(decisions []Decision) []string {
	var names []string
	for _, d := range decisions {
		names = append(names, d.By.String())
	}
	return names
}

// checkDeciders checks what decides on each bucket of a request.
func checkDeciders(t testing.TB, store Store, req Request, want ...string) {
	t.Helper()
	d, err := store.Take(t.Context(), req, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := deciders(d); !slices.Equal(got, want) {
		t.Errorf("decided by %q, want %q: %+v", got, want, d)
	}
}

// TestDeciders guards what a Decision says has decided, for requests with one and
// with several buckets, that are sent alone and in batches.
func TestDeciders(t *testing.T) {
	t.Parallel()
	one := Request{Buckets: []Bucket{hourly(100)}}
	other := hourly(1)
	other.Name = "other"
	two := Request{Buckets: []Bucket{hourly(100), other}}

	t.Run("memory", func(t *testing.T) {
		m := NewMemoryWithClock(frozen)
		for range 2 { // of an absent bucket, and of one that exists
			checkDeciders(t, m, one, "memory")
		}
		checkDeciders(t, m, two, "memory", "memory")
		checkDeciders(t, m, two, "memory", "memory") // denied
	})
	t.Run("redis", func(t *testing.T) {
		server := redistest.Start(t)
		r, _ := testNode(t, server)
		checkDeciders(t, r, one, "redis")
		checkDeciders(t, r, two, "redis", "redis")
		checkDeciders(t, r, two, "remembered", "remembered")
		checkDeciders(t, r, Request{Buckets: two.Buckets[1:]}, "remembered")
		checkDeciders(t, r, one, "redis")
		each := two
		each.Accounting = AccountingEach
		checkDeciders(t, r, each, "redis", "redis")
		before := r.Stats()[0]
		redistest.Together(t, 32, func(int) {
			for range 20 {
				checkDeciders(t, r, Request{Buckets: []Bucket{hourly(100_000)}}, "redis")
			}
		})
		if after := r.Stats()[0]; after.Calls-before.Calls >= after.Requests-before.Requests {
			t.Errorf("nothing was batched: %+v", after)
		}
		server.Kill()
		for range manyFailures {
			forgetOnce(r)
			checkDeciders(t, r, one, "fallback")
			checkDeciders(t, r, two, "fallback", "fallback")
		}
	})
	t.Run("cluster", func(t *testing.T) {
		nodes := redistest.StartCluster(t, 3)
		r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback, opt.Timeout = NewMemory(), time.Second })
		var req Request
		for _, node := range nodes.Nodes {
			req.Buckets = append(req.Buckets, onNode(t, r, nodes, node, hourly(1000)))
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			_, err := r.Peek(t.Context(), req.Buckets[0])
			return err
		})
		checkDeciders(t, r, req, "redis", "redis", "redis")
		nodes.Nodes[1].Kill()
		for range manyFailures {
			checkDeciders(t, r, req, "redis", "fallback", "redis")
			req.Buckets[0], req.Buckets[1] = req.Buckets[1], req.Buckets[0]
			checkDeciders(t, r, req, "fallback", "redis", "redis")
			req.Buckets[0], req.Buckets[1] = req.Buckets[1], req.Buckets[0]
		}
	})
}
