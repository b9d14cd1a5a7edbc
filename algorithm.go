package ratelimit

import (
	"fmt"
	"strconv"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// algorithm is how a limit counts units.
type algorithm string

const (
	leakyBucket   algorithm = "leaky_bucket"
	tokenBucket   algorithm = "token_bucket" // the mirror image of the former: its tokens are the room that is left
	fixedWindow   algorithm = "fixed_window"
	slidingWindow algorithm = "sliding_window"
	slidingLog    algorithm = "sliding_log"
	warmUp        algorithm = "warm_up"

	concurrency algorithm = "concurrency" // which is an option instead
)

// algorithms has what stores count by.
var algorithms = map[algorithm]limiter.Algorithm{
	leakyBucket:   limiter.Leaky,
	tokenBucket:   limiter.Leaky,
	fixedWindow:   limiter.Fixed,
	slidingWindow: limiter.Sliding,
	slidingLog:    limiter.Log,
	warmUp:        limiter.WarmUp,
}

// parseAlgorithm parses the algorithm option.
func parseAlgorithm(text string) (algorithm, string) {
	if _, ok := algorithms[algorithm(text)]; !ok {
		return "", "leaky_bucket, token_bucket, fixed_window, sliding_window, sliding_log or warm_up"
	}
	return algorithm(text), ""
}

// hasWindow reports whether a counts in windows.
func (a algorithm) hasWindow() bool { return algorithms[a].DripSize() > 0 }

// slides reports whether a counts in the window that ends with the request.
func (a algorithm) slides() bool { return a.hasWindow() && a != fixedWindow }

// hasSize reports whether a admits more if its size is larger.
func (a algorithm) hasSize() bool { return a != warmUp }

// windowError returns the error for invalid numbers of a limit that counts in windows.
func (b *bucket) windowError(numbers limiter.Limit) error {
	if size := numbers.LargestSize(); size > 0 {
		got := b.size.String()
		if b.sizeIsDynamic() {
			got = strconv.FormatInt(numbers.Size, 10)
		}
		return badNumber("size", b.size.String(), got, fmt.Sprintf("at most %d with algorithm %s", size, b.limit.algorithm))
	}
	years := 17
	if b.limit.algorithm.slides() {
		years = 11 // units count in the next window too
	}
	text := string(b.limit.Window)
	got := text
	if b.rate.isDynamic() {
		got = adminapi.Interval(adminapi.Seconds(numbers.DripInterval))
	}
	return badNumber("window", text, got, fmt.Sprintf("at most %d years with algorithm %s", years, b.limit.algorithm))
}

// parseColdFactor parses the cold_factor option.
func parseColdFactor(text string) (factor, string) {
	f, want := parseFactor(text)
	if want != "" || f < 1e6 || f > limiter.MaxColdFactor*1e6 || f%1000 != 0 {
		return 0, fmt.Sprintf("a decimal from 1 to %d with at most 3 digits after the point, such as 3", limiter.MaxColdFactor)
	}
	return f, ""
}

// When windows begin.
const (
	windowStartClock = "clock"
	windowStartFirst = "first"
)

// parseWindowStart parses the window_start option.
func parseWindowStart(text string) (clock bool, want string) {
	switch text {
	case windowStartClock, windowStartFirst:
		return text == windowStartClock, ""
	}
	return false, "clock or first"
}
