package behaviour

import (
	"crypto/tls"
	"net/http/httptest"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// getOverTLS has s answer a GET request over TLS, whose handshake is complete or
// not yet, with a key in X-Key unless it is empty.
func getOverTLS(t testing.TB, s *sitetest.Site, complete bool, key string) sitetest.Answer {
	t.Helper()
	r := httptest.NewRequest("GET", "https://"+s.Addr+"/", nil)
	r.TLS = &tls.ConnectionState{HandshakeComplete: complete}
	if key != "" {
		r.Header.Set("X-Key", key)
	}
	w := httptest.NewRecorder()
	s.Server().ServeHTTP(w, sitetest.Received(r))
	return sitetest.Answer{Response: w.Result(), Text: w.Body.String()}
}

// TestEarlyData guards that before a handshake is complete no address counts:
// such a request may be replayed by anyone. The client has to retry it, and
// no bucket is charged. Where no address is needed the request is answered.
func TestEarlyData(t *testing.T) {
	const (
		late  = "200 limit=3 remaining=2 clear=1.000"
		early = "425"
	)
	for _, tc := range []struct {
		options string
		header  string
		want    string
	}{
		{"key {client_ip}", "", early},
		{"key {http.vars.client_ip}", "", early},
		{"key {remote_host}", "", early},
		{"key {http.request.remote}", "", early},
		{"key {http.request.remote.port}", "", early},
		{"key {http.request.remote.host/24}", "", early},
		{"key {http.request.remote.host/24,64}", "", early},
		{`key "{header.X-Key} {client_ip}"`, "a", early},
		{"key {header.X-Key}", "", early},
		{"", "", early}, // the default
		{"key {header.X-Key}", "a", late},
		{"key {header.X-Key}", "192.0.2.1", late},
		{"key {host}", "", late},
		{"key everyone", "", late},
		{"match /api/*", "", late},
	} {
		t.Run(tc.options+" "+tc.header, func(t *testing.T) {
			s := sitetest.Start(t, `
				rate_limit {
					limit all {
						key all
						size 3
					}
					limit one {
						`+tc.options+`
						size 3
					}
				}
				handle_errors {
					respond "{err.message}"
				}
				respond "admitted"
			`)
			a := getOverTLS(t, s, false, tc.header)
			if a.String() != tc.want {
				t.Errorf("got %s, want %s", a, tc.want)
			}
			if tc.want != early {
				return
			}
			if want := "TLS handshake not complete, the client's address cannot be verified"; a.Text != want {
				t.Errorf("got %q, want %q", a.Text, want)
			}
			if got := getOverTLS(t, s, true, tc.header).String(); got != late {
				t.Errorf("when it comes again: got %s, want %s", got, late)
			}
		})
	}
}

// TestMatcherErrors guards that an error of a matcher is not taken for an answer:
// that of remote_ip, before a handshake is complete, is a 425 of its own.
func TestMatcherErrors(t *testing.T) {
	s := sitetest.Start(t, `
		rate_limit {
			key everyone
			match remote_ip 192.0.2.0/24
			size 3
		}
		respond "admitted"
	`)
	for complete, want := range map[bool]string{false: "425", true: "200 limit=3 remaining=2 clear=1.000"} {
		if got := getOverTLS(t, s, complete, "").String(); got != want {
			t.Errorf("handshake complete %t: got %s, want %s", complete, got, want)
		}
	}
}

// TestRefusedAs guards which refusals before a handshake is complete count as early data: those of
// a key, and not those of a matcher, which may have failed for any reason.
func TestRefusedAs(t *testing.T) {
	for limit, want := range map[string]telemetry.Checked{
		"key {client_ip}":                            telemetry.CheckedEarlyData,
		"key everyone\ncost {query.n}":               telemetry.CheckedRefused,
		"key everyone\nmatch remote_ip 192.0.2.0/24": telemetry.CheckedRefused,
	} {
		t.Run(limit, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nsize 3\n"+limit+"\n}\nrespond admitted")
			getOverTLS(t, s, false, "")
			for result, n := range s.Process.Requests() {
				if (n == 1) != (result == want) || n > 1 {
					t.Errorf("%d counted as %v, want one as %v", n, result, want)
				}
			}
		})
	}
}
