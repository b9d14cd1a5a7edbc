// Package peers has the rate limiters for Caddy that e2e compares with the
// limiter. Two are what one would write in an afternoon: a handler that uses
// redis_rate and one that runs its own script. They do the usual: a go-redis
// client with default options, a round trip for each limit, the usual header
// fields, and an error for Caddy to answer if a request is denied. A third one is
// not meant for use, but shows the minimum cost of decisions by Redis.
//
//	redis_rate <address> {
//		limit <key> <size> <drip_rate>
//	}
//
// and likewise evalsha and one_call. A limit's bucket loses one unit every
// drip_rate.
package peers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
)

func init() {
	register("redis_rate", func() handler { return new(RedisRate) })
	register("evalsha", func() handler { return new(Evalsha) })
	register("one_call", func() handler { return new(OneCall) })
}

type handler interface {
	caddy.Module
	caddyhttp.MiddlewareHandler
	unmarshal(d *caddyfile.Dispenser) error
}

// register registers a handler's module and directive with Caddy.
func register(directive string, fresh func() handler) {
	caddy.RegisterModule(fresh())
	httpcaddyfile.RegisterHandlerDirective(directive, func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		p := fresh()
		return p, p.unmarshal(h.Dispenser)
	})
	httpcaddyfile.RegisterDirectiveOrder(directive, httpcaddyfile.Before, "basic_auth")
}

// peer is the common part of the handlers.
type peer struct {
	Address string  `json:"address"`
	Limits  []limit `json:"limits"`

	client *redis.Client
}

type limit struct {
	Key      string         `json:"key"`
	Size     int            `json:"size"`
	DripRate caddy.Duration `json:"drip_rate"`
}

// decision is the result of a request for one limit.
type decision struct {
	allowed      bool
	remaining    int
	clear, retry time.Duration
}

// drip returns the time between two drips in µs.
func (l limit) drip() int64 { return time.Duration(l.DripRate).Microseconds() }

// decision converts a script's reply: the time until the bucket is empty, and the
// room left, both in µs.
func (l limit) decision(clear, room int64) decision {
	d := decision{allowed: room >= 0, clear: time.Duration(clear) * time.Microsecond}
	if d.allowed {
		d.remaining = int(room / l.drip())
	} else {
		d.retry = time.Duration(-room) * time.Microsecond
	}
	return d
}

func (p *peer) unmarshal(d *caddyfile.Dispenser) error {
	d.Next() // the directive
	if !d.Args(&p.Address) {
		return d.ArgErr()
	}
	for d.NextBlock(0) {
		var l limit
		var size, rate string
		if d.Val() != "limit" || !d.Args(&l.Key, &size, &rate) {
			return d.ArgErr()
		}
		var err error
		if l.Size, err = strconv.Atoi(size); err != nil {
			return d.WrapErr(err)
		}
		dripRate, err := caddy.ParseDuration(rate)
		if err != nil {
			return d.WrapErr(err)
		}
		l.DripRate = caddy.Duration(dripRate)
		p.Limits = append(p.Limits, l)
	}
	return nil
}

func (p *peer) connect() {
	p.client = redis.NewClient(&redis.Options{Addr: p.Address})
}

// Cleanup closes the connections.
func (p *peer) Cleanup() error { return p.client.Close() }

// serve checks the limits, each with its key. The header fields describe the one
// with the least room, or one that denies.
func (p *peer) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler,
	take func(ctx context.Context, keys []string) ([]decision, error),
) error {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	keys := make([]string, len(p.Limits))
	for i, l := range p.Limits {
		keys[i] = repl.ReplaceAll(l.Key, "")
	}
	decisions, err := take(r.Context(), keys)
	if errors.Is(err, context.Canceled) { // the client has gone
		return caddyhttp.Error(499, err)
	}
	if err != nil {
		return caddyhttp.Error(http.StatusInternalServerError, err)
	}
	var size int
	least := decision{remaining: math.MaxInt}
	for i, d := range decisions {
		if d.remaining < least.remaining || !d.allowed {
			size, least = p.Limits[i].Size, d
		}
	}
	header := w.Header()
	header.Set("X-Ratelimit-Limit", strconv.Itoa(size))
	header.Set("X-Ratelimit-Remaining", strconv.Itoa(least.remaining))
	header.Set("X-Ratelimit-Clear", strconv.FormatFloat(least.clear.Seconds(), 'f', 3, 64))
	if !least.allowed {
		header.Set("X-Ratelimit-Reset", strconv.FormatFloat(least.retry.Seconds(), 'f', 3, 64))
		header.Set("Retry-After", strconv.FormatFloat(math.Ceil(least.retry.Seconds()), 'f', 0, 64))
		return caddyhttp.Error(http.StatusTooManyRequests, fmt.Errorf("retry after %v", least.retry))
	}
	return next.ServeHTTP(w, r)
}

// oneByOne checks the limits one after the other, until one denies.
func (p *peer) oneByOne(take func(ctx context.Context, key string, l limit) (decision, error)) func(context.Context, []string) ([]decision, error) {
	return func(ctx context.Context, keys []string) ([]decision, error) {
		decisions := make([]decision, 0, len(keys))
		for i, l := range p.Limits {
			d, err := take(ctx, keys[i], l)
			if err != nil {
				return nil, err
			}
			decisions = append(decisions, d)
			if !d.allowed {
				break
			}
		}
		return decisions, nil
	}
}

// RedisRate uses redis_rate.
type RedisRate struct {
	peer
	limiter *redis_rate.Limiter
}

// CaddyModule returns the module's name.
func (*RedisRate) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.redis_rate", New: func() caddy.Module { return new(RedisRate) }}
}

// Provision makes the client.
func (h *RedisRate) Provision(caddy.Context) error {
	h.connect()
	h.limiter = redis_rate.NewLimiter(h.client)
	return nil
}

func (h *RedisRate) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return h.serve(w, r, next, h.oneByOne(func(ctx context.Context, key string, l limit) (decision, error) {
		res, err := h.limiter.Allow(ctx, key, redis_rate.Limit{Rate: 1, Burst: l.Size, Period: time.Duration(l.DripRate)})
		if err != nil {
			return decision{}, err
		}
		return decision{allowed: res.Allowed > 0, remaining: res.Remaining, clear: res.ResetAfter, retry: res.RetryAfter}, nil
	}))
}

// Evalsha runs a script once for each limit.
type Evalsha struct {
	peer
}

// CaddyModule returns the module's name.
func (*Evalsha) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.evalsha", New: func() caddy.Module { return new(Evalsha) }}
}

// Provision makes the client.
func (h *Evalsha) Provision(caddy.Context) error {
	h.connect()
	return nil
}

// gcra keeps one integer, the time at which the bucket is empty. It returns that
// and the room left, both in µs. If there is no room, the room is negative: minus
// the time to wait.
var gcra = redis.NewScript(`
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local clear = math.max(tonumber(redis.call('GET', KEYS[1]) or now), now)
local room = ARGV[1] - (clear - now) - ARGV[2]
if room >= 0 then
	clear = clear + ARGV[2]
	redis.call('SET', KEYS[1], clear, 'PX', math.ceil((clear - now) / 1000))
end
return {clear - now, room}
`)

func (h *Evalsha) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return h.serve(w, r, next, h.oneByOne(func(ctx context.Context, key string, l limit) (decision, error) {
		res, err := gcra.Run(ctx, h.client, []string{key}, l.drip()*int64(l.Size), l.drip()).Int64Slice()
		if err != nil {
			return decision{}, err
		}
		return l.decision(res[0], res[1]), nil
	}))
}

var (
	_ caddyhttp.MiddlewareHandler = (*RedisRate)(nil)
	_ caddyhttp.MiddlewareHandler = (*Evalsha)(nil)
	_ caddy.CleanerUpper          = (*RedisRate)(nil)
	_ caddy.CleanerUpper          = (*Evalsha)(nil)
)
