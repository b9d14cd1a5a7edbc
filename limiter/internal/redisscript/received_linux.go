package redisscript

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// received returns how many bytes have ever come on a socket of TCP, whether or not
// they were read. Only Linux reports that.
func received(raw syscall.RawConn) (bytes uint64, known bool) {
	err := raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if known = err == nil; known {
			bytes = info.Bytes_received
		}
	})
	return bytes, known && err == nil
}
