package limiter

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// newBatched returns a store whose server is far away, so that concurrent requests
// are batched. It has no deny cache: the server decides every request.
func newBatched(t testing.TB, server *redistest.Server, change func(*RedisOptions)) *Redis {
	t.Helper()
	p := redistest.StartProxy(t, server.Addr)
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses = []string{p.Addr}
		if change != nil {
			change(opt)
		}
	})
	mustTake(t, r, Request{Buckets: []Bucket{{Name: "first", Limit: Limit{Size: 1, DripInterval: time.Hour, DripSize: 1}, Cost: 1}}})
	p.Delay(20 * time.Millisecond)
	var now atomic.Int64
	r.clock = func() time.Duration { return time.Duration(now.Add(int64(time.Hour))) }
	return r
}

// TestBatchedRequestsAreExact guards that batched requests are decided one after
// the other: many concurrent requests to one bucket are admitted up to its size,
// to the unit, and charge other buckets according to their Accounting.
func TestBatchedRequestsAreExact(t *testing.T) {
	const requests, size = 100, 30
	server := redistest.Start(t)
	for _, tc := range []struct {
		name       string
		accounting Accounting
		drip, cost int64
		keys       int
		other      int64 // the size of another bucket, if there is one
		held       int64 // units in the other bucket
	}{
		{name: "one bucket", drip: 1, cost: 1, keys: 1},
		{name: "one bucket with slack", drip: 7, cost: 3, keys: 1},
		{name: "several keys", drip: 1, cost: 1, keys: 3},
		{name: "atomic", drip: 1, cost: 1, keys: 1, other: 1000, held: size},
		{name: "atomic, other is full first", drip: 1, cost: 1, keys: 1, other: 20, held: 20},
		{name: "each", accounting: AccountingEach, drip: 1, cost: 1, keys: 1, other: 1000, held: requests},
		{name: "each with slack", accounting: AccountingEach, drip: 4, cost: 3, keys: 2, other: 1000, held: requests / 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushDB(t.Context()))
			r := newBatched(t, server, nil)
			request := func(i int) Request {
				b := Bucket{Name: "b", Key: fmt.Sprint(i % tc.keys), Limit: Limit{Size: size, DripInterval: time.Hour, DripSize: tc.drip}, Cost: tc.cost}
				req := Request{Buckets: []Bucket{b}, Accounting: tc.accounting}
				if tc.other > 0 {
					b.Name, b.Limit, b.Cost = "other", Limit{Size: tc.other, DripInterval: time.Hour, DripSize: 1}, 1
					req.Buckets = append(req.Buckets, b)
				}
				return req
			}
			admitted := make([]atomic.Int64, tc.keys)
			c := redistest.CommandCounter{Server: server}
			c.Since(t, "evalsha")
			redistest.Together(t, requests, func(i int) {
				d, err := r.Take(t.Context(), request(i), nil)
				if err != nil {
					t.Error(err)
				} else if !Denied(d) {
					admitted[i%tc.keys].Add(1)
				}
			})
			if n := c.Since(t, "evalsha"); n > requests/4 {
				t.Errorf("%d calls for %d requests: the test covers too little", n, requests)
			}
			want := int64(size) / tc.cost
			if tc.other > 0 {
				want = min(want, tc.other)
			}
			for key := range tc.keys {
				if got := admitted[key].Load(); got != want {
					t.Errorf("key %d: admitted %d, want %d", key, got, want)
				}
				req := request(key)
				if got := storedUnits(t, r, server, req.Buckets[0]); got != want*tc.cost {
					t.Errorf("key %d: %d units, want %d", key, got, want*tc.cost)
				}
				if tc.other > 0 {
					if got := storedUnits(t, r, server, req.Buckets[1]); got != tc.held {
						t.Errorf("key %d: the other bucket holds %d, want %d", key, got, tc.held)
					}
				}
			}
		})
	}
}

// TestDirtyLevelCountsOnce guards that when batched requests report the level of a
// dirty bucket to a server after an outage, the level counts only once.
func TestDirtyLevelCountsOnce(t *testing.T) {
	t.Parallel()
	const before, requests = 30, 20
	server := redistest.Start(t)
	r := newBatched(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	b, other := hourly(100), hourly(100_000)
	other.Name = "other"
	server.Kill()
	for range before {
		mustTake(t, r, Request{Buckets: []Bucket{b}})
	}
	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		mustTake(t, r, Request{Buckets: []Bucket{other}})
		if server.Client().Exists(t.Context(), r.keys.of(&other)).Val() == 0 {
			return errors.New("not decided by the server")
		}
		return nil
	})
	redistest.Together(t, requests, func(int) {
		if d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil); err != nil || d[0].Denied {
			t.Errorf("decided %+v, error %v", d, err)
		}
	})
	if got := storedUnits(t, r, server, b); got != before+requests {
		t.Errorf("%d units, want %d", got, before+requests)
	}
}

// TestWrongRepliesDecideNothing guards that a server which answers a batch with
// too many or too few numbers decides no request, because it is unknown which
// number belongs to which request. The error is reported, and does not count as an
// outage.
func TestWrongRepliesDecideNothing(t *testing.T) {
	const requests = 30
	server := redistest.Start(t)
	for _, script := range []string{
		"return {}",
		"return {1, 0}",
		"local r = {} for i = 1, 2 * #KEYS - 1 do r[i] = 0 end return r",
		"local r = {} for i = 1, 2 * #KEYS + 2 do r[i] = 0 end return r",
	} {
		t.Run(script, func(t *testing.T) {
			var seen events
			r := newRedis(RedisOptions{Addresses: []string{server.Addr}, Timeout: 10 * time.Second, Report: seen.report},
				newScript(script))
			defer r.Close()
			redistest.Together(t, requests, func(i int) {
				if script == "return {1, 0}" && i > 0 {
					return // a batch of one would get the right answer
				}
				b := numbered(int64(i))
				req := Request{Buckets: []Bucket{b}}
				if script == "return {1, 0}" {
					other := b
					other.Name = "other"
					req.Buckets = append(req.Buckets, other)
				}
				d, err := r.Take(context.Background(), req, nil)
				if len(d) > 0 {
					t.Errorf("decided %+v", d)
				}
				checkError(t, err, server.Addr)
				if reason := reasonOf(t, err); reason != "corrupt" {
					t.Errorf("reason %q: %v", reason, err)
				}
			})
			seen.check(t, "error corrupt")
		})
	}
}
