package ratelimit

import (
	"sync/atomic"
	"time"
)

// logThrottle lets one message through a minute.
type logThrottle struct {
	last atomic.Int64 // time since processStart, plus a minute
}

// processStart is the origin of a monotonic clock.
var processStart = time.Now()

// allow reports whether a minute has passed since it last returned true.
func (t *logThrottle) allow() bool {
	now, last := int64(time.Since(processStart)+time.Minute), t.last.Load()
	return now-last >= int64(time.Minute) && t.last.CompareAndSwap(last, now)
}
