package wait

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
)

// Slots are those that a request has of a limit on requests in progress, where others may wait for
// them. The zero value is for limits where none may.
type Slots struct {
	queues  *Queues
	key     Key
	client  string
	n       int64
	since   time.Time // since when, if instances share them
	counted bool      // whether they are counted as ones that the client has; guarded by the queues' lock
}

// slotsOf is whose slots are counted: a client's, or all of those for which a key's requests wait.
type slotsOf struct {
	key    Key // without the class
	client string
	all    bool
}

// NewSlots returns slots that a request of a client has, which are not counted yet.
func (s *Queues) NewSlots(key Key, client string, n int64, shared bool) Slots {
	slots := Slots{queues: s, key: key, client: client, n: n}
	if shared {
		slots.since = time.Now()
	}
	return slots
}

// Count has the slots count as ones that the client has, or not.
func (t *Slots) Count(counts bool) {
	if t.queues == nil {
		return
	}
	t.queues.mu.Lock()
	defer t.queues.mu.Unlock()
	switch {
	case t.counted == counts:
	case counts:
		t.queues.countSlots(t.key, t.client, t.n)
	default:
		t.queues.countSlots(t.key, t.client, -t.n)
	}
	t.counted = counts
}

// Free gives the slots back, and the next request that waits its turn.
func (t *Slots) Free() {
	t.Count(false)
	t.Wake(t.key.Class)
}

// Wake gives the next request of a class its turn.
func (t *Slots) Wake(class adaptive.Class) {
	if t.queues == nil {
		return
	}
	var used time.Duration
	if !t.since.IsZero() {
		used = time.Since(t.since)
	}
	key := t.key
	key.Class = class
	t.queues.Freed(key, t.n, used)
}

// slots returns how the slots of a client and of all are counted for which requests of key wait.
func (key Key) slots(client string) (own, all slotsOf) {
	key.Class = 0
	return slotsOf{key: key, client: client}, slotsOf{key: key, all: true}
}

// Has returns how many slots a client has, and how many all have, for which requests of key wait.
func (s *Queues) Has(key Key, client string) (own, all int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of, ofAll := key.slots(client)
	return s.slots[of], s.slots[ofAll]
}

// countSlots counts n slots more that requests of a client have, or fewer. The lock is held.
func (s *Queues) countSlots(key Key, client string, n int64) {
	if key.Cost > 0 {
		return
	}
	own, all := key.slots(client)
	for _, of := range [...]slotsOf{own, all} {
		if s.slots[of] += n; s.slots[of] == 0 {
			delete(s.slots, of)
		}
	}
}
