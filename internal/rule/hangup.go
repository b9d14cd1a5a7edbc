package rule

import (
	"net"
	"syscall"
)

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
