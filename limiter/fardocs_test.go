package limiter

import (
	"flag"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// farDocument makes TestFarDocument simulate all, and write it.
var farDocument = flag.String("far", "", "the document whose tables of what is admitted far from Redis are to be written anew, with a picture beside it")

// The modes and networks of the tables.
var (
	farModes = []Consistency{{}, Lease(100 * time.Millisecond), Lease(time.Second), Eventual(100 * time.Millisecond), Eventual(time.Second)}

	farNetworks = []struct {
		nodes int
		farNetwork
	}{
		{1, farNetwork{rtt: 100 * time.Microsecond}},
		{3, farNetwork{rtt: time.Millisecond}},
		{10, farNetwork{rtt: 20 * time.Millisecond}},
		{10, farNetwork{rtt: 200 * time.Millisecond}},
		{100, farNetwork{rtt: 20 * time.Millisecond}},
		{1000, farNetwork{rtt: 20 * time.Millisecond}},
		{10, farNetwork{rtt: 20 * time.Millisecond, loss: 0.01, crashes: 5}},
	}
)

// farServerTime is the CPU time of Redis for a decision of a node that never has two
// requests at once, as docs/internals/performance.md has it.
const farServerTime = 44.7e-6

// TestFarDocument guards that what docs/internals/simulation.md shows can be made, and with -far makes it.
// No simulation may exceed the bound.
func TestFarDocument(t *testing.T) {
	if *farDocument == "" {
		t.Skip("make far runs it; TestFar runs a sample")
	}
	server := newFarServer(t, redistest.Start(t))
	simulate := func(c farCase) farResult {
		began := time.Now()
		r := c.simulate(t, server)
		t.Logf("%v: %+v in %v", c, r, time.Since(began).Round(time.Millisecond))
		if r.wrong > 0 {
			t.Errorf("%v: %d more than may be", c, r.wrong)
		}
		return r
	}
	var tables, capacity strings.Builder
	fmt.Fprintf(&capacity, "| load | nodes | %s |\n| --- | ---: |%s\n", joinModes(), strings.Repeat(" ---: |", len(farModes)))
	for _, load := range farLoads {
		fmt.Fprintf(&tables, "*%s*: %s\n\n| nodes, RTT | %s |\n| --- |%s\n", load.name, load.about, joinModes(), strings.Repeat(" --- |", len(farModes)))
		for _, n := range farNetworks {
			name := fmt.Sprintf("%d, %v", n.nodes, n.rtt)
			if n.loss > 0 {
				name += ", faults"
			}
			fmt.Fprintf(&tables, "| %s |", name)
			var carries strings.Builder
			for _, mode := range farModes {
				r := simulate(farCase{mode, n.nodes, n.farNetwork, load})
				requests := float64(r.requests)
				fmt.Fprintf(&tables, " %.2f · %.3f · %.2f · %d/%d |", float64(r.waited)/requests, float64(r.calls)/requests,
					float64(r.admitted)/float64(r.ideal), r.over, r.mayOver)
				fmt.Fprintf(&carries, " %s |", round(requests/float64(r.calls)/farServerTime))
			}
			tables.WriteString("\n")
			if n.loss == 0 && n.nodes != 3 && n.rtt < 200*time.Millisecond {
				fmt.Fprintf(&capacity, "| %s | %d |%s\n", load.name, n.nodes, carries.String())
			}
		}
		tables.WriteString("\n")
	}
	var waited, over [len(farCurves)]curve
	for i, mode := range farCurves {
		for _, nodes := range []int{1, 3, 10, 30, 100, 300, 1000} {
			n := farNetwork{rtt: 20 * time.Millisecond}
			r := simulate(farCase{mode, nodes, n, farBusy})
			waited[i] = append(waited[i], [2]float64{float64(nodes), float64(r.waited) / float64(r.requests)})
			r = simulate(farCase{mode, nodes, n, farFlood})
			over[i] = append(over[i], [2]float64{float64(nodes), float64(r.over) / float64(farFlood.limit.Size)})
		}
	}
	if t.Failed() {
		return
	}
	document := filetest.Read(t, *farDocument)
	text := string(document)
	for _, part := range []struct{ name, text string }{{"simulation", tables.String()}, {"capacity", capacity.String()}} {
		begin, end := "<!-- begin: "+part.name+" -->\n", "<!-- end: "+part.name+" -->"
		before, rest, begins := strings.Cut(text, begin)
		_, after, ends := strings.Cut(rest, end)
		if !begins || !ends {
			t.Fatalf("%s has no marks %q and %q", *farDocument, begin, end)
		}
		text = before + begin + strings.TrimSuffix(part.text, "\n\n") + "\n" + end + after
		text = strings.ReplaceAll(text, "|\n\n"+end, "|\n"+end)
	}
	write(t, *farDocument, text)
	write(t, strings.TrimSuffix(*farDocument, ".md")+".svg", drawFar(waited[:], over[:]))
}

// write writes a file of the documentation.
func write(t *testing.T, file, text string) {
	t.Helper()
	filetest.Write(t, file, []byte(text))
}

// joinModes returns the heads of the columns for all modes.
func joinModes() string {
	names := make([]string, 0, len(farModes))
	for _, m := range farModes {
		names = append(names, "`"+m.String()+"`")
	}
	return strings.Join(names, " | ")
}

// round returns a number with two digits that count.
func round(x float64) string {
	unit := math.Pow(10, math.Floor(math.Log10(x))-1)
	digits := fmt.Sprintf("%.0f", math.Round(x/unit)*unit)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + " " + digits[i:]
	}
	return digits
}

// farCurves are the modes that are drawn.
var farCurves = [...]Consistency{{}, Lease(100 * time.Millisecond), Lease(time.Second), Eventual(100 * time.Millisecond)}

// curve is the points of a line: numbers of nodes, and what was measured.
type curve [][2]float64

// The measures of the picture, in pixels.
const (
	farWidth, farHeight = 330, 190
	farLeft, farTop     = 46, 40
	farCell             = farLeft + farWidth + 30
)

// farStyle has the colours on light and on dark ground.
const farStyle = `<style>
text { fill: #1f2328 } .soft { fill: #59636e } .ground { fill: #ffffff } .grid { stroke: #d1d9e0; fill: none }
.line { fill: none; stroke-width: 2 } .c0 { stroke: #59636e } .c1 { stroke: #1a63c0 } .c2 { stroke: #2e8b57 } .c3 { stroke: #d9703f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .soft { fill: #9198a1 } .ground { fill: #0d1117 } .grid { stroke: #30363d }
.c0 { stroke: #9198a1 } .c1 { stroke: #6cb0ff } .c2 { stroke: #4fc98a } .c3 { stroke: #e2733c }
}
</style>
`

// drawFar draws how many requests waited, and how much was admitted beyond the limit.
func drawFar(waited, over []curve) string {
	var b strings.Builder
	height := farTop + farHeight + 80
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="12">
<title>Requests that wait for Redis, and what is admitted beyond a limit, against the number of nodes</title>
%s<rect class="ground" width="%d" height="%d"/>
`, 2*farCell, height, farStyle, 2*farCell, height)
	drawCurves(&b, 0, "share of requests that wait (busy)", waited)
	drawCurves(&b, farCell, "admitted beyond the limit, in sizes (flood)", over)
	for i, m := range farCurves {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)"><path class="line c%d" d="M0-4h28"/><text x="36">%v</text></g>`+"\n",
			farLeft+i*170, height-16, i, m)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// drawCurves draws one panel with its left edge at left.
func drawCurves(b *strings.Builder, left int, title string, curves []curve) {
	top := 0.0
	for _, c := range curves {
		for _, p := range c {
			top = max(top, p[1])
		}
	}
	step := math.Pow(10, math.Floor(math.Log10(max(top, 0.1))))
	if top/step < 2 {
		step /= 5
	} else if top/step < 5 {
		step /= 2
	}
	top = math.Ceil(top/step) * step
	x := func(nodes float64) float64 { return math.Log10(nodes) / 3 * farWidth }
	y := func(v float64) float64 { return farHeight * (1 - v/top) }
	fmt.Fprintf(b, `<g transform="translate(%d %d)">`+"\n"+`<text y="-16" font-size="14" font-weight="600">%s</text>`+"\n", left+farLeft, farTop, title)
	for i := 0; float64(i)*step <= top*1.001; i++ {
		v := float64(i) * step
		fmt.Fprintf(b, `<path class="grid" d="M0 %.1fH%d"/><text class="soft" x="-8" y="%.1f" text-anchor="end">%.4g</text>`+"\n", y(v), farWidth, y(v)+4, v)
	}
	for _, nodes := range []float64{1, 10, 100, 1000} {
		fmt.Fprintf(b, `<path class="grid" d="M%.1f %dv4"/><text class="soft" x="%.1f" y="%d" text-anchor="middle">%v</text>`+"\n",
			x(nodes), farHeight, x(nodes), farHeight+18, nodes)
	}
	fmt.Fprintf(b, `<text class="soft" x="%d" y="%d" text-anchor="middle">nodes, Redis 20 ms away</text>`+"\n", farWidth/2, farHeight+34)
	for i, c := range curves {
		fmt.Fprintf(b, `<path class="line c%d" d="`, i)
		for j, p := range c {
			fmt.Fprintf(b, "%c%.1f %.1f", "LM"[btoi(j == 0)], x(p[0]), y(p[1]))
		}
		b.WriteString(`"/>` + "\n")
	}
	b.WriteString("</g>\n")
}

// btoi returns 1 for true.
func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
