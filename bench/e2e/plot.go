package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// panel is one diagram of a plot. Its x axis is logarithmic.
type panel struct {
	title, label, across string
	log                  bool // the y axis in powers of ten
	lines                []line
}

type line struct {
	name   string
	points []point
}

type point struct{ x, y float64 }

// Each limiter has its colour, on a light ground and on a dark one, in all
// panels; the peers are dashed.
var colours = map[string]struct{ light, dark, dash string }{
	bare:      {"#6e7781", "#9198a1", "2 3"},
	inProcess: {"#1a7f37", "#3fb950", ""},
	eventual:  {"#0550ae", "#a5d6ff", "2 3"},
	onRedis:   {"#0969da", "#58a6ff", ""},
	mholt:     {"#bc4c00", "#f0883e", "7 4"},
	redisRate: {"#8250df", "#bc8cff", "7 4"},
	evalsha:   {"#bf3989", "#f778ba", "7 4"},
	oneCall:   {"#9a6700", "#d29922", "2 3"},
}

// The measures of a panel, in pixels.
const (
	plotWidth, plotHeight = 350, 230
	left, top             = 60, 40
	cellWidth, cellHeight = left + plotWidth + 25, top + plotHeight + 55
	legendHeight          = 85
)

// plot draws panels of the same lines, two in a row, as SVG.
func plot(title string, panels []panel) string {
	width, height := 2*cellWidth, (len(panels)+1)/2*cellHeight+legendHeight
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="13">
<title>%s</title>
<style>
.ground { fill: #ffffff } text { fill: #1f2328 } .axis { stroke: #d1d9e0 } .line { fill: none; stroke-width: 2 }
`, width, height, html.EscapeString(title))
	classes := make(map[string]string)
	var dark strings.Builder
	for i, l := range panels[0].lines {
		class, c := fmt.Sprintf("l%d", i), colours[l.name]
		classes[l.name] = class
		fmt.Fprintf(&b, ".%[1]s { stroke: %[2]s; stroke-dasharray: %[3]s } .d%[1]s { fill: %[2]s }\n", class, c.light, orNone(c.dash))
		fmt.Fprintf(&dark, ".%[1]s { stroke: %[2]s } .d%[1]s { fill: %[2]s }\n", class, c.dark)
	}
	fmt.Fprintf(&b, `@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } text { fill: #e6edf3 } .axis { stroke: #3d444d }
%s}
</style>
<rect class="ground" width="%d" height="%d"/>
`, dark.String(), width, height)
	for i, p := range panels {
		p.draw(&b, classes, float64(i%2*cellWidth), float64(i/2*cellHeight))
	}
	for i, l := range panels[0].lines {
		x, y := left+i%3*(width-left)/3, height-legendHeight+15+i/3*25
		fmt.Fprintf(&b, `<line class="line %s" x1="%d" y1="%d" x2="%d" y2="%d"/><text x="%d" y="%d">%s</text>`+"\n",
			classes[l.name], x, y, x+36, y, x+44, y+4, html.EscapeString(l.name))
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func orNone(dash string) string {
	if dash == "" {
		return "none"
	}
	return dash
}

// draw draws the panel with its upper left corner at x, y.
func (p panel) draw(b *strings.Builder, classes map[string]string, x, y float64) {
	least, most := math.Inf(1), math.Inf(-1) // of y
	first, last := math.Inf(1), 1.0          // of x
	for _, l := range p.lines {
		for _, q := range l.points {
			least, most, first, last = min(least, q.y), max(most, q.y), min(first, q.x), max(last, q.x)
		}
	}
	var ticks []float64
	var place func(float64) float64 // of a y, from 0 at the foot to 1 at the head
	if p.log {
		low, high := math.Floor(math.Log10(max(least, 1e-3))), math.Ceil(math.Log10(max(most, 1e-2)))
		high = max(high, low+1)
		for e := low; e <= high; e++ {
			ticks = append(ticks, math.Pow(10, e))
		}
		place = func(v float64) float64 { return (math.Log10(max(v, 1e-3)) - low) / (high - low) }
	} else {
		step := 0.2
		for most/step > 8 {
			step *= 5
		}
		high := math.Ceil(most/step) * step
		for i := range int(math.Round(high/step)) + 1 {
			ticks = append(ticks, float64(i)*step)
		}
		place = func(v float64) float64 { return v / high }
	}
	px := func(v float64) float64 { return x + left + math.Log2(v/first)/max(math.Log2(last/first), 1)*plotWidth }
	py := func(v float64) float64 { return y + top + (1-place(v))*plotHeight }

	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" font-weight="600">%s</text>`+"\n", x+left, y+top-14, html.EscapeString(p.title))
	fmt.Fprintf(b, `<text transform="translate(%.0f %.0f) rotate(-90)" text-anchor="middle">%s</text>`+"\n",
		x+16, y+top+plotHeight/2, html.EscapeString(p.label))
	fmt.Fprintf(b, `<text x="%.0f" y="%.0f" text-anchor="middle">%s</text>`+"\n", x+left+plotWidth/2, y+top+plotHeight+38, html.EscapeString(p.across))
	for _, t := range ticks {
		fmt.Fprintf(b, `<line class="axis" x1="%.0f" y1="%.1f" x2="%.0f" y2="%.1f"/><text x="%.0f" y="%.1f" text-anchor="end">%.4g</text>`+"\n",
			x+left, py(t), x+left+plotWidth, py(t), x+left-8, py(t)+4, t)
	}
	for _, q := range p.lines[0].points {
		fmt.Fprintf(b, `<line class="axis" x1="%.1f" y1="%.0f" x2="%.1f" y2="%.0f"/><text x="%.1f" y="%.0f" text-anchor="middle">%g</text>`+"\n",
			px(q.x), y+top+plotHeight, px(q.x), y+top+plotHeight+5, px(q.x), y+top+plotHeight+19, q.x)
	}
	for _, l := range p.lines {
		points := make([]string, len(l.points))
		for i, q := range l.points {
			points[i] = fmt.Sprintf("%.1f,%.1f", px(q.x), py(q.y))
			fmt.Fprintf(b, `<circle class="d%s" cx="%.1f" cy="%.1f" r="3"/>`+"\n", classes[l.name], px(q.x), py(q.y))
		}
		fmt.Fprintf(b, `<polyline class="line %s" points="%s"/>`+"\n", classes[l.name], strings.Join(points, " "))
	}
}
