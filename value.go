package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/redisaddr"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Number is a number, or a string with placeholders that is evaluated to one for
// each request.
type Number string

// MarshalJSON returns a number if its text survives decoding and encoding, as Caddy
// does to store its config, and a string otherwise.
func (n Number) MarshalJSON() ([]byte, error) {
	var f float64
	if json.Unmarshal([]byte(n), &f) == nil {
		if text, err := json.Marshal(f); err == nil && string(text) == string(n) {
			return text, nil
		}
	}
	return json.Marshal(string(n))
}

// UnmarshalJSON accepts any JSON value as text. It is validated with the option.
func (n *Number) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	*n = Number(text)
	return err
}

// Duration is a duration such as `500ms`, `1s` or `1d` (in JSON also an integer
// of nanoseconds), or a string with placeholders that is evaluated to one for each
// request.
type Duration string

// UnmarshalJSON accepts any JSON value as text, and a number as nanoseconds. It is
// validated with the option.
func (d *Duration) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	if strings.IndexByte("-0123456789", b[0]) >= 0 {
		text += "ns"
	}
	*d = Duration(text)
	return err
}

// List is a list of strings. In JSON it may also be a single string.
type List []string

// UnmarshalJSON accepts a list or a single element, each any JSON value as text.
// They are validated with the option.
func (l *List) UnmarshalJSON(b []byte) error {
	raw := []json.RawMessage{b}
	if b[0] == '[' {
		if err := json.Unmarshal(b, &raw); err != nil {
			return err
		}
	}
	*l = nil
	for _, element := range raw {
		text, err := scalar(element)
		if err != nil {
			return err
		}
		if string(b) != "null" {
			*l = append(*l, text)
		}
	}
	return nil
}

// scalar returns the text of a JSON string, number or other value.
func scalar(b []byte) (text string, err error) {
	switch {
	case string(b) == "null":
	case b[0] == '"':
		err = json.Unmarshal(b, &text)
	default:
		text = string(b)
	}
	return text, err
}

// value is the value of an option: a constant, or a template that is evaluated for
// each request.
type value[T any] struct {
	option   string
	constant T
	template string // empty for a constant
	parse    parser[T]
}

// parser parses the text of a value. If that is invalid, want describes valid
// texts; otherwise it is empty.
type parser[T any] func(text string) (v T, want string)

// newValue parses an option, given its text or default.
func newValue[T any](resolve resolver, option, text string, parse parser[T]) (value[T], error) {
	v := value[T]{option: option, parse: parse}
	resolved, err := resolve(option, text)
	if errors.Is(err, errUnresolved) {
		v.template = text
		return v, nil
	}
	if err != nil {
		return v, err
	}
	if isTemplate(resolved) {
		v.template = resolved
		return v, nil
	}
	var want string
	if v.constant, want = parse(resolved); want != "" {
		if text == resolved {
			want += ", or a placeholder"
		}
		return v, badNumber(option, text, resolved, want)
	}
	return v, nil
}

// newNumber parses an option that is a number or duration for all requests.
func newNumber[T any](option, text string, parse parser[T]) (T, error) {
	return newNumberBy(resolveNumber, option, text, parse)
}

// newNumberBy is newNumber with another way to resolve placeholders.
func newNumberBy[T any](resolve resolver, option, text string, parse parser[T]) (T, error) {
	resolved, err := resolve(option, text)
	if err != nil {
		var none T
		return none, err
	}
	v, want := parse(resolved)
	if want != "" {
		return v, badNumber(option, text, resolved, want)
	}
	return v, nil
}

// resolver resolves the global placeholders in the text of an option.
type resolver func(option, text string) (string, error)

// errUnresolved is the error of resolveLater for a text with global placeholders.
var errUnresolved = errors.New("known when the configuration is loaded")

// resolveLater is the resolver while a Caddyfile is adapted, which may be elsewhere
// than where its placeholders have their values.
func resolveLater(option, text string) (string, error) {
	if !isTemplate(text) {
		return text, nil
	}
	if !placeholder.BracesBalance(text) {
		return resolveNumber(option, text) // which has the error
	}
	_, err := caddy.NewEmptyReplacer().ReplaceFunc(text, func(name string, _ any) (any, error) {
		if placeholder.IsGlobal(name) {
			return nil, errUnresolved
		}
		return "", nil
	})
	return text, err
}

// resolveNumber is the resolver when a configuration is loaded. It is an error if a
// placeholder has no value, or a value with braces, which would be a placeholder again.
func resolveNumber(option, text string) (string, error) {
	if !isTemplate(text) {
		return text, nil
	}
	if !placeholder.BracesBalance(text) {
		return text, badOption(option, text, "each placeholder with both of its braces")
	}
	known := caddy.NewReplacer()
	resolved, err := caddy.NewEmptyReplacer().ReplaceFunc(text, func(name string, _ any) (any, error) {
		if !placeholder.IsGlobal(name) {
			return "{" + name + "}", nil
		}
		v, _ := known.GetString(name)
		switch {
		case v == "":
			return nil, newOptionError(option, "got {%s}, which is empty, want a value", name)
		case strings.ContainsAny(v, "{}"):
			return nil, newOptionError(option, "got {%s}, whose value has braces, want one without", name)
		}
		return v, nil
	})
	if err != nil || resolved == "" {
		return text, err
	}
	return resolved, nil
}

// isTemplate reports whether text has placeholders. JSON has none, such as an
// object that was given instead of a number.
func isTemplate(text string) bool { return hasPlaceholder(text) && !json.Valid([]byte(text)) }

// badNumber returns the error for an option whose resolved text is invalid. It does
// not show the content of files.
func badNumber(option, text, resolved, want string) error {
	switch {
	case text == resolved:
		return badOption(option, text, want)
	case strings.Contains(text, "{file."):
		return badOption(option, text, "the file to contain "+want)
	}
	return badOption(option, resolved, fmt.Sprintf("%s from %s", want, quoteWord(text)))
}

// newConstant parses an option that must not have placeholders.
func newConstant[T any](option, text string, parse parser[T]) (T, error) {
	v, want := parse(text)
	if want != "" {
		return v, badOption(option, text, want)
	}
	return v, nil
}

// isDynamic reports whether the value depends on the request.
func (v *value[T]) isDynamic() bool { return v.template != "" }

// at returns the value for one request.
func (v *value[T]) at(repl *caddy.Replacer) (T, error) {
	if v.template == "" {
		return v.constant, nil
	}
	text := textproto.TrimString(repl.ReplaceAll(v.template, "")) // header fields may have white space around them
	got, want := v.parse(text)
	if want != "" {
		return got, badOption(v.option, text, fmt.Sprintf("%s from %s", want, quoteWord(v.template)))
	}
	return got, nil
}

// String returns the constant or the template.
func (v *value[T]) String() string {
	if v.template != "" {
		return v.template
	}
	return fmt.Sprint(v.constant)
}

// optionError is the error for an option: one line that says what is wrong with it.
type optionError struct{ option, problem string }

// newOptionError returns the error for an option.
func newOptionError(option, problem string, args ...any) error {
	return &optionError{option, fmt.Sprintf(problem, args...)}
}

// Error returns the option and what is wrong with it.
func (e *optionError) Error() string { return e.option + ": " + e.problem }

// badOption returns the error for an option with an invalid value: one line with
// what it got and what is valid.
func badOption(option, got, want string) error {
	const most = 64 // clients must not be able to flood the log
	got = redacted(got)
	if len(got) > most {
		got = strings.ToValidUTF8(got[:most], "") + "…"
	}
	return newOptionError(option, "got %q, want %s", got, want)
}

// inWords lists words as a sentence does: "a, b or c".
func inWords(words []string, conjunction string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " " + conjunction + " " + words[last]
}

// redacted returns text for an error message, without the password of a URL.
func redacted(text string) string {
	if strings.Contains(text, "://") {
		return redisaddr.WithoutPassword(text)
	}
	return text
}

// quoteWord returns text for an error message that expected a word: quoted if it
// has special characters, and without the password of a URL.
func quoteWord(text string) string {
	text = redacted(text)
	if quoted := strconv.Quote(text); quoted[1:len(quoted)-1] != text {
		return quoted
	}
	return text
}

// hasPlaceholder reports whether Caddy would replace anything in text.
func hasPlaceholder(text string) bool {
	found := false
	_, _ = caddy.NewEmptyReplacer().ReplaceFunc(text, func(string, any) (any, error) {
		found = true
		return nil, nil
	})
	return found
}

// parseUnits parses a number of units.
func parseUnits(text string) (int64, string) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n < 1 || n > limiter.MaxUnits {
		return 0, fmt.Sprintf("a whole number from 1 to %d", int64(limiter.MaxUnits))
	}
	return int64(n), ""
}

// parseBits returns a parser of prefix lengths.
func parseBits(most uint64) parser[int] {
	return func(text string) (int, string) {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n < 1 || n > most {
			return 0, fmt.Sprintf("a whole number of bits from 1 to %d", most)
		}
		return int(n), ""
	}
}

// parseInteger returns a parser of whole numbers.
func parseInteger(least, most int64) parser[int] {
	return func(text string) (int, string) {
		n, err := strconv.ParseUint(text, 10, 31)
		if err != nil || int64(n) < least || int64(n) > most {
			return 0, fmt.Sprintf("a whole number from %d to %d", least, most)
		}
		return int(n), ""
	}
}

// parseInterval parses the time between two drips.
func parseInterval(text string) (time.Duration, string) {
	d, err := caddy.ParseDuration(text)
	if err != nil || d < time.Microsecond || d%time.Microsecond != 0 {
		return 0, "a duration of whole microseconds, at least 1µs, such as 500ms, 1s or 1h"
	}
	return d, ""
}

// factor is a divisor of sizes, in millionths.
type factor uint64

// parseFactor parses a factor.
func parseFactor(text string) (factor, string) {
	const digits, want = 6, "a decimal from 0 with at most 6 digits after the point, such as 0.5 or 2"
	whole, fraction, point := strings.Cut(text, ".")
	if whole == "" || len(fraction) > digits || point && fraction == "" {
		return 0, want
	}
	n, err := strconv.ParseUint(whole+fraction+strings.Repeat("0", digits-len(fraction)), 10, 64)
	if err != nil {
		return 0, want
	}
	return factor(n), ""
}

// String returns f as a decimal.
func (f factor) String() string {
	text := fmt.Sprintf("%d.%06d", f/1e6, f%1e6)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
}

// thousandths returns f in thousandths, which must be a whole number below 2^32.
func (f factor) thousandths() uint32 { return uint32(f / 1000) } //nolint:gosec // it is

// divide returns size divided by f, rounded up, at least 1. Results above
// limiter.MaxUnits are capped at one more than that. f must not be 0.
func (f factor) divide(size int64) int64 {
	hi, lo := bits.Mul64(uint64(size), 1e6)
	if hi >= uint64(f) {
		return limiter.MaxUnits + 1
	}
	n, rest := bits.Div64(hi, lo, uint64(f))
	if rest > 0 {
		n++
	}
	return int64(min(n, limiter.MaxUnits+1))
}
