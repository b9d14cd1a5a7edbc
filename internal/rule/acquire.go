package rule

import (
	"math/rand/v2"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A limit that follows the load has a bucket for its name, key and numbers, but no store is
// asked about it. Controllers in this process decide, once all others have, right before the
// request is passed on. It has a slot with them until its response begins, which takes no room while
// the upstream waits for the client to send the body.

// mostShedWait is the longest wait that is reported to requests that are turned away. It is random, so that
// they do not return together.
const mostShedWait = 4 * time.Second

// acquire asks the limits that follow the load for slots, one after the other, and adds those that
// have none to the entries. If one turns the request away, those behind it are not asked, and what
// was charged before stays so.
func (q *Request) acquire() (err error) {
	var places []*settle.Place
	shed, now := false, time.Now()
	for i := 0; i < len(q.loads) && err == nil && !shed; i++ {
		e := &q.loads[i]
		var class adaptive.Class
		if class, err = e.Limit.Load.ClassOf(q.http); err != nil {
			break
		}
		p, room := q.enter(e, class)
		if room || e.Query.DryRun {
			places = append(places, p)
			q.holdings = append(q.holdings, settle.Holding{Terms: &e.Limit.Settlement, Place: p})
		}
		if !room {
			q.entries, q.decided, shed = append(q.entries, *e), now, e.Denies()
		}
	}
	if err != nil || shed {
		for _, p := range places {
			p.Release(false)
		}
		q.settleUnpassed()
	} else {
		settle.WatchBody(q.http, places)
	}
	for i := range q.loads {
		if e := &q.loads[i]; e.Decided && err == nil {
			q.countEntry(e, shed, false)
		}
	}
	return err
}

// enter asks for a slot at a limit that follows the load, for which the request may have to
// wait. In a dry run it has one in any case, and room says whether there was any.
func (q *Request) enter(e *Entry, class adaptive.Class) (p *settle.Place, room bool) {
	p = &settle.Place{Load: e.Limit.Load}
	segment, _, _ := strings.Cut(strings.TrimPrefix(q.http.URL.Path, "/"), "/")
	asks := adaptive.Request{Class: class, Route: adaptive.Route{Method: q.http.Method, Segment: segment}, DryRun: e.Query.DryRun}
	ask := func() {
		now := time.Now()
		room = e.Limit.Load.Controllers.Of(e.Query.Key, now).Acquire(&p.Slot, &asks, now)
	}
	waits := e.Limit.waitsForSlot() && !e.Query.DryRun
	t := wait.Granted // as a slot may have been freed before it is in the queue
	if waits && e.Limit.Waiting.HasWaiters(e.queue(class)) {
		t = wait.Waiting
		now := time.Now()
		e.Limit.Load.Controllers.Of(e.Query.Key, now).Queue(class, now)
	} else {
		ask()
	}
	if !room && waits {
		w := q.newWaiter(e, e.queue(class), time.Now())
		if w.Join(t, e.Limit.MaxWaiting) {
			for !room && w.Next() {
				ask()
			}
			q.leave(w, e, room)
		}
		if room {
			e.Policy.Counters.Add(q.stripe, telemetry.Delayed, 1)
		}
	}
	size := int64(e.Limit.Load.Options.Max)
	e.Decided, e.Decision = true, limiter.Decision{By: limiter.DecidedByLoad, DryRun: e.Query.DryRun, Size: size, Remaining: size}
	if !room {
		e.Limit.Load.Controllers.Of(e.Query.Key, time.Now()).Shed(class)
		e.Decision.Denied, e.Decision.Remaining = true, 0
		e.Decision.RetryAfter = time.Duration(1 + rand.Int64N(int64(mostShedWait))) //nolint:gosec // not a secret
	}
	if e.Limit.waitsForSlot() && (room || e.Query.DryRun) {
		p.TakeUp(e.Limit.Waiting.NewSlots(e.queue(0), q.fairBy(e), 1, false))
	}
	return p, room
}
