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
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func init() {
	caddy.RegisterModule(new(App))
	caddy.RegisterModule(new(Handler))
}

// App says where the buckets of all `rate_limit` handlers are kept. Without it
// they live in this process: each Caddy instance then limits for itself, and
// limits start afresh when it does. Reloading the configuration keeps them, and
// a configuration without limits does for a minute.
type App struct {
	// The Redis that keeps the buckets, so that every Caddy instance that uses
	// it enforces the same limits.
	Redis *Redis `json:"redis,omitempty"`

	// The buckets in this process: all there are without Redis, and with it
	// those that decide while it can't be asked.
	Memory *Memory `json:"memory,omitempty"`

	// What becomes of a request if Redis can't be asked, or does not answer in
	// time; the option of the same name in a handler overrides it. One of:
	//
	// - `fallback` (default): buckets in this process decide, beginning with
	//   the levels that Redis reported last. Each Caddy instance limits for
	//   itself meanwhile.
	// - `allow`: the request passes without being limited, and its response
	//   gets no header fields.
	// - `deny`: the request is refused with status 503 and `Retry-After`.
	//
	// The log tells when Redis is lost and when it is back. After a few failures
	// it is no longer asked, but for a probe now and then, so that requests need
	// not wait for it.
	OnError string `json:"on_error,omitempty"`

	taken       []any // keys of the references held in stores
	store       limiter.Store
	memory      *limiter.Memory
	redis       *sharedRedis  // nil without Redis
	timeout     time.Duration // of Redis; 0 without
	maxKeys     int
	onError     onError
	definitions *definitions
	logger      *zap.Logger
}

// Redis is the Redis that keeps the buckets: a single server, a cluster, or a
// server that sentinels know. Servers have to be 7.0 or later.
//
// Addresses, names, users, passwords, the secret, numbers and the options of TLS
// may hold `{env.*}`, `{file.*}` and `{system.*}` placeholders. They are resolved
// when the configuration is loaded and only kept unresolved; one that resolves
// to nothing is an error. A
// configuration loads whether Redis can be reached or not. Configurations with
// equal settings share their connections.
type Redis struct {
	// Where the servers are, each as `host:port`, the path of a unix socket,
	// that as Caddy has it elsewhere, `unix//path`, or a URL: `redis://[[user]:password@]host[:port][/db]`, the same with
	// `rediss://` for TLS, or `unix://[[user]:password@]/path`. One is the
	// server itself, several are servers of a cluster, and with `master_name`
	// they are sentinels. All must be written in one form, and only a single
	// server can be a unix socket.
	Addresses List `json:"addresses,omitempty"`

	// The user to log in as. The server's default user if empty.
	Username string `json:"username,omitempty"`

	// The password to log in with.
	Password string `json:"password,omitempty"`

	// The number of the database, from 0 to 65535. A cluster has only 0.
	// Default: 0.
	DB Number `json:"db,omitempty"`

	// Whether a single address is that of a cluster's server, which is asked for
	// the others. Several addresses without `master_name` are a cluster anyway.
	Cluster bool `json:"cluster,omitempty"`

	// The name by which sentinels know the server. The addresses are then the
	// sentinels', without users, passwords and databases; the port of a URL
	// is 26379 if left out.
	MasterName string `json:"master_name,omitempty"`

	// The user to log in to the sentinels as. Their default user if empty.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// The password to log in to the sentinels with. Default: none, whatever the
	// server's password is.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// Speaks TLS with the servers, and with sentinels. The options are those of
	// the reverse proxy's transport; all may be left out: the system's roots are
	// trusted, and certificates checked for the name in the server's address.
	// Files are read when the configuration is loaded. Certificate and CA files
	// that have changed by then make new connections. `handshake_timeout` and
	// `except_ports` have no effect here. Default: TLS only with `rediss://`.
	TLS *reverseproxy.TLSConfig `json:"tls,omitempty"`

	// What the names of all keys begin with: at most 128 bytes without braces.
	// Default: `rl:`.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// A secret to hash keys with, so that who can see Redis's keys can't find out
	// by trying whose buckets they are. It must be the same on all Caddy
	// instances: those with different ones limit apart. Default: none, keys are
	// plain digests.
	KeySecret string `json:"key_secret,omitempty"`

	// The most a request may wait for Redis, everything included, in all
	// handlers that it passes together: from `1ms` to `1m`. If there is no answer
	// by then, `on_error` decides what becomes of it. Connections are made outside
	// of it. Default: `50ms`.
	Timeout Duration `json:"timeout,omitempty"`

	// The most connections to each server, from 1 to 4096. Default: 10 for each
	// CPU.
	PoolSize Number `json:"pool_size,omitempty"`
}

// Memory is the buckets in this process.
type Memory struct {
	// The most buckets to hold, of all limits together, from 1 to 1000000000. Each
	// limit holds at most its own `max_keys`, by default half of this one, so that
	// a flood of keys neither grows memory nor takes the room of other limits. A
	// million buckets take about 52 MB of memory (RSS), ten million 514 MB.
	// Default: 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`
}

// Handler limits how often clients may send requests, by leaky buckets.
//
// A request has to pass all limits that apply to it. If it does, response
// header fields tell the client how much room is left, and the next handler is
// invoked. If it does not, it is denied with status 429 and `Retry-After`, and
// error routes shape the response. Only where no error route could see the
// error is the bare response written directly. Requests that Caddy makes itself,
// as for `httpInclude` in templates, are not limited.
//
// The handler sets these placeholders. Where several `rate_limit` handlers
// see a request, they show the tightest of their limits:
//
// Placeholder | Description
// ------------|-------------
// `{http.rate_limit.limit}` | The path of the limit that decided: of a denied request the one that denies it, the longest if several do, else the one with the least room
// `{http.rate_limit.size}` | The size of that limit's bucket
// `{http.rate_limit.remaining}` | The units that the fullest bucket still has room for
// `{http.rate_limit.clear}` | The seconds until all buckets have run empty
// `{http.rate_limit.retry_after}` | The whole seconds to wait before all limits admit the same request; `0` if it was admitted, empty if it never will be
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
	Headers List `json:"headers,omitempty"`

	// What becomes of a request if Redis can't be asked, or does not answer in
	// time: `fallback`, `allow` or `deny`, see the app's option of the same name.
	// Default: what the app says.
	OnError string `json:"on_error,omitempty"`

	store      limiter.Store
	redis      *sharedRedis  // the same; nil without Redis
	timeout    time.Duration // of Redis; 0 without
	onError    onError
	accounting limiter.Accounting
	families   families
	logger     *zap.Logger

	// Which error routes of a server see the handler's errors, *errorRoutes by
	// *caddyhttp.Server.
	errorRoutes sync.Map

	origin   atomic.Pointer[string] // of the handler's errors, once there was one
	reported minutely
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
// `drip_rate` and `drip_size` are a part of what tells buckets apart, so who can
// influence them gets a fresh bucket with each value: take them from what clients
// can't choose, as variables are that were set by who is logged in. The log has a
// warning where they read what clients send. `{env.*}`, `{file.*}` and `{system.*}` are resolved when the configuration is
// loaded, in any number or duration.
type Limit struct {
	// What the limit is called, in header fields, logs and the names of its
	// buckets: 1 to 64 letters, digits, `_`, `.` or `-`. Limits of one name and
	// equal numbers share their buckets, on all sites and Caddy instances; those
	// without a name do if their keys are equal too.
	// Needed within another limit; otherwise `default` if empty.
	Name string `json:"name,omitempty"`

	// The requests that the limit applies to. All if empty.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Whose bucket a request meets: text with placeholders, read after the
	// limit's matchers. An IP address is normalised and shortened to its
	// prefix; one of 6to4 or NAT64 counts as the IPv4 address in it. If none of
	// the placeholders has a value, the client's address is used, apart from
	// other keys. Default: that of the limit this one is in, else
	// `{http.vars.client_ip}`.
	Key string `json:"key,omitempty"`

	// The rate, as `<n>/<duration>`: n units each duration, evenly, such as
	// `60/1s`, `1000/1h` or `5/1d`. It takes the place of `drip_rate` and
	// `drip_size`, and makes the size n unless that is set. Takes no placeholders
	// that depend on the request.
	Rate Rate `json:"rate,omitempty"`

	// The most units the bucket holds, from 1 to 2^49. Default: the `n` of the
	// rate, if there is one.
	Size Number `json:"size,omitempty"`

	// The time from one drip to the next, in whole microseconds. Each value that
	// placeholders make has buckets of its own. Default: `1s`.
	DripRate Duration `json:"drip_rate,omitempty"`

	// The units that leave with each drip, from 1 to 2^49. Each value that
	// placeholders make has buckets of its own. Default: 1.
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
	// placeholders that depend on the request.
	Max Number `json:"max,omitempty"`

	// The time in which `max` requests are admitted on average. Takes no
	// placeholders that depend on the request.
	Duration Duration `json:"duration,omitempty"`

	// The least time between two requests, kept by a second bucket beside
	// that of `max` and `duration`. Takes no placeholders
	// that depend on the request.
	MinInterval Duration `json:"min_interval,omitempty"`

	// The most keys of this limit that have buckets in this process, from 1 to
	// 1000000000, and no more than the app's `max_keys` of `memory`. It is this
	// limit's alone: limits within it have their own, and so has the interval of
	// `min_interval`. With Redis it also bounds what this instance keeps there, at
	// about 173 bytes a key, so that Redis holds at most so many of each instance.
	//
	// To be never full it has to be the new keys that come in a second times the
	// seconds that a bucket takes to drain. A million keys take about 52 MB of
	// memory (RSS), ten million 514 MB. Default: half of the app's.
	MaxKeys Number `json:"max_keys,omitempty"`

	// What becomes of keys that have no bucket while `max_keys` others have one:
	//
	// - `forget` (default): each gets a bucket, in place of one that is nearly
	//   empty compared with others. Nobody is kept out. Whose bucket is forgotten
	//   has as much room again as it held.
	// - `share`: nothing is ever forgotten. New keys share buckets, one for each
	//   network of the client's address, a /16 of IPv4 or a /32 of IPv6, whatever
	//   the key is. One for all whose clients have no address, as on a unix
	//   socket. It is for limits that must hold whatever happens, such as those of
	//   logins.
	//
	// The log has a line a minute while a limit does either. Limits within have
	// their own.
	WhenFull string `json:"when_full,omitempty"`

	// Limits that apply to the same requests as this one, if they match.
	Limits []*Limit `json:"limits,omitempty"`

	path     string
	key      *key
	maxKeys  int  // 0 for the default
	share    bool // whether new keys share buckets when there is no room
	buckets  []*bucket
	matchers caddyhttp.MatcherSets
	logger   *zap.Logger

	warnNoKey     sync.Once
	warnNoAddress sync.Once
	reported      minutely // bad values
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

// Provision takes the stores that the configuration names.
func (a *App) Provision(ctx caddy.Context) error {
	a.logger = ctx.Logger()
	a.definitions = newDefinitions()
	var err error
	a.onError, err = newConstant("on_error", or(a.OnError, string(onErrorFallback)), parseOnError)
	if err != nil {
		return err
	}
	a.maxKeys = limiter.DefaultMaxKeys
	if a.Memory != nil && a.Memory.MaxKeys != "" {
		if a.maxKeys, err = newNumber("max_keys", string(a.Memory.MaxKeys), parseMaxKeys); err != nil {
			return fmt.Errorf("memory: %w", err)
		}
	}
	a.definitions.maxKeys = a.maxKeys
	if err := a.takeMemory(); err != nil {
		return err
	}
	if a.Redis == nil {
		return nil
	}
	opt, tls, err := a.Redis.options(ctx)
	if err == nil {
		err = a.takeRedis(opt, tls)
	}
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	a.timeout = opt.Timeout
	return nil
}

// Cleanup lets go of what Provision and Start took. Caddy also calls it when
// one of them failed, or was never called.
func (a *App) Cleanup() error {
	a.leave()
	return a.release()
}

// Start puts the app's settings in force and begins to connect to Redis.
func (a *App) Start() error {
	a.enter()
	if a.redis != nil {
		a.redis.connect()
	}
	return nil
}

// Stop does nothing: requests may still be on their way.
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

	loaded, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	app := loaded.(*App)
	h.store, h.redis, h.timeout = app.store, app.redis, app.timeout
	if h.onError, err = newConstant("on_error", or(h.OnError, string(app.onError)), parseOnError); err != nil {
		return err
	}
	defs := app.definitions.inHandler()
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
	return nil
}

// parseAccounting reads a kind of accounting.
func parseAccounting(text string) (limiter.Accounting, string) {
	switch text {
	case limiter.AccountingAtomic.String():
		return limiter.AccountingAtomic, ""
	case limiter.AccountingEach.String():
		return limiter.AccountingEach, ""
	}
	return 0, "atomic or each"
}

// onError is what becomes of a request on which Redis does not decide.
type onError string

const (
	onErrorFallback onError = "fallback" // this process decides
	onErrorAllow    onError = "allow"    // it passes
	onErrorDeny     onError = "deny"     // it is refused
)

// parseOnError reads what becomes of such a request.
func parseOnError(text string) (onError, string) {
	switch o := onError(text); o {
	case onErrorFallback, onErrorAllow, onErrorDeny:
		return o, ""
	}
	return "", "fallback, allow or deny"
}

// Interface guards
var (
	_ caddy.App                   = (*App)(nil)
	_ caddy.Provisioner           = (*App)(nil)
	_ caddy.CleanerUpper          = (*App)(nil)
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
