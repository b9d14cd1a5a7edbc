//go:build !unix

package redisscript

import "syscall"

// unread reports false: this system does not support it.
func unread(syscall.RawConn) bool { return false }
