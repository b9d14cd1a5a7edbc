package operation

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is what the tests need of Grafana's model of a dashboard.
type dashboard struct {
	ID            *int
	UID           string
	Title         string
	SchemaVersion int
	Editable      bool
	Templating    struct{ List []variable }
	Panels        []panel
}

type variable struct {
	Name, Label, Type string
	Query             any
	Datasource        datasource
	Multi             bool
	AllValue          string
	Refresh           int
}

type datasource struct{ Type, UID string }

type panel struct {
	ID                       int
	Type, Title, Description string
	Datasource               datasource
	GridPos                  struct{ X, Y, W, H int }
	FieldConfig              struct{ Defaults struct{ Unit string } }
	Targets                  []target
}

type target struct {
	RefID, Expr, LegendFormat string
	Instant                   bool
	Datasource                datasource
}

// readDashboard returns the dashboard in deploy.
func readDashboard(t testing.TB) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal([]byte(read(t, deploy, "grafana/dashboard.json")), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// units are those of Grafana that the dashboard uses.
var units = []string{"reqps", "ops", "s", "percentunit", "short"}

// datasourceVariable is how panels refer to the data source that users choose.
var datasourceVariable = datasource{Type: "prometheus", UID: "${datasource}"}

// TestDashboardFollowsTheRules guards that Grafana can load the dashboard, and
// that it follows the rules of Grafana's dashboard-linter: it works with any data
// source, job and instance, and each panel says what it shows and in which unit. Unlike
// those it may be edited, since users start from it.
func TestDashboardFollowsTheRules(t *testing.T) {
	d := readDashboard(t)
	switch {
	case d.ID != nil:
		t.Error("an id is that of one Grafana's database")
	case len(d.UID) < 8 || len(d.UID) > 40:
		t.Errorf("uid %q, want 8 to 40 characters", d.UID)
	case d.SchemaVersion < 39 || d.SchemaVersion > 42:
		t.Errorf("schemaVersion %d, want 39 to 42", d.SchemaVersion)
	case !d.Editable:
		t.Error("not editable")
	}
	for _, want := range []struct{ name, label string }{
		{"datasource", "Data source"}, {"job", "Job"}, {"instance", "Instance"}, {"limit", "Limit"},
	} {
		i := slices.IndexFunc(d.Templating.List, func(v variable) bool { return v.Name == want.name })
		if i < 0 {
			t.Errorf("no variable %s", want.name)
			continue
		}
		v := d.Templating.List[i]
		if v.Label != want.label {
			t.Errorf("variable %s: label %q, want %q", v.Name, v.Label, want.label)
		}
		if v.Name == "datasource" {
			if v.Type != "datasource" || v.Query != "prometheus" {
				t.Errorf("variable %s: type %q of %v", v.Name, v.Type, v.Query)
			}
		} else if v.Type != "query" || v.Datasource != datasourceVariable || !v.Multi || v.AllValue != ".+" || v.Refresh != 2 {
			t.Errorf("variable %s: %+v", v.Name, v)
		}
	}

	ids, titles := make(map[int]bool), make(map[string]bool)
	for i, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 {
			t.Errorf("%s: id %d is not its own", p.Title, p.ID)
		}
		if titles[p.Title] || p.Title == "" {
			t.Errorf("title %q is not its own", p.Title)
		}
		ids[p.ID], titles[p.Title] = true, true
		for _, q := range d.Panels[:i] {
			a, b := p.GridPos, q.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("%s: lies over %s", p.Title, q.Title)
			}
		}
		if g := p.GridPos; g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			t.Errorf("%s: lies at %+v, want it within 24 columns", p.Title, g)
		}
		if p.Type == "row" {
			continue
		}
		if !slices.Contains([]string{"timeseries", "stat", "table"}, p.Type) {
			t.Errorf("%s: type %q", p.Title, p.Type)
		}
		if sentences := strings.Count(p.Description, ". ") + 1; sentences < 2 || !strings.HasSuffix(p.Description, ".") {
			t.Errorf("%s: its description does not say what to do: %q", p.Title, p.Description)
		}
		if p.Datasource != datasourceVariable {
			t.Errorf("%s: data source %+v", p.Title, p.Datasource)
		}
		if !slices.Contains(units, p.FieldConfig.Defaults.Unit) {
			t.Errorf("%s: unit %q, want one of %q", p.Title, p.FieldConfig.Defaults.Unit, units)
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s: asks for nothing", p.Title)
		}
		for n, target := range p.Targets {
			if target.RefID != string(rune('A'+n)) || target.Datasource != datasourceVariable {
				t.Errorf("%s: target %d: %+v", p.Title, n, target)
			}
			if problem := lint(target); problem != "" {
				t.Errorf("%s: %s: %s", p.Title, target.Expr, problem)
			}
		}
	}
}

var (
	// selector matches a metric with its labels and its range.
	selector = regexp.MustCompile(`(\w+\()?(caddy_rate_limit_\w+)(\{[^}]*\})?(\[[^]]*\])?`)

	// metricName matches the name of a metric.
	metricName = regexp.MustCompile(`caddy_rate_limit_\w+`)
)

// lint returns what is wrong with a query, in which each metric must be that of the
// chosen jobs and instances, and counters must be rates: of Grafana's interval in
// graphs, and of the shown range in tables. The second is not a rule of Grafana's.
func lint(t target) string {
	found := selector.FindAllStringSubmatch(t.Expr, -1)
	if len(found) == 0 {
		return "asks for no metric of ours"
	}
	for _, m := range found {
		function, name, labels, interval := m[1], m[2], m[3], m[4]
		if !strings.Contains(labels, `job=~"$job", instance=~"$instance"`) {
			return name + " of any job and instance"
		}
		counter := strings.HasSuffix(name, "_total") || strings.HasSuffix(name, "_bucket")
		want := ""
		switch {
		case counter && t.Instant:
			want = "increase([$__range]"
		case counter:
			want = "rate([$__rate_interval]"
		}
		if got := function + interval; counter && got != want || !counter && interval != "" {
			return name + " in " + got + ", want " + want
		}
	}
	return ""
}

// TestLintFindsMistakes guards that lint finds what it is for.
func TestLintFindsMistakes(t *testing.T) {
	const chosen = `{job=~"$job", instance=~"$instance"}`
	for _, expr := range []string{
		"up", "caddy_rate_limit_redis_up", `caddy_rate_limit_redis_up{job=~"$job"}`,
		"caddy_rate_limit_units_total" + chosen,
		"rate(caddy_rate_limit_units_total" + chosen + "[5m])",
		"increase(caddy_rate_limit_units_total" + chosen + "[$__range])",
		"rate(caddy_rate_limit_redis_up" + chosen + "[$__rate_interval])",
	} {
		if lint(target{Expr: expr}) == "" {
			t.Errorf("finds nothing wrong with %s", expr)
		}
	}
}
