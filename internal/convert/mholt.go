package convert

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/zone"
)

// zoneOptions are the options of a zone of mholt/caddy-ratelimit.
type zoneOptions struct {
	name, key      string
	events, window string
	ipv4, ipv6     string

	known *zone.Zone // nil if it depends on the environment or the arguments of a snippet
}

// zoneNames gives zones names.
type zoneNames struct {
	used names
	of   map[zoneOptions]string // those that were given
	had  map[string]bool        // names of zones
}

// newZoneNames returns an empty zoneNames.
func newZoneNames() zoneNames {
	return zoneNames{used: make(names), of: make(map[zoneOptions]string), had: make(map[string]bool)}
}

// give returns the name of the limit of a zone, and what to note on it. Zones of one
// name share their state, and so do limits if they are alike.
func (n zoneNames) give(z zoneOptions) (name, note string) {
	z.known = nil // it is told by the others
	if name = n.of[z]; name != "" {
		return name, ""
	}
	if n.had[z.name] {
		note = fmt.Sprintf("zone: there is another of the name %q with other options; they don't share their counts here", z.name)
	}
	if name = z.name; !isVariable(name) || !bare.MatchString(name) {
		name = n.used.of(z.name)
	}
	n.of[z], n.had[z.name] = name, true
	return name, note
}

// option returns where the value of an option of a zone belongs, nil if there
// is none of that name.
func (z *zoneOptions) option(name string) *string {
	return map[string]*string{
		"key": &z.key, "events": &z.events, "window": &z.window, "ipv4_prefix": &z.ipv4, "ipv6_prefix": &z.ipv6,
	}[name]
}

// isVariable reports whether the environment, or what imports a snippet, decides on
// text of a Caddyfile.
func isVariable(text string) bool {
	return strings.Contains(text, "{$") || strings.Contains(text, "{args[")
}

// numbers returns the options that make the numbers of a zone, with their values,
// and what to note on them. What is variable can't be checked; z.known is nil then.
// eventsOption is what the file calls the events.
func (z *zoneOptions) numbers(eventsOption string) (options [][2]string, note string, err error) {
	events, want := zone.ParseEvents(z.events, 1)
	switch {
	case want == "":
		z.events = strconv.FormatInt(events, 10)
	case !isVariable(z.events):
		return nil, "", fmt.Errorf("%s: got %q, want %s", eventsOption, z.events, want)
	}
	window, want := zone.ParseWindow(z.window)
	if want != "" && !isVariable(z.window) {
		return nil, "", fmt.Errorf("window: got %q, want %s", z.window, want)
	}
	for _, p := range []struct {
		option, text string
		most         uint64
	}{{"ipv4_prefix", z.ipv4, 32}, {"ipv6_prefix", z.ipv6, 128}} {
		if bits, err := strconv.ParseUint(p.text, 10, 16); p.text != "" && !isVariable(p.text) && (err != nil || bits > p.most) {
			return nil, "", fmt.Errorf("%s: got %q, want a whole number from 0 to %d", p.option, p.text, p.most)
		}
	}
	if !placeholder.BracesBalance(z.key) {
		return nil, "", fmt.Errorf("key: got %q, want each placeholder with both of its braces, and others as \\{ and \\}", z.key)
	}
	if !zone.Exact(events) {
		note = fmt.Sprintf("zone: events are estimated, as there are more than %d", zone.MostLogged)
	}
	if !isVariable(z.events + z.window) {
		z.known = &zone.Zone{Name: z.name, Events: events, Window: window}
	}
	return [][2]string{{"algorithm", zone.AlgorithmOf(events)}, {"size", z.events}, {"window", z.window}}, note, nil
}

// sorted returns the indexes of zones in the order in which they are asked. If that
// depends on variables, it is the order in which they are written, and ok is
// false.
func sorted(zones []*zoneOptions) (indexes []int, ok bool) {
	ok = true
	for i, z := range zones {
		indexes, ok = append(indexes, i), ok && (z.known != nil || len(zones) == 1)
	}
	if ok && len(zones) > 1 {
		slices.SortStableFunc(indexes, func(i, j int) int { return zone.Compare(*zones[i].known, *zones[j].known) })
	}
	return indexes, ok
}

// unknownOrder is the note on zones whose order is not known.
const unknownOrder = "zone: the order of zones depends on variables, so they are in the order in which they are written; " +
	"those that admit most in a time were asked first"

// keyOptions returns the options that make the key of a zone.
func (z *zoneOptions) keyOptions() [][2]string {
	options := [][2]string{{"key", cmp.Or(z.key, zone.NoKey)}}
	if z.ipv4 != "" && z.ipv4 != "0" {
		options = append(options, [2]string{"ipv4_prefix", z.ipv4})
	}
	switch {
	case z.ipv6 != "" && z.ipv6 != "0":
		options = append(options, [2]string{"ipv6_prefix", z.ipv6})
	case strings.Contains(z.key, "{"):
		options = append(options, [2]string{"ipv6_prefix", "128"}) // the default is 64 here
	}
	return options
}

// instead returns what takes the place of an option of a block, and "" for all others.
func instead(option string) string {
	if option == "log_key" {
		return "limits log denied requests at DEBUG and without keys; the option log adds what was decided to the access log"
	}
	return zone.Instead(option)
}

// blockOptions are the options of a block besides zones.
const blockOptions = "disable_metrics, distributed, jitter, log_key, storage, sweep_interval"

// aboutZones is what a converted block says of its decisions.
const aboutZones = "From mholt/caddy-ratelimit. These limits decide as its zones do."

// MholtCaddyfile converts the blocks of mholt/caddy-ratelimit in a Caddyfile, and
// leaves out everything else of it.
func MholtCaddyfile(text []byte) (*Result, error) {
	tokens, err := caddyfile.Tokenize(text, "Caddyfile")
	if err != nil && !errors.Is(err, io.EOF) { // which is said of an empty file
		return nil, errors.New(oneLine(err.Error()))
	}
	m := &mholt{tokens: tokens, lines: strings.Split(string(text), "\n"), names: newZoneNames()}
	for m.next() {
		if !m.startsLine() || m.token() != "rate_limit" {
			continue
		}
		if m.global {
			continue // the options of this module
		}
		if err := m.block(); err != nil {
			return nil, err
		}
	}
	if m.blocks == 0 {
		return nil, errors.New("found no block of rate_limit, want one with zones")
	}
	return m.result(), nil
}

// mholt converts a Caddyfile.
type mholt struct {
	writer
	tokens []caddyfile.Token
	at     int // the next token
	lines  []string
	depth  int
	global bool // whether it is in the block of global options
	blocks int
	names  zoneNames
}

// next goes to the next token.
func (m *mholt) next() bool {
	if m.at >= len(m.tokens) {
		return false
	}
	m.at++
	switch {
	case m.opens():
		if m.depth == 0 {
			m.global = m.at == 1
		}
		m.depth++
	case m.token() == "}" && !m.tokens[m.at-1].Quoted():
		m.depth--
		m.global = m.global && m.depth > 0
	}
	return true
}

// token returns the text of the token.
func (m *mholt) token() string { return m.tokens[m.at-1].Text }

// line returns the line of the token.
func (m *mholt) line() int { return m.tokens[m.at-1].Line }

// opens reports whether the token opens a block.
func (m *mholt) opens() bool { return m.token() == "{" && !m.tokens[m.at-1].Quoted() }

// startsLine reports whether the token is the first in its line.
func (m *mholt) startsLine() bool {
	if m.at < 2 {
		return true
	}
	before := m.tokens[m.at-2]
	return before.Line+before.NumLineBreaks() < m.line()
}

// arguments returns the words after the token in its line, and whether a block opens
// behind them.
func (m *mholt) arguments() (words []string, block bool) {
	for m.at < len(m.tokens) {
		if m.at++; m.startsLine() {
			m.at--
			break
		}
		m.at--
		m.next()
		if m.opens() {
			return words, true
		}
		words = append(words, m.token())
	}
	return words, false
}

// errorf returns an error with the line of the token.
func (m *mholt) errorf(at int, format string, args ...any) error {
	return fmt.Errorf("line %d: "+format, append([]any{at}, args...)...)
}

// block converts a block.
func (m *mholt) block() error {
	start := m.line()
	args, opened := m.arguments()
	if len(args) > 1 || !opened {
		return m.errorf(start, "rate_limit: got %q, want a block with zones, and before it at most a matcher", strings.Join(args, " "))
	}
	head := "rate_limit {"
	if len(args) == 1 {
		matcher, ok := args[0], strings.HasPrefix(args[0], "@") && bare.MatchString(args[0])
		if !ok {
			matcher, ok = word(matcher)
		}
		if !ok || args[0] != "*" && !strings.HasPrefix(args[0], "/") && !strings.HasPrefix(args[0], "@") {
			return m.errorf(start, "rate_limit: got %q, want a matcher such as /path or @name", args[0])
		}
		head = "rate_limit " + matcher + " {"
	}
	var options writer // of the block, and notes
	var zones []*zoneOptions
	written := make(map[string]*zoneText)
	inside := m.depth
	for m.next() && m.depth >= inside {
		option, at := m.token(), m.line()
		args, opened := m.arguments()
		switch {
		case option == "zone" && len(args) == 1 && opened:
			z, text, err := m.zone(args[0], at)
			if err != nil {
				return err
			}
			if written[z.name] != nil {
				options.note(at, fmt.Sprintf("zone: there are several of the name %q in the block, of which only the last counts", z.name))
				zones = slices.DeleteFunc(zones, func(other *zoneOptions) bool { return other.name == z.name })
			}
			zones, written[z.name] = append(zones, z), text
		case option == "zone":
			return m.errorf(at, "zone: got %q, want a name and a block", strings.Join(args, " "))
		case option == "jitter":
			share, ok := word(strings.Join(args, " "))
			if len(args) != 1 || opened || !ok {
				return m.errorf(at, "jitter: got %q, want one value", strings.Join(args, " "))
			}
			if _, want := zone.ParseJitter(args[0]); want != "" && !isVariable(args[0]) {
				return m.errorf(at, "jitter: got %q, want %s", args[0], want)
			}
			options.option("jitter", share)
		case instead(option) != "":
			options.note(at, option+": "+instead(option))
			for deeper := m.depth; opened && m.depth >= deeper; {
				if !m.next() {
					return m.errorf(at, "%s: its block is not closed", option)
				}
			}
		case isImported(option):
			return m.importError("rate_limit", option, at)
		default:
			return m.errorf(at, "rate_limit: got an unknown option %q, want one of %s, zone", option, blockOptions)
		}
	}
	if m.depth >= inside {
		return m.errorf(start, "rate_limit: its block is not closed")
	}
	if len(zones) == 0 {
		return m.errorf(start, "rate_limit: got no zone, want one or more")
	}
	m.blocks++
	if m.blocks == 1 {
		m.comment(aboutZones)
		m.option("")
	}
	m.comment("Line " + strconv.Itoa(start) + ":")
	m.option(head)
	order, ok := sorted(zones)
	if !ok {
		options.note(start, unknownOrder)
	}
	if len(zones) > 1 {
		options.option("accounting", "in_order")
	}
	options.option("headers", "off")
	for _, z := range zones { // in the order of the file
		text := written[z.name]
		limit, note := m.names.give(*z)
		text.notes = append(text.notes, note)
		var w writer
		for _, note := range text.notes {
			if note != "" {
				w.note(text.line, note)
			}
		}
		w.option("limit", limit, "{")
		w.text.WriteString(text.body)
		text.body = w.text.String()
		options.notes = append(options.notes, w.notes...)
	}
	for _, i := range order {
		options.option("")
		options.text.WriteString(written[zones[i].name].body)
	}
	m.add(&options)
	m.option("}\n")
	return nil
}

// zoneText is the text of the limit that a zone becomes.
type zoneText struct {
	line  int      // of the zone
	notes []string // on it
	body  string   // what follows the name
}

// zone converts a zone, and returns its options and the text of its limit.
func (m *mholt) zone(name string, start int) (*zoneOptions, *zoneText, error) {
	z, w := &zoneOptions{name: name}, new(writer)
	var matches [][]string
	all := false
	inside := m.depth
	for m.next() && m.depth >= inside {
		option, at := m.token(), m.line()
		if option == "match" {
			lines, err := m.match()
			if err != nil {
				return nil, nil, err
			}
			all = all || len(lines) == 0
			matches = append(matches, lines)
			continue
		}
		args, opened := m.arguments()
		value := z.option(option)
		switch {
		case value == nil && isImported(option):
			return nil, nil, m.importError("zone", option, at)
		case value == nil:
			return nil, nil, m.errorf(at, "zone: got an unknown option %q, want one of events, ipv4_prefix, ipv6_prefix, key, match, window", option)
		case len(args) != 1 || opened:
			return nil, nil, m.errorf(at, "%s: got %q, want one value", option, strings.Join(args, " "))
		case *value != "":
			return nil, nil, m.errorf(at, "%s: got it twice, want it once", option)
		}
		*value = args[0]
	}
	if m.depth >= inside {
		return nil, nil, m.errorf(start, "zone: its block is not closed")
	}
	numbers, note, err := z.numbers("events")
	if err != nil {
		return nil, nil, m.errorf(start, "zone %q: %w", name, err)
	}
	switch {
	case all || len(matches) == 0:
	case len(matches) == 1:
		w.option("match {\n" + strings.Join(matches[0], "\n") + "\n}")
	default: // one of several: not none of them
		w.option("match {\nnot {")
		for _, lines := range matches {
			w.option("not {\n" + strings.Join(lines, "\n") + "\n}")
		}
		w.option("}\n}")
	}
	for _, o := range append(z.keyOptions(), numbers...) {
		text, ok := word(o[1])
		if !ok {
			return nil, nil, m.errorf(start, "zone %q: %s: got %q, want text that is printable, without backticks beside backslashes", name, o[0], o[1])
		}
		w.option(o[0], text)
	}
	w.option("}")
	return z, &zoneText{line: start, notes: []string{note}, body: w.text.String()}, nil
}

// isImported reports whether an option stands for lines from somewhere else.
func isImported(option string) bool { return option == "import" || strings.HasPrefix(option, "{block") }

// importError returns the error for such an option.
func (m *mholt) importError(in, option string, at int) error {
	return m.errorf(at, "%s: got %q, whose lines are not read; convert what caddy adapt prints, in JSON", in, option)
}

// match returns the lines of matchers: those of a block, or what stands behind match.
func (m *mholt) match() (lines []string, err error) {
	start := m.line()
	args, opened := m.arguments()
	behind, ok := strings.CutPrefix(strings.TrimSpace(m.lines[start-1]), "match")
	words := args
	if opened {
		words = append(words, "{")
	}
	inLine, err := caddyfile.Tokenize([]byte(behind), "Caddyfile")
	whole := ok && err == nil && slices.EqualFunc(inLine, words, func(t caddyfile.Token, word string) bool { return t.Text == word })
	switch {
	case len(args) == 0 && !opened:
		return nil, nil
	case len(args) > 0 && !whole:
		return nil, m.errorf(start, "match: got %q, want a matcher in the same line, or a block with a line for each", strings.Join(args, " "))
	case !opened && m.tokens[m.at-len(args)].Quoted():
		return []string{"expression" + behind}, nil
	case !opened:
		return []string{behind}, nil
	}
	first, inside := m.at, m.depth
	expressions := make(map[int]bool) // the lines with nothing else
	for m.next() && m.depth >= inside {
		expressions[m.line()] = expressions[m.line()] || m.startsLine() && m.tokens[m.at-1].Quoted()
	}
	if m.depth >= inside {
		return nil, m.errorf(start, "match: its block is not closed")
	}
	if first == m.at-1 && len(args) == 0 {
		return nil, nil
	}
	from, to := m.tokens[first].Line, m.line()
	if from <= start || !m.startsLine() {
		return nil, m.errorf(start, "match: want a line for each matcher, and one for the brace that closes the block")
	}
	if len(args) > 0 { // the block is that of a matcher
		lines, from, to = append(lines, behind), start+1, to+1
	}
	for line := from; line < to; line++ {
		text := strings.TrimSuffix(m.lines[line-1], "\r")
		if expressions[line] { // Caddy's formatter breaks a backtick that begins a line
			text = "expression " + strings.TrimSpace(text)
		}
		lines = append(lines, text)
	}
	return lines, nil
}

// MholtJSON converts the handlers of mholt/caddy-ratelimit in a configuration in JSON,
// and leaves everything else of it as it is.
func MholtJSON(text []byte) (*Result, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var config any
	if err := decoder.Decode(&config); err != nil {
		return nil, fmt.Errorf("decoding JSON: %w", err)
	}
	m := &mholtJSON{names: newZoneNames()}
	config, err := m.convert(config, "")
	if err != nil {
		return nil, err
	}
	if m.handlers == 0 {
		return nil, errors.New("found no handler rate_limit with rate_limits, want one")
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "\t")
	if err := encoder.Encode(config); err != nil {
		return nil, err
	}
	return &Result{Text: out.String(), Notes: m.notes}, nil
}

// mholtJSON converts a configuration in JSON.
type mholtJSON struct {
	notes    []Note
	handlers int
	names    zoneNames
}

// convert returns a value with its handlers converted.
func (m *mholtJSON) convert(value any, path string) (any, error) {
	var err error
	switch v := value.(type) {
	case []any:
		for i := range v {
			if v[i], err = m.convert(v[i], path+"/"+strconv.Itoa(i)); err != nil {
				return nil, err
			}
		}
	case map[string]any:
		if v["handler"] == "rate_limit" {
			return m.handler(v, path)
		}
		for _, name := range slices.Sorted(maps.Keys(v)) {
			if v[name], err = m.convert(v[name], path+"/"+name); err != nil {
				return nil, err
			}
		}
	}
	return value, nil
}

// handler converts a handler.
func (m *mholtJSON) handler(v map[string]any, path string) (any, error) {
	fail := func(format string, args ...any) (any, error) {
		return nil, fmt.Errorf("%s: "+format, append([]any{oneLine(path)}, args...)...)
	}
	zones, ok := v["rate_limits"].(map[string]any)
	if !ok || len(zones) == 0 {
		return fail("rate_limits: want an object with zones")
	}
	m.handlers++
	converted := map[string]any{"handler": "rate_limit", "headers": "off"}
	for _, option := range slices.Sorted(maps.Keys(v)) {
		switch {
		case option == "handler" || option == "rate_limits":
		case v[option] == nil || v[option] == false: // as if it were not there
		case option == "jitter":
			text := fmt.Sprint(v[option])
			if _, want := zone.ParseJitter(text); want != "" {
				return fail("jitter: got %q, want %s", text, want)
			}
			converted[option] = v[option]
		case instead(option) != "":
			m.notes = append(m.notes, Note{Path: path, Text: option + ": " + instead(option)})
		default:
			return fail("got an unknown option %q, want one of %s, rate_limits", option, blockOptions)
		}
	}
	order, limits := make([]*zoneOptions, 0, len(zones)), make([]map[string]any, 0, len(zones))
	for _, name := range slices.Sorted(maps.Keys(zones)) {
		options, ok := zones[name].(map[string]any)
		if !ok {
			return fail("rate_limits: %q: want an object", name)
		}
		z, limit := &zoneOptions{name: name}, map[string]any{}
		for _, option := range slices.Sorted(maps.Keys(options)) {
			value := options[option]
			if value == nil { // as if it were not there
				continue
			}
			if option == "match" {
				limit["match"] = value
				continue
			}
			into := z.option(option)
			if option == "max_events" {
				into = &z.events
			}
			if into == nil || option == "events" {
				return fail("rate_limits: %q: got an unknown option %q, want one of ipv4_prefix, ipv6_prefix, key, match, max_events, window", name, option)
			}
			switch text := value.(type) {
			case string:
				*into = text
			case json.Number:
				if *into = wholeNumber(text); option == "window" { // nanoseconds
					n, err := strconv.ParseInt(*into, 10, 64)
					if err != nil {
						return fail("rate_limits: %q: window: got %s, want whole nanoseconds", name, text)
					}
					*into = time.Duration(n).String()
				}
			default:
				return fail("rate_limits: %q: %s: want text or a number", name, option)
			}
		}
		numbers, note, err := z.numbers("max_events")
		if err != nil {
			return fail("rate_limits: %q: %w", name, err)
		}
		if note != "" {
			m.notes = append(m.notes, Note{Path: path, Text: note})
		}
		for _, o := range append(z.keyOptions(), numbers...) {
			limit[o[0]] = o[1]
			if _, err := strconv.ParseUint(o[1], 10, 64); err == nil && o[0] != "key" {
				limit[o[0]] = json.Number(o[1])
			}
		}
		given, note := m.names.give(*z)
		limit["name"] = given
		if note != "" {
			m.notes = append(m.notes, Note{Path: path, Text: note})
		}
		order, limits = append(order, z), append(limits, limit)
	}
	indexes, ok := sorted(order)
	if !ok {
		m.notes = append(m.notes, Note{Path: path, Text: unknownOrder})
	}
	inOrder := make([]any, 0, len(limits))
	for _, i := range indexes {
		inOrder = append(inOrder, limits[i])
	}
	if converted["limits"] = inOrder; len(inOrder) > 1 {
		converted["accounting"] = "in_order"
	}
	return converted, nil
}

// wholeNumber returns a number without a point or an exponent, if it is a whole one:
// Caddy takes 1e3 for 1000.
func wholeNumber(n json.Number) string {
	const exact = 1 << 53
	if f, err := n.Float64(); err == nil && f == math.Trunc(f) && math.Abs(f) < exact {
		return strconv.FormatFloat(f, 'f', -1, 64)
	}
	return n.String()
}
