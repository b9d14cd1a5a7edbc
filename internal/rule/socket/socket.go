// Package socket is what a system tells and does beneath the connections of clients.
package socket

import (
	"context"
	"errors"
	"net"
	"net/http"
	"syscall"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

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

// Of returns the connection of a request, or nil if it is not known.
func Of(r *http.Request) net.Conn {
	conn, _ := r.Context().Value(connKey{}).(net.Conn)
	return conn
}

// ClientLeft reports whether the client of r has left. Its context says so too, but over
// HTTP/1 only once all that the client has sent has been read.
func ClientLeft(r *http.Request) bool {
	if r.Context().Err() != nil {
		return true
	}
	conn := Of(r)
	return conn != nil && hungUp(conn)
}

// hungUp reports whether the client of conn has closed it, or at least the direction in which it
// sends, also while there is unread data: an HTTP/1 server notices only when it reads, and what a
// client has sent of a body or of its next request comes before the end. It reads nothing, takes
// no lock that a reader holds, and may be called while others read. It is false if that is
// unknown: on systems other than Linux, for connections that a listener has wrapped without
// giving access to the one inside, and as long as the system's buffers have no room for the data
// before the end.
func hungUp(conn net.Conn) bool {
	ended := false
	known, err := control(conn, func(fd uintptr) { ended = peerClosed(fd) })
	return known && (err != nil || ended) // an error if this side has closed it
}

// KeepUnsent has writes to conn wait while the system keeps more than so many bytes that were never
// sent, instead of as many as fit into its buffers: a client that does not read gets no more. It does
// nothing where that is not known.
func KeepUnsent(conn net.Conn, bytes int) {
	_, _ = control(conn, func(fd uintptr) { keepUnsent(fd, bytes) })
}

// CloseWrite ends what is sent over conn, but not what is received. It fails if conn can't do that.
func CloseWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// control calls f with the socket beneath conn, if that is known.
func control(conn net.Conn, f func(fd uintptr)) (known bool, err error) {
	for {
		switch c := conn.(type) {
		case syscall.Conn:
			raw, err := c.SyscallConn()
			if err != nil {
				return false, err
			}
			return true, raw.Control(f)
		case interface{ NetConn() net.Conn }: // TLS
			conn = c.NetConn()
		case interface{ Raw() net.Conn }: // the PROXY protocol
			conn = c.Raw()
		default:
			return false, nil
		}
	}
}
