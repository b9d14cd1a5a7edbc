package telemetry

import (
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Names of the events that are emitted for Caddy's events app.
const (
	EventExceeded   = "rate_limit_exceeded"
	EventWouldDeny  = "rate_limit_would_deny"
	EventShed       = "rate_limit_shed"
	EventBanned     = "rate_limit_banned"
	EventRedisLost  = "rate_limit_redis_lost"
	EventRedisBack  = "rate_limit_redis_back"
	EventMemoryFull = "rate_limit_memory_full"
)

const (
	// denialsEvery is how often a limit may emit an event of denials.
	denialsEvery = 10 * time.Second

	// MaxWaitingEvents is the maximum number of events that wait for the handlers of
	// earlier ones.
	MaxWaitingEvents = 64

	// MaxStuckEvents is the maximum number of events whose handlers run longer than
	// the next event waits. Beyond that no handler is invoked.
	MaxStuckEvents = 8
)

// denialEvents are the events of denials. Those of dry runs have one of their own,
// since a handler may act on a denial, and so have those that say something of an upstream and
// nothing of a client.
var denialEvents = [...]struct {
	name    string
	results []Result
	every   time.Duration // how often a limit may emit it
}{
	exceeded:  {EventExceeded, []Result{Denied, Banned}, denialsEvery},
	wouldDeny: {EventWouldDeny, []Result{WouldDeny}, denialsEvery},
	shed:      {EventShed, []Result{Shed}, time.Second},
}

// The indices of denialEvents.
const (
	exceeded = iota
	wouldDeny
	shed
)

// emitter emits events one after the other, on a goroutine of its own, so that
// their handlers delay no request and no reload. They are emitted by the newest
// config that has started: stores and counters outlive configs, and an event of an
// older one would reach no subscriber. Before the first config has started, events wait.
type emitter struct {
	process *Process
	queue   chan event
	started chan struct{} // a config has started
	stuck   chan struct{} // has an element for each event that is being handled
	dropped atomic.Int64  // events, since this was logged
	slow    Throttle      // of the log of slow handlers
	running chan struct{} // has an element while it runs
}

// event is an event to emit.
type event struct {
	name string
	data map[string]any
}

// newEmitter returns an emitter. Nothing is emitted unless it runs.
func newEmitter(p *Process) *emitter {
	return &emitter{
		process: p,
		queue:   make(chan event, MaxWaitingEvents),
		started: make(chan struct{}, 1),
		stuck:   make(chan struct{}, MaxStuckEvents),
		running: make(chan struct{}, 1),
	}
}

// listen notes which config emits events from now on. There are no events for denials
// before that. The lock must be held.
func (p *Process) listen() {
	newest := p.newestStarted()
	for kind := range denialEvents {
		listens := newest != nil && newest.listens(denialEvents[kind].name)
		if listens && !p.listening[kind] {
			for _, c := range p.Counters.All() {
				c.reported[kind].denials = c.denied(kind)
			}
		}
		p.listening[kind] = listens
	}
	select {
	case p.events.started <- struct{}{}:
	default:
	}
}

// lookForDenials emits an event of each limit that has denied requests since its last
// one, unless that was a moment ago. If the handlers of too many events are stuck, it
// does so later, and returns false.
func (p *Process) lookForDenials(now time.Time) (inTime bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	inTime = true
	for kind := 0; kind < len(denialEvents) && inTime; kind++ {
		if p.listening[kind] {
			inTime = p.lookForDenialsOf(kind, now)
		}
	}
	return inTime
}

// lookForDenialsOf is lookForDenials for one of denialEvents. The lock must be held.
func (p *Process) lookForDenialsOf(kind int, now time.Time) (inTime bool) {
	for _, c := range p.Counters.All() {
		denied, reported := c.denied(kind), &c.reported[kind]
		if denied == reported.denials || now.Before(reported.next) {
			continue
		}
		if len(p.events.stuck) >= cap(p.events.stuck) {
			return false
		}
		wait := c.lastWait(kind)
		data := map[string]any{"limit": c.Path, "wait": time.Duration(wait).Seconds(), "count": denied - reported.denials}
		if wait == waitForever {
			data["wait"] = nil
		}
		select {
		case p.events.queue <- event{denialEvents[kind].name, data}:
			reported.denials, reported.next = denied, now.Add(denialEvents[kind].every)
		default:
			return false
		}
	}
	return true
}

// Banned emits an event of a ban that has begun. key is the text of the key, or nil if keys are not wanted. If
// many begin at once, some are not reported: they must not crowd out other events.
func (p *Process) Banned(limit string, d time.Duration, key *string) {
	e := p.events
	if len(e.queue) >= MaxWaitingEvents/2 {
		e.drop()
		return
	}
	data := map[string]any{"limit": limit, "duration": d.Seconds()}
	if key != nil {
		data["key"] = *key
	}
	e.send(EventBanned, data)
}

// send queues an event, or drops it if too many wait already.
func (e *emitter) send(name string, data map[string]any) {
	select {
	case e.queue <- event{name, data}:
	default:
		e.drop()
	}
}

// drop counts an event without a subscriber.
func (e *emitter) drop() {
	e.dropped.Add(1)
	e.warn()
}

// warn logs that events are delayed or were dropped, at most once a minute.
func (e *emitter) warn() {
	if newest := e.process.Newest(); newest != nil && e.slow.Allow() {
		newest.Logger.Warn("event handlers are too slow: events are delayed or dropped", zap.Int64("dropped", e.dropped.Swap(0)))
	}
}

// run emits events until ctx is done, and then forgets those that wait, as no config is
// left to emit them. One that still runs ends first.
func (e *emitter) run(ctx context.Context) {
	e.running <- struct{}{}
	defer func() { <-e.running }()
	for {
		queue := e.queue
		if e.config() == nil {
			queue = nil
		}
		select {
		case <-ctx.Done():
			for len(e.queue) > 0 {
				<-e.queue
			}
			return
		case <-e.started:
		case ev := <-queue:
			e.emit(ctx, ev)
		}
	}
}

// config returns the config that emits events now, or nil.
func (e *emitter) config() *Config {
	e.process.mu.Lock()
	defer e.process.mu.Unlock()
	return e.process.newestStarted()
}

// emit has an event handled and waits for that, but not for long. What handlers return
// is ignored: there is nothing that they could abort.
func (e *emitter) emit(ctx context.Context, ev event) {
	config := e.config()
	if config == nil || !config.listens(ev.name) {
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
				config.Logger.Error("an event handler panicked",
					zap.String("event", ev.name), zap.Any("panic", p), zap.Stack("stack"))
			}
			<-e.stuck
			close(handled)
		}()
		config.emit(ev.name, ev.data)
	}()
	patience := time.NewTimer(e.process.opt.Patience)
	defer patience.Stop()
	select {
	case <-handled:
	case <-patience.C:
	case <-ctx.Done():
	}
}
