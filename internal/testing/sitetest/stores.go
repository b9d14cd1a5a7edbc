package sitetest

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
)

// StoresInUse returns how many references there are to stores in a process, and to
// all in Redis.
func StoresInUse(p *state.Process) (memory, redis int) {
	var keyOfMemory any
	p.Stores.Range(func(key, store any) bool {
		if _, ok := store.(state.SharedMemory); ok {
			keyOfMemory = key // References would wait for Range
		} else {
			redis++
		}
		return true
	})
	if keyOfMemory != nil {
		memory, _ = p.Stores.References(keyOfMemory)
	}
	return memory, redis
}
