package sitetest

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
)

// URL returns the URL of a path of the site.
func (s *Site) URL(path string) string { return "http://" + s.Addr + path }

// Get sends a GET request for path, with header fields as "Name: value".
func (s *Site) Get(path string, header ...string) Answer {
	s.t.Helper()
	return s.Send("GET", path, header...)
}

// GetWithHints is Get, and returns the informational responses too: the status,
// the field Link and our fields of each.
func (s *Site) GetWithHints(path string) (hints []string, final Answer) {
	s.t.Helper()
	ctx := httptrace.WithClientTrace(s.t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			hints = append(hints, fmt.Sprint(code, " ", header.Get("Link"), " ", fieldstest.In(http.Header(header))))
			return nil
		},
	})
	final = s.sendContext(ctx, "GET", path)
	return hints, final
}

// Send sends a request and returns the whole answer.
func (s *Site) Send(method, path string, header ...string) Answer {
	s.t.Helper()
	return s.sendContext(s.t.Context(), method, path, header...)
}

// sendContext is Send with a context.
func (s *Site) sendContext(ctx context.Context, method, path string, header ...string) Answer {
	s.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, s.URL(path), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		if name == "Host" {
			req.Host = value
		} else {
			req.Header.Add(name, value)
		}
	}
	return s.Do(req)
}

// Do sends a request and returns the whole answer.
func (s *Site) Do(req *http.Request) Answer {
	s.t.Helper()
	answer := do(s.t, s.Client, req)
	s.Requests.Add(1)
	return answer
}

// do sends a request and returns the whole answer.
func do(t testing.TB, client *http.Client, req *http.Request) Answer {
	t.Helper()
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return Answer{res, string(body)}
}

// Statuses sends n requests and returns how many got which status.
func (s *Site) Statuses(n int, method, path string, header ...string) string {
	s.t.Helper()
	counts := make(map[int]int)
	for range n {
		counts[s.Send(method, path, header...).StatusCode]++
	}
	return fmt.Sprint(counts)
}

// From makes s send from another loopback address, as another client would.
func (s *Site) From(address string) {
	s.t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	s.Client.CloseIdleConnections()
	s.Client.Transport = &http.Transport{DisableCompression: true, DialContext: dialer.DialContext}
}

// UseHTTP2 makes s send over HTTP/2 without TLS, for a server with protocol h2c.
func (s *Site) UseHTTP2() {
	transport := s.Client.Transport.(*http.Transport)
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
}

// Answer is a response and its body.
type Answer struct {
	*http.Response
	Text string
}

// String returns the status and our fields, such as
// "200 limit=2 remaining=1 clear=1.000".
func (a Answer) String() string {
	return strings.TrimSpace(fmt.Sprint(a.StatusCode, " ", fieldstest.In(a.Header)))
}

// Step is one request of a test, and the response that it should get.
type Step struct {
	After  time.Duration // by which the clock moves before
	Method string        // GET if empty
	Path   string        // / if empty
	Header []string      // fields as "Name: value"
	Want   string        // as Answer.String has it
	Text   string        // if not empty, the whole body
}

// Run takes the steps one by one.
func (s *Site) Run(steps ...Step) {
	s.t.Helper()
	for i, st := range steps {
		s.Clock.Advance(st.After)
		a := s.Send(cmp.Or(st.Method, "GET"), cmp.Or(st.Path, "/"), st.Header...)
		if a.String() != st.Want {
			s.t.Errorf("step %d: %s%s %q:\n got %s\nwant %s", i+1, st.Method, st.Path, st.Header, a, st.Want)
		}
		if st.Text != "" && a.Text != st.Text {
			s.t.Errorf("step %d: %s%s %q:\n got body %q\nwant body %q",
				i+1, st.Method, st.Path, st.Header, a.Text, st.Text)
		}
	}
}

// Times returns n steps like st.
func Times(n int, st Step) []Step {
	steps := make([]Step, n)
	for i := range steps {
		steps[i] = st
	}
	return steps
}

// PlainDenial is the body of a denial that no error route handles, for a second to wait.
const PlainDenial = "Too many requests. Retry after 1 s.\n"

// Dial opens a connection to a server, until the test ends.
func Dial(t testing.TB, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(Patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// Ask sends a request on a connection of its own and returns the status and the whole
// answer's fields, or 0 if there is none.
func Ask(ctx context.Context, target string, header ...string) (int, http.Header) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return 0, nil
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return 0, nil
	}
	defer res.Body.Close()
	_, _ = io.Copy(io.Discard, res.Body)
	return res.StatusCode, res.Header
}
