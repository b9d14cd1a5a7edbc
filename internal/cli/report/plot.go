package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// A plot is drawn such that it can be as wide as there is room while its text
// keeps its size: across, all is in percent of the width; down, in pixels.
type plot struct {
	ID          string
	Title, Desc string // what it shows, and what is seen in it
	Height      float64
	Bottom      float64 // of the panels, where the axis is
	Panels      []panel
	X           []tick
	XName       string
	Hovers      []hover
	Rules       []rule
	Points      []point
	Legend      []legend
}

// Below returns where something is that is so far below the axis.
func (p *plot) Below(by float64) float64 { return p.Bottom + by }

// FirstTop returns where the first panel begins.
func (p *plot) FirstTop() float64 { return p.Panels[0].Top }

// legend says what a colour means.
type legend struct{ Class, Text string }

// The colours of requests.
var outcomes = []legend{{"admitted", "admitted"}, {"denied", "denied"}}

// panel is one of the diagrams of a plot, which share an axis across.
type panel struct {
	Title  string
	Top    float64
	Height float64
	Y      []tick
	Shapes []shape

	shares bool // whether it shows percentages
}

// TitleAt returns where the title is.
func (p panel) TitleAt() float64 { return p.Top - 8 }

// Foot returns where the panel ends.
func (p panel) Foot() float64 { return p.Top + p.Height }

// shape is a path whose coordinates are thousandths of the width, and pixels.
type shape struct{ Class, Path string }

// tick is a place on an axis. A second line has the day.
type tick struct {
	At     float64
	Label  string
	Second string
	Anchor string
}

// hover is what a part of the width says when it is pointed at.
type hover struct {
	X, Width string
	Tall     float64
	Text     string
}

// rule is a vertical line that marks something.
type rule struct {
	At     float64
	Label  string
	More   string // of the label, where there is room
	Anchor string
	Shift  float64 // of the label, away from the line
}

// point marks a place on a curve. The label is empty if there is no room for it.
type point struct {
	At, Down float64
	Label    string
}

const (
	panelTitle = 22.0 // height of a panel's title
	panelGap   = 14.0
	axisHeight = 36.0 // of the labels below
)

// newPlot stacks panels of given heights.
func newPlot(id, title string, panels ...panel) *plot {
	p := &plot{ID: id, Title: title}
	y := 0.0
	for i := range panels {
		panels[i].Top = y + panelTitle
		y = panels[i].Top + panels[i].Height
		if i < len(panels)-1 {
			y += panelGap
		}
	}
	p.Panels, p.Bottom, p.Height = panels, y, y+axisHeight
	return p
}

// bars builds a path of rectangles.
type bars struct{ strings.Builder }

// add adds a rectangle from x0 to x1, which are parts of the width, and from the
// pixel y0 to y1. What is there at all is drawn at least a pixel high.
func (b *bars) add(x0, x1, y0, y1 float64) {
	if y1-y0 < 1 {
		y0 = y1 - 1
	}
	fmt.Fprintf(b, "M%s %sH%sV%sH%sZ", px(1000*x0), px(y0), px(1000*x1), px(y1), px(1000*x0))
}

// px formats a coordinate.
func px(f float64) string {
	s := fmt.Sprintf("%.2f", f)
	return strings.TrimRight(strings.TrimRight(s, "0"), ".")
}

// maxBars is how many bars are drawn across, fewer if there are many limits, so
// that the file stays small enough to open.
func maxBars(limits int) int {
	if limits > 40 {
		return 100
	}
	return 300
}

// column is a bar of a plot: some requests, those denied on top, and what the panel below shows
// of these.
type column struct {
	admitted, denied int64
	below            float64
	text             string
}

// columnPlot draws columns, or returns nil if there were no requests. The lower panel is left out
// if nothing was denied.
func columnPlot(id, title string, upper, lower panel, columns []column) *plot {
	high, highBelow := int64(0), 0.0
	for _, c := range columns {
		high, highBelow = max(high, c.admitted+c.denied), max(highBelow, c.below)
	}
	if high == 0 {
		return nil
	}
	panels := []panel{upper, lower}
	if highBelow == 0 {
		panels = panels[:1]
	}
	p := newPlot(id, title, panels...)
	p.Legend = outcomes
	y := make([]func(float64) float64, len(panels))
	for i, highest := range []float64{float64(high), highBelow}[:len(panels)] {
		y[i] = p.Panels[i].linear(highest)
	}
	width, gap := 1/float64(len(columns)), 0.0
	if len(columns) <= 60 {
		gap = width * 0.12
	}
	var admitted, denied, below bars
	for i, c := range columns {
		left := float64(i) * width
		x0, x1, passed := left+gap, left+width-gap, y[0](float64(c.admitted))
		if c.admitted > 0 {
			admitted.add(x0, x1, passed, p.Panels[0].Foot())
		}
		if c.denied > 0 {
			denied.add(x0, x1, y[0](float64(c.admitted+c.denied)), passed)
			below.add(x0, x1, y[1](c.below), p.Bottom)
		}
		if c.admitted+c.denied > 0 {
			p.Hovers = append(p.Hovers, hover{px(100 * left), px(100 * width), p.Bottom, c.text})
		}
	}
	p.Panels[0].Shapes = []shape{{"admitted", admitted.String()}, {"denied", denied.String()}}
	if len(panels) > 1 {
		p.Panels[1].Shapes = []shape{{"denied", below.String()}}
	}
	return p
}

// timePlot shows the requests over time, or nil if there were none.
func timePlot(l Limit, id string, most int) *plot {
	times, each := merge(l.Times, l.Slot, most)
	columns := make([]column, 0, len(times))
	high, peak := int64(0), Slot{}
	for _, s := range times {
		columns = append(columns, column{s.Admitted, s.Denied, float64(s.Denied), fmt.Sprintf(
			"%s: %s admitted, %s denied", moment(s.Start, each), count(s.Admitted), count(s.Denied))})
		if high = max(high, s.Admitted+s.Denied); s.Denied > peak.Denied {
			peak = s
		}
	}
	p := columnPlot(id, "Admitted and denied over time", panel{Title: "Requests per " + interval(each), Height: 150},
		panel{Title: "Only those denied", Height: 70}, columns)
	if p == nil {
		return nil
	}
	p.Desc = fmt.Sprintf("At most %s per %s.", plural(high, "request"), interval(each))
	if peak.Denied > 0 {
		p.Desc += fmt.Sprintf(" Most were denied from %s on: %s.", moment(peak.Start, each), count(peak.Denied))
	} else {
		p.Desc += " None was denied."
	}
	start := times[0].Start
	p.X = timeTicks(start, time.Duration(len(times))*each)
	if name, _ := start.Zone(); name != "" {
		p.Title += " (" + name + ")"
	}
	return p
}

// merge joins neighbouring slots until there are at most that many.
func merge(times []Slot, each time.Duration, most int) ([]Slot, time.Duration) {
	n := (len(times) + most - 1) / most
	if n <= 1 {
		return times, each
	}
	joined := make([]Slot, 0, most)
	for part := range slices.Chunk(times, n) {
		s := Slot{Start: part[0].Start}
		for _, p := range part {
			s.Admitted += p.Admitted
			s.Denied += p.Denied
		}
		joined = append(joined, s)
	}
	return joined, each * time.Duration(n)
}

// moment formats when a slot begins, as exactly as its length needs.
func moment(t time.Time, slot time.Duration) string {
	switch {
	case slot < time.Second:
		return t.Format("2 Jan, 15:04:05.000")
	case slot < time.Minute:
		return t.Format("2 Jan, 15:04:05")
	}
	return t.Format("Mon 2 Jan, 15:04")
}

// hourPlot shows what was denied by hour of the day, or nil if there were no requests.
func hourPlot(l Limit, id string) *plot {
	columns := make([]column, 0, len(l.ByHour))
	worst, worstShare := 0, 0.0
	for h, c := range l.ByHour {
		passed, denied := max(0, c.Requests-c.Denied), 100*min(1, fraction(c.Denied, c.Requests))
		columns = append(columns, column{passed, c.Requests - passed, denied, fmt.Sprintf(
			"%02d:00 to %02d:00: %s, %s denied", h, h+1, plural(c.Requests, "request"), share(c.Denied, c.Requests))})
		if denied > worstShare {
			worst, worstShare = h, denied
		}
	}
	p := columnPlot(id, "By hour of the day", panel{Title: "Requests", Height: 70},
		panel{Title: "Share denied", Height: 100, shares: true}, columns)
	if p == nil {
		return nil
	}
	p.Desc = "None was denied."
	if worstShare > 0 {
		p.Desc = fmt.Sprintf("The largest share was denied from %02d:00 to %02d:00: %s.",
			worst, worst+1, share(l.ByHour[worst].Denied, l.ByHour[worst].Requests))
	}
	for h := 0; h < len(l.ByHour); h += 4 {
		p.X = append(p.X, tick{At: 100 * float64(h) / 24, Label: fmt.Sprintf("%02d:00", h), Anchor: "start"})
	}
	if l.HourIn != "" {
		p.Title += " (" + visible(l.HourIn) + ")"
	}
	return p
}

// sizePlot shows how many keys needed which size, and what each size would deny,
// or nil if there are no keys. Keys that no size is enough for are only part of
// the shares. A unit takes the width from half a unit below to
// half a unit above it.
func sizePlot(l Limit, id string) *plot {
	all, peaks := total(l.Peaks), l.Peaks
	if all > 0 && peaks[len(peaks)-1].Units == NoSize {
		peaks = peaks[:len(peaks)-1]
	}
	if total(peaks) == 0 {
		return nil
	}
	highest := float64(max(peaks[len(peaks)-1].Units, l.Size, 1))
	low, high := math.Log(0.5), math.Log((highest+.5)*1.15)
	across := func(units float64) float64 { return min(1, (math.Log(max(units, .5))-low)/(high-low)) }

	p := newPlot(id, "Which size would deny how many keys",
		panel{Title: "Keys by the size that they needed", Height: 100},
		panel{Title: "Share of keys denied at least once, by size", Height: 130})
	p.XName = "size, in units"
	p.Desc = fmt.Sprintf("Half of the keys needed a size of %s, and the busiest %s.",
		sizeNeeded(l.SizeFor(.5)), sizeNeeded(l.SizeFor(0)))
	for _, v := range powers(highest*1.1, 6) {
		p.X = append(p.X, tick{At: 100 * across(v), Label: short(v), Anchor: "middle"})
	}
	if l.Size > 0 {
		denied := share(above(l.Peaks, l.Size), all)
		p.Desc += fmt.Sprintf(" The size of %s denied %s of the keys.", count(l.Size), denied)
		p.Legend = []legend{{"admitted", "never denied"}, {"denied", "denied at least once"}}
		r := rule{At: 100 * across(float64(l.Size)), Anchor: "start", Shift: 6, Label: "size " + short(float64(l.Size)), More: ": " + denied + " denied"}
		if r.At > 50 {
			r.Anchor, r.Shift = "end", -6
		}
		p.Rules = []rule{r}
	}
	p.drawKeys(l, peaks, across)
	down := p.drawShares(peaks, all, across)
	p.Points = sizePoints(proposals(l), func(of proposal) (float64, float64) {
		return 100 * across(float64(of.Size)), down(of.Denied)
	})
	return p
}

// drawKeys draws the keys in bins of about a tenth of a decade, with the size between two.
func (p *plot) drawKeys(l Limit, peaks []Peak, across func(float64) float64) {
	all, bins, most := total(l.Peaks), binned(peaks, l.Size), int64(1)
	for _, b := range bins {
		most = max(most, b.keys)
	}
	keys := &p.Panels[0]
	decades := max(1, math.Log10(float64(most)))
	tall := func(n float64) float64 { // a single key is a little above the axis
		return keys.Foot() - keys.Height*(math.Log10(n)+.3)/(decades+.3)
	}
	for _, n := range powers(float64(most), 4) {
		keys.Y = append(keys.Y, tick{At: tall(n), Label: short(n)})
	}
	var admitted, denied bars
	for _, b := range bins {
		path := &admitted
		if l.Size > 0 && b.from > l.Size {
			path = &denied
		}
		x0, x1 := across(float64(b.from)-.5), across(float64(b.to)+.5)
		path.add(x0, x1, tall(float64(b.keys)), keys.Foot())
		p.Hovers = append(p.Hovers, hover{px(100 * x0), px(100 * (x1 - x0)), p.Bottom, fmt.Sprintf(
			"%s needed %s; a size of %s would deny %s (%s)", plural(b.keys, "key"), span(b.from, b.to), count(b.to),
			share(above(l.Peaks, b.to), all), plural(above(l.Peaks, b.to), "key"))})
	}
	keys.Shapes = []shape{{"admitted", admitted.String()}, {"denied", denied.String()}}
}

// drawShares draws what each size would deny, down to a single key, and none. It returns where a
// number of keys is.
func (p *plot) drawShares(peaks []Peak, all int64, across func(float64) float64) (down func(int64) float64) {
	curve := &p.Panels[1]
	most := math.Pow(10, math.Ceil(max(1, math.Log10(float64(all)))))
	at := func(one float64) float64 { return curve.Top + (curve.Height-16)*math.Log10(one)/math.Log10(most) }
	down = func(n int64) float64 {
		if n == 0 {
			return curve.Foot()
		}
		return at(float64(all) / float64(n))
	}
	for _, one := range powers(most, 5) {
		label := percentage(100 / one)
		if one > 1e4 {
			label = "1 in " + short(one)
		}
		curve.Y = append(curve.Y, tick{At: at(one), Label: label})
	}
	curve.Y = append(curve.Y, tick{At: curve.Foot(), Label: "none"})
	var line strings.Builder
	fmt.Fprintf(&line, "M0 %sV%s", px(curve.Foot()), px(down(all)))
	left := all
	for _, k := range peaks {
		left -= k.Keys
		fmt.Fprintf(&line, "H%sV%s", px(1000*across(float64(k.Units)-.5)), px(down(left)))
	}
	fmt.Fprintf(&line, "H1000V%sZ", px(curve.Foot()))
	curve.Shapes = []shape{{"curve", line.String()}}
	return down
}

// sizePoints marks the proposed sizes, with as many labels as do not meet. The
// current size has its own mark.
func sizePoints(all []proposal, place func(proposal) (at, down float64)) []point {
	const room = 5.5 // for a label, which is right of its point
	points := make([]point, 0, len(all))
	free := 0.0
	for _, of := range all {
		at, down := place(of)
		k := point{At: at, Down: down}
		if !of.Current && at >= free && at < 100-room {
			k.Label, free = short(float64(of.Size)), at+room
		}
		points = append(points, k)
	}
	return points
}

// bin counts the keys whose peak is in a range.
type bin struct{ from, to, keys int64 }

// binned puts peaks into bins of about a tenth of a decade, of which one ends with
// size.
func binned(peaks []Peak, size int64) []bin {
	var bins []bin
	from, to := int64(1), int64(1)
	next := func() {
		from = to + 1
		// The float's largest value would not fit into the integer.
		to = int64(min(math.Ceil(float64(from)*1.26)-1, 1<<62))
		to = max(to, from)
	}
	for _, p := range peaks {
		units := max(p.Units, 1)
		for to < units && from < 1<<61 {
			next()
		}
		b := bin{from, to, p.Keys}
		if b.from <= size && size < b.to {
			if units <= size {
				b.to = size
			} else {
				b.from = size + 1
			}
		}
		if n := len(bins); n > 0 && bins[n-1].from == b.from {
			bins[n-1].keys += b.keys
		} else if b.keys > 0 {
			bins = append(bins, b)
		}
	}
	return bins
}

// span formats a range of units.
func span(from, to int64) string {
	if from == to {
		return plural(from, "unit")
	}
	return count(from) + " to " + count(to) + " units"
}

// powers returns where the ticks of a logarithmic axis are: powers of ten up to most, about that
// many.
func powers(most float64, ticks int) (list []float64) {
	step := math.Pow(10, math.Ceil(max(1, math.Log10(most)/float64(ticks))))
	for v := 1.0; v <= most; v *= step {
		list = append(list, v)
	}
	return list
}

// linear gives a panel an axis from 0 to at least high, and returns where values are. Only
// shares have ticks at other than whole numbers.
func (p *panel) linear(high float64) func(float64) float64 {
	want, label := 4.0, short
	if p.Height < 100 {
		want = 2
	}
	if p.shares {
		label = percentage
	}
	step := math.Pow(10, math.Floor(math.Log10(high/want)))
	for _, f := range []float64{1, 2, 5, 10} {
		if high/(step*f) <= want {
			step *= f
			break
		}
	}
	top := math.Ceil(high/step*(1-1e-9)) * step
	y := func(v float64) float64 { return p.Foot() - v*p.Height/top }
	for i := 0; float64(i)*step <= top*(1+1e-9); i++ {
		if v := float64(i) * step; p.shares || v == math.Trunc(v) {
			p.Y = append(p.Y, tick{At: y(v), Label: label(v)})
		}
	}
	return y
}

const day = 24 * time.Hour

// steps are how far apart the ticks of an axis of time may be. From an hour on they follow the
// calendar, with months for 30 days.
var steps = []time.Duration{
	1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 10e9, 15e9, 30e9,
	time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour, 3 * time.Hour, 4 * time.Hour, 6 * time.Hour, 12 * time.Hour, day, 2 * day, 7 * day, 14 * day, 28 * day,
	30 * day, 60 * day, 90 * day, 180 * day, 360 * day, 720 * day, 1800 * day, 3600 * day, 18000 * day,
}

// tickTime returns the n-th tick, of which the first is at or before a start.
func tickTime(start time.Time, step time.Duration, n int) time.Time {
	year, month, date := start.Date()
	switch {
	case step >= 30*day:
		return time.Date(year, month+time.Month(n)*time.Month(step/(30*day)), 1, 0, 0, 0, 0, start.Location())
	case step >= day:
		return time.Date(year, month, date+n*int(step/day), 0, 0, 0, 0, start.Location())
	case step >= time.Hour:
		hours := int(step / time.Hour)
		return time.Date(year, month, date, (start.Hour()/hours+n)*hours, 0, 0, 0, start.Location())
	}
	return start.Truncate(step).Add(time.Duration(n) * step)
}

// tickFormats returns how ticks are shown, and what their second line has.
func tickFormats(step time.Duration) (format, second string) {
	switch {
	case step >= 30*day:
		return "Jan", "2006"
	case step >= day:
		return "2 Jan", "2006"
	case step >= time.Minute:
		return "15:04", "2 Jan"
	case step >= time.Second:
		return "15:04:05", "2 Jan"
	}
	return "05.000", "15:04"
}

// timeTicks returns about six places on an axis of time, at round times of the
// clock where it is. With the first and wherever another day begins, they have the
// day.
func timeTicks(start time.Time, length time.Duration) (ticks []tick) {
	const want = 6
	i := slices.IndexFunc(steps, func(step time.Duration) bool { return length <= want*step })
	if i < 0 {
		i = len(steps) - 1
	}
	format, second := tickFormats(steps[i])
	last := ""
	for n := range 2 * want {
		t := tickTime(start, steps[i], n)
		at := 100 * float64(t.Sub(start)) / float64(length)
		if at < 0 || at > 100 || len(ticks) > 0 && at <= ticks[len(ticks)-1].At {
			continue
		}
		k := tick{At: at, Label: t.Format(format), Anchor: "middle"}
		if d := t.Format(second); d != last {
			// On a phone there is no room for two next to each other.
			if n := len(ticks); n > 0 && at-ticks[n-1].At < 20 {
				ticks[n-1].Second = ""
			}
			k.Second, last = d, d
		}
		if at < 4 {
			k.Anchor = "start"
		} else if at > 96 {
			k.Anchor = "end"
		}
		ticks = append(ticks, k)
	}
	if len(ticks) == 0 {
		return []tick{{Label: start.Format("15:04:05"), Second: start.Format("2 Jan"), Anchor: "start"}}
	}
	return ticks
}
