package ratelimit

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// printStatus prints what status answers. It returns errFound if a server is down.
func printStatus(w io.Writer, a *statusAnswer) (err error) {
	if !a.Configured {
		fmt.Fprintln(w, "The running config has no limits.")
		return nil
	}
	fmt.Fprintf(w, "Version %s. Buckets are kept in %s; this process has %d of at most %d.\n",
		printable(a.Version), printable(a.Store), a.Memory.Buckets, a.Memory.MaxKeys)
	fmt.Fprintf(w, "Requests: %d admitted, %d denied, %d undecided, %d refused, %d in early data.\n",
		a.Requests["admitted"], a.Requests["denied"], a.Requests["undecided"], a.Requests["refused"], a.Requests["early_data"])
	if a.Store == "redis" {
		servers := newTable("SERVER", "STATE", "IN USE", "IDLE", "CALLS", "REQUESTS", "FAILURES")
		for i := range a.Servers {
			s := &a.Servers[i]
			state, failures := "up", uint64(0)
			if !s.Up {
				err = errFound
				state = "down"
				if s.Down != nil {
					state += " for " + briefly(time.Duration(*s.Down))
				}
				if s.Reason != "" {
					state += ": " + printable(s.Reason)
				}
			}
			for _, n := range s.Failures {
				failures += n
			}
			servers.add(!s.Up, printable(s.Address), state, s.Connections["in_use"], s.Connections["idle"], s.Calls, s.Requests, failures)
		}
		fmt.Fprintln(w)
		servers.print(w)
		if err != nil {
			fmt.Fprintf(w, "While a server is down, on_error applies to its requests: %s, unless their handler sets another.\n", printable(string(a.OnError)))
		}
	}
	limits := newTable("LIMIT", "ADMITTED", "DENIED", "SPARED", "ADMITTED/S", "DENIED/S")
	for i := range a.Limits {
		l := &a.Limits[i]
		limits.add(false, printable(l.Path), l.Admitted, l.Denied, l.Spared, perSecond(l.Rates["admitted"]), perSecond(l.Rates["denied"]))
	}
	fmt.Fprintln(w)
	limits.print(w)
	fmt.Fprintf(w, "Rates are of the last %s. Spared: the limit had room, but another one denied.\n", briefly(time.Duration(a.RatesOver)))
	return err
}

// perSecond returns a rate as it is shown.
func perSecond(rate float64) string { return strconv.FormatFloat(rate, 'f', 1, 64) }

// briefly returns a duration with about three digits.
func briefly(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= 10*time.Millisecond:
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Microsecond).String()
}

// shownLimit is a row of the table of limits.
type shownLimit struct {
	path, algorithm, size, pace, cost, key string
	buckets                                int
}

// printLimits prints what limits answers. A limit of several sites has one row, as
// its buckets and counts are those of all of them.
func printLimits(w io.Writer, a *limitsAnswer) error {
	if len(a.Limits) == 0 {
		fmt.Fprintln(w, "The running config has no limits.")
		return nil
	}
	var rows []shownLimit
	sites := make(map[shownLimit][]string)
	counts := make(map[string]*limitAnswer)
	for i := range a.Limits {
		l := &a.Limits[i]
		row := shownLimit{printable(l.Path), printable(l.Algorithm), shownNumber(l.Size), l.pace(), shownNumber(l.Cost), printable(l.Key), l.Buckets}
		if l.Off {
			row.size = "off"
		}
		if sites[row] == nil {
			rows = append(rows, row)
		}
		if at := cmp.Or(printableHosts(l.Hosts), l.Server, "-"); !slices.Contains(sites[row], at) {
			sites[row] = append(sites[row], at)
		}
		counts[row.path] = l
	}
	limits, shared := newTable("LIMIT", "ALGORITHM", "SIZE", paceTitle, "COST", "KEY", "SITE", "BUCKETS", "ADMITTED", "DENIED"), false
	for _, r := range rows {
		in := sites[r]
		slices.Sort(in)
		if n := len(in) - 1; n > 2 {
			in = []string{fmt.Sprintf("%s and %d more", in[0], n)}
		}
		cells := []any{r.path, r.algorithm, r.size, r.pace, r.cost, r.key, strings.Join(in, ", "), r.buckets}
		if l := counts[r.path]; l != nil {
			cells = append(cells, l.Admitted, l.Denied)
			counts[r.path] = nil
		} else {
			cells, shared = append(cells, "", ""), true
		}
		limits.add(false, cells...)
	}
	limits.print(w)
	if shared {
		fmt.Fprintln(w, "ADMITTED and DENIED are of all limits with the same path, and stand in the first row.")
	}
	return nil
}

// printableHosts returns the hosts of a site, shortened.
func printableHosts(hosts []string) string {
	if len(hosts) > 2 {
		return fmt.Sprintf("%s and %d more", printable(hosts[0]), len(hosts)-1)
	}
	return strings.Join(hosts, " ")
}

// printBucket prints what peek and reset answer.
func printBucket(w io.Writer, a *peekAnswer) error {
	level := strconv.FormatInt(a.Level, 10)
	if a.Size != nil {
		level += fmt.Sprintf(" of %d", *a.Size)
	}
	if a.Held > 0 {
		level += fmt.Sprintf(", %d of them held", a.Held)
	}
	fmt.Fprintf(w, "limit     %s\nin        %s\nlevel     %s\n", printable(a.Limit), printable(a.From), level)
	if a.Remaining != nil {
		fmt.Fprintf(w, "room for  %d\n", *a.Remaining)
	}
	if a.RetryAfter != nil && *a.RetryAfter > 0 {
		fmt.Fprintf(w, "admits    in %s\n", briefly(time.Duration(*a.RetryAfter)))
	}
	fmt.Fprintf(w, "empty     in %s\n", briefly(time.Duration(a.Clear)))
	if a.Node != nil {
		fmt.Fprintf(w, "here      %s\n", a.Node)
	}
	return nil
}

// String returns what is known, as it is shown.
func (n *nodeAnswer) String() string {
	known := strconv.FormatInt(n.Level, 10)
	if n.Remembered {
		known += ", and denies without asking Redis"
	}
	return known
}
