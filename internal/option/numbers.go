package option

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Units parses a number of units.
func Units(text string) (int64, string) {
	n, use := Cost(text)
	if use == useWhole || use == "" && n < 1 {
		return 0, "a whole number of at least 1"
	}
	return n, use
}

// useWhole describes a whole number that may be 0.
const useWhole = "a whole number"

// Cost parses the units that a request costs, which may be none.
func Cost(text string) (int64, string) {
	n, err := strconv.ParseUint(text, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange) || err == nil && n > bucket.MaxUnits:
		return 0, fmt.Sprintf("a whole number of at most %d", int64(bucket.MaxUnits))
	case err != nil:
		return 0, useWhole
	}
	return int64(n), ""
}

// Bits returns a parser of prefix lengths.
func Bits(most uint64) Parser[int] {
	return func(text string) (int, string) {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n < 1 || n > most {
			return 0, fmt.Sprintf("a whole number of bits from 1 to %d", most)
		}
		return int(n), ""
	}
}

// Integer returns a parser of whole numbers.
func Integer(least, most int64) Parser[int] {
	return func(text string) (int, string) {
		n, err := strconv.ParseUint(text, 10, 31)
		if err != nil || int64(n) < least || int64(n) > most {
			return 0, fmt.Sprintf("a whole number from %d to %d", least, most)
		}
		return int(n), ""
	}
}

// Interval parses the time between two drips.
func Interval(text string) (time.Duration, string) {
	d, err := caddy.ParseDuration(text)
	switch {
	case err == nil && strings.HasSuffix(text, "ns") && (d < time.Microsecond || d%time.Microsecond != 0):
		return 0, "a duration with a unit (a number alone is in nanoseconds), such as 500ms, 1s or 1h"
	case err != nil || d < time.Microsecond:
		return 0, "a duration of at least 1µs, such as 500ms, 1s or 1h"
	case d%time.Microsecond != 0:
		return 0, "a duration of whole microseconds, such as 500ms, 1s or 1h"
	}
	return d, ""
}

// Factor is a divisor of sizes, in millionths.
type Factor uint64

// ParseFactor parses a factor.
func ParseFactor(text string) (Factor, string) {
	const digits, use = 6, "a decimal from 0 with at most 6 digits after the point, such as 0.5 or 2"
	whole, fraction, point := strings.Cut(text, ".")
	if whole == "" || len(fraction) > digits || point && fraction == "" {
		return 0, use
	}
	n, err := strconv.ParseUint(whole+fraction+strings.Repeat("0", digits-len(fraction)), 10, 64)
	if err != nil {
		return 0, use
	}
	return Factor(n), ""
}

// String returns f as a decimal.
func (f Factor) String() string {
	text := fmt.Sprintf("%d.%06d", f/1e6, f%1e6)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
}

// Thousandths returns f in thousandths, which must be a whole number below 2^32.
func (f Factor) Thousandths() uint32 { return uint32(f / 1000) } //nolint:gosec // it is

// Divide returns size divided by f, rounded up, at least 1. Results above
// bucket.MaxUnits are capped at one more than that. f must not be 0.
func (f Factor) Divide(size int64) int64 {
	hi, lo := bits.Mul64(uint64(size), 1e6)
	if hi >= uint64(f) {
		return bucket.MaxUnits + 1
	}
	n, rest := bits.Div64(hi, lo, uint64(f))
	if rest > 0 {
		n++
	}
	return int64(min(n, bucket.MaxUnits+1))
}

// Rate is a number of units per duration.
type Rate struct {
	Units int64
	Each  time.Duration
}

// String returns the rate as it is configured.
func (r Rate) String() string {
	return fmt.Sprintf("%d/%s", r.Units, DurationText(r.Each))
}

// unitOfRate matches a duration of a rate that is a number of one unit, or the unit
// alone. Each unit has its own first letter.
var unitOfRate = regexp.MustCompile(`^(?:([0-9]+) ?)?([smhd]|(?:sec|second|min|minute|hr|hour|day)s?)$`)

// ParseRate parses a rate, such as 10/s, 10r/s or 10 per second.
func ParseRate(text string) (Rate, string) {
	n, each, found := strings.Cut(text, " per ")
	if !found {
		n, each, _ = strings.Cut(text, "/")
	}
	units, wrongUnits := Units(strings.TrimSuffix(n, "r"))
	if m := unitOfRate.FindStringSubmatch(each); m != nil {
		each = cmp.Or(m[1], "1") + m[2][:1]
	}
	interval, wrongInterval := Interval(each)
	switch {
	case wrongInterval == "" && strings.Contains(wrongUnits, "at most"):
		return Rate{}, "<n>/<duration> with " + wrongUnits
	case wrongUnits != "" || wrongInterval != "":
		return Rate{}, "<n>/<duration>, such as 10/s, 600/min, 100/hr, 5/12h or 10 per minute: a whole number, " +
			"and s, sec, second, m, min, minute, h, hr, hour, d, day or a duration"
	}
	return Rate{units, interval}, ""
}

// Limit returns the limit of the given size; 0 means that the size depends on the
// request. The drip must not depend on it: it is then a single unit, which fits in
// any size, if that results in the exact rate.
func (r Rate) Limit(size int64) (bucket.Limit, error) {
	if size > 0 {
		return bucket.OfRate(r.Units, r.Each, size)
	}
	if l, err := bucket.OfRate(r.Units, r.Each, 1); err == nil {
		return l, nil
	}
	return bucket.OfRate(r.Units, r.Each, r.Units)
}

// DurationText returns a duration as people write it, such as 365d, 1h30m or 200ms.
func DurationText(d time.Duration) string {
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
