package config

// App has the options of the app.
type App struct {
	// The Redis in which to keep the buckets, so that all Caddy instances that use
	// it enforce the same limits.
	Redis *Redis `json:"redis,omitempty"`

	// The buckets in this process. With Redis, they are the fallback for when it
	// is unavailable.
	Memory *Memory `json:"memory,omitempty"`

	// How to handle a request if Redis is unavailable or does not reply in time.
	// Handlers can override it by their option of the same name. One of:
	//
	// - `fallback` (default): buckets in this process decide, starting from the
	//   levels that Redis reported last. Meanwhile each Caddy instance limits on
	//   its own.
	// - `allow`: the request passes without being limited, and its response
	//   gets no header fields.
	// - `deny`: the request is rejected with status 503 and `Retry-After`.
	//
	// Outages and recoveries are logged. After a few failures in a row, Redis is
	// only probed now and then until it recovers, so that requests do not wait
	// for it.
	OnError string `json:"on_error,omitempty"`

	// With Redis, who decides on requests to limits that do not say so themselves and
	// allow it: `exact` (default), `lease <duration>` or `eventual <duration>`, see the
	// option of limits.
	Consistency string `json:"consistency,omitempty"`

	// Whether to report metrics to Prometheus, by Caddy's own endpoint of the
	// admin API and by its `metrics` handler: `on` (default) or `off`. The names of
	// all begin with `caddy_rate_limit_`. Their labels have names and numbers of
	// limits, and addresses of Redis servers, never anything of a request. Caddy's
	// global option `metrics` is not needed; it adds those of its HTTP servers.
	Metrics string `json:"metrics,omitempty"`

	// The kinds of advice that are not reported, of limits, servers and Redis, see the option of
	// a handler. Default: none.
	IgnoreAdvice List `json:"ignore_advice,omitempty"`
}

// Memory configures the buckets in this process.
type Memory struct {
	// The maximum number of buckets for all limits together, from 1 to 1000000000.
	// Each limit has at most its own `max_keys`, by default half of this one, so
	// that a flood of keys neither uses up the memory nor crowds out the buckets of
	// other limits. A million buckets take about 110 MB of memory (RSS) with Redis,
	// and 70 MB without.
	// Default: 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`

	// The file in which buckets survive a restart, an upgrade or a crash: the absolute path of a
	// file, or `off`. It is written when Caddy stops, and every 30 seconds if there was a request
	// and some bucket needs more than a minute to run empty. With Redis there is no file. Default:
	// `rate_limit/buckets-1` in Caddy's data directory.
	Persist string `json:"persist,omitempty"`
}
