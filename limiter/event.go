package limiter

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// Event reports a change in the state of a server, or an error.
type Event struct {
	// The server's address.
	Server string

	// What happened.
	Kind EventKind

	// The reason as one word, such as "refused", "timeout" or "oom". Empty with
	// EventRecovered and EventReplaced.
	Reason string

	// The reason in full. Nil with EventRecovered and EventReplaced.
	Err error

	// With EventRecovered, EventReplaced and EventReason, how long the server has been
	// down.
	Downtime time.Duration

	// The number of events that were dropped before this one because too many were
	// waiting to be reported.
	Dropped int
}

// EventKind is a kind of event.
type EventKind uint8

const (
	// EventDown: the server has failed several times in a row. Its breaker is
	// open: no requests are sent to it except for occasional probes.
	EventDown = EventKind(redisscript.EventDown)

	// EventRecovered: the server has answered a probe and decides requests again.
	EventRecovered = EventKind(redisscript.EventRecovered)

	// EventError: calls failed, but not enough of them in a row for EventDown.
	// Reported at most once a minute for each reason.
	EventError = EventKind(redisscript.EventError)

	// EventReplaced: a cluster server that was down no longer has any slots, as
	// after a failover. Other servers have its keys.
	EventReplaced = EventKind(redisscript.EventReplaced)

	// EventReason: the server is still down, for another reason than was last reported,
	// which has lasted for several failures. Reported at most once a minute for each
	// server.
	EventReason = EventKind(redisscript.EventReason)
)

// newEvent converts an event of the Redis client.
func newEvent(e redisscript.Event) Event {
	return Event{Server: e.Server, Kind: EventKind(e.Kind), Reason: e.Reason, Err: e.Err, Downtime: e.Downtime, Dropped: e.Dropped}
}
