// Package ratelimit is a Caddy module that limits how often clients may send
// requests. It puts leaky buckets in front of any site: in this process, or in
// a Redis server, where all Caddy instances share them.
//
// The package is the HTTP handler `rate_limit` and the app of the same name,
// which says where the buckets are kept. What a bucket is and how it decides is
// in package limiter.
package ratelimit

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func init() {
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
}

// App says where the buckets of all `rate_limit` handlers are kept. Without it
// they live in this process: each Caddy instance then limits for itself, and
// limits start afresh when it does. Reloading the configuration keeps them.
type App struct {
	// The Redis server that keeps the buckets, so that every Caddy instance
	// that uses it enforces the same limits.
	Redis *Redis `json:"redis,omitempty"`

	store       limiter.Store
	storeKey    any // of the reference held in stores; nil if none is
	definitions *definitions
}

// Redis is the Redis server that keeps the buckets. It has to be 7.0 or later.
//
// Addresses, `username` and `password` may hold `{env.*}` and `{file.*}`
// placeholders. They are resolved when the configuration is loaded and only
// kept unresolved; one that resolves to nothing is an error. Caddy does not
// connect before the first request needs it.
type Redis struct {
	// The address of the server: `host:port`, the path of a unix socket, or a
	// URL, `redis://[[user]:password@]host[:port][/db]` or
	// `unix://[[user]:password@]/path`. There must be one.
	Addresses []string `json:"addresses,omitempty"`

	// The user to log in as. The server's default user if empty.
	Username string `json:"username,omitempty"`

	// The password to log in with.
	Password string `json:"password,omitempty"`

	// The number of the database. Default: 0.
	DB int `json:"db,omitempty"`

	// What the names of all keys begin with. It must not contain braces.
	// Default: `rl:`.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// The most a request may wait for Redis, everything included. If there is
	// no answer by then, it is answered with status 503. Default: `50ms`.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// The most connections to the server. Default: 10 for each CPU.
	PoolSize int `json:"pool_size,omitempty"`
}

// Handler limits how often clients may send requests, by leaky buckets.
//
// A request has to pass all limits that apply to it. If it does, response
// header fields tell the client how much room is left, and the next handler is
// invoked. If it does not, it is denied with status 429 and `Retry-After`, and
// error routes shape the response. Only where no error route could see the
// error is the bare response written directly.
//
// The handler sets these placeholders. Where several `rate_limit` handlers
// see a request, they show the tightest of their limits:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.limit}` | The path of the limit that decided: of a denied request the one that takes longest to admit it, else the one with the least room
// `{http.rate_limit.size}` | The size of that limit's bucket
// `{http.rate_limit.remaining}` | The units that the fullest bucket still has room for
// `{http.rate_limit.clear}` | The seconds until all buckets have run empty
// `{http.rate_limit.retry_after}` | The whole seconds to wait before the same request is admitted; `0` if it was, empty if it never will be
// `{http.rate_limit.denied}` | Whether the request was denied, `true` or `false`
// `{http.rate_limit.exceeded.name}` | The path of the limit that denied the request; empty if none did
type Handler struct {
	// The limits that requests have to pass.
	Limits []*Limit `json:"limits,omitempty"`

	// What a request is charged if some of its buckets have room and others do
	// not. With `atomic`, the default, nothing anywhere: a denied request uses
	// up no limit. With `each`, every bucket that has room is charged.
	Accounting string `json:"accounting,omitempty"`

	// The header fields to set on responses, one or several of:
	//
	// - `x-ratelimit` (default): `X-RateLimit-Limit`, `-Remaining`, `-Clear`,
	//   and on denial `-Reset`
	// - `ratelimit`: `RateLimit-Policy` and `RateLimit` of
	//   draft-ietf-httpapi-ratelimit-headers-11, with an item for each limit
	// - `off`: neither
	//
	// A denied request gets `Retry-After` in any case.
	Headers []string `json:"headers,omitempty"`

	store      limiter.Store
	accounting limiter.Accounting
	families   families
	buckets    int // how many there are at most for one request
	logger     *zap.Logger

	// Whether error routes of a server may see the handler's errors, by
	// *caddyhttp.Server.
	errorRoutes sync.Map
}

// Limit is a leaky bucket for each key, such as each client address. The
// bucket holds at most `size` units. A request adds its `cost` if it fits;
// otherwise it is denied and adds nothing. Every `drip_rate`, `drip_size` units
// drip out.
//
// Instead of `size`, `drip_rate` and `drip_size`, a limit can be told by `max`
// and `duration`: a bucket of size `max` that drips one unit every
// `duration`/`max`. That is a burst of `max` and `max` per duration on average,
// so up to 2·`max` − 1 in one duration.
//
// Limits within a limit apply where it does, as well as it. A limit without
// size only holds others.
//
// `size`, `drip_rate`, `drip_size`, `cost` and `factor` may be strings with
// placeholders, evaluated for each request. A request for which one makes no
// usable value is refused: with status 400 for `cost`, 500 for the others.
type Limit struct {
	// What the limit is called, in header fields, logs and the names of its
	// buckets: 1 to 64 letters, digits, `_`, `.` or `-`. Limits of one name and
	// equal numbers share their buckets, on all sites and Caddy instances.
	// Needed within another limit; otherwise `default` if empty.
	Name string `json:"name,omitempty"`

	// The requests that the limit applies to. All if empty.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Whose bucket a request meets: text with placeholders. An IP address is
	// normalised and shortened to its prefix. If none of the placeholders has
	// a value, the client's address is used, apart from other keys. Default:
	// that of the limit this one is in, else `{http.vars.client_ip}`.
	Key string `json:"key,omitempty"`

	// The most units the bucket holds, from 1 to 2^49.
	Size Number `json:"size,omitempty"`

	// The time from one drip to the next, in whole microseconds. Default: `1s`.
	DripRate Duration `json:"drip_rate,omitempty"`

	// The units that leave with each drip, from 1 to 2^49. Default: 1.
	DripSize Number `json:"drip_size,omitempty"`

	// The units a request adds, at least 1. Default: 1.
	Cost Number `json:"cost,omitempty"`

	// What the size is divided by, rounding up: a decimal of at most 6 digits
	// after the point. 0 switches the bucket off, but not the limits within
	// this one. Default: 1.
	Factor Number `json:"factor,omitempty"`

	// How many bits of an IPv4 address count, from 1 to 32. Default: 32.
	IPv4Prefix Number `json:"ipv4_prefix,omitempty"`

	// How many bits of an IPv6 address count, from 1 to 128. Default: 64,
	// since a single host may use any address of its /64.
	IPv6Prefix Number `json:"ipv6_prefix,omitempty"`

	// The burst, and the most on average in each duration. Takes no
	// placeholders.
	Max Number `json:"max,omitempty"`

	// The time in which `max` requests are admitted on average. Takes no
	// placeholders.
	Duration Duration `json:"duration,omitempty"`

	// The least time between two requests, kept by a second bucket beside
	// that of `max` and `duration`. Takes no placeholders.
	MinInterval Duration `json:"min_interval,omitempty"`

	// Limits that apply to the same requests as this one, if they match.
	Limits []*Limit `json:"limits,omitempty"`

	path     string
	key      *key
	buckets  []*bucket
	matchers caddyhttp.MatcherSets
	logger   *zap.Logger

	warnNoKey sync.Once
	reported  atomic.Int64 // when a bad value was last reported, in Unix seconds
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.rate_limit",
		New: func() caddy.Module { return new(Handler) },
	}
}

// stores holds the stores in use, so that handlers of one configuration share
// one, and limits outlive reloads: a new configuration takes its reference
// before the old one lets go of its own.
var stores = caddy.NewUsagePool()

// newMemory makes the store of this process. Tests replace it to move the
// clock.
var newMemory = func() *limiter.Memory { return limiter.NewMemory(nil) }

// sharedStore is a store in the pool.
type sharedStore struct{ limiter.Store }

// Destruct closes the store's connections, if it has any.
func (s sharedStore) Destruct() error {
	if c, ok := s.Store.(interface{ Close() error }); ok {
		return c.Close()
	}
	return nil
}

// Provision takes the store that the configuration names.
func (a *App) Provision(caddy.Context) error {
	a.definitions = &definitions{named: make(map[string][]setting)}

	var key any = "memory"
	open := func() (caddy.Destructor, error) { return sharedStore{newMemory()}, nil }
	if a.Redis != nil {
		opt, err := a.Redis.options(caddy.NewReplacer())
		if err != nil {
			return fmt.Errorf("redis: %w", err)
		}
		key = opt
		open = func() (caddy.Destructor, error) { return sharedStore{limiter.NewRedis(opt)}, nil }
	}
	store, _, err := stores.LoadOrNew(key, open)
	if err != nil {
		return err
	}
	a.storeKey, a.store = key, store.(sharedStore).Store
	return nil
}

// Cleanup lets go of the store. Caddy also calls it when Provision failed, and
// then there may be none.
func (a *App) Cleanup() error {
	if a.storeKey == nil {
		return nil
	}
	_, err := stores.Delete(a.storeKey)
	return err
}

// Start does nothing: the app has no server of its own.
func (*App) Start() error { return nil }

// Stop does nothing.
func (*App) Stop() error { return nil }

// Provision makes the limits ready, and returns an error if an option of one
// can't be right.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	var err error
	if h.accounting, err = newConstant("accounting", or(h.Accounting, "atomic"), parseAccounting); err != nil {
		return err
	}
	if h.families, err = newFamilies(h.Headers); err != nil {
		return err
	}

	app, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	h.store = app.(*App).store
	defs := app.(*App).definitions.inHandler()
	if len(h.Limits) == 0 {
		return errors.New("limits: got none, want at least one")
	}
	for i, l := range h.Limits {
		if l == nil {
			return fmt.Errorf("limits: limit %d is null", i)
		}
		if err := l.provision(ctx, nil, defs); err != nil {
			return err
		}
	}
	h.buckets = len(defs.paths)
	return nil
}

// parseAccounting reads a kind of accounting.
func parseAccounting(text string) (limiter.Accounting, string) {
	switch text {
	case limiter.Atomic.String():
		return limiter.Atomic, ""
	case limiter.Each.String():
		return limiter.Each, ""
	}
	return 0, "atomic or each"
}

// Interface guards
var (
	_ caddy.App                   = (*App)(nil)
	_ caddy.Provisioner           = (*App)(nil)
	_ caddy.CleanerUpper          = (*App)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
