package compile

import (
	"cmp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
)

// reader reads options one after the other, and keeps the first error: what has one is zero.
type reader struct {
	resolve option.Resolver // of global placeholders
	err     error
}

// read reads an option that is the same for all requests. Without a text it is zero.
func read[T any, S ~string](r *reader, name string, text S, parse option.Parser[T]) (v T) {
	if text == "" {
		return v
	}
	v, err := option.Parse(r.resolve, name, string(text), parse)
	r.err = cmp.Or(r.err, err)
	return v
}

// readConstant is read for an option that must not have placeholders.
func readConstant[T any, S ~string](r *reader, name string, text S, parse option.Parser[T]) (v T) {
	if text == "" {
		return v
	}
	v, err := option.ParseConstant(name, string(text), parse)
	r.err = cmp.Or(r.err, err)
	return v
}

// readValue reads an option that may depend on the request.
func readValue[T any, S ~string](r *reader, name string, text S, parse option.Parser[T]) value.Value[T] {
	v, err := value.New(r.resolve, name, string(text), parse)
	r.err = cmp.Or(r.err, err)
	return v
}

// readOptional is readValue for an option that has a default, see value.NewOptional.
func readOptional[T any, S ~string](r *reader, name string, text S, byDefault string, parse option.Parser[T]) value.Value[T] {
	v, err := value.NewOptional(r.resolve, name, string(text), byDefault, parse)
	r.err = cmp.Or(r.err, err)
	return v
}
