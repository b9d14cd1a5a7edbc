package limiter

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// order has the files of this package from the bottom to the top: each uses only what is
// declared in those before it.
var order = strings.Fields(`
	doc limit consistency request decision siphash prepare outcome level store held limiter
	table partition heldunits original memory entries forget levels sweep logs share holding take visit save load
	event clock keys redisoptions denycache states query wire script flights accounts removals follow fallback
	renewal ledger calls closing report lease crossslot stats redis inspect clear hold`)

// upward are the exceptions: what a file uses of one above it.
var upward = []string{
	"request -> held", // a Request has what is to settle it
	"held -> states",  // which has what servers hold of it
}

// TestFilesUseThoseBelow guards the order in which the files of this package can be read: what
// is asked and told, the Memory, what is in flight, Redis.
func TestFilesUseThoseBelow(t *testing.T) {
	t.Parallel()
	set := token.NewFileSet()
	var files []*ast.File
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		if !slices.Contains(order, strings.TrimSuffix(name, ".go")) {
			t.Errorf("%s has no place in the order of files", name)
		}
		files = append(files, parseGo(t, set, name))
	}
	info := &types.Info{Uses: make(map[*ast.Ident]types.Object)}
	config := types.Config{Importer: importer.ForCompiler(set, "gc", exported(t))}
	pkg, err := config.Check("limiter", set, files, info)
	if err != nil {
		t.Fatal(err)
	}

	fileOf := func(at token.Pos) string {
		return strings.TrimSuffix(filepath.Base(set.Position(at).Filename), ".go")
	}
	example, uses := make(map[string]string), 0
	for id, used := range info.Uses {
		if used.Pkg() != pkg {
			continue
		}
		uses++
		from, to := fileOf(id.Pos()), fileOf(used.Pos())
		if slices.Index(order, to) > slices.Index(order, from) {
			example[from+" -> "+to] = fmt.Sprintf("%s at %s", id.Name, set.Position(id.Pos()))
		}
	}
	if uses < 5000 {
		t.Errorf("only %d uses found", uses)
	}
	for _, arrow := range upward {
		if example[arrow] == "" {
			t.Errorf("%s is an exception that nothing needs", arrow)
		}
		delete(example, arrow)
	}
	for arrow, at := range example {
		t.Errorf("%s goes up: %s", arrow, at)
	}
}

// exported returns a function that opens what the compiler has exported of a package that this
// one imports.
func exported(t *testing.T) importer.Lookup {
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".")
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	for line := range bytes.Lines(out) {
		if path, file, found := strings.Cut(strings.TrimSpace(string(line)), " "); found {
			files[path] = file
		}
	}
	return func(path string) (io.ReadCloser, error) { return os.Open(files[path]) }
}
