// Package sitetest runs Caddys with a site for tests, in their process or in one of their own,
// sends requests to them, and reads what they answer and log. A test that imports it imports
// the modules that its Caddy has besides the standard ones.
package sitetest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard" // what Caddyfiles of tests use

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Patience is how long tests wait for what should come at once. It is only
// used up when a test fails.
const Patience = 30 * time.Second

// Storage is where Caddy may write while tests run.
var Storage string

// Main runs the tests of a package, in the directory of the module, with nothing of the user's:
// each TestMain is a call of it.
func Main(m *testing.M) {
	caddytest.Main()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	for _, err := os.Stat("go.mod"); err != nil; _, err = os.Stat("go.mod") {
		if err := os.Chdir(".."); err != nil {
			panic(err)
		}
	}
	var err error
	if Storage, err = os.MkdirTemp("", "caddy"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(Storage)
	// Nothing of the user's is read or written, here or in child processes.
	for _, variable := range caddytest.Home(Storage) {
		name, value, _ := strings.Cut(variable, "=")
		_ = os.Setenv(name, value)
	}
	// With the race detector each process would sleep a second before it exits.
	_ = os.Setenv("GORACE", strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=10"))
	state.Default = NewProcess(telemetry.Options{})
	return m.Run()
}

// NewProcess returns the state of a process for a test.
func NewProcess(counted telemetry.Options) *state.Process {
	p := state.New(counted)
	p.SweepInterval = time.Hour               // or what is drained by a clock of a test may be gone too early
	p.RedisCloseDelay = 20 * time.Millisecond // or the store of a test reports in the log of the next one
	return p
}

// Clock is the clock of the in-process store, moved by the test alone.
type Clock struct{ now atomic.Int64 }

// Advance moves the clock forward.
func (c *Clock) Advance(d time.Duration) { c.now.Add(int64(d)) }

// Now returns how far the clock has gone.
func (c *Clock) Now() time.Duration { return time.Duration(c.now.Load()) }

// Config is what a test's Caddy runs.
type Config struct {
	Global string // global options in addition to those of the harness
	Site   string // the site that the test's requests go to
	Sites  string // more sites, and what else stands beside them; {port} is the first's
	Admin  string // address of the admin endpoint, off if empty; a process has one at a time
	Routes string // routes in JSON instead of those of the site

	Level   string // of its log; DEBUG if empty
	Unnamed bool   // whether limits that the Caddyfile names get none, as in a config that is written in JSON

	Process *state.Process // of Start; a new one if nil
}

// GivenNames match, in JSON, the names that limits without one get from a Caddyfile.
var GivenNames = regexp.MustCompile(`"name":"default(-[0-9]+)?",|,"name":"default(-[0-9]+)?"`)

// JSON returns what Caddyfile does, adapted, with the routes of c if it has any.
func (c Config) JSON(t testing.TB, addr, log string) []byte {
	t.Helper()
	adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(c.Caddyfile(addr, log), nil)
	if err != nil {
		t.Fatalf("adapting the Caddyfile: %v", err)
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") {
			t.Fatalf("adapting the Caddyfile: %v", w)
		}
	}
	if c.Unnamed {
		adapted = GivenNames.ReplaceAllLiteral(adapted, nil)
	}
	if c.Routes == "" {
		return adapted
	}

	var root map[string]any
	var routes []any
	if err := json.Unmarshal(adapted, &root); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(c.Routes), &routes); err != nil {
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

// Caddyfile returns the config for a server on the given address, which logs to a file.
func (c Config) Caddyfile(addr, log string) []byte {
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
		cmp.Or(c.Admin, "off"), Storage, log, cmp.Or(c.Level, "DEBUG"), c.Global, addr, c.Site, strings.ReplaceAll(c.Sites, "{port}", port))
}

// Site is a Caddy that runs in this process until its test ends. Its state is its own, as if it
// had a process of its own, so tests with sites may run in parallel, unless they have an admin
// endpoint.
type Site struct {
	t       testing.TB
	Addr    string // host:port of the site
	Clock   *Clock // of its limits in the process
	Client  *http.Client
	Process *state.Process

	caddy    bool      // whether it is the one config that Caddy runs
	instance *instance // that runs otherwise

	LogPath  string
	Requests atomic.Int64 // that its access log will have
}

// Start runs a Caddy with one site, on a store of its own.
func Start(t testing.TB, site string) *Site {
	t.Helper()
	return StartConfig(t, Config{Site: site})
}

// StartConfig runs a Caddy with c, on a store of its own.
func StartConfig(t testing.TB, c Config) *Site {
	t.Helper()
	s := &Site{
		t:       t,
		Clock:   new(Clock),
		LogPath: filepath.Join(TempDir(t), "log"),
		Client: &http.Client{
			Timeout:   Patience,
			Transport: &http.Transport{DisableCompression: true},
		},
		Process: c.Process,
		caddy:   c.Admin != "",
	}
	if s.Process == nil {
		s.Process = NewProcess(telemetry.Options{})
	}
	s.Clock.Advance(time.Hour)
	dir := TempDir(t)
	s.Process.DataDir = func() string { return dir } // its own: no test finds buckets of another one
	s.Process.MakeMemory = func() *limiter.Memory { return limiter.NewMemoryWithClock(s.Clock.Now) }
	t.Cleanup(func() {
		s.Client.CloseIdleConnections()
		s.Stop()
		s.Process.Stores.Range(func(key, _ any) bool {
			t.Errorf("Caddy stopped, but a store is still in use: %T", key)
			return true
		})
	})
	if err := s.Load(c); err != nil {
		t.Fatalf("starting Caddy: %v", err)
	}
	return s
}

// Load makes Caddy run c. The site gets a new address, so that what is sent to
// it can't reach the config before; if c is rejected that keeps its own.
func (s *Site) Load(c Config) error {
	s.t.Helper()
	s.Client.CloseIdleConnections()
	return caddytest.Retry(func() error {
		addr := redistest.FreeAddr(s.t)
		config := c.JSON(s.t, addr, s.LogPath)
		err := In(s.Process, func() error { return s.run(config) })
		if err == nil {
			s.Addr = addr
		}
		return err
	})
}

// Reload makes Caddy run c, which it is to accept.
func (s *Site) Reload(c Config) {
	s.t.Helper()
	if err := s.Load(c); err != nil {
		s.t.Fatal(err)
	}
}

// run makes Caddy run a config instead of the one before.
func (s *Site) run(config []byte) error {
	if s.caddy {
		return caddy.Load(config, true)
	}
	next, err := newInstance(config)
	if err != nil {
		return err
	}
	before := s.instance
	s.instance = next
	return before.stop()
}

// Stop stops Caddy before the test ends.
func (s *Site) Stop() {
	s.t.Helper()
	err := In(s.Process, func() error {
		if s.caddy {
			return caddy.Stop()
		}
		before := s.instance
		s.instance = nil
		return before.stop()
	})
	if err != nil {
		s.t.Errorf("stopping Caddy: %v", err)
	}
}

// Context returns the context of the config that runs.
func (s *Site) Context() caddy.Context {
	if s.caddy {
		return caddy.ActiveContext()
	}
	return s.instance.Context
}

// LongTimeout is the option of Redis that gives requests time, for tests of other things than
// timeouts.
const LongTimeout = "timeout 10s"

// RedisGlobal returns the global option for a Redis server at addr.
func RedisGlobal(addr string, options ...string) string {
	return "rate_limit {\nredis " + addr + " {\n" + strings.Join(options, "\n") + "\n}\n}"
}
