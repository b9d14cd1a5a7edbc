package listener

import (
	"crypto/tls"
	"io"
	"net"
	"runtime"
	"sync"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
)

// held is what a connection holds of limits until it is closed.
type held struct {
	forgotten runtime.Cleanup // releases it, if the connection is never closed

	mu     sync.Mutex
	units  []rule.Units // of each wrapper
	closed bool
}

// add adds what the connection holds. If it has been closed meanwhile, that is nothing.
func (h *held) add(units rule.Units) {
	h.mu.Lock()
	closed := h.closed
	if !closed {
		h.units = append(h.units, units)
	}
	h.mu.Unlock()
	if closed {
		units.Release()
	}
}

// release releases all, once.
func (h *held) release() {
	h.mu.Lock()
	units := h.units
	h.closed, h.units = true, nil
	h.mu.Unlock()
	for _, u := range units {
		u.Release()
	}
}

// newHeld returns what c holds. A handler that has taken the connection over may forget to close it: then the runtime
// closes its descriptor once nothing refers to it, and what it holds is released as well.
func newHeld(c net.Conn) *held {
	h := new(held)
	if tcp, ok := innermost(c).(*net.TCPConn); ok {
		h.forgotten = runtime.AddCleanup(tcp, (*held).release, h)
	}
	return h
}

// end closes a connection, which counts until then.
func (h *held) end(c net.Conn) error {
	defer h.release()
	h.forgotten.Stop()
	return c.Close()
}

// tcpConn is a TCP connection that holds something. All but Close is that connection's, so that files are sent as
// without it.
type tcpConn struct {
	*net.TCPConn
	*held
}

// Close closes the connection.
func (c *tcpConn) Close() error { return c.end(c.TCPConn) }

// conn is any other connection that holds something, or may.
type conn struct {
	net.Conn
	*held
}

// Close closes the connection.
func (c *conn) Close() error { return c.end(c.Conn) }

// NetConn returns the connection within.
func (c *conn) NetConn() net.Conn { return c.Conn }

// CloseWrite ends what is sent, but not what is received.
func (c *conn) CloseWrite() error { return socket.CloseWrite(c.Conn) }

// ReadFrom implements io.ReaderFrom, since some connections have a faster way to send files.
func (c *conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(c.Conn, r) }

// WriteTo implements io.WriterTo, for the same in the other direction.
func (c *conn) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, c.Conn) }

// holder is a connection that may hold something.
type holder interface {
	net.Conn
	add(rule.Units)
}

// holding returns a connection that holds something, or the same if it holds nothing.
func holding(c net.Conn, units rule.Units) net.Conn {
	if units == (rule.Units{}) {
		return c
	}
	of, already := c.(holder) // of another wrapper
	if !already {
		if tcp, ok := c.(*net.TCPConn); ok {
			of = &tcpConn{tcp, newHeld(c)}
		} else {
			of = &conn{c, newHeld(c)}
		}
	}
	of.add(units)
	return of
}

// lateConn is a connection whose address may not be known before something is read.
type lateConn struct {
	conn
	wrapper *Wrapper
	once    sync.Once
	refused bool
}

// stated is a connection with TLS, as of a plugin's wrapper.
type stated interface {
	ConnectionState() tls.ConnectionState
}

// statedLateConn is a lateConn of such a connection.
type statedLateConn struct {
	*lateConn
	stated
}

// newLate returns a connection on which w decides later.
func newLate(c net.Conn, w *Wrapper) net.Conn {
	late := &lateConn{conn: conn{c, newHeld(c)}, wrapper: w}
	if state, ok := c.(stated); ok {
		return statedLateConn{late, state}
	}
	return late
}

// isRefused decides on the connection when it is first called, which may wait for the client's address.
func (c *lateConn) isRefused() bool {
	c.once.Do(func() {
		units, admitted := c.wrapper.admit(c.Conn)
		if admitted {
			c.add(units)
			return
		}
		c.refused = true
		refuse(c)
	})
	return c.refused
}

// Read implements net.Conn. A connection that is refused has ended.
func (c *lateConn) Read(b []byte) (int, error) {
	if c.isRefused() {
		return 0, io.EOF
	}
	return c.Conn.Read(b)
}

// Write implements net.Conn.
func (c *lateConn) Write(b []byte) (int, error) {
	if c.isRefused() {
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}

// ReadFrom implements io.ReaderFrom.
func (c *lateConn) ReadFrom(r io.Reader) (int64, error) {
	if c.isRefused() {
		return 0, net.ErrClosed
	}
	return c.conn.ReadFrom(r)
}

// WriteTo implements io.WriterTo.
func (c *lateConn) WriteTo(w io.Writer) (int64, error) {
	if c.isRefused() {
		return 0, nil
	}
	return c.conn.WriteTo(w)
}

// knowsAddress reports whether a connection tells its address without waiting for it.
func knowsAddress(c net.Conn) bool {
	switch c := c.(type) {
	case *net.TCPConn, *net.UnixConn, *tcpConn:
		return true
	case *conn:
		return knowsAddress(c.Conn)
	}
	return false
}

// refuse closes a connection so that nothing is left of it: a TCP connection is reset.
func refuse(c net.Conn) {
	if of, ok := innermost(c).(interface{ SetLinger(sec int) error }); ok {
		_ = of.SetLinger(0)
	}
	_ = c.Close()
}

// innermost returns the connection beneath c that no other is known to be beneath.
func innermost(c net.Conn) net.Conn {
	for {
		switch outer := c.(type) {
		case *tcpConn:
			return outer.TCPConn
		case interface{ NetConn() net.Conn }:
			c = outer.NetConn()
		case interface{ Raw() net.Conn }: // the PROXY protocol
			c = outer.Raw()
		default:
			return c
		}
	}
}
