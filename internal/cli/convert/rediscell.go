package convert

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// cell is a node of a tree of limits that redis-cell counts. The names from a root
// to it are the parts of its key: user:alex:trade.
type cell struct {
	line     int
	name     string // a part of keys, or anyPart
	limit    *throttle
	children []*cell
}

// anyPart is the name for the parts that no sibling has as its name.
const anyPart = "*"

// throttle has what CL.THROTTLE is given: count units in period seconds, and burst more
// units at once than one.
type throttle struct {
	line                 int
	burst, count, period int64
	interval             time.Duration // from one unit to the next, in whole µs
}

// RedisCell converts a tree of limits that redis-cell counts, in YAML or JSON.
func RedisCell(text []byte, mapping Mapping) (*Result, error) {
	c := &cells{conversion{answers: answersOf(mapping)}}
	roots, err := c.parse(text)
	if err != nil {
		return nil, err
	}
	limits, blocks := 0, make(names)
	for _, root := range roots {
		limits += c.writeApart(root, roots, place{}, blocks)
	}
	if limits == 0 {
		return nil, errors.New("schema: no limits given; use at least one")
	}
	if part, found := c.unused(); found {
		return nil, fmt.Errorf("descriptor: no key has the part %q; use a part that keys have, %s", part, c.parts())
	}
	return c.result(), nil
}

// isRedisCell reports whether text is a tree of limits that redis-cell counts.
func isRedisCell(text []byte) bool {
	var document yaml.Node
	if yaml.Unmarshal(text, &document) != nil || len(document.Content) != 1 {
		return false
	}
	fields, err := new(reader).fields(document.Content[0], "")
	return err == nil && slices.ContainsFunc(fields, func(f field) bool { return f.name == "schema" })
}

// cells converts a tree.
type cells struct{ conversion }

// inner returns a converter for what is within something else.
func (c *cells) inner() *cells { return &cells{c.part()} }

// parts returns what placeholders may be given for, briefly.
func (c *cells) parts() string {
	const most = 5
	parts := slices.Sorted(maps.Keys(c.used))
	switch {
	case len(parts) == 0:
		return "which has none that differ"
	case len(parts) > most:
		return "such as " + option.InWords(parts[:most], "or")
	}
	return option.InWords(parts, "or")
}

// parse returns the roots of the tree.
func (c *cells) parse(text []byte) (roots []*cell, err error) {
	found := false
	err = documents(text, func(node *yaml.Node) error {
		if found {
			return fmt.Errorf("line %d: schema: a second document begins; use one", node.Line)
		}
		found = true
		return c.decode(node, "configuration", target{"schema", func(f field) (err error) {
			roots, err = c.parseCells(f, 1)
			return err
		}})
	})
	return roots, err
}

// maxName is how long a name may be: an alias may repeat it any number of times.
const maxName = 1000

// parseCells parses siblings, by name.
func (c *cells) parseCells(in field, depth int) (parsed []*cell, err error) {
	if isNull(in.value) {
		return nil, nil
	}
	if depth > maxDepth {
		return nil, fmt.Errorf("line %d: children: nested too deeply; use at most %d within each other", in.line, maxDepth)
	}
	entries, err := c.entries(in.value, in.name, func(name string) string { return name })
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if length := len(entry.name); length == 0 || length > maxName {
			return nil, fmt.Errorf("line %d: %s: a name of %d bytes is not valid; use 1 to %d", entry.line, in.name, length, maxName)
		}
		n, err := c.parseCell(entry, depth)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, n)
	}
	return parsed, nil
}

// parseCell parses a node of the tree.
func (c *cells) parseCell(in field, depth int) (*cell, error) {
	n := &cell{line: in.line, name: in.name}
	if isNull(in.value) {
		return n, nil
	}
	err := c.decode(in.value, strconv.Quote(in.name), target{"limits", func(f field) (err error) {
		n.limit, err = parseThrottle(f)
		return err
	}}, target{"children", func(f field) (err error) {
		n.children, err = c.parseCells(f, depth+1)
		return err
	}})
	return n, err
}

// parseThrottle parses the numbers of a limit.
func parseThrottle(f field) (*throttle, error) {
	if isNull(f.value) {
		return nil, nil // there is no limit
	}
	if f.value.Kind != yaml.SequenceNode || len(f.value.Content) != 3 {
		return nil, fmt.Errorf("line %d: limits: not valid; use three numbers: the burst, the count and the seconds that it is for", f.line)
	}
	t := &throttle{line: f.line}
	for i, number := range []struct {
		name  string
		n     *int64
		least int64
	}{{"burst", &t.burst, 0}, {"count", &t.count, 1}, {"period", &t.period, 1}} {
		node := resolve(f.value.Content[i])
		if err := wholeNumber(node, number.n); err != nil || *number.n < number.least || *number.n >= maxThrottle {
			return nil, fmt.Errorf("line %d: limits: %q is not valid as the %s; use a whole number from %d, below 2^32", node.Line, node.Value, number.name, number.least)
		}
	}
	if t.count > t.period*microseconds {
		return nil, fmt.Errorf("line %d: limits: %d in %d s are too many; use at most 1000000 a second, one for each microsecond", t.line, t.count, t.period)
	}
	t.interval = time.Duration((t.period*microseconds+t.count-1)/t.count) * time.Microsecond
	if l := (limiter.Limit{Size: t.burst + 1, DripInterval: t.interval}); l.Validate() != nil {
		return nil, fmt.Errorf("line %d: limits: a burst of %d and %d in %d s is too large; use a burst that drains within 35 years", t.line, t.burst, t.count, t.period)
	}
	return t, nil
}

// maxThrottle is what the numbers of a limit are below: in microseconds and nanoseconds
// they fit into 64 bits.
const (
	maxThrottle  = 1 << 32
	microseconds = 1_000_000 // in a second
)

// wholeNumber sets n to what a node says, as YAML has it, or in quotes as decimal.
func wholeNumber(node *yaml.Node, n *int64) (err error) {
	switch {
	case node.Kind == yaml.ScalarNode && node.Tag == "!!int":
		return node.Decode(n)
	case node.Kind == yaml.ScalarNode && node.Tag == "!!str":
		*n, err = strconv.ParseInt(node.Value, 10, 64)
		return err
	}
	return errors.New("no whole number")
}

// place is a position in a tree.
type place struct {
	path  string   // the key of what is around it; empty for roots
	root  string   // the block of its root
	depth int      // how many others it is within
	key   []string // the placeholders of the parts that differ
	given string   // the key that is inherited
}

// write writes a cell and those within it, and returns how many limits they are.
func (c *cells) write(n *cell, siblings []*cell, at place, used names) (limits int) {
	name, isRoot := used.of(blockName(n.name)), at.depth == 0
	part := at.root + "_" + strconv.Itoa(at.depth)
	if isRoot {
		at.root, at.path, part = name, n.name, name
	} else {
		at.path += ":" + n.name
	}
	var matchers []string
	distinguishes := !isRoot || n.name == anyPart // or else the name belongs to a kind of keys
	if distinguishes {
		field := c.placeholderOf(part)
		matchers = matchPart(n, siblings, field)
		if n.name == anyPart {
			at.key = append(slices.Clone(at.key), field)
		}
	}
	body := c.inner()
	if limits = body.writeBody(n, at); limits == 0 {
		return 0
	}
	if distinguishes {
		c.notePlaceholder(part, n, siblings, at.path)
	} else if n.limit != nil {
		c.note(n.limit.line, at.path+": which requests are these? All that come here, unless a matcher follows rate_limit.")
	}
	if isRoot {
		c.option("rate_limit", name, "{")
	} else {
		c.option("limit", name, "{")
	}
	if isRoot && limits > 1 {
		c.comment("As with a call for each limit, charge the others if one denies. Without this line, none is charged then.")
		c.option("accounting each\n")
	}
	c.writeMatchers(matchers)
	if n.limit == nil && len(matchers) > 0 {
		c.option("")
	}
	c.add(&body.writer)
	c.option("}")
	return limits
}

// writeBody writes the limit of a cell, and those within it.
func (c *cells) writeBody(n *cell, at place) (limits int) {
	if n.limit != nil {
		limits++
		if key := cmp.Or(strings.Join(at.key, ""), "all"); key != at.given {
			c.writeKey(at.key)
			at.given = key
		}
		c.writeThrottle(n.limit)
	}
	at.depth++
	used := make(names)
	for _, child := range n.children {
		limits += c.writeApart(child, n.children, at, used)
	}
	return limits
}

// writeApart writes a cell after a blank line, if anything precedes it.
func (c *cells) writeApart(n *cell, siblings []*cell, at place, used names) (limits int) {
	inner := c.inner()
	limits = inner.write(n, siblings, at, used)
	c.addApart(&inner.writer)
	return limits
}

// writeThrottle writes the numbers of a limit. It notes a drip rate that is longer by a
// tenth of a thousandth or more, for want of parts of a microsecond.
func (c *cells) writeThrottle(t *throttle) {
	drip := option.DurationText(t.interval)
	if exact := t.period * microseconds; (t.interval.Microseconds()*t.count-exact)*10_000 >= exact {
		c.note(t.line, fmt.Sprintf("limits: %d in %d s become a little fewer, one in %s, as a drip_rate has whole microseconds.", t.count, t.period, drip))
	}
	c.option("size", strconv.FormatInt(t.burst+1, 10))
	c.option("drip_rate", drip)
}

// matchPart returns which requests a cell is for, by a part of their keys.
func matchPart(n *cell, siblings []*cell, field string) (matchers []string) {
	if n.name != anyPart {
		return []string{matchValue(field, n.name)}
	}
	var values []string
	if !slices.Contains(present, field) {
		values = append(values, "``") // the key ends before
	}
	for _, s := range siblings {
		if s.name == anyPart {
			continue
		}
		if text, ok := plain(s.name); ok {
			values = append(values, text)
		} else {
			matchers = append(matchers, "not "+matchValue(field, s.name))
		}
	}
	if len(values) > 0 {
		matchers = slices.Insert(matchers, 0, "not vars "+field+" "+strings.Join(values, " "))
	}
	return matchers
}

// placeholderOf returns the placeholder for a part of keys.
func (c *cells) placeholderOf(part string) string {
	return cmp.Or(c.placeholder(part), "{vars."+part+"}")
}

// notePlaceholder notes that a part needs a placeholder, once, at the first cell that it decides on.
func (c *cells) notePlaceholder(part string, n *cell, siblings []*cell, path string) {
	if c.mapping[part] != "" || !c.noteOnce(part) {
		return
	}
	question := "which requests are these?"
	if n.name == anyPart {
		question = "what is the * of a request?"
	}
	answer := fmt.Sprintf("Replace {vars.%s} with a placeholder that distinguishes them, or name one with --descriptor '%s=<placeholder>'", part, part)
	if !slices.ContainsFunc(siblings, func(s *cell) bool { return s.name == anyPart }) { // a variable has one of few values
		if value, ok := word(n.name); ok {
			answer += fmt.Sprintf(", or set it: vars /path %s %s", part, value)
		}
	}
	c.note(n.line, path+": "+question+" "+answer)
}

// blockName returns what a limit may be called, without what may not be in the name of a
// variable.
func blockName(name string) string {
	if name == anyPart {
		return "any"
	}
	return strings.ReplaceAll(name, ".", "_")
}
