package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/logqueue"
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

	// With Redis, who decides on requests to limits that do not say so themselves and
	// allow it: `exact` (default), `lease <duration>` or `eventual <duration>`, see the
	// option of limits.
	Consistency string `json:"consistency,omitempty"`

	// Whether to report metrics to Prometheus, by Caddy's own endpoint of the
	// admin API and by its `metrics` handler: `on` (default) or `off`. The names of
	// all begin with `caddy_rate_limit_`. Their labels have names and numbers of
	// limits, and addresses of Redis servers, never anything of a request. Caddy's
	// global option `metrics` is not needed; it adds those of its HTTP servers.
	Metrics string `json:"metrics,omitempty"`

	storeKeys   []any // keys in the pool of the stores that the app uses
	store       limiter.Store
	memory      *limiter.Memory
	redis       *sharedRedis  // nil without Redis
	timeout     time.Duration // of Redis; 0 without
	maxKeys     int
	onError     rule.OnError
	consistency limiter.Consistency
	agreement   *agreement
	handlers    []*Handler     // of the config, in the order in which they were provisioned
	lines       logqueue.Queue // of the app and its handlers
	logger      *zap.Logger    // of lines

	reportMetrics bool
	ctx           caddy.Context
	events        *caddyevents.App
	running       *telemetry.Config // nil until it has started
}

// Memory configures the buckets in this process.
type Memory struct {
	// The maximum number of buckets for all limits together, from 1 to 1000000000.
	// Each limit has at most its own `max_keys`, by default half of this one, so
	// that a flood of keys neither uses up the memory nor crowds out the buckets of
	// other limits. A million buckets take about 110 MB of memory (RSS) with Redis,
	// and 70 MB without.
	// Default: 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`
}

// parseMaxKeys reads a number of buckets.
var parseMaxKeys = option.Integer(1, 1_000_000_000)

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision opens the stores, or takes over those of the previous config.
func (a *App) Provision(ctx caddy.Context) error {
	a.logger, a.ctx = a.lines.Logger(ctx.Logger()), ctx
	a.agreement = newAgreement()
	var err error
	a.onError, err = option.ParseConstant("on_error", cmp.Or(a.OnError, string(rule.OnErrorFallback)), rule.ParseOnError)
	if err != nil {
		return err
	}
	if a.consistency, err = option.Parse(option.OnLoad, "consistency", cmp.Or(a.Consistency, "exact"), parseConsistency); err != nil {
		return err
	}
	if a.reportMetrics, err = option.ParseConstant("metrics", cmp.Or(a.Metrics, "on"), parseMetrics); err != nil {
		return err
	}
	if a.reportMetrics {
		if err := process.Register(ctx.GetMetricsRegistry()); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	a.maxKeys = limiter.DefaultMaxKeys
	if a.Memory != nil && a.Memory.MaxKeys != "" {
		if a.maxKeys, err = option.Parse(option.OnLoad, "max_keys", string(a.Memory.MaxKeys), parseMaxKeys); err != nil {
			return fmt.Errorf("memory: %w", err)
		}
	}
	a.agreement.maxKeys = a.maxKeys
	if err := a.openEvents(ctx); err != nil {
		return err
	}
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
	if opt.TLS != nil && opt.TLS.InsecureSkipVerify {
		a.logger.Warn("tls_insecure_skip_verify: certificates of redis are not verified, " +
			"anyone on the network path can read and change what is sent")
	}
	return nil
}

// flushLines is how long a config that ends waits for its log.
const flushLines = 500 * time.Millisecond

// Cleanup undoes Start and releases the stores. Caddy also calls it if Provision
// or Start failed, or was never called.
func (a *App) Cleanup() error {
	a.deactivate()
	defer a.lines.Flush(flushLines)
	if a.agreement != nil {
		a.agreement.release()
	}
	return a.releaseStores()
}

// Start applies the app's settings and connects to Redis.
func (a *App) Start() error {
	a.activate()
	a.warnUnintended()
	if a.redis != nil {
		a.redis.connect()
	}
	return nil
}

// Stop has limits that are decided here reported at once: the app that takes over may keep
// them in another way. Requests may still be in flight, so Cleanup flushes the log again.
func (a *App) Stop() error {
	if a.redis != nil {
		a.redis.Flush()
	}
	a.lines.Flush(flushLines)
	return nil
}

// openMemory makes the app use the memory store of this process.
func (a *App) openMemory() error {
	store, err := openStore(a, memoryKey, func() (sharedMemory, error) {
		if m := process.idleMemory.Swap(nil); m != nil {
			return use(m.Memory), nil
		}
		process.NewMemory()
		return use(process.newMemory()), nil
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
	opt.Fallback = a.memory
	login := a.Redis.rotates(&opt)
	store, err := openStore(a, newRedisStoreKey(opt, options, login).pooled(), func() (*sharedRedis, error) {
		var r *limiter.Redis
		counted := process.Process
		opt.Report = func(e limiter.Event) { counted.Redis(r, e) }
		var err error
		if r, err = limiter.NewRedis(opt); err != nil {
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
		_, err := process.stores.Delete(key)
		errs = append(errs, err)
	}
	a.storeKeys = nil
	return errors.Join(errs...)
}

// activate applies the app's settings.
func (a *App) activate() {
	if before := newestApp(); before != nil {
		a.logStoreChange(before)
	}
	a.running = a.telemetryConfig()
	process.Add(a.running)
	a.memory.SetMaxKeys(a.maxKeys)
}

// warnUnintended logs what of the config is probably not as it was intended, once all handlers
// around its limits are known: one line for each limit. The command check says the same, and more.
func (a *App) warnUnintended() {
	told := make(map[string]bool)
	for _, found := range advice.On(advice.Config{HTTP: a.http(), Redis: a.redis != nil}) {
		if about := found.About(); !found.OnCheck && !found.Inherited && !told[about] {
			told[about] = true
			a.logger.Warn("this "+found.Of+" probably does not do what was intended",
				zap.String(found.Of, found.Name), zap.String("problem", found.Problem), zap.String("remedy", found.Remedy))
		}
	}
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
	process.Remove(a.running)
	if newest := newestApp(); newest != nil {
		newest.memory.SetMaxKeys(newest.maxKeys)
	}
}
