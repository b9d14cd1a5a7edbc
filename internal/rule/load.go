package rule

import (
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
// request is passed on. It has a place with them until its response begins.

// Load is how a limit follows the load.
type Load struct {
	Options     adaptive.Options
	UntilBody   bool                  // whether a request has its place until its response has ended
	High, Low   caddyhttp.MatcherSets // the requests that are more important than others, or less
	Controllers *adaptive.Controllers // those of all limits of its name and options

	proxied atomic.Bool // whether an upstream has ever answered a request by reverse_proxy
}

const (
	// latencyPlaceholder is set by reverse_proxy once an upstream has answered.
	latencyPlaceholder = "http.reverse_proxy.upstream.latency"

	// mostShedWait is the longest wait that is told to those who are turned away. It is random,
	// so that they do not return together.
	mostShedWait = 4 * time.Second
)

// classOf returns how important a request is. Its error is that of a matcher.
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
// asked. There is no decision on them before Enter.
func (q *Request) Loads() []Entry { return q.loads }

// Enter asks the limits that follow the load for places, one after the other, and tells o of
// those that have none. If one turns the request away, it is returned, with the wait that is
// told: those behind it are not asked, and what was charged before stays so.
func (q *Request) Enter(o *outcome.Outcome, how outcome.How, h http.Header) (shed *outcome.Entry, wait time.Duration, err error) {
	var places []Holding
	for i := range q.loads {
		e := &q.loads[i]
		load := e.Limit.Load
		class, err := load.classOf(q.http)
		if err != nil {
			leave(places)
			q.settleUnpassed()
			return nil, 0, err
		}
		p, room := q.placeAt(e, class, o)
		e.decideLoad(room)
		if room || e.Query.DryRun {
			places = append(places, Holding{bucket: e.Bucket, place: p})
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
			leave(places)
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
		q.holdings = append(q.holdings, places...)
	}
	return shed, wait, nil
}

// placeAt asks for a place at a limit that follows the load, for which the request may have to
// wait. In a dry run it has one in any case, and room says whether there was any.
func (q *Request) placeAt(e *Entry, class adaptive.Class, o *outcome.Outcome) (p *place, room bool) {
	p = &place{limit: e.Limit, queue: e.queue(0)}
	ask := func() {
		p.since = time.Now()
		p.controller = e.Limit.Load.Controllers.Of(e.Query.Key, p.since)
		room = p.controller.Admit(class, e.Query.DryRun, p.since)
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
	return p, room
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

// place is that of a request with the controller of a limit that follows the load.
type place struct {
	limit      *Limit
	queue      queueKey // of one of the classes that wait for it, if any may
	controller *adaptive.Controller
	since      time.Time
	answered   bool // whether the header of the response is an answer; of a limit until body
}

// leave frees the place. answered says whether an upstream has answered.
func (p *place) leave(answered bool) { p.leaveAt(time.Now(), answered) }

// leaveAt is leave at some time.
func (p *place) leaveAt(now time.Time, answered bool) {
	if p.controller.Finish(p.since, now, answered) {
		p.limit.Reporter.slowAtMin(p.limit, p.controller.State(now).Mean)
	}
	if !p.limit.waitsForSlot() {
		return
	}
	for _, class := range [...]adaptive.Class{adaptive.High, adaptive.Normal, adaptive.Low} {
		p.queue.class = class
		p.limit.Waiting.freed(p.queue, 1)
	}
}

// leave frees all places, of a request that is not passed on.
func leave(places []Holding) {
	for i := range places {
		places[i].place.leave(false)
	}
}

// leavePlaces frees places when the header of the response, with a status, is there. A limit
// until body frees it later, but for what need not end: upgraded connections, and events.
func (s *settler) leavePlaces(status int) {
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.place == nil {
			continue
		}
		answered := s.answers(h.place.limit.Load, status)
		if h.place.limit.Load.UntilBody && !s.endless(status) {
			h.place.answered = answered
			continue
		}
		h.place.leave(answered)
		h.place = nil
	}
}

// leaveAll frees the places that are left at the end of a request, or when a handler takes its
// connection. Without a header they have not been answered.
func (s *settler) leaveAll(whole bool) {
	for i := range s.holdings {
		if h := &s.holdings[i]; h.place != nil {
			h.place.leave(whole && h.place.answered)
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

// endless reports whether a response need not end, as its header says.
func (s *settler) endless(status int) bool {
	return status == http.StatusSwitchingProtocols || s.request.Method == http.MethodConnect ||
		strings.HasPrefix(strings.ToLower(s.Header().Get("Content-Type")), "text/event-stream")
}
