package ratelimit

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// offlineModule tells the commands that read config files of this module.
type offlineModule struct{}

// MaxKeys implements offline.Module.
func (offlineModule) MaxKeys(app caddy.App) int { return app.(*App).maxKeys }

// Redis implements offline.Module.
func (offlineModule) Redis(config json.RawMessage) (offline.Redis, error) {
	rd := new(Redis)
	if err := caddy.StrictUnmarshalJSON(config, rd); err != nil {
		return nil, err
	}
	return func(ctx caddy.Context) (limiter.RedisOptions, error) {
		opt, _, err := rd.options(ctx)
		return opt, err
	}, nil
}
