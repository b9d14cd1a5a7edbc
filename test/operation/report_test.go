package operation

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"html"
	"image"
	"image/color"
	"image/png"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report/reporttest"
)

var (
	reportPage    = flag.String("report", "", "the HTML file of a report to take the picture of, instead of the sample's")
	reportPicture = flag.String("picture", "", "where to write a PNG file of the report, as in the documentation")
)

// writeReport returns a file with a report, and its content.
func writeReport(t *testing.T, r *report.Report) (path string, page []byte) {
	t.Helper()
	var b bytes.Buffer
	if err := r.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "report.html")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, b.Bytes()
}

// TestReportPictures guards that a browser draws the plots as they are meant, in
// light and in dark, and prints on white: it counts pixels of each colour.
func TestReportPictures(t *testing.T) {
	path, _ := writeReport(t, reporttest.Sample())
	for _, tc := range []struct {
		name   string
		option string
		back   string // of the page
		drawn  []string
	}{
		{"light", "--blink-settings=preferredColorScheme=1", "f4f6f9", []string{"5a8fd2", "c8450c", "fbe3d6"}},
		{"dark", "--blink-settings=preferredColorScheme=0", "0f141b", []string{"4f86c9", "ff8a52", "4a2b1c"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			img := screenshot(t, path, 1100, 1800, tc.option)
			if got := hex(img.At(2, 2)); got != tc.back {
				t.Errorf("the page is %s, want %s", got, tc.back)
			}
			pixels := make(map[string]int)
			for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y++ {
				for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x++ {
					pixels[hex(img.At(x, y))]++
				}
			}
			for _, colour := range tc.drawn {
				if pixels[colour] < 1500 {
					t.Errorf("%d pixels of %s", pixels[colour], colour)
				}
			}
		})
	}
}

// screenshot returns what a window of a size shows of a file.
func screenshot(t *testing.T, path string, width, height int, options ...string) image.Image {
	t.Helper()
	out := filepath.Join(t.TempDir(), "page.png")
	chromium(t, "file://"+path, append(options,
		"--screenshot="+out, fmt.Sprintf("--window-size=%d,%d", width, height))...)
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// hex formats a colour as CSS does.
func hex(c color.Color) string {
	r, g, b, _ := c.RGBA()
	return fmt.Sprintf("%02x%02x%02x", r>>8, g>>8, b>>8)
}

// measured is what a browser made of a page.
type measured struct {
	Title                 string
	Width, ScrollWidth    float64
	Marks                 []struct{ Width, Height float64 }
	Plots                 []struct{ Left, Right, Height float64 }
	Overlaps              []string // texts of plots that cover each other
	Outside               []string // texts of plots that are cut
	SmallText             []string
	LinkedOpen            bool // whether following a link shows a limit
	Scripts               int
	AllLimits, OpenLimits int
}

// measure is a page that shows another in frames as wide as screens, and measures
// them. The page itself allows no script, but has no say in the one around it.
const measure = `<!DOCTYPE html><title>measure</title>
<div id="screens">%s</div><pre id="measured"></pre>
<script>
function measureFrame(f) {
	const w = f.contentWindow, d = f.contentDocument, m = {
		Title: d.title, Width: d.documentElement.clientWidth, Marks: [], Plots: [], Overlaps: [], Outside: [], SmallText: [],
		Scripts: d.scripts.length, AllLimits: d.querySelectorAll('details.limit').length,
		OpenLimits: d.querySelectorAll('details.limit[open]').length,
	};
	const links = d.querySelectorAll('a[href^="#"]');
	if (links.length) {
		const last = links[links.length - 1];
		w.location.hash = last.getAttribute('href');
		const target = d.getElementById(last.getAttribute('href').slice(1));
		m.LinkedOpen = target.getBoundingClientRect().height > 0;
	}
	for (const l of d.querySelectorAll('details.limit')) l.open = true;
	m.ScrollWidth = d.documentElement.scrollWidth;
	for (const p of d.querySelectorAll('svg[role=img]')) {
		const r = p.getBoundingClientRect();
		m.Plots.push({Left: r.left, Right: r.right, Height: r.height});
		for (const e of p.querySelectorAll('.mark')) {
			const b = e.getBoundingClientRect();
			m.Marks.push({Width: b.width, Height: b.height});
		}
		const texts = [...p.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, b]) => b.width > 0);
		texts.forEach(([text, a], i) => {
			if (a.left < 0 || a.right > m.Width) m.Outside.push(text);
			if (a.height < 11) m.SmallText.push(text);
			texts.slice(i + 1).forEach(([other, b]) => {
				if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
					m.Overlaps.push(text + ' | ' + other);
			});
		});
	}
	return m;
}
onload = () => { measured.textContent = JSON.stringify([...screens.children].map(measureFrame)); };
</script>`

// widths are those of a phone, a tablet and a desk's screen.
var widths = []int{360, 768, 1280}

// TestReportLayout guards that a report can be read on wide and narrow screens:
// nothing makes the page scroll sideways, plots are as wide as there is room, their
// text is neither small nor cut and covers no other, and a link leads to its limit
// even if that is closed. It also guards that the page requests nothing.
func TestReportLayout(t *testing.T) {
	many := reporttest.Sample()
	for i := range 20 {
		l := many.Configs[0].Limits[i%3]
		l.Path = fmt.Sprintf("%s-%s-%d", l.Path, strings.Repeat("long", 20), i)
		many.Configs[0].Limits = append(many.Configs[0].Limits, l)
	}
	compared := reporttest.Sample()
	compared.Configs = append(compared.Configs, compared.Configs[0])

	// Everything that a log may last, and as much as may be counted.
	lasting, start := reporttest.Sample(), time.Date(2026, 3, 27, 22, 50, 0, 0, time.UTC)
	lasting.Configs[0].Limits = nil
	for i, length := range []time.Duration{
		time.Second, 50 * time.Second, 10 * time.Minute, 3 * time.Hour, 7 * time.Hour, 30 * time.Hour, 72 * time.Hour, 150 * time.Hour, 40 * 24 * time.Hour, 365 * 24 * time.Hour,
	} {
		l := reporttest.Sample().Configs[0].Limits[0]
		l.Path, l.Slot = length.String(), length/time.Duration(len(l.Times))
		for j := range l.Times {
			l.Times[j].Start = start.Add(time.Duration(j) * l.Slot)
			l.Times[j].Admitted *= int64(math.Pow10(i))
		}
		l.Peaks = []report.Peak{{Units: 1, Keys: int64(math.Pow10(i))}, {Units: int64(math.Pow10(2 * i)), Keys: int64(math.Pow10(i))}}
		l.Size = int64(math.Pow10(i))
		lasting.Configs[0].Limits = append(lasting.Configs[0].Limits, l)
	}

	for _, tc := range []struct {
		name   string
		report *report.Report
		limits int
		open   int
	}{{"sample", reporttest.Sample(), 3, 3}, {"many limits", many, 23, 0}, {"two configurations", compared, 6, 6}, {"times and numbers", lasting, 10, 0}} {
		t.Run(tc.name, func(t *testing.T) {
			_, page := writeReport(t, tc.report)
			for i, m := range measurePage(t, page) {
				t.Logf("%d pixels wide", widths[i])
				if m.Scripts != 0 {
					t.Errorf("%d scripts", m.Scripts)
				}
				if m.AllLimits != tc.limits || m.OpenLimits != tc.open || !m.LinkedOpen {
					t.Errorf("%d limits, %d open, shown by a link: %t; want %d, %d, true", m.AllLimits, m.OpenLimits, m.LinkedOpen, tc.limits, tc.open)
				}
				if m.ScrollWidth > m.Width {
					t.Errorf("the page is %v wide on a screen of %v", m.ScrollWidth, m.Width)
				}
				if len(m.Plots) != 3*tc.limits {
					t.Errorf("%d plots, want %d", len(m.Plots), 3*tc.limits)
				}
				for _, p := range m.Plots {
					if p.Left < 0 || p.Right > m.Width || p.Right-p.Left < 250 || p.Height < 150 {
						t.Errorf("a plot from %v to %v, %v high", p.Left, p.Right, p.Height)
					}
				}
				if len(m.Marks) < 2*len(m.Plots) {
					t.Errorf("%d marks in %d plots", len(m.Marks), len(m.Plots))
				}
				for _, k := range m.Marks {
					if k.Width < .5 || k.Height < 1 {
						t.Errorf("a mark of %v × %v", k.Width, k.Height)
					}
				}
				for what, texts := range map[string][]string{"covered": m.Overlaps, "cut": m.Outside, "small": m.SmallText} {
					if len(texts) > 0 {
						t.Errorf("%s: %.60q", what, texts[:min(8, len(texts))])
					}
				}
			}
		})
	}
}

// measurePage serves a page to a browser and returns what it measured, for each of
// the widths.
func measurePage(t *testing.T, page []byte) []measured {
	t.Helper()
	var frames strings.Builder
	for _, width := range widths {
		fmt.Fprintf(&frames, `<iframe src="/report" style="border:0;width:%dpx;height:2000px"></iframe>`, width)
	}
	var mu sync.Mutex
	var requested []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		requested = append(requested, r.URL.Path)
		mu.Unlock()
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		switch r.URL.Path {
		case "/":
			fmt.Fprintf(w, measure, &frames)
		case "/report":
			_, _ = w.Write(page)
		default:
			w.WriteHeader(http.StatusNoContent) // the icon of the page around
		}
	}))
	defer srv.Close()
	dom := chromium(t, srv.URL+"/", "--dump-dom", "--window-size=1400,3000")
	mu.Lock()
	for _, path := range requested {
		if path != "/" && path != "/report" && path != "/favicon.ico" {
			t.Errorf("the page requested %s", path)
		}
	}
	mu.Unlock()

	_, rest, _ := strings.Cut(dom, `<pre id="measured">`)
	text, _, _ := strings.Cut(rest, "</pre>")
	var all []measured
	if err := json.Unmarshal([]byte(html.UnescapeString(text)), &all); err != nil {
		t.Fatalf("%v: %.200q", err, text)
	}
	if len(all) != len(widths) {
		t.Fatalf("%d frames, want %d", len(all), len(widths))
	}
	return all
}

// TestReportPrinted guards that a report can be printed, with limits that are not
// open on the screen.
func TestReportPrinted(t *testing.T) {
	sizes := make(map[bool]int64)
	for _, closed := range []bool{false, true} {
		path, page := writeReport(t, reporttest.Sample())
		if closed {
			if err := os.WriteFile(path, bytes.ReplaceAll(page, []byte(`card" open>`), []byte(`card">`)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		out := filepath.Join(t.TempDir(), "page.pdf")
		chromium(t, "file://"+path, "--no-pdf-header-footer", "--print-to-pdf="+out)
		pdf, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		sizes[closed] = int64(bytes.Count(pdf, []byte("/Type /Page\n")))
	}
	if sizes[false] < 4 || sizes[true] != sizes[false] {
		t.Errorf("%d pages with limits open, %d with limits closed", sizes[false], sizes[true])
	}
}

// TestReportPicture writes the picture of the documentation if it has a file for it
// by -picture, and guards that there is something in it.
func TestReportPicture(t *testing.T) {
	path, _ := writeReport(t, reporttest.Sample())
	if *reportPage != "" {
		var err error
		if path, err = filepath.Abs(*reportPage); err != nil {
			t.Fatal(err)
		}
	}
	img := screenshot(t, path, 1100, 1955, "--blink-settings=preferredColorScheme=1")
	var b bytes.Buffer
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	if err := encoder.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	if n := b.Len(); n < 50<<10 || n > 300<<10 {
		t.Errorf("the picture has %d bytes, want 50 to 300 KiB", n)
	}
	if *reportPicture == "" {
		return
	}
	if err := os.WriteFile(*reportPicture, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
