package ratelimit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// shownNumbers are the numbers of a limit as operators see them, under the names of
// the options that its algorithm has; the others are nil or empty. The admin API, the
// commands and the metrics all show these. Each is a number or, if that depends on the
// request, its template.
type shownNumbers struct {
	Algorithm   string `json:"algorithm"`
	Size        any    `json:"size"`
	DripRate    any    `json:"drip_rate,omitempty"` // in seconds
	DripSize    any    `json:"drip_size,omitempty"`
	Window      any    `json:"window,omitempty"` // in seconds
	WindowStart string `json:"window_start,omitempty"`
	Period      string `json:"period,omitempty"` // instead of a window in a config

	Rate       string      `json:"rate,omitempty"`    // if it warms up
	WarmUp     jsonSeconds `json:"warm_up,omitempty"` // if so
	ColdFactor json.Number `json:"cold_factor,omitempty"`
}

// shown returns the numbers of b as its config has them.
func (b *bucket) shown() shownNumbers {
	n := b.shownWith(jsonValue(&b.rate, func(d time.Duration) any { return jsonSeconds(d) }), jsonValue(&b.drip, asIs))
	if b.period != nil {
		n.Window = nil // its length varies
	}
	switch {
	case b.off:
		n.Size = int64(0)
	case !b.sizeIsDynamic():
		n.Size, _, _ = b.effectiveSize(nil) // validated before
	case b.factor.isDynamic() || b.factor.constant != 1e6:
		n.Size = b.size.String() + " / " + b.factor.String()
	default:
		n.Size = b.size.String()
	}
	return n
}

// shownFor returns the numbers of b for one request.
func (b *bucket) shownFor(l *limiter.Limit) shownNumbers {
	n := b.shownWith(jsonSeconds(l.DripInterval), l.DripSize)
	n.Size = l.Size
	return n
}

// shownWith returns the numbers of b but for its size, given the interval and the
// size of its drips.
func (b *bucket) shownWith(interval, drip any) shownNumbers {
	n := shownNumbers{Algorithm: string(b.limit.algorithm)}
	switch b.limit.algorithm {
	case leakyBucket, tokenBucket:
		n.DripRate, n.DripSize = interval, drip
	case fixedWindow:
		n.Window = interval
		if b.period != nil {
			n.Period = b.period.String()
		} else {
			n.WindowStart = cmp.Or(b.limit.WindowStart, windowStartClock)
		}
	case slidingWindow, slidingLog:
		n.Window = interval
	case warmUp:
		n.Rate = rate{b.drip.constant, b.rate.constant}.String()
		n.WarmUp, n.ColdFactor = jsonSeconds(b.warmUp), json.Number(b.cold.String())
	}
	return n
}

// paceTitle is the title of a column that has the pace of limits.
const paceTitle = "RATE OR WINDOW"

// pace returns how fast units leave, in a few words: how many drip out, or the window
// or period in which they count.
func (n *shownNumbers) pace() string {
	switch {
	case n.Period != "":
		return printable(n.Period)
	case n.WindowStart == windowStartFirst:
		return shownInterval(n.Window) + " from the first request"
	case n.Window != nil:
		return shownInterval(n.Window)
	case n.Rate != "":
		return n.Rate + " after " + shownInterval(n.WarmUp)
	}
	return shownNumber(n.DripSize) + " each " + shownInterval(n.DripRate)
}

// String returns the numbers, without the algorithm, in a few words.
func (n *shownNumbers) String() string {
	how := "drips"
	switch {
	case n.Rate != "":
		return "rate " + n.Rate + ", warm-up " + shownInterval(n.WarmUp) + ", cold factor " + n.ColdFactor.String()
	case n.Period != "":
		how = "each"
	case n.Window != nil:
		how = "window"
	case n.Algorithm == string(tokenBucket):
		how = "refills"
	}
	return "size " + shownNumber(n.Size) + ", " + how + " " + n.pace()
}

// largestSize returns the largest size with which l is valid, or 0 if none is.
func largestSize(l limiter.Limit) (size int64) {
	for more := int64(limiter.MaxUnits); more > 0; more /= 2 {
		if l.Size = size + more; l.Validate() == nil {
			size = l.Size
		}
	}
	return size
}

// shownNumber returns a number in text, or its template. Numbers in an answer of the
// admin API that was decoded are float64.
func shownNumber(value any) string {
	switch value := value.(type) {
	case float64:
		return strconv.FormatFloat(value, 'f', -1, 64)
	case string:
		return printable(value)
	}
	return fmt.Sprint(value)
}

// shownInterval returns a time in text, such as 365d, 1h30m or 200ms, or its template.
func shownInterval(value any) string {
	var d time.Duration
	switch value := value.(type) {
	case float64:
		d = time.Duration(value*1e6+0.5) * time.Microsecond
	case jsonSeconds:
		d = time.Duration(value)
	default:
		return shownNumber(value)
	}
	const day = 24 * time.Hour
	if d >= 2*day && d%day == 0 {
		return strconv.FormatInt(int64(d/day), 10) + "d"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// jsonValue returns what to show of a value: its template if it depends on the
// request, and otherwise what show returns of it.
func jsonValue[T any](v *value[T], show func(T) any) any {
	if v.isDynamic() {
		return v.template
	}
	return show(v.constant)
}

// asIs returns a number to show.
func asIs(n int64) any { return n }
