package sitetest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
)

// Output is what a command has printed, and its exit status.
type Output struct {
	Out, Errors string
	Status      int
}

// Want checks a command's exit status and its output, or else its errors: without
// logs, traces and usage, and nothing beside them.
func (r Output) Want(t testing.TB, status int, text string) {
	t.Helper()
	got, other := r.Out, r.Errors
	if status == 1 {
		got, other = r.Errors, r.Out
	}
	if r.Status != status || got != text || other != "" {
		t.Errorf("got status %d and\n%s\nerrors: %s\nwant status %d and\n%s", r.Status, r.Out, r.Errors, status, text)
	}
}

// RunCommand runs a subcommand of caddy rate-limit in a process of its own, in an
// empty directory.
func RunCommand(t testing.TB, args ...string) Output {
	t.Helper()
	return RunCommandIn(t, TempDir(t), args...)
}

// RunCommandIn is RunCommand in a given directory.
func RunCommandIn(t testing.TB, dir string, args ...string) Output {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	cmd := caddytest.Command(ctx, append([]string{"rate-limit"}, args...)...)
	cmd.Dir, cmd.Env = dir, append(cmd.Env, "COLUMNS=")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("%q: %v", args, errors.Join(err, ctx.Err()))
	}
	return Output{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// ConfigFile writes a Caddyfile.
func ConfigFile(t testing.TB, text string) string {
	t.Helper()
	return WriteFile(t, TempDir(t), "Caddyfile", text)
}

// WriteFile writes a file in a directory, and returns its path.
func WriteFile(t testing.TB, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
