package ratelimit

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/calendar"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
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

// setWindowBucket sets up the bucket of a limit that counts in windows. If they are
// fixed, it loses all that it holds at the end of each.
func (l *Limit) setWindowBucket() error {
	switch {
	case l.Size == "":
		return option.Bad("algorithm", l.Algorithm, "a size with it, the most units in a window")
	case l.Window == "" && l.algorithm.slides():
		return option.Bad("algorithm", l.Algorithm, "a window with it")
	case l.Window == "" && l.Period == "":
		return option.Bad("algorithm", l.Algorithm, "a window or a period with it")
	case l.Window != "" && l.Period != "":
		return option.Bad("period", l.Period, "either a window or a period")
	case l.WindowStart != "" && l.Period != "":
		return option.Bad("window_start", l.WindowStart, "no period with it: periods begin as the calendar says")
	}
	b := &bucket{path: l.path, counts: algorithms[l.algorithm]}
	b.drip = option.Value[int64]{Option: "size", Constant: b.counts.DripSize()}
	var err error
	if b.size, err = option.NewValue(l.resolve, "size", string(l.Size), option.Units); err != nil {
		return err
	}
	if l.Period != "" {
		if b.period, err = option.Parse(l.resolve, "period", l.Period, calendar.Parse); err != nil {
			return err
		}
		b.rate = option.Value[time.Duration]{Option: "period", Constant: b.period.Longest()}
	} else {
		if b.rate, err = option.NewValue(l.resolve, "window", string(l.Window), option.Interval); err != nil {
			return err
		}
		if b.aligned, err = option.ParseConstant("window_start", cmp.Or(l.WindowStart, windowStartClock), parseWindowStart); err != nil {
			return err
		}
	}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}

// windowError returns the error for invalid numbers of a limit that counts in windows.
func (b *bucket) windowError(numbers limiter.Limit) error {
	if size := numbers.LargestSize(); size > 0 {
		got := b.size.String()
		if b.sizeIsDynamic() {
			got = strconv.FormatInt(numbers.Size, 10)
		}
		return option.BadNumber("size", b.size.String(), got, fmt.Sprintf("at most %d with algorithm %s", size, b.limit.algorithm))
	}
	years := 17
	if b.limit.algorithm.slides() {
		years = 11 // units count in the next window too
	}
	text := string(b.limit.Window)
	got := text
	if b.rate.IsDynamic() {
		got = adminapi.Interval(adminapi.Seconds(numbers.DripInterval))
	}
	return option.BadNumber("window", text, got, fmt.Sprintf("at most %d years with algorithm %s", years, b.limit.algorithm))
}

// setWarmUpBucket sets up the bucket of a limit whose rate grows after it was idle.
func (l *Limit) setWarmUpBucket() error {
	switch {
	case l.Rate == "":
		return option.Bad("algorithm", l.Algorithm, "a rate with it, such as 10/1s")
	case l.WarmUp == "":
		return option.Bad("algorithm", l.Algorithm, "a warm_up with it, the time until it admits the whole rate")
	}
	r, err := option.Parse(l.resolve, "rate", string(l.Rate), option.ParseRate)
	if err != nil {
		return err
	}
	b := &bucket{
		path: l.path, counts: algorithms[l.algorithm], aligned: true,
		size: option.Value[int64]{Option: "rate", Constant: r.Units},
		rate: option.Value[time.Duration]{Option: "rate", Constant: r.Each},
		drip: option.Value[int64]{Option: "rate", Constant: r.Units},
	}
	if b.warmUp, err = option.Parse(l.resolve, "warm_up", string(l.WarmUp), option.Interval); err != nil {
		return err
	}
	if b.cold, err = option.Parse(l.resolve, "cold_factor", cmp.Or(string(l.ColdFactor), strconv.Itoa(limiter.DefaultColdFactor)), parseColdFactor); err != nil {
		return err
	}
	return l.addBucket(b, string(l.Cost), "")
}

// parseColdFactor parses the cold_factor option.
func parseColdFactor(text string) (option.Factor, string) {
	f, want := option.ParseFactor(text)
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
