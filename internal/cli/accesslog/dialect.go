package accesslog

import (
	"bytes"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Units of times, in nanoseconds.
const (
	second = time.Second
	milli  = time.Millisecond
	micro  = time.Microsecond
)

// dialect is how one log writes what it says.
type dialect struct {
	format Format
	exact  bool          // whether its times are more exact than a second
	layout string        // of times that are strings, as far as known
	unit   time.Duration // of durations that are numbers
}

// layouts are those that Caddy's time_format may have, as time.Parse reads them:
// it accepts fractions of seconds with each of them.
var layouts = []string{
	time.RFC3339,
	"2006-01-02T15:04:05Z0700",
	"2006/01/02 15:04:05",
	clfTime,
	time.DateTime,
	time.RFC1123Z,
	time.RFC1123,
	time.RFC850,
	time.ANSIC,
	time.UnixDate,
}

// detect finds out the dialect of a log from its first lines.
func detect(sample []byte, format Format) dialect {
	d := dialect{format: format, exact: true, unit: second}
	var longest float64 // of durations
	fractions, times := false, 0
	exact := false
	for n := 0; len(sample) > 0 && n < 500; n++ {
		var line []byte
		line, sample, _ = bytes.Cut(sample, []byte("\n"))
		line = trimLine(line)
		if len(line) == 0 {
			continue
		}
		if d.format == Auto {
			d.format = detectFormat(line)
		}
		if d.format != Caddy {
			continue
		}
		var l caddyLine
		if l.decode(line) != Used {
			continue
		}
		if end, ok := d.time(l.Ts); ok {
			if d.layout == "" && l.Ts.quoted {
				d.layout = detectLayout(l.Ts.text)
			}
			times++
			exact = exact || end%int64(second) != 0
		}
		if v, err := strconv.ParseFloat(l.Duration.text, 64); err == nil && !l.Duration.quoted {
			fractions = fractions || strings.ContainsRune(l.Duration.text, '.')
			longest = max(longest, v)
		}
	}
	switch {
	case d.format != Caddy:
		d.exact = false
	case times > 0:
		d.exact = exact
	}
	// Seconds have fractions. Milliseconds and nanoseconds are whole numbers, of
	// which the latter are large.
	switch {
	case fractions || longest == 0:
	case longest >= 100_000:
		d.unit = 1
	default:
		d.unit = milli
	}
	return d
}

// detectFormat returns the format that a line seems to have, or Auto.
func detectFormat(line []byte) Format {
	if line[0] == '{' {
		return Caddy
	}
	var e Entry
	for _, f := range []Format{Combined, Common} {
		if d := (&dialect{format: f}); d.parseCLF(line, &e, new(clfClock)) != BadLine {
			return f
		}
	}
	return Auto
}

// The times that are believed.
var (
	earliest = time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()
	latest   = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()
)

// time returns the time of a line, in nanoseconds since 1970.
func (d *dialect) time(t token) (int64, bool) {
	parse := timeOfNumber
	if t.quoted {
		parse = d.timeOfText
	}
	ns, ok := parse(t.text)
	return ns, ok && ns >= earliest && ns < latest
}

// timeOfText parses a time that is a string.
func (d *dialect) timeOfText(text string) (int64, bool) {
	if d.layout != "" {
		if t, err := time.Parse(d.layout, text); err == nil {
			return t.UnixNano(), true
		}
	}
	for _, layout := range layouts {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UnixNano(), true
		}
	}
	return 0, false
}

// detectLayout returns the first layout that text has.
func detectLayout(text string) string {
	i := slices.IndexFunc(layouts, func(layout string) bool {
		_, err := time.Parse(layout, text)
		return err == nil
	})
	return layouts[i] // one of them has parsed it
}

// timeOfNumber parses a time that is a number of seconds, milliseconds,
// microseconds or nanoseconds since 1970: times of our age do not overlap.
func timeOfNumber(text string) (int64, bool) {
	whole, fraction, _ := strings.Cut(text, ".")
	if strings.ContainsAny(fraction, "eE") || strings.ContainsAny(whole, "eE") {
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || f < 0 || f > math.MaxInt64/2 {
			return 0, false
		}
		whole, fraction = strconv.FormatInt(int64(f), 10), ""
	}
	n, err := strconv.ParseInt(whole, 10, 64)
	if err != nil || n < 0 {
		return 0, false
	}
	unit := time.Duration(1)
	switch {
	case n < 1e11:
		unit = second
	case n < 1e14:
		unit = milli
	case n < 1e17:
		unit = micro
	}
	if n > math.MaxInt64/int64(unit) {
		return 0, false
	}
	n *= int64(unit)
	for _, c := range []byte(fraction) {
		if unit /= 10; unit == 0 {
			break
		}
		n += int64(c-'0') * int64(unit)
	}
	return n, true
}

// elapsed returns a duration in nanoseconds. None is 0.
func (d *dialect) elapsed(t token) (int64, bool) {
	if t == (token{}) {
		return 0, true
	}
	if t.quoted {
		v, err := time.ParseDuration(t.text)
		return max(int64(v), 0), err == nil
	}
	v, err := strconv.ParseFloat(t.text, 64)
	if v *= float64(d.unit); err != nil || v > math.MaxInt64/4 {
		return 0, false
	}
	return int64(max(v, 0)), true
}

// parse parses a line.
func (d *dialect) parse(line []byte, e *Entry, clock *clfClock) Reason {
	var reason Reason
	switch {
	case d.format != Caddy:
		reason = d.parseCLF(line, e, clock)
	case line[0] != '{':
		reason = BadJSON
	default:
		reason = d.parseCaddy(line, e)
	}
	if (reason == BadLine || reason == BadJSON) && console.Match(line) {
		return Console
	}
	if reason == NotAccess && withheld.Match(line) {
		return Withheld
	}
	return reason
}

// console matches lines of access logs in the format that Caddy has for the console.
var console = regexp.MustCompile(`^[^{\t]+\t[^\t]*\thttp\.log\.access`)

// trimLine removes white space around a line.
func trimLine(line []byte) []byte { return bytes.Trim(line, " \t\r\n") }
