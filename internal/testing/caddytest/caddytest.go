// Package caddytest lets a test binary be a Caddy with all modules in it, and runs such
// Caddy instances as processes of their own.
package caddytest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// asCaddy is the environment variable that makes the test binary a Caddy.
const asCaddy = "RATELIMIT_TEST_AS_CADDY"

// Main runs Caddy, and does not return, if Command has made the process. Each TestMain
// begins with it.
func Main() {
	if os.Getenv(asCaddy) != "" {
		caddycmd.Main()
		os.Exit(0)
	}
}

// Command returns the command that runs `caddy` with some arguments.
func Command(ctx context.Context, args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), asCaddy+"=1")
	return cmd
}

// Home returns the environment variables that make a directory the place of all files
// that Caddy keeps.
func Home(dir string) []string {
	return []string{"HOME=" + dir, "XDG_DATA_HOME=" + dir, "XDG_CONFIG_HOME=" + dir}
}

// Process is a running Caddy.
type Process struct {
	*os.Process
	Exited <-chan struct{} // closed when the process has exited and was reaped

	cmd    *exec.Cmd
	output *bytes.Buffer // what it has printed, to be read when it has exited
}

// Start starts a command. It is killed when the test ends.
func Start(t testing.TB, cmd *exec.Cmd) (*Process, error) {
	t.Helper()
	p := &Process{cmd: cmd, output: new(bytes.Buffer)}
	if cmd.Stdout == nil {
		cmd.Stdout, cmd.Stderr = p.output, p.output
	}
	var err error
	if p.Exited, err = redistest.Run(cmd); err != nil {
		return nil, err
	}
	p.Process = cmd.Process
	t.Cleanup(p.Stop)
	return p, nil
}

// Stop kills the process and waits until it is gone.
func (p *Process) Stop() {
	_ = p.Kill()
	<-p.Exited
}

// Running returns an error with what the process has printed if it has exited.
func (p *Process) Running() error {
	select {
	case <-p.Exited:
		return fmt.Errorf("caddy exited: %v\n%s", p.cmd.ProcessState, p.output)
	default:
		return nil
	}
}

// Serves waits until something listens on a TCP address, or until the process has exited.
func (p *Process) Serves(addr string) error {
	const patience = 30 * time.Second
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if err := p.Running(); err != nil {
			return err
		}
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			return conn.Close()
		}
		if time.Now().After(deadline) {
			return errors.New("caddy does not serve")
		}
	}
}

// Retry calls start up to five times, as long as its error says that another process
// has taken an address that was free a moment before.
func Retry(start func() error) (err error) {
	for range 5 {
		if err = start(); err == nil || !strings.Contains(err.Error(), "address already in use") {
			break
		}
	}
	return err
}

// FreshConnections returns a transport that opens a connection for each request: to
// the unix socket at the given path or, if that is empty, to the request's host. It sends a
// request again if its connection was closed before there was an answer.
func FreshConnections(socket string) http.RoundTripper {
	transport := &http.Transport{DisableKeepAlives: true}
	if socket != "" {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}
	}
	return Resending{transport}
}

// Resending sends a request again if its connection was closed before there was an answer: a
// server that a reload replaces does that to connections it has not read from.
type Resending struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (r Resending) RoundTrip(req *http.Request) (*http.Response, error) {
	for tries := 1; ; tries++ {
		res, err := r.RoundTripper.RoundTrip(req)
		closed := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
		if !closed || tries == 4 {
			return res, err
		}
		if req.GetBody != nil {
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}
