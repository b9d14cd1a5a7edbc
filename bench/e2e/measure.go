package main

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

const module = "github.com/seed-387a6c65/caddy-ratelimit/bench"

// measurement is all that is measured together.
type measurement struct {
	options
	progress io.Writer
	dir      string
	busy     string // the machine's load average before it began, where there is Linux
	redis    *redisServer
	farRedis string // the address at which it is far away
	sites    map[variant]site
	results  map[variant][]result // round by round
}

// start builds Caddy and starts Redis. What it started is ended by stop.
func start(ctx context.Context, o options, progress io.Writer) (*measurement, error) {
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		return nil, err
	}
	m := &measurement{
		options: o, progress: progress, dir: dir,
		sites: make(map[variant]site), results: make(map[variant][]result),
	}
	if err := m.prepare(ctx); err != nil {
		m.stop()
		return nil, err
	}
	return m, nil
}

func (m *measurement) prepare(ctx context.Context) (err error) {
	m.busy = "unknown"
	if averages, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.busy, _, _ = strings.Cut(string(averages), " ")
	}
	fmt.Fprintln(m.progress, "building Caddy")
	build := exec.CommandContext(ctx, "go", "build", //nolint:gosec // all arguments are ours
		"-ldflags", "-s -w", "-o", m.dir+string(filepath.Separator), module+"/caddy/ours", module+"/caddy/mholt")
	build.Stderr = m.progress
	if err := build.Run(); err != nil {
		return fmt.Errorf("building Caddy: %w", err)
	}
	if err := m.writeScript(); err != nil {
		return err
	}
	if m.redis, err = m.startRedis(ctx); err != nil {
		return err
	}
	m.farRedis, err = relay(ctx, m.redis.address, away/2)
	return err
}

// stop ends all processes and removes what they wrote.
func (m *measurement) stop() {
	m.stopSites()
	if m.redis != nil {
		m.redis.stop()
	}
	_ = os.RemoveAll(m.dir)
}

func (m *measurement) stopSites() {
	for _, s := range m.sites {
		for _, p := range s {
			p.stop()
		}
	}
	clear(m.sites)
}

// measure runs the variants and their baselines one after the other, round by
// round, each round in another order, so that none always follows the same.
func (m *measurement) measure(ctx context.Context, name string, variants []variant) error {
	variants = withBaselines(variants)
	for _, v := range variants {
		delete(m.results, v)
		if err := m.warm(ctx, v); err != nil {
			return err
		}
	}
	for round := range m.rounds {
		fmt.Fprintf(m.progress, "%s: round %d of %d\n", name, round+1, m.rounds)
		results := make([]result, len(variants))
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(m.atOnce)
		for _, i := range rand.Perm(len(variants)) {
			g.Go(func() (err error) {
				if ctx.Err() == nil {
					results[i], err = m.load(ctx, variants[i], m.duration)
				}
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		for i, v := range variants {
			m.results[v] = append(m.results[v], results[i])
		}
	}
	return nil
}

// warm starts what serves the variant, unless it was there already, and runs it
// until it knows a good part of the keys.
func (m *measurement) warm(ctx context.Context, v variant) error {
	if len(m.site(v)) > 0 {
		return nil
	}
	if err := m.startSite(ctx, v); err != nil {
		return fmt.Errorf("%v: %w", v, err)
	}
	if m.warmup == 0 {
		return nil
	}
	fmt.Fprintf(m.progress, "warming up %v\n", v)
	d := m.warmup
	if v.limiter != bare {
		d *= time.Duration(1 + v.keys/50_000)
	}
	v.paced = 0 // as many as there is time for
	_, err := m.load(ctx, v, d)
	return err
}

// withBaselines returns the variants, each with its baseline before the first
// that has it.
func withBaselines(variants []variant) []variant {
	var all []variant
	for _, v := range variants {
		for _, v := range []variant{v.baseline(), v} {
			if !slices.Contains(all, v) {
				all = append(all, v)
			}
		}
	}
	return all
}

// afresh ends all sites and empties Redis, so that what comes next neither
// finds what was left nor shares the machine with it.
func (m *measurement) afresh(ctx context.Context) error {
	m.stopSites()
	return m.redis.client.FlushAll(ctx).Err()
}

// dependency returns the version of a module that a binary has in it.
func (m *measurement) dependency(binary, path string) string {
	info, err := buildinfo.ReadFile(filepath.Join(m.dir, binary))
	if err == nil {
		for _, dep := range info.Deps {
			if dep.Path == path {
				return dep.Version
			}
		}
	}
	return "unknown"
}

// version returns the version that a program tells, the first number with a
// point.
func version(ctx context.Context, program string, arg string) string {
	output, _ := exec.CommandContext(ctx, program, arg).Output() // wrk exits with an error
	if v := regexp.MustCompile(`\d+\.\d+(\.\d+)?`).Find(output); v != nil {
		return string(v)
	}
	return "unknown"
}

// figures returns a figure of each run of a variant.
func (m *measurement) figures(v variant, figure func(result) float64) []float64 {
	figures := make([]float64, len(m.results[v]))
	for i, r := range m.results[v] {
		figures[i] = figure(r)
	}
	return figures
}

// The figures that are told in several places.
func rate(r result) float64       { return r.rate }
func p50(r result) float64        { return r.p50 }
func p99(r result) float64        { return r.p99 }
func redisCalls(r result) float64 { return r.redisCalls }
func redisCPU(r result) float64   { return r.redisCPU }

// median returns the median of a figure of all runs of a variant.
func (m *measurement) median(v variant, figure func(result) float64) float64 {
	return median(m.figures(v, figure))
}

// added returns how much greater a figure of each run is than that of its baseline in
// the same round.
func (m *measurement) added(v variant, figure func(result) float64) []float64 {
	added := m.figures(v, figure)
	for i, x := range m.figures(v.baseline(), figure) {
		added[i] -= x
	}
	return added
}

// ratios returns the throughput of each run over that of its baseline in the
// same round.
func (m *measurement) ratios(v variant) []float64 {
	ratios := m.figures(v.baseline(), rate)
	for i, r := range m.figures(v, rate) {
		ratios[i] = r / ratios[i]
	}
	return ratios
}

// median returns the median of at least one figure.
func median(figures []float64) float64 {
	sorted := slices.Sorted(slices.Values(figures))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
