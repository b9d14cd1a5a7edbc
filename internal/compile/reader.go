package compile

import (
	"errors"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
)

// reader reads options one after the other, and keeps the first error: what has one is zero. That a placeholder has no
// value yet is the error only if there is no other.
type reader struct {
	resolve option.Resolver // of global placeholders
	err     error
}

func (r *reader) fail(err error) {
	if r.err == nil || err != nil && errors.Is(r.err, option.ErrUnresolved) {
		r.err = err
	}
}

// read reads an option that is the same for all requests. Without a text it is zero.
func read[T any, S ~string](r *reader, name string, text S, parse option.Parser[T]) (v T) {
	if text == "" {
		return v
	}
	v, err := option.Parse(r.resolve, name, string(text), parse)
	r.fail(err)
	return v
}

// readConstant is read for an option that must not have placeholders.
func readConstant[T any, S ~string](r *reader, name string, text S, parse option.Parser[T]) (v T) {
	if text == "" {
		return v
	}
	v, err := option.ParseConstant(name, string(text), parse)
	r.fail(err)
	return v
}

// readValue reads an option that may depend on the request.
func readValue[T any, S ~string](r *reader, name string, text S, parse option.Parser[T]) value.Value[T] {
	v, err := value.New(r.resolve, name, string(text), parse)
	r.fail(err)
	return v
}

// readOptional is readValue for an option that has a default, see value.NewOptional.
func readOptional[T any, S ~string](r *reader, name string, text S, byDefault string, parse option.Parser[T]) value.Value[T] {
	v, err := value.NewOptional(r.resolve, name, string(text), byDefault, parse)
	r.fail(err)
	return v
}
