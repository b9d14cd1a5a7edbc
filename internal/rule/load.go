package rule

import (
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A limit that follows the load has a bucket for its name, key and numbers, but no store is
// asked about it. Controllers in this process decide, once all others have, right before the
// request is passed on. It has a slot with them until its response begins, which takes no room while
// the upstream waits for the client to send the body.

// Load is how a limit follows the load.
type Load struct {
	Options     adaptive.Options
	UntilBody   bool                  // whether a request has its place until its response has ended
	High, Low   caddyhttp.MatcherSets // the requests that are more important than others, or less
	Controllers *adaptive.Controllers // of all limits of its name and options

	HighRaw, LowRaw caddyhttp.RawMatcherSets // these matchers as the config has them, to show

	proxied atomic.Bool // whether an upstream has ever answered a request by reverse_proxy
}

const (
	// latencyPlaceholder is set by reverse_proxy once an upstream has answered.
	latencyPlaceholder = "http.reverse_proxy.upstream.latency"

	// mostShedWait is the longest wait that is told to those who are turned away. It is random,
	// so that they do not return together.
	mostShedWait = 4 * time.Second
)

// classOf returns how important a request is. Its error is a matcher's.
func (l *Load) classOf(r *http.Request) (adaptive.Class, error) {
	for _, of := range [...]struct {
		class adaptive.Class
		sets  caddyhttp.MatcherSets
	}{{adaptive.High, l.High}, {adaptive.Low, l.Low}} {
		if len(of.sets) == 0 { // which would match all
			continue
		}
		if matches, err := of.sets.AnyMatchWithError(r); err != nil || matches {
			return of.class, err
		}
	}
	return adaptive.Normal, nil
}

// Loads returns the entries of limits that follow the load, in the order in which they are
// asked. There is no decision on them before Acquire.
func (q *Request) Loads() []Entry { return q.loads }

// Acquire asks the limits that follow the load for slots, one after the other, and tells o of
// those that have none. If one turns the request away, it is returned, with the wait that is
// told: those behind it are not asked, and what was charged before stays so.
func (q *Request) Acquire(o *outcome.Outcome, how outcome.How, h http.Header) (shed *outcome.Entry, wait time.Duration, err error) {
	var slots []Holding
	for i := range q.loads {
		e := &q.loads[i]
		load := e.Limit.Load
		class, err := load.classOf(q.http)
		if err != nil {
			release(slots)
			q.settleUnpassed()
			return nil, 0, err
		}
		p, room := q.acquire(e, class, o)
		e.decideLoad(room)
		if room || e.Query.DryRun {
			slots = append(slots, Holding{bucket: e.Bucket, place: p})
		}
		if room {
			continue
		}
		how.Families = 0 // it is no quota of clients
		decider, told := o.Add(1, func(int) outcome.Entry {
			return outcome.Entry{Policy: &e.Policy.Policy, Name: e.Query.Name, Limit: e.Query.Limit, Cost: e.Query.Cost, Decision: e.Decision}
		}, how, h)
		if e.Denies() {
			shed, wait = decider, told
			release(slots)
			q.settleUnpassed()
			break
		}
	}
	for i := range q.loads {
		if e := &q.loads[i]; e.Decided {
			e.Policy.Counters.Count(q.stripe, &e.Query, &e.Decision, false, shed != nil, false)
		}
	}
	if shed == nil {
		q.holdings = append(q.holdings, slots...)
		q.watchBody(slots)
	}
	return shed, wait, nil
}

// acquire asks for a slot at a limit that follows the load, for which the request may have to
// wait. In a dry run it has one in any case, and room says whether there was any.
func (q *Request) acquire(e *Entry, class adaptive.Class, o *outcome.Outcome) (p *place, room bool) {
	p = &place{limit: e.Limit, queue: e.queue(0)}
	asks := adaptive.Request{Class: class, Route: adaptive.Route{Method: q.http.Method, Segment: firstSegment(q.http.URL.Path)}, DryRun: e.Query.DryRun}
	ask := func() {
		now := time.Now()
		room = e.Limit.Load.Controllers.Of(e.Query.Key, now).Acquire(&p.slot, &asks, now)
	}
	waits := e.Limit.waitsForSlot() && !e.Query.DryRun
	t := granted // as a slot may have been freed before it is in the queue
	if waits && e.Limit.Waiting.hasWaiters(e.queue(class)) {
		t = waiting
		now := time.Now()
		e.Limit.Load.Controllers.Of(e.Query.Key, now).Queue(class, now)
	} else {
		ask()
	}
	if !room && waits {
		w := q.join(e, class, time.Now(), t)
		for !room && w.nextTurn() {
			ask()
		}
		if w.leave(room, o); room {
			e.Policy.Counters.CountDelayed(q.stripe)
		}
	}
	if !room {
		e.Limit.Load.Controllers.Of(e.Query.Key, time.Now()).Shed(class)
	}
	if e.Limit.waitsForSlot() && (room || e.Query.DryRun) {
		p.client = q.fairBy(e.Limit)
		p.lapse = time.AfterFunc(e.Limit.Load.Options.Counted(), func() { p.takesRoom(false) })
		p.takesRoom(true)
	}
	return p, room
}

// firstSegment returns the first segment of a path.
func firstSegment(path string) string {
	segment, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return segment
}

// decideLoad sets the decision on e.
func (e *Entry) decideLoad(room bool) {
	size := int64(e.Limit.Load.Options.Max)
	e.Decided, e.Decision = true, limiter.Decision{By: limiter.DecidedByLoad, DryRun: e.Query.DryRun, Size: size, Remaining: size}
	if !room {
		e.Decision.Denied, e.Decision.Remaining = true, 0
		e.Decision.RetryAfter = time.Duration(1 + rand.Int64N(int64(mostShedWait))) //nolint:gosec // not a secret
	}
}

// place is the slot of a request at a limit that follows the load.
type place struct {
	limit    *Limit
	queue    queueKey // of one of the classes that wait for it, if any may
	client   string   // by fair_by, if any may wait
	slot     adaptive.Slot
	answered bool // whether the header of the response is an answer; of a limit until body

	lapse   *time.Timer // until it takes no room any more, if any may wait
	counted bool        // whether it is one of the client's slots; guarded by the queues' lock
}

// takesRoom has the place count as one of its client's slots, or not, where any request may wait.
func (p *place) takesRoom(takes bool) {
	if !p.limit.waitsForSlot() {
		return
	}
	s := p.limit.Waiting.Queues
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case p.counted == takes:
	case takes:
		s.countSlots(p.queue, p.client, 1)
	default:
		s.countSlots(p.queue, p.client, -1)
	}
	p.counted = takes
}

// release gives the slot back. answered says whether an upstream has answered.
func (p *place) release(answered bool) { p.releaseAt(time.Now(), answered) }

// releaseAt is release at some time.
func (p *place) releaseAt(now time.Time, answered bool) {
	if p.slot.Release(now, answered) {
		p.limit.Reporter.SlowAtMin(&p.limit.Load.Options, p.slot.State(now))
	}
	if p.lapse != nil {
		p.lapse.Stop()
	}
	p.takesRoom(false)
	p.wake()
}

// wake has the next request that waits for room ask for it.
func (p *place) wake() {
	if !p.limit.waitsForSlot() {
		return
	}
	key := p.queue
	for _, class := range [...]adaptive.Class{adaptive.High, adaptive.Normal, adaptive.Low} {
		key.class = class
		p.limit.Waiting.freed(key, 1, 0)
	}
}

// release gives all slots back, of a request that is not passed on.
func release(slots []Holding) {
	for i := range slots {
		slots[i].place.release(false)
	}
}

// watchBody has slots take no room while the body of the request is read, and nothing of it is
// there.
func (q *Request) watchBody(slots []Holding) {
	r := q.http
	if len(slots) == 0 || r.ContentLength == 0 || r.Body == nil || r.Body == http.NoBody {
		return
	}
	watched := watchedBody{ReadCloser: r.Body}
	for i := range slots {
		watched.places = append(watched.places, slots[i].place)
	}
	r.Body = watched
}

// watchedBody is the body of a request with slots.
type watchedBody struct {
	io.ReadCloser
	places []*place
}

// Read implements io.Reader. It is also called while or after slots are released.
func (b watchedBody) Read(buffer []byte) (int, error) {
	now := time.Now()
	for _, p := range b.places {
		if p.slot.Wait(now) {
			p.takesRoom(false)
			p.wake()
		}
	}
	n, err := b.ReadCloser.Read(buffer)
	now = time.Now()
	for _, p := range b.places {
		if left := p.slot.Resume(now); left > 0 && p.lapse != nil {
			p.lapse.Reset(left) // which also ends it if it is released meanwhile
			p.takesRoom(true)
		}
	}
	return n, err
}

// leavePlaces releases slots when the header of the response, with a status, is there. A limit
// until body releases it later, except for what need not end: upgraded connections, and events.
func (s *settler) leavePlaces(status int) {
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.place == nil {
			continue
		}
		answered := s.answers(h.place.limit.Load, status)
		if h.place.limit.Load.UntilBody && !s.isStreaming(status) {
			h.place.answered = answered
			continue
		}
		h.place.release(answered)
		h.place = nil
	}
}

// leaveAll releases the slots that are left at the end of a request, or when a handler takes its
// connection. Without a header they have not been answered.
func (s *settler) leaveAll(whole bool) {
	for i := range s.holdings {
		if h := &s.holdings[i]; h.place != nil {
			h.place.release(whole && h.place.answered)
			h.place = nil
		}
	}
}

// answers reports whether the header of a response is an answer of the upstream: no failure,
// which may be fast because nothing was done, and, where an upstream is known to be behind
// reverse_proxy, not one of another handler.
func (s *settler) answers(l *Load, status int) bool {
	repl := s.request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	_, proxied := repl.Get(latencyPlaceholder)
	if proxied && !l.proxied.Load() {
		l.proxied.Store(true)
	}
	return status < statusClientLeft && status != http.StatusTooManyRequests && s.routedError() == nil && (proxied || !l.proxied.Load())
}

// isStreaming reports whether a response need not end, as its header says.
func (s *settler) isStreaming(status int) bool {
	return s.upgrades(status) || strings.HasPrefix(strings.ToLower(s.Header().Get("Content-Type")), "text/event-stream")
}
