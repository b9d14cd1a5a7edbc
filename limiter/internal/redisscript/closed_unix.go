//go:build unix

package redisscript

import "syscall"

// closed reports whether the other end of an idle connection has closed it, or has
// sent something unasked, as a server does before it closes a connection.
func closed(raw syscall.RawConn) bool {
	var is bool
	err := raw.Read(func(fd uintptr) bool {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		is = err != syscall.EAGAIN && err != syscall.EINTR //nolint:errorlint // an errno
		return true
	})
	return is && err == nil
}
