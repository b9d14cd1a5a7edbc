package ratelimit

import (
	"github.com/caddyserver/caddy/v2"
)

// kept are values that configs share by their keys. Each is made for the first config that
// uses it, and ends with the last one, so it survives reloads.
type kept[K comparable, V any] struct {
	pool *caddy.UsagePool
	make func(K) V
}

// newKept returns an empty kept, with what makes its values.
func newKept[K comparable, V any](make func(K) V) *kept[K, V] {
	return &kept[K, V]{caddy.NewUsagePool(), make}
}

// keptValue is a value in the pool.
type keptValue[V any] struct{ value V }

// Destruct implements caddy.Destructor.
func (keptValue[V]) Destruct() error { return nil }

// used are the values that one config uses. They have to be released.
type used[K comparable, V any] struct {
	of   *kept[K, V]
	have map[K]V
}

// use returns that of a config that uses none yet.
func (k *kept[K, V]) use() used[K, V] { return used[K, V]{k, make(map[K]V)} }

// get returns the value of a key.
func (u *used[K, V]) get(key K) V {
	v, ok := u.have[key]
	if !ok {
		found, _, _ := u.of.pool.LoadOrNew(key, func() (caddy.Destructor, error) {
			return keptValue[V]{u.of.make(key)}, nil
		})
		v = found.(keptValue[V]).value
		u.have[key] = v
	}
	return v
}

// release releases all values.
func (u *used[K, V]) release() {
	for key := range u.have {
		_, _ = u.of.pool.Delete(key)
	}
	clear(u.have)
}

// len returns the number of values that any config uses.
func (k *kept[K, V]) len() (n int) {
	k.pool.Range(func(any, any) bool { n++; return true })
	return n
}
