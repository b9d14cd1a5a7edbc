package report

import (
	"bufio"
	"bytes"
	"cmp"
	"embed"
	"fmt"
	"html/template"
	"io"
	"time"
)

// The page refers to nothing outside itself and runs no script, which its own
// Content-Security-Policy enforces: keys and paths are what clients sent.
//
//go:embed page.gohtml style.css
var files embed.FS

var page = template.Must(template.New("page.gohtml").Funcs(template.FuncMap{
	"count":   count,
	"needed":  sizeNeeded,
	"share":   share,
	"visible": visible,
	"odd":     func(i int) bool { return i%2 == 1 },
	"percent": func(part, whole int64) float64 { return 100 * fraction(part, whole) },
}).ParseFS(files, "page.gohtml", "style.css"))

// Recognized is how many bytes of a report IsReport needs.
const Recognized = 1024

// IsReport reports whether a file that begins like this is a report.
func IsReport(begins []byte) bool {
	return bytes.HasPrefix(begins, []byte("<!DOCTYPE html>\n")) && bytes.Contains(begins, []byte("\n<title>Rate limits, replayed: "))
}

// maxOpen is how many limits are shown in full when the page is opened. With
// more, the table of limits leads to each.
const maxOpen = 6

// WriteHTML writes the report as one HTML file that needs no other file, no
// network and no script.
func (r *Report) WriteHTML(w io.Writer) error {
	// The template writes piece by piece.
	buffered := bufio.NewWriter(w)
	if err := page.Execute(buffered, newDocument(r)); err != nil {
		return fmt.Errorf("writing the report: %v", err)
	}
	return buffered.Flush()
}

// document is what the template shows.
type document struct {
	*Report
	Range   string
	Made    string
	Logs    []string
	Unused  int64
	Configs []section
	Changes []change // between two configurations
	Index   bool     // whether a table of the limits helps
}

// section is one configuration.
type section struct {
	Config
	Title  string
	Limits []entry
}

// entry is one limit.
type entry struct {
	Limit
	ID        string
	Open      bool
	Verdict   verdict
	Denied    string
	Time      *plot
	Sizes     *plot
	Hours     *plot
	Proposals []proposal
	Top       []topKey
	Hidden    bool // the texts of the keys
}

// topKey is a row of the table of keys.
type topKey struct {
	Key
	Name string
	Over bool // its peak exceeds the size
}

// change is what differs for one limit between two configurations.
type change struct {
	Path          string
	Before, After *Limit // nil if the configuration does not have it
	Difference    string
}

// newDocument prepares all that the template shows.
func newDocument(r *Report) document {
	d := document{
		Report: r,
		Range:  timeRange(r.From, r.To),
		Made:   r.Generated.Format("2 January 2006, 15:04 MST"),
		Unused: r.Lines - r.Used,
	}
	for _, log := range r.Logs {
		d.Logs = append(d.Logs, visible(log))
	}
	limits := 0
	for _, c := range r.Configs {
		limits += len(c.Limits)
	}
	d.Index = limits > 1
	for i, c := range r.Configs {
		s := section{Config: c, Title: visible(c.Name)}
		for j, l := range c.Limits {
			s.Limits = append(s.Limits, newEntry(l, fmt.Sprintf("c%d-l%d", i+1, j+1), limits))
		}
		d.Configs = append(d.Configs, s)
	}
	if len(r.Configs) == 2 {
		d.Changes = changes(r.Configs[0], r.Configs[1])
	}
	return d
}

// newEntry prepares one of a number of limits.
func newEntry(l Limit, id string, limits int) entry {
	e := entry{
		Limit:     l,
		ID:        id,
		Open:      limits <= maxOpen,
		Verdict:   judge(l),
		Denied:    bounds(l.Denied, l.DeniedAtMost),
		Time:      timePlot(l, id+"-time", maxBars(limits)),
		Sizes:     sizePlot(l, id+"-size"),
		Hours:     hourPlot(l, id+"-hour"),
		Proposals: proposals(l),
	}
	for i, k := range l.Top {
		name := visibleKey(k.Text)
		if k.Text == "" {
			e.Hidden = true
			name = fmt.Sprintf("key %d", i+1)
		}
		e.Top = append(e.Top, topKey{k, name, l.Size > 0 && k.Peak > l.Size})
	}
	return e
}

// changes compares the limits of two configurations by path, in the order of the
// first, then those that only the second has.
func changes(before, after Config) []change {
	index := func(c Config) map[string]*Limit {
		m := make(map[string]*Limit, len(c.Limits))
		for i := range c.Limits {
			m[c.Limits[i].Path] = &c.Limits[i]
		}
		return m
	}
	was, is := index(before), index(after)
	all := make([]change, 0, len(before.Limits))
	for i := range before.Limits {
		l := &before.Limits[i]
		ch := change{Path: l.Path, Before: l, After: is[l.Path], Difference: "removed"}
		if ch.After != nil {
			ch.Difference = difference(l.Denied, ch.After.Denied)
		}
		all = append(all, ch)
	}
	for i := range after.Limits {
		if l := &after.Limits[i]; was[l.Path] == nil {
			all = append(all, change{Path: l.Path, After: l, Difference: "added"})
		}
	}
	return all
}

// difference says how a count changed.
func difference(before, after int64) string {
	switch cmp.Compare(after, before) {
	case 1:
		return count(after-before) + " more"
	case -1:
		return count(before-after) + " fewer"
	}
	return "the same"
}

// timeRange describes the time that the logs cover.
func timeRange(from, to time.Time) string {
	if from.IsZero() || to.Before(from) {
		return "no requests"
	}
	to = to.In(from.Location())
	const day, clock = "2 January 2006", "15:04:05"
	if from.Format(day) == to.Format(day) {
		return fmt.Sprintf("%s, %s to %s %s", from.Format(day), from.Format(clock), to.Format(clock), to.Format("MST"))
	}
	return fmt.Sprintf("%s, %s to %s, %s", from.Format(day), from.Format(clock+" MST"), to.Format(day), to.Format(clock+" MST"))
}
