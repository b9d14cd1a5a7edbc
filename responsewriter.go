package ratelimit

import (
	"io"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// wrapped reports whether a writer of ours is in w.
func wrapped(w http.ResponseWriter) bool {
	for {
		if _, ok := w.(*responseWriter); ok {
			return true
		}
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return false
		}
		w = wrapper.Unwrap()
	}
}

// responseWriter puts our fields in order just before the header is written.
// Whatever else can be done with the writer underneath, such as hijacking its
// connection, is found through Unwrap.
type responseWriter struct {
	caddyhttp.ResponseWriterWrapper
	record *record
	done   bool
}

// finish puts our fields in order, once.
func (rw *responseWriter) finish() {
	if !rw.done {
		rw.done = true
		h := rw.Header()
		rw.record.fields.keep(h)
		rw.record.fields.unannounce(h)
	}
}

// end is called when everything is written but the trailers. Those that were not
// announced have joined the header meanwhile.
func (rw *responseWriter) end() {
	rw.record.fields.dropTrailers(rw.Header())
}

// WriteHeader implements http.ResponseWriter. Informational responses are not
// the final one, though our fields stand alone there too; only switching
// protocols is.
func (rw *responseWriter) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		rw.finish()
	} else {
		rw.record.fields.keep(rw.Header())
	}
	rw.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (rw *responseWriter) Write(b []byte) (int, error) {
	rw.finish()
	return rw.ResponseWriter.Write(b)
}

// ReadFrom implements io.ReaderFrom, by which files are sent without copying.
func (rw *responseWriter) ReadFrom(r io.Reader) (int64, error) {
	rw.finish()
	return rw.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError flushes what was written, for http.ResponseController.
func (rw *responseWriter) FlushError() error {
	rw.finish()
	return http.NewResponseController(rw.ResponseWriter).Flush()
}

// Interface guards
var (
	_ http.ResponseWriter = (*responseWriter)(nil)
	_ http.Pusher         = (*responseWriter)(nil)
	_ io.ReaderFrom       = (*responseWriter)(nil)
)
