package wait

import "golang.org/x/sys/unix"

// peerClosed reports whether the peer of a socket has closed its side, or reset the connection.
func peerClosed(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}} // it is small
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}
