package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// written are the documents that make performance writes.
var written = []string{"../../docs/internals/performance.md", "../results.md"}

// TestRun measures as briefly as wrk can, many things at once, to check that all
// variants are served correctly and that the documents are written completely. It is
// skipped if a program is missing, but not in CI, where that would count as
// passed.
func TestRun(t *testing.T) {
	for _, program := range []string{"redis-server", "wrk"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
	}
	const mark = "A word that stays.\n"
	var paths []string
	dir := t.TempDir()
	for _, original := range written {
		text, err := os.ReadFile(original)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, filepath.Base(original))
		if err := os.WriteFile(path, append([]byte(mark), text...), 0o600); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	o := options{
		documents: paths,
		duration:  time.Second, rounds: 1, threads: 1, atOnce: 25,
		connections: []int{2, 1}, processes: []int{2}, keys: []int{100}, limits: []int{3}, floodSizes: []int{20}, hotConnections: []int{2}, paces: []int{50, 20},
		benchmarks: []benchmark{{"handler", `^BenchmarkHandler$`}}, benchtime: "1x", count: 2,
	}
	if err := run(t.Context(), o, io.Discard, t.Output()); err != nil {
		t.Fatal(err)
	}

	var all strings.Builder
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(text, []byte(mark)) {
			t.Errorf("%s: what is outside of the marks did not stay", path)
		}
		all.Write(text)
	}
	part := func(name string) string {
		_, rest, _ := strings.Cut(all.String(), "<!-- begin: "+name+" -->\n")
		text, _, _ := strings.Cut(rest, "<!-- end: "+name+" -->")
		return text
	}
	for name, lines := range map[string]int{
		"machine":          1,
		"requests":         2 + 26 + 3, // head and rule, variants, baselines
		"summary":          2 + 8 + 2,
		"connections":      2*(2+2+7) + 1,
		"floods":           2 + 3,
		"processes":        2 + 3 + 1,
		"keys":             2 + 2 + 1,
		"limits":           2 + 2 + 1,
		"fleet":            7,
		"hot-keys":         2 + 2 + 2 + 2*(1+2+4+4) + 3 + 2 + 1 + 4 + 3 + 2 + 2*(1+4),
		"hot-keys-summary": 1,
		"added":            2 + 2 + 1 + 5,
		"handler":          2 + 6,
	} {
		text := part(name)
		if got := strings.Count(strings.TrimSpace(text), "\n") + 1; got != lines || strings.Contains(text, "%!") || strings.Contains(text, "NaN") {
			t.Errorf("%s has %d lines, want %d:\n%s", name, got, lines, text)
		}
	}

	for name, want := range map[string]int{"": 4 * 7, "-added": 2 * 6} { // panels, lines
		svg, err := os.ReadFile(strings.TrimSuffix(paths[0], ".md") + name + ".svg")
		if err != nil {
			t.Fatal(err)
		}
		drawn := 0
		for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if e, ok := token.(xml.StartElement); ok && e.Name.Local == "polyline" {
				drawn++
			}
		}
		if drawn != want || bytes.Contains(svg, []byte("NaN")) {
			t.Errorf("the plot%s has %d lines, want %d", name, drawn, want)
		}
	}
}

// TestDocuments guards that there is a place for each benchmark: otherwise that
// would only be noticed after everything has been measured.
func TestDocuments(t *testing.T) {
	d, err := readDocuments(written)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range benchmarks {
		if err := d.set(b.mark, ""); err != nil {
			t.Error(err)
		}
	}
}

// TestReported is the specification of how results of go test -bench become a
// table: runs of one name are one line, and a unit that any of them has is a
// column.
func TestReported(t *testing.T) {
	output := `goos: linux
BenchmarkA/keys=1-2  	 100	 12.34 ns/op	 0 B/op
BenchmarkA/keys=1-2  	 100	 10.0 ns/op	 0 B/op
BenchmarkA/keys=1-2  	 100	 14.12 ns/op	 0 B/op
BenchmarkB-2         	   1	  2.5 x-pass
PASS
`
	want := strings.TrimLeft(`
| benchmark | ns/op          | B/op | x-pass |
| ---       | ---:           | ---: | ---:   |
| A/keys=1  | 12.3 (10–14.1) | 0    |        |
| B         |                |      | 2.50   |
`, "\n")
	got, ok := reported([]byte(output))
	if got != want || !ok {
		t.Errorf("got %v\n%s\nwant\n%s", ok, got, want)
	}
	if _, ok := reported([]byte("PASS\n")); ok {
		t.Error("results were reported where there are none")
	}
}
