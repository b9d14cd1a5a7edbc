package behaviour

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// shownPolicy is a limit with a policy, and what shows it: a text where options are listed
// and, if something is counted, a metric and a count of status and limits.
type shownPolicy struct{ limit, text, metric, count string }

// shownPolicies has a limit for each of rule.Options, by its name.
var shownPolicies = map[string]shownPolicy{
	"count_denied": {limit: "size 9; count_denied", text: "count_denied"},
	"count":        {limit: "size 9; count status 401 5xx", text: "count status 401 5xx"},
	"clear":        {limit: "size 9; clear status 2xx", text: "clear status 2xx"},
	"actual_cost":  {limit: "size 9; actual_cost bytes", text: "actual_cost bytes"},
	"hold":         {limit: "size 9; count status 404; hold off", text: "count status 404, hold off"},
	"dry_run": {
		"size 9; dry_run", "dry_run",
		`decisions_total{by="memory",limit="dry_run",result="would_deny"}`, "would_deny",
	},
	"speed":       {"speed 1MB/s; size 16384", "speed 1MB/s", `delayed_total{limit="speed"}`, "delayed"},
	"soft":        {"size 9; soft 2", "soft 2", `over_size_total{limit="soft"}`, "over_size"},
	"max_delay":   {"size 9; max_delay 2s", "max_delay 2s", `delayed_total{limit="max_delay"}`, "delayed"},
	"max_waiting": {"size 9; max_delay 2s; max_waiting 7", "max_delay 2s, max_waiting 7", `delayed_total{limit="max_waiting"}`, "delayed"},
	"fair_by": {
		"key {client_ip}; concurrency auto; max_delay 2s; fair_by off",
		"max_delay 2s, fair_by off, auto latency 500ms min 4 until header, status 503", `displaced_total{limit="fair_by"}`, "displaced",
	},
	"ban":       {"size 9; ban 1m 10m", "ban 1m 10m", `bans_total{limit="ban"}`, "bans"},
	"ban_after": {"size 9; ban 1m; ban_after 2", "ban 1m, ban_after 2", `bans_total{limit="ban_after"}`, "bans"},
	"borrow":    {"size 9; borrow pool", "borrow pool", `borrowed_total{limit="borrow"}`, "borrowed"},
	"pool":      {limit: "concurrency 9; pool", text: "pool"},
	"auto": {
		limit: "key {client_ip}; concurrency auto", text: "auto latency 500ms min 4 until header, status 503",
		metric: `load_limit{limit="auto"}`,
	},
	"status": {limit: "size 9; status 403", text: "status 403"},

	// Its metrics are those of Redis, see TestLease.
	"consistency": {limit: "size 9; consistency lease 100ms", text: "consistency lease 100ms"},
}

// TestPoliciesAreShown guards that each policy of a limit is in all that shows limits:
// limits, explain and peek, to people and to programs, and if something is counted because
// of it, by status, limits and metrics; and that none is shown of a limit without.
func TestPoliciesAreShown(t *testing.T) {
	var site strings.Builder
	site.WriteString("rate_limit {\nlimit none {\nsize 9\n}\n")
	for name := range jsonNames(reflect.TypeFor[rule.Options]()) {
		p, ok := shownPolicies[name]
		if !ok {
			t.Fatalf("%s: this test has no limit with it", name)
		}
		site.WriteString("limit " + name + " {\n" + strings.ReplaceAll(p.limit, "; ", "\n") + "\n}\n")
	}
	site.WriteString("}\nrespond ok")
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: site.String()})
	s.Get("/")

	address, file := "--address="+a.Addr, sitetest.ConfigFile(t, "http://localhost:8080 {\n"+site.String()+"\n}\n")
	explain := []string{"explain", "--config", file, "--client-ip", "127.0.0.1", "http://localhost:8080/"}
	tables := map[string]string{
		"limits": sitetest.RunCommand(t, "limits", address).Out, "status": sitetest.RunCommand(t, "status", address).Out,
		"explain": sitetest.RunCommand(t, explain...).Out,
	}
	objects := map[string]map[string]any{
		"limits": byName(t, a.Ask("GET", "limits", "")), "status": byName(t, a.Ask("GET", "status", "")),
		"explain": byName(t, decoded(t, sitetest.RunCommand(t, append(explain, "--json")...).Out)), "peek": {},
	}
	peek := func(name string) string {
		objects["peek"][name] = a.Ask("POST", "peek", `{"limit": "`+name+`", "key": "127.0.0.1"}`)
		_, rest, _ := strings.Cut(sitetest.RunCommand(t, "peek", name, "127.0.0.1", address).Out, "\noptions      ")
		options, _, _ := strings.Cut(rest, "\n")
		return options
	}
	metrics := collected(t, s.Process)
	for name, p := range shownPolicies {
		for surface, options := range map[string]string{
			"limits": cellOf(tables["limits"], name, adminjson.OptionsTitle), "explain": cellOf(tables["explain"], name, adminjson.OptionsTitle),
			"peek": peek(name),
		} {
			if options != p.text {
				t.Errorf("%s: limit %s: options %q, want %q", surface, name, options, p.text)
			}
			if l, _ := objects[surface][name].(map[string]any); l[name] == nil {
				t.Errorf("%s: limit %s: no %s in %v", surface, name, name, l)
			}
		}
		if metrics[p.metric] == "" && p.metric != "" {
			t.Errorf("no metric %s", p.metric)
		}
		for _, surface := range []string{"status", "limits"} {
			if p.count == "" {
				continue
			}
			if l, _ := objects[surface][name].(map[string]any); l[p.count] != 0.0 {
				t.Errorf("%s: limit %s: %s is %v, want 0", surface, name, p.count, l[p.count])
			}
			title := strings.ToUpper(strings.ReplaceAll(p.count, "_", " "))
			if n := cellOf(tables[surface], name, title); n != "0" {
				t.Errorf("%s: limit %s: column %s has %q, want 0", surface, name, title, n)
			}
			if n := cellOf(tables[surface], "none", title); n != "" {
				t.Errorf("%s: a limit without policies has %q in column %s", surface, n, title)
			}
		}
		for surface := range objects {
			if l, _ := objects[surface]["none"].(map[string]any); name != "status" && l[name] != nil || p.count != "" && l[p.count] != nil {
				t.Errorf("%s: a limit without policies has %s", surface, name)
			}
		}
		if metrics[strings.Replace(p.metric, `limit="`+name, `limit="none`, 1)] != "" {
			t.Errorf("a limit without policies has the metric of %s", name)
		}
	}
	for count := range jsonNames(reflect.TypeFor[adminjson.PolicyCounts]()) {
		if !slices.ContainsFunc(slices.Collect(maps.Values(shownPolicies)), func(p shownPolicy) bool { return p.count == count }) {
			t.Errorf("%s: this test has no limit that counts it", count)
		}
	}
	if options := peek("none") + cellOf(tables["limits"], "none", adminjson.OptionsTitle) + cellOf(tables["explain"], "none", adminjson.OptionsTitle); options != "" {
		t.Errorf("a limit without policies has options %q", options)
	}
}

// TestOptionsAreShown guards that the admin API, and with it the command limits, shows each
// option of a limit under its name, or says the same in another way.
func TestOptionsAreShown(t *testing.T) {
	t.Parallel()
	other := map[string]string{
		"max": "size", "duration": "drip_rate",
		"factor": "size", "concurrency": "algorithm", "min_interval": "path", "limit": "parent",
	}
	shown := jsonNames(reflect.TypeFor[adminjson.Limit]())
	for _, option := range config.LimitOptions {
		if !shown[option] && !shown[other[option]] {
			t.Errorf("%s is not shown", option)
		}
	}
}

// TestPeekInDryRun guards that peek does not say of a dry run that it denies requests.
func TestPeekInDryRun(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit candidate {\nsize 1\ndrip_rate 1h\ndry_run\n}\nrespond ok"})
	s.Get("/")
	sitetest.RunCommand(t, "peek", "candidate", "127.0.0.1", "--address", a.Addr).Want(t, 0, ""+
		"limit        candidate\n"+
		"options      dry_run\n"+
		"in           memory\n"+
		"level        1 of 1\n"+
		"remaining    0\n"+
		"retry after  1h0m0s, if enforced\n"+
		"empties in   1h0m0s\n")
	sitetest.RunCommand(t, "peek", "--client-ip", "127.0.0.1", "--address", a.Addr).Want(t, 0, ""+
		"LIMIT      OPTIONS  KEY        LEVEL   REMAINING  RETRY AFTER          EMPTIES IN\n"+
		"candidate  dry_run  127.0.0.1  1 of 1          0  1h0m0s, if enforced  1h0m0s\n")
}

// jsonNames returns the names in JSON of the fields of a struct.
func jsonNames(of reflect.Type) map[string]bool {
	names := make(map[string]bool)
	for _, f := range reflect.VisibleFields(of) {
		if name := config.JSONName(f); name != "" {
			names[name] = true
		}
	}
	return names
}

// decoded returns an object that a command printed.
func decoded(t *testing.T, text string) (object map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &object); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return object
}

// byName returns the limits of an answer by their names.
func byName(t *testing.T, answer map[string]any) map[string]any {
	t.Helper()
	found := make(map[string]any)
	limits, _ := answer["limits"].([]any)
	for _, l := range limits {
		l := l.(map[string]any)
		name, ok := l["path"].(string)
		if !ok {
			name = l["limit"].(string)
		}
		found[name] = l
	}
	return found
}

// cellOf returns what a table of limits has in the row of a limit, in the column of a title.
func cellOf(table, limit, title string) string {
	lines := strings.Split(table, "\n")
	for len(lines) > 0 && !strings.HasPrefix(lines[0], "LIMIT ") {
		lines = lines[1:]
	}
	if len(lines) == 0 {
		return ""
	}
	from := strings.Index(lines[0]+"  ", "  "+title+"  ")
	if from < 0 {
		return ""
	}
	from += len("  ")
	after := lines[0][min(from+len(title), len(lines[0])):]
	to := from + len(title) + len(after) - len(strings.TrimLeft(after, " "))
	for _, line := range lines[1:] {
		if !strings.HasPrefix(line, limit+" ") {
			continue
		}
		if strings.TrimLeft(after, " ") == "" {
			to = len(line)
		}
		return strings.TrimSpace(line[min(from, len(line)):min(to, len(line))])
	}
	return ""
}
