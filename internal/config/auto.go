package config

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Auto says how `concurrency auto` follows the load.
type Auto struct {
	// A mean time until responses begin that is still good, from `1ms` to `1m`: at least three times what
	// is usual where there is little to do, and at most half of what clients wait. Default: `500ms`.
	Latency Duration `json:"latency,omitempty"`

	// The least number of requests that may be in progress, from 1 to 1000000. Default: 4.
	Min Number `json:"min,omitempty"`

	// The largest number, from `min` to 1000000. Default: 1000, or `min` if that is more.
	Max Number `json:"max,omitempty"`

	// Until when a request is in progress: `header` (default), until its response begins, or
	// `body`, until that has ended, for upstreams that work while they send. Websockets and
	// events (`text/event-stream`) are in progress until their header in any case.
	Until string `json:"until,omitempty"`

	// Matches the requests that are more important than others: those that are turned away last.
	HighRaw caddyhttp.RawMatcherSets `json:"high,omitempty" caddy:"namespace=http.matchers"`

	// Matches the requests that are less important: those that are turned away first.
	LowRaw caddyhttp.RawMatcherSets `json:"low,omitempty" caddy:"namespace=http.matchers"`
}

// ConcurrencyAuto is the concurrency that follows the load.
const ConcurrencyAuto = "auto"
