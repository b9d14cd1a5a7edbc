package ratelimit

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const (
	// asCaddy is the environment variable that makes the test binary a Caddy
	// with this module in it: tests start it as a process of its own.
	asCaddy = "RATELIMIT_TEST_AS_CADDY"

	// patience is how long tests wait for what should come at once. It is only
	// used up when a test fails.
	patience = 30 * time.Second

	// inUse is what errors say when another process took a port that was free
	// a moment before.
	inUse = "address already in use"
)

// storage is where Caddy may write while tests run.
var storage string

func TestMain(m *testing.M) {
	if os.Getenv(asCaddy) != "" {
		caddycmd.Main()
		return
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	var err error
	if storage, err = os.MkdirTemp("", "caddy"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(storage)
	// Nothing of the user's is read or written, here or in child processes.
	for _, name := range []string{"HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"} {
		os.Setenv(name, storage)
	}
	return m.Run()
}

// clock is the clock of the in-process store, moved by the test alone.
type clock struct{ now atomic.Int64 }

func (c *clock) advance(d time.Duration) { c.now.Add(int64(d)) }

func (c *clock) read() time.Duration { return time.Duration(c.now.Load()) }

// config is what a test's Caddy runs.
type config struct {
	global string // global options in addition to those of the harness
	site   string // the site that the test's requests go to
	sites  string // more sites, and what else stands beside them; {port} is the first's
	admin  string // address of the admin endpoint, off if empty
	routes string // routes in JSON instead of those of the site
}

// json adapts the config for a server on the given address.
func (c config) json(t testing.TB, addr, log string) []byte {
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

func (c config) caddyfile(addr, log string) []byte {
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
			level DEBUG
		}
		%s
	}
	http://%s {
		log
		%s
	}
	%s`,
		cmp.Or(c.admin, "off"), storage, log, c.global, addr, c.site, strings.ReplaceAll(c.sites, "{port}", port))
}

// server is a Caddy that runs in this process until its test ends.
type server struct {
	t      testing.TB
	addr   string // host:port of the site
	clock  *clock
	client *http.Client

	logPath  string
	requests int // of which the access log will tell
}

// startSite runs a Caddy with one site, on a store of its own.
func startSite(t testing.TB, site string) *server {
	t.Helper()
	return startConfig(t, config{site: site})
}

// startConfig runs a Caddy with c, on a store of its own.
func startConfig(t testing.TB, c config) *server {
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
	original := newMemory
	newMemory = func() *limiter.Memory { return limiter.NewMemory(s.clock.read) }
	kept.Store(nil)
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		if err := caddy.Stop(); err != nil {
			t.Errorf("stopping Caddy: %v", err)
		}
		newMemory = original
		kept.Store(nil)
		stores.Range(func(key, _ any) bool {
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
func (s *server) load(c config) error {
	s.t.Helper()
	s.client.CloseIdleConnections()
	const attempts = 5
	for n := 1; ; n++ {
		addr := redistest.FreeAddr(s.t)
		err := caddy.Load(c.json(s.t, addr, s.logPath), true)
		if err == nil {
			s.addr = addr
			return nil
		}
		if n == attempts || !strings.Contains(err.Error(), inUse) {
			return err
		}
	}
}

// url returns the URL of a path of the site.
func (s *server) url(path string) string { return "http://" + s.addr + path }

// get sends a GET request for path, with header fields as "Name: value".
func (s *server) get(path string, header ...string) answer {
	s.t.Helper()
	return s.send("GET", path, header...)
}

// send sends a request and returns the whole answer.
func (s *server) send(method, path string, header ...string) answer {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url(path), nil)
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
	s.requests++
	return answer{res, string(body)}
}

// answer is a response and its body.
type answer struct {
	*http.Response
	body string
}

// String returns the status and our fields, such as
// "200 limit=2 remaining=1 clear=1.000".
func (a answer) String() string {
	return strings.TrimSpace(fmt.Sprint(a.StatusCode, " ", fieldsIn(a.Header)))
}

// fieldsIn returns the fields in h that rate limits may set, briefly. Where one
// stands more than once its values are separated by "|".
func fieldsIn(h http.Header) string {
	var text []string
	for _, f := range []struct{ name, brief string }{
		{"X-RateLimit-Limit", "limit"},
		{"X-RateLimit-Remaining", "remaining"},
		{"X-RateLimit-Clear", "clear"},
		{"X-RateLimit-Reset", "reset"},
		{"Retry-After", "retry-after"},
		{"RateLimit-Policy", "policy"},
		{"RateLimit", "ratelimit"},
	} {
		if values := h.Values(f.name); len(values) > 0 {
			text = append(text, f.brief+"="+strings.Join(values, "|"))
		}
	}
	return strings.Join(text, " ")
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
		entries = readEntries(s.t, s.logPath)
		handled := 0
		for _, e := range entries {
			if e["msg"] == "handled request" {
				handled++
			}
		}
		return handled >= s.requests
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
func startProcess(t testing.TB, c config) (addr string) {
	t.Helper()
	const attempts = 5
	for n := 1; ; n++ {
		addr, err := tryProcess(t, c)
		if err == nil {
			return addr
		}
		if n == attempts || !strings.Contains(err.Error(), inUse) {
			t.Fatal(err)
		}
	}
}

// tryProcess is startProcess, with an error if the process exits.
func tryProcess(t testing.TB, c config) (addr string, err error) {
	t.Helper()
	dir := tempDir(t)
	addr = redistest.FreeAddr(t)
	file := filepath.Join(dir, "Caddyfile")
	caddyfile := c.caddyfile(addr, filepath.Join(dir, "log"))
	if err := os.WriteFile(file, caddyfile, 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	output := new(bytes.Buffer)
	cmd := exec.Command(self, "run", "--config", file)
	cmd.Env = append(os.Environ(), asCaddy+"=1")
	cmd.Stdout, cmd.Stderr = output, output
	exited, err := redistest.Run(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-exited
	})
	eventually(t, "a Caddy process that serves", func() bool {
		select {
		case <-exited:
			err = fmt.Errorf("the Caddy process exited: %v\n%s", cmd.ProcessState, output)
			return true
		default:
		}
		conn, errDial := net.Dial("tcp", addr)
		if errDial == nil {
			conn.Close()
		}
		return errDial == nil
	})
	return addr, err
}
