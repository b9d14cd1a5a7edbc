package ratelimit

import (
	"cmp"
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

// App configures where the buckets of all `rate_limit` handlers are kept. Without
// it they are kept in this process: each Caddy instance then limits on its own,
// and buckets start empty when it restarts. They survive config reloads, and are
// kept for a minute while the config has no limits.
type App struct {
	// The Redis in which to keep the buckets, so that all Caddy instances that use
	// it enforce the same limits.
	Redis *Redis `json:"redis,omitempty"`

	// The buckets in this process. With Redis, they are the fallback for when it
	// is unavailable.
	Memory *Memory `json:"memory,omitempty"`

	// How to handle a request if Redis is unavailable or does not reply in time.
	// Handlers can override it by their option of the same name. One of:
	//
	// - `fallback` (default): buckets in this process decide, starting from the
	//   levels that Redis reported last. Meanwhile each Caddy instance limits on
	//   its own.
	// - `allow`: the request passes without being limited, and its response
	//   gets no header fields.
	// - `deny`: the request is rejected with status 503 and `Retry-After`.
	//
	// Outages and recoveries are logged. After a few failures in a row, Redis is
	// only probed now and then until it recovers, so that requests do not wait
	// for it.
	OnError string `json:"on_error,omitempty"`

	storeKeys   []any // keys in the pool of the stores that the app uses
	store       limiter.Store
	memory      *limiter.Memory
	redis       *sharedRedis  // nil without Redis
	timeout     time.Duration // of Redis; 0 without
	maxKeys     int
	onError     onError
	definitions *definitions
	handlers    []*Handler // of the config, in the order in which they were provisioned
	logger      *zap.Logger
	ctx         caddy.Context // of the config
}

// Memory configures the buckets in this process.
type Memory struct {
	// The maximum number of buckets for all limits together, from 1 to 1000000000.
	// Each limit has at most its own `max_keys`, by default half of this one, so
	// that a flood of keys neither uses up the memory nor crowds out the buckets of
	// other limits. A million buckets take about 52 MB of memory (RSS), ten million
	// 514 MB.
	// Default: 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`
}

// parseMaxKeys reads a number of buckets.
var parseMaxKeys = parseInteger(1, 1_000_000_000)

// running holds the apps that were started and not cleaned up yet, the newest
// last. There are two while a config is being replaced. If the new one fails to
// start it is removed, and the settings of the old one apply again.
var running struct {
	sync.Mutex
	apps      []*App
	stopWatch context.CancelFunc // ends watchLimits, while there are apps
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision opens the stores, or takes over those of the previous config.
func (a *App) Provision(ctx caddy.Context) error {
	a.logger, a.ctx = ctx.Logger(), ctx
	a.definitions = newDefinitions()
	var err error
	a.onError, err = newConstant("on_error", cmp.Or(a.OnError, string(onErrorFallback)), parseOnError)
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
	if err := a.openMemory(); err != nil {
		return err
	}
	if a.Redis == nil {
		return nil
	}
	opt, tls, err := a.Redis.options(ctx)
	if err == nil {
		err = a.openRedis(opt, tls)
	}
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	a.timeout = opt.Timeout
	return nil
}

// Cleanup undoes Start and releases the stores. Caddy also calls it if Provision
// or Start failed, or was never called.
func (a *App) Cleanup() error {
	a.deactivate()
	if a.definitions != nil {
		a.definitions.release()
	}
	return a.releaseStores()
}

// Start applies the app's settings and starts connecting to Redis.
func (a *App) Start() error {
	a.activate()
	if a.redis != nil {
		a.redis.connect()
	}
	return nil
}

// Stop does nothing: requests may still be in flight.
func (*App) Stop() error { return nil }

// openMemory makes the app use the memory store of this process.
func (a *App) openMemory() error {
	store, err := openStore(a, memoryKey, func() (sharedMemory, error) {
		if m := idleMemory.Swap(nil); m != nil {
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

// openRedis makes the app use a Redis store, with the memory store as its
// fallback. options are those that opt.TLS was made from.
func (a *App) openRedis(opt limiter.RedisOptions, options *reverseproxy.TLSConfig) error {
	opt.Fallback, opt.Report = a.memory, logEvent
	store, err := openStore(a, newRedisStoreKey(opt, options).pooled(), func() (*sharedRedis, error) {
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

// releaseStores releases the stores that the app uses, Redis before its
// fallback.
func (a *App) releaseStores() error {
	errs := make([]error, 0, len(a.storeKeys))
	for _, key := range slices.Backward(a.storeKeys) {
		_, err := stores.Delete(key)
		errs = append(errs, err)
	}
	a.storeKeys = nil
	return errors.Join(errs...)
}

// activate applies the app's settings.
func (a *App) activate() {
	running.Lock()
	defer running.Unlock()
	if n := len(running.apps); n > 0 {
		a.logStoreChange(running.apps[n-1])
	} else {
		var ctx context.Context
		ctx, running.stopWatch = context.WithCancel(context.Background())
		go watchLimits(ctx, watchEvery, limitUsages)
	}
	running.apps = append(running.apps, a)
	a.memory.SetMaxKeys(a.maxKeys)
}

// logStoreChange logs what happens to the limits if the app keeps its buckets
// elsewhere than the one before it.
func (a *App) logStoreChange(before *App) {
	switch {
	case a.redis == nil && before.redis == nil:
	case a.redis == nil:
		a.logger.Info("limits are now kept in this process, starting from the levels that redis last reported; " +
			"each Caddy instance limits on its own")
	case before.redis == nil:
		a.logger.Info("limits are now kept in redis, starting from the levels in this process; " +
			"what several Caddy instances admitted on their own is not added up")
	case !a.redis.SharesBuckets(before.redis.Redis):
		a.logger.Info("limits are now kept in another redis or under other keys, starting from the levels that this process knows; " +
			"levels known only to other Caddy instances are carried over when those are reloaded")
	}
}

// deactivate applies the settings of the newest other app, if there is one.
func (a *App) deactivate() {
	running.Lock()
	defer running.Unlock()
	running.apps = slices.DeleteFunc(running.apps, func(other *App) bool { return other == a })
	if n := len(running.apps); n > 0 {
		running.apps[n-1].memory.SetMaxKeys(running.apps[n-1].maxKeys)
	} else if running.stopWatch != nil {
		running.stopWatch()
		running.stopWatch = nil
	}
}

// errorEvents limits the log to one error a minute for each server and reason,
// also across reloads that open new stores.
var errorEvents eventThrottle

// eventThrottle lets one event of each server and reason through a minute.
type eventThrottle struct {
	sync.Mutex
	last map[[2]string]time.Time // by server and reason; of the last minute
}

// allow reports whether e may be logged.
func (t *eventThrottle) allow(e limiter.Event) bool {
	t.Lock()
	defer t.Unlock()
	now := time.Now()
	maps.DeleteFunc(t.last, func(_ [2]string, at time.Time) bool { return now.Sub(at) >= time.Minute })
	key := [2]string{e.Server, e.Reason}
	if _, ok := t.last[key]; ok {
		return false
	}
	if t.last == nil {
		t.last = make(map[[2]string]time.Time)
	}
	t.last[key] = now
	return true
}

// logEvent logs an event of a Redis server, once for however many requests it
// affects. Stores outlive configs, so the event goes to the logger of the newest
// one.
func logEvent(e limiter.Event) {
	log := caddy.Log().Named("rate_limit")
	running.Lock()
	if n := len(running.apps); n > 0 {
		log = running.apps[n-1].logger
	}
	running.Unlock()
	if e.Dropped > 0 {
		log = log.With(zap.Int("dropped", e.Dropped)) // earlier events, while logging was blocked
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
		if !errorEvents.allow(e) {
			return
		}
		log.Warn("redis failed on single requests, applying on_error to them",
			server, zap.String("reason", e.Reason), zap.Error(e.Err))
	}
}
