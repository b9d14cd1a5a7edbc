package limiter

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Store keeps buckets and decides requests against them. Its methods may be
// called from several goroutines at once; each request is decided in one
// atomic step.
type Store interface {
	// Take decides one request and charges its buckets. It appends a Decision
	// for each bucket to dst, in order, and returns the extended slice; the
	// request is admitted if none of them is Denied.
	//
	// It waits no longer than until the deadline of ctx. A ctx that is cancelled
	// need not end it: a request that is on its way may be charged anyway, and
	// its decision is then worth more than an error.
	//
	// An error means that nothing was decided: the request is malformed, or
	// the store did not answer in time. In the latter case buckets may or may
	// not have been charged.
	Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error)
}

var (
	_ Store = (*Memory)(nil)
	_ Store = (*Redis)(nil)
)

// Request is the buckets that one request has to pass.
type Request struct {
	// The buckets, none named twice with the same key.
	Buckets []Bucket

	// What is charged when some buckets have room and others do not.
	Accounting Accounting

	// Whether to return an error if the server that should decide can't be
	// asked, and not let buckets in this process decide meanwhile.
	NoFallback bool
}

// Bucket is one bucket and what a request adds to it. Its Name and Key and its
// Limit's DripInterval and DripSize are its identity: requests that agree in them
// meet in one bucket. The size is no part of it: it may differ from request to
// request, and each is decided by its own. What a bucket holds stays when the
// size changes, and together requests of several sizes are admitted no more than
// the largest allows.
type Bucket struct {
	// What the bucket limits, such as "login". Stores may show it; any
	// characters but spaces and braces are fine.
	Name string

	// Whose bucket it is, such as an address. Any bytes; stores keep and show
	// only a digest.
	Key string

	// The bucket's numbers, as this request goes by them.
	Limit Limit

	// The units the request adds, at least 1; 0 means 1. A request that costs
	// more than the size is never admitted.
	Cost int64

	// The most buckets of this Name that a process holds; 0 means half of those
	// that its Memory holds in all. A limit that is full forgets the bucket that
	// is emptiest, unless there is a ShareKey. Buckets of one Name should agree
	// in it.
	MaxKeys int

	// If not empty, buckets of this limit are never forgotten. While the limit is
	// full, keys that have no bucket share one with all others of their ShareKey,
	// such as the network that a client's address is in.
	ShareKey string

	shared bool // whether it is one that keys share; Key is then what they share it by
}

// keeps reports whether b's limit forgets no bucket.
func (b *Bucket) keeps() bool { return b.shared || b.ShareKey != "" }

// sameKey reports whether a and b are of one key.
func (b *Bucket) sameKey(a *Bucket) bool { return a.Key == b.Key && a.shared == b.shared }

// fits reports whether b, which stands at s, has room for the request.
func (b *Bucket) fits(s state, now int64) bool {
	return b.Cost <= b.Limit.Size && b.Limit.wait(s, now, b.Cost) == 0
}

// fitsBeside reports whether b, which stands at s, has room for the request and
// for other units, at most its size.
func (b *Bucket) fitsBeside(s state, units, now int64) bool {
	return b.Cost <= b.Limit.Size-units && b.Limit.wait(s, now, b.Cost+units) == 0
}

// Accounting says what a request charges when some of its buckets have room
// for it and others do not.
type Accounting uint8

const (
	// AccountingAtomic charges all buckets if all have room, else none.
	AccountingAtomic Accounting = iota

	// AccountingEach charges every bucket that has room, even if others deny.
	AccountingEach
)

// String returns the word for a in a configuration.
func (a Accounting) String() string {
	if a == AccountingEach {
		return "each"
	}
	return "atomic"
}

// prepare gives the buckets what they leave out, and returns an error if req
// does not describe buckets that can be decided. Stores call it, so that numbers
// of any origin are safe to pass.
func (req *Request) prepare() error {
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if b.Cost == 0 || b.Limit.DripSize == 0 {
			req.complete()
			b = &req.Buckets[i]
		}
		if err := b.Limit.Validate(); err != nil {
			return fmt.Errorf("bucket %q: %w", b.Name, err)
		}
		if b.Cost < 1 {
			return fmt.Errorf("bucket %q: cost %d: must be at least 1", b.Name, b.Cost)
		}
		if len(req.Buckets) > fewBuckets {
			continue
		}
		for j := range i {
			if a := &req.Buckets[j]; a.Name == b.Name && a.Key == b.Key {
				return fmt.Errorf("bucket %q: %w", b.Name, errTwice)
			}
		}
	}
	if len(req.Buckets) > fewBuckets {
		return req.twiceOfMany()
	}
	return nil
}

// fewBuckets is how many buckets are compared each with each, which takes no
// memory. More would take longer than to look them up.
const fewBuckets = 16

// twiceOfMany returns an error if one of many buckets is named twice with the
// same key.
func (req Request) twiceOfMany() error {
	type named struct{ name, key string }
	seen := make(map[named]struct{}, len(req.Buckets))
	for i := range req.Buckets {
		b := &req.Buckets[i]
		if seen[named{b.Name, b.Key}] = struct{}{}; len(seen) == i {
			return fmt.Errorf("bucket %q: %w", b.Name, errTwice)
		}
	}
	return nil
}

// complete gives the buckets what they leave out. They are copied first: those of
// the caller may be in use elsewhere.
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

// decisions appends what became of the buckets to dst.
func (req Request) decisions(outcomes []outcome, dst []Decision) []Decision {
	for i := range outcomes {
		dst = req.Buckets[i].decision(outcomes[i].state, outcomes[i].denied, dst)
	}
	return dst
}

// decision appends what became of b to dst: s, its clear time told from now.
func (b *Bucket) decision(s state, denied bool, dst []Decision) []Decision {
	dst = append(dst, Decision{})
	dst[len(dst)-1].report(&b.Limit, s, 0, b.Cost, denied)
	return dst
}

// errTwice refuses a request that would be checked against a bucket twice and
// charged once.
var errTwice = errors.New("named twice with one key in one request")
