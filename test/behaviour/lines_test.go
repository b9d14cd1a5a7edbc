package behaviour

import (
	"go/ast"
	goparser "go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// line is a line of the log.
type line struct{ level, msg string }

// lines are the lines that requests cause, by the function that logs them. Functions with
// none run when a config is loaded, or beside requests.
var lines = map[string][]line{
	"App.Provision":      nil,
	"App.logStoreChange": nil,
	"Compiler.setZones":  nil,
	"Compiler.warnZones": nil,
	"App.warnUnintended": nil,
	"Reporter.NoKey": {
		{"warn", "a request has no value for the key of this limit, using the client's address"},
		{"warn", "a request has neither a value for the key of this limit nor a client address, " +
			"as on a unix socket without trusted_proxies_unix; all such requests share one bucket"},
	},
	"Reporter.SharedByProxy": {
		{"warn", "the key of this limit is probably the address of a proxy, so that all its visitors share one bucket"},
	},
	"Reporter.BadValue": {{"error", "the value of a placeholder can't be used; requests are rejected"}},
	"Reporter.NoCost": {
		{"warn", "the actual cost of a request is not a whole number, so its estimated cost is charged"},
		{"warn", "a response does not say what its request has cost, so an estimate is charged; this is logged once an hour"},
	},
	"Reporter.SlowAtMin": {
		{"warn", "the upstream is slower than latency with only min requests in progress; if it is not broken or used by others, latency is too low for it"},
	},
	"Handler.logError":    {{"error", "a matcher failed; requests are rejected"}},
	"Handler.undecided":   {{"debug", "no decision on a request, admitting it"}},
	"Handler.reject":      {{"debug", "request rejected"}},
	"Handler.logExceeded": {{"info", "rate limit exceeded"}},

	"logRedis":            nil,
	"clientLogger.Printf": nil,
	"emitter.warn":        nil, // by a request that bans, see TestBlockedEventHandler
	"emitter.emit":        nil,
	"fullLimit.log":       nil,
	"File.load":           nil,
	"File.save":           nil,
	"File.warn":           nil,
}

// TestLinesAreQueued guards that all lines go through a logqueue.Queue, and that
// TestBlockedLogDelaysNoLine knows of all functions that log: no other logger of Caddy's is
// used, and none of Go's.
func TestLinesAreQueued(t *testing.T) {
	t.Parallel()
	logs := make(map[string]bool)
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if d.IsDir() && slices.Contains([]string{"bench", "tools", "test", "internal/testing"}, path) {
			return fs.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := goparser.ParseFile(token.NewFileSet(), path, nil, goparser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			if spec.Path.Value == `"log"` || spec.Path.Value == `"log/slog"` {
				t.Errorf("%s imports %s", path, spec.Path.Value)
			}
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok {
				for _, logger := range loggersOf(f) {
					t.Errorf("%s: %s uses %s, want it queued", path, funcName(f), logger)
				}
				if logsLines(f) {
					logs[funcName(f)] = true
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := slices.Sorted(maps.Keys(logs)), slices.Sorted(maps.Keys(lines)); !slices.Equal(got, want) {
		t.Errorf("lines are logged by\n%q\nwant\n%q\nAdd what is new to lines, and have TestBlockedLogDelaysNoLine ask for it.", got, want)
	}
}

// funcName returns the name of a function, with its receiver's type.
func funcName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	return strings.TrimPrefix(types.ExprString(f.Recv.List[0].Type), "*") + "." + f.Name.Name
}

// loggersOf returns the loggers that f takes and does not have queued.
func loggersOf(f *ast.FuncDecl) (loggers []string) {
	queued := make(map[ast.Expr]bool)
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		fun, text := call.Fun, types.ExprString(call.Fun)
		selector, ok := fun.(*ast.SelectorExpr)
		switch {
		case !ok:
		case selector.Sel.Name == "Logger" && len(call.Args) == 1: // that of a queue
			queued[call.Args[0]] = true
		case queued[call], funcName(f) == "init": // which runs before there is a log
		case text == "caddy.Log", text == "zap.L", text == "zap.S", strings.HasPrefix(text, "zap.New"),
			selector.Sel.Name == "Logger", selector.Sel.Name == "Slogger":
			loggers = append(loggers, text)
		}
		return true
	})
	return loggers
}

// logsLines reports whether f logs a line.
func logsLines(f *ast.FuncDecl) (logs bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			if selector, ok := call.Fun.(*ast.SelectorExpr); ok {
				switch selector.Sel.Name {
				case "Debug", "Info", "Warn", "Error", "DPanic", "Panic", "Fatal", "Log", "Check":
					on := types.ExprString(selector.X)
					logs = logs || on == "log" || strings.HasSuffix(strings.ToLower(on), "logger") || strings.HasSuffix(on, "Logger()") ||
						strings.HasPrefix(on, "log.") || strings.HasSuffix(on, "Log()")
				}
			}
		}
		return true
	})
	return logs
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
