package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestMain lets a benchmark run a Caddy in a process of its own.
func TestMain(m *testing.M) {
	caddytest.Main()
	os.Exit(m.Run())
}

// process is a Caddy in a process of its own, which serves at addr.
type process struct {
	*caddytest.Process
	addr string
}

// startProcess runs a Caddy with the Caddyfile for an address until the benchmark ends.
func startProcess(b *testing.B, caddyfile func(addr string) string) *process {
	b.Helper()
	p := new(process)
	err := caddytest.Retry(func() (err error) {
		dir := b.TempDir()
		p.addr = redistest.FreeAddr(b)
		file := filepath.Join(dir, "Caddyfile")
		if err := os.WriteFile(file, []byte(caddyfile(p.addr)), 0o600); err != nil {
			return err
		}
		cmd := caddytest.Command(context.Background(), "run", "--config", file)
		cmd.Env = append(cmd.Env, caddytest.Home(dir)...)
		if p.Process, err = caddytest.Start(b, cmd); err != nil {
			return err
		}
		return p.Serves(p.addr)
	})
	if err != nil {
		b.Fatal(err)
	}
	return p
}

// quiet are the global options of all of them.
const quiet = "admin off\npersist_config off\nlog {\noutput discard\n}\n"

// plainSite returns the Caddyfile of a site without TLS.
func plainSite(site string) func(addr string) string {
	return func(addr string) string { return "{\n" + quiet + "}\nhttp://" + addr + " {\n" + site + "\n}\n" }
}

// memory returns the bytes that the process keeps in memory.
func (p *process) memory(b *testing.B) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.Pid))
	if err != nil {
		b.Skip("needs Linux")
	}
	pages, _ := strconv.Atoi(strings.Fields(string(text))[1])
	return float64(pages * os.Getpagesize())
}

// cpu returns the seconds for which the process has used a processor.
func (p *process) cpu(b *testing.B) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid))
	if err != nil {
		b.Skip("needs Linux")
	}
	_, after, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(after)
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return float64(user+system) / 100
}

// descriptors returns how many descriptors the process has open.
func (p *process) descriptors(b *testing.B) float64 {
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid))
	if err != nil {
		b.Skip("needs Linux")
	}
	return float64(len(open))
}
