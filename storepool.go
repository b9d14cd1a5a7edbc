package ratelimit

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

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
