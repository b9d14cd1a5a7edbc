package hangup

import "golang.org/x/sys/unix"

// closed reports whether the peer of a socket has closed its side, or reset the connection.
func closed(fd uintptr) bool {
	ask := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}} //nolint:gosec // it is small
	n, err := unix.Poll(ask, 0)
	return err == nil && n > 0
}
