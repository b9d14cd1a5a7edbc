package config

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Limit is a leaky bucket for each key, such as each client address. The
// bucket holds at most `size` units. A request adds its `cost` if it fits;
// otherwise it is denied and adds nothing. Every `drip_rate`, `drip_size` units
// drip out. With another `algorithm`, units are counted differently.
//
// Instead of `size`, `drip_rate` and `drip_size`, a limit can be defined by `max`
// and `duration`: a bucket of size `max` that drips one unit every
// `duration`/`max`. That is a burst of `max` and `max` per duration on average,
// so up to 2·`max` − 1 in one duration.
//
// Nested limits apply in addition to the limit that contains them, if that
// applies. A limit without a size only groups others.
//
// `size`, `drip_rate`, `drip_size`, `window`, `cost` and `factor` may be strings with
// placeholders, evaluated for each request. If the value for a request can't be
// used, the request is rejected: with status 400 for `cost`, 500 for the others. If a
// `factor`, or a `size` with `rate`, has no value, its default is used.
// Each value of `drip_rate`, `drip_size` and `window` has its own buckets, so a client that
// can choose them gets a fresh bucket with each value. Use values that clients
// can't choose, such as variables that are set depending on the user who is logged
// in. A warning is logged for placeholders that clients control. `{env.*}`,
// `{file.*}` and `{system.*}` are resolved when the config is loaded, in any number
// or duration.
type Limit struct {
	// The name of the limit, in header fields, logs and the names of its buckets: 1 to 64 letters, digits,
	// `_`, `.` or `-`. Limits with the same name and equal numbers share their buckets, on all sites and
	// Caddy instances; limits without a name do so if their keys are equal too. In a Caddyfile, limits
	// without a name are called `default`, `default-2` and so on. Required for a nested limit. Default:
	// `default`.
	Name string `json:"name,omitempty" caddyfile:"" bucket:"none"`

	// What identifies a client: text with placeholders. If none has a value, the client's address is used.
	// Default: the key of the containing limit, or `{client_ip}`, in JSON `{http.vars.client_ip}`.
	Key string `json:"key,omitempty" bucket:"none"`

	// How units are counted: `leaky_bucket`, `token_bucket`, `fixed_window`, `sliding_window`,
	// `sliding_log` or `warm_up`. Default: `leaky_bucket`.
	Algorithm string `json:"algorithm,omitempty" bucket:"any"`

	// Units per duration, evenly spread, such as `10/s`, `60/min`, `5/12h` or `10 per minute`. It replaces
	// `drip_rate` and `drip_size`.
	Rate Rate `json:"rate,omitempty" bucket:"rate warm_up"`

	// Bytes of response bodies per duration, such as `2MB/s`, in place of a rate of requests: for all
	// responses of a key together, over all its connections, in this Caddy alone. It denies nothing:
	// responses wait for room, and clients take turns. Header fields and requests do not count. New
	// numbers apply to open responses too.
	Speed Rate `json:"speed,omitempty" bucket:"speed"`

	// The burst: how many units the bucket holds, from 1 to 2^49, with `speed` at least 16 KiB. Bytes may
	// have a unit, such as `10MB` or `1GiB`. Default: the number in `rate`, or what `speed` sends in a
	// second.
	Size Number `json:"size,omitempty" bucket:"rate speed drip fixed_window sliding_window sliding_log"`

	// The time from one drip to the next, in whole microseconds. Default: `1s`.
	DripRate Duration `json:"drip_rate,omitempty" bucket:"drip"`

	// How many units leave with each drip. Default: 1.
	DripSize Number `json:"drip_size,omitempty" bucket:"drip"`

	// The length of a window, in whole microseconds.
	Window Duration `json:"window,omitempty" bucket:"fixed_window sliding_window sliding_log"`

	// When fixed windows begin: with `clock`, at multiples of their length since 1970 (UTC); with `first`,
	// at the first request after the last window has ended. Default: `clock`.
	WindowStart string `json:"window_start,omitempty" bucket:"fixed_window"`

	// A calendar period in place of a `window`, in UTC or a given time zone: `minute`, `hour`, `day`,
	// `week` (from Monday), `month` or `year`, as in `month Europe/Berlin`.
	Period string `json:"period,omitempty" bucket:"fixed_window"`

	// The time in which an idle limit reaches its full rate, and the idle time after which it is cold
	// again.
	WarmUp Duration `json:"warm_up,omitempty" bucket:"warm_up"`

	// With `warm_up`: how many times longer the intervals between requests are at first, from 1 to
	// 1000000. Default: 3.
	ColdFactor Number `json:"cold_factor,omitempty" bucket:"warm_up"`

	// Denied requests count too, so a client that keeps trying stays locked out. Default: off.
	CountDenied bool `json:"count_denied,omitempty" bucket:"any"`

	// How many units a request adds, or `body`: the bytes of its body, by `Content-Length`. A request that
	// costs more than the size is never admitted. One that costs 0 passes unless its key is banned, so
	// clients must not choose the cost. Default: 1.
	Cost Number `json:"cost,omitempty" bucket:"any"`

	// Which responses count, by status, such as `status 401 403`, `status 4xx` or `not status 304`,
	// and by header field or trailer. Default: all.
	Count *option.Responses `json:"count,omitempty" bucket:"any"`

	// Which responses empty the bucket of their key, in the words of `count`, such as `status 2xx`: a
	// login that succeeds forgets wrong passwords before it. What other requests hold stays held. Match
	// only requests that can't succeed without the password, by `POST` and their path. Default: none.
	Clear *option.Responses `json:"clear,omitempty" bucket:"any"`

	// The cost of a request, known at the end of its response and charged in place of its `cost`: `tokens`
	// of a language model; `json` and paths of numbers in the body, such as `json usage.prompt_tokens*0.15
	// usage.completion_tokens*0.6`; `bytes`; `duration`, in milliseconds; or a placeholder with a whole
	// number. Default: the `cost`.
	ActualCost string `json:"actual_cost,omitempty" bucket:"any"`

	// With `off`, requests hold nothing until `count` or `actual_cost` is known, so parallel requests do
	// not deny each other, and may exceed the limit. Default: `on`.
	Hold string `json:"hold,omitempty" bucket:"any"`

	// How many requests of a key may be in progress, in place of a size and a rate; or `auto`: as many as
	// the upstream answers in time.
	Concurrency Number `json:"concurrency,omitempty" bucket:"concurrency"`

	// How `concurrency auto` follows the load.
	Auto *Auto `json:"auto,omitempty" caddyfile:"" bucket:"none"`

	// The limit decides but denies nothing. Default: off.
	DryRun bool `json:"dry_run,omitempty" bucket:"none"`

	// A number with at most 6 decimals that divides the size, rounding up: `0.5` doubles it, `2` halves
	// it. `0` turns this bucket off, but not nested limits. Default: 1.
	Factor Number `json:"factor,omitempty" bucket:"rate max drip concurrency fixed_window sliding_window sliding_log"`

	// With `duration`: the burst, and how many requests per `duration` pass on average.
	Max Number `json:"max,omitempty" bucket:"max"`

	// The time in which `max` requests pass on average.
	Duration Duration `json:"duration,omitempty" bucket:"max"`

	// The shortest time between two requests, unless they cost 0. It is a second bucket, in addition to
	// `max` or alone.
	MinInterval Duration `json:"min_interval,omitempty" bucket:"max"`

	// How many bits of an IPv4 address count. Default: 32.
	IPv4Prefix Number `json:"ipv4_prefix,omitempty" bucket:"none"`

	// How many bits of an IPv6 address count. A host may use any address of its /64. Default: 64.
	IPv6Prefix Number `json:"ipv6_prefix,omitempty" bucket:"none"`

	// The maximum number of keys with buckets in a process. Default: half of that in `memory`.
	MaxKeys Number `json:"max_keys,omitempty" bucket:"any"`

	// What happens to new keys beyond `max_keys`: with `forget` they replace nearly empty buckets;
	// with `share`, for logins, they share buckets. Default: `forget`.
	WhenFull string `json:"when_full,omitempty" bucket:"any"`

	// The status of denials, from 400 to 599. Default: 429.
	Status Number `json:"status,omitempty" bucket:"any"`

	// How many units above the size still pass, marked by `{http.rate_limit.over}`. Default: 0.
	Soft Number `json:"soft,omitempty" bucket:"any"`

	// How long a request may wait for room, or with `concurrency` for a slot, instead of being denied.
	// Default: requests do not wait.
	MaxDelay Duration `json:"max_delay,omitempty" bucket:"any"`

	// How many requests of this limit may wait at once in a process, on all sites where it has this
	// name. Default: 1000.
	MaxWaiting Number `json:"max_waiting,omitempty" bucket:"any"`

	// Which clients take turns while their requests, or responses with `speed`, wait: a template like
	// `key`; `off` for first come, first served. Default: `{client_ip}`.
	FairBy string `json:"fair_by,omitempty" bucket:"any"`

	// The number of counters, from 1 to 10000, for the keys with the most requests and denials, as
	// plain text in memory, at about 1 kB each. Default: off.
	TrackTop Number `json:"track_top,omitempty" bucket:"any"`

	// How long to ban a key that the limit denies: one to three durations of at least `1s`, the last of
	// which is repeated. Default: no bans.
	Ban List `json:"ban,omitempty" bucket:"any"`

	// After how many denials a key is banned, from 1 to 10000. Default: 1.
	BanAfter Number `json:"ban_after,omitempty" bucket:"any"`

	// With Redis, who decides: `exact`, Redis; `lease <duration>`, the instance, with units that it has
	// charged to Redis before; `eventual <duration>`, the instance, by its own count and those of others,
	// exchanged at that interval, from `1ms` to `1m`. Default: that of the containing limit, or the app's.
	Consistency string `json:"consistency,omitempty" bucket:"none"`

	// The limit in the same block, with `pool`, that is charged for requests for which this one has no
	// room. Default: none.
	Borrow string `json:"borrow,omitempty" bucket:"any"`

	// The limit counts only requests that other limits borrow from it. Default: off.
	Pool bool `json:"pool,omitempty" bucket:"any"`

	// Which requests the limit applies to: a named matcher, all except those that one matches (`not
	// @name`), a path, `*` (all), matchers in one line (`method POST`), or a block of matchers that must
	// all match. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers" bucket:"none"`

	// A nested limit, in addition to this one, for requests that both match. It inherits key and prefixes
	// unless it has a key.
	Limits NestedLimits `json:"limits,omitzero" caddyfile:"limit" bucket:"none"`
}

// NestedLimits is a list of limits, each with the same options as the limit that contains
// it.
type NestedLimits struct {
	List []*Limit `json:"-"` // not in JSON itself, as Caddy's website can't show a type that contains itself
}

// IsZero reports whether there are none.
func (n NestedLimits) IsZero() bool { return len(n.List) == 0 }

// MarshalJSON returns the list.
func (n NestedLimits) MarshalJSON() ([]byte, error) { return json.Marshal(n.List) }

// UnmarshalJSON reads a list, in which an unknown option is an error, as Caddy wants it of
// all modules.
func (n *NestedLimits) UnmarshalJSON(b []byte) error { return caddy.StrictUnmarshalJSON(b, &n.List) }
