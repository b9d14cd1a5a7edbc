package limiter

import (
	"context"
	"fmt"
)

// A bucket is cleared by a request that holds units of it, in one call that empties it, except for
// what is held. What this process was charged before is sent before that, on the same connection, so
// the server has it by then. Any process then learns the level from the answer to its next request,
// and none remembers the bucket as full while a request holds units of it, see outcome.mayBeLetGo.

// clear implements holder.
func (h *heldHere) clear(ctx context.Context) error {
	h.settle(0)
	return h.memory.clear(ctx, h.Bucket)
}

// clear implements charger.
func (m *Memory) clear(_ context.Context, b Bucket) error {
	if !b.shared {
		m.empty(&b)
	}
	return nil
}

// clear implements holder.
func (k *reservation) clear(ctx context.Context) error {
	k.settle(0)
	return k.store.clear(ctx, k.bucket)
}

// clear implements charger. What is in doubt, since its call was not answered, may be charged after it.
func (r *servers) clear(ctx context.Context, b Bucket) (err error) {
	if b.shared { // others' units are in it
		return nil
	}
	b.reservedAs, b.Hold, b.Pool, b.Borrows, b.Watches, b.Cost = 0, false, false, false, 0, 0
	q := r.query(Request{Buckets: []Bucket{b}}, whatClear)
	q.stage = ended
	if end, now := r.deadline(ctx); now.Before(end.At) {
		_, _, err = r.call(end, q, nil)
	} else {
		err = errLate
	}
	if err != nil {
		r.fallback.empty(&b, nil)
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	} else {
		q.release()
	}
	r.denyCache.forget(&b, r.clock().Microseconds())
	return err
}
