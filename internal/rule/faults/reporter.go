// Package faults logs what is wrong with the requests of a limit.
package faults

import (
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// Reporter logs what is wrong with the requests of a limit. However many there are, it does
// so once, or once a minute.
type Reporter struct {
	Logger *zap.Logger
	Limit  string // its path
	Key    *key.Key

	noKeyOnce     sync.Once
	noAddressOnce sync.Once
	unclear       telemetry.Throttle
	badValues     telemetry.Throttle
	noUsage       telemetry.Throttle
	slow          telemetry.Throttle
	proxies       proxyWatch
}

// Begin has it log, about the limit of a path with a key.
func (r *Reporter) Begin(logger *zap.Logger, path string, k *key.Key) {
	r.Logger, r.Limit, r.Key = logger, path, k
	r.proxies.begin(k)
}

// NoKey logs, once, that the client's address is used instead of the key, or
// that it is missing too.
func (r *Reporter) NoKey(address string) {
	once, message := &r.noKeyOnce, "a request has no value for the key of this limit, using the client's address"
	if address == "" {
		once, message = &r.noAddressOnce, "a request has neither a value for the key of this limit nor a client address, "+
			"as on a unix socket without trusted_proxies_unix; all such requests share one bucket"
	}
	once.Do(func() {
		r.Logger.Warn(message, zap.String("limit", r.Limit), zap.Stringer("key", r.Key))
	})
}

// UnclearFull logs that there is no room for more requests of which a field in the key is unclear. Clients
// that send what is certain do not notice.
func (r *Reporter) UnclearFull() {
	if r.unclear.Allow() {
		r.Logger.Warn("requests are denied of which a field in the key is unclear, as the bucket that all of these share is full; "+
			"it may be an attack, or a client that sends its fields in an unusual way", zap.String("limit", r.Limit), zap.Stringer("key", r.Key))
	}
}

// BadValue logs that the value of a placeholder can't be used.
func (r *Reporter) BadValue(err error) {
	if r.badValues.Allow() {
		r.Logger.Error("the value of a placeholder can't be used; requests are rejected",
			zap.String("limit", r.Limit), zap.Error(err))
	}
}

// NoCost logs why the actual cost of a request is not known, and that an estimate is charged. If it
// should be in a body that does not have it, that is how clients and upstreams are, and likely
// to last.
func (r *Reporter) NoCost(actualCost string, inBody bool, why string, charged int64) {
	limit, cost, charge := zap.String("limit", r.Limit), zap.String("actual_cost", actualCost), zap.Int64("charged", charged)
	if !inBody {
		if r.badValues.Allow() {
			r.Logger.Warn("the actual cost of a request is not a whole number, so its estimated cost is charged", limit, cost, zap.String("got", value.Described(why)), charge)
		}
	} else if r.noUsage.AllowEvery(time.Hour) {
		r.Logger.Warn("a response does not say what its request has cost, so an estimate is charged; this is logged once an hour", limit, cost, zap.String("why", why), charge)
	}
}

// SlowAtMin logs that a limit which follows the load allows no more requests than it must, and
// its upstream is slower than it should be anyway, with what holds the slots.
func (r *Reporter) SlowAtMin(o *adaptive.Options, s adaptive.State) {
	if !r.slow.Allow() {
		return
	}
	mean := "no answers"
	if s.Mean > 0 {
		mean = s.Mean.Round(time.Millisecond).String()
	}
	r.Logger.Warn("the upstream is slower than latency with only min requests in progress; if it is not broken or used by others, latency is too low for it",
		zap.String("limit", r.Limit), zap.String("mean", mean), zap.Duration("latency", o.Latency), zap.Int("min", o.Min),
		zap.Int("in_progress", s.InProgress), zap.Int("overdue", s.Overdue), zap.Int("awaiting_body", s.Waiting), zap.Duration("oldest", s.Oldest))
}
