package config

import (
	"reflect"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// LimitOptions are the names of the options of a Limit in a Caddyfile, in the order of
// its fields: the names in JSON, except name and auto, which are no options, and its limits.
var LimitOptions = func() (names []string) {
	for i := range reflect.TypeFor[Limit]().NumField() {
		switch name := JsonName(reflect.TypeFor[Limit]().Field(i)); name {
		case "", "name", "auto":
		case "limits":
			names = append(names, "limit")
		default:
			names = append(names, name)
		}
	}
	return names
}()

// BlockOptions are the options that belong to a whole block.
var BlockOptions = []string{"accounting", "headers", "on_error", "log", "body", "jitter", "zone"}

// JsonName returns the name of a field in JSON, or "" if it is not in it.
func JsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// OptionsOf returns the options that are texts, of the struct that of points to, or the options that
// are on or off, by name.
func OptionsOf[T string | bool](of any) map[string]*T {
	options := make(map[string]*T)
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		if f := v.Type().Field(i); JsonName(f) != "" && f.Type.Kind() == reflect.TypeFor[T]().Kind() {
			options[JsonName(f)] = v.Field(i).Addr().Convert(reflect.TypeFor[*T]()).Interface().(*T)
		}
	}
	return options
}

// FirstField returns the name in JSON of the first field that is set in the struct
// that of points to, or "" if none is.
func FirstField(of any) string {
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		if f := v.Type().Field(i); f.IsExported() && !v.Field(i).IsZero() {
			return JsonName(f)
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
			fields[JsonName(f)] = i
		}
	}
	return fields
}()

// FirstSet returns the first of the options that is set, or nil.
func (l *Limit) FirstSet(options ...string) *option.Setting {
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

// Setting returns an option as the config has it, or nil if it is not set.
func (l *Limit) Setting(name string) *option.Setting {
	var text string
	switch name {
	case "count":
		if l.Count != nil {
			text = "true" // as of a flag: its values stand in a block
		}
	case "ban":
		text = l.BanText()
	case "limit":
		if within := l.Limits.List; len(within) > 0 && within[0] != nil {
			text = within[0].Name
		}
	default:
		return l.FirstSet(name)
	}
	if text == "" {
		return nil
	}
	return &option.Setting{Option: name, Text: text}
}

// IsGroup reports whether l has no bucket, only nested limits.
func (l *Limit) IsGroup() bool {
	return l.Size == "" && l.Rate == "" && l.Max == "" && l.MinInterval == "" && l.Concurrency == ""
}

// BanText returns the ban option as text.
func (l *Limit) BanText() string { return strings.Join(l.Ban, " ") }

// DefaultName is the name of a limit without one.
const DefaultName = "default"
