// Package config has what a config says: the options of blocks, limits and the app, as JSON has them, and
// as Caddy's website documents them. What they mean is compiled by package compile.
package config

// Block has the options of a `rate_limit` block, except its limits' own.
type Block struct {
	// The limits that requests must pass. Required, unless there are `rate_limits`.
	Limits []*Limit `json:"limits,omitempty" caddyfile:""`

	// What is charged when some buckets have room and others do not: `atomic`, nothing; `each`, the
	// buckets that have room. With `each`, a denied request still uses up other limits: nine denied trades
	// take nine units from the bucket for all actions of that user. Default: `atomic`; zones are checked
	// one after the other, and those before the first that denies are charged.
	Accounting string `json:"accounting,omitempty"`

	// Which header fields to set: one or more of
	//
	// - `x-ratelimit` (default): `X-RateLimit-Limit`, `-Remaining`, `-Clear`, and on denials `-Reset`.
	// - `github`, in its place: as in GitHub's API, with `-Used`, and `-Reset` as a time in seconds
	//   since 1970.
	// - `ratelimit-11`: `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11.
	// - `off`, alone: only `Retry-After`, which denials always have.
	Headers List `json:"headers,omitempty"`

	// What happens while Redis is unavailable: `fallback`, `allow` or `deny`. Default: the app's.
	OnError string `json:"on_error,omitempty"`

	// Adds the decision to the access log, but never the key. Default: off.
	Log bool `json:"log,omitempty"`

	// Whether a denial that no error route handles has a line of text as its body: `on` or `off`. Default:
	// `on`.
	Body string `json:"body,omitempty"`

	// With `slots`, clients that a bucket has denied are told successive times, a drip apart and at most a
	// minute after the first, so that they do not all return at once. With zones it may be the largest
	// share by which waits are lengthened, at random: `0.2` adds up to 20 %. Default: none.
	Jitter Number `json:"jitter,omitempty"`

	// The length up to which bodies are read for `{http.rate_limit.field.*}`, at most `16MiB`. In longer
	// bodies all fields are unclear. Default: `64KiB`.
	ReadBody Number `json:"read_body,omitempty"`

	// Kinds of advice to suppress for this block, because they warn about something intentional:
	// `ignore_advice path_form`. Default: none.
	IgnoreAdvice List `json:"ignore_advice,omitempty"`

	Zones
}
