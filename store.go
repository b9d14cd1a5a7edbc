package ratelimit

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// stores holds the stores in use, so that handlers of one configuration share
// one, and limits outlive reloads: a new configuration takes its references
// before the old one lets go of its own.
//
// There is one store in this process, under memoryKey, that every app takes:
// with Redis for its fallback, so that limits stay when Redis comes into the
// configuration or leaves it. Stores in Redis are under a redisKey each.
var stores = caddy.NewUsagePool()

const memoryKey = "memory"

// newMemory makes the store of this process. Tests replace it to move the
// clock.
var newMemory = func() *limiter.Memory { return limiter.NewMemory(nil) }

// keepTime is how long the buckets of this process are kept when no app uses them
// any more, in case a configuration without limits is soon replaced by one with
// them. Tests lower it.
var keepTime = time.Minute

// kept is the store of this process while no app uses it.
var kept atomic.Pointer[sharedMemory]

// drainTime is how long a store in Redis stays open at least after the last app
// let go of it, and how often it is then seen whether its requests are over: Caddy
// cleans a configuration up while they are still on their way. Tests lower it.
var drainTime = 10 * time.Second

// sharedMemory is the store of this process in the pool.
type sharedMemory struct{ *limiter.Memory }

// Destruct keeps the store for the next app for a while.
func (m sharedMemory) Destruct() error {
	this := &m
	kept.Store(this)
	time.AfterFunc(keepTime, func() { kept.CompareAndSwap(this, nil) })
	return nil
}

// sharedRedis is a store in Redis in the pool.
type sharedRedis struct {
	*limiter.Redis
	connected sync.Once
	requests  atomic.Int64 // under way beyond a handler that uses the store
}

// connect begins to connect. A store that an earlier app used has connections.
func (s *sharedRedis) connect() { s.connected.Do(s.Connect) }

// Destruct closes the store's connections when nobody can need them any more: a
// request that has passed one handler may come to another one much later.
func (s *sharedRedis) Destruct() error {
	time.AfterFunc(drainTime, func() {
		if s.requests.Load() > 0 {
			_ = s.Destruct()
			return
		}
		_ = s.Close()
	})
	return nil
}

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

// take returns the store that the pool has under key, or opens it. A panic in
// open is an error: the pool would stay locked.
func take[S caddy.Destructor](a *App, key any, open func() (S, error)) (S, error) {
	store, _, err := stores.LoadOrNew(key, func() (_ caddy.Destructor, err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("opening the store: %v", p)
			}
		}()
		return open()
	})
	if err != nil {
		var none S
		return none, err
	}
	a.taken = append(a.taken, key)
	return store.(S), nil
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

// redisKey tells stores in Redis apart. It is equal for equal settings, however
// they are written, and holds none of them in clear.
type redisKey struct {
	digest [sha256.Size]byte // of all but the roots
	roots  *x509.CertPool    // that are trusted; nil means the system's
}

// newRedisKey returns the key of a store with the given options, its TLS being
// made of the given ones.
func newRedisKey(opt limiter.RedisOptions, options *reverseproxy.TLSConfig) redisKey {
	digest := sha256.New()
	fmt.Fprintf(digest, "%q %t %q %q %q %q %q %d %q %q %d %d",
		slices.Sorted(slices.Values(opt.Addresses)), opt.Cluster,
		opt.MasterName, opt.SentinelUsername, opt.SentinelPassword,
		opt.Username, opt.Password, opt.DB, opt.KeyPrefix, opt.KeySecret, opt.Timeout, opt.PoolSize)
	if opt.TLS == nil {
		return redisKey{digest: [sha256.Size]byte(digest.Sum(nil))}
	}
	// The options name the client's certificate, whose file may have changed
	// since; those it was read from have to be compared too.
	_ = json.NewEncoder(digest).Encode(cmp.Or(options, new(reverseproxy.TLSConfig)))
	for _, certificate := range opt.TLS.Certificates {
		fmt.Fprintf(digest, "%x", certificate.Certificate)
	}
	return redisKey{digest: [sha256.Size]byte(digest.Sum(nil)), roots: opt.TLS.RootCAs}
}

// inUse returns the key in the pool that is equal to k, or k if there is none:
// roots can only be compared one by one.
func (k redisKey) inUse() redisKey {
	stores.Range(func(key, _ any) bool {
		other, ok := key.(redisKey)
		same := ok && other.digest == k.digest && other.roots.Equal(k.roots)
		if same {
			k = other
		}
		return !same
	})
	return k
}

// running holds the apps that were started and not cleaned up yet, the newest
// last. There are two while a configuration is replaced; if the new one fails
// to start it leaves, and the old one's settings are in force as before.
var running struct {
	sync.Mutex
	apps    []*App
	unwatch context.CancelFunc // ends watchLimits, while there are apps
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
