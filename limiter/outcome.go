package limiter

import (
	"math"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// outcome is the result for one bucket of a request: its level after the request,
// whether it was charged or not.
type outcome struct {
	bucket.Ahead
	denied  bool // it has no room, which is a denial unless it borrows or is a pool
	blocked bool // it has none only because of held units, which may be released
	foreign bool // its key held something that is not a bucket, at least for now
	begun   bool // it was found empty
	unused  bool // of a pool: nothing is borrowed from it
	unasked bool // of a pool: nothing is known of it but that, or that others deny
	by      Decider

	held, receipt int64 // the units that are held, including this request's, and what names those of their time
	leased        int64 // other units that this process has leased and may use now

	entries *bucket.EntriesLevel // if it keeps entries, and more than their summary is known
}

// report fills in d, which is zero, for a bucket of limit l after a request of the
// given cost. s is the level after the charge or, if the bucket denied, the
// unchanged level. Returning such a large struct would cost more than filling it
// in.
func (d *Decision) report(l *bucket.Limit, s bucket.Ahead, cost int64, denied bool) {
	now := s.After(0)
	d.Size, d.Remaining, d.rest = l.Size, l.Remaining(now, 0), s.Rest
	d.Clear = time.Duration(s.Clear) * time.Microsecond
	if denied {
		d.Denied = true
		if d.Never = cost > l.Size; !d.Never {
			d.RetryAfter = time.Duration(l.Wait(now, cost, 0)) * time.Microsecond
		}
	}
}

// reportEntries fills in d for a log at level v, as report does for other buckets.
func (d *Decision) reportEntries(l *bucket.Limit, v *bucket.EntriesLevel, cost int64, denied bool) {
	d.Size = l.Size
	d.Remaining = max(l.Size-v.Units, 0)
	d.Clear = time.Duration(v.Clear) * time.Microsecond
	d.exact, d.rest, d.one = true, v.Again, v.One
	if denied {
		d.Denied = true
		if d.Never = cost > l.Size; !d.Never {
			d.RetryAfter = time.Duration(v.Again) * time.Microsecond
		}
	}
}

// mayBeLetGo reports whether what b holds by its answer includes units that are held, and so
// may be released at any time.
func (o *outcome) mayBeLetGo(b *Bucket) bool { return o.blocked || (b.Hold || b.free()) && o.held > 0 }

// full returns how long, in µs, a bucket of limit l will have no room at all.
func (o *outcome) full(l *Limit) int64 {
	if o.entries != nil {
		return o.entries.One
	}
	return l.of().Wait(o.After(0), 1, 0)
}

// includeHeld has the levels of buckets with Hold include what is held, as if it were
// charged, and the levels in answers to requests that cost nothing.
func (req *Request) includeHeld(outcomes []outcome) {
	for i := range outcomes {
		b, o := &req.Buckets[i], &outcomes[i]
		if o.held <= 0 || o.blocked || !b.Hold && !b.free() {
			continue
		}
		at := bucket.Moment{Unix: time.Now().UnixMicro()}
		o.Ahead = b.Limit.of().AtLeast(o.After(at.Now), o.held, at).Ahead(at.Now)
		if o.entries != nil {
			*o.entries = o.entries.Plus(o.held, b.Limit.of())
		}
	}
}

// What a bucket with Borrows has no room for, the next Pool of the request may have. So
// whether a pool is charged depends on buckets before it, and whether these deny depends
// on it. The outcome of each is whether it has room, and lending says what follows.

// lending follows the buckets of a request in their order. Its zero value is ready for
// the first one.
type lending struct {
	short bool // whether one that borrows had no room, since the last pool
}

// next notes whether the next bucket fits. It reports whether that denies the request,
// unless it is a dry run, and whether it is a pool of which nothing is borrowed.
func (l *lending) next(borrows, pool, fits bool) (denies, unused bool) {
	switch {
	case borrows:
		l.short = l.short || !fits
		return false, false
	case pool:
		short := l.short
		l.short = false
		return short && !fits, !short
	}
	return !fits, false
}

// markUnused marks the outcomes of pools of which nothing is borrowed.
func (req *Request) markUnused(outcomes []outcome) {
	var pools lending
	for i := range outcomes {
		b, o := &req.Buckets[i], &outcomes[i]
		_, o.unused = pools.next(b.Borrows, b.Pool, !o.denied)
	}
}

// never is a wait that does not end.
const never time.Duration = math.MaxInt64 / 1000 * 1000

// lend makes the Decisions on the pool with the given index, and on those that borrow from
// it, what follows from them for the request. So far each says whether there is room.
func (req *Request) lend(pool int, outcomes []outcome, decisions []Decision) {
	d := &decisions[pool]
	wait := req.Buckets[pool].RoomIn(d) // until it has as much room
	if d.Never || outcomes[pool].unasked {
		wait = never
	}
	full := d.Denied
	lent := !full && !outcomes[pool].unused && !req.denied(outcomes)
	for i := pool - 1; i >= 0 && !req.Buckets[i].Pool; i-- {
		borrower := &decisions[i]
		if !req.Buckets[i].Borrows {
			continue
		}
		switch micros := wait.Microseconds(); {
		case !borrower.exact:
			borrower.one = micros + 1
		case req.Buckets[i].need() > borrower.Size:
			borrower.rest, borrower.one = micros, min(borrower.one, micros)
		default:
			borrower.rest, borrower.one = min(borrower.rest, micros), min(borrower.one, micros)
		}
		switch {
		case !borrower.Denied:
			continue
		case borrower.Never:
			borrower.RetryAfter = never
		}
		borrower.RetryAfter = min(borrower.RetryAfter, wait)
		borrower.Denied, borrower.Borrowed = full, lent
		if borrower.Never = borrower.RetryAfter == never; borrower.Never || !full {
			borrower.RetryAfter = 0
		}
	}
	d.Pool, d.Borrowed = true, lent
	d.Denied, d.Never, d.RetryAfter = false, false, 0
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

// retryBlocked is when to try again after units that others hold were in the way: no one
// knows when they will be settled.
const retryBlocked = time.Second
