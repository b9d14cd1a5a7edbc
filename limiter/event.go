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

	// Why, in a word, such as "refused", "timeout" or "oom". Empty with
	// EventRecovered and EventReplaced.
	Reason string

	// Why, in full. Nil with EventRecovered and EventReplaced.
	Err error

	// With EventRecovered and EventReplaced, how long the server was down.
	Downtime time.Duration

	// How many events before this one were dropped, since too many waited to be
	// reported.
	Dropped int
}

// EventKind is a kind of event.
type EventKind uint8

const (
	// EventDown: the server has failed several times in a row. It is no longer
	// asked, except for a probe now and then.
	EventDown EventKind = iota

	// EventRecovered: the server has answered a probe and decides again.
	EventRecovered

	// EventError: a single call failed, or several apart from each other. Reported
	// at most once a minute for each reason.
	EventError

	// EventReplaced: a server of a cluster that was down has no slots any more, as
	// after a failover. Other servers have its keys.
	EventReplaced
)

// newEvent returns an event of the servers as it is reported.
func newEvent(e redisscript.Event) Event {
	kinds := map[redisscript.EventKind]EventKind{
		redisscript.EventDown:      EventDown,
		redisscript.EventRecovered: EventRecovered,
		redisscript.EventError:     EventError,
		redisscript.EventReplaced:  EventReplaced,
	}
	return Event{Server: e.Server, Kind: kinds[e.Kind], Reason: e.Reason, Err: e.Err, Downtime: e.Downtime, Dropped: e.Dropped}
}
