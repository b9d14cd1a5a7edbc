package docs

import (
	"cmp"
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	goparser "go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
)

// TestCaddyWebsite guards that Caddy's website can list and document this package: its
// generator, caddyserver/moduledoc, reads the source and types of what is registered. It takes
// caddy.RegisterModule(new(T)) or RegisterModule(T{}) and an ID that is a literal, and fails
// without a reason on other forms, and on a type that contains itself. Each option is
// documented by the comment above its field.
func TestCaddyWebsite(t *testing.T) {
	t.Parallel()
	var ids []string
	options := 0
	for _, p := range ownPackages(t) {
		for _, m := range p.modules(t) {
			ids = append(ids, m.id)
			w := websiteReader{t: t, docs: p.docs, options: make(map[string]bool)}
			w.read(m.typ, m.id, nil)
			options += len(w.options)
		}
	}
	slices.Sort(ids)
	if want := []string{"admin.api.rate_limit", "caddy.listeners.rate_limit", "http.handlers.rate_limit", "rate_limit"}; !slices.Equal(ids, want) {
		t.Errorf("found modules %q, want %q", ids, want)
	}
	if options < len(config.LimitOptions)+len(config.BlockOptions) {
		t.Errorf("found only %d options", options)
	}
}

// userEnv is the environment before TestMain changes it, with the caches of the go command.
var userEnv = os.Environ()

// ownPackage is a package of this module.
type ownPackage struct {
	syntax []*ast.File
	types  *types.Package
	info   *types.Info
	docs   map[token.Pos]bool // the fields of all packages that have a comment above them
}

// ownPackages returns the packages of this module that the root package consists of, with their
// types. Those of others come from what the compiler exports, as go list tells it.
func ownPackages(t *testing.T) (packages []*ownPackage) {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json=ImportPath,Export,Dir,GoFiles,Module", ".")
	list.Env = userEnv
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v", list, err)
	}
	set, docs := token.NewFileSet(), make(map[token.Pos]bool)
	exported, own := make(map[string]string), make(map[string]*types.Package)
	others := importer.ForCompiler(set, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exported[path]) })
	check := types.Config{Importer: importerFunc(func(path string) (*types.Package, error) {
		if p := own[path]; p != nil {
			return p, nil
		}
		return others.Import(path)
	})}
	decoder := json.NewDecoder(strings.NewReader(string(out)))
	for { // a package comes after those that it imports
		var listed struct {
			ImportPath, Export, Dir string
			GoFiles                 []string
			Module                  struct{ Main bool }
		}
		switch err := decoder.Decode(&listed); {
		case errors.Is(err, io.EOF):
			return packages
		case err != nil:
			t.Fatal(err)
		}
		exported[listed.ImportPath] = listed.Export
		if !listed.Module.Main {
			continue
		}
		p := &ownPackage{info: &types.Info{Uses: make(map[*ast.Ident]types.Object)}, docs: docs}
		for _, name := range listed.GoFiles {
			file, err := goparser.ParseFile(set, filepath.Join(listed.Dir, name), nil, goparser.ParseComments|goparser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			p.syntax = append(p.syntax, file)
			ast.Inspect(file, func(n ast.Node) bool {
				if f, ok := n.(*ast.Field); ok && f.Doc != nil {
					for _, name := range f.Names {
						docs[name.Pos()] = true
					}
				}
				return true
			})
		}
		if p.types, err = check.Check(listed.ImportPath, set, p.syntax, p.info); err != nil {
			t.Fatal(err)
		}
		own[listed.ImportPath] = p.types
		packages = append(packages, p)
	}
}

// importerFunc is a function that imports packages.
type importerFunc func(path string) (*types.Package, error)

// Import implements types.Importer.
func (f importerFunc) Import(path string) (*types.Package, error) { return f(path) }

// registered is a module as the generator finds it.
type registered struct {
	id  string
	typ types.Type
}

// modules returns the modules that a package registers.
func (p *ownPackage) modules(t *testing.T) (modules []registered) {
	t.Helper()
	ids, names := make(map[string]string), make(map[string]bool)
	for _, file := range p.syntax {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				if s, ok := n.Fun.(*ast.SelectorExpr); !ok || s.Sel.Name != "RegisterModule" {
					return true
				}
				if name := registeredType(n.Args[0]); name != nil {
					names[name.Name] = true
					modules = append(modules, registered{name.Name, p.info.Uses[name].Type()})
				} else {
					t.Errorf("%s: RegisterModule takes something else than new(T) or T{}", p.types.Path())
				}
			case *ast.FuncDecl:
				if n.Recv != nil && n.Name.Name == "CaddyModule" {
					name := strings.TrimPrefix(types.ExprString(n.Recv.List[0].Type), "*")
					if ids[name] = literalID(n); ids[name] == "" {
						t.Errorf("%s: the ID of %s is not a literal in its only statement", p.types.Path(), name)
					}
				}
			}
			return true
		})
	}
	for name := range ids {
		if !names[name] {
			t.Errorf("%s: %s is a module that is not registered", p.types.Path(), name)
		}
	}
	for i, m := range modules {
		modules[i].id = cmp.Or(ids[m.id], "module without ID: "+m.id)
	}
	return modules
}

// registeredType returns the T of new(T) or T{}, or nil.
func registeredType(argument ast.Expr) *ast.Ident {
	var of ast.Expr
	switch a := argument.(type) {
	case *ast.CompositeLit:
		of = a.Type
	case *ast.CallExpr:
		if f, ok := a.Fun.(*ast.Ident); ok && f.Name == "new" {
			of = a.Args[0]
		}
	}
	name, _ := of.(*ast.Ident)
	return name
}

// literalID returns the ID in what the method CaddyModule returns, or "".
func literalID(method *ast.FuncDecl) (id string) {
	if len(method.Body.List) != 1 {
		return ""
	}
	returned, _ := method.Body.List[0].(*ast.ReturnStmt)
	if returned == nil || len(returned.Results) != 1 {
		return ""
	}
	info, _ := returned.Results[0].(*ast.CompositeLit)
	if info == nil {
		return ""
	}
	for _, element := range info.Elts {
		field, _ := element.(*ast.KeyValueExpr)
		if field == nil || types.ExprString(field.Key) != "ID" {
			continue
		}
		if literal, ok := field.Value.(*ast.BasicLit); ok {
			id, _ = strconv.Unquote(literal.Value)
		}
	}
	return id
}

// websiteReader reads types as the generator does.
type websiteReader struct {
	t       *testing.T
	docs    map[token.Pos]bool
	options map[string]bool // of types of this module
}

// read reads a type and all that are within it. at is where it stands, and within the types
// that are being read.
func (w *websiteReader) read(typ types.Type, at string, within []*types.Named) {
	switch typ := types.Unalias(typ).(type) {
	case *types.Interface:
	case *types.Basic:
		if typ.Info()&(types.IsBoolean|types.IsNumeric|types.IsString) == 0 {
			w.t.Errorf("%s: has type %v, which can't be shown", at, typ)
		}
	case *types.Pointer:
		w.read(typ.Elem(), at, within)
	case *types.Slice:
		w.read(typ.Elem(), at, within)
	case *types.Map:
		w.read(typ.Key(), at, within)
		w.read(typ.Elem(), at, within)
	case *types.Struct:
		w.readFields(typ, at, within)
	case *types.Named:
		switch {
		case typ.String() == "encoding/json.RawMessage": // a module
		case slices.Contains(within, typ):
			w.t.Errorf("%s: %v contains itself, so that the generator does not end", at, typ)
		default:
			w.read(typ.Underlying(), at, append(slices.Clip(within), typ))
		}
	default:
		w.t.Errorf("%s: has type %v, which can't be shown", at, typ)
	}
}

// readFields reads the fields of a struct that JSON has.
func (w *websiteReader) readFields(s *types.Struct, at string, within []*types.Named) {
	for i := range s.NumFields() {
		f := s.Field(i)
		name, _, _ := strings.Cut(reflect.StructTag(s.Tag(i)).Get("json"), ",")
		if !f.Exported() || name == "-" || name == "" && !f.Embedded() {
			continue
		}
		path := at
		if !f.Embedded() {
			path += "/" + name
			if own := strings.HasPrefix(f.Pkg().Path(), "github.com/seed-387a6c65/"); own && !w.docs[f.Pos()] {
				w.t.Errorf("%s: has no comment above its field", path)
			} else if own {
				w.options[path] = true
			}
		}
		w.read(f.Type(), path, within)
	}
}
