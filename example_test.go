package ratelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

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
