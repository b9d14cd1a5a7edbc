package telemetry

import (
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// fullLimits finds the limits that forget buckets or have keys share them, and lets
// each be logged once a minute, also across reloads.
type fullLimits struct {
	seen   map[string]limiter.LimitUsage // by name, as last seen
	limits map[string]fullLimit          // by path
}

// fullLimit counts what happened to buckets of a limit since it was last logged.
type fullLimit struct {
	path              string
	forgotten, shared uint64
	maxKeys           int
	memory            bool      // whether memory is full, and maxKeys is the maximum of memory
	next              time.Time // when it may be logged again
}

// reset starts over, for a new store.
func (l *fullLimits) reset() {
	l.seen, l.limits = make(map[string]limiter.LimitUsage), make(map[string]fullLimit)
}

// due returns the limits to log now, given the usage of all.
func (l *fullLimits) due(now time.Time, usages []limiter.LimitUsage) []fullLimit {
	for _, u := range usages {
		before := l.seen[u.Name]
		l.seen[u.Name] = u
		if u.Forgotten == before.Forgotten && u.Shared == before.Shared {
			continue
		}
		path := limitPath(u.Name)
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
		message += "new keys evict the emptiest buckets"
	}
	message += "; unless this is a flood, raise max_keys to "
	if l.memory {
		message += "the sum over all limits of "
	}
	log.Warn(message+"(new keys per second) × (seconds to drain)",
		zap.String("limit", l.path), zap.Uint64("forgotten", l.forgotten), zap.Uint64("shared", l.shared),
		zap.Int("max_keys", l.maxKeys))
}

// data returns the data of the limit's event.
func (l fullLimit) data() map[string]any {
	return map[string]any{"limit": l.path, "forgotten": l.forgotten, "shared": l.shared, "max_keys": l.maxKeys}
}
