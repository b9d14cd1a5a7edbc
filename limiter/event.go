package limiter

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// Event is something about a server that an operator should know.
type Event struct {
	// The server's address.
	Server string

	// What happened.
	Kind EventKind

	// Why, in a word, such as "refused", "timeout" or "oom". Empty with Back and Replaced.
	Reason string

	// Why, in full. Nil with Back and Replaced.
	Err error

	// With Back and Replaced, how long the server was lost.
	Lost time.Duration

	// How many events before this one were dropped, since too many waited to be
	// reported.
	Dropped int
}

// EventKind is a kind of event.
type EventKind uint8

const (
	// Lost: the server has failed several times in a row. It is no longer asked,
	// but for a probe now and then.
	Lost EventKind = iota

	// Back: the server has answered a probe and decides again.
	Back

	// Lapse: the server failed in single cases. Reported at most once a minute
	// for each reason.
	Lapse

	// Replaced: a lost server of a cluster has no slots any more, as after a
	// failover. Others decide on its keys.
	Replaced
)

// newEvent returns an event of the servers as it is reported.
func newEvent(e redisscript.Event) Event {
	kinds := map[redisscript.EventKind]EventKind{
		redisscript.EventDown:      Lost,
		redisscript.EventRecovered: Back,
		redisscript.EventError:     Lapse,
		redisscript.EventReplaced:  Replaced,
	}
	return Event{Server: e.Server, Kind: kinds[e.Kind], Reason: e.Reason, Err: e.Err, Lost: e.Downtime, Dropped: e.Dropped}
}
