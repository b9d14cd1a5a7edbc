// Package telemetry counts what limits decide and reports it: metrics, rates, events and
// log lines.
package telemetry

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/refpool"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// App is the app of this module. It is a type of the root package, which can't be imported from
// here.
type App interface {
	caddy.App

	// Compiled returns what the app has become, once it is provisioned.
	Compiled() *Config
}

// Config is a config that runs. There are two while one replaces the other.
type Config struct {
	App     caddy.App        // whose config it is
	Limits  []Limit          // of which several may share a path
	Memory  *limiter.Memory  // the store in this process
	MaxKeys int              // of that store
	Saved   func() time.Time // when that store was written to its file, or the zero time
	Redis   *limiter.Redis   // the store in Redis; nil without
	Metrics bool             // whether to report metrics
	Logger  *zap.Logger      // which does not block
	Events  *caddyevents.App
	Context caddy.Context // in which events are emitted
}

// listens reports whether anyone wants to know of an event.
func (c *Config) listens(event string) bool {
	return c.Context.Err() == nil && c.Events.ShouldEmit(event)
}

// emit has an event handled. It may block.
func (c *Config) emit(event string, data map[string]any) { c.Events.Emit(c.Context, event, data) }

// usage returns the usage of the store in this process. It has the limits too that have not
// had any bucket yet.
func (c *Config) usage() []limiter.LimitUsage {
	usages := c.Memory.Usage()
	used := make(map[string]bool)
	for _, u := range usages {
		used[u.Name] = true
	}
	for _, l := range c.Limits {
		if !used[l.Name] {
			used[l.Name] = true
			usages = append(usages, limiter.LimitUsage{Name: l.Name, MaxKeys: l.MaxKeys})
		}
	}
	return usages
}

// leases returns how units are used that were leased of the store in Redis, if there is one.
func (c *Config) leases() []limiter.LeaseUsage {
	if c.Redis == nil {
		return nil
	}
	return c.Redis.Leases()
}

// limitPath returns the path of the limit whose buckets have a name: the part before what distinguishes
// buckets of one path apart, see rule.Bucket.SetName.
func limitPath(name string) string {
	path, _, _ := strings.Cut(name, "@")
	return path
}

// Limit is a limit that metrics are kept for: its algorithm and numbers as text, empty for
// those that the algorithm does not have.
type Limit struct {
	Name     string // of its buckets in stores
	MaxKeys  int    // of these buckets
	Counters *Counters

	Algorithm, Size, DripRate, DripSize, Window string

	Policies Policies
	Load     *adaptive.Controllers // if it follows the load
	Waiting  func() Waiting        // the requests that wait for it; nil if none may
}

// Waiting is how many requests wait for a limit now.
type Waiting struct {
	Requests int // all of them
	Clients  int // those that have a request in a queue
	Longest  int // the most requests of a client in a queue
}

// Policies are those options of a limit, as a set, of which more is counted than what the
// limit admits and denies.
type Policies uint16

// The options.
const (
	DryRun      Policies = 1 << iota // it denies nothing
	Soft                             // it admits more than its size
	Delays                           // requests may wait for room
	Bans                             // it bans keys
	Borrows                          // it borrows from a pool
	Leases                           // this process may decide, from what it has leased
	Eventual                         // this process may decide, and report afterwards
	Load                             // it follows the load, and no store decides
	Fields                           // its key has fields of what clients submit
	Connections                      // it counts connections, which this process decides on
	Open                             // the same, those that are open
)

// Has reports whether p has the option.
func (p Policies) Has(option Policies) bool { return p&option != 0 }

// Process is what a process counts, whichever config it runs. Counters, rates and what is
// logged at most once a minute outlive configs.
type Process struct {
	opt      Options
	Counters *refpool.Pool[string, *Counters] // of limits, by path
	checked  [stripes]struct {
		_ [64]byte
		n [checkedKinds]atomic.Uint64
	}
	redisWait prometheus.Histogram
	events    *emitter
	losses    losses

	// ServerStats returns the state of the servers of a store. Tests replace it.
	ServerStats func(*limiter.Redis) []limiter.ServerStats

	mu        sync.Mutex
	configs   []*running // the newest last
	stop      context.CancelFunc
	sampled   time.Time // when rates and full limits were looked at last
	rates     rates
	full      fullLimits
	listening [len(denialEvents)]bool // whether the newest config that has started wants to know of denials
	failed    map[[2]string]*Throttle // of what is logged of each server, by reason
}

// running is a config that runs.
type running struct {
	*Config
	limits  map[string]Limit // by path
	started bool             // whether the whole of Caddy's config has
}

// Options are what tests set.
type Options struct {
	Now      func() time.Time // the clock of events; time.Now by default
	Every    time.Duration    // how often to look for denials; a second by default
	Patience time.Duration    // how long an event waits for the handlers of the one before; 10 s by default
}

// New returns the telemetry of a process without configs.
func New(opt Options) *Process {
	if opt.Now == nil {
		opt.Now = time.Now
	}
	if opt.Every == 0 {
		opt.Every = time.Second
	}
	if opt.Patience == 0 {
		opt.Patience = 10 * time.Second
	}
	p := &Process{
		opt: opt, Counters: refpool.New(func(path string) *Counters { return &Counters{Path: path} }), redisWait: newRedisWait(), failed: make(map[[2]string]*Throttle),
		ServerStats: (*limiter.Redis).Stats, losses: losses{lost: make(map[string]*loss)},
	}
	p.events = newEmitter(p)
	p.full.reset()
	return p
}

// Add adds a config. Until it is removed, it is the newest one.
func (p *Process) Add(c *Config) {
	defer p.follow()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.configs) == 0 {
		var ctx context.Context
		ctx, p.stop = context.WithCancel(context.Background())
		go p.look(ctx)
		go p.events.run(ctx)
	}
	p.configs = append(p.configs, &running{Config: c, limits: byPath(c.Limits)})
}

// Started notes that the whole config that c is part of has started: only then do
// all handlers of events listen.
func (p *Process) Started(c *Config) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.configs {
		r.started = r.started || r.Config == c
	}
	p.listen()
}

// Remove removes a config, if it was added.
func (p *Process) Remove(c *Config) {
	defer p.follow()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.configs = slices.DeleteFunc(p.configs, func(r *running) bool { return r.Config == c })
	p.listen()
	if len(p.configs) == 0 && p.stop != nil {
		p.stop()
		p.stop = nil
	}
}

// Newest returns the newest config, or nil if there is none, as when Caddy's config has
// no limits. It is not one that Caddy is still provisioning, or failed to start.
func (p *Process) Newest() *Config {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.configs) == 0 {
		return nil
	}
	return p.configs[len(p.configs)-1].Config
}

// newestStarted returns the newest config that has started, or nil. The lock must be
// held.
func (p *Process) newestStarted() *Config {
	for _, r := range slices.Backward(p.configs) {
		if r.started {
			return r.Config
		}
	}
	return nil
}

// look looks at the counters now and then until ctx is done. One goroutine does so for
// all configs, so that no request has to.
func (p *Process) look(ctx context.Context) {
	ticker := time.NewTicker(p.opt.Every)
	defer ticker.Stop()
	for ctx.Err() == nil {
		p.Look()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// Look looks at the counters: for denials to emit events of and, every second time, for
// limits that are full. It takes a sample for the rates then.
func (p *Process) Look() {
	p.lookForReturns()
	now := p.opt.Now()
	if !p.lookForDenials(now) {
		p.events.warn()
	}
	newest := p.Newest()
	if newest == nil || !p.sample(now) {
		return
	}
	usages := newest.usage()
	p.mu.Lock()
	full := p.full.due(now, usages)
	p.mu.Unlock()
	for _, limit := range full {
		if limit.memory {
			limit.maxKeys = newest.MaxKeys
		}
		limit.log(newest.Logger)
		p.events.send(EventMemoryFull, limit.data())
	}
}

// sample takes a sample for the rates, if it is time to do so.
func (p *Process) sample(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.sampled) < sampleEvery {
		return false
	}
	p.sampled = now
	p.rates.sample(now, p.Counters)
	return true
}

// NewMemory notes that the store in this process is a new one, whose usage begins at 0.
func (p *Process) NewMemory() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.full.reset()
}

// Throttle lets one message through in some time.
type Throttle struct {
	last atomic.Int64 // time since start, plus that time
}

// start is the origin of a monotonic clock.
var start = time.Now()

// Allow reports whether a minute has passed since it last returned true.
func (t *Throttle) Allow() bool { return t.AllowEvery(time.Minute) }

// AllowEvery is Allow with another time, which must be the same each time.
func (t *Throttle) AllowEvery(d time.Duration) bool { return t.allow(time.Since(start), d) }

// allow is AllowEvery at a time since start.
func (t *Throttle) allow(at, every time.Duration) bool {
	now, last := int64(at+every), t.last.Load()
	return now-last >= int64(every) && t.last.CompareAndSwap(last, now)
}
