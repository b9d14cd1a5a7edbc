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
	"regexp"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// startWithin is how long a server may take until it answers.
const startWithin = 20 * time.Second

// process is a server that runs while variants are measured.
type process struct {
	cmd    *exec.Cmd
	url    string        // its URL, if it is a Caddy
	log    string        // the file with its output
	exited chan struct{} // closed when the process has exited
}

// launch starts a server and waits until it is ready. It is killed when ctx is
// done, at the latest by m.stop.
func (m *measurement) launch(ctx context.Context, ready func() error, command string, args ...string) (*process, error) {
	log, err := os.CreateTemp(m.dir, "*.log")
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
		p.stop()
		output, _ := os.ReadFile(p.log)
		return nil, fmt.Errorf("%s is not ready: %w\n%s", filepath.Base(command), err, output)
	}
}

// stop kills the process and waits until it is gone.
func (p *process) stop() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// site is the processes of Caddy that serve a variant.
type site []*process

// served returns what the variant's processes are the same for: however requests are sent.
func (v variant) served() variant {
	v.connections, v.pause, v.paced = 0, 0, 0
	return v
}

// site returns the processes of the variant.
func (m *measurement) site(v variant) site { return m.sites[v.served()] }

func (m *measurement) startSite(ctx context.Context, v variant) error {
	v = v.served()
	for range v.processes {
		p, err := m.startCaddy(ctx, v)
		if err != nil {
			return err
		}
		m.sites[v] = append(m.sites[v], p)
	}
	return nil
}

// startCaddy starts Caddy with the variant's configuration.
func (m *measurement) startCaddy(ctx context.Context, v variant) (*process, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	config := filepath.Join(m.dir, port+".Caddyfile")
	redis := m.redis.address
	if v.far {
		redis = m.farRedis
	}
	if err := os.WriteFile(config, []byte(v.caddyfile(port, redis)), 0o600); err != nil {
		return nil, err
	}
	binary := "ours"
	if v.limiter == mholt {
		binary = "mholt"
	}
	url := fmt.Sprintf("http://127.0.0.1:%s/", port)
	p, err := m.launch(ctx, func() error { return v.probe(ctx, url) },
		filepath.Join(m.dir, binary), "run", "--config", config, "--adapter", "caddyfile")
	if err != nil {
		return nil, err
	}
	p.url = url
	return p, nil
}

// probe requests the page once, and returns an error unless the limiter has seen
// the request exactly if it should have. That cannot be checked for
// mholt/caddy-ratelimit, which leaves admitted requests unchanged.
func (v variant) probe(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("X-Key", "key-1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	_, limited := resp.Header["X-Ratelimit-Limit"]
	if limited != (v.limiter != bare && v.limiter != mholt) {
		return fmt.Errorf("status %d with header %v", resp.StatusCode, resp.Header)
	}
	return nil
}

// cpuTime returns the CPU time that the processes have used, as reported by Linux;
// 0 elsewhere.
func (s site) cpuTime() time.Duration {
	ticks := 0
	for _, p := range s {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		_, rest, _ := bytes.Cut(stat, []byte(") ")) // behind the program's name
		fields := bytes.Fields(rest)
		if len(fields) < 13 {
			return 0
		}
		user, _ := strconv.Atoi(string(fields[11]))
		system, _ := strconv.Atoi(string(fields[12]))
		ticks += user + system
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// errorLogged returns the first error that any of the processes has logged, if
// there is one.
func (s site) errorLogged() error {
	for _, p := range s {
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

// redisServer is the server that all variants share.
type redisServer struct {
	*process
	address string
	client  *redis.Client
}

// startRedis starts a server of our own, which writes nothing to disk.
func (m *measurement) startRedis(ctx context.Context) (*redisServer, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort("127.0.0.1", port)
	client := redis.NewClient(&redis.Options{Addr: address})
	p, err := m.launch(ctx, func() error { return client.Ping(ctx).Err() },
		"redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--daemonize", "no")
	if err != nil {
		_ = client.Close()
		return nil, err
	}
	return &redisServer{p, address, client}, nil
}

func (r *redisServer) stop() {
	_ = r.client.Close()
	r.process.stop()
}

var (
	scriptCalls = regexp.MustCompile(`(?m)^cmdstat_(?:eval|fcall)\w*:calls=(\d+)`)
	cpuSeconds  = regexp.MustCompile(`(?m)^used_cpu_(?:sys|user):([\d.]+)`)
)

// usage returns the number of scripts that clients had Redis run, and the CPU time
// that it has used, including socket reads and writes. Limiters call nothing but
// scripts; Redis's total does not tell the commands inside scripts from others.
func (r *redisServer) usage(ctx context.Context) (calls int64, cpu time.Duration, err error) {
	info, err := r.client.Info(ctx, "commandstats", "cpu").Result()
	if err != nil {
		return 0, 0, err
	}
	for _, match := range scriptCalls.FindAllStringSubmatch(info, -1) {
		n, _ := strconv.ParseInt(match[1], 10, 64)
		calls += n
	}
	for _, match := range cpuSeconds.FindAllStringSubmatch(info, -1) {
		s, _ := strconv.ParseFloat(match[1], 64)
		cpu += time.Duration(s * float64(time.Second))
	}
	return calls, cpu, nil
}

// freePort returns a port of this host on which nothing listened just now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
