package ratelimit

import (
	"crypto/tls"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/quic-go/quic-go/http3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// from makes s send from another loopback address, as another client would.
func (s *server) from(address string) {
	s.t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	s.client.CloseIdleConnections()
	s.client.Transport = &http.Transport{DisableCompression: true, DialContext: dialer.DialContext}
}

// TestVirtualRequests guards that the requests which Caddy makes itself, for a
// template that includes other pages, are charged to nobody, and that clients
// can't pass theirs off as such.
func TestVirtualRequests(t *testing.T) {
	dir := tempDir(t)
	page := []byte(`{{httpInclude "/part"}} and {{httpInclude "/part"}}`)
	if err := os.WriteFile(filepath.Join(dir, "page.html"), page, 0o600); err != nil {
		t.Fatal(err)
	}
	s := startSite(t, `
		rate_limit {
			size 1
			drip_rate 1h
		}
		root `+dir+`
		templates
		respond /part "part"
		file_server
	`)
	const (
		admitted = "200 limit=1 remaining=0 clear=3600.000"
		denied   = "429 limit=1 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600"
	)
	for _, client := range []string{"127.0.0.2", "127.0.0.3"} {
		s.from(client)
		s.run(
			step{path: "/page.html", want: admitted, body: "part and part"},
			step{path: "/page.html", want: denied},
			step{path: "/part", header: []string{"Caddy-Templates-Include: 1"}, want: denied},
		)
	}
	// The address that virtual requests come from has its bucket for itself.
	s.from("127.0.0.1")
	s.run(
		step{path: "/part", header: []string{"Caddy-Templates-Include: 1"}, want: admitted, body: "part"},
		step{path: "/part", header: []string{"Caddy-Templates-Include: 1"}, want: denied},
	)
	if lines := s.log("error", ""); len(lines) > 0 {
		t.Errorf("got %v, want no error in the log", lines)
	}
}

// TestProtocols guards that what comes over a connection is limited, whatever
// version of HTTP it speaks, with TLS or without.
func TestProtocols(t *testing.T) {
	addr := redistest.FreeAddr(t)
	s := startConfig(t, config{
		global: "servers {\nprotocols h1 h2 h2c h3\n}\nauto_https disable_redirects\nskip_install_trust",
		site:   "rate_limit {\nkey {http.request.proto}\nsize 1\n}\nrespond admitted",
		sites: "https://" + addr + ` {
			tls internal
			rate_limit {
				key {http.request.proto}-tls
				size 1
			}
			respond admitted
		}`,
	})
	trusting := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // a certificate of this test
	eventually(t, "a certificate", func() bool {
		conn, err := tls.Dial("tcp", addr, trusting)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	only := func(set func(*http.Protocols)) *http.Transport {
		transport := &http.Transport{TLSClientConfig: trusting.Clone(), Protocols: new(http.Protocols)}
		set(transport.Protocols)
		return transport
	}
	h3 := &http3.Transport{TLSClientConfig: trusting.Clone()}
	t.Cleanup(func() { h3.Close() })
	for _, tc := range []struct {
		name, url, proto string
		transport        http.RoundTripper
	}{
		{"HTTP/1.1", s.url("/"), "HTTP/1.1", only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP/1.1 with TLS", "https://" + addr, "HTTP/1.1", only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP/2", s.url("/"), "HTTP/2.0", only(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })},
		{"HTTP/2 with TLS", "https://" + addr, "HTTP/2.0", only(func(p *http.Protocols) { p.SetHTTP2(true) })},
		{"HTTP/3", "https://" + addr, "HTTP/3.0", h3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			client := &http.Client{Transport: tc.transport, Timeout: patience}
			defer client.CloseIdleConnections()
			for i, want := range []string{
				"200 limit=1 remaining=0 clear=1.000",
				"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1",
			} {
				res, err := client.Get(tc.url)
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				if got := (answer{Response: res}).String(); got != want || res.Proto != tc.proto {
					t.Errorf("request %d: got %s over %s, want %s over %s", i+1, got, res.Proto, want, tc.proto)
				}
			}
		})
	}
}
