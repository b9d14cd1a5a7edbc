// Command e2e measures whole requests: it builds Caddy with the rate limiter
// and with its peers, starts it in several configurations, has wrk send them
// requests in turns, and prints a table in Markdown. If documents are named, it
// measures all that they have, and writes them. See ../README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"
)

// options are the command's flags, and what a test makes less of.
type options struct {
	duration, warmup time.Duration
	rounds, threads  int
	atOnce           int // runs at a time
	documents        []string
	only             string // the mark of the one section to measure, if not all
	benchtime        string
	count            int

	connections    []int // the first is that of all but the sweep
	processes      []int
	keys           []int
	limits         []int
	floodSizes     []int // clients
	hotConnections []int
	paces          []int // requests a second
	benchmarks     []benchmark
}

func main() {
	o := options{
		atOnce:         1,
		connections:    []int{64, 1, 8, 16, 256},
		processes:      []int{1, 2, 4},
		keys:           []int{1, 100, 10_000, 1_000_000},
		limits:         []int{1, 2, 4, 8, 16},
		floodSizes:     []int{1000, 4000, 10_000},
		hotConnections: []int{64, 256},
		paces:          []int{200, 2000, 8000},
		benchmarks:     benchmarks,
	}
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: e2e [flags] [documents to write; without any, one table is measured, and printed]")
		flag.PrintDefaults()
	}
	flag.DurationVar(&o.duration, "duration", 3*time.Second, "how long one run takes, in whole seconds; shorter ones differ too much")
	flag.DurationVar(&o.warmup, "warmup", time.Second, "how long each variant is run before the first round, in whole seconds, and as long again for each 50 000 keys; 0 for not at all")
	flag.StringVar(&o.only, "only", "", "what alone to measure: requests, as without documents, "+hotKeys+" or "+addedLatency)
	flag.IntVar(&o.rounds, "rounds", 9, "how many times each variant is run")
	flag.IntVar(&o.threads, "threads", 2, "how many threads wrk uses")
	flag.StringVar(&o.benchtime, "benchtime", "0.1s", "how long each micro-benchmark takes, see go help testflag")
	flag.IntVar(&o.count, "count", 3, "how many times each micro-benchmark is run")
	flag.Parse()
	o.documents = flag.Args()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

// run measures, and prints or writes what was found. When it returns none of
// the processes that it started is left, whatever the outcome.
func run(ctx context.Context, o options, out, progress io.Writer) (err error) {
	if err := o.check(); err != nil {
		return err
	}
	for _, program := range []string{"redis-server", "wrk"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s: not on PATH, please install it", program)
		}
	}
	defer func() {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
	}()

	if len(o.documents) == 0 {
		m, err := start(ctx, o, progress)
		if err != nil {
			return err
		}
		defer m.stop()
		name, groups, table := "requests", [][]variant{m.requests()}, m.requestsTable
		switch o.only {
		case hotKeys:
			name, groups, table = o.only, m.hotGroups(), m.hotTables
		case addedLatency:
			name, groups, table = o.only, m.addedGroups(), m.addedTable
		}
		for _, g := range groups {
			if err := m.measure(ctx, name, g); err != nil {
				return err
			}
		}
		fmt.Fprintf(out, "%s\n\n%s", m.machine(ctx), table())
		return nil
	}

	d, err := readDocuments(o.documents)
	if err != nil {
		return err
	}
	if o.only != "" {
		o.benchmarks = nil
	}
	for _, b := range o.benchmarks { // before all is measured
		if err := d.set(b.mark, ""); err != nil {
			return err
		}
	}
	m, err := start(ctx, o, progress)
	if err != nil {
		return err
	}
	defer m.stop()
	if err := m.write(ctx, d); err != nil {
		return err
	}
	for _, b := range o.benchmarks {
		text, err := b.run(ctx, o.benchtime, o.count, progress)
		if err != nil {
			return err
		}
		if err := d.set(b.mark, text); err != nil {
			return err
		}
	}
	return d.save()
}

// check returns an error if the flags make no sense.
func (o options) check() error {
	for _, d := range []time.Duration{o.duration, o.warmup} {
		if d < 0 || d%time.Second != 0 { // wrk knows nothing shorter
			return fmt.Errorf("%v is not valid; use whole seconds", d)
		}
	}
	if !slices.Contains([]string{"", "requests", hotKeys, addedLatency}, o.only) {
		return fmt.Errorf("-only: %q is not valid; use requests, %s or %s", o.only, hotKeys, addedLatency)
	}
	if o.duration == 0 || o.rounds < 1 || o.threads < 1 || o.count < 1 {
		return errors.New("use a duration, a round, a thread and a count of one at least")
	}
	return nil
}

// machine tells what was measured with.
func (m *measurement) machine(ctx context.Context) string {
	return fmt.Sprintf("%s, %d CPUs (%s/%s), %s, Caddy %s, go-redis %s, mholt/caddy-ratelimit %s, redis_rate %s, redis-server %s, wrk %s: %d rounds of %v. Load average before: %s.",
		time.Now().Format(time.DateOnly), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version(),
		m.dependency("ours", "github.com/caddyserver/caddy/v2"), m.dependency("ours", "github.com/redis/go-redis/v9"),
		m.dependency("mholt", "github.com/mholt/caddy-ratelimit"), m.dependency("ours", "github.com/go-redis/redis_rate/v10"),
		version(ctx, "redis-server", "--version"), version(ctx, "wrk", "--version"), m.rounds, m.duration, m.busy)
}
