package ratelimit

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// getOverTLS has s answer a GET request over TLS, whose handshake is complete or
// not yet, with a key in X-Key unless it is empty.
func getOverTLS(s *server, complete bool, key string) answer {
	s.t.Helper()
	r := httptest.NewRequest("GET", "https://"+s.addr+"/", nil)
	r.TLS = &tls.ConnectionState{HandshakeComplete: complete}
	if key != "" {
		r.Header.Set("X-Key", key)
	}
	w := httptest.NewRecorder()
	activeServer(s.t).ServeHTTP(w, received(r))
	return answer{w.Result(), w.Body.String()}
}

// TestEarlyData guards that before a handshake is complete no address counts:
// such a request may be replayed by anyone. The client is asked to retry it, and
// nobody is charged.
func TestEarlyData(t *testing.T) {
	for _, tc := range []struct {
		key    string
		header string
		want   string
	}{
		{"{client_ip}", "", "425"},
		{"{remote_host}", "", "425"},
		{"{http.request.remote}", "", "425"},
		{"{http.request.remote.host/24}", "", "425"},
		{"{header.X-Key}-{client_ip}", "a", "425"},
		{"{header.X-Key}", "", "425"},
		{"{header.X-Key}", "a", "200 limit=3 remaining=2 clear=1.000"},
		{"everyone", "", "200 limit=3 remaining=2 clear=1.000"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			s := startSite(t, `
				rate_limit {
					limit all {
						key all
						size 5
					}
					limit one {
						key `+tc.key+`
						size 3
					}
				}
				handle_errors {
					respond "{err.message}"
				}
				respond "admitted"
			`)
			early := getOverTLS(s, false, tc.header)
			if early.String() != tc.want {
				t.Errorf("got %s, want %s", early, tc.want)
			}
			if tc.want != "425" {
				return
			}
			if !strings.Contains(early.body, "handshake") {
				t.Errorf("the error says %q", early.body)
			}
			if got, want := getOverTLS(s, true, tc.header).String(), "200 limit=3 remaining=2 clear=1.000"; got != want {
				t.Errorf("when it comes again: got %s, want %s", got, want)
			}
		})
	}
}

// TestMatcherErrors guards that an error of a matcher is not taken for an answer:
// that of remote_ip, before a handshake is complete, is a 425 of its own.
func TestMatcherErrors(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			key everyone
			match remote_ip 192.0.2.0/24
			size 3
		}
		respond "admitted"
	`)
	for complete, want := range map[bool]string{false: "425", true: "200 limit=3 remaining=2 clear=1.000"} {
		if got := getOverTLS(s, complete, "").String(); got != want {
			t.Errorf("handshake complete %t: got %s, want %s", complete, got, want)
		}
	}
}

// Guards that an address that anyone may have forged is not relied on: while
// the TLS handshake is incomplete a request whose key needs one is answered
// 425, and any other is not.
func TestKeyInEarlyData(t *testing.T) {
	tests := []struct {
		name, key string
		values    map[string]string
		refused   bool
	}{
		{"client address", "{http.vars.client_ip}", nil, true},
		{"short name", "{client_ip}", nil, true},
		{"remote address", "{http.request.remote.host}", nil, true},
		{"prefix of the remote address", "{http.request.remote.host/24,64}", nil, true},
		{"remote address with its port", "{http.request.remote}", nil, true},
		{"remote port", "{http.request.remote.port}", nil, true},
		{"address among others", "{a} {client_ip}", map[string]string{"a": "x"}, true},
		{"address that stands in for a key", "{a}", nil, true},
		{"default key", "", nil, true},
		{"header", "{a}", map[string]string{"a": "x"}, false},
		{"header that holds an address", "{a}", map[string]string{"a": "192.0.2.1"}, false},
		{"host", "{http.request.host}", nil, false},
		{"static", "everyone", nil, false},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			for _, state := range []*tls.ConnectionState{nil, {HandshakeComplete: true}, {}} {
				early := state != nil && !state.HandshakeComplete
				l, _ := readyLimit(t, &Limit{Key: tc.key, Size: "1"})
				c := newTestEvaluation()
				c.request.TLS = state
				for name, v := range tc.values {
					c.replacer.Set(name, v)
				}
				err := l.addTo(c)
				if !early || !tc.refused {
					if err != nil || len(c.buckets) != 1 {
						t.Errorf("TLS %+v: got buckets %+v, %v, want one", state, c.buckets, err)
					}
					continue
				}
				ref, ok := errors.AsType[refusal](err)
				const want = "TLS handshake not complete, the client's address cannot be verified"
				if !ok || ref.status != http.StatusTooEarly || ref.Error() != want || len(c.buckets) != 0 {
					t.Errorf("in early data got buckets %+v, %v, want status 425", c.buckets, err)
				}
			}
		})
	}
}

// Guards that a limit which does not apply needs no address either.
func TestKeyInEarlyDataOutsideMatch(t *testing.T) {
	var l Limit
	if err := json.Unmarshal([]byte(`{"size":1,"match":[{"path":["/api/*"]}]}`), &l); err != nil {
		t.Fatal(err)
	}
	readyLimit(t, &l)
	c := newTestEvaluation()
	c.request.TLS = new(tls.ConnectionState)
	if err := l.addTo(c); err != nil || len(c.buckets) != 0 {
		t.Errorf("got buckets %+v, %v, want none", c.buckets, err)
	}
}
