package ratelimit

import (
	"go/ast"
	goparser "go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestRaceSkipsAreRun guards that make test runs without the race detector what is
// skipped or shortened under it.
func TestRaceSkipsAreRun(t *testing.T) {
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	pattern := func(line string) *regexp.Regexp {
		found := regexp.MustCompile(`(?m)^` + line + `$`).FindSubmatch(makefile)
		if found == nil {
			t.Fatalf("the Makefile has no line that matches %s", line)
		}
		return regexp.MustCompile(string(found[1]))
	}
	run, skip := pattern(`\tgo test -run '(.*)' \.`), pattern(`TESTS_OF_SERVERS = (.*)`)
	for dir, runs := range map[string]func(name string) bool{
		".":       run.MatchString,
		"limiter": func(name string) bool { return !skip.MatchString(name) },
	} {
		tests := testsThatUse(t, dir, "singleGoroutine", "raceEnabled")
		if len(tests) < 3 {
			t.Errorf("%s: got only %v", dir, tests)
		}
		for _, name := range tests {
			if !runs(name) {
				t.Errorf("%s: make test does not run %s without the race detector", dir, name)
			}
		}
	}
}

// testsThatUse returns the tests of a package in which any of the names occur.
func testsThatUse(t *testing.T, dir string, names ...string) (tests []string) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		parsed, err := goparser.ParseFile(token.NewFileSet(), file, nil, goparser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range parsed.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			used := false
			ast.Inspect(f, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok {
					for _, name := range names {
						used = used || id.Name == name
					}
				}
				return !used
			})
			if used {
				tests = append(tests, f.Name.Name)
			}
		}
	}
	return tests
}
