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
// Text outside of them stays.
type document struct {
	path, text string
}

// documents are all that a run writes. Beside the first are the plots that were measured, of
// the same name and what they are keyed by.
type documents struct {
	all   []document
	plots map[string]string
}

func readDocuments(paths []string) (*documents, error) {
	d := &documents{plots: make(map[string]string)}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		d.all = append(d.all, document{path, string(text)})
	}
	return d, nil
}

// set replaces the text between the marks of a name, in each document that has
// them.
func (d *documents) set(name, text string) error {
	begin, end := "<!-- begin: "+name+" -->\n", "<!-- end: "+name+" -->"
	found := false
	for i := range d.all {
		before, rest, ok := strings.Cut(d.all[i].text, begin)
		_, after, ok2 := strings.Cut(rest, end)
		if ok && ok2 {
			d.all[i].text = before + begin + strings.TrimRight(text, "\n") + "\n" + end + after
			found = true
		}
	}
	if !found {
		return fmt.Errorf("no document has the marks %q and %q", begin, end)
	}
	return nil
}

// save writes all documents and plots.
func (d *documents) save() error {
	for _, doc := range d.all {
		if err := os.WriteFile(doc.path, []byte(doc.text), 0o644); err != nil { //nolint:gosec // to be read by all
			return err
		}
	}
	for name, svg := range d.plots {
		if err := os.WriteFile(strings.TrimSuffix(d.all[0].path, ".md")+name+".svg", []byte(svg), 0o644); err != nil { //nolint:gosec // likewise
			return err
		}
	}
	return nil
}
