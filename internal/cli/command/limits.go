package command

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// limitsCommand returns the command limits.
func limitsCommand() *cobra.Command {
	cmd := Runs(&cobra.Command{
		Use:     "limits",
		Short:   "Lists the limits of the running config",
		Long:    "\nLists the limits of the config that Caddy runs, with their numbers and keys.",
		Example: "  caddy rate-limit limits",
		Args:    cobra.NoArgs,
	}, func(cmd *cobra.Command, _ []string) error { return ask(cmd, "limits", nil, printLimits) })
	addAdminFlags(cmd)
	return cmd
}

// shownLimit is a row of the table of limits.
type shownLimit struct {
	name, path, match, algorithm, size, pace, cost, options, key string
	buckets                                                      int
}

// printLimits prints what limits answers. A limit of several sites has one row, as
// its buckets and counts are for all of them.
func printLimits(w io.Writer, a *adminjson.Limits) error {
	if len(a.Limits) == 0 {
		fmt.Fprintln(w, "The running config has no limits.")
		return nil
	}
	var rows []shownLimit
	sites := make(map[shownLimit][]string)
	counts := make(map[string]*adminjson.Limit)
	for i := range a.Limits {
		l := &a.Limits[i]
		row := shownLimit{
			keytext.Safe(l.Name), l.Path, matches(&l.Scope),
			keytext.Safe(l.Algorithm), adminjson.Number(l.Size), l.Pace(), adminjson.Number(l.Cost),
			strings.Join(l.NonDefault(), ", "), keytext.Safe(l.Key), l.Buckets,
		}
		if l.Off {
			row.size = "off"
		}
		if sites[row] == nil {
			rows = append(rows, row)
		}
		if at := siteText(&l.Scope); !slices.Contains(sites[row], at) {
			sites[row] = append(sites[row], at)
		}
		counts[row.path] = l
	}
	titles := []string{"LIMIT", "ALGORITHM", "SIZE", adminjson.PaceTitle, "COST", adminjson.OptionsTitle, "KEY", "SITE", "MATCH", "BUCKETS", "ADMITTED", "DENIED"}
	limits, shared := terminal.NewTable(append(titles, countTitles()...)...), false
	for _, r := range rows {
		in := sites[r]
		slices.Sort(in)
		if n := len(in) - 1; n > 2 {
			in = []string{fmt.Sprintf("%s and %d more", in[0], n)}
		}
		cells := []any{r.name, r.algorithm, terminal.Number(r.size), r.pace, terminal.Number(r.cost), r.options, r.key, strings.Join(in, ", "), r.match, r.buckets}
		if l := counts[r.path]; l != nil {
			cells = append(append(cells, l.Admitted, l.Denied), countCells(&l.PolicyCounts)...)
			counts[r.path] = nil
		} else {
			cells, shared = append(append(cells, "", ""), countCells(new(adminjson.PolicyCounts))...), true
		}
		limits.Add(false, cells...)
	}
	limits.DropEmpty()
	limits.Print(w)
	if shared {
		terminal.Printf(w, "Counts of requests are totals for all limits with the same path, shown in its first row.")
	}
	return nil
}

// siteText returns the site of a limit, in a few words.
func siteText(s *adminjson.Scope) string {
	return cmp.Or(printableHosts(s.Hosts), keytext.Safe(cmp.Or(s.Server, "-")))
}

// matches returns what a request must match for the limit to apply, in a few words.
func matches(s *adminjson.Scope) string {
	all := append(slices.Concat(s.RouteMatches, s.ParentMatches), s.Match)
	var texts []string
	for _, sets := range all {
		if len(sets) > 0 {
			texts = append(texts, matcherSetsText(sets))
		}
	}
	if len(texts) == 0 {
		return "-"
	}
	return keytext.Safe(strings.Join(texts, "; "))
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
		return fmt.Sprintf("%s and %d more", keytext.Safe(hosts[0]), len(hosts)-1)
	}
	return keytext.SafeList(hosts)
}
