package convert

import (
	"cmp"
	"errors"
	"fmt"
	"net/textproto"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// descriptor is an entry of a configuration of envoyproxy/ratelimit.
type descriptor struct {
	line       int
	key, value string
	limit      *rateLimit
	within     []*descriptor

	shadowMode, quotaMode, shareThreshold bool
	metrics                               []string // options that are about metrics
}

// rateLimit is the limit of a descriptor.
type rateLimit struct {
	line      int
	unit      string
	requests  uint32
	unlimited bool
	name      string
	replaces  []string
}

// windows are the units of envoyproxy/ratelimit, and how long its windows last.
var windows = map[string]string{
	"second": "1s", "minute": "1m", "hour": "1h", "day": "1d", "week": "7d", "month": "30d", "year": "365d",
}

// known maps keys that are common, in lower case, to the placeholders that they become.
var known = map[string]string{
	"remote_address": "{client_ip}",
	"client_ip":      "{client_ip}",
	"path":           "{path}",
	":path":          "{uri}",
	"method":         "{method}",
	":method":        "{method}",
	"host":           "{host}",
	"authority":      "{host}",
	":authority":     "{host}",
	"user_agent":     "{header.User-Agent}",
}

// routed are the keys whose values the routes of Envoy set.
var routed = []string{
	"generic_key", "header_match", "query_match", "query_parameter_value_match",
	"source_cluster", "destination_cluster", "route", "route_name",
}

// present are the placeholders that every request has a value for.
var present = []string{"{client_ip}", "{path}", "{uri}", "{method}", "{host}"}

// Mapping says which placeholders the keys become of descriptors. Envoy takes
// their values from its routes, which the configuration of the limits lacks.
type Mapping map[string]string

// Add adds what is written as <key>=<placeholder>.
func (m Mapping) Add(text string) error {
	key, value, _ := strings.Cut(text, "=")
	switch {
	case key == "" || !onePlaceholder.MatchString(value):
		return fmt.Errorf("descriptor: %q is not valid; use a key and a placeholder, such as message_type={header.X-Message-Type}", text)
	case m[key] != "":
		return fmt.Errorf("descriptor: %q is given twice; use each key once", key)
	}
	m[key] = value
	return nil
}

// Envoy converts a configuration of envoyproxy/ratelimit, in YAML.
func Envoy(text []byte, mapping Mapping) (*Result, error) {
	e := &envoy{domains: make(map[string]bool), blocks: make(names)}
	e.answers, e.misplaced = answersOf(mapping), anywhere
	if err := e.documents(text, 0); err != nil {
		return nil, err
	}
	if len(e.domains) == 0 {
		if e.other != "" {
			return nil, fmt.Errorf("kind: a %s is not valid; use the configuration of envoyproxy/ratelimit, or a ConfigMap with it", oneLine(e.other))
		}
		return nil, errors.New("domain: none given; use one, and its descriptors")
	}
	if key, found := e.unused(); found {
		return nil, fmt.Errorf("descriptor: no limit has the key %q; use a key that the configuration has", key)
	}
	return e.result(), nil
}

// documents converts the documents of text, before which a file has that many lines.
func (e *envoy) documents(text []byte, before int) error {
	return documents(text, func(node *yaml.Node) error {
		moveDown(node, before)
		return e.document(node)
	})
}

// document converts a document: a domain, or an object of Kubernetes that holds some.
func (e *envoy) document(node *yaml.Node) error {
	object, err := e.objectOf(node)
	if err != nil {
		return err
	}
	if object != nil {
		return e.unpack(object)
	}
	domain, descriptors, err := e.parseDomain(node)
	if err != nil {
		return err
	}
	if e.domains[domain] {
		return fmt.Errorf("line %d: domain: %q is given twice; use each domain once", node.Line, domain)
	}
	e.domains[domain] = true
	e.writeDomain(e.blocks, domain, descriptors)
	return nil
}

// envoy converts a configuration of envoyproxy/ratelimit.
type envoy struct {
	conversion
	other   string          // the kind of an object of Kubernetes that holds no limits
	domains map[string]bool // that were converted
	blocks  names           // that were given to them
}

// inner returns a converter for what is within something else.
func (e *envoy) inner() *envoy { return &envoy{conversion: e.part()} }

// anywhere are the fields of envoyproxy/ratelimit, which takes them anywhere.
var anywhere = []string{
	"domain", "key", "value", "descriptors", "rate_limit", "unit", "requests_per_unit", "unlimited", "shadow_mode", "name", "replaces",
	"detailed_metric", "value_to_metric", "share_threshold", "quota_mode",
}

// parseDomain parses a document.
func (e *envoy) parseDomain(node *yaml.Node) (domain string, descriptors []*descriptor, err error) {
	err = e.decode(node, "configuration", target{"domain", &domain}, target{"descriptors", func(f field) (err error) {
		descriptors, err = e.parseDescriptors(f, 1)
		return err
	}})
	if err == nil && domain == "" {
		err = fmt.Errorf("line %d: domain: none given; use one", node.Line)
	}
	return domain, descriptors, err
}

// maxDepth is how deep descriptors may be nested, and maxWildcards how many values
// with * a key may have side by side: each of them excludes those before.
const maxDepth, maxWildcards = 32, 100

// parseDescriptors parses a list of descriptors.
func (e *envoy) parseDescriptors(list field, depth int) (parsed []*descriptor, err error) {
	seen, wildcards := make(map[[2]string]bool), make(map[string]int)
	err = list.list("", func(node *yaml.Node) error {
		if depth > maxDepth {
			return fmt.Errorf("line %d: descriptors: nested too deeply; use at most %d within each other", list.value.Line, maxDepth)
		}
		d, err := e.parseDescriptor(node, depth)
		if err != nil {
			return err
		}
		id := [2]string{d.key, d.value}
		if seen[id] {
			return fmt.Errorf("line %d: descriptors: key %q with value %q is given twice; use it once", d.line, d.key, d.value)
		}
		seen[id] = true
		if d.rank() == wildcard {
			if wildcards[d.key]++; wildcards[d.key] > maxWildcards {
				return fmt.Errorf("line %d: descriptors: too many values with *; use at most %d for key %q", d.line, maxWildcards, d.key)
			}
		}
		parsed = append(parsed, d)
		return nil
	})
	return parsed, err
}

// parseDescriptor parses a descriptor.
func (e *envoy) parseDescriptor(node *yaml.Node, depth int) (*descriptor, error) {
	d := &descriptor{line: node.Line}
	metric := func(f field) error {
		on, err := f.flag()
		if on {
			d.metrics = append(d.metrics, f.name)
		}
		return err
	}
	err := e.decode(node, "descriptor", target{"key", &d.key}, target{"value", &d.value},
		target{"rate_limit", func(f field) (err error) {
			d.limit, err = e.parseRateLimit(f)
			return err
		}}, target{"descriptors", func(f field) (err error) {
			d.within, err = e.parseDescriptors(f, depth+1)
			return err
		}}, target{"shadow_mode", &d.shadowMode}, target{"quota_mode", &d.quotaMode}, target{"share_threshold", &d.shareThreshold},
		target{"detailed_metric", metric}, target{"value_to_metric", metric})
	if err == nil && d.key == "" {
		err = fmt.Errorf("line %d: key: none given; use one in each descriptor", d.line)
	}
	return d, err
}

// parseRateLimit parses the limit of a descriptor.
func (e *envoy) parseRateLimit(in field) (*rateLimit, error) {
	if isNull(in.value) {
		return nil, nil // there is no limit
	}
	l := &rateLimit{line: in.value.Line}
	given := false
	err := e.decode(in.value, "rate_limit", target{"unit", &l.unit}, target{"requests_per_unit", func(f field) (err error) {
		given = true
		return f.decode(&l.requests)
	}}, target{"unlimited", &l.unlimited}, target{"name", &l.name}, target{"replaces", func(list field) error {
		return list.list(" of names", func(node *yaml.Node) error {
			var name string
			if err := new(conversion).decode(node, "replaces", target{"name", &name}); err != nil || name == "" {
				return cmp.Or(err, fmt.Errorf("line %d: replaces: not valid; use entries with a name", node.Line))
			}
			l.replaces = append(l.replaces, name)
			return nil
		})
	}})
	l.unit = strings.ToLower(l.unit)
	switch {
	case err != nil:
		return nil, err
	case l.unlimited && (l.unit != "" || given):
		return nil, fmt.Errorf("line %d: unlimited: can't be combined with unit or requests_per_unit; use it alone", l.line)
	case l.unlimited:
	case windows[l.unit] == "":
		return nil, fmt.Errorf("line %d: unit: %q is not valid; use second, minute, hour, day, week, month or year", l.line, l.unit)
	case !given:
		return nil, fmt.Errorf("line %d: requests_per_unit: none given; use a number", l.line)
	}
	return l, nil
}

// writeDomain writes the block of a domain.
func (e *envoy) writeDomain(blocks names, domain string, descriptors []*descriptor) {
	e.comment("Domain " + domain + " of envoyproxy/ratelimit.")
	inner := e.inner()
	limits := inner.writeAll(descriptors, nil)
	if limits > 0 {
		e.option("rate_limit", blocks.of(domain), "{")
	} else {
		e.comment("No limit is left of it.")
	}
	if limits > 1 {
		e.comment("As Envoy does, charge the other limits if one denies. Without this line, none is charged then.")
		e.option("accounting each\n")
	}
	e.add(&inner.writer)
	if limits > 0 {
		e.option("}")
	}
	e.option("")
}

// writeAll writes the limits of sibling descriptors, and returns how
// many they are. The key of the limit around them has the given placeholders.
func (e *envoy) writeAll(descriptors []*descriptor, key []string) (limits int) {
	used := make(names)
	for i, d := range descriptors {
		inner := e.inner()
		limits += inner.write(d, without(descriptors, i), key, used)
		e.addApart(&inner.writer)
	}
	return limits
}

// without returns the siblings of descriptor i that take requests away from it: those
// of the same key that say more about the value.
func without(siblings []*descriptor, i int) (better []*descriptor) {
	d := siblings[i]
	if d.rank() == exact {
		return nil
	}
	for j, s := range siblings {
		if s.key == d.key && (s.rank() < d.rank() || s.rank() == d.rank() && d.rank() == wildcard && j < i) {
			better = append(better, s)
		}
	}
	return better
}

// What a descriptor says of the value, from most to least.
const (
	exact = iota
	wildcard
	anything
)

// rank returns how much a descriptor says of the value.
func (d *descriptor) rank() int {
	switch {
	case d.value == "":
		return anything
	case strings.Contains(d.value, "*"):
		return wildcard
	}
	return exact
}

// write writes the limit of a descriptor and those within it, and returns how many
// they are.
func (e *envoy) write(d *descriptor, better []*descriptor, key []string, used names) (limits int) {
	field, guess := e.placeholderOf(d.key)
	if d.rank() == anything || d.rank() == wildcard && !d.shareThreshold {
		key = append(slices.Clone(key), field)
	}
	for _, option := range d.metrics {
		e.note(d.line, option+": there are no metrics of single values here. "+
			"The option track_top shows which keys send the most requests and are denied most often.")
	}
	if d.shareThreshold && d.rank() != wildcard {
		e.note(d.line, "share_threshold: it has no effect, as there is no * in the value.")
	}
	enforced := e.enforced(d)
	inner := e.inner()
	limits = inner.writeAll(d.within, key)
	if limits == 0 && !enforced {
		e.add(&inner.writer) // comments
		return 0
	}
	if guess != "" && e.noteOnce(d.key) {
		e.note(d.line, guess)
	}
	e.option("limit", used.of(d.name()), "{")
	e.writeMatch(d, field, better)
	switch {
	case enforced && d.shadowMode && limits > 0: // apart, as those within it are enforced
		limits++
		e.option("")
		e.option("limit", d.name()+"-shadow", "{")
		e.writeLimit(d, key)
		e.option("}")
	case enforced:
		limits++
		e.writeLimit(d, key)
	}
	if inner.text.Len() > 0 {
		e.option("")
		e.add(&inner.writer)
	}
	e.option("}")
	return limits
}

// writeLimit writes the limit of a descriptor itself.
func (e *envoy) writeLimit(d *descriptor, key []string) {
	e.writeKey(key)
	e.option("algorithm fixed_window")
	e.option("size", strconv.FormatUint(uint64(d.limit.requests), 10))
	e.option("window", windows[d.limit.unit])
	if d.shadowMode {
		e.option("dry_run")
	}
}

// name returns what to call a limit.
func (d *descriptor) name() string {
	switch {
	case d.limit != nil && d.limit.name != "":
		return d.limit.name
	case d.value != "":
		return d.key + "-" + strings.ReplaceAll(d.value, "*", "any")
	}
	return d.key
}

// enforced reports whether a descriptor has a limit that can be converted, and notes
// what can't be.
func (e *envoy) enforced(d *descriptor) bool {
	l := d.limit
	if l == nil || l.unlimited {
		return false
	}
	what := fmt.Sprintf("%s (%d/%s)", d.described(), l.requests, l.unit)
	if len(l.replaces) > 0 {
		e.note(l.line, fmt.Sprintf("replaces: the limits named %s apply here besides the limit of %s. "+
			"Exclude its requests from them with match not.", quoted(l.replaces), d.described()))
	}
	switch {
	case d.quotaMode:
		e.note(d.line, "quota_mode: the limit of "+what+" is left out, as limits here deny one by one.")
	case l.requests == 0:
		e.note(l.line, "requests_per_unit: the limit of "+what+" is left out, as a limit here admits 1 or more. "+
			"Deny its requests with respond and a matcher.")
	default:
		return true
	}
	return false
}

// described returns the descriptor as a user would write it.
func (d *descriptor) described() string {
	if d.value == "" {
		return d.key
	}
	return d.key + "=" + d.value
}

// quoted returns a list of names.
func quoted(names []string) string {
	shown := make([]string, len(names))
	for i, name := range names {
		shown[i] = strconv.Quote(name)
	}
	return strings.Join(shown, ", ")
}

// placeholderOf returns the placeholder for the key of a descriptor, and
// what to note on it if it is guessed.
func (e *envoy) placeholderOf(key string) (field, guess string) {
	if field = e.placeholder(key); field != "" {
		return field, ""
	}
	if field = known[strings.ToLower(key)]; field != "" {
		return field, ""
	}
	plain := strings.Map(func(r rune) rune {
		if strings.ContainsRune("{}$\"`\\ ", r) || oneLine(string(r)) != string(r) {
			return '_'
		}
		return r
	}, key)
	switch {
	case slices.Contains(routed, strings.ToLower(key)):
		return "{http.vars." + plain + "}", fmt.Sprintf("key: the site has to set %s as the routes of Envoy do, such as with: vars /path %s value", key, key)
	case strings.EqualFold(key, "masked_remote_address"):
		return "{client_ip}", "key: the masks of masked_remote_address are in the routes of Envoy; set them with ipv4_prefix and ipv6_prefix"
	}
	field = "{header." + textproto.CanonicalMIMEHeaderKey(strings.ReplaceAll(plain, "_", "-")) + "}"
	return field, fmt.Sprintf("key: %s is a guess for %s; if it is another placeholder, name it with --descriptor '%s=<placeholder>'", field, key, key)
}

// writeMatch writes which requests a limit applies to.
func (e *envoy) writeMatch(d *descriptor, field string, better []*descriptor) {
	var lines []string
	values, others := []string(nil), []string(nil)
	if strings.Trim(d.value, "*") == "" && !slices.Contains(present, field) {
		values = append(values, "``") // the request has no such descriptor
	}
	for _, s := range better {
		if text, ok := plainValue(s); ok {
			values = append(values, text)
		} else {
			others = append(others, "not vars_regexp "+field+" `"+s.pattern()+"`")
		}
	}
	if text, ok := plainValue(d); ok {
		lines = append(lines, "vars "+field+" "+text)
	} else if d.rank() != anything {
		lines = append(lines, "vars_regexp "+field+" `"+d.pattern()+"`")
	}
	if len(values) > 0 {
		lines = append(lines, "not vars "+field+" "+strings.Join(values, " "))
	}
	e.writeMatchers(append(lines, others...))
}

// plainValue returns the value of a descriptor as plain does.
func plainValue(d *descriptor) (string, bool) {
	if d.rank() != exact {
		return "", false
	}
	return plain(d.value)
}

// stars matches the stars of a wildcard.
var stars = regexp.MustCompile(`\*+`)

// pattern returns a regular expression for the value of a descriptor.
func (d *descriptor) pattern() string {
	if d.rank() == exact {
		return whole(d.value)
	}
	parts := stars.Split(d.value, -1)
	for i, part := range parts {
		parts[i] = literal(part)
	}
	return strings.TrimSuffix("(?s)^"+strings.Join(parts, ".*")+"$", ".*$")
}
