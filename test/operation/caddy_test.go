package operation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
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
func startNode(t testing.TB, caddyfile func(*node) string) (n *node) {
	t.Helper()
	err := caddytest.Retry(func() error {
		n = &node{t: t, site: redistest.FreeAddr(t), metrics: redistest.FreeAddr(t), admin: redistest.FreeAddr(t)}
		cmd := caddyCommand(t, "run", "--config", write(t, "Caddyfile", caddyfile(n)))
		cmd.Env = append(cmd.Env, "CADDY_ADMIN="+n.admin)
		p, err := caddytest.Start(t, cmd)
		if err != nil {
			return err
		}
		return p.Serves(n.site)
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// caddyCommand returns the command that runs `caddy` with some arguments.
func caddyCommand(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	cmd := caddytest.Command(context.Background(), args...)
	cmd.Env = append(append(cmd.Env, caddytest.Home(t.TempDir())...), "REDIS_PASSWORD="+redisPassword)
	return cmd
}

// validate makes a Caddy adapt and provision a Caddyfile, and fails the test if it
// rejects it.
func validate(t testing.TB, caddyfile string) {
	t.Helper()
	cmd := caddyCommand(t, "validate", "--config", write(t, "Caddyfile", caddyfile))
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
