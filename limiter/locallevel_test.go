package limiter

import (
	"errors"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestLocalLevels is the worked example of docs/internals/architecture.md: two nodes with a bucket of
// six, a reply that is lost, and a server that restarts empty. What a node tells is joined
// to what the server has, as the higher of both, so nothing is charged twice.
func TestLocalLevels(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	node := func(addr string) *Redis {
		return newTestRedis(t, server, func(opt *RedisOptions) { opt.Addresses, opt.Fallback = []string{addr}, NewMemory() })
	}
	a, b, bucket := node(proxy.Addr), node(server.Addr), hourly(6)
	call := func(step string, r *Redis, denied bool, by Decider, remaining, here, there int64) {
		t.Helper()
		decisions, err := r.Take(t.Context(), Request{Buckets: []Bucket{bucket}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		d := decisions[0]
		if d.Denied != denied || d.By != by || d.Remaining != remaining {
			t.Errorf("%s: %+v, want denied %t by %v, with %d remaining", step, d, denied, by, remaining)
		}
		if l, _ := peekHere(t, r, bucket); l.Units != here {
			t.Errorf("%s: the node knows %d units, want %d", step, l.Units, here)
		}
		if l := peek(t, b, bucket); l.Units != there {
			t.Errorf("%s: the server has %d units, want %d", step, l.Units, there)
		}
	}
	call("A asks", a, false, DecidedByRedis, 5, 1, 1)
	call("A asks again", a, false, DecidedByRedis, 4, 2, 2)
	call("B asks", b, false, DecidedByRedis, 3, 3, 3)
	proxy.CutReplies("evalsha")
	call("the reply to A is lost", a, false, DecidedByFallback, 3, 3, 4)
	proxy.Pass()
	connected := func() {
		t.Helper()
		redistest.WaitFor(t, 5*time.Second, func() error {
			if a.Stats()[0].Idle == 0 || b.Stats()[0].Idle == 0 {
				return errors.New("a node is not connected again")
			}
			return nil
		})
	}
	connected()
	call("A tells 3", a, false, DecidedByRedis, 1, 5, 5)
	server.Kill()
	server.Restart(t)
	connected()
	call("B tells 3 to a server that has lost all", b, false, DecidedByRedis, 2, 4, 4)
	call("A tells 5", a, false, DecidedByRedis, 0, 6, 6)
	call("B asks a server that knows what A knows", b, true, DecidedByRedis, 0, 6, 6)
}
