package redisscript

import (
	"context"
	"time"
)

// Deadline says when a caller must have the answer.
type Deadline struct {
	At        time.Time
	Shortened bool // whether that is sooner than the client's timeout: then the server is not to blame if the answer is late
}

// context returns a context with the deadline and nothing else. Its Done never fires: it
// is for code that reads the deadline, and so needs no timer.
func (d Deadline) context() context.Context { return untimed{context.Background(), d.At} }

// untimed is such a context.
type untimed struct {
	context.Context
	at time.Time
}

// Deadline implements context.Context.
func (u untimed) Deadline() (time.Time, bool) { return u.at, true }
