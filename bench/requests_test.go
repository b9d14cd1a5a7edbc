package bench

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

var (
	// open has room for any number of requests: no benchmark fills it.
	open = limiter.Limit{Size: 1 << 40, DripInterval: time.Millisecond, DripSize: 1}

	// shut has room for one request, and then for none while a benchmark runs.
	shut = limiter.Limit{Size: 1, DripInterval: 24 * time.Hour, DripSize: 1}
)

// hour is the cost after which an open bucket takes an hour to drain. Each bucket
// starts with it, so that buckets in use are measured, not drained ones.
const hour = 3_600_000

// addresses are typical keys of limits.
var addresses = sync.OnceValue(func() []string {
	all := make([]string, 1_000_000)
	for i := range all {
		all[i] = fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
	}
	return all
})

// key returns the key of the i-th request: one of the first n addresses, in an
// order that no cache can predict.
func key(i, n int) string {
	return addresses()[uint32(i)*2654435761%uint32(n)]
}

// buckets returns n buckets with different names, as in a request with n limits on
// one key.
func buckets(n int, limit limiter.Limit) []limiter.Bucket {
	all := make([]limiter.Bucket, n)
	for i := range all {
		all[i] = limiter.Bucket{Name: fmt.Sprintf("api/limit-%d", i), Limit: limit, Cost: 1}
	}
	return all
}

// take returns a task that sends requests for the given buckets to a store, each
// for one of the given number of keys.
func take(b testing.TB, store limiter.Store, of []limiter.Bucket, keys int) task {
	denied := of[0].Limit == shut
	return func() func(int) {
		req := limiter.Request{Buckets: slices.Clone(of)}
		decisions := make([]limiter.Decision, 0, len(of))
		return func(i int) {
			k := key(i, keys)
			for j := range req.Buckets {
				req.Buckets[j].Key = k
			}
			got, err := store.Take(context.Background(), req, decisions)
			if err != nil || got[0].Denied != denied {
				wrong(b, "got %+v, %v, want denied %t", got, err, denied)
			}
		}
	}
}

// fill brings the buckets of so many keys into the state that is measured.
func fill(b testing.TB, store limiter.Store, of []limiter.Bucket, keys int) {
	b.Helper()
	const callers = 16
	calls := make([]func(int), callers)
	for c := range calls {
		req := limiter.Request{Buckets: slices.Clone(of)}
		calls[c] = func(i int) {
			for j := range req.Buckets {
				req.Buckets[j].Key = addresses()[i]
				if req.Buckets[j].Limit == open {
					req.Buckets[j].Cost = hour
				}
			}
			if _, err := store.Take(context.Background(), req, nil); err != nil {
				wrong(b, "%v", err)
			}
		}
	}
	call(calls, 0, keys)
	if b.Failed() {
		b.FailNow()
	}
}

// wrong fails a benchmark for an unexpected answer, which means that something
// else was measured. Only the first such answer is reported.
func wrong(b testing.TB, format string, args ...any) {
	b.Helper()
	if !b.Failed() {
		b.Errorf(format, args...)
	}
}
