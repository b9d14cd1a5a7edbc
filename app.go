package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// App says where the buckets of all `rate_limit` handlers are kept. Without it
// they live in this process: each Caddy instance then limits for itself, and
// limits start afresh when it does. Reloading the configuration keeps them, and
// a configuration without limits does for a minute.
type App struct {
	// The Redis that keeps the buckets, so that every Caddy instance that uses
	// it enforces the same limits.
	Redis *Redis `json:"redis,omitempty"`

	// The buckets in this process: all there are without Redis, and with it
	// those that decide while it can't be asked.
	Memory *Memory `json:"memory,omitempty"`

	// What becomes of a request if Redis can't be asked, or does not answer in
	// time; the option of the same name in a handler overrides it. One of:
	//
	// - `fallback` (default): buckets in this process decide, beginning with
	//   the levels that Redis reported last. Each Caddy instance limits for
	//   itself meanwhile.
	// - `allow`: the request passes without being limited, and its response
	//   gets no header fields.
	// - `deny`: the request is refused with status 503 and `Retry-After`.
	//
	// The log tells when Redis is lost and when it is back. After a few failures
	// it is no longer asked, but for a probe now and then, so that requests need
	// not wait for it.
	OnError string `json:"on_error,omitempty"`

	taken       []any // keys of the references held in stores
	store       limiter.Store
	memory      *limiter.Memory
	redis       *sharedRedis  // nil without Redis
	timeout     time.Duration // of Redis; 0 without
	maxKeys     int
	onError     onError
	definitions *definitions
	logger      *zap.Logger
}

// Memory is the buckets in this process.
type Memory struct {
	// The most buckets to hold, of all limits together, from 1 to 1000000000. Each
	// limit holds at most its own `max_keys`, by default half of this one, so that
	// a flood of keys neither grows memory nor takes the room of other limits. A
	// million buckets take about 52 MB of memory (RSS), ten million 514 MB.
	// Default: 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`
}

// parseMaxKeys reads a number of buckets.
var parseMaxKeys = parseInteger(1, 1_000_000_000)

// running holds the apps that were started and not cleaned up yet, the newest
// last. There are two while a configuration is replaced; if the new one fails
// to start it leaves, and the old one's settings are in force as before.
var running struct {
	sync.Mutex
	apps    []*App
	unwatch context.CancelFunc // ends watchLimits, while there are apps
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision takes the stores that the configuration names.
func (a *App) Provision(ctx caddy.Context) error {
	a.logger = ctx.Logger()
	a.definitions = newDefinitions()
	var err error
	a.onError, err = newConstant("on_error", or(a.OnError, string(onErrorFallback)), parseOnError)
	if err != nil {
		return err
	}
	a.maxKeys = limiter.DefaultMaxKeys
	if a.Memory != nil && a.Memory.MaxKeys != "" {
		if a.maxKeys, err = newNumber("max_keys", string(a.Memory.MaxKeys), parseMaxKeys); err != nil {
			return fmt.Errorf("memory: %w", err)
		}
	}
	a.definitions.maxKeys = a.maxKeys
	if err := a.takeMemory(); err != nil {
		return err
	}
	if a.Redis == nil {
		return nil
	}
	opt, tls, err := a.Redis.options(ctx)
	if err == nil {
		err = a.takeRedis(opt, tls)
	}
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	a.timeout = opt.Timeout
	return nil
}

// Cleanup lets go of what Provision and Start took. Caddy also calls it when
// one of them failed, or was never called.
func (a *App) Cleanup() error {
	a.leave()
	return a.release()
}

// Start puts the app's settings in force and begins to connect to Redis.
func (a *App) Start() error {
	a.enter()
	if a.redis != nil {
		a.redis.connect()
	}
	return nil
}

// Stop does nothing: requests may still be on their way.
func (*App) Stop() error { return nil }

// takeMemory makes the store of this process the app's.
func (a *App) takeMemory() error {
	store, err := take(a, memoryKey, func() (sharedMemory, error) {
		if m := kept.Swap(nil); m != nil {
			return *m, nil
		}
		fullLimits.reset()
		return sharedMemory{newMemory()}, nil
	})
	if err != nil {
		return err
	}
	a.memory, a.store = store.Memory, store.Memory
	return nil
}

// takeRedis makes a store in Redis the app's, with that of this process to fall
// back on. Its TLS is made of the given options.
func (a *App) takeRedis(opt limiter.RedisOptions, options *reverseproxy.TLSConfig) error {
	opt.Fallback, opt.Report = a.memory, report
	store, err := take(a, newRedisKey(opt, options).inUse(), func() (*sharedRedis, error) {
		r, err := limiter.NewRedis(opt)
		if err != nil {
			return nil, err
		}
		return &sharedRedis{Redis: r}, nil
	})
	if err != nil {
		return err
	}
	a.redis, a.store = store, store
	return nil
}

// release lets go of the stores that the app has taken, of Redis before its
// fallback.
func (a *App) release() error {
	errs := make([]error, 0, len(a.taken))
	for _, key := range slices.Backward(a.taken) {
		_, err := stores.Delete(key)
		errs = append(errs, err)
	}
	a.taken = nil
	return errors.Join(errs...)
}

// enter puts the app's settings in force.
func (a *App) enter() {
	running.Lock()
	defer running.Unlock()
	if n := len(running.apps); n > 0 {
		a.logMove(running.apps[n-1])
	} else {
		var ctx context.Context
		ctx, running.unwatch = context.WithCancel(context.Background())
		go watchLimits(ctx, watchEvery, limitUsages)
	}
	running.apps = append(running.apps, a)
	a.memory.SetMaxKeys(a.maxKeys)
}

// logMove logs what becomes of the limits if the app keeps its buckets elsewhere
// than the one before it.
func (a *App) logMove(before *App) {
	switch {
	case a.redis == nil && before.redis == nil:
	case a.redis == nil:
		a.logger.Info("this process keeps the limits from now on, as redis last reported them; " +
			"each Caddy instance limits for itself")
	case before.redis == nil:
		a.logger.Info("redis keeps the limits from now on and is told those of this process; " +
			"what several Caddy instances have admitted apart is not added up")
	case !a.redis.SharesBuckets(before.redis.Redis):
		a.logger.Info("another redis, or other keys in it, keeps the limits from now on and is told those that " +
			"this process knows; what it has not heard of other Caddy instances is not carried over until these are reloaded")
	}
}

// leave puts the settings of the newest other app in force, if there is one.
func (a *App) leave() {
	running.Lock()
	defer running.Unlock()
	running.apps = slices.DeleteFunc(running.apps, func(other *App) bool { return other == a })
	if n := len(running.apps); n > 0 {
		running.apps[n-1].memory.SetMaxKeys(running.apps[n-1].maxKeys)
	} else if running.unwatch != nil {
		running.unwatch()
		running.unwatch = nil
	}
}

// lapses keeps lapses of one server for one reason to one line a minute, also over
// reloads that make new stores.
var lapses lapseLog

type lapseLog struct {
	sync.Mutex
	last map[[2]string]time.Time // by server and reason; of the last minute
}

// due reports whether a lapse is to be logged.
func (l *lapseLog) due(e limiter.Event) bool {
	l.Lock()
	defer l.Unlock()
	now := time.Now()
	maps.DeleteFunc(l.last, func(_ [2]string, at time.Time) bool { return now.Sub(at) >= time.Minute })
	key := [2]string{e.Server, e.Reason}
	if _, ok := l.last[key]; ok {
		return false
	}
	if l.last == nil {
		l.last = make(map[[2]string]time.Time)
	}
	l.last[key] = now
	return true
}

// report logs what happened to a Redis server, once each time, whatever number
// of requests notice it. Stores outlive configurations: it is logged where the
// newest one says.
func report(e limiter.Event) {
	log := caddy.Log().Named("rate_limit")
	running.Lock()
	if n := len(running.apps); n > 0 {
		log = running.apps[n-1].logger
	}
	running.Unlock()
	if e.Dropped > 0 {
		log = log.With(zap.Int("dropped", e.Dropped)) // events before, while the log took nothing
	}
	switch server := zap.String("server", e.Server); e.Kind {
	case limiter.EventDown:
		log.Error("redis unavailable, applying on_error",
			server, zap.String("reason", e.Reason), zap.Error(e.Err))
	case limiter.EventRecovered:
		log.Info("redis recovered", server, zap.Duration("down", e.Downtime))
	case limiter.EventReplaced:
		log.Info("redis server replaced by others of its cluster",
			server, zap.Duration("down", e.Downtime))
	case limiter.EventError:
		if !lapses.due(e) {
			return
		}
		log.Warn("redis failed on single requests, applying on_error to them",
			server, zap.String("reason", e.Reason), zap.Error(e.Err))
	}
}
