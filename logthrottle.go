package ratelimit

import (
	"sync/atomic"
	"time"
)

// minutely says when something is due that is done once a minute at most.
type minutely struct {
	last atomic.Int64 // time since epoch, plus a minute
}

// epoch is some time from which a clock counts that nobody sets.
var epoch = time.Now()

// due reports whether a minute has passed since it was last true.
func (m *minutely) due() bool {
	now, last := int64(time.Since(epoch)+time.Minute), m.last.Load()
	return now-last >= int64(time.Minute) && m.last.CompareAndSwap(last, now)
}
