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

// documents are all that a run writes. Beside the first is the plot, of the same
// name.
type documents struct {
	all  []document
	plot string
}

func readDocuments(paths []string) (*documents, error) {
	d := new(documents)
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

// save writes all documents and the plot, if there is one.
func (d *documents) save() error {
	for _, doc := range d.all {
		if err := os.WriteFile(doc.path, []byte(doc.text), 0o644); err != nil { //nolint:gosec // to be read by all
			return err
		}
	}
	if d.plot == "" { // it was not measured
		return nil
	}
	return os.WriteFile(strings.TrimSuffix(d.all[0].path, ".md")+".svg", []byte(d.plot), 0o644) //nolint:gosec // likewise
}
