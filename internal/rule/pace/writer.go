package pace

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
)

// writer writes the body of a response in pieces, each once it may be sent.
type writer struct {
	caddyhttp.ResponseWriterWrapper
	response *Response
	request  *http.Request
	conn     net.Conn               // of the client, until it keeps little that is not sent; nil if unknown
	pause    func() (resume func()) // what else measures how long the response takes

	free    bool        // whether the response has no body that is sent
	begun   atomic.Bool // whether any of the body has been written, or the header flushed
	written atomic.Bool // whether anything was, since it was flushed
}

// Serve has serve write the response to r through a writer that paces it. Whatever else measures how long
// the response takes is paused while it waits. conn is the connection of the client, if it is known.
func (p *Response) Serve(w http.ResponseWriter, r *http.Request, conn net.Conn, pause func() (resume func()), serve func(http.ResponseWriter) error) error {
	defer func() {
		if !p.hijacked { // otherwise its connection goes on
			p.end()
		}
	}()
	out := &writer{
		ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, response: p, request: r, conn: conn, pause: pause,
		free: r.Method == http.MethodHead,
	}
	p.beforeWait, p.whileWait = out.beforeWait, out.whileWait
	return serve(out)
}

// WriteHeader implements http.ResponseWriter.
func (w *writer) WriteHeader(status int) {
	w.free = w.free || status == http.StatusNoContent || status == http.StatusNotModified
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *writer) Write(b []byte) (n int, err error) {
	if w.free {
		return w.ResponseWriter.Write(b)
	}
	return w.response.write(b, func(piece []byte) (int, error) {
		w.note(true)
		return w.ResponseWriter.Write(piece)
	})
}

// ReadFrom implements io.ReaderFrom, which lets files be sent without copying. A piece of a file is read
// when it may be sent, so that no memory is held meanwhile.
func (w *writer) ReadFrom(r io.Reader) (written int64, err error) {
	if w.free {
		return w.ResponseWriterWrapper.ReadFrom(r)
	}
	part, ok := r.(*io.LimitedReader)
	if ok {
		_, ok = part.R.(io.Seeker)
	}
	if !ok {
		return io.Copy(struct{ io.Writer }{w}, r)
	}
	if _, err := w.response.claim(mostAside + 1); err != nil {
		return 0, err
	}
	defer w.response.release()
	const most = mostPiece - 4<<10 // of what Caddy writes at once, or it would look for more each time
	for part.N > 0 {
		n, err := w.response.await(int(min(part.N, most)))
		if err != nil {
			return written, err
		}
		w.note(true)
		sent, err := w.ResponseWriterWrapper.ReadFrom(&io.LimitedReader{R: part.R, N: int64(n)})
		part.N, written = part.N-sent, written+sent
		if err != nil || sent < int64(n) {
			return written, err
		}
	}
	return written, nil
}

// beforeWait prepares for a wait: what was written before is sent, as several small pieces would fit into
// the buffers of the server, and so is a header that has all that the server would add. The wait is neither
// its client's time, who may have to read at some rate, nor the upstream's.
func (w *writer) beforeWait() (after func(), err error) {
	if w.conn != nil {
		socket.KeepUnsent(w.conn, mostPiece)
		w.conn = nil
	}
	if w.written.Load() || !w.begun.Load() && hasType(w.Header()) && w.Header()["Content-Length"] != nil {
		if err := w.FlushError(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return nil, err
		}
	}
	restore := func() {}
	if _, idle := caddyhttp.IdleTimeoutsFromContext(w.request.Context()); idle != nil && idle.Deadline.MinRate > 0 {
		restore = idle.Override(idle.Deadline.Timeout, 0, 0)
	}
	resume := w.pause()
	return func() { resume(); restore() }, nil
}

// note notes that something is written, or flushed.
func (w *writer) note(written bool) {
	w.begun.Store(true)
	w.written.Store(written)
}

// whileWait sends the header of a response that waits for long, for which clients, and proxies before them, do
// not: though the server might have added the length of a short one. It reports whether the client has left,
// which the request's context does not tell over HTTP/1 while something that it has sent is unread.
func (w *writer) whileWait() (hasLeft bool) {
	if !w.begun.Load() && hasType(w.Header()) {
		_ = w.FlushError() // the next write fails too
	}
	return w.request.ProtoMajor == 1 && socket.ClientLeft(w.request)
}

// hasType reports whether a header has the type of the content, so that the server does not guess it. One
// without a value says that it is not to be guessed.
func hasType(h http.Header) bool {
	_, has := h["Content-Type"]
	return has
}

// FlushError implements flushing for http.ResponseController.
func (w *writer) FlushError() error {
	w.note(false)
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Interface guards
var (
	_ http.ResponseWriter = (*writer)(nil)
	_ http.Pusher         = (*writer)(nil)
	_ io.ReaderFrom       = (*writer)(nil)
	_ http.Hijacker       = (*writer)(nil)
)
