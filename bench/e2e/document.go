package main

import (
	"fmt"
	"os"
	"strings"
)

// document is a Markdown file with parts that are written by this command,
// each between two marks:
//
//	<!-- begin: name -->
//	<!-- end: name -->
//
// What stands outside of them stays.
type document struct {
	path, text string
}

func readDocument(path string) (*document, error) {
	text, err := os.ReadFile(path)
	return &document{path, string(text)}, err
}

// set replaces what stands between the marks of a name.
func (d *document) set(name, text string) error {
	begin, end := "<!-- begin: "+name+" -->\n", "<!-- end: "+name+" -->"
	before, rest, ok := strings.Cut(d.text, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s: no marks %q and %q", d.path, begin, end)
	}
	d.text = before + begin + strings.TrimRight(text, "\n") + "\n" + end + after
	return nil
}

func (d *document) save() error {
	return os.WriteFile(d.path, []byte(d.text), 0o644) //nolint:gosec // a document
}
