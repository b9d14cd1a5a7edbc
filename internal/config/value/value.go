// Package value has the values of options while requests are served: constants, or templates that
// are evaluated for each request.
package value

import (
	"cmp"
	"errors"
	"fmt"
	"net/textproto"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Value is the value of an option: a constant, or a template that is evaluated for
// each request.
type Value[T any] struct {
	Option   string // its name
	Constant T
	Template string // empty for a constant
	parse    option.Parser[T]
	optional bool // whether Constant is the value where the template has none
}

// New parses an option, given its text or default.
func New[T any](resolve option.Resolver, name, text string, parse option.Parser[T]) (Value[T], error) {
	v := Value[T]{Option: name, parse: parse}
	resolved, err := resolve(name, text)
	if errors.Is(err, option.ErrUnresolved) {
		v.Template = text
		return v, nil
	}
	if err != nil {
		return v, err
	}
	if option.IsTemplate(resolved) {
		v.Template = resolved
		return v, nil
	}
	var use string
	if v.Constant, use = parse(resolved); use != "" {
		if text == resolved {
			use += ", or a placeholder"
		}
		return v, option.BadNumber(name, text, resolved, use)
	}
	return v, nil
}

// NewOptional is New for an option without which a limit is complete: where a template has
// no value for a request, it has its default.
func NewOptional[T any](resolve option.Resolver, name, text, byDefault string, parse option.Parser[T]) (Value[T], error) {
	v, err := New(resolve, name, cmp.Or(text, byDefault), parse)
	if v.optional = v.IsDynamic(); v.optional {
		v.Constant, _ = parse(byDefault)
	}
	return v, err
}

// SetParser sets the parser of what a template becomes, if that may be what a constant must not.
func (v *Value[T]) SetParser(parse option.Parser[T]) { v.parse = parse }

// IsDynamic reports whether the value depends on the request.
func (v *Value[T]) IsDynamic() bool { return v.Template != "" }

// At returns the value for one request.
func (v *Value[T]) At(repl *caddy.Replacer) (T, error) {
	if v.Template == "" {
		return v.Constant, nil
	}
	text := textproto.TrimString(repl.ReplaceAll(v.Template, "")) // header fields may have white space around them
	if text == "" && v.optional {
		return v.Constant, nil
	}
	got, use := v.parse(text)
	if use != "" {
		return got, option.BadFrom(v.Option, Described(text), v.Template, use)
	}
	return got, nil
}

// String returns the constant, or the template.
func (v *Value[T]) String() string {
	if v.Template != "" {
		return v.Template
	}
	return fmt.Sprint(v.Constant)
}

// Described returns text that a request has given, such as a field of its header or one of
// its response, for the log: itself if it could be a short number, and else how long it is.
// What clients send does not belong there, nor can it be distinguished from what others say.
func Described(text string) string {
	const most = 24
	if len(text) <= most && strings.Trim(text, "0123456789+-.,eE") == "" {
		return strconv.Quote(text)
	}
	return fmt.Sprintf("text of %d bytes", len(text))
}
