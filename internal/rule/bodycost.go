package rule

import (
	"bytes"
	"errors"
	"io"
	"net/http"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// errNoLength rejects a request whose cost is the length of its body, which nobody knows
// before the body has come. It could be counted as it is read, but then an upstream would
// have a part of what is denied, and nobody could know whether parallel requests fit.
var errNoLength = RefusalError{
	Status: http.StatusLengthRequired,
	Err:    errors.New("the cost is the length of the body, and the request does not tell it"),
}

// costOf returns what the request costs, as far as that is known before its response. To a
// dry run, which must not reject it, a body of unknown length is one that does not fit.
func (b *Bucket) costOf(q *Request) (int64, error) {
	if !b.CostIsBody {
		cost, err := b.Cost.At(q.replacer)
		return cost, q.valueError(b, http.StatusBadRequest, err)
	}
	switch length, known := bodyLength(q.http); {
	case known:
		return min(max(length, 1), limiter.MaxUnits), nil
	case b.Limit.DryRun:
		return limiter.MaxUnits, nil
	}
	return 0, errNoLength
}

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
	// HTTP/2 and 3 may tell by the end of the stream that there is no body, and HTTP/3
	// always does.
	first := make([]byte, 1)
	n, err := io.ReadFull(r.Body, first)
	if n == 0 && err == io.EOF { //nolint:errorlint // as ReadFull returns it
		return 0, true
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(first[:n]), r.Body), r.Body}
	return 0, false
}

// isWebSocket reports whether r opens a websocket in a stream of HTTP/2 or 3 (RFC 8441,
// RFC 9220), as Caddy's reverse_proxy sees it: it sends an upstream no body with that.
func isWebSocket(r *http.Request) bool {
	const protocol = "websocket"
	return r.Method == http.MethodConnect &&
		(r.ProtoMajor == 2 && r.Header.Get(":protocol") == protocol || r.ProtoMajor == 3 && r.Proto == protocol)
}
