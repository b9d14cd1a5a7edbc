//go:build !unix

package redisscript

import (
	"syscall"
	"time"
)

// received reports nothing: this system does not tell.
func received(syscall.RawConn) (unread bool, ago time.Duration, known bool) { return false, 0, false }
