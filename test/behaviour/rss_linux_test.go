package behaviour

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// BenchmarkResidentSize measures by how much a Caddy grows that has met b.N keys, each
// once, as docs/failure.md says it of a million: run it with -benchtime 1000000x.
func BenchmarkResidentSize(b *testing.B) {
	const callers = 256
	for _, store := range []string{"process", "redis"} {
		b.Run(store, func(b *testing.B) {
			redis := ""
			if store == "redis" {
				redis = "redis " + redistest.Start(b).Addr + " {\ntimeout 10s\n}\n"
			}
			addr := redistest.FreeAddr(b)
			config := sitetest.ConfigFile(b, "{\nadmin off\nlog {\noutput discard\n}\nrate_limit {\n"+redis+"memory {\nmax_keys 4000000\n}\n}\n}\nhttp://"+addr+
				" {\nrate_limit keys {\nkey {header.X-Key}\nsize 100\nrate 100/1d\n}\nrespond ok\n}")
			caddy := caddytest.Command(b.Context(), "run", "--config", config)
			if err := caddy.Start(); err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() {
				_ = caddy.Process.Kill()
				_ = caddy.Wait()
			})
			client := http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers}}
			var failed atomic.Pointer[string]
			ask := func(key int) {
				req, _ := http.NewRequestWithContext(b.Context(), http.MethodGet, "http://"+addr, http.NoBody)
				req.Header.Set("X-Key", fmt.Sprintf("%016d", key))
				res, err := client.Do(req)
				text := fmt.Sprint(err)
				if err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					_ = res.Body.Close()
					text = res.Status
				}
				if text != "200 OK" {
					failed.Store(&text)
				}
			}
			send := func(from, to int) {
				var all sync.WaitGroup
				next := atomic.Int64{}
				next.Store(int64(from))
				for range callers {
					all.Go(func() {
						for key := int(next.Add(1)); key <= to && b.Context().Err() == nil; key = int(next.Add(1)) {
							ask(key)
						}
					})
				}
				all.Wait()
			}
			redistest.WaitFor(b, sitetest.Patience, func() error { ask(0); return failedSince(&failed) })
			send(-20_000, 0) // so that connections and the like do not count as keys
			before := residentSize(b, caddy.Process.Pid)
			send(0, b.N)
			if err := failedSince(&failed); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(residentSize(b, caddy.Process.Pid)-before)/float64(b.N), "B/key")
		})
	}
}

// failedSince returns the failure of a request since it was called last.
func failedSince(failed *atomic.Pointer[string]) error {
	if text := failed.Swap(nil); text != nil {
		return fmt.Errorf("a request failed: %s", *text)
	}
	return nil
}

// residentSize returns the resident size of a process in bytes, once it has been idle.
func residentSize(b *testing.B, pid int) (size int64) {
	b.Helper()
	time.Sleep(time.Second)
	status := filetest.Read(b, fmt.Sprintf("/proc/%d/status", pid))
	_, rss, _ := strings.Cut(string(status), "VmRSS:")
	if _, err := fmt.Sscan(rss, &size); err != nil {
		b.Fatal(err)
	}
	return size << 10
}
