// Package check is the command check: what is legal in a config and probably a mistake.
package check

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Command returns the command check.
func Command() *cobra.Command {
	cmd := command.Runs(&cobra.Command{
		Use:   "check [FILE]",
		Short: "Advises on the limits of a config",
		Long: `
Finds valid limits that probably do not do what was intended: those that
clients can get around, those that deny all clients behind a proxy at once, those
that no request reaches, and others. For each it says what to change.

A config that Caddy would not load is an error, as with caddy validate, except that log
files are not opened: run it where the config's files and environment are. It needs no
running Caddy. With --redis it connects to the Redis of the config, has it decide a
request, and checks how it is set up. A Redis that can't be reached is one of the problems.

FILE is the config, as in --config.

A mistake can't be meant as it is. A warning may be: the option ignore_advice of the block,
or the global one, takes what it has in brackets, and it is no longer given.

The exit status is 2 if there is a mistake, 3 if there are only warnings, 1 if Caddy would
not load the config, and 0 if all is well.`,
		Example: "  caddy rate-limit check\n  caddy rate-limit check Caddyfile --redis",
		Args:    cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, args []string) error { return runCheck(cmd, strings.Join(args, "")) })
	offline.AddFlags(cmd)
	cmd.Flags().Bool("redis", false, "Connect to Redis and check how it is set up")
	return cmd
}

// runCheck runs the command check. file is its argument, or "".
func runCheck(cmd *cobra.Command, file string) error {
	d, err := offline.LoadFor(cmd, file)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Validate(); err != nil {
		return fmt.Errorf("%s: Caddy would not load it: %w", d.Name, err)
	}
	c := newChecker(d)
	if withRedis, _ := cmd.Flags().GetBool("redis"); withRedis {
		c.checkRedis(cmd.Context())
	}
	if asJSON, _ := cmd.Flags().GetBool("json"); asJSON {
		err = terminal.PrintJSON(cmd.OutOrStdout(), c)
	} else {
		c.print(cmd.OutOrStdout())
	}
	if err == nil {
		err = c.status()
	}
	return err
}

// checker collects advice on a config.
type checker struct {
	*offline.Config `json:"-"`

	Advice []advice.Advice `json:"advice"`
	Notes  []string        `json:"notes"` // what could not be checked
}

// Advice returns advice on a config.
func Advice(d *offline.Config) []advice.Advice { return newChecker(d).Advice }

// newChecker returns the advice that can be given on the config alone.
func newChecker(d *offline.Config) *checker {
	about := advice.Config{HTTP: d.HTTP, Listeners: d.Listeners, Redis: d.Redis != nil, Ignored: d.Ignored}
	if opt, err := d.RedisOptions(); err == nil && about.Redis { // Validate returns the error
		about.Servers = &opt
	}
	c := &checker{Config: d, Advice: append([]advice.Advice{}, advice.On(about)...), Notes: append([]string{}, d.Warnings...)}
	for _, s := range c.Servers {
		if slices.ContainsFunc(d.Listeners, func(l *rule.Listener) bool { return l.Server == s.Name }) && s.SpeaksHTTP3() {
			c.Notes = append(c.Notes, "Server "+s.Name+" speaks HTTP/3, which has no connections that limits in listener_wrappers see.")
		}
	}
	limited := len(d.Listeners) > 0 || slices.ContainsFunc(c.Servers, func(s *offline.Server) bool { return len(s.Handlers) > 0 })
	if !limited && len(c.Notes) == 0 {
		c.Notes = append(c.Notes, "The config has no limits.")
	}
	return c
}

// advise adds advice on a Redis that was asked.
func (c *checker) advise(about, problem, remedy string) {
	if kind := advice.OfRedis; !slices.Contains(c.Ignored, kind.String()) {
		c.Advice = append(c.Advice, advice.Advice{Kind: kind, Of: about, Problem: problem, Remedy: remedy})
	}
}

// status returns the exit status, or nil if it is 0.
func (c *checker) status() error {
	switch mistakes := c.mistakes(); {
	case mistakes > 0:
		return command.ErrProblems
	case len(c.Advice) > 0:
		return errWarnings
	}
	return nil
}

// errWarnings is the exit status if all advice is on what may be meant.
const errWarnings = command.StatusError(3)

// mistakes returns how much of the advice is on what can't be meant.
func (c *checker) mistakes() (n int) {
	for _, a := range c.Advice {
		if a.Kind.IsCertain() {
			n++
		}
	}
	return n
}

// print prints the advice, that on mistakes first.
func (c *checker) print(w io.Writer) {
	for _, certain := range []bool{true, false} {
		for _, a := range c.Advice {
			if a.Kind.IsCertain() == certain {
				text := fmt.Sprintf("%s: %s: %s %s [%s]", map[bool]string{true: "mistake", false: "warning"}[certain], a.About(), a.Problem, a.Remedy, a.Kind)
				fmt.Fprintln(w, terminal.Wrapped(keytext.Safe(text), 80, 2)+"\n")
			}
		}
	}
	if mistakes, all := c.mistakes(), len(c.Advice); all == 0 {
		fmt.Fprintln(w, "No problems found.")
	} else {
		fmt.Fprintln(w, strings.Join(slices.Concat(several(mistakes, "mistake"), several(all-mistakes, "warning")), ", ")+".")
	}
	for _, note := range c.Notes {
		fmt.Fprintln(w, "Note: "+keytext.Safe(note))
	}
}

// several returns how many of what there are, if there are any.
func several(n int, what string) []string {
	switch n {
	case 0:
		return nil
	case 1:
		return []string{"1 " + what}
	}
	return []string{fmt.Sprintf("%d %ss", n, what)}
}
