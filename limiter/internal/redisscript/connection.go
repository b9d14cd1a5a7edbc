package redisscript

import (
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// connection is a connection to a server. go-redis has made it and logged in, and
// closes it; nothing else of go-redis is used from then on.
type connection struct {
	net.Conn
	raw     syscall.RawConn // of its socket; nil if there is none
	plain   bool            // whether what comes on the socket is read as it is
	before  uint64          // number of bytes that came while it was made, if that is known
	release func() error    // closes it
	made    time.Time
	trip    time.Duration // how long an answer took while it was made

	// Guarded by the pipeline's lock.
	flight  flight
	batches int  // batches in flight
	dropped bool // whether it is being closed
	dead    bool // whether its reader has ended

	writeBy time.Time // the deadline of writes
	heardAt atomic.Int64
	read    atomic.Uint64
	waiting atomic.Bool // whether its reader waits for something to come

	mu  sync.Mutex
	why error // why it was closed; nil if it was not
}

// start is the time from which heardAt counts.
var start = time.Now()

// Read reads what has come.
func (c *connection) Read(b []byte) (int, error) {
	c.waiting.Store(true)
	n, err := c.Conn.Read(b)
	c.waiting.Store(false)
	c.read.Add(uint64(n)) // not negative
	c.heardAt.Store(int64(time.Since(start)))
	return n, err
}

// heard returns when something has last come.
func (c *connection) heard() time.Time { return start.Add(time.Duration(c.heardAt.Load())) }

// silent returns for how long nothing has come, since it was awaited. The pipeline's
// lock must be held.
func (c *connection) silent(now time.Time) time.Duration {
	last := c.heard()
	if in := c.flight.first(); in != nil {
		if in.sent.IsZero() {
			return 0
		}
		last = later(last, in.sent)
	}
	return now.Sub(last)
}

// answers reports whether something has come that has not been passed on yet: then
// this process is late, and not the server. heard is when its reader last went on.
func (c *connection) answers() (is bool, heard time.Time) {
	heard = c.heard()
	if c.raw == nil {
		return !c.waiting.Load(), heard
	}
	read := c.read.Load()
	if bytes, known := received(c.raw); c.plain && known && bytes >= c.before+read {
		// That is exact: a reader may have taken something from the socket, and wait
		// for a processor before it can say so.
		return bytes > c.before+read || !c.waiting.Load(), heard
	}
	return unread(c.raw) || !c.waiting.Load(), heard
}

// write writes b. That takes long only if this process is late, or if the server does
// not read: then see stopWriting.
func (c *connection) write(b []byte, now time.Time, timeout time.Duration) error {
	if by := now.Add(timeout + maxLate); by.After(c.writeBy) {
		c.writeBy = by.Add(maxLate) // so that most writes need not set it
		if err := c.SetWriteDeadline(c.writeBy); err != nil {
			return err
		}
	}
	_, err := c.Conn.Write(b)
	return err
}

// stopWriting ends a write that waits because the server does not read.
func (c *connection) stopWriting() { _ = c.SetWriteDeadline(time.Unix(1, 0)) }

// close closes the connection and records why, unless it is closed. Its reader ends at
// once; the rest is done in the background, because TLS sends a close notification first.
func (c *connection) close(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil {
		c.why = why
		_ = c.SetReadDeadline(time.Unix(1, 0))
		go func() { _ = c.release() }()
	}
}

// cause returns why the connection was closed.
func (c *connection) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}
