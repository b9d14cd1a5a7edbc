// Package state has what the configs of a process share, and what of it survives reloads.
package state

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
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/pace"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state/persist"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/refpool"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Default is the state of this process. Each config takes it once, when it is loaded.
var Default = New(telemetry.Options{})

// Process is what the configs of a process share, and what tests change of how it works. A
// new config takes its references before the old one releases its own, so what is in pools
// survives reloads.
type Process struct {
	*telemetry.Process // what is counted at limits

	// The stores in use. There is a single memory store, under memoryKey, which every app
	// uses. With Redis it is the fallback, so that levels are kept when Redis is added to
	// the config or removed from it. Each Redis store is under a redisStoreKey.
	Stores *caddy.UsagePool

	// The memory store while no app uses it.
	IdleMemory atomic.Pointer[SharedMemory]

	Tops    *refpool.Pool[TopID, *toplist.List]  // the keys that ask most
	Bans    *refpool.Pool[string, *rule.BanList] // the keys that are banned, by the name of the bucket in stores
	Waiting *refpool.Pool[string, *wait.Queues]  // the requests that wait, by the same
	Speeds  *refpool.Pool[string, *pace.Speed]   // the responses that are paced, by the same
	Loads   *refpool.Pool[LoadID, *adaptive.Controllers]

	// MakeMemory returns a new memory store.
	MakeMemory func() *limiter.Memory

	// DataDir returns the directory where Caddy keeps its data.
	DataDir func() string

	// How long the memory store is kept after the last app released it, in case a config
	// without limits is soon replaced by one with limits.
	IdleMemoryTime time.Duration

	// How long a Redis store stays open, at least, after the last app released it, since
	// Caddy cleans up a config while requests are still in flight. It is also how often the
	// store then checks whether they have finished.
	RedisCloseDelay time.Duration

	// How often drained buckets are removed from the memory store. Requests remove them
	// too, a few each, which takes long if there are few requests.
	SweepInterval time.Duration
}

// New returns the state of a process that has loaded no config.
func New(counted telemetry.Options) *Process {
	return &Process{
		Process: telemetry.New(counted),
		Stores:  caddy.NewUsagePool(),
		Tops:    refpool.New(func(id TopID) *toplist.List { return toplist.New(id.N, nil) }),
		Bans:    refpool.New(func(string) *rule.BanList { return rule.NewBanList() }),
		Waiting: refpool.New(func(string) *wait.Queues { return wait.New() }),
		Speeds:  refpool.New(func(string) *pace.Speed { return pace.NewSpeed() }),
		Loads:   refpool.New(func(id LoadID) *adaptive.Controllers { return adaptive.NewControllers(id.Options) }),

		MakeMemory:      limiter.NewMemory,
		DataDir:         caddy.AppDataDir,
		IdleMemoryTime:  time.Minute,
		RedisCloseDelay: 10 * time.Second,
		SweepInterval:   time.Second,
	}
}

// TopID identifies the list of the keys that ask most: the name of the buckets, and the
// number of counters.
type TopID struct {
	Name string
	N    int
}

// LoadID identifies the controllers of limits: the name of their buckets, and what they keep to.
type LoadID struct {
	Name    string
	Options adaptive.Options
}

// memoryKey is the key of the memory store in the pool.
const memoryKey = "memory"

// SharedMemory is the memory store in the pool.
type SharedMemory struct {
	*limiter.Memory
	File    *persist.File
	process *Process
	unused  chan struct{} // closed when no app uses it any more
}

// sweep returns a store that is swept, and written to its file, until its Destruct.
func (p *Process) sweep(m *limiter.Memory, file *persist.File) SharedMemory {
	shared := SharedMemory{m, file, p, make(chan struct{})}
	ticker := time.NewTicker(p.SweepInterval)
	go func() {
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				m.Sweep()
				file.Tick()
			case <-shared.unused:
				return
			}
		}
	}()
	return shared
}

// Destruct keeps the store for the next app for IdleMemoryTime.
func (m SharedMemory) Destruct() error {
	close(m.unused)
	m.File.Close()
	this, idle := &m, &m.process.IdleMemory
	idle.Store(this)
	time.AfterFunc(m.process.IdleMemoryTime, func() { idle.CompareAndSwap(this, nil) })
	return nil
}

// Redis is a Redis store in the pool.
type Redis struct {
	*limiter.Redis
	process   *Process
	connected sync.Once
	Requests  atomic.Int64 // in flight, having reached a handler that uses the store
}

// connectWait is how long a config waits for the first connection to Redis.
const connectWait = 250 * time.Millisecond

// ConnectOnce connects, unless that was done before. Calls meanwhile wait too:
// Caddy may start its servers before the app, and then requests do.
func (s *Redis) ConnectOnce() {
	s.connected.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectWait)
		defer cancel()
		s.Connect(ctx)
	})
}

// Destruct closes the store once no request can use it any more: one that has
// passed a handler may reach another one much later. When the process exits, nothing
// would close it later.
func (s *Redis) Destruct() error {
	if caddy.Exiting() {
		return s.Close()
	}
	time.AfterFunc(s.process.RedisCloseDelay, func() {
		if s.Requests.Load() > 0 {
			_ = s.Destruct()
			return
		}
		_ = s.Close()
	})
	return nil
}

// Stores are the stores that a config uses. They have to be released.
type Stores struct {
	Process *Process        // that the stores are of
	Memory  *limiter.Memory // also the fallback of redis
	File    *persist.File   // of Memory
	Redis   *Redis          // nil without Redis
	keys    []any           // in the pool
}

// Store returns the store that decides.
func (s *Stores) Store() limiter.Store {
	if s.Redis != nil {
		return s.Redis
	}
	return s.Memory
}

// OpenMemory opens the memory store of the process.
func (s *Stores) OpenMemory() error {
	p := s.Process
	store, err := openStore(s, memoryKey, func() (SharedMemory, error) {
		if m := p.IdleMemory.Swap(nil); m != nil {
			return p.sweep(m.Memory, m.File), nil
		}
		p.NewMemory() // counted anew
		m := p.MakeMemory()
		return p.sweep(m, persist.New(m, caddy.Exiting)), nil
	})
	s.Memory, s.File = store.Memory, store.File
	return err
}

// OpenRedis opens a Redis store, with the memory store as its fallback. tls are the options that
// opt.TLS was made from, and login identifies opt.Credentials.
func (s *Stores) OpenRedis(opt limiter.RedisOptions, tls *reverseproxy.TLSConfig, login string) (err error) {
	opt.Fallback = s.Memory
	s.Redis, err = openStore(s, newRedisStoreKey(opt, tls, login).pooled(s.Process.Stores), func() (*Redis, error) {
		var r *limiter.Redis
		counted := s.Process.Process
		opt.Report = func(e limiter.Event) { counted.Redis(r, e) }
		var err error
		if r, err = limiter.NewRedis(opt); err != nil {
			return nil, err
		}
		return &Redis{Redis: r, process: s.Process}, nil
	})
	return err
}

// Release releases the stores, Redis before its fallback.
func (s *Stores) Release() error {
	errs := make([]error, 0, len(s.keys))
	for _, key := range slices.Backward(s.keys) {
		_, err := s.Process.Stores.Delete(key)
		errs = append(errs, err)
	}
	s.keys = nil
	return errors.Join(errs...)
}

// openStore returns the store that the pool has under key, or opens it. A panic
// in open is returned as an error, since the pool would stay locked.
func openStore[S caddy.Destructor](s *Stores, key any, open func() (S, error)) (S, error) {
	store, _, err := s.Process.Stores.LoadOrNew(key, func() (_ caddy.Destructor, err error) {
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

// pooled returns the key in a pool that is equivalent to k, or k if there is
// none. A lookup would not find it: roots are compared by Equal, not ==.
func (k redisStoreKey) pooled(pool *caddy.UsagePool) redisStoreKey {
	pool.Range(func(key, _ any) bool {
		other, ok := key.(redisStoreKey)
		same := ok && other.digest == k.digest && other.roots.Equal(k.roots)
		if same {
			k = other
		}
		return !same
	})
	return k
}
