//go:build !unix

package redisscript

import "syscall"

// closed cannot find out on this system. A closed connection is noticed when it is
// used or when pool.check tries it.
func closed(syscall.RawConn) bool { return false }
