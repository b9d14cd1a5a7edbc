// Package convert turns the configurations of other rate limiters into ones of
// this module.
package convert

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Result is a configuration that was converted.
type Result struct {
	Text  string // a part of a Caddyfile
	Notes []Note // on what has no equivalent, or was guessed
}

// Convert converts the configuration of another limiter. A mapping says what it
// does not say itself.
func Convert(text []byte, mapping Mapping) (*Result, error) {
	switch {
	case isRedisCell(text):
		return RedisCell(text, mapping)
	case hasZone.Match(text) && !IsEnvoy(text):
		return nil, errors.New("a configuration of mholt/caddy-ratelimit needs no conversion: it loads as it is")
	}
	return Envoy(text, mapping)
}

// hasZone matches what only a configuration of mholt/caddy-ratelimit has.
var hasZone = regexp.MustCompile(`(?m)^[ \t]*zone[ \t]|"rate_limits"`)

// conversion is the conversion of a configuration, or of a part of it.
type conversion struct {
	writer
	reader
	answers

	misplaced []string // fields that are taken anywhere, and mostly without effect
}

// part returns a conversion for a part of what c converts.
func (c *conversion) part() conversion { return conversion{answers: c.answers} }

// answers are the placeholders that a user gives for what a configuration has by other names.
// All parts of a conversion share them.
type answers struct {
	mapping Mapping
	used    map[string]bool // names that were looked up
	noted   map[string]bool // names with a note on their placeholder
}

// answersOf returns the answers of a mapping.
func answersOf(mapping Mapping) answers {
	return answers{mapping, make(map[string]bool), make(map[string]bool)}
}

// placeholder returns the placeholder for a name, or "".
func (a answers) placeholder(name string) string {
	a.used[name] = true
	return a.mapping[name]
}

// noteOnce reports whether a note on a name's placeholder is the first one.
func (a answers) noteOnce(name string) (first bool) {
	first = !a.noted[name]
	a.noted[name] = true
	return first
}

// unused returns a name that was given and never used, and whether there is one.
func (a answers) unused() (name string, found bool) {
	for _, name := range slices.Sorted(maps.Keys(a.mapping)) {
		if !a.used[name] {
			return name, true
		}
	}
	return "", false
}

// Note is on something that the result lacks, or that has to be checked.
type Note struct {
	Line int
	Text string
}

// String returns the note in one line.
func (n Note) String() string {
	return oneLine("line " + strconv.Itoa(n.Line) + ": " + n.Text)
}

// writer writes a part of a Caddyfile, and notes on it.
type writer struct {
	text  strings.Builder
	notes []Note
}

// note adds a note on a line, and a comment that says the same.
func (w *writer) note(line int, text string) {
	n := Note{Line: line, Text: text}
	w.notes = append(w.notes, n)
	w.comment(n.String())
}

// add adds what another writer has written.
func (w *writer) add(other *writer) {
	w.text.WriteString(other.text.String())
	w.notes = append(w.notes, other.notes...)
}

// addApart adds what another writer has written, after a blank line if anything precedes it.
func (w *writer) addApart(other *writer) {
	if w.text.Len() > 0 && other.text.Len() > 0 {
		w.option("")
	}
	w.add(other)
}

// comment writes a comment, of one line whatever its text holds: also a variable of
// the environment in it could have several.
func (w *writer) comment(text string) {
	w.text.WriteString("# " + strings.ReplaceAll(oneLine(text), "{$", "{ $") + "\n")
}

// option writes an option with its arguments, which are ready to be written.
func (w *writer) option(words ...string) { w.text.WriteString(strings.Join(words, " ") + "\n") }

// writeKey writes the key of a limit.
func (w *writer) writeKey(key []string) {
	if len(key) == 0 {
		w.option("key all")
		return
	}
	template := strings.Join(key, "")
	w.option("key", template)
	if address.MatchString(template) {
		w.option("ipv6_prefix 128")
	}
}

// writeMatchers writes which requests a limit applies to.
func (w *writer) writeMatchers(lines []string) {
	switch len(lines) {
	case 0:
	case 1:
		w.option("match", lines[0])
	default:
		w.option("match {\n" + strings.Join(lines, "\n") + "\n}")
	}
}

// result returns what was written, formatted as Caddy formats it.
func (w *writer) result() *Result {
	slices.SortStableFunc(w.notes, func(a, b Note) int { return cmp.Compare(a.Line, b.Line) })
	text := bytes.TrimSpace(caddyfile.Format([]byte(w.text.String())))
	return &Result{Text: string(text) + "\n", Notes: w.notes}
}

// oneLine returns text without anything in it that is not printable.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, text)
}

// unquoted matches what needs no quotes in a Caddyfile.
var unquoted = regexp.MustCompile("^([\\pL\\pN_./:@+=,;!?&%$~*()-]|\\{[^{}\\s\"`\\\\]+\\})+$")

// word returns text as a word of a Caddyfile. There is none for text that holds
// what is not printable, or both backticks and backslashes.
func word(text string) (string, bool) {
	switch {
	case oneLine(text) != text:
		return "", false
	case unquoted.MatchString(text) && !strings.HasPrefix(text, "@"):
		return text, true
	case !strings.Contains(text, "`"):
		return "`" + text + "`", true
	case !strings.Contains(text, `\`):
		return `"` + strings.ReplaceAll(text, `"`, `\"`) + `"`, true
	}
	return "", false
}

// plain returns text as a word that the matcher vars compares as it is: without anything
// that could be a placeholder.
func plain(text string) (string, bool) {
	if strings.ContainsAny(text, `{}\`) {
		return "", false
	}
	return word(text)
}

// matchValue returns the matcher for requests in which a placeholder has a value.
func matchValue(field, value string) string {
	if text, ok := plain(value); ok {
		return "vars " + field + " " + text
	}
	return "vars_regexp " + field + " `" + whole(value) + "`"
}

// whole returns a regular expression for a whole text, as literal does.
func whole(text string) string { return "^" + literal(text) + "$" }

// literal returns a regular expression for text that can be written in backticks,
// and in which Caddy finds no placeholder.
func literal(text string) string {
	var b strings.Builder
	for _, r := range text {
		switch {
		case r == '{' || r == '}' || r == '`' || r < 0x80 && !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\x{%x}`, r)
		default:
			b.WriteString(regexp.QuoteMeta(string(r)))
		}
	}
	return b.String()
}

// names gives limits names that differ: it has how often each was wanted.
type names map[string]int

// of returns a name like the wanted one: 1 to 64 letters, digits, '_', '.' or '-'.
func (n names) of(wanted string) string {
	const longest = 64
	base := strings.Map(func(r rune) rune {
		if r < 0x80 && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("_.-", r)) {
			return r
		}
		return '-'
	}, wanted)
	base = cmp.Or(base[:min(len(base), longest)], "limit")
	for name := base; ; {
		n[base]++
		if name == base && n[base] == 1 {
			return name
		}
		suffix := "-" + strconv.Itoa(n[base])
		if name = base[:min(len(base), longest-len(suffix))] + suffix; n[name] == 0 {
			n[name]++
			return name
		}
	}
}

// onePlaceholder matches a single placeholder that is not a variable of the environment.
var onePlaceholder = regexp.MustCompile("^\\{[^{}$\\s\"`\\\\][^{}\\s\"`\\\\]*\\}$")

// address matches the placeholders of addresses.
var address = regexp.MustCompile(`\{(client_ip|remote_host|remote_ip|http\.vars\.client_ip|http\.request\.remote\.host|remote\.host|remote\.ip)\}`)
