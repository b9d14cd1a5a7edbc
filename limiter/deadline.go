package limiter

import (
	"context"
	"time"
)

// deadline is a context that has one and nothing else. Done never fires: it is
// for those who ask for the time, as the client does whenever it reads or
// writes, and so needs no timer.
type deadline struct {
	context.Context
	at     time.Time
	passed bool // before it began
}

// Deadline returns the time by which all must be done.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// Err returns an error if the deadline had passed before anything was done.
func (d deadline) Err() error {
	if d.passed {
		return context.DeadlineExceeded
	}
	return nil
}

// within returns a context with a deadline d from now.
func within(d time.Duration) deadline {
	return deadline{Context: context.Background(), at: time.Now().Add(d)}
}

// before returns d, or with the deadline of ctx if that is earlier.
func (d deadline) before(ctx context.Context) deadline {
	if end, ok := ctx.Deadline(); ok && end.Before(d.at) {
		d.at, d.passed = end, !time.Now().Before(end)
	}
	return d
}

// timed returns a context that is done at the deadline of one that only tells
// when that is.
func timed(ctx context.Context) (context.Context, context.CancelFunc) {
	if end, ok := ctx.Deadline(); ok {
		return context.WithDeadline(context.Background(), end)
	}
	return context.WithCancel(ctx)
}
