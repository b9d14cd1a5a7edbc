package ratelimit

import (
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
		tests := raceTests(t, dir)
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

// raceTests returns the tests of a package that do something else under the race
// detector.
func raceTests(t *testing.T, dir string) (tests []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, function := range strings.Split(string(source), "\nfunc ")[1:] {
			name, body, _ := strings.Cut(function, "(")
			if strings.HasPrefix(name, "Test") && (strings.Contains(body, "singleGoroutine(t)") || strings.Contains(body, "raceEnabled")) {
				tests = append(tests, name)
			}
		}
	}
	return tests
}
