package behaviour

import (
	"go/ast"
	goparser "go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestLoggersAreQueued guards that each logger is one of a logqueue.Queue, so that no line waits
// for the log: none of Caddy's or Zap's is used as it is, and none of Go's.
func TestLoggersAreQueued(t *testing.T) {
	t.Parallel()
	queues := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if d.IsDir() && slices.Contains([]string{"bench", "tools", "test", "internal/testing"}, path) {
			return fs.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files := token.NewFileSet()
		file, err := goparser.ParseFile(files, path, nil, goparser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			if spec.Path.Value == `"log"` || spec.Path.Value == `"log/slog"` {
				t.Errorf("%s imports %s", path, spec.Path.Value)
			}
		}
		queued := make(map[ast.Node]bool)
		ast.Inspect(file, func(n ast.Node) bool {
			if f, ok := n.(*ast.FuncDecl); ok && f.Name.Name == "init" {
				return false // there is no log yet
			}
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			text := types.ExprString(call.Fun)
			switch {
			case strings.HasSuffix(text, ".Logger") && len(call.Args) == 1: // that of a queue
				queued[call.Args[0]] = true
				queues++
			case queued[call]:
			case text == "caddy.Log", text == "zap.L", text == "zap.S", strings.HasPrefix(text, "zap.New"),
				strings.HasSuffix(text, ".Logger"), strings.HasSuffix(text, ".Slogger"):
				t.Errorf("%s: %s is not queued", files.Position(call.Pos()), text)
			}
			return true
		})
		return nil
	})
	if err != nil || queues == 0 {
		t.Errorf("%d queues, error %v", queues, err)
	}
}

// TestLogHasNoClientText guards that no line at any level has text that a client sent, or
// that an upstream answered, where a number or a matcher was to get a value from it.
func TestLogHasNoClientText(t *testing.T) {
	t.Parallel()
	const text = "<script>canary</script>"
	s := sitetest.Start(t, `
		rate_limit /cost {
			size 10
			cost {header.X-Sent}
		}
		rate_limit /size {
			size {header.X-Sent}
		}
		rate_limit /actual {
			size 10
			drip_rate 1h
			actual_cost {header.X-Sent}
		}
		rate_limit /matcher {
			size 10
			limit within {
				match expression `+"`{\"a\": 1}[{header.X-Sent}] > 1`"+`
				size 10
			}
		}
		respond ok`)
	for path, status := range map[string]int{"/cost": 400, "/size": 500, "/actual": 200, "/matcher": 500} {
		if got := s.Get(path, "X-Sent: "+text); got.StatusCode != status {
			t.Errorf("%s: got status %d, want %d", path, got.StatusCode, status)
		}
	}
	logged := 0
	for _, e := range s.Entries() {
		if name, _ := e["logger"].(string); !strings.HasPrefix(name, sitetest.OwnLogger) {
			continue
		}
		logged++
		if strings.Contains(e.Text(), "canary") {
			t.Errorf("the log has %s", e.Text())
		}
	}
	if logged < 4 {
		t.Errorf("the log has %d lines of the module, want at least 4", logged)
	}
}
