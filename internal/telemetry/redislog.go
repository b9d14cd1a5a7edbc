package telemetry

import (
	"context"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/logqueue"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/redisaddr"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func init() {
	redis.SetLogger(clientLogger{})
}

// noConfig has the lines that are of no config.
var noConfig logqueue.Queue

// clientLogger writes the messages of the Redis client to Caddy's log, at level
// DEBUG: what matters to a request is in the error that it gets. The client has
// one logger for the whole process, shared with other modules.
type clientLogger struct{}

// Printf implements the client's logging interface. Of the arguments only numbers
// and addresses are logged: errors may quote a server's reply, which may contain
// the user or password.
func (clientLogger) Printf(_ context.Context, format string, v ...any) {
	log := noConfig.Logger(caddy.Log())
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
			if redisaddr.IsHostPort(value) {
				shown[i] = value
			}
		default:
			shown[i] = "…"
		}
	}
	log.Named("redis").Debug(fmt.Sprintf(format, shown...))
}

// Redis logs an event of a Redis server and passes it on, once for however many
// requests it affects. Stores outlive configs, so the event goes to the logger of
// the newest one.
func (p *Process) Redis(e limiter.Event) {
	p.events.redis(e)
	log := noConfig.Logger(caddy.Log()).Named("rate_limit")
	if newest := p.Newest(); newest != nil {
		log = newest.Logger
	}
	switch server := zap.String("server", e.Server); e.Kind {
	case limiter.EventDown:
		log.Error("redis unavailable, applying on_error",
			server, zap.String("reason", e.Reason), zap.Error(e.Err), lookAt(e.Reason))
	case limiter.EventReason:
		log.Error("redis still unavailable, now for another reason",
			server, zap.String("reason", e.Reason), zap.Duration("down", e.Downtime), zap.Error(e.Err), lookAt(e.Reason))
	case limiter.EventRecovered:
		log.Info("redis recovered", server, zap.Duration("down", e.Downtime))
	case limiter.EventReplaced:
		log.Info("redis server replaced by others of its cluster",
			server, zap.Duration("down", e.Downtime))
	case limiter.EventError:
		if p.throttleOf(e).Allow() {
			log.Warn("redis failed for individual requests, applying on_error",
				server, zap.String("reason", e.Reason), zap.Error(e.Err), lookAt(e.Reason))
		}
	}
}

// lookAt returns the field with the options to look at if a server fails for a reason that
// they may be to blame for.
func lookAt(reason string) zap.Field {
	var options string
	switch reason {
	case "noauth":
		options = "password; of sentinels, sentinel_password"
	case "credentials":
		options = "username and password"
	case "wrongpass":
		options = "username and password; of sentinels, sentinel_username and sentinel_password"
	case "noperm":
		options = "username and key_prefix, and the permissions in " + option.Docs + "redis.md"
	case "moved":
		options = "cluster"
	case "dns":
		options = "the address after redis"
	case "tls":
		options = "tls, tls_server_name, tls_trust_pool and tls_client_auth"
	default:
		return zap.Skip()
	}
	return zap.String("look_at", options)
}

// throttleOf returns the throttle of the log of an error, one for each server and
// reason, also across reloads that open new stores.
func (p *Process) throttleOf(e limiter.Event) *Throttle {
	p.mu.Lock()
	defer p.mu.Unlock()
	about := [2]string{e.Server, e.Reason}
	if p.failed[about] == nil {
		p.failed[about] = new(Throttle)
	}
	return p.failed[about]
}
