package config

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Auto says how `concurrency auto` follows the load.
type Auto struct {
	// A mean time to the response header that is still good, from `1ms` to `1m`: at least three times the
	// usual mean, and at most half the time that clients wait (a quarter if some responses take far longer
	// than others). Default: `500ms`.
	Latency Duration `json:"latency,omitempty"`

	// The lowest number of requests that may be in progress, from 1 to 1000000. Default: 4.
	Min Number `json:"min,omitempty"`

	// The highest number, up to 1000000. Default: 1000, or `min` if that is more.
	Max Number `json:"max,omitempty"`

	// When a request stops counting as in progress: with `header` when its response begins; with `body`
	// when it ends, for upstreams that compute while they send. Websockets and server-sent events always
	// stop at the header. Default: `header`.
	Until string `json:"until,omitempty"`

	// Matchers, written like `match`, for requests that are turned away last, even if they match `low`.
	HighRaw caddyhttp.RawMatcherSets `json:"high,omitempty" caddy:"namespace=http.matchers"`

	// Matchers for requests that are turned away first.
	LowRaw caddyhttp.RawMatcherSets `json:"low,omitempty" caddy:"namespace=http.matchers"`
}

// ConcurrencyAuto is the concurrency that follows the load.
const ConcurrencyAuto = "auto"
