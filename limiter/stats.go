package limiter

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// The states of a server. One that is idle is pinged every five seconds, so that its state
// does not depend on requests.
const (
	// ServerConnecting: it has neither answered nor failed yet.
	ServerConnecting = redisscript.Connecting

	// ServerUp: it has answered within the last ten seconds.
	ServerUp = redisscript.Up

	// ServerDown: its breaker is open, so that no requests are sent to it except for
	// occasional probes, or it has not answered for ten seconds.
	ServerDown = redisscript.Down
)

// ServerStats is the state of a Redis server and what has happened on it since the
// store was made.
type ServerStats struct {
	// The server's address.
	Address string

	// Whether it represents all servers of a cluster, which are not known yet.
	Cluster bool

	// ServerConnecting, ServerUp or ServerDown.
	State string

	// The state of its breaker: "closed", "open" or "half_open".
	Breaker string

	// When it went down, and the reason for its last failure, as in Event; zero
	// unless it is down. Err is nil too if it has only fallen silent.
	DownSince time.Time
	Reason    string
	Err       error

	// Connections that are idle, in use, and being made.
	Idle, InUse, Connecting int

	// The number of times that the script was run, and of requests that it was run
	// for: their ratio is the size of a batch.
	Calls, Requests uint64

	// The number of failures by Reason.
	Failures map[string]uint64
}
