//go:build unix

package behaviour

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/logqueue"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// pipe is a pipe that is not read.
type pipe struct {
	t      *testing.T
	both   int      // one end is open until the test ends, so that nothing of it fails
	writer *os.File // for Caddy
}

// newPipe makes a pipe in dir.
func newPipe(t *testing.T, dir string) pipe {
	t.Helper()
	path := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	both, err := syscall.Open(path, syscall.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(both) })
	writer, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { writer.Close() })
	return pipe{t, both, writer}
}

// fill fills the pipe, so that writers wait.
func (p pipe) fill() {
	p.t.Helper()
	var err error
	for newline := []byte{'\n'}; err == nil; {
		_, err = syscall.Write(p.both, newline)
	}
	if err != syscall.EAGAIN {
		p.t.Fatalf("filling the pipe: %v", err)
	}
}

// read begins to empty the pipe, and returns a function that returns the next log entry.
func (p pipe) read() func() sitetest.Entry {
	entries := make(chan sitetest.Entry)
	ctx := p.t.Context()
	go func() {
		for lines := bufio.NewScanner(unblocked{ctx, p.both}); lines.Scan(); {
			var e sitetest.Entry
			if json.Unmarshal(lines.Bytes(), &e) != nil {
				continue // what filled the pipe
			}
			select {
			case entries <- e:
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() sitetest.Entry {
		p.t.Helper()
		select {
		case e := <-entries:
			return e
		case <-time.After(sitetest.Patience):
			p.t.Fatal("the log has no more lines")
		}
		return nil
	}
}

// unblocked reads a descriptor that does not block.
type unblocked struct {
	ctx context.Context
	fd  int
}

// Read implements io.Reader.
func (u unblocked) Read(b []byte) (n int, err error) {
	for u.ctx.Err() == nil {
		if n, err = syscall.Read(u.fd, b); err != syscall.EAGAIN {
			return n, err
		}
		time.Sleep(ms)
	}
	return 0, io.EOF
}

// asker asks a Caddy process. A request that waits for long fails.
func asker(addr string) func(path string) (status int, err error) {
	client := &http.Client{Timeout: 5 * time.Second}
	return func(path string) (int, error) {
		res, err := client.Get("http://" + addr + path)
		if err != nil {
			return 0, err
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return res.StatusCode, err
	}
}

// Guards that requests are answered in time while Caddy's log is not read, when
// Redis is lost, and when it is back.
func TestBlockedLogDelaysNoRequest(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	dir, addr := sitetest.TempDir(t), redistest.FreeAddr(t)
	log := newPipe(t, dir)
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{
		admin off
		persist_config off
		default_bind 127.0.0.1
		storage file_system %s
		rate_limit {
			redis %s
		}
	}
	http://%s {
		rate_limit {
			size 100000
			drip_rate 1h
		}
		respond admitted
	}`, dir, redis.Addr, addr), 0o600); err != nil {
		t.Fatal(err)
	}
	sitetest.RunCaddy(t, log.writer, file)
	ask := asker(addr)
	get := func() error {
		status, err := ask("/")
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("got status %d", status)
		}
		return err
	}
	sitetest.Eventually(t, "a Caddy process that serves", func() bool { return get() == nil })
	log.fill()
	askMany := func(when string) {
		var asks sync.WaitGroup
		for range 16 {
			asks.Go(func() {
				if err := get(); err != nil {
					t.Errorf("%s: %v", when, err)
				}
			})
		}
		asks.Wait()
	}
	askMany("Redis decides")
	redis.Kill()
	askMany("Redis is killed")
	askMany("Redis is lost")
	redis.Restart(t)
	decided := redis.CommandStat(t, "evalsha")
	sitetest.Eventually(t, "Redis decides again", func() bool {
		askMany("Redis is back")
		return redis.CommandStat(t, "evalsha") > decided
	})
}

// line is a line of the log.
type line struct{ level, msg string }

// unread are the lines about what is wrong that requests cause in TestBlockedLogDelaysNoLine.
var unread = []line{
	{"warn", "a request has no value for the key of this limit, using the client's address"},
	{"warn", "a request has neither a value for the key of this limit nor a client address, " +
		"as on a unix socket without trusted_proxies_unix; all such requests share one bucket"},
	{"warn", "the key of this limit is probably the address of a proxy, so that all its visitors share one bucket"},
	{"warn", "the actual cost of a request is not a whole number, so its estimated cost is charged"},
	{"warn", "a response does not say what its request has cost, so an estimate is charged; this is logged once an hour"},
	{"warn", "the upstream is slower than latency with only min requests in progress; if it is not broken or used by others, latency is too low for it"},
	{"error", "the value of a placeholder can't be used; requests are rejected"},
	{"error", "a matcher failed; requests are rejected"},
}

// Guards that no line that a request can cause makes it wait for the log, and that the log
// has all of them when it is read: with the time at which they were logged, in order, and
// with the lines about errors even if many others were logged after them.
func TestBlockedLogDelaysNoLine(t *testing.T) {
	t.Parallel()
	dir, addr := sitetest.TempDir(t), redistest.FreeAddr(t)
	socket := filepath.Join(dir, "socket")
	log := newPipe(t, dir)
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{
		admin off
		persist_config off
		default_bind 127.0.0.1
		storage file_system %[1]s
		log {
			level DEBUG
			format json
			include http.handlers.rate_limit rate_limit
		}
		rate_limit {
			redis %[2]s
			on_error allow
		}
	}
	(plain) {
		size 100000
		drip_rate 1h
		on_error fallback
	}
	http://%[3]s {
		rate_limit /keyless keyless {
			key {header.X-Key}
			import plain
		}
		rate_limit /cost cost {
			cost {query.cost}
			import plain
		}
		rate_limit /actual actual {
			actual_cost {header.X-Cost}
			import plain
		}
		rate_limit /tokens tokens {
			actual_cost tokens
			import plain
		}
		rate_limit /end end {
			cost {query.cost}
			import plain
		}
		rate_limit /matcher matcher {
			import plain
			limit within {
				match {
					expression `+"`int({query.n}) > 1`"+`
				}
				size 10
				drip_rate 1h
			}
		}
		rate_limit /allow allow {
			size 10
			drip_rate 1h
		}
		rate_limit /denied denied {
			size 1
			drip_rate 1h
			on_error fallback
		}
		rate_limit /unclear unclear {
			key {http.rate_limit.field.a}
			size 1
			drip_rate 1h
			on_error fallback
		}
		rate_limit /zone {
			zone a {
				key static
				events 1
				window 1h
			}
			on_error fallback
		}
		handle /busy {
			rate_limit busy {
				concurrency auto {
					latency 1ms
					min 1
				}
			}
			reverse_proxy %[5]s
		}
		respond admitted
	}
	http:// {
		bind unix/%[4]s
		rate_limit {
			import plain
		}
		respond admitted
	}`, dir, redistest.FreeAddr(t), addr, socket, sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { time.Sleep(5 * time.Millisecond) })), 0o600); err != nil {
		t.Fatal(err)
	}
	sitetest.RunCaddy(t, log.writer, file)
	ask := asker(addr)
	sitetest.Eventually(t, "a Caddy process that serves", func() bool { _, err := ask("/"); return err == nil })
	for range 2 { // what is admitted first is denied later
		_, _ = ask("/denied")
		_, _ = ask("/zone")
	}
	_, _ = ask("/unclear?a=1&a=2") // the next one is denied
	log.fill()
	askSocket := (&http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		Dial: func(string, string) (net.Conn, error) { return net.Dial("unix", socket) },
	}}).Get
	begun := time.Now()
	for _, path := range []struct {
		path   string
		status int
	}{
		{"/keyless", http.StatusOK},
		{"/keyless", http.StatusOK},
		{"/cost?cost=no", http.StatusBadRequest},
		{"/actual", http.StatusOK},
		{"/tokens", http.StatusOK},
		{"/matcher?n=no", http.StatusInternalServerError},
		{"/allow", http.StatusOK},
		{"/zone", http.StatusTooManyRequests},
		{"/unclear?a=3&a=4", http.StatusTooManyRequests},
	} {
		if status, err := ask(path.path); err != nil || status != path.status {
			t.Errorf("%s: got %d, %v, want status %d", path.path, status, err, path.status)
		}
	}
	forwarded, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/allow", nil)
	if err != nil {
		t.Fatal(err)
	}
	forwarded.Header.Set("X-Forwarded-For", "192.0.2.1")
	if res, err := (&http.Client{Timeout: 5 * time.Second}).Do(forwarded); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("by a proxy: got %v, %v", res, err)
	} else {
		res.Body.Close()
	}
	if res, err := askSocket("http://localhost/"); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("by the socket: got %v, %v", res, err)
	} else {
		res.Body.Close()
	}
	var busy sync.WaitGroup
	for range 5 { // more than take no room any more, so that one is always turned away
		busy.Go(func() {
			for time.Since(begun) < 22*time.Second {
				if _, err := ask("/busy"); err != nil {
					t.Errorf("busy: %v", err)
					return
				}
			}
		})
	}
	for range 2 * logqueue.Max {
		if status, err := ask("/denied"); err != nil || status != http.StatusTooManyRequests {
			t.Fatalf("denied: got %d, %v", status, err)
		}
	}
	busy.Wait()
	ended := time.Now()

	read := log.read()
	if status, err := ask("/end?cost=no"); err != nil || status != http.StatusBadRequest {
		t.Errorf("the last request: got %d, %v", status, err)
	}
	dropped, logged := 0.0, make(map[line]sitetest.Entry)
	for last := false; !last; {
		e := read()
		n, _ := e["lines_dropped"].(float64)
		dropped += n
		last = e["limit"] == "end"
		if ts, _ := e["ts"].(float64); timestamp(begun) <= ts && ts <= timestamp(ended) && e["logger"] == sitetest.OwnLogger {
			logged[line{fmt.Sprint(e["level"]), fmt.Sprint(e["msg"])}] = e
		}
	}
	for _, l := range unread {
		if _, ok := logged[l]; !ok {
			t.Errorf("the log lacks a line that was logged while nobody read it: %v", l)
		}
	}
	if dropped < logqueue.Max/2 {
		t.Errorf("the log tells of %v lines that were dropped", dropped)
	}
}

// timestamp returns a time as the log shows it.
func timestamp(at time.Time) float64 { return float64(at.UnixNano()) / 1e9 }
