package operation

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// node is a Caddy process.
type node struct {
	t       testing.TB
	site    string // address of its site
	metrics string // address of its `metrics` directive, if it has one
	admin   string // address of its admin API
}

// startNode runs a Caddy until the test ends and returns when it serves. caddyfile
// returns its configuration.
func startNode(t testing.TB, caddyfile func(*node) string) *node {
	t.Helper()
	for attempt := 1; ; attempt++ {
		n := &node{t: t, site: redistest.FreeAddr(t), metrics: redistest.FreeAddr(t), admin: redistest.FreeAddr(t)}
		err := n.launch(caddyfile(n))
		if err == nil {
			return n
		}
		// Another process may have taken a port meanwhile.
		if attempt == 5 || !strings.Contains(err.Error(), "address already in use") {
			t.Fatal(err)
		}
	}
}

// launch runs the process, and returns when it serves.
func (n *node) launch(caddyfile string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	output := new(bytes.Buffer)
	cmd := exec.Command(self, "run", "--config", write(n.t, "Caddyfile", caddyfile))
	cmd.Env = append(caddyEnv(n.t), "CADDY_ADMIN="+n.admin)
	cmd.Stdout, cmd.Stderr = output, output
	exited, err := redistest.Run(cmd)
	if err != nil {
		return err
	}
	n.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-exited
	})
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		select {
		case <-exited:
			return fmt.Errorf("caddy exited: %v\n%s", cmd.ProcessState, output)
		default:
		}
		conn, err := net.Dial("tcp", n.site)
		if err == nil {
			return conn.Close()
		}
		if time.Now().After(deadline) {
			return errors.New("caddy does not serve")
		}
	}
}

// caddyEnv returns the environment in which the test binary is a Caddy.
func caddyEnv(t testing.TB) []string {
	t.Helper()
	dir := t.TempDir()
	return append(os.Environ(), asCaddy+"=1", "REDIS_PASSWORD="+redisPassword,
		"HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
}

// validate makes a Caddy adapt and provision a Caddyfile, and fails the test if it
// rejects it.
func validate(t testing.TB, caddyfile string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "validate", "--config", write(t, "Caddyfile", caddyfile))
	cmd.Env = caddyEnv(t)
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, output, caddyfile)
	}
}

// get sends a request to the site with header fields, each a name and a value, and
// returns the status of the response.
func (n *node) get(path string, fields ...string) int {
	n.t.Helper()
	status, _ := fetch(n.t, "http://"+n.site+path, fields...)
	return status
}

// redisDecided matches, in the metrics of a node, that Redis has decided on a request
// at the limit "site".
var redisDecided = regexp.MustCompile(
	`caddy_rate_limit_decisions_total\{by="redis",limit="site",result="admitted"\} [1-9]`)

// waitForRedis sends requests of several clients until Redis decides on them. Before
// that each node limits on its own.
func (n *node) waitForRedis() {
	n.t.Helper()
	redistest.WaitFor(n.t, patience, func() error {
		for i := range 10 { // some for each server of a cluster
			n.get("/", "X-Forwarded-For", fmt.Sprint("192.0.2.", i))
		}
		if _, scraped := fetch(n.t, "http://"+n.metrics+"/metrics"); !redisDecided.MatchString(scraped) {
			return errors.New("Redis does not decide")
		}
		return nil
	})
}

// fetch sends a request with header fields, each a name and a value, and returns
// the response's status and body.
func fetch(t testing.TB, url string, fields ...string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(fields); i += 2 {
		req.Header.Set(fields[i], fields[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(text)
}
