// Package behaviour has the tests of what the module does in a Caddy, by subject.
package behaviour

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const (
	// patience is how long tests wait for what should come at once. It is only
	// used up when a test fails.
	patience = 30 * time.Second

	ms = time.Millisecond
	µs = time.Microsecond
)

// storage is where Caddy may write while tests run.
var storage string

func TestMain(m *testing.M) {
	caddytest.Main()
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	if _, err := os.Stat("example.Caddyfile"); err != nil { // processes that fuzz begin where it is
		if err := os.Chdir("../.."); err != nil {
			panic(err)
		}
	}
	var err error
	if storage, err = os.MkdirTemp("", "caddy"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(storage)
	// Nothing of the user's is read or written, here or in child processes.
	for _, variable := range caddytest.Home(storage) {
		name, value, _ := strings.Cut(variable, "=")
		os.Setenv(name, value)
	}
	// With the race detector each process would sleep a second before it exits.
	os.Setenv("GORACE", strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=10"))
	state.Process.SweepInterval = time.Hour // or what is drained by a clock of a test may be gone too early
	state.Process.RedisCloseDelay = 20 * ms // or the store of a test reports in the log of the next one
	return m.Run()
}

// singleGoroutine skips a test of one goroutine if the race detector is on: that has
// nothing to find there, and makes it many times slower.
func singleGoroutine(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("one goroutine: nothing for the race detector")
	}
}

// overHTTP3 skips a test under the race detector. Caddy v2.11.9 may start its tls app
// after its servers, and the detector, which sees that a read of TCP comes after the write,
// does not see it of UDP.
func overHTTP3(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("HTTP/3: a handshake looks like a race with the start of Caddy's tls app")
	}
}

// clock is the clock of the in-process store, moved by the test alone.
type clock struct{ now atomic.Int64 }

func (c *clock) advance(d time.Duration) { c.now.Add(int64(d)) }

func (c *clock) read() time.Duration { return time.Duration(c.now.Load()) }

// setup is what a test's Caddy runs.
type setup struct {
	global string // global options in addition to those of the harness
	site   string // the site that the test's requests go to
	sites  string // more sites, and what else stands beside them; {port} is the first's
	admin  string // address of the admin endpoint, off if empty
	routes string // routes in JSON instead of those of the site

	level   string // of its log; DEBUG if empty
	unnamed bool   // whether limits that the Caddyfile names get none, as in a config that is written in JSON
}

// givenNames match the names that limits without one get.
var givenNames = regexp.MustCompile(`"name":"default(-[0-9]+)?",|,"name":"default(-[0-9]+)?"`)

// json adapts the config for a server on the given address.
func (c setup) json(t testing.TB, addr, log string) []byte {
	t.Helper()
	adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(c.caddyfile(addr, log), nil)
	if err != nil {
		t.Fatalf("adapting the Caddyfile: %v", err)
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") {
			t.Fatalf("adapting the Caddyfile: %v", w)
		}
	}
	if c.unnamed {
		adapted = givenNames.ReplaceAllLiteral(adapted, nil)
	}
	if c.routes == "" {
		return adapted
	}

	var root map[string]any
	var routes []any
	if err := json.Unmarshal(adapted, &root); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(c.routes), &routes); err != nil {
		t.Fatalf("routes: %v", err)
	}
	apps := root["apps"].(map[string]any)
	servers := apps["http"].(map[string]any)["servers"].(map[string]any)
	servers["srv0"].(map[string]any)["routes"] = routes
	adapted, err = json.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	return adapted
}

func (c setup) caddyfile(addr, log string) []byte {
	_, port, _ := strings.Cut(addr, ":")
	return fmt.Appendf(nil, `{
		admin %s
		persist_config off
		default_bind 127.0.0.1
		grace_period 1s
		storage file_system %s
		log {
			output file %s {
				roll_disabled
			}
			format json
			level %s
		}
		%s
	}
	http://%s {
		log
		%s
	}
	%s`,
		cmp.Or(c.admin, "off"), storage, log, cmp.Or(c.level, "DEBUG"), c.global, addr, c.site, strings.ReplaceAll(c.sites, "{port}", port))
}

// server is a Caddy that runs in this process until its test ends.
type server struct {
	t      testing.TB
	addr   string // host:port of the site
	clock  *clock
	client *http.Client

	logPath  string
	requests atomic.Int64 // of which the access log will tell
}

// startSite runs a Caddy with one site, on a store of its own.
func startSite(t testing.TB, site string) *server {
	t.Helper()
	return startConfig(t, setup{site: site})
}

// startConfig runs a Caddy with c, on a store of its own.
func startConfig(t testing.TB, c setup) *server {
	t.Helper()
	s := &server{
		t:       t,
		clock:   new(clock),
		logPath: filepath.Join(tempDir(t), "log"),
		client: &http.Client{
			Timeout:   patience,
			Transport: &http.Transport{DisableCompression: true},
		},
	}
	s.clock.advance(time.Hour)
	original, dataDir, dir := state.Process.MakeMemory, state.Process.DataDir, tempDir(t)
	state.Process.DataDir = func() string { return dir } // its own: no test finds buckets of another one
	state.Process.MakeMemory = func() *limiter.Memory { return limiter.NewMemoryWithClock(s.clock.read) }
	state.Process.IdleMemory.Store(nil)
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		if err := caddy.Stop(); err != nil {
			t.Errorf("stopping Caddy: %v", err)
		}
		state.Process.MakeMemory, state.Process.DataDir = original, dataDir
		state.Process.IdleMemory.Store(nil)
		state.Process.Stores.Range(func(key, _ any) bool {
			t.Errorf("Caddy stopped, but a store is still in use: %T", key)
			return true
		})
	})
	if err := s.load(c); err != nil {
		t.Fatalf("starting Caddy: %v", err)
	}
	return s
}

// load makes Caddy run c. The site gets a new address, so that what is sent to
// it can't reach the config before; if c is rejected that keeps its own.
func (s *server) load(c setup) error {
	s.t.Helper()
	s.client.CloseIdleConnections()
	return caddytest.Retry(func() error {
		addr := redistest.FreeAddr(s.t)
		err := caddy.Load(c.json(s.t, addr, s.logPath), true)
		if err == nil {
			s.addr = addr
		}
		return err
	})
}

// url returns the URL of a path of the site.
func (s *server) url(path string) string { return "http://" + s.addr + path }

// get sends a GET request for path, with header fields as "Name: value".
func (s *server) get(path string, header ...string) answer {
	s.t.Helper()
	return s.send("GET", path, header...)
}

// getWithHints is get, and returns the informational responses too: the status,
// the field Link and our fields of each.
func (s *server) getWithHints(path string) (hints []string, final answer) {
	s.t.Helper()
	ctx := httptrace.WithClientTrace(s.t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			hints = append(hints, fmt.Sprint(code, " ", header.Get("Link"), " ", fieldstest.In(http.Header(header))))
			return nil
		},
	})
	final = s.sendContext(ctx, "GET", path)
	return hints, final
}

// send sends a request and returns the whole answer.
func (s *server) send(method, path string, header ...string) answer {
	s.t.Helper()
	return s.sendContext(s.t.Context(), method, path, header...)
}

// sendContext is send with a context.
func (s *server) sendContext(ctx context.Context, method, path string, header ...string) answer {
	s.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, s.url(path), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		if name == "Host" {
			req.Host = value
		} else {
			req.Header.Add(name, value)
		}
	}
	res, err := s.client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	s.requests.Add(1)
	return answer{res, string(body)}
}

// dial opens a connection to a server, until the test ends.
func dial(t testing.TB, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// from makes s send from another loopback address, as another client would.
func (s *server) from(address string) {
	s.t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	s.client.CloseIdleConnections()
	s.client.Transport = &http.Transport{DisableCompression: true, DialContext: dialer.DialContext}
}

// useHTTP2 makes s send over HTTP/2 without TLS, for a server with protocol h2c.
func (s *server) useHTTP2() {
	transport := s.client.Transport.(*http.Transport)
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
}

// answer is a response and its body.
type answer struct {
	*http.Response
	body string
}

// String returns the status and our fields, such as
// "200 limit=2 remaining=1 clear=1.000".
func (a answer) String() string {
	return strings.TrimSpace(fmt.Sprint(a.StatusCode, " ", fieldstest.In(a.Header)))
}

// step is one request of a test, and what it should come to.
type step struct {
	after  time.Duration // by which the clock moves before
	method string        // GET if empty
	path   string        // / if empty
	header []string      // fields as "Name: value"
	want   string        // as answer.String has it
	body   string        // if not empty, the whole body
}

// run takes the steps one by one.
func (s *server) run(steps ...step) {
	s.t.Helper()
	for i, st := range steps {
		s.clock.advance(st.after)
		a := s.send(cmp.Or(st.method, "GET"), cmp.Or(st.path, "/"), st.header...)
		if a.String() != st.want {
			s.t.Errorf("step %d: %s%s %q:\n got %s\nwant %s", i+1, st.method, st.path, st.header, a, st.want)
		}
		if st.body != "" && a.body != st.body {
			s.t.Errorf("step %d: %s%s %q:\n got body %q\nwant body %q",
				i+1, st.method, st.path, st.header, a.body, st.body)
		}
	}
}

// times returns n steps like st.
func times(n int, st step) []step {
	steps := make([]step, n)
	for i := range steps {
		steps[i] = st
	}
	return steps
}

// entry is a line of Caddy's log.
type entry map[string]any

// is reports whether the entry was logged at the given level by a logger whose
// name begins so.
func (e entry) is(level, logger string) bool {
	name, _ := e["logger"].(string)
	return e["level"] == level && strings.HasPrefix(name, logger)
}

// text returns the entry but for Caddy's own copy of the request, which holds
// what the client sent.
func (e entry) text() string {
	rest := make(entry, len(e))
	for k, v := range e {
		if k != "request" {
			rest[k] = v
		}
	}
	text, _ := json.Marshal(rest)
	return string(text)
}

// Loggers, by how their names begin.
const (
	ownLogger   = "http.handlers.rate_limit"
	errorLogger = "http.log.error"
)

// entries returns the log as of when all requests sent so far were handled.
func (s *server) entries() []entry {
	s.t.Helper()
	var entries []entry
	eventually(s.t, "access log of all requests", func() bool {
		if app := state.Process.Newest(); app != nil && app.Logger.Sync() != nil {
			return false
		}
		entries = readEntries(s.t, s.logPath)
		handled := int64(0)
		for _, e := range entries {
			if e["msg"] == "handled request" {
				handled++
			}
		}
		return handled >= s.requests.Load()
	})
	return entries
}

// log returns the entries of the given level and logger.
func (s *server) log(level, logger string) []entry {
	s.t.Helper()
	var found []entry
	for _, e := range s.entries() {
		if e.is(level, logger) {
			found = append(found, e)
		}
	}
	return found
}

// lastAccess returns what the access log says of the last request.
func (s *server) lastAccess() entry {
	s.t.Helper()
	for _, e := range slices.Backward(s.entries()) {
		if e["msg"] == "handled request" {
			return e
		}
	}
	s.t.Fatal("the access log is empty")
	return nil
}

// handlers returns the handlers of this module in the config that Caddy runs.
func handlers() []rule.Module {
	app, _ := caddy.ActiveContext().AppIfConfigured("http")
	return slices.Collect(maps.Keys(routes.Sites[rule.Module](app.(*caddyhttp.App))))
}

// activeServer returns the HTTP server of the config that Caddy runs.
func activeServer(t testing.TB) *caddyhttp.Server {
	t.Helper()
	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		t.Fatal(err)
	}
	return app.(*caddyhttp.App).Servers["srv0"]
}

// received returns r as if it had come over a connection.
func received(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{}))
}

// readEntries reads a log file, but for a line that is still being written.
func readEntries(t testing.TB, path string) []entry {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	var entries []entry
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		var e entry
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("log line %q: %v", lines.Text(), err)
		}
		entries = append(entries, e)
	}
	return entries
}

// eventually waits until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v in vain: %s", patience, what)
		}
	}
}

// tempDir returns a directory for the length of the test. The name of t.TempDir
// has that of the test in it, which Caddy may take for a placeholder.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(storage, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// startProcess runs a Caddy with c in a process of its own until the test ends,
// and returns the address of its site once it is served.
func startProcess(t testing.TB, c setup) (addr string) {
	t.Helper()
	addr, _ = startKillable(t, c)
	return addr
}

// startKillable is startProcess, and returns how to kill the process before.
func startKillable(t testing.TB, c setup) (addr string, kill func()) {
	t.Helper()
	err := caddytest.Retry(func() error {
		dir := tempDir(t)
		addr = redistest.FreeAddr(t)
		file := filepath.Join(dir, "Caddyfile")
		if err := os.WriteFile(file, c.caddyfile(addr, filepath.Join(dir, "log")), 0o600); err != nil {
			return err
		}
		p := runCaddy(t, nil, file)
		kill = p.Stop
		return p.Serves(addr)
	})
	if err != nil {
		t.Fatal(err)
	}
	return addr, kill
}

// runCaddy starts a Caddy with a Caddyfile in a process of its own, until the test ends.
// What it prints goes to output, if there is one.
func runCaddy(t testing.TB, output io.Writer, caddyfile string, flags ...string) *caddytest.Process {
	t.Helper()
	cmd := caddytest.Command(context.Background(), append([]string{"run", "--config", caddyfile}, flags...)...)
	cmd.Env = append(cmd.Env, caddytest.Home(filepath.Dir(caddyfile))...) // its own: it finds the buckets of the one before that had it
	cmd.Stdout, cmd.Stderr = output, output
	p, err := caddytest.Start(t, cmd)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// newUpstream starts a server for Caddy to proxy to and returns its host:port.
func newUpstream(t testing.TB, h http.HandlerFunc) string {
	upstream := httptest.NewServer(h)
	t.Cleanup(upstream.Close)
	return upstream.Listener.Addr().String()
}

// slowly gives requests time, for tests of other things than timeouts.
const slowly = "timeout 10s"

// redisGlobal returns the global option for a Redis server at addr.
func redisGlobal(addr string, options ...string) string {
	return "rate_limit {\nredis " + addr + " {\n" + strings.Join(options, "\n") + "\n}\n}"
}

// adaptCaddyfile returns the JSON that a Caddyfile stands for. A warning, such
// as that it is not formatted, is an error.
func adaptCaddyfile(src string) ([]byte, error) {
	options := map[string]any{"filename": "Caddyfile"}
	out, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), options)
	if err == nil && len(warnings) > 0 {
		err = fmt.Errorf("warnings: %v", warnings)
	}
	return out, err
}

// mayBeMeant are the kinds of advice on what examples and tests of options have.
var mayBeMeant = []advice.Kind{advice.Floodable, advice.NumberChosen, advice.ChargedTwice, advice.Unnamed, advice.ZonesDiffer}

// validateConfig loads a configuration as `caddy validate` does, without admin endpoint
// and logs. The command check has to refuse what that refuses, and nothing else. What can't be
// meant as it is, of which both would warn, is an error here: no example has it. Caddy
// can't validate two at once, so tests of what may be accepted do not run in parallel.
func validateConfig(config []byte) error {
	err := validateAsCaddy(config)
	d, refused := offline.New(config)
	if refused == nil {
		if refused = d.Validate(); refused == nil && err == nil {
			for _, a := range d.Check() {
				if !a.OnCheck && !slices.Contains(mayBeMeant, a.Kind) {
					err = errors.Join(err, fmt.Errorf("%s: %s %s", a.About(), a.Problem, a.Remedy))
					refused = err
				}
			}
		}
		d.Close()
	}
	if (err == nil) != (refused == nil) {
		return fmt.Errorf("caddy validate says: %w; check says: %w", err, refused)
	}
	return err
}

// validateAsCaddy is validateConfig without the command check.
func validateAsCaddy(config []byte) error {
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(config, &cfg); err != nil {
		return err
	}
	cfg.Admin = &caddy.AdminConfig{Disabled: true}
	cfg.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output":"discard"}`)}},
	}}
	return caddy.Validate(&cfg)
}

// validateCaddyfile adapts a Caddyfile, formatted or not, and validates what
// it stands for.
func validateCaddyfile(src string) error {
	options := map[string]any{"filename": "Caddyfile"}
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), options)
	if err != nil {
		return err
	}
	return validateConfig(config)
}

// configOf returns a configuration with one handler.
func configOf(handler string) []byte {
	return []byte(`{"apps":{"http":{"servers":{"srv":{"listen":[":8080"],` +
		`"routes":[{"handle":[{` + handler + `}]}]}}}}}`)
}

// inLines makes a Caddyfile of text that stands in one line.
func inLines(text string) string { return strings.ReplaceAll(text, "; ", "\n") }

// inLimit returns a Caddyfile with a limit.
func inLimit(block string) string {
	return ":8080 {\nrate_limit api {\n" + inLines(block) + "\n}\n}\n"
}

// inApp returns a Caddyfile with the global option.
func inApp(block string) string {
	return "{\nrate_limit {\n" + inLines(block) + "\n}\n}\n:8080 {\nrespond ok\n}\n"
}

// wrapping is what Caddy puts in front of our errors.
var wrapping = regexp.MustCompile(`^.*(parsing caddyfile tokens for 'rate_limit'|` +
	`(provision|decoding module config:) (http\.handlers\.)?rate_limit): `)

// wantError checks an error: behind what Caddy puts in front of it, it is
// exactly the one line that is wanted, nothing if it is to be accepted.
func wantError(t *testing.T, err error, want string) {
	t.Helper()
	got := ""
	if err != nil {
		got = wrapping.ReplaceAllLiteralString(err.Error(), "")
	}
	if got != want {
		t.Errorf("\n got error %q\nwant error %q", got, want)
	}
	if strings.Contains(got, "\n") {
		t.Errorf("error %q has several lines, want one", got)
	}
}

// checkStoredAgain checks that all that is ours in a configuration has a field
// in our types, and is the same when it is written from them. It returns how
// many modules of ours there are.
func checkStoredAgain(t *testing.T, config []byte) (found int) {
	t.Helper()
	check := func(module any, raw map[string]any) {
		found++
		text, err := json.Marshal(raw)
		if err != nil {
			t.Fatal(err)
		}
		if err := caddy.StrictUnmarshalJSON(text, module); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		stored, err := json.Marshal(module)
		if err != nil {
			t.Fatal(err)
		}
		var again map[string]any
		if err := json.Unmarshal(stored, &again); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(again, raw) {
			t.Errorf("stored again got\n%s\nwant\n%s", stored, text)
		}
	}
	var search func(any)
	search = func(value any) {
		switch value := value.(type) {
		case []any:
			for _, v := range value {
				search(v)
			}
		case map[string]any:
			if value["handler"] == "rate_limit" {
				delete(value, "handler") // Caddy's own
				check(new(ratelimit.Handler), value)
				return
			}
			for name, v := range value {
				if app, ok := v.(map[string]any); ok && name == "rate_limit" {
					check(new(ratelimit.App), app)
					continue
				}
				search(v)
			}
		}
	}
	var all map[string]any
	if err := json.Unmarshal(config, &all); err != nil {
		t.Fatal(err)
	}
	search(all)
	return found
}

// wantAddress is what errors say of an address.
const wantAddress = `is not valid; use a host, host:port, the path of a unix socket, or a redis://, rediss:// or unix:// URL`

// bucketAt returns the bucket of a path in the running config.
func bucketAt(t testing.TB, path string) *rule.Bucket {
	t.Helper()
	for _, h := range handlers() {
		for b := range rule.Buckets(h.Compiled().Limits) {
			if b.Path == path {
				return b.Bucket
			}
		}
	}
	t.Fatalf("the running config has no limit %s", path)
	return nil
}

// provisionApp returns an app that is ready to start, until the test ends.
func provisionApp(t *testing.T, config string) *ratelimit.App {
	t.Helper()
	app := new(ratelimit.App)
	if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
		t.Fatal(err)
	}
	if err := app.Provision(newContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cleanUp(t, app) })
	return app
}

// storeOf returns the store that decides.
func storeOf(app telemetry.App) limiter.Store {
	if c := app.Compiled(); c.Redis != nil {
		return c.Redis
	}
	return app.Compiled().Memory
}

// newContext returns the context of a config without apps, until the test ends.
func newContext(t testing.TB) caddy.Context {
	t.Helper()
	parent, err := caddy.ProvisionContext(new(caddy.Config))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(parent)
	t.Cleanup(cancel)
	return ctx
}

// cleanUp does what Caddy does with an app whose configuration ends.
func cleanUp(t *testing.T, app *ratelimit.App) {
	t.Helper()
	if err := app.Cleanup(); err != nil {
		t.Error(err)
	}
}

// setRedisCloseDelay sets for how long a store that no config uses stays open, until
// the test ends.
func setRedisCloseDelay(t testing.TB, d time.Duration) {
	original := state.Process.RedisCloseDelay
	state.Process.RedisCloseDelay = d
	t.Cleanup(func() { state.Process.RedisCloseDelay = original })
}

// readyLimit returns a limit that is ready for requests, and what it logs.
func readyLimit(t testing.TB, l *config.Limit) (*rule.Limit, *observer.ObservedLogs) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	s, err := compile.NewShared(new(config.App))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Release)
	c, err := compile.New(&config.Block{Limits: []*config.Limit{l}}, option.OnLoad)
	if err != nil {
		t.Fatal(err)
	}
	limits, err := c.Load(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	setLogger(limits[0], zap.New(core))
	return limits[0], logs
}

func setLogger(l *rule.Limit, logger *zap.Logger) {
	l.Reporter.Logger = logger
	for _, child := range l.Within {
		setLogger(child, logger)
	}
}

// testRequest is a request as handlers get it.
type testRequest struct {
	*http.Request
	replacer *caddy.Replacer
}

// newSiteRequest returns a request whose client has the address 192.0.2.1.
func newSiteRequest() *testRequest {
	r := httptest.NewRequest("GET", "/", nil)
	repl := caddy.NewReplacer()
	return &testRequest{caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server)), repl}
}

// setClient gives the request a client's address.
func (r *testRequest) setClient(address string) {
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
}

// asks returns what a store is asked when the request has to pass l.
func (r *testRequest) asks(l *rule.Limit) (buckets []limiter.Bucket, err error) {
	q, err := rule.Evaluate(r.Request, []*rule.Limit{l}, time.Time{})
	defer q.Release()
	for _, e := range q.Entries() {
		buckets = append(buckets, e.Query)
	}
	return buckets, err
}

// collectSpans makes Caddy send the spans of its tracing to the test, and returns
// them as they are encoded.
func collectSpans(t *testing.T) <-chan string {
	t.Helper()
	spans := make(chan string, 100)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		spans <- string(body)
	}))
	t.Cleanup(collector.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
	return spans
}

// plainDenial is the body of a denial that no error route handles, for a second to wait.
const plainDenial = "Too many requests. Retry after 1 s.\n"
