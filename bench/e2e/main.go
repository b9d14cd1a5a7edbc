// Command e2e measures whole requests: it builds Caddy with the rate limiter,
// starts it in several configurations, has wrk send them requests in turns, and
// prints a table in Markdown. See ../README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// options are the command's flags.
type options struct {
	duration, warmup     time.Duration
	rounds               int
	connections, threads int
}

func main() {
	var o options
	flag.DurationVar(&o.duration, "duration", time.Second, "how long one run of wrk takes, in whole seconds")
	flag.DurationVar(&o.warmup, "warmup", time.Second, "how long each variant is run before the first round, in whole seconds; 0 for not at all")
	flag.IntVar(&o.rounds, "rounds", 25, "how many times each variant is run")
	flag.IntVar(&o.connections, "connections", 64, "how many connections wrk keeps busy")
	flag.IntVar(&o.threads, "threads", 2, "how many threads wrk uses")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

// run measures all variants. When it returns none of the processes that it
// started is left, whatever the outcome.
func run(ctx context.Context, o options, out, progress io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	for _, program := range []string{"redis-server", "wrk"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%s: not on PATH, please install it", program)
		}
	}
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	fmt.Fprintln(progress, "building Caddy")
	caddy := filepath.Join(dir, "caddy")
	build := exec.CommandContext(ctx, "go", "build", "-o", caddy, "github.com/seed-387a6c65/caddy-ratelimit/bench/caddy")
	build.Stderr = progress
	if err := build.Run(); err != nil {
		return fmt.Errorf("building Caddy: %w", err)
	}

	m := measurement{
		options: o, dir: dir, caddy: caddy,
		sites: make(map[string]site), results: make(map[string][]result),
	}
	defer m.stop()
	err = m.start(ctx)
	if err == nil {
		err = m.measure(ctx, progress)
	}
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case err != nil:
		return err
	}
	return m.print(ctx, out)
}

// check returns an error if the flags make no sense.
func (o options) check() error {
	for _, d := range []time.Duration{o.duration, o.warmup} {
		if d < 0 || d%time.Second != 0 { // wrk knows nothing shorter
			return fmt.Errorf("%v: want whole seconds", d)
		}
	}
	if o.duration == 0 || o.rounds < 1 || o.threads < 1 || o.connections < o.threads {
		return errors.New("want a duration, a round, a thread and a connection for each thread at least")
	}
	return nil
}

// measurement is all that is measured together.
type measurement struct {
	options
	dir, caddy string
	processes  []*process
	sites      map[string]site     // of the variants, by their names
	results    map[string][]result // likewise, round by round
}

// start starts Redis, and Caddy for each variant.
func (m *measurement) start(ctx context.Context) error {
	redis, err := m.startRedis(ctx)
	if err != nil {
		return err
	}
	for i, v := range variants {
		if m.sites[v.name], err = m.startCaddy(ctx, fmt.Sprintf("caddy-%d", i), v, redis); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
	}
	return nil
}

// measure runs the variants one after the other, round by round, each round in
// another order, so that none always follows the same.
func (m *measurement) measure(ctx context.Context, progress io.Writer) error {
	if m.warmup > 0 {
		fmt.Fprintln(progress, "warming up")
		for _, v := range variants {
			if _, err := m.load(ctx, v, m.warmup); err != nil {
				return err
			}
		}
	}
	for round := range m.rounds {
		fmt.Fprintf(progress, "round %d of %d\n", round+1, m.rounds)
		for _, i := range rand.Perm(len(variants)) { //nolint:gosec // no secret
			v := variants[i]
			r, err := m.load(ctx, v, m.duration)
			if err != nil {
				return err
			}
			m.results[v.name] = append(m.results[v.name], r)
		}
	}
	return nil
}

// stop ends all processes.
func (m *measurement) stop() {
	for _, p := range m.processes {
		p.stop()
	}
}
