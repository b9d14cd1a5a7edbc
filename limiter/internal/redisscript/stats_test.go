package redisscript

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestStats guards the state of a server through an outage: its counters, its
// breaker, its connections, and that Stats works after Close.
func TestStats(t *testing.T) {
	server := redistest.Start(t)
	c := newTestClient(t, server, nil)
	stats := func() Stats {
		t.Helper()
		all := c.Stats()
		if len(all) != 1 || all[0].Address != server.Addr {
			t.Fatalf("stats %+v", all)
		}
		return all[0]
	}
	if s := stats(); s.State != Connecting || s.Breaker != "closed" || s.Calls != 0 || s.Idle+s.InUse+s.Connecting != 0 || len(s.Failures) != 0 {
		t.Errorf("before anything was sent: %+v", s)
	}
	for range 3 {
		mustCount(t, c, upTo(100))
	}
	if s := stats(); s.Calls != 3 || s.Requests != 3 || s.Idle < 1 || s.InUse != 0 || !s.DownSince.IsZero() || s.Reason != "" {
		t.Errorf("after three calls: %+v", s)
	}
	server.Pause(t)
	var waits sync.WaitGroup
	waits.Go(func() { mustCount(t, c, upTo(100)) })
	redistest.WaitFor(t, 5*time.Second, func() error {
		if s := stats(); s.InUse != 1 || s.Idle != 0 {
			return fmt.Errorf("with a call in flight: %+v", s)
		}
		return nil
	})
	server.Resume(t)
	waits.Wait()
	redistest.Together(t, 64, func(int) {
		for range 20 {
			mustCount(t, c, upTo(1e6))
		}
	})
	busy := stats()
	if busy.Requests != 4+64*20 || busy.Calls >= busy.Requests || busy.Calls <= 3 {
		t.Errorf("after many concurrent calls: %+v", busy)
	}

	began := time.Now()
	server.Kill()
	for range 10 {
		_, _ = c.count(t.Context(), upTo(100))
	}
	s := stats()
	if s.State != Down || s.Breaker != "open" || s.DownSince.Before(began) || s.DownSince.After(time.Now()) || s.Idle != 0 {
		t.Errorf("while it is down: %+v", s)
	}
	if s.Failures[s.Reason] == 0 || s.Failures["refused"]+s.Failures["closed"] < 5 {
		t.Errorf("reason %q, failures %v", s.Reason, s.Failures)
	}
	s.Failures["refused"] = 1e6
	if stats().Failures["refused"] == 1e6 {
		t.Error("the caller has the map of the counters")
	}

	server.Restart(t)
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, err := c.count(t.Context(), upTo(100))
		return err
	})
	redistest.WaitFor(t, 5*time.Second, func() error {
		if s := stats(); s.State != Up || s.Breaker != "closed" || !s.DownSince.IsZero() || s.Reason != "" || s.Requests <= busy.Requests {
			return fmt.Errorf("after its recovery: %+v", s)
		}
		return nil
	})
	before := stats()
	_ = c.Close()
	_, _ = c.count(t.Context(), upTo(100))
	if s := stats(); s.Requests < before.Requests || s.Failures["refused"] != before.Failures["refused"] || s.Idle+s.InUse+s.Connecting != 0 {
		t.Errorf("after Close %+v, before %+v", s, before)
	}
}

// TestStatsHalfOpen guards the name of each state of a breaker, and that a server
// that is being probed is not up.
func TestStatsHalfOpen(t *testing.T) {
	b := newBreaker("server", nil)
	now := time.Now()
	b.now = func() time.Time { return now }
	for range openAfter {
		b.failure(newFailure("server", time.Second, context.DeadlineExceeded))
	}
	now = now.Add(time.Hour)
	if probe, err := b.allow(); !probe || err != nil {
		t.Fatalf("probe %t, error %v", probe, err)
	}
	if s := b.stats(); s.State != Down || s.Breaker != "half_open" || s.Reason != "timeout" || s.Failures["timeout"] != openAfter {
		t.Errorf("%+v", s)
	}
	b.success(true)
	if s := b.stats(); s.State == Down || s.Breaker != "closed" {
		t.Errorf("%+v", s)
	}
}

// TestStatsCluster guards which servers are listed: all of them as one until they
// are known, then each master, and no longer one that has left.
func TestStatsCluster(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	c := newTestClient(t, nodes.Nodes[0], func(opt *Options) { opt.Cluster = true })
	if all := c.Stats(); len(all) != 1 || all[0].Address != nodes.Nodes[0].Addr || all[0].State != Connecting {
		t.Errorf("before the servers are known: %+v", all)
	}
	addresses := func() []string {
		var names []string
		for _, s := range c.Stats() {
			names = append(names, s.Address)
		}
		return names
	}
	all := nodes.Addrs()
	slices.Sort(all)
	redistest.WaitFor(t, 5*time.Second, func() error {
		_, err := c.count(t.Context(), upTo(100))
		return err
	})
	if got := addresses(); !slices.Equal(got, all) {
		t.Errorf("servers %q, want %q", got, all)
	}
	for n := range int64(50) {
		mustCount(t, c, numbered(n))
	}
	total := uint64(0)
	for _, s := range c.Stats() {
		if total += s.Requests; s.Requests == 0 || s.Requests != s.Calls || s.State != Up {
			t.Errorf("%+v", s)
		}
	}
	if total != 51 {
		t.Errorf("%d requests, want 51", total)
	}

	gone := nodes.Nodes[2]
	nodes.Remove(t, gone)
	all = slices.DeleteFunc(all, func(addr string) bool { return addr == gone.Addr })
	redistest.WaitFor(t, 20*time.Second, func() error {
		for n := range int64(50) {
			_, _ = c.count(t.Context(), numbered(n))
		}
		if got := addresses(); !slices.Equal(got, all) {
			return fmt.Errorf("servers %q, want %q", got, all)
		}
		return nil
	})
	_ = c.Close()
	if got := addresses(); !slices.Equal(got, all) {
		t.Errorf("after Close servers %q, want %q", got, all)
	}
}
