//go:build unix

package redisscript

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// unread reports whether there is something to read from a socket, or its end.
func unread(raw syscall.RawConn) (is bool) {
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		is = err != unix.EAGAIN && err != unix.EINTR // an errno
	})
	return is && err == nil
}
