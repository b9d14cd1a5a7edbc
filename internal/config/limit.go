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
// drip out. With another `algorithm`, units are counted in another way.
//
// Instead of `size`, `drip_rate` and `drip_size`, a limit can be defined by `max`
// and `duration`: a bucket of size `max` that drips one unit every
// `duration`/`max`. That is a burst of `max` and `max` per duration on average,
// so up to 2·`max` − 1 in one duration.
//
// Nested limits apply in addition to the limit that contains them, if that
// applies. A limit without a size only groups others.
//
// `size`, `drip_rate`, `drip_size`, `cost` and `factor` may be strings with
// placeholders, evaluated for each request. If the value for a request can't be
// used, the request is rejected: with status 400 for `cost`, 500 for the others. Where a
// `factor`, or a `size` beside `rate`, has no value, its default is used.
// Each value of `drip_rate` and `drip_size` has its own buckets, so a client that
// can choose them gets a fresh bucket with each value. Use values that clients
// can't choose, such as variables that are set depending on the user who is logged
// in. A warning is logged for placeholders of what clients send. `{env.*}`,
// `{file.*}` and `{system.*}` are resolved when the config is loaded, in any number
// or duration.
type Limit struct {
	// The name of the limit, used in header fields, logs and the names of its
	// buckets: 1 to 64 letters, digits, `_`, `.` or `-`. Limits of the same name
	// and equal numbers share their buckets, on all sites and Caddy instances;
	// those without a name do so if their keys are equal too. A Caddyfile has
	// none of these: they get names there, `default`, `default-2` and so on.
	// Required for a nested limit. Default: `default`.
	Name string `json:"name,omitempty" caddyfile:"" bucket:"none"`

	// The key of a request, whose bucket is charged: text with placeholders,
	// evaluated after the limit's matchers. An IP address is normalised and
	// shortened to its prefix; one of 6to4 or NAT64 counts as the IPv4 address in
	// it. Values that Caddy treats as equal are one key, such as a path in other
	// case or a Basic credential in other base64. `{http.rate_limit.basic_user}` is
	// the unverified name in a Basic credential. If none of the placeholders has a value, the client's address is used
	// instead, with buckets of its own. Default: that of the containing limit, or
	// `{http.vars.client_ip}`.
	Key string `json:"key,omitempty" bucket:"none"`

	// How units are counted, one of:
	//
	// - `leaky_bucket` (default): as described above.
	// - `token_bucket`: the same decisions in other words. The bucket holds at most
	//   `size` tokens, and is full at first. A request takes its `cost` out. Every
	//   `drip_rate`, `drip_size` tokens are added.
	// - `fixed_window`: at most `size` units in each window, which is a `window` or
	//   a `period`. Two windows' worth may pass in a short time around the moment
	//   at which one ends and another begins.
	// - `sliding_window`: at most `size` units in the time of a `window` that ends
	//   now, by an estimate: those of the present window, and of the one before
	//   the share that its part of that time has.
	// - `sliding_log`: at most `size` units in any time of a `window`, exactly. It
	//   keeps the time of each request for that long, so `size` is at most 10,000.
	// - `warm_up`: requests one by one at the given `rate`, without bursts, and
	//   slower after the limit was idle: then the first intervals are `cold_factor`
	//   times as long, and shrink during the `warm_up`. A request is admitted once
	//   the interval after the last one is over, and one that costs several units,
	//   at most the `n` of the rate, makes the next one wait for all of them.
	Algorithm string `json:"algorithm,omitempty" bucket:"any"`

	// The rate, as `<n>/<duration>`: n units per duration, evenly, such as `10/s`,
	// `10r/s`, `60/min`, `5/12h` or `10 per minute`. It replaces `drip_rate` and `drip_size`, and
	// the size is n unless it is set. That is a burst of `size` and n per duration on
	// average, so up to `size` + n − 1 in one duration. Placeholders must not depend
	// on the request.
	Rate Rate `json:"rate,omitempty" bucket:"rate warm_up"`

	// How many bytes of response bodies are sent per duration, such as `2MB/s`, in place of a rate of
	// requests: to all responses of a key together, over all its connections, by this process alone, with
	// or without Redis. It denies no request. Bytes are charged to a bucket of `size` bytes before they
	// are sent, and wait while that has no room; clients take turns, see `fair_by`. What is sent over an upgraded
	// connection, such as a websocket, counts. Header fields do not, and neither does what clients send. Where
	// compression comes before the limit, as `encode` in its usual place does not, its result counts. New
	// numbers also hold for responses that have begun. Placeholders must not depend on the request.
	Speed Rate `json:"speed,omitempty" bucket:"speed"`

	// The number of units that the bucket holds, from 1 to 2^49. If they are bytes, because of
	// `actual_cost`, `cost` or `speed`, it may be text with a unit, such as `10MB` or `1GiB`. With
	// `speed` it is what is sent at full speed first, at least 16 KiB. Default: the `n` of the rate, or
	// what the speed sends in a second, if either is set.
	Size Number `json:"size,omitempty" bucket:"rate speed drip fixed_window sliding_window sliding_log"`

	// The time from one drip to the next, in whole microseconds. Each value of
	// placeholders has its own buckets. Default: `1s`.
	DripRate Duration `json:"drip_rate,omitempty" bucket:"drip"`

	// The number of units in a drip, from 1 to 2^49. Each value of placeholders
	// has its own buckets. Default: 1.
	DripSize Number `json:"drip_size,omitempty" bucket:"drip"`

	// The length of a window, fixed, sliding or of a log, in whole microseconds.
	// Each value of placeholders has its own windows.
	Window Duration `json:"window,omitempty" bucket:"fixed_window sliding_window sliding_log"`

	// When a fixed window begins: with `clock` (default) at multiples of its
	// length since the beginning of 1970 (UTC), with `first` at the first request
	// after the last window has ended.
	WindowStart string `json:"window_start,omitempty" bucket:"fixed_window"`

	// The fixed windows are calendar periods: `minute`, `hour`, `day`, `week` (from
	// Monday), `month` or `year`. A time zone may follow, as in `month
	// Europe/Berlin`; the default is UTC. Days on which clocks are changed have 23
	// or 25 hours. Placeholders must not depend on the request.
	Period string `json:"period,omitempty" bucket:"fixed_window"`

	// The time in which a limit that warms up, if there are always requests, comes to
	// its full rate after it was idle, and the idle time after which it starts anew;
	// in whole microseconds. Placeholders must not depend on the request.
	WarmUp Duration `json:"warm_up,omitempty" bucket:"warm_up"`

	// How many times as long as at the full rate the intervals between requests are
	// at first, if a limit warms up: a decimal from 1 to 1000000 with at most 3 digits
	// after the point. Placeholders must not depend on the request. Default: 3.
	ColdFactor Number `json:"cold_factor,omitempty" bucket:"warm_up"`

	// Whether requests that are denied count too, so that a client which keeps asking
	// stays locked out, and one that waits for its `Retry-After` is admitted. A
	// leaky or token bucket that denies a request is full then, and its next drip
	// comes one `drip_rate` later. A fixed window is full until it ends. A sliding
	// window counts the units of the request in the present window, and a sliding log
	// keeps its time like that of an admitted one. A limit that warms up denies the
	// next requests for the time of one unit at its full rate at least.
	//
	// A request that any of several limits denies counts in each of them that has
	// this option, whether it had room or not. Times to retry are for a client
	// that sends nothing before, and all numbers include the request.
	// With Redis, every denied request calls it. The bucket of `min_interval` counts
	// too. Default: no.
	CountDenied bool `json:"count_denied,omitempty" bucket:"any"`

	// The number of units that a request adds, or `body`: one for each byte of the
	// request's body as its `Content-Length` says, at least 1. A request with a body of
	// unknown length gets a 411 then. A request that costs 0 is charged nothing and always
	// passes, unless its key is banned: its response says what is left. So use no placeholder that
	// clients choose. Default: 1.
	Cost Number `json:"cost,omitempty" bucket:"any"`

	// Which responses count, by their statuses, such as 401, a class (`4xx`, in JSON 4) or any but
	// some, and by their header fields or trailers. A request takes its room when it arrives, and
	// gives it back if its response does not count, so parallel requests can't exceed the limit.
	// If the response is unknown, as when the client has left or an upstream did not answer, it
	// counts; a request that was not passed on does not. Default: all requests count, whatever
	// their responses.
	Count *option.Responses `json:"count,omitempty" bucket:"any"`

	// What a request has cost, known at the end of its response. The request is admitted if its
	// `cost` fits, holds that until then, and is charged what it has cost instead. One of:
	//
	// - `tokens`: the number that the API of a language model says in the response's body: OpenAI
	//   and what is compatible, Anthropic, Gemini, Bedrock Converse, Cohere, Ollama, llama.cpp.
	// - `json` and one or more numbers in the body, at paths of names with dots between them, each
	//   with a weight if it has any, such as `json usage.prompt_tokens*0.15
	//   usage.completion_tokens*0.6`. Paths with a `|` between them are one number: the last
	//   that the body has.
	// - `bytes`: the length of the response's body, or of what is sent over a websocket; with
	//   `cost body`, the length of the request's body is added.
	// - `duration`: the milliseconds from the request's arrival to the end of its response.
	// - a placeholder with a whole number, such as `{http.response.header.X-Cost}`.
	//
	// The `cost` should be an upper bound, since a client that hangs up before the number is there
	// is charged no less, and a request that costs more may overfill the bucket, by its size at
	// most. Without a response or a number the `cost` is charged, or for a body without one a
	// quarter of its bytes if that is more, but nothing if the status is 3xx, 4xx or 5xx. Default:
	// the `cost`.
	ActualCost string `json:"actual_cost,omitempty" bucket:"any"`

	// With `off`, requests hold nothing until `count` or `actual_cost` is known: they are admitted
	// while the bucket is not full, and charged then, even if there is no room. So parallel
	// requests do not deny each other, and may exceed the limit by as many as are in progress; a
	// charge overfills the bucket by its size at most. Default: `on`.
	Hold string `json:"hold,omitempty" bucket:"any"`

	// How many requests of a key may be in progress at once, from 1 to 2^49, instead of a
	// size and a rate. A request is in progress until its response has ended, and an
	// upgraded connection, such as a websocket, until it is closed. If a Caddy instance
	// crashes, its requests end for the others 10 to 15 seconds later.
	//
	// With `auto` the number follows the load: it grows while what is behind the limit answers within a
	// `latency`, and shrinks while it does not. All requests share it unless the limit has a
	// key, and each Caddy instance has its own. Requests beyond it get a 503. The options of this
	// are in `auto`, in a Caddyfile in a block behind `concurrency auto`.
	Concurrency Number `json:"concurrency,omitempty" bucket:"concurrency"`

	// How `concurrency auto` follows the load.
	Auto *Auto `json:"auto,omitempty" caddyfile:"" bucket:"none"`

	// Whether this is a dry run: the limit decides and is charged as if it were enforced
	// with the others, but denies no request. It is shown by no header field, and by
	// `{http.rate_limit.dry_run}`, the access log, metrics and events. Limits within a dry
	// run are dry runs too. Default: no.
	DryRun bool `json:"dry_run,omitempty" bucket:"none"`

	// Divides the size, rounding up: a decimal with at most 6 digits after the
	// point. 0 switches the bucket off, but not nested limits. Default: 1.
	Factor Number `json:"factor,omitempty" bucket:"rate max drip concurrency fixed_window sliding_window sliding_log"`

	// The burst, and the number of requests per `duration` on average.
	// Placeholders must not depend on the request.
	Max Number `json:"max,omitempty" bucket:"max"`

	// The time in which `max` requests are admitted on average. Placeholders must
	// not depend on the request.
	Duration Duration `json:"duration,omitempty" bucket:"max"`

	// The minimum time between two requests, whatever they cost, enforced by a second
	// bucket besides that of `max` and `duration`, or alone. Requests that cost 0 do not
	// count. Placeholders must not depend on the request.
	MinInterval Duration `json:"min_interval,omitempty" bucket:"max"`

	// The prefix length to which IPv4 addresses are shortened, from 1 to 32.
	// Default: 32.
	IPv4Prefix Number `json:"ipv4_prefix,omitempty" bucket:"none"`

	// The prefix length to which IPv6 addresses are shortened, from 1 to 128.
	// Default: 64, since a single host may use any address of its /64.
	IPv6Prefix Number `json:"ipv6_prefix,omitempty" bucket:"none"`

	// The maximum number of keys of this limit that have buckets in this process,
	// from 1 to 1000000000, and no more than the app's `max_keys` of `memory`. It
	// only counts for this limit: nested limits have their own, and so has the
	// bucket of `min_interval`. With Redis, it also bounds the number of keys that
	// this instance keeps there, at about 186 bytes a key.
	//
	// A limit is never full if this is at least the number of new keys a second
	// times the seconds that a bucket takes to drain. A million keys take about
	// 110 MB of memory (RSS) with Redis, and 70 MB without. Default: half of
	// the app's.
	MaxKeys Number `json:"max_keys,omitempty" bucket:"any"`

	// What to do with keys that have no bucket when `max_keys` others have one:
	//
	// - `forget` (default): each new key gets a bucket, replacing one that is
	//   nearly empty compared with others. No key is locked out. A key whose
	//   bucket is forgotten starts with an empty one.
	// - `share`: no bucket is forgotten. New keys share buckets, one for each
	//   network of the client's address, a /16 of IPv4 or a /32 of IPv6, whatever
	//   the key is. Clients without an address, as on a unix socket, share one.
	//   Use it for limits that must hold under any circumstances, such as those
	//   of logins.
	//
	// While a limit does either, this is logged once a minute. Nested limits have
	// their own option.
	WhenFull string `json:"when_full,omitempty" bucket:"any"`

	// The status of responses to requests that this limit denies, from 400 to 599.
	// If several limits deny, the one with the longest wait counts. Default: 429.
	Status Number `json:"status,omitempty" bucket:"any"`

	// How many units more than `size` the bucket may hold. Requests that fill it above
	// `size` pass, and are marked by `{http.rate_limit.over}`; header fields are about
	// `size`, so that 0 remain. Not for `warm_up`. Default: 0.
	Soft Number `json:"soft,omitempty" bucket:"any"`

	// For how long a request may wait until units have dripped out for it, instead of
	// being denied, such as `2s`: it is charged at once and passed on when there is
	// room. All Caddy instances together pass them on in the order in which they
	// came, one drip after the other. With `warm_up` a request waits until the wait after
	// the one before it is over; it must cost less than half of what fits into `warm_up`
	// at the full rate, and others do not wait. With the other algorithms `drip_size` +
	// cost − 1 must be at most the size, or more could pass at once. In a process, clients take
	// turns, see `fair_by`. The request of a client that leaves is not passed on, as far as it can be
	// noticed, and leaves its turn to others. Only for leaky and token buckets, and `warm_up`.
	//
	// With `concurrency`, static or `auto`, a request waits for a place instead, in its process,
	// where clients take turns, see `fair_by`. With Redis, the next one also looks about every
	// 100 ms for places that other processes free or leave it. A request is charged once it has a place. Not with
	// another `accounting` than `atomic`, or beside `count_denied`. Default: none waits.
	MaxDelay Duration `json:"max_delay,omitempty" bucket:"any"`

	// How many requests may wait at once in this process, on all sites together if the
	// limit has a name. Beyond that they are denied. Default: 1000.
	MaxWaiting Number `json:"max_waiting,omitempty" bucket:"any"`

	// Which clients take turns at a limit for which requests wait, as a template like `key`: one
	// request of each is next, however many it has. If `max_waiting` requests wait, or the bucket of
	// a rate is full of them, the last one of the client with most of them is denied for one of a
	// client that has at least two fewer. Addresses count by their prefixes, as in `key`. Clients
	// without a value are one. With `off` requests are first come, first served. Needs `max_delay`, or `speed`,
	// where a turn is as many bytes for each client. Default: `{client_ip}`.
	FairBy string `json:"fair_by,omitempty" bucket:"any"`

	// The number of counters, from 1 to 10000, with which to track the keys that
	// have the most requests and the keys that this limit denies most often, in the last one
	// to two minutes. The admin API shows them, see `/rate_limit/top`. A count is
	// too high by at most the number of all requests divided by the number of counters,
	// so a hundred find the keys that send more than one percent of all requests.
	//
	// The keys are then kept as plain text in the memory of this process, which are
	// otherwise only kept as digests: up to 256 bytes of each. A counter takes
	// about 1 kB. Nested limits have their own option. Default: off.
	TrackTop Number `json:"track_top,omitempty" bucket:"any"`

	// For how long to ban a key that this limit denies: one to three durations from `1s`,
	// such as `10m`, `1h` and `24h`. The first ban takes the first of them, the next ban
	// the next one, and the last one is repeated. A ban is forgotten once the key was
	// neither banned nor denied for the last duration. Until a ban ends, the limit denies
	// all requests of the key, on all Caddy instances, and they do not make it longer. With
	// `count` it denies, and so bans, once as many responses as fit have counted.
	//
	// The admin API lists the bans, places and lifts them. For that the keys that are
	// banned are kept as plain text in the memory of this process, at most 1000 of 1 kB. Changing
	// the durations ends bans. Placeholders must not depend on the request. Not with
	// `concurrency`, `count_denied` or `when_full share`. Default: no bans.
	Ban List `json:"ban,omitempty" bucket:"any"`

	// How many requests of a key the limit denies before a ban begins, from 1 to 10000.
	// Default: 1.
	BanAfter Number `json:"ban_after,omitempty" bucket:"any"`

	// With Redis, who decides on requests, and so how exactly all Caddy instances together
	// keep the limit. One of:
	//
	// - `exact`: Redis decides each request.
	// - `lease <duration>`: an instance decides from units that it has charged to Redis at
	//   most so long before, of keys with many requests. In any time T all instances
	//   together admit at most what the limit allows in T and the duration. Requests for
	//   such keys hardly wait for Redis.
	// - `eventual <duration>`: an instance decides by what it knows, and reports what it has
	//   admitted every such time. No request waits for Redis. In bursts each instance may
	//   admit a bucketful more, and all of them wait for it afterwards; with windows they
	//   may in each.
	//
	// Nested limits have it too where they can, and others are exact: those with the
	// algorithms `sliding_log` and `warm_up`, or with `concurrency`, `count`,
	// `actual_cost`, `count_denied`, `ban`, `borrow`, `pool` or `max_delay`, for `lease`
	// with a size below 8 times the cost, and for `eventual` with a `drip_size` above the
	// size. A request is decided by an instance if all of its limits allow that. Default:
	// that of the containing limit, or the app's.
	Consistency string `json:"consistency,omitempty" bucket:"none"`

	// The limit from which to borrow what this one has no room for: the name of one in the
	// same block that has `pool`. A request that borrows is charged there and not here, as
	// a whole. It is denied if there is no room there either. Header fields are about this
	// limit alone, and `{http.rate_limit.borrowed}` has its path. Not with `count_denied`,
	// `ban` or `max_delay`. Default: it borrows nothing.
	Borrow string `json:"borrow,omitempty" bucket:"any"`

	// Whether this limit is a pool for limits that name it in `borrow`. It counts what they
	// borrow and nothing else, and applies to no other requests. A request takes its own
	// `cost` of it, by default what it costs the limit that borrows, or 1 of
	// `concurrency`. A pool whose matchers do not match a request lends nothing to it. Not
	// with `count_denied`, `ban`, `soft`, `max_delay`, `min_interval` or limits within it.
	// Default: no.
	Pool bool `json:"pool,omitempty" bucket:"any"`

	// Matches the requests that the limit applies to. Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers" bucket:"none"`

	// Nested limits, which apply to requests that this limit applies to and that
	// they match.
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
