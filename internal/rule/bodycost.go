package rule

import (
	"io"
	"net/http"
	"time"
)

// bodyLength returns the length of r's body, and whether that is known before it has come.
func bodyLength(r *http.Request) (length int64, known bool) {
	switch {
	case r.ContentLength >= 0:
		return r.ContentLength, true
	case isWebSocket(r):
		return 0, true // like one over HTTP/1, which begins when the upstream agrees
	case r.ProtoMajor == 1, r.Method == http.MethodConnect, r.Header.Get("Expect") != "":
		return 0, false // and some of these send nothing before they are answered
	}
	// HTTP/2 and 3 may show by the end of the stream that there is no body, and HTTP/3
	// always does.
	body, begun := r.Body.(*begunBody)
	if !begun {
		body = &begunBody{ReadCloser: r.Body, began: make(chan struct{})}
		r.Body = body
		go body.begin()
		select {
		case <-body.began:
		case <-time.After(beginTime):
		}
	}
	return 0, body.empty()
}

// beginTime is how long a stream may take to show that it has no body. A longer silence counts
// as a body: its client may wait for an answer before it sends it.
const beginTime = 500 * time.Millisecond

// begunBody is a body whose beginning was read to learn whether there is any.
type begunBody struct {
	io.ReadCloser
	began chan struct{} // closed when first and err are known
	first []byte        // not read yet
	err   error
}

// begin reads the first byte, or the end. It returns at the latest when the request is over,
// as its stream ends then.
func (b *begunBody) begin() {
	first := make([]byte, 1)
	n, err := io.ReadFull(b.ReadCloser, first)
	b.first, b.err = first[:n], err
	close(b.began)
}

// empty reports whether it is known that there is nothing in the body.
func (b *begunBody) empty() bool {
	select {
	case <-b.began:
		return b.err == io.EOF // as ReadFull returns it
	default:
		return false
	}
}

// Read implements io.Reader.
func (b *begunBody) Read(p []byte) (int, error) {
	<-b.began
	switch {
	case b.err != nil:
		return 0, b.err
	case len(b.first) > 0:
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.ReadCloser.Read(p)
}

// isWebSocket reports whether r opens a websocket in a stream of HTTP/2 or 3 (RFC 8441,
// RFC 9220), as Caddy's reverse_proxy sees it: it sends an upstream no body with that.
func isWebSocket(r *http.Request) bool {
	const protocol = "websocket"
	return r.Method == http.MethodConnect &&
		(r.ProtoMajor == 2 && r.Header.Get(":protocol") == protocol || r.ProtoMajor == 3 && r.Proto == protocol)
}
