package outcome

import (
	"io"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Serve passes a request on, and keeps the values of others out of the header fields of its
// outcome, if it has any.
func (o *Outcome) Serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if o == nil {
		return next.ServeHTTP(w, r)
	}
	w = o.Wrap(w)
	err := next.ServeHTTP(w, r)
	if rw, ok := w.(*Writer); ok {
		rw.CleanTrailers()
	}
	return err
}

// isWrapped reports whether w wraps a Writer.
func isWrapped(w http.ResponseWriter) bool {
	for {
		if _, ok := w.(*Writer); ok {
			return true
		}
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return false
		}
		w = wrapper.Unwrap()
	}
}

// Writer removes values that others added to our fields just before the
// header is written. Other features of the underlying writer, such as hijacking,
// are available through Unwrap.
type Writer struct {
	caddyhttp.ResponseWriterWrapper
	outcome *Outcome
	cleaned bool
	written int32 // the number of fields in the header when it was written
}

// cleanHeader removes foreign values and announced trailers from the header, once.
func (rw *Writer) cleanHeader() {
	if !rw.cleaned {
		rw.cleaned = true
		h := rw.Header()
		rw.outcome.fields.dropForeign(h)
		rw.outcome.fields.dropAnnounced(h)
		rw.written = int32(len(h))
	}
}

// CleanTrailers must be called when everything but the trailers is written. It
// removes ours from those that were not announced, which a proxy has added to the header
// by now. Most responses have none, and to look at each field takes a while.
func (rw *Writer) CleanTrailers() {
	h := rw.Header()
	if rw.cleaned && len(h) == int(rw.written) {
		return
	}
	rw.cleanHeader() // it may not have been written explicitly
	rw.outcome.fields.dropTrailers(h)
}

// WriteHeader implements http.ResponseWriter. An informational response is not
// the final one, unless it switches protocols, but its fields are cleaned too.
func (rw *Writer) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		rw.cleanHeader()
	} else {
		rw.outcome.fields.dropForeign(rw.Header())
	}
	rw.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (rw *Writer) Write(b []byte) (int, error) {
	rw.cleanHeader()
	return rw.ResponseWriter.Write(b)
}

// ReadFrom implements io.ReaderFrom, which lets files be sent without copying.
func (rw *Writer) ReadFrom(r io.Reader) (int64, error) {
	rw.cleanHeader()
	return rw.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError implements flushing for http.ResponseController.
func (rw *Writer) FlushError() error {
	rw.cleanHeader()
	return http.NewResponseController(rw.ResponseWriter).Flush()
}

// Interface guards
var (
	_ http.ResponseWriter = (*Writer)(nil)
	_ http.Pusher         = (*Writer)(nil)
	_ io.ReaderFrom       = (*Writer)(nil)
)
