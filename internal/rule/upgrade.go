package rule

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
)

// Hijack implements http.Hijacker. What handlers send over a connection that they have taken
// over, as for a websocket, is part of the response, as it is over HTTP/2.
func (s *settler) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(s.ResponseWriter).Hijack()
	if err == nil {
		s.leaveAll(false)
		if s.state != complete {
			s.state = upgraded
		}
	}
	if err != nil || !slices.ContainsFunc(s.holdings, func(h Holding) bool { return h.bucket.Limit.Settlement.ActualCost == ActualBytes }) {
		return conn, buffered, err
	}
	conn = &countedConn{conn, &s.bytes}
	buffered.Writer.Reset(conn) // it is empty
	return conn, buffered, nil
}

// countedConn is a connection of which the bytes that are sent are counted.
type countedConn struct {
	net.Conn
	sent *atomic.Int64
}

// Write implements net.Conn.
func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.sent.Add(int64(n))
	return n, err
}

// ReadFrom implements io.ReaderFrom, which copies between connections without buffers.
func (c *countedConn) ReadFrom(r io.Reader) (int64, error) {
	n, err := io.Copy(c.Conn, r)
	c.sent.Add(n)
	return n, err
}

// CloseWrite ends what is sent, but not what is received.
func (c *countedConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Interface guards
var (
	_ http.Hijacker = (*settler)(nil)
	_ io.ReaderFrom = (*countedConn)(nil)
)
