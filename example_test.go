package ratelimit

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
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
	config, err := adaptCaddyfile(string(src))
	if err != nil {
		t.Fatal(err)
	}
	if err := validateConfig(config); err != nil {
		t.Error(err)
	}
}

// fenced is a block of code in Markdown: how far it is indented, its language
// and what is in it.
var fenced = regexp.MustCompile("(?ms)^( *)```([a-z]+)\n(.*?)^ *```$")

// Guards the code in the README. A block of language `caddyfile` is valid,
// either as a whole file or as what stands in a site; one of language `json` is
// valid as a whole configuration or as a handler. What is neither, such as a
// summary of options, is to have another language or none.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	validators := map[string]func(string) error{"caddyfile": validateSnippet, "json": validateJSON}
	found := make(map[string]int)
	for _, i := range fenced.FindAllSubmatchIndex(text, -1) {
		indent, language := string(text[i[2]:i[3]]), string(text[i[4]:i[5]])
		code := strings.ReplaceAll("\n"+string(text[i[6]:i[7]]), "\n"+indent, "\n")
		line := 1 + bytes.Count(text[:i[6]], []byte("\n"))
		found[language]++
		validate := validators[language]
		if validate == nil {
			continue
		}
		t.Run(fmt.Sprintf("%s in line %d", language, line), func(t *testing.T) {
			if err := validate(withSecrets(t, code, secret)); err != nil {
				t.Errorf("README.md:%d: %v%s", line, err, code)
			}
		})
	}
	for language := range validators {
		if all := bytes.Count(text, []byte("```"+language)); found[language] != all || all == 0 {
			t.Errorf("found %d of %d blocks of %s", found[language], all, language)
		}
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

// validateSnippet validates a Caddyfile. If the first word in it is neither the
// brace of global options, nor a snippet, nor a site's address, it is what
// stands in a site.
func validateSnippet(code string) error {
	tokens, err := caddyfile.Tokenize([]byte(code), "README.md")
	if err != nil {
		return err
	}
	if len(tokens) == 0 {
		return fmt.Errorf("it is empty")
	}
	first := tokens[0].Text
	if !strings.ContainsAny(first, "{(.:") && first != "localhost" {
		code = ":8080 {" + code + "}\n"
	}
	config, err := adaptCaddyfile(string(caddyfile.Format([]byte(code))))
	if err != nil {
		return err
	}
	return validateConfig(config)
}

// validateJSON validates a configuration or a handler.
func validateJSON(code string) error {
	var object map[string]any
	if err := json.Unmarshal([]byte(code), &object); err != nil {
		return err
	}
	switch {
	case object["apps"] != nil:
		return validateConfig([]byte(code))
	case object["handler"] != nil:
		members := strings.TrimSpace(code)
		return validateConfig(configOf(members[1 : len(members)-1]))
	}
	return fmt.Errorf("it is neither a configuration, with apps, nor a handler")
}

// Guards the README's example with authentication: those who guess passwords are
// stopped by the limit in front, and the one behind counts what a user who knows theirs sends.
func TestReadmeAuthentication(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var site string
	for _, block := range fenced.FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(block[3], "basic_auth") {
			_, site, _ = strings.Cut(block[3], "{")
			site = site[:strings.LastIndex(site, "}")]
		}
	}
	// The same for two users whose hashes take less time, with the password "secret".
	const hash = "$2a$04$en50XSOSRK6koiBfio.FceBm05YZ6/aoY6lwR1hzV41PDo.aHhWyG"
	user := regexp.MustCompile(`(?m)bob .*$`)
	if !user.MatchString(site) {
		t.Fatal("the README has no example with a user called bob")
	}
	site = user.ReplaceAllLiteralString(site, "bob "+hash+"\nalice "+hash)
	s := startSite(t, strings.ReplaceAll(site, "localhost:9000", newUpstream(t, func(http.ResponseWriter, *http.Request) {})))

	login := func(user, password string) int {
		t.Helper()
		return s.get("/", "Authorization: Basic "+base64.StdEncoding.EncodeToString([]byte(user+":"+password))).StatusCode
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
		s.clock.advance(tc.after)
		if got := count(21, tc.user, tc.password); got != tc.want {
			t.Errorf("%s with %s: got %s, want %s", tc.user, tc.password, got, tc.want)
		}
	}
}
