package limiter

import (
	"context"
	"fmt"
	"time"
)

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
	_, outcomes, err := r.call(end, q, nil)
	if err != nil {
		r.fallback.drop(q)
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	r.answered(q, outcomes)
	q.release()
	return nil
}
