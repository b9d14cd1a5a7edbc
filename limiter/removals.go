package limiter

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// A server holds no more buckets than the nodes together do, because a node that
// forgets a bucket removes it there too, unless the server knows of more than the
// node did: then another node still asks for it. Nobody waits for that. Removals
// travel with the next call, some in one query. Those that nobody takes are
// dropped; their buckets leave when they have drained.

const (
	// removeTogether is how many removals are one query, and removeWithin how
	// long the first waits for others.
	removeTogether = 64
	removeWithin   = 100 * time.Millisecond

	// removing is how many queries may be on their way.
	removing = 16

	// removalsWaiting is how many removals may wait, for a server that is slow.
	removalsWaiting = 1 << 14

	// drainsAnyway is the time, in µs, within which a bucket drains that is not
	// worth a removal.
	drainsAnyway = 1_000_000
)

// removal is a bucket that was forgotten, and what it held.
type removal struct {
	partition *partition
	hash      uint64
	digest    keyDigest
	state
}

// removals collects what a store has to remove.
type removals struct {
	send func([]removal)

	mu      sync.Mutex
	waiting []removal
	sending int // how many calls of send there are
	timed   bool
}

// add has b removed before long.
func (r *removals) add(b removal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting = append(r.waiting, b)
	switch {
	case len(r.waiting) >= removeTogether:
		r.flush()
	case !r.timed:
		r.timed = true
		time.AfterFunc(removeWithin, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.timed = false
			r.flush()
		})
	}
}

// flush sends what waits, as far as not too much is on its way. Of too much that
// waits the oldest is dropped. The lock must be held.
func (r *removals) flush() {
	for len(r.waiting) > 0 && r.sending < removing {
		n := min(len(r.waiting), removeTogether)
		r.sending++
		go r.send(slices.Clone(r.waiting[:n]))
		r.waiting = r.waiting[n:]
	}
	if n := len(r.waiting) - removalsWaiting; n > 0 {
		r.waiting = r.waiting[n:]
	}
}

// sent records that a call of send is over.
func (r *removals) sent() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sending--
	if len(r.waiting) >= removeTogether {
		r.flush()
	}
}

// remove removes buckets from their servers that are not held here again.
func (r *Redis) remove(buckets []removal) {
	var all sync.WaitGroup
	defer func() {
		go func() {
			all.Wait()
			r.fallback.removals.sent()
		}()
	}()
	if r.closed.Load() {
		return
	}
	ctx := redisscript.WithDeadline(time.Now().Add(r.timeout), false)
	var q *query
	var group []byte
	ask := func() {
		if q == nil {
			return
		}
		binary.BigEndian.PutUint16(group[2:], uint16(len(q.Keys))) //nolint:gosec // at most removeTogether
		q.plain = string(group)
		q.Arg = q.plain
		all.Add(1)
		q.Done = func(error) { all.Done() }
		if r.client.Submit(ctx, &q.Call) != nil {
			all.Done()
		}
	}
	now := r.fallback.memory.clock().Microseconds()
	for i := range buckets {
		b := &buckets[i]
		if b.clear-now < drainsAnyway || r.fallback.memory.holds(b) {
			continue
		}
		if q == nil || !r.client.OneServer() {
			ask()
			q = new(query)
			q.Owner, q.abandoned = q, true // nothing is decided by it
			group = []byte{0, 1, 0, 0, whatRemove}
		}
		limit := b.partition.id.bucket()
		q.Keys = append(q.Keys, string(limit.appendRest(r.keys.appendDigest(nil, b.digest))))
		group = appendNumbers(group, b.clear-now, b.slack, limit.Limit.rate())
	}
	ask()
}

// holds reports whether m has a bucket of the removal's identity.
func (m *Memory) holds(r *removal) bool {
	t := &r.partition.tables[r.hash%tables]
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.has(r.hash)
}
