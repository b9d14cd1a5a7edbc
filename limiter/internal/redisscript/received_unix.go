//go:build unix && !linux

package redisscript

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// received asks the kernel whether something has come on a socket, or its end, that
// has not been read. For how long nothing has come is only known on Linux.
func received(raw syscall.RawConn) (unread bool, ago time.Duration, known bool) {
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		unread = err != unix.EAGAIN && err != unix.EINTR //nolint:errorlint // an errno
	})
	return unread && err == nil, 0, false
}
