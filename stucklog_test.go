//go:build unix

package ratelimit

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// Guards that requests are answered in time while nobody reads Caddy's log, when
// Redis is lost, and when it is back.
func TestBlockedLogDelaysNoRequest(t *testing.T) {
	redis := redistest.Start(t)
	dir, addr := tempDir(t), redistest.FreeAddr(t)
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	// One end is open until the test ends, so that nothing of it fails.
	both, err := syscall.Open(pipe, syscall.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(both) })
	stderr, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer stderr.Close()

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
	runCaddy(t, stderr, file)
	client := &http.Client{Timeout: 5 * time.Second}
	get := func() error {
		res, err := client.Get("http://" + addr)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		if _, err := io.Copy(io.Discard, res.Body); err != nil {
			return err
		}
		if res.StatusCode != http.StatusOK {
			return fmt.Errorf("got status %d", res.StatusCode)
		}
		return nil
	}
	eventually(t, "a Caddy process that serves", func() bool { return get() == nil })

	line := make([]byte, 1)
	for err = nil; err == nil; {
		_, err = syscall.Write(both, line)
	}
	if err != syscall.EAGAIN {
		t.Fatalf("filling the pipe: %v", err)
	}
	ask := func(when string) {
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
	ask("Redis decides")
	redis.Kill()
	ask("Redis is killed")
	ask("Redis is lost")
	redis.Restart(t)
	decided := redis.CommandStat(t, "evalsha")
	eventually(t, "Redis decides again", func() bool {
		ask("Redis is back")
		return redis.CommandStat(t, "evalsha") > decided
	})
}
