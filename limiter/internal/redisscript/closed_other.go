//go:build !unix

package redisscript

import "syscall"

// closed can't tell here. A closed connection shows when it is used, or when it
// is next tried, see pool.check.
func closed(syscall.RawConn) bool { return false }
