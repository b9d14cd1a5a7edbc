package adminjson

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Numbers are the numbers of a limit as operators see them, under the names of
// the options that its algorithm has; the others are nil or empty. The admin API, the
// commands and the metrics all show these. Each is a number or, if that depends on the
// request, its template.
type Numbers struct {
	Algorithm   string `json:"algorithm"`
	Size        any    `json:"size"`
	DripRate    any    `json:"drip_rate,omitempty"` // in seconds
	DripSize    any    `json:"drip_size,omitempty"`
	Window      any    `json:"window,omitempty"` // in seconds
	WindowStart string `json:"window_start,omitempty"`
	Period      string `json:"period,omitempty"` // instead of a window in a config

	Rate       string         `json:"rate,omitempty"`    // if it warms up
	WarmUp     option.Seconds `json:"warm_up,omitempty"` // if so
	ColdFactor json.Number    `json:"cold_factor,omitempty"`

	rule.Options
}

// PaceTitle is the title of a column that has the pace of limits.
const PaceTitle = "RATE OR WINDOW"

// OptionsTitle is the title of a column that has the options of limits.
const OptionsTitle = "OPTIONS"

// Pace returns how fast units leave, in a few words: how many drip out, or the window
// or period in which they count.
func (n *Numbers) Pace() string {
	switch {
	case n.Algorithm == "concurrency":
		return "in progress"
	case n.Period != "":
		return keytext.Safe(n.Period)
	case n.WindowStart == "first":
		return Interval(n.Window) + " from the first request"
	case n.Window != nil:
		return Interval(n.Window)
	case n.Rate != "":
		return keytext.Safe(n.Rate) + " after " + Interval(n.WarmUp)
	}
	return Number(n.DripSize) + " each " + Interval(n.DripRate)
}

// String returns the numbers and options, without the algorithm, in a few words.
func (n *Numbers) String() string {
	return strings.Join(append([]string{n.pacing()}, n.NonDefault()...), ", ")
}

// pacing returns the size and how fast units leave, in a few words.
func (n *Numbers) pacing() string {
	how := "drips"
	switch {
	case n.Algorithm == "concurrency":
		return "at most " + Number(n.Size) + " in progress"
	case n.Rate != "":
		return "rate " + keytext.Safe(n.Rate) + ", warm-up " + Interval(n.WarmUp) + ", cold factor " + n.ColdFactor.String()
	case n.Period != "":
		how = "each"
	case n.Window != nil:
		how = "window"
	case n.Algorithm == "token_bucket":
		how = "refills"
	}
	return "size " + Number(n.Size) + ", " + how + " " + n.Pace()
}

// Number returns a number in text, or its template. Numbers in an answer of the
// admin API that was decoded are float64; one of another version may lack some.
func Number(value any) string {
	switch value := value.(type) {
	case float64:
		return strconv.FormatFloat(value, 'f', -1, 64)
	case nil:
		return "?"
	}
	return keytext.Safe(fmt.Sprint(value))
}

// Interval returns a time in text, such as 365d, 1h30m or 200ms, or its template.
func Interval(value any) string {
	if seconds, ok := value.(float64); ok {
		return option.DurationText(time.Duration(seconds*1e6+0.5) * time.Microsecond)
	}
	return Number(value)
}
