package config

// Listener has the options of `rate_limit` in `listener_wrappers`.
type Listener struct {
	// The limits that connections must pass, with the options of limits of requests but for those that
	// are about requests and responses. With `concurrency` a limit counts the connections that are open,
	// with any other algorithm those that are opened. The key is `{client_ip}`, here the address of the
	// connection, or a word for one bucket for all. `match` takes `remote_ip`, `client_ip` and `not`.
	// A limit without a name is called `connections`. Required, unless there is `banned`.
	Limits []*Limit `json:"limits,omitempty" caddyfile:""`

	// What is charged when some buckets have room and others do not: `atomic`, nothing; `each`, those
	// that have room. With `each`, attempts that a limit with `concurrency` refuses count for the `ban`
	// of another one. Default: `atomic`.
	Accounting string `json:"accounting,omitempty"`

	// The names of limits of requests whose bans hold for connections too: while one of them bans an
	// address, its connections are refused, on all sites of the server. They have a `ban`, and the
	// client's address as their key. Default: none.
	Banned List `json:"banned,omitempty"`

	// Kinds of advice to suppress for this wrapper, because they warn about something intentional.
	// Default: none.
	IgnoreAdvice List `json:"ignore_advice,omitempty"`
}

// ConnectionsName is the name of a limit of connections without one.
const ConnectionsName = "connections"
