// Package refpool has pools of values that the configs of a process share.
package refpool

import (
	"iter"

	"github.com/caddyserver/caddy/v2"
)

// Pool has values that configs share by their keys. Each is made for the first config that
// uses it, and ends with the last one, so it survives reloads.
type Pool[K comparable, V any] struct {
	pool *caddy.UsagePool
	make func(K) V
}

// New returns an empty pool, with what makes its values.
func New[K comparable, V any](make func(K) V) *Pool[K, V] {
	return &Pool[K, V]{caddy.NewUsagePool(), make}
}

// pooled is a value in the pool.
type pooled[V any] struct{ value V }

// Destruct implements caddy.Destructor.
func (pooled[V]) Destruct() error { return nil }

// Refs are the values that one config uses. They have to be released.
type Refs[K comparable, V any] struct {
	of   *Pool[K, V]
	have map[K]V
}

// NewRefs returns the Refs of a config that uses no value yet.
func (p *Pool[K, V]) NewRefs() Refs[K, V] { return Refs[K, V]{p, make(map[K]V)} }

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

// All returns the values that any config uses, by their keys.
func (p *Pool[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		p.pool.Range(func(key, v any) bool { return yield(key.(K), v.(pooled[V]).value) })
	}
}

// Len returns the number of these values.
func (p *Pool[K, V]) Len() (n int) {
	for range p.All() {
		n++
	}
	return n
}

// References returns how many configs use the value of a key.
func (p *Pool[K, V]) References(key K) int {
	n, _ := p.pool.References(key)
	return n
}
