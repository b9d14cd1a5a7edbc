// Command typecheck type-checks the packages in this directory and below for other systems. That
// finds what differs there, such as an int of 32 bits or a function of the system, and takes some
// seconds; to build them, all of Caddy would be compiled for each system.
//
//	go run ./internal/testing/typecheck windows/386 darwin/arm64
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func main() {
	failed := false
	for _, system := range os.Args[1:] {
		checked, errs := check(system)
		for _, err := range errs {
			fmt.Fprintf(os.Stderr, "%s: %v\n", system, err)
		}
		failed = failed || len(errs) > 0
		fmt.Printf("%s: %d packages\n", system, checked)
	}
	if failed {
		os.Exit(1)
	}
}

// listed is a package as go list shows it.
type listed struct {
	ImportPath, Dir string
	GoFiles         []string
	ImportMap       map[string]string
	DepOnly         bool
	Error           *struct{ Err string }
	Module          *struct{ GoVersion string }
}

// check type-checks all packages for a system, and returns how many there are.
func check(system string) (checked int, errs []error) {
	goos, goarch, _ := strings.Cut(system, "/")
	list := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,GoFiles,ImportMap,DepOnly,Error,Module", "./...")
	list.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+goarch)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return 0, []error{err}
	}
	known := imported{"unsafe": types.Unsafe}
	for packages := json.NewDecoder(bytes.NewReader(out)); ; { // each after those that it imports
		var p listed
		if err := packages.Decode(&p); errors.Is(err, io.EOF) {
			return checked, errs
		} else if err != nil {
			return checked, append(errs, err)
		}
		if p.ImportPath == "unsafe" {
			continue
		}
		found := known.add(&p, types.SizesFor("gc", goarch))
		if !p.DepOnly { // what dependencies have is theirs
			checked++
			errs = append(errs, found...)
		}
	}
}

// imported are the packages that are known, by path.
type imported map[string]*types.Package

// Import implements types.Importer.
func (known imported) Import(path string) (*types.Package, error) {
	if p := known[path]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("no package %s", path)
}

// add type-checks a package, if it is a dependency without the bodies of its functions.
func (known imported) add(p *listed, sizes types.Sizes) (errs []error) {
	if p.Error != nil {
		errs = append(errs, errors.New(p.Error.Err))
	}
	fset := token.NewFileSet()
	files := make([]*ast.File, 0, len(p.GoFiles))
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		files = append(files, f)
	}
	conf := types.Config{
		Importer: renamed{known, p.ImportMap}, Sizes: sizes, IgnoreFuncBodies: p.DepOnly,
		Error: func(err error) { errs = append(errs, err) },
	}
	if p.Module != nil && p.Module.GoVersion != "" {
		conf.GoVersion = "go" + p.Module.GoVersion
	}
	known[p.ImportPath], _ = conf.Check(p.ImportPath, fset, files, nil)
	return errs
}

// renamed finds packages by the paths that one package imports them by, as those that the
// standard library has copies of.
type renamed struct {
	imported
	paths map[string]string
}

// Import implements types.Importer.
func (r renamed) Import(path string) (*types.Package, error) {
	if to, ok := r.paths[path]; ok {
		path = to
	}
	return r.imported.Import(path)
}
