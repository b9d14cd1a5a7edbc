package redisscript

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// received asks the kernel whether something has come on a socket, or its end, that
// has not been read, and for how long nothing has come. Of sockets that are not TCP's
// it is never known for how long. It is told in ticks of the kernel, of at most 10 ms.
func received(raw syscall.RawConn) (unread bool, ago time.Duration, known bool) {
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if unread = err != unix.EAGAIN && err != unix.EINTR; unread { //nolint:errorlint // an errno
			return
		}
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			ago, known = time.Duration(info.Last_data_recv)*time.Millisecond, true
		}
	})
	return unread && err == nil, ago, known && err == nil
}
