package docs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// documents returns the paths of all documents that may have examples in them.
func documents(t *testing.T) []string {
	t.Helper()
	docs, err := filepath.Glob("docs/*.md")
	if err != nil || len(docs) == 0 {
		t.Fatalf("found no documents: %v", err)
	}
	internals, err := filepath.Glob("docs/internals/*.md")
	if err != nil || len(internals) == 0 {
		t.Fatalf("found no documents for contributors: %v", err)
	}
	docs = append(docs, internals...)
	return append(docs, "README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md", "bench/results.md", "test/faults/results.md",
		"deploy/README.md", "deploy/recipes.md")
}

// TestDocumentedCode guards the examples in all documents. A block of
// language `caddyfile` is valid, either as a whole file or as part of a site;
// one of language `json` is valid as a configuration or as a handler. The other
// languages have tests of their own below, and a language without a test fails.
func TestDocumentedCode(t *testing.T) {
	racetest.SingleGoroutine(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	found := make(map[string]int)
	for _, path := range documents(t) {
		for _, b := range doctest.Blocks(t, path) {
			found[b.Language]++
			t.Run(fmt.Sprintf("%s %s", b.Language, b.Place), func(t *testing.T) {
				var err error
				switch b.Language {
				case "caddyfile":
					err = validateSnippet(withSecrets(t, b.Code, secret))
				case "json":
					err = validateJSON(withSecrets(t, b.Code, secret))
				case "sh":
					err = validateShell(t, b.Code)
				case "go":
					if !strings.HasPrefix(b.Place, "docs/clients.md:") { // see TestClientExamples
						err = validateGo(t, b.Code)
					}
				case "yaml", "text": // see TestDocumentedConversions
				case "console", "http": // see TestConsole and TestDocumentedFields
				case "mermaid": // a picture
				case "bash", "python", "javascript": // see TestClientExamples
				case "nginx": // see TestRecipes and TestNginxExample
				case "promql":
					err = validateQuery(b.Code)
				default:
					err = fmt.Errorf("no test checks blocks of language %q", b.Language)
				}
				if err != nil {
					t.Errorf("%s: %v\n%s", b.Place, err, b.Code)
				}
			})
		}
	}
	for _, language := range []string{"caddyfile", "json", "sh", "go"} {
		if found[language] == 0 {
			t.Errorf("found no block of language %q", language)
		}
	}
}

// TestSnippetsPassCheck guards that `caddy rate-limit check` has no warning for what people
// copy from the documents, unless the text after the code says that it has.
func TestSnippetsPassCheck(t *testing.T) {
	racetest.SingleGoroutine(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const said = "`check` warns"
	checked, excused := 0, 0
	for _, path := range documents(t) {
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		after := doctest.Fenced.Split(string(page), -1)[1:] // the text after each block of code
		for i, b := range doctest.Blocks(t, path) {
			if b.Language != "caddyfile" {
				continue
			}
			checked++
			beside, _, _ := strings.Cut(after[i], "\n#")
			r := sitetest.RunCommand(t, "check", "--config", sitetest.ConfigFile(t, asSite(withSecrets(t, b.Code, secret), "example.com")))
			switch warns := r.Status >= 2; {
			case r.Errors != "" || !warns && !strings.HasPrefix(r.Out, "No problems found.\n"):
				t.Errorf("%s: status %d\n%s%s", b.Place, r.Status, r.Out, r.Errors)
			case warns && !strings.Contains(beside, said):
				t.Errorf("%s: the text after it does not say that %s\n%s", b.Place, said, r.Out)
			case warns:
				excused++
			case strings.Contains(beside, said):
				t.Errorf("%s: the text after it says that %s, and it does not", b.Place, said)
			}
		}
	}
	if checked < 50 || excused > 8 {
		t.Errorf("checked %d snippets, %d of which have warnings", checked, excused)
	}
}

// TestAdviceIsDocumented guards that the page of the commands has each kind of advice, as
// ignore_advice takes it.
func TestAdviceIsDocumented(t *testing.T) {
	page, err := os.ReadFile("docs/commands.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range advice.Kinds {
		if !strings.Contains(string(page), "`"+kind.String()+"`") {
			t.Errorf("the page lacks %s", kind)
		}
	}
}

// validateShell checks that commands name targets of the Makefile, packages and
// directories that exist.
func validateShell(t *testing.T, code string) error {
	t.Helper()
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	module, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t)
	name := regexp.MustCompile(`^'?(Test[\w/]+)\$?'?$`)
	dir := "."
	for line := range strings.Lines(code) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		for _, word := range words[1:] {
			switch {
			case words[0] == "make" && !strings.Contains(word, "=") && !bytes.Contains(makefile, []byte("\n"+word+":")):
				return fmt.Errorf("the Makefile has no target %s", word)
			case words[0] == "xcaddy" && strings.Contains(word, "/") && !bytes.HasPrefix(module, []byte("module "+word+"\n")):
				return fmt.Errorf("this is not module %s", word)
			case strings.TrimSpace(line) == "caddy run --config Caddyfile --watch": // see TestRecipes
			case words[0] == "caddy" && strings.HasPrefix(word, "--"):
				if c := subcommand(words[2]); c == nil || c.Flag(word[2:]) == nil {
					return fmt.Errorf("caddy rate-limit has no command %s with a flag %s", words[2], word)
				}
			case words[0] == "cd":
				dir = filepath.Join(dir, word)
			case words[0] == "install" && strings.HasPrefix(word, "deploy/"), words[0] == "go" && strings.HasPrefix(word, "./"):
				if _, err := os.Stat(filepath.Join(dir, word)); err != nil {
					return err
				}
			case words[0] == "go" && name.MatchString(word):
				test := name.FindStringSubmatch(word)[1]
				if !tests[test] && !tests["behaviour."+test] {
					return fmt.Errorf("there is no test %s", test)
				}
			}
		}
		if _, err := os.Stat(dir); err != nil {
			return err
		}
		// The last six prepare the unit, see TestUnit in test/operation, or Debian's package; of jq
		// see TestDeniedInAccessLog.
		known := []string{"make", "xcaddy", "cd", "go", "caddy", "jq", "install", "groupadd", "useradd", "systemctl", "dpkg-divert", "update-alternatives"}
		if !slices.Contains(known, words[0]) {
			return fmt.Errorf("no test knows the command %s", words[0])
		}
	}
	return nil
}

// validateGo checks that code, or an import of a package of ours, stands in the
// examples of packages limiter and httplimit, which are run.
func validateGo(t *testing.T, code string) error {
	t.Helper()
	var examples []byte
	for _, path := range []string{"limiter/example_test.go", "limiter/httplimit/example_test.go"} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		examples = append(examples, text...)
	}
	plain := func(code string) string { return strings.Join(strings.Fields(code), " ") }
	want := strings.TrimPrefix(plain(code), "import ")
	if want == "" || !strings.Contains(plain(string(examples)), want) {
		return errors.New("it is not part of example_test.go of limiter or httplimit")
	}
	return nil
}

// TestDeniedInAccessLog guards the command in docs/on-call.md that counts denials by limit and
// client: it finds those of the site above it in its access log.
func TestDeniedInAccessLog(t *testing.T) {
	blocks := doctest.Blocks(t, "docs/on-call.md")
	site, ok := strings.CutPrefix(blocks[0].Code, "example.com {\n\tlog\n")
	if !ok {
		t.Fatalf("the site is another one:\n%s", blocks[0].Code)
	}
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) })
	s := sitetest.Start(t, strings.ReplaceAll(strings.TrimSuffix(site, "}\n"), "localhost:9000", upstream))
	for range 103 {
		s.Get("/")
	}
	s.Entries()
	command := strings.NewReplacer("access.log", s.LogPath, "T15", "T").Replace(blocks[1].Code)
	out, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput()
	if want := regexp.MustCompile(`^ *3 \d{4}-\d\d-\d\dT\d\d\tsite\t127\.0\.0\.1\n$`); err != nil || !want.Match(out) {
		t.Errorf("got %q, %v, want three denials by site", out, err)
	}
}

// TestConsole guards the session in the README: the requests, sent to the example
// one after the other with a few milliseconds between them, have the
// responses that are shown, but for the date.
func TestConsole(t *testing.T) {
	example, err := os.ReadFile("example.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	_, site, _ := strings.Cut(string(example), "\nhttp://localhost:8080 {")
	s := sitetest.Start(t, site[:strings.LastIndex(site, "}")])
	date := regexp.MustCompile(`(?m)^Date: .*$`)
	commands := 0
	for _, path := range documents(t) {
		for _, b := range doctest.Blocks(t, path) {
			if b.Language != "console" {
				continue
			}
			for call := range strings.SplitSeq(strings.TrimSpace(b.Code), "\n\n$ ") {
				command, want, _ := strings.Cut(strings.TrimPrefix(call, "$ "), "\n")
				raw, err := curl(s, command)
				if err != nil {
					t.Errorf("%s: %v", b.Place, err)
					continue
				}
				got := date.ReplaceAllString(strings.ReplaceAll(raw, "\r\n", "\n"), "Date:")
				if want := date.ReplaceAllString(want, "Date:"); strings.TrimSpace(got) != want {
					t.Errorf("%s:\ngot\n%s\nwant\n%s", b.Place, got, want)
				}
				s.Clock.Advance(7 * time.Millisecond)
				commands++
			}
		}
	}
	if commands == 0 {
		t.Error("found no commands")
	}
}

// curlCommand is what TestConsole understands: one header field, and the path.
var curlCommand = regexp.MustCompile(`^curl -i (?:-H '([^']+)' )?http://localhost:8080(/\S*)$`)

// curl sends the request of a command, and returns the response as it arrives.
func curl(s *sitetest.Site, command string) (string, error) {
	parts := curlCommand.FindStringSubmatch(command)
	if parts == nil {
		return "", fmt.Errorf("no test knows the command %s", command)
	}
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(sitetest.Patience)); err != nil {
		return "", err
	}
	header := "Host: " + s.Addr + "\r\n"
	if parts[1] != "" {
		header += parts[1] + "\r\n"
	}
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\n%s\r\n", parts[2], header); err != nil {
		return "", err
	}
	var raw bytes.Buffer
	res, err := http.ReadResponse(bufio.NewReader(io.TeeReader(conn, &raw)), nil)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	s.Requests.Add(1)
	return raw.String(), err
}

// TestDocumentedFields guards the header fields that are shown behind an example:
// the first response to a search has them.
func TestDocumentedFields(t *testing.T) {
	examples := 0
	for _, path := range documents(t) {
		var before doctest.Block
		for _, b := range doctest.Blocks(t, path) {
			if b.Language == "http" {
				examples++
				res := sitetest.Start(t, before.Code).Get("/api/search", "X-Api-Key: alice")
				for line := range strings.Lines(b.Code) {
					name, want, _ := strings.Cut(strings.TrimSpace(line), ": ")
					if got := res.Header.Get(name); got != want {
						t.Errorf("%s: %s: got %q, want %q", b.Place, name, got, want)
					}
				}
			}
			before = b
		}
	}
	if examples != 1 {
		t.Errorf("found %d examples, want 1", examples)
	}
}

// TestDocumentedLogLines guards that the messages in the table of log lines are
// those of the code.
func TestDocumentedLogLines(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("internal/telemetry/*.go")
	if err != nil {
		t.Fatal(err)
	}
	var source []byte
	for _, path := range append(files, more...) {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		source = append(source, text...)
	}
	source = regexp.MustCompile(`"\s*\+\s*"`).ReplaceAll(source, nil) // texts of several lines
	doc, err := os.ReadFile("docs/failure.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile("(?m)^\\| (ERROR|WARN|INFO) \\| `([^`]+)` \\|").FindAllStringSubmatch(string(doc), -1)
	if len(rows) == 0 {
		t.Fatal("found no log lines")
	}
	for _, row := range rows {
		method := row[1][:1] + strings.ToLower(row[1][1:])
		if !bytes.Contains(source, []byte("."+method+"(\""+row[2]+"\"")) {
			t.Errorf("no %s line of the code says %q", row[1], row[2])
		}
	}
}

// TestDocumentedLinks guards that links from one document to another, and to
// headings, lead somewhere.
func TestDocumentedLinks(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for _, path := range documents(t) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range link.FindAllStringSubmatch(string(text), -1) {
			target, heading, _ := strings.Cut(match[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			file := path
			if target != "" {
				file = filepath.Join(filepath.Dir(path), target)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: link to %s: %v", path, match[1], err)
			} else if heading != "" && !slices.Contains(doctest.Anchors(t, file), heading) {
				t.Errorf("%s: link to %s: no such heading", path, match[1])
			}
		}
	}
}

// TestDocumentedTables guards that tables are shown as tables, with all of their cells: each
// row has as many as its heading.
func TestDocumentedTables(t *testing.T) {
	t.Parallel()
	divider := regexp.MustCompile(`^ *\|( *:?-+:? *\|)+ *$`)
	cell := regexp.MustCompile(`(?:[^|\\]|\\.)*\|`)
	tables := 0
	for _, path := range append(documents(t), "CHANGELOG.md") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		rows := strings.Split(doctest.Fenced.ReplaceAllStringFunc(string(text), func(block string) string {
			return strings.Repeat("\n", strings.Count(block, "\n")) // so that lines keep their numbers
		}), "\n")
		want := 0 // cells of the table that a line is in, 0 if it is in none
		for i, row := range rows {
			cells := len(cell.FindAllString(row, -1)) // and the text in front of the first
			switch {
			case divider.MatchString(row):
				tables++
				if want = cells; i == 0 || len(cell.FindAllString(rows[i-1], -1)) != want {
					t.Errorf("%s:%d: the heading has other cells than the line below it: %s", path, i, rows[max(i-1, 0)])
				}
			case !strings.HasPrefix(strings.TrimSpace(row), "|"):
				want = 0
			case want > 0 && cells != want:
				t.Errorf("%s:%d: got %d cells, want %d: %s", path, i+1, cells-1, want-1, row)
			case want == 0 && (i+1 == len(rows) || !divider.MatchString(rows[i+1])):
				t.Errorf("%s:%d: a row without a table: %s", path, i+1, row)
			}
		}
	}
	if tables < 50 {
		t.Errorf("found only %d tables", tables)
	}
}

// validateQuery returns an error if a query asks for a metric that there is not.
// Tests of the dashboard run queries like these.
func validateQuery(query string) error {
	names := regexp.MustCompile(`caddy_rate_limit_\w+`).FindAllString(query, -1)
	if len(names) == 0 {
		return errors.New("it asks for none of our metrics")
	}
	descriptions := make(chan *prometheus.Desc, 100)
	state.Default.Describe(descriptions)
	close(descriptions)
	known := make(map[string]bool)
	for d := range descriptions {
		name := regexp.MustCompile(`fqName: "(\w+)"`).FindStringSubmatch(d.String())[1]
		known[name], known[name+"_bucket"] = true, true
	}
	for _, name := range names {
		if !known[name] {
			return fmt.Errorf("there is no metric %s", name)
		}
	}
	return nil
}

// TestRunbooks guards that each alert leads to the section that says what to do about it.
func TestRunbooks(t *testing.T) {
	t.Parallel()
	const page = "docs/on-call.md"
	alerts, err := os.ReadFile("deploy/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, rules, _ := strings.Cut(string(alerts), "- alert: ")
	for rule := range strings.SplitSeq(rules, "- alert: ") {
		name, rest, _ := strings.Cut(rule, "\n")
		url := "/caddy-ratelimit/blob/main/" + page + "#" + strings.ToLower(name) + "\n"
		if !strings.Contains(rest, "runbook_url: https://github.com/") || !strings.Contains(rest, url) {
			t.Errorf("%s has no runbook_url that ends with %s", name, url)
		}
		if !bytes.Contains(text, []byte("\n### "+name+"\n")) {
			t.Errorf("%s has no section %s", page, name)
		}
	}
}

// sessionSite is the site of the recorded session.
const sessionSite = `
	rate_limit {
		limit api {
			rate 60/1m
			limit search {
				match path /search /search/
				rate 5/1m
				track_top 100
			}
		}
		limit tenant {
			match header X-Tenant *
			key {header.X-Tenant}
			rate 1000/30m
		}
	}
	respond ok`

// TestSession guards that the session in docs/commands.md is what the commands
// print, but for the numbers in it.
func TestSession(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: sessionSite})
	for range 8 {
		s.Get("/search")
	}
	s.From("127.0.0.2")
	s.Get("/", "X-Tenant: acme")
	// What is recorded does not show where the test has run.
	config := sitetest.ConfigFile(t, "http://localhost:8080 {\n"+sessionSite+"\n}\n")
	shown := strings.NewReplacer(config, "Caddyfile", " --address "+a.Addr, "")

	var session strings.Builder
	for _, args := range [][]string{
		{"explain", "--config", config, "-H", "X-Tenant: acme", "http://localhost:8080/search"},
		{"check", "--config", config},
		{"status", "--address", a.Addr},
		{"peek", "--address", a.Addr, "api/search", "127.0.0.1"},
	} {
		r := sitetest.RunCommand(t, args...)
		if r.Status != 0 || r.Errors != "" {
			t.Errorf("%q: %+v", args, r)
		}
		line := strings.ReplaceAll(strings.Join(args, " "), "X-Tenant: acme", "'X-Tenant: acme'")
		session.WriteString("$ caddy rate-limit " + shown.Replace(line) + "\n" + strings.TrimSpace(r.Out) + "\n\n")
	}
	got := strings.TrimSpace(session.String()) + "\n"
	numbers := regexp.MustCompile(`[\d.]+(µs|ms|m|s)?|\((devel)\)|unknown|v\d\S*`)
	spaces := regexp.MustCompile(` +`)
	guardPart(t, "docs/commands.md", "session", "```text\n"+got+"```\n", func(text string) string {
		return spaces.ReplaceAllString(numbers.ReplaceAllString(text, "0"), " ")
	})
}

// TestPromises guards docs/internals/promises.md: every row names a test, and every test
// that is named exists.
func TestPromises(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("docs/internals/promises.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t)
	rows := regexp.MustCompile(`(?m)^\| (.+) \| (.+) \|$`).FindAllStringSubmatch(string(page), -1)
	if len(rows) == 0 {
		t.Error("docs/internals/promises.md has no rows")
	}
	for _, row := range rows {
		if row[1] == "Guarantee" {
			continue
		}
		names := regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1)
		if len(names) == 0 {
			t.Errorf("no test for: %s", row[1])
		}
		for _, name := range names {
			if !tests[name[1]] {
				t.Errorf("no test or fault is called %s: %s", name[1], row[1])
			}
		}
	}
}

// testNames returns the names of all tests and fuzz targets, behind that of their
// package, and of all faults behind TestFaults.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := make(map[string]bool)
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := goparser.ParseFile(token.NewFileSet(), path, nil, goparser.SkipObjectResolution)
		if err != nil {
			return err
		}
		pkg := strings.TrimSuffix(file.Name.Name, "_test")
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil {
				names[pkg+"."+f.Name.Name] = strings.HasPrefix(f.Name.Name, "Test") || strings.HasPrefix(f.Name.Name, "Fuzz")
			}
		}
		if pkg == "faults" {
			for _, id := range faultIDs(file) {
				names["TestFaults/"+id] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// faultIDs returns the ids in the tables of faults in a file: the first fields of
// what a []fault is made of.
func faultIDs(file *ast.File) []string {
	var ids []string
	ast.Inspect(file, func(n ast.Node) bool {
		table, ok := n.(*ast.CompositeLit)
		if !ok {
			return true
		}
		if array, ok := table.Type.(*ast.ArrayType); !ok || !isIdent(array.Elt, "fault") {
			return true
		}
		for _, element := range table.Elts {
			if row, ok := element.(*ast.CompositeLit); ok && len(row.Elts) > 0 {
				if lit, ok := row.Elts[0].(*ast.BasicLit); ok {
					if id, err := strconv.Unquote(lit.Value); err == nil {
						ids = append(ids, id)
					}
				}
			}
		}
		return false
	})
	return ids
}

// isIdent reports whether an expression is the given name.
func isIdent(e ast.Expr, name string) bool {
	ident, ok := e.(*ast.Ident)
	return ok && ident.Name == name
}

// subcommand returns one of caddy rate-limit, or nil.
func subcommand(name string) *cobra.Command {
	all := new(cobra.Command)
	caddycmd.Commands()["rate-limit"].CobraFunc(all)
	for _, c := range all.Commands() {
		if c.Name() == name {
			return c
		}
	}
	return nil
}
