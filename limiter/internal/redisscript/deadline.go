package redisscript

import (
	"context"
	"time"
)

// deadline is a context with a deadline and nothing else. Its Done never fires: it
// is for code that asks for the deadline, and so needs no timer.
type deadline struct {
	context.Context
	at        time.Time
	shortened bool // whether that is sooner than the timeout
}

// Deadline implements context.Context.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// WithDeadline returns a context for Do with a deadline for the answer. shortened
// says whether that is shorter than the client's timeout: then the server is not
// to blame if the answer is late.
func WithDeadline(at time.Time, shortened bool) context.Context {
	return deadline{context.Background(), at, shortened}
}

// shortened reports whether there is less time for an answer than the timeout allows
// a server.
func shortened(ctx context.Context) bool {
	d, ok := ctx.(deadline)
	return ok && d.shortened
}

// timed returns a context with the deadline of ctx that does become done, which a
// deadline never does.
func timed(ctx context.Context) (context.Context, context.CancelFunc) {
	if end, ok := ctx.Deadline(); ok {
		return context.WithDeadline(context.Background(), end)
	}
	return context.WithCancel(ctx)
}
