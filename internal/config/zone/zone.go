// Package zone says what a zone of mholt/caddy-ratelimit is equivalent to in this module.
// Both what loads such a configuration and what converts one use it.
package zone

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// The algorithms that zones may have.
const (
	slidingLog    = "sliding_log"
	slidingWindow = "sliding_window"
)

// MostLogged is the largest number of events that a log holds.
const MostLogged = bucket.MaxLogUnits

// Exact reports whether so many events are counted one by one, rather than estimated.
func Exact(events int64) bool { return events <= MostLogged }

// AlgorithmOf returns the algorithm of a zone with so many events.
func AlgorithmOf(events int64) string {
	if !Exact(events) {
		return slidingWindow
	}
	return slidingLog
}

// NoKey is the key of the limit that a zone without a key becomes.
const NoKey = "all"

// MostEvents is the largest number of events of a zone.
const MostEvents = bucket.MaxSlidingUnits

// ParseEvents parses a number of events, which is at least the given one. If it can't,
// it returns what to use. As there, the number may have a sign.
func ParseEvents(text string, least int64) (events int64, use string) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least || n > MostEvents {
		return 0, fmt.Sprintf("a whole number from %d to %d", least, MostEvents)
	}
	return n, ""
}

// ParseWindow parses the length of a window. If it can't, it returns what to use.
func ParseWindow(text string) (window time.Duration, use string) {
	if window, use = option.Interval(text); use == "" && limiter.SlidingLog(1, window).Validate() != nil {
		return 0, "a duration of at most 11 years"
	}
	return window, use
}

// ParseJitter parses the largest share of the wait by which Retry-After may be longer. As
// there, it is a fraction, which may be more than 1: 10 makes a wait up to eleven times as
// long. If it can't, it returns what to use.
func ParseJitter(text string) (share float64, use string) {
	share, err := strconv.ParseFloat(text, 64)
	if err != nil || !(share >= 0) || math.IsInf(share, 1) {
		return 0, "a share of the wait of at least 0, such as 0.1 for 10 %"
	}
	return share, ""
}

// Percent returns the jitter to use if one was meant as a percentage.
func Percent(jitter float64) string {
	return fmt.Sprintf("for up to %v %%, write jitter %v", jitter, jitter/100)
}

// Zone is what decides when a zone is checked.
type Zone struct {
	Name   string
	Events int64
	Window time.Duration
}

// Compare orders zones as they are checked: those that admit most in a time come
// first. The order of others is random there; here it is the order of their names.
func Compare(a, b Zone) int {
	rate := func(z Zone) float64 { return float64(z.Events) / float64(z.Window) }
	return cmp.Or(cmp.Compare(rate(b), rate(a)), cmp.Compare(a.Name, b.Name))
}

// LimitName returns the name of the limit that a zone becomes: the zone's, unless
// limits can't be called that. Different zones have different limits.
func LimitName(zone string) string {
	const longest = 64
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '.', r == '-':
			return r
		}
		return '-'
	}, zone)
	if name == zone && name != "" && len(name) <= longest {
		return name
	}
	digest := fnv.New64a()
	_, _ = digest.Write([]byte(zone))
	suffix := "-" + strconv.FormatUint(digest.Sum64(), 36)
	return name[:min(len(name), longest-len(suffix))] + suffix
}

// Instead says what takes the place of an option that has no effect here, and is
// empty for all others.
func Instead(option string) string {
	switch option {
	case "distributed":
		return "to share the limits between servers, keep them in Redis, with the global option rate_limit { redis <address> }"
	case "storage":
		return "to share or keep the limits, keep them in Redis, with the global option rate_limit { redis <address> }"
	case "sweep_interval":
		return "it is not needed, as counts leave by themselves when they are out of date, and max_keys bounds their number"
	case "disable_metrics":
		return "metrics have no label for the key here; to turn them off, use the global option rate_limit { metrics off }"
	}
	return ""
}
