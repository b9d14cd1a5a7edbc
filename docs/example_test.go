package docs

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards that the example is formatted, and runs as it is.
func TestExample(t *testing.T) {
	src, err := os.ReadFile("example.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	if warning, differs := caddyfile.FormattingDifference("example.Caddyfile", src); differs {
		t.Error(warning)
	}
	config, err := configtest.Adapt(string(src))
	if err != nil {
		t.Fatal(err)
	}
	if err := configtest.Validate(config); err != nil {
		t.Error(err)
	}
}

var (
	envPlaceholder  = regexp.MustCompile(`\{(?:env\.|\$)(\w+)\}`)
	filePlaceholder = regexp.MustCompile(`\{file\.[^}]+\}`)
)

// withSecrets returns code whose placeholders have values: its variables are
// set, and its files are one that exists.
func withSecrets(t *testing.T, code, file string) string {
	for _, variable := range envPlaceholder.FindAllStringSubmatch(code, -1) {
		value := "value"
		if strings.HasSuffix(variable[1], "ADDRESS") {
			value = "localhost:6379"
		}
		t.Setenv(variable[1], value)
	}
	return filePlaceholder.ReplaceAllLiteralString(code, "{file."+file+"}")
}

// Guards that the Caddyfile of the package's comment, which pkg.go.dev shows, is one that
// Caddy loads.
func TestPackageComment(t *testing.T) {
	src, err := os.ReadFile("module.go")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for line := range strings.Lines(string(src)) {
		if strings.HasPrefix(line, "package ") {
			break
		}
		if line, ok := strings.CutPrefix(line, "//\t"); ok {
			code.WriteString(line)
		}
	}
	if !strings.Contains(code.String(), "rate_limit") {
		t.Fatalf("it has no limit:\n%s", code.String())
	}
	if err := validateSnippet(code.String()); err != nil {
		t.Errorf("%v\n%s", err, code.String())
	}
}

// asSite returns code as a whole Caddyfile. If the first word in it is neither the brace of
// global options, nor a snippet, nor a site's address, it is part of a site, which gets the
// address.
func asSite(code, address string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(code), " ")
	if !strings.ContainsAny(first, "{(.:") && first != "localhost" {
		return address + " {\n" + code + "}\n"
	}
	return code
}

// validateSnippet validates a Caddyfile, or what is part of a site.
func validateSnippet(code string) error {
	config, err := configtest.Adapt(string(caddyfile.Format([]byte(asSite(code, ":8080")))))
	if err != nil {
		return err
	}
	return configtest.Validate(config)
}

// validateJSON validates a configuration or a handler.
func validateJSON(code string) error {
	var object map[string]any
	if err := json.Unmarshal([]byte(code), &object); err != nil {
		return err
	}
	switch {
	case object["apps"] != nil:
		return configtest.Validate([]byte(code))
	case object["handler"] != nil:
		members := strings.TrimSpace(code)
		return configtest.Validate(configtest.WithHandler(members[1 : len(members)-1]))
	}
	return fmt.Errorf("it is neither a configuration, with apps, nor a handler")
}

// Guards the example with authentication: those who guess passwords are stopped
// by the limit in front, and the one behind counts what a user who knows theirs sends.
func TestAuthenticationExample(t *testing.T) {
	var site string
	for _, b := range doctest.Blocks(t, "docs/keys.md") {
		if strings.Contains(b.Code, "basic_auth") {
			_, site, _ = strings.Cut(b.Code, "{")
			site = site[:strings.LastIndex(site, "}")]
		}
	}
	// The same for two users whose hashes take less time, with the password "secret".
	const hash = "$2a$04$en50XSOSRK6koiBfio.FceBm05YZ6/aoY6lwR1hzV41PDo.aHhWyG"
	user := regexp.MustCompile(`(?m)bob .*$`)
	if !user.MatchString(site) {
		t.Fatal("docs/keys.md has no example with a user called bob")
	}
	site = user.ReplaceAllLiteralString(site, "bob "+hash+"\nalice "+hash)
	s := sitetest.Start(t, strings.ReplaceAll(site, "localhost:9000", sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) {})))

	login := func(user, password string) int {
		t.Helper()
		return s.Get("/", "Authorization: Basic "+base64.StdEncoding.EncodeToString([]byte(user+":"+password))).StatusCode
	}
	count := func(n int, user, password string) string {
		statuses := make(map[int]int)
		for range n {
			statuses[login(user, password)]++
		}
		return fmt.Sprint(statuses)
	}
	for _, tc := range []struct {
		after          time.Duration
		user, password string
		want           string // how many of 21 requests get which status
	}{
		{0, "bob", "guess", "map[401:20 429:1]"},
		{time.Minute, "bob", "secret", "map[200:10 429:11]"},
		{10 * time.Second, "bob", "guess", "map[401:10 429:11]"},
		{20 * time.Second, "alice", "secret", "map[200:10 429:11]"},
	} {
		s.Clock.Advance(tc.after)
		if got := count(21, tc.user, tc.password); got != tc.want {
			t.Errorf("%s with %s: got %s, want %s", tc.user, tc.password, got, tc.want)
		}
	}
}
