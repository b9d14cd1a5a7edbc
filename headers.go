package ratelimit

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/field"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// What clients are told of a decision:
//
//	X-RateLimit-*, RateLimit, RateLimit-Policy   outcome.Outcome.Show, called by rule.Handler.Decide;
//	                                             the values are made in internal/outcome/fields.go
//	Retry-After of a denial                      the same, from the longest wait of all handlers
//	Retry-After without a decision (on_error)    reject
//	status, body, Cache-Control                  reject
//
// A handler within that changes fields of ours is corrected by outcome.Writer when the response begins.

// denial is the error of a request that a limit denied: the entry of that limit,
// and the wait that is in the response, 0 if none would help.
type denial struct {
	*outcome.Entry
	wait time.Duration
}

// Error returns the path of the limit, or the name of the zone, and the wait.
func (d denial) Error() string {
	if d.wait == 0 {
		return "rate limit " + d.Title + " exceeded: the request costs more than the limit holds"
	}
	return "rate limit " + d.Title + " exceeded: retry after " + fieldtext.WholeSeconds(d.wait) + " s"
}

// errNoDecision replaces errors other than denials, which error routes should not show to
// clients, as they may contain the store's address, for example. The reason is in the log.
var errNoDecision = errors.New("rate limits can't be checked for this request")

// reject rejects a request, by an error for error routes to handle. If none would
// handle it, the status is written directly, as the server would do: returning an
// error is more than twice as expensive.
//
// No cache may keep the response, whatever the site says of its others. Error routes
// may say otherwise of theirs.
func (h *Handler) reject(w http.ResponseWriter, r *http.Request, v *rule.Verdict) error {
	denied := v.Denial != nil
	switch {
	case denied && len(h.RateLimits) > 0:
		h.logExceeded(r, v)
	case !denied && v.Wait > 0:
		w.Header().Set("Retry-After", fieldtext.WholeSeconds(v.Wait))
	}
	setNoStore(w.Header())
	unreadBody := r.ContentLength != 0 && r.ProtoMajor == 1 && !field.ReadWhole(r.Body) // others have a stream for each request
	if unreadBody && !awaitBody(r) {
		closeAfterResponse(w)
	}
	if h.errorRoutes.MaySee(h, r, v.Status) {
		err := returnedError(v)
		if !denied && v.Status != http.StatusTooEarly {
			err = errNoDecision
		}
		return h.handlerError(v.Status, err)
	}
	if c := h.logger.Check(zap.DebugLevel, "request rejected"); c != nil {
		fields := []zap.Field{zap.Int("status", v.Status), zap.Error(returnedError(v))}
		if denied {
			fields = append(fields, zap.String("limit", v.Denial.Path), zap.Stringer("by", v.Denial.Decision.By))
		}
		c.Write(fields...)
	}
	if unreadBody { // and there are no error routes to read it
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
	}
	forceNoStore(w)
	if !denied || h.noBody {
		w.WriteHeader(v.Status)
		return nil
	}
	// What other handlers have said of their response does not hold for this one. Its
	// type comes from the server.
	for _, name := range [...]string{"Content-Type", "Content-Length", "Content-Encoding"} {
		if w.Header()[name] != nil {
			w.Header().Del(name)
		}
	}
	w.WriteHeader(v.Status)
	_, _ = w.Write(denial{v.Denial, v.Wait}.body()) // the client may be gone
	return nil
}

// returnedError returns why a request is rejected.
func returnedError(v *rule.Verdict) error {
	if v.Denial != nil {
		return denial{v.Denial, v.Wait}
	}
	return v.Err
}

// body returns the text of a response that no error route shapes (RFC 6585, section 4).
func (d denial) body() []byte {
	if d.wait == 0 {
		return []byte("Too many requests: this one costs more than its limit holds.\n")
	}
	why := "Too many requests"
	if d.Decision.By == limiter.DecidedByLoad {
		why = "Too busy"
	}
	b := append(append(make([]byte, 0, 48), why...), ". Retry after "...)
	return append(fieldtext.AppendWholeSeconds(b, d.wait), " s.\n"...)
}

const (
	// smallBody is the length up to which a body is expected to come with the header
	// of its request, in the first window of a TCP connection.
	smallBody = 14 << 10

	// bodyTime is for how long an unwanted body is read.
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

// forceNoStore repeats setNoStore when the header is written to w, beneath all that
// changes it on the way: a deferred `header` that lets pages be cached means no
// denials. Caddy has its IdleTimeoutWriter there, unless it is configured without.
func forceNoStore(w http.ResponseWriter) {
	changed := false
	for {
		switch wrapper := w.(type) {
		case *caddyhttp.IdleTimeoutWriter:
			if changed {
				wrapper.ResponseWriter = &noStoreWriter{caddyhttp.ResponseWriterWrapper{ResponseWriter: wrapper.ResponseWriter}}
			}
			return
		case caddyhttp.ResponseRecorder, *outcome.Writer: // do not change it
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

// handlerError returns err as Caddy's handlers do, with an ID and a trace. The
// trace is always the same, and computing it takes longer than all the rest.
func (h *Handler) handlerError(status int, err error) error {
	origin := h.origin.Load()
	if origin == nil {
		e := caddyhttp.Error(status, err)
		h.origin.Store(&e.Trace)
		return e
	}
	return caddyhttp.HandlerError{Err: err, StatusCode: status, ID: newErrorID(), Trace: *origin}
}

// newErrorID returns an ID like those of Caddy's errors.
func newErrorID() string {
	const chars = "abcdefghijkmnpqrstuvwxyz23456789" // 32 that look distinct
	var id [9]byte
	bits := rand.Uint64() //nolint:gosec // not a secret
	for i := range id {
		id[i] = chars[bits%32]
		bits /= 32
	}
	return string(id[:])
}

// logExceeded logs that a zone has denied a request, and the wait in the response.
func (h *Handler) logExceeded(r *http.Request, v *rule.Verdict) {
	c := h.logger.Check(zap.InfoLevel, "rate limit exceeded")
	if c == nil {
		return
	}
	address, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		address = r.RemoteAddr
	}
	fields := []zap.Field{zap.String("zone", v.Denial.Title), zap.Duration("wait", v.Wait), zap.String("remote_ip", address)}
	if h.LogKey {
		key, template := v.Key, h.RateLimits[v.Denial.Title].Key
		if template == "" || strings.Count(template, "{") > 1 { // the text between several placeholders counts too
			key = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).ReplaceAll(template, "")
		}
		fields = append(fields, zap.String("key", keytext.Of(key)))
	}
	c.Write(fields...)
}
