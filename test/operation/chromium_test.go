package operation

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// chromium runs a headless Chromium on a page and returns what it wrote to its
// standard output. The test fails if the page wrote anything to its console, as a
// browser does when a page breaks its own Content-Security-Policy.
//
// Without the program the test is skipped; with the environment variable CI set it
// fails, because a skipped test would count as passed there.
func chromium(t *testing.T, url string, options ...string) string {
	t.Helper()
	// As in the Makefile.
	path := program(t, "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
	// Not t.TempDir: processes that end late still write to it.
	profile, err := os.MkdirTemp("", "chromium")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(profile) })

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	args := append([]string{
		"--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--user-data-dir=" + profile,
		// What it would otherwise fetch by itself.
		"--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
		"--disable-default-apps", "--disable-extensions", "--metrics-recording-only", "--no-pings",
		"--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
		"--enable-logging=stderr", "--v=0",
	}, options...)
	cmd := exec.CommandContext(ctx, path, append(args, url)...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		t.Fatalf("chromium: %v\n%s", err, log.String())
	}
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "CONSOLE") {
			t.Errorf("console: %s", line)
		}
	}
	return out.String()
}
