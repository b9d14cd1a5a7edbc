package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

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
	// that is only due to held units does not count. Like others it denies requests for which it
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

// local reports whether this process may decide req locally: if it may on each bucket.
func (req *Request) local() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Consistency.within == 0 {
			return false
		}
	}
	return true
}

// leased reports whether each bucket of req has leases.
func (req *Request) leased() bool {
	for i := range req.Buckets {
		if !req.Buckets[i].Consistency.IsLease() {
			return false
		}
	}
	return true
}

// A limit with CountDenied counts denied requests too, so a client that keeps asking
// stays locked out, and one that waits for as long as its RetryAfter is admitted.
//
// A bucket without room counts a denied request in the way of its algorithm: a leaky
// bucket is full then, as of that moment, so its drips start over; a fixed window is
// full until it ends; a sliding window counts the units in its present window, as far
// as it can count; a log adds them in place of its oldest; and a limit that warms up
// is not free within the time of one unit at its full rate, but no warmer. A bucket
// that had room, but was not charged because another one denied the request, is
// charged as if it had been admitted.

// counting reports whether any of the buckets counts denied requests.
func (req Request) counting() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Limit.CountDenied {
			return true
		}
	}
	return false
}

// severalKeys reports whether the buckets belong to more than one key.
func (req Request) severalKeys() bool {
	for i := range req.Buckets {
		if !req.Buckets[i].sameKey(&req.Buckets[0]) {
			return true
		}
	}
	return false
}

// holds reports whether any of req's buckets holds units.
func (req *Request) holds() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Hold {
			return true
		}
	}
	return false
}

// elastic reports whether b denies nothing on its own.
func (b *Bucket) elastic() bool { return b.Borrows || b.Pool }

// mayShare reports whether any bucket of req may have to be replaced by a shared
// one.
func (req Request) mayShare() bool {
	for i := range req.Buckets {
		if req.Buckets[i].ShareKey != "" {
			return true
		}
	}
	return false
}
