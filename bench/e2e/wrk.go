package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

//go:embed wrk.lua
var script []byte

// result is what wrk counted in one run, and what it took. Times are in µs.
type result struct {
	Requests int64
	Micros   int64
	Refused  int64 // answered with a status of 400 or more
	Failed   int64 // not answered
	P50, P99 int64 // latency
	cpu      int64 // of Caddy, all requests together
}

// rate returns the requests per second.
func (r result) rate() float64 { return float64(r.Requests) / float64(r.Micros) * 1e6 }

// load has wrk send requests to the variant, and returns an error where the
// answers are not those that were to be measured.
func (m *measurement) load(ctx context.Context, v variant, duration time.Duration) (result, error) {
	var r result
	lua := filepath.Join(m.dir, "wrk.lua")
	if err := os.WriteFile(lua, script, 0o600); err != nil {
		return r, err
	}
	s := m.sites[v.name]
	before := s.caddy.cpuTime()
	output, err := exec.CommandContext(ctx, "wrk", //nolint:gosec // all arguments are ours
		"--threads", strconv.Itoa(m.threads), "--connections", strconv.Itoa(m.connections),
		"--duration", strconv.Itoa(int(duration.Seconds())), "--timeout", "10s",
		"--script", lua, s.url, "--", strconv.Itoa(v.keys)).CombinedOutput()
	if err != nil {
		return r, fmt.Errorf("%s: wrk: %w\n%s", v.name, err, output)
	}
	if err := json.Unmarshal(output[max(bytes.LastIndexByte(output, '{'), 0):], &r); err != nil {
		return r, fmt.Errorf("%s: wrk: %w\n%s", v.name, err, output)
	}
	r.cpu = (s.caddy.cpuTime() - before).Microseconds()

	refused := int64(0)
	if v.denied {
		refused = r.Requests
	}
	if r.Requests == 0 || r.Failed > 0 || r.Refused != refused {
		return r, fmt.Errorf("%s: of %d requests %d were refused, want %d, and %d failed",
			v.name, r.Requests, r.Refused, refused, r.Failed)
	}
	if err := m.errorLogged(); err != nil {
		return r, fmt.Errorf("%s: %w", v.name, err)
	}
	return r, nil
}
