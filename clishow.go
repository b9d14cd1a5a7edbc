package ratelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
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
	fmt.Fprintln(w)
	a.printCounts(w)
	return err
}

// printCounts prints what the limits did. With Redis, it shows how much was decided
// without.
func (a *statusAnswer) printCounts(w io.Writer) {
	titles := []string{"LIMIT", "ADMITTED", "DENIED", "SPARED", "ADMITTED/S", "DENIED/S"}
	redis := a.Store == "redis"
	if redis {
		titles = append(titles, "FALLBACK", "FALLBACK/S")
	}
	limits := newTable(titles...)
	for i := range a.Limits {
		l := &a.Limits[i]
		cells := []any{printable(l.Path), l.Admitted, l.Denied, l.Spared, perSecond(l.Rates["admitted"]), perSecond(l.Rates["denied"])}
		if redis {
			cells = append(cells, l.By[limiter.DecidedByFallback.String()], perSecond(l.Rates["fallback"]))
		}
		limits.add(redis && l.Rates["fallback"] > 0, cells...)
	}
	limits.print(w)
	fmt.Fprintf(w, "Rates are of the last %s. Spared: the limit had room, but another one denied.\n", briefly(time.Duration(a.RatesOver)))
	if redis {
		fmt.Fprintln(w, "Fallback: those of all these that this process decided, because Redis was down or too slow.")
	}
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
	name, path, match, algorithm, size, pace, cost, key string
	buckets                                             int
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
		row := shownLimit{
			printable(l.Name), l.Path, l.matches(),
			printable(l.Algorithm), shownNumber(l.Size), l.pace(), shownNumber(l.Cost), printable(l.Key), l.Buckets,
		}
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
	limits, shared := newTable("LIMIT", "ALGORITHM", "SIZE", paceTitle, "COST", "KEY", "SITE", "MATCH", "BUCKETS", "ADMITTED", "DENIED"), false
	for _, r := range rows {
		in := sites[r]
		slices.Sort(in)
		if n := len(in) - 1; n > 2 {
			in = []string{fmt.Sprintf("%s and %d more", in[0], n)}
		}
		cells := []any{r.name, r.algorithm, r.size, r.pace, r.cost, r.key, strings.Join(in, ", "), r.match, r.buckets}
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

// matches returns what a request must match for the limit to apply, in a few words.
func (l *limitAnswer) matches() string {
	all := append(slices.Concat(l.RouteMatches, l.ParentMatches), l.Match)
	var texts []string
	for _, sets := range all {
		if len(sets) > 0 {
			texts = append(texts, matcherSetsText(sets))
		}
	}
	if len(texts) == 0 {
		return "-"
	}
	return printable(strings.Join(texts, "; "))
}

// matcherSetsText returns sets of matchers, of which one must match, as they are shown.
func matcherSetsText(sets caddyhttp.RawMatcherSets) string {
	either := make([]string, 0, len(sets))
	for _, set := range sets {
		var both []string
		for _, name := range slices.Sorted(maps.Keys(set)) {
			both = append(both, matcherText(name, set[name]))
		}
		either = append(either, strings.Join(both, " and "))
	}
	return strings.Join(either, " or ")
}

// matcherText returns a matcher as it is shown: like in a Caddyfile if it has a list of
// texts, and otherwise with its config.
func matcherText(name string, config json.RawMessage) string {
	var words []string
	var inner caddyhttp.RawMatcherSets
	switch {
	case name == "not" && json.Unmarshal(config, &inner) == nil:
		return "not (" + matcherSetsText(inner) + ")"
	case json.Unmarshal(config, &words) == nil:
		return strings.Join(append([]string{name}, words...), " ")
	}
	if text := string(config); text != "null" && text != "{}" {
		return name + " " + text
	}
	return name
}

// printableHosts returns the hosts of a site, shortened.
func printableHosts(hosts []string) string {
	if len(hosts) > 2 {
		return fmt.Sprintf("%s and %d more", printable(hosts[0]), len(hosts)-1)
	}
	return strings.Join(hosts, " ")
}

// print prints what peek and reset answer.
func (a *bucketAnswer) print(w io.Writer) {
	from := printable(a.From)
	if a.Error != "" {
		from = "this Caddy, as Redis does not answer"
	}
	fmt.Fprintf(w, "limit     %s\nin        %s\nlevel     %s\n", printable(a.Limit), from, a.levelText())
	if a.Remaining != nil {
		fmt.Fprintf(w, "room for  %d\n", *a.Remaining)
	}
	if a.denies() {
		fmt.Fprintf(w, "admits    %s\n", a.admitsText())
	}
	fmt.Fprintf(w, "empty     in %s\n", briefly(time.Duration(a.Clear)))
	if a.Node != nil {
		fmt.Fprintf(w, "here      %s\n", a.Node)
	}
}

// levelText returns the level as it is shown.
func (a *bucketAnswer) levelText() string {
	level := strconv.FormatInt(a.Level, 10)
	if a.Size != nil {
		level += fmt.Sprintf(" of %d", *a.Size)
	}
	if a.Held > 0 {
		level += fmt.Sprintf(", %d of them held", a.Held)
	}
	return level
}

// admitsText returns when a request is admitted, as it is shown.
func (a *bucketAnswer) admitsText() string {
	switch {
	case a.Never:
		return "never"
	case a.RetryAfter == nil:
		return ""
	case *a.RetryAfter == 0:
		return "now"
	}
	return "in " + briefly(time.Duration(*a.RetryAfter))
}

// print prints what peek and reset answer about the buckets of all limits. It returns
// an error if there is no bucket to ask for.
func (a *bucketsAnswer) print(w io.Writer, whose string) error {
	titles := []string{"LIMIT", "KEY", "LEVEL", "ROOM", "ADMITS", "EMPTY"}
	nodes := slices.ContainsFunc(a.Buckets, func(b bucketAnswer) bool { return b.Node != nil })
	if nodes {
		titles = append(titles, "HERE")
	}
	held := newTable(titles...)
	for i := range a.Buckets {
		b := &a.Buckets[i]
		room := ""
		if b.Remaining != nil {
			room = strconv.FormatInt(*b.Remaining, 10)
		}
		cells := []any{printable(b.Limit), b.shownKey.String(), b.levelText(), room, b.admitsText(), "in " + briefly(time.Duration(b.Clear))}
		if nodes {
			cells = append(cells, b.Node)
		}
		held.add(b.denies(), cells...)
	}
	if len(a.Buckets) > 0 {
		held.print(w)
	} else if a.Asked > 0 {
		fmt.Fprintf(w, "No bucket of %s holds anything, of %d.\n", whose, a.Asked)
	}
	if len(a.NotAsked) > 0 {
		not := newTable("NOT ASKED", "WHY")
		for _, n := range a.NotAsked {
			not.add(false, printable(n.Limit), printable(n.Why))
		}
		if a.Asked > 0 {
			fmt.Fprintln(w)
		}
		not.print(w)
	}
	if a.Asked == 0 {
		return errors.New("no limit could be asked with what was given")
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
