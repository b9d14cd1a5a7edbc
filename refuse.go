package ratelimit

import (
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// refuse rejects a request, by an error for error routes to handle. If none would
// handle it, the status is written directly, as the server would do: returning an
// error is more than twice as expensive.
//
// No cache may keep the response, whatever the site says of its others. Error routes
// may say otherwise of theirs.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, status int, err error) error {
	setNoStore(w.Header())
	holdsUp := r.ContentLength != 0 && r.ProtoMajor == 1 // others have a stream for each request
	if holdsUp && !awaitBody(r) {
		closeAfterResponse(w)
	}
	if h.seenByErrorRoutes(r, status) {
		if status != http.StatusTooManyRequests && status != http.StatusTooEarly {
			err = errNoDecision
		}
		return h.handlerError(status, err)
	}
	if c := h.logger.Check(zap.DebugLevel, "request rejected"); c != nil {
		fields := []zap.Field{zap.Int("status", status), zap.Error(err)}
		if d, ok := err.(denial); ok { //nolint:errorlint // decide does not wrap them
			fields = append(fields, zap.String("limit", d.path), zap.Stringer("by", d.decision.By))
		}
		c.Write(fields...)
	}
	if holdsUp { // and there are no error routes to read it
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
	}
	insistOnNoStore(w)
	w.WriteHeader(status)
	return nil
}

const (
	// smallBody is the length up to which a body is expected to come with the header
	// of its request, in the first window of a TCP connection.
	smallBody = 14 << 10

	// bodyTime is for how long a body that nobody wants is read.
	bodyTime = 500 * time.Millisecond
)

// awaitBody reports whether a server should read what is left of the body of an
// HTTP/1 request before it rejects it, which it does to keep the connection: if that
// is not much, and on its way. A client that expects 100 Continue sends nothing before.
//
// A server that is configured for full duplex would read it after the response, and
// take a body that comes later for requests.
func awaitBody(r *http.Request) bool {
	if srv, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok && srv.EnableFullDuplex {
		return false
	}
	return 0 < r.ContentLength && r.ContentLength <= smallBody && r.Header.Get("Expect") == ""
}

// closeAfterResponse makes an HTTP/1 server respond without reading the rest of the
// body, and then close the connection, late enough for the client to get the response.
// This is what a reader for bodies of limited size does to the innermost writer when
// it meets a larger one.
func closeAfterResponse(w http.ResponseWriter) {
	for {
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = wrapper.Unwrap()
	}
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
}

// setNoStore makes the response with header h one that no cache keeps.
func setNoStore(h http.Header) { h.Set("Cache-Control", "no-store") }

// insistOnNoStore repeats setNoStore when the header is written to w, beneath all that
// changes it on the way: a deferred `header` that lets pages be cached means no
// denials. Caddy has its IdleTimeoutWriter there, unless it is configured without.
func insistOnNoStore(w http.ResponseWriter) {
	changed := false
	for {
		switch wrapper := w.(type) {
		case *caddyhttp.IdleTimeoutWriter:
			if changed {
				wrapper.ResponseWriter = &noStoreWriter{caddyhttp.ResponseWriterWrapper{ResponseWriter: wrapper.ResponseWriter}}
			}
			return
		case caddyhttp.ResponseRecorder, *responseWriter: // do not change it
		default:
			changed = true
		}
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return
		}
		w = wrapper.Unwrap()
	}
}

// noStoreWriter is the writer of a response that no cache may keep.
type noStoreWriter struct {
	caddyhttp.ResponseWriterWrapper
}

// WriteHeader implements http.ResponseWriter.
func (w *noStoreWriter) WriteHeader(status int) {
	setNoStore(w.Header())
	w.ResponseWriter.WriteHeader(status)
}
