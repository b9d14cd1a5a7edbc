package limiter

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestSentinel tests a server that is found by sentinels: by two failovers, of
// which the second follows the master's death, it is soon decided by the new
// one, and meanwhile here. Nobody waits longer than he may.
func TestSentinel(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	sentinel := redistest.StartSentinelAuth(t, "watcher", "of-sentinels", "--requirepass", "of-servers")
	var seen events
	memory := NewMemory(nil)
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
			t.Errorf("after %d requests it is said to hold %d", requests, got)
		}
	}
	// decides waits until the server decides all requests.
	decides := func(server *redistest.Server, within time.Duration) {
		t.Helper()
		waitFor(t, within, func() error {
			before := server.CommandStat(t, "evalsha")
			for range 10 {
				take()
			}
			if n := server.CommandStat(t, "evalsha") - before; n < 10 {
				return fmt.Errorf("%d of 10 requests decided, reported %q", n, seen.take())
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
	got := seen.take()
	if len(got) == 0 {
		t.Error("nothing was reported of an outage")
	}
	if got := storedUnits(t, r, sentinel.Master, b); got > requests || got < requests-20 {
		t.Errorf("%d units after %d requests", got, requests)
	}
	if worst > 2*timeout {
		t.Errorf("waited %v, may wait %v", worst, timeout)
	}
}

// TestSentinelFailures tests what an operator is told where sentinels can't be
// asked, or do not know the name.
func TestSentinelFailures(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.MasterName = []string{server.Addr}, "no sentinel's"
	})
	began := time.Now()
	_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(5)}}, nil)
	checkError(t, err, server.Addr, "no sentinel's")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("waited %v", took)
	}
}

// TestSentinelsFail tests sentinels that fail while their server is well: one
// that hangs costs little time, and without any of them the connections there
// are stay and serve all.
func TestSentinelsFail(t *testing.T) {
	t.Parallel()
	sentinel := redistest.StartSentinel(t)
	first := redistest.StartProxy(t, sentinel.Sentinels[0].Addr)
	second := redistest.StartProxy(t, sentinel.Sentinels[1].Addr)
	b := hourly(100_000)
	const size, callers = 20, 40
	var seen events
	start := func(t *testing.T, timeout time.Duration) (*Redis, *server) {
		t.Helper()
		second.Refuse() // so that the first is asked
		r := newTestRedis(t, sentinel.Master, func(opt *RedisOptions) {
			opt.Addresses, opt.MasterName = []string{first.Addr, second.Addr}, redistest.MasterName
			opt.PoolSize, opt.Timeout, opt.Report = size, timeout, seen.report
		})
		s := r.servers.(*single).server
		r.Connect()
		waitFor(t, 5*time.Second, func() error {
			if s.made.Load() == 0 {
				return errors.New("not connected")
			}
			return nil
		})
		second.Pass()
		return r, s
	}

	t.Run("one hangs", func(t *testing.T) {
		r, s := start(t, 50*time.Millisecond)
		first.BlackHole()
		defer first.Pass()
		began := time.Now()
		if err := sentinel.Master.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err(); err != nil {
			t.Fatal(err)
		}
		failed := 0
		for {
			_, err := r.Take(t.Context(), Request{Buckets: []Bucket{b}}, nil)
			if took := time.Since(began); took > 3500*time.Millisecond {
				t.Fatalf("not decided for %v: %v", took, err)
			}
			if err == nil && !s.guard.isLost() {
				break
			}
			failed++
			time.Sleep(5 * time.Millisecond)
		}
		if failed == 0 {
			t.Error("no request failed: the test shows nothing")
		}
	})

	t.Run("none is left", func(t *testing.T) {
		r, server := start(t, 10*time.Second)
		for _, s := range sentinel.Sentinels {
			s.Kill()
		}
		failToConnect(t, server)
		seen.take()
		before := second.Connections()
		made, decided := busy(t, r, callers, b)
		if decided != made {
			t.Errorf("%d of %d requests decided", decided, made)
		}
		checkFewDials(t, int64(second.Connections()-before))
		for _, event := range seen.take() {
			if !strings.HasPrefix(event, "lapse ") {
				t.Errorf("reported %q", event)
			}
		}
	})
}
