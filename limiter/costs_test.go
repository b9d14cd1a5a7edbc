package limiter

import (
	"fmt"
	"math/bits"
	"testing"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/costtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// The tests in this file guard what a request costs. Each ceiling is the present
// figure: lower it when the code gets better, and if it must get worse, raise it in the
// commit that says why.

// TestSizes guards the sizes of what is copied or kept for each bucket of each request.
// A word more in one of them slowed requests with many buckets by some percent.
func TestSizes(t *testing.T) {
	costtest.Sizes(t, []costtest.Size{
		{Of: "Limit", Size: unsafe.Sizeof(Limit{}), Ceiling: 40, Why: "it is part of a Bucket"},
		{Of: "Bucket", Size: unsafe.Sizeof(Bucket{}), Ceiling: 120, Why: "one is copied for each bucket of a request, and cleared after it"},
		{Of: "Decision", Size: unsafe.Sizeof(Decision{}), Ceiling: 56, Why: "one is filled in for each bucket of a request"},
		{Of: "outcome", Size: unsafe.Sizeof(outcome{}), Ceiling: 56, Why: "one is filled in for each bucket of a request of several"},
		{Of: "location", Size: unsafe.Sizeof(location{}), Ceiling: 72, Why: "one is filled in for each bucket of a request of several, and it is part of an asked"},
		{Of: "bucketQuery", Size: unsafe.Sizeof(bucketQuery{}), Ceiling: 192, Why: "one is kept for each bucket of a request while Redis decides"},
		{Of: "slot", Size: unsafe.Sizeof(slot{}), Ceiling: 24, Why: "one is kept for each bucket in this process, with the room of a table that is not full"},
		{Of: "table", Size: unsafe.Sizeof(table{}), Ceiling: 64, Why: "a cache line: a larger one would share it with its neighbour"},
	})
}

// costly returns a store in this process and a request of n buckets, as many with each
// key, that it always admits.
func costly(n int) (*Memory, Request) {
	req := Request{}
	for i := range n {
		req.Buckets = append(req.Buckets, Bucket{
			Name: fmt.Sprint("limit", i), Key: "203.0.113.77", Cost: 1,
			Limit: Limit{Size: 1 << 40, DripInterval: time.Microsecond, DripSize: 1},
		})
	}
	return NewMemory(), req
}

// TestTakeAllocations guards that a decision in this process allocates nothing,
// however many limits a site has: with garbage, requests wait for its collection.
func TestTakeAllocations(t *testing.T) {
	racetest.SingleGoroutine(t)
	for _, tc := range []struct {
		buckets int
		ceiling float64
	}{
		{1, 0}, {2, 0}, {8, 0}, {16, 0}, {32, 0}, {64, 0},
	} {
		t.Run(fmt.Sprint(tc.buckets), func(t *testing.T) {
			m, req := costly(tc.buckets)
			dst := make([]Decision, 0, tc.buckets)
			n := testing.AllocsPerRun(1000, func() { dst, _ = m.Take(t.Context(), req, dst[:0]) })
			if n > tc.ceiling {
				t.Errorf("%v allocations, the ceiling is %v", n, tc.ceiling)
			}
		})
	}
}

// TestSharedTakeAllocations guards that a decision of Redis allocates no more for many
// limits than for one. What is left belongs to a batch, which has as many requests as
// there are callers: here one.
func TestSharedTakeAllocations(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	racetest.SingleGoroutine(t)
	const ceiling, ceilingBytes = 3, 184
	server := redistest.Start(t)
	for _, tc := range []struct {
		buckets int
		secret  string
	}{
		{1, ""}, {2, ""}, {8, ""}, {16, ""}, {32, ""}, {64, ""}, {1, "secret"}, {64, "secret"},
	} {
		t.Run(fmt.Sprint(tc.buckets, tc.secret), func(t *testing.T) {
			m, req := costly(tc.buckets)
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback, opt.KeySecret = m, tc.secret })
			dst := make([]Decision, 0, tc.buckets)
			take := func() {
				var err error
				if dst, err = r.Take(t.Context(), req, dst[:0]); err != nil || dst[0].By != DecidedByRedis {
					t.Fatal(dst, err)
				}
			}
			if n := testing.AllocsPerRun(1000, take); n > ceiling {
				t.Errorf("%v allocations, the ceiling is %v", n, ceiling)
			}
			if n := costtest.Bytes(take, func() {}); n > ceilingBytes {
				t.Errorf("%d bytes, the ceiling is %d", n, ceilingBytes)
			}
		})
	}
}

// TestTimedTakeTime guards that a decision in this process does not become slower: what it
// takes is most of what a handler adds to a request with many limits.
func TestTimedTakeTime(t *testing.T) {
	racetest.SingleGoroutine(t)
	var tasks []costtest.Task
	for _, tc := range []struct {
		buckets int
		ceiling float64
	}{
		{1, 3.9}, {8, 36.8}, {32, 142}, {64, 284},
	} {
		if bits.UintSize == 32 { // where arithmetic of 64 bits takes several instructions
			tc.ceiling *= 2.5
		}
		m, req := costly(tc.buckets)
		dst := make([]Decision, 0, tc.buckets)
		tasks = append(tasks, costtest.Task{
			Name:    fmt.Sprint(tc.buckets, " buckets"),
			Run:     func() { dst, _ = m.Take(t.Context(), req, dst[:0]) },
			Ceiling: tc.ceiling,
		})
	}
	costtest.Check(t, tasks)
}
