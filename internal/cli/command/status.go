package command

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// statusCommand returns the command status.
func statusCommand() *cobra.Command {
	cmd := Runs(&cobra.Command{
		Use:   "status",
		Short: "Shows the store, its health and the counters of each limit",
		Long: `
Shows where the buckets are kept, whether each Redis server can be reached, and how
many requests each limit has admitted and denied.

The exit status is 2 if a Redis server is not up: it is down, or has not answered yet.`,
		Example: "  caddy rate-limit status\n  caddy rate-limit status --address unix//run/caddy.sock --json",
		Args:    cobra.NoArgs,
	}, func(cmd *cobra.Command, _ []string) error { return ask(cmd, "status", nil, printStatus) })
	addAdminFlags(cmd)
	return cmd
}

// printStatus prints what status answers. It returns ErrProblems if a server is not up.
func printStatus(w io.Writer, a *adminjson.Status) (err error) {
	if !a.Configured {
		fmt.Fprintln(w, "The running config has no limits.")
		return nil
	}
	here := ""
	if a.Memory != nil {
		here = fmt.Sprintf("; this process has %d of at most %d", a.Memory.Buckets, a.Memory.MaxKeys)
		if ago := a.Memory.SavedAgo; ago != nil {
			here += fmt.Sprintf(", written to a file %s ago", terminal.Briefly(time.Duration(*ago)))
		}
	}
	terminal.Printf(w, "Version %s. Buckets are kept in %s%s.", keytext.Safe(a.Version), keytext.Safe(a.Store), here)
	terminal.Printf(w, "Requests: %d admitted, %d denied, %d undecided, %d refused, %d in early data.",
		a.Requests["admitted"], a.Requests["denied"], a.Requests["undecided"], a.Requests["refused"], a.Requests["early_data"])
	if a.Store == "redis" {
		err = printServers(w, a)
	}
	fmt.Fprintln(w)
	printCounts(w, a)
	if len(a.Load) > 0 {
		fmt.Fprintln(w)
		printLoad(w, a.Load)
	}
	if len(a.Waiting) > 0 {
		fmt.Fprintln(w)
		printWaiting(w, a.Waiting)
	}
	return err
}

// printServers prints the state of Redis servers. It returns ErrProblems if one is not up.
func printServers(w io.Writer, a *adminjson.Status) (err error) {
	servers := terminal.NewTable("SERVER", "STATE", "IN USE", "IDLE", "CALLS", "REQUESTS", "FAILURES")
	for i := range a.Servers {
		s := &a.Servers[i]
		state, failures := keytext.Safe(s.State), uint64(0)
		if s.Down != nil {
			state += " for " + terminal.Briefly(time.Duration(*s.Down))
		}
		if s.Reason != "" {
			state += ": " + keytext.Safe(s.Reason)
		}
		up := s.State == limiter.ServerUp
		if !up {
			err = ErrProblems
		}
		for _, n := range s.Failures {
			failures += n
		}
		servers.Add(!up, keytext.Safe(s.Address), state, s.Connections["in_use"], s.Connections["idle"], s.Calls, s.Requests, failures)
	}
	fmt.Fprintln(w)
	servers.Print(w)
	if err != nil {
		terminal.Printf(w, "While a server is not up, on_error applies to its requests: %s, unless their handler sets another.", keytext.Safe(a.OnError))
	}
	return err
}

// printWaiting prints the requests that wait.
func printWaiting(w io.Writer, limits []adminjson.Waiting) {
	table := terminal.NewTable("LIMIT", "WAITING", "CLIENTS", "LONGEST")
	for _, l := range limits {
		table.Add(false, keytext.Safe(l.Path), l.Requests, l.Clients, l.Longest)
	}
	table.Print(w)
	terminal.Printf(w, "Waiting: requests that wait by max_delay now. Clients: those with a request in a queue. Longest: the most requests that one of them has there.")
}

// printLoad prints what the limits do that follow the load.
func printLoad(w io.Writer, limits []adminjson.Load) {
	table := terminal.NewTable("LIMIT", "ALLOWED", "IN PROGRESS", "OVERDUE", "IN BODY", "OLDEST", "MEAN", "LATENCY", "STATE", "SHED HIGH", "NORMAL", "LOW", "AT MIN")
	for i := range limits {
		l := &limits[i]
		mean := "no answers"
		if l.Mean > 0 {
			mean = time.Duration(l.Mean).Round(time.Millisecond).String()
		}
		table.Add(l.State == adaptive.Slow.String(), keytext.Safe(l.Path), l.Limit, l.InProgress, l.Uncounted["overdue"], l.Uncounted["body"], terminal.Briefly(time.Duration(l.Oldest)), mean, adminjson.Interval(l.Latency),
			keytext.Safe(l.State), l.Shed["high"], l.Shed["normal"], l.Shed["low"], terminal.Briefly(time.Duration(l.AtMin)))
	}
	table.Print(w)
	for i := range limits {
		for _, route := range limits[i].Routes {
			terminal.Printf(w, "%s: %s is much slower than usual, and limited alone too.", keytext.Safe(limits[i].Path), keytext.Safe(route))
		}
	}
	terminal.Printf(w, "Overdue: in progress for more than twice latency, and in body: waiting for the client to send it; neither takes room. Mean: time until responses begin. State: slow, fewer are allowed; filling, requests are turned away although the mean is good, so more are allowed; idle, there is enough room.")
}

// printCounts prints what the limits did. With Redis, it shows how much was decided
// without.
func printCounts(w io.Writer, a *adminjson.Status) {
	titles := append([]string{"LIMIT", "ADMITTED", "DENIED", "SPARED", "ADMITTED/S", "DENIED/S"}, countTitles()...)
	redis := a.Store == "redis"
	if redis {
		titles = append(titles, "FALLBACK", "FALLBACK/S")
	}
	limits := terminal.NewTable(titles...)
	for i := range a.Limits {
		l := &a.Limits[i]
		cells := []any{keytext.Safe(l.Path), l.Admitted, l.Denied, l.Spared, perSecond(l.Rates["admitted"]), perSecond(l.Rates["denied"])}
		cells = append(cells, countCells(&l.PolicyCounts)...)
		if redis {
			cells = append(cells, l.By[limiter.DecidedByFallback.String()], perSecond(l.Rates["fallback"]))
		}
		limits.Add(redis && l.Rates["fallback"] > 0, cells...)
	}
	limits.DropEmpty()
	limits.Print(w)
	terminal.Printf(w, "Rates are of the last %s. Spared: the limit had room, but another one denied.", terminal.Briefly(time.Duration(a.RatesOver)))
	if redis {
		terminal.Printf(w, "Fallback: decided locally, because Redis was down or too slow.")
	}
}

// countTitles returns the titles of the columns that countCells fills. Columns that stay
// empty should be dropped.
func countTitles() (titles []string) {
	for _, c := range new(adminjson.PolicyCounts).List() {
		titles = append(titles, strings.ToUpper(strings.ReplaceAll(c.Name, "_", " ")))
	}
	return titles
}

// countCells returns the counts that only limits with certain options have.
func countCells(counts *adminjson.PolicyCounts) (cells []any) {
	for _, c := range counts.List() {
		if c.N == nil {
			cells = append(cells, "")
		} else {
			cells = append(cells, *c.N)
		}
	}
	return cells
}

// perSecond returns a rate as it is shown.
func perSecond(rate float64) terminal.Number {
	return terminal.Number(strconv.FormatFloat(rate, 'f', 1, 64))
}
