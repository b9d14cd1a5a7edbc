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

// clientLogger takes what the Redis client logs into Caddy's log, at level
// DEBUG: what matters to a request is in the error that it gets. There is one
// logger for all clients in the process, those of other modules too.
type clientLogger struct{}

// Printf implements the client's logging interface. Of what the client wants to
// tell only numbers and addresses are kept: errors may quote what a server
// replied, and so the user or password.
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
