package pace

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
)

// mostAside is the length up to which a message may be sent beside another write, in bytes: it is one that
// the connection is about to be closed, as a control frame of a websocket.
const mostAside = 256

// Hijack implements http.Hijacker. All that is sent over a connection that a handler takes over, as for a
// websocket, is paced, as it is over HTTP/2.
func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return c, buffered, err
	}
	p := w.response
	socket.KeepUnsent(c, mostPiece)
	p.beforeWait = func() (func(), error) { return func() {}, nil }
	paced := newConn(c, p)
	buffered.Writer.Reset(paced) // it is empty
	return paced, buffered, nil
}

// conn is a connection that is paced.
type conn struct {
	net.Conn
	response *Response
	writing  chan struct{} // has room for the one who writes, and may wait
	aside    atomic.Int64  // bytes that were sent beside that, and are to be charged
	close    sync.Once
}

// newConn returns a connection over which a response is sent.
func newConn(c net.Conn, p *Response) *conn {
	p.closed = make(chan struct{})
	return &conn{Conn: c, response: p, writing: make(chan struct{}, 1)}
}

// Write implements net.Conn. A short message that is written while another one waits is sent at once, and
// charged before anything more is sent.
func (c *conn) Write(b []byte) (int, error) {
	select {
	case c.writing <- struct{}{}:
	default:
		if len(b) <= mostAside {
			c.aside.Add(int64(len(b)))
			return c.Conn.Write(b)
		}
		select {
		case c.writing <- struct{}{}:
		case <-c.response.closed:
			return 0, net.ErrClosed
		}
	}
	defer func() { <-c.writing }()
	for aside := int(c.aside.Swap(0)); aside > 0; {
		n, err := c.response.await(aside)
		if err != nil {
			return 0, err
		}
		aside -= n
	}
	return c.response.write(b, c.Conn.Write)
}

// ReadFrom implements io.ReaderFrom.
func (c *conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(struct{ io.Writer }{c}, r) }

// Close implements net.Conn.
func (c *conn) Close() (err error) {
	c.close.Do(func() {
		close(c.response.closed)
		err = c.Conn.Close()
		c.writing <- struct{}{} // who writes has been told
		defer func() { <-c.writing }()
		c.response.end()
		c.response.left = net.ErrClosed
	})
	return err
}

// CloseWrite ends what is sent, but not what is received.
func (c *conn) CloseWrite() error { return socket.CloseWrite(c.Conn) }
