package rule

import (
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// How is how a request is decided.
type How struct {
	Accounting Accounting
	NoFallback bool // whether a store fails that can't ask its server

	// For how long the request may wait for Redis, at all handlers together; 0 if it need
	// not. Time spent elsewhere between them does not count.
	Timeout time.Duration
	Outcome *outcome.Outcome   // which has how long it waited so far; nil if it can't wait
	Waits   *telemetry.Process // which counts how long requests wait
}

// Request is one request, and the buckets that it has to pass at one handler.
type Request struct {
	http     *http.Request
	replacer *caddy.Replacer
	at       time.Time // when the request arrived, if that is not now
	decided  time.Time // when the decisions were begun, since a request may wait for that
	entries  []Entry
	loads    []Entry          // of limits that follow the load, which no store is asked about
	paced    []Entry          // of limits with a speed, of which a store is asked as the response is sent
	holdings []settle.Holding // what has to be settled

	how   How
	store limiter.Store

	// What a store is asked about, the entries that each of these buckets decides, and the
	// answers.
	asked   []limiter.Bucket
	about   []entryRange
	answers []limiter.Decision

	// The last fixed key that was expanded: most limits of a request share it.
	key     *key.Key
	keyText string
	keyOwn  bool

	mayQueue      bool   // whether the request may wait for a slot
	mayExceed     bool   // whether a limit lets requests wait or pass above its size
	clientLeft    bool   // whether its client has left while it waited
	deniedWaiting bool   // whether it was denied while it waited, after it was charged
	reads         bool   // whether a limit names a field of what the client submits
	direct        bool   // whether no proxy is known to have passed it on
	network       string // of the client's address; empty until it is needed
	stripe        uint32 // of counters; the pool keeps a Request on one core where it can
}

// entryRange is a range of entries, from the first to before the last.
type entryRange struct{ from, to int }

// Entry is one bucket, and all that is decided on it for a request.
type Entry struct {
	*Bucket
	Query    limiter.Bucket // what a store is asked about it; its size has the extraCapacity too
	Estimate int64          // what the request costs, as far as that is known before its response

	Decision limiter.Decision // about the size of the limit
	Decided  bool             // whether there is one that counts
	Over     bool             // whether the request filled the bucket above the size of the limit
	Began    bool             // whether the request began that the limit bans the key
	Banned   time.Duration    // for how long the limit bans the key; 0 if it does not
	Charged  int64            // what it was charged, as far as that is known before its response
	Delay    time.Duration    // how long the request has to wait for it, or would without dry_run

	shown    int           // where the outcome has it
	extra    extraCapacity // in the size that is asked
	waits    bool          // whether the request counts as one that waits
	tookOver bool          // whether it has a slot that another request was charged for
	withheld bool          // whether no store is asked about it

	client    string // by fair_by
	hasClient bool   // whether it is known
}

// Denies reports whether the request was denied because of e.
func (e *Entry) Denies() bool { return e.Decided && e.Decision.Denied && !e.Decision.DryRun }

// ByAddress reports whether the client's address replaces the key.
func (e *Entry) ByAddress() bool { return e.Query.Name == e.AddressName }

// hasOwnKey reports whether the key tells whose bucket it is, where that matters.
func (e *Entry) hasOwnKey() bool {
	return e.Limit.Settlement.Clear != nil && !e.ByAddress() && e.Limit.Key.HasFields(e.Query.Key)
}

// Size returns the size of the limit for the request.
func (e *Entry) Size() int64 { return e.Query.Limit.Size - e.extra.units() }

// need returns for how many units there has to be room.
func (e *Entry) need() int64 {
	if e.Query.Hold {
		return max(e.Query.Cost, 1) // of what holds nothing, it is not known yet whether it costs anything
	}
	return e.Query.Cost
}

// RefusalError is the error of a request that is rejected for another reason than
// its rate.
type RefusalError struct {
	Status int
	Err    error
}

// Error returns why the request is rejected.
func (r RefusalError) Error() string { return r.Err.Error() }

// StatusCode returns the status of the response.
func (r RefusalError) StatusCode() int { return r.Status }

// requests pools them for the memory of their slices.
var requests = sync.Pool{New: func() any { return &Request{stripe: made.Add(1)} }}

// made is the number of requests ever made.
var made atomic.Uint32

// Release gives q back. It must not be used any more, nor anything that it returned but the
// Holdings.
func (q *Request) Release() {
	for i := range q.entries {
		q.entries[i].endWait()
	}
	clear(q.entries) // drop references to what clients sent
	clear(q.loads)
	clear(q.paced)
	clear(q.asked[:cap(q.asked)])
	*q = Request{entries: q.entries[:0], loads: q.loads[:0], paced: q.paced[:0], asked: q.asked[:0], about: q.about[:0], answers: q.answers[:0], stripe: q.stripe}
	requests.Put(q)
}

// Entries returns the entries of q: its buckets, in the order in which they are decided. Some
// are not decided by Decide: those after the first that denies, if limits are decided in order,
// and pools of which nothing was borrowed.
func (q *Request) Entries() []Entry { return q.entries }

// Loads returns the entries of limits that follow the load, in the order in which they are
// asked. They are decided last, by acquire.
func (q *Request) Loads() []Entry { return q.loads }

// Paced returns the entries of limits that pace the response. They deny nothing.
func (q *Request) Paced() []Entry { return q.paced }

// IsEmpty reports whether no limit applies to the request.
func (q *Request) IsEmpty() bool { return len(q.entries)+len(q.loads)+len(q.paced) == 0 }

// firstDenied returns the index of the first entry that has denied, or -1.
func (q *Request) firstDenied() int {
	for i := range q.entries {
		if q.entries[i].Denies() {
			return i
		}
	}
	return -1
}

// undecide forgets what was decided on the entries from one index to another.
func (q *Request) undecide(from, to int) {
	for i := from; i < to; i++ {
		q.entries[i].Decided = false
		q.entries[i].endWait()
	}
}

// notesDenials reports whether any of the limits counts denied requests, or bans for them.
func (q *Request) notesDenials() bool {
	for i := range q.entries {
		if l := q.entries[i].Limit; l.CountDenied || l.Bans != nil {
			return true
		}
	}
	return false
}

// queue returns the queue of e, for requests of a class.
func (e *Entry) queue(class adaptive.Class) wait.Key {
	key := wait.Key{Name: e.Query.Name, Key: e.Query.Key, Class: class}
	switch l := e.Limit; {
	case l.Load != nil:
		key.Load = l.Load.Options // with others, it has other slots
	case !l.limitsConcurrency():
		key.Cost = e.Query.Cost
	}
	return key
}

// fairBy returns which client the request is of, where clients wait for e: "" if they do not
// take turns, and for all clients without a value.
func (q *Request) fairBy(e *Entry) string {
	if e.Limit.Turns != nil && !e.hasClient {
		e.client, _, _ = e.Limit.Turns.Of(q.http, q.replacer) // one that can't be verified yet counts as missing
		e.hasClient = true
	}
	return e.client
}

// endWait notes that the request does not wait, or not any more, for the limit.
func (e *Entry) endWait() {
	if e.waits {
		e.Limit.Waiting.Unreserve()
		e.waits = false
	}
}

// Held returns what the request holds of the i-th entry, after Decide, or nil if it is charged
// at once.
func (q *Request) Held(i int) *settle.Logged {
	e := &q.entries[i]
	if !e.Query.Hold {
		return nil
	}
	h := settle.Holding{Terms: &e.Limit.Settlement, Cost: e.Estimate, Own: e.hasOwnKey()}
	for _, own := range q.holdings {
		if own.Entry == i {
			h = own
		}
	}
	return &settle.Logged{Holding: h, Request: q.http}
}
