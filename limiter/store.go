package limiter

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
)

// Store keeps buckets and decides requests against them. Its methods are safe for
// concurrent use, and each request is decided in one atomic step.
type Store interface {
	// Take decides one request and charges its buckets. It appends a Decision for
	// each bucket to dst, in order, and returns the extended slice. The request is
	// admitted if no Decision is Denied.
	//
	// Take does not wait beyond the deadline of ctx. Cancelling ctx need not end
	// it: a request that has already been sent may be charged anyway, and then its
	// decision is worth more than an error.
	//
	// An error means that nothing was decided: the request is malformed, or the
	// store did not answer in time. In the latter case the buckets may or may not
	// have been charged.
	Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error)
}

var (
	_ Store = (*Memory)(nil)
	_ Store = (*Redis)(nil)
)

// Request lists the buckets that one request has to pass.
type Request struct {
	// The buckets. No two may have the same Name and Key.
	Buckets []Bucket

	// What to charge when some buckets have room and others do not.
	Accounting Accounting

	// Whether to return an error when the server is unavailable, instead of
	// letting the fallback decide.
	NoFallback bool
}

// Bucket is one bucket and what a request adds to it. Its Name, its Key and its
// Limit's DripInterval and DripSize are its identity: requests that agree in them
// use the same bucket; so are Algorithm, Aligned, Phase and ColdFactor of the Limit.
// CountDenied is not part of it, and Size is not: it may differ from request to
// request, and each request is decided by its own Size. The level stays when the
// Size changes, and together requests with several Sizes are admitted no more than
// the largest allows.
type Bucket struct {
	// What the bucket limits, such as "login". Stores may show it. It may contain
	// any characters except spaces and braces.
	Name string

	// Whose bucket it is, such as an address. It may contain any bytes; a Store
	// keeps and shows only a digest of it.
	Key string

	// The limit that this request is decided by.
	Limit Limit

	// The units that the request adds, at least 1; 0 means 1. A request that costs
	// more than Size is never admitted.
	Cost int64

	// The most buckets of this Name that a process holds; 0 means half of its
	// Memory's maximum. When the limit is full, the emptiest of a few buckets is
	// evicted, unless ShareKey is set. All buckets of one Name should have the
	// same MaxKeys.
	MaxKeys int

	// If not empty, buckets of this limit are never evicted. While the limit is
	// full, a key that has no bucket shares one with all other such keys of the
	// same ShareKey, such as the network of a client's address.
	ShareKey string

	shared bool // whether several keys share it; Key is then their ShareKey
}

// keeps reports whether b's limit never evicts a bucket.
func (b *Bucket) keeps() bool { return b.shared || b.ShareKey != "" }

// sameKey reports whether a and b belong to the same key.
func (b *Bucket) sameKey(a *Bucket) bool { return a.Key == b.Key && a.shared == b.shared }

// fits reports whether b, at level s, has room for the request, beside n other units.
func (b *Bucket) fits(s level, n, now int64) bool { return b.Limit.room(s, n, now) >= b.Cost }

// MaxBuckets is the maximum number of buckets in a request.
const MaxBuckets = 1<<16 - 1

// Accounting says what to charge when some buckets of a request have room for it
// and others do not.
type Accounting uint8

const (
	// AccountingAtomic charges all buckets if all have room, and none otherwise,
	// except those that count denied requests, see Limit.CountDenied.
	AccountingAtomic Accounting = iota

	// AccountingEach charges every bucket that has room, even if others deny.
	AccountingEach
)

// String returns a as it is written in a configuration: "atomic" or "each".
func (a Accounting) String() string {
	if a == AccountingEach {
		return "each"
	}
	return "atomic"
}

// prepare fills in default values, and returns an error if req does not describe
// buckets that can be decided. Every Store calls it, so untrusted numbers are safe
// to pass.
func (req *Request) prepare() error {
	if n := len(req.Buckets); n > MaxBuckets {
		return fmt.Errorf("%d buckets in a request: must be at most %d", n, MaxBuckets)
	}
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if b.Cost == 0 || b.Limit.DripSize == 0 {
			req.complete()
			b = &req.Buckets[i]
		}
		if err := b.Limit.validate(); err != nil {
			return fmt.Errorf("bucket %q: %w", b.Name, err)
		}
		if b.Cost < 1 {
			return fmt.Errorf("bucket %q: cost %d: must be at least 1", b.Name, b.Cost)
		}
	}
	return req.namedTwice()
}

// namedTwice returns an error if two buckets have the same Name and Key.
func (req *Request) namedTwice() error {
	n := len(req.Buckets)
	if n <= pairwise {
		for i := range req.Buckets {
			for j := range i {
				if err := req.sameBucket(i, j); err != nil {
					return err
				}
			}
		}
		return nil
	}
	// A hash table with linear probing, at most half full. Each entry is the index of a
	// bucket plus one.
	var small [128]uint16
	table := small[:]
	if 2*n > len(small) {
		table = make([]uint16, 2<<bits.Len(uint(n-1)))
	}
	mask, key := uint64(len(table)-1), uint64(0)
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if i == 0 || b.Key != req.Buckets[i-1].Key {
			key = maphash.String(namesSeed, b.Key)
		}
		at := mix(maphash.String(namesSeed, b.Name), key) & mask
		for ; table[at] != 0; at = (at + 1) & mask {
			if err := req.sameBucket(i, int(table[at])-1); err != nil {
				return err
			}
		}
		table[at] = uint16(i + 1)
	}
	return nil
}

// pairwise is the largest number of buckets of which each is compared with each.
const pairwise = 4

var namesSeed = maphash.MakeSeed()

// sameBucket returns an error if the i-th and j-th buckets have the same Name and Key.
func (req *Request) sameBucket(i, j int) error {
	a, b := &req.Buckets[i], &req.Buckets[j]
	if a.Name == b.Name && a.Key == b.Key {
		return fmt.Errorf("bucket %q: %w", b.Name, errTwice)
	}
	return nil
}

// complete fills in default values. It copies the buckets first, because the
// caller may be using them elsewhere.
func (req *Request) complete() {
	req.Buckets = slices.Clone(req.Buckets)
	for i := range req.Buckets {
		b := &req.Buckets[i]
		b.Limit = b.Limit.complete()
		if b.Cost == 0 {
			b.Cost = 1
		}
	}
}

// decisions appends a Decision for each outcome to dst.
func (req Request) decisions(outcomes []outcome, dst []Decision) []Decision {
	for i := range outcomes {
		o, b := &outcomes[i], &req.Buckets[i]
		if o.log != nil {
			dst = append(dst, Decision{By: o.by})
			dst[len(dst)-1].reportLog(&b.Limit, o.log, b.Cost, o.denied)
			continue
		}
		dst = b.decision(o.ahead, o.denied, o.by, dst)
	}
	return dst
}

// decision appends the Decision of b to dst.
func (b *Bucket) decision(s ahead, denied bool, by Decider, dst []Decision) []Decision {
	dst = append(dst, Decision{By: by})
	dst[len(dst)-1].report(&b.Limit, s, b.Cost, denied)
	return dst
}

// errTwice rejects a request that would be checked against a bucket twice and
// charged once.
var errTwice = errors.New("named twice with one key in one request")
