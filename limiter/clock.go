package limiter

import (
	"sync/atomic"
	"time"
)

// newClock returns a clock that shows the time since now and never goes back. It goes on while
// the machine sleeps, as the clocks of servers do.
func newClock() func() time.Duration {
	start, c := time.Now(), new(clock)
	return func() time.Duration {
		now := time.Now()
		return c.show(now.Sub(start), time.Duration(now.UnixNano()-start.UnixNano()))
	}
}

// clock is a monotonic clock, which may stand while the machine sleeps, with what the time of
// day has gone ahead of it.
type clock struct{ ahead atomic.Int64 }

// minSleep is by how much the time of day has to get ahead at once to count: it is adjusted
// to other clocks all the time.
const minSleep = time.Second

// show returns the time on both, each given since the same moment.
func (c *clock) show(monotonic, wall time.Duration) time.Duration {
	ahead := c.ahead.Load()
	for now := int64(wall - monotonic); now-ahead >= int64(minSleep); ahead = c.ahead.Load() {
		c.ahead.CompareAndSwap(ahead, now)
	}
	return monotonic + time.Duration(ahead)
}
