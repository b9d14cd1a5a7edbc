package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/dustin/go-humanize"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// maxText is how many characters of a key or path are shown.
const maxText = 96

// visibleKey returns the text of a key, see package keytext, for display.
func visibleKey(text string) string {
	safe := []rune(keytext.Safe(text))
	if more := len(safe) - maxText; more > 0 {
		return fmt.Sprintf("%s… (%s more)", string(safe[:maxText]), plural(int64(more), "character"))
	}
	return string(safe)
}

// visible returns text from clients such that it can neither hide nor reorder
// anything: characters that do not print are escaped, and what is too long ends
// visibly.
func visible(s string) string {
	var b strings.Builder
	for shown := 0; s != ""; shown++ {
		if shown == maxText {
			fmt.Fprintf(&b, "… (%s more)", plural(int64(utf8.RuneCountInString(s)), "character"))
			break
		}
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case r == '\\':
			b.WriteString(`\\`)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
		s = s[n:]
	}
	return b.String()
}

// count formats n with its digits in groups, on one line.
func count(n int64) string { return strings.ReplaceAll(humanize.Comma(n), ",", "\u00a0") }

// sizeNeeded formats the size that a key needed.
func sizeNeeded(n int64) string {
	if n == NoSize {
		return "more than any"
	}
	return count(n)
}

// short formats n for an axis, where there is little room.
func short(n float64) string {
	for _, u := range []struct {
		value float64
		name  string
	}{{1e18, "E"}, {1e15, "P"}, {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if n >= u.value {
			return strconv.FormatFloat(n/u.value, 'g', 4, 64) + u.name
		}
	}
	return strconv.FormatFloat(n, 'g', 4, 64)
}

// plural formats a count of things whose plural ends in s.
func plural(n int64, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return count(n) + " " + thing + "s"
}

// bounds formats a count that is known only to lie between two.
func bounds(least, most int64) string {
	if most <= least {
		return count(least)
	}
	return count(least) + " to " + count(most)
}

// fraction is part/whole, and 0 of nothing.
func fraction(part, whole int64) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// sign is the percent sign, on the same line as its number.
const sign = "\u00a0%"

// share formats part/whole as a percentage, which reads 0 % only if part is 0, and
// 100 % only if it is all.
func share(part, whole int64) string {
	f := 100 * fraction(part, whole)
	switch {
	case part == whole && whole > 0:
		return "100" + sign
	case f > 0 && f < 0.001:
		return "<0.001" + sign
	case f > 99.9:
		return ">99.9" + sign
	}
	return percentage(f)
}

// percentage formats f percent with two significant digits, or three from 10 %.
func percentage(f float64) string {
	if f == 0 {
		return "0" + sign
	}
	digits := 2
	if f >= 10 {
		digits = 3
	}
	decimals := max(0, digits-1-int(math.Floor(math.Log10(f))))
	s := strconv.FormatFloat(f, 'f', decimals, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s + sign
}

// interval formats a duration as after "per" or "every".
func interval(d time.Duration) string {
	for _, u := range []struct {
		length time.Duration
		name   string
	}{{24 * time.Hour, "day"}, {time.Hour, "hour"}, {time.Minute, "minute"}, {time.Second, "second"}} {
		if d == u.length {
			return u.name
		}
		if d > u.length && d%u.length == 0 {
			return plural(int64(d/u.length), u.name)
		}
	}
	if d < time.Second && d%time.Millisecond == 0 {
		return strconv.FormatInt(d.Milliseconds(), 10) + "\u00a0ms"
	}
	return d.String()
}
