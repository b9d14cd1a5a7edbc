package replay

import (
	"context"
	"math"
	"math/bits"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// roomyStore charges requests to limits that have the largest size that is valid. As
// long as it denies nothing, the highest level of a bucket is the size that it takes
// never to deny its key. The store is the one that decides, so this holds whatever
// the algorithm.
type roomyStore struct {
	memory  *limiter.Memory
	largest map[limiter.Limit]int64 // valid sizes, by the limit with size 0

	buckets   []limiter.Bucket
	decisions []limiter.Decision
	levels    []level
	held      *limiter.Held // of the last request
}

// level is what a bucket holds after a request.
type level struct {
	units int64         // report.NoSize if no size has room for them
	clear time.Duration // until it is empty
}

// maxLargest is the most limits whose largest size is kept: each request may have
// numbers of its own.
const maxLargest = 1000

// newRoomyStore returns a store for the given number of keys of all limits.
func newRoomyStore(clock func() time.Duration, keys int) *roomyStore {
	r := &roomyStore{memory: limiter.NewMemoryWithClock(clock), largest: make(map[limiter.Limit]int64)}
	r.memory.SetMaxKeys(keys)
	return r
}

// fill charges a request to buckets, and returns the level of each. They are valid
// until the next call. What the request holds has to be settled by r.held.
func (r *roomyStore) fill(buckets []limiter.Bucket) ([]level, error) {
	r.buckets, r.held = append(r.buckets[:0], buckets...), nil
	for i := range r.buckets {
		b := &r.buckets[i]
		if b.Hold && r.held == nil {
			r.held = new(limiter.Held)
		}
		if b.Limit.Algorithm != bucket.WarmUp { // which has no size
			b.Limit.Size = r.largestSize(b.Limit)
		}
		b.MaxKeys, b.ShareKey = maxReplayedKeys, ""
	}
	var err error
	r.decisions, err = r.memory.Take(context.Background(), limiter.Request{
		Buckets:    r.buckets,
		Accounting: limiter.AccountingEach,
		Held:       r.held,
	}, r.decisions[:0])
	r.levels = r.levels[:0]
	for i := range r.decisions {
		d := &r.decisions[i]
		l := level{d.Size - d.Remaining, d.Clear}
		if d.Denied {
			l.units = report.NoSize
		}
		r.levels = append(r.levels, l)
	}
	return r.levels, err
}

// largestSize returns the largest size with which l is valid.
func (r *roomyStore) largestSize(l limiter.Limit) int64 {
	l.Size = 0
	size, known := r.largest[l]
	if !known {
		if len(r.largest) == maxLargest {
			clear(r.largest)
		}
		size = bucket.Limit(l).LargestSize()
		r.largest[l] = size
	}
	return size
}

// roundedPeak rounds a peak up to one of a few hundred values, by less than 4 %, but
// not beyond the size if the peak is not.
func roundedPeak(units, size int64) int64 {
	if rounded := roundUp(units); units > size || rounded < size {
		return rounded
	}
	return size
}

// roundUp rounds what is above 64 up, by less than 4 %.
func roundUp(units int64) int64 {
	shift := max(bits.Len64(uint64(units))-6, 0)
	step := int64(1) << shift
	if units > math.MaxInt64-step {
		return report.NoSize
	}
	return (units + step - 1) / step * step
}
