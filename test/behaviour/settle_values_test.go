package behaviour

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// sentField is a field of a header as it is sent, byte for byte.
type sentField struct{ name, value string }

// sender sends a request with fields and, unless body is empty, with that and no length,
// and returns the status and the header of the response.
type sender func(t *testing.T, method string, fields []sentField, body string) (status string, header http.Header)

// startAllVersions runs a site for HTTP/1.1 and 2 without TLS and, at the address that it returns, for all
// versions with a certificate of roots.
func startAllVersions(t *testing.T, site string) (s *sitetest.Site, tlsAddr string, roots *x509.CertPool) {
	t.Helper()
	tlsAddr = redistest.FreeAddr(t)
	authority := redistest.NewAuthority(t)
	cert, key := authority.Issue(t, "localhost")
	s = sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2 h2c h3\n}\nauto_https disable_redirects",
		Site:   site,
		Sites:  "https://" + tlsAddr + " {\ntls " + cert + " " + key + "\n" + site + "\n}",
	})
	return s, tlsAddr, authority.Pool()
}

// eachProtocol calls do with a sender of each version of HTTP, each to a Caddy of its own.
func eachProtocol(t *testing.T, site string, do func(t *testing.T, send sender)) {
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2", "HTTP/3"} {
		t.Run(protocol, func(t *testing.T) {
			if protocol == "HTTP/3" {
				sitetest.OverHTTP3(t)
			}
			s, addr, roots := startAllVersions(t, site)
			switch protocol {
			case "HTTP/1.1":
				do(t, func(t *testing.T, method string, fields []sentField, body string) (string, http.Header) {
					return sendHTTP1(t, s.Addr, method, fields, body)
				})
			case "HTTP/2":
				do(t, func(t *testing.T, method string, fields []sentField, body string) (string, http.Header) {
					return sendHTTP2(t, s.Addr, method, fields, body)
				})
			default:
				h3 := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
				defer h3.Close()
				do(t, func(t *testing.T, method string, fields []sentField, body string) (string, http.Header) {
					return sendHTTP3(t, h3, "https://"+addr, method, fields, body)
				})
			}
		})
	}
}

// sendHTTP1 is a sender over HTTP/1.1.
func sendHTTP1(t *testing.T, addr, method string, fields []sentField, body string) (string, http.Header) {
	t.Helper()
	conn := sitetest.Dial(t, addr)
	defer conn.Close()
	fmt.Fprintf(conn, "%s / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n", method, addr)
	for _, f := range fields {
		fmt.Fprintf(conn, "%s:%s\r\n", f.name, f.value)
	}
	if body != "" {
		fmt.Fprintf(conn, "Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n", len(body), body)
	}
	fmt.Fprint(conn, "\r\n")
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(res.StatusCode), res.Header
}

// openStream sends the header of a request in stream 1 of a connection of HTTP/2 with
// settings, and returns its frames.
func openStream(t *testing.T, addr, method, path string, fields []sentField, end bool, settings ...http2.Setting) *http2.Framer {
	t.Helper()
	conn := sitetest.Dial(t, addr)
	io.WriteString(conn, http2.ClientPreface)
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	framer.WriteSettings(settings...)
	framer.WriteWindowUpdate(0, 1<<20)
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, f := range append([]sentField{{":method", method}, {":scheme", "http"}, {":authority", addr}, {":path", path}}, fields...) {
		encoder.WriteField(hpack.HeaderField{Name: strings.ToLower(f.name), Value: f.value})
	}
	framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: end})
	return framer
}

// sendHTTP2 is a sender over HTTP/2, by frames, since a client would not send all of them.
func sendHTTP2(t *testing.T, addr, method string, fields []sentField, body string) (string, http.Header) {
	t.Helper()
	framer := openStream(t, addr, method, "/", fields, body == "")
	for sent := 0; sent < len(body); sent += 16000 {
		end := min(sent+16000, len(body))
		framer.WriteData(1, end == len(body), []byte(body[sent:end]))
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		switch frame := frame.(type) {
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			t.Fatalf("got %v", frame)
		case *http2.MetaHeadersFrame:
			if frame.PseudoValue("status") == "100" {
				continue
			}
			header := make(http.Header)
			for _, f := range frame.RegularFields() {
				header.Add(f.Name, f.Value)
			}
			return frame.PseudoValue("status"), header
		}
	}
}

// sendHTTP3 is a sender over HTTP/3.
func sendHTTP3(t *testing.T, h3 *http3.Transport, url, method string, fields []sentField, body string) (string, http.Header) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sitetest.Patience)
	defer cancel()
	var reader io.Reader
	if body != "" {
		reader = struct{ io.Reader }{strings.NewReader(body)} // of unknown length
	}
	req, err := http.NewRequestWithContext(ctx, method, url, reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fields {
		name := http.CanonicalHeaderKey(f.name)
		req.Header[name] = append(req.Header[name], f.value)
	}
	res, err := h3.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	return fmt.Sprint(res.StatusCode), res.Header
}

// TestWhiteSpaceAroundFields guards that white space around the value of a header field
// makes no other key, number or ban: it is no part of the value (RFC 9110, section 5.5),
// and an upstream over HTTP/1 does not see it. A value of nothing else is a missing one.
func TestWhiteSpaceAroundFields(t *testing.T) {
	key := func(values ...string) (fields []sentField) {
		for _, v := range values {
			fields = append(fields, sentField{"x-key", v})
		}
		return fields
	}
	same := [][]sentField{key("k"), key(" k"), key("k "), key("\tk"), key(" \t k\t \t")}
	missing := [][]sentField{nil, key(""), key(" "), key(" \t"), key("", "\t")}
	for _, tc := range []struct {
		name, before, limit string
		requests            [][]sentField
		want                string // how much each leaves of the 9, or its status
	}{
		{"key", "", "key {header.X-Key}\nsize 9", append(same, missing...), "8 7 6 5 4 8 7 6 5 4"},
		{"first of several", "", "key {header.X-Key}\nsize 9",
			[][]sentField{key("k"), key("k", "z"), key(" ", "k"), key("\tk", "k"), key("z", "k"), key("k, z"), key("k, z ")}, "8 7 6 5 8 8 7"},
		{"key of several", "", "key {header.X-Key}-{header.X-Other}\nsize 9", append(same, missing...), "8 7 6 5 4 8 7 6 5 4"},
		{"key behind text", "", "key a-{header.X-Key}\nsize 9", append(same, missing...), "8 7 6 5 4 8 7 6 5 4"},
		{"address", "", "key {header.X-Key}\nsize 9", [][]sentField{key("192.0.2.1"), key(" 192.0.2.1"), key("::ffff:192.0.2.1 ")}, "8 7 6"},
		{"variable", "vars name {header.X-Key}", "key {vars.name}\nsize 9", append(same, missing[:4]...), "8 7 6 5 4 8 7 6 5"},
		{"capture", "@name header_regexp name X-Key (.*)\nvars @name found 1", "key {re.name.1}\nsize 9", same, "8 7 6 5 4"},
		{"pattern of a matcher", "", "match header_regexp X-Key ^\\s*k\\s*$\nkey all\nsize 9", same, "8 7 6 5 4"},
		{"all but what a matcher exempts", "", "match not header X-Key k\nkey all\nsize 9", [][]sentField{key("k"), key("z"), nil}, "200 8 7"},
		{"cost", "", "key all\nsize 9\ncost {header.X-Key}",
			[][]sentField{key("2"), key(" 2"), key("2\t"), key("2", "3"), key(" "), nil}, "7 5 3 400 400 400"},
		{"size", "", "key all\nsize {header.X-Key}", [][]sentField{key("9"), key(" 9"), key("\t9 ")}, "8 7 6"},
		{"factor", "", "key all\nsize 18\nfactor {header.X-Key}", [][]sentField{key("2"), key(" 2"), key("2\t")}, "8 7 6"},
		{"ban", "", "key {header.X-Key}\nsize 2\nban 1h", [][]sentField{key("k"), key("\tk"), key("k"), key("k "), key(" k"), key("z")}, "1 0 429 429 429 1"},
		{"zone", "", "", append(same, missing[:4]...), "200 200 200 429 429 200 200 200 429"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			site := tc.before + "\nrate_limit test {\ndrip_rate 1h\n" + tc.limit + "\n}\nrespond admitted"
			if tc.name == "zone" {
				site = "rate_limit {\nzone test {\nkey {header.X-Key}\nevents 3\nwindow 1h\n}\n}\nrespond admitted"
			}
			site = "route {\n" + site + "\n}"
			eachProtocol(t, site, func(t *testing.T, send sender) {
				var got []string
				for _, fields := range tc.requests {
					status, header := send(t, "GET", fields, "")
					if status == "200" {
						status = cmp.Or(header.Get("x-ratelimit-remaining"), status)
					}
					got = append(got, status)
				}
				if got := strings.Join(got, " "); got != tc.want {
					t.Errorf("requests %q leave %s, want %s", tc.requests, got, tc.want)
				}
			})
		})
	}
}

// TestWhiteSpaceInResponses guards that white space around fields of a response neither
// hides that it counts nor what it cost.
func TestWhiteSpaceInResponses(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "route {\nrate_limit count {\nkey all\nsize 9\ndrip_rate 1h\ncount header X-Login failed\n}\n"+
		"rate_limit cost {\nkey all\nsize 99\ndrip_rate 1h\nactual_cost {http.response.header.X-Cost}\n}\n"+
		"header X-Login \"\tfailed \"\nheader X-Cost \" 7\t\"\nrespond ok\n}")
	s.Get("/")
	if got := level(t, s, "count"); got.Units != 1 {
		t.Errorf("got %+v, want the response counted", got)
	}
	if got := level(t, s, "cost"); got.Units != 7 {
		t.Errorf("got %+v, want 7 units", got)
	}
}

// TestBodyOfUnknownLength guards that a body of unknown length passes no limit by
// it, however it is sent, and that a request without a body needs no length.
func TestBodyOfUnknownLength(t *testing.T) {
	const site = "rate_limit upload {\nkey all\nsize 1000\ndrip_rate 1h\ncost body\n}\nrespond ok"
	eachProtocol(t, site, func(t *testing.T, send sender) {
		for i, tc := range []struct {
			method string
			fields []sentField
			body   string
			want   string
		}{
			{"GET", nil, "", "200 999"},
			{"POST", []sentField{{"content-length", "0"}}, "", "200 998"},
			{"POST", nil, "x", "411 "},
			{"GET", nil, strings.Repeat("x", 40_000), "411 "},
			{"POST", []sentField{{"expect", "100-continue"}}, "x", "411 "},
			{"DELETE", nil, "", "200 997"},
		} {
			status, header := send(t, tc.method, tc.fields, tc.body)
			if got := status + " " + header.Get("x-ratelimit-remaining"); got != tc.want {
				t.Errorf("request %d, %s %v with %d bytes: got %s, want %s", i, tc.method, tc.fields, len(tc.body), got, tc.want)
			}
		}
	})
}

// TestStalledBodyOfUnknownLength guards that a stream which neither ends nor sends a body is
// answered, as its client may wait for that, and that what a dry run passes on then is whole.
func TestStalledBodyOfUnknownLength(t *testing.T) {
	const numbers = "{\nkey all\nsize 1000\ndrip_rate 1h\ncost body\n"
	s := startLeavingSite(t, "route {\nrate_limit /limited upload "+numbers+"}\nrate_limit /dry {\nlimit one "+numbers+"dry_run\n}\n"+
		"limit two "+numbers+"dry_run\n}\n}\nheader X-Dry {http.rate_limit.dry_run}\nheader X-Body \"{http.request.body}\"\nrespond ok\n}")
	for _, version := range []int{2, 3} {
		for path, want := range map[string]string{"/limited": "411  ", "/dry": "200 one whole"} {
			t.Run(fmt.Sprint(version, path), func(t *testing.T) {
				if version == 3 {
					sitetest.OverHTTP3(t)
				}
				target, transport := s.streams(version)
				defer transport.CloseIdleConnections()
				body, w := io.Pipe()
				defer w.Close()
				if path == "/dry" {
					time.AfterFunc(time.Second, func() { _, _ = io.WriteString(w, "whole"); w.Close() })
				}
				ctx, cancel := context.WithTimeout(t.Context(), sitetest.Patience)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, target+path, body)
				if err != nil {
					t.Fatal(err)
				}
				res, err := transport.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				if got := fmt.Sprint(res.StatusCode, " ", res.Header.Get("X-Dry"), " ", res.Header.Get("X-Body")); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			})
		}
	}
}

// TestDryRunOfBodies guards that a dry run rejects no body of unknown length, and takes
// nothing of it, but tells that it would.
func TestDryRunOfBodies(t *testing.T) {
	const site = "rate_limit upload {\nkey all\nsize 1000\ndrip_rate 1h\ncost body\ndry_run\n}\n" +
		"header X-Dry {http.rate_limit.dry_run}\nheader X-Body \"{http.request.body}\"\nrespond ok"
	eachProtocol(t, "route {\n"+site+"\n}", func(t *testing.T, send sender) {
		for body, want := range map[string]string{"": "200  ", "whole": "200 upload whole"} {
			status, header := send(t, "POST", nil, body)
			if got := status + " " + header.Get("x-dry") + " " + header.Get("x-body"); got != want {
				t.Errorf("with body %q: got %q, want %q", body, got, want)
			}
		}
	})
}
