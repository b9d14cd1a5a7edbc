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

// NewRefs returns the Refs of a config that uses no value yet.
func (p *RefPool[K, V]) NewRefs() Refs[K, V] { return Refs[K, V]{p, make(map[K]V)} }

// Get returns the value of a key.
func (r *Refs[K, V]) Get(key K) V {
	v, ok := r.have[key]
	if !ok {
		found, _, _ := r.of.pool.LoadOrNew(key, func() (caddy.Destructor, error) {
			return pooled[V]{r.of.make(key)}, nil
		})
		v = found.(pooled[V]).value
		r.have[key] = v
	}
	return v
}

// Release releases all values.
func (r *Refs[K, V]) Release() {
	for key := range r.have {
		_, _ = r.of.pool.Delete(key)
	}
	clear(r.have)
}

// Len returns the number of values that any config uses.
func (p *RefPool[K, V]) Len() (n int) {
	p.pool.Range(func(any, any) bool { n++; return true })
	return n
}
