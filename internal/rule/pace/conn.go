package pace

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"sync"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
)

// Hijack implements http.Hijacker. All that is sent over a connection that a handler takes over, as for a
// websocket, is paced, as it is over HTTP/2.
func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return c, buffered, err
	}
	p := w.response
	socket.KeepUnsent(c, mostPiece)
	p.hijacked, p.beforeWait, p.whileWait = true, func() (func(), error) { return func() {}, nil }, nil
	p.ctx = context.WithoutCancel(p.ctx) // the handler may return
	paced := &conn{Conn: c, response: p}
	buffered.Writer.Reset(paced) // it is empty
	return paced, buffered, nil
}

// conn is a connection that is paced.
type conn struct {
	net.Conn
	response *Response
	close    sync.Once
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) { return c.response.write(b, c.Conn.Write) }

// ReadFrom implements io.ReaderFrom.
func (c *conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(struct{ io.Writer }{c}, r) }

// Close implements net.Conn.
func (c *conn) Close() (err error) {
	c.close.Do(func() {
		err = c.Conn.Close()
		c.response.end()
	})
	return err
}

// CloseWrite ends what is sent, but not what is received.
func (c *conn) CloseWrite() error { return socket.CloseWrite(c.Conn) }
