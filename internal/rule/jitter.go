package rule

import (
	"hash/maphash"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Jitter makes waits in denials longer than they need be, so that clients which were denied
// together do not return together.
type Jitter struct {
	Share float64 // of a wait, up to which it is longer at random, as zones have it; 0 for slots

	seed maphash.Seed

	mu   sync.Mutex
	told [1 << 10]toldSlot // by the hashes of buckets
}

// toldSlot is the slot of a bucket that was told last. It is lost if that of another bucket needs
// its place: then some clients return together.
type toldSlot struct {
	bucket uint64 // the hash of its name and key
	at     time.Time
}

// mostSpread is how much longer the wait for a slot is at most.
const mostSpread = time.Minute

// NewJitter returns a Jitter of random shares, or of slots if the share is 0.
func NewJitter(share float64) *Jitter { return &Jitter{Share: share, seed: maphash.MakeSeed()} }

// longer returns the wait to tell a request that e denied, which is to wait this long at least.
func (j *Jitter) longer(q *Request, e *outcome.Entry, wait time.Duration) time.Duration {
	switch {
	case j.Share > 0:
		more := rand.Float64() * j.Share * float64(wait) //nolint:gosec // not a secret
		if more >= float64(math.MaxInt64-wait) {
			return math.MaxInt64
		}
		return wait + time.Duration(more)
	case e.Decision.By == limiter.DecidedByLoad: // which is random
		return wait
	}
	var h maphash.Hash
	h.SetSeed(j.seed)
	_, _ = h.WriteString(e.Name)
	_ = h.WriteByte(0)
	_, _ = h.WriteString(q.keyNamed(e.Name))
	return j.next(h.Sum64(), wait, slotTime(e), time.Now())
}

// next returns the wait at now for the next slot of a bucket, which is one step after the last one
// that was told. Beyond mostSpread it begins anew.
func (j *Jitter) next(bucket uint64, wait, step time.Duration, now time.Time) time.Duration {
	j.mu.Lock()
	defer j.mu.Unlock()
	last, first := &j.told[bucket%uint64(len(j.told))], now.Add(wait)
	at := last.at.Add(step)
	if last.bucket != bucket || at.Before(first) || at.Sub(first) > mostSpread {
		at = first
	}
	*last = toldSlot{bucket, at}
	return at.Sub(now)
}

// slotTime returns the time from one slot of e's bucket to the next: until there is room for the
// same request again. The room that is there at once when a window begins is spread over the
// window, and that of requests in progress over the time after which to look again. Where that is
// longer than slots may be apart, a second keeps clients apart.
func slotTime(e *outcome.Entry) (step time.Duration) {
	l := (*bucket.Limit)(&e.Limit)
	share := float64(max(e.Cost, 1)) / float64(max(e.Decision.Size, 1))
	switch {
	case e.Concurrency:
		step = time.Duration(float64(retrySlot) * share)
	case l.Algorithm.DripSize() > 0:
		step = time.Duration(float64(l.DripInterval) * share)
	default:
		step = l.DripTime(max(e.Cost, 1))
	}
	if step > mostSpread {
		return time.Second
	}
	return step
}
