package ratelimit

import (
	"reflect"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// limitOptions are the names of the options of a Limit in a Caddyfile, in the order of
// its fields: those of its JSON, but for its name and auto, which are no options, and its limits.
var limitOptions = func() (names []string) {
	for i := range reflect.TypeFor[Limit]().NumField() {
		switch name := jsonName(reflect.TypeFor[Limit]().Field(i)); name {
		case "", "name", "auto":
		case "limits":
			names = append(names, "limit")
		default:
			names = append(names, name)
		}
	}
	return names
}()

// handlerOptions are the options that belong to a whole block.
var handlerOptions = []string{"accounting", "headers", "on_error", "log", "body", "jitter", "zone"}

// jsonName returns the name of a field in JSON, or "" if it is not in it.
func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// optionsOf returns the options of the struct that of points to that are texts, or those that
// are on or off, by name.
func optionsOf[T string | bool](of any) map[string]*T {
	options := make(map[string]*T)
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		if f := v.Type().Field(i); jsonName(f) != "" && f.Type.Kind() == reflect.TypeFor[T]().Kind() {
			options[jsonName(f)] = v.Field(i).Addr().Convert(reflect.TypeFor[*T]()).Interface().(*T)
		}
	}
	return options
}

// firstField returns the name in JSON of the first field that is set in the struct
// that of points to, or "" if none is.
func firstField(of any) string {
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.IsExported() && !v.Field(i).IsZero() {
			return jsonName(f)
		}
	}
	return ""
}

// fieldOf are the fields of a Limit that are texts, or on or off, by the name of the option.
var fieldOf = func() map[string]int {
	fields := make(map[string]int)
	for i := range reflect.TypeFor[Limit]().NumField() {
		f := reflect.TypeFor[Limit]().Field(i)
		if kind := f.Type.Kind(); kind == reflect.String || kind == reflect.Bool {
			fields[jsonName(f)] = i
		}
	}
	return fields
}()

// firstSet returns the first of the options that is set, or nil.
func (l *Limit) firstSet(options ...string) *option.Setting {
	v := reflect.ValueOf(l).Elem()
	for _, name := range options {
		i, found := fieldOf[name]
		if !found {
			panic("a limit has no option " + name)
		}
		switch f := v.Field(i); {
		case f.IsZero():
		case f.Kind() == reflect.Bool:
			return &option.Setting{Option: name, Text: "true"}
		default:
			return &option.Setting{Option: name, Text: f.String()}
		}
	}
	return nil
}

// setting returns an option as the config has it, or nil if it is not set.
func (l *Limit) setting(name string) *option.Setting {
	var text string
	switch name {
	case "count":
		if l.Count != nil {
			text = "true" // as of a flag: its values stand in a block
		}
	case "ban":
		text = l.banText()
	case "limit":
		if within := l.Limits.list; len(within) > 0 && within[0] != nil {
			text = within[0].Name
		}
	default:
		return l.firstSet(name)
	}
	if text == "" {
		return nil
	}
	return &option.Setting{Option: name, Text: text}
}

// isGroup reports whether l has no bucket, only nested limits.
func (l *Limit) isGroup() bool {
	return l.Size == "" && l.Rate == "" && l.Max == "" && l.MinInterval == "" && l.Concurrency == ""
}

// banText returns the ban option as text.
func (l *Limit) banText() string { return strings.Join(l.Ban, " ") }
