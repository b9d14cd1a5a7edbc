package sitetest

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// StartProcess runs a Caddy with c in a process of its own until the test ends,
// and returns the address of its site once it is served.
func StartProcess(t testing.TB, c Config) (addr string) {
	t.Helper()
	addr, _ = StartKillable(t, c)
	return addr
}

// StartKillable is StartProcess, and returns how to kill the process before.
func StartKillable(t testing.TB, c Config) (addr string, kill func()) {
	t.Helper()
	err := caddytest.Retry(func() error {
		dir := TempDir(t)
		addr = redistest.FreeAddr(t)
		file := filepath.Join(dir, "Caddyfile")
		if err := os.WriteFile(file, c.Caddyfile(addr, filepath.Join(dir, "log")), 0o600); err != nil {
			return err
		}
		p := RunCaddy(t, nil, file)
		kill = p.Stop
		return p.Serves(addr)
	})
	if err != nil {
		t.Fatal(err)
	}
	return addr, kill
}

// RunCaddy starts a Caddy with a Caddyfile in a process of its own, until the test ends.
// What it prints goes to output, if there is one.
func RunCaddy(t testing.TB, output io.Writer, caddyfile string, flags ...string) *caddytest.Process {
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
