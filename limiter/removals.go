package limiter

import (
	"slices"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// A server holds no more buckets than all processes together, because a process
// that evicts a bucket also removes it from the server, unless the server's level
// is higher than the process knew: then another process still uses the bucket.
// Removals are asynchronous: several form one query, which is sent with the next
// batch. The key of a removal that fails or is dropped expires when the bucket has
// drained.

const (
	// removeTogether is the maximum number of removals in one query, and
	// removeWithin the longest time that the first waits for others.
	removeTogether = 64
	removeWithin   = 100 * time.Millisecond

	// removing is the maximum number of calls of send in flight.
	removing = 16

	// removalsWaiting is the maximum number of removals waiting for a slow server.
	removalsWaiting = 1 << 14

	// drainsAnyway is the time, in µs, within which a bucket drains that is not
	// worth removing.
	drainsAnyway = 1_000_000
)

// add schedules the removal of b.
func (r *removals) add(b removal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting = append(r.waiting, b)
	r.flushSoon()
}

// flushSoon sends what waits, if that is enough for a query, or before long. The
// lock must be held.
func (r *removals) flushSoon() {
	switch {
	case len(r.waiting) >= removeTogether:
		r.flush()
	case len(r.waiting) > 0 && !r.timed:
		r.timed = true
		time.AfterFunc(removeWithin, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.timed = false
			r.flush()
		})
	}
}

// flush sends the waiting removals, unless too many calls are in flight. If too
// many are waiting, the oldest are dropped. The lock must be held.
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

// sent records that a call of send has ended.
func (r *removals) sent() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sending--
	r.flushSoon()
}

// remove removes buckets from their servers, unless this process holds them again.
func (r *servers) remove(buckets []removal) {
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
	end := redisscript.Deadline{At: time.Now().Add(r.timeout)}
	var q *query
	send := func() {
		if q == nil {
			return
		}
		all.Add(1)
		q.Done = func(error) { all.Done() }
		if r.client.Submit(end, &q.Call) != nil {
			all.Done()
		}
	}
	now := r.fallback.memory.clock().Microseconds()
	for i := range buckets {
		b := &buckets[i]
		if b.Clear-now < drainsAnyway || r.fallback.memory.holds(b) {
			continue
		}
		if q == nil || !r.client.OneServer() {
			send()
			q = &query{what: whatRemove, stage: ended}
			q.Owner = q
		}
		limit := b.partition.id.bucket()
		q.Keys = append(q.Keys, string(limit.appendRest(r.keys.appendDigest(nil, b.digest))))
		q.buckets = append(q.buckets, bucketQuery{limit: bucket.Limit(limit.Limit), local: localLevel{Ahead: b.Ahead(now), dirty: unsure}})
	}
	send()
}
