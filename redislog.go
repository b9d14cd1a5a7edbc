package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
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
