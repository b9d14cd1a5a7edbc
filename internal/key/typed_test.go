package key

import (
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// newTestKey parses a template with the default prefix lengths.
func newTestKey(t testing.TB, template string) *Key {
	t.Helper()
	k, err := Parse("key", template, clientip.Prefixes{IPv4: 24, IPv6: 64})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestTypedKeyIsExpandedKey guards that a key that is typed is the one that a
// request's bucket has, for templates and values of all kinds, and that the list of
// keys shows the values that were sent.
func TestTypedKeyIsExpandedKey(t *testing.T) {
	t.Parallel()
	templates := []string{
		"{client_ip}", "{http.request.header.A}", "{http.request.header.A}{http.request.header.B}",
		"a-{http.request.header.A}", "{http.request.header.A}-b", "a-{http.request.header.A}-b",
		"{http.request.header.A}|{client_ip}|{http.request.header.B}", "x{http.request.header.B}y{client_ip}z",
	}
	values := []string{"", "a", "203.0.113.7", "2001:db8::1", "a-b", "-", ",", `a\,b`, `\`, "\x00", "é", strings.Repeat("x", 300)}
	for _, template := range templates {
		k := newTestKey(t, template)
		for _, a := range values {
			for _, b := range values {
				for _, ip := range []string{"198.51.100.9", "2001:db8:1:2:3::4", "::ffff:198.51.100.9", "2002:c633:6409::1"} {
					r := httptest.NewRequest("GET", "/", nil)
					r.Header["A"], r.Header["B"] = []string{a}, []string{b}
					repl := caddyhttp.NewTestReplacer(r)
					ctx := caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), &caddyhttp.Server{}).Context()
					r = r.WithContext(ctx)
					caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, ip)
					want, own, err := k.Of(r, r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer))
					if err != nil {
						t.Fatal(err)
					}
					var typed []string
					for _, p := range k.Placeholders() {
						typed = append(typed, map[string]string{
							placeholder.ClientIP: ip, "http.request.header.A": a, "http.request.header.B": b,
						}[p.Text])
					}
					sent := slices.Clone(typed)
					got, err := k.Typed(nil, typed)
					if own != (err == nil) {
						t.Fatalf("%s of %q: own key %t, error %v", template, sent, own, err)
					}
					if own && got != want {
						t.Errorf("%s of %q: typed %q, expanded %q", template, sent, got, want)
					}
					if own && len(sent) == 1 {
						text := strings.ReplaceAll(strings.ReplaceAll(template, "{client_ip}", ip), "{http.request.header.A}", a)
						if got, err := k.Typed(&text, nil); err != nil || got != want {
							t.Errorf("%s typed as %q: got %q, %v, want %q", template, text, got, err, want)
						}
					}
					if own && len(sent) > 1 {
						if got, err := k.Typed(&want, nil); err != nil || got != want {
							t.Errorf("%s of %q: %q is typed as %q, %v", template, sent, want, got, err)
						}
						if back := Split(want); k.join(back) != want || len(back) != len(sent) {
							t.Errorf("%s of %q: %q is split as %q", template, sent, want, back)
						}
					}
				}
			}
		}
	}
}

// TestTypedAddresses guards which addresses and prefixes are accepted, and what keys
// have of them.
func TestTypedAddresses(t *testing.T) {
	t.Parallel()
	k := newTestKey(t, "{client_ip}") // /24 and /64
	for text, want := range map[string]string{
		"203.0.113.7":        "203.0.113.0/24",
		"203.0.113.0/24":     "203.0.113.0/24",
		"203.0.113.7/24":     "203.0.113.0/24",
		"::ffff:203.0.113.7": "203.0.113.0/24",
		"2002:cb00:7107::1":  "203.0.113.0/24",
		"64:ff9b::cb00:7107": "203.0.113.0/24",
		"2001:DB8::1":        "2001:db8::/64",
		"2001:db8::/64":      "2001:db8::/64",
		"fe80::1%eth0":       "fe80::/64",
		"203.0.113.0/25":     "",
		"203.0.113.7/32":     "",
		"2001:db8::/48":      "",
		"203.0.113":          "",
		"203.0.113.7:80":     "",
		"[2001:db8::1]":      "",
		"localhost":          "",
		" 203.0.113.7":       "",
		"":                   "",
	} {
		got, err := k.Typed(&text, nil)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v, want %q", text, got, err, want)
		}
	}
	exact, err := Parse("key", "{client_ip}", clientip.Prefixes{IPv4: 32, IPv6: 128})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"203.0.113.7", "203.0.113.7/32"} {
		if got, err := exact.Typed(&text, nil); got != "203.0.113.7" || err != nil {
			t.Errorf("%q: got %q, %v", text, got, err)
		}
	}
}

// FuzzSplitKey guards that a key of several placeholders is taken apart into the values
// that made it up, whatever clients send.
func FuzzSplitKey(f *testing.F) {
	f.Add("a", "b", "c")
	f.Add("", `\`, ",")
	f.Add(`a\,`, `,\,`, `\\`)
	k := newTestKey(f, "{http.request.header.A}-{http.request.header.B}{http.request.header.C}")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		whole := k.join([]string{a, b, c})
		if values := Split(whole); !slices.Equal(values, []string{a, b, c}) {
			t.Errorf("%q is split as %q", whole, values)
		}
	})
}
