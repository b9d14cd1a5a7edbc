package limiter

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestShortReplies guards a server that replies fewer numbers than it should
// for: the request is not decided by them, in time, whether it is sent directly or
// on the first connection; and a late reply to a call that holds units does no
// harm.
func TestShortReplies(t *testing.T) {
	t.Parallel()
	several := func(keys ...string) Request {
		var req Request
		for i, key := range keys {
			b := hourly(5)
			b.Name, b.Key = fmt.Sprint("b", i), key
			req.Buckets = append(req.Buckets, b)
		}
		return req
	}
	for _, tc := range []struct {
		name, script string
		req          Request
		cluster      bool
		wait         time.Duration
	}{
		{"fewer than keys", "return {1, 1}", several("k", "k", "k"), false, time.Second},
		{"one", "return {1}", several("k", "k"), false, time.Second},
		{"odd", "return {1, 1, 1}", several("k", "k"), false, time.Second},
		{"late, to a hold", `
			if #ARGV == 0 then return {} end
			local t = redis.call('TIME')
			local from = t[1] * 1e6 + t[2]
			repeat t = redis.call('TIME') until t[1] * 1e6 + t[2] > from + 200000
			return {1}`, several("x", "yy"), true, 100 * time.Millisecond},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			opt := RedisOptions{KeyPrefix: "rl:", Timeout: time.Second, Fallback: NewMemory()}
			if tc.cluster {
				opt.Addresses = redistest.StartCluster(t, 3).Addrs()
			} else {
				opt.Addresses = []string{redistest.Start(t).Socket}
			}
			r := newRedis(opt, newScript(tc.script))
			defer r.Close()
			for range 3 {
				done := make(chan error, 1)
				go func() {
					ctx, cancel := context.WithTimeout(context.Background(), tc.wait)
					defer cancel()
					_, err := r.Take(ctx, tc.req, nil)
					done <- err
				}()
				select {
				case err := <-done:
					if err != nil {
						t.Error(err)
					}
				case <-time.After(10 * time.Second):
					t.Fatal("it takes far longer than it may")
				}
				time.Sleep(300 * time.Millisecond) // until a late reply has arrived
			}
		})
	}
}
