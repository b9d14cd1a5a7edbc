package limiter

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Store keeps buckets and decides requests against them. Its methods are safe for
// concurrent use, and each request is decided in one atomic step.
type Store interface {
	// Take decides one request and charges its buckets. It appends a Decision for
	// each bucket to dst, in order, and returns the extended slice. The request is
	// admitted if no Decision is Denied.
	//
	// Neither req.Buckets nor dst is used after Take has returned.
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

// Keeper is a [Store] whose buckets can be looked at and changed, one at a time: a
// [Memory] or a [Redis]. An error wraps [ErrUnavailable] if a server did not answer in time.
type Keeper interface {
	Store

	// Peek returns the level of a bucket. It changes nothing.
	Peek(ctx context.Context, b Bucket) (Level, error)

	// Reset empties a bucket, and returns what it held.
	Reset(ctx context.Context, b Bucket) (Level, error)

	// Ban bans a bucket's key for d. The bucket's Limit is made by [BanAfter].
	Ban(ctx context.Context, b Bucket, d time.Duration) error
}

var (
	_ Keeper = (*Memory)(nil)
	_ Keeper = (*Redis)(nil)
)

// Request lists the buckets that one request has to pass.
type Request struct {
	// The buckets, at most 65,535. No two may have the same Name and Key.
	Buckets []Bucket

	// What to charge when some buckets have room and others do not.
	Accounting Accounting

	// Whether to return an error when the server is unavailable, instead of
	// letting the fallback decide.
	NoFallback bool

	// What to settle later, if any of the Buckets has Hold.
	Held *Held

	later bool // whether any of the Buckets is charged later
}

// Bucket is one bucket and what a request adds to it. Its Name, its Key and how its Limit
// counts are its identity: requests that agree in them use the same bucket. The size of the
// Limit, as set by [Limit.WithBurst] or the units of a window, is no part of that, nor is
// [Limit.CountingDenied]: they may differ from request to request, and each request is
// decided by its own. The level stays when the size changes, and together requests with
// several sizes are admitted no more than the largest allows.
type Bucket struct {
	// What the bucket limits, such as "login": any text. Stores may show it.
	Name string

	// Whose bucket it is, such as an address. It may contain any bytes; a Store
	// keeps and shows only a digest of it.
	Key string

	// The limit that this request is decided by.
	Limit Limit

	// The units that the request adds. A request that costs more than the size is never
	// admitted. One that costs 0 always fits and adds nothing: its Decision says what is
	// left. (A ban still denies it, see Watches. With Hold, the cost is not known yet.)
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

	// Whether this process may decide locally, and with which bound. The zero value is
	// exact. A Memory ignores it. Buckets whose algorithm or options need an exact
	// decision, see [Consistency], make the request an error.
	Consistency Consistency

	// Whether this is a dry run: the bucket is decided and charged as always, but
	// its denial does not deny the request.
	DryRun bool

	// Whether an admitted request only holds Cost, until Request.Held settles it: what
	// it costs, or whether it counts, is not known yet. Held units take room, but do
	// not drip. A request that is denied holds nothing, and charges this bucket nothing.
	// A process renews what it holds in a server every 5 s. When the server has not heard
	// of it for 15 s, they are charged, as of then. All buckets of one Name should have the
	// same Hold. With a Cost of 0 nothing is held: such a request is denied only if the
	// bucket is full, as it may cost something, and what Request.Held settles is charged
	// then, see [Held.Settle].
	Hold bool

	// Whether what this bucket has no room for is borrowed from the next Pool in the
	// request. There must be one, with the same DryRun. Its Limit must not be [Limit.CountingDenied].
	Borrows bool

	// Whether this bucket is a pool. It is charged, or holds units, if the request is
	// admitted and any of the buckets before it that has Borrows, up to another Pool, had
	// no room. Such a bucket is not charged then, and denies only if its pool has no room
	// either. Its Limit must not be [Limit.CountingDenied]. Cost is what a request borrows,
	// whatever it would have cost where there was no room.
	Pool bool

	// How many of the buckets right before this one it watches, at most 15. Such
	// a bucket is charged if one of those denies the request, and not otherwise; a denial
	// that is only due to held units is none. Like others it denies requests for which it
	// has no room, and then those that it watches deny them too. They have its Key and
	// DryRun, and none of them counts denied requests, or has Borrows, Pool or a ShareKey.
	Watches uint8

	later      bool   // whether Request.Held settles it, which has Hold and holds nothing; it has no Hold then
	shared     bool   // whether several keys share it; Key is then their ShareKey
	lent       bool   // whether a bucket that is not decided with this one, a Pool, borrows from it
	reservedAs uint16 // its index in Request.Held.reservations, plus 1; 0 if it is not there
}

// keeps reports whether b's limit never evicts a bucket.
func (b *Bucket) keeps() bool { return b.shared || b.ShareKey != "" }

// sameKey reports whether a and b belong to the same key.
func (b *Bucket) sameKey(a *Bucket) bool { return a.Key == b.Key && a.shared == b.shared }

// need returns for how many units there has to be room, unless the request is free.
func (b *Bucket) need() int64 { return max(b.Cost, 1) }

// free reports whether the request costs nothing, so that it fits whatever b holds. Where
// its cost is not known yet, and where b only watches others, it may be 0 and is not free.
func (b *Bucket) free() bool { return b.Cost == 0 && !b.Hold && !b.later && b.Watches == 0 }

// fits reports whether b, at level s, has room for the request, next to n other units.
func (b *Bucket) fits(s bucket.Level, n, now int64) bool {
	return b.Limit.of().Room(s, n, now) >= b.need() || b.free()
}

// maxBuckets is the maximum number of buckets in a request.
const maxBuckets = 1<<16 - 1

// Accounting says what to charge when some buckets of a request have room for it
// and others do not.
type Accounting uint8

const (
	// AccountingAtomic charges all buckets if all have room, and none otherwise,
	// except those that count denied requests, see [Limit.CountingDenied].
	AccountingAtomic Accounting = iota

	// AccountingEach charges every bucket that has room, even if others deny.
	AccountingEach
)

// String returns a as a word: "atomic" or "each".
func (a Accounting) String() string {
	if a == AccountingEach {
		return "each"
	}
	return "atomic"
}

// reservationOf returns what a Redis store knows of the units that are held of b, or nil.
func (req *Request) reservationOf(b *Bucket) *reservation {
	if b.reservedAs == 0 {
		return nil
	}
	return req.Held.reservations[b.reservedAs-1]
}

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

// chargesWatcher reports whether a bucket of req is charged for the denial of another one.
func (req *Request) chargesWatcher(outcomes []outcome) bool {
	for i := range req.Buckets {
		if outcomes[i].denied {
			continue
		}
		for j := i - int(req.Buckets[i].Watches); j < i; j++ {
			if outcomes[j].denied {
				return true
			}
		}
	}
	return false
}

// bar has the buckets deny that another one watches which does.
func (req *Request) bar(outcomes []outcome) {
	for i := range req.Buckets {
		for j := i - int(req.Buckets[i].Watches); j < i && outcomes[i].denied; j++ {
			outcomes[j].denied = true
		}
	}
}

// denied reports whether the outcomes of req's buckets deny it.
func (req *Request) denied(outcomes []outcome) bool {
	var pools lending
	for i := range outcomes {
		b := &req.Buckets[i]
		pools.short = pools.short || b.lent
		if denies, _ := pools.next(b.Borrows, b.Pool, !outcomes[i].denied); denies && !b.DryRun {
			return true
		}
	}
	return false
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

// decisions appends a Decision for each outcome to dst.
func (req Request) decisions(outcomes []outcome, dst []Decision) []Decision {
	from := len(dst)
	for i := range outcomes {
		o, b := &outcomes[i], &req.Buckets[i]
		if o.entries != nil {
			dst = append(dst, Decision{By: o.by, DryRun: b.DryRun})
			dst[len(dst)-1].reportEntries(b.Limit.of(), o.entries, b.need(), o.denied)
		} else {
			dst = b.decision(o.Ahead, o.denied, o.by, dst)
		}
		d := &dst[len(dst)-1]
		if o.leased > 0 { // and charged, but still to be had
			d.Remaining = min(d.Remaining+o.leased, d.Size)
		}
		if (b.Hold || b.later) && o.blocked && !d.Never {
			d.RetryAfter = retryBlocked
		}
		if b.Watches > 0 && !d.Denied {
			d.RetryAfter = b.RoomIn(d)
			d.Denied = d.RetryAfter > 0
			d.Began = d.Denied
		}
		for j := len(dst) - 1 - int(b.Watches); j < len(dst)-1; j++ {
			if w := &dst[j]; w.Denied && !w.Never {
				w.RetryAfter = max(w.RetryAfter, d.RetryAfter)
			}
		}
		if b.Pool {
			req.lend(i, outcomes, dst[from:])
		}
	}
	return dst
}

// decision appends the Decision of b to dst.
func (b *Bucket) decision(s bucket.Ahead, denied bool, by Decider, dst []Decision) []Decision {
	dst = append(dst, Decision{By: by, DryRun: b.DryRun})
	dst[len(dst)-1].report(b.Limit.of(), s, b.need(), denied)
	return dst
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

// retryBlocked is when to try again after units that others hold were in the way: no one
// knows when they will be settled.
const retryBlocked = time.Second
