package main

import (
	"fmt"
	"os"
	"strings"
)

// document is a Markdown file with parts that this command writes, each between
// two marks:
//
//	<!-- begin: name -->
//	<!-- end: name -->
//
// Text outside of them stays. Beside it is a plot of the same name.
type document struct {
	path, text, plot string
}

func readDocument(path string) (*document, error) {
	text, err := os.ReadFile(path)
	return &document{path: path, text: string(text)}, err
}

// set replaces the text between the marks of a name.
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

// save writes both.
func (d *document) save() error {
	if err := os.WriteFile(strings.TrimSuffix(d.path, ".md")+".svg", []byte(d.plot), 0o644); err != nil { //nolint:gosec // to be read by all
		return err
	}
	return os.WriteFile(d.path, []byte(d.text), 0o644) //nolint:gosec // likewise
}
