package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
)

//go:embed wrk.lua
var script []byte

// answers are what wrk counted in one run. Times are in µs.
type answers struct {
	Requests int64
	Micros   int64
	Refused  int64 // answered with a status of 400 or more
	Failed   int64 // not answered
	P50, P99 int64 // latency
}

// result is one run of a variant, and what it took.
type result struct {
	rate              float64 // requests per second
	p50, p99          float64 // latency in ms
	caddyCPU          float64 // µs per request, of all processes
	redisCalls        float64 // per request
	callsAdmitted     float64 // of Redis, per request that was admitted
	admitted          float64 // requests per second
	redisCPU          float64 // µs per decision, of which a request has one for each limit
	redisCPUPerSecond float64 // µs
}

// load has requests sent to the variant, and returns an error if the answers are not the
// expected ones.
func (m *measurement) load(ctx context.Context, v variant, duration time.Duration) (result, error) {
	site := m.site(v)
	callsBefore, redisBefore, err := m.redis.usage(ctx)
	if err != nil {
		return result{}, err
	}
	caddyBefore := site.cpuTime()
	if v.pause > 0 {
		duration *= pausedTimes
	}

	// One sender for each process, all at once.
	sent := make([]answers, len(site))
	g, ctx2 := errgroup.WithContext(ctx)
	for i, p := range site {
		g.Go(func() (err error) {
			if v.paced > 0 {
				sent[i], err = paced(ctx2, p.url, v.draw, v.connections, duration)
				return err
			}
			sent[i], err = m.wrk(ctx2, p.url, v.draw, v.connections/len(site), max(m.threads/len(site), 1), duration)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return result{}, fmt.Errorf("%v: %w", v, err)
	}

	caddy := site.cpuTime() - caddyBefore
	calls, redis, err := m.redis.usage(ctx)
	if err != nil {
		return result{}, err
	}
	calls, redis = calls-callsBefore, redis-redisBefore

	var r result
	var sum answers
	for _, a := range sent {
		r.rate += float64(a.Requests) / float64(a.Micros) * 1e6
		r.p50 = max(r.p50, float64(a.P50)/1e3) // of the slowest, where there are several
		r.p99 = max(r.p99, float64(a.P99)/1e3)
		sum.Requests += a.Requests
		sum.Refused += a.Refused
		sum.Failed += a.Failed
	}
	n := float64(sum.Requests)
	r.caddyCPU = float64(caddy.Microseconds()) / n
	r.redisCalls = float64(calls) / n
	r.callsAdmitted = float64(calls) / max(n-float64(sum.Refused), 1)
	r.admitted = r.rate * (n - float64(sum.Refused)) / n
	r.redisCPU = float64(redis.Microseconds()) / n / float64(max(v.limits, 1))
	r.redisCPUPerSecond = r.rate * float64(redis.Microseconds()) / n

	refused := int64(0)
	switch {
	case v.denied:
		refused = sum.Requests
	case v.perSecond > 0:
		refused = sum.Refused // some
	}
	if sum.Requests == 0 || sum.Failed > 0 || sum.Refused != refused {
		return r, fmt.Errorf("%v: of %d requests %d were refused, want %d, and %d failed",
			v, sum.Requests, sum.Refused, refused, sum.Failed)
	}
	if usesRedis(v.limiter) && !v.denied && calls == 0 {
		return r, fmt.Errorf("%v: of %d requests none was decided by Redis", v, sum.Requests)
	}
	if err := site.errorLogged(); err != nil {
		return r, fmt.Errorf("%v: %w", v, err)
	}
	return r, nil
}

// wrk runs wrk once.
func (m *measurement) wrk(ctx context.Context, url string, d draw, connections, threads int, duration time.Duration) (a answers, err error) {
	output, err := exec.CommandContext(ctx, "wrk", //nolint:gosec // all arguments are ours
		"--threads", strconv.Itoa(min(threads, connections)), "--connections", strconv.Itoa(connections),
		"--duration", strconv.Itoa(int(duration.Seconds())), "--timeout", "10s",
		"--script", filepath.Join(m.dir, scriptName), url, "--",
		strconv.Itoa(d.keys), strconv.Itoa(rand.IntN(1<<30)), //nolint:gosec // no secret
		strconv.FormatFloat(d.zipf, 'g', -1, 64), strconv.FormatInt(d.pause.Milliseconds(), 10)).CombinedOutput()
	if err == nil {
		err = json.Unmarshal(output[max(bytes.LastIndexByte(output, '{'), 0):], &a)
	}
	if err != nil {
		return a, fmt.Errorf("wrk: %w\n%s", err, output)
	}
	return a, nil
}

const scriptName = "wrk.lua"

// writeScript puts wrk's script where it is read from.
func (m *measurement) writeScript() error {
	return os.WriteFile(filepath.Join(m.dir, scriptName), script, 0o600)
}
