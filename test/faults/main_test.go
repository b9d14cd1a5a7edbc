// Package faults breaks what the rate limiter depends on, while real Caddy
// processes serve load and real Redis servers decide, and judges what clients see:
// status codes, waits, and how many requests were admitted compared with the exact
// bound. See docs/internals/faults.md, and results.md for the figures.
//
//	go test .                    what CI runs: every fault, briefly
//	go test . -run 'Faults/3'    one fault
//	go test . -long -table results.md
//	go test . -v -run Soak -soak 10m
package faults

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
)

var (
	long  = flag.Bool("long", false, "let faults last as long as the table in results.md says")
	table = flag.String("table", "", "the document whose table of results is to be written anew")
)

func TestMain(m *testing.M) {
	caddytest.Main()
	os.Exit(m.Run())
}

// fault is one thing that goes wrong.
type fault struct {
	id   string // its number in the table of results.md
	name string
	run  func(*trial)
}

// faults lists all faults in the order of the table.
var faults = slices.Concat(
	serverFaults, networkFaults, dataFaults, topologyFaults, accessFaults, siteFaults, burstFaults, farFaults,
	fleetFaults, algorithmFaults, localFaults, heldFaults, busyFaults, connectionFaults,
)

// alone are the faults that run with no other beside them: those that find out how much is done
// in a time, and whose load takes all of a small machine.
var alone = regexp.MustCompile(`^(17|19|22a|22c|27|30|33|42|46.*|.*\(512 connections\))$`)

// TestFaults runs all faults, two at a time if they are brief and leave most of the machine idle, and
// those again, one after the other, whose findings are not as they should be: other load may keep the
// machine busy for a while. That makes answers late, but never excuses an over-admission.
func TestFaults(t *testing.T) {
	results := &results{rows: make(map[string]string), wrong: make(map[string][]string)}
	var busy, idle []fault
	for _, f := range faults {
		if *long || alone.MatchString(f.id) {
			busy = append(busy, f)
		} else {
			idle = append(idle, f)
		}
	}
	var next atomic.Int64
	var workers sync.WaitGroup
	for range 2 {
		workers.Go(func() {
			for n := next.Add(1); int(n) <= len(idle); n = next.Add(1) {
				results.try(t, idle[n-1])
			}
		})
	}
	workers.Wait()
	for _, f := range busy {
		results.try(t, f)
	}
	for tries := range 3 {
		for _, f := range faults {
			if len(results.wrong[f.id]) > 0 {
				t.Logf("%s: not so, and so once more: %s", f.id, strings.Join(results.wrong[f.id], "; "))
				time.Sleep(time.Duration(tries) * 5 * time.Second)
				results.try(t, f)
			}
		}
	}
	for id, findings := range results.wrong {
		for _, finding := range findings {
			t.Errorf("%s: not so: %s", id, finding)
		}
	}
	if *table != "" && !t.Failed() {
		if err := writeTable(*table, results.rows); err != nil {
			t.Fatal(err)
		}
	}
}

// results are those of the faults that have run.
type results struct {
	sync.Mutex
	rows  map[string]string   // of the table, by fault
	wrong map[string][]string // findings of the last try, by fault
}

// try runs a fault.
func (r *results) try(t *testing.T, f fault) {
	t.Run(f.id, func(t *testing.T) {
		tr := &trial{T: t}
		began := time.Now()
		defer func() {
			row := tr.row(f)
			t.Logf("%.0f s\n%s", time.Since(began).Seconds(), row)
			r.Lock()
			defer r.Unlock()
			r.rows[f.id] = row
			delete(r.wrong, f.id)
			if !tr.broken && !*long && !t.Failed() {
				r.wrong[f.id] = tr.wrong
			}
		}()
		f.run(tr)
		if tr.broken || *long {
			for _, finding := range tr.wrong {
				t.Errorf("not so: %s", finding)
			}
		}
	})
}

// trial is one run of a fault, with its findings.
type trial struct {
	*testing.T
	findings []string
	wrong    []string // the findings that should not be
	broken   bool     // whether one of them was judged strictly
}

// during returns a duration: the short one, or the longer one in a long run.
func during(short, longer time.Duration) time.Duration {
	if *long {
		return longer
	}
	return short
}

// most judges a number that must not exceed a bound.
func most[N int | int64 | float64 | time.Duration](tr *trial, what string, got, bound N) {
	tr.Helper()
	tr.judge(got <= bound, fmt.Sprintf("%s %v ≤ %v", what, show(got), show(bound)))
}

// least judges a number that must not be below a bound.
func least[N int | int64 | float64 | time.Duration](tr *trial, what string, got, bound N) {
	tr.Helper()
	tr.judge(got >= bound, fmt.Sprintf("%s %v ≥ %v", what, show(got), show(bound)))
}

// strictly judges as most does, for what a busy machine cannot excuse: the fault
// is not retried.
func strictly(tr *trial, what string, got, bound int) {
	tr.Helper()
	tr.broken = tr.broken || got > bound
	most(tr, what, got, bound)
}

// decidedOnce judges how many requests Redis has not decided, given how often it has
// run the script: at most some, and no fewer than none, because then a call has run
// twice. Requests in flight when the counting began may have run, and are not counted.
func decidedOnce(tr *trial, what string, requests, ran, inFlight, most int) {
	tr.Helper()
	got := requests - ran
	tr.broken = tr.broken || got < -inFlight
	tr.judge(-inFlight <= got && got <= most, fmt.Sprintf("%s %d ≤ %d ≤ %d", what, -inFlight, got, most))
}

// overAdmitted judges how many requests for one key were admitted beyond the
// bounds of the hot limit and the slow one.
func overAdmitted(tr *trial, requests []request, hot, slow int) {
	tr.Helper()
	strictly(tr, "over-admitted", excess(requests, false), hot)
	strictly(tr, "over-admitted by slow limits", excess(requests, true), slow)
}

// overAdmittedTogether does the same as overAdmitted for several nodes that can
// all reach Redis the whole time. If some cannot in time, they do not know of each
// other, so a busy machine is an excuse there, if the nodes logged it.
func overAdmittedTogether(tr *trial, nodes []*node, since time.Time, requests []request) {
	tr.Helper()
	broken, told := tr.broken, 0
	for _, n := range nodes {
		told += len(n.events(since))
	}
	overAdmitted(tr, requests, 0, 0)
	if told > 0 {
		tr.broken = broken
	}
}

// is judges a condition.
func (tr *trial) is(what string, ok bool) {
	tr.Helper()
	tr.judge(ok, what)
}

// note adds a finding that is not judged.
func (tr *trial) note(format string, args ...any) {
	tr.findings = append(tr.findings, fmt.Sprintf(format, args...))
}

func (tr *trial) judge(ok bool, finding string) {
	tr.Helper()
	if !ok {
		tr.wrong = append(tr.wrong, finding)
		finding = "**not so:** " + finding
	}
	tr.findings = append(tr.findings, finding)
}

// show formats a number for the table.
func show(v any) string {
	switch v := v.(type) {
	case time.Duration:
		if v < time.Second {
			return fmt.Sprintf("%.1f ms", float64(v.Microseconds())/1000)
		}
		return fmt.Sprintf("%.2f s", v.Seconds())
	case float64:
		return fmt.Sprintf("%.3g", v)
	}
	return fmt.Sprint(v)
}

// row returns the fault's row of the table.
func (tr *trial) row(f fault) string {
	cell := strings.NewReplacer("|", `\|`).Replace
	return fmt.Sprintf("| %s | %s | %s |", f.id, cell(f.name), cell(strings.Join(tr.findings, "; ")))
}

// writeTable replaces the table in a document by the rows of the faults that have run.
func writeTable(path string, rows map[string]string) error {
	lines := []string{"| | fault | found |", "|---|---|---|"}
	for _, f := range faults {
		if row, ok := rows[f.id]; ok {
			lines = append(lines, row)
		}
	}
	return rewrite(path, "results", strings.Join(lines, "\n")+"\n")
}

// rewrite replaces the part of a document between two marks with the given name.
func rewrite(path, name, with string) error {
	begin, end := "<!-- "+name+" -->\n", "<!-- end of "+name+" -->"
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := bytes.Cut(text, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok || !ok2 {
		return fmt.Errorf("%s: no marks %q and %q", path, begin, end)
	}
	text = slices.Concat(before, []byte(begin+with+end), after)
	return os.WriteFile(path, text, 0o644)
}
