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

	// The reason as one word. Empty with EventRecovered and EventReplaced.
	//
	// - `timeout`: it hangs, is too slow, or packets are lost.
	// - `refused`, `closed`, `down`: it is down, its address refuses connections, or they break.
	// - `backlog`: calls can't be sent or answered in time, because earlier ones are unanswered
	//   or this process is busy.
	// - `oom`, `misconf`, `noreplicas`, `readonly`: it rejects writes: its memory or disk is
	//   full, it has too few replicas, or it is a replica.
	// - `loading`, `busy`: it is loading its data, or runs another client's script.
	// - `noauth`, `wrongpass`, `credentials`: the user or password is wrong, or the file with it
	//   can't be read.
	// - `noperm`: the user may not call a command or use a key.
	// - `tls`, `dns`: TLS fails, or its host name is unknown.
	// - `db`: it has no database with this number.
	// - `moved`: it belongs to a cluster, but the configuration does not say so: add `cluster`.
	// - `clusterdown`, `tryagain`, `masterdown`: part of its cluster is down or being moved.
	// - `nomaster`: the sentinels know no server by this name.
	// - `unsupported`: it lacks a command, or an option of a command.
	// - `maxclients`: it has too many clients.
	// - `reply`: something at its address sent an invalid reply.
	// - `corrupt`: another program has written to a key, which counts as empty.
	// - `error`: anything else.
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
