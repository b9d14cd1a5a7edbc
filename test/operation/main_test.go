// Package operation tests what operators use, with the programs that they use: a
// real Prometheus scrapes real instances under load, answers every query of the
// dashboard and raises the alerts; a real Chromium opens the report of a replay; a real
// nginx decides as the documents say. The files in deploy are checked as far as that is
// possible without Docker, Kubernetes and Grafana.
//
//	make test-operation        installs what is missing, and runs all
//	go test . -v -run Monitor  one test
package operation

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
)

const (
	// root is the repository's directory, and deploy that of the files to deploy.
	root   = "../.."
	deploy = root + "/deploy"

	// patience is how long to wait for what should happen at once.
	patience = 30 * time.Second
)

func TestMain(m *testing.M) {
	caddytest.Main()
	os.Exit(m.Run())
}

// program returns the path of the first of some programs that is installed, or that
// `make test-operation` has put into the checkout. Without any the test is skipped;
// with the environment variable CI set it fails, because a skipped test would count
// as passed there.
func program(t testing.TB, names ...string) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
		own, err := filepath.Abs(filepath.Join(root, ".programs/usr/bin", name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(own); err == nil {
			return own
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("none of %q is installed, and CI must not go without this test", names)
	}
	t.Skipf("none of %q is installed", names)
	return ""
}

// run runs a program in a directory and returns what it prints. It fails the test
// if the program fails.
func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, output)
	}
	return string(output)
}

// read returns the text of a file.
func read(t testing.TB, elements ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// write writes a file of the test's own and returns its path.
func write(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	writeAt(t, path, text)
	return path
}

// writeAt writes a file.
func writeAt(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
