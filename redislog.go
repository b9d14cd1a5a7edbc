package ratelimit

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func init() {
	redis.SetLogger(clientLogger{})
}

// clientLogger writes the messages of the Redis client to Caddy's log, at level
// DEBUG: what matters to a request is in the error that it gets. The client has
// one logger for the whole process, shared with other modules.
type clientLogger struct{}

// Printf implements the client's logging interface. Of the arguments only numbers
// and addresses are logged: errors may quote a server's reply, which may contain
// the user or password.
func (clientLogger) Printf(_ context.Context, format string, v ...any) {
	log := caddy.Log()
	if !log.Core().Enabled(zap.DebugLevel) {
		return
	}
	shown := make([]any, len(v))
	for i, value := range v {
		switch value := value.(type) {
		case int, int32, int64, uint32, uint64, bool, time.Duration:
			shown[i] = value
		case string:
			shown[i] = "…"
			if isHostPort(value) {
				shown[i] = value
			}
		default:
			shown[i] = "…"
		}
	}
	log.Named("redis").Debug(fmt.Sprintf(format, shown...))
}

// errorEvents limits the log to one error a minute for each server and reason,
// also across reloads that open new stores.
var errorEvents eventThrottle

// eventThrottle lets one event of each server and reason through a minute.
type eventThrottle struct {
	sync.Mutex
	last map[[2]string]time.Time // by server and reason; of the last minute
}

// allow reports whether e may be logged.
func (t *eventThrottle) allow(e limiter.Event) bool {
	t.Lock()
	defer t.Unlock()
	now := time.Now()
	maps.DeleteFunc(t.last, func(_ [2]string, at time.Time) bool { return now.Sub(at) >= time.Minute })
	key := [2]string{e.Server, e.Reason}
	if _, ok := t.last[key]; ok {
		return false
	}
	if t.last == nil {
		t.last = make(map[[2]string]time.Time)
	}
	t.last[key] = now
	return true
}

// logEvent logs an event of a Redis server and passes it on, once for however many
// requests it affects. Stores outlive configs, so the event goes to the logger of
// the newest one.
func logEvent(e limiter.Event) {
	events.redis(e)
	log := caddy.Log().Named(ownName)
	if app := newestApp(); app != nil {
		log = app.logger
	}
	if e.Dropped > 0 {
		log = log.With(zap.Int("dropped", e.Dropped)) // earlier events, while logging was blocked
	}
	switch server := zap.String("server", e.Server); e.Kind {
	case limiter.EventDown:
		log.Error("redis unavailable, applying on_error",
			server, zap.String("reason", e.Reason), zap.Error(e.Err))
	case limiter.EventRecovered:
		log.Info("redis recovered", server, zap.Duration("down", e.Downtime))
	case limiter.EventReplaced:
		log.Info("redis server replaced by others of its cluster",
			server, zap.Duration("down", e.Downtime))
	case limiter.EventError:
		if !errorEvents.allow(e) {
			return
		}
		log.Warn("redis failed on single requests, applying on_error to them",
			server, zap.String("reason", e.Reason), zap.Error(e.Err))
	}
}
