package sitetest

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
)

// StoresInUse returns how many references there are to stores in the process, and to
// all in Redis.
func StoresInUse() (memory, redis int) {
	var keyOfMemory any
	state.Process.Stores.Range(func(key, store any) bool {
		if _, ok := store.(state.SharedMemory); ok {
			keyOfMemory = key // References would wait for Range
		} else {
			redis++
		}
		return true
	})
	if keyOfMemory != nil {
		memory, _ = state.Process.Stores.References(keyOfMemory)
	}
	return memory, redis
}
