package report_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/html"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report/reporttest"
)

// hostile is what a client may send as a key or path.
const hostile = "/<script>alert(1)</script>\"'><img src=//evil.example/x onerror=1>\x00\x1b[31m\u202egnp.exe\xff\n{{.}}"

// TestWriteHTML guards that every report is a page of well-formed HTML and SVG
// that refers to nothing outside itself, runs nothing, and shows no number that is
// none, whatever was found.
func TestWriteHTML(t *testing.T) {
	for _, tc := range cases(t) {
		t.Run(tc.name, func(t *testing.T) {
			page := write(t, tc.report)
			doc, err := html.Parse(strings.NewReader(page))
			if err != nil {
				t.Fatal(err)
			}
			checkNothingOutside(t, doc)
			checkAccessible(t, doc)
			checkPlots(t, page, tc.plots)
			for _, bad := range []string{"NaN", "Inf", "%!", "ZgotmplZ", "e+0", "e-0"} {
				if i := strings.Index(page, bad); i >= 0 {
					t.Errorf("the page has %q: %s", bad, page[max(0, i-100):min(len(page), i+20)])
				}
			}
			for _, text := range tc.texts {
				if !strings.Contains(textOf(doc), text) {
					t.Errorf("the page lacks %q", text)
				}
			}
		})
	}
}

type testCase struct {
	name   string
	report *report.Report
	plots  int      // how many there must be
	texts  []string // what must be read
}

// cases returns reports with everything that is unusual.
func cases(t *testing.T) []testCase {
	t.Helper()
	at := time.Date(2026, 3, 29, 0, 30, 0, 0, time.UTC)
	one := func(edit func(*report.Limit)) *report.Report {
		l := limit(at, time.Minute, 60, 100, 5)
		edit(&l)
		return wrap(at, at.Add(time.Hour), l)
	}
	many := &report.Report{Configs: []report.Config{{Name: "a"}}}
	for i := range 200 {
		l := limit(at, time.Minute, 300, int64(i), int64(i%7))
		l.Path = fmt.Sprintf("site/limit-%d", i)
		many.Configs[0].Limits = append(many.Configs[0].Limits, l)
	}
	two := wrap(at, at.Add(time.Hour), limit(at, time.Minute, 60, 100, 5))
	two.Configs = append(two.Configs, report.Config{Name: "other", Limits: []report.Limit{
		limit(at, time.Minute, 60, 103, 2), {Path: "site/new", Size: 3},
	}})
	second := one(func(l *report.Limit) { l.DeniedAtMost = l.Denied + 70 })
	second.Resolution = time.Second

	return []testCase{
		{"sample", reporttest.Sample(), 9, []string{
			"access.log", "not an access log entry", "selective", "A single key had", "203.0.113.7", "raise the drip rate",
		}},
		{"zero value", &report.Report{}, 0, []string{"no requests"}},
		{"no limits", wrap(at, at.Add(time.Hour)), 0, []string{"This configuration has no limits."}},
		{"no requests", wrap(at, at, report.Limit{Path: "site/unused", Algorithm: "leaky_bucket", Numbers: "size 10, drips 1 each 1s", Size: 10}), 0,
			[]string{"No request met this limit.", "leaky_bucket, size 10, drips 1 each 1s"}},
		{"slots without requests", wrap(at, at, report.Limit{Size: 1, Slot: time.Second, Times: make([]report.Slot, 3)}), 0, nil},
		{"one request", wrap(at, at, report.Limit{
			Path: "site/one", Size: 1, Requests: 1, Admitted: 1, Keys: 1, Slot: time.Second,
			Times: []report.Slot{{Start: at, Admitted: 1}}, Peaks: []report.Peak{{Units: 1, Keys: 1}},
			ByHour: [24]report.Count{0: {Requests: 1}}, Top: []report.Key{{Count: report.Count{Requests: 1}, Peak: 1}},
		}), 3, []string{"Denied none of 1 request, from 1 key."}},
		{"only denied", wrap(at, at, report.Limit{
			Path: "site/none", Size: 1, Requests: 3, Denied: 3, Keys: 1, KeysDenied: 1, Slot: time.Second,
			Times: []report.Slot{{Start: at, Denied: 3}}, Peaks: []report.Peak{{Units: 9, Keys: 1}},
			ByHour: [24]report.Count{0: {Requests: 3, Denied: 3}},
		}), 3, []string{"Denied 100\u00a0% of requests, from 1 of 1 key."}},
		{"huge counts", wrap(at, at.Add(time.Hour), limit(at, time.Minute, 60, 1e12, 1e12)), 3, []string{"1T", "60\u00a0000\u00a0000\u00a0000\u00a0005"}},
		{"largest numbers", one(func(l *report.Limit) {
			l.Size = math.MaxInt64 - 1
			l.Peaks = []report.Peak{{Units: 1, Keys: 1 << 40}, {Units: math.MaxInt64 - 1, Keys: 1 << 40}}
		}), 3, nil},
		{"tiny share", one(func(l *report.Limit) { l.Requests, l.Denied, l.DeniedAtMost = 1e9, 1, 1 }), 3, []string{"<0.001\u00a0%"}},
		{"size depends on request", one(func(l *report.Limit) { l.Size = 0 }), 3,
			[]string{"with the drip rate as it is; each request's own size is not known here"}},
		{"windows", one(func(l *report.Limit) { l.Windows = true }), 3, []string{"with the window as it is"}},
		{"keys that no size serves", one(func(l *report.Limit) {
			l.Peaks = []report.Peak{{Units: 3, Keys: 1000}, {Units: report.NoSize, Keys: 234}}
			l.Top = []report.Key{{Peak: report.NoSize}}
		}), 3, []string{"Half of the keys needed a size of 3, and the busiest more than any.", "more than any"}},
		{"only keys that no size serves", one(func(l *report.Limit) { l.Peaks = []report.Peak{{Units: report.NoSize, Keys: 4}} }), 2, nil},
		{"no peaks", one(func(l *report.Limit) { l.Peaks = nil }), 2, nil},
		{"peaks of nothing", one(func(l *report.Limit) { l.Peaks = []report.Peak{{Units: 0, Keys: 3}, {Units: 1}} }), 3, nil},
		{"nothing denied", one(func(l *report.Limit) {
			l.Denied, l.DeniedAtMost, l.KeysDenied = 0, 0, 0
			l.Size = 5000
			for i := range l.Times {
				l.Times[i].Denied = 0
			}
			l.ByHour = [24]report.Count{3: {Requests: 7}}
		}), 3, []string{"a size of 300 would have denied nothing either"}},
		{"one-second times", second, 3, []string{"between two bounds", "305 to 375"}},
		{"hidden keys", one(func(l *report.Limit) { l.Top = []report.Key{{Count: report.Count{Requests: 3, Denied: 1}, Peak: 12}} }), 3,
			[]string{"--show-keys", "key 1"}},
		{"hostile text", one(func(l *report.Limit) {
			l.Path = hostile
			l.HourIn = hostile
			l.Top = []report.Key{{Text: hostile}, {Text: strings.Repeat("x", 1e6)}, {Text: strings.Repeat("\u202e\u0301", 500)}}
			l.ByPath = []report.Breakdown{{Path: hostile}}
			l.Unusual = []string{hostile}
		}), 3, []string{`<script>alert(1)</script>`, `\x00\x1b[31m\u202egnp.exe\xff\n{{.}}`, "… (999\u00a0904 characters more)"}},
		{"many limits", many, 598, []string{"site/limit-199"}},
		{"two configurations", two, 6, []string{"Comparison", "180 fewer", "added"}},
		{"a year", wrap(at, at.AddDate(1, 0, 0), limit(at, 24*time.Hour, 365, 5, 1)), 3, []string{"Requests per 2 days", "Jan"}},
		{"a millisecond", wrap(at, at.Add(time.Millisecond), limit(at, time.Microsecond, 300, 5, 1)), 3, []string{"Requests per 1µs"}},
	}
}

// limit returns a limit with something in all that there is, and with more in each
// slot.
func limit(at time.Time, slot time.Duration, slots int, admitted, denied int64) report.Limit {
	l := report.Limit{
		Path: "site/limit", Algorithm: "leaky_bucket", Numbers: "size 20, drips 2 each 1s", Size: 20, Keys: 1234, KeysDenied: 20,
		Slot: slot, HourIn: "UTC",
		Peaks:  []report.Peak{{Units: 1, Keys: 1000}, {Units: 20, Keys: 214}, {Units: 21, Keys: 19}, {Units: 300, Keys: 1}},
		Top:    []report.Key{{Text: "203.0.113.7", Count: report.Count{Requests: 300, Denied: 200}, Peak: 300}},
		ByPath: []report.Breakdown{{Path: "/search", Count: report.Count{Requests: 900, Denied: 200}}},
	}
	for i := range slots {
		s := report.Slot{Start: at.Add(time.Duration(i) * slot), Admitted: admitted, Denied: denied}
		l.Times = append(l.Times, s)
		l.Admitted += admitted
		l.Denied += denied
		h := &l.ByHour[s.Start.Hour()]
		h.Requests += admitted + denied
		h.Denied += denied
	}
	l.Denied += 5 // and those before
	l.DeniedAtMost = l.Denied
	l.Requests = l.Admitted + l.Denied
	return l
}

// wrap returns a report on limits.
func wrap(from, to time.Time, limits ...report.Limit) *report.Report {
	return &report.Report{
		Generated: to, From: from, To: to, Lines: 10, Used: 10, Logs: []string{"access.log"},
		Configs: []report.Config{{Name: "Caddyfile", Limits: limits}},
	}
}

// write returns the page.
func write(t *testing.T, r *report.Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// each calls f with all elements.
func each(n *html.Node, f func(*html.Node)) {
	if n.Type == html.ElementNode {
		f(n)
	}
	for c := n.FirstChild; c != nil; c = c.NextSibling {
		each(c, f)
	}
}

// textOf returns what is read in n.
func textOf(n *html.Node) string {
	if n.Type == html.TextNode {
		return n.Data
	}
	var b strings.Builder
	for c := n.FirstChild; c != nil; c = c.NextSibling {
		b.WriteString(textOf(c))
	}
	return b.String()
}

// attr returns an attribute.
func attr(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

// checkNothingOutside fails the test if anything in the page could run or load.
func checkNothingOutside(t *testing.T, doc *html.Node) {
	t.Helper()
	policy := ""
	each(doc, func(n *html.Node) {
		switch n.Data {
		case "script", "img", "image", "use", "link", "iframe", "object", "embed", "base", "form", "foreignObject", "animate", "audio", "video":
			t.Errorf("the page has an element %s", n.Data)
		case "meta":
			if attr(n, "http-equiv") == "Content-Security-Policy" {
				policy = attr(n, "content")
			}
		case "style":
			if css := textOf(n); strings.Contains(css, "url(") || strings.Contains(css, "@import") {
				t.Error("the style refers to something")
			}
		}
		for _, a := range n.Attr {
			switch {
			case strings.HasPrefix(a.Key, "on"), a.Key == "src", a.Key == "style":
				t.Errorf("%s has an attribute %s", n.Data, a.Key)
			case a.Key == "href" && !strings.HasPrefix(a.Val, "#c"):
				t.Errorf("%s refers to %q", n.Data, a.Val)
			}
		}
	})
	if want := "default-src 'none'; style-src 'unsafe-inline'"; policy != want {
		t.Errorf("policy %q, want %q", policy, want)
	}
}

// checkAccessible fails the test if a table has no caption, a plot no name, a link
// no target, or a heading skips a level.
func checkAccessible(t *testing.T, doc *html.Node) {
	t.Helper()
	ids := make(map[string]bool)
	var wanted []string
	level := 0
	each(doc, func(n *html.Node) {
		if id := attr(n, "id"); id != "" {
			if ids[id] {
				t.Errorf("two elements have the id %s", id)
			}
			ids[id] = true
		}
		wanted = append(wanted, strings.Fields(attr(n, "aria-labelledby"))...)
		if href := attr(n, "href"); href != "" {
			wanted = append(wanted, href[1:])
		}
		switch n.Data {
		case "table":
			first := n.FirstChild
			for first != nil && first.Type != html.ElementNode {
				first = first.NextSibling
			}
			if first == nil || first.Data != "caption" || strings.TrimSpace(textOf(first)) == "" {
				t.Error("a table has no caption")
			}
		case "h1", "h2", "h3", "h4":
			now := int(n.Data[1] - '0')
			if now > level+1 {
				t.Errorf("h%d follows h%d: %s", now, level, textOf(n))
			}
			level = now
		case "svg":
			if attr(n, "role") == "img" {
				if attr(n, "aria-labelledby") == "" {
					t.Error("a plot has no name")
				}
			} else if n.Parent.Data != "svg" && attr(n, "aria-hidden") != "true" {
				t.Error("an image is neither named nor hidden")
			}
		}
	})
	for _, id := range wanted {
		if !ids[id] {
			t.Errorf("nothing has the id %s", id)
		}
	}
}

var (
	plots  = regexp.MustCompile(`(?s)<svg height="[^"]*" role="img".*?</svg></div>`)
	digits = regexp.MustCompile(`-?[0-9.]+`)
)

// checkPlots fails the test unless there are so many plots, each well-formed XML
// with data in it, with nothing outside of it, and with ticks in order.
func checkPlots(t *testing.T, page string, want int) {
	t.Helper()
	all := plots.FindAllString(page, -1)
	if len(all) != want {
		t.Errorf("%d plots, want %d", len(all), want)
	}
	for _, svg := range all {
		svg = strings.TrimSuffix(svg, "</div>")
		marks, height := 0, 0.0
		lastX, lastY, ys := -1.0, 0.0, 0
		titles := 0
		decoder := xml.NewDecoder(strings.NewReader(svg))
		for {
			token, err := decoder.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("a plot is not well-formed: %v\n%s", err, svg)
			}
			e, ok := token.(xml.StartElement)
			if !ok {
				continue
			}
			get := func(name string) string {
				for _, a := range e.Attr {
					if a.Name.Local == name {
						return a.Value
					}
				}
				return ""
			}
			switch class := get("class"); {
			case e.Name.Local == "svg" && get("role") == "img":
				height = number(t, get("height"))
			case e.Name.Local == "title":
				titles++
			case strings.HasPrefix(class, "mark "):
				marks++
				checkPath(t, get("d"), height)
			case class == "name":
				ys = 0
			case class == "ytick":
				// Either way, but always the same.
				y := number(t, get("y"))
				if y < 0 || y > height || ys > 0 && y == lastY {
					t.Errorf("a tick at %v after %v of %v", y, lastY, height)
				}
				lastY, ys = y, ys+1
			case strings.HasPrefix(class, "xtick"):
				x := number(t, strings.TrimSuffix(get("x"), "%"))
				if x <= lastX || x > 100 {
					t.Errorf("a tick at %v %% after %v %%", x, lastX)
				}
				lastX = x
			}
		}
		if marks == 0 || lastX < 0 || titles < 2 {
			t.Errorf("a plot has %d marks, %d titles, and its last tick at %v %%", marks, titles, lastX)
		}
	}
}

// checkPath fails the test if a path leaves its plot.
func checkPath(t *testing.T, d string, height float64) {
	t.Helper()
	for _, part := range regexp.MustCompile(`[MHVZ][^MHVZ]*`).FindAllString(d, -1) {
		var x, y float64
		switch n := digits.FindAllString(part, -1); part[0] {
		case 'M':
			x, y = number(t, n[0]), number(t, n[1])
		case 'H':
			x = number(t, n[0])
		case 'V':
			y = number(t, n[0])
		}
		if x < -1 || x > 1001 || y < 0 || y > height {
			t.Fatalf("%s is outside of 1000 × %v", part, height)
		}
	}
}

// number parses a number.
func number(t *testing.T, s string) float64 {
	t.Helper()
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestHTMLSize guards that a report on many limits can still be opened: browsers
// get slow with tens of megabytes.
func TestHTMLSize(t *testing.T) {
	for _, tc := range cases(t) {
		if n := len(write(t, tc.report)); n > 12<<20 {
			t.Errorf("%s: %d bytes", tc.name, n)
		}
	}
}

// TestContrast guards that text can be read, in light and in dark: WCAG asks for
// 4.5 to 1, and for 3 to 1 of what is drawn.
func TestContrast(t *testing.T) {
	page := write(t, reporttest.Sample())
	schemes := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(page, 2)
	if len(schemes) != 2 {
		t.Fatalf("%d colour schemes", len(schemes))
	}
	for i, name := range []string{"light", "dark"} {
		colours := make(map[string]float64)
		for _, c := range regexp.MustCompile(`--([a-z-]+): #([0-9a-f]{6});`).FindAllStringSubmatch(schemes[i][1], -1) {
			colours[c[1]] = luminance(t, c[2])
		}
		for _, pair := range []struct {
			front, back string
			least       float64
		}{
			{"text", "card", 7}, {"text", "page", 7}, {"soft", "card", 4.5}, {"soft", "page", 4.5}, {"link", "card", 4.5},
			{"mark", "card", 4.5}, {"calm", "calm-back", 4.5}, {"good", "good-back", 4.5}, {"warn", "warn-back", 4.5},
			{"admitted", "card", 3}, {"denied", "card", 3}, {"denied", "curve", 3},
		} {
			front, ok := colours[pair.front]
			back, found := colours[pair.back]
			if !ok || !found {
				t.Fatalf("%s: no colours %s and %s", name, pair.front, pair.back)
			}
			if got := (max(front, back) + .05) / (min(front, back) + .05); got < pair.least {
				t.Errorf("%s: %s on %s has a contrast of %.2f, want %.1f", name, pair.front, pair.back, got, pair.least)
			}
		}
	}
}

// luminance returns the relative luminance of a colour as WCAG defines it.
func luminance(t *testing.T, hex string) float64 {
	t.Helper()
	rgb, err := strconv.ParseUint(hex, 16, 32)
	if err != nil {
		t.Fatal(err)
	}
	linear := func(c uint64) float64 {
		f := float64(c&0xff) / 255
		if f <= 0.04045 {
			return f / 12.92
		}
		return math.Pow((f+0.055)/1.055, 2.4)
	}
	return 0.2126*linear(rgb>>16) + 0.7152*linear(rgb>>8) + 0.0722*linear(rgb)
}

// TestWriteFails guards that a full disk is not taken for success.
func TestWriteFails(t *testing.T) {
	full := errors.New("no space left")
	if err := reporttest.Sample().WriteHTML(failing{full}); err == nil {
		t.Error("no error")
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }
