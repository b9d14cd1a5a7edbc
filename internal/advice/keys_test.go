package advice

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

// templateOf returns a template as in a Caddyfile.
func templateOf(t *testing.T, text string) *key.Key {
	t.Helper()
	segment := caddyfile.Segment{{Text: text}}
	shorthands().ApplyToSegment(&segment)
	k, err := key.Parse("key", segment[0].Text, clientip.Prefixes{IPv4: 32, IPv6: 64})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestDocumentedFlaws guards that each key in the table of docs/keys.md is reported, with the
// remedy in the same row, and that the table has all kinds of advice.
func TestDocumentedFlaws(t *testing.T) {
	t.Parallel()
	doc := filetest.Read(t, "docs/keys.md")
	_, section, _ := strings.Cut(string(doc), "\n## Keys that limit nothing\n")
	_, table, _ := strings.Cut(section, "|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	code := regexp.MustCompile("`([^`]+)`")
	var shown []string
	for row := range strings.Lines(table + "\n") {
		cells := strings.Split(row, "|")
		if len(cells) != 5 {
			t.Fatalf("got %q, want a row of three cells", row)
		}
		for _, k := range code.FindAllStringSubmatch(cells[1], -1) {
			text := strings.ReplaceAll(k[1], "now.*", "now.rfc3339")
			if strings.HasPrefix(text, "{http.request.duration") {
				text = "{http.request.duration_ms}"
			}
			found := OnKey(templateOf(t, text), new(routes.Around))
			if len(found) != 1 {
				t.Errorf("%s: got %v, want one flaw", text, found)
				continue
			}
			for _, remedy := range code.FindAllStringSubmatch(cells[3], -1) {
				if !strings.Contains(found[0].Remedy, remedy[1]) {
					t.Errorf("%s: got %q, want %s", text, found[0].Remedy, remedy[1])
				}
			}
			shown = append(shown, found[0].Placeholder)
		}
	}
	for _, f := range flaws {
		if !slices.ContainsFunc(f.names, func(name string) bool { return slices.Contains(shown, name) }) {
			t.Errorf("the table lacks %q", f.names)
		}
	}
	for _, m := range missing {
		if !slices.ContainsFunc(shown, func(name string) bool {
			return slices.ContainsFunc(m.names, func(known string) bool {
				return name == known || strings.HasSuffix(known, ".") && strings.HasPrefix(name, known)
			})
		}) {
			t.Errorf("the table lacks %q", m.names)
		}
	}
}

// TestForeignKeys guards that keys as people write them for other rate limiters, or with
// placeholders of plugins, are reported only where they are at fault.
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	for text, fault := range map[string]bool{
		"{client_ip}": false, "{remote_host}": false, "{remote_host}/api/auth/pair": false, "static": false,
		"{path}": false, "{host}": false, "{http.request.remote.host}": false, "{http.request.header.X-Forwarded-For}": false,
		"{http.request.header.X-Api-Key}": false, "{header.Authorization}": false, "{header.CF-Connecting-IP}": false,
		"{cookie.session}": false, "{query.id}": false, "{path.id}": true, "{path.0}": false, "{http.vars.uid}": false,
		"{http.request.remote.host}_{http.request.uri.path}": false, "{http.request.tls.client.fingerprint}": false,
		"{tls_client_subject}": false, "{labels.1}": false, "{re.user.1}": false, "{http.regexp.token.1}": false,
		"{json.user.id}": false, "{jwt.sub}": false, "{geoip2.country_code}": false, "{http.request.bodyhash}": false,
		"{http.request.remote_ip}": true, "{http.request.client_ip}": true, "{remote.host}": true, "{remote.ip}": true, "{body.name}": true, "{http.request.remote_addr}": true,
	} {
		if found := OnKey(templateOf(t, text), new(routes.Around)); len(found) > 0 != fault {
			t.Errorf("%s: got %v, want a fault: %v", text, found, fault)
		}
	}
}

// TestRemediesOfKeys guards that there is no advice on a key which advice has named, except
// {client_ip} with one that clients choose.
func TestRemediesOfKeys(t *testing.T) {
	t.Parallel()
	var keys []string
	for _, m := range missing {
		for _, name := range m.names {
			if strings.HasSuffix(name, ".") {
				name += "1"
			}
			keys = append(keys, name)
		}
	}
	for _, f := range flaws {
		keys = append(keys, f.names...)
	}
	named := regexp.MustCompile(`\{([^}]+)\}`)
	for _, name := range append(keys, "http.request.nothing", "remote.nothing") {
		for _, a := range OnKey(templateOf(t, "{"+name+"}"), new(routes.Around)) {
			remedies := named.FindAllStringSubmatch(a.Remedy, -1)
			if len(remedies) == 0 && a.Placeholder != "args.1" {
				t.Errorf("%s: got %q, want a placeholder", name, a.Remedy)
			}
			for _, remedy := range remedies {
				k := templateOf(t, remedy[0])
				if again := OnKey(k, new(routes.Around)); len(again) > 0 {
					t.Errorf("%s: got %q, and of that %+v", name, a.Remedy, again)
				}
				if chosen, _ := Chosen(k, new(routes.Around)); chosen != "" && !strings.Contains(a.Remedy, "{client_ip}") {
					t.Errorf("%s: got %q, want a limit by address too", name, a.Remedy)
				}
			}
		}
	}
}
