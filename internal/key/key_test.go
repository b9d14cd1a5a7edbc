package key

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/textproto"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// request returns a request from 192.0.2.1, and its replacer.
func request() (*http.Request, *caddy.Replacer) {
	r := httptest.NewRequest("GET", "/", nil)
	repl := caddy.NewReplacer()
	return caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server)), repl
}

// defaultPrefixes are the prefixes that limits use.
var defaultPrefixes = clientip.Prefixes{IPv4: 32, IPv6: 64}

// expandKey expands a template for a request from 192.0.2.1, with values for
// its placeholders.
func expandKey(t testing.TB, template string, values map[string]string) (text string, own bool) {
	t.Helper()
	return expandKeyPrefixes(t, template, 32, 64, values)
}

// expandKeyPrefixes is expandKey with other prefixes than the defaults.
func expandKeyPrefixes(
	t testing.TB, template string, ipv4, ipv6 int, values map[string]string,
) (text string, own bool) {
	t.Helper()
	k, err := Parse("key", template, clientip.Prefixes{IPv4: ipv4, IPv6: ipv6})
	if err != nil {
		t.Fatal(err)
	}
	r, repl := request()
	for name, v := range values {
		if name == "http.vars.client_ip" {
			caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, v)
			continue
		}
		repl.Set(name, v)
	}
	text, own, err = k.Of(r, repl)
	if err != nil {
		t.Fatal(err)
	}
	return text, own
}

// keyText returns the template with the values of an expanded key in it.
func keyText(key string, k *Key) string {
	if !k.several {
		return key
	}
	values, text := Split(key), ""
	for _, p := range k.Parts {
		if p.Placeholder {
			text, values = text+values[0], values[1:]
		} else {
			text += p.Text
		}
	}
	return text
}

// Guards that the placeholders of a key are the ones that Caddy replaces, and
// its text is the one that Caddy makes, of escaped braces too.
func TestKeyTemplates(t *testing.T) {
	t.Parallel()
	templates := []string{
		"a", "{a}", "{a}{b}", "{a} {b}", "x{a}", "{a}x", "x{a}y{b}z", "{b}{a}{b}", "{a}{nope}", "{a}\n{b}",
		`\{a\}`, `\{a}`, `{a\}}`, `\{{a}\}`, `{\{a}`, `\\{a}`, `{a}\`, `\`, `\x{a}`, `\{\}`,
		`\{a}{a}`, `{a}\{b\}`, `{a}\}`, `\{\{{a}}}`, "{a}{}", "{ a }", "{a b}{a}", "ключ {a}", "\xff{a}",
		"{a}\x01\x7f",
	}
	values := map[string]string{
		"a": "A", "b": "B", "a b": "C", " a ": "D", `a\}`: "F", `\{a`: "G",
	}
	for _, template := range templates {
		t.Run(template, func(t *testing.T) {
			k, err := Parse("key", template, defaultPrefixes)
			if err != nil {
				t.Fatal(err)
			}
			r, repl := request()
			for name, v := range values {
				repl.Set(name, v)
			}
			key, own, err := k.Of(r, repl)
			if err != nil || !own {
				t.Fatalf("own = %t, %v, want a key of its own", own, err)
			}
			if got, want := keyText(key, k), repl.ReplaceAll(template, ""); got != want {
				t.Errorf("got %q, want %q as Caddy has it", got, want)
			}
		})
	}
}

// Guards the texts that are no key.
func TestKeyTemplateErrors(t *testing.T) {
	t.Parallel()
	const want = `use text or placeholders, such as {client_ip}, or a word for one bucket for all`
	for template, message := range map[string]string{
		"":        `key: nothing given; ` + want,
		"\x00":    `key: "\x00" is not valid; ` + want,
		"{a}\x00": `key: "{a}\x00" is not valid; ` + want,
		strings.Repeat("{", 102): `key: "` + strings.Repeat("{", 64) + `…" is not valid; ` + want +
			`: too many unclosed placeholders`,
	} {
		if _, err := Parse("key", template, defaultPrefixes); err == nil || err.Error() != message {
			t.Errorf("got error %v\nwant %s", err, message)
		}
	}
}

// Guards that a placeholder which lacks a brace is no text: all clients would
// have one bucket.
func TestKeyBraces(t *testing.T) {
	t.Parallel()
	for _, template := range []string{
		"{", "}", "}{", "{a", "a}", "{a}{", "{{a}", "{{a}}", "{a}}", "{a{b}}", "{a}{b", "{{{a}}}", `{a\}`,
		"{a}" + strings.Repeat("{", 50), "{http.vars.client_ip", "x-{a}-{b", `\{a}}`,
	} {
		_, err := Parse("key", template, defaultPrefixes)
		want := fmt.Sprintf(`key: %q is not valid; use both braces of each placeholder, and \{ and \} for others`, template)
		if err == nil || err.Error() != want {
			t.Errorf("got error %v\nwant %s", err, want)
		}
	}
}

// Guards that a key is what its values are: of a single placeholder it is the
// value itself, whatever that holds, without white space around it, and nothing in it is
// replaced once more.
func TestKeyValues(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("k", 1<<20)
	for _, value := range []string{
		"a", "a b", "{a}", "{env.HOME}", `\{a\}`, "}", "{", "a\nb", "a\r\nb", "\x00", "\x00\x01", "\xff\xfe",
		"ключ", "0", "1.2.3.4:80", "1.2.3", "1.2.3.4.5", "256.1.1.1", "01.2.3.4", "1.2.3.4/24", "[::1]",
		"fe80::g", "2001:db8::/64", big,
	} {
		if got, own := expandKey(t, "{a}", map[string]string{"a": " \t" + value + "\t "}); got != value || !own {
			t.Errorf("of %.40q in white space got key %.40q, own = %t, want it without", value, got, own)
		}
		if got, own := expandKey(t, "{a}", map[string]string{"a": value}); got != value || !own {
			t.Errorf("of %.40q got key %.40q, own = %t, want it as it is", value, got, own)
		}
		got, own := expandKey(t, "a-{a}", map[string]string{"a": value})
		if got != "a-"+value || !own {
			t.Errorf("of %.40q behind text got key %.40q, own = %t, want it as it is", value, got, own)
		}
	}
}

// Guards in which keys, and where in them, only the prefix of an address counts.
func TestKeyAddresses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		address    string
		ipv4, ipv6 int
		want       string
	}{
		{"192.0.2.77", 32, 64, "192.0.2.77"},
		{"::ffff:192.0.2.77%eth0", 32, 64, "192.0.2.77"},
		{"192.0.2.77", 24, 64, "192.0.2.0/24"},
		{"2001:db8:1:2:3:4:5:6", 32, 64, "2001:db8:1:2::/64"},
		{"2001:db8:1:2:3:4:5:6", 32, 128, "2001:db8:1:2:3:4:5:6"},
		{"2002:c000:24d::1", 32, 64, "192.0.2.77"},
		{"64:ff9b::c000:24d", 24, 64, "192.0.2.0/24"},
	}
	for _, tc := range tests {
		name := fmt.Sprintf("%s /%d /%d", tc.address, tc.ipv4, tc.ipv6)
		t.Run(name, func(t *testing.T) {
			for _, placeholder := range []string{"http.vars.client_ip", "http.request.remote.host"} {
				values := map[string]string{placeholder: tc.address, "a": "A"}
				for template, want := range map[string]string{
					"{" + placeholder + "}":                           tc.want,
					"ip-{" + placeholder + "}":                        "ip-" + tc.want,
					"{" + placeholder + "} {a} {" + placeholder + "}": tc.want + ",A," + tc.want,
				} {
					got, own := expandKeyPrefixes(t, template, tc.ipv4, tc.ipv6, values)
					if got != want || !own {
						t.Errorf("%s: got %q, own = %t, want %q", template, got, own, want)
					}
				}
			}
			// A value that is an address is one wherever it comes from, and one among others.
			for template, want := range map[string]string{"{a}": tc.want, "x-{a}": "x-" + tc.want, "/{a}/{b}": tc.want + ","} {
				got, own := expandKeyPrefixes(t, template, tc.ipv4, tc.ipv6, map[string]string{"a": tc.address})
				if got != want || !own {
					t.Errorf("%s: got %q, own = %t, want %q", template, got, own, want)
				}
			}
		})
	}
}

// drawValues draws values of two placeholders: any, or such as are likely to
// collide. Those are other values with the boundary elsewhere, or the pieces of
// an address.
func drawValues(t *rapid.T, others [2]string) [2]string {
	value := rapid.OneOf(
		rapid.StringMatching(`[,\\a.]{0,6}`),
		rapid.SampledFrom([]string{strings.Repeat(",", 127), strings.Repeat("\x80", 128)}),
		rapid.String(),
	)
	whole := others[0] + rapid.SampledFrom([]string{"", " ", "."}).Draw(t, "between") + others[1]
	switch rapid.IntRange(0, 2).Draw(t, "any, others, address") {
	case 0:
		return [2]string{value.Draw(t, "a"), value.Draw(t, "b")}
	case 2:
		whole = rapid.SampledFrom([]string{"192.0.2.1", "192.0.2.11"}).Draw(t, "address")
	}
	i := rapid.IntRange(0, len(whole)).Draw(t, "boundary")
	return [2]string{whole[:i], strings.TrimPrefix(whole[i:], ".")}
}

// Guards that different values always make different keys, byte for byte except for white
// space around them, whatever clients send: who chooses one of several parts of a key can't make
// the whole another's.
func TestKeysAreInjective(t *testing.T) {
	t.Parallel()
	check := func(template string, first, second [2]string) error {
		k, err := Parse("key", template, clientip.Prefixes{IPv4: 32, IPv6: 128})
		if err != nil {
			return err
		}
		var keys [2]string
		for i, values := range [][2]string{first, second} {
			r, repl := request()
			repl.Set("a", values[0])
			repl.Set("b", values[1])
			caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, values[0])
			var own bool
			if keys[i], own, err = k.Of(r, repl); err != nil || !own {
				return fmt.Errorf("%s: %q: own = %t, %v, want a key of its own", template, values, own, err)
			}
		}
		if keys[0] == keys[1] {
			return fmt.Errorf("%s: %q and %q both have the key %q", template, first, second, keys[0])
		}
		return nil
	}
	for _, tc := range []struct {
		template string
		a, b     [2]string // the values of {a} and {b}; the client's address is the value of {a}
	}{
		{"{a}{b}", [2]string{"ab", "c"}, [2]string{"a", "bc"}},
		{"{a}{b}", [2]string{"abc", ""}, [2]string{"", "abc"}},
		{"{a} {b}", [2]string{"x y", "z"}, [2]string{"x", "y z"}},
		{"{a}|{b}", [2]string{"x|", "y"}, [2]string{"x", "|y"}},
		{"{a}{b}", [2]string{"a,", "b"}, [2]string{"a", ",b"}},
		{"{a}{b}", [2]string{`a\`, ",b"}, [2]string{`a\,`, "b"}},
		{"{a}{b}", [2]string{`a\`, `\,b`}, [2]string{`a\\,`, "b"}},
		{"{a}{b}", [2]string{",", ""}, [2]string{"", ","}},

		// What they make is an address, in one way or another.
		{"{a}{b}", [2]string{"192.0.2.1", "23"}, [2]string{"192.0.2.123", ""}},
		{"{a}.{b}", [2]string{"192", "0.2.1"}, [2]string{"192.0", "2.1"}},
		{"{a}.{b}", [2]string{"192.0.2", "1"}, [2]string{"192.0", "2.1"}},
		{"{a}:{b}", [2]string{"2001:db8::1", "2"}, [2]string{"2001:db8:", "1:2"}},
		{"{http.vars.client_ip}{b}", [2]string{"192.0.2.1", "23"}, [2]string{"192.0.2.123", ""}},
		{"{b}{http.vars.client_ip}", [2]string{"2.0.2.1", "19"}, [2]string{"192.0.2.1", ""}},
	} {
		if err := check(tc.template, tc.a, tc.b); err != nil {
			t.Error(err)
		}
	}
	property := func(t *rapid.T) {
		template := rapid.SampledFrom([]string{
			"{a}{b}", "{a} {b}", "{a}.{b}", "{b}{a}{b}", "x{a}{b}y", "{a}\x01{b}",
		}).Draw(t, "template")
		first := drawValues(t, [2]string{})
		second := drawValues(t, first)
		for i := range first {
			first[i], second[i] = textproto.TrimString(first[i]), textproto.TrimString(second[i])
		}
		if first == second || first == [2]string{} || second == [2]string{} {
			return // the same, or none
		}
		if err := check(template, first, second); err != nil {
			t.Fatal(err)
		}
	}
	testseed.Check(t, 20, property)
}

// Guards any template with any values: it makes the text that Caddy makes of
// it, without white space around the values and with addresses in one spelling, and
// different values different keys.
func FuzzKey(f *testing.F) {
	f.Add("{a}", "x", "", "y", "")
	f.Add("{a}{b}", "ab", "c", "a", "bc")
	f.Add("{a} {b}", "x y", "z", "x", "y z")
	f.Add("x{a}", "1", "", "2", "")
	f.Add("x{a}", "::0%zone", "", "192.0.2.1", "")
	f.Add("{a}", "::ffff:192.0.2.1", "", "192.0.2.1", "")
	f.Add("192.0.2.{a}", "1", "", "2", "")
	f.Add("::{a}", "1", "", "01", "")
	f.Add("{a}{b}", "192.0.2.1", "1", "192.0.2.11", "")
	f.Add(`\{{a}\}{b`, "1", "2", "3", "4")
	f.Add("{client_ip}{a}", "1", "2", "3", "4")
	f.Add("everyone", "1", "2", "3", "4")
	f.Add("{a}{b}", `,\`, ",", ",", `\,`)
	f.Add("{a}{b}{a}", "\xff", "1\n", "{b}", "")
	f.Fuzz(func(t *testing.T, template, a1, b1, a2, b2 string) {
		k, err := Parse("key", template, clientip.Prefixes{IPv4: 32, IPv6: 128})
		if err != nil {
			return
		}
		spelled := func(v string) string { return k.Prefixes.Of(textproto.TrimString(v)) }
		uses := make(map[string]bool)
		for _, p := range k.Parts {
			if p.Placeholder {
				uses[p.Text] = true
			}
		}
		type expanded struct {
			key, text string
			own       bool
		}
		expand := func(values map[string]string) expanded {
			repl, trimmed := caddy.NewEmptyReplacer(), caddy.NewEmptyReplacer()
			for name, v := range values {
				repl.Set(name, v)
				trimmed.Set(name, spelled(v))
			}
			key, own, err := k.Of(new(http.Request), repl)
			if err != nil {
				t.Fatal(err)
			}
			return expanded{key, trimmed.ReplaceAll(template, ""), own}
		}
		one, two := expand(map[string]string{"a": a1, "b": b1}), expand(map[string]string{"a": a2, "b": b2})
		for _, e := range []expanded{one, two} {
			if _, err := netip.ParseAddr(e.text); err == nil || !e.own {
				continue
			}
			if keyText(e.key, k) != e.text {
				t.Fatalf("%q: got key %q, want the text %q", template, e.key, e.text)
			}
		}
		if !one.own || !two.own || one.key != two.key {
			return
		}
		same := func(a, b string) bool { return spelled(a) == spelled(b) }
		if (!uses["a"] || same(a1, a2)) && (!uses["b"] || same(b1, b2)) {
			return
		}
		if _, err := netip.ParseAddr(one.text); err == nil && len(k.Placeholders()) == 1 {
			return // one address, written in two ways
		}
		t.Fatalf("%q: {a: %q, b: %q} and {a: %q, b: %q} both have the key %q",
			template, a1, b1, a2, b2, one.key)
	})
}

// Guards that a value which is read directly is the one that the replacer has, but of a
// field that was sent twice only the first.
func TestValuesReadDirectly(t *testing.T) {
	t.Parallel()
	requests := map[string][]string{
		"no header":    nil,
		"one":          {"X-Key: alice"},
		"empty":        {"X-Key: "},
		"twice":        {"X-Key: alice", "X-Key: bob"},
		"other fields": {"X-Keys: alice", "Host: example.com"},
	}
	for name, header := range requests {
		r, repl := request()
		for _, field := range header {
			name, value, _ := strings.Cut(field, ": ")
			r.Header.Add(name, value)
		}
		for _, placeholder := range []string{
			placeholder.ClientIP, placeholder.RemoteHost, "http.request.header.X-Key", "http.request.header.x-key", "http.request.header.Host",
			"http.request.header.", "http.request.uri.path", "http.vars.other",
		} {
			p, err := newPlaceholder(placeholder)
			if err != nil {
				t.Fatal(err)
			}
			want, _ := repl.GetString(p.Text)
			want, _, _ = strings.Cut(want, ",")
			if got := p.value(r, repl); got != want {
				t.Errorf("%s: {%s} is %q, want %q", name, placeholder, got, want)
			}
		}
	}
}

// Guards by which network keys share buckets: the client's, unless it
// is unknown or nothing has proven it yet.
func TestNetworkOfClients(t *testing.T) {
	t.Parallel()
	for address, want := range map[any]string{
		"203.0.113.7": "203.0.0.0/16",
		"@":           clientip.NoNetwork,
		nil:           clientip.NoNetwork,
	} {
		r, _ := request()
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
		if got := NetworkOfClient(r); got != want {
			t.Errorf("%v: got %q, want %q", address, got, want)
		}
		r, _ = request()
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
		if r.TLS = new(tls.ConnectionState); NetworkOfClient(r) != clientip.NoNetwork {
			t.Errorf("%v in early data: got %q, want %q", address, NetworkOfClient(r), clientip.NoNetwork)
		}
	}
}

// Guards that what Caddy or upstreams take for equal is one key, however it is written, and
// nothing else is; an operator may type it in any of these ways.
func TestSpellings(t *testing.T) {
	t.Parallel()
	const alice = "YWxpY2U6c2VjcmV0cw==" // alice:secrets
	for _, tc := range []struct {
		key    string
		equal  []string // targets, each with header fields behind it
		others []string
	}{
		{
			"{http.request.header.Authorization}",
			[]string{
				"/; Authorization: Basic " + alice, "/; Authorization: basic  " + alice, "/; Authorization: Basic YWxpY2U6c2VjcmV0cx==",
				"/; Authorization: Basic YWxpY2U6c2VjcmV0c/==", "/; Authorization: Basic YWxpY2U6c2VjcmV0cw", "/; Authorization: Basic YWxp Y2U6c2VjcmV0cw==",
				"/; Authorization: ; Authorization: Basic " + alice,
			},
			[]string{
				"/; Authorization: Basic YWxpY2U6c2VjcmV0cg==", "/; Authorization: Bearer " + alice, "/; Authorization: " + alice,
				"/; Authorization: Basic =", "/; Authorization: Basic", "/; Authorization: Bearer YWxpY2U6c2VjcmV0cx==",
			},
		},
		{
			"{http.request.header.Proxy-Authorization}",
			[]string{"/; Proxy-Authorization: Basic fn5-fn4_", "/; Proxy-Authorization: BASIC fn5+fn4/"},
			[]string{"/; Proxy-Authorization: Basic fn5+fn4"},
		},
		{
			"{http.request.header.Authorization}", // a JWT, and what is none
			[]string{"/; Authorization: Bearer eyJh.eyJi.c2ln-w", "/; Authorization: bearer eyJh.eyJi.c2ln-x", "/; Authorization: Bearer eyJh.eyJi.c2ln-w=="},
			[]string{
				"/; Authorization: Bearer eyJx.eyJi.c2ln-w", "/; Authorization: Bearer eyJh.eyJj.c2ln-w", "/; Authorization: Bearer eyJh.eyJi.c2ln",
				"/; Authorization: Bearer user.no.1", "/; Authorization: Bearer user.no.2", "/; Authorization: Bearer eyJh.c2ln-w", "/; Authorization: Bearer eyJh.c2ln-x",
			},
		},
		{
			"{http.request.header.Authorization}", // a JWT behind another scheme
			[]string{"/; Authorization: DPoP eyJh.eyJi.c2ln-w", "/; Authorization: dpop eyJh.eyJi.c2ln-x"},
			[]string{"/; Authorization: Bearer eyJh.eyJi.c2ln-w", "/; Authorization: DPoP user.no.1"},
		},
		{
			"{http.request.header.Authorization}", // and behind none
			[]string{"/; Authorization: eyJh.eyJi.c2ln-w", "/; Authorization: eyJh.eyJi.c2ln-x", "/; Authorization: eyJh.eyJi.c2ln-w=="},
			[]string{"/; Authorization: Bearer eyJh.eyJi.c2ln-w", "/; Authorization: user.no.1", "/; Authorization: eyJh.c2ln-w"},
		},
		{
			"{http.rate_limit.basic_user}",
			[]string{
				"/; Authorization: Basic " + alice, "/; Authorization: Basic YWxpY2U6Z3Vlc3M=", "/; Authorization: Basic QUxJQ0U6", // ALICE:
				"/; Authorization: Basic IGFsaWNlOmE6Yg==", // " alice:a:b"
			},
			[]string{
				"/; Authorization: Basic Ym9iOg==", // bob:
			},
		},
		{
			"{http.request.host}",
			[]string{"/; Host: a.test", "/; Host: A.Test", "/; Host: a.test.", "/; Host: a.test:80"},
			[]string{"/; Host: b.test", "/; Host: b.a.test"},
		},
		{
			"{http.request.hostport}",
			[]string{"/; Host: a.test:80", "/; Host: A.Test.:80"},
			[]string{"/; Host: a.test", "/; Host: a.test:81", "/; Host: [2001:db8::1]:80", "/; Host: [2001:db8::2]"},
		},
		{
			"{http.request.host.labels.1}",
			[]string{"/; Host: a.test", "/; Host: A.Test.:80"},
			[]string{"/; Host: b.test"},
		},
		{
			"{http.request.uri.path}",
			[]string{"/a/b", "/A/b", "//a/b", "/a//b", "/./a/b", "/x/../a/b", "/%61/b", "/a/b?c"},
			[]string{"/a/b/", "/a", "/a/c", "/"},
		},
		{"{http.request.uri.path.dir}", []string{"/a/b", "/A/c", "//a/b", "/a/./b"}, []string{"/b", "/b/a"}},
		{"{http.request.uri.path.file}", []string{"/a/b", "/c/B", "/b"}, []string{"/a/c"}},
		{"{http.request.uri.path.1}", []string{"/a/b", "//x/B/c", "/./x//b"}, []string{"/b/d", "/a/c"}},
		{
			"{http.request.uri.query.k}",
			[]string{"/?k=a", "/?k=%61", "/?k=a&k=zz", "/?k=&k=a", "/?K=zz&k=a", "/?k=+a"},
			[]string{"/?k=A", "/?k=zz&k=a"},
		},
		{
			"{http.request.cookie.s}",
			[]string{"/; Cookie: s=a", `/; Cookie: s="a"`, "/; Cookie: S=zz, s=a", "/; Cookie: s=a, s=yy", "/; Cookie: S=a"},
			[]string{"/; Cookie: s=A", "/; Cookie: s=zz, s=a"},
		},
		{
			"{http.request.header.X-Ip},{http.request.uri.path}",
			[]string{"/a; X-Ip: 192.0.2.1", "/A; X-Ip: ::ffff:192.0.2.1", "//a; X-Ip: 2002:c000:201::1"},
			[]string{"/a; X-Ip: 198.51.100.1", "/b; X-Ip: 192.0.2.1"},
		},
	} {
		k := newTestKey(t, tc.key)
		of := func(target string) string {
			t.Helper()
			target, fields, _ := strings.Cut(target, "; ")
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://any.test"+target, nil)
			if err != nil {
				t.Fatal(err)
			}
			for field := range strings.SplitSeq(fields, "; ") {
				name, value, _ := strings.Cut(field, ": ")
				if name == "Host" {
					r.Host = value
				} else if name != "" {
					r.Header.Add(name, strings.ReplaceAll(value, ", ", "; "))
				}
			}
			repl := caddy.NewReplacer()
			r = caddyhttp.PrepareRequest(r, repl, nil, nil)
			got, own, err := k.Of(r, repl)
			if err != nil || !own {
				t.Fatalf("%s: %q has no key: %v", tc.key, target, err)
			}
			if typed, err := k.Typed(&got, nil); err != nil || typed != got {
				t.Errorf("%s: the key %q is %q, %v if it is typed", tc.key, got, typed, err)
			}
			return got
		}
		want := of(tc.equal[0])
		for _, target := range tc.equal {
			if got := of(target); got != want {
				t.Errorf("%s: %q has key %q, want %q", tc.key, target, got, want)
			}
		}
		seen := map[string]string{want: tc.equal[0]}
		for _, target := range tc.others {
			got := of(target)
			if other, known := seen[got]; known {
				t.Errorf("%s: %q and %q both have key %q", tc.key, target, other, got)
			}
			seen[got] = target
		}
	}
}

// Guards that a client that sends no name in a Basic credential has no key by it, and that the name
// is known to later handlers as it was sent, if any key has it.
func TestBasicUser(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"": "", "Basic": "", "Basic ": "", "Basic =": "", "Basic !!!": "", "Bearer YWxpY2U6c2VjcmV0": "", "YWxpY2U6c2VjcmV0": "",
		"Basic YWxpY2U=": "", "Basic OnNlY3JldA==": "", "Basic IDpzZWNyZXQ=": "", // without a colon; ":secret"; " :secret"
		"Basic QWxpY2U6c2VjcmV0": "Alice", "bAsIc  QWxpY2U6": "Alice", "Basic /zo=": "\xff",
	} {
		r, repl := request()
		r.Header.Set("Authorization", value)
		got, own, err := newTestKey(t, "{http.rate_limit.basic_user}").Of(r, repl)
		if err != nil || got != strings.ToLower(want) && got != want || own != (want != "") {
			t.Errorf("%q: key %q, own = %t, %v, want %q", value, got, own, err, want)
		}
		if set, _ := repl.GetString("http.rate_limit.basic_user"); textproto.TrimString(set) != want {
			t.Errorf("%q: later handlers see %q, want %q", value, set, want)
		}
	}
}
