package ratelimit

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// watchEvery is how often to look for full limits. Tests lower it.
var watchEvery = 2 * time.Second

// limitUsages returns the usage of each limit of a store. Tests replace it.
var limitUsages = (*limiter.Memory).Limits

// watchLimits logs which limits are full until ctx is done. One goroutine does so
// for all configs, with the logger of the newest one, so that no request waits
// for the log.
func watchLimits(ctx context.Context, every time.Duration, usages func(*limiter.Memory) []limiter.LimitUsage) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	recentCounts.sample(time.Now())
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			recentCounts.sample(now)
			app := newestApp()
			if app == nil {
				continue // ctx is about to be cancelled
			}
			for _, limit := range fullLimits.due(now, usages(app.memory)) {
				if limit.memory {
					limit.maxKeys = app.maxKeys
				}
				limit.log(app.logger)
				limit.emit()
			}
		}
	}
}

// fullLimits are the full limits of this process, also across reloads.
var fullLimits fullLimitLog

// fullLimitLog finds the limits that forget buckets or have keys share them, and
// lets each be logged once a minute.
type fullLimitLog struct {
	mu     sync.Mutex
	seen   map[string]limiter.LimitUsage // by name, as last seen
	limits map[string]fullLimit          // by path
}

// fullLimit counts what happened to buckets of a limit since it was last logged.
type fullLimit struct {
	path              string
	forgotten, shared uint64
	maxKeys           int
	memory            bool      // whether memory is full, and maxKeys is that of memory
	next              time.Time // when it may be logged again
}

// reset starts over, for a new store.
func (l *fullLimitLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen, l.limits = make(map[string]limiter.LimitUsage), make(map[string]fullLimit)
}

// due returns the limits to log now, given the usage of all.
func (l *fullLimitLog) due(now time.Time, usages []limiter.LimitUsage) []fullLimit {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range usages {
		before := l.seen[u.Name]
		l.seen[u.Name] = u
		if u.Forgotten == before.Forgotten && u.Shared == before.Shared {
			continue
		}
		path := pathOfBuckets(u.Name)
		limit := l.limits[path]
		limit.path, limit.maxKeys, limit.memory = path, u.MaxKeys, u.Buckets < u.MaxKeys
		limit.forgotten += u.Forgotten - before.Forgotten
		limit.shared += u.Shared - before.Shared
		l.limits[path] = limit
	}
	due := make([]fullLimit, 0, len(l.limits))
	for _, path := range slices.Sorted(maps.Keys(l.limits)) {
		limit := l.limits[path]
		if limit.forgotten+limit.shared == 0 || now.Before(limit.next) {
			continue
		}
		due = append(due, limit)
		l.limits[path] = fullLimit{next: now.Add(time.Minute)}
	}
	return due
}

// log logs what happens to new keys, and how to avoid it.
func (l fullLimit) log(log *zap.Logger) {
	message := "limit full: "
	if l.memory {
		message = "memory full: "
	}
	if l.shared > 0 {
		message += "new keys share a bucket with others of their network"
	} else {
		message += "the emptiest buckets are forgotten for those of new keys"
	}
	message += "; unless this is a flood, raise max_keys of "
	if l.memory {
		message += "memory to the sum, over all limits, of "
	} else {
		message += "the limit, and of memory if need be, to "
	}
	log.Warn(message+"the new keys a second times the seconds that a bucket takes to drain",
		zap.String("limit", l.path), zap.Uint64("forgotten", l.forgotten), zap.Uint64("shared", l.shared),
		zap.Int("max_keys", l.maxKeys))
}

// emit queues the event of the limit.
func (l fullLimit) emit() {
	events.send(eventMemoryFull, map[string]any{
		"limit": l.path, "forgotten": l.forgotten, "shared": l.shared, "max_keys": l.maxKeys,
	})
}
