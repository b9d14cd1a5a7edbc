package config

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Auto says how `concurrency auto` follows the load.
type Auto struct {
	// A mean time to the response header that is still good, from `1ms` to `1m`: at least three times
	// the usual mean, and at most half the time clients wait (a quarter if some answers take far
	// longer than others). Default: `500ms`.
	Latency Duration `json:"latency,omitempty"`

	// The fewest requests in progress that are allowed, from 1 to 1000000. Default: 4.
	Min Number `json:"min,omitempty"`

	// The most, up to 1000000. Default: 1000, or `min` if that is more.
	Max Number `json:"max,omitempty"`

	// When a request stops counting as in progress: with `header` when its response begins, with
	// `body` when it ends, for upstreams that compute while they send. Websockets and server-sent
	// events always stop at the header. Default: `header`.
	Until string `json:"until,omitempty"`

	// Matchers, written like `match`: requests that are turned away last, also if they match `low`.
	HighRaw caddyhttp.RawMatcherSets `json:"high,omitempty" caddy:"namespace=http.matchers"`

	// Matchers: requests that are turned away first.
	LowRaw caddyhttp.RawMatcherSets `json:"low,omitempty" caddy:"namespace=http.matchers"`
}

// ConcurrencyAuto is the concurrency that follows the load.
const ConcurrencyAuto = "auto"
