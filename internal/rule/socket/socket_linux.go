package socket

import "golang.org/x/sys/unix"

// peerClosed reports whether the peer of a socket has closed its side, or reset the connection.
func peerClosed(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}} // descriptors are small
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// keepUnsent bounds what a socket keeps that it has not sent yet. It fails for sockets that are not TCP.
func keepUnsent(fd uintptr, bytes int) {
	_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, bytes)
}
