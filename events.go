package ratelimit

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Names of the events that are emitted for Caddy's events app.
const (
	eventExceeded   = "rate_limit_exceeded"
	eventRedisLost  = "rate_limit_redis_lost"
	eventRedisBack  = "rate_limit_redis_back"
	eventMemoryFull = "rate_limit_memory_full"
)

const (
	// exceededEvery is how often a limit may emit eventExceeded.
	exceededEvery = 10 * time.Second

	// maxWaitingEvents is the maximum number of events that wait for the handlers of
	// earlier ones.
	maxWaitingEvents = 64

	// maxStuckEvents is the maximum number of events whose handlers run longer than
	// handlerPatience. Beyond that no handler is invoked.
	maxStuckEvents = 8
)

// handlerPatience is how long the next event waits for the handlers of the one
// before, so that they come in order. Tests lower it.
var handlerPatience = 10 * time.Second

// events emits the events of this process.
var events = newEmitter()

// emitter emits events one after the other, on a goroutine of its own, so that
// their handlers delay no request and no reload. They are emitted by the newest
// app that has started: stores and counters outlive configs, and an event of an
// older app would reach nobody. Before the first app has started, events wait.
type emitter struct {
	// Whether anyone listens to eventExceeded. Requests look at nothing else if
	// not.
	wantsExceeded atomic.Bool

	exceeded chan *counters // of limits that have denied a request since their last event
	queue    chan event     // other events
	started  chan struct{}  // an app has started
	stuck    chan struct{}  // has an element for each event that is being handled
	dropped  atomic.Int64   // events, since this was logged
	throttle logThrottle    // of the log of slow handlers
	running  sync.Mutex     // held while it runs

	// The clock, and when to look whether limits may emit eventExceeded again.
	// Tests replace them.
	now   func() time.Time
	ticks func() (ticks <-chan time.Time, stop func())
}

// event is an event to emit.
type event struct {
	name string
	data map[string]any
}

// denials is what is known about the denials of a limit for eventExceeded.
type denials struct {
	// The wait of the first denial since the last event, see encodeWait. Zero if
	// there was none.
	wait atomic.Int64

	reported atomic.Uint64 // how many denials the events so far have told of
}

// waitForever stands for the wait of a request that will never be admitted.
const waitForever = math.MaxInt64

// encodeWait returns the wait of a denial, which is never zero.
func encodeWait(d *limiter.Decision) int64 {
	if d.Never {
		return waitForever
	}
	return max(int64(d.RetryAfter), 1)
}

// newEmitter returns an emitter. Nothing is emitted unless it runs.
func newEmitter() *emitter {
	return &emitter{
		exceeded: make(chan *counters, maxWaitingEvents),
		queue:    make(chan event, maxWaitingEvents),
		started:  make(chan struct{}, 1),
		stuck:    make(chan struct{}, maxStuckEvents),
		now:      time.Now,
		ticks: func() (<-chan time.Time, func()) {
			ticker := time.NewTicker(time.Second)
			return ticker.C, ticker.Stop
		},
	}
}

// denied notes that a limit has denied a request. c must have counted that already.
// It is called for each denial and must be fast: only the first denial after an
// event of the limit does more than look.
func (e *emitter) denied(c *counters, d *limiter.Decision) {
	if !e.wantsExceeded.Load() || c.denials.wait.Load() != 0 || !c.denials.wait.CompareAndSwap(0, encodeWait(d)) {
		return
	}
	select {
	case e.exceeded <- c:
	default: // the next denial tries again; none is lost, as they are counted
		c.denials.wait.Store(0)
	}
}

// send queues an event, or drops it if too many wait already.
func (e *emitter) send(name string, data map[string]any) {
	select {
	case e.queue <- event{name, data}:
	default:
		e.drop()
	}
}

// redis queues the event of a Redis server, if it is one that changes its state.
func (e *emitter) redis(ev limiter.Event) {
	switch ev.Kind {
	case limiter.EventDown:
		e.send(eventRedisLost, map[string]any{"server": ev.Server, "reason": ev.Reason})
	case limiter.EventRecovered, limiter.EventReplaced:
		e.send(eventRedisBack, map[string]any{"server": ev.Server, "down": ev.Downtime.Seconds()})
	case limiter.EventError: // the server is still up
	}
}

// start makes e run until ctx is done.
func (e *emitter) start(ctx context.Context) { go e.run(ctx) }

// run emits events until ctx is done.
func (e *emitter) run(ctx context.Context) {
	e.running.Lock()
	defer e.running.Unlock()
	defer e.drain()
	ticks, stop := e.ticks()
	defer stop()
	limits := make(exceededLimits)
	for ctx.Err() == nil {
		queue := e.queue
		if newestStartedApp() == nil {
			queue = nil
		}
		select {
		case <-ctx.Done():
		case <-e.started:
		case ev := <-queue:
			e.emit(ctx, ev)
		case c := <-e.exceeded:
			if limits.add(c, e.now()) {
				e.emitExceeded(ctx, limits, c)
			}
		case <-ticks:
			for _, c := range limits.due(e.now()) {
				e.emitExceeded(ctx, limits, c)
			}
		}
	}
}

// drain forgets the events that wait, as no app is left to emit them.
func (e *emitter) drain() {
	for {
		select {
		case <-e.queue:
		case c := <-e.exceeded:
			c.denials.wait.Store(0)
		default:
			return
		}
	}
}

// exceededLimits are the limits that have emitted eventExceeded recently, or are
// about to.
type exceededLimits map[*counters]exceededLimit

// exceededLimit is the state of one of these.
type exceededLimit struct {
	next    time.Time // when it may emit an event again
	waiting bool      // whether it has denied a request since its last event
}

// add notes that a limit has denied a request, and reports whether it may emit an
// event now.
func (l exceededLimits) add(c *counters, now time.Time) (due bool) {
	limit := l[c]
	limit.waiting = true
	l[c] = limit
	return !now.Before(limit.next)
}

// due returns the limits that are to emit an event now. It forgets those that have
// not denied any request for a while.
func (l exceededLimits) due(now time.Time) (due []*counters) {
	for c, limit := range l {
		switch {
		case now.Before(limit.next):
		case limit.waiting:
			due = append(due, c)
		default:
			delete(l, c)
		}
	}
	return due
}

// emitExceeded tells of all denials of a limit since its last event. If the
// handlers of too many events are stuck, it does so later.
func (e *emitter) emitExceeded(ctx context.Context, limits exceededLimits, c *counters) {
	if len(e.stuck) == cap(e.stuck) {
		e.warn()
		return
	}
	// Denials that are counted after this set the wait again.
	wait := c.denials.wait.Swap(0)
	totals := c.totals()
	denied := totals.of(countedDenied)
	count := denied - c.denials.reported.Swap(denied)
	if count == 0 { // the last event has told of them
		delete(limits, c)
		return
	}
	limits[c] = exceededLimit{next: e.now().Add(exceededEvery)}
	data := map[string]any{"limit": c.path, "wait": time.Duration(wait).Seconds(), "count": count}
	if wait == waitForever {
		data["wait"] = nil
	}
	e.emit(ctx, event{eventExceeded, data})
}

// emit invokes the handlers of an event and waits for them, but not for long. What
// they return is ignored: there is nothing that they could abort.
func (e *emitter) emit(ctx context.Context, ev event) {
	app := newestStartedApp()
	if app == nil || app.ctx.Err() != nil || !app.events.ShouldEmit(ev.name) {
		return
	}
	select {
	case e.stuck <- struct{}{}:
	default:
		e.drop()
		return
	}
	handled := make(chan struct{})
	go func() {
		defer func() {
			if p := recover(); p != nil {
				app.logger.Error("an event handler panicked",
					zap.String("event", ev.name), zap.Any("panic", p), zap.Stack("stack"))
			}
			<-e.stuck
			close(handled)
		}()
		app.events.Emit(app.ctx, ev.name, ev.data)
	}()
	patience := time.NewTimer(handlerPatience)
	defer patience.Stop()
	select {
	case <-handled:
	case <-patience.C:
	case <-ctx.Done():
	}
}

// drop counts an event that nobody will get.
func (e *emitter) drop() {
	e.dropped.Add(1)
	e.warn()
}

// warn logs that events are late or were dropped, at most once a minute.
func (e *emitter) warn() {
	if app := newestApp(); app != nil && e.throttle.allow() {
		app.logger.Warn("event handlers take too long, events are late or were dropped", zap.Int64("dropped", e.dropped.Swap(0)))
	}
}

// listen notes that a, or none if it is nil, is the app that emits events from now
// on.
func (e *emitter) listen(a *App) {
	wants := a != nil && a.events.ShouldEmit(eventExceeded)
	if wants && !e.wantsExceeded.Load() {
		limitCounters.Range(func(_, c any) bool { // what was before is not told now
			totals := c.(*counters).totals()
			c.(*counters).denials.reported.Store(totals.of(countedDenied))
			return true
		})
	}
	e.wantsExceeded.Store(wants)
	select {
	case e.started <- struct{}{}:
	default:
	}
}

// openEvents makes the app emit events once its config has started. It must not do
// so earlier: until then the events app may still be adding handlers.
func (a *App) openEvents(ctx caddy.Context) error {
	loaded, err := ctx.App("events")
	if err != nil {
		return err
	}
	app, ok := loaded.(*caddyevents.App)
	if !ok {
		return errors.New("the events app is not Caddy's")
	}
	a.ctx, a.events = ctx, app
	return app.On("started", startedHandler{a})
}

// startedHandler handles the event that the config of an app has started. Caddy
// logs handlers with their exported fields, of which this has none: those of the
// app include passwords.
type startedHandler struct{ app *App }

// Handle implements caddyevents.Handler.
func (h startedHandler) Handle(context.Context, caddy.Event) error {
	running.Lock()
	defer running.Unlock()
	h.app.started = true
	events.listen(running.newestStarted())
	return nil
}

// newestStarted returns the newest app whose config has started, or nil if there is
// none. The lock must be held.
func (r *runningApps) newestStarted() *App {
	for i := len(r.apps) - 1; i >= 0; i-- {
		if r.apps[i].started {
			return r.apps[i]
		}
	}
	return nil
}

// newestStartedApp is newestStarted with the lock.
func newestStartedApp() *App {
	running.Lock()
	defer running.Unlock()
	return running.newestStarted()
}
