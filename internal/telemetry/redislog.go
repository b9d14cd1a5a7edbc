package telemetry

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/redisaddr"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/logqueue"
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

// losses are the Redis servers that were reported lost, and not back yet. Stores may
// come and go meanwhile, as a reload that mends a setting opens another one.
type losses struct {
	mu    sync.Mutex
	store *limiter.Redis // of the newest config: only its events count
	lost  map[string]*loss
}

// loss is a server that was reported lost.
type loss struct {
	since time.Time

	// Whether an older store has lost it, and the newest one has not reported it yet. It says
	// of no return then, since it has not lost it.
	inherited bool

	// Whether the newest store has named it. One of a cluster names its servers once it knows
	// them, which takes a connection.
	named bool
}

// Redis logs an event of a Redis server and passes it on, once for however many requests it
// affects. Stores outlive configs, so it goes to the logger of the newest one; and requests
// of older configs may still use another store, whose events no longer matter.
func (p *Process) Redis(store *limiter.Redis, e limiter.Event) {
	l := &p.losses
	l.mu.Lock()
	defer l.mu.Unlock()
	newest := p.Newest()
	if newest == nil || newest.Redis != store {
		return
	}
	lost, now := l.lost[e.Server], p.opt.Now()
	switch e.Kind {
	case limiter.EventDown:
		if lost == nil {
			p.lose(newest, e, now)
			return
		}
		lost.inherited, e.Kind, e.Downtime = false, limiter.EventReason, now.Sub(lost.since)
		logRedis(newest.Logger, e)
	case limiter.EventRecovered, limiter.EventReplaced:
		if lost != nil {
			e.Downtime = max(e.Downtime, now.Sub(lost.since))
			p.findBack(newest, e)
		}
	case limiter.EventReason:
		logRedis(newest.Logger, e)
	case limiter.EventError:
		if p.throttleOf(e).Allow() {
			logRedis(newest.Logger, e)
		}
	}
}

// lose reports that a server is lost. The lock of losses must be held.
func (p *Process) lose(newest *Config, e limiter.Event, since time.Time) {
	p.losses.lost[e.Server] = &loss{since: since}
	logRedis(newest.Logger, e)
	p.events.send(EventRedisLost, map[string]any{"server": e.Server, "reason": e.Reason})
}

// findBack reports that a server that was lost is back, or no longer in use. The lock of losses must be
// held.
func (p *Process) findBack(newest *Config, e limiter.Event) {
	delete(p.losses.lost, e.Server)
	logRedis(newest.Logger, e)
	p.events.send(EventRedisBack, map[string]any{"server": e.Server, "down": e.Downtime.Seconds()})
}

// eventUnused is the kind of event of a server that was lost and that the newest config does
// not name.
const eventUnused limiter.EventKind = math.MaxUint8

// follow has the losses follow the newest config, if it has another store.
func (p *Process) follow() {
	l := &p.losses
	l.mu.Lock()
	defer l.mu.Unlock()
	newest := p.Newest()
	switch {
	case newest == nil:
		l.store = nil
		clear(l.lost) // nothing is left to report to
		return
	case newest.Redis == l.store:
		return
	}
	l.store = newest.Redis
	servers := p.servers(newest)
	for name, lost := range l.lost {
		s, named := servers[name]
		lost.named, lost.inherited = named, !named || s.Breaker == breakerClosed
	}
	p.findReturns(newest, servers)
	for _, name := range slices.Sorted(maps.Keys(servers)) {
		if s := servers[name]; s.Breaker != breakerClosed && l.lost[name] == nil { // before its store was the newest one
			p.lose(newest, limiter.Event{Server: name, Kind: limiter.EventDown, Reason: s.Reason, Err: s.Err}, s.DownSince)
		}
	}
}

// breakerClosed is the state of the breaker of a server that is not down.
const breakerClosed = "closed"

// servers returns the state of the servers of a config by address.
func (p *Process) servers(c *Config) map[string]limiter.ServerStats {
	servers := make(map[string]limiter.ServerStats)
	if c.Redis != nil {
		for _, s := range p.ServerStats(c.Redis) {
			servers[s.Address] = s
		}
	}
	return servers
}

// lookForReturns reports servers that an older store has lost and the newest one has reached.
// Those of a cluster are not named together any more once they are known.
func (p *Process) lookForReturns() {
	l := &p.losses
	l.mu.Lock()
	defer l.mu.Unlock()
	newest := p.Newest()
	if newest == nil || newest.Redis != l.store || len(l.lost) == 0 {
		return
	}
	p.findReturns(newest, p.servers(newest))
}

// findReturns reports servers that an older store has lost, and that the newest one, which
// has these servers, has reached or does not use. The lock of losses must be held.
func (p *Process) findReturns(newest *Config, servers map[string]limiter.ServerStats) {
	unknown := false
	for _, s := range servers {
		unknown = unknown || s.Cluster
	}
	for _, name := range slices.Sorted(maps.Keys(p.losses.lost)) {
		lost, kind := p.losses.lost[name], limiter.EventRecovered
		switch s, named := servers[name]; {
		case !lost.inherited, named && s.State != limiter.ServerUp, !named && unknown:
			continue
		case !named && !lost.named:
			kind = eventUnused
		}
		p.findBack(newest, limiter.Event{Server: name, Kind: kind, Downtime: p.opt.Now().Sub(lost.since)})
	}
}

// logRedis logs an event of a Redis server.
func logRedis(log *zap.Logger, e limiter.Event) {
	server, down := zap.String("server", e.Server), zap.Duration("down", e.Downtime)
	why := []zap.Field{server, zap.String("reason", e.Reason), zap.Error(e.Err), lookAt(e.Reason)}
	switch e.Kind {
	case limiter.EventDown:
		log.Error("redis unavailable, applying on_error", why...)
	case limiter.EventReason:
		log.Error("redis still unavailable", append(why, down)...)
	case limiter.EventError:
		log.Warn("redis failed for individual requests, applying on_error", why...)
	case limiter.EventRecovered:
		log.Info("redis recovered", server, down)
	case limiter.EventReplaced:
		log.Info("redis server replaced by others of its cluster", server, down)
	case eventUnused:
		log.Info("redis server that was unavailable is no longer used", server, down)
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
	case "nomaster":
		options = "master_name"
	case "db":
		options = "db"
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
