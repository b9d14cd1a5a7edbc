package ratelimit

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// process is what the configurations of this process share. A new config takes its
// references before the old one releases its own, so what is in pools survives reloads.
var process = &processState{
	Process: telemetry.New(telemetry.Options{}),
	stores:  caddy.NewUsagePool(),
	tops:    newKept(func(id topID) *toplist.List { return toplist.New(id.n, nil) }),
	bans:    newKept(func(string) *rule.BanList { return rule.NewBanList() }),
	waiting: newKept(func(string) *rule.Lines { return rule.NewLines() }),
	loads:   newKept(func(id loadID) *adaptive.Controllers { return adaptive.NewControllers(id.options) }),

	newMemory:       limiter.NewMemory,
	idleMemoryTime:  time.Minute,
	redisCloseDelay: 10 * time.Second,
	sweepInterval:   time.Second,
}

// processState is the state of the process, and what tests change of how it works.
type processState struct {
	*telemetry.Process // what is counted at limits

	// The stores in use. There is a single memory store, under memoryKey, which every app
	// uses. With Redis it is the fallback, so that levels are kept when Redis is added to
	// the config or removed from it. Each Redis store is under a redisStoreKey.
	stores *caddy.UsagePool

	// The memory store while no app uses it.
	idleMemory atomic.Pointer[sharedMemory]

	tops    *kept[topID, *toplist.List]  // the keys that ask most
	bans    *kept[string, *rule.BanList] // the keys that are banned, by the name of the bucket in stores
	waiting *kept[string, *rule.Lines]   // how many requests wait, likewise
	loads   *kept[loadID, *adaptive.Controllers]

	// newMemory returns a new memory store.
	newMemory func() *limiter.Memory

	// How long the memory store is kept after the last app released it, in case a config
	// without limits is soon replaced by one with limits.
	idleMemoryTime time.Duration

	// How long a Redis store stays open, at least, after the last app released it, since
	// Caddy cleans up a config while requests are still in flight. It is also how often the
	// store then checks whether they have finished.
	redisCloseDelay time.Duration

	// How often drained buckets are removed from the memory store. Requests remove them
	// too, a few each, which takes long if there are few requests.
	sweepInterval time.Duration
}

// topID identifies the list of the keys that ask most: the name of the buckets, and the
// number of counters.
type topID struct {
	name string
	n    int
}

// loadID identifies the controllers of limits: the name of their buckets, and what they keep to.
type loadID struct {
	name    string
	options adaptive.Options
}

const memoryKey = "memory"

// sharedMemory is the memory store in the pool.
type sharedMemory struct {
	*limiter.Memory
	unused chan struct{} // closed when no app uses it any more
}

// use returns a store that is swept until its Destruct.
func use(m *limiter.Memory) sharedMemory {
	shared := sharedMemory{m, make(chan struct{})}
	sweep := time.NewTicker(process.sweepInterval)
	go func() {
		defer sweep.Stop()
		for {
			select {
			case <-sweep.C:
				m.Sweep()
			case <-shared.unused:
				return
			}
		}
	}()
	return shared
}

// Destruct keeps the store for the next app for idleMemoryTime.
func (m sharedMemory) Destruct() error {
	close(m.unused)
	this := &m
	process.idleMemory.Store(this)
	time.AfterFunc(process.idleMemoryTime, func() { process.idleMemory.CompareAndSwap(this, nil) })
	return nil
}

// sharedRedis is a Redis store in the pool.
type sharedRedis struct {
	*limiter.Redis
	connected sync.Once
	requests  atomic.Int64 // in flight, having reached a handler that uses the store
}

// connectWait is how long a config waits for the first connection to Redis.
const connectWait = 250 * time.Millisecond

// connect connects, unless that was done before. Whoever calls it meanwhile waits too:
// Caddy may start its servers before the app, and then requests do.
func (s *sharedRedis) connect() {
	s.connected.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectWait)
		defer cancel()
		s.Connect(ctx)
	})
}

// Destruct closes the store once no request can use it any more: one that has
// passed a handler may reach another one much later. When the process exits, nobody
// would close it later.
func (s *sharedRedis) Destruct() error {
	if caddy.Exiting() {
		return s.Close()
	}
	time.AfterFunc(process.redisCloseDelay, func() {
		if s.requests.Load() > 0 {
			_ = s.Destruct()
			return
		}
		_ = s.Close()
	})
	return nil
}

// stores are the stores that a config uses. They have to be released.
type stores struct {
	memory *limiter.Memory // also the fallback of redis
	redis  *sharedRedis    // nil without Redis
	keys   []any           // in the pool
}

// store returns the store that decides.
func (s *stores) store() limiter.Store {
	if s.redis != nil {
		return s.redis
	}
	return s.memory
}

// openMemory opens the memory store of this process.
func (s *stores) openMemory() error {
	store, err := openStore(s, memoryKey, func() (sharedMemory, error) {
		if m := process.idleMemory.Swap(nil); m != nil {
			return use(m.Memory), nil
		}
		process.NewMemory()
		return use(process.newMemory()), nil
	})
	s.memory = store.Memory
	return err
}

// openRedis opens a Redis store, with the memory store as its fallback. tls are the options that
// opt.TLS was made from, and login identifies opt.Credentials.
func (s *stores) openRedis(opt limiter.RedisOptions, tls *reverseproxy.TLSConfig, login string) (err error) {
	opt.Fallback = s.memory
	s.redis, err = openStore(s, newRedisStoreKey(opt, tls, login).pooled(), func() (*sharedRedis, error) {
		var r *limiter.Redis
		counted := process.Process
		opt.Report = func(e limiter.Event) { counted.Redis(r, e) }
		var err error
		if r, err = limiter.NewRedis(opt); err != nil {
			return nil, err
		}
		return &sharedRedis{Redis: r}, nil
	})
	return err
}

// release releases the stores, Redis before its fallback.
func (s *stores) release() error {
	errs := make([]error, 0, len(s.keys))
	for _, key := range slices.Backward(s.keys) {
		_, err := process.stores.Delete(key)
		errs = append(errs, err)
	}
	s.keys = nil
	return errors.Join(errs...)
}

// openStore returns the store that the pool has under key, or opens it. A panic
// in open is returned as an error, since the pool would stay locked.
func openStore[S caddy.Destructor](s *stores, key any, open func() (S, error)) (S, error) {
	store, _, err := process.stores.LoadOrNew(key, func() (_ caddy.Destructor, err error) {
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
	s.keys = append(s.keys, key)
	return store.(S), nil
}

// redisStoreKey identifies a Redis store in the pool. It is equal for equal
// settings, however they are written, and contains none of them in plain text.
type redisStoreKey struct {
	digest [sha256.Size]byte // of all settings but the roots
	roots  *x509.CertPool    // that are trusted; nil for the system's
}

// newRedisStoreKey returns the key of a store with the given options; options
// are those that opt.TLS was made from, and login identifies opt.Credentials.
func newRedisStoreKey(opt limiter.RedisOptions, options *reverseproxy.TLSConfig, login string) redisStoreKey {
	digest := sha256.New()
	fmt.Fprintf(digest, "%q %t %q %q %q %q %q %q %d %q %q %d",
		slices.Sorted(slices.Values(opt.Addresses)), opt.Cluster,
		opt.MasterName, opt.SentinelUsername, opt.SentinelPassword,
		opt.Username, opt.Password, login, opt.DB, opt.KeyPrefix, opt.KeySecret, opt.Timeout)
	if opt.TLS == nil {
		return redisStoreKey{digest: [sha256.Size]byte(digest.Sum(nil))}
	}
	// The options only name the certificate files, which may have changed, so
	// the certificates are compared too.
	_ = json.NewEncoder(digest).Encode(cmp.Or(options, new(reverseproxy.TLSConfig)))
	for _, certificate := range opt.TLS.Certificates {
		fmt.Fprintf(digest, "%x", certificate.Certificate)
	}
	return redisStoreKey{digest: [sha256.Size]byte(digest.Sum(nil)), roots: opt.TLS.RootCAs}
}

// pooled returns the key in the pool that is equivalent to k, or k if there is
// none. A lookup would not find it: roots are compared by Equal, not ==.
func (k redisStoreKey) pooled() redisStoreKey {
	process.stores.Range(func(key, _ any) bool {
		other, ok := key.(redisStoreKey)
		same := ok && other.digest == k.digest && other.roots.Equal(k.roots)
		if same {
			k = other
		}
		return !same
	})
	return k
}
