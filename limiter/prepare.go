package limiter

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
)

// validateConsistency returns an error if b can't have its Consistency.
func (b *Bucket) validateConsistency() error {
	if b.Hold || b.Watches > 0 || b.elastic() {
		return errConsistency
	}
	return b.Consistency.Validate(b.Limit)
}

// errConsistency rejects a bucket that no process can decide on locally.
var errConsistency = errors.New("a bucket with Hold, Watches, Borrows or Pool has to be exact")

// errPools rejects a request in which it is not certain who lends, or that no store can
// decide in one step.
var errPools = errors.New("a bucket that Borrows needs a Pool behind it, and a Pool one before it that Borrows, with the same DryRun; none of them may have CountDenied, and none may be both")

// validatePools returns an error if it is not clear which pool a bucket borrows from.
func (req *Request) validatePools() error {
	borrower := -1 // the first since the last pool
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if !b.elastic() {
			continue
		}
		if b.Limit.CountDenied || b.Borrows && b.Pool || b.Pool && borrower < 0 ||
			borrower >= 0 && b.DryRun != req.Buckets[borrower].DryRun {
			return fmt.Errorf("bucket %q: %w", b.Name, errPools)
		}
		if borrower < 0 {
			borrower = i
		}
		if b.Pool {
			borrower = -1
		}
	}
	if borrower >= 0 {
		return fmt.Errorf("bucket %q: %w", req.Buckets[borrower].Name, errPools)
	}
	return nil
}

// maxBuckets is the maximum number of buckets in a request.
const maxBuckets = 1<<16 - 1

// prepare fills in default values, and returns an error if req does not describe
// buckets that can be decided. Every Store calls it, so untrusted numbers are safe
// to pass.
func (req *Request) prepare() error {
	if n := len(req.Buckets); n > maxBuckets {
		return fmt.Errorf("%d buckets in a request: must be at most %d", n, maxBuckets)
	}
	plain, err := req.prepareEach()
	if err == nil && !plain {
		err = req.validateRoles()
	}
	if err == nil {
		err = req.namedTwice()
	}
	return err
}

// prepareEach is prepare without what buckets need of the request, and of each other. plain
// says that they need nothing.
func (req *Request) prepareEach() (plain bool, err error) {
	plain = true
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if b.Limit.DripSize == 0 || b.Cost == 0 && (b.Hold || b.Limit.CountDenied) {
			req.complete()
			b = &req.Buckets[i]
		}
		if err := b.Limit.of().Check(); err != nil {
			return false, fmt.Errorf("bucket %q: %w", b.Name, err)
		}
		if b.Cost < 0 {
			return false, fmt.Errorf("bucket %q: cost %d: must not be negative", b.Name, b.Cost)
		}
		if b.Consistency != (Consistency{}) {
			if err := b.validateConsistency(); err != nil {
				return false, fmt.Errorf("bucket %q: %w", b.Name, err)
			}
		}
		plain = plain && !b.Hold && !b.later && b.Watches == 0 && !b.elastic() && !b.Limit.of().CountsHeld() && !b.Limit.of().CountsDenials()
	}
	return plain, nil
}

// validateRoles returns an error if a bucket can't hold units, watch others, borrow or lend
// as it is to, or has a Limit that would admit everything unless it did.
func (req *Request) validateRoles() error {
	if err := req.validateWatches(); err != nil {
		return err
	}
	if err := req.validatePools(); err != nil {
		return err
	}
	for i := range req.Buckets {
		b := &req.Buckets[i]
		switch {
		case (b.Hold || b.later) && req.Held == nil:
			return errNotHeld
		case (b.Hold || b.later) && b.Limit.of().Waits():
			return fmt.Errorf("bucket %q: %w", b.Name, errHeldWaits)
		case b.Cost > 0 && !b.Hold && b.Limit.of().CountsHeld():
			return fmt.Errorf("bucket %q: %w", b.Name, errConcurrency)
		case b.Cost > 0 && b.Watches == 0 && b.Limit.of().CountsDenials():
			return fmt.Errorf("bucket %q: %w", b.Name, errBanAfter)
		}
	}
	return nil
}

// maxWatched is the largest number of buckets that a Bucket watches.
const maxWatched = 15

// validateWatches returns an error if a bucket can't watch what it is to watch.
func (req *Request) validateWatches() error {
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if b.Watches == 0 {
			continue
		}
		if int(b.Watches) > min(i, maxWatched) || b.Hold || b.elastic() || b.Limit.CountDenied || b.ShareKey != "" {
			return fmt.Errorf("bucket %q: %w", b.Name, errWatches)
		}
		for j := i - int(b.Watches); j < i; j++ {
			if w := &req.Buckets[j]; !w.sameKey(b) || w.DryRun != b.DryRun || w.Watches > 0 || w.elastic() || w.Limit.CountDenied || w.ShareKey != "" {
				return fmt.Errorf("bucket %q, watched by %q: %w", w.Name, b.Name, errWatches)
			}
		}
	}
	return nil
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
	indexes := small[:]
	if 2*n > len(small) {
		indexes = make([]uint16, 2<<bits.Len(uint(n-1)))
	}
	mask, key := uint64(len(indexes)-1), uint64(0)
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if i == 0 || b.Key != req.Buckets[i-1].Key {
			key = maphash.String(namesSeed, b.Key)
		}
		at := mix(maphash.String(namesSeed, b.Name), key) & mask
		for ; indexes[at] != 0; at = (at + 1) & mask {
			if err := req.sameBucket(i, int(indexes[at])-1); err != nil {
				return err
			}
		}
		indexes[at] = uint16(i + 1)
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

// complete fills in default values, and has nothing held or count of what costs nothing. It
// copies the buckets first, because the caller may be using them elsewhere.
func (req *Request) complete() {
	req.Buckets = slices.Clone(req.Buckets)
	for i := range req.Buckets {
		b := &req.Buckets[i]
		b.Limit = Limit(b.Limit.of().Complete())
		if b.Cost == 0 {
			b.later, b.Hold, b.Limit.CountDenied = b.Hold, false, false
			req.later = req.later || b.later
		}
	}
}

// errTwice rejects a request that would be checked against a bucket twice and
// charged once.
var errTwice = errors.New("named twice with one key in one request")

// errWatches rejects a request with a bucket that watches others in a way that no store
// can decide in one step.
var errWatches = errors.New("a bucket may watch those right before it that have its Key and DryRun; neither may have CountDenied, Borrows, Pool, ShareKey or, if it watches, Hold")

// errNotHeld rejects a request that could not be settled.
var errNotHeld = errors.New("a bucket has Hold, and the request has no Held to settle it")

// errHeldWaits rejects a request of which it will not be known when it may run.
var errHeldWaits = errors.New("a bucket with Hold can't have a Limit with which requests may wait")

// errConcurrency and errBanAfter reject requests that nothing would count.
var (
	errConcurrency = errors.New("a Concurrency limit counts what is held: use Limiter.Hold, or set Bucket.Hold")
	errBanAfter    = errors.New("a BanAfter limit counts denials by other buckets of the request: set Bucket.Watches")
)
