package redisscript

import (
	"context"
	"time"
)

// deadline is a context that has one and nothing else. Done never fires: it is
// for those who ask for the time, as the client does whenever it reads or
// writes, and so needs no timer.
type deadline struct {
	context.Context
	at      time.Time
	hurried bool // whether that is sooner than servers are given to answer
}

// Deadline returns the time by which all must be done.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// within returns a context with a deadline d from now.
func within(d time.Duration) context.Context {
	return deadline{context.Background(), time.Now().Add(d), false}
}

// hurried reports whether there is less time for an answer than servers are
// given. If it takes longer, neither they nor connections are to blame.
func hurried(ctx context.Context) bool {
	d, ok := ctx.(deadline)
	return ok && d.hurried
}

// timed returns a context that is done at the deadline of one that only tells
// when that is.
func timed(ctx context.Context) (context.Context, context.CancelFunc) {
	if end, ok := ctx.Deadline(); ok {
		return context.WithDeadline(context.Background(), end)
	}
	return context.WithCancel(ctx)
}

// WithDeadline returns a context for Do that tells when the answer must be there.
// Shortened says whether that is sooner than the client's timeout: then no server
// is to blame if it is late.
func WithDeadline(at time.Time, shortened bool) context.Context {
	return deadline{context.Background(), at, shortened}
}
