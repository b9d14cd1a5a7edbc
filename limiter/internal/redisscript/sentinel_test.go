package redisscript

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestSentinelFailures guards what an operator learns if sentinels are
// unreachable or do not know the name.
func TestSentinelFailures(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	r := newTestClient(t, server, func(opt *Options) {
		opt.Addresses, opt.MasterName = []string{server.Addr}, "no sentinel's"
	})
	began := time.Now()
	_, err := r.count(t.Context(), upTo(5))
	checkError(t, err, server.Addr, "no sentinel's")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("waited %v", took)
	}
}

// TestSentinelsFail guards sentinels that fail while their server is healthy: one
// that hangs costs little time, and without any of them the existing connections
// stay and serve all calls.
func TestSentinelsFail(t *testing.T) {
	t.Parallel()
	sentinel := redistest.StartSentinel(t)
	first := redistest.StartProxy(t, sentinel.Sentinels[0].Addr)
	second := redistest.StartProxy(t, sentinel.Sentinels[1].Addr)
	b := upTo(100_000)
	const callers = 40
	var seen events
	start := func(t *testing.T, timeout time.Duration) (*testClient, *Server) {
		t.Helper()
		second.Refuse() // so that the first is called
		r := newTestClient(t, sentinel.Master, func(opt *Options) {
			opt.Addresses, opt.MasterName = []string{first.Addr, second.Addr}, redistest.MasterName
			opt.Timeout, opt.Report = timeout, seen.report
		})
		s := r.server()
		r.Connect()
		redistest.WaitFor(t, 5*time.Second, func() error {
			if !s.pipeline.healthy() {
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
		redistest.Done(t, sentinel.Master.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal"))
		failed := 0
		for {
			_, err := r.count(t.Context(), b)
			if took := time.Since(began); took > 3500*time.Millisecond {
				t.Fatalf("not decided for %v: %v", took, err)
			}
			if err == nil && !s.breaker.isOpen() {
				break
			}
			failed++
			time.Sleep(5 * time.Millisecond)
		}
		if failed == 0 {
			t.Error("no request failed: the test proves nothing")
		}
	})

	t.Run("none is left", func(t *testing.T) {
		r, _ := start(t, 10*time.Second)
		for _, s := range sentinel.Sentinels {
			s.Kill()
		}
		seen.take()
		before := second.Connections()
		redistest.Together(t, callers, func(int) {
			for range 20 {
				mustCount(t, r, b)
			}
		})
		if dials := second.Connections() - before; dials > 0 {
			t.Errorf("%d attempts to connect", dials)
		}
		for _, event := range seen.take() {
			if !strings.HasPrefix(event, "error ") {
				t.Errorf("reported %q", event)
			}
		}
	})
}
