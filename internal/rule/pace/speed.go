// Package pace sends responses at the speed that limits allow. A speed denies nothing: a bucket counts the
// bytes, and what it has no room for waits until it has. The package knows nothing of limits but their
// buckets.
//
// Bytes are charged before they are written, piece by piece, to all buckets of a response in one step. So
// no more is written in any time than each of them admits, and a response that waits has been charged
// nothing. A piece for which a bucket has no room waits in a queue of that bucket, in this process, and
// only the first one there asks again.
package pace

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const (
	leastPiece = 2 << 10  // of one response while others wait, unless it has less to send
	mostPiece  = 64 << 10 // what Caddy writes at once

	// leastTime is how much of the speed a piece has at least, so that a key has no more than a thousand a
	// second: each is a system call, and wakes a goroutine.
	leastTime = time.Millisecond

	// turnTime is the time in which all responses that wait for a bucket have a turn, as far as pieces
	// can be made small enough.
	turnTime = 100 * time.Millisecond

	// LeastSize is the smallest size of a bucket, in bytes: there is room for a piece and two drips of any
	// sensible speed, or drips would be lost while pieces wait.
	LeastSize = 16 << 10
)

// Numbers are the numbers of a speed.
type Numbers struct {
	Bucket      limiter.Bucket // of all responses, except for the key
	AddressName string         // the bucket's name if the client's address replaces the key
	Most, Least int64          // bytes of a piece; Least if others wait
}

// SetPieces sets how many bytes a piece has, and reports whether the size of the bucket is large enough.
func (n *Numbers) SetPieces(speed option.Rate) bool {
	size := n.Bucket.Limit.Size
	in := func(d time.Duration) int64 {
		bytes := min(float64(speed.Units)*float64(d)/float64(speed.Each), mostPiece)
		return min(max(int64(bytes), leastPiece), size/8)
	}
	n.Most, n.Least = in(turnTime), in(leastTime)
	return size >= LeastSize
}

// Limit is a limit with a speed.
type Limit struct {
	Numbers
	Speed    *Speed
	Counters *telemetry.Counters
}

// Use has all responses of l's name keep to its numbers, from their next piece on: also those that began
// when others were in force.
func (l *Limit) Use() { l.Speed.inForce.Store(&l.Numbers) }

// Speed is what the limits of one name have in common over all configs: the numbers in force, and the
// responses that are sent by them.
type Speed struct {
	inForce atomic.Pointer[Numbers] // nil until a config that runs has said them

	mu     sync.Mutex
	queues map[bucketKey]*queue
}

// bucketKey identifies a bucket, as stores do.
type bucketKey struct {
	name, key string
	interval  time.Duration
	drip      int64
}

// NewSpeed returns a Speed without responses.
func NewSpeed() *Speed { return &Speed{queues: make(map[bucketKey]*queue)} }

// State returns how many responses wait, of how many clients, and the most of one client.
func (s *Speed) State() (state telemetry.Waiting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.queues {
		of := make(map[string]int)
		q.mu.Lock()
		for _, w := range q.waiting {
			of[w.client]++
		}
		q.mu.Unlock()
		for _, n := range of {
			state.Requests, state.Clients, state.Longest = state.Requests+n, state.Clients+1, max(state.Longest, n)
		}
	}
	return state
}

// enter returns the queue of a bucket for one response more.
func (s *Speed) enter(key bucketKey) *queue {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[key]
	if q == nil {
		q = &queue{last: make(map[string]int64), most: leastClients}
		s.queues[key] = q
	}
	q.responses++
	return q
}

// leave returns a queue for one response less.
func (s *Speed) leave(key bucketKey, q *queue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.responses--; q.responses == 0 {
		delete(s.queues, key)
	}
}
