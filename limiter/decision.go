package limiter

import "time"

// Decision tells how one bucket decided on a request.
type Decision struct {
	// Whether this bucket had no room for the request. Nothing was added to it
	// then.
	Denied bool

	// Whether the request can never be admitted, because its cost exceeds the
	// bucket's size.
	Never bool

	// The bucket's size.
	Size int64

	// The whole units there is still room for.
	Remaining int64

	// The time until the bucket runs empty, if nothing more is added.
	Clear time.Duration

	// The exact time until this bucket will have room for the same request:
	// denied one microsecond before, admitted at it. Zero if the bucket did
	// not deny, or never will admit; see also Bucket.Wait.
	RetryAfter time.Duration
}

// Summary is what several buckets decided on one request, in one.
type Summary struct {
	// Whether any bucket denied, and so the request is denied.
	Denied bool

	// Whether any bucket can never admit the request. No retry helps then.
	Never bool

	// The size of the bucket with the least room, the smaller size if two
	// have equally little.
	Size int64

	// The least room left in any bucket.
	Remaining int64

	// The time until all buckets have run empty.
	Clear time.Duration

	// The longest RetryAfter of all decisions. Zero if none denies, or if one always
	// will.
	RetryAfter time.Duration

	// The index of the bucket that decided: of a denied request the one that
	// never admits it, or takes longest to of those that deny it, otherwise
	// the one whose Size and Remaining these are.
	Deciding int
}

// Summarize returns the summary of the decisions on one request. That of none is
// the zero Summary: a request that has nothing to pass is not denied.
func Summarize(decisions []Decision) Summary {
	if len(decisions) == 0 {
		return Summary{}
	}
	least, decider := 0, -1
	var wait time.Duration
	var sum Summary
	for i, d := range decisions {
		l := decisions[least]
		if d.Remaining < l.Remaining || d.Remaining == l.Remaining && d.Size < l.Size {
			least = i
		}
		if d.Denied && (decider < 0 || outranks(d, decisions[decider])) {
			decider = i
		}
		sum.Clear, wait = max(sum.Clear, d.Clear), max(wait, d.RetryAfter)
	}
	sum.Size, sum.Remaining, sum.Deciding = decisions[least].Size, decisions[least].Remaining, least
	if decider >= 0 {
		sum.Denied, sum.Never, sum.Deciding = true, decisions[decider].Never, decider
		if !sum.Never {
			sum.RetryAfter = wait
		}
	}
	return sum
}

// outranks reports whether denial d holds for longer than denial e.
func outranks(d, e Decision) bool {
	if d.Never || e.Never {
		return d.Never && !e.Never
	}
	return d.RetryAfter > e.RetryAfter
}

// outcome is what became of one bucket of a request: its state, with the clear
// time told from now, after it was charged or, if not, as it was.
type outcome struct {
	state
	denied  bool
	blocked bool // denied only for units that are held, and may come back
	foreign bool // its key held what is no bucket, at least for now
	here    bool // whether this process decided instead of a server

	held, till int64 // the units that are held, this request's too, and until when
}

// report fills in d, which is zero, about a bucket of limit l after a request of
// the given cost was decided: s holds what was charged, or, if it denied, what
// it held all along. To return so large a struct would cost more than to make it.
func (d *Decision) report(l *Limit, s state, now, cost int64, denied bool) {
	d.Size = l.Size
	d.Remaining = l.remaining(s, now)
	d.Clear = time.Duration(s.clear-now) * time.Microsecond
	if denied {
		d.Denied = true
		if d.Never = cost > l.Size; !d.Never {
			d.RetryAfter = time.Duration(l.wait(s, now, cost)) * time.Microsecond
		}
	}
}

// Wait returns how long b will have no room for the same request again, if
// nothing more is added after d was decided: denied one microsecond before,
// admitted at it. It differs from d.RetryAfter where b did not deny: what b was charged
// for a request that another bucket denies may have been its last room. Zero if
// there is room, or never will be.
func (b *Bucket) Wait(d *Decision) time.Duration {
	cost := max(b.Cost, 1)
	if d.Denied || d.Remaining >= cost {
		return d.RetryAfter
	}
	// A bucket that had room holds Size − Remaining units, and that many and
	// slack leave it until it is clear.
	l, clear := b.Limit.complete(), int64(d.Clear/time.Microsecond)
	slack := ceilDiv(clear, l.rate())*l.DripSize - (l.Size - d.Remaining)
	return time.Duration(l.wait(state{clear, slack}, 0, cost)) * time.Microsecond
}
