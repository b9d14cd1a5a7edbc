package ratelimit

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// watchEvery is how often it is looked which limits are full. Tests lower it.
var watchEvery = 2 * time.Second

// limitUsages returns what the limits of a store use. Tests replace it.
var limitUsages = (*limiter.Memory).Limits

// watchLimits logs which limits are full, until ctx ends. One goroutine does so
// for all configurations, so that no request has to or waits for the log. The log
// is that of the newest one.
func watchLimits(ctx context.Context, every time.Duration, usages func(*limiter.Memory) []limiter.LimitUsage) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			running.Lock()
			var app *App
			if n := len(running.apps); n > 0 {
				app = running.apps[n-1]
			}
			running.Unlock()
			if app == nil {
				continue // it is about to end
			}
			for _, limit := range fullLimits.due(now, usages(app.memory)) {
				limit.log(app.logger)
			}
		}
	}
}

// fullLimits are those of this process, also over reloads.
var fullLimits fullLimitLog

// fullLimitLog finds which limits forget buckets or have keys share them, and
// keeps them to one line a minute each.
type fullLimitLog struct {
	mu     sync.Mutex
	seen   map[string]limiter.LimitUsage // by name, as of when it was last looked
	limits map[string]fullLimit          // by path
}

// fullLimit is what became of the buckets of a limit since it was last logged.
type fullLimit struct {
	path              string
	forgotten, shared uint64
	maxKeys           int
	next              time.Time // when it may be logged again
}

// reset begins anew, for a store that has not forgotten anything yet.
func (l *fullLimitLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen, l.limits = make(map[string]limiter.LimitUsage), make(map[string]fullLimit)
}

// due returns the limits that are to be logged now, given what all of them use.
func (l *fullLimitLog) due(now time.Time, usages []limiter.LimitUsage) []fullLimit {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, u := range usages {
		before := l.seen[u.Name]
		l.seen[u.Name] = u
		if u.Forgotten == before.Forgotten && u.Shared == before.Shared {
			continue
		}
		// What tells buckets of one path apart stands behind it.
		path, _, _ := strings.Cut(u.Name, "@")
		limit := l.limits[path]
		limit.path, limit.maxKeys = path, u.MaxKeys
		limit.forgotten += u.Forgotten - before.Forgotten
		limit.shared += u.Shared - before.Shared
		l.limits[path] = limit
	}
	var due []fullLimit
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

// log tells what becomes of new keys, and what to change.
func (l fullLimit) log(log *zap.Logger) {
	message := "limit full: the emptiest buckets are forgotten for those of new keys"
	if l.shared > 0 {
		message = "limit full: new keys share a bucket with others of their network"
	}
	log.Warn(message+"; unless this is a flood, raise max_keys of the limit, and of memory if need be, "+
		"to the new keys a second times the seconds that a bucket takes to drain",
		zap.String("limit", l.path), zap.Uint64("forgotten", l.forgotten), zap.Uint64("shared", l.shared),
		zap.Int("max_keys", l.maxKeys))
}
