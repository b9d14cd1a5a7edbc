// Package offline loads a config without starting it, and takes requests through its routes to its
// limits.
package offline

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// moduleName is the name of the handler and of the app.
const moduleName = "rate_limit"

// Redis returns the options of a config's Redis, or an error if they are invalid.
type Redis func(caddy.Context) (limiter.RedisOptions, error)

// readRedis reads the option redis of the app.
func readRedis(text []byte) (Redis, error) {
	rd := new(config.Redis)
	if err := caddy.StrictUnmarshalJSON(text, rd); err != nil {
		return nil, err
	}
	return func(ctx caddy.Context) (limiter.RedisOptions, error) {
		opt, _, err := rd.Options(ctx)
		return opt, err
	}, nil
}

// Limit is a bucket of a limit, and its position.
type Limit struct{ rule.LocatedBucket }

// Sizes returns the size in force and the one that is written, which a factor divides; 0 if
// they depend on the request.
func (l *Limit) Sizes() (inForce, written int64) {
	if l.SizeIsDynamic() {
		return 0, 0
	}
	inForce, _, _ = l.EffectiveSize(nil) // it is complete
	return inForce, l.Size.Constant
}

// Numbers returns the numbers as the config has them.
func (l *Limit) Numbers() adminjson.Numbers {
	n := adminapi.Numbers(l.Bucket)
	if inForce, written := l.Sizes(); inForce != written {
		n.Size = l.Size.String() + " / " + l.Factor.String()
	}
	return n
}
