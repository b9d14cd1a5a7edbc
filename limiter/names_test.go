package limiter

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// TestLayersNameNoAlgorithm guards that what is built on algorithms names none of them:
// an algorithm is its two files and a line in each of two lists, algorithm.go of package
// bucket and algorithms.lua. The log of admissions that one of them keeps next to its level is
// what the layers call entries. Constructors of limits, which users call, may be anywhere;
// numbers that only one algorithm has may not, as they would stand for its name. They are
// named only where users make limits and bans: in limit.go here, and where the
// Caddy module makes them of options.
func TestLayersNameNoAlgorithm(t *testing.T) {
	const arithmetic = "../internal/bucket/"
	own := []string{"leaky", "window", "sliding", "log", "warm", "bans"}
	names := map[string]bool{"Leaky": true, "Sliding": true, "Log": true, "WarmUp": true, "Fixed": true, "Bans": true}
	for _, name := range own {
		names[name] = true
	}
	names["logSummary"] = true
	set := token.NewFileSet()
	for _, base := range own {
		for _, d := range parseGo(t, set, arithmetic+base+".go").Decls {
			if d, ok := d.(*ast.GenDecl); ok && d.Tok == token.CONST {
				for _, s := range d.Specs {
					names[s.(*ast.ValueSpec).Names[0].Name] = true
				}
			}
		}
	}
	delete(names, "MaxLogUnits") // the most entries
	checkNames := func(pattern string, least int, named func(ast.Node) *ast.Ident, except ...string) {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		checked := 0
		for _, file := range files {
			base := strings.TrimSuffix(filepath.Base(file), ".go")
			if strings.HasSuffix(base, "_test") || slices.Contains(except, base) {
				continue
			}
			checked++
			ast.Inspect(parseGo(t, set, file), func(n ast.Node) bool {
				if id := named(n); id != nil && names[id.Name] {
					t.Errorf("%s: names %s", set.Position(id.Pos()), id.Name)
				}
				return true
			})
		}
		if checked < least {
			t.Errorf("%s: %d files, so the test proves nothing", pattern, checked)
		}
	}
	identifier := func(n ast.Node) *ast.Ident {
		id, _ := n.(*ast.Ident)
		return id
	}
	checkNames("*.go", 15, identifier, "limit")
	checkNames(arithmetic+"*.go", 3, identifier, append(own, "algorithm")...)
	ofLimits := func(n ast.Node) *ast.Ident {
		if s, ok := n.(*ast.SelectorExpr); ok {
			if id, ok := s.X.(*ast.Ident); ok && (id.Name == "limiter" || id.Name == "bucket") {
				return s.Sel
			}
		}
		return nil
	}
	checkNames("../*.go", 4, ofLimits)
	checkNames("../internal/compile/*.go", 10, ofLimits, "shapes", "bans")
	checkNames("../internal/rule/*.go", 10, ofLimits, "algorithm", "ban")

	// In Lua the names are in the registry, which inserts the files.
	files, err := filepath.Glob("*.lua")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, file := range files {
		if base := strings.TrimSuffix(file, ".lua"); base == "algorithms" || slices.Contains(own, base) {
			continue
		}
		checked++
		text, err := luaFiles.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		code := regexp.MustCompile(`--[^\n]*`).ReplaceAllString(string(text), "")
		for _, name := range regexp.MustCompile(`(?i)\b(leaky|window|sliding|log|logged|warm|fixed|bans|kind [=~]= \d)\b`).FindAllString(code, -1) {
			t.Errorf("%s names %s", file, name)
		}
	}
	if checked < 5 {
		t.Errorf("%d files in Lua, so the test proves nothing", checked)
	}
}

// parseGo parses a file.
func parseGo(t *testing.T, set *token.FileSet, path string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestAlgorithmsFitTheirField guards that the first field of a stored value holds the
// number of each algorithm: of the 3 bytes that value.lua packs there, the time takes 20
// bits. A ninth algorithm needs another form, or the time of a level would be wrong.
func TestAlgorithmsFitTheirField(t *testing.T) {
	value, err := luaFiles.ReadFile("value.lua")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(value), "pack('>I3I4I4B', (kind + 8) * 1048576 +") {
		t.Error("value.lua packs values in another way, so this test has to change")
	}
	if last := len(bucket.Algorithms) - 1; last+8 >= 1<<(24-20) {
		t.Errorf("algorithm %d does not fit", last)
	}
}

// TestLettersDiffer guards that no two algorithms have values under the same key: each would
// take those of the other for none.
func TestLettersDiffer(t *testing.T) {
	by := make(map[byte]bucket.Algorithm)
	for i, k := range bucket.Algorithms {
		if other, ok := by[k.Letter]; ok {
			t.Errorf("%v and %v both have the letter %q", other, bucket.Algorithm(i), k.Letter)
		}
		by[k.Letter] = bucket.Algorithm(i)
	}
}
