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

// timePlot shows the requests over time, or nil if there were none.
func timePlot(l Limit, id string, most int) *plot {
	if l.Slot <= 0 || !slices.ContainsFunc(l.Times, func(s Slot) bool { return s.Admitted > 0 || s.Denied > 0 }) {
		return nil
	}
	times, each := merge(l.Times, l.Slot, most)
	var high, highDenied int64
	var peak Slot
	for _, s := range times {
		high = max(high, s.Admitted+s.Denied)
		if s.Denied > highDenied {
			highDenied, peak = s.Denied, s
		}
	}
	panels := []panel{{Title: "Requests per " + interval(each), Height: 150}}
	if highDenied > 0 {
		panels = append(panels, panel{Title: "Only those denied", Height: 70})
	}
	p := newPlot(id, "Admitted and denied over time", panels...)
	all, _ := linear(&p.Panels[0], float64(high), true)
	p.Desc = fmt.Sprintf("At most %s per %s.", plural(high, "request"), interval(each))
	below := func(float64) float64 { return 0 }
	if highDenied > 0 {
		below, _ = linear(&p.Panels[1], float64(highDenied), true)
		p.Desc += fmt.Sprintf(" Most were denied from %s on: %s.", moment(peak.Start, each), count(highDenied))
	} else {
		p.Desc += " None was denied."
	}

	var admitted, denied, only bars
	width := 1 / float64(len(times))
	gap := 0.0
	if len(times) <= 60 {
		gap = width * 0.12
	}
	for i, s := range times {
		x0, x1 := float64(i)*width, float64(i+1)*width
		base := p.Panels[0].Top + p.Panels[0].Height
		if s.Admitted > 0 {
			admitted.add(x0+gap, x1-gap, all(float64(s.Admitted)), base)
		}
		if s.Denied > 0 {
			denied.add(x0+gap, x1-gap, all(float64(s.Admitted+s.Denied)), all(float64(s.Admitted)))
			only.add(x0+gap, x1-gap, below(float64(s.Denied)), p.Bottom)
		}
		if s.Admitted > 0 || s.Denied > 0 {
			p.Hovers = append(p.Hovers, hover{px(100 * x0), px(100 * width), p.Bottom, fmt.Sprintf(
				"%s: %s admitted, %s denied", moment(s.Start, each), count(s.Admitted), count(s.Denied))})
		}
	}
	p.Legend = outcomes
	p.Panels[0].Shapes = []shape{{"admitted", admitted.String()}, {"denied", denied.String()}}
	if highDenied > 0 {
		p.Panels[1].Shapes = []shape{{"denied", only.String()}}
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

// hourPlot shows what was denied by hour of the day, or nil if there is nothing.
func hourPlot(l Limit, id string) *plot {
	var high int64
	worst, worstShare := 0, 0.0
	for h, c := range l.ByHour {
		high = max(high, c.Requests)
		if f := fraction(c.Denied, c.Requests); f > worstShare {
			worst, worstShare = h, f
		}
	}
	if high == 0 {
		return nil
	}
	panels := []panel{{Title: "Requests", Height: 70}}
	if worstShare > 0 {
		panels = append(panels, panel{Title: "Share denied", Height: 100})
	}
	p := newPlot(id, "By hour of the day", panels...)
	p.Desc = "None was denied."
	all, _ := linear(&p.Panels[0], float64(high), true)
	below := func(float64) float64 { return 0 }
	if worstShare > 0 {
		p.Desc = fmt.Sprintf("The largest share was denied from %02d:00 to %02d:00: %s.",
			worst, worst+1, share(l.ByHour[worst].Denied, l.ByHour[worst].Requests))
		var step float64
		below, step = linear(&p.Panels[1], 100*min(1, worstShare), false)
		for i := range p.Panels[1].Y {
			p.Panels[1].Y[i].Label = "0" + sign
			if i > 0 {
				p.Panels[1].Y[i].Label = percentage(step * float64(i))
			}
		}
	}
	var admitted, denied, shares bars
	for h, c := range l.ByHour {
		x0, x1 := float64(h)/24, float64(h+1)/24
		if c.Requests > 0 {
			passed := max(0, c.Requests-c.Denied)
			if passed > 0 {
				admitted.add(x0+.005, x1-.005, all(float64(passed)), p.Panels[0].Top+p.Panels[0].Height)
			}
			if c.Denied > 0 {
				denied.add(x0+.005, x1-.005, all(float64(c.Requests)), all(float64(passed)))
				shares.add(x0+.005, x1-.005, below(100*min(1, fraction(c.Denied, c.Requests))), p.Bottom)
			}
			p.Hovers = append(p.Hovers, hover{px(100 * x0), px(100. / 24), p.Bottom, fmt.Sprintf(
				"%02d:00 to %02d:00: %s, %s denied", h, h+1, plural(c.Requests, "request"), share(c.Denied, c.Requests))})
		}
		if h%4 == 0 {
			p.X = append(p.X, tick{At: 100 * x0, Label: fmt.Sprintf("%02d:00", h), Anchor: "start"})
		}
	}
	p.Legend = outcomes
	p.Panels[0].Shapes = []shape{{"admitted", admitted.String()}, {"denied", denied.String()}}
	if worstShare > 0 {
		p.Panels[1].Shapes = []shape{{"denied", shares.String()}}
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
	highest := max(peaks[len(peaks)-1].Units, l.Size, 1)
	low, high := math.Log(0.5), math.Log((float64(highest)+.5)*1.15)
	across := func(units float64) float64 { return min(1, (math.Log(max(units, .5))-low)/(high-low)) }

	p := newPlot(id, "Which size would deny how many keys",
		panel{Title: "Keys by the size that they needed", Height: 100},
		panel{Title: "Share of keys denied at least once, by size", Height: 130})
	p.XName = "size, in units"
	p.Desc = fmt.Sprintf("Half of the keys needed a size of %s, and the busiest %s.",
		sizeNeeded(l.SizeFor(.5)), sizeNeeded(l.SizeFor(0)))
	if l.Size > 0 {
		p.Desc += fmt.Sprintf(" The size of %s denied %s of the keys.", count(l.Size), share(above(l.Peaks, l.Size), all))
	}

	// Above: the keys in bins of about a tenth of a decade, with the size between two.
	bins := binned(peaks, l.Size)
	most := int64(1)
	for _, b := range bins {
		most = max(most, b.keys)
	}
	keys := &p.Panels[0]
	decades := max(1, math.Log10(float64(most)))
	tall := func(n int64) float64 { // a single key is a little above the axis
		return keys.Top + keys.Height - keys.Height*(math.Log10(float64(n))+.3)/(decades+.3)
	}
	for n, step := int64(1), decadeStep(decades, 4); ; {
		keys.Y = append(keys.Y, tick{At: tall(n), Label: short(float64(n))})
		next := n * step
		if next/step != n || next > most {
			break
		}
		n = next
	}
	var admitted, denied bars
	for _, b := range bins {
		path := &admitted
		if l.Size > 0 && b.from > l.Size {
			path = &denied
		}
		x0, x1 := across(float64(b.from)-.5), across(float64(b.to)+.5)
		path.add(x0, x1, tall(b.keys), keys.Top+keys.Height)
		p.Hovers = append(p.Hovers, hover{px(100 * x0), px(100 * (x1 - x0)), p.Bottom, fmt.Sprintf(
			"%s needed %s; a size of %s would deny %s (%s)", plural(b.keys, "key"), span(b.from, b.to), count(b.to),
			share(above(l.Peaks, b.to), all), plural(above(l.Peaks, b.to), "key"))})
	}
	if l.Size > 0 {
		p.Legend = []legend{{"admitted", "never denied"}, {"denied", "denied at least once"}}
	}
	keys.Shapes = []shape{{"admitted", admitted.String()}, {"denied", denied.String()}}

	// Below: what each size would deny, down to a single key, and none.
	curve := &p.Panels[1]
	decades = math.Ceil(max(1, math.Log10(float64(all))))
	foot := curve.Top + curve.Height
	down := func(n int64) float64 {
		if n == 0 {
			return foot
		}
		return curve.Top - (curve.Height-16)*math.Log10(float64(n)/float64(all))/decades
	}
	step := math.Log10(float64(decadeStep(decades, 5)))
	for d := 0.0; d <= decades; d += step {
		label := percentage(100 * math.Pow(10, -d))
		if d > 4 {
			label = "1 in " + short(math.Pow(10, d))
		}
		curve.Y = append(curve.Y, tick{At: curve.Top + (curve.Height-16)*d/decades, Label: label})
	}
	curve.Y = append(curve.Y, tick{At: foot, Label: "none"})
	var line strings.Builder
	left := all
	fmt.Fprintf(&line, "M0 %sV%s", px(foot), px(down(left)))
	for _, k := range peaks {
		left -= k.Keys
		fmt.Fprintf(&line, "H%sV%s", px(1000*across(float64(k.Units)-.5)), px(down(left)))
	}
	fmt.Fprintf(&line, "H1000V%sZ", px(foot))
	curve.Shapes = []shape{{"curve", line.String()}}

	for at, n := 1.0, decadeStep(math.Log10(float64(highest)+1), 6); at <= float64(highest)*1.1; at *= float64(n) {
		p.X = append(p.X, tick{At: 100 * across(at), Label: short(at), Anchor: "middle"})
	}
	if l.Size > 0 {
		r := rule{At: 100 * across(float64(l.Size)), Anchor: "start", Shift: 6,
			Label: "size " + short(float64(l.Size)), More: fmt.Sprintf(": %s denied", share(above(l.Peaks, l.Size), all))}
		if r.At > 50 {
			r.Anchor, r.Shift = "end", -6
		}
		p.Rules = []rule{r}
	}
	p.Points = sizePoints(proposals(l), func(of proposal) (float64, float64) {
		return 100 * across(float64(of.Size)), down(of.Denied)
	})
	return p
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

// decadeStep returns by which power of ten ticks of a logarithmic axis are apart
// for about that many.
func decadeStep(decades float64, ticks int) int64 {
	step := int64(10)
	for n := decades / float64(ticks); n > 1; n-- {
		step *= 10
	}
	return step
}

// linear gives a panel an axis from 0 to at least high, with ticks at whole numbers
// only if requested, and returns where values are and how far apart ticks may be.
func linear(p *panel, high float64, whole bool) (func(float64) float64, float64) {
	want := 4.0
	if p.Height < 100 {
		want = 2
	}
	step := math.Pow(10, math.Floor(math.Log10(high/want)))
	for _, f := range []float64{1, 2, 5, 10} {
		if high/(step*f) <= want {
			step *= f
			break
		}
	}
	top := math.Ceil(high/step*(1-1e-9)) * step
	bottom, scale := p.Top+p.Height, p.Height/top
	y := func(v float64) float64 { return bottom - v*scale }
	for i := 0; float64(i)*step <= top*(1+1e-9); i++ {
		if v := float64(i) * step; !whole || v == math.Trunc(v) {
			p.Y = append(p.Y, tick{At: y(v), Label: short(v)})
		}
	}
	return y, step
}

// timeTicks returns about six places on an axis of time, at round times of the
// clock where it is. With the first and wherever another day begins, they have the
// day.
func timeTicks(start time.Time, length time.Duration) []tick {
	const want, most = 6, 100
	const day = 24 * time.Hour
	var ticks []tick
	lastDay := ""
	add := func(t time.Time, format, second string) {
		at := 100 * float64(t.Sub(start)) / float64(length)
		if at < 0 || at > 100 || len(ticks) > 0 && at <= ticks[len(ticks)-1].At {
			return
		}
		k := tick{At: at, Label: t.Format(format), Anchor: "middle"}
		if d := t.Format(second); d != lastDay {
			// On a phone there is no room for two next to each other.
			if n := len(ticks); n > 0 && at-ticks[n-1].At < 20 {
				ticks[n-1].Second = ""
			}
			k.Second, lastDay = d, d
		}
		ticks = append(ticks, k)
	}
	year, month, date := start.Date()
	switch {
	case length > 120*day:
		step := 1
		for _, s := range []int{1, 2, 3, 6, 12, 24, 60, 120, 600} {
			if step = s; float64(length)/(float64(s)*float64(30*day)) <= want {
				break
			}
		}
		for n := range most {
			m := month + time.Month(n*step)
			t := time.Date(year, m, 1, 0, 0, 0, 0, start.Location())
			if t.Sub(start) > length {
				break
			}
			add(t, "Jan", "2006")
		}
	case length > 5*day:
		step := 1
		for _, s := range []int{1, 2, 7, 14, 28} {
			if step = s; float64(length)/(float64(s)*float64(day)) <= want+1 {
				break
			}
		}
		for n := range most {
			t := time.Date(year, month, date+n*step, 0, 0, 0, 0, start.Location())
			if t.Sub(start) > length {
				break
			}
			add(t, "2 Jan", "2006")
		}
	case length > 5*time.Hour:
		step := 1
		for _, s := range []int{1, 2, 3, 4, 6, 12, 24} {
			if step = s; float64(length)/(float64(s)*float64(time.Hour)) <= want+1 {
				break
			}
		}
		first := start.Hour() / step * step
		for n := range most {
			t := time.Date(year, month, date, first+n*step, 0, 0, 0, start.Location())
			if t.Sub(start) > length {
				break
			}
			add(t, "15:04", "2 Jan")
		}
	default:
		step := time.Millisecond
		for _, s := range []time.Duration{
			1e6, 2e6, 5e6, 10e6, 20e6, 50e6, 100e6, 200e6, 500e6, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second,
			30 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute, time.Hour,
		} {
			if step = s; float64(length)/float64(s) <= want {
				break
			}
		}
		format := "15:04"
		if step < time.Second {
			format = "05.000"
		} else if step < time.Minute {
			format = "15:04:05"
		}
		second := "2 Jan"
		if step < time.Second {
			second = "15:04"
		}
		for t := start.Truncate(step); t.Sub(start) <= length; t = t.Add(step) {
			add(t, format, second)
		}
	}
	if len(ticks) == 0 {
		add(start, "15:04:05", "2 Jan")
	}
	for i := range ticks {
		if ticks[i].At < 4 {
			ticks[i].Anchor = "start"
		} else if ticks[i].At > 96 {
			ticks[i].Anchor = "end"
		}
	}
	return ticks
}
