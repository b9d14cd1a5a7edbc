package config

// App has the options of the app.
type App struct {
	// The Redis in which to keep the buckets, so that all Caddy instances that use
	// it enforce the same limits.
	Redis *Redis `json:"redis,omitempty"`

	// The buckets in this process. With Redis, they are the fallback for when it
	// is unavailable.
	Memory *Memory `json:"memory,omitempty"`

	// What happens to requests that Redis has not decided in time: `fallback`, buckets in this process
	// decide, starting from the levels that Redis last reported; `allow`; `deny`, with `503`. Default:
	// `fallback`.
	OnError string `json:"on_error,omitempty"`

	// The `consistency` of limits that do not set it and need not be exact. Default: `exact`.
	Consistency string `json:"consistency,omitempty"`

	// Whether to report metrics to Prometheus, at the admin API's endpoint and through the handler
	// `metrics`: `on` or `off`. Default: `on`.
	Metrics string `json:"metrics,omitempty"`

	// Kinds of advice to suppress for all blocks, servers and Redis. Default: none.
	IgnoreAdvice List `json:"ignore_advice,omitempty"`
}

// Memory configures the buckets in this process.
type Memory struct {
	// The maximum number of buckets of all limits in the process, from 1 to 1000000000. Default:
	// 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`

	// The file in which buckets survive a restart, an upgrade or a crash: an absolute path, or `off`.
	// With Redis there is no file. Default: `rate_limit/buckets-1` in Caddy's data directory.
	Persist string `json:"persist,omitempty"`
}
