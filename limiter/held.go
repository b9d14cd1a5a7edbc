package limiter

import (
	"context"
	"sync"
)

// Held has the units that one request holds, of its Buckets with Hold, until their
// outcome is known. Its zero value is ready for use in one [Request].
type Held struct {
	mu           sync.Mutex
	settle       []settling     // by the index of the bucket
	reservations []*reservation // what Redis stores hold for it
}

// settling is how to settle what one bucket holds, and the most that this may charge.
type settling struct {
	by   holder // nil if it holds nothing
	most int64
}

// holder is what a request holds of one bucket.
type holder interface {
	// settle releases it, and charges that many units.
	settle(charge int64)

	// clear releases it, and empties the bucket, except for what others hold.
	clear(ctx context.Context) error
}

// Settle ends that the bucket with the given index in the Request holds units, and
// charges that many of them, which need not be as many: 0 releases them. More than the
// bucket has room for overfills it, by its size at most. It does nothing if the bucket
// holds none, as after a denial, or was settled before. Settle does not wait: what a
// server has to do is sent with the next requests.
//
// Of a bucket with a Cost of 0 this charge is the only one. If it is not known whether its
// server has made it, it becomes a part of the level that this process knows, like that of a
// request without an answer: it is never made twice, and lost only with the process, or
// without a Fallback.
//
// A [Concurrency] limit is charged nothing, whatever charge is.
//
// Each bucket has to be settled at some time, whatever becomes of the request.
func (h *Held) Settle(bucket int, charge int64) {
	if s := h.release(bucket); s.by != nil {
		s.by.settle(min(max(charge, 0), s.most))
	}
}

// Clear is Settle with a charge of 0, and empties the bucket, as after a login that succeeds. What
// other requests hold of it stays held, and what they are charged in the end is charged. It waits
// for the server, no longer than a request would: after that the bucket is empty for all processes.
//
// The error wraps [ErrUnavailable] if the server does not answer in time. Then the bucket is empty in
// this process, and the server may still have what it held. A shared bucket, see Bucket.ShareKey, is
// not emptied: others' units are in it.
func (h *Held) Clear(ctx context.Context, bucket int) error {
	if s := h.release(bucket); s.by != nil {
		return s.by.clear(ctx)
	}
	return nil
}

// release returns how to settle what a bucket holds, which from then on it does not.
func (h *Held) release(bucket int) (s settling) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if bucket < len(h.settle) {
		s, h.settle[bucket] = h.settle[bucket], settling{}
	}
	return s
}

// hold records how to settle what the i-th of some buckets holds. More than its cost, or twice
// its size, it can't be charged: with that an empty bucket has a debt of its size. What is larger
// would only make sums of charges too large to be sent. A limit that counts what is held is
// charged nothing: a charge would deny the request that comes in the same microsecond.
func (h *Held) hold(i int, buckets []Bucket, by holder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.settle == nil {
		h.settle = make([]settling, len(buckets))
	}
	b, most := &buckets[i], int64(0)
	if !b.Limit.of().CountsHeld() {
		most = max(b.Cost, 2*b.Limit.Size)
	}
	h.settle[i] = settling{by, most}
}

// charger is a store that can settle what holds nothing.
type charger interface {
	// chargeLater charges n units of b, whether there is room for them or not.
	chargeLater(b Bucket, n int64)

	// clear empties b's bucket, except for what requests hold.
	clear(ctx context.Context, b Bucket) error
}

// deferred is a bucket that is only charged in the end.
type deferred struct {
	in charger
	Bucket
}

// settle implements holder.
func (d *deferred) settle(charge int64) {
	if charge > 0 {
		d.in.chargeLater(d.Bucket, min(charge, MaxUnits))
	}
}

// clear implements holder.
func (d *deferred) clear(ctx context.Context) error { return d.in.clear(ctx, d.Bucket) }

// deferCharges has req.Held charge the buckets that hold nothing of the request, on which these
// are the decisions, in the store that made them.
func (req *Request) deferCharges(decisions []Decision, in charger) {
	if !req.later || Denied(decisions) {
		return
	}
	for i := range req.Buckets {
		if d := &decisions[i]; req.Buckets[i].later && !d.Denied && d.Borrowed == d.Pool {
			b := req.Buckets[i]
			b.Watches, b.Borrows, b.Pool = 0, false, false
			req.Held.hold(i, req.Buckets, &deferred{in, b})
		}
	}
}
