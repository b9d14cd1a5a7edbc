//go:build !linux

package redisscript

import "syscall"

// received reports that this system does not support it.
func received(syscall.RawConn) (bytes uint64, known bool) { return 0, false }
