// Package config has what a config says: the options of blocks, limits and the app, as JSON has them, and
// as Caddy's website documents them. What they mean is compiled by package compile.
package config

// Block has the options of a `rate_limit` block, except its limits' own.
type Block struct {
	// The limits that requests must pass. Required, unless there are `rate_limits`.
	Limits []*Limit `json:"limits,omitempty" caddyfile:""`

	// Which buckets to charge if some have room for the request and others do
	// not. With `atomic`, none: a denied request uses up no limit. With
	// `each`, every bucket that has room: then requests that are denied use up other limits,
	// and nine denied trades take nine units from the bucket of all actions of that user, which
	// are then denied too. Default: `atomic`; `rate_limits` are checked one after the other,
	// see there.
	Accounting string `json:"accounting,omitempty"`

	// The header fields to set on responses, one or more of:
	//
	// - `x-ratelimit` (default): `X-RateLimit-Limit`, `-Remaining`, `-Clear`,
	//   and on denial `-Reset`
	// - `github`, in place of `x-ratelimit`: `X-RateLimit-Limit`, `-Remaining`, `-Used`, and
	//   `-Reset` as a time in seconds since 1970. If a request passes several handlers, the
	//   first that shows `X-RateLimit-*` decides how.
	// - `ratelimit-11`: `RateLimit-Policy` and `RateLimit` of
	//   draft-ietf-httpapi-ratelimit-headers-11, with an item for each limit
	// - `off`, alone: none
	//
	// Fields of an upstream that are of the same family are removed. The families are
	// `X-RateLimit-*`, and `RateLimit` with `RateLimit-*`.
	// The response to a denied request always has `Retry-After`.
	Headers List `json:"headers,omitempty"`

	// How to handle a request if Redis is unavailable or does not reply in time:
	// `fallback`, `allow` or `deny`, see the app's option of the same name.
	// Default: the app's.
	OnError string `json:"on_error,omitempty"`

	// Whether to add the object `rate_limit` to the request's line in the access
	// log. It never contains the key. Default: false. Its fields:
	//
	// - `result`: `admitted` or `denied`; `undecided` if Redis was unavailable, so
	//   that `on_error` applied; `refused` if a number or a matcher could not be
	//   evaluated; `early_data` if the client's address was not verified yet
	// - `limit`, `by`, `remaining`: as the placeholders
	// - `retry_after`: the wait in the response, not rounded, if the request was
	//   denied and a wait helps
	// - `over`, `banned`, `borrowed`, `dry_run`: as the placeholders, if they are not empty
	// - `units`: what the request was charged, by the paths of the limits, without those that
	//   charged nothing; with `count` and `actual_cost`, as its response says
	// - `waited`: for how long the request waited for Redis, if there is one
	// - `delayed`: for how long it waited by `max_delay`, if it did
	Log bool `json:"log,omitempty"`

	// Whether the response to a denied request that no error route handles has a body,
	// `on` (default) or `off`: one line of text with the seconds until there is room.
	Body string `json:"body,omitempty"`

	// With `slots`, clients that a bucket has denied are told times one after the other: the first one
	// when there is room, and each further one a drip later, at most a minute later than the first. So
	// they do not all return in the same second to a bucket that has room for one of them. With
	// windows, what a window admits is spread over it; with `concurrency`, over the second after which
	// to retry. If that is more than a minute each, the times are a second apart. All header fields,
	// placeholders, messages and log fields have the same wait. Each Caddy instance spreads the
	// clients that it denies. With `rate_limits` it may be the largest share by which waits are longer,
	// at random, such as 0.2 for up to a fifth. Default: none.
	Jitter Number `json:"jitter,omitempty"`

	// The kinds of advice on limits of this block that are meant as they are, such as
	// `path_form`: neither reported when the config is loaded nor by the command check, which
	// has the kind of each in brackets. Default: none.
	IgnoreAdvice List `json:"ignore_advice,omitempty"`

	Zones
}
