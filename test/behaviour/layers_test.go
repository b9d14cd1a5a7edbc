package behaviour

import (
	goparser "go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestLayers guards which packages know which: the limiter can be used without Caddy, the
// arithmetic below it imports nothing but the standard library, and the packages under
// internal know nothing of the root, which hands them what they need. The admin API reads rules,
// options and counts: what it reads knows nothing of it. Tests may import what
// they like. The root has few files, so that a reader finds what is where.
func TestLayers(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	files = slices.DeleteFunc(files, func(file string) bool { return strings.HasSuffix(file, "_test.go") })
	if want := []string{"caddyfile.go", "handler.go", "headers.go", "module.go"}; !slices.Equal(files, want) {
		t.Errorf("the root has %q, want %q", files, want)
	}
	isAdmin := func(path string) bool { return strings.Contains(path, "/internal/admin/") }
	const root = `"github.com/seed-387a6c65/caddy-ratelimit"`
	for dir, forbidden := range map[string]func(path string) bool{
		"limiter":                    func(path string) bool { return path == root || strings.Contains(path, "/caddyserver/") },
		"internal":                   func(path string) bool { return path == root },
		"internal/outcome/fieldtext": func(path string) bool { return strings.Contains(path, "/caddyserver/") }, // for httplimit
		"internal/request/clientip":  func(path string) bool { return strings.Contains(path, ".") },             // the same
		"internal/bucket":            func(path string) bool { return strings.Contains(path, ".") },
		"internal/compile":           isAdmin,
		"internal/config":            isAdmin,
		"internal/rule":              isAdmin,
		"internal/outcome":           isAdmin,
		"internal/telemetry":         isAdmin,
		"internal/state":             isAdmin,
		"internal/advice":            isAdmin,
		"internal/directive":         isAdmin,
		"internal/key":               isAdmin,
		"limiter/internal/redisscript": func(path string) bool {
			return strings.Contains(path, "/caddyserver/") || strings.HasSuffix(path, `/limiter"`)
		},
	} {
		files := 0
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := goparser.ParseFile(token.NewFileSet(), path, nil, goparser.ImportsOnly)
			if err != nil {
				return err
			}
			files++
			for _, spec := range file.Imports {
				if forbidden(spec.Path.Value) {
					t.Errorf("%s imports %s", path, spec.Path.Value)
				}
			}
			return nil
		})
		if err != nil || files == 0 {
			t.Errorf("%s: read %d files: %v", dir, files, err)
		}
	}
}
