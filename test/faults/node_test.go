package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

const (
	// patience is how long to wait for what should happen at once.
	patience = 20 * time.Second

	// timeout is the longest that a request may wait for Redis: the default.
	timeout = 50 * time.Millisecond

	// slack is how much waits may exceed their bound: the processes share a few
	// cores with the servers and the load.
	slack = 35 * time.Millisecond
)

// node is a Caddy process.
type node struct {
	t     testing.TB
	addr  string // address of its site
	admin string
	dir   string
	caddy *caddytest.Process
	write func(n *node) string // makes its Caddyfile
}

// slowPath is where the slow limit applies and the hot one does not.
const slowPath = "/slow"

// site is what nodes serve unless a fault needs something else: the hot limit, 20
// requests and one more every 100 ms, and the slow one, 10 requests and one more
// every hour.
const site = `
	@hot not path /slow
	rate_limit @hot hot {
		key {header.X-Key}
		size 20
		drip_rate 100ms
	}
	rate_limit /slow slow {
		key {header.X-Key}
		size 10
		drip_rate 1h
	}
	respond ok
`

// counted is site with one more limit in each block, which never denies and is
// charged whatever the other limit decides, so that each request that Redis
// decides is a call. With site, some denials are cached until the next drip.
const counted = `
	@hot not path /slow
	rate_limit @hot hot {
		accounting each
		key {header.X-Key}
		size 20
		drip_rate 100ms
		limit all {
			size 1000000
			drip_rate 1ms
		}
	}
	rate_limit /slow slow {
		accounting each
		key {header.X-Key}
		size 10
		drip_rate 1h
		limit all {
			size 1000000
			drip_rate 1ms
		}
	}
	respond ok
`

// redisAt returns the redis option, with more options in its block.
func redisAt(addresses string, options ...string) string {
	return "redis " + addresses + " {\n" + strings.Join(options, "\n") + "\n}\n"
}

// caddyfile returns a node's configuration: options are those of the global
// rate_limit block.
func caddyfile(options, site string) func(*node) string {
	return func(n *node) string {
		return fmt.Sprintf(`{
			admin %s
			persist_config off
			default_bind 127.0.0.1
			grace_period 1s
			servers {
				max_header_size 2MB
			}
			storage file_system %s
			log {
				output file %s {
					roll_disabled
				}
				format json
				level INFO
			}
			rate_limit {
				%s
			}
		}
		http://%s {
			%s
		}
		`, n.admin, n.dir, filepath.Join(n.dir, "log"), options, n.addr, site)
	}
}

// startNodes runs Caddy processes until the test ends, and returns once they
// serve.
func startNodes(t testing.TB, count int, write func(*node) string) []*node {
	t.Helper()
	nodes := make([]*node, count)
	for i := range nodes {
		nodes[i] = startNode(t, write)
	}
	return nodes
}

// startNode runs one Caddy process until the test ends.
func startNode(t testing.TB, write func(*node) string) (n *node) {
	t.Helper()
	err := caddytest.Retry(func() error {
		n = &node{t: t, addr: redistest.FreeAddr(t), admin: redistest.FreeAddr(t), dir: tempDir(t), write: write}
		if err := os.WriteFile(n.file(), []byte(write(n)), 0o600); err != nil {
			return err
		}
		return n.launch("--config", n.file())
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// tempDir returns a directory for the length of the test.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // the name of t.TempDir contains the name of the test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// file returns the path of the node's Caddyfile.
func (n *node) file() string { return filepath.Join(n.dir, "Caddyfile") }

// launch runs the node's process, with options of `caddy run`, and returns once it
// serves.
func (n *node) launch(options ...string) (err error) {
	cmd := caddytest.Command(context.Background(), append([]string{"run"}, options...)...)
	cmd.Env = append(cmd.Env, caddytest.Home(n.dir)...)
	if n.caddy, err = caddytest.Start(n.t, cmd); err != nil {
		return err
	}
	if err = n.caddy.Serves(n.addr); err != nil {
		return err
	}
	// Caddy starts the site before other apps, or after them, and tells its config once all of it runs.
	res, err := admin.Get("http://" + n.admin + "/config/")
	if err == nil {
		err = res.Body.Close()
	}
	return err
}

// client asks sites, and admin their admin endpoints, whose connections do not outlast a
// reload.
var (
	client = &http.Client{Transport: caddytest.Resending{RoundTripper: http.DefaultTransport}}
	admin  = &http.Client{Transport: caddytest.FreshConnections("")}
)

// reload makes the node run the result of write, and returns the error if the node
// rejects it.
func (n *node) reload(write func(*node) string) error {
	req, err := http.NewRequest(http.MethodPost, "http://"+n.admin+"/load", strings.NewReader(write(n)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "text/caddyfile")
	req.Header.Set("Cache-Control", "must-revalidate") // load it even if it is the same
	res, err := admin.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, _ := io.ReadAll(res.Body)
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", body)
	}
	return nil
}

// get sends one request with the given key, and returns the response.
func (n *node) get(key string) *http.Response {
	n.t.Helper()
	return n.ask("/", "X-Key", key)
}

// ask sends one request with the given header fields, each a name and a value, and
// returns the response.
func (n *node) ask(path string, fields ...string) *http.Response {
	n.t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+n.addr+path, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	for i := 0; i < len(fields); i += 2 {
		req.Header.Set(fields[i], fields[i+1])
	}
	res, err := client.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	return res
}

// usage is the resources that a process holds.
type usage struct{ goroutines, files, rss int }

// usage returns the node's resources after a garbage collection.
func (n *node) usage() usage {
	n.t.Helper()
	_, _ = n.debug("heap?gc=1")
	profile, err := n.debug("goroutine?debug=1")
	if err != nil {
		n.t.Fatal(err)
	}
	var u usage
	if _, err := fmt.Sscanf(profile, "goroutine profile: total %d", &u.goroutines); err != nil {
		n.t.Fatal(err)
	}
	proc := filepath.Join("/proc", strconv.Itoa(n.caddy.Pid))
	files, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		n.t.Fatal(err)
	}
	u.files = len(files)
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		n.t.Fatal(err)
	}
	_, rss, _ := strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscan(rss, &u.rss); err != nil {
		n.t.Fatal(err)
	}
	return u
}

// debug returns a profile of the node.
func (n *node) debug(profile string) (string, error) {
	res, err := admin.Get("http://" + n.admin + "/debug/pprof/" + profile)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return string(text), err
}

// event is a line in the node's log from this module.
type event struct {
	Level  string  `json:"level"`
	Time   float64 `json:"ts"`
	Logger string  `json:"logger"`
	Text   string  `json:"msg"`
	Reason string  `json:"reason"`
	Error  string  `json:"error"`
}

// at returns when the event was logged.
func (e event) at() time.Time { return time.UnixMicro(int64(e.Time * 1e6)) }

// Kinds of events, by their levels.
const (
	lost  = "error"
	back  = "info"
	lapse = "warn"
)

// events returns what the module has logged since the given time.
func (n *node) events(since time.Time) []event {
	n.t.Helper()
	var events []event
	for line := range strings.Lines(n.log()) {
		var e event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			continue // it is being written
		}
		if strings.Contains(e.Logger, "rate_limit") && !e.at().Before(since.Add(-time.Millisecond)) {
			events = append(events, e)
		}
	}
	return events
}

// log returns the node's whole log.
func (n *node) log() string {
	n.t.Helper()
	text, err := os.ReadFile(filepath.Join(n.dir, "log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.t.Fatal(err)
	}
	return string(text)
}

// count returns how many of the events have the given level.
func count(events []event, level string) int {
	n := 0
	for _, e := range events {
		if e.Level == level {
			n++
		}
	}
	return n
}

// reasons returns the reasons why servers were down, each once.
func reasons(events []event) string {
	var found []string
	for _, e := range events {
		if e.Reason != "" && !strings.Contains(strings.Join(found, " "), e.Reason) {
			found = append(found, e.Reason)
		}
	}
	return strings.Join(found, " ")
}

// decisions returns the number of script calls that servers have run. With counted
// and only a few requests at a time, that is the number of decisions.
func decisions(t testing.TB, servers ...*redistest.Server) int {
	t.Helper()
	n := int64(0)
	for _, s := range servers {
		n += s.CommandStat(t, "evalsha")
	}
	return int(n)
}

// eventually waits until ok returns true, and returns how long that took.
func eventually(t testing.TB, what string, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !ok() {
		if time.Since(began) > patience {
			t.Fatalf("waited %v in vain: %s", patience, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(began)
}
