package directive

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// UnmarshalBlock decodes a block. It accepts known fields only, as Caddy does, and says where a field is that
// it does not accept, and what is meant by it.
func UnmarshalBlock(text []byte, b *config.Block) error { return unmarshalStrictly(text, b) }

// UnmarshalApp decodes the options of the app, as UnmarshalBlock does those of a block.
func UnmarshalApp(text []byte, a *config.App) error { return unmarshalStrictly(text, a) }

// UnmarshalListener decodes the options of a listener wrapper, as UnmarshalBlock does those of a block.
func UnmarshalListener(text []byte, l *config.Listener) error { return unmarshalStrictly(text, l) }

func unmarshalStrictly(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		return nil
	}
	return cmp.Or(fault(text, reflect.TypeOf(into), ""), err)
}

// object is a type of objects in JSON: its options in a Caddyfile, what it is called, and where it stands.
type object struct {
	t     reflect.Type
	scope *Scope
	name  string
	place string
}

// placeIn returns where o stands, as seen from an object of a type.
func (o *object) placeIn(t reflect.Type) string {
	if o.t == reflect.TypeFor[config.Limit]() && t == reflect.TypeFor[config.Block]() {
		return strings.TrimSuffix(o.place, " of the handler rate_limit")
	}
	return o.place
}

// objects are all of this module, in the order in which it is looked for where a field belongs.
var objects = []object{
	{reflect.TypeFor[config.Limit](), LimitScope, "a limit", `"limits": [{ ... }] of the handler rate_limit`},
	{reflect.TypeFor[config.Block](), BlockScope, "the handler", "the handler rate_limit"},
	{reflect.TypeFor[config.Zone](), ZoneScope, "a zone", `"rate_limits": {"<name>": { ... }}`},
	{reflect.TypeFor[config.Auto](), autoScope, "auto", `"auto": { ... } of a limit`},
	{reflect.TypeFor[config.Distributed](), DistributedScope, "distributed", `"distributed": { ... } of the handler`},
	{reflect.TypeFor[config.Listener](), ListenerScope, "the listener wrapper", "the listener wrapper rate_limit"},
	{reflect.TypeFor[config.App](), GlobalScope, "the app", "the app rate_limit"},
	{reflect.TypeFor[config.Redis](), RedisScope, "redis", `"redis": { ... } of the app rate_limit`},
	{reflect.TypeFor[config.Memory](), MemoryScope, "memory", `"memory": { ... } of the app rate_limit`},
}

// samples are what to write for types that are no texts, numbers or flags.
var samples = map[reflect.Type]string{
	reflect.TypeFor[[]*config.Limit]():          `a list of objects, such as [{"rate": "10/s"}]`,
	reflect.TypeFor[config.Limit]():             `an object, such as {"rate": "10/s"}`,
	reflect.TypeFor[map[string]*config.Zone]():  `an object of zones by their names, such as {"login": {"max_events": 5, "window": "1m"}}`,
	reflect.TypeFor[config.Zone]():              `an object, such as {"max_events": 5, "window": "1m"}`,
	reflect.TypeFor[config.Auto]():              `an object, such as {"latency": "500ms"}`,
	reflect.TypeFor[config.Redis]():             `an object, such as {"addresses": ["localhost:6379"]}`,
	reflect.TypeFor[config.Memory]():            `an object, such as {"max_keys": 100000}`,
	reflect.TypeFor[option.Responses]():         `an object, such as {"status_code": [401]}`,
	reflect.TypeFor[caddyhttp.RawMatcherSets](): `a list of objects, such as [{"path": ["/a"]}]`,
	reflect.TypeFor[reverseproxy.TLSConfig]():   "an object, such as {}",
	reflect.TypeFor[bool]():                     "true or false",
	reflect.TypeFor[int]():                      "a whole number",
	reflect.TypeFor[string]():                   "text in quotes",
}

// fault returns what is wrong with JSON for a type: the first field that is unknown or of another kind, or nil.
// at is where the JSON stands, as in limits[0].match.
func fault(text json.RawMessage, t reflect.Type, at string) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == reflect.TypeFor[config.NestedLimits]() {
		t = reflect.TypeFor[[]*config.Limit]()
	}
	text = bytes.TrimSpace(text)
	_, own := reflect.New(t).Interface().(json.Unmarshaler)
	switch kind := t.Kind(); {
	case own || string(text) == "null":
	case kind == reflect.Struct && text[0] == '{':
		return faultIn(text, t, at)
	case kind == reflect.Map && text[0] == '{':
		names, values := members(text)
		for i, name := range names {
			if err := fault(values[i], t.Elem(), at+"."+name); err != nil {
				return err
			}
		}
		return nil
	case kind == reflect.Slice && text[0] == '[':
		var elements []json.RawMessage
		_ = json.Unmarshal(text, &elements)
		for i, element := range elements {
			if err := fault(element, t.Elem(), fmt.Sprintf("%s[%d]", at, i)); err != nil {
				return err
			}
		}
		return nil
	}
	if json.Unmarshal(text, reflect.New(t).Interface()) == nil {
		return nil
	}
	return wrongKind(text, t, at)
}

// wrongKind returns the error for JSON of another kind than a type has.
func wrongKind(text json.RawMessage, t reflect.Type, at string) error {
	use := cmp.Or(samples[t], "an object")
	kind := map[byte]string{'{': "an object", '[': "a list", '"': "text"}[text[0]]
	secret := slices.Contains(secrets, at[strings.LastIndex(at, ".")+1:])
	if kind == "text" && !secret && t.Kind() != reflect.Struct || kind == "" && !secret { // an address may have a password
		return option.Bad(cmp.Or(at, "rate_limit"), strings.Trim(string(text), `"`), use)
	}
	return option.Errorf(cmp.Or(at, "rate_limit"), "%s is not valid; use %s", cmp.Or(kind, "a number"), use)
}

// faultIn is fault for an object.
func faultIn(text json.RawMessage, t reflect.Type, at string) error {
	known := fieldsOf(t)
	names, values := members(text)
	for i, name := range names {
		path := strings.TrimPrefix(at+"."+name, ".")
		of, found := known[strings.ToLower(name)]
		if !found {
			return option.Errorf(option.Quote(option.Shortened(path)), "%s", unknownField(t, names, values, i))
		}
		if err := fault(values[i], of, path); err != nil {
			return err
		}
	}
	return nil
}

// fieldsOf returns the types of the fields of a struct, by their names in JSON.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := make(map[string]reflect.Type)
	for _, f := range reflect.VisibleFields(t) {
		if name := config.JSONName(f); name != "" && name != "-" {
			fields[name] = f.Type
		}
	}
	return fields
}

// members returns the names and the values in an object, in their order.
func members(text json.RawMessage) (names []string, values []json.RawMessage) {
	d := json.NewDecoder(bytes.NewReader(text))
	_, _ = d.Token()
	for d.More() {
		name, err := d.Token()
		var value json.RawMessage
		if err != nil || d.Decode(&value) != nil {
			break
		}
		names, values = append(names, fmt.Sprint(name)), append(values, value)
	}
	return names, values
}

// unknownField returns what to use instead of a field that an object of a type does not have.
func unknownField(t reflect.Type, names []string, values []json.RawMessage, i int) string {
	lines := make([][]string, len(names))
	for j, name := range names {
		lines[j] = append([]string{name}, strings.Fields(strings.Trim(string(values[j]), `"`))...)
	}
	known := fieldsOf(t)
	here := slices.IndexFunc(objects, func(o object) bool { return o.t == t })
	if here < 0 { // of Caddy
		return "unknown field; use " + option.InWords(slices.Sorted(maps.Keys(known)), "or")
	}
	if use := useFields(objects[here].scope, known, lines, i); use != "" {
		return "unknown field; " + use
	}
	word := plainWord(names[i])
	if meant := inJSON[word]; known[meant] != nil {
		return fmt.Sprintf("unknown field; did you mean %s?", meant)
	}
	if home := homeOfField(t, known, word); home != nil {
		return fmt.Sprintf("not a field of %s; use it in %s", objects[here].name, home.placeIn(t))
	}
	if meant := nearestOption(word, slices.Sorted(maps.Keys(known))); meant != "" {
		return fmt.Sprintf("unknown field; did you mean %s?", meant)
	}
	for _, o := range objects {
		if use := useFields(o.scope, fieldsOf(o.t), lines, i); use != "" && o.t != t {
			return fmt.Sprintf("not a field of %s; in %s %s", objects[here].name, o.placeIn(t), use)
		}
	}
	return "unknown field; see " + option.Docs + "directive.md"
}

// inJSON are the names in JSON of what is called otherwise in a Caddyfile.
var inJSON = map[string]string{
	"events": "max_events", "zone": "rate_limits", "zones": "rate_limits", "limit": "limits",
	"address": "addresses", "host": "addresses", "hosts": "addresses", "server": "addresses", "servers": "addresses", "url": "addresses",
}

// homeOfField returns the object that has a field which is unknown in one of a type, or nil. One within that is
// meant before others.
func homeOfField(t reflect.Type, known map[string]reflect.Type, name string) (home *object) {
	for i, o := range objects {
		of, has := fieldsOf(o.t)[name]
		if !has || o.t == t || of == reflect.TypeFor[config.NestedLimits]() {
			continue
		}
		for _, field := range known {
			if field == reflect.PointerTo(o.t) {
				return &objects[i]
			}
		}
		if home == nil {
			home = &objects[i]
		}
	}
	return home
}

// useFields returns what to use instead of a field in an object with the options of a scope, and the known
// fields. It returns "" if that is not known, or is not one of these.
func useFields(here *Scope, known map[string]reflect.Type, lines [][]string, i int) string {
	use, _ := instead(here, lines, i)
	switch {
	case strings.HasPrefix(use, "leave "):
		return use
	case known[use] != nil:
		return fmt.Sprintf("did you mean %s?", use)
	case !strings.HasPrefix(use, `"`):
		return ""
	}
	use, _, _ = strings.Cut(use, ", or ")
	missing, other := false, ""
	use = quotedLine.ReplaceAllStringFunc(use, func(line string) string {
		name, value, _ := strings.Cut(strings.Trim(line, `"`), " ")
		if here == ZoneScope && name == "events" {
			name = "max_events"
		}
		of := known[name]
		switch missing = missing || of == nil; {
		case missing || of.Kind() == reflect.Bool || value == "":
			value = "true"
		case of.Kind() != reflect.String && of != reflect.TypeFor[config.List]():
			other = name
		case !json.Valid([]byte(value)):
			value = strconv.Quote(value)
		}
		return fmt.Sprintf("%q: %s", name, value)
	})
	switch {
	case missing:
		return ""
	case other != "":
		return "use " + other
	}
	return "use " + use
}

// quotedLine matches a line in a hint.
var quotedLine = regexp.MustCompile(`"[^"]*"`)
