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
)

// TestLayersNameNoAlgorithm guards that what is built on algorithms names none of them:
// an algorithm is its two files and a line in each of two lists, algorithm.go and
// core.lua. The log of admissions that one of them keeps beside its level is what the
// layers call entries. Constructors of limits, which users call, may be anywhere.
func TestLayersNameNoAlgorithm(t *testing.T) {
	own := []string{"leaky", "window", "sliding", "log", "warm", "bans"}
	names := map[string]bool{"Leaky": true, "Sliding": true, "Log": true, "WarmUp": true, "Fixed": true, "Bans": true}
	for _, name := range own {
		names[name] = true
	}
	names["logSummary"] = true
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, file := range files {
		base := strings.TrimSuffix(file, ".go")
		if strings.HasSuffix(base, "_test") || slices.Contains(own, base) || base == "algorithm" {
			continue
		}
		checked++
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && names[id.Name] {
				t.Errorf("%s: names %s", set.Position(id.Pos()), id.Name)
			}
			return true
		})
	}
	if checked < 15 {
		t.Errorf("%d files, so the test proves nothing", checked)
	}

	// In Lua the names are in the constants and in the registry, which inserts the files.
	core, err := luaFiles.ReadFile("core.lua")
	if err != nil {
		t.Fatal(err)
	}
	registry := regexp.MustCompile(`(?s)\n    algorithm = leaky\n.*?algorithm = others\[kind\]\n|--@ leaky\.lua\n|LEAKY, SLIDING, LOG, WARM, FIXED, BANS = `)
	code := regexp.MustCompile(`--[^\n]*`).ReplaceAllString(registry.ReplaceAllString(string(core), ""), "")
	for _, name := range regexp.MustCompile(`(?i)\b(leaky|window|sliding|log|logged|warm|fixed|bans)\b`).FindAllString(code, -1) {
		t.Errorf("core.lua names %s", name)
	}
}
