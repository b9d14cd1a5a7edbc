package settle

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/socket"
)

// settler is the writer of a response by which units are settled that its request holds.
type settler struct {
	caddyhttp.ResponseWriterWrapper
	request  *http.Request
	holdings []Holding
	early    bool         // whether the client had left before the request was passed on, and no handler had it since
	response              // its header, and what is counted, only at the end
	counted  *countedBody // the request's body if its length is wanted and not known; otherwise nil
	sent     atomic.Int64 // bytes of the body, or over its connection
}

// countedBody is the body of a request that does not say its length.
type countedBody struct {
	io.ReadCloser
	read atomic.Int64 // bytes
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read.Add(int64(n))
	return n, err
}

// hasLeft reports whether the client seems to have left.
func (s *settler) hasLeft() bool { return s.request.Context().Err() != nil }

// begin settles what the status and the header of the response decide, once. A handler's
// failure after the client has left is no response, nor is the status that says so, nor an
// error route's text where it is unknown what the response would have been; their bodies begin
// none either.
func (s *settler) begin(status int) {
	if s.state != pending {
		return
	}
	s.leavePlaces(status)
	switch {
	case s.early && (status == StatusClientLeft || s.unanswered(s.routedError())):
		s.state = unpassed
	case status == StatusClientLeft, status > StatusClientLeft && s.hasLeft(), s.unanswered(s.routedError()):
		s.state = unknown
	default:
		s.state, s.status = complete, status
		s.beginBody()
	}
}

// beginBody settles what the header of the response decides, and has the body read if a limit
// wants that.
func (s *settler) beginBody() {
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.clears(s.request.Context(), s.status, s.Header()) {
			continue
		}
		if charge, decided := h.byHeader(s.status, s.Header()); decided {
			h.Settle(charge)
		}
		if cost := h.Terms.Usage; cost != nil && h.Held != nil && s.body == nil && !s.upgrades(s.status) {
			s.body = cost.Plan().NewBody(s.Header())
		}
	}
}

// upgrades reports whether the connection, or the stream of it, carries another protocol than HTTP
// after a response with that status.
func (s *settler) upgrades(status int) bool {
	return status == http.StatusSwitchingProtocols || s.request.Method == http.MethodConnect
}

// unanswered reports whether err says that the request was passed on to a server whose
// answer is not known. Clients can cause such errors, by a body that breaks off, when they
// know from the silence that they guessed wrong.
func (s *settler) unanswered(err error) bool {
	if err == nil {
		return false
	}
	if errors.Is(err, context.Canceled) {
		return true
	}
	switch statusOf(err) {
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		// The error is of the last try of a proxy, and an upstream may have had the request before.
		retries, _ := s.request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Get("http.reverse_proxy.retries")
		var unreachable reverseproxy.DialError
		return !errors.As(err, &unreachable) || retries != nil && retries != 0
	case http.StatusRequestEntityTooLarge:
		return s.request.ContentLength < 0 // otherwise it was rejected before it was passed on
	case StatusClientLeft:
		return true
	}
	return false
}

// routedError returns the error that error routes within the next handlers have got, or nil.
func (s *settler) routedError() error {
	ctx := s.request.Context()
	if ctx.Value(caddyhttp.ErrorCtxKey) != nil {
		return nil // the request is in error routes itself
	}
	value, _ := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Get("http.error")
	err, _ := value.(error)
	return err
}

// statusOf returns the status of the response to a request that handlers failed with err.
func statusOf(err error) int {
	var failed caddyhttp.HandlerError
	switch {
	case err == nil:
		return http.StatusOK
	case errors.As(err, &failed) && failed.StatusCode != 0:
		return failed.StatusCode
	}
	return http.StatusInternalServerError
}

// end settles the rest when the handlers have returned err, or panicked. A request that
// was passed on and whose response is not known counts. If its client had left before that,
// a proxy does not send it, and says so by status 499 or nothing, and without an error.
func (s *settler) end(err error, panicked bool) {
	s.header, s.bytes, s.length, s.left = s.Header(), s.sent.Load(), s.request.ContentLength, s.hasLeft()
	if s.counted != nil {
		s.length = s.counted.read.Load()
	}
	if received, ok := caddyhttp.GetVar(s.request.Context(), "start_time").(time.Time); ok {
		s.took = time.Since(received)
	}
	failed := panicked || err != nil
	s.leaveAll(!failed && !s.left)
	switch {
	case s.state == complete && (failed || s.left):
		s.state = broken
	case s.state == unpassed && failed:
		s.state = unknown
	case s.state != pending:
	case panicked, s.unanswered(err):
		s.state = unknown
	case err != nil || !s.left:
		s.begin(statusOf(err))
	case s.early:
		s.state = unpassed
	default:
		s.state = unknown
	}
	if s.body != nil {
		s.body.End()
	}
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.Held == nil || s.state > upgraded && h.clears(s.request.Context(), s.status, s.header) {
			continue // its header has decided, or its trailer does
		}
		charge, why, known := h.atEnd(s.request, &s.response)
		if !known {
			h.Terms.Reporter.NoCost(h.Terms.ActualCost, h.Terms.Usage != nil, why, charge)
		}
		h.Settle(charge)
	}
}

// WriteHeader implements http.ResponseWriter. Informational responses are not final.
func (s *settler) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		s.begin(status)
	}
	s.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter. Over HTTP/2 a write that fails counts as a whole,
// since n says nothing then: a client that resets the stream after all but the last byte would
// get the rest of them for nothing.
func (s *settler) Write(b []byte) (int, error) {
	s.begin(http.StatusOK)
	n, err := s.ResponseWriter.Write(b)
	if s.body != nil {
		s.body.Write(b) // also what does not reach the client: it was made for it
	}
	sent := n
	if err != nil && s.request.ProtoMajor == 2 && !errors.Is(err, http.ErrBodyNotAllowed) {
		sent = len(b)
	}
	s.sent.Add(int64(sent))
	return n, err
}

// ReadFrom implements io.ReaderFrom, which lets files be sent without copying, but not over HTTP/2.
func (s *settler) ReadFrom(r io.Reader) (int64, error) {
	s.begin(http.StatusOK)
	if s.request.ProtoMajor == 2 || s.body != nil {
		return io.Copy(struct{ io.Writer }{s}, r)
	}
	n, err := s.ResponseWriterWrapper.ReadFrom(r)
	s.sent.Add(n)
	return n, err
}

// FlushError implements flushing for http.ResponseController.
func (s *settler) FlushError() error {
	s.begin(http.StatusOK)
	return http.NewResponseController(s.ResponseWriter).Flush()
}

// leavePlaces releases slots when the header of the response, with a status, is there. A limit
// until body releases it later, except for what need not end: upgraded connections, and events.
func (s *settler) leavePlaces(status int) {
	for i := range s.holdings {
		h := &s.holdings[i]
		if h.Place == nil {
			continue
		}
		answered := s.answers(h.Place.Load, status)
		isStream := s.upgrades(status) || strings.HasPrefix(strings.ToLower(s.Header().Get("Content-Type")), "text/event-stream")
		if h.Place.Load.UntilBody && !isStream {
			h.Place.answered = answered
			continue
		}
		h.Place.Release(answered)
		h.Place = nil
	}
}

// leaveAll releases the slots that are left at the end of a request, or when a handler takes its
// connection. Without a header they have not been answered.
func (s *settler) leaveAll(whole bool) {
	for i := range s.holdings {
		if h := &s.holdings[i]; h.Place != nil {
			h.Place.Release(whole && h.Place.answered)
			h.Place = nil
		}
	}
}

// answers reports whether the header of a response is an answer of the upstream: no failure,
// which may be fast because nothing was done, and, where an upstream is known to be behind
// reverse_proxy, not one of another handler.
func (s *settler) answers(l *Load, status int) bool {
	repl := s.request.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	_, proxied := repl.Get(latencyPlaceholder)
	if proxied && !l.proxied.Load() {
		l.proxied.Store(true)
	}
	return status < StatusClientLeft && status != http.StatusTooManyRequests && s.routedError() == nil && (proxied || !l.proxied.Load())
}

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
	if err != nil || !slices.ContainsFunc(s.holdings, func(h Holding) bool { return h.Terms.ActualCost == ActualBytes }) {
		return conn, buffered, err
	}
	conn = &countedConn{conn, &s.sent}
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
func (c *countedConn) CloseWrite() error { return socket.CloseWrite(c.Conn) }

// Pass passes a request on that holds units, and settles them, whatever its outcome.
func Pass(w http.ResponseWriter, r *http.Request, holdings []Holding, o *outcome.Outcome, next caddyhttp.Handler) (err error) {
	s := &settler{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, request: r, holdings: holdings}
	s.early = s.hasLeft()
	// What a request costs may be estimated by the length of its body, and clients choose whether they say it.
	if r.ContentLength < 0 && slices.ContainsFunc(holdings, func(h Holding) bool { return h.Terms.Usage != nil }) {
		s.counted = &countedBody{ReadCloser: r.Body}
		r.Body = s.counted
	}
	panicked := true
	defer func() { s.end(err, panicked) }()
	err = o.Serve(s, r, next)
	panicked = false
	return err
}

// Interface guards
var (
	_ http.ResponseWriter = (*settler)(nil)
	_ http.Pusher         = (*settler)(nil)
	_ io.ReaderFrom       = (*settler)(nil)
	_ http.Hijacker       = (*settler)(nil)
	_ io.ReaderFrom       = (*countedConn)(nil)
)
