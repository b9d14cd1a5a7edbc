package ratelimit

import (
	"reflect"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
)

// limitOptions are the names of the options of a Limit in a Caddyfile, in the order of
// its fields: those of its JSON, but for its name, which is no option, and its limits.
var limitOptions = func() (names []string) {
	for i := range reflect.TypeFor[Limit]().NumField() {
		switch name := jsonName(reflect.TypeFor[Limit]().Field(i)); name {
		case "", "name":
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

// textsOf returns the options that are texts of the struct that of points to, by name.
func textsOf(of any) map[string]*string {
	texts := make(map[string]*string)
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		if f := v.Type().Field(i); jsonName(f) != "" && f.Type.Kind() == reflect.String {
			texts[jsonName(f)] = v.Field(i).Addr().Convert(reflect.TypeFor[*string]()).Interface().(*string)
		}
	}
	return texts
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

// firstSet returns the first of the options that is set, or nil.
func (l *Limit) firstSet(options ...string) *option.Setting {
	texts := textsOf(l)
	for _, name := range options {
		switch text := texts[name]; {
		case text == nil:
			panic("a limit has no text " + name)
		case *text != "":
			return &option.Setting{Option: name, Text: *text}
		}
	}
	return nil
}
