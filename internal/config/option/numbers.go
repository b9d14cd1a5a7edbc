package option

import (
	"cmp"
	"errors"
	"fmt"
	"math/big"
	"math/bits"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/dustin/go-humanize"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Units parses a number of units.
func Units(text string) (int64, string) { return unitsFrom(1)(text) }

// Bytes parses a number of units that are bytes, which may have a unit, as in 10MB (a million bytes each)
// or 10MiB (1024² bytes each).
func Bytes(text string) (int64, string) { return bytesFrom(1)(text) }

// PlanUnits and PlanBytes are Units and Bytes for what depends on the request: a plan may be one
// without a quota, which is 0.
var PlanUnits, PlanBytes = unitsFrom(0), bytesFrom(0)

// unitsFrom returns the parser of a number of units.
func unitsFrom(least int64) Parser[int64] {
	return func(text string) (int64, string) {
		whole := useWhole
		if least > 0 {
			whole += fmt.Sprintf(" of at least %d", least)
		}
		switch n, use := Cost(text); {
		case isBytes(text):
			return 0, whole + ", or bytes in a limit with actual_cost bytes or cost body"
		case use == useWhole || use == "" && n < least:
			return 0, whole
		default:
			return n, use
		}
	}
}

// bytesFrom returns the parser of a number of bytes.
func bytesFrom(least int64) Parser[int64] {
	return func(text string) (int64, string) {
		if !isBytes(text) {
			return unitsFrom(least)(text)
		}
		n, err := humanize.ParseBytes(text)
		if err != nil || n > bucket.MaxUnits || int64(n) < least {
			return 0, fmt.Sprintf("a number of bytes from %d to 2^49, such as 1000000, 10MB or 10MiB", least)
		}
		return int64(n), ""
	}
}

var byteSize = regexp.MustCompile(`(?i)^[0-9]+(?:\.[0-9]+)?(?:[kmgt]i?)?b$`)

// isBytes reports whether a text is a number of bytes with its unit.
func isBytes(text string) bool { return byteSize.MatchString(text) }

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
func (f Factor) Thousandths() uint32 { return uint32(f / 1000) }

// Divide returns size divided by f, rounded up, at least 1 unless size is 0. Results above
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

// rateOfZero matches the beginning of a rate of no units.
var rateOfZero = regexp.MustCompile(`^0+r?(?:/| per )`)

// ParseRate parses a rate, such as 10/s, 10r/s or 10 per second.
func ParseRate(text string) (Rate, string) {
	return rateOf(Units, text, "such as 10/s, 600/min, 100/hr, 5/12h or 10 per minute: a whole number")
}

// ParseByteRate parses a rate of bytes, such as 10MB/s.
func ParseByteRate(text string) (Rate, string) {
	return rateOf(Bytes, text, "such as 2MB/s, 500kB/min or 1GiB/12h: a number of bytes")
}

// rateOf parses a rate of what a parser takes, of which errors show examples.
func rateOf(parse Parser[int64], text, examples string) (Rate, string) {
	rate, wrongUnits, wrongInterval := parseRate(parse, text)
	switch {
	case wrongUnits == "" && wrongInterval == "":
		return rate, ""
	case wrongInterval == "" && (strings.Contains(wrongUnits, "at most") || strings.Contains(wrongUnits, "bytes") || rateOfZero.MatchString(text)):
		return Rate{}, "<n>/<duration> with " + wrongUnits
	}
	return Rate{}, cmp.Or(RateMeant(text), "<n>/<duration>, "+examples+", "+
		"and s, sec, second, m, min, minute, h, hr, hour, d, day or a duration")
}

// parseRate parses a rate, and returns what to use instead of its units and of its duration.
func parseRate(parse Parser[int64], text string) (r Rate, wrongUnits, wrongInterval string) {
	n, each, found := strings.Cut(text, " per ")
	if !found {
		n, each, _ = strings.Cut(text, "/")
	}
	r.Units, wrongUnits = parse(strings.TrimSuffix(n, "r"))
	if m := unitOfRate.FindStringSubmatch(each); m != nil {
		each = cmp.Or(m[1], "1") + m[2][:1]
	}
	r.Each, wrongInterval = Interval(each)
	return r, wrongUnits, wrongInterval
}

// How people write rates elsewhere: with a fraction, as 10rps, with words or spaces between a number
// and a time, or as a bandwidth.
var (
	otherRate = regexp.MustCompile(`(?i)^([0-9]{1,9}(?:\.[0-9]{1,6})?)(?: ?(?:r|q|reqs?|requests?|events?|times))?` +
		`(?: ?(?:/|p|per|in|every) ?| )([0-9]{0,6}) ?(s|sec|seconds?|m|min|minutes?|h|hr|hours?|d|days?)$`)
	bandwidth = regexp.MustCompile(`(?i)^([0-9]{1,6}) ?([kmg]?)(?:bits?|bps|bits?/s)$`)
)

// RateMeant returns the rate that was probably meant by a text that is not a rate, or "".
func RateMeant(text string) string {
	if m := bandwidth.FindStringSubmatch(text); m != nil {
		bits, _ := strconv.ParseUint(m[1], 10, 64)
		bytes := bits * map[string]uint64{"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[strings.ToLower(m[2])] / 8
		return strings.ReplaceAll(humanize.Bytes(bytes), " ", "") + "/s"
	}
	m := otherRate.FindStringSubmatch(text)
	if m == nil {
		return ""
	}
	units, _ := new(big.Rat).SetString(m[1])
	n, _ := new(big.Int).SetString(cmp.Or(m[2], "1"), 10)
	each := strings.ToLower(m[3][:1])
	if n.Mul(n, units.Denom()); n.Cmp(big.NewInt(1)) != 0 {
		each = n.String() + each
	}
	meant := units.Num().String() + "/" + each
	if _, units, interval := parseRate(Units, meant); meant == text || units != "" || interval != "" {
		return ""
	}
	return meant
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

// Seconds is a duration that JSON shows in seconds.
type Seconds time.Duration

// String returns the duration as people write it.
func (s Seconds) String() string { return DurationText(time.Duration(s)) }

// MarshalJSON returns the number of seconds with microseconds.
func (s Seconds) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(s).Seconds(), 'f', 6, 64), nil
}

// UnmarshalJSON reads a number of seconds.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	seconds, err := strconv.ParseFloat(string(b), 64)
	*s = Seconds(seconds * float64(time.Second))
	return err
}
