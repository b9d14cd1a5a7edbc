package main

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"
)

// print writes what was measured, and with what, in Markdown.
func (m *measurement) print(ctx context.Context, out io.Writer) error {
	binary, err := buildinfo.ReadFile(m.caddy)
	if err != nil {
		return err
	}
	caddy := "unknown"
	for _, dep := range binary.Deps {
		if dep.Path == "github.com/caddyserver/caddy/v2" {
			caddy = dep.Version
		}
	}
	fmt.Fprintf(out, "%s, %d CPUs (%s/%s), %s, Caddy %s, redis-server %s, wrk %s: %d rounds of %v, %d connections, %d threads.\n\n",
		time.Now().Format(time.DateOnly), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, binary.GoVersion, caddy,
		version(ctx, "redis-server", "--version"), version(ctx, "wrk", "--version"),
		m.rounds, m.duration, m.connections, m.threads)

	w := tabwriter.NewWriter(out, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| \t| requests/s \t| min–max \t| p50 ms \t| p99 ms \t| CPU µs \t| ratio \t| min–max \t| to |")
	fmt.Fprintln(w, "|---\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---|")
	for _, v := range variants {
		own := m.results[v.name]
		rates := each(own, result.rate)
		fmt.Fprintf(w, "| %s \t| %.0f \t| %.0f–%.0f \t| %.2f \t| %.2f \t| %.1f ", v.name,
			median(rates), slices.Min(rates), slices.Max(rates),
			median(each(own, func(r result) float64 { return float64(r.P50) / 1e3 })),
			median(each(own, func(r result) float64 { return float64(r.P99) / 1e3 })),
			median(each(own, func(r result) float64 { return float64(r.cpu) / float64(r.Requests) })))
		if v.baseline == "" {
			fmt.Fprintln(w, "\t| 1 \t| \t| |")
			continue
		}
		ratios := each(m.results[v.baseline], result.rate)
		for i := range ratios {
			ratios[i] = own[i].rate() / ratios[i]
		}
		fmt.Fprintf(w, "\t| %.2f \t| %.2f–%.2f \t| %s |\n",
			median(ratios), slices.Min(ratios), slices.Max(ratios), v.baseline)
	}
	return w.Flush()
}

// each returns a figure of each result.
func each(results []result, figure func(result) float64) []float64 {
	figures := make([]float64, len(results))
	for i, r := range results {
		figures[i] = figure(r)
	}
	return figures
}

// median returns the median of at least one figure.
func median(figures []float64) float64 {
	sorted := slices.Sorted(slices.Values(figures))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
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
