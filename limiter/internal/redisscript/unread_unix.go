//go:build unix

package redisscript

import "syscall"

// unread reports whether there is something to read from a socket, or its end.
func unread(raw syscall.RawConn) bool {
	var is bool
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		is = err != syscall.EAGAIN && err != syscall.EINTR //nolint:errorlint // an errno
	})
	return is && err == nil
}
