package limiter

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestTimedSentinel guards a server that is found by sentinels: after each of two
// failovers, the second of which follows the master's death, the new master soon
// decides, and until then this process does. No request waits longer than its
// timeout.
func TestTimedSentinel(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	sentinel := redistest.StartSentinelAuth(t, "watcher", "of-sentinels", "--requirepass", "of-servers")
	var seen events
	memory := NewMemory()
	r := newTestRedis(t, sentinel.Master, func(opt *RedisOptions) {
		opt.Addresses, opt.MasterName = sentinel.SentinelAddrs(), redistest.MasterName
		opt.SentinelUsername, opt.SentinelPassword, opt.Password = "watcher", "of-sentinels", "of-servers"
		opt.Fallback, opt.Report, opt.Timeout = memory, seen.report, timeout
	})
	b := hourly(100_000)
	requests, worst := int64(0), time.Duration(0)
	take := func() {
		t.Helper()
		began := time.Now()
		d := mustTake(t, r, Request{Buckets: []Bucket{b}})
		worst = max(worst, time.Since(began))
		requests++
		if got := d[0].Size - d[0].Remaining; got > requests || got < requests-20 {
			t.Errorf("after %d requests it is reported to hold %d", requests, got)
		}
	}
	// decides waits until the server decides all requests.
	decides := func(server *redistest.Server, within time.Duration) {
		t.Helper()
		redistest.WaitFor(t, within, func() error {
			before := server.CommandStat(t, "evalsha")
			for range 10 {
				take()
			}
			if n := server.CommandStat(t, "evalsha") - before; n < 10 {
				return fmt.Errorf("%d of 10 requests decided", n)
			}
			return nil
		})
	}
	decides(sentinel.Master, 5*time.Second)

	sentinel.Failover(t)
	decides(sentinel.Replica, 5*time.Second)
	if got := storedUnits(t, r, sentinel.Replica, b); got > requests || got < requests-20 {
		t.Errorf("%d units after %d requests", got, requests)
	}

	seen.take()
	sentinel.Replica.Kill()
	decides(sentinel.Master, 20*time.Second)
	redistest.WaitFor(t, 5*time.Second, func() error {
		if len(seen.take()) == 0 {
			return errors.New("no event was reported about the outage")
		}
		return nil
	})
	if got := storedUnits(t, r, sentinel.Master, b); got > requests || got < requests-20 {
		t.Errorf("%d units after %d requests", got, requests)
	}
	if got := peek(t, r, b); got.Units > requests || got.Units < requests-20 {
		t.Errorf("peeked at %+v after %d requests", got, requests)
	}
	if _, err := r.Reset(t.Context(), b); err != nil {
		t.Error(err)
	}
	if got := peek(t, r, b); got.Units != 0 {
		t.Errorf("after a reset it holds %+v", got)
	}
	if all := r.Stats(); len(all) != 1 || all[0].State != ServerUp || !strings.HasPrefix(all[0].Address, redistest.MasterName+" of the sentinels at ") {
		t.Errorf("stats %+v", all)
	}
	if worst > 2*timeout {
		t.Errorf("waited %v, want at most %v", worst, timeout)
	}
}
