package state

import (
	"github.com/caddyserver/caddy/v2"
)

// RefPool has values that configs share by their keys. Each is made for the first config that
// uses it, and ends with the last one, so it survives reloads.
type RefPool[K comparable, V any] struct {
	pool *caddy.UsagePool
	make func(K) V
}

// newRefPool returns an empty pool, with what makes its values.
func newRefPool[K comparable, V any](make func(K) V) *RefPool[K, V] {
	return &RefPool[K, V]{caddy.NewUsagePool(), make}
}

// pooled is a value in the pool.
type pooled[V any] struct{ value V }

// Destruct implements caddy.Destructor.
func (pooled[V]) Destruct() error { return nil }

// Refs are the values that one config uses. They have to be released.
type Refs[K comparable, V any] struct {
	of   *RefPool[K, V]
	have map[K]V
}

// NewRefs returns those of a config that uses none yet.
func (k *RefPool[K, V]) NewRefs() Refs[K, V] { return Refs[K, V]{k, make(map[K]V)} }

// Get returns the value of a key.
func (u *Refs[K, V]) Get(key K) V {
	v, ok := u.have[key]
	if !ok {
		found, _, _ := u.of.pool.LoadOrNew(key, func() (caddy.Destructor, error) {
			return pooled[V]{u.of.make(key)}, nil
		})
		v = found.(pooled[V]).value
		u.have[key] = v
	}
	return v
}

// Release releases all values.
func (u *Refs[K, V]) Release() {
	for key := range u.have {
		_, _ = u.of.pool.Delete(key)
	}
	clear(u.have)
}

// Len returns the number of values that any config uses.
func (k *RefPool[K, V]) Len() (n int) {
	k.pool.Range(func(any, any) bool { n++; return true })
	return n
}
