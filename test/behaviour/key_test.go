package behaviour

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards that an inherited key is what its placeholders are where the limit
// stands that takes it, when the matchers before it have set them: by another
// limit's capture, strangers would share buckets and clients choose theirs.
func TestInheritedKeyIsExpandedWhereUsed(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit {
			key {re.id.1}
			headers ratelimit-11
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
		limits, err := fieldstest.ParseList(s.Get(tc.path).Header.Get("RateLimit"))
		if err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, l := range limits {
			left = append(left, fmt.Sprint(path.Base(l.Name), " ", l.Parameters["r"]))
		}
		if got := strings.Join(left, ", "); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.path, got, tc.want)
		}
	}
}

// Guards that the administrator learns what really happens where clients
// have no address, as on a unix socket of which no proxy is trusted: all of
// them share one bucket. Where a proxy is trusted that tells one, it counts.
func TestClientsWithoutAddress(t *testing.T) {
	t.Parallel()
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
			socket := filepath.Join(sitetest.TempDir(t), "caddy.sock")
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: tc.global,
				Site:   "respond other",
				Sites: "http:// {\nbind unix/" + socket + "\nlog\nrate_limit {\nkey " + tc.key +
					"\nsize 9\n}\nrespond {http.rate_limit.limit}\n}",
			})
			s.Client.Transport = caddytest.FreshConnections(socket)
			var left []string
			for _, address := range []string{"192.0.2.1", "192.0.2.2"} {
				var header []string
				if tc.forwarded {
					header = []string{"X-Forwarded-For: " + address}
				}
				a := s.Get("/", header...)
				left = append(left, a.Header.Get("X-RateLimit-Remaining"))
				if a.Text != "default" { // clients learn nothing of it
					t.Errorf("the limit is called %q, want default", a.Text)
				}
			}
			if got := strings.Join(left, " "); got != tc.left {
				t.Errorf("two clients leave %s of 9, want %s", got, tc.left)
			}
			var warnings []string
			for _, e := range s.Log("warn", sitetest.OwnLogger) {
				warnings = append(warnings, fmt.Sprint(e["msg"], ": ", e["limit"], " ", e["key"]))
			}
			if !slices.Equal(warnings, tc.warnings) {
				t.Errorf("got warnings\n %q\nwant\n %q", warnings, tc.warnings)
			}
		})
	}
}

// Guards what the documentation says of keys that can be written in several ways: what HTTP
// treats as equal is one key. Where an upstream uses another value, clients choose a
// fresh bucket for each.
func TestKeysSentInSeveralWays(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		key      string
		requests []string // a path and header fields, separated by "; "
		want     string   // how much each leaves of the 9
	}{
		{"{header.X-Key}", []string{"/; X-Key: a", "/; X-Key: a; X-Key: zz", "/; X-Key: zz; X-Key: a", "/; X-Key: a,zz"}, "8 7 8 8"},
		{"{query.key}", []string{"/?key=a", "/?key=a&key=zz", "/?key=zz&key=a", "/?Key=zz&key=a"}, "8 7 8 6"},
		{"{cookie.session}", []string{
			"/; Cookie: session=a", "/; Cookie: session=a, SESSION=zz", "/; Cookie: SESSION=zz, session=a",
			"/; Cookie: session=yy, session=a", "/; Cookie: session=a, session=yy",
		}, "8 7 6 8 5"},
		{"{host}", []string{"/; Host: any.test", "/; Host: ANY.test", "/; Host: any.test.", "/; Host: any.test:80"}, "8 7 6 5"},
		{"{labels.2}", []string{"/; Host: acme.any.test", "/; Host: ACME.any.test", "/; Host: acme.any.test.", "/; Host: acme.any.test..:80", "/; Host: other.any.test"}, "8 7 6 5 8"},
		{"{host}", []string{"/; Host: [2001:db8::1]", "/; Host: [2001:DB8::1]:80", "/; Host: [2001:db8::1].", "/; Host: [2001:db8:0:1::1]"}, "8 7 6 8"},
		{"{header.Authorization}", []string{
			"/; Authorization: Bearer k", "/; Authorization: bearer k", "/; Authorization: BEARER  k", "/; Authorization: Bearer \tk",
			"/; Authorization: Bearer K", "/; Authorization: k", "/; Authorization: K",
			"/; Authorization: Basic YTpiYg==", "/; Authorization: Basic YTpiYv==",
		}, "8 7 6 5 8 8 8 8 7"},
		{"{query.key}", []string{"/?key=a", "/?key=%61", "/?key=+a%20", "/?key=%09", "/?key="}, "8 7 6 8 7"},
		{"{cookie.session}", []string{"/; Cookie: session=a", "/; Cookie: session= a", "/; Cookie: session=a , x=y", `/; Cookie: session="a"`}, "8 7 6 5"},
		{"{uri}", []string{"/a", "/%61"}, "8 8"},
		{"{path}", []string{"/a", "/%61", "/A", "//a", "/./a", "/a/"}, "8 7 6 5 4 8"},
		{"{host}", []string{"/; Host: named.test", "/; Host: Named.Test", "/; Host: named.test:80"}, "8 7 6"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			site := "rate_limit {\nkey " + tc.key + "\nsize 9\n}\nrespond admitted"
			s := sitetest.StartConfig(t, sitetest.Config{
				Site:  site,
				Sites: "http://named.test:{port} {\n" + site + "\n}\nhttp://:{port} {\n" + site + "\n}",
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
				left = append(left, s.Get(path, header...).Header.Get("X-RateLimit-Remaining"))
			}
			if got := strings.Join(left, " "); got != tc.want {
				t.Errorf("requests %q leave %s, want %s", tc.requests, got, tc.want)
			}
		})
	}
}

// TestKeysChooseBuckets guards whose bucket a request meets.
func TestKeysChooseBuckets(t *testing.T) {
	t.Parallel()
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
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
				Site:   fmt.Sprintf(site, quoted(tc.key)),
			})
			var left []string
			for _, header := range tc.requests {
				var fields []string
				if header != "" {
					fields = strings.Split(header, "; ")
				}
				left = append(left, s.Get("/", fields...).Header.Get("X-RateLimit-Remaining"))
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
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit {
			size 1
		}
		respond "admitted"
	`)
	s.Run(
		sitetest.Step{Header: []string{"X-Forwarded-For: 1.2.3.4"}, Want: "200 limit=1 remaining=0 clear=1.000"},
		sitetest.Step{Header: []string{"X-Forwarded-For: 1.2.3.5"},
			Want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
	)
}
