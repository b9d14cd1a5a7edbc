package ratelimit

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// convertedFile is the part of a file that convert's tests compare with.
type convertedFile struct{ source, want string }

// convertedFiles returns the files that convert's tests convert.
func convertedFiles(t testing.TB) (files []convertedFile) {
	t.Helper()
	sources, err := filepath.Glob("testdata/convert/*")
	if err != nil || len(sources) == 0 {
		t.Fatalf("found no files: %v", err)
	}
	for _, source := range sources {
		if filepath.Ext(source) != ".want" {
			files = append(files, convertedFile{source, source + ".want"})
		}
	}
	return files
}

// validateConverted validates what convert printed.
func validateConverted(text string) error {
	if strings.HasPrefix(text, "{") {
		return validateConfig([]byte(text))
	}
	config, err := adaptCaddyfile(string(caddyfile.Format([]byte(":8080 {\n@get method GET\n" + text + "respond ok\n}\n"))))
	if err != nil {
		return err
	}
	return validateConfig(config)
}

// TestConvert guards what configurations of other limiters become, and what is noted
// on them; that it is valid, and formatted as Caddy formats it. With -record it writes
// the files it compares with.
func TestConvert(t *testing.T) {
	for _, file := range convertedFiles(t) {
		t.Run(filepath.Base(file.source), func(t *testing.T) {
			text, err := os.ReadFile(file.source)
			if err != nil {
				t.Fatal(err)
			}
			r, err := convertFrom(formatOf(file.source, text), file.source, text, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := r.Text + "----------\n"
			for _, note := range r.Notes {
				got += note.String() + "\n"
			}
			if *recordSession {
				if err := os.WriteFile(file.want, []byte(got), 0o644); err != nil { //nolint:gosec // it is no secret
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file.want)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if err := validateConverted(r.Text); err != nil {
				t.Errorf("%v\n%s", err, r.Text)
			}
			if formatted := caddyfile.Format([]byte(r.Text)); !bytes.Equal(formatted, []byte(r.Text)) && filepath.Ext(file.source) != ".json" {
				t.Errorf("got\n%s\nformatted it is\n%s", r.Text, formatted)
			}
		})
	}
}
