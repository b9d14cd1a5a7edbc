package rule

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
)

// lookEvery is how often a request that waits looks whether its client is still there.
const lookEvery = 250 * time.Millisecond

// ErrLeft is the error of a request whose client has left while it waited.
var ErrLeft = RefusalError{Status: statusClientLeft, Err: context.Canceled}

// WaitOut waits until the request, which is admitted, may pass. It stays charged if its client
// leaves before, and does not pass: WaitOut returns false then.
func (q *Request) WaitOut(wait time.Duration, res *outcome.Outcome) bool {
	if wait == 0 {
		return true
	}
	start, timer, look := time.Now(), time.NewTimer(wait), time.NewTicker(lookEvery)
	defer func() {
		timer.Stop()
		look.Stop()
		res.AddDelay(time.Since(start))
	}()
	for waits := true; !clientLeft(q.http); {
		if !waits {
			return true
		}
		select {
		case <-timer.C:
			waits = false
		case <-look.C:
		case <-q.http.Context().Done():
		}
	}
	q.settleUnpassed()
	return false
}

// connKey is the key of a request's connection in its context.
type connKey struct{}

// KeepConnections has requests know their connections, if any of the limits makes requests
// wait. ctx is that of a server's handlers.
func KeepConnections(ctx caddy.Context, limits []*Limit) {
	srv, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || !delays(limits) {
		return
	}
	srv.RegisterConnContext(func(ctx context.Context, conn net.Conn) context.Context {
		if ctx.Value(connKey{}) != nil {
			return ctx // another handler has said so
		}
		return context.WithValue(ctx, connKey{}, conn)
	})
}

// delays reports whether any of the limits makes requests wait.
func delays(limits []*Limit) bool {
	for b := range Buckets(limits) {
		if b.Limit.MaxDelay > 0 {
			return true
		}
	}
	return false
}

// clientLeft reports whether the client of r has left. Its context says so too, but over
// HTTP/1 only once all that the client has sent has been read.
func clientLeft(r *http.Request) bool {
	if r.Context().Err() != nil {
		return true
	}
	conn, ok := r.Context().Value(connKey{}).(net.Conn)
	return ok && hungUp(conn)
}
