// Package rule is what limits are once their configuration has been read, and what happens to
// a request that has to pass them: which buckets it meets, what a store is asked about them,
// and what the answers mean. A policy that needs more than its numbers, such as bans or pools,
// has a file of its own, with both what is asked because of it and what the answer means.
package rule

import (
	"path"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/calendar"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/pace"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Limit is a compiled limit. It does not change once its config is loaded.
type Limit struct {
	Path        string // of names; empty if the limit has none and only groups others
	Named       bool   // whether the config names it
	Connections bool   // whether it counts connections, always in this process, and not requests
	Key         *key.Key
	ReadBody    int64 // up to which length bodies are read for their fields; 0 if neither it nor a limit within names any
	Matchers    caddyhttp.MatcherSets
	Match       caddyhttp.RawMatcherSets // the matchers as the config has them, to show

	Algorithm Algorithm
	Buckets   []*Bucket // its own, and the bucket of a minimum interval; none if it only groups others
	Within    []*Limit  // nested limits

	MaxKeys       int  // of each bucket's name; 0 for the default
	ShareWhenFull bool // whether new keys share buckets when MaxKeys others have one
	TrackTop      int  // how many counters find the keys that ask most; 0 if none

	Options // the consistency is that of its buckets

	Waiting *Waiters     // nil if none may wait
	Turns   *key.Key     // what tells clients apart that take turns as they wait; nil if they do not
	Bans    *Bans        // nil if it bans no keys
	Load    *settle.Load // nil if it does not follow the load
	Pace    *pace.Limit  // nil if it has no speed

	Borrowers  []*Limit // those to which a pool may lend
	OwnCost    bool     // whether a pool charges its own cost, and not the cost of the limit that borrows
	Lender     *Limit   // the pool from which it may borrow; nil if there is none
	Settlement settle.Terms

	Zone     *zone.Zone // that it was in the config; nil if it was none
	Reporter faults.Reporter
}

// Bucket is a bucket of a limit. It is what the options of the limit make of it, and its
// numbers may depend on the request.
type Bucket struct {
	Limit       *Limit
	Path        string // of the limit, or for a minimum interval of one within it
	Policy      *Policy
	Name        string // in stores
	AddressName string // in stores if the client's address replaces the key

	// The option that determines how long the bucket takes to drain, if that is not
	// drip_rate.
	Source option.Setting

	Size, Drip, Cost value.Value[int64]
	Rate             value.Value[time.Duration]
	Factor           value.Value[option.Factor]
	Aligned          bool             // whether it drips at moments of the clock
	Counts           bucket.Algorithm // as stores have it
	WarmUp           time.Duration    // if it warms up
	Cold             option.Factor    // if it warms up
	Period           *calendar.Period // instead of the rate; nil if there is none
	CostIsBody       bool             // whether the cost is the length of the request's body

	Consistency limiter.Consistency
	Holds       bool // whether requests hold units until their outcome is known
	Leasable    bool // whether it could have consistency lease

	// The bucket of all requests except for its key, or nil if its numbers depend
	// on the request.
	Constant *limiter.Bucket
	Off      bool // whether the factor is 0
}

// IsMain reports whether b is its limit's own bucket, and not the bucket of a minimum interval.
func (b *Bucket) IsMain() bool { return b.Path == b.Limit.Path }

// Policy is what responses show of a bucket besides its numbers, and where it is counted.
// All limits of a path share one.
type Policy struct {
	outcome.Policy
	Counters *telemetry.Counters
	Top      *toplist.List // nil if the limit does not track the keys that ask most
}

// Unnamed reports whether l has buckets, but the config names neither it nor them.
func (l *Limit) Unnamed() bool { return !l.Named && len(l.Buckets) > 0 }

// Name returns the last name in the path.
func (l *Limit) Name() string { return path.Base(l.Path) }

// MaxKeysOf returns how many buckets the limit may have of each name, given the maximum of
// all limits together.
func (l *Limit) MaxKeysOf(all int) int {
	if l.MaxKeys > 0 {
		return l.MaxKeys
	}
	return max(all/2, 1)
}

// WhenFull returns what happens to new keys when MaxKeys others have buckets, as the option
// is written.
func (l *Limit) WhenFull() string {
	if l.ShareWhenFull {
		return "share"
	}
	return "forget"
}

// Waiters are the requests that may wait.
type Waiters struct {
	Option string // max_delay as the config has it
	*wait.Queues
}

// WaitingState returns what tells which requests wait for b, or responses for its speed; nil if none may.
func (b *Bucket) WaitingState() func() telemetry.Waiting {
	switch {
	case !b.IsMain():
		return nil
	case b.Limit.Pace != nil:
		return b.Limit.Pace.Speed.State
	case b.Limit.Waiting != nil:
		return b.Limit.Waiting.State
	}
	return nil
}

// waitsForSlot reports whether requests that l has no slot for may wait in a queue.
func (l *Limit) waitsForSlot() bool { return l.MaxDelay > 0 && l.limitsConcurrency() }

// waitsForRoom reports whether requests may wait until units have left l.
func (l *Limit) waitsForRoom() bool { return l.MaxDelay > 0 && !l.limitsConcurrency() }

// waitsForRoom reports whether requests may wait until units have left b.
func (b *Bucket) waitsForRoom() bool { return b.IsMain() && b.Limit.waitsForRoom() }

// limitsConcurrency reports whether l limits the requests in progress.
func (l *Limit) limitsConcurrency() bool { return l.Settlement.InProgress || l.Load != nil }
