// Package hangup tells whether the client of a connection has hung up, also while there is
// unread data: an HTTP/1 server notices only when it reads, and what a client has sent of a
// body or of its next request precedes the end.
package hangup

import (
	"net"
	"syscall"
)

// Closed reports whether the other side of conn has closed it, or at least the direction in
// which it sends. It reads nothing, takes no lock that a reader holds, and may be called
// concurrently with readers. It is false if that is unknown: on systems other than Linux, for
// connections that a listener has wrapped without telling the one beneath, and as long as
// more data than the system's buffers take precedes the end.
func Closed(conn net.Conn) bool {
	for {
		switch c := conn.(type) {
		case syscall.Conn:
			raw, err := c.SyscallConn()
			if err != nil {
				return false
			}
			ended := false
			err = raw.Control(func(fd uintptr) { ended = closed(fd) })
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
