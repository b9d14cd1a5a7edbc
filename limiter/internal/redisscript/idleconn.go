package redisscript

import (
	"context"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// idleFor is how long a connection must be idle before each write first checks
// whether the other end has closed it. Under load, connections are rarely idle for
// so long, so no time is spent on the check.
const idleFor = time.Millisecond

// idleConn is a network connection that refuses to send what the other end will
// never read: servers, and proxies in between, close connections that have been
// idle for long. A request sent on such a connection would be lost, although it
// could be sent on another one. Where the system cannot tell, the request is sent.
type idleConn struct {
	net.Conn
	raw  syscall.RawConn // nil if there is none
	read atomic.Int64    // when something was last read, in ns since start; 0 after a write
}

var start = time.Now()

// Write returns errIdleClosed, and sends nothing, if the other end has closed the
// connection while it was idle.
func (c *idleConn) Write(b []byte) (int, error) {
	last := c.read.Swap(0)
	if c.raw == nil || last == 0 || time.Since(start)-time.Duration(last) < idleFor {
		return c.Conn.Write(b)
	}
	// The deadline of the last read has passed, so the check would only report a
	// timeout.
	if err := c.SetReadDeadline(time.Time{}); err != nil || closed(c.raw) {
		return 0, errIdleClosed
	}
	return c.Conn.Write(b)
}

// Read records the time of the read.
func (c *idleConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Store(int64(time.Since(start)))
	return n, err
}

// pollableConn is an idleConn that also lets the client poll the connection, as it
// does with those in its own pool.
type pollableConn struct {
	*idleConn
	syscall.Conn
}

// Read and Write are those of the idleConn, and so are the other net.Conn methods.
func (c pollableConn) Read(b []byte) (int, error)  { return c.idleConn.Read(b) }
func (c pollableConn) Write(b []byte) (int, error) { return c.idleConn.Write(b) }

// idleHook wraps all of a client's connections as idleConns with bounded replies.
type idleHook struct{}

func (idleHook) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := next(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		bounded, ok := conn.(*boundedConn)
		if ok {
			conn = bounded.Conn
		} else {
			bounded = &boundedConn{Conn: conn}
		}
		idle := &idleConn{Conn: bounded}
		if pollable, ok := conn.(syscall.Conn); ok {
			if idle.raw, err = pollable.SyscallConn(); err == nil {
				return pollableConn{idle, pollable}, nil
			}
		}
		if tls, ok := conn.(interface{ NetConn() net.Conn }); ok {
			// What a TLS server sends unasked is its close notification.
			if pollable, ok := tls.NetConn().(syscall.Conn); ok {
				idle.raw, _ = pollable.SyscallConn()
			}
		}
		return idle, nil
	}
}

func (idleHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (idleHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
