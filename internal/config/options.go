package config

import (
	"reflect"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Option is an option of a Limit: one of its fields, whose comment is the documentation.
type Option struct {
	Name    string   // in a Caddyfile
	Buckets []string // the forms of buckets that it is part of; AnyBucket if it needs one; empty if it needs none
	field   int
}

// AnyBucket is the form of an option that can be used with a bucket of any form.
const AnyBucket = "any"

// Options has all options of a Limit, in the order of its fields. The tag bucket of each field
// has the forms of buckets, see Option, or none.
var Options = func() (all []Option) {
	for i := range reflect.TypeFor[Limit]().NumField() {
		f := reflect.TypeFor[Limit]().Field(i)
		for _, name := range caddyfileNames(f) {
			all = append(all, Option{name, strings.Fields(strings.TrimPrefix(f.Tag.Get("bucket"), "none")), i})
		}
	}
	return all
}()

// LimitOptions are the names of the options of a Limit in a Caddyfile, and BlockOptions of those that
// belong to a whole block.
var (
	LimitOptions = CaddyfileNames(new(Limit))
	BlockOptions = append(CaddyfileNames(new(Block)), "zone")
)

// CaddyfileNames returns the names in a Caddyfile of the fields of the struct that of points to.
func CaddyfileNames(of any) (names []string) {
	for i := range reflect.TypeOf(of).Elem().NumField() {
		names = append(names, caddyfileNames(reflect.TypeOf(of).Elem().Field(i))...)
	}
	return names
}

// caddyfileNames returns the names of a field in a Caddyfile: as its tag caddyfile has them, or else
// as in JSON.
func caddyfileNames(f reflect.StructField) []string {
	if names, tagged := f.Tag.Lookup("caddyfile"); tagged {
		return strings.Fields(names)
	}
	return strings.Fields(JSONName(f))
}

// JSONName returns the name of a field in JSON, or "" if it is not in it.
func JSONName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// OptionsOf returns those options of the struct that of points to which are texts, on or off, or lists, by
// their names in a Caddyfile.
func OptionsOf[T string | bool | List](of any) map[string]*T {
	options := make(map[string]*T)
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		for _, name := range caddyfileNames(v.Type().Field(i)) {
			if p := v.Field(i).Addr(); p.CanConvert(reflect.TypeFor[*T]()) {
				options[name] = p.Convert(reflect.TypeFor[*T]()).Interface().(*T)
			}
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
			return JSONName(f)
		}
	}
	return ""
}

// FirstSet returns the first of the options that is set, or nil.
func (l *Limit) FirstSet(names ...string) *option.Setting {
	for _, name := range names {
		if o := l.Setting(name); o != nil {
			return o
		}
	}
	return nil
}

// Setting returns an option as the config has it, or nil if it is not set.
func (l *Limit) Setting(name string) *option.Setting {
	i := slices.IndexFunc(Options, func(o Option) bool { return o.Name == name })
	if i < 0 {
		panic("a limit has no option " + name)
	}
	f := reflect.ValueOf(l).Elem().Field(Options[i].field)
	if f.IsZero() {
		return nil
	}
	text := "true" // of a flag, or what is in a block
	switch v := f.Interface().(type) {
	case List:
		text = strings.Join(v, " ")
	case NestedLimits:
		if text = ""; len(v.List) > 0 && v.List[0] != nil {
			text = v.List[0].Name
		}
	default:
		if f.Kind() == reflect.String {
			text = f.String()
		}
	}
	if text == "" {
		return nil
	}
	return &option.Setting{Option: name, Text: text}
}

// IsGroup reports whether l has no bucket, only nested limits.
func (l *Limit) IsGroup() bool {
	return l.Size == "" && l.Rate == "" && l.Speed == "" && l.Max == "" && l.MinInterval == "" && l.Concurrency == ""
}

// BanText returns the ban option as text.
func (l *Limit) BanText() string { return strings.Join(l.Ban, " ") }

// DefaultName is the name of a limit without one.
const DefaultName = "default"
