package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// startWithin is how long a server may take until it answers.
const startWithin = 20 * time.Second

// process is a server that runs while variants are measured.
type process struct {
	cmd    *exec.Cmd
	log    string        // the file with its output
	exited chan struct{} // closed when the process has exited
}

// launch starts a server and waits until it is ready. It is killed when ctx is
// done, at the latest by m.stop.
func (m *measurement) launch(ctx context.Context, name string, ready func() error, command string, args ...string) (*process, error) {
	log, err := os.Create(filepath.Join(m.dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &process{
		cmd:    exec.CommandContext(ctx, command, args...),
		log:    log.Name(),
		exited: make(chan struct{}),
	}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = m.dir, log, log
	home := filepath.Join(m.dir, "home") // Caddy must not touch the user's
	p.cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+home, "XDG_DATA_HOME="+home)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	m.processes = append(m.processes, p)
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait()
	}()

	deadline := time.After(startWithin)
	for {
		err := ready()
		if err == nil {
			return p, nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
			continue
		case <-p.exited:
		case <-deadline:
		}
		output, _ := os.ReadFile(p.log)
		return nil, fmt.Errorf("%s is not ready: %w\n%s", filepath.Base(command), err, output)
	}
}

// stop kills the process and waits until it is gone.
func (p *process) stop() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// cpuTime returns the CPU time that the process has used, as Linux tells it; 0
// elsewhere.
func (p *process) cpuTime() time.Duration {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	_, rest, _ := bytes.Cut(stat, []byte(") ")) // behind the program's name
	fields := bytes.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(string(fields[11]))
	system, _ := strconv.Atoi(string(fields[12]))
	return time.Duration(user+system) * 10 * time.Millisecond
}

// startRedis starts a server of our own, which writes nothing to disk, and
// returns its address.
func (m *measurement) startRedis(ctx context.Context) (address string, err error) {
	port, err := freePort()
	if err != nil {
		return "", err
	}
	address = net.JoinHostPort("127.0.0.1", port)
	ready := func() error {
		conn, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	_, err = m.launch(ctx, "redis", ready, "redis-server", "--bind", "127.0.0.1", "--port", port,
		"--save", "", "--appendonly", "no", "--daemonize", "no")
	return address, err
}

// site is where a variant is served.
type site struct {
	url   string
	caddy *process
}

// startCaddy starts Caddy with the variant's configuration.
func (m *measurement) startCaddy(ctx context.Context, name string, v variant, redis string) (site, error) {
	port, err := freePort()
	if err != nil {
		return site{}, err
	}
	config := filepath.Join(m.dir, name+".Caddyfile")
	if err := os.WriteFile(config, []byte(v.caddyfile(port, redis)), 0o600); err != nil {
		return site{}, err
	}
	url := fmt.Sprintf("http://127.0.0.1:%s/", port)
	caddy, err := m.launch(ctx, name, func() error { return v.probe(ctx, url) },
		m.caddy, "run", "--config", config, "--adapter", "caddyfile")
	return site{url, caddy}, err
}

// probe asks for the page once, and returns an error unless the limiter has
// seen the request if it should have, and only then.
func (v variant) probe(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	if _, limited := resp.Header["X-Ratelimit-Limit"]; limited != v.limited() {
		return fmt.Errorf("status %d with header %v", resp.StatusCode, resp.Header)
	}
	return nil
}

// errorLogged returns the first error that any Caddy has logged, if there is
// one.
func (m *measurement) errorLogged() error {
	for _, p := range m.processes {
		log, err := os.ReadFile(p.log)
		if err != nil {
			return err
		}
		for line := range bytes.Lines(log) {
			if bytes.Contains(line, []byte(`"level":"error"`)) {
				return fmt.Errorf("an error was logged: %s", bytes.TrimSpace(line))
			}
		}
	}
	return nil
}

// freePort returns a port of this host that nothing listened on just now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
