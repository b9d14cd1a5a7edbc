package ratelimit

import (
	"go/ast"
	goparser "go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestPromises guards docs/promises.md: what it quotes is still promised, every
// row names a test, and every test that is named exists.
func TestPromises(t *testing.T) {
	page, err := os.ReadFile("docs/promises.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t)
	named := regexp.MustCompile("`([^`]+)`")
	chapter, promises := "", 0
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if title, ok := strings.CutPrefix(line, "## "); ok {
			chapter = title
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| Promise ") {
			continue
		}
		promises++
		promise, second := strings.TrimSpace(cells[0]), strings.TrimSpace(cells[1])
		document := chapter
		if chapter == "No test yet" {
			document = second
		} else {
			names := named.FindAllStringSubmatch(second, -1)
			if len(names) == 0 {
				t.Errorf("no test for: %s", promise)
			}
			for _, name := range names {
				if !tests[name[1]] {
					t.Errorf("no test or fault is called %s: %s", name[1], promise)
				}
			}
		}
		if text := documentText(t, document); !strings.Contains(text, strings.Join(strings.Fields(promise), " ")) {
			t.Errorf("%s does not say: %s", document, promise)
		}
	}
	if promises == 0 {
		t.Error("docs/promises.md has no rows")
	}
}

// documentText returns what a document says, without its line breaks. Another name
// than a file's is a package's, and stands for its documentation.
func documentText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if dir, ok := strings.CutSuffix(name, " (package documentation)"); ok {
		text, err = os.ReadFile(filepath.Join(dir, "doc.go"))
		text = regexp.MustCompile(`(?m)^// ?`).ReplaceAll(text, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

// testNames returns the names of all tests and fuzz targets, behind that of their
// package, and of all faults behind TestFaults.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := make(map[string]bool)
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := goparser.ParseFile(token.NewFileSet(), path, nil, goparser.SkipObjectResolution)
		if err != nil {
			return err
		}
		pkg := strings.TrimSuffix(file.Name.Name, "_test")
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil {
				names[pkg+"."+f.Name.Name] = strings.HasPrefix(f.Name.Name, "Test") || strings.HasPrefix(f.Name.Name, "Fuzz")
			}
		}
		if pkg == "faults" {
			for _, id := range faultIDs(file) {
				names["TestFaults/"+id] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// faultIDs returns the ids in the tables of faults in a file: the first fields of
// what a []fault is made of.
func faultIDs(file *ast.File) []string {
	var ids []string
	ast.Inspect(file, func(n ast.Node) bool {
		table, ok := n.(*ast.CompositeLit)
		if !ok {
			return true
		}
		if array, ok := table.Type.(*ast.ArrayType); !ok || !isIdent(array.Elt, "fault") {
			return true
		}
		for _, element := range table.Elts {
			if row, ok := element.(*ast.CompositeLit); ok && len(row.Elts) > 0 {
				if lit, ok := row.Elts[0].(*ast.BasicLit); ok {
					if id, err := strconv.Unquote(lit.Value); err == nil {
						ids = append(ids, id)
					}
				}
			}
		}
		return false
	})
	return ids
}

// isIdent reports whether an expression is the given name.
func isIdent(e ast.Expr, name string) bool {
	ident, ok := e.(*ast.Ident)
	return ok && ident.Name == name
}

// TestLimiterNeedsNoCaddy guards that the library can be used without Caddy: no
// file of its packages, but for tests, imports any of it.
func TestLimiterNeedsNoCaddy(t *testing.T) {
	files := 0
	err := filepath.WalkDir("limiter", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := goparser.ParseFile(token.NewFileSet(), path, nil, goparser.ImportsOnly)
		if err != nil {
			return err
		}
		files++
		for _, spec := range file.Imports {
			if strings.Contains(spec.Path.Value, "/caddyserver/") || spec.Path.Value == `"github.com/seed-387a6c65/caddy-ratelimit"` {
				t.Errorf("%s imports %s", path, spec.Path.Value)
			}
		}
		return nil
	})
	if err != nil || files == 0 {
		t.Errorf("read %d files: %v", files, err)
	}
}
