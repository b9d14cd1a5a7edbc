package limiter

import (
	"sync"
	"sync/atomic"
)

// heldUnitsHere counts the units that are held in a Memory, by the hash of their bucket.
// They end with their process, so nothing lapses.
type heldUnitsHere struct {
	buckets atomic.Int64 // how many have units that are held
	mu      sync.Mutex
	units   map[uint64]int64
}

// of returns how many units of a bucket are held.
func (h *heldUnitsHere) of(hash uint64) int64 {
	if h.buckets.Load() == 0 {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.units[hash]
}

// add holds n units of a bucket more, or fewer. The lock of its table must be held.
func (h *heldUnitsHere) add(hash uint64, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.units == nil {
		h.units = make(map[uint64]int64)
	}
	if h.units[hash] += n; h.units[hash] == 0 {
		delete(h.units, hash)
	}
	h.buckets.Store(int64(len(h.units)))
}
