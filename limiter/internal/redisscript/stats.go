package redisscript

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Stats is the state of a server, and what has happened on it since the Client was
// opened.
type Stats struct {
	// The server's address.
	Address string

	// Whether it represents all servers of a cluster, which are not known yet.
	Cluster bool

	// Connecting, Up or Down.
	State string

	// The state of its breaker: "closed", "open" or "half_open".
	Breaker string

	// When it went down, and the reason for its last failure, as in Event; zero
	// unless it is Down. Err is nil too if it has only fallen silent.
	DownSince time.Time
	Reason    string
	Err       error

	// Connections that are idle, in use, and being made.
	Idle, InUse, Connecting int

	// The number of times that the script was run, and of Calls that it was run
	// for.
	Calls, Requests uint64

	// The number of failures by Reason.
	Failures map[string]uint64
}

// The states of a server. While it is idle it is pinged every few seconds, so that its state
// is known without asking.
const (
	Connecting = "connecting" // it has not answered yet, and has not failed
	Up         = "up"         // it has answered within the last ten seconds
	Down       = "down"       // its breaker is open, or it has not answered for ten seconds
)

// Stats returns the state of each server, sorted by address. Until the servers of
// a cluster are known, it has one entry for all of them. It does not block.
func (c *Client) Stats() []Stats {
	all := c.topology.stats()
	slices.SortFunc(all, func(a, b Stats) int { return cmp.Compare(a.Address, b.Address) })
	return all
}

// counts has the numbers of what happens on the server at one address.
type counts struct {
	runs, calls atomic.Uint64

	mu       sync.Mutex
	failures map[string]uint64 // by reason, of which there are few
}

// ran records a number of runs of the script, for a number of calls.
func (c *counts) ran(runs, calls int) {
	c.runs.Add(uint64(runs))   // not negative
	c.calls.Add(uint64(calls)) // not negative
}

// failed records a failure.
func (c *counts) failed(f *ServerError) {
	if f.reason == unused {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failures == nil {
		c.failures = make(map[string]uint64)
	}
	c.failures[f.reason]++
}

// stats returns the state of the breaker and what was counted.
func (b *breaker) stats() Stats {
	s := Stats{Address: b.server, Calls: b.counts.runs.Load(), Requests: b.counts.calls.Load()}
	b.counts.mu.Lock()
	s.Failures = maps.Clone(b.counts.failures)
	b.counts.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	s.State, s.Breaker = Connecting, b.is().String()
	if b.isOpen() {
		s.State, s.DownSince, s.Reason, s.Err = Down, b.openedAt, b.last.reason, b.last
	}
	return s
}

// stats returns the state of the server.
func (s *Server) stats() Stats {
	stats := s.breaker.stats()
	if s.isClosed() {
		return stats
	}
	stats.Idle, stats.InUse = s.pipeline.connections()
	if s.dialing.Load() {
		stats.Connecting = 1
	}
	switch heard := s.pipeline.lastHeard(); {
	case stats.State == Down || heard.IsZero():
	case time.Since(heard) < upFor:
		stats.State = Up
	default:
		stats.State, stats.DownSince, stats.Reason = Down, heard, "timeout"
	}
	return stats
}
