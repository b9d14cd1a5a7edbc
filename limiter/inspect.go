package limiter

import (
	"context"
	"fmt"
	"time"
)

// Peek returns the level of b's bucket in Redis. It changes nothing. While b's key
// has to share a bucket in this process, see Bucket.ShareKey, that one is looked
// at. The error wraps [ErrUnavailable] if the server does not answer in time.
func (r *Redis) Peek(ctx context.Context, b Bucket) (Level, error) {
	b, err := b.prepared()
	if err != nil {
		return Level{}, err
	}
	if shared, ok := r.sharedBy(b); ok {
		b = shared
	}
	return r.inspect(ctx, b, whatPeek)
}

// Reset empties b's bucket in Redis and in this process, which also forgets that
// it was full, and returns what it held in Redis, as Peek does. While b's key has
// to share a bucket in this process, that one is emptied too. Requests that are
// being decided meanwhile may or may not be charged.
//
// Other processes follow when Redis next decides a request of theirs for the
// bucket: within a second, if they get any. One that gets none until Redis fails or
// restarts uses what it knew before.
//
// After an outage, a restart of the server or one of its cluster's failovers, each
// process reports to the server what it knows of a bucket with its next request, and so
// may put back what was reset shortly before or after.
//
// The error wraps [ErrUnavailable] if the server does not answer in time. Then it
// is unknown whether the bucket was reset.
func (r *Redis) Reset(ctx context.Context, b Bucket) (Level, error) {
	b, err := b.prepared()
	if err != nil {
		return Level{}, err
	}
	shared, ok := r.sharedBy(b)
	level, err := r.reset(ctx, b)
	if err == nil && ok {
		level, err = r.reset(ctx, shared)
	}
	return level, err
}

// ResetHere empties b's bucket in this process alone, which also forgets that it was
// full: while its server does not answer, this process then decides as if the bucket
// were empty. While b's key has to share a bucket, that one is emptied too. A server
// that comes back with what it held counts that again.
func (r *Redis) ResetHere(b Bucket) error {
	b, err := b.prepared()
	if err != nil {
		return err
	}
	shared, ok := r.sharedBy(b)
	r.forget(&b, nil)
	if ok {
		r.forget(&shared, nil)
	}
	return nil
}

// sharedBy returns the bucket that b's key has to share in this process, if it has
// to.
func (r *Redis) sharedBy(b Bucket) (Bucket, bool) {
	if r.fallback == nil {
		return b, false
	}
	return r.fallback.memory.sharedBy(b)
}

// reset empties one bucket and returns what it held in Redis.
//
// A query in flight may report to the server what the bucket held, and so put it back.
// So the server empties it a second time, when no such query is left.
func (r *Redis) reset(ctx context.Context, b Bucket) (Level, error) {
	level, err := r.resetOnce(ctx, b)
	if err != nil || r.fallback == nil {
		return level, err
	}
	for end := time.Now().Add(2 * r.timeout); r.fallback.reportsEmptied(&b) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	_, err = r.resetOnce(ctx, b)
	return level, err
}

// resetOnce is reset without the second time.
func (r *Redis) resetOnce(ctx context.Context, b Bucket) (Level, error) {
	x := r.fallback.resetting(&b)
	defer r.fallback.wasReset(x)
	level, err := r.inspect(ctx, b, whatReset)
	if err == nil {
		r.forget(&b, x)
	}
	return level, err
}

// forget empties b's bucket in this process, except for what was charged since x was sent.
func (r *Redis) forget(b *Bucket, x *emptying) {
	r.fallback.empty(b, x)
	r.denyCache.forget(b, r.clock().Microseconds())
	r.leases.forget(b)
	r.reports.forget(b, x)
}

// inspect has a server peek at one bucket, or reset it, and returns what it held.
func (r *Redis) inspect(ctx context.Context, b Bucket, what byte) (Level, error) {
	end, now := r.deadline(ctx)
	if !now.Before(end.At) {
		return Level{}, fmt.Errorf("%w: %w", ErrUnavailable, errLate)
	}
	req := Request{Buckets: []Bucket{b}}
	q := r.keys.query(req, what)
	q.stage = ended
	_, outcomes, err := r.call(end, q, nil)
	if err != nil {
		return Level{}, fmt.Errorf("%w: %w", ErrUnavailable, err) // q may still be in flight
	}
	q.release()
	return b.inspected(outcomes[0].Ahead, outcomes[0].entries, outcomes[0].held), nil
}

// PeekHere returns what this process knows of b's bucket: its level in the
// Fallback, the zero Level if there is none, with what is in flight as Held; and
// whether this process remembers the bucket as full, and so denies requests without
// asking a server, which it never does if they count. It changes nothing.
func (r *Redis) PeekHere(b Bucket) (level Level, remembered bool, err error) {
	b, err = b.prepared()
	if err != nil {
		return Level{}, false, err
	}
	if shared, ok := r.sharedBy(b); ok {
		b = shared
	}
	now := r.clock().Microseconds()
	e, ok := r.denyCache.get(&b, now)
	remembered = ok && e.full(&b.Limit, now) && !b.Limit.CountDenied
	if f := r.fallback; f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		s, _ := f.memory.levelOf(&b)
		level = b.inspected(s, nil, f.units(f.memory.hash(&b), b.Limit.Size))
		level.Unreported = r.reports.unreported(&b)
	}
	level.Leased = r.leases.left(&b)
	return level, remembered, nil
}

// Ban is as that of a [Memory], on all nodes. The error wraps [ErrUnavailable] if the
// server does not answer in time: then the key is banned in this process, if there is a
// Fallback, which reports it to the server later.
func (r *Redis) Ban(ctx context.Context, b Bucket, d time.Duration) error {
	b, s, err := b.banned(d)
	if err != nil {
		return err
	}
	r.fallback.raise(&b, s)
	end, _ := r.deadline(ctx)
	q := r.query(Request{Buckets: []Bucket{b}}, byte(AccountingAtomic))
	q.buckets[0].local = localLevel{Ahead: s, dirty: own} // if there is no fallback, which would
	if _, _, err = r.call(end, q, nil); err != nil {
		r.fallback.drop(q)
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	q.release()
	return nil
}
