package ratelimit

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"net/textproto"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap/zapcore"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
)

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
	k, err := newKey(template, clientip.Prefixes{IPv4: ipv4, IPv6: ipv6})
	if err != nil {
		t.Fatal(err)
	}
	c := newTestEvaluation()
	for name, v := range values {
		if name == "http.vars.client_ip" {
			caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, v)
			continue
		}
		c.replacer.Set(name, v)
	}
	text, own, err = k.expand(c.request, c.replacer)
	if err != nil {
		t.Fatal(err)
	}
	return text, own
}

// keyText returns the template with the values of an expanded key in it.
func keyText(key string, k *key) string {
	if !k.several {
		return key
	}
	values, text := splitValues(key), ""
	for _, p := range k.parts {
		if p.placeholder {
			text, values = text+values[0], values[1:]
		} else {
			text += p.text
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
			k, err := newKey(template, defaultPrefixes)
			if err != nil {
				t.Fatal(err)
			}
			c := newTestEvaluation()
			for name, v := range values {
				c.replacer.Set(name, v)
			}
			key, own, err := k.expand(c.request, c.replacer)
			if err != nil || !own {
				t.Fatalf("own = %t, %v, want a key of its own", own, err)
			}
			if got, want := keyText(key, k), c.replacer.ReplaceAll(template, ""); got != want {
				t.Errorf("got %q, want %q as Caddy has it", got, want)
			}
		})
	}
}

// Guards the texts that are no key.
func TestKeyTemplateErrors(t *testing.T) {
	t.Parallel()
	const want = `want text or placeholders, such as {client_ip}, or a word for one bucket for all`
	for template, message := range map[string]string{
		"":        `key: got "", ` + want,
		"\x00":    `key: got "\x00", ` + want,
		"{a}\x00": `key: got "{a}\x00", ` + want,
		strings.Repeat("{", 102): `key: got "` + strings.Repeat("{", 64) + `…", ` + want +
			`: too many unclosed placeholders`,
	} {
		if _, err := newKey(template, defaultPrefixes); err == nil || err.Error() != message {
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
		_, err := newKey(template, defaultPrefixes)
		want := fmt.Sprintf(`key: got %q, want each placeholder with both of its braces, and others as \{ and \}`, template)
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
			// A whole key that is an address is one wherever it comes from.
			got, own := expandKeyPrefixes(t, "{a}", tc.ipv4, tc.ipv6, map[string]string{"a": tc.address})
			if got != tc.want || !own {
				t.Errorf("{a}: got %q, own = %t, want %q", got, own, tc.want)
			}
			// Beside other text it is not.
			got, _ = expandKeyPrefixes(t, "/{a}/{b}", tc.ipv4, tc.ipv6, map[string]string{"a": tc.address})
			if got != tc.address+"," {
				t.Errorf("/{a}/{b}: got %q, want %q as it is", got, tc.address)
			}
		})
	}
}

// Guards the prefixes that count unless others are set, and that they are the
// parent's where a limit takes its key.
func TestKeyInheritance(t *testing.T) {
	t.Parallel()
	l, _ := readyLimit(t, &Limit{Limits: []*Limit{
		{Name: "plain", Size: "1"},
		{Name: "prefixed", Size: "1", IPv4Prefix: "24"},
		{Name: "group", Key: "{a}", IPv4Prefix: "16", IPv6Prefix: "48", Limits: []*Limit{
			{Name: "same", Size: "1", Limits: []*Limit{
				{Name: "deep", Max: "5", Duration: "1s", MinInterval: "1s"},
				{Name: "other", Key: "{b}", Size: "1"},
				{Name: "finer", IPv6Prefix: "56", Size: "1"},
			}},
			{Name: "own", Key: "{client_ip}", IPv4Prefix: "8", Size: "1"},
		}},
	}})
	var got []string
	var list func(*Limit)
	list = func(l *Limit) {
		for _, b := range l.buckets {
			got = append(got, fmt.Sprintf("%s %s /%d /%d", b.path, b.limit.key, b.limit.key.prefixes.IPv4, b.limit.key.prefixes.IPv6))
		}
		for _, child := range l.Limits {
			list(child)
		}
	}
	list(l)
	want := []string{
		"plain {http.vars.client_ip} /32 /64",
		"prefixed {http.vars.client_ip} /24 /64",
		"group/same {a} /16 /48",
		"group/same/deep {a} /16 /48",
		"group/same/deep/min_interval {a} /16 /48",
		"group/same/other {b} /32 /64",
		"group/same/finer {a} /16 /56",
		"group/own {http.vars.client_ip} /8 /64",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Guards that the short names of the address placeholders, which a Caddyfile
// replaces, also mean the address in JSON.
func TestKeyShorthandsInJSON(t *testing.T) {
	t.Parallel()
	const config = `{"key":"{client_ip} {remote_host} {http.request.host}","size":1}`
	var l Limit
	if err := json.Unmarshal([]byte(config), &l); err != nil {
		t.Fatal(err)
	}
	readyLimit(t, &l)
	want := "{http.vars.client_ip} {http.request.remote.host} {http.request.host}"
	if got := l.key.String(); got != want {
		t.Errorf("got key %s, want %s", got, want)
	}
	c := newTestEvaluation()
	caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, "203.0.113.9")
	if err := l.addTo(c); err != nil || len(c.buckets) != 1 {
		t.Fatalf("got buckets %+v, %v, want one", c.buckets, err)
	}
	want = "203.0.113.9 192.0.2.1 example.com"
	if got := keyText(c.buckets[0].Key, l.key); got != want {
		t.Errorf("got %q, want %q", got, want)
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

// Guards that different values always make different keys, byte for byte but for white
// space around them, whatever clients send: who chooses one of several parts of a key can't make
// the whole another's.
func TestKeysAreInjective(t *testing.T) {
	t.Parallel()
	check := func(template string, first, second [2]string) error {
		k, err := newKey(template, clientip.Prefixes{IPv4: 32, IPv6: 128})
		if err != nil {
			return err
		}
		var keys [2]string
		for i, values := range [][2]string{first, second} {
			c := newTestEvaluation()
			c.replacer.Set("a", values[0])
			c.replacer.Set("b", values[1])
			setClient(c, values[0])
			var own bool
			if keys[i], own, err = k.expand(c.request, c.replacer); err != nil || !own {
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
		a, b     [2]string // the values of {a} and {b}; the client's address is that of {a}
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
	for range 20 {
		rapid.Check(t, property)
	}
}

// Guards any template with any values: it makes the text that Caddy makes of
// it, without white space around the values, and different values different keys.
func FuzzKey(f *testing.F) {
	f.Add("{a}", "x", "", "y", "")
	f.Add("{a}{b}", "ab", "c", "a", "bc")
	f.Add("{a} {b}", "x y", "z", "x", "y z")
	f.Add("x{a}", "1", "", "2", "")
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
		k, err := newKey(template, clientip.Prefixes{IPv4: 32, IPv6: 128})
		if err != nil {
			return
		}
		uses := make(map[string]bool)
		for _, p := range k.parts {
			if p.placeholder {
				uses[p.text] = true
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
				trimmed.Set(name, textproto.TrimString(v))
			}
			key, own, err := k.expand(new(http.Request), repl)
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
		same := func(a, b string) bool { return textproto.TrimString(a) == textproto.TrimString(b) }
		if (!uses["a"] || same(a1, a2)) && (!uses["b"] || same(b1, b2)) {
			return
		}
		if _, err := netip.ParseAddr(one.text); err == nil && len(k.placeholders()) == 1 {
			return // one address, written in two ways
		}
		t.Fatalf("%q: {a: %q, b: %q} and {a: %q, b: %q} both have the key %q",
			template, a1, b1, a2, b2, one.key)
	})
}

// Guards that leaving out what makes the key is neither a bypass nor shares a
// bucket with everyone who does: the client's masked address stands in, apart
// from keys that clients choose, in both buckets of a legacy limit too.
func TestMissingKeyFallsBackToAddress(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, key string
		values    map[string]string
		wantKey   string
		wantName  string
	}{
		{"none", "{a}", nil, "198.51.100.0/24", "limit@client_ip"},
		{"empty", "{a}", map[string]string{"a": ""}, "198.51.100.0/24", "limit@client_ip"},
		{"none of several", "{a}-{b}", nil, "198.51.100.0/24", "limit@client_ip"},
		{"no name", "{}", nil, "198.51.100.0/24", "limit@client_ip"},
		{
			"an address that is none",
			"{http.request.remote.host}",
			map[string]string{"http.request.remote.host": ""},
			"198.51.100.0/24", "limit@client_ip"},
		{"one of several", "{a}-{b}", map[string]string{"b": "x"}, ",x", "limit"},
		{"white space", "{a}", map[string]string{"a": " \t"}, "198.51.100.0/24", "limit@client_ip"},
		{"white space in text", "x-{a}", map[string]string{"a": "\t"}, "198.51.100.0/24", "limit@client_ip"},
		{"the address as a key", "{a}", map[string]string{"a": "198.51.100.7"}, "198.51.100.0/24", "limit"},
		{"static", "everyone", nil, "everyone", "limit"},
		{"escaped", `\{a\}`, nil, "{a}", "limit"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			for _, l := range []*Limit{
				{Name: "limit", Key: tc.key, IPv4Prefix: "24", Size: "1"},
				{Name: "limit", Key: tc.key, IPv4Prefix: "24", Max: "5", Duration: "1s", MinInterval: "1s"},
			} {
				l, logs := readyLimit(t, l)
				c := newTestEvaluation()
				caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, "::ffff:198.51.100.7")
				for name, v := range tc.values {
					if name == "http.request.remote.host" {
						c.request.RemoteAddr = v
						continue
					}
					c.replacer.Set(name, v)
				}
				if err := l.addTo(c); err != nil || c.of[0].path != "limit" {
					t.Fatalf("got limit %q, %v, want limit", c.of[0].path, err)
				}
				own, fallback := strings.CutSuffix(tc.wantName, "@client_ip")
				want := []string{tc.wantName + " " + tc.wantKey}
				if l.MinInterval != "" {
					want = append(want, strings.Replace(tc.wantName, own, own+"/min_interval", 1)+" "+tc.wantKey)
				}
				var got []string
				for _, b := range c.buckets {
					got = append(got, b.Name+" "+b.Key)
				}
				if !slices.Equal(got, want) {
					t.Errorf("got buckets and keys %q, want %q", got, want)
				}
				if got, want := logs.Len(), map[bool]int{true: 1}[fallback]; got != want {
					t.Errorf("got %d log entries, want %d", got, want)
				}
			}
		})
	}
}

// Guards that missing keys are reported to the administrator, by the template and
// not by what anyone sent, once for each limit until the configuration is
// loaded again, and not once for each request.
func TestMissingKeyWarnsOnce(t *testing.T) {
	t.Parallel()
	load := func() (*Limit, func() []string) {
		l, logs := readyLimit(t, &Limit{Limits: []*Limit{
			{Name: "a", Key: "{a}", Size: "1", Limits: []*Limit{{Name: "within", Size: "1"}}},
			{Name: "b", Key: "{b} {client_ip}", Size: "1"},
			{Name: "c", Key: "{c}-{a}", Size: "1"},
			{Name: "static", Key: "all", Size: "1"},
		}})
		return l, func() []string {
			entries := logs.TakeAll()
			warned := make([]string, len(entries))
			for i, e := range entries {
				fields := e.ContextMap()
				warned[i] = fmt.Sprintf("%s %s %s", e.Level, fields["limit"], fields["key"])
			}
			return warned
		}
	}
	want := []string{"warn a {a}", "warn a/within {a}", "warn c {c}-{a}"}
	for range 2 { // two configurations
		l, warned := load()
		c := newTestEvaluation()
		c.replacer.Set("a", "secret")
		if err := l.addTo(c); err != nil {
			t.Fatal(err)
		}
		if got := warned(); len(got) > 0 {
			t.Errorf("of a request that has its keys got %q", got)
		}
		var requests sync.WaitGroup
		for range 20 {
			requests.Go(func() {
				if err := l.addTo(newTestEvaluation()); err != nil {
					t.Error(err)
				}
			})
		}
		requests.Wait()
		got := warned()
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Guards that a request without a known client address is still limited.
func TestUnknownClientAddress(t *testing.T) {
	t.Parallel()
	l, logs := readyLimit(t, &Limit{Name: "a", Size: "1"})
	c := newTestEvaluation()
	caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, "")
	if err := l.addTo(c); err != nil || len(c.buckets) != 1 {
		t.Fatalf("got buckets %+v, %v, want one", c.buckets, err)
	}
	if b := c.buckets[0]; b.Name != "a@client_ip" || b.Key != "" {
		t.Errorf("got bucket %q with key %q, want a@client_ip with none", b.Name, b.Key)
	}
	if logs.FilterLevelExact(zapcore.WarnLevel).Len() != 1 {
		t.Errorf("got %d log entries, want a warning", logs.Len())
	}
}

// Guards that limits which have their key in common agree on it within one
// request, and that it is read anew for the next.
func TestKeyOfEachRequest(t *testing.T) {
	t.Parallel()
	l, _ := readyLimit(t, &Limit{Name: "a", Key: "{a}", Size: "1", Limits: []*Limit{
		{Name: "b", Size: "1"},
		{Name: "c", Key: "{c}", Size: "1"},
		{Name: "d", Size: "1"},
	}})
	for _, v := range []string{"1", "2"} {
		c := newTestEvaluation()
		c.replacer.Set("a", "a"+v)
		c.replacer.Set("c", "c"+v)
		if err := l.addTo(c); err != nil {
			t.Fatal(err)
		}
		got := make([]string, len(c.buckets))
		for i, b := range c.buckets {
			got[i] = b.Name + " " + b.Key
		}
		if want := []string{"a a" + v, "a/b a" + v, "a/c c" + v, "a/d a" + v}; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
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
		c := newTestEvaluation()
		r, repl := c.request, c.replacer
		for _, field := range header {
			name, value, _ := strings.Cut(field, ": ")
			r.Header.Add(name, value)
		}
		for _, placeholder := range []string{
			placeholder.ClientIP, placeholder.RemoteHost, "http.request.header.X-Key", "http.request.header.x-key", "http.request.header.Host",
			"http.request.header.", "http.request.uri.path", "http.vars.other",
		} {
			p := newPlaceholder(placeholder)
			want, _ := repl.GetString(p.text)
			want, _, _ = strings.Cut(want, ",")
			if got := p.value(r, repl); got != want {
				t.Errorf("%s: {%s} is %q, want %q", name, placeholder, got, want)
			}
		}
	}
}

// Guards that an inherited key is what its placeholders are where the limit
// stands that takes it, when the matchers before it have set them: by another
// limit's capture, strangers would share buckets and clients choose theirs.
func TestInheritedKeyIsExpandedWhereUsed(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			key {re.id.1}
			headers ratelimit
			limit first {
				match path_regexp id ^/([^/]+)/
				size 9
				limit within {
					size 9
				}
			}
			limit second {
				match path_regexp id /([^/]+)$
				size 9
			}
			limit other {
				match path_regexp id ^/((.+)/.+)$
				key {re.id.2}{header.X-Key}
				size 9
			}
			limit last {
				size 9
			}
		}
		respond "admitted"
	`)
	// What is left of the 9 after each request.
	for _, tc := range []struct{ path, want string }{
		{"/a/x", "first 8, within 8, second 8, other 8, last 8"}, // the captures are a, a, x, a and a/x
		{"/b/x", "first 8, within 8, second 7, other 8, last 8"},
		{"/a/y", "first 7, within 7, second 8, other 7, last 8"},
		{"/a/x", "first 6, within 6, second 6, other 6, last 7"},
	} {
		limits, err := parseList(s.get(tc.path).Header.Get("RateLimit"))
		if err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, l := range limits {
			left = append(left, fmt.Sprint(path.Base(l.name), " ", l.parameters["r"]))
		}
		if got := strings.Join(left, ", "); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.path, got, tc.want)
		}
	}
}

// Guards that the administrator is told what really happens where clients
// have no address, as on a unix socket of which no proxy is trusted: all of
// them share one bucket. Where a proxy is trusted that tells one, it counts.
func TestClientsWithoutAddress(t *testing.T) {
	const noAddress = "a request has neither a value for the key of this limit nor a client address, " +
		"as on a unix socket without trusted_proxies_unix; all such requests share one bucket: default "
	const noKey = "a request has no value for the key of this limit, using the client's address: default "
	for _, tc := range []struct {
		name, global, key string
		forwarded         bool   // whether the requests tell an address
		left              string // of 9, by two clients
		warnings          []string
	}{
		{"address", "", "{client_ip}", true, "8 7", []string{noAddress + "{http.vars.client_ip}"}},
		{"address of the connection", "", "{remote_host}", true, "8 7",
			[]string{noAddress + "{http.request.remote.host}"}},
		{"header field", "", "{header.X-Key}", true, "8 7", []string{noAddress + "{http.request.header.X-Key}"}},
		{"trusted proxy", "servers {\ntrusted_proxies_unix\n}", "{client_ip}", true, "8 8", nil},
		{"trusted proxy that tells none", "servers {\ntrusted_proxies_unix\n}", "{client_ip}", false, "8 7",
			[]string{noAddress + "{http.vars.client_ip}"}},
		{"strictly trusted proxy that tells none",
			"servers {\ntrusted_proxies_unix\ntrusted_proxies_strict\n}", "{client_ip}", false, "8 7",
			[]string{noAddress + "{http.vars.client_ip}"}},
		{"trusted proxy and header field", "servers {\ntrusted_proxies_unix\n}", "{header.X-Key}", true, "8 8",
			[]string{noKey + "{http.request.header.X-Key}"}},
		{"no address needed", "", "all", false, "8 7", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			socket := filepath.Join(tempDir(t), "caddy.sock")
			s := startConfig(t, config{
				global: tc.global,
				site:   "respond other",
				sites: "http:// {\nbind unix/" + socket + "\nlog\nrate_limit {\nkey " + tc.key +
					"\nsize 9\n}\nrespond {http.rate_limit.limit}\n}",
			})
			s.client.Transport = freshConnections(socket)
			var left []string
			for _, address := range []string{"192.0.2.1", "192.0.2.2"} {
				var header []string
				if tc.forwarded {
					header = []string{"X-Forwarded-For: " + address}
				}
				a := s.get("/", header...)
				left = append(left, a.Header.Get("X-RateLimit-Remaining"))
				if a.body != "default" { // clients learn nothing of it
					t.Errorf("the limit is called %q, want default", a.body)
				}
			}
			if got := strings.Join(left, " "); got != tc.left {
				t.Errorf("two clients leave %s of 9, want %s", got, tc.left)
			}
			var warnings []string
			for _, e := range s.log("warn", ownLogger) {
				warnings = append(warnings, fmt.Sprint(e["msg"], ": ", e["limit"], " ", e["key"]))
			}
			if !slices.Equal(warnings, tc.warnings) {
				t.Errorf("got warnings\n %q\nwant\n %q", warnings, tc.warnings)
			}
		})
	}
}

// Guards what the documentation says of keys that can be told in several ways: what HTTP
// treats as equal is one key. Where an upstream goes by another value, clients choose a
// fresh bucket for each.
func TestKeysSentInSeveralWays(t *testing.T) {
	for _, tc := range []struct {
		key      string
		requests []string // a path and header fields, separated by "; "
		want     string   // how much each leaves of the 9
	}{
		{"{header.X-Key}", []string{"/; X-Key: a", "/; X-Key: a; X-Key: zz", "/; X-Key: zz; X-Key: a", "/; X-Key: a,zz"}, "8 7 8 8"},
		{"{query.key}", []string{"/?key=a", "/?key=a&key=zz", "/?key=zz&key=a", "/?Key=zz&key=a"}, "8 8 8 7"},
		{"{cookie.session}", []string{
			"/; Cookie: session=a", "/; Cookie: session=a, SESSION=zz", "/; Cookie: SESSION=zz, session=a",
			"/; Cookie: session=yy, session=a", "/; Cookie: session=a, session=yy",
		}, "8 7 8 8 6"},
		{"{host}", []string{"/; Host: any.test", "/; Host: ANY.test", "/; Host: any.test.", "/; Host: any.test:80"}, "8 7 6 5"},
		{"{host}", []string{"/; Host: [2001:db8::1]", "/; Host: [2001:DB8::1]:80", "/; Host: [2001:db8::1].", "/; Host: [2001:db8:0:1::1]"}, "8 7 6 8"},
		{"{header.Authorization}", []string{
			"/; Authorization: Bearer k", "/; Authorization: bearer k", "/; Authorization: BEARER  k", "/; Authorization: Bearer \tk",
			"/; Authorization: Bearer K", "/; Authorization: k", "/; Authorization: K", "/; Authorization: Basic k",
		}, "8 7 6 5 8 8 8 8"},
		{"{query.key}", []string{"/?key=a", "/?key=%61", "/?key=+a%20", "/?key=%09", "/?key="}, "8 7 6 8 7"},
		{"{cookie.session}", []string{"/; Cookie: session=a", "/; Cookie: session= a", "/; Cookie: session=a , x=y", `/; Cookie: session="a"`}, "8 7 6 5"},
		{"{uri}", []string{"/a", "/%61"}, "8 8"},
		{"{path}", []string{"/a", "/%61", "/A"}, "8 7 8"},
		{"{host}", []string{"/; Host: named.test", "/; Host: Named.Test", "/; Host: named.test:80"}, "8 7 6"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			site := "rate_limit {\nkey " + tc.key + "\nsize 9\n}\nrespond admitted"
			s := startConfig(t, config{
				site:  site,
				sites: "http://named.test:{port} {\n" + site + "\n}\nhttp://:{port} {\n" + site + "\n}",
			})
			var left []string
			for _, request := range tc.requests {
				path, fields, _ := strings.Cut(request, "; ")
				var header []string
				for field := range strings.SplitSeq(fields, "; ") {
					if field == "" {
						continue
					}
					header = append(header, strings.ReplaceAll(field, ", ", "; "))
				}
				left = append(left, s.get(path, header...).Header.Get("X-RateLimit-Remaining"))
			}
			if got := strings.Join(left, " "); got != tc.want {
				t.Errorf("requests %q leave %s, want %s", tc.requests, got, tc.want)
			}
		})
	}
}

// TestKeysChooseBuckets guards whose bucket a request meets.
func TestKeysChooseBuckets(t *testing.T) {
	const site = `
		rate_limit {
			key %s
			size 9
		}
		respond "admitted"
	`
	for _, tc := range []struct {
		key      string
		requests []string // header fields of each, separated by "; "
		want     string   // how much each leaves of the 9
	}{
		{"{header.X-Key}", []string{"X-Key: a", "X-Key: a", "X-Key: b", "X-Key: A"}, "8 7 8 8"},
		// Without the field it is the client's address, apart from other keys.
		{"{header.X-Key}", []string{"X-Key: 127.0.0.1", "", "", "X-Key: 127.0.0.1", "X-Key: "}, "8 8 7 7 6"},
		// Of a field sent twice the first counts.
		{"{header.X-Key}", []string{"X-Key: a", "X-Key: a; X-Key: b", "X-Key: a,b", "X-Key: a"}, "8 7 8 6"},
		{"{header.X-Key}{header.X-More}", []string{"X-Key: a; X-More: bc", "X-Key: ab; X-More: c"}, "8 8"},
		{"{header.X-Key}{header.X-More}", []string{"X-Key: a", "X-More: a", "X-Key: a", ""}, "8 8 7 8"},
		{"user-{header.X-Key}", []string{"X-Key: a", "", "X-Key: a"}, "8 8 7"},
		{"everyone", []string{"", "X-Key: a", "X-Forwarded-For: 1.2.3.4"}, "8 7 6"},
		// An address is normalised wherever it comes from.
		{"{header.X-Key}", []string{"X-Key: 1.2.3.4", "X-Key: ::ffff:1.2.3.4", "X-Key: ::FFFF:102:304"}, "8 7 6"},
		{"{header.X-Key}", []string{
			"X-Key: 2001:db8::1", "X-Key: 2001:db8:0:0:8::2", "X-Key: 2001:db8:0:1::1",
		}, "8 7 8"},
		{"{client_ip}", []string{
			"X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: ::ffff:1.2.3.4", "X-Forwarded-For: 1.2.3.5", "",
		}, "8 7 8 8"},
		{"{client_ip}", []string{
			"X-Forwarded-For: 2001:db8::1", "X-Forwarded-For: 2001:db8::ffff:ffff:ffff:ffff",
			"X-Forwarded-For: 2001:db8:0:1::1", "X-Forwarded-For: 2001:db8::1%eth0",
		}, "8 7 8 6"},
		{"{client_ip} {header.X-Key}", []string{
			"X-Forwarded-For: 2001:db8::1; X-Key: a", "X-Forwarded-For: 2001:db8::2; X-Key: a",
			"X-Forwarded-For: 2001:db8::2; X-Key: b",
		}, "8 7 8"},
		// A host of IPv4 is one however it comes.
		{"{client_ip}", []string{
			"X-Forwarded-For: 192.0.2.1", "X-Forwarded-For: 2002:c000:201::1", "X-Forwarded-For: 64:ff9b::c000:201",
			"X-Forwarded-For: 64:ff9b::192.0.2.2", "X-Forwarded-For: 2002:c000:202:1::",
		}, "8 7 6 8 7"},
		{"{remote_host}", []string{"X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 1.2.3.5"}, "8 7"},
		// A request without a key is still told by its prefix.
		{"{header.X-Key}", []string{"X-Forwarded-For: 2001:db8::1", "X-Forwarded-For: 2001:db8::2"}, "8 7"},
		{"{header.X-Key}\nipv6_prefix 128", []string{
			"X-Key: 2001:db8::1", "X-Key: 2001:DB8:0::1%eth0", "X-Key: 2001:db8::2",
		}, "8 7 8"},
		{"{client_ip}\nipv4_prefix 24\nipv6_prefix 48", []string{
			"X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 1.2.3.5", "X-Forwarded-For: 1.2.4.4",
			"X-Forwarded-For: 2001:db8:0:1::1", "X-Forwarded-For: 2001:db8:0:2::1",
			"X-Forwarded-For: 2001:db8:1::1",
		}, "8 7 8 8 7 8"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			s := startConfig(t, config{
				global: "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
				site:   fmt.Sprintf(site, quoted(tc.key)),
			})
			var left []string
			for _, header := range tc.requests {
				var fields []string
				if header != "" {
					fields = strings.Split(header, "; ")
				}
				left = append(left, s.get("/", fields...).Header.Get("X-RateLimit-Remaining"))
			}
			if got := strings.Join(left, " "); got != tc.want {
				t.Errorf("requests %q leave %s, want %s", tc.requests, got, tc.want)
			}
		})
	}
}

// quoted returns a value of the Caddyfile, in quotes if it has spaces, and the
// lines behind it as they are.
func quoted(text string) string {
	value, rest, _ := strings.Cut(text, "\n")
	return fmt.Sprintf("%q\n%s", value, rest)
}

// TestAddressNotTrusted guards that clients can't choose their bucket by a
// field that only proxies may send.
func TestAddressNotTrusted(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			size 1
		}
		respond "admitted"
	`)
	s.run(
		step{header: []string{"X-Forwarded-For: 1.2.3.4"}, want: "200 limit=1 remaining=0 clear=1.000"},
		step{header: []string{"X-Forwarded-For: 1.2.3.5"},
			want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
	)
}

// setClient gives a request a client's address.
func setClient(c *evaluation, address string) {
	caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, address)
}

// Guards by which network keys share buckets: that of the client's address, unless it
// is unknown or nothing has proven it yet.
func TestNetworkOfClients(t *testing.T) {
	t.Parallel()
	for address, want := range map[any]string{
		"203.0.113.7":        "203.0.0.0/16",
		"::ffff:203.0.113.7": "203.0.0.0/16",
		"2001:db8:1:2::3":    "2001:db8::/32",
		"@":                  clientip.NoNetwork,
		nil:                  clientip.NoNetwork,
	} {
		c := newTestEvaluation()
		caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, address)
		if got := c.clientNetwork(); got != want {
			t.Errorf("%v: got %q, want %q", address, got, want)
		}
		c = newTestEvaluation()
		caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, address)
		if c.request.TLS = new(tls.ConnectionState); c.clientNetwork() != clientip.NoNetwork {
			t.Errorf("%v in early data: got %q, want %q", address, c.clientNetwork(), clientip.NoNetwork)
		}
	}
}
