package limiter

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// banned returns b with its default values filled in, and its level if it is banned for d
// from now on; or an error if it can't be.
func (b Bucket) banned(d time.Duration) (Bucket, bucket.Ahead, error) {
	b, err := b.prepared()
	switch {
	case err != nil:
	case b.Limit.Algorithm != bucket.Bans:
		err = fmt.Errorf("bucket %q: its limit must be made by BanAfter", b.Name)
	case d < time.Microsecond || d.Microseconds() > MaxUnits:
		err = fmt.Errorf("ban of %v: must be from 1µs to 17 years", d)
	}
	return b, bucket.Ahead{Clear: d.Microseconds() + b.Limit.DripSize, Rest: b.Limit.Size}, err
}

// Ban bans b's key for d, unless it is banned for longer already, as if its first ban had
// begun. b's Limit is made by [BanAfter].
func (m *Memory) Ban(_ context.Context, b Bucket, d time.Duration) error {
	b, s, err := b.banned(d)
	if err == nil {
		m.raise(&b, s, clean)
		m.sweep(m.clock().Microseconds())
	}
	return err
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
	_, outcomes, err := r.call(end, q, nil)
	if err != nil {
		r.fallback.drop(q)
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	r.answered(q, outcomes)
	q.release()
	return nil
}
