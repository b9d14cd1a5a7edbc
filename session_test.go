package ratelimit

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// recordSession makes TestSession write the session.
var recordSession = flag.Bool("record", false, "write the session in docs/operation.md from what the commands print")

// sessionSite is the site of the recorded session.
const sessionSite = `
	rate_limit {
		limit api {
			rate 60/1m
			limit search {
				match path /search
				rate 5/1m
				track_top 100
			}
		}
		limit tenant {
			match header X-Tenant *
			key {header.X-Tenant}
			rate 1000/1h
		}
	}
	respond ok`

// TestSession guards that the session in docs/operation.md is what the commands
// print, but for the numbers in it.
func TestSession(t *testing.T) {
	s, a := startWithAdmin(t, config{site: sessionSite})
	for range 8 {
		s.get("/search")
	}
	s.from("127.0.0.2")
	s.get("/", "X-Tenant: acme")
	// What is recorded does not show where the test has run.
	config := configFile(t, "http://localhost:8080 {\n"+sessionSite+"\n}\n")
	shown := strings.NewReplacer(config, "Caddyfile", " --address "+a.addr, "")

	var session strings.Builder
	for _, args := range [][]string{
		{"explain", "--config", config, "-H", "X-Tenant: acme", "http://localhost:8080/search"},
		{"check", "--config", config},
		{"status", "--address", a.addr},
		{"limits", "--address", a.addr},
		{"top", "--address", a.addr},
		{"peek", "--address", a.addr, "api/search", "127.0.0.1"},
		{"reset", "--address", a.addr, "api/search", "127.0.0.1", "--yes"},
		{"peek", "--address", a.addr, "api/search", "127.0.0.1"},
	} {
		r := runCommand(t, args...)
		if r.status != 0 || r.errors != "" {
			t.Errorf("%q: %+v", args, r)
		}
		line := strings.ReplaceAll(strings.Join(args, " "), "X-Tenant: acme", "'X-Tenant: acme'")
		session.WriteString("$ caddy rate-limit " + shown.Replace(line) + "\n" + strings.TrimSpace(r.out) + "\n\n")
	}
	got := strings.TrimSpace(session.String()) + "\n"
	file := filepath.Join("docs", "operation.md")
	document, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(document), "<!-- session -->\n```text\n")
	want, after, ends := strings.Cut(rest, "```\n<!-- end of session -->")
	if !begins || !ends {
		t.Fatalf("%s has no session", file)
	}
	if *recordSession {
		text := before + "<!-- session -->\n```text\n" + got + "```\n<!-- end of session -->" + after
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // it is no secret
			t.Fatal(err)
		}
		return
	}
	numbers := regexp.MustCompile(`[\d.]+(µs|ms|m|s)?|\((devel)\)|unknown|v\d\S*`)
	spaces := regexp.MustCompile(` +`)
	same := func(text string) string {
		return spaces.ReplaceAllString(numbers.ReplaceAllString(text, "0"), " ")
	}
	if same(got) != same(want) {
		t.Errorf("got\n%s\nwant, but for numbers,\n%s", got, want)
	}
}
