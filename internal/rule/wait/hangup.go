package wait

import (
	"context"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// lookEvery is how often a request that waits looks whether its client is still there.
const lookEvery = 250 * time.Millisecond

// connKey is the key of a request's connection in its context.
type connKey struct{}

// KeepConnections has the requests of a server know their connections. ctx is that of its handlers.
func KeepConnections(ctx caddy.Context) {
	srv, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		return
	}
	srv.RegisterConnContext(func(ctx context.Context, conn net.Conn) context.Context {
		if ctx.Value(connKey{}) != nil {
			return ctx // another handler has said so
		}
		return context.WithValue(ctx, connKey{}, conn)
	})
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

// hungUp reports whether the client of conn has closed it, or at least the direction in which it
// sends, also while there is unread data: an HTTP/1 server notices only when it reads, and what a
// client has sent of a body or of its next request comes before the end. It reads nothing, takes
// no lock that a reader holds, and may be called while others read. It is false if that is
// unknown: on systems other than Linux, for connections that a listener has wrapped without
// giving access to the one inside, and as long as the system's buffers have no room for the data
// before the end.
func hungUp(conn net.Conn) bool {
	for {
		switch c := conn.(type) {
		case syscall.Conn:
			raw, err := c.SyscallConn()
			if err != nil {
				return false
			}
			ended := false
			err = raw.Control(func(fd uintptr) { ended = peerClosed(fd) })
			return err != nil || ended // an error if this side has closed it
		case interface{ NetConn() net.Conn }: // TLS
			conn = c.NetConn()
		case interface{ Raw() net.Conn }: // the PROXY protocol
			conn = c.Raw()
		default:
			return false
		}
	}
}
