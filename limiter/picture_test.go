package limiter_test

import (
	"context"
	"flag"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// drawPicture makes TestAlgorithmsPicture write the picture.
var drawPicture = flag.Bool("picture", false, "draw docs/algorithms.svg from what the algorithms decide")

// The traffic of the picture, in ticks: a lone request, two bursts around the end of
// a window, a flood of two and a half requests a second, a pause and a burst.
const (
	tick   = 50 * time.Millisecond
	second = int(time.Second / tick)
	window = 10 * second
	lasts  = 40 * second
	begins = 15 * second / 2 // when the first request comes
	across = 10              // the size of each limit
)

// arrivals returns how many requests come at each tick.
func arrivals() (at [lasts]int) {
	for _, burst := range []struct{ from, every, count int }{
		{second / 2, 1, 1},
		{15 * second / 2, 3, 12},
		{10*second + 4, 3, 12},
		{14 * second, 8, 40},
		{36 * second, 2, 20},
	} {
		for i := range burst.count {
			at[burst.from+i*burst.every]++
		}
	}
	return at
}

// panels are the parts of the picture. Each bound is the most that the algorithm
// admits from one tick to another, as docs/algorithms.md says it, given that it counts
// nothing at the first.
var panels = []struct {
	title, options string
	limit          limiter.Limit
	bound          func(from, to int) int
	inWindow       int // the most in any time of a window
}{
	{
		"leaky_bucket, token_bucket", "size 10, a unit a second", limiter.Limit{Size: across, DripInterval: time.Second},
		func(from, to int) int { return across + (to-from)/second }, 2 * across,
	},
	{
		"fixed_window", "size 10, window 10s", limiter.ClockWindow(across, 10*time.Second, time.Unix(0, 0)),
		func(from, to int) int { return across * (1 + to/window - from/window) }, 2 * across,
	},
	{
		"fixed_window, window_start first", "size 10, window 10s", limiter.FixedWindow(across, 10*time.Second),
		func(from, to int) int { return across * (1 + (to-from)/window) }, 2 * across,
	},
	{
		"sliding_window", "size 10, window 10s", limiter.SlidingWindow(across, 10*time.Second),
		func(from, to int) int { return across * (1 + to/window - from/window) }, 2 * across,
	},
	{
		"sliding_log", "size 10, window 10s", limiter.SlidingLog(across, 10*time.Second),
		func(from, to int) int { return across * (1 + (to-from)/window) }, across,
	},
	{
		"warm_up", "a unit a second, warm_up 10s", limiter.WarmingUp(across, 10*time.Second, 10*time.Second),
		func(from, to int) int { return warmingUp(float64(to-from) / float64(second)) }, 1 + across,
	},
}

// warmingUp returns the most requests that the limit that warms up admits in that many
// seconds from cold: the wait after each is the integral of a line over the permit
// that it takes, of which there are ten. It falls from 3 s to 1 s after five of them.
func warmingUp(seconds float64) int {
	admitted := 1
	for permits := 10.0; ; permits-- {
		wait := 1.0
		if permits > 5 {
			wait += (permits - 5 - 0.5) * 2 / 5
		}
		if seconds -= wait; seconds < 0 {
			return admitted
		}
		admitted++
	}
}

// history is what a limit does with the traffic, tick by tick.
type history struct {
	asked, admitted, room, bound [lasts]int // admitted is the sum of all until then
	busy, from                   int        // the most in the time of a window, and when that begins
}

// play sends the traffic to a limit, in a store whose clock is the ticks.
func play(t *testing.T, limit limiter.Limit, bound func(from, to int) int) history {
	t.Helper()
	h, now := history{asked: arrivals()}, 0
	store := limiter.NewMemoryWithClock(func() time.Duration { return time.Duration(now) * tick })
	b := limiter.Bucket{Name: "picture", Key: "client", Limit: limit, Cost: 1}
	total, empty, before := 0, 0, 0 // admitted, when it last counted nothing, and what was admitted until then
	for now = range lasts {
		if level, err := store.Peek(context.Background(), b); err != nil {
			t.Fatal(err)
		} else if level.Clear == 0 {
			empty, before = now, total
		}
		for range h.asked[now] {
			d, err := store.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{b}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !d[0].Denied {
				total++
			}
		}
		level, err := store.Peek(context.Background(), b)
		if err != nil {
			t.Fatal(err)
		}
		h.admitted[now], h.room[now], h.bound[now] = total, int(level.Remaining), before+bound(empty, now)
		within := total
		if now >= window {
			within -= h.admitted[now-window]
		}
		if within > h.busy {
			h.busy, h.from = within, now-window
		}
	}
	return h
}

// TestAlgorithmsPicture guards docs/algorithms.svg: it is what the algorithms decide
// today, and none of them exceeds the bounds that the page gives. With -picture it
// draws it again.
func TestAlgorithmsPicture(t *testing.T) {
	var drawn []history
	for _, p := range panels {
		h := play(t, p.limit, p.bound)
		for at, n := range h.admitted {
			if n > h.bound[at] {
				t.Errorf("%s: %d admitted after %v, at most %d may be", p.title, n, time.Duration(at)*tick, h.bound[at])
				break
			}
		}
		if h.busy > p.inWindow {
			t.Errorf("%s: %d admitted within 10 s, at most %d may be", p.title, h.busy, p.inWindow)
		}
		drawn = append(drawn, h)
	}
	got := drawAlgorithms(drawn)
	file := filepath.Join("..", "docs", "algorithms.svg")
	if *drawPicture {
		filetest.Write(t, file, []byte(got))
		return
	}
	want := filetest.Read(t, file)
	if got != string(want) {
		t.Errorf("%s is not what the algorithms decide: if the difference is meant, run make picture", file)
	}
}

// TestAlgorithmsPictureIsDescribed guards what docs/algorithms.md says about the
// picture.
func TestAlgorithmsPictureIsDescribed(t *testing.T) {
	const first, last = 15 * second / 2, 14 * second // of both bursts
	for i, tc := range []struct{ bursts, flood, pause int }{
		{14, 18, 6}, // the leaky bucket
		{19, 10, 10},
		{19, 10, 10},
		{11, 18, 6}, // the sliding window
		{10, 16, 4}, // the sliding log
		{2, 10, 1},  // the limit that warms up
	} {
		h := play(t, panels[i].limit, panels[i].bound)
		got := tc
		got.bursts = h.admitted[last-1] - h.admitted[first-1]
		got.flood = h.admitted[30*second] - h.admitted[last-1]
		got.pause = h.room[36*second-1]
		if got != tc {
			t.Errorf("%s: %+v, want %+v", panels[i].title, got, tc)
		}
		from, silent := 0, 0 // how long nothing is admitted after the bursts
		for at := first; at < 30*second; at++ {
			if h.admitted[at] == h.admitted[at-1] {
				from++
			} else {
				from = 0
			}
			silent = max(silent, from)
		}
		if long := silent >= 8*second; long != (tc.bursts == 19) {
			t.Errorf("%s: silent for %v", panels[i].title, time.Duration(silent)*tick)
		}
	}
}

// The measures of the picture, in pixels.
const (
	plotWidth, plotHeight, barsHeight = 360, 170, 44
	plotLeft, plotTop, plotGap        = 46, 58, 12
	cellWidth                         = plotLeft + plotWidth + 34
	cellHeight                        = plotTop + plotHeight + plotGap + barsHeight + 42
	legendHeight                      = 66
	maxAdmitted, maxRequested         = 50, 10 // at the upper ends of the axes
)

// pictureStyle has the colours on light and on dark ground.
const pictureStyle = `<style>
text { fill: #1f2328 } .soft { fill: #59636e } .ground { fill: #ffffff } .grid { stroke: #d1d9e0; fill: none }
.bound { stroke: #59636e; fill: none; stroke-width: 1.5; stroke-dasharray: 5 3 } .busy { fill: #fff1c2 }
.line { stroke: #1a63c0; fill: none; stroke-width: 2 } .room { fill: #d3e5fb } .admitted { fill: #5a8fd2 } .denied { fill: #d9703f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .soft { fill: #9198a1 } .ground { fill: #0d1117 } .grid { stroke: #30363d }
.bound { stroke: #9198a1 } .busy { fill: #3a3011 }
.line { stroke: #6cb0ff } .room { fill: #1b3354 } .admitted { fill: #4f86c9 } .denied { fill: #e2733c }
}
</style>
`

// drawAlgorithms draws the histories, two panels in a row, as SVG.
func drawAlgorithms(all []history) string {
	height := (len(all)+1)/2*cellHeight + legendHeight
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="12">
<title>What each algorithm admits of the same requests</title>
`, 2*cellWidth, height)
	b.WriteString(pictureStyle)
	fmt.Fprintf(&b, `<rect class="ground" width="%d" height="%d"/>`+"\n", 2*cellWidth, height)
	for i, h := range all {
		h.draw(&b, panels[i].title, panels[i].options, i%2*cellWidth, i/2*cellHeight)
	}
	for i, l := range []struct{ shape, text string }{
		{`<path class="line" d="M0-4h28"/>`, "admitted since the beginning"},
		{`<path class="bound" d="M0-4h28"/>`, "at most, since it last counted nothing"},
		{`<path class="room" d="M0-10h28v12h-28z"/>`, "admitted at once if asked for"},
		{`<path class="admitted" d="M0-10h13v12h-13z"/>`, "requests admitted, each second"},
		{`<path class="denied" d="M0-10h13v12h-13z"/>`, "requests denied"},
		{`<path class="busy" d="M0-10h28v12h-28z"/>`, "the 10 seconds with the most"},
	} {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">%s<text x="36">%s</text></g>`+"\n",
			plotLeft+i%3*270, height-legendHeight+22+i/3*24, l.shape, l.text)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// draw draws one panel with its upper left corner at left, top.
func (h *history) draw(b *strings.Builder, title, options string, left, top int) {
	x := func(at int) float64 { return float64(at) / float64(lasts) * plotWidth }
	y := func(units int) float64 { return plotHeight - min(float64(units)/maxAdmitted, 1)*plotHeight }
	const foot = plotHeight + plotGap + barsHeight

	fmt.Fprintf(b, `<g transform="translate(%d %d)">`+"\n", left+plotLeft, top+plotTop)
	fmt.Fprintf(b, `<text y="-28" font-size="14" font-weight="600">%s</text><text class="soft" y="-11">%s</text>`+"\n", title, options)
	fmt.Fprintf(b, `<path class="busy" d="M%s 0H%sV%dH%sZ"/>`+"\n", px(x(max(h.from, 0))), px(x(h.from+window)), foot, px(x(max(h.from, 0))))

	// What would be admitted at once lies on top of what was admitted.
	fmt.Fprintf(b, `<path class="room" d="%sV%s%sZ"/>`+"\n",
		steps(func(at int) float64 { return y(h.admitted[at] + h.room[at]) }, x),
		px(y(h.admitted[lasts-1])),
		backwards(func(at int) float64 { return y(h.admitted[at]) }, x))
	for units := 0; units <= maxAdmitted; units += across {
		fmt.Fprintf(b, `<path class="grid" d="M0 %sH%d"/><text class="soft" x="-8" y="%s" text-anchor="end">%d</text>`+"\n",
			px(y(units)), plotWidth, px(y(units)+4), units)
	}
	fmt.Fprintf(b, `<path class="bound" d="%s"/>`+"\n", steps(func(at int) float64 { return y(h.bound[at]) }, x))
	fmt.Fprintf(b, `<path class="line" d="%s"/>`+"\n", steps(func(at int) float64 { return y(h.admitted[at]) }, x))
	fmt.Fprintf(b, `<text x="%s" y="16" text-anchor="middle" font-weight="600">%d in 10 s</text>`+"\n", px((x(max(h.from, 0))+x(h.from+window))/2), h.busy)

	var admitted, denied strings.Builder
	for from := 0; from < lasts; from += second {
		asked := 0
		for at := from; at < from+second; at++ {
			asked += h.asked[at]
		}
		passed := h.admitted[from+second-1]
		if from > 0 {
			passed -= h.admitted[from-1]
		}
		bar := func(d *strings.Builder, low, high int) {
			if high > low {
				up := func(n int) float64 { return foot - float64(n)/maxRequested*barsHeight }
				fmt.Fprintf(d, "M%s %sV%sH%sV%sZ", px(x(from)+1), px(up(low)), px(up(high)), px(x(from+second)-1), px(up(low)))
			}
		}
		bar(&admitted, 0, passed)
		bar(&denied, passed, asked)
	}
	fmt.Fprintf(b, `<path class="admitted" d="%s"/><path class="denied" d="%s"/>`+"\n", admitted.String(), denied.String())
	fmt.Fprintf(b, `<path class="grid" d="M0 %dH%d"/>`+"\n", foot, plotWidth)
	for at := 0; at <= lasts; at += window {
		fmt.Fprintf(b, `<path class="grid" d="M%s %dv4"/><text class="soft" x="%s" y="%d" text-anchor="middle">%d s</text>`+"\n",
			px(x(at)), foot, px(x(at)), foot+18, at/second)
	}
	b.WriteString("</g>\n")
}

// steps returns the path of a line that jumps at some ticks.
func steps(y, x func(at int) float64) string {
	var path strings.Builder
	last := y(0)
	fmt.Fprintf(&path, "M0 %s", px(last))
	for at := 1; at < lasts; at++ {
		if next := y(at); next != last {
			fmt.Fprintf(&path, "H%sV%s", px(x(at)), px(next))
			last = next
		}
	}
	fmt.Fprintf(&path, "H%s", px(x(lasts)))
	return path.String()
}

// backwards continues a path along such a line, from its end to its beginning.
func backwards(y, x func(at int) float64) string {
	var path strings.Builder
	for at := lasts - 1; at > 0; at-- {
		if y(at-1) != y(at) {
			fmt.Fprintf(&path, "H%sV%s", px(x(at)), px(y(at-1)))
		}
	}
	path.WriteString("H0")
	return path.String()
}

// px formats a coordinate.
func px(f float64) string { return strconv.FormatFloat(math.Round(f*10)/10, 'f', -1, 64) }
